"""Calls: requests of the router to engines, and the handling of their answers."""

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec

from kv_connector.router.bodies.fields import Content
from kv_connector.router.engines.client import (
    EngineClient,
    EngineReply,
    HttpError,
    content_type,
    refused,
    retry_after,
)
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import EngineLost, Lease
from kv_connector.router.engines.reasons import PATIENCE_S, Reasons
from kv_connector.router.failure import UNREADABLE, Failure, engine_down, failure, refused_key
from kv_connector.router.observe.access_log import Exchange
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.observe.spans import Spans
from kv_connector.router.requests.answers import Answer, Computed
from kv_connector.router.requests.early_token import EarlyToken, PrefillStream
from kv_connector.router.requests.events import CutOffError, EventStream, has_end, split_at_error
from kv_connector.router.requests.token_counts import prompt_tokens, written_tokens
from kv_connector.router.streams.running import Running

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Errors after which no packets arrive from the engine's host any more.
_VANISHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

# Time in which an encoder engine has to answer, in seconds. A request waits for it, and another engine can
# always encode the pictures. An encoder engine whose core hangs answers its health checks, so nothing else
# ends the wait. fetch_timeout allows half of that for the embeddings.
ENCODE_S = 20.0

# Content type of vLLM's streams.
EVENT_STREAM = "text/event-stream; charset=utf-8"


async def _nobody_waits() -> None:
    pass


def _nothing_to_end() -> None:
    pass


@dataclass(frozen=True)
class Call:
    """The parts of a request that both engines get beside its body."""

    path: str
    headers: Mapping[str, str]
    request_id: str
    model: str | None = None
    """Model that the client names; None: the client names no model."""
    running: Running = field(default_factory=Running)
    """The request's progress on its decode engine."""
    exchange: Exchange = field(default_factory=Exchange)
    """Facts of the client's request for the access log."""
    begin: Callable[[], Awaitable[None]] = _nobody_waits
    """Begins the client's stream, as one engine's would begin. To be called, once or more, when both engines
    have begun a stream. A later error is reported within the stream."""
    resumes: bool = False
    """Whether it continues a stream whose decode engine has failed."""
    prompt_computed: Callable[[], None] = _nothing_to_end
    """To be called when the prompt is computed, or when nothing will show that it is."""


class LateError(Exception):
    """An engine that accepts connections did not answer in time."""


class EngineFailure(Failure):
    """An engine did not answer a request, or answered with an error. Other engines may succeed."""

    def __init__(
        self,
        failure: Failure,
        blamed: Mapping[Side, Endpoint],
        *,
        broke: bool = False,
        unread: bool = False,
    ) -> None:
        """``broke``: the decode engine failed while it had the request, which may be the cause.
        ``unread``: no process listens at the engine's address, or it refuses the router's key or the rank. So
        the request is not the cause."""
        super().__init__(failure.status, failure.body, failure.content_type, failure.retry_after)
        self.blamed = blamed
        self.broke = broke
        self.unread = unread


class EngineError(EngineFailure):
    """The engine answered with an error that is not the request's fault."""


class Calls:
    """Sends requests to engines, and reports each outcome to Members.

    An engine that accepts no connection is not used until it answers again. An engine whose requests fail is
    used less (engines/breaker.py). Used from the event loop's thread only.
    """

    def __init__(
        self, client: EngineClient, members: Members, metrics: Metrics, incidents: Incidents, spans: Spans
    ) -> None:
        self._client = client
        self._members = members
        self._metrics = metrics
        self._incidents = incidents
        self._spans = spans
        self.reasons = Reasons()

    def begin(self, call: Call, decode: Lease, *, prefetches: bool = False) -> bool:
        """Notes that the decode engine gets the request next. Returns whether it shall report token ids.
        ``prefetches``: as of Running.begin()."""
        call.running.lease = decode
        return call.running.begin(decode.endpoint, prefetches=prefetches)

    async def whole(self, side: Side, lease: Lease, method: str, body: Content, call: Call) -> EngineReply:
        """Sends a request that is not a completion, and returns the whole answer."""
        endpoint = lease.endpoint
        call.exchange.decoding(endpoint)
        try:
            async with lease.alive():
                url = endpoint.url + call.path
                reply = await self._client.whole(method, url, body, endpoint.headers(call.headers))
        except (*HttpError, EngineLost) as error:
            raise self._broken(side, endpoint, call, error) from error
        if (refusal := refused_key(reply.status, call.exchange.key)) is not None:
            raise self._failed_part(side, endpoint, call, refusal)
        return reply

    async def prefill(self, lease: Lease, body: Content, call: Call) -> Computed:
        """Sends the prefill engine its part of the request, and returns its report."""
        call.exchange.prefilling(lease.endpoint)
        computed = (await self._part(Side.PREFILL, lease, body, call, _PrefillAnswer)).computed()
        call.exchange.computed(computed.tokens, computed.cached)
        call.prompt_computed()
        return computed

    async def encode(self, lease: Lease, body: Content, call: Call) -> dict[str, Any]:
        """Sends the encoder engine the request's pictures. Returns its announcements of their embeddings.

        EngineFailure if the encoder engine has no answer within ENCODE_S.
        """
        answer = await self._part(Side.ENCODER, lease, body, call, _EncoderAnswer, within=ENCODE_S)
        self._members.served(time.monotonic(), lease.endpoint)
        return answer.ec_transfer_params or {}

    async def _part(
        self, side: Side, lease: Lease, body: Content, call: Call, kind: type[T], within: float | None = None
    ) -> T:
        """Sends an engine its part of the request, and returns its whole answer. ``within``: time limit in
        seconds; None: no limit."""
        endpoint, limit = lease.endpoint, asyncio.timeout(within)
        try:
            async with limit, lease.alive():
                with self._spans.client(side, endpoint, endpoint.headers(call.headers)) as headers:
                    reply = await self._client.whole("POST", endpoint.url + call.path, body, headers)
        except (*HttpError, EngineLost) as error:
            why = LateError(f"no answer within {within:g} s") if limit.expired() else error
            raise self._broken(side, endpoint, call, why) from error
        if reply.status >= 400:
            refusal = Failure(reply.status, reply.body, reply.content_type, reply.retry_after)
            raise self._failed_part(side, endpoint, call, refusal)
        try:
            return msgspec.json.decode(reply.body, type=kind)
        except UNREADABLE as error:
            raise self._broken(side, endpoint, call, error) from error

    async def prefill_early(
        self,
        lease: Lease,
        body: Content,
        call: Call,
        accepted: asyncio.Future[None],
        early: asyncio.Future[EarlyToken | None],
    ) -> Computed:
        """Does the same as prefill(), for a prefill engine that streams.

        ``accepted``: done when the engine has begun its stream. ``early`` gets the engine's token at once,
        None if it has no token to pass on. vLLM's streams have no kv_transfer_params; the values that the
        router needs are in the stream's usage.
        """
        endpoint, stream = lease.endpoint, PrefillStream()
        call.exchange.prefilling(endpoint)
        try:
            async with lease.alive():
                with self._spans.client(Side.PREFILL, endpoint, endpoint.headers(call.headers)) as headers:
                    request = self._client.stream("POST", endpoint.url + call.path, body, headers)
                    async with request as response:
                        if response.status >= 400:
                            refusal = await _refusal(response)
                            raise self._failed_part(Side.PREFILL, endpoint, call, refusal)
                        accepted.set_result(None)
                        events = EventStream(response.content.iter_any())
                        while said := await events.read():
                            try:
                                token = stream.feed(said)
                            except Failure as problem:
                                raise self._failed_part(Side.PREFILL, endpoint, call, problem) from None
                            if token is not None and not early.done():
                                early.set_result(token)
        except (*HttpError, EngineLost) as error:
            raise self._broken(Side.PREFILL, endpoint, call, error) from error
        finally:
            if not early.done():
                early.set_result(None)
        call.exchange.computed(stream.prompt_tokens, stream.cached_tokens)
        call.prompt_computed()
        return Computed(tokens=stream.prompt_tokens, cached=stream.cached_tokens)

    async def load(
        self,
        transfer_id: str,
        prefill: Endpoint,
        lease: Lease,
        body: Content,
        call: Call,
        stack: AsyncExitStack,
        accepted: asyncio.Future[None] | None = None,
    ) -> Answer:
        """Does the same as decode(), for a prompt that ``prefill`` computes. If the decode engine fails,
        ``prefill`` may be to blame.

        vLLM's answer to a failed KV load does not contain the reason. A decode engine that has registered
        reports it.
        """
        call.exchange.decoding(lease.endpoint)
        call.exchange.transfer_id = transfer_id
        with self.reasons.expected(transfer_id, lease.endpoint) as reason:
            try:
                answer = await self._ask(lease, body, call, stack, accepted)
            except EngineError as error:
                if error.unread:
                    self._erred(lease.endpoint, error)
                    raise
                if self._members.registered(lease.endpoint):
                    await asyncio.wait({reason}, timeout=PATIENCE_S)
                reported: Failure = error
                unsure = reason.done()
                self._erred(lease.endpoint, error, unsure=unsure)
                if unsure:
                    self._erred(prefill, error, unsure=True)
                    words = (
                        f"decode engine {lease.endpoint} did not receive the prompt's KV from prefill engine "
                        f"{prefill}: {reason.result()}"
                    )
                    logger.warning("request %s: %s", call.request_id, words)
                    what = f"did not receive a prompt's KV from {self._members.label(prefill)}"
                    self._incidents.note(self._members.label(lease.endpoint), what, reason.result())
                    reported = failure(error.status, "api_error", words)
                blamed = {**error.blamed, Side.PREFILL: prefill}
                raise EngineError(reported, blamed, broke=not unsure) from None
        for endpoint in (prefill, lease.endpoint):
            self._members.served(time.monotonic(), endpoint)
        return answer

    async def decode(self, lease: Lease, body: Content, call: Call, stack: AsyncExitStack) -> Answer:
        """Sends the decode engine a request whose prompt it computes itself, and waits until the answer
        begins.

        ``stack`` closes the connection.
        """
        call.exchange.decoding(lease.endpoint)
        try:
            answer = await self._ask(lease, body, call, stack)
        except EngineError as error:
            self._erred(lease.endpoint, error)
            raise
        self._members.served(time.monotonic(), lease.endpoint)
        return answer

    async def _ask(
        self,
        lease: Lease,
        body: Content,
        call: Call,
        stack: AsyncExitStack,
        accepted: asyncio.Future[None] | None = None,
    ) -> Answer:
        """Sends the request and waits until its answer begins.

        ``stack`` closes the connection. ``accepted``: done when the decode engine has begun a stream. The
        caller reports the decode engine's errors to Members.
        """
        endpoint = lease.endpoint
        try:
            async with lease.alive():
                span = self._spans.client(Side.DECODE, endpoint, endpoint.headers(call.headers))
                headers = stack.enter_context(span)
                request = self._client.stream("POST", endpoint.url + call.path, body, headers)
                response = await stack.enter_async_context(request)
                kind = content_type(response)
                if response.status >= 400:
                    refusal = await _refusal(response)
                    raise self._failure(Side.DECODE, endpoint, call, refusal)
                if not kind.startswith("text/event-stream"):
                    body = await response.read()
                    if call.running.wants_ids:
                        body = call.running.read_whole(body)
                    return Answer(response.status, kind, _one(body))
                if accepted is not None:
                    accepted.set_result(None)
                events = EventStream(response.content.iter_any())
                try:
                    opening = await events.opening()
                except Failure as problem:
                    # vLLM sent its status before it knew the error. The client has not received the status
                    # yet.
                    raise self._failure(Side.DECODE, endpoint, call, problem) from None
            # From here on, a loss ends the next wait for events.
            stack.enter_context(lease.when_lost(partial(response.content.set_exception, EngineLost())))
        except (*HttpError, EngineLost) as error:
            raise self._broken(Side.DECODE, endpoint, call, error) from error
        chunks = self._relay(opening, events, lease, call)
        # If the router has requested token ids, they are recorded, and removed if the client did not request
        # them.
        return Answer(response.status, kind, call.running.note(chunks) if call.running.wants_ids else chunks)

    async def _relay(
        self, opening: bytes, events: EventStream, lease: Lease, call: Call
    ) -> AsyncIterator[bytes]:
        """Yields the answer's events. Raises EngineFailure: the status has been sent, so the error goes into
        the stream."""
        before_last, last, more = b"", b"", opening
        try:
            while more:
                before_last, last = last, more
                before, problem = split_at_error(more)
                if before:
                    yield before
                if problem is not None:
                    reported = self._failure(Side.DECODE, lease.endpoint, call, problem)
                    if isinstance(reported, EngineError):
                        self._erred(lease.endpoint, reported, begun=True)
                    raise reported
                more = await events.read()
            if not has_end(before_last + last):
                raise CutOffError
        except (*HttpError, EngineLost, CutOffError) as error:
            raise self._broken(Side.DECODE, lease.endpoint, call, error, begun=True) from error

    def _failed_part(self, side: Side, endpoint: Endpoint, call: Call, answer: Failure) -> Failure:
        reported = self._failure(side, endpoint, call, answer)
        if isinstance(reported, EngineError):
            self._erred(endpoint, reported)
        return reported

    def _erred(self, endpoint: Endpoint, error: object, *, begun: bool = False, unsure: bool = False) -> None:
        self._members.erred(time.monotonic(), endpoint, str(error), begun=begun, unsure=unsure)

    def _failure(self, side: Side, endpoint: Endpoint, call: Call, answer: Failure) -> Failure:
        """Returns the failure for an engine's error.

        Up to 499 the error is the request's fault, from 500 on the engine's. A rank that the API server does
        not have is the operator's fault, because the router has named the rank. So is a key of the router
        that the engine refuses: as it answers at once, it would get ever more requests.
        """
        refusal = refused_key(answer.status, call.exchange.key)
        answer = refusal or answer
        unread = refusal is not None
        if no_such_rank(answer, endpoint):
            unread = True
            words = (
                f"{endpoint.url} has no data-parallel rank {endpoint.rank}: list the URL once for each rank "
                f"that it serves (--{side.value})"
            )
            answer = failure(502, "api_error", words)
        self._metrics.failures.labels(side.value, str(endpoint)).inc()
        logger.warning("request %s: %s engine %s answered %s", call.request_id, side.value, endpoint, answer)
        if call.model is not None and no_such_model(answer, call.model):
            return (
                EngineFailure(answer, {side: endpoint})
                if self._members.lacks(side, endpoint, call.model)
                else answer
            )
        if answer.status < 500:
            return answer
        self._incidents.note(self._members.label(endpoint), f"answers {answer.status}", str(answer))
        return EngineError(answer, {side: endpoint}, broke=side is Side.DECODE and not unread, unread=unread)

    def _broken(
        self, side: Side, endpoint: Endpoint, call: Call, error: Exception, *, begun: bool = False
    ) -> EngineFailure:
        """Returns the failure for an engine that accepts no connection, is lost, or broke off.

        ``begun``: the engine's answer had begun.
        """
        self._metrics.failures.labels(side.value, str(endpoint)).inc()
        logger.warning(
            "request %s: %s engine %s failed: %s: %s",
            call.request_id,
            side.value,
            endpoint,
            type(error).__name__,
            error,
        )
        words = f"{type(error).__name__}: {error}"
        self._incidents.note(self._members.label(endpoint), _what_broke(error), words)
        broke = False
        if _takes_no_connection(error):
            self._members.failed(endpoint, words, gone=refused(error))
        elif not isinstance(error, EngineLost):  # Members already knows that
            # The request may be at fault. An engine that is gone refuses the next connection.
            self._erred(endpoint, words, begun=begun)
            broke = side is Side.DECODE
        down = engine_down(side.value, str(endpoint), error)
        return EngineFailure(down, {side: endpoint}, broke=broke, unread=refused(error))


def _takes_no_connection(error: Exception) -> bool:
    if isinstance(error, (aiohttp.ClientConnectorError, TimeoutError)):
        return True
    return isinstance(error, OSError) and error.errno in _VANISHED


def _what_broke(error: Exception) -> str:
    """Returns a description of the error without addresses, which the error's own text contains."""
    match error:
        case EngineLost():
            return "lost its requests: it gives no sign of life"
        case aiohttp.ClientConnectorError() | TimeoutError():
            return "accepts no connection"
        case LateError():
            return "does not answer a request in time"
        case _ if isinstance(error, UNREADABLE):
            return "sent an unreadable answer"
        case _:
            return "broke off a request"


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


def no_such_rank(answer: Failure, endpoint: Endpoint) -> bool:
    """Returns whether vLLM refuses the rank that ``Endpoint.headers`` names.

    A client's text can follow in an error's message, but cannot begin it.
    """
    words = f"data_parallel_rank {endpoint.rank} is out of range"
    return answer.status == 400 and endpoint.rank > 0 and _message(answer).startswith(words)


def no_such_model(answer: Failure, model: str) -> bool:
    """Returns whether vLLM does not serve the model. Other causes also have the status 404."""
    return answer.status == 404 and _message(answer).startswith(f"The model `{model}` does not exist")


def _message(answer: Failure) -> str:
    """Returns the message of an engine's error; "" if it has none."""
    try:
        return msgspec.json.decode(answer.body, type=_Refusal).error.message
    except UNREADABLE:
        return ""


class _EncoderAnswer(msgspec.Struct):
    ec_transfer_params: dict[str, Any] | None = None


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
    usage: Any = None

    def computed(self) -> Computed:
        cached = (self.kv_transfer_params or {}).get("remote_prefill_cached_tokens")
        return Computed(
            self.kv_transfer_params,
            prompt_tokens(self.usage),
            cached if isinstance(cached, int) else None,
            written_tokens(self.usage),
        )


async def _refusal(response: aiohttp.ClientResponse) -> Failure:
    body = await response.read()
    return Failure(response.status, body, content_type(response), retry_after(response))


async def _one(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk
