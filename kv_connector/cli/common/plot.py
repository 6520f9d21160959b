"""The option --plot: the file in which a command draws its results."""

from pathlib import Path
from typing import Annotated

import typer

Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="SVG file for a drawing of the results (needs the extra `plot`)."
    ),
]


def check_plot(file: Path | None) -> None:
    """Refuses an unusable file before anything is measured."""
    if file is None:
        return
    from kv_connector.lab import plots

    try:
        plots.check(file)
    except plots.PlotError as error:
        raise typer.BadParameter(f"--plot: {error}") from None
