"""kv-connector weights: pushes checkpoints into serving engines, and reports the weights that they serve."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.common.push_progress import push_progress
from kv_connector.cli.router import KeyFile, address, cluster_key
from kv_connector.engine import TransferError
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.weight_version import shown

if TYPE_CHECKING:
    from kv_connector.weights.pusher import WeightPusher
    from kv_connector.weights.sources import CheckpointSource
    from kv_connector.weights.verify import Verified

app = typer.Typer(
    name="weights",
    no_args_is_help=True,
    help="Push new weights into engines while they serve: a checkpoint here, a trainer's by WeightPusher in "
    "Python.",
)

Checkpoint = Annotated[
    Path, typer.Argument(metavar="DIRECTORY", help="Checkpoint: a directory with safetensors.")
]
Version = Annotated[str, typer.Option(help="Name of the new weight version. Default: the directory's name.")]
Engines = Annotated[
    list[Address],
    typer.Option(
        "--engine",
        parser=address,
        metavar="HOST:PORT",
        help="Control address of an engine that takes weights (its `control_port`). Repeat for each engine.",
    ),
]
RouterEngines = Annotated[
    list[Address] | None,
    typer.Option(
        "--engine",
        parser=address,
        metavar="HOST:PORT",
        help="Control address of an engine that takes weights (its `control_port`). Repeat for each engine. "
        "Required without --router.",
    ),
]
Router = Annotated[
    Address | None,
    typer.Option(
        "--router",
        parser=address,
        metavar="HOST:PORT",
        help="Address at which a router takes registrations, in place of --engine: all its engines that take "
        "weights.",
    ),
]
Providers = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        help="Lane for the weights. Repeat in order of preference. Engines on GPUs need one, such as bounce, "
        "also among their own providers. Default: host and tcp.",
    ),
]
Nics = Annotated[
    list[str] | None,
    typer.Option(
        "--nic",
        metavar="NAME",
        help="NIC of this machine for verbs or libfabric, such as mlx5_0. Repeat for more. Default: the NICs "
        "nearest to the weights.",
    ),
]
DataHost = Annotated[str, typer.Option(help="Address of this machine at which the engines reach it.")]
Partial = Annotated[
    list[str] | None,
    typer.Option(
        "--partial",
        metavar="NAME",
        help="Tensor that engines may leave out, or parameter that they may keep: a name, or a pattern "
        "with * and ?. Repeat for each.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def push(
    checkpoint: Checkpoint,
    engine: RouterEngines = None,
    router: Router = None,
    version: Version = "",
    key_file: KeyFile = None,
    provider: Providers = None,
    data_host: DataHost = "127.0.0.1",
    partial: Partial = None,
    nic: Nics = None,
    in_turn: Annotated[
        bool,
        typer.Option(
            "--in-turn",
            help="Engines switch one after another, in the order of --engine. For servers of SGLang, name "
            "prefill servers first.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Total time limit, in seconds.")
    ] = 600.0,
) -> None:
    """Writes a checkpoint beside the served weights, and switches each engine to it in one short pause.

    In shadow mode an engine's served weights stay unchanged until all of the new ones have landed. If this
    command ends early, such an engine continues with its old weights. An engine in streaming mode that has
    taken a part stays paused until the next version. Status 1: some engine does not serve the checkpoint; the
    others do. An engine that registers with the router after the start gets the next push.
    """
    version = version or checkpoint.resolve().name
    _check_engines(engine, router)
    if in_turn and router is not None:
        raise typer.BadParameter("--in-turn needs --engine, once for each engine, in place of --router")
    with _pusher(
        checkpoint, engine or (), key_file, provider, data_host, partial, nic, timeout, router, in_turn
    ) as pusher:
        from kv_connector.weights.update import PushError

        nbytes = sum(part.nbytes for part in pusher.parts())
        typer.echo(f"{nbytes / 1e9:.2f} GB for {len(pusher.parts())} workers")
        began = time.monotonic()
        try:
            with push_progress(pusher.progress, Console()):
                update = pusher.push(version)
            try:
                update.wait("landed", max(timeout - (time.monotonic() - began), 0))
            except PushError:
                # The other engines apply the version. They need this process until then.
                with suppress(PushError):
                    update.wait("applied", max(timeout - (time.monotonic() - began), 0))
                raise
            landed = time.monotonic() - began
            typer.echo(f"landed in {landed:.2f} s ({nbytes / 1e9 / landed:.2f} GB/s)")
            update.wait("applied", max(timeout - landed, 0))
        except PushError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(ExitStatus.FAILURE) from None
        typer.echo(f"version {version} is served after {time.monotonic() - began:.2f} s")


class Round(msgspec.Struct, frozen=True):
    """The seconds of one push, counted from its start, except for the pauses."""

    landed: float
    applied: float
    paused: dict[str, float]  # by engine


@app.command()
def bench(
    checkpoint: Checkpoint,
    engine: Engines,
    rounds: Annotated[int, typer.Option(min=1, help="Pushes that are measured, after one that is not.")] = 5,
    version: Version = "",
    key_file: KeyFile = None,
    provider: Providers = None,
    data_host: DataHost = "127.0.0.1",
    partial: Partial = None,
    nic: Nics = None,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time limit for each push, in seconds.")
    ] = 600.0,
    json: Json = False,
) -> None:
    """Measures repeated pushes of a checkpoint.

    The pushes are those of `push`: the engines serve the checkpoint in the end, and pause once a push.
    """
    version = version or checkpoint.resolve().name
    with _pusher(checkpoint, engine, key_file, provider, data_host, partial, nic) as pusher:
        from kv_connector.weights.update import PushError

        nbytes = sum(part.nbytes for part in pusher.parts())
        try:
            # Each push has another name: an engine that already serves a version would not be measured.
            names = [f"{version} ({number} of {rounds + 1})" for number in range(1, rounds + 1)]
            _, *measured = [_round(pusher, name, timeout) for name in [*names, version]]
        except PushError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(ExitStatus.FAILURE) from None
    if json:
        typer.echo(msgspec.json.encode({"bytes": nbytes, "rounds": measured}).decode())
        return
    table = Table(f"{nbytes / 1e9:.2f} GB", "median, ms", "least", "most", "GB/s")
    for what, seconds in (
        ("landed", [one.landed for one in measured]),
        ("applied", [one.applied for one in measured]),
        *((f"{name} paused", [one.paused[name] for one in measured]) for name in measured[0].paused),
    ):
        middle = statistics.median(seconds)
        speed = "" if what.endswith("paused") else f"{nbytes / 1e9 / middle:.2f}"
        table.add_row(what, *(f"{one * 1e3:,.1f}" for one in (middle, min(seconds), max(seconds))), speed)
    Console().print(table)


def _round(pusher: WeightPusher, version: str, timeout: float) -> Round:
    began = time.monotonic()
    with _within(timeout, pusher):
        update = pusher.push(version)
        update.wait("landed", max(timeout - (time.monotonic() - began), 0))
        landed = time.monotonic() - began
        update.wait("applied", max(timeout - landed, 0))
    return Round(landed, time.monotonic() - began, dict(update.pause_seconds))


@app.command()
def plan(
    checkpoint: Checkpoint,
    engine: Engines,
    key_file: KeyFile = None,
    provider: Providers = None,
    data_host: DataHost = "127.0.0.1",
    partial: Partial = None,
    nic: Nics = None,
    json: Json = False,
) -> None:
    """Prints the bytes that `push` would write to each worker. Writes no weights.

    A plan of another checkpoint drops the copy that landed last: `seed` and `verify` do not work until the
    next push.
    """
    with _pusher(checkpoint, engine, key_file, provider, data_host, partial, nic) as pusher:
        parts = pusher.parts()
    if json:
        typer.echo(msgspec.json.encode(parts).decode())
        return
    table = Table("worker", "MB", "pages", "shortest, bytes", "laid out before, MB")
    for part in parts:
        table.add_row(
            part.worker,
            f"{part.nbytes / 1e6:,.1f}",
            f"{part.pages:,}",
            f"{part.shortest_page:,}",
            f"{part.packed_bytes / 1e6:,.1f}",
        )
    Console().print(table)


@app.command()
def status(
    engine: RouterEngines = None, router: Router = None, key_file: KeyFile = None, json: Json = False
) -> None:
    """Prints the version that each engine serves, and versions that are landing.

    Status 1: an engine does not answer, or reports a problem.
    """
    engines = _engines(engine, router, key_file)
    from kv_connector.weights.wire.links import LinkError, questions
    from kv_connector.weights.wire.messages import Ask, State

    states: dict[str, Any] = {}
    failed = False
    with questions(cluster_key(key_file)) as links:
        asked = [(link := links.dial(one), links.ask(link, Ask())) for one in engines]
        for link, answer in asked:
            try:
                state = links.wait(answer, link, links.timeouts.connect)
                assert isinstance(state, State)
                names = {key: shown(getattr(state, key)) for key in ("served", "landing", "landed")}
                states[str(link.address)] = msgspec.structs.asdict(state) | names
                failed |= bool(state.problem)
            except LinkError as error:
                states[str(link.address)] = {"problem": str(error)}
                failed = True
    if json:
        typer.echo(msgspec.json.encode(states).decode())
    else:
        for name, said in states.items():
            typer.echo(_line(name, said))
    if failed:
        raise typer.Exit(ExitStatus.FAILURE)


@app.command()
def seed(
    engine: Engines,
    seeder: Annotated[
        Address,
        typer.Option(
            "--from",
            parser=address,
            metavar="HOST:PORT",
            help="Control address of the engine that has the weights.",
        ),
    ],
    key_file: KeyFile = None,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time limit for each engine, in seconds.")
    ] = 600.0,
) -> None:
    """Copies the served version of an engine in shadow mode to engines that have just started.

    The engine with the weights continues to serve, and so does an engine in shadow mode that receives them.
    No trainer is needed. If this command ends early, the copy ends too. An engine in shadow mode then
    continues with its old weights. An engine in streaming mode that has taken a part stays paused until the
    next version. Status 1: some engine does not serve the version.
    """
    from kv_connector.weights.seeding.start_seeding import SeedError
    from kv_connector.weights.seeding.start_seeding import seed as ask
    from kv_connector.weights.wire.links import questions

    failed = False
    with questions(cluster_key(key_file)) as links:
        for one in engine:
            began = time.monotonic()
            try:
                version = ask(seeder, one, links, timeout)
                typer.echo(f"{one}: version {version} is served, after {time.monotonic() - began:.2f} s")
            except SeedError as error:
                typer.echo(f"{one}: {error}", err=True)
                failed = True
    if failed:
        raise typer.Exit(ExitStatus.FAILURE)


@app.command()
def verify(
    checkpoint: Checkpoint,
    engine: RouterEngines = None,
    router: Router = None,
    key_file: KeyFile = None,
    partial: Partial = None,
    json: Json = False,
) -> None:
    """Compares the weights that the engines took last with this checkpoint, by hashes of each parameter.

    An engine without a copy beside its model (streaming), or without a push since its start, cannot be
    compared. The command reads the checkpoint, and uses one core of each worker for about a second a GB.
    Status 1: some parameter differs, is not in the checkpoint, or could not be compared.
    """
    source = _source(checkpoint)
    engines = _engines(engine, router, key_file)
    from kv_connector.weights.verify import verify as compare
    from kv_connector.weights.wire.links import questions

    with questions(cluster_key(key_file)) as links:
        found = list(compare(source, engines, links, partial or ()))
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        for one in found:
            typer.echo(_compared(one))
    if not all(one.good for one in found):
        raise typer.Exit(ExitStatus.FAILURE)


def _compared(one: Verified) -> str:
    if one.problem:
        return one.problem
    what = f"{one.worker}: version {one.version}: "
    if not one.differ:
        return f"{what}all {one.parameters} parameters are the checkpoint's"
    return f"{what}{len(one.differ)} of {one.parameters} parameters differ: {', '.join(one.differ)}"


def _line(name: str, said: dict[str, Any]) -> str:
    if "served" not in said:
        return str(said["problem"])
    words = [f"serves {said['served'] or 'what it was started with'}"]
    words += [
        f"{said[key]} {verb}"
        for key, verb in (("landing", "is landing"), ("landed", "has landed"))
        if said[key]
    ]
    words += [f"seeds {said['seeding']}"] if said["seeding"] else []
    words += [f"{said['senders']} senders"] if said["senders"] else []
    words += ["stays paused until a whole version is pushed or seeded to it"] if said["torn"] else []
    words += [f"problem: {said['problem']}"] if said["problem"] else []
    return f"{name}: {', '.join(words)}"


def _check_engines(engines: Sequence[Address] | None, router: Address | None) -> None:
    if bool(engines) == bool(router):
        raise typer.BadParameter("give either --engine, once for each engine, or --router")


def _engines(
    engines: Sequence[Address] | None, router: Address | None, key_file: Path | None
) -> Sequence[Address]:
    """Returns the engines of a command: those that are named, or those of the router. Errors end the command
    with status 2."""
    _check_engines(engines, router)
    if router is None:
        return engines or ()
    from kv_connector.weights.trainer.router_list import RouterList
    from kv_connector.weights.wire.links import LinkError

    listed = RouterList(router, cluster_key(key_file))
    try:
        return listed.ask()
    except LinkError as error:
        raise typer.BadParameter(str(error)) from None
    finally:
        listed.close()


def _source(checkpoint: Path) -> CheckpointSource:
    """Opens the checkpoint. Errors end the command with status 2."""
    try:
        from kv_connector.weights.sources import CheckpointSource, SourceError
    except ImportError as error:
        raise typer.BadParameter(f"{error}: pip install 'kv-connector[weights]'") from None
    try:
        return CheckpointSource(checkpoint)
    except SourceError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def _within(timeout: float, pusher: WeightPusher) -> Iterator[None]:
    """Cancels the pusher after the time limit: neither writes nor connecting to engines has a limit."""
    timer = threading.Timer(timeout, pusher.cancel, [f"not done within {timeout:g} s (--timeout)"])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _pusher(
    checkpoint: Path,
    engines: Sequence[Address],
    key_file: Path | None,
    providers: list[str] | None,
    data_host: str,
    partial: list[str] | None,
    nics: list[str] | None,
    timeout: float | None = None,
    router: Address | None = None,
    in_turn: bool = False,
) -> Iterator[WeightPusher]:
    """Yields a connected pusher. Errors end the command with status 2. ``timeout``: limit for all of it."""
    source = _source(checkpoint)
    from kv_connector.weights.pusher import WeightPusher
    from kv_connector.weights.update import PushError

    cluster_key(key_file)  # reports a wrong key like the other commands
    try:
        pusher = WeightPusher(
            source,
            [str(engine) for engine in engines],
            router=None if router is None else str(router),
            key_file=None if key_file is None else str(key_file),
            providers=providers or (),
            data_host=data_host,
            name=f"weights-push-{uuid.uuid4().hex[:6]}",
            partial=partial or (),
            begin_timeout=timeout,
            nics=nics or (),
            in_turn=in_turn,
        )
    except (TransferError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    done = False
    try:
        with pusher, nullcontext() if timeout is None else _within(timeout, pusher):
            try:
                pusher.connect()
            except (PushError, ValueError) as error:
                typer.echo(str(error), err=True)
                raise typer.Exit(ExitStatus.USAGE) from None
            yield pusher
            done = True
    except TransferError as error:
        if not done:
            raise
        # The error is from closing. The engines have the pushed weights, and this process ends.
        typer.echo(str(error), err=True)
