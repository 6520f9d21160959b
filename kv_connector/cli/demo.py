"""kv-connector demo: prompts through a prefill and a decode engine, beside one engine alone, on CPUs."""

import functools
import importlib.util
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.common.plot import Plot, check_plot
from kv_connector.cli.doctor import SUPPORTED_SGLANG, VLLM_TO_INSTALL

TABLE_WIDTH = 110


class Framework(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"


# Packages to install if a module is missing.
_INSTALL = {
    Framework.VLLM: {"vllm": VLLM_TO_INSTALL},
    Framework.SGLANG: {"sglang.srt": f"sglang=={SUPPORTED_SGLANG[-1]}", "sglang_router": "sglang-router"},
}


def demo(
    engine: Annotated[Framework, typer.Option(help="Engines to start: vllm or sglang.")] = Framework.VLLM,
    provider: Annotated[
        str | None,
        typer.Option(help="Only lane for pushes: host or tcp. Default: the connector's choice."),
    ] = None,
    plot: Plot = None,
) -> None:
    """Starts a prefill engine, a decode engine, one engine alone and a router, and compares them.

    Outputs must be equal; times are shown. Takes about two minutes.
    """
    try:
        from kv_connector.lab.completion import CompletionError
        from kv_connector.lab.demonstration import demonstrate
        from kv_connector.lab.process import StartError, leave_on_signals
        from kv_connector.lab.sites import sglang_site, vllm_site
    except ImportError as error:
        raise typer.BadParameter(f"{error}. Install it: pip install 'kv-connector[demo]'") from None
    for module, package in _INSTALL[engine].items():
        if not _importable(module):
            raise typer.BadParameter(f"{module} is not installed in this environment. Install {package}")
    if provider is not None:
        _check(provider)
    check_plot(plot)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)  # a table in a file is not cut
    directory = Path(tempfile.mkdtemp(prefix="kv-connector-demo-"))
    try:
        start = sglang_site if engine is Framework.SGLANG else vllm_site
        with leave_on_signals():
            problems = demonstrate(console, directory, functools.partial(start, provider=provider), plot)
    except (StartError, CompletionError) as error:
        problems = [str(error)]
    except BaseException:
        console.print(f"Stopped: the engines have ended. Their logs are in {directory}")
        raise
    finally:
        shutil.rmtree(directory / "model", ignore_errors=True)
    if problems:
        for problem in problems:
            console.print(f"FAILED: {problem}", style="bold red", markup=False, highlight=False)
        console.print(f"The engines' logs are in {directory}")
        raise typer.Exit(ExitStatus.FAILURE)
    shutil.rmtree(directory)
    console.print(
        "All outputs are equal. The KV cache of every prompt went through the connector", style="bold green"
    )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the parent package exists
        return False


def _check(provider: str) -> None:
    """Refuses an unusable lane now, instead of in three engines a minute later."""
    from kv_connector.engine.transfer_engine import providers

    known = {status.name: status for status in providers()}
    if provider not in known:
        raise typer.BadParameter(
            f"--provider {provider!r} is not in this build. Choose one of {', '.join(known)}"
        )
    if not known[provider].usable:
        raise typer.BadParameter(f"{provider} is not usable here: {known[provider].reason}")
