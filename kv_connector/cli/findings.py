"""What a command found out, as a table of findings with verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kv_connector import __version__

_FILE_COLUMNS = 140


class Verdict(Enum):
    OK = "[green]ok"
    NOTE = "[yellow]note"
    FAIL = "[bold red]FAIL"


@dataclass(frozen=True)
class Finding:
    subject: str
    verdict: Verdict
    words: str
    """What was found and, unless all is well, what to do."""


def show(findings: Iterable[Finding]) -> None:
    table = Table(title=f"kv-connector {__version__}", title_justify="left")
    for column in ("subject", "", "finding"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, finding.verdict.value, escape(finding.words))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_COLUMNS)
    console.print(table)
