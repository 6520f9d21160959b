"""ConcurrentAttempt: both engines get a request at the same time, so pages arrive while the prompt is
computed.

If possible, the client gets the prefill engine's token before the decode engine's answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Any

from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Lease
from kv_connector.router.failure import failure
from kv_connector.router.requests.answers import Answer, Computed
from kv_connector.router.requests.completion import decode_params
from kv_connector.router.requests.continuation import PATHS
from kv_connector.router.requests.early_token import EarlyToken, Mismatch, Rest
from kv_connector.router.streams.attempt import Attempt, Components
from kv_connector.router.streams.calls import EVENT_STREAM, EngineFailure
from kv_connector.router.streams.holds import PrefillHold
from kv_connector.router.streams.usage import recounted

logger = logging.getLogger(__name__)

Retry = Callable[[EngineFailure], Awaitable[tuple[AsyncExitStack, Answer]]]
"""Returns what follows the early first token, from other engines than those that failed; raises the failure
if there are no others.
"""


class ConcurrentAttempt:
    """One attempt to serve a request. Used from the event loop's thread only."""

    def __init__(self, parts: Components, attempt: Attempt, retry: Retry) -> None:
        self._parts = parts
        self._attempt = attempt
        self._completion = attempt.completion
        self._call = attempt.call
        self._retry = retry
        loop = asyncio.get_running_loop()
        self._token: asyncio.Future[EarlyToken | None] = loop.create_future()
        """The prefill engine's token; None: it has no token that can be passed on."""
        self._at_prefill: asyncio.Future[None] = loop.create_future()
        """Done when the prefill engine has begun its stream."""
        self._at_decode: asyncio.Future[None] = loop.create_future()
        """Done when the decode engine has begun its stream."""
        self._prefill_lease = ExitStack()
        self._decode_lease = ExitStack()
        self._decode_answer = AsyncExitStack()
        self._ends = AsyncExitStack()
        self._prefill: Lease
        self._decode: Lease
        self._late: str | None
        """Reason why the client does not get the prefill engine's token; None: it may get the token."""
        self._prefilling: asyncio.Task[Computed]
        self._decoding: asyncio.Task[Answer]

    async def answer(self, stack: AsyncExitStack) -> Answer:
        """Waits until the answer begins; Failure if there is none. ``stack`` ends the attempt."""
        stack.push_async_exit(self.close)
        self._parts.spans.name_transfer(self._attempt.transfer_id)
        self.lease_engines()
        self.start_prefill()
        self.start_decode()
        with self._hold():
            if self._late is None:
                token = await self.wait_for_early_token()
                if token is not None:
                    return await self.answer_with_early_token(token)
                self._late = "decode_first" if self._decoding.done() else "no_text"
            return await self.answer_from_decode(self._late)

    async def close(self, *why: Any) -> None:
        """Ends what has started, in this order: the stream with the early token, the decode engine's request
        and answer, its lease, the prefill engine's request, its lease.

        ``why``: the arguments of ``__aexit__``.
        """
        await self._ends.__aexit__(*why)

    def lease_engines(self) -> None:
        placement, pools = self._attempt.placement, self._parts.pools
        self._ends.callback(self._prefill_lease.close)
        prefill = pools[Side.PREFILL].lease(self._attempt.prefill, placement.work, prompt=placement.prompt)
        self._prefill = self._prefill_lease.enter_context(prefill)
        self._ends.callback(self._decode_lease.close)
        self._decode = self._decode_lease.enter_context(
            pools[Side.DECODE].lease(placement.decode, context=placement.tokens, prompt=placement.prompt)
        )
        self._late = self._late_reason()

    def start_prefill(self) -> None:
        calls, early = self._parts.calls, self._late is None
        body = self._attempt.prefill_body(serial=False, early=early)
        self._prefilling = asyncio.create_task(
            calls.prefill_early(self._prefill, body, self._call, self._at_prefill, self._token)
            if early
            else calls.prefill(self._prefill, body, self._call)
        )
        self._prefilling.add_done_callback(self._prefilled)
        self._ends.push_async_exit(self._end_prefill)

    def start_decode(self) -> None:
        attempt, decode = self._attempt, self._decode
        self._parts.caches.sent(attempt.transfer_id, decode)
        ids = attempt.begin_decode(self._parts, decode)
        params = decode_params(attempt.transfer_id, attempt.prefill, early=self._late is None)
        body = self._completion.decode_body(params, ids=ids)
        load = self._parts.calls.load(
            attempt.transfer_id,
            attempt.prefill,
            decode,
            body,
            self._call,
            self._decode_answer,
            self._at_decode,
        )
        self._decoding = asyncio.create_task(load)
        self._ends.push_async_exit(self._end_decode)
        words = "request %s: transfer %s from %s to %s"
        logger.debug(words, self._call.request_id, attempt.transfer_id, attempt.prefill, decode.endpoint)

    async def wait_for_early_token(self) -> EarlyToken | None:
        """Returns the prefill engine's token once both engines have begun a stream; the client's stream
        begins first.

        Returns None if there is no token to pass on, or if the decode engine is first.
        """
        accepted = (self._at_prefill, self._at_decode)
        while not self._decoding.done():
            if begun := all(future.done() for future in accepted):
                await self._call.begin()
            if self._token.done() and (begun or self._token.result() is None):
                return self._token.result()
            events: list[asyncio.Future[Any]] = [*accepted, self._token, self._decoding]
            waits = [event for event in events if not event.done()]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return None

    async def answer_with_early_token(self, token: EarlyToken) -> Answer:
        self._parts.metrics.early_tokens.labels("sent").inc()
        chunks = self._spliced(token)
        # If a generator was never begun, closing it runs none of its code.
        await anext(chunks)
        self._ends.push_async_callback(chunks.aclose)
        return Answer(200, EVENT_STREAM, chunks)

    async def answer_from_decode(self, late: str) -> Answer:
        """Returns the decode engine's answer. ``late``: why the client did not get the prefill engine's
        token."""
        self._parts.metrics.early_tokens.labels(late).inc()
        answer = await self._first_byte()
        return replace(answer, chunks=self._recounted(answer))

    async def retry_after_early_token(self, error: EngineFailure) -> tuple[AsyncExitStack, Answer]:
        """Returns what follows the token, from other engines.

        Raises the error if there are no others, or if they could sample another token.
        """
        await self._end_decode(type(error), error, error.__traceback__)
        if not self._completion.repeats_itself():
            raise error
        return await self._retry(error)

    def _hold(self) -> PrefillHold:
        return self._attempt.hold(self._parts.holds, self._prefill)

    def _late_reason(self) -> str | None:
        if self._call.path not in PATHS:
            return "other_api"
        members = self._parts.members
        if not all(members.early_tokens(lease.endpoint) for lease in (self._prefill, self._decode)):
            return "engines"
        return self._completion.late_reason()

    def _prefilled(self, task: asyncio.Task[Computed]) -> None:
        if not task.cancelled() and task.exception() is None:
            report = task.result()
            self._call.running.cached = report.cached
            self._parts.caches.prefilled(self._prefill, report, self._attempt.placement.prefix)
            if report.tokens is not None:
                self._decode.counted(report.tokens)
        self._prefill_lease.close()

    async def _first_byte(self) -> Answer:
        """Returns the decode engine's answer, unless the prefill engine fails before. In that case the decode
        engine would wait for pages that never come."""
        prefilling, decoding = self._prefilling, self._decoding
        while True:
            if prefilling.done() and (not decoding.done() or decoding.exception()):
                prefilling.result()
            if decoding.done():
                answer = decoding.result()
                self._parts.caches.began(self._decode, self._attempt.placement)
                return answer
            waits: set[asyncio.Task[Any]] = {decoding} if prefilling.done() else {prefilling, decoding}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    async def _spliced(self, token: EarlyToken) -> AsyncGenerator[bytes]:
        """Yields an empty beginning, the prefill engine's token, and the rest of the decode engine's answer.

        If the engines fail before the decode engine has begun, the rest is the answer of other engines.
        """
        rest = Rest(token)
        try:
            async with AsyncExitStack() as stack:
                try:
                    with self._hold():
                        yield b""
                        yield token.events
                        answer = await self._first_byte()
                    chunks = self._recounted(answer)
                except EngineFailure as error:
                    entered, answer = await self.retry_after_early_token(error)
                    await stack.enter_async_context(entered)
                    chunks = answer.chunks
                async for events in chunks:
                    if more := rest.of(events):
                        yield more
        except Mismatch as error:
            self._parts.metrics.early_tokens.labels("mismatch").inc()
            logger.error("request %s: the answer is broken off: %s", self._call.request_id, error)
            what = "an answer is broken off: the decode engine sampled another first token"
            self._parts.incidents.note("", what, str(error))
            raise failure(502, "api_error", f"the answer is broken off: {error}") from None

    def _recounted(self, answer: Answer) -> AsyncIterator[bytes]:
        return recounted(answer, self._computed)

    async def _computed(self) -> Computed | None:
        """Returns the prefill engine's report on the prompt, if it comes in time."""
        prefilling = self._prefilling
        await asyncio.wait({prefilling}, timeout=self._parts.patience)
        if not prefilling.done() or prefilling.cancelled() or prefilling.exception():
            return None
        return prefilling.result()

    async def _end_prefill(self, kind: object, *_: object) -> None:
        """Ends the prefill engine's request.

        If the decode engine has answered, the prefill engine's own answer takes only milliseconds. Closing
        its connection would abort it, so the answer is awaited.
        """
        if kind is None:
            await asyncio.wait({self._prefilling}, timeout=self._parts.patience)
        await _end(self._prefilling)

    async def _end_decode(self, *why: Any) -> None:
        """Ends the decode engine's request. ``why``: the arguments of ``__aexit__``."""
        await _end(self._decoding)
        await self._decode_answer.__aexit__(*why)
        self._decode_lease.close()


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancels the task if it still runs, and retrieves its exception."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
