"""kv-connector: the command line's entry point."""

import typer

from kv_connector.cli import bench
from kv_connector.cli.demo import demo
from kv_connector.cli.doctor import doctor
from kv_connector.cli.drain import drain
from kv_connector.cli.keygen import keygen
from kv_connector.cli.router import router
from kv_connector.cli.topology import topology

app = typer.Typer(name="kv-connector", no_args_is_help=True, pretty_exceptions_show_locals=False)
app.command()(demo)
app.command()(doctor)
app.command()(topology)
app.command()(router)
app.command()(keygen)
app.command()(drain)
app.add_typer(bench.app, name="bench")


@app.callback()
def main() -> None:
    """KV-cache pages pushed layer by layer from prefill engines into decode engines."""


if __name__ == "__main__":
    app()
