"""kv-connector: the command line's entry point."""

import inspect
from typing import Annotated

import typer

from kv_connector import __version__
from kv_connector.cli import bench, weights
from kv_connector.cli.config import check as config
from kv_connector.cli.demo import demo
from kv_connector.cli.doctor import doctor
from kv_connector.cli.drain import drain, undrain
from kv_connector.cli.keygen import keygen
from kv_connector.cli.router import RouterCommand, router
from kv_connector.cli.topology import topology
from kv_connector.cli.trace import trace
from kv_connector.cli.verify.command import verify

app = typer.Typer(name="kv-connector", no_args_is_help=True, pretty_exceptions_show_locals=False)
app.command()(demo)
app.command()(doctor)
app.command()(topology)
app.command(cls=RouterCommand)(router)
app.command()(keygen)
app.command()(drain)
app.command()(undrain)
app.command()(trace)
app.command()(verify)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(weights.app, name="weights")


def _join_lines(commands: typer.Typer) -> None:
    """Joins the lines of each paragraph of the commands' help.

    Typer keeps the line breaks of the source, and a narrow terminal adds its own.
    """
    for command in commands.registered_commands:
        paragraphs = inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(one.split()) for one in paragraphs.split("\n\n"))
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _join_lines(group.typer_instance)


_join_lines(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kv-connector {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Pushes KV cache pages layer by layer from prefill engines into decode engines."""


if __name__ == "__main__":
    app()
