"""The router's status page: its contents, the part that strangers see, and the recent failures."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from base64 import b64encode
from typing import Any

import pytest
from router_setup import (
    PATIENCE,
    FedStream,
    answer_ok,
    client_of,
    cluster,
    metric,
    refuse,
    serve,
    serve_engine,
    until_metric,
    within,
)
from starlette.requests import Request
from starlette.responses import Response

from kv_connector.control.membership import Activity, Leave, Register
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.front.app import DONE, create_app
from kv_connector.router.front.status import Status
from kv_connector.router.front.status_page import Page
from kv_connector.router.observe.first_bytes import SLICE_SECONDS, SLICES, FirstBytes
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

COMPLETION = {"prompt": "the secret of the prompt", "max_tokens": 3}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- Contents


async def test_the_status_has_the_engines_and_what_was_answered() -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
        await until_metric(
            client, 'kv_connector_router_requests_total{route="/v1/completions",status="200"}', 1
        )
        status = (await client.get("/status.json")).json()
        assert [(one["name"], one["roles"], one["state"]) for one in status["engines"]] == [
            ("prefill 1", ["prefill"], "ready"),
            ("decode 1", ["decode"], "ready"),
        ]
        assert status["answered"] == {"200": 1}
        assert status["in_flight"] == 0
        assert status["first_byte"]["latest"]["answers"] == 1
        assert 0 < status["first_byte"]["latest"]["p50"] < PATIENCE
        assert status["failures"] == []


async def test_requests_in_flight_are_counted_at_their_engine() -> None:
    async def decode(request: Request, body: dict[str, Any]) -> Response:
        return await d.until_gone(request)

    async with cluster(answer_ok, decode) as (_, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await within(d.arrived.wait())
        status = (await client.get("/status.json")).json()
        assert status["in_flight"] == 1
        assert {one["name"]: one["outstanding"] for one in status["engines"]}["decode 1"] == 1
        asking.cancel()
        await within(d.aborted.wait())


async def test_the_router_lives_without_a_single_engine() -> None:
    settings = RouterSettings(
        prefill=(Endpoint.parse("http://127.0.0.1:1"),), decode=(Endpoint.parse("http://[::1]:1"),)
    )
    async with serve(create_app(settings)) as url, client_of(url) as client:
        assert (await client.get("/health")).status_code == 503
        answer = await client.get("/live")
        assert (answer.status_code, answer.json()) == (200, {"live": True})


# --- The part that strangers see


async def failing(**settings: Any) -> tuple[str, dict[str, Any], list[str]]:
    """Returns the status of a router whose decode engine refuses and whose prefill engine does not exist, and
    the texts that must not be in it."""
    secret = f"the engine says {COMPLETION['prompt']}"
    async with serve_engine(refuse(500, secret)) as d:
        gone = "http://127.0.0.1:1"
        engines = (Endpoint.parse(gone),), (Endpoint.parse(d.url),)
        app = create_app(RouterSettings(*engines, patience=0.05, **settings))
        async with serve(app) as url, client_of(url) as client:
            headers = {"x-request-id": "request-of-alice"}
            assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code >= 500
            # A request with several prompts goes to the decode engine only.
            several = {"prompt": [COMPLETION["prompt"], "b"], "max_tokens": 3}
            assert (await client.post("/v1/completions", json=several, headers=headers)).status_code == 500
            answer = await client.get("/status.json")
            assert answer.headers["cache-control"] == "no-store"
            return answer.text, answer.json(), [gone, d.url, "127.0.0.1", "alice", "secret", "Cannot connect"]


@pytest.mark.usefixtures("unwatched")
async def test_a_stranger_sees_what_fails_and_neither_addresses_nor_prompts_nor_ids() -> None:
    text, status, secrets = await failing()
    assert [secret for secret in secrets if secret in text] == []
    told = {(one["engine"], one["what"]) for one in status["failures"]}
    assert ("prefill 1", "accepts no connection") in told
    assert ("prefill 1", "does not answer") in told
    assert ("decode 1", "answers 500") in told


@pytest.mark.usefixtures("unwatched")
async def test_an_operator_sees_addresses_and_the_engines_own_words() -> None:
    text, status, (gone, d, *_) = await failing(status_details=True)
    assert [one["address"] for one in status["engines"]] == [gone, d]
    details = {(one["engine"], one["what"]): one["detail"] for one in status["failures"]}
    assert "Cannot connect" in details["prefill 1", "accepts no connection"]
    assert "the engine says" in details["decode 1", "answers 500"]
    assert "alice" not in text


async def test_the_page_loads_nothing_and_runs_nothing_but_itself() -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        answer = await client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", answer.text)
    assert not re.search(r"\son\w+=|\sstyle=|innerHTML|javascript:", answer.text)


def test_the_page_is_light_enough_for_a_phone() -> None:
    assert len(Page.load().html.encode()) < 32 << 10


# --- Engines that join by themselves


class Joined:
    """Members that register, and the status over them, by the test's own clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.incidents = Incidents(self.clock)
        self.members = Members({side: Pool() for side in Side}, {}, self.incidents, suspect=3.0, dead=5.0)
        self._status = Status(self.members, Metrics(), self.incidents, details=False, clock=self.clock)

    def register(
        self, name: str, role: Role, activity: Activity | None = None, incarnation: str = "1"
    ) -> None:
        message = Register(name, incarnation, role, f"http://{name}:8100", name, 5600, activity=activity)
        self.members.register(self.clock.now, message)
        for endpoint in self.members.to_probe():
            self.members.answered(endpoint)

    def status(self) -> dict[str, Any]:
        self.clock.now += 1.0
        found: dict[str, Any] = json.loads(self._status.json())
        return found

    def names(self) -> list[str]:
        return [engine["name"] for engine in self.status()["engines"]]


@pytest.fixture
def joined() -> Joined:
    return Joined()


def test_lanes_transfers_and_rate_are_those_of_an_engines_last_report(joined: Joined) -> None:
    for second in range(60):
        joined.clock.now += 1.0
        joined.register("p", Role.PREFILL, Activity({"tcp": 1}, 0, second // 2 * 4_000_000))
    joined.clock.now += 1.0
    joined.register("p", Role.PREFILL, Activity({"tcp": 2}, 3, 30 * 4_000_000))
    (engine,) = joined.status()["engines"]
    # It pushes 4 MB every two seconds.
    assert engine.pop("pushing") == pytest.approx(2_000_000, rel=0.2)
    assert engine == {
        "name": "prefill 1",
        "roles": ["prefill"],
        "state": "ready",
        "outstanding": 0,
        "silence": 1.0,
        "lanes": {"tcp": 2},
        "transfers": 3,
    }


def test_engine_that_pushes_no_more_is_soon_shown_as_idle(joined: Joined) -> None:
    for pushed in (0, 1 << 30, 1 << 30, 1 << 30):
        joined.clock.now += 5.0
        joined.register("p", Role.PREFILL, Activity({}, 0, pushed))
    (engine,) = joined.status()["engines"]
    assert engine["pushing"] == 0


def test_an_engine_keeps_its_name_when_it_comes_back_to_its_place(joined: Joined) -> None:
    for name in ("a", "b", "c"):
        joined.register(name, Role.DECODE)
    joined.members.leave(Leave("a", "1"))
    assert joined.names() == ["decode 2", "decode 3"]
    joined.register("b", Role.DECODE, incarnation="2")
    joined.register("a", Role.DECODE, incarnation="2")
    assert sorted(joined.names()) == ["decode 1", "decode 2", "decode 3"]
    joined.register("d", Role.BOTH)
    assert "prefill and decode 1" in joined.names()


def test_death_of_an_engine_is_listed_with_its_name(joined: Joined) -> None:
    joined.register("d", Role.DECODE)
    joined.members.tick(joined.clock.now)
    for _ in range(6):
        joined.clock.now += 1.0
        joined.members.tick(joined.clock.now)
    status = joined.status()
    assert status["engines"] == []
    assert [(one["engine"], one["what"], one["ago"]) for one in status["failures"]] == [
        ("decode 1", "is declared dead: it gives no sign of life", 2.0),
        ("decode 1", "is silent: its registrations stopped", 4.0),
    ]


def test_many_readers_cost_what_one_does(joined: Joined) -> None:
    joined.register("p", Role.PREFILL)
    first = joined._status.json()
    joined.register("d", Role.DECODE)
    joined.clock.now += 0.4
    assert joined._status.json() is first
    joined.clock.now += 0.2
    assert b"decode 1" in joined._status.json()


# --- Recent failures


def test_equal_incidents_are_counted_and_the_memory_is_bounded() -> None:
    clock = Clock()
    incidents = Incidents(clock)
    for _ in range(1000):
        incidents.note("decode 1", "answers 500", "x")
        incidents.note("decode 2", "answers 500", "y")
    assert [(one.engine, one.times, one.detail) for one in incidents.latest()] == [
        ("decode 2", 1000, "y"),
        ("decode 1", 1000, "x"),
    ]
    clock.now += 3600
    incidents.note("decode 1", "answers 500", "z")
    assert (incidents.latest()[0].times, incidents.latest()[0].detail) == (1, "z")
    for number in range(1000):
        incidents.note(f"decode {number}", "answers 502", "")
    assert len(incidents.latest()) == 64
    assert incidents.latest()[0].engine == "decode 999"


def test_first_bytes_are_reported_by_slice_of_time() -> None:
    clock = Clock()
    first_bytes = FirstBytes(clock)
    for hundredths in range(1, 101):
        first_bytes.observe(hundredths / 100)
    assert first_bytes.latest().answers == 100
    assert all(one.answers == 0 and one.p50 is None for one in first_bytes.slices())
    clock.now += SLICE_SECONDS
    slices = first_bytes.slices()
    assert [one.answers for one in slices] == [0] * (SLICES - 1) + [100]
    assert slices[-1].p50 == pytest.approx(0.5, rel=0.03)
    assert slices[-1].p99 == pytest.approx(0.99, rel=0.03)
    clock.now += SLICES * SLICE_SECONDS
    assert first_bytes.latest().p99 is None
    assert not any(one.answers for one in first_bytes.slices())


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 3600.0])
def test_first_bytes_out_of_the_ordinary_are_counted_too(seconds: float) -> None:
    first_bytes = FirstBytes(Clock())
    first_bytes.observe(seconds)
    assert first_bytes.latest().answers == 1


def test_first_bytes_take_no_more_memory_than_their_slices() -> None:
    clock = Clock()
    first_bytes = FirstBytes(clock)
    for _ in range(10 * SLICES):
        first_bytes.observe(0.01)
        clock.now += SLICE_SECONDS
    assert len(first_bytes._over) == SLICES


async def test_metrics_have_the_requests_and_the_state_of_each_engine() -> None:
    streams = FedStream()
    async with cluster(answer_ok, streams) as (p, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await within(d.arrived.wait())
        requests, ready = "kv_connector_router_engine_requests", "kv_connector_router_engine_ready"
        await until_metric(client, f'{requests}{{engine="{d.url}"}}', 1)
        for engine, side in ((p, "prefill"), (d, "decode")):
            assert await metric(client, f'{ready}{{engine="{engine.url}",side="{side}"}}') == 1
        for chunk in (DONE, None):
            streams.queue.put_nowait(chunk)
        await within(asking)
        await until_metric(client, f'{requests}{{engine="{d.url}"}}', 0)


async def test_metrics_have_the_sizes_of_what_the_router_remembers() -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        assert await metric(client, "kv_connector_router_sessions ") == 0
        body = {"prompt": "x" * 4096, "max_tokens": 4, "user": "alice"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        await until_metric(client, "kv_connector_router_sessions ", 1)
        assert await metric(client, "kv_connector_router_prefixes ") > 0
