"""Clients of a pair of engines to which a fault happens, with the outcome of each request."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from kv_connector.bench.pd.load import REQUEST_SECONDS, TOKENS, LoadError, complete
from kv_connector.lab.cluster import EngineProcess

SEED = 1
PROMPT_TOKENS = (300, 380, 460, 540, 620, 700)
OUTPUT_TOKENS = 24
CLIENTS = 8
ABORTED = 40
# With this many clients an answer takes about a second. So moments within one second hit prefill, transfer
# and decode.
MOMENT_SECONDS = 1.0
# After two answers a client the load is steady.
ANSWERS_BEFORE, BEFORE_SECONDS = 2 * CLIENTS, 120.0
# If no request notices a kill, the load ends after this time nevertheless. It is twice our own dead time.
AFTER_SECONDS = 10.0
# A client that got an error retries after a pause. One that checks for service does not wait long for an
# answer.
PAUSE_SECONDS, ATTEMPT_SECONDS, RIGHT_SECONDS = 0.2, 10.0, 60.0
# The metric is from an engine's last step. It may be 0 before the step that takes blocks has ended.
LOOK_SECONDS, SETTLE_SECONDS = 0.1, 2.0

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class FinishedRequest:
    """The outcome of one request. Without tokens and problem, its client left."""

    prompt: int
    began: float
    ended: float
    tokens: Tokens
    problem: str


class FaultClients:
    """The clients of one deployment, through one fault. `expected` are the right answers to `prompts`."""

    def __init__(self, url: str, expected: Sequence[Tokens]) -> None:
        self._url = url
        self._prompts = prompts()
        self._rng = np.random.default_rng(SEED)
        self.expected = expected
        self.fault = math.inf
        """Time of the fault."""
        self.requests: list[FinishedRequest] = []
        self.probes: list[FinishedRequest] = []
        """Requests of `until_right`."""

    async def leave(self, engines: Sequence[EngineProcess], limit: float) -> float | None:
        """Sends requests whose clients close their connections at any moment.

        Returns the result of `until_empty`.
        """
        turn = asyncio.Semaphore(CLIENTS)
        async with _http(self._url) as http:
            self.fault = time.monotonic()

            async def one(prompt: int, seconds: float) -> None:
                async with turn:
                    self.requests.append(await self._ask(http, prompt, seconds))

            moments = self._rng.uniform(0, MOMENT_SECONDS, ABORTED).tolist()
            await asyncio.gather(*(one(i % len(self._prompts), moment) for i, moment in enumerate(moments)))
        return await until_empty(engines, time.monotonic(), limit)

    async def lose(
        self, kill: Callable[[], None], others: Sequence[EngineProcess], limit: float
    ) -> float | None:
        """Sends requests all the time, kills an engine at some moment, and continues until every client got
        an answer or error.

        Returns the result of `until_empty` for the other engines. LoadError: there is no service to begin
        with.
        """
        steady = asyncio.Event()
        async with _http(self._url) as http:

            async def one() -> None:
                asked_since = False
                while not asked_since or time.monotonic() < self.fault + AFTER_SECONDS:
                    asked_since = time.monotonic() > self.fault
                    request = await self._ask(http, int(self._rng.integers(len(self._prompts))))
                    self.requests.append(request)
                    if sum(bool(request.tokens) for request in self.requests) >= ANSWERS_BEFORE:
                        steady.set()
                    if request.problem:
                        if request.ended > self.fault:
                            return
                        await asyncio.sleep(PAUSE_SECONDS)

            tasks = [asyncio.create_task(one()) for _ in range(CLIENTS)]
            try:
                await asyncio.wait_for(steady.wait(), BEFORE_SECONDS)
                await asyncio.sleep(self._rng.uniform(0, MOMENT_SECONDS))
                self.fault = time.monotonic()
                kill()
                empty = await until_empty(others, self.fault, limit, tasks)
                await asyncio.gather(*tasks)
            except TimeoutError:
                problems = {request.problem for request in self.requests}
                raise LoadError(f"no {ANSWERS_BEFORE} answers in {BEFORE_SECONDS:g} s: {problems}") from None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return empty

    async def until_right(self) -> float | None:
        """Returns the seconds until an answer is right; None after RIGHT_SECONDS."""
        async with _http(self._url) as http:
            start = time.monotonic()
            while (rest := start + RIGHT_SECONDS - time.monotonic()) > 0:
                probe = await self._ask(http, 0, min(rest, ATTEMPT_SECONDS))
                self.probes.append(probe)
                if probe.tokens == self.expected[0]:
                    return probe.ended - start
                await asyncio.sleep(PAUSE_SECONDS)
        return None

    async def _ask(
        self, http: httpx.AsyncClient, prompt: int, seconds: float | None = None
    ) -> FinishedRequest:
        """Sends one request, whose client leaves after ``seconds``."""
        began, tokens, problem = time.monotonic(), Tokens(), ""
        try:
            async with asyncio.timeout(seconds):
                tokens = (await complete(http, self._prompts[prompt], OUTPUT_TOKENS)).tokens
        except TimeoutError:
            pass
        except (LoadError, httpx.HTTPError) as error:
            problem = f"{type(error).__name__}: {error}"
        return FinishedRequest(prompt, began, time.monotonic(), tokens, problem)


async def until_empty(
    engines: Sequence[EngineProcess], since: float, limit: float, tasks: Sequence[asyncio.Task[None]] = ()
) -> float | None:
    """Returns the seconds from `since` until a KV block was in use for the last time; None if that is past
    `limit`.

    Waits for the clients' `tasks` too. LoadError: an engine has ended.
    """
    last, free = since, math.inf
    while True:
        used = any([await asyncio.to_thread(_usage, engine) for engine in engines])
        now = time.monotonic()
        last, free = (now, math.inf) if used else (last, min(free, now))
        if now - free >= SETTLE_SECONDS and all(task.done() for task in tasks):
            return last - since
        if now - since > limit + SETTLE_SECONDS:
            return None
        await asyncio.sleep(LOOK_SECONDS)


def _usage(engine: EngineProcess) -> float:
    if not engine.running():
        raise LoadError(f"{engine.name} ended by itself; the end of its log:\n{engine.log_tail()}")
    try:
        return engine.metric("vllm:kv_cache_usage_perc")
    except OSError:
        return 1.0  # The engine is too busy to answer, so its blocks count as used.


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED)
    return [rng.integers(*TOKENS, length).tolist() for length in PROMPT_TOKENS]


async def right_answers(url: str) -> list[Tokens]:
    async with _http(url) as http:
        return [(await complete(http, prompt, OUTPUT_TOKENS)).tokens for prompt in prompts()]


def _http(url: str) -> httpx.AsyncClient:
    # No connection is used twice: a broken one would fail a request that did not open it.
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False)
