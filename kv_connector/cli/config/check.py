"""kv-connector config check: reads the files that start a deployment, and reports errors in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kv_connector.cli.common.findings import Finding, Verdict, print_findings
from kv_connector.cli.config.alone import check_engine, check_router, check_variables
from kv_connector.cli.config.deployment import STAND_IN, ConfiguredEngine, Unknown, Unreadable
from kv_connector.cli.config.files import read, variables
from kv_connector.cli.config.together import check_together

app = typer.Typer(no_args_is_help=True)


@app.callback()
def config() -> None:
    """Checks the settings of a deployment before anything starts."""


@app.command()
def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Files of one deployment; -: standard input.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Reports errors in the settings of engines and routers, and settings that do not fit each other.

    FILE starts or configures them. It is one of these: the JSON or YAML of --kv-transfer-config, a vLLM
    config file, the JSON of KV_CONNECTOR_SETTINGS, or a file of environment variables. It may be the file of
    kv-connector router --config. Or it is a shell script, compose file or Kubernetes manifest that starts
    vLLM, SGLang or kv-connector router. Variables come from the environment and from the given files of
    variables.

    Needs neither engine nor GPU, and opens no connection. Fails if there is an error.
    """
    try:
        texts = {str(file): _text(file) for file in files}
        known = dict(os.environ)
        for where, text in texts.items():
            known |= alone.environment if (alone := variables(where, text)) else {}
        parts = [part for where, text in texts.items() for part in read(where, text, known)]
    except Unreadable as error:
        raise typer.BadParameter(str(error)) from None
    if not parts:
        raise typer.BadParameter(f"{', '.join(texts)}: no engine, router or settings of kv-connector found")
    findings: list[Finding] = list(check_variables(parts))
    engines, routers = [], []
    for part in parts:
        if isinstance(part, Unknown):
            findings.append(Finding(part.where, Verdict.NOTE, part.words))
        elif isinstance(part, ConfiguredEngine):
            engine, found = check_engine(part)
            engines.append(engine)
            findings += found
        else:
            router, found = check_router(part)
            routers += [router] if router else []
            findings += found
    between = [one for one in check_together(engines, routers) if STAND_IN not in one.words]
    print_findings([*findings, *between], json=json)


def _text(file: Path) -> str:
    if str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot read {file}: {error}") from None
