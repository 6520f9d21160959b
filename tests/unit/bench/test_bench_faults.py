"""The comparison under faults, without engines: its clients' records, the empty pool, and the table."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import invoke
from serving import serving
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kv_connector.bench.pd import clients, faults
from kv_connector.bench.pd.clients import CLIENTS, OUTPUT_TOKENS, FaultClients, until_empty
from kv_connector.bench.pd.deployments import Deployment, RunningDeployment
from kv_connector.bench.pd.faults import FAULTS, Fault, FaultPlan, Suffered
from kv_connector.bench.pd.load import LoadError
from kv_connector.bench.pd.mooncake_proxy import Proxy
from kv_connector.bench.tables import make_console
from kv_connector.cli.bench import app
from kv_connector.lab.cluster import LocalCluster
from kv_connector.lab.process import StartError

ABORT, KILL_D, KILL_P = FAULTS
# The fake engine answers a prompt with the prompt's first tokens.
EXPECTED = [tuple(prompt[:OUTPUT_TOKENS]) for prompt in clients.prompts()]
LIMIT = 30.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_SECONDS", "LOOK_SECONDS", "PAUSE_SECONDS", "MOMENT_SECONDS"):
        monkeypatch.setattr(clients, name, 0.02)


class Pair:
    """A fake of both engines and a router: it echoes prompts until it is killed."""

    def __init__(self) -> None:
        self.alive = True
        self.answers = True
        self.wrong = False
        self.requests = self.now = self.most = 0
        self.gone = asyncio.Event()

    async def completions(self, request: Request) -> Response:
        if not self.alive:
            return JSONResponse({"error": "no engine is ready"}, 503)
        tokens = (await request.json())["prompt"][self.wrong : self.wrong + OUTPUT_TOKENS]
        return StreamingResponse(self._stream(tokens), media_type="text/event-stream")

    async def _stream(self, tokens: Sequence[int]) -> AsyncIterator[str]:
        self.requests += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for token in tokens:
                if not self.alive:
                    yield 'data: {"error": {"message": "D is gone"}}\n\n'
                    return
                yield "data: " + json.dumps({"choices": [{"token_ids": [token]}]}) + "\n\n"
                await asyncio.sleep(0)
            if not self.answers:
                await self.gone.wait()
            yield "data: [DONE]\n\n"
        finally:
            self.now -= 1

    def kill(self) -> None:
        self.alive = False


@asynccontextmanager
async def serving_pair() -> AsyncIterator[tuple[Pair, FaultClients]]:
    pair = Pair()
    async with serving(pair.completions) as url:
        yield pair, FaultClients(url, EXPECTED)


class Pool:
    """An engine with given KV usages, one for each query. The last one repeats forever."""

    name = "an engine"

    def __init__(self, *usage: float | Exception, running: bool = True) -> None:
        self._usage = list(usage)
        self._running = running

    def running(self) -> bool:
        return self._running

    def log_tail(self) -> str:
        return "out of memory"

    def metric(self, name: str) -> float:
        assert name == "vllm:kv_cache_usage_perc"
        usage = self._usage.pop(0) if len(self._usage) > 1 else self._usage[0]
        if isinstance(usage, Exception):
            raise usage
        return usage


def engines(*pools: Pool) -> Any:
    return pools


def suffered(one: FaultClients, empty: float | None = 0.0, right: float | None = 0.0) -> Suffered:
    return faults._suffered(one, "ours", "a fault", empty, right)


# --- the clients


@pytest.mark.anyio
async def test_clients_leave_at_their_moments_and_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOMENT_SECONDS", 0.3)
    async with serving_pair() as (pair, one):
        pair.answers = False
        assert await one.leave(engines(Pool(0.0), Pool(0.0)), LIMIT) is not None
        record = suffered(one)
        assert (record.later, record.left, record.failed_later) == (clients.ABORTED, clients.ABORTED, 0)
        assert (record.under_way, record.answered) == (0, 0)
        assert pair.requests <= clients.ABORTED
        # a client's next request may arrive before the server has seen the last one end
        assert pair.most <= 2 * CLIENTS
        pair.gone.set()


@pytest.mark.anyio
async def test_client_with_an_answer_before_the_moment_has_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOMENT_SECONDS", 1e6)
    async with serving_pair() as (_, one):
        await one.leave(engines(Pool(0.0)), LIMIT)
        record = suffered(one)
        assert (record.left, record.failed_later) == (0, 0)
        assert (record.answered, record.wrong) == (clients.ABORTED, 0)


@pytest.mark.anyio
async def test_kill_is_reported_to_every_client_once() -> None:
    async with serving_pair() as (pair, one):
        empty = await one.lose(pair.kill, engines(Pool(0.5, 0.5, 0.0)), LIMIT)
        record = suffered(one, empty)
        assert record.answered >= clients.ANSWERS_BEFORE
        assert record.wrong == 0
        assert record.failed + record.failed_later == CLIENTS
        assert record.under_way <= CLIENTS
        told = max(request.ended for request in one.requests if request.problem) - one.fault
        assert record.last_failure_s == pytest.approx(told, abs=0.01)
        assert empty is not None
        # No client has an answer that began after the kill, and no client retries.
        assert record.later == record.failed_later


@pytest.mark.anyio
async def test_unnoticed_kill_ends_the_load_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "AFTER_SECONDS", 0.0)
    async with serving_pair() as (_, one):
        assert await one.lose(lambda: None, engines(Pool(0.0)), LIMIT) is not None
        record = suffered(one)
        assert (record.failed, record.failed_later, record.last_failure_s) == (0, 0, 0.0)
        assert record.later == CLIENTS, "each has asked once more, however long that took"


@pytest.mark.anyio
async def test_without_service_there_is_nothing_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_pair() as (pair, one):
        pair.kill()

        async def out_of_time(steady: Coroutine[Any, Any, Any], _: float) -> None:
            """Stands in for asyncio.wait_for: the time is over once a client has its answer."""
            steady.close()
            async with asyncio.timeout(LIMIT):
                while not one.requests:
                    await asyncio.sleep(0.001)
            raise TimeoutError

        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "wait_for", out_of_time)
            with pytest.raises(LoadError, match="no engine is ready"):
                await one.lose(pytest.fail, engines(Pool(0.0)), LIMIT)


def test_requests_count_by_when_they_began_and_ended() -> None:
    one = FaultClients("", EXPECTED)
    one.fault = 10.0
    right, wrong = EXPECTED[0], EXPECTED[1]
    for began, ended, tokens, problem in (
        (1, 2, right, ""),
        (1, 3, (), "refused"),
        (9, 11, wrong, ""),
        (9, 12.5, (), "broken"),
        (10, 11, (), "refused"),
        (11, 12, (), ""),
    ):
        one.requests.append(clients.FinishedRequest(0, began, ended, tokens, problem))
    record = suffered(one, empty=None, right=1.234)
    assert (record.failed_before, record.under_way, record.failed) == (1, 2, 1)
    assert (record.later, record.failed_later, record.left) == (2, 1, 1)
    assert (record.last_failure_s, record.empty_s, record.right_s) == (2.5, None, 1.23)
    assert (record.answered, record.wrong) == (2, 1)


@pytest.mark.anyio
async def test_there_is_service_again_with_the_first_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "RIGHT_SECONDS", LIMIT)
    async with serving_pair() as (pair, one):
        pair.wrong = True
        looking = asyncio.create_task(one.until_right())
        while len(one.probes) < 2:
            await asyncio.sleep(0.001)
        pair.wrong = False
        seconds = await looking
        assert seconds is not None
        assert seconds >= one.probes[-1].ended - one.probes[0].ended
        # Answers with wrong tokens are answers, and count.
        record = suffered(one)
        assert record.answered == len(one.probes)
        assert record.wrong == len(one.probes) - 1


@pytest.mark.anyio
async def test_no_right_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "RIGHT_SECONDS", 0.1)
    async with serving_pair() as (pair, one):
        pair.kill()
        assert await one.until_right() is None
        assert one.probes


# --- The time until a pool is empty


@pytest.mark.anyio
async def test_a_pool_is_empty_from_the_last_block_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SETTLE_SECONDS", 1.0)
    # The 0 in between is the metric of an older step.
    since = time.monotonic()
    busy = Pool(0.0, 0.5, 0.0, ConnectionRefusedError(), 0.5, 0.0)
    seconds = await until_empty(engines(busy, Pool(0.0)), since, LIMIT)
    assert seconds is not None
    assert 4 * clients.LOOK_SECONDS <= seconds <= time.monotonic() - since - 1.0


@pytest.mark.anyio
@pytest.mark.parametrize("last", [0.01, TimeoutError("it does not answer")])
async def test_blocks_that_stay_are_none(last: float | Exception) -> None:
    assert await until_empty(engines(Pool(0.0), Pool(last)), time.monotonic(), 0.1) is None


@pytest.mark.anyio
async def test_pool_is_not_taken_as_empty_before_the_clients_are_done() -> None:
    wait = asyncio.Event()

    async def client() -> None:
        await wait.wait()

    task = asyncio.create_task(client())
    pool = Pool(0.0)
    empty = asyncio.create_task(until_empty(engines(pool), time.monotonic(), LIMIT, [task]))
    done, _ = await asyncio.wait([empty], timeout=5 * clients.SETTLE_SECONDS)
    assert not done
    wait.set()
    assert await empty == 0.0  # it was empty all the while


@pytest.mark.anyio
async def test_an_engine_that_ends_by_itself_is_a_finding() -> None:
    with pytest.raises(LoadError, match=r"(?s)an engine ended by itself.*out of memory"):
        await until_empty(engines(Pool(0.0, running=False)), time.monotonic(), LIMIT)


# --- Mooncake's proxy


@pytest.mark.anyio
async def test_mooncakes_proxy_queries_the_engine_again_once_a_prefill_broke_off() -> None:
    names = iter(("first", "second"))
    asked: list[str] = []

    async def query(_: Request) -> Response:
        return JSONResponse({"0": {"engine_id": next(names)}})

    async def engine(request: Request) -> Response:
        transfer = (await request.json())["kv_transfer_params"]
        if transfer["do_remote_prefill"]:
            asked.append(transfer["remote_engine_id"])
        return JSONResponse({})

    async def body() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    async with serving(engine, query=query) as url:
        proxy = Proxy(url, url, url)
        async with httpx.AsyncClient(verify=False) as proxy._client:
            for prefill in (url, "http://127.0.0.1:9", url):  # no process listens at port 9
                proxy._prefill_url = prefill
                await proxy.completions(Request(scope, body))
                await asyncio.gather(*proxy._prefills)
    assert asked == ["first", "first", "second"]


# --- the table, the run and the command line


def record(fault: Fault, **more: Any) -> Suffered:
    values = dict.fromkeys(Suffered.__struct_fields__, 0) | {"deployment": "ours", "fault": fault.name}
    return Suffered(**(values | more))


def test_cell_lists_the_outcomes() -> None:
    text = faults.cell(
        KILL_D, record(KILL_D, under_way=8, failed=7, last_failure_s=0.31, empty_s=10.2, right_s=1.5)
    )
    assert text.splitlines() == [
        "in flight: 7 of 8 failed",
        "later: 0 of 0 failed",
        "last failure after 0.31 s",
        "prefill engine empty after 10.2 s",
        "decode engine restarted: right answer after 1.5 s",
        "0 of 0 answers wrong",
    ]
    text = faults.cell(ABORT, record(ABORT, later=40, left=39, failed_later=1, empty_s=None, right_s=0.2))
    assert text.splitlines() == [
        "39 of 40 left, 1 failed",
        "both engines empty after > 60 s",
        "then right answer after 0.2 s",
        "0 of 0 answers wrong",
    ]
    more = {"failed_before": 1, "empty_s": None, "right_s": None, "answered": 20, "wrong": 2}
    assert faults.cell(KILL_P, record(KILL_P, **more)).splitlines() == [
        "before: 1 failed",
        "in flight: 0 of 0 failed",
        "later: 0 of 0 failed",
        "decode engine empty after > 180 s",
        "prefill engine restarted: right answer after > 60 s",
        "2 of 20 answers wrong",
    ]
    assert faults.cell(KILL_P, None) == "-"


@contextmanager
def _nothing_started(deployment: Deployment, *_: object) -> Iterator[tuple[None, Any]]:
    if deployment.name == "nixl":
        raise StartError("nixl-prefill was not ready in time")
    yield None, deployment


def _fail(_: LocalCluster, __: ExitStack) -> RunningDeployment:
    pytest.fail("it was started")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_run_goes_on_after_a_deployment_that_fails_and_wrong_tokens_fail_it(
    wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def right_answers(_: str) -> list[tuple[int, ...]]:
        return EXPECTED

    monkeypatch.setattr(faults, "_started", _nothing_started)
    monkeypatch.setattr(faults, "right_answers", right_answers)
    monkeypatch.setattr(faults, "ALONE", Alone())
    monkeypatch.setattr(faults, "_suffer", lambda _, fault, *__: record(fault, answered=3, wrong=wrong))
    pairs = tuple(Deployment(name, f"the {name}", _fail) for name in ("nixl", "ours"))
    file = tmp_path / "faults.jsonl"
    console = make_console()
    for deployments, good in ((pairs, False), (pairs[1:], not wrong)):
        with console.capture() as printed:
            assert faults.run(FaultPlan(deployments, (ABORT, KILL_D), file), console) is good
        assert f"{wrong} of 3 answers wrong" in printed.get()
    with console.capture() as printed:
        faults.run(FaultPlan(pairs, (ABORT,), None), console)
    assert "the nixl, 40 clients leave: nixl-prefill was not ready in time" in printed.get()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["conditions", "fault", "fault"] * 2


class Alone:
    name = "alone"
    label = "one engine"
    url = ""


run = partial(invoke, app, "faults")


def test_the_command_line_names_its_options() -> None:
    status, output = run("--help")
    assert status == 0
    for option in ("--deployments", "--faults", "--json"):
        assert option in output


@pytest.mark.parametrize(
    ("option", "name", "known"),
    [("--deployments", "alone", "ours, nixl, mooncake"), ("--faults", "kill", "abort, kill-d, kill-p")],
)
def test_an_unknown_name_is_refused_with_the_known_ones(option: str, name: str, known: str) -> None:
    status, output = run(option, name)
    assert status == 2
    assert name in output
    assert known in output


def test_names_choose_what_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: list[FaultPlan] = []
    monkeypatch.setattr(faults, "run", lambda plan, _: plans.append(plan) or True)
    status, output = run("--deployments", "n*,ours", "--faults", "kill-*", "--json", str(tmp_path / "x"))
    assert status == 0, output
    (plan,) = plans
    assert [deployment.name for deployment in plan.deployments] == ["ours", "nixl"]
    assert plan.faults == (KILL_D, KILL_P)
    assert plan.json == tmp_path / "x"
