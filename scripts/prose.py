"""The prose of the project's files: what scripts/check_text.py checks.

Readers cut a file into pieces: paragraphs, list items, table cells, docstrings, comments, names of tests, and
the strings that operators see. Code blocks, link targets, quotations and generated tables are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

DOCUMENT, TITLE, CELL = "document", "title", "cell"
DOCSTRING, COMMENT, COMMIT = "docstring", "comment", "commit"
LOG, ERROR, HELP, METRIC = "log", "error", "help", "metric"
TEST = "test name"
STRINGS = frozenset({LOG, ERROR, HELP, METRIC})
"""Kinds of text that an operator reads while the software runs."""
PAGES = frozenset({DOCUMENT, TITLE, CELL})

PRINTED_FIELDS = frozenset(
    {
        "kv_connector/agent/settings.py",
        "kv_connector/cli/common/exit_status.py",
        "kv_connector/protocol/timeouts.py",
    }
)
"""Files whose field docstrings are printed in docs/reference.md: operators read them as help."""
WITHOUT_STRINGS = ("tests/", "scripts/")
"""Folders whose errors and log lines no operator reads."""


class Prose(NamedTuple):
    """A paragraph, list item, table cell, docstring paragraph, comment or string."""

    path: str
    line: int
    kind: str
    text: str
    first: bool = True
    """Whether a docstring or help text begins here."""


# Text: what is read as words.


def _mask(token: str) -> Callable[[re.Match[str]], str]:
    """Replaces a match by a word, and keeps its line ends: positions must still give the line."""
    return lambda match: "\n" * match[0].count("\n") + token


_CODE = re.compile(r"(`+)(?!`)[\s\S]{1,600}?(?<!`)\1(?!`)")
_URL = re.compile(r"\b(?:https?|file|tcp|ipc)://[^\s<>)\]\"'`]*[^\s<>)\]\"'`.,;:!?]")
_QUOTE = re.compile(r"\"[^\"]{1,400}\"|“[^”]{1,400}”|(?<![\w'])'(?!s\b)[^'\n]{1,200}'(?!\w)")
_LINK = re.compile(
    r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\](?:\([^()\s]*(?:\([^()]*\)[^()\s]*)?(?:\s+\"[^\"]*\")?\)|\[[^\]]*\])"
)
_TAG = re.compile(r"<!--[\s\S]*?-->|</?[a-zA-Z][^<>]*>")
_EMPHASIS = re.compile(r"\*+(?=\S)|(?<=\S)\*+")


def _quote(match: re.Match[str]) -> str:
    """Replaces a quotation. The mark that ends its sentence stays."""
    end = match[0][-2] if match[0][-2] in ".!?" else ""
    return "\n" * match[0].count("\n") + "QUOTE" + end


def masked(prose: Prose) -> str:
    """The text with one word for each piece of code, URL and quotation. Line ends stay."""
    text = prose.text
    if "`" in text:
        text = _CODE.sub(_mask("CODE"), text)
    if prose.kind in PAGES:
        if "](" in text or "][" in text:
            text = _LINK.sub(r"\1", text)
        text = _EMPHASIS.sub("", _TAG.sub(_mask(""), text))
    if "://" in text:
        text = _URL.sub("URL", text)
    return _QUOTE.sub(_quote, text)


_NEVER_LAST = frozenset({"e.g.", "i.e.", "vs.", "cf.", "dr.", "mr.", "mrs.", "prof."})
_SELDOM_LAST = frozenset({"etc.", "approx.", "max.", "min.", "al.", "no.", "fig.", "resp.", "incl.", "sec."})
_END = re.compile(r"[.!?]+[\"')\]]*\s+")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(position, sentence) of each sentence of a paragraph whose code is masked.

    A dot ends no sentence within a number, version or file name, nor after an abbreviation.
    """
    begin = 0
    for match in _END.finditer(text):
        after = text[match.end() : match.end() + 1]
        word = text[: match.start() + 1].rsplit(None, 1)[-1].lstrip("([\"'").lower()
        goes_on = after.islower() or after.isdigit()
        if word in _NEVER_LAST or (goes_on and (word in _SELDOM_LAST or match[0].startswith("..."))):
            continue
        yield begin, text[begin : match.end()].strip()
        begin = match.end()
    if text[begin:].strip():
        yield begin, text[begin:].strip()


_WORD = re.compile(r"\S*\w\S*")


def words(sentence: str) -> int:
    return len(_WORD.findall(sentence))


# Readers: from a file to its pieces of prose.

_FENCE = re.compile(r"\s*(?:[-*+]\s+)?(```+|~~~+)")
_ITEM = re.compile(r"(\s*)((?:[-*+]|\d+[.)])\s+)")
_SKIPPED_LINE = re.compile(r"\s*(?:>|\[[^\]]+\]:\s|(?:={3,}|-{3,}|\*{3,})\s*$)")


def markdown(path: str, text: str) -> Iterator[Prose]:
    """Headings, paragraphs, list items and table cells. Code, quotations and generated parts are left out."""
    lines: list[str] = []
    start = indent = 0
    fence, generated, comment, blank = "", False, False, True

    def flush() -> Iterator[Prose]:
        if lines:
            yield Prose(path, start, DOCUMENT, "\n".join(lines))
            lines.clear()

    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if fence:
            fence = "" if stripped.startswith(fence) else fence
            continue
        if comment or stripped.startswith("<!--"):
            yield from flush()
            generated = (generated or stripped.startswith("<!-- generated")) and stripped != "<!-- end -->"
            comment = "-->" not in stripped
            continue
        if generated:
            continue
        if not stripped:
            yield from flush()
            blank = True
            continue
        depth = len(line) - len(line.lstrip())
        if not lines and blank and depth >= indent + 4:
            continue  # a code block; the lines after its first are not preceded by a blank one
        if match := _FENCE.match(line):
            yield from flush()
            fence = match[1]
        elif stripped.startswith("#"):
            yield from flush()
            yield Prose(path, number, TITLE, stripped.lstrip("# "))
            indent = 0
        elif stripped.startswith("|"):
            yield from flush()
            for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                if re.search(r"\w", cell):
                    yield Prose(path, number, CELL, cell.strip())
        elif _SKIPPED_LINE.match(line):
            yield from flush()
        else:
            if match := _ITEM.match(line):
                yield from flush()
                indent, line = len(match[0]), line[match.end() :]
            elif not lines:
                indent = 0 if depth == 0 else indent
            if not lines:
                start = number
            lines.append(line.strip())
        blank = False
    yield from flush()


_COLUMNS = re.compile(r"[^\s.!?] {3,}\S")


def paragraphs(path: str, line: int, kind: str, text: str, margin: int = 0) -> Iterator[Prose]:
    """Paragraphs and list items of a docstring or comment. Code and tables are left out."""
    lines: list[str] = []
    head, *tail = text.split("\n")
    rows = [head.strip(), *(row.removeprefix(" " * margin).rstrip() for row in tail)]
    start, first, blank, item = line, True, False, 0
    for number, row in enumerate(rows, line):
        match = _ITEM.match(row)
        depth = len(row) - len(row.lstrip())
        table = bool(_COLUMNS.search(row))
        ends = not row or match or table or row.startswith((">>>", "|"))
        if lines and ends:
            yield Prose(path, start, kind, "\n".join(lines), first)
            lines, first = [], False
        if not row:
            blank = True
            continue
        if not lines and blank and depth >= item + 4:
            continue
        if table or row.lstrip().startswith((">>>", "|", "...")):
            continue
        if match:
            item, row = len(match[0]), row[match.end() :]
        elif depth == 0:
            item = 0
        if not lines:
            start = number
        lines.append(row.strip())
        blank = False
    if lines:
        yield Prose(path, start, kind, "\n".join(lines), first)


class _Comment(NamedTuple):
    line: int
    column: int
    alone: bool
    text: str


_DIRECTIVE = re.compile(r"(?:type:|noqa|pragma\b|mypy:|ruff:|fmt:|NOLINT|clang-format|!|IWYU|-\*-)[^#]*#?\s*")
_PYTHON = re.compile(
    r"""'''(?:[^\\]|\\[\s\S])*?'''|\"""(?:[^\\]|\\[\s\S])*?\"""|'(?:[^'\\\n]|\\[\s\S])*'|"(?:[^"\\\n]|\\[\s\S])*"|\#[^\n]*"""
)
_CPP = re.compile(
    r"""R"(\w*)\([\s\S]*?\)\1"|"(?:[^"\\\n]|\\.)*"|(?<![0-9a-fA-F])'(?:[^'\\\n]|\\.)+'|//[^\n]*|/\*[\s\S]*?\*/"""
)


def _comments(scanner: re.Pattern[str], text: str) -> Iterator[_Comment]:
    """Comments by line. Those of several lines are separate comments at one column."""
    line, position = 1, 0
    for match in scanner.finditer(text):
        comment = match[0]
        if comment[0] not in "#/":
            continue
        line += text.count("\n", position, match.start())
        position = match.start()
        begin = text.rfind("\n", 0, position) + 1
        alone = not text[begin:position].strip()
        for offset, row in enumerate(comment.removesuffix("*/").split("\n")):
            content = re.sub(r"^\s*(?:#+:?|///?<?|/\*+|\*(?!\*))", "", row).rstrip()
            yield _Comment(line + offset, position - begin, alone or offset > 0, content)


def comments(path: str, scanner: re.Pattern[str], text: str) -> Iterator[Prose]:
    """Comments as paragraphs: lines that follow each other at one column belong together."""
    block: list[_Comment] = []

    def flush() -> Iterator[Prose]:
        if block:
            rows = [one.text[1:] if one.text.startswith(" ") else one.text for one in block]
            yield from paragraphs(path, block[0].line, COMMENT, "\n".join(["", *rows]).replace("\n", "", 1))
            block.clear()

    for comment in _comments(scanner, text):
        content = _DIRECTIVE.sub("", comment.text.lstrip(), count=1)
        if _DIRECTIVE.match(comment.text.lstrip()):
            comment = comment._replace(text=content)
            if not content:
                continue
        follows = block and comment.line == block[-1].line + 1 and comment.column == block[-1].column
        if not (follows and comment.alone):
            yield from flush()
        block.append(comment)
    yield from flush()


_LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
_METRICS = frozenset({"Counter", "Gauge", "Histogram", "Summary", "_gauge", "_counter", "_histogram"})
_METRIC_TABLES = frozenset({"COUNTERS", "GAUGES", "HISTOGRAMS"})
_PLACEHOLDER = re.compile(r"%[-+ #0-9.*]*[sdrifgxXc]")


def _literals(node: ast.expr | None) -> Iterator[tuple[int, str]]:
    """(line, text) of each literal that an argument may be. Its placeholders are words."""
    match node:
        case ast.Constant(value=str(text)):
            yield node.lineno, _PLACEHOLDER.sub("VALUE", text)
        case ast.JoinedStr():
            parts = [one.value if isinstance(one, ast.Constant) else "VALUE" for one in node.values]
            yield node.lineno, "".join(map(str, parts))
        case ast.BinOp(op=ast.Add()):
            left, right = list(_literals(node.left)), list(_literals(node.right))
            if len(left) == len(right) == 1:
                yield left[0][0], left[0][1] + right[0][1]
            else:
                yield from (*left, *right)
        case ast.BinOp(op=ast.Mod()):
            yield from _literals(node.left)
        case ast.IfExp():
            yield from _literals(node.body)
            yield from _literals(node.orelse)


def _name(node: ast.expr) -> str:
    """The last name of what is called: `Counter` for `types[Counter]` and `prometheus_client.Counter`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript():
            return _name(node.slice)
    return ""


def _call(node: ast.Call) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of the strings that operators see by this call."""
    name = _name(node.func)
    first = node.args[0] if node.args else None
    for keyword in node.keywords:
        if keyword.arg == "help":
            yield from ((line, HELP, text) for line, text in _literals(keyword.value))
    if name in _LOG_METHODS and isinstance(node.func, ast.Attribute) and "log" in _name(node.func.value):
        yield from ((line, LOG, text) for line, text in _literals(first))
    elif (name in _METRICS or name.endswith("MetricFamily")) and len(node.args) > 1:
        yield from ((line, METRIC, text) for line, text in _literals(node.args[1]))
    elif name.endswith(("Error", "BadParameter", "Misfit", "Exception")):
        yield from ((line, ERROR, text) for line, text in _literals(first))


def _strings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of log lines, errors, help texts and metric descriptions."""
    seen: set[tuple[int, str, str]] = set()
    for node in ast.walk(tree):
        found: list[tuple[int, str, str]] = []
        if isinstance(node, ast.Call):
            found = list(_call(node))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            found = [(line, ERROR, text) for line, text in _literals(node.exc.args[0])]
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and any(_name(target) in _METRIC_TABLES for target in node.targets)
        ):
            found = [(at, METRIC, text) for one in node.value.values for at, text in _literals(one)]
        for one in found:
            if one not in seen:
                seen.add(one)
                yield one


def _docstrings(path: str, body: list[ast.stmt], kind: str = DOCSTRING) -> Iterator[Prose]:
    """The strings that stand alone in a body (docstrings of its owner and fields), and names of tests."""
    for index, node in enumerate(body):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                field = index > 0 and path in PRINTED_FIELDS
                yield from paragraphs(path, node.lineno, HELP if field else kind, text, node.col_offset)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name.startswith("test_"):
                    name = node.name.removeprefix("test_").replace("_", " ")
                    yield Prose(path, node.lineno, TEST, name[:1].upper() + name[1:])
                calls = [one.func for one in node.decorator_list if isinstance(one, ast.Call)]
                command = any(_name(one) in ("command", "callback") for one in calls)
                yield from _docstrings(path, node.body, HELP if command else DOCSTRING)
            case ast.ClassDef():
                yield from _docstrings(path, node.body)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for block in ("body", "orelse", "finalbody"):
                    yield from _docstrings(path, getattr(node, block, []))


def python(path: str, text: str) -> Iterator[Prose]:
    """Docstrings, comments, test names, and where an operator reads them, logs, errors, help and metrics."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SystemExit(f"{path}:{error.lineno or 1}: {error.msg}") from None
    yield from _docstrings(path, tree.body)
    yield from comments(path, _PYTHON, text)
    if not path.startswith(WITHOUT_STRINGS):
        for line, kind, string in _strings(tree):
            for offset, row in enumerate(string.split("\n\n")):
                if re.search(r"[a-z]", row):
                    yield Prose(path, line, kind, row.replace("\n", " "), offset == 0)


def cpp(path: str, text: str) -> Iterator[Prose]:
    yield from comments(path, _CPP, text)


READERS: dict[str, Callable[[str, str], Iterator[Prose]]] = {
    ".md": markdown,
    ".py": python,
    ".pyi": python,
    **dict.fromkeys((".h", ".cc", ".cu", ".cuh", ".cpp"), cpp),
}


def read(root: Path, name: str) -> list[Prose]:
    """The prose of a file. Scripts without a suffix are read if they are Python."""
    path = root / name
    reader = READERS.get(path.suffix)
    if reader is None and not path.suffix:
        with path.open("rb") as opened:
            first = opened.readline(80)
        reader = python if first.startswith(b"#!") and b"python" in first else None
    if reader is None:
        return []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SystemExit(f"{name}: {error}") from None
    return list(reader(name, text))
