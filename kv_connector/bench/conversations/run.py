"""The run of `kv-connector bench conversations`: calibration, load, counters, and the report."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from kv_connector.bench.conversations.client import CompletionServer, TurnError
from kv_connector.bench.conversations.counters import (
    MetricsSource,
    Reading,
    engine,
    predictions,
    read_all,
    read_settled,
)
from kv_connector.bench.conversations.load import ConversationLoad, Manner, calibrate
from kv_connector.bench.conversations.prompts import Api
from kv_connector.bench.conversations.report import print_results, totals
from kv_connector.bench.conversations.results import Turn
from kv_connector.bench.conversations.trace import TracedRequest
from kv_connector.bench.conversations.workload import ConversationShape, Pace
from kv_connector.bench.machine import conditions
from kv_connector.bench.records import append
from kv_connector.bench.tables import print_conditions

KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Generated:
    """Conversations of the generator."""

    shape: ConversationShape
    pace: Pace

    def __str__(self) -> str:
        shape, pace = self.shape, self.pace
        loop = f"{pace.at_once} at a time" if pace.at_once else f"{pace.rate:g} a second"
        return (
            f"{shape.conversations} conversations of {shape.turns} turns, {loop}; tokens: system prompt "
            f"{shape.system}, first message {shape.first}, later ones {shape.message}, answers "
            f"{shape.answer}; think time {pace.think_seconds:g} s"
        )


@dataclass(frozen=True)
class Traced:
    """The requests of a trace file."""

    file: Path
    requests: Sequence[TracedRequest]
    speed: float

    def __str__(self) -> str:
        return f"{len(self.requests)} lines of {self.file}, at {self.speed:g} times their speed"


@dataclass(frozen=True)
class ConversationsPlan:
    urls: Sequence[str]
    work: Generated | Traced
    api: Api
    model: str
    """Empty: the first model that the first endpoint serves."""
    seed: int
    ignore_eos: bool
    session_header: str
    timeout: float
    """Limit of one request, in seconds."""
    engines: Sequence[MetricsSource]
    compare: str
    """URL of the endpoint whose answers are right; empty: none."""
    json: Path | None


class Interrupted(Exception):
    """The user ended the run. The results were printed."""


def run(plan: ConversationsPlan, console: Console) -> bool:
    """Measures and prints. Returns whether no turn failed or differed. Interrupted: by Ctrl-C."""
    where = conditions(
        {
            "endpoints": ", ".join(plan.urls),
            "load": str(plan.work),
            "requests": f"{plan.api}, greedy, seed {plan.seed}",
            "compared with": plan.compare or "nothing",
        }
    )
    print_conditions(console, where)
    append(plan.json, where)
    measurement = _Measurement(plan)
    interrupted = False
    try:
        with console.status("calibration") as status:
            asyncio.run(measurement.measure(status))
    except TurnError as error:
        console.print(f"[red]failed before the first turn:[/] {escape(str(error))}")
        return False
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - measurement.began
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C leaves the counters out
        asyncio.run(measurement.finish())
    return measurement.report(console, seconds, interrupted=interrupted)


class _Measurement:
    def __init__(self, plan: ConversationsPlan) -> None:
        self._plan = plan
        self._sources = [*plan.engines, *(MetricsSource(url, f"{url}/metrics") for url in plan.urls)]
        self._before: list[Reading] = []
        self._after: list[Reading] = []
        self._turns: list[Turn] = []
        self.began = time.perf_counter()

    async def measure(self, status: Status) -> None:
        """Sends the whole load. TurnError: the endpoint cannot be measured."""
        plan = self._plan
        key = os.environ.get(KEY_VARIABLE, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with _http() as http:
            endpoint = partial(CompletionServer, http, timeout=plan.timeout, headers=headers)
            endpoints = [endpoint(url) for url in plan.urls]
            compare = endpoint(plan.compare) if plan.compare else None
            manner = Manner(
                api=plan.api,
                model=plan.model or await endpoints[0].model(),
                seed=plan.seed,
                ignore_eos=plan.ignore_eos,
                session_header=plan.session_header,
            )
            scale = await calibrate(endpoints[0], manner)
            self._before = await read_all(http, self._sources)

            def record(turn: Turn) -> None:
                self._turns.append(turn)
                append(plan.json, turn)
                status.update(f"{len(self._turns)} turns ended")

            load = ConversationLoad(endpoints, manner, scale, record, compare)
            self.began = time.perf_counter()
            if isinstance(plan.work, Generated):
                await load.converse(plan.work.shape, plan.work.pace)
            else:
                await load.replay(plan.work.requests, plan.work.speed)

    async def finish(self) -> None:
        """Reads the counters after the load."""
        async with _http() as http:
            self._after = await read_settled(http, self._sources)

    def report(self, console: Console, seconds: float, *, interrupted: bool) -> bool:
        missing = [Reading({}, "not read") for _ in self._sources]
        read = list(zip(self._sources, self._before or missing, self._after or missing, strict=True))
        count = len(self._plan.engines)
        engines = [engine(*one) for one in read[:count]]
        hits = [hit for one in read[count:] for hit in predictions(*one)]
        total = totals(self._turns, engines, seconds, interrupted=interrupted)
        for result in (*engines, *hits, total):
            append(self._plan.json, result)
        print_results(console, self._turns, engines, hits, total)
        if interrupted:
            raise Interrupted
        return not total.failures and not total.differences


@contextlib.asynccontextmanager
async def _http() -> AsyncIterator[aiohttp.ClientSession]:
    # No limit of connections: a queue in the client would count as the server's time to first token.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        yield http
