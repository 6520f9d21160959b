#!/usr/bin/env python3
"""Checks the wording of the project's texts: CONTRIBUTING.md, "How we write".

    scripts/check_text.py [PATH ...]          prints each violation as `file:line: rule: text [hint]`
    scripts/check_text.py --counts [PATH ...] prints totals by rule and document

It reads Markdown, docstrings, comments and test names of Python, comments of C++, log lines, raised errors,
help texts, metric descriptions, and the commit subjects of the branch. It skips code blocks, inline code,
link targets, quotations, generated tables and URLs. It exits with 1 if a text violates a rule.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prose import (
    CELL,
    COMMIT,
    DOCSTRING,
    DOCUMENT,
    HELP,
    PAGES,
    STRINGS,
    TEST,
    Prose,
    masked,
    read,
    sentences,
    words,
)

ROOT = Path(__file__).resolve().parents[1]

OPERATOR_PAGES = re.compile(
    r"(README|SECURITY|docs/(get-started|operate)/.*|docs/(reference|router-api)|examples/.*"
    r"|integration/(helm|observability)/.*)\.md"
)
LONG, LONG_STRING = 30, 25
"""Words of a sentence, and words of a sentence in a string that operators see."""
CHARACTERS = {COMMIT: (72, "long-subject"), TEST: (80 - len("test_"), "long-name")}
"""Most characters of a commit subject and of a test name without its prefix, and the rule's name."""
MEAN, MEAN_OF_BENCHMARKS = 18, 22
"""Words of a document's mean sentence, and of a benchmark log's."""


class Finding(NamedTuple):
    path: str
    line: int
    rule: str
    excerpt: str
    hint: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.excerpt} [{self.hint}]"


@dataclass(frozen=True)
class Rule:
    """A pattern that no text of some kinds may contain."""

    name: str
    hint: str
    pattern: re.Pattern[str]
    applies: Callable[[Prose], bool]


def _all(prose: Prose) -> bool:
    return True


def _operator(prose: Prose) -> bool:
    return prose.kind in STRINGS or (prose.kind in PAGES and bool(OPERATOR_PAGES.fullmatch(prose.path)))


def _kinds(*kinds: str) -> Callable[[Prose], bool]:
    return lambda prose: prose.kind in kinds


def _rules() -> Iterator[Rule]:
    def rule(
        name: str, pattern: str, hint: str, applies: Callable[[Prose], bool] = _all, flags: int = 0
    ) -> Rule:
        return Rule(name, hint, re.compile(pattern, flags), applies)

    yield rule(
        "relative-subject",
        r"(?:^|[.;:!?] )(?:Who|Whose|Whom|Whoever)\b(?![^.]*\?)",
        "name the subject",
    )
    yield rule(
        "fragment",
        r"^(?:What|Who|Whose|Of|Where|By|As|Those|That|Until|Behind)\b",
        "say what the object is or does: a noun phrase, or a verb in the third person",
        lambda prose: prose.kind in (DOCSTRING, HELP, TEST) and prose.first,
    )
    yield rule(
        "told", r"\b(?:is|are|was|were|be|been) told\b|\btells? of\b|\btold of\b", "report, notify, send"
    )
    yield rule("to-be-had", r"\b(?:to|can|could|may) be had\b", "available")
    yield rule("come-of", r"\b(?:come|comes|came|become|becomes|became) of\b", "outcome, result")
    yield rule("of-no-use", r"\bof no (?:use|interest|matter)\b|\bno matter of\b", "say what happens instead")
    yield rule("the-other", r"\b(?:that|those) of the others?\b|\bthe other one'?s?\b", "repeat the noun")
    yield rule(
        "says-so",
        r"\b(?:say|says|said) so\b|\bin (?:its|their|our) (?:own )?words\b|\bin words\b",
        "report, or quote the text",
    )
    yield rule("hear", r"\bhear[sd]? (?:of|from)\b|\bdeaf\b", "receive")
    yield rule("let-go-of", r"\blet(?:s|ting)? go of\b", "release, deregister")
    yield rule(
        "nobody",
        r"\b(?:[Nn]obody|[Aa]nybody|[Ee]verybody|[Ss]omebody)\b",
        "name the component",
        lambda prose: prose.kind in (DOCSTRING, TEST) or _operator(prose),
    )
    yield rule("of-ours", r"\bof (?:ours|theirs|its own|his)\b", "repeat the noun")
    yield rule("he", r"\b(?:he|him|his|He|His)\b", "it or they: software and attackers are no persons")
    yield rule(
        "p-and-d",
        r"(?<![/:+\w-])[PD](?:'s)?\b(?![/:+-])",
        "prefill engine, decode engine",
        lambda prose: prose.kind == COMMIT or _operator(prose),
    )
    yield rule(
        "semicolons", r";[^.;]*;", "two or more sentences, or a list", lambda prose: prose.kind != CELL
    )
    yield rule(
        "ask",
        r"\b(?:ask|asks|asked|meets?|met|owes?|owed)\b",
        "request, connect, hold",
        _kinds(*STRINGS, TEST),
    )
    yield rule(
        "name-words",
        r"\b(?:who|whom|whoever|told|tells?|says?|said|hears?|heard|(?<!llm )[pd]s?)\b",
        "name the component; report, send, receive; prefill engine, decode engine",
        _kinds(TEST),
        re.IGNORECASE,
    )
    yield rule(
        "filler",
        r"\b(?:simply|just|obviously|of course|easy|easily)\b",
        "leave it out",
        _kinds(*PAGES),
        re.IGNORECASE,
    )
    yield rule(
        "subject-form",
        r"^(?!Merge |Revert |[A-Za-z][\w./ -]*: )",
        "<area>: <imperative verb> <object>",
        _kinds(COMMIT),
    )
    yield rule("empty-subject", r"^(?:Lint|Fixes|WIP)$", "say what the commit changes", _kinds(COMMIT))


RULES = tuple(_rules())
THRESHOLDS = ("long-sentence", "long-string", *(name for _, name in CHARACTERS.values()), "mean")


def write(line: object) -> None:
    sys.stdout.write(f"{line}\n")


# Findings.

_DEFINES_P = re.compile(r"\(`?P`?\)|\bP`? (?:is|means|stands for|=|\()|\bP`? and `?D`? (?:are|mean|stand)")


def _defines_p(pieces: list[Prose]) -> bool:
    """Whether a document's first two paragraphs say what P is."""
    opening = [one.text for one in pieces if one.kind == DOCUMENT][:2]
    return any(_DEFINES_P.search(text) for text in opening)


def _excerpt(text: str, begin: int, end: int) -> str:
    left, right = max(0, begin - 30), min(len(text), end + 50)
    return ("..." if left else "") + text[left:right].strip() + ("..." if right < len(text) else "")


def check(pieces: Iterable[Prose]) -> Iterator[Finding]:
    """The violations of one file, or of the commits."""
    pieces = list(pieces)
    lengths: list[int] = []
    undefined = bool(pieces) and pieces[0].kind in PAGES and not _defines_p(pieces)
    for prose in pieces:
        lined = masked(prose)
        text = lined.replace("\n", " ")
        for rule in RULES:
            if not rule.applies(prose) and not (undefined and rule.name == "p-and-d"):
                continue
            for match in rule.pattern.finditer(text):
                line = prose.line + lined.count("\n", 0, match.start())
                yield Finding(prose.path, line, rule.name, _excerpt(text, *match.span()), rule.hint)
        if prose.kind in CHARACTERS:
            most, name = CHARACTERS[prose.kind]
            if len(prose.text) > most:
                yield Finding(prose.path, prose.line, name, prose.text, f"at most {most} characters")
            continue
        limit, name = (LONG_STRING, "long-string") if prose.kind in STRINGS else (LONG, "long-sentence")
        for position, sentence in sentences(text):
            length = words(sentence)
            if prose.kind == DOCUMENT and length:
                lengths.append(length)
            if length > limit:
                line = prose.line + lined.count("\n", 0, position)
                yield Finding(prose.path, line, name, sentence[:60] + "...", f"{length} words, limit {limit}")
    if lengths:
        limit = MEAN_OF_BENCHMARKS if pieces[0].path.startswith("docs/benchmarks/") else MEAN
        mean = sum(lengths) / len(lengths)
        if mean > limit:
            excess = int(mean - limit) + 1
            hint = f"limit {limit}"
            yield Finding(pieces[0].path, 1, "mean", f"{mean:.1f} words per sentence", hint, excess)


def files(paths: list[Path]) -> Iterator[str]:
    """Names of the text files of the project, or of those under the paths."""
    for path in paths:
        if not path.exists():
            raise SystemExit(f"check_text: {path}: no such file or folder")
        if not path.is_relative_to(ROOT):
            raise SystemExit(f"check_text: {path} is not in {ROOT}")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *map(str, paths)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    yield from sorted(names)


def _git_log(base: str, root: Path) -> subprocess.CompletedProcess[str]:
    command = ["git", "log", "--no-merges", "--format=%h %s", "--end-of-options", f"{base}..HEAD", "--"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def subjects(base: str | None, root: Path = ROOT) -> Iterator[Prose]:
    """Subjects of the commits that are not in `base`. Merges are left out.

    None: main, or else origin/main, as a checkout of CI has no main. Without both, no commit is checked.
    """
    done = _git_log(base or "main", root)
    if done.returncode and base is None:
        done = _git_log("origin/main", root)
    if done.returncode and base is not None:
        raise SystemExit(f"check_text: --base {base}: {done.stderr.strip()}")
    for row in done.stdout.splitlines():
        commit, _, subject = row.partition(" ")
        yield Prose(f"commit {commit}", 1, COMMIT, subject)


def findings(paths: list[Path], base: str | None) -> list[Finding]:
    found = [one for name in files(paths) for one in check(read(ROOT, name))]
    if not paths:
        found += check(subjects(base))
    return sorted(found)


def print_counts(found: list[Finding], paths: list[Path]) -> None:
    totals: Counter[str] = Counter()
    for one in found:
        totals[one.rule] += one.times
    for rule in (*(rule.name for rule in RULES), *THRESHOLDS):
        write(f"{rule:18}{totals[rule]:6}")
    write("\nwords per sentence:")
    for name in files(paths):
        lengths = [
            words(sentence)
            for one in read(ROOT, name)
            if one.kind == DOCUMENT
            for _, sentence in sentences(masked(one).replace("\n", " "))
        ]
        if lengths:
            write(f"  {name:40}{sum(lengths) / len(lengths):6.1f}  in {len(lengths)} sentences")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks the wording of the project's texts.")
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="Files and folders; default: all."
    )
    parser.add_argument(
        "--base", help="Branch whose commits are not checked; default: main, or else origin/main."
    )
    parser.add_argument("--counts", action="store_true", help="Print totals by rule.")
    options = parser.parse_args(arguments)
    paths = [path.resolve() for path in options.paths]
    found = findings(paths, options.base)
    if options.counts:
        print_counts(found, paths)
        return 0
    for one in found:
        write(one)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
