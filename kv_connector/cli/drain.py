"""kv-connector drain: takes an engine out of service without failing a request."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import typer

from kv_connector.cli.exit_status import ExitStatus
from kv_connector.cli.router import KeyFile, address, cluster_key, endpoint
from kv_connector.control.membership import Drain, Draining, MembershipSockets
from kv_connector.protocol.actions import Address, Source
from kv_connector.router.endpoint import Endpoint

REPEAT_SECONDS = 0.5
# While a connection is being made.
SOON_SECONDS = 0.05
# A router that has said nothing for so long is not there: routers take engines for dead as fast. If it comes
# back, the engine tells it of the drain.
SILENCE_SECONDS = 5.0


def drain(
    engine: Annotated[
        Endpoint, typer.Argument(parser=endpoint, metavar="URL", help="The engine's API server.")
    ],
    router: Annotated[
        list[Address],
        typer.Option(
            parser=address,
            metavar="HOST:PORT",
            help="Where a router takes registrations. Repeat for each that sends the engine requests.",
        ),
    ],
    key_file: KeyFile = None,
    move: Annotated[
        bool,
        typer.Option(
            "--move",
            help="Running streams go on at other decode engines, without an end for their clients. For an "
            "engine of role kv_both.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait until the engine is idle.")
    ] = 600.0,
    json: Annotated[
        bool, typer.Option("--json", help="What each router says last, as one JSON object.")
    ] = False,
) -> None:
    """Sends an engine nothing new, and returns once it has finished what it had from these routers.

    With --move that is a matter of seconds, but for requests that have to end where they began: how many, and
    why, is said as soon as it is known. The engine may then be stopped. It tells routers that are not named
    here to send it nothing, too. Where some of the routers do not answer, the others' word decides.
    """
    sockets = MembershipSockets(cluster_key(key_file))
    try:
        asked = [_Asked(one, sockets.dial(one, patient=False)) for one in router]
        idle = _until_idle(sockets, asked, Drain(engine.url, move), time.monotonic() + timeout)
    finally:
        sockets.close()
    answers = [one for one in asked if one.answered]
    for one in asked:
        if one not in answers:
            typer.echo(f"no router answers at {one.address}. Has it the same cluster key?", err=True)
    if not answers:
        raise typer.Exit(ExitStatus.USAGE)
    if all(one.outstanding is None for one in answers):
        where = ", ".join(str(one.address) for one in answers)
        raise typer.BadParameter(f"the router at {where} knows no engine {engine.url}")
    outstanding = sum(one.outstanding or 0 for one in answers)
    if json:
        said = {str(one.address): one.outstanding if one.answered else None for one in asked}
        told: dict[str, Any] = {"engine": engine.url, "idle": idle, "outstanding": said}
        if move:
            told |= {"moved": sum(one.moved for one in asked), "staying": _staying(asked)}
        typer.echo(msgspec.json.encode(told))
    elif idle:
        moved = f", {sum(one.moved for one in asked)} streams have moved" if move else ""
        typer.echo(f"{engine.url} is idle{moved}")
    else:
        typer.echo(f"{engine.url} still has {outstanding} requests after {timeout:g} s", err=True)
    if not idle:
        raise typer.Exit(ExitStatus.FAILURE)


@dataclass
class _Asked:
    """A router, and what it said last."""

    address: Address
    link: Source
    answered: float | None = None  # when
    outstanding: int | None = None
    """Requests that the engine has from it; None: it knows no such engine."""
    moved: int = 0
    staying: Mapping[str, int] = field(default_factory=dict)
    """Draining's, as long as there were any."""


def _until_idle(
    sockets: MembershipSockets, asked: Sequence[_Asked], question: Drain, deadline: float
) -> bool:
    """Asks again and again, until every router that is there says that the engine has nothing of it.

    False: one says otherwise at the deadline.
    """
    routers = {one.link: one for one in asked}
    began = time.monotonic()
    told: set[str] = set()

    def tell() -> None:
        """What is not moved, once all that are there have said it; again where there is another reason."""
        staying = _staying(asked)
        if not told.issuperset(staying):
            told.update(staying)
            why = ", ".join(f"{count} {reason}" for reason, count in staying.items())
            typer.echo(f"{question.url}: {sum(staying.values())} requests end there: {why}", err=True)

    while (now := time.monotonic()) < deadline:
        connected = [sockets.send(one.link, question) for one in asked]
        until = min(now + (REPEAT_SECONDS if all(connected) else SOON_SECONDS), deadline)
        while (left := until - time.monotonic()) > 0:
            sockets.wait(left)
            for received in sockets.receive():
                if isinstance(received.message, Draining):
                    one, answer = routers[received.source], received.message
                    one.answered, one.outstanding = time.monotonic(), answer.outstanding
                    one.moved, one.staying = answer.moved, answer.staying or one.staying
            if all(one.answered and not one.outstanding for one in asked):
                tell()
                return True
        silent = time.monotonic() - SILENCE_SECONDS
        there = [one for one in asked if (one.answered or began) > silent]
        if all(one.answered for one in there):
            tell()
            if not any(one.outstanding for one in there):
                return True
    return not any(one.outstanding for one in asked)


def _staying(asked: Sequence[_Asked]) -> dict[str, int]:
    """Requests that are not moved, by why."""
    return dict(sum((Counter(one.staying) for one in asked), Counter()))
