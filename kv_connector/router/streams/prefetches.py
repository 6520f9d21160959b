"""Prefetches: prefill engines load the answers of conversations before the next turn, in the user's pause.

The next turn repeats the answer, whose KV only the decode engine has. The prefill engine would compute it, or
load it, while the user waits for the first token. A prefetch is a further request, after the end of the
answer. The prefill engine loads what it lacks and computes nothing. If it cannot load, the request ends, and
the next turn goes on as without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kv_connector.router.bodies.fields import Content
from kv_connector.router.bodies.messages import ChatMessage
from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.client import EngineClient, HttpError
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import EngineLost, NoEngine, Pool
from kv_connector.router.failure import UNREADABLE, Failure
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.placement.records import CacheRecords, continued_by
from kv_connector.router.requests.completion import PREFETCH_PATH, prefetch_body
from kv_connector.router.requests.transcript import Said
from kv_connector.router.streams.request import Request, may_go_on
from kv_connector.router.streams.running import Running

logger = logging.getLogger(__name__)

# Prefetches of one prefill engine at once. The engine loads 16 prefixes at once (MOST_AT_ONCE of
# vllm/scheduling/prefix_borrower.py), and most of them are to be for requests that wait.
MOST_AT_ONCE = 4

# Tokens of an answer that are worth a request. An H200 computes 64 tokens of an 8B model in 1.5 ms. Two
# blocks of the largest usual size have at least one that the prefill engine lacks as a whole.
LEAST_TOKENS = 64

# Tokens by which the prefill engine may lack more than the answer: its last block of the prompt is not full,
# and a block has 256 tokens at most.
_UNFILLED = 256


class Prefetches:
    """Starts prefetches, and counts them. Used from the event loop's thread only."""

    def __init__(
        self,
        pools: Mapping[Side, Pool],
        client: EngineClient,
        caches: CacheRecords,
        metrics: Metrics,
        patience: float,
    ) -> None:
        """``patience``: seconds that a prefetch may take."""
        self._pools = pools
        self._client = client
        self._caches = caches
        self._metrics = metrics
        self._patience = patience
        self._running: set[asyncio.Task[None]] = set()
        self._at_once: Counter[Endpoint] = Counter()

    def answered(self, request: Request, began: Running, said: Said) -> None:
        """Starts the prefetch of a whole answer, if the conversation may go on.

        ``began``: the request on its first decode engine.
        """
        call, ended = request.call, request.running
        placement = ended.placement or began.placement
        if placement is None or placement.prefill is None or began.lease is None or ended.lease is None:
            return
        if not may_go_on(call, request.completion):
            return
        if not self.able(placement.prefill, ended.lease.endpoint) or _thinks(said):
            return
        tokens = ended.prompt + ended.said
        answer = tokens - began.prompt
        prompt = began.lease.prompt
        continued = None if prompt is None else continued_by(prompt, said)
        if (
            not (began.prompt and ended.ids and answer)
            or not request.completion.only_text()
            or prompt is None
            or continued is None
        ):
            self._count("unknown")
        elif answer < LEAST_TOKENS:
            return
        elif not self._caches.repeats(prompt, said):
            self._count("rewritten")
        elif self._at_once[placement.prefill] >= MOST_AT_ONCE:
            self._count("busy")
        else:
            # The decode engine has not computed the last token.
            lender, most = ended.lease.endpoint, answer + _UNFILLED
            body = prefetch_body(request.completion.body, bytes(ended.ids), lender, tokens - 1, most)
            name = f"{call.request_id}-prefetch"
            headers = {**call.headers, "x-request-id": name}
            self._start(_Prefetch(name, placement.prefill, lender, continued, body, headers))

    def able(self, prefill: Endpoint, decode: Endpoint) -> bool:
        """Returns whether both engines take requests, and exchange prefixes.

        A stream may have moved to its own prefill engine, which has the answer then.
        """
        borrower, lender = self._pools[Side.PREFILL].member(prefill), self._pools[Side.DECODE].member(decode)
        return (
            prefill != decode
            and borrower is not None
            and lender is not None
            and borrower.takes
            and lender.takes
            and borrower.prefetches
            and lender.workload.keeps_answers
            and borrower.prefixes == lender.prefixes != ""
            and borrower.weights.fits(lender.weights)
        )

    def _start(self, prefetch: _Prefetch) -> None:
        task = asyncio.create_task(self._run(prefetch))
        self._running.add(task)
        self._at_once[prefetch.prefill] += 1

        def ended(_: asyncio.Task[None]) -> None:
            self._running.discard(task)
            self._at_once[prefetch.prefill] -= 1
            if not self._at_once[prefetch.prefill]:
                del self._at_once[prefetch.prefill]

        task.add_done_callback(ended)

    async def _run(self, prefetch: _Prefetch) -> None:
        try:
            async with asyncio.timeout(self._patience):
                loaded = await self._load(prefetch)
        except (*HttpError, EngineLost, Failure, NoEngine, *UNREADABLE) as error:
            # The next turn goes on without it. A broken engine shows in its requests.
            words = "request %s: prefill engine %s did not answer: %s: %s"
            logger.info(words, prefetch.name, prefetch.prefill, type(error).__name__, error)
            self._count("failed")
        else:
            self._count("loaded" if loaded else "declined")
            self._metrics.prefetched_tokens.inc(loaded)

    async def _load(self, prefetch: _Prefetch) -> int:
        """Returns the tokens that the prefill engine has loaded."""
        pool = self._pools[Side.PREFILL]
        with pool.lease(prefetch.prefill, prompt=prefetch.continued) as lease:
            async with lease.alive():
                url, headers = lease.endpoint.url + PREFETCH_PATH, lease.endpoint.headers(prefetch.headers)
                reply = await self._client.whole("POST", url, prefetch.body, headers)
            if reply.status >= 400:
                raise Failure(reply.status, reply.body, reply.content_type)
            params = msgspec.json.decode(reply.body, type=_PrefetchAnswer).kv_transfer_params or {}
            loaded = params.get("prefetched_tokens")
            if not isinstance(loaded, int) or loaded < 1:
                return 0
            self._caches.prefetched(lease, prefetch.lender, loaded)
            return loaded

    def _count(self, outcome: str) -> None:
        self._metrics.prefetches.labels(outcome).inc()

    async def close(self) -> None:
        """Cancels all prefetches."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@dataclass(frozen=True)
class _Prefetch:
    name: str
    """Request id."""
    prefill: Endpoint
    lender: Endpoint
    continued: Prompt
    """The prompt and its answer."""
    body: Content
    headers: Mapping[str, str]


class _PrefetchAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def _thinks(said: Said) -> bool:
    """Returns whether the answer has a thinking part, which templates leave out of the next turn."""
    answer = said.answer
    return isinstance(answer, ChatMessage) and bool(answer.reasoning or answer.thinks_aloud)
