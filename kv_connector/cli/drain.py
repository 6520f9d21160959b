"""kv-connector drain: takes an engine out of service without failing a request."""

import time
from typing import Annotated

import typer

from kv_connector.cli.router import KeyFile, address, cluster_key, endpoint
from kv_connector.control.membership import Drain, Draining, MembershipSockets
from kv_connector.protocol.actions import Address
from kv_connector.router.endpoint import Endpoint

REPEAT_SECONDS = 0.5


def drain(
    engine: Annotated[
        Endpoint, typer.Argument(parser=endpoint, metavar="URL", help="The engine's API server.")
    ],
    router: Annotated[
        Address,
        typer.Option(parser=address, metavar="HOST:PORT", help="Where the router takes registrations."),
    ],
    key_file: KeyFile = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until the engine is idle.")] = 600.0,
) -> None:
    """Sends an engine nothing new, and returns once it has finished what it had from this router.

    The engine may then be stopped. It tells its other routers to send it nothing, too.
    """
    sockets = MembershipSockets(cluster_key(key_file))
    try:
        outstanding = _until_idle(sockets, router, engine, time.monotonic() + timeout)
    finally:
        sockets.close()
    if outstanding:
        typer.echo(f"{engine.url} still has {outstanding} requests after {timeout:g} s", err=True)
        raise typer.Exit(1)
    typer.echo(f"{engine.url} is idle")


def _until_idle(sockets: MembershipSockets, router: Address, engine: Endpoint, deadline: float) -> int:
    """Requests that the engine still has: 0, or what is left at the deadline."""
    link = sockets.dial(router)
    outstanding = -1
    while (now := time.monotonic()) < deadline:
        sockets.send(link, Drain(engine.url))
        sockets.wait(min(REPEAT_SECONDS, deadline - now))
        for received in sockets.receive():
            if isinstance(received.message, Draining):
                if received.message.outstanding is None:
                    raise typer.BadParameter(f"the router at {router} knows no engine {engine.url}")
                outstanding = received.message.outstanding
        if outstanding == 0:
            return 0
        # The answer may have come at once: not another question right behind it.
        time.sleep(max(0.0, now + REPEAT_SECONDS - time.monotonic()))
    if outstanding < 0:
        raise typer.BadParameter(f"no router answers at {router}. Has it the same cluster key?")
    return outstanding
