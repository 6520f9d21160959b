"""Updates the generated tables of README.md and docs/, from the code or from recorded runs in docs/data.

    python scripts/reference.py            # make reference
    python scripts/reference.py --check    # writes nothing; exits with status 1 if a file is not up to date

A table is between two comments. The first one names the contents, and may name the rows:

    <!-- generated: settings control_host control_port -->
    <!-- end -->
    <!-- generated: run 2026-11-27-first-token -->
    <!-- end -->
    <!-- generated: summary 2026-11-27-first-token -->
    <!-- end -->
    <!-- generated: models vllm-0.32 -->
    <!-- end -->

Settings and exit statuses are described by the docstrings under their fields, options by their help, metrics
by their descriptions.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kv_connector.agent.exposition import Exposition
from kv_connector.agent.settings import AgentSettings
from kv_connector.cli.common.environment import OTHERS, VARIABLES
from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.main import app
from kv_connector.moe.metrics import MoeMetrics
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.router.observe.metrics import Metrics
from kv_connector.vllm.encoder.exposition import EmbeddingExposition
from kv_connector.weights.metrics import WeightMetrics

ROOT = Path(__file__).parents[1]
_GENERATED = re.compile(r"(<!-- generated: (\w+)(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def documents() -> dict[Path, str]:
    """Returns the new contents of each file."""
    return {path: _document(path) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}


def _document(path: Path) -> str:
    text = path.read_text()
    marks = re.findall(r"<!-- (generated|end)\b", text)
    if marks != ["generated", "end"] * (len(marks) // 2):
        # A table without its end would take the text up to the end of the next table with it.
        raise SystemExit(f"{path}: each `<!-- generated: ... -->` needs one `<!-- end -->` after its table")
    return _GENERATED.sub(functools.partial(_renewed, path), text)


def _renewed(path: Path, found: re.Match[str]) -> str:
    kind, wanted = found[2], found[3].split()
    where = f"{path}: <!-- generated: {kind}{found[3]} -->"
    if kind in ("run", "summary"):
        if len(wanted) != 1:
            raise SystemExit(f"{where}: name one file of docs/data")
        return _between(found, run(wanted[0], path.parent, summary=kind == "summary"))
    if kind == "models":
        if len(wanted) != 1:
            raise SystemExit(f"{where}: name one file of docs/data")
        return _between(found, models(wanted[0]))
    if kind == "commands":
        return _between(found, "\n\n".join(part.strip("\n") for part in commands()))
    if kind not in TABLES:
        raise SystemExit(
            f"{where}: no such table. Use run, summary, models, commands or one of {', '.join(TABLES)}"
        )
    header, rows = TABLES[kind]()
    by_name = {row[0].strip("`").partition("{")[0]: row for row in rows}
    if unknown := [name for name in wanted if name not in by_name]:
        raise SystemExit(f"{where}: no such rows: {', '.join(unknown)}")
    chosen = [by_name[name] for name in wanted] if wanted else rows
    return _between(found, table(header, chosen))


def _between(found: re.Match[str], words: str) -> str:
    """Puts blank lines around it, because Markdown dialects differ in where a comment ends."""
    return found[1] + "\n" + words.strip("\n") + "\n\n" + found[4]


# --- Recorded runs


def run(name: str, beside: Path, *, summary: bool = False) -> str:
    """Returns the tables of docs/data/NAME.json, and how they were measured, for a page in the folder
    ``beside``. ``summary``: the file's summary replaces method, machine and command."""
    file = ROOT / "docs" / "data" / f"{name}.json"
    try:
        return _run(json.loads(file.read_text()), beside, summary=summary)
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}") from None
    except KeyError as error:
        raise SystemExit(f"{file}: the field {error} is missing") from None
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise SystemExit(f"{file}: not a recorded run ({error})") from None


def _run(recorded: dict[str, Any], beside: Path, *, summary: bool) -> str:
    tables = [table(recorded["header"], recorded["rows"])] if "rows" in recorded else []
    for panel in recorded.get("panels", ()):
        columns = [*panel.get("beside", ()), *panel["series"]]
        header = [panel["columns_are"], *(one["name"] for one in columns)]
        rows = [
            (place, *(format(one["values"][number], one.get("format", panel["format"])) for one in columns))
            for number, place in enumerate(panel["columns"])
        ]
        title = (
            f"{panel['title']}, {panel['unit']}" if panel["unit"] not in panel["title"] else panel["title"]
        )
        tables.append(f"{title[0].upper()}{title[1:]}:\n\n{table(header, rows)}")
    log, _, heading = recorded["log"].partition("#")
    link = os.path.relpath(ROOT / "docs" / log, beside) + ("#" + heading if heading else "")
    how = (
        f"{recorded['summary']} [Log]({link})."
        if summary
        else f"{recorded['method']} Machine: {recorded['machine']}. Date: {recorded['date']}. "
        f"Command: `{recorded['command']}`. [Log]({link})."
    )
    return "\n".join([*tables, textwrap.fill(how, 120, break_long_words=False, break_on_hyphens=False)])


# --- Model classes

_SHOWN = 8
"""Model classes that a row names. The record has all of them."""


def models(name: str) -> str:
    """Returns the table of docs/data/models/NAME.json, which scripts/models.py writes."""
    families = json.loads((ROOT / "docs" / "data" / "models" / f"{name}.json").read_text())
    counts = {
        verdict: sum(len(one["models"]) for one in families if one["verdict"] == verdict)
        for verdict in dict.fromkeys(one["verdict"] for one in families)
    }
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    rows = []
    for one in families:
        shown, rest = one["models"][:_SHOWN], len(one["models"]) - _SHOWN
        names = ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
        rows.append((names, ", ".join(one["caches"]) or "-", one["verdict"], one["reason"]))
    header = ("model classes", "KV cache", "", "tests, or the reason")
    return f"{sum(counts.values())} model classes: {words}.\n\n{table(header, rows)}"


# --- Settings

Rows = tuple[Sequence[str], list[Sequence[str]]]
"""A header, and rows whose first cell is a name."""


def settings() -> Rows:
    words = field_docs(AgentSettings)
    rows: list[Sequence[str]] = []
    for field in msgspec.structs.fields(AgentSettings):
        meaning, default = _default(words[field.name], field.default if field.required is False else None)
        rows.append((f"`{field.name}`", kind(msgspec.inspect.type_info(field.type)), default, meaning))
    return ("key", "value", "default", "meaning"), rows


def timeouts() -> Rows:
    words = field_docs(Timeouts)
    rows: list[Sequence[str]] = [
        (f"`{one.name}`", f"{one.default:g}", words[one.name]) for one in dataclasses.fields(Timeouts)
    ]
    return ("timeout", "default", "meaning"), rows


def _default(words: str, value: object) -> tuple[str, str]:
    """Returns the meaning and the default: the docstring's default, or else the field's own value."""
    meaning, told, default = words.partition(" Default: ")
    if told:
        return meaning, default.removesuffix(".")
    return meaning, f"`{msgspec.json.encode(value).decode()}`"


def kind(info: msgspec.inspect.Type) -> str:
    """Describes a type for operators."""
    match info:
        case msgspec.inspect.Metadata(type=inner):
            return kind(inner)
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(kind(one) for one in types if not isinstance(one, msgspec.inspect.NoneType))
        case msgspec.inspect.LiteralType(values=values):
            return ", ".join(f'`"{value}"`' for value in sorted(map(str, values)))
        case msgspec.inspect.BoolType():
            return "`true` or `false`"
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.IntType(ge=low, le=high) | msgspec.inspect.FloatType(ge=low, le=high):
            bounds = [f"from {low}" if low is not None else "", f"to {high}" if high is not None else ""]
            return " ".join(["number", *filter(None, bounds)])
        case msgspec.inspect.VarTupleType(item_type=inner):
            return f"list of {_several(kind(inner))}"
        case msgspec.inspect.DictType(value_type=value):
            return f"{_several(kind(value))} by name"
    raise TypeError(f"no words for {info}")


def _several(words: str) -> str:
    """Converts "number from 0" to "numbers from 0"."""
    noun, space, rest = words.partition(" ")
    return f"{noun}s{space}{rest}"


@cache
def field_docs(owner: type) -> dict[str, str]:
    """Returns the docstring under each field of a class, in one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                found[name] = " ".join(words.replace("``", "`").split())
    return found


def statuses() -> Rows:
    words = field_docs(ExitStatus)
    return ("status", "means"), [(str(one.value), words[one.name]) for one in ExitStatus]


def environment() -> Rows:
    return ("variable", "meaning"), [(f"`{name}`", words) for name, words in (VARIABLES | OTHERS).items()]


# --- Metrics


class Metric(NamedTuple):
    name: str
    labels: tuple[str, ...]
    kind: str
    words: str

    def row(self) -> Sequence[str]:
        labels = f"{{{', '.join(self.labels)}}}" if self.labels else ""
        return f"`{self.name}{labels}`", self.kind, self.words


def metrics(found: Iterable[Metric]) -> Rows:
    return ("metric", "kind", "meaning"), [one.row() for one in found]


def engine_metrics() -> Iterator[Metric]:
    """Yields an engine's metrics, without the labels by which a framework names the engine."""
    made: list[Metric] = []

    class Recorded:
        """Stands in for a metric: records its definition, and accepts all calls."""

        def __init__(self, kind: str) -> None:
            self._kind = kind

        def __call__(self, name: str, words: str, labels: Sequence[str] = (), **_: object) -> Recorded:
            suffix = "_total" if self._kind == "counter" else ""
            made.append(Metric(name + suffix, tuple(labels), self._kind, words))
            return self

        def labels(self, *_: object) -> Recorded:
            return self

    kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
    recorded = {kind: Recorded(name) for kind, name in kinds.items()}
    Exposition(recorded, (), {0: ()})
    EmbeddingExposition(recorded, (), {0: ()})
    yield from made


def router_metrics() -> Iterator[Metric]:
    yield from _of(Metrics().registry)


def moe_metrics() -> Iterator[Metric]:
    registry = CollectorRegistry()
    MoeMetrics(registry)
    yield from _of(registry)


def weight_metrics() -> Iterator[Metric]:
    registry = CollectorRegistry()
    WeightMetrics(registry)
    yield from _of(registry)


def _of(registry: CollectorRegistry) -> Iterator[Metric]:
    for collector in dict.fromkeys(registry._names_to_collectors.values()):
        labels = tuple(getattr(collector, "_labelnames", ()))
        for family in collector.describe() if hasattr(collector, "describe") else collector.collect():
            suffix = "_total" if family.type == "counter" else ""
            yield Metric(family.name + suffix, labels, family.type, family.documentation)


# --- Commands


def commands() -> Iterator[str]:
    yield from _command("kv-connector", typer.main.get_command(app), level=3)


def _command(path: str, command: Any, level: int) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    places = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    words = [path, *(["[OPTIONS]"] if options else []), *(_place(param) for param in places)]
    yield f"{'#' * level} {path}"
    yield "    " + " ".join(
        [*words, *(["[COMMAND]" if command.invoke_without_command else "COMMAND"] if inner else [])]
    )
    yield _paragraphs(command.help or "")
    if options or places:
        rows = [(f"`{_place(param)}`", "", _cell(param.help or "")) for param in places]
        yield table(("option", "default", "meaning"), rows + [_option(param) for param in options])
    for name, one in inner.items():
        yield from _command(f"{path} {name}", one, 3 if path == "kv-connector" else 4)


def _place(param: Any) -> str:
    name = (param.metavar or param.name).upper()
    dots = "..." if param.nargs != 1 else ""
    return f"{name}{dots}" if param.required else f"[{name}]{dots}"


def _option(param: Any) -> Sequence[str]:
    value = "" if param.is_flag else f" {param.metavar or _value(param)}"
    default = "" if param.default in (None, "", False) or callable(param.default) else f"`{param.default}`"
    if isinstance(param.show_default, str):  # the option's own words for a default that is computed
        default = f"`{param.show_default}`"
    if param.required:
        default = "required"
    if param.secondary_opts:  # `--x, --no-x`
        default = f"`{(param.opts if param.default else param.secondary_opts)[0]}`"
    names = ", ".join([*param.opts, *param.secondary_opts])
    words = [param.help or "", _range(param)]
    return f"`{names}{value}`", default, _cell(" ".join(filter(None, words)))


def _value(param: Any) -> str:
    return "NUMBER" if isinstance(param.default, int | float) else "TEXT"


def _range(param: Any) -> str:
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    if low is None and high is None:
        return ""
    return f"({low} to {high})" if high is not None else f"(from {low})"


# --- Files


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def _cell(words: str) -> str:
    """Converts help of several paragraphs for a table's cell."""
    return "<br>".join(" ".join(paragraph.split()) for paragraph in words.split("\n\n"))


def _paragraphs(words: str) -> str:
    return "\n\n".join(textwrap.fill(" ".join(one.split()), 120) for one in words.split("\n\n"))


TABLES: dict[str, Callable[[], Rows]] = {
    "settings": settings,
    "timeouts": timeouts,
    "engine_metrics": lambda: metrics(engine_metrics()),
    "weight_metrics": lambda: metrics(weight_metrics()),
    "moe_metrics": lambda: metrics(moe_metrics()),
    "router_metrics": lambda: metrics(router_metrics()),
    "statuses": statuses,
    "environment": environment,
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Updates the generated tables of README.md and docs/.")
    parser.add_argument(
        "--check", action="store_true", help="Write nothing. Fail if a file is not up to date."
    )
    options = parser.parse_args(arguments)
    stale = {path: text for path, text in documents().items() if path.read_text() != text}
    if options.check:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not up to date: make reference\n")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
