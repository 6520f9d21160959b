"""Two ranks on P and two on D, behind one API server each: every request reaches the ranks chosen for it."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from deployment import (
    PATIENCE_SECONDS,
    TIMEOUTS,
    Client,
    RefusedCall,
    completion_body,
    engine_settings,
    prompt,
    wait_until,
)

from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster, Role
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama, make_mixtral

RANKS = 2
REQUESTS = 200
AT_A_TIME = 8
TOKENS = 8
SMALL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}
MODELS = {"dense": make_llama, "moe": make_mixtral}


@dataclass(frozen=True)
class Site:
    plain: EngineProcess
    prefill: EngineProcess
    decode: EngineProcess
    routers: dict[str, str]


@pytest.fixture(params=MODELS, scope="module")
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, interpreter: tuple[str, ...]
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param](directory / "model", **SMALL)
    ranks = ("--data-parallel-size", str(RANKS), "--worker-extension-cls", "moe_on_cpu.Worker")
    settings = engine_settings(*ranks)
    concurrent, serial = free_ports(2)
    registrations = [f"{HOST}:{port}" for port in (concurrent, serial)]
    roles: tuple[tuple[str, Role], ...] = (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    with LocalCluster(directory, model, settings) as cluster:
        cluster.interpreter = interpreter
        prefill, decode = (
            cluster.start_engine(name, role=role, extra={"timeouts": TIMEOUTS}, routers=registrations)
            for name, role in roles
        )
        assert prefill.control_port is not None
        listed: list[Any] = [
            SimpleNamespace(url=prefill.url, endpoint=f"{prefill.url}@{HOST}:{prefill.control_port + rank}")
            for rank in range(RANKS)
        ]
        site = Site(
            plain=cluster.start_engine("plain", settings=engine_settings()),
            prefill=prefill,
            decode=decode,
            routers={
                "concurrent": cluster.start_router("router-concurrent", registration=concurrent),
                "serial": cluster.start_router("router-serial", registration=serial, dispatch="serial"),
                "listed": cluster.start_router("router-listed", prefill=listed, decode=[decode] * RANKS),
            },
        )
        cluster.wait_ready()
        yield site


def transfers(engine: EngineProcess, role: str) -> Counter[tuple[str, str]]:
    """Returns the ended transfers, by rank and outcome."""
    return Counter(
        {
            (labels["engine"], labels["outcome"]): int(count)
            for labels, count in engine.samples("kv_connector_transfers_total")
            if labels["role"] == role and count
        }
    )


async def all_ranks_ready(client: Client, router: str) -> str:
    try:
        health = json.loads(await client.get(f"{router}/health"))
    except RefusedCall as error:
        return str(error)
    states = [*health["prefill"].values(), *health["decode"].values()]
    ready = [state for state in states if state == "ready"]
    return "" if len(ready) == 2 * RANKS else f"all ranks are ready: {health}"


async def until_idle(engine: EngineProcess) -> None:
    """Waits until every rank is idle.

    An engine reports its state at the end of a step, so each poll makes each rank run one.
    """

    async def missing() -> str:
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as http:
            for rank in range(RANKS):
                url, body = f"{engine.url}/v1/completions", completion_body([1], 1)
                answer = await http.post(url, json=body, headers={"x-data-parallel-rank": str(rank)})
                answer.raise_for_status()
        names = ("live_prefill_requests", "live_decode_requests", "live_transfers", "transfers_under_way")
        busy = [s for name in names for s in engine.samples(f"kv_connector_{name}") if s[1]]
        return f"{engine.name} has nothing in hand: {busy}; see {engine.log}" if busy else ""

    await wait_until(missing)


@pytest.mark.anyio
@pytest.mark.parametrize("dispatch", ["concurrent", "serial", "listed"])
async def test_all_ranks_serve_and_the_tokens_are_one_engines(
    site: Site, client: Client, dispatch: str
) -> None:
    router = site.routers[dispatch]
    await wait_until(lambda: all_ranks_ready(client, router))
    sides = {"prefill": site.prefill, "decode": site.decode}
    before = {name: transfers(engine, name) for name, engine in sides.items()}
    turns = asyncio.Semaphore(AT_A_TIME)

    async def ask(number: int) -> None:
        tokens = prompt(f"{dispatch} {number}", 40 + number * 23 % 900)
        samples = {"n": 2, "temperature": 1.0, "top_k": 1} if number % 10 == 0 else {}
        async with turns:
            expected = await client.choices(site.plain.url, tokens, TOKENS, **samples)
            assert await client.choices(router, tokens, TOKENS, **samples) == expected, number

    await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    for name, engine in sides.items():
        await until_idle(engine)
        ended = transfers(engine, name) - before[name]
        assert sum(ended.values()) == REQUESTS, f"{name}: {ended}"
        for rank in range(RANKS):
            assert ended[str(rank), "completed"] >= REQUESTS // (2 * RANKS), f"{name}: {ended}"
        assert {outcome for _, outcome in ended} == {"completed"}, f"{name}: {ended}"
