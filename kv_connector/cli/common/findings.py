"""The findings of a command: verdicts, as a table or as JSON, and the exit status that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kv_connector import __version__
from kv_connector.cli.common.exit_status import ExitStatus

_FILE_COLUMNS = 120


class Verdict(Enum):
    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAIL: "bold red"}


@dataclass(frozen=True)
class Finding:
    subject: str
    verdict: Verdict
    words: str
    """The finding and, unless all is well, the remedy."""


def print_findings(findings: Sequence[Finding], *, json: bool, report: msgspec.Struct | None = None) -> None:
    """Prints the findings, as JSON if requested. Exits with a failure if one is FAIL.

    `report`: the object from which the findings were made, which replaces them in JSON.
    """
    if json:
        told = report or {"version": __version__, "findings": findings}
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=2))
    else:
        _print(findings)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(ExitStatus.FAILURE)


def _print(findings: Sequence[Finding]) -> None:
    table = Table(title=f"kv-connector {__version__}", title_justify="left")
    for column in ("subject", "", "finding"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = _STYLES[finding.verdict]
        table.add_row(escape(finding.subject), f"[{style}]{finding.verdict.value}", escape(finding.words))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_COLUMNS)
    console.print(table)
