"""Output of results."""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kv_connector.bench.machine import Conditions
from kv_connector.bench.records import STANDARD_OUTPUT

# Columns of a console that is a file: the widest table fits.
_FILE_COLUMNS = 140


def make_console(json: Path | None = None) -> Console:
    """Returns a console.

    `json` is the file of the records: if it is standard output, the console uses standard error.
    """
    stderr = json == STANDARD_OUTPUT
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=_FILE_COLUMNS)


class ComparedRow(Protocol):
    """One of the compared things."""

    @property
    def label(self) -> str: ...
    @property
    def module(self) -> str | None:
        """Python module that it needs and that is no dependency of this project."""


R = TypeVar("R", bound=ComparedRow)


def leave_out_missing(rows: Iterable[R], console: Console) -> list[R]:
    """Returns the rows that are available here, and reports each of the others."""
    present = []
    for row in rows:
        reason = None if row.module is None else _import_error(row.module)
        if reason is None:
            present.append(row)
        else:
            console.print(f"left out: {row.label}: {escape(reason)}")
    return present


@cache
def _import_error(module: str) -> str | None:
    """Returns the reason for which `module` cannot be imported here.

    A separate process tries it: importing may start threads.
    """
    result = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    return result.stderr.strip().rpartition("\n")[2] if result.returncode else None


def print_table(
    console: Console, title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1
) -> None:
    """Prints a table, or nothing if there are no rows.

    The first `names` columns are names, the others numbers. `title` and `header` are plain text; cells may
    have rich's markup.
    """
    table = Table(*(escape(column) for column in header))
    for column in table.columns[names:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        console.print(f"\n[bold]{escape(title)}")
        console.print(table)


def verdict(reached: bool) -> str:
    """Returns the last cell of an aim."""
    return "[green]reached[/]" if reached else "[red]not reached[/]"


def print_conditions(console: Console, conditions: Conditions) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
    rows = {
        "started": conditions.started,
        "processor": f"{conditions.processor}, {conditions.cores} cores usable",
        "memory": f"{conditions.memory_gib} GiB; huge pages {conditions.huge_pages}",
        "kernel": f"{conditions.kernel}, yama ptrace_scope {conditions.ptrace_scope}",
        "python": f"{conditions.python}; {versions}",
        "load": " ".join(f"{value:.2f}" for value in conditions.load),
        **conditions.settings,
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", escape(value))
    console.print("[bold]Conditions")
    console.print(table)
