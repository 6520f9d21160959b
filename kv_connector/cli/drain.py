"""kv-connector drain and undrain: take an engine out of service without failing a request, and back."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import typer

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.router import KeyFile, address, cluster_key, endpoint
from kv_connector.control.membership import (
    Drain,
    Draining,
    MembershipMessage,
    MembershipSockets,
    Undrain,
    Undrained,
)
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.endpoint import Endpoint

REPEAT_SECONDS = 0.5
# Interval of requests while a connection is being made.
SOON_SECONDS = 0.05
# A router that has not answered for this long counts as gone: routers give up engines as fast. If it comes
# back, the engine reports the drain to it.
SILENCE_SECONDS = 5.0

Engine = Annotated[
    Endpoint, typer.Argument(parser=endpoint, metavar="URL", help="URL of the engine's API server.")
]
Routers = Annotated[
    list[Address],
    typer.Option(
        "--router",
        parser=address,
        metavar="HOST:PORT",
        help="Address at which a router takes registrations. Repeat for each router of the engine.",
    ),
]


def drain(
    engine: Engine,
    router: Routers,
    key_file: KeyFile = None,
    move: Annotated[
        bool,
        typer.Option(
            "--move",
            help="Move running streams to other decode engines; their clients notice no end. Only for an "
            "engine of role kv_both.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Drain the engine even if no other decode engine takes requests. Clients get 503 then.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time limit until the engine is idle, in seconds.")
    ] = 600.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print the last answer of each router as one JSON object.")
    ] = False,
) -> None:
    """Stops new requests to an engine, and returns once its requests from these routers have ended.

    The engine may then be stopped. With --move this takes seconds, except for requests that cannot move:
    their number and the reasons are printed. The engine also reports the drain to routers that are not named
    here. If some routers do not answer, the answers of the others decide. `kv-connector undrain` ends the
    drain. The last decode engine is drained with --force only.
    """
    sockets = MembershipSockets(cluster_key(key_file))
    try:
        asked = [_Asked(one, sockets.dial(one, patient=False)) for one in router]
        question = Drain(engine.url, move, unless_last=not force)
        idle = _until_idle(sockets, asked, question, time.monotonic() + timeout)
    finally:
        sockets.close()
    answers = _answered(asked)
    for one in answers:
        if one.last is not None:
            typer.echo(
                f"the router at {one.address} refuses the drain: {engine.url} is its last {one.last.value} "
                "engine that takes requests. Start another one first, or add --force.",
                err=True,
            )
    if any(one.last is not None for one in answers):
        raise typer.Exit(ExitStatus.USAGE)
    _refuse_unknown(engine, [one for one in answers if one.outstanding is None], answers)
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


def undrain(
    engine: Engine,
    router: Routers,
    key_file: KeyFile = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Time limit until the engine reports the end of the drain, in seconds.",
        ),
    ] = 10.0,
) -> None:
    """Ends a drain: the engine gets new requests again.

    One router is enough for an engine that registers: the engine reports the end to all its routers. For a
    listed engine, name each router that drained it.
    """
    sockets = MembershipSockets(cluster_key(key_file))
    try:
        asked = [_Asked(one, sockets.dial(one, patient=False)) for one in router]
        _until_undrained(sockets, asked, Undrain(engine.url), time.monotonic() + timeout)
    finally:
        sockets.close()
    answers = _answered(asked)
    _refuse_unknown(engine, [one for one in answers if one.draining is None], answers)
    if any(one.draining for one in answers):
        typer.echo(
            f"{engine.url} still reports its drain after {timeout:g} s. Check that it runs, and "
            "that it runs this release.",
            err=True,
        )
        raise typer.Exit(ExitStatus.FAILURE)
    typer.echo(f"the drain of {engine.url} has ended")


@dataclass
class _Asked:
    """A router with its last answers."""

    address: Address
    link: Source
    answered: float | None = None  # time of the last answer
    outstanding: int | None = None
    """Requests that the engine has from it. None: it does not know the engine."""
    moved: int = 0
    staying: Mapping[str, int] = field(default_factory=dict)
    """Field of Draining, from the last answer in which it was not empty."""
    last: Role | None = None
    """Field of Draining."""
    draining: bool | None = None
    """Field of Undrained."""


def _answered(asked: Sequence[_Asked]) -> list[_Asked]:
    """Returns the routers that have answered. Reports the others, and exits if there is none."""
    answers = [one for one in asked if one.answered]
    for one in asked:
        if one not in answers:
            typer.echo(
                f"no router answers at {one.address}. Check the address, and that it has the "
                "same cluster key.",
                err=True,
            )
    if not answers:
        raise typer.Exit(ExitStatus.USAGE)
    return answers


def _refuse_unknown(engine: Endpoint, unknown: Sequence[_Asked], answers: Sequence[_Asked]) -> None:
    """Exits if no router that has answered knows the engine."""
    if len(unknown) == len(answers):
        where = ", ".join(str(one.address) for one in answers)
        raise typer.BadParameter(f"the router at {where} does not know the engine {engine.url}")


def _heard_in_a_round(
    sockets: MembershipSockets, asked: Sequence[_Asked], question: Drain | Undrain, deadline: float
) -> Iterator[list[tuple[_Asked, MembershipMessage | None]]]:
    """Sends the question to all routers once.

    Yields the answers of each wait until the next round or the deadline.
    """
    routers = {one.link: one for one in asked}
    now = time.monotonic()
    connected = [sockets.send(one.link, question) for one in asked]
    until = min(now + (REPEAT_SECONDS if all(connected) else SOON_SECONDS), deadline)
    while (left := until - time.monotonic()) > 0:
        sockets.wait(left)
        yield [(routers[received.source], received.message) for received in sockets.receive()]


def _until_undrained(
    sockets: MembershipSockets, asked: Sequence[_Asked], question: Undrain, deadline: float
) -> None:
    """Repeats the question until no router that answers reports a drain, or until the deadline."""
    silent = time.monotonic() + SILENCE_SECONDS
    while (now := time.monotonic()) < deadline:
        for heard in _heard_in_a_round(sockets, asked, question, deadline):
            for one, answer in heard:
                if isinstance(answer, Undrained):
                    one.answered, one.draining = time.monotonic(), answer.draining
            if all(one.answered and not one.draining for one in asked):
                return
        if now > silent and not any(one.draining for one in asked):
            return


def _until_idle(
    sockets: MembershipSockets, asked: Sequence[_Asked], question: Drain, deadline: float
) -> bool:
    """Repeats the question until each router that answers reports that the engine has none of its requests.

    Returns false if a router reports requests at the deadline.
    """
    began = time.monotonic()
    told: set[str] = set()

    def tell() -> None:
        """Prints the requests that stay, once all routers have answered, and again for each new reason."""
        staying = _staying(asked)
        if not told.issuperset(staying):
            told.update(staying)
            why = ", ".join(f"{count} {reason}" for reason, count in staying.items())
            typer.echo(
                f"{question.url}: {sum(staying.values())} requests end on this engine: {why}", err=True
            )

    while time.monotonic() < deadline:
        for heard in _heard_in_a_round(sockets, asked, question, deadline):
            for one, answer in heard:
                if isinstance(answer, Draining):
                    one.answered, one.outstanding = time.monotonic(), answer.outstanding
                    one.moved, one.staying = answer.moved, answer.staying or one.staying
                    one.last = answer.last
            if any(one.last is not None for one in asked):
                return False
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
    """Returns the number of requests that are not moved, by reason."""
    return dict(sum((Counter(one.staying) for one in asked), Counter()))
