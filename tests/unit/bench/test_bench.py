"""The benchmark: what counts as arrived, how contestants are compared, and how a failing contestant ends."""

import asyncio
import json
import multiprocessing
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke
from serving import Handler, serving
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kv_connector.bench import harness, machine, report, tables
from kv_connector.bench.bench_memory import BenchMemory
from kv_connector.bench.contestant import Contestant, ContestantSide, Face, SideRole
from kv_connector.bench.contestants import CONTESTANTS
from kv_connector.bench.harness import measure_round
from kv_connector.bench.pd import load
from kv_connector.bench.records import FailedMeasurement, Idle, Latency, Record, Throughput
from kv_connector.bench.workloads import POOL_BYTES, WORKLOADS, PageWorkload, Slots
from kv_connector.cli.bench import app

PAGES = PageWorkload("4096x4K", 4096, 4 << 10)
SMALL_POOL = 2 * PAGES.bytes
"""Bytes of a pool in which PAGES can lie. One of POOL_BYTES takes each side a second of a core."""
INSTALLED_WITH_US = [contestant for contestant in CONTESTANTS if contestant.module is None]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here measures speed, so no test waits for a quiet machine. Each test ends what it starts."""
    monkeypatch.setattr(machine, "QUIET_PATIENCE", 0.0)
    monkeypatch.setattr(harness, "LATENCY_ITERATIONS", (20, 20))
    monkeypatch.setattr(harness, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(harness, "POOL_BYTES", SMALL_POOL)
    before = set(multiprocessing.active_children())  # other tests' processes, which live for the whole run
    yield
    assert set(multiprocessing.active_children()) <= before


# --- workloads and pools


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_workloads_pages_are_different_and_lie_in_the_pool(workload: PageWorkload) -> None:
    slots = workload.slots(seed=1)
    assert len(np.unique(slots)) == workload.pages
    assert slots.min() >= 0
    assert (int(slots.max()) + 1) * workload.page_bytes <= POOL_BYTES


def test_slots_come_from_the_seed() -> None:
    assert (PAGES.slots(1) == PAGES.slots(1)).all()
    assert (PAGES.slots(1) != PAGES.slots(2)).any()


def test_a_pool_notices_one_wrong_byte_inside_and_one_outside_its_pages() -> None:
    pool = BenchMemory(1 << 20, shared=False)
    pool.zero()
    slots = np.array([3, 1], dtype=np.int64)
    pool.memory[3 * 4096] = 7
    before = pool.digest(slots, 4096)
    assert pool.zero_outside(slots, 4096)
    pool.memory[2 * 4096 - 1] = 1
    assert pool.digest(slots, 4096) != before
    assert pool.zero_outside(slots, 4096)
    pool.memory[2 * 4096] = 1
    assert not pool.zero_outside(slots, 4096)


# --- the harness


@pytest.mark.parametrize("contestant", INSTALLED_WITH_US, ids=lambda contestant: contestant.name)
def test_every_page_arrives_and_nothing_else_changes(contestant: Contestant) -> None:
    (record,) = measure_round(1, contestant, [PAGES.name], pin=False)
    assert isinstance(record, Throughput), record
    assert record.verified
    assert record.bytes == PAGES.bytes
    assert len(record.seconds) == harness.REPETITIONS
    assert min(record.seconds) > 0


@pytest.mark.parametrize("name", ["socket", "host-shared", "tcp"])
def test_latency_is_measured_for_each_face_with_and_without_rest(name: str) -> None:
    (contestant,) = (c for c in CONTESTANTS if c.name == name)
    records = list(measure_round(1, contestant, ["latency", "idle"], pin=True))
    *latencies, idle = records
    assert isinstance(idle, Idle)
    faces = {Face.THREAD} if name == "socket" else set(Face)
    found = set()
    for record in latencies:
        assert isinstance(record, Latency), record
        assert len(record.microseconds) == 20
        assert min(record.microseconds) > 0
        found.add((record.face, record.pause_us))
    assert found == {(face, pause) for face in faces for pause in harness.PAUSES_US}


class FakeSide(ContestantSide):
    """Connects, and moves nothing."""

    def connect(self, peer: Connection) -> None:
        peer.send("hello")
        peer.recv()

    def prepare(self, workload: PageWorkload, source_slots: Slots, target_slots: Slots) -> None:
        """Does nothing."""

    def transfer(self) -> None:
        """Reports the transfer as done."""


class BrokenSide(FakeSide):
    """Fails in one method on one side, or ends its process there."""

    def __init__(self, role: SideRole, pool: BenchMemory, *, where: str, ends: bool) -> None:
        super().__init__(role, pool)
        self.where = where
        self.ends = ends

    def connect(self, peer: Connection) -> None:
        if self.role is SideRole.TARGET:
            self.maybe("connect")
        super().connect(peer)

    def transfer(self) -> None:
        self.maybe("transfer")

    def maybe(self, where: str) -> None:
        if where != self.where:
            return
        if self.ends:
            os._exit(3)
        raise RuntimeError("the cable is loose")


def measure(make: object) -> list[Record]:
    contestant = Contestant("fake", "a fake", make)  # type: ignore[arg-type]
    return list(measure_round(1, contestant, [PAGES.name], pin=False))


def test_a_contestant_that_moves_nothing_is_not_verified() -> None:
    (record,) = measure(FakeSide)
    assert isinstance(record, Throughput)
    assert not record.verified
    assert not report.all_verified([record])


@pytest.mark.parametrize("where", ["connect", "transfer"])
@pytest.mark.parametrize(("ends", "words"), [(False, "the cable is loose"), (True, "its process ended")])
def test_a_contestant_that_fails_is_recorded_with_its_reason(where: str, ends: bool, words: str) -> None:
    (record,) = measure(partial(BrokenSide, where=where, ends=ends))
    assert isinstance(record, FailedMeasurement)
    assert record.case == ("start" if where == "connect" else PAGES.name)
    assert words in record.reason


# --- the comparison


def throughput(contestant: str, number: int, gb_per_second: float, workload: str = "1024x64K") -> Throughput:
    return Throughput(
        round=number,
        contestant=contestant,
        workload=workload,
        bytes=10**9,
        seconds=[1 / gb_per_second] * 3,
        cpu_initiator=0.0,
        cpu_target=0.0,
        foreign_cores=0.0,
        verified=True,
    )


def latency(contestant: str, face: Face, microseconds: float, pause_us: int = 0) -> Latency:
    return Latency(
        round=1, contestant=contestant, face=face, pause_us=pause_us, microseconds=[microseconds] * 9
    )


def find(ours: str, baseline: str, case: str) -> report.Aim:
    (aim,) = (a for a in report.aims() if (a.ours, a.baseline, a.case) == (ours, baseline, case))
    return aim


def test_a_ratio_compares_within_each_round() -> None:
    # The machine was four times slower in round 2. Within each round, ours is at 0.85 and 0.95 of the other.
    records = [
        throughput("memcpy", 1, 20.0),
        throughput("host-shared", 1, 17.0),
        throughput("memcpy", 2, 5.0),
        throughput("host-shared", 2, 4.75),
        throughput("host-shared", 3, 100.0),
    ]
    aim = find("host-shared", "memcpy", "1024x64K")
    assert report.ratio(aim, records) == pytest.approx(0.9)
    assert aim.reached(0.8)
    assert not aim.reached(0.79)


def test_a_ratio_needs_both_sides_in_one_round() -> None:
    aim = find("tcp", "mooncake", "1024x64K")
    assert report.ratio(aim, [throughput("tcp", 1, 3.0)]) is None
    assert report.ratio(aim, [throughput("tcp", 1, 3.0), throughput("mooncake", 2, 1.0)]) is None


def test_latency_is_compared_without_python_and_back_to_back() -> None:
    aim = find("tcp", "socket", "latency")
    records = [
        latency("socket", Face.THREAD, 8.0),
        latency("socket", Face.THREAD, 80.0, pause_us=1000),
        latency("tcp", Face.WORKER, 12.0),
        latency("tcp", Face.THREAD, 40.0),
        latency("tcp", Face.PYTHON, 90.0),
    ]
    assert report.ratio(aim, records) == pytest.approx(1.5)
    assert aim.reached(1.5)
    assert not aim.reached(1.51)


def test_small_pages_are_to_be_twice_as_fast_as_the_rivals() -> None:
    for rival in ("mooncake", "nixl-tcp"):
        assert find("tcp", rival, "4096x16K").limit == 2
        assert find("tcp", rival, "4096x4K").limit == 2
        assert find("tcp", rival, "1024x64K").limit == 1


# --- the command line


run = partial(invoke, app)


@pytest.mark.parametrize("words", [("--contestants", "memcopy"), ("--cases", "64K")])
def test_an_unknown_name_is_refused_with_the_known_ones(words: tuple[str, str]) -> None:
    status, output = run(*words)
    assert status == 2
    assert words[1] in output
    assert ("process_vm_writev" if words[0] == "--contestants" else "1024x64K") in output


def test_a_run_prints_conditions_tables_and_ratios_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    words = ("--contestants", "process*,host", "--cases", "*x4K", "--rounds", "1", "--json", str(file))
    status, output = run(*words)
    assert status == 0, output
    assert output.index("Conditions") < output.index("GB/s") < output.index("Ratios to the aims")
    assert "host, foreign memory" in output
    assert "at least 0.9" in output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["conditions", "throughput", "throughput"]
    assert all(line["verified"] for line in lines[1:])
    assert lines[0]["cores"] >= 1


def test_contestant_that_cannot_be_imported_is_left_out_with_the_reason() -> None:
    here = Contestant("here", "one that is here", FakeSide, module="json")
    missing = Contestant("gone", "one that is not", FakeSide, module="no_such_module")
    console = tables.make_console()
    with console.capture() as printed:
        assert tables.leave_out_missing([missing, here], console) == [here]
    assert "one that is not" in printed.get()
    assert "No module named 'no_such_module'" in printed.get()


# --- P/D load


async def serve_load(handler: Handler, asked: load.PromptLoad) -> load.ServedLoad:
    async with serving(handler) as url:
        return await asyncio.to_thread(load.serve, url, asked, 1)


@pytest.mark.anyio
async def test_the_load_keeps_its_concurrency_and_reads_tokens_in_order() -> None:
    at_once = most = 0
    three = asyncio.Barrier(3)

    async def stream(request: Request) -> Response:
        nonlocal at_once, most
        body = await request.json()
        at_once += 1
        most = max(most, at_once)
        async with asyncio.timeout(60):
            await three.wait()  # blocks until three requests are served at a time

        async def events() -> AsyncIterator[str]:
            nonlocal at_once
            for index in range(load.OUTPUT_TOKENS):
                token = body["prompt"][index]
                yield "data: " + json.dumps({"choices": [{"token_ids": [token]}]}) + "\n\n"
                await asyncio.sleep(0)
            at_once -= 1
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    served = await serve_load(stream, load.PromptLoad(prompt_tokens=32, concurrency=3, requests=9))
    assert most == 3
    assert len(served.answers) == 9
    assert all(0 < answer.ttft <= served.seconds for answer in served.answers)
    # Each answer echoes its own prompt: all answers differ, and none is mixed up.
    assert len({answer.tokens for answer in served.answers}) == 9


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (JSONResponse({"error": "no blocks left"}, 500), "no blocks left"),
        (Response('data: {"error": {"message": "engine died"}}\n\n', media_type="text/event-stream"), "died"),
        (Response("data: [DONE]\n\n", media_type="text/event-stream"), "0 tokens"),
    ],
    ids=["status", "in the stream", "too short"],
)
async def test_a_failed_request_fails_the_load_with_the_servers_words(answer: Response, words: str) -> None:
    async def refuse(_: Request) -> Response:
        return answer

    with pytest.raises(load.LoadError, match=words):
        await serve_load(refuse, load.PromptLoad(prompt_tokens=32, concurrency=1, requests=1))
