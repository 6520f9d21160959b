"""A serving prefill and decode engine whose weights change one after the other, and at once.

No token is computed from the KV of one version with the weights of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deployment import (
    DATA_HOST,
    SMALL,
    TIMEOUTS,
    Client,
    assert_quiescent,
    decode_params,
    engine_settings,
    prefill_params,
    prompt,
    wait_logged,
    wait_until,
)
from typer.testing import CliRunner

from kv_connector.cli.main import app
from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster, Role, engine_states
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama

pytestmark = pytest.mark.anyio

# Prompts of several chunks at P, so that an update comes in the middle of some.
PROMPTS = [prompt(f"fleet {number}", tokens) for number, tokens in enumerate((40, 300, 700))]
TOKENS = 16
# Requests at a time: more than P computes at once.
CLIENTS = 4


@dataclass(frozen=True)
class Fleet:
    prefill: EngineProcess
    decode: EngineProcess
    takes: dict[str, str]  # address where each receives weights
    router: str
    registration: str  # where engines register with the router
    router_log: Path
    checkpoints: dict[str, Path]
    versions: Iterator[int] = field(default_factory=itertools.count)

    async def push(self, name: str, *engines: EngineProcess, problem: str = "") -> None:
        """Pushes, each time as a new version. ``problem``: why it is not served."""
        options = [word for engine in engines for word in ("--engine", self.takes[engine.name])]
        version = f"{name}-{next(self.versions)}"
        words = ["weights", "push", str(self.checkpoints[name]), *options, "--version", version]
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert done.exit_code == bool(problem), done.output
        assert problem in done.output

    async def push_by_router(self, name: str) -> str:
        """Pushes to the engines that the router lists. Returns what `weights status` then reports of them."""
        by_router = ["--router", self.registration]
        words = ["weights", "push", str(self.checkpoints[name]), *by_router]
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert done.exit_code == 0, done.output
        return (await asyncio.to_thread(CliRunner().invoke, app, ["weights", "status", *by_router])).output

    async def seed(self, seeder: EngineProcess, joiner: EngineProcess) -> None:
        words = ["weights", "seed", "--from", self.takes[seeder.name], "--engine", self.takes[joiner.name]]
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert done.exit_code == 0, done.output

    async def verify(self, name: str) -> str:
        """Returns the report of `weights verify` on both engines' copies."""
        options = [word for address in self.takes.values() for word in ("--engine", address)]
        words = ["weights", "verify", str(self.checkpoints[name]), *options]
        return (await asyncio.to_thread(CliRunner().invoke, app, words)).output

    async def alone(self, client: Client) -> list[list[int]]:
        """Returns the decode engine's answers by itself."""
        return [await client.complete(self.decode.url, one, TOKENS) for one in PROMPTS]


@pytest.fixture(scope="module")
def fleet(interpreter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    checkpoints = {
        name: make_llama(directory / name, layers=2, seed=seed, **SMALL) for seed, name in enumerate("ab")
    }
    settings = engine_settings("--weight-transfer-config", '{"backend": "write_imm"}')
    (registration,) = free_ports(1)
    with LocalCluster(directory / "logs", checkpoints["a"], settings) as cluster:
        cluster.interpreter = interpreter
        engines, takes = [], {}
        roles: tuple[tuple[str, Role], ...] = (("prefill", "kv_producer"), ("decode", "kv_consumer"))
        for name, role in roles:
            (port,) = free_ports(1)
            takes[name] = f"{HOST}:{port}"
            environment = {
                **settings.environment,
                "KV_CONNECTOR_WEIGHTS": json.dumps({"control_host": HOST, "control_port": port}),
                "VLLM_PLUGINS": "kv_connector",
            }
            chunks = dataclasses.replace(settings, environment=environment, max_batched_tokens=200)
            engines.append(
                cluster.start_engine(
                    name,
                    role=role,
                    routers=[f"{HOST}:{registration}"],
                    extra={"providers": ["host"], "data_host": DATA_HOST, "timeouts": TIMEOUTS},
                    settings=chunks,
                )
            )
        router = cluster.start_router("router", registration=registration)
        cluster.wait_ready()
        cluster.wait_joined(router, *engines)
        prefill, decode = engines
        registered = f"{HOST}:{registration}"
        yield Fleet(
            prefill, decode, takes, router, registered, directory / "logs" / "router.log", checkpoints
        )


class Load:
    """Requests one after another, by several clients, until they are stopped."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._url = url
        self._stopping = False
        self.answers: list[tuple[int, list[int]]] = []  # (number of the prompt, tokens)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._ask(number))
            yield
            self._stopping = True

    async def more(self, answers: int) -> None:
        """Waits until this many more answers have arrived."""
        wanted = len(self.answers) + answers

        async def missing() -> str:
            return "" if len(self.answers) >= wanted else f"{wanted} answers, not {len(self.answers)}"

        await wait_until(missing)

    async def _ask(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._stopping:
                return
            asked = turn % len(PROMPTS)
            # A stream's first token comes from the prefill engine.
            ask = self._client.stream if number % 2 else self._client.complete
            said = await ask(self._url, PROMPTS[asked], TOKENS)
            self.answers.append((asked, said))


async def assert_of_one_version_each(
    client: Client, fleet: Fleet, answers: Sequence[tuple[int, list[int]]], old: list[list[int]]
) -> int:
    """Checks answers around an update of both engines. ``old``: the answers before it.

    Each answer is of one version, or begins with the old version's tokens and continues with the new
    version's answer to them. The first token of a stream may be of either version, because it comes from the
    prefill engine. Returns the number of answers that are not of a single version.
    """
    new = await fleet.alone(client)
    assert all(one != other for one, other in zip(old, new, strict=True))
    straddling = [(asked, said) for asked, said in answers if said not in (old[asked], new[asked])]
    if straddling:
        await fleet.push("a", fleet.prefill)
    for asked, said in straddling:
        assert said[0] in (old[asked][0], new[asked][0])
        first = await client.complete(fleet.prefill.url, [*PROMPTS[asked], said[0]], TOKENS - 1)
        same = next((at for at in range(1, TOKENS) if said[at] != first[at - 1]), TOKENS)
        if same < TOKENS:
            behind = await client.complete(fleet.decode.url, [*PROMPTS[asked], *said[:same]], TOKENS - same)
            assert said[same:] == behind, (said, first, old[asked], new[asked])
    return len(straddling)


@pytest.mark.parametrize("order", ["prefill decode", "decode prefill", "together"])
async def test_a_fleet_is_updated_under_requests(fleet: Fleet, client: Client, order: str) -> None:
    await fleet.push("a", fleet.prefill, fleet.decode)
    old = await fleet.alone(client)
    load = Load(client, fleet.router)
    engines = {"prefill": fleet.prefill, "decode": fleet.decode}
    async with load.running():
        await load.more(len(PROMPTS))
        if order == "together":
            await fleet.push("b", *engines.values())
        else:
            for name in order.split():
                await fleet.push("b", engines[name])
                await load.more(CLIENTS)
    straddling = await assert_of_one_version_each(client, fleet, load.answers, old)
    print(f"{order}: {straddling} of {len(load.answers)} answers straddle")
    if order != "together":
        counted = await client.get(f"{fleet.router}/metrics")
        assert 'local_prefills_total{reason="other_weights"}' in counted, "the router paired other weights"
    await assert_quiescent(client, *engines.values())


async def test_router_lists_the_engines_that_a_push_updates(fleet: Fleet, client: Client) -> None:
    said = await fleet.push_by_router("b")
    assert all(f"{address}: serves b" in said for address in fleet.takes.values()), said
    new = await fleet.alone(client)
    said = await fleet.push_by_router("a")
    assert all(f"{address}: serves a" in said for address in fleet.takes.values()), said
    assert all(one != other for one, other in zip(new, await fleet.alone(client), strict=True))


async def test_a_stream_that_waits_at_decode_keeps_its_first_token(fleet: Fleet, client: Client) -> None:
    """The client has the old version's token when both engines are updated."""
    await fleet.push("a", fleet.prefill, fleet.decode)
    old = await fleet.alone(client)
    in_hand = await client.load(fleet.decode)
    await client.post(f"{fleet.decode.url}/pause?mode=keep&clear_cache=false")
    begun = asyncio.Event()
    asking = asyncio.create_task(client.stream(fleet.router, PROMPTS[1], TOKENS, lambda _: begun.set()))
    await begun.wait()

    async def missing() -> str:
        return "" if await client.load(fleet.decode) > in_hand else "the request is not at D"

    await wait_until(missing)
    await fleet.push("b", fleet.prefill, fleet.decode)
    said = await asking
    assert said[0] == old[1][0]
    assert await assert_of_one_version_each(client, fleet, [(1, said)], old) == 1
    await assert_quiescent(client, fleet.prefill, fleet.decode)


async def test_pages_of_other_weights_are_not_used_with_any_router(fleet: Fleet, client: Client) -> None:
    """The requests are those of a router that does not know versions. D computes the prompt itself, although
    its policy is to fail requests whose pages are not loaded."""
    for number, (first, second) in enumerate(((fleet.prefill, fleet.decode), (fleet.decode, fleet.prefill))):
        await fleet.push("a", fleet.prefill, fleet.decode)
        await fleet.push("b", first)
        alone = await fleet.alone(client)
        await assert_quiescent(client, fleet.prefill, fleet.decode)
        for asked, one in enumerate(PROMPTS):
            transfer = f"other weights {number} {asked}"
            logged = len(fleet.decode.log.read_bytes())
            said, _ = await asyncio.gather(
                client.complete(
                    fleet.decode.url, one, TOKENS, kv_transfer_params=decode_params(transfer, fleet.prefill)
                ),
                client.complete(fleet.prefill.url, one, 1, kv_transfer_params=prefill_params(transfer)),
            )
            assert said == alone[asked]
            await wait_logged(
                fleet.decode,
                f"transfer {transfer} of request .* from .*: stale: .*weights: prefill engine has",
                logged,
            )
        await fleet.push("b", second)
        await assert_quiescent(client, fleet.prefill, fleet.decode)


async def counted(client: Client, fleet: Fleet) -> list[str]:
    """Returns the prompts that the router did not pair, by reason."""
    lines = (await client.get(f"{fleet.router}/metrics")).splitlines()
    return [line for line in lines if line.startswith("kv_connector_router_local_prefills_total{")]


async def test_a_torn_engine_is_left_out_until_it_is_mended(fleet: Fleet, client: Client) -> None:
    prefill = fleet.prefill

    async def is_told(state: str) -> None:
        async def missing() -> str:
            found = await asyncio.to_thread(engine_states, fleet.router)
            return "" if found[prefill.url] == state else f"{prefill.url} is {state}, not {found}"

        await wait_until(missing)

    await client.probe(prefill, "probe_break_weights", "broken by a test")
    await fleet.push("a", prefill, problem="broken by a test")
    await is_told("torn")
    log = fleet.router_log.read_text()
    assert "TORN: " in log
    assert "broken by a test" in log
    assert "kv_connector_weights_torn 1.0" in await client.get(f"{prefill.url}/metrics")
    await client.probe(prefill, "probe_break_weights", "")
    await fleet.push("a", prefill)
    await fleet.seed(prefill, fleet.decode)
    await is_told("ready")
    assert "kv_connector_weights_torn 0.0" in await client.get(f"{prefill.url}/metrics")
    alone = await fleet.alone(client)
    unpaired = await counted(client, fleet)
    assert [await client.complete(fleet.router, one, TOKENS) for one in PROMPTS] == alone
    assert await counted(client, fleet) == unpaired, "who was seeded is not paired with who has the same"
    assert (await fleet.verify("a")).count("parameters are the checkpoint's") == 2
    assert (await fleet.verify("b")).count("parameters differ: ") == 2
