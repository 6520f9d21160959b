"""Runs every test suite of the project, one after the other, and writes a table of the results.

    python scripts/test_all.py               all suites that have not passed on this state of the tree
    python scripts/test_all.py verbs fleet   these alone
    python scripts/test_all.py --table       prints the table, runs nothing

A run that was broken off continues where it ended. Results are kept for a commit and its uncommitted changes.
The table is build/test-all/table.md, and each suite's output build/test-all/SUITE.log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kv_connector.lab.process import Process, stop

ROOT = Path(__file__).parents[1]

# Time limit of a suite, as a multiple of its usual duration. Machines differ by a factor of two, and a suite
# that hangs must not cost the others their turn.
PATIENCE = 4

_COUNTS = re.compile(r"\b(\d+) (passed|failed|skipped|errors?)\b")


@dataclass(frozen=True)
class Suite:
    name: str
    command: str
    minutes: float
    """Usual duration on two cores, set-up excluded."""


# Short suites come first, so that faults show early.
SUITES = (
    Suite("helm", "make test-helm", 1),
    Suite("browser", "make test-browser", 2),
    Suite("observability", "make test-observability", 4),
    Suite("vllm-next", "make test-vllm-next", 8),
    Suite("fleet", "make test-fleet", 6),
    Suite("data-parallel", "make test-data-parallel", 8),
    Suite("compose", "make test-compose", 10),
    Suite("libfabric", "make test-libfabric", 12),
    Suite("verbs", "make test-verbs", 12),
    Suite("weights", "make test-weights", 12),
    Suite("examples", "make test-examples", 14),
    Suite("topologies", "make test-topologies", 16),
    Suite("wheels", "make wheels && make test-wheels", 20),
    Suite("sglang", "make test-sglang", 20),
    Suite("conversations", "make test-conversations", 10),
    Suite("faults", "make test-faults MINUTES=10", 25),
    Suite("campaign", "make campaign SEEDS=20000", 20),
    Suite("interleavings", "make interleavings", 4),
    Suite("fuzz", "make fuzz INPUTS=1000000", 10),
    Suite("fuzz-router", "make fuzz-router WORLDS=1000", 8),
    Suite("fuzz-scheduler", "make fuzz-scheduler SCENARIOS=1000", 20),
    Suite("fuzz-splice", "make fuzz-splice ANSWERS=100000", 6),
    Suite("hostile", "make hostile FRAMES=1000000", 5),
    Suite("soak", "make soak MINUTES=30", 32),
    Suite("leaving", "make test-leaving", 30),
    Suite("early", "make test-early", 45),
    Suite("ci", "bash .ci/run", 35),
)


@dataclass(frozen=True)
class Result:
    suite: str
    commit: str
    result: str
    """`passed`, `failed`, `timed out`, or `not run` if every test was skipped."""
    seconds: float
    remark: str
    """The last line with counts, or the end of the output of a suite that failed."""


class Book:
    """Results of one state of the tree, by suite, in a file."""

    def __init__(self, directory: Path, state: str) -> None:
        self._file = directory / f"{state}.json"
        directory.mkdir(parents=True, exist_ok=True)
        kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.results: dict[str, Result] = {name: Result(**fields) for name, fields in kept.items()}

    def put(self, result: Result) -> None:
        self.results[result.suite] = result
        written = self._file.with_suffix(".new")
        written.write_text(json.dumps({name: asdict(one) for name, one in self.results.items()}, indent=1))
        written.replace(self._file)


def state_of(root: Path) -> tuple[str, str]:
    """The commit's short name, with `+` if files differ from it, and a name for that exact state."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
        return done.stdout

    commit = git("rev-parse", "--short=10", "HEAD").strip()
    changes = git("diff", "HEAD", "--binary")
    for name in git("ls-files", "--others", "--exclude-standard", "-z").split("\0"):
        if name:
            changes += f"{name}\n{hashlib.sha256((root / name).read_bytes()).hexdigest()}\n"
    if not changes:
        return commit, commit
    return f"{commit}+", f"{commit}-{hashlib.sha256(changes.encode()).hexdigest()[:10]}"


def run(suite: Suite, commit: str, directory: Path, root: Path) -> Result:
    """Runs one suite in a separate process group, which has ended when this returns. BLOCKS."""
    log = directory / f"{suite.name}.log"
    log.write_bytes(b"")
    started = time.monotonic()
    command = ["bash", "-c", f"cd {shlex.quote(str(root))} && {suite.command}"]
    process = Process(suite.name, command, environment={}, log=log)
    try:
        status = process.wait(suite.minutes * 60 * PATIENCE)
    finally:
        stop([process])
    text = log.read_text(errors="replace")
    seconds = time.monotonic() - started
    if status is None:
        remark = f"after {seconds / 60:.0f} min; see {log.name}"
        return Result(suite.name, commit, "timed out", seconds, remark)
    if status != 0:
        return Result(suite.name, commit, "failed", seconds, f"status {status}: {_last(text)}")
    counts = [
        {kind: int(many) for many, kind in found}
        for found in map(_COUNTS.findall, text.splitlines())
        if found
    ]
    nothing = bool(counts) and not any(one.get("passed") for one in counts)
    return Result(suite.name, commit, "not run" if nothing else "passed", seconds, _last(text, _COUNTS))


def _last(text: str, pattern: re.Pattern[str] | None = None) -> str:
    """Returns the last line with text, or the last that matches, without a runner's decoration."""
    lines = [line.strip(" =\t") for line in text.splitlines() if line.strip(" =\t")]
    found = [line for line in lines if pattern.search(line)] if pattern else lines
    return (found or lines or ["no output"])[-1][:160]


def table(results: Mapping[str, Result], suites: Iterable[Suite]) -> str:
    rows = ["| suite | commit | result | duration | remark |", "|---|---|---|---|---|"]
    for suite in suites:
        one = results.get(suite.name)
        if one is None:
            rows.append(f"| {suite.name} | | not started | | `{suite.command}` |")
        else:
            remark = one.remark.replace("|", "\\|")
            rows.append(f"| {one.suite} | {one.commit} | {one.result} | {one.seconds:.0f} s | {remark} |")
    return "\n".join(rows) + "\n"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str], *, root: Path = ROOT, suites: Sequence[Suite] = SUITES) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [suite.name for suite in suites]
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"Suites to run: {', '.join(known)}. Default: all."
    )
    parser.add_argument("--table", action="store_true", help="Print the table and run nothing.")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.suites if name not in known]:
        parser.error(f"unknown suite {unknown[0]!r}. Valid: {', '.join(known)}.")
    directory = root / "build" / "test-all"
    commit, state = state_of(root)
    book = Book(directory, state)
    for suite in suites if not given.table else ():
        if given.suites and suite.name not in given.suites:
            continue
        before = book.results.get(suite.name)
        if before is not None and before.result == "passed":
            _say(f"== {suite.name}: passed on this state before")
            continue
        _say(f"== {suite.name}: {suite.command} (usually {suite.minutes:g} min)")
        book.put(run(suite, commit, directory, root))
        _say(f"== {suite.name}: {book.results[suite.name].result}, {book.results[suite.name].remark}")
    text = table(book.results, suites)
    (directory / "table.md").write_text(text)
    sys.stdout.write(text)
    wrong = [one for one in book.results.values() if one.result in ("failed", "timed out")]
    return 1 if wrong else 0


def _end(number: int, _: FrameType | None) -> NoReturn:
    """Ends this process by an exception, so that the running suite ends with it."""
    sys.exit(128 + number)


if __name__ == "__main__":
    # A shell makes its background jobs ignore SIGINT.
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, _end)
    sys.exit(main(sys.argv[1:]))
