"""Resumption: a stream whose decode engine fails continues on another one, while the client sees a pause.

The rest of the stream is requested as a new request of a prefill and a decode engine. Its prompt is the
original prompt and the answer so far, as token ids. Placement finds the engines that still have KV of the
prompt, and the rest is computed again. It needs nothing of the engine that has failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import NoEngine
from kv_connector.router.failure import UNREADABLE, Failure, failure
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.requests.answers import Answer
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.continuation import ContinuationTail, resumed_prompt
from kv_connector.router.streams.calls import Call, EngineFailure
from kv_connector.router.streams.continuing import INCOMPLETE, Continuing, ContinuingError
from kv_connector.router.streams.request import Request
from kv_connector.router.streams.restarts import Restarts
from kv_connector.router.streams.running import Running, Shown

logger = logging.getLogger(__name__)

# Failures of decode engines that a stream survives. A fleet that is replaced without drains ends each engine
# once, and a stream of minutes may be on several of them. More is the sign of a request that ends engines.
MAX_FAILURES = 3
# Tokens that a stream must get from an engine before it may leave this engine, too, after a failure. A
# request that ends its engine at some token ends the next engine at the same token.
MIN_PROGRESS = 32
# Longest pause of a stream: nginx gives up an answer after 60 s without data (proxy_read_timeout).
MAX_PAUSE_S = 60.0
# Bytes of a character in UTF-8, of which each may be a token.
_BYTES_OF_CHARACTER = 4

Send = Callable[[Completion, Call, Collection[Endpoint]], Awaitable[tuple[AsyncExitStack, Answer]]]
"""Sends a request to other engines than those to avoid, and waits until the answer begins."""

_REASONS = {
    "other_api": "only streams of /v1/completions and /v1/chat/completions continue",
    "not_streamed": "its field `stream` has another value than true",
    "seed": "the random state of a request with a seed is lost with its engine",
    "penalties": "its penalties count the answer from its beginning",
    "stop_strings": "text may be held back for its stop strings",
    "several_answers": "it has several prompts, answers or beams",
    "more_than_text": "it has log probabilities, an echo or pictures",
    "constrained": "its output has a grammar, a format or bad words",
    "tools": "it has tools",
    "other_key": "it has a field, or a value of one, that the router does not know",
    "no_ids": "its engine had not reported token ids yet",
    "memory": "the router had no room for its token ids",
    "ended": "its last token had arrived already",
    "thinking": "it was in its reasoning, or had no text yet",
    "no_text": "its last token was a part of a character",
    "often": f"{MAX_FAILURES} decode engines had failed before",
    "again": f"a decode engine had failed less than {MIN_PROGRESS} tokens before",
    "no_other_engine": "no other decode engine takes requests",
    "engine_failed": "the next engines failed too",
    "refused": "the next engine refused it",
    "too_late": f"the next engine sent nothing for {MAX_PAUSE_S:g} s",
    "queued": f"streams before it kept the other engines busy for {MAX_PAUSE_S:g} s",
}


class NotResumedError(Exception):
    """A stream cannot continue. ``reason``: a key of _REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(_REASONS[reason])
        self.reason = reason


@dataclass(frozen=True)
class Resumed:
    """The rest of a stream."""

    running: Running
    stack: AsyncExitStack
    """Ends the answer."""
    answer: Answer
    tail: ContinuationTail


@dataclass(frozen=True)
class _Place:
    """A place of an answer where another engine can continue."""

    ids: bytes
    """Token ids before it. The client has the text of these tokens, except for ``held``, and no text behind
    them."""
    said: int
    """Tokens of them that the current engine has generated."""
    known: list[int]
    """Ids behind it that the client has."""
    held: str = ""
    """Text before it that the client does not have."""


class Resumption:
    """Resumes streams, and counts them. Used from the event loop's thread only."""

    def __init__(self, continuing: Continuing, restarts: Restarts, metrics: Metrics, send: Send) -> None:
        self._continuing = continuing
        self._restarts = restarts
        self._metrics = metrics
        self._send = send

    async def resume(
        self, request: Request, error: EngineFailure, last: bytes, prompt: int, cached: int | None
    ) -> Resumed:
        """Waits until other engines continue the stream; NotResumedError if that fails.

        ``error``: the failure of its engine, whose connections are closed. ``last``: the last events that the
        client got. ``prompt``: tokens of the original prompt. ``cached``: as of Running.
        """
        began, running = time.perf_counter(), request.running
        engine = running.engine
        _check(request, prompt)
        assert engine is not None
        new, waited = request.new_running(), False
        try:
            async with asyncio.timeout(MAX_PAUSE_S), self._restarts.turn(engine, request.call.model):
                waited = True
                if self._continuing.other(request, engine) is None:
                    raise NotResumedError("no_other_engine")
                place = await self._place(request)
                said = place.said + running.prompt - prompt
                continuation, call = await self._continuation(request, new, place.ids, prompt, said)
                avoid = {engine, *error.blamed.values()}
                stack, answer = await self._send(continuation, call, avoid)
        except (EngineFailure, NoEngine) as problem:
            raise NotResumedError("engine_failed") from problem
        except Failure as problem:
            # From 500 on the router itself had no engine, or no answer that it could use.
            raise NotResumedError("refused" if problem.status < 500 else "engine_failed") from problem
        except TimeoutError:
            raise NotResumedError("too_late" if waited else "queued") from None
        pause = time.perf_counter() - began
        self._metrics.broken_streams.labels("resumed").inc()
        self._metrics.resume_pause.observe(pause)
        words = "request %s: resumed on decode engine %s at token %d, after a pause of %.3f s"
        logger.info(words, request.call.request_id, new.engine, said, pause)
        tail = ContinuationTail(
            last, prompt=prompt, said=said, cached=cached, known=place.known, held=place.held
        )
        return Resumed(new, stack, answer, tail)

    def failure(self, request: Request, error: EngineFailure, why: NotResumedError | None) -> Failure:
        """Returns the failure with which a stream ends, and counts it. ``why``: the reason; None: the request
        was not made for another engine."""
        why = why or NotResumedError(request.stays or "no_ids")
        self._metrics.broken_streams.labels(why.reason).inc()
        cause = f": {why.__cause__}" if why.__cause__ is not None else ""
        logger.warning("request %s: not resumed (%s): %s%s", request.call.request_id, why.reason, why, cause)
        return _explained(error, f"The stream did not continue on another engine: {why}")

    async def _continuation(
        self, request: Request, running: Running, ids: bytes, prompt: int, said: int
    ) -> tuple[Completion, Call]:
        """Returns the request for the rest of the stream. ``prompt``, ``said``: tokens of the prompt and of
        the answer so far."""
        request.resumed += 1
        request.resumed_at = said
        seen = request.completion.prompt(request.call.path)
        return await self._continuing.of(
            request,
            running,
            ids,
            said,
            why="resumed",
            prompt=resumed_prompt(seen, prompt + said, said),
            resumes=True,
        )

    async def _place(self, request: Request) -> _Place:
        """Returns the place where the stream can continue."""
        running = request.running
        ids = bytes(running.ids)
        if running.place is None:
            raise NotResumedError("thinking")
        nbytes, said = running.place
        behind = ids[nbytes + 1 :].split(b",") if len(ids) > nbytes else []
        if running.shown is Shown.NOTHING:
            place = self._without(request, ids, said + len(behind), behind)
            return replace(place, held=await self._continuing.held(request))
        if running.shown is Shown.THINKING:
            raise NotResumedError("thinking")
        # Events had several tokens each, of which the last ones may be a part of a character.
        for count in range(len(behind), max(0, len(behind) - _BYTES_OF_CHARACTER), -1):
            try:
                text = await self._continuing.text(request, b",".join(behind[:count]))
            except ContinuingError as error:
                raise NotResumedError("no_text") from error
            if not text.endswith(INCOMPLETE):
                return self._without(request, ids, said + len(behind), behind[count:])
        raise NotResumedError("no_text")

    def _without(self, request: Request, ids: bytes, said: int, dropped: list[bytes]) -> _Place:
        """Returns the place before the last tokens, which have no text: they are generated again. If the
        client has their ids, they must be the same."""
        known = dropped if request.running.shows_ids else []
        if known and request.completion.body.get("temperature") != 0:
            raise NotResumedError("no_text")
        length = len(ids) - sum(len(one) + 1 for one in dropped)
        return _Place(ids[:length], said - len(dropped), list(map(int, known)))


def _check(request: Request, prompt: int) -> None:
    """Raises NotResumedError if the stream cannot continue, whatever other engines do."""
    running = request.running
    if request.stays is not None:
        raise NotResumedError(request.stays)
    if running.full:
        raise NotResumedError("memory")
    if not running.prompt:
        raise NotResumedError("no_ids")
    if running.ended:
        raise NotResumedError("ended")
    if request.resumed >= MAX_FAILURES:
        raise NotResumedError("often")
    if request.resumed and running.prompt + running.said - prompt < request.resumed_at + MIN_PROGRESS:
        raise NotResumedError("again")


def _explained(error: Failure, words: str) -> Failure:
    """Returns the failure with a longer message."""
    try:
        said = msgspec.json.decode(error.body, type=dict[str, Any])
        message = str(said["error"]["message"]).rstrip(".")
        body = msgspec.json.encode(said | {"error": said["error"] | {"message": f"{message}. {words}"}})
    except (*UNREADABLE, KeyError, TypeError):
        return failure(error.status, "api_error", f"{error}. {words}")
    return Failure(error.status, body, error.content_type, error.retry_after)
