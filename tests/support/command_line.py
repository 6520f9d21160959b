"""Runs kv-connector's commands as in a wide terminal without colours."""

import typer
from typer.testing import CliRunner


def invoke(app: typer.Typer, *words: str) -> tuple[int, str]:
    """Runs a command and returns its exit status and output."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


def one_line(output: str) -> str:
    """Returns the words of a message without its frame and line breaks."""
    return " ".join(output.replace("│", " ").split())
