"""New weights for engines that serve: their tokens are those of an engine that was started with them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import own_engine
import pytest
import safetensors.torch
from deployment import SMALL, Client, engine_settings, prompt, wait_until
from suite_numbers import whole_of
from typer.testing import CliRunner
from weight_trainer import FORKSERVER, TrainedModel, Trainer, in_checkpoint, main_until_killed

from kv_connector.cli.main import app
from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster, engine_environment
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import Process, stop
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import CheckpointSource
from kv_connector.weights.trainer.joining import workers_of
from kv_connector.weights.trainer.writer import Target
from kv_connector.weights.update import PushError

pytestmark = pytest.mark.anyio

# Parts that take minutes run in make test-weights.
ALL = "KVC_WEIGHT_FAULTS" in os.environ
PROMPTS = list(enumerate((1, 7, 31, 32, 33, 100, 400, 1500)))
# Lengths around blocks of 32 and chunks of 320, requested once each.
MORE_PROMPTS = [
    *PROMPTS,
    *enumerate((2, 15, 63, 64, 65, 127, 129, 200, 319, 320, 321, 1000) if ALL else (), 8),
]
TOKENS = 16
ENDLESS = 1900  # tokens: more than arrive during an update
# Seconds. An engine that gets no CPU time on a busy machine must not count as dead. A killed one closes its
# sockets.
PATIENT = {"suspect": 15.0, "dead": 30.0}
# Number of kills of a trainer, each after more of its writes.
POINTS = whole_of("KVC_WEIGHT_FAULTS", 2)
# (ranks, replicas of each shard). HSDP's ranks have rows as FSDP2's do. Two ranks have each row, and share
# the writes.
MESHES = ((2, 1), (4, 1), (4, 2)) if ALL else ((4, 2),)
# Each has other ranks, lanes and another mode.
ENGINES = ((1, ("host", "tcp"), "shadow"), (2, ("tcp",), "streaming"))
# Engines to which a killed trainer writes.
KILLED = ((0,), (1,), (0, 1)) if ALL else ((0, 1),)


@dataclass(frozen=True)
class Site:
    engines: list[EngineProcess]  # of one rank and of two, started with "a"
    takes: list[str]  # addresses where they receive weights
    oracle: EngineProcess  # started with "b"
    checkpoints: Mapping[str, Path]
    cluster: LocalCluster

    def push(self, name: str, *more: str, to: Sequence[str] = (), by: str = "push") -> str:
        """Pushes with the command, to all engines by default. Returns its output."""
        options = [word for address in to or self.takes for word in ("--engine", address)]
        done = CliRunner().invoke(app, ["weights", by, str(self.checkpoints[name]), *options, *more])
        assert done.exit_code == 0, done.output
        return done.output

    def seed(self, seeder: str, joiner: str) -> str:
        done = CliRunner().invoke(app, ["weights", "seed", "--from", seeder, "--engine", joiner])
        assert done.exit_code == 0, done.output
        return done.output


def start(
    cluster: LocalCluster, name: str, ranks: int, arguments: Sequence[str] = (), **of_weights: object
) -> tuple[EngineProcess, str]:
    """Starts an engine. Returns it with the address where it receives weights."""
    # Port of the controller. The workers' ports follow.
    (port,) = free_ports(1)
    given = {"control_host": HOST, "control_port": port, **of_weights}
    words = ("--weight-transfer-config", '{"backend": "write_imm"}', "-tp", str(ranks), *arguments)
    environment = {
        "KV_CONNECTOR_WEIGHTS": json.dumps(given),
        "VLLM_PLUGINS": "kv_connector",
        "VLLM_SERVER_DEV_MODE": "1",  # for vLLM's own client only
    }
    settings = dataclasses.replace(cluster.settings, arguments=words, environment=environment)
    return cluster.start_engine(name, settings=settings), f"{HOST}:{port}"


@contextmanager
def serving(
    directory: Path,
    interpreter: tuple[str, ...],
    checkpoints: Mapping[str, Path],
    kinds: Sequence[tuple[int, tuple[str, ...], str]] = ENGINES,
) -> Iterator[Site]:
    with LocalCluster(directory / "logs", checkpoints["a"], engine_settings()) as cluster:
        cluster.interpreter = interpreter
        engines, takes = [], []
        for ranks, providers, mode in kinds:
            engine, take = start(
                cluster,
                f"ranks{ranks}",
                ranks,
                # One event per token of eight streams would leave a trainer beside their reader no CPU time.
                ("--stream-interval", str(TOKENS)),
                providers=providers,
                mode=mode,
                timeouts=PATIENT,
            )
            engines.append(engine)
            takes.append(take)
        cluster.model = checkpoints["b"]
        oracle = cluster.start_engine("oracle")
        cluster.wait_ready()
        yield Site(engines, takes, oracle, checkpoints, cluster)


@pytest.fixture(scope="module")
def site(interpreter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("weights")
    checkpoints = {
        name: make_llama(directory / name, layers=3, seed=seed, **SMALL) for seed, name in enumerate("ab")
    }
    checkpoints["c"] = with_a_slice_of_another(directory / "c", checkpoints["b"], checkpoints["a"])
    with serving(directory, interpreter, checkpoints) as site:
        yield site


def with_a_slice_of_another(directory: Path, one: Path, other: Path) -> Path:
    """Writes checkpoint ``one`` with half the columns of one matrix from ``other``, which the second of two
    ranks has."""
    name = "model.layers.1.self_attn.o_proj.weight"
    shutil.copytree(one, directory)
    weights, others = dict(in_checkpoint(one)), dict(in_checkpoint(other))
    half = weights[name].shape[1] // 2
    weights[name][:, half:] = others[name][:, half:]
    safetensors.torch.save_file(weights, directory / "model.safetensors")
    return directory


async def answers(
    client: Client, engine: EngineProcess, prompts: Sequence[tuple[int, int]] = PROMPTS
) -> list[list[int]]:
    return await asyncio.gather(
        *(client.complete(engine.url, prompt(number, tokens), TOKENS) for number, tokens in prompts)
    )


async def all_answers(
    client: Client, engines: Sequence[EngineProcess], prompts: Sequence[tuple[int, int]] = PROMPTS
) -> list[list[list[int]]]:
    return [await answers(client, engine, prompts) for engine in engines]


async def test_pushed_weights_are_served(site: Site, client: Client) -> None:
    """Weights are pushed back and forth with the commands. Prompts cached under old weights are not used."""
    b = await answers(client, site.oracle, MORE_PROMPTS)
    a, same = await all_answers(client, site.engines, MORE_PROMPTS)
    assert a == same
    assert all(before != after for before, after in zip(a, b, strict=True))
    said = await asyncio.to_thread(site.push, "b")
    assert "version b is served" in said
    assert await all_answers(client, site.engines, MORE_PROMPTS) == [b, b]
    by = partial(site.push, "a", "--version", "back", "--rounds", "1", "--json", by="bench")
    measured = json.loads(await asyncio.to_thread(by))
    assert await all_answers(client, site.engines, MORE_PROMPTS) == [a, a]
    (counted,) = measured["rounds"]
    assert 0 < counted["landed"] <= counted["applied"]
    assert counted["paused"].keys() == set(site.takes)
    assert all(0 < pause < counted["applied"] for pause in counted["paused"].values())
    assert measured["bytes"] > 0
    options = [word for address in site.takes for word in ("--engine", address)]
    told = await asyncio.to_thread(CliRunner().invoke, app, ["weights", "status", *options])
    assert told.exit_code == 0
    assert told.output.count("serves back") == len(ENGINES)


@pytest.mark.parametrize(("ranks", "replicas"), MESHES)
async def test_shards_of_a_trainer_are_served(
    site: Site, client: Client, tmp_path: Path, ranks: int, replicas: int
) -> None:
    await asyncio.to_thread(site.push, "a", "--version", f"before {ranks}/{replicas}")
    b = await answers(client, site.oracle, MORE_PROMPTS)
    before = await answers(client, site.engines[0], MORE_PROMPTS)
    assert all(old != new for old, new in zip(before, b, strict=True))
    checkpoint = site.checkpoints["b"]
    with Trainer(tmp_path, site.takes, checkpoint, ranks=ranks, replicas=replicas, applies=True) as trainer:
        await asyncio.to_thread(trainer.all_say, "connected")
        trainer.say("step-1")
        await asyncio.to_thread(trainer.all_say, "applied")
        assert await all_answers(client, site.engines, MORE_PROMPTS) == [b, b]


async def test_a_slice_that_one_rank_has_is_seen_in_the_tokens(site: Site, client: Client) -> None:
    """The test proves that equal tokens mean that all of the weights are equal."""
    await asyncio.to_thread(site.push, "c")
    c, same = await all_answers(client, site.engines, MORE_PROMPTS)
    assert c == same
    b = await answers(client, site.oracle, MORE_PROMPTS)
    assert all(one != other for one, other in zip(b, c, strict=True))


@pytest.mark.parametrize("number", range(len(ENGINES)))
async def test_streams_go_on_over_an_update(number: int, site: Site, client: Client) -> None:
    """Tokens before the update are of the old weights. The following ones are the new weights'
    continuation."""
    engine, take = site.engines[number], site.takes[number]
    await asyncio.to_thread(site.push, "a", "--version", "a2", to=[take])
    ids = prompt(3, 50)
    said: list[list[int]] = [[] for _ in range(8)]

    async def more(tokens: int) -> None:
        """Waits until each stream has this many more tokens."""
        wanted = [len(one) + tokens for one in said]

        async def missing() -> str:
            short = [len(one) for one, least in zip(said, wanted, strict=True) if len(one) < least]
            return f"{wanted} tokens of each stream, not {short}" if short else ""

        await wait_until(missing)
        assert not any(stream.done() for stream in streams)

    with WeightPusher(
        CheckpointSource(site.checkpoints["b"]),
        [take],
        providers=("host", "tcp"),
        timeouts=Timeouts(**PATIENT),
    ) as pusher:
        await asyncio.to_thread(pusher.connect)
        streams = [asyncio.create_task(client.stream(engine.url, ids, ENDLESS, one.extend)) for one in said]
        await more(1)
        update = await asyncio.to_thread(pusher.push, "b2")
        await asyncio.to_thread(update.wait)
        await more(3 * TOKENS)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    await asyncio.to_thread(site.push, "a", "--version", "a3", to=[take])
    old = await client.complete(engine.url, ids, max(map(len, said)))
    for one in said:
        same = next(at for at, (token, other) in enumerate(zip(one, old, strict=False)) if token != other)
        assert same > 0
        new = await client.complete(site.oracle.url, [*ids, *one[:same]], TOKENS)
        assert one[same : same + TOKENS] == new


async def test_trainer_that_gives_up_pauses_only_an_overwritten_engine(site: Site, client: Client) -> None:
    """An engine in shadow mode loses nothing. An engine whose weights were overwritten stays paused until it
    has a whole version."""
    await asyncio.to_thread(site.push, "a", "--version", "a4")
    a = await answers(client, site.engines[0])
    pusher = WeightPusher(CheckpointSource(site.checkpoints["b"]), site.takes, providers=("host", "tcp"))
    with pusher:
        await asyncio.to_thread(pusher.connect)
        write = pusher._writer.write
        left = {worker.peer: len(worker.rounds) - 1 for worker in workers_of(pusher._engines)}

        def give_up(target: Target) -> None:
            """Gives up with one round left."""
            if left[target.peer]:
                left[target.peer] -= 1
                write(target)
            else:
                pusher._writer.failures[target.peer] = "it gives up"

        pusher._writer.write = give_up  # type: ignore[method-assign]
        update = await asyncio.to_thread(pusher.push, "b4")
        with pytest.raises(PushError) as failed:
            await asyncio.to_thread(update.wait, "applied", 1)
        assert str(failed.value).count("it gives up") == len(ENGINES)
        # Of a trainer that is gone by then, the engine may only know that its connection is closed.
        asked = ["weights", "status", "--engine", site.takes[1]]
        async with asyncio.timeout(60):
            while (
                "stays paused" not in (told := await asyncio.to_thread(CliRunner().invoke, app, asked)).output
            ):
                pass  # the engine receives it later than the trainer
    assert await answers(client, site.engines[0]) == a
    assert told.exit_code == 1
    assert "it gives up" in told.output
    # The engine in shadow mode repairs the other.
    await asyncio.to_thread(site.push, "b", "--version", "b5", to=site.takes[:1])
    assert "version b5 is served" in await asyncio.to_thread(site.seed, *site.takes)
    b = await answers(client, site.oracle)
    assert await all_answers(client, site.engines) == [b, b]


async def test_starting_engine_is_seeded_before_it_gets_requests_and_seeds_others(
    site: Site, client: Client
) -> None:
    """An engine of one rank seeds one of two, and the reverse. The first engine that the joiner requests has
    no copy."""
    few = PROMPTS[1:4]
    await asyncio.to_thread(site.push, "a", "--version", "a6", to=site.takes[:1])
    joiner, take = start(
        site.cluster, "joiner", 2, ("--load-format", "dummy"), providers=("tcp",), seed_from=site.takes[::-1]
    )
    try:
        await asyncio.to_thread(site.cluster.wait_ready)
        a = await answers(client, site.engines[0], few)
        assert await answers(client, joiner, few) == a
        await asyncio.to_thread(site.push, "b", "--version", "b6", to=[take])
        assert "version b6 is served" in await asyncio.to_thread(site.seed, take, site.takes[0])
        b = await answers(client, site.oracle, few)
        assert a != b
        assert [await answers(client, one, few) for one in (joiner, site.engines[0])] == [b, b]
    finally:
        joiner.kill()


@pytest.mark.parametrize("numbers", KILLED)
async def test_a_trainer_that_is_killed_at_any_point_leaves_no_mixed_weights(
    numbers: tuple[int, ...], site: Site, client: Client
) -> None:
    """Each engine has one whole version, and again after the next push. The engine in shadow mode serves in
    the meantime."""
    engines, takes = [site.engines[n] for n in numbers], [site.takes[n] for n in numbers]
    modes = [ENGINES[n][2] for n in numbers]
    await asyncio.to_thread(site.push, "a", "--version", "a5", to=takes)
    a, b = await answers(client, engines[0]), await answers(client, site.oracle)
    with WeightPusher(CheckpointSource(site.checkpoints["b"]), takes, providers=("host", "tcp")) as every:
        await asyncio.to_thread(every.connect)
        by_engine = [sum(1 for w in engine.workers for _ in w.sends) for engine in every._engines]
    writes = sum(by_engine)
    for point in range(POINTS):
        posted = writes * (2 * point + 1) // (2 * POINTS - 1)  # in the last round all writes
        version = f"killed-{posted}-{numbers}"
        trainer = FORKSERVER.Process(
            target=main_until_killed, args=(site.checkpoints["b"], version, takes, posted)
        )
        trainer.start()
        await asyncio.to_thread(trainer.join)
        assert trainer.exitcode == -signal.SIGKILL
        states = [await settled(take) for take in takes]
        for engine, mode, own, state in zip(engines, modes, by_engine, states, strict=True):
            assert not (state["served"] == version and posted < own), version
            if state["torn"]:
                assert mode == "streaming"
            else:
                assert await answers(client, engine) == (b if state["served"] == version else a), version
        await asyncio.to_thread(site.push, "a", "--version", f"a-{posted}-{numbers}", to=takes)
        assert await all_answers(client, engines) == [a] * len(engines)


async def settled(take: str) -> dict[str, Any]:
    """Returns the engine's state once it has no trainer and has finished all work that the trainer left."""
    async with asyncio.timeout(60):
        while True:
            told = await asyncio.to_thread(
                CliRunner().invoke, app, ["weights", "status", "--json", "--engine", take]
            )
            (state,) = json.loads(told.output).values()
            if "senders" in state and not state["senders"] and not state["landing"]:
                return dict(state)


async def test_vllms_own_trainer_drives_it(site: Site, client: Client) -> None:
    """vLLM's trainer uses the interface of its other backends, and the caller pauses."""
    from vllm.distributed.weight_transfer.base import ModuleSource, WeightSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from kv_connector.vllm.weights.trainer import WriteImmTrainerEngine, WriteImmTrainerInitInfo

    host, port = site.takes[0].split(":")
    info = WriteImmTrainerInitInfo([f"{host}:{int(port) + 1}"], rank=0, providers=("host",))
    engine = site.engines[0]
    sync = HTTPVLLMWeightSyncClient(engine.url)
    for name in ("a", "b"):
        source: WeightSource = ModuleSource(TrainedModel(in_checkpoint(site.checkpoints[name])))
        trainer = await asyncio.to_thread(
            WeightTransferTrainerFactory.trainer_init, info, client=sync, source=source
        )
        assert isinstance(trainer, WriteImmTrainerEngine)
        await client.post(f"{engine.url}/pause?mode=keep&clear_cache=true")
        await asyncio.to_thread(trainer.send_weights)
        await client.post(f"{engine.url}/resume")
        trainer.shutdown()
    assert await answers(client, engine) == await answers(client, site.oracle)
    with pytest.raises(
        TypeError, match="write_imm sends shards as they lie in memory, but object gives whole"
    ):
        WriteImmTrainerEngine.trainer_init(info, client=sync, source=object())


@pytest.mark.parametrize(
    ("kind", "clear_cache"),
    [("llm", True), ("async", True), ("async", False)] if ALL else [("llm", True)],
)
async def test_an_engine_of_a_program_takes_weights(
    site: Site, client: Client, tmp_path: Path, kind: str, clear_cache: bool
) -> None:
    """Programs that train run LLM or AsyncLLM themselves, without vLLM's API server.

    The cache may outlive the update. New requests, also those with the prompt of the running stream, get the
    tokens of an engine without a cache, and the stream goes on with its KV.
    """
    (port,) = free_ports(1)
    report, log = tmp_path / "report", tmp_path / "log"
    given: dict[str, Any] = {"control_host": HOST, "control_port": port}
    given |= {"providers": ["tcp"], "timeouts": PATIENT, "clear_cache": clear_cache}
    environment = engine_environment(site.cluster.settings) | {"KV_CONNECTOR_WEIGHTS": json.dumps(given)}
    command = [*site.cluster.interpreter, "-m", "own_engine", kind, str(site.checkpoints["a"]), str(report)]
    program = Process("own engine", command, environment=environment, log=log)

    async def told(number: int) -> dict[str, Any]:
        async def missing() -> str:
            lines = report.read_text().splitlines() if report.exists() else []
            assert len(lines) > number or program.running(), log.read_text()[-3000:]
            return "" if len(lines) > number else f"line {number} of the report: {log.read_text()[-3000:]}"

        await wait_until(missing, 300)
        found: dict[str, Any] = json.loads(report.read_text().splitlines()[number])
        return found

    try:
        before = (await told(0))["before"]
        await asyncio.to_thread(site.push, "b", to=[f"{HOST}:{port}"])
        after = await told(1)
    finally:
        stop([program])
    assert after["version"] == after["label"] == "b"
    assert after["after"] == await answers(client, site.oracle, own_engine.PROMPTS)
    assert all(old != new for old, new in zip(before, after["after"], strict=True))
    if kind == "llm":
        return
    # The stream went on over the update: its first tokens are the old weights'.
    said = after["said"]
    assert 0 < after["at"] < len(said) == own_engine.LONG
    await asyncio.to_thread(site.push, "a", "--version", f"a7 {clear_cache}", to=site.takes[:1])
    ids = prompt(*own_engine.STREAMED)
    old = await client.complete(site.engines[0].url, ids, len(said))
    same = next(at for at, (token, other) in enumerate(zip(said, old, strict=True)) if token != other)
    assert 0 < same <= after["at"]
    new = await client.complete(site.oracle.url, [*ids, *said[:same]], TOKENS)
    assert (said[same : same + TOKENS] == new) is clear_cache, "KV of the old weights gives other tokens"
