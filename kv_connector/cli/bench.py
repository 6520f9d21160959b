"""kv-connector bench: measures our transfers beside the machine's own limits and other projects."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.common.plot import Plot, check_plot
from kv_connector.cli.conversations import conversations

if TYPE_CHECKING:
    from kv_connector.bench.lane import Lane

app = typer.Typer(invoke_without_command=True)
app.command("conversations")(conversations)

_Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="File to which conditions and results are appended as JSON lines. -: standard output; "
        "tables then go to standard error.",
    ),
]


@app.callback()
def transfers(
    context: typer.Context,
    contestants: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Names or patterns of contestants, comma separated, such as 'host*,tcp,socket'.",
        ),
    ] = "*",
    cases: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Names or patterns of cases, comma separated, such as '*64K,latency'."
        ),
    ] = "*",
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Rounds; each contestant is measured once a round, and tables show medians."
        ),
    ] = 5,
    pin: Annotated[
        bool, typer.Option("--pin", help="Pin the initiator to the first core and the target to the second.")
    ] = False,
    json: _Json = None,
    plot: Plot = None,
) -> None:
    """Moves the same pages through each contestant, between two processes of this machine.

    Other projects are included if they are installed (the extra `bench`).
    """
    if context.invoked_subcommand is not None:
        return
    from kv_connector.bench.contestants import CONTESTANTS
    from kv_connector.bench.measurements.transfers import Transfers
    from kv_connector.bench.tables import make_console
    from kv_connector.bench.workloads import CASES

    check_plot(plot)
    names = _choose(contestants, [contestant.name for contestant in CONTESTANTS])
    measurement = Transfers(
        chosen=tuple(contestant for contestant in CONTESTANTS if contestant.name in names),
        cases=_choose(cases, CASES),
        rounds=rounds,
        pin=pin,
        json=json,
        plot=plot,
    )
    _end(measurement.run(make_console(json)))


@app.command("pd")
def prefill_decode(
    deployments: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Names or patterns of deployments, comma separated, such as 'alone,ours'."
        ),
    ] = "*",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each deployment is measured once a round.")] = 3,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the model to serve. Default: a small random Llama."),
    ] = None,
    json: _Json = None,
    plot: Plot = None,
) -> None:
    """Measures time to first token and throughput of one vLLM engine and of prefill/decode pairs, on CPUs."""
    from kv_connector.bench.pd.deployments import DEPLOYMENTS
    from kv_connector.bench.pd.run import PdPlan, run
    from kv_connector.bench.tables import make_console
    from kv_connector.lab.process import leave_on_signals

    check_plot(plot)
    names = _choose(deployments, [deployment.name for deployment in DEPLOYMENTS])
    plan = PdPlan(
        deployments=tuple(deployment for deployment in DEPLOYMENTS if deployment.name in names),
        rounds=rounds,
        model=model,
        json=json,
        plot=plot,
    )
    with leave_on_signals():
        _end(run(plan, make_console(json)))


@app.command("faults")
def compare_faults(
    deployments: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Names or patterns of deployments, comma separated, such as 'ours,nixl'."
        ),
    ] = "*",
    faults: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Names or patterns of faults, comma separated, such as 'abort,kill-*'."
        ),
    ] = "*",
    json: _Json = None,
) -> None:
    """Compares prefill/decode pairs when clients leave and when an engine is killed and restarted.

    Each fault happens to a newly started pair, one after the other.
    """
    from kv_connector.bench.pd.faults import FAULTS, PAIRS, FaultPlan, run
    from kv_connector.bench.tables import make_console
    from kv_connector.lab.process import leave_on_signals

    pairs = _choose(deployments, [deployment.name for deployment in PAIRS])
    names = _choose(faults, [fault.name for fault in FAULTS])
    plan = FaultPlan(
        deployments=tuple(deployment for deployment in PAIRS if deployment.name in pairs),
        faults=tuple(fault for fault in FAULTS if fault.name in names),
        json=json,
    )
    with leave_on_signals():
        _end(run(plan, make_console(json)))


_Providers = Annotated[
    str,
    typer.Option(
        "--provider",
        metavar="NAMES",
        help="Lanes to measure, comma separated. Default: every lane that is usable here.",
    ),
]
_Devices = Annotated[
    str,
    typer.Option("--device", metavar="NAMES", help="NICs of the provider, comma separated, one domain each."),
]
_TargetDevices = Annotated[
    str,
    typer.Option(
        "--target-device",
        metavar="NAMES",
        help="NICs of the target side, comma separated. Default: those of --device.",
    ),
]


@app.command("writes")
def table_2(
    provider: _Providers = "",
    device: _Devices = "",
    target_device: _TargetDevices = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each lane is measured once a round.")] = 3,
    pin: Annotated[
        bool, typer.Option("--pin", help="Pin the initiator to the first core and the target to the second.")
    ] = False,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared", help="Use memfds as pools, which the host lane maps. Default: private memory."
        ),
    ] = False,
    json: _Json = None,
) -> None:
    """Measures the paper's Table 2: single writes of 64 KiB to 32 MiB, paged writes of 1 to 64 KiB."""
    from kv_connector.bench.measurements.writes import WriteMeasurement
    from kv_connector.bench.tables import make_console

    lanes = _lanes(provider, device, target_device, in_one_process=False)
    measurement = WriteMeasurement(lanes=lanes, rounds=rounds, pin=pin, shared=shared, json=json)
    _end(measurement.run(make_console(json)))


@app.command("groups")
def tables_8_and_9(
    provider: _Providers = "",
    device: _Devices = "",
    target_device: _TargetDevices = "",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Group sizes in peers, comma separated. Default: 8,16,32,64, and 1,3,7 with --experts.",
        ),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Scatters and barriers per group size.")] = 2000,
    experts: Annotated[
        bool,
        typer.Option(
            "--experts",
            help="Measure dispatch and combine of experts between nodes instead, with up to 7 peers.",
        ),
    ] = False,
    json: _Json = None,
) -> None:
    """Measures the paper's Tables 8 and 9: the steps of a scatter and of a barrier, by number of peers.

    With --experts: how soon the first packet of experts between nodes reaches the lane.
    """
    from kv_connector.bench.measurements.experts import MOST_PEERS, Experts
    from kv_connector.bench.measurements.groups import Groups
    from kv_connector.bench.tables import make_console

    if peers is None:
        peers = "1,3,7" if experts else "8,16,32,64"
    try:
        sizes = tuple(int(size) for size in peers.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"--peers: {peers!r} is not a list of numbers. Give numbers such as 8,16"
        ) from None
    if min(sizes) < 1:
        raise typer.BadParameter("--peers: a group has at least 1 peer")
    if experts and max(sizes) > MOST_PEERS:
        raise typer.BadParameter(
            f"--peers: {max(sizes)} with --experts. Give up to {MOST_PEERS} peers, such as 1,3,7"
        )
    lanes = _lanes(provider, device, target_device, in_one_process=True)
    if experts:
        sends = Experts(lanes=lanes, peers=sizes, iterations=iterations, json=json)
        _end(sends.run(make_console(json)))
    else:
        groups = Groups(lanes=lanes, peers=sizes, iterations=iterations, json=json)
        _end(groups.run(make_console(json)))


@app.command("peers")
def cost_of_peers(
    provider: _Providers = "",
    device: _Devices = "",
    target_device: _TargetDevices = "",
    peers: Annotated[int, typer.Option(min=1, help="Peers that each of the two engines adds.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each lane is measured once a round.")] = 3,
    json: _Json = None,
) -> None:
    """Measures the cost of peers: seconds to connect them, memory and file descriptors of each."""
    from kv_connector.bench.measurements.peers import PeerCosts
    from kv_connector.bench.tables import make_console

    lanes = _lanes(provider, device, target_device, in_one_process=False)
    measurement = PeerCosts(lanes=lanes, peers=peers, rounds=rounds, json=json)
    _end(measurement.run(make_console(json)))


@app.command("meeting")
def meeting_of_engines(
    provider: Annotated[str, typer.Option(metavar="NAME", help="Lane between the engines.")] = "host",
    prefill: Annotated[int, typer.Option(min=1, help="Ranks of the prefill engine.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Ranks of the decode engine.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with new engines.")] = 5,
    json: _Json = None,
) -> None:
    """Connects engines of many ranks: seconds from the first request until every rank has its page."""
    from kv_connector.bench.measurements.connecting import Meetings
    from kv_connector.bench.tables import make_console

    (lane,) = _lanes(provider, "", "", in_one_process=False)
    measurement = Meetings(provider=lane.provider, prefill=prefill, decode=decode, rounds=rounds, json=json)
    _end(measurement.run(make_console(json)))


@app.command("registration")
def registering_beside_writes(
    provider: _Providers = "",
    device: _Devices = "",
    target_device: _TargetDevices = "",
    mib: Annotated[int, typer.Option(min=1, help="Registered memory in MiB.")] = 4096,
    iterations: Annotated[
        int, typer.Option(min=100, max=30_000, help="Round trips, with one counter each.")
    ] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with and without registrations.")] = 5,
    json: _Json = None,
) -> None:
    """Measures the latency of a 4 KiB write while a thread registers and deregisters memory."""
    from kv_connector.bench.measurements.memory_registration import Registration
    from kv_connector.bench.tables import make_console

    lanes = _lanes(provider, device, target_device, in_one_process=True)
    measurement = Registration(
        lanes=lanes, registered_bytes=mib << 20, iterations=iterations, repeats=rounds, json=json
    )
    _end(measurement.run(make_console(json)))


@app.command("router")
def share_of_the_router(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each way is measured once a round.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each way in each round.")] = 1000,
    json: _Json = None,
) -> None:
    """Measures the router's share of a time to first token, also with open status pages."""
    from kv_connector.bench.router import RouterPlan, run
    from kv_connector.bench.tables import make_console
    from kv_connector.lab.process import leave_on_signals

    with leave_on_signals():
        _end(run(RouterPlan(rounds=rounds, requests=requests, json=json), make_console(json)))


@app.command("moe")
def exchange_of_experts(
    ranks: Annotated[
        int,
        typer.Option(
            min=0, max=8, help="Ranks, one per GPU. 0: all GPUs, or without GPUs 2 ranks over host memory."
        ),
    ] = 0,
    hidden: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Elements per token, comma separated.")
    ] = "7168,4096,2048",
    tokens: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Tokens per rank, comma separated.")
    ] = "8,32,128",
    top_k: Annotated[int, typer.Option(min=1, max=32, help="Experts per token.")] = 8,
    experts: Annotated[int, typer.Option(min=1, max=1 << 16, help="Experts of all ranks together.")] = 256,
    iterations: Annotated[
        int, typer.Option(min=1, help="Repetitions of each shape, in each of two turns.")
    ] = 100,
    json: _Json = None,
) -> None:
    """Measures dispatch and combine of experts beside torch.distributed.

    Collectives use NCCL between GPUs, and gloo on host memory. Needs torch.
    """
    from kv_connector.bench.moe import ExchangeShape, ExpertsPlan, ExpertsWorkload, run
    from kv_connector.bench.tables import make_console
    from kv_connector.moe.gpus import visible_gpus

    if top_k > experts:
        raise typer.BadParameter(f"--top-k: {top_k} of {experts} experts. Set a number up to --experts.")
    found = visible_gpus()
    gpus = found.count if found is not None else 0
    if gpus and ranks > gpus:
        raise typer.BadParameter(f"--ranks: each of {ranks} ranks needs a GPU, and {gpus} are visible")
    shapes = tuple(
        ExchangeShape(size, count)
        for size in _numbers("--hidden", hidden, 8)
        for count in _numbers("--tokens", tokens, 1)
    )
    workload = ExpertsWorkload(
        ranks or gpus or 2, shapes, top_k=top_k, experts=experts, iterations=iterations
    )
    _end(run(ExpertsPlan(workload, gpu=gpus > 0, json=json), make_console(json)))


@app.command("micro")
def hot_loops(
    iterations: Annotated[int, typer.Option(min=1000, help="Calls of each loop.")] = 100_000,
    json: _Json = None,
) -> None:
    """Measures the transfer engine's hot loops over sim. Fails if an aim is missed."""
    from kv_connector.bench.measurements.micro import HotLoops
    from kv_connector.bench.tables import make_console

    _end(HotLoops(iterations=iterations, json=json).run(make_console(json)))


def _end(good: bool) -> None:
    """Ends a command by the result of its measurement."""
    if not good:
        raise typer.Exit(ExitStatus.FAILURE)


def _lanes(provider: str, device: str, target_device: str, *, in_one_process: bool) -> "Sequence[Lane]":
    from kv_connector.bench.lane import UnknownLane, choose_lanes

    try:
        return choose_lanes(
            _split(provider), _split(device), _split(target_device), in_one_process=in_one_process
        )
    except UnknownLane as error:
        raise typer.BadParameter(str(error)) from None


def _numbers(option: str, words: str, unit: int) -> tuple[int, ...]:
    """Parses comma separated multiples of ``unit``."""
    try:
        numbers = tuple(int(word) for word in _split(words))
    except ValueError:
        raise typer.BadParameter(
            f"{option}: {words!r} is not a list of numbers. Give numbers such as 8,16"
        ) from None
    if not numbers or any(number < 1 or number % unit for number in numbers):
        raise typer.BadParameter(f"{option}: every number must be a multiple of {unit}, at least {unit}")
    return numbers


def _split(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def _choose(patterns: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the `names` that match one of the comma separated patterns, in their own order."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise typer.BadParameter(f"{pattern!r} matches none of: {', '.join(names)}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted))
