"""Engines that join and leave a router over real sockets, as a client of the router sees them."""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
import zmq
from router_setup import (
    PATIENCE,
    FakeEngine,
    FedStream,
    Handler,
    answer_ok,
    client_of,
    metric,
    no_answer,
    nobody,
    refuse,
    serve,
    serve_engine,
    streaming,
    until_metric,
    within,
)
from scaling_simulation import Autoscaler
from starlette.requests import Request
from starlette.responses import Response
from typer.testing import CliRunner

from kv_connector.cli.main import app as command_line
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import (
    MOST_HITS,
    PAGE,
    Activity,
    ControllerAddress,
    ControllersAre,
    MembershipSockets,
    PromptCost,
    PromptHits,
    Register,
    WorkloadReport,
    decode,
    encode,
)
from kv_connector.control.registrar import Registrar
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import MalformedMessage, Role
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Members
from kv_connector.router.front.app import DONE, create_app
from kv_connector.router.settings import Objectives, RouterSettings
from kv_connector.weights.trainer import router_list
from kv_connector.weights.trainer.router_list import NoEngines, RouterList
from kv_connector.weights.wire.links import LinkError

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets heartbeats of 50 ms instead of a second."""
    monkeypatch.setattr("kv_connector.control.registrar.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("kv_connector.router.front.registry._TICK_S", 0.02)
    monkeypatch.setattr("kv_connector.router.front.registry._PROBE_S", 0.02)


# For routers that wait for silence: twenty heartbeats and more, as a busy machine may delay many of them.
QUICK = {"suspect": 1.0, "dead": 2.0}


class Cluster:
    """A router with which engines register, and the engines."""

    def __init__(self, stack: contextlib.AsyncExitStack, key: ClusterKey) -> None:
        self.key = key
        self.address = Address("127.0.0.1", free_ports(1)[0])
        self._stack = stack
        self._names = 0

    async def router(self, **settings: Any) -> httpx.AsyncClient:
        """Returns a client of a router that ends with the cluster."""
        return await self._stack.enter_async_context(self.running_router(**settings))

    @contextlib.asynccontextmanager
    async def running_router(self, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        chosen: dict[str, Any] = {
            "prefill": (),
            "decode": (),
            "registration": self.address,
            "key": self.key,
            "suspect": PATIENCE,
            "dead": PATIENCE,
        }
        async with (
            serve(create_app(RouterSettings(**(chosen | settings)))) as url,
            client_of(url) as client,
        ):
            yield client

    async def engine(
        self, role: Role, handler: Handler = answer_ok, load: WorkloadReport | None = None
    ) -> "Member":
        """Returns an engine that has registered."""
        engine = await self._stack.enter_async_context(serve_engine(handler))
        member = Member(self, role, engine, load=load)
        self._stack.callback(member.fall_silent)
        return member

    async def ranks(self, role: Role, handler: Handler = answer_ok) -> tuple["Member", "Member"]:
        """Returns two engines that have registered, behind one API server."""
        first = await self.engine(role, handler)
        second = Member(self, role, first.engine, rank=1)
        self._stack.callback(second.fall_silent)
        return first, second

    async def pair(self) -> tuple["Member", "Member"]:
        return await self.engine(Role.PREFILL), await self.engine(Role.DECODE)


class Member:
    """A fake engine with a registration."""

    _count = 0

    def __init__(
        self,
        cluster: Cluster,
        role: Role,
        engine: FakeEngine,
        rank: int = 0,
        load: WorkloadReport | None = None,
    ) -> None:
        self.engine = engine
        Member._count += 1
        name, port = f"engine-{Member._count}", 5600 + rank
        registration = Register(name, "1", role, engine.url, "127.0.0.1", port, rank=rank, load=load)
        self.registrar = Registrar(registration, [cluster.address], cluster.key)

    def leave(self) -> None:
        self.registrar.close()

    def fall_silent(self) -> None:
        """Stops its heartbeats, as if the process was stopped or killed."""
        self.registrar._routers.clear()
        self.registrar.close()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        yield Cluster(stack, ClusterKey.generate())


async def until_health(
    client: httpx.AsyncClient, condition: Callable[[dict[str, dict[str, str]]], bool]
) -> None:
    """Waits until /health of the router satisfies the condition."""
    async with asyncio.timeout(PATIENCE):
        while not condition((await client.get("/health")).json()):
            await asyncio.sleep(0.01)  # each query is a request: there is no event to wait for


async def until_nothing_is_asked(client: httpx.AsyncClient) -> None:
    """Waits until no engine has a request from the router."""
    async with asyncio.timeout(PATIENCE):
        while any(engine["outstanding"] for engine in (await client.get("/status.json")).json()["engines"]):
            await asyncio.sleep(0.01)  # each query is a request: there is no event to wait for


async def ask(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "x", **more})


# --- Joining and leaving


async def test_the_first_request_waits_for_the_engines_to_join(cluster: Cluster) -> None:
    client = await cluster.router()
    asking = asyncio.create_task(ask(client))
    p, d = await cluster.pair()
    assert (await asking).status_code == 200
    assert len(p.engine.bodies) == len(d.engine.bodies) == 1
    params = d.engine.bodies[0]["kv_transfer_params"]
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 5600)
    assert (await client.get("/health")).json() == {
        "status": "ready",
        "prefill": {p.engine.url: "ready"},
        "decode": {d.engine.url: "ready"},
    }
    assert await metric(client, 'kv_connector_router_engines{side="prefill",state="ready"}') == 1


@pytest.mark.parametrize("faulty", ["tick", "to_probe", "to_watch"])
async def test_internal_fault_does_not_end_the_routers_registration_loop(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, faulty: str
) -> None:
    sound = getattr(Members, faulty)
    failed: list[str] = []

    def fail_once(*arguments: Any) -> Any:
        if failed:
            return sound(*arguments)
        failed.append(faulty)
        raise RuntimeError("not expected")

    monkeypatch.setattr(Members, faulty, fail_once)
    client = await cluster.router()
    await cluster.pair()
    assert (await ask(client)).status_code == 200
    assert [record.exc_text for record in caplog.records if "goes on after an error" in record.message]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_request_without_engines_gets_the_reason(cluster: Cluster, side: str) -> None:
    client = await cluster.router(patience=0.05, require_prefill=side == "prefill")
    answer = await ask(client)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert f"no {side} engine takes requests: none is known" in answer.json()["error"]["message"]
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unready")


# --- Without a prefill engine


@pytest.mark.parametrize("policy", [{}, {"objectives": Objectives(1.0, 1.0)}])
async def test_without_a_prefill_engine_decode_engines_compute_the_prompts(
    cluster: Cluster, policy: dict[str, Any]
) -> None:
    client = await cluster.router(patience=0.05, **policy)
    d = await cluster.engine(Role.DECODE)
    await until_health(client, lambda state: state["decode"] == {d.engine.url: "ready"})
    assert (await ask(client)).status_code == 200
    assert "kv_transfer_params" not in d.engine.bodies[0]
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert (
        await metric(client, 'kv_connector_router_placements_total{prompt="decode",reason="no_prefill"}') == 1
    )
    assert await metric(client, 'kv_connector_router_local_prefills_total{reason="no_prefill"}') == 1
    (failure,) = (await client.get("/status.json")).json()["failures"]
    assert failure["what"] == "no prefill engine takes requests"
    p = await cluster.engine(Role.PREFILL)
    await until_health(client, lambda state: state["status"] == "ready")
    assert (await ask(client)).status_code == 200
    assert len(p.engine.bodies) == 1


async def test_newly_started_router_waits_for_prefill_engines(cluster: Cluster) -> None:
    client = await cluster.router(patience=PATIENCE)
    d = await cluster.engine(Role.DECODE)
    await until_health(client, lambda state: state["decode"] == {d.engine.url: "ready"})
    asking = asyncio.create_task(ask(client))
    await until_metric(client, "kv_connector_router_in_flight", 1)
    p = await cluster.engine(Role.PREFILL)
    assert (await asking).status_code == 200
    assert len(p.engine.bodies) == 1


async def test_router_without_a_required_prefill_engine_is_unready(cluster: Cluster) -> None:
    client = await cluster.router(patience=0.05, require_prefill=True)
    d = await cluster.engine(Role.DECODE)
    await until_health(client, lambda state: state["decode"] == {d.engine.url: "ready"})
    assert (await ask(client)).status_code == 503
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unready")


async def test_an_engine_whose_api_server_is_not_up_is_not_used(cluster: Cluster) -> None:
    client = await cluster.router(patience=0.05)
    p, _ = await cluster.pair()
    await until_health(client, lambda state: list(state["decode"].values()) == ["ready"])
    with nobody() as p.engine.url:
        late = Member(cluster, Role.PREFILL, p.engine)
        await until_health(client, lambda state: state["prefill"].get(p.engine.url) == "joining")
        for _ in range(3):
            assert (await ask(client)).status_code == 200
        late.fall_silent()


async def test_leaving_engine_gets_no_further_request(cluster: Cluster) -> None:
    client = await cluster.router()
    p, _ = await cluster.pair()
    other = await cluster.engine(Role.PREFILL)
    await until_health(client, lambda state: list(state["prefill"].values()) == ["ready"] * 2)
    assert (await ask(client)).status_code == 200
    p.leave()
    await until_health(client, lambda state: list(state["prefill"]) == [other.engine.url])
    before = len(p.engine.bodies)
    for _ in range(4):
        assert (await ask(client)).status_code == 200
    assert len(p.engine.bodies) == before


async def test_a_silent_engine_loses_its_requests_and_they_go_elsewhere(cluster: Cluster) -> None:
    """The prefill engine is stopped: it takes the request, and never answers."""
    client = await cluster.router(**QUICK)

    async def hang(request: Request, body: dict[str, Any]) -> Response:
        return await stopped.engine.until_gone(request)

    stopped = await cluster.engine(Role.PREFILL, hang)

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        # Like a decode engine, it answers once its prompt is computed.
        if len(d.engine.bodies) == 1:
            return await d.engine.until_gone(request)
        return await answer_ok(request, body)

    d = await cluster.engine(Role.DECODE, decode)
    await until_health(
        client, lambda state: [*state["prefill"].values(), *state["decode"].values()] == ["ready"] * 2
    )
    asking = asyncio.create_task(ask(client))
    await within(stopped.engine.arrived.wait())
    healthy = await cluster.engine(Role.PREFILL)
    await until_health(client, lambda state: state["prefill"].get(healthy.engine.url) == "ready")
    stopped.fall_silent()
    answer = await within(asking)
    assert answer.status_code == 200
    await within(stopped.engine.aborted.wait())
    await within(d.engine.aborted.wait())
    first, second = (body["kv_transfer_params"]["transfer_id"] for body in d.engine.bodies)
    assert first != second
    assert healthy.engine.bodies[0]["kv_transfer_params"]["transfer_id"] == second
    assert await metric(client, "kv_connector_router_retries_total") == 1


async def test_a_stream_of_an_engine_that_falls_silent_ends_with_an_error(cluster: Cluster) -> None:
    client = await cluster.router(**QUICK)
    stream = FedStream()
    await cluster.engine(Role.PREFILL)
    d = await cluster.engine(Role.DECODE, stream)
    stream.queue.put_nowait(b"data: 1\n\n")
    async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        chunks = answer.aiter_raw()
        assert await within(anext(chunks)) == b"data: 1\n\n"
        d.fall_silent()
        last = b"".join([chunk async for chunk in chunks])
    assert last.endswith(DONE)
    error = msgspec.json.decode(last.removeprefix(b"data: ").removesuffix(DONE))["error"]
    assert d.engine.url in error["message"]
    await within(stream.aborted.wait())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the router check the health of API servers in use all the time, and declare hangs sooner."""
    monkeypatch.setattr("kv_connector.router.front.registry._WATCH_S", 0.02)
    monkeypatch.setattr("kv_connector.router.front.registry._MISS_S", 0.4)


@pytest.mark.usefixtures("watched")
async def test_an_api_server_that_hangs_loses_its_requests_and_they_go_elsewhere(cluster: Cluster) -> None:
    """Its worker lives, and its kernel accepts connections. Only the health check shows the fault."""

    async def hang(request: Request, body: dict[str, Any]) -> Response:
        return await stuck.engine.until_gone(request)

    client = await cluster.router()
    await cluster.engine(Role.PREFILL)
    stuck = await cluster.engine(Role.DECODE, hang)
    asking = asyncio.create_task(ask(client))
    await within(stuck.engine.arrived.wait())
    other = await cluster.engine(Role.DECODE)
    await until_health(client, lambda state: list(state["decode"].values()) == ["ready"] * 2)
    stuck.engine.health = no_answer
    assert (await within(asking)).status_code == 200
    await within(stuck.engine.aborted.wait())
    state = (await client.get("/health")).json()["decode"]
    assert state == {stuck.engine.url: "unreachable", other.engine.url: "ready"}
    assert (await ask(client)).status_code == 200
    assert len(stuck.engine.bodies) == 1
    stuck.engine.health = stuck.engine.models
    await until_health(client, lambda state: list(state["decode"].values()) == ["ready"] * 2)


@pytest.mark.usefixtures("watched")
async def test_api_server_with_a_late_or_failed_health_answer_keeps_its_requests(
    cluster: Cluster,
) -> None:
    answers = [no_answer, lambda _: refuse(500, "busy")(_, {}), no_answer]
    looked, release = asyncio.Event(), asyncio.Event()

    async def hold(request: Request, body: dict[str, Any]) -> Response:
        await within(release.wait())
        return await answer_ok(request, body)

    async def health(request: Request) -> Response:
        if answers:
            return await answers.pop(0)(request)
        looked.set()
        return await d.engine.models(request)

    client = await cluster.router()
    await cluster.engine(Role.PREFILL)
    d = await cluster.engine(Role.DECODE, hold)
    asking = asyncio.create_task(ask(client))
    await within(d.engine.arrived.wait())
    d.engine.health = health
    await within(looked.wait())
    assert (await client.get("/health")).json()["decode"] == {d.engine.url: "ready"}
    release.set()
    assert (await asking).status_code == 200
    assert await metric(client, "kv_connector_router_retries_total") == 0


async def test_the_routers_health_is_read_without_a_look_at_engines() -> None:
    """A decode engine that is busy with a long prompt stays in use, however often a load balancer reads
    /health."""
    looks = 0

    async def busy(request: Request) -> Response:
        nonlocal looks
        looks += 1
        return await no_answer(request)

    async with (
        serve_engine(answer_ok) as p,
        serve_engine(answer_ok) as d,
        listed([p], [d]) as url,
        client_of(url) as client,
    ):
        d.health = busy
        for _ in range(20):
            assert (await client.get("/health")).json()["decode"] == {d.url: "ready"}
        assert looks <= 1, "the router's own look, one at a time"


async def test_restarted_router_knows_every_engine(cluster: Cluster) -> None:
    async with cluster.running_router() as client:
        p, d = await cluster.pair()
        assert (await ask(client)).status_code == 200
    client = await cluster.router()
    assert (await ask(client)).status_code == 200
    assert len(p.engine.bodies) == len(d.engine.bodies) == 2


async def test_two_routers_share_the_engines(cluster: Cluster) -> None:
    second = Cluster(cluster._stack, cluster.key)
    clients = [await cluster.router(), await second.router()]
    p, d = await cluster.pair()
    for member, role in ((p, Role.PREFILL), (d, Role.DECODE)):
        member.leave()
        registration = Register(role.value, "1", role, member.engine.url, "127.0.0.1", 5600)
        member.registrar = Registrar(registration, [cluster.address, second.address], cluster.key)
        cluster._stack.callback(member.fall_silent)
    for client in clients:
        assert (await ask(client)).status_code == 200


# --- Data-parallel ranks


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_a_request_goes_to_the_ranks_that_were_chosen_for_it(cluster: Cluster, dispatch: str) -> None:
    """vLLM's own balancer would choose any rank. The decode engine would request pages from another rank than
    the one that computes them."""
    client = await cluster.router(dispatch=dispatch)
    (p, _), (d, _) = await cluster.ranks(Role.PREFILL), await cluster.ranks(Role.DECODE)
    await until_health(
        client, lambda state: [*state["prefill"].values(), *state["decode"].values()] == ["ready"] * 4
    )
    for _ in range(8):
        assert (await ask(client)).status_code == 200
    at_p, at_d = ([headers["x-data-parallel-rank"] for headers in e.headers] for e in (p.engine, d.engine))
    assert sorted(at_p) == sorted(at_d) == ["0"] * 4 + ["1"] * 4
    if dispatch == "concurrent":
        told = {b["kv_transfer_params"]["transfer_id"]: b["kv_transfer_params"] for b in d.engine.bodies}
        for rank, body in zip(at_p, p.engine.bodies, strict=True):
            assert told[body["kv_transfer_params"]["transfer_id"]]["remote_port"] == 5600 + int(rank)


async def test_heartbeats_of_one_rank_leave_the_requests_of_the_other_alone(cluster: Cluster) -> None:
    client = await cluster.router()
    await cluster.engine(Role.PREFILL)
    stream = FedStream()
    await cluster.ranks(Role.DECODE, stream)
    stream.queue.put_nowait(b"data: 1\n\n")
    async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        chunks = answer.aiter_raw()
        assert await within(anext(chunks)) == b"data: 1\n\n"
        await until_health(client, lambda state: list(state["decode"].values()) == ["ready"] * 2)
        await asyncio.sleep(0.3)  # many heartbeats of both
        stream.queue.put_nowait(DONE)
        stream.queue.put_nowait(None)
        assert b"".join([chunk async for chunk in chunks]) == DONE


async def test_a_drain_reaches_every_rank(cluster: Cluster, tmp_path: Any) -> None:
    client = await cluster.router()
    ranks = await cluster.ranks(Role.DECODE)
    await until_health(client, lambda state: list(state["decode"].values()) == ["ready"] * 2)
    key_file = tmp_path / "key"
    cluster.key.write(key_file)
    words = ["drain", "--force", ranks[0].engine.url, "--router", str(cluster.address)]
    words += ["--key-file", str(key_file)]
    idle = await asyncio.to_thread(CliRunner().invoke, command_line, words)
    assert idle.exit_code == 0, idle.output
    async with asyncio.timeout(PATIENCE):
        while not all(rank.registrar._registration.draining for rank in ranks):
            await asyncio.sleep(0.01)
    assert list((await client.get("/health")).json()["decode"].values()) == ["draining"] * 2


# --- Draining


async def test_a_drained_engine_finishes_what_it_has(cluster: Cluster, tmp_path: Any) -> None:
    release = asyncio.Event()

    async def hold(request: Request, body: dict[str, Any]) -> Response:
        await within(release.wait())
        return await answer_ok(request, body)

    client = await cluster.router()
    await cluster.engine(Role.PREFILL)
    old = await cluster.engine(Role.DECODE, hold)
    asking = asyncio.create_task(ask(client))
    await within(old.engine.arrived.wait())
    new = await cluster.engine(Role.DECODE)
    await until_health(client, lambda state: state["decode"].get(new.engine.url) == "ready")
    key_file = tmp_path / "key"
    cluster.key.write(key_file)
    words = ["drain", old.engine.url, "--router", str(cluster.address), "--key-file", str(key_file)]
    busy = await asyncio.to_thread(CliRunner().invoke, command_line, [*words, "--timeout", "0.6"])
    assert busy.exit_code == 1, busy.output
    assert "still has 1 requests" in busy.output
    await until_health(client, lambda state: state["decode"].get(new.engine.url) == "ready")
    for _ in range(3):
        assert (await ask(client)).status_code == 200
    assert len(old.engine.bodies) == 1
    release.set()
    assert (await asking).status_code == 200
    idle = await asyncio.to_thread(CliRunner().invoke, command_line, words)
    assert idle.exit_code == 0, idle.output
    # The engine knows about its drain, too, and from now on reports it to every router.
    assert old.registrar._registration.draining


async def test_undrain_puts_an_engine_back_at_all_its_routers(cluster: Cluster, tmp_path: Any) -> None:
    client = await cluster.router()
    _, d = await cluster.pair()
    await until_health(client, lambda state: state["decode"] == {d.engine.url: "ready"})
    key_file = tmp_path / "key"
    cluster.key.write(key_file)
    words = [d.engine.url, "--router", str(cluster.address), "--key-file", str(key_file)]
    for command in (["drain", "--force"], ["undrain"]):
        done = await asyncio.to_thread(CliRunner().invoke, command_line, [*command, *words])
        assert done.exit_code == 0, done.output
        drained = command[0] == "drain"
        async with asyncio.timeout(PATIENCE):
            while d.registrar._registration.draining is not drained:
                await asyncio.sleep(0.01)
        state = "draining" if drained else "ready"
        await until_health(client, lambda found, state=state: found["decode"] == {d.engine.url: state})  # type: ignore[misc]  # mypy infers no lambda with a default
    assert (await ask(client)).status_code == 200
    words[0] = "http://127.0.0.1:1"
    unknown = await asyncio.to_thread(CliRunner().invoke, command_line, ["undrain", *words])
    assert unknown.exit_code == 2
    assert "does not know the engine" in unknown.output


async def test_the_drain_of_the_last_decode_engine_is_refused(cluster: Cluster, tmp_path: Any) -> None:
    client = await cluster.router()
    _, d = await cluster.pair()
    await until_health(client, lambda state: state["decode"] == {d.engine.url: "ready"})
    key_file = tmp_path / "key"
    cluster.key.write(key_file)
    words = ["drain", d.engine.url, "--router", str(cluster.address), "--key-file", str(key_file)]
    refused = await asyncio.to_thread(CliRunner().invoke, command_line, words)
    assert refused.exit_code == 2
    assert f"{d.engine.url} is its last decode engine" in refused.output
    assert (await client.get("/health")).json()["decode"] == {d.engine.url: "ready"}
    assert not d.registrar._registration.draining


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_drained_prefill_engine_is_not_idle_while_decode_lacks_its_pages(
    cluster: Cluster, tmp_path: Any, dispatch: str
) -> None:
    loaded = asyncio.Event()

    async def load(request: Request, body: dict[str, Any]) -> Response:
        await within(loaded.wait())
        return await answer_ok(request, body)

    client = await cluster.router(dispatch=dispatch)
    p, d = await cluster.engine(Role.PREFILL), await cluster.engine(Role.DECODE, load)
    asking = asyncio.create_task(ask(client))
    await within(p.engine.arrived.wait())
    await within(d.engine.arrived.wait())
    key_file = tmp_path / "key"
    cluster.key.write(key_file)
    words = ["drain", p.engine.url, "--router", str(cluster.address), "--key-file", str(key_file)]
    busy = await asyncio.to_thread(CliRunner().invoke, command_line, [*words, "--timeout", "0.6"])
    assert busy.exit_code == 1, busy.output
    assert "still has 1 requests" in busy.output
    loaded.set()
    assert (await asking).status_code == 200
    idle = await asyncio.to_thread(CliRunner().invoke, command_line, words)
    assert idle.exit_code == 0, idle.output


@pytest.mark.usefixtures("watched")
async def test_a_restart_ends_the_drain_of_an_engine_that_does_not_register(
    cluster: Cluster, tmp_path: Any
) -> None:
    answers = [no_answer, no_answer]

    async def health(request: Request) -> Response:
        return await (answers.pop(0) if answers else d.models)(request)

    async with serve_engine(answer_ok) as p, serve_engine(answer_ok) as d:
        lists = {"prefill": (Endpoint.parse(p.url),), "decode": (Endpoint.parse(d.url),)}
        client = await cluster.router(**lists, patience=0.05)
        key_file = tmp_path / "key"
        cluster.key.write(key_file)
        words = ["drain", "--force", d.url, "--router", str(cluster.address), "--key-file", str(key_file)]
        idle = await asyncio.to_thread(CliRunner().invoke, command_line, words)
        assert idle.exit_code == 0, idle.output
        assert (await ask(client)).status_code == 503
        d.health = health
        await until_metric(client, 'kv_connector_router_engines{side="decode",state="ready"}', 1)
        assert (await ask(client)).status_code == 200


async def test_an_engine_that_sleeps_gets_nothing_until_it_wakes(cluster: Cluster) -> None:
    client = await cluster.router(patience=0.05)
    await cluster.engine(Role.PREFILL)
    decode = await cluster.engine(Role.DECODE)
    url = decode.engine.url
    for asleep, state, status in ((True, "asleep", 503), (False, "ready", 200), (True, "asleep", 503)):
        decode.registrar.set_asleep(asleep)
        await until_health(client, lambda found, state=state: found["decode"].get(url) == state)  # type: ignore[misc]  # mypy infers no lambda with a default
        assert (await ask(client)).status_code == status


async def test_torn_engine_gets_no_request_and_its_version_is_shown(cluster: Cluster) -> None:
    client = await cluster.router(status_details=True, patience=0.05)
    await cluster.engine(Role.PREFILL)
    decode = await cluster.engine(Role.DECODE)
    url = decode.engine.url
    for version, torn, state, status in (
        ("v1", "", "ready", 200),
        ("v1", "worker 0: no such tensor", "torn", 503),
        ("v2", "", "ready", 200),
    ):
        decode.registrar.set_weights(version)
        decode.registrar.set_torn(torn)
        await until_health(client, lambda found, state=state: found["decode"].get(url) == state)  # type: ignore[misc]  # mypy infers no lambda with a default
        assert (await ask(client)).status_code == status

    async def told() -> dict[str, Any]:
        engines = (await client.get("/status.json")).json()["engines"]
        return next(dict(engine) for engine in engines if "decode" in engine["roles"])

    async with asyncio.timeout(PATIENCE):
        while (await told()).get("weights") != "v2":
            await asyncio.sleep(0.01)  # each query is a request: there is no event to wait for


async def test_router_lists_the_controllers_of_engines_that_take_weights(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.router.front.registry._COMPLETE_S", 0.0)
    client = await cluster.router()
    ranks = await cluster.ranks(Role.DECODE)
    other = await cluster.engine(Role.PREFILL)
    await until_health(client, lambda found: len(found["decode"]) == 2 and len(found["prefill"]) == 1)
    listed = RouterList(cluster.address, cluster.key)

    async def now_listed() -> list[Address]:
        try:
            return list(await asyncio.to_thread(listed.ask))
        except NoEngines:
            return []

    async def until_listed(*wanted: Address) -> None:
        async with asyncio.timeout(PATIENCE):
            while await now_listed() != list(wanted):
                await asyncio.sleep(0.01)  # each query is a message: there is no event to wait for

    try:
        with pytest.raises(NoEngines, match="none of the engines of 2 API servers"):
            await asyncio.to_thread(listed.ask)
        of_ranks, of_other = Address("127.0.0.1", 5800), Address("127.0.0.1", 5700)
        other.registrar.set_controller(of_other)
        await until_listed(of_other)
        for rank in ranks:
            rank.registrar.set_controller(of_ranks)
        await until_listed(of_other, of_ranks)
        other.leave()
        await until_listed(of_ranks)
    finally:
        listed.close()


async def test_router_that_has_started_lists_no_controllers_before_all_engines_register(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.router.front.registry._COMPLETE_S", PATIENCE)
    monkeypatch.setattr(router_list, "_ANSWER_S", 0.3)
    client = await cluster.router()
    engine = await cluster.engine(Role.DECODE)
    engine.registrar.set_controller(Address("127.0.0.1", 5800))
    await until_health(client, lambda found: len(found["decode"]) == 1)
    listed = RouterList(cluster.address, cluster.key)
    try:
        with pytest.raises(LinkError, match="no router answers"):
            await asyncio.to_thread(listed.ask)
    finally:
        listed.close()


async def test_draining_an_engine_that_is_not_there(cluster: Cluster, tmp_path: Any) -> None:
    await cluster.router()
    key_file = tmp_path / "key"
    cluster.key.write(key_file)
    words = ["drain", "http://127.0.0.1:1", "--router", str(cluster.address), "--key-file", str(key_file)]
    unknown = await asyncio.to_thread(CliRunner().invoke, command_line, words, env={"COLUMNS": "200"})
    assert unknown.exit_code == 2
    assert "does not know the engine" in unknown.output


# --- Retries


def listed(
    prefill: list[FakeEngine], decode: list[FakeEngine], **settings: Any
) -> contextlib.AbstractAsyncContextManager[str]:
    return serve(
        create_app(
            RouterSettings(
                prefill=tuple(Endpoint.parse(engine.url) for engine in prefill),
                decode=tuple(Endpoint.parse(engine.url) for engine in decode),
                **settings,
            )
        )
    )


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["refuses connections", "answers 500"])
async def test_another_engine_takes_over_before_anything_was_streamed(
    dispatch: str, side: str, how: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        broken = await stack.enter_async_context(serve_engine(refuse(500, "broken")))
        if how == "refuses connections":
            broken.url = stack.enter_context(nobody())
        good, p = [await stack.enter_async_context(serve_engine(answer_ok)) for _ in range(2)]

        async def decode(request: Request, body: dict[str, Any]) -> Response:
            # Like a decode engine, it answers once the prefill engine has computed the prompt.
            wanted = body["kv_transfer_params"].get("transfer_id")
            while side == "prefill" and wanted is not None and not await request.is_disconnected():
                if wanted in [at_p["kv_transfer_params"]["transfer_id"] for at_p in good.bodies]:
                    break
                await asyncio.sleep(0.005)
            return await answer_ok(request, body)

        d = await stack.enter_async_context(serve_engine(decode))
        sides = {"prefill": [p], "decode": [d]} | {side: [broken, good]}
        url = await stack.enter_async_context(listed(**sides, dispatch=dispatch))
        client = await stack.enter_async_context(client_of(url))
        for _ in range(4):
            assert (await ask(client)).status_code == 200
        # The prefill engine may hold the first attempt's transfer. A decode engine gets a request that it
        # refuses, on purpose, to release it.
        assert len([body for body in good.bodies if "model" not in body]) == 4
        if how == "refuses connections":
            assert await metric(client, "kv_connector_router_retries_total") == 1, "it is not used again"


async def test_an_error_event_at_the_beginning_of_a_stream_is_an_error(cluster: Cluster) -> None:
    """vLLM sends its status before it knows the error. The router does not pass the status on before the
    first token."""
    broken, good = FedStream(), FedStream()
    broken.queue.put_nowait(
        b'data: {"error": {"message": "KV load failed", "code": 500}}\n\ndata: [DONE]\n\n'
    )
    broken.queue.put_nowait(None)
    async with serve_engine(answer_ok) as p, serve_engine(broken) as first, serve_engine(good) as second:
        async with (
            listed([p], [first]) as url,
            client_of(url) as client,
        ):
            answer = await ask(client, stream=True)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "KV load failed"
        broken.queue.put_nowait(b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n')
        broken.queue.put_nowait(None)
        good.queue.put_nowait(b"data: 1\n\n" + DONE)
        good.queue.put_nowait(None)
        async with (
            listed([p], [first, second]) as url,
            client_of(url) as client,
        ):
            answer = await ask(client, stream=True)
            assert (answer.status_code, answer.content) == (200, b"data: 1\n\n" + DONE)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_failed_load_is_answered_with_its_reason(cluster: Cluster, stream: bool, late: bool) -> None:
    """vLLM's own answer has no reason, and may arrive before it."""

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        transfer = body["kv_transfer_params"]["transfer_id"]
        if late:
            asyncio.get_running_loop().call_later(0.05, d.registrar.load_failed, transfer, why)
        else:
            d.registrar.load_failed(transfer, why)
        if stream:
            return Response(b"data: " + json.dumps(error).encode() + b"\n\n", media_type="text/event-stream")
        return Response(json.dumps(error), 500)

    error = {"error": {"message": "Internal server error", "code": 500}}
    why = "dtype: prefill engine has float32, decode engine has bfloat16"
    p, d = await cluster.engine(Role.PREFILL), await cluster.engine(Role.DECODE, decode)
    client = await cluster.router()
    answer = await within(ask(client, stream=stream))
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert d.engine.url in message
    assert message.endswith(f"did not receive the prompt's KV from prefill engine {p.engine.url}: {why}")
    d.registrar.close()
    d.registrar.load_failed("t", why)  # its loads also fail when it ends, and no process receives the reason


async def test_reason_that_another_engine_reports_for_a_transfer_is_ignored(cluster: Cluster) -> None:
    async def decode(request: Request, body: dict[str, Any]) -> Response:
        other.registrar.load_failed(body["kv_transfer_params"]["transfer_id"], "a reason of another engine")
        return await refuse(500, "of vLLM's own")(request, body)

    other = await cluster.engine(Role.PREFILL)
    await cluster.engine(Role.DECODE, decode)
    client = await cluster.router()
    answer = await within(ask(client))
    assert (answer.status_code, answer.json()) == (500, {"error": {"message": "of vLLM's own"}})


async def test_reason_is_accepted_from_another_rank_of_the_decode_engine(cluster: Cluster) -> None:
    """vLLM may give a request to another rank than the router names."""

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        other = ranks[1 - int(request.headers["x-data-parallel-rank"])]
        other.registrar.load_failed(body["kv_transfer_params"]["transfer_id"], "no pages came")
        return await refuse(500, "of vLLM's own")(request, body)

    await cluster.engine(Role.PREFILL)
    ranks = await cluster.ranks(Role.DECODE, decode)
    client = await cluster.router()
    answer = await within(ask(client))
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].endswith(": no pages came")


async def test_failure_without_a_reported_reason_is_answered_with_the_engines_error(cluster: Cluster) -> None:
    await cluster.engine(Role.PREFILL)
    d = await cluster.engine(Role.DECODE, refuse(500, "of vLLM's own"))
    d.registrar.load_failed("another transfer", "another reason")
    client = await cluster.router()
    answer = await within(ask(client))
    assert (answer.status_code, answer.json()) == (500, {"error": {"message": "of vLLM's own"}})


async def test_a_chat_whose_load_fails_after_its_roles_is_tried_elsewhere(cluster: Cluster) -> None:
    """vLLM names the role of each choice before it knows the error. The client gets one correct answer."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    role = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    broken, good = FedStream(), FedStream()
    for chunk in (role, b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n', None):
        broken.queue.put_nowait(chunk)
    for chunk in (role[:20], role[20:], b"data: 1\n\n" + DONE, None):
        good.queue.put_nowait(chunk)
    async with (
        serve_engine(answer_ok) as p,
        serve_engine(broken) as first,
        serve_engine(good) as second,
        listed([p], [first, second]) as url,
        client_of(url) as client,
    ):
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        answer = await within(client.post("/v1/chat/completions", json=body))
        assert (answer.status_code, answer.content) == (200, role + b"data: 1\n\n" + DONE)
        assert await metric(client, "kv_connector_router_retries_total") == 1


async def test_the_clients_own_error_is_not_tried_elsewhere() -> None:
    async def decode(request: Request, body: dict[str, Any]) -> Response:
        return await d.until_gone(request)

    async with (
        serve_engine(refuse(400, "too long")) as p,
        serve_engine(answer_ok) as other,
        serve_engine(decode) as d,
        listed([p, other], [d]) as url,
        client_of(url) as client,
    ):
        assert (await ask(client)).status_code == 400
        assert not other.bodies


async def test_request_that_breaks_every_engine_does_not_reach_all_of_them() -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serve_engine(refuse(500, "broken"))) for _ in range(5)]
        d = await stack.enter_async_context(serve_engine(answer_ok))
        url = await stack.enter_async_context(listed(engines, [d], dispatch="serial"))
        client = await stack.enter_async_context(client_of(url))
        assert (await ask(client)).status_code == 500
        assert sum(len(engine.bodies) for engine in engines) == 3


async def test_one_engine_for_both_sides_prefills_itself() -> None:
    async with (
        serve_engine(answer_ok) as both,
        listed([both], [both]) as url,
        client_of(url) as client,
    ):
        assert (await ask(client)).status_code == 200
        assert both.bodies == [{"prompt": "x"}]


# --- Forecasts


async def test_autoscaler_starts_engines_of_the_side_that_is_short(cluster: Cluster) -> None:
    """The recipe of docs/operate/autoscaling.md, over stubs. Only the time of its window is a stand-in."""
    ended = asyncio.Event()
    client = await cluster.router(prefetch_answers=False)
    load = WorkloadReport(8192, 8192, 10_000, prompt=PromptCost(0, 1_000_000, 0))  # 1 ms a token
    decoding = streaming(b'data: {"choices": []}\n\n', ended, DONE)
    for role, handler in ((Role.PREFILL, answer_ok), (Role.DECODE, decoding)):
        await cluster.engine(role, handler, load)
    numbers = iter(range(1, 1000))
    busy = 'kv_connector_router_prompt_work_seconds_total{side="prefill"}'
    filled = "kv_connector_router_decode_caches_filled"

    async def stream() -> None:
        body = {"prompt": [next(numbers)] * 3000, "stream": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    async def rate(streams: int, seconds: float) -> float:
        before = await metric(client, busy)
        tasks = [asyncio.create_task(stream()) for _ in range(streams)]
        async with asyncio.timeout(PATIENCE):
            while await metric(client, filled) < 0.3 * streams - 1e-6:
                await asyncio.sleep(0.01)  # each query is a request: there is no event to wait for
        found = (await metric(client, busy) - before) / seconds
        ended.set()
        await within(asyncio.gather(*tasks))
        ended.clear()
        return found

    scalers = {side: Autoscaler(most=8) for side in (Role.PREFILL, Role.DECODE)}
    # Five prompts of 3 s within 5 s, whose streams fill one and a half caches.
    assert await rate(streams=5, seconds=5) == pytest.approx(3.0)
    wanted = {Role.PREFILL: scalers[Role.PREFILL].wanted(0, 3.0, 1)}
    wanted[Role.DECODE] = scalers[Role.DECODE].wanted(0, 1.5, 1)
    assert wanted == {Role.PREFILL: 5, Role.DECODE: 3}
    for role, handler in ((Role.PREFILL, answer_ok), (Role.DECODE, decoding)):
        for _ in range(1, wanted[role]):
            await cluster.engine(role, handler, load)
        ready = f'kv_connector_router_engines{{side="{role.value}",state="ready"}}'
        await until_metric(client, ready, wanted[role])
    # The same load asks for no more engines.
    demand = await rate(streams=5, seconds=5)
    assert scalers[Role.PREFILL].wanted(15, demand, 5) == 5
    assert scalers[Role.DECODE].wanted(15, 1.5, 3) == 3


# --- Unknown senders


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_with_objectives_a_prompt_does_not_queue_behind_another(
    cluster: Cluster, dispatch: str
) -> None:
    computed = asyncio.Event()

    async def busy(request: Request, body: dict[str, Any]) -> Response:
        await computed.wait()
        return await answer_ok(request, body)

    # By forecast the long prompt takes 20 s, so a slow machine does not end the queue before the test does.
    client = await cluster.router(objectives=Objectives(40, 1.5), dispatch=dispatch)
    load = WorkloadReport(8192, 8192, 1 << 20, prompt=PromptCost(500_000_000, 2_500_000, 0))
    p = await cluster.engine(Role.PREFILL, busy, load)
    d = await cluster.engine(Role.DECODE, answer_ok, msgspec.structs.replace(load, step_tokens=256))
    long = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1] * 8000}))
    await within(p.engine.arrived.wait())
    short = await client.post("/v1/completions", json={"prompt": [2] * 100})
    assert short.status_code == 200
    assert "kv_transfer_params" not in d.engine.bodies[-1]
    assert len(p.engine.bodies) == 1
    computed.set()
    assert (await long).status_code == 200
    await until_nothing_is_asked(client)  # the prefill engine's answer may come after the decode engine's
    behind = await client.post("/v1/completions", json={"prompt": [3] * 8000})
    assert behind.status_code == 200
    assert len(p.engine.bodies) == 2, "what it has computed it has not to compute any more"
    placed = "kv_connector_router_placements_total"
    assert await metric(client, f'{placed}{{prompt="prefill",reason="prefill_sooner"}}') == 2
    assert await metric(client, f'{placed}{{prompt="decode",reason="decode_sooner"}}') == 1
    assert await metric(client, 'kv_connector_router_local_prefills_total{reason="decode_sooner"}') == 1
    assert await metric(client, "kv_connector_router_late_forecasts_total") == 0


async def test_no_engine_joins_without_the_key(cluster: Cluster) -> None:
    client = await cluster.router(patience=0.05)
    await cluster.pair()
    await until_health(client, lambda state: list(state["decode"].values()) == ["ready"])
    thief = Cluster(cluster._stack, ClusterKey.generate())
    thief.address = cluster.address
    stolen = await thief.engine(Role.PREFILL)
    # Many heartbeats of the intruder.
    await asyncio.sleep(0.5)
    state = (await client.get("/health")).json()
    assert stolen.engine.url not in state["prefill"]
    assert (await ask(client)).status_code == 200
    assert not stolen.engine.bodies


async def test_a_router_that_gets_its_key_late_is_joined(cluster: Cluster) -> None:
    """ZMQ does not reconnect if only one side has a key. The engine does."""
    async with cluster.running_router(key=None, patience=0.05) as client:
        p, _ = await cluster.pair()
        await asyncio.sleep(0.3)  # many heartbeats
        assert p.engine.url not in (await client.get("/health")).json()["prefill"]
    client = await cluster.router()
    assert (await ask(client)).status_code == 200


async def test_a_registration_that_makes_no_sense_costs_its_sender_the_connection(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    client = await cluster.router()
    sockets = MembershipSockets(cluster.key)
    try:
        link = sockets.dial(cluster.address)
        sockets.send(link, Register("x", "1", Role.PREFILL, "ftp://nowhere", "h", 1))
        async with asyncio.timeout(PATIENCE):
            while "a registration is ignored" not in caplog.text:
                await asyncio.sleep(0.01)
        await cluster.pair()
        assert (await ask(client)).status_code == 200
    finally:
        sockets.close()


async def test_an_engine_that_was_refused_is_used_once_its_rival_has_left(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The refused engine keeps its connection."""
    caplog.set_level(logging.INFO, "kv_connector.router")
    client = await cluster.router()
    await cluster.engine(Role.PREFILL)
    engine = await cluster._stack.enter_async_context(serve_engine(answer_ok))

    def member(name: str, port: int) -> Registrar:
        registration = Register(name, name, Role.DECODE, engine.url, "127.0.0.1", port)
        registrar = Registrar(registration, [cluster.address], cluster.key)
        cluster._stack.callback(registrar.close)
        return registrar

    rival = member("rival", 5700)
    await until_health(client, lambda state: state["decode"] == {engine.url: "ready"})
    member("right", 5600)
    async with asyncio.timeout(PATIENCE):
        while "both register as rank" not in caplog.text:
            await asyncio.sleep(0.01)
    rival.close()
    async with asyncio.timeout(PATIENCE):
        while "right at" not in caplog.text.partition("LEFT")[2]:
            await asyncio.sleep(0.01)
    assert (await ask(client)).status_code == 200
    assert caplog.text.count("both register as rank") == 1


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"garbage",
        encode(Register("x", "1", Role.PREFILL, "http://h:1", "h", 1))[:-1],
        *(
            encode(Register("x", "1", Role.PREFILL, "http://h:1", "h", 1, activity=activity))
            for activity in (
                Activity({str(lane): 1 for lane in range(17)}),
                Activity({}, -1),
                Activity({"": 1}),
            )
        ),
        *(
            encode(Register("x", "1", Role.PREFILL, "http://h:1", "h", 1, load=load))
            for load in (
                WorkloadReport(0, 1, 1),
                WorkloadReport(1, 0, 1),
                WorkloadReport(1, 1, 1, waiting=-1),
                WorkloadReport(1, 1, 1, decode_ns=-1),
                WorkloadReport(1, 1, 1, prompt=PromptCost(1, -1, 1)),
                WorkloadReport(1, 1, 1, block_tokens=-1),
            )
        ),
        encode(PromptHits({str(number): (2, 1) for number in range(MOST_HITS + 1)})),
        encode(PromptHits({"t": (2, -1)})),
        encode(ControllersAre(1, (ControllerAddress("h", 1),) * (PAGE + 1))),
        encode(Register("x", "1", Role.DECODE, "http://h:1", "h", 1, controller=ControllerAddress("h", 0))),
    ],
)
def test_frame_that_is_no_membership_message_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(frame)


def test_page_of_controllers_with_the_longest_names_fits_into_a_message() -> None:
    page = ControllersAre(1 << 48, (ControllerAddress("h" * 255, 65535),) * PAGE, True, 1 << 48)
    assert len(encode(page)) < 16 << 10
    assert decode(encode(page)) == page


def test_each_heartbeat_has_the_last_workload() -> None:
    load = WorkloadReport(8192, 512, 100_000)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        registration = Register("x", "1", Role.PREFILL, "http://h:1", "h", 1, load=load)
        registrar = Registrar(registration, [Address("127.0.0.1", port)], None)

        def heard() -> Any:
            assert router.poll(60_000)
            return decode(router.recv_multipart()[1])

        try:
            assert heard() == registration
            later = WorkloadReport(8192, 512, 100_000, 4096, 7, 5_000_000, PromptCost(4_000_000, 25_000, 400))
            registrar.set_load(later)
            said = next(said for said in (heard() for _ in range(100)) if said.load != load)
            assert said == heard() == msgspec.structs.replace(registration, load=later)
        finally:
            registrar.close()


def test_registrar_reports_each_hit_once() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        registration = Register("x", "1", Role.DECODE, "http://h:1", "h", 1)
        registrar = Registrar(registration, [Address("127.0.0.1", port)], None)
        hits = {f"{number:032x}": (1 << 20, number) for number in range(MOST_HITS + 1)}
        reports: list[dict[str, tuple[int, int]]] = []
        try:
            assert router.poll(60_000)
            assert decode(router.recv_multipart()[1]) == registration, (
                "hits for a router that is away are lost"
            )
            registrar.add_hits({"i" * 256: (2, 1), "\xe9" * 32: (2, 1), **hits})  # ids of other routers
            beats = 0
            while sum(map(len, reports)) < len(hits) or beats < 3:
                assert router.poll(60_000)
                frame = router.recv_multipart()[1]
                assert len(frame) < 16 << 10
                said = decode(frame)
                if isinstance(said, PromptHits):
                    reports.append(said.hits)
                    beats = 0
                else:
                    beats += 1
        finally:
            registrar.close()
        assert {name: hit for report in reports for name, hit in report.items()} == hits
        assert sum(map(len, reports)) == len(hits)


def test_a_router_that_is_away_is_not_waited_for() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as later:
        port = free_ports(1)[0]
        registration = Register("x", "1", Role.PREFILL, "http://h:1", "h", 1)
        registrar = Registrar(registration, [Address("127.0.0.1", port)], None)
        try:
            later.bind(f"tcp://127.0.0.1:{port}")
            assert later.poll(60_000)
            assert decode(later.recv_multipart()[1]) == registration
        finally:
            started = time.monotonic()
            registrar.close()
            assert time.monotonic() - started < 5


async def test_a_registration_port_in_use_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        app = create_app(RouterSettings((), (), registration=Address("127.0.0.1", port)))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on"))
        with pytest.raises(SystemExit):
            await server.serve()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    (reason,) = [error for error in errors if "cannot listen for engines" in error]
    assert "\n" not in reason
    assert not [record for record in caplog.records if record.exc_info]
