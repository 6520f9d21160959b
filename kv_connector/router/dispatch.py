"""Dispatcher: takes a completion to a prefill and a decode engine, and brings back the latter's answer."""

import asyncio
import functools
import itertools
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from kv_connector.router.client import EngineClient, HttpError, Reply, content_type
from kv_connector.router.completion import DISOWNED_PATH, Completion, decode_params, disowned_body
from kv_connector.router.early_token import EarlyToken, Mismatch, PrefillStream, Rest
from kv_connector.router.endpoint import Endpoint
from kv_connector.router.events import EventStream
from kv_connector.router.failure import Failure, engine_down, failure
from kv_connector.router.incidents import Incidents
from kv_connector.router.members import Members, Side
from kv_connector.router.metrics import Metrics
from kv_connector.router.pool import EngineLost, Lease, NoEngine, Pool
from kv_connector.router.reasons import PATIENCE_S, Reasons
from kv_connector.router.settings import Settings
from kv_connector.router.spans import Spans

logger = logging.getLogger(__name__)

# A request that breaks every engine it meets must not meet all of them.
ATTEMPTS = 3


@dataclass(frozen=True)
class Call:
    """What both engines get of a request beside its body."""

    path: str
    headers: Mapping[str, str]
    request_id: str


@dataclass(frozen=True)
class Answer:
    """The decode engine's answer, from its beginning on."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]

    @property
    def streaming(self) -> bool:
        return self.content_type.startswith("text/event-stream")


# Where answers are text alone, whose first token may come from P.
_EVENT_STREAM = "text/event-stream; charset=utf-8"
_EARLY_PATHS = ("/v1/completions", "/v1/chat/completions")

# In an answer's usage. Within a string, of a generated text for one, its quotes would be escaped.
_CACHED_TOKENS = re.compile(rb'("cached_tokens": ?)\d+')


class EngineFailure(Failure):
    """An engine did not answer a request, or with an error of its own. Others may do better."""

    def __init__(self, failure: Failure, blamed: Mapping[Side, Endpoint]) -> None:
        super().__init__(failure.status, failure.body, failure.content_type)
        self.blamed = blamed


class EngineError(EngineFailure):
    """The engine answered with an error of its own."""


class Dispatcher:
    """Used from the event loop's thread only."""

    def __init__(
        self,
        settings: Settings,
        client: EngineClient,
        metrics: Metrics,
        incidents: Incidents,
        spans: Spans,
    ) -> None:
        self._settings = settings
        self._client = client
        self._metrics = metrics
        self._incidents = incidents
        self.spans = spans
        self._pools = {side: Pool() for side in Side}
        self.members = Members(
            self._pools,
            {Side.PREFILL: settings.prefill, Side.DECODE: settings.decode},
            incidents,
            suspect=settings.suspect,
            dead=settings.dead,
        )
        self.reasons = Reasons()
        self._disowning: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self, completion: Completion, call: Call) -> AsyncIterator[Answer]:
        """Waits until the answer begins; Failure if there is none.

        Until then an engine that fails is replaced by another, if there is one. Leaving the block early
        (or being cancelled before) closes the connections to both engines, which makes vLLM abort the
        request on both.
        """
        stack, answer = await self._try(completion, call)
        async with stack:
            yield answer

    async def forward(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Any decode engine's whole answer."""
        call = Call(path, headers, headers["x-request-id"])
        async with AsyncExitStack() as stack:
            lease = await self._acquire(Side.DECODE, stack, ())
            try:
                async with lease.alive():
                    url = lease.endpoint.url + path
                    return await self._client.whole(method, url, body, lease.endpoint.headers(headers))
            except (*HttpError, EngineLost) as error:
                raise self._broken(Side.DECODE, lease.endpoint, call, error) from error

    async def close(self) -> None:
        """Waits, `patience` at most, for what engines are still to be told. No request is open any more."""
        if self._disowning:
            await asyncio.wait(self._disowning)

    async def _try(
        self, completion: Completion, call: Call, avoided: Collection[Endpoint] = (), first: int = 1
    ) -> tuple[AsyncExitStack, Answer]:
        """``avoided``: the engines that failed in the attempts before the ``first`` of these."""
        avoid = {*avoided}
        for attempt in itertools.count(first):
            try:
                async with AsyncExitStack() as stack:
                    answer = await self._attempt(completion, call, stack, avoid, attempt)
                    return stack.pop_all(), answer
            except EngineFailure as error:
                avoid = self._avoid_next(error, avoid, attempt)
                logger.warning("request %s: tried again with other engines: %s", call.request_id, error)
        raise AssertionError

    def _avoid_next(self, error: EngineFailure, avoided: Collection[Endpoint], attempt: int) -> set[Endpoint]:
        """What the attempt after that one, which failed, is to avoid; raises its error where it was the last,
        or there is nobody else."""
        avoid = {*avoided, *error.blamed.values()}
        if attempt >= ATTEMPTS or not any(self._pools[side].usable(avoid) for side in error.blamed):
            raise error
        self._metrics.retries.inc()
        return avoid

    async def _attempt(
        self,
        completion: Completion,
        call: Call,
        stack: AsyncExitStack,
        avoid: Collection[Endpoint],
        number: int,
    ) -> Answer:
        """What is left on ``stack`` ends with the answer."""
        reason = completion.local_reason()
        if reason is not None:
            return await self._local(completion, call, reason, stack, avoid)
        # D asks a rank of P's for the pages: where vLLM chooses the rank, its answer has to say which.
        unknown_rank = not completion.goes_to_named_rank and self.members.has_ranks(Side.PREFILL)
        if self._settings.dispatch == "serial" or unknown_rank:
            return await self._serial(completion, call, stack, avoid)
        return await self._concurrent(completion, call, stack, avoid, number)

    async def _acquire(
        self, side: Side, stack: AsyncExitStack | ExitStack, avoid: Collection[Endpoint]
    ) -> Lease:
        """An engine of this side. A router that has just started waits for the first to register."""
        pool = self._pools[side]
        await pool.wait_usable(self._settings.patience)
        try:
            return stack.enter_context(pool.lease(avoid))
        except NoEngine:
            states = self.members.states()[side]
            known = ", ".join(f"{name} is {state.value}" for name, state in states.items()) or "none is known"
            self._incidents.note("", f"no {side.value} engine takes requests", known)
            raise failure(503, "api_error", f"no {side.value} engine takes requests: {known}") from None

    async def _local(
        self,
        completion: Completion,
        call: Call,
        reason: str,
        stack: AsyncExitStack,
        avoid: Collection[Endpoint],
    ) -> Answer:
        self._metrics.local_prefills.labels(reason).inc()
        logger.debug("request %s: prefilled by its decode engine: %s", call.request_id, reason)
        decode = await self._acquire(Side.DECODE, stack, avoid)
        return await self._decode(decode, completion.local_body(), call, stack)

    async def _serial(
        self, completion: Completion, call: Call, stack: AsyncExitStack, avoid: Collection[Endpoint]
    ) -> Answer:
        transfer_id = uuid.uuid4().hex
        self.spans.name_transfer(transfer_id)
        with ExitStack() as prefilling:
            prefill = await self._acquire(Side.PREFILL, prefilling, avoid)
            with self._owed(transfer_id, prefill.endpoint, call):
                body = completion.prefill_body(transfer_id, serial=True)
                params = await self._prefill(prefill, body, call)
        if not params:
            # Going on would compute the prompt twice, and nobody would notice.
            raise failure(
                502,
                "api_error",
                f"the prefill engine {prefill.endpoint} answered without kv_transfer_params: "
                "was it started with --kv-transfer-config and a role that produces?",
            )
        with self._owed(transfer_id, prefill.endpoint, call):
            decode = await self._acquire(Side.DECODE, stack, avoid)
            body = completion.decode_body(params)
            return await self._load(transfer_id, prefill.endpoint, decode, body, call, stack)

    async def _concurrent(
        self,
        completion: Completion,
        call: Call,
        stack: AsyncExitStack,
        avoid: Collection[Endpoint],
        number: int,
    ) -> Answer:
        transfer_id = uuid.uuid4().hex
        self.spans.name_transfer(transfer_id)
        held = ExitStack()
        stack.callback(held.close)
        prefill = await self._acquire(Side.PREFILL, held, avoid)
        serving = ExitStack()
        stack.callback(serving.close)
        decode = await self._acquire(Side.DECODE, serving, {*avoid, prefill.endpoint})
        if decode.endpoint == prefill.endpoint:
            # The only engine is both.
            return await self._local(completion, call, "one_engine", stack, avoid)
        late = self._late_reason(completion, call, prefill.endpoint, decode.endpoint)
        told: asyncio.Future[EarlyToken | None] = asyncio.get_running_loop().create_future()
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        prompt = completion.prefill_body(transfer_id, serial=False, early=late is None)
        prefilling = asyncio.create_task(
            self._prefill(prefill, prompt, call) if late else self._prefill_early(prefill, prompt, call, told)
        )
        prefilling.add_done_callback(lambda _: held.close())
        # D is served by then. P's own answer is a matter of milliseconds, and closing its connection would
        # abort it.
        stack.push_async_exit(_Finish(prefilling, self._settings.patience))
        body = completion.decode_body(decode_params(transfer_id, prefill.endpoint, early=late is None))
        ours = AsyncExitStack()
        load = self._load(transfer_id, prefill.endpoint, decode, body, call, ours, accepted)
        decoding = asyncio.create_task(load)

        async def end_decode(*why: Any) -> None:
            """``why``: as of ``__aexit__``."""
            await _end(decoding)
            await ours.__aexit__(*why)
            serving.close()

        stack.push_async_exit(end_decode)
        logger.debug(
            "request %s: transfer %s from %s to %s",
            call.request_id,
            transfer_id,
            prefill.endpoint,
            decode.endpoint,
        )
        owed = functools.partial(self._owed, transfer_id, prefill.endpoint, call)
        with owed():
            if late is None:
                token = await _early(told, accepted, decoding)
                if token is not None:
                    self._metrics.early_tokens.labels("sent").inc()
                    again = functools.partial(self._again, completion, call, avoid, number, end_decode)
                    chunks = self._splice(token, prefilling, decoding, owed, again, call)
                    # A generator that was never begun runs none of its code when it is closed.
                    await anext(chunks)
                    stack.push_async_callback(chunks.aclose)
                    return Answer(200, _EVENT_STREAM, chunks)
                late = "decode_first" if decoding.done() else "no_text"
            self._metrics.early_tokens.labels(late).inc()
            answer = await _first_byte(prefilling, decoding)
        return replace(answer, chunks=self._recount(answer.chunks, prefilling))

    def _late_reason(
        self, completion: Completion, call: Call, prefill: Endpoint, decode: Endpoint
    ) -> str | None:
        """Why the client does not get P's token; None if it does."""
        if call.path not in _EARLY_PATHS:
            return "other_api"
        if not (self.members.early_tokens(prefill) and self.members.early_tokens(decode)):
            return "engines"
        return completion.late_reason()

    async def _splice(
        self,
        token: EarlyToken,
        prefilling: asyncio.Task[dict[str, Any] | None],
        decoding: asyncio.Task[Answer],
        owed: Callable[[], AbstractContextManager[None]],
        again: Callable[[EngineFailure], Awaitable[tuple[AsyncExitStack, Answer]]],
        call: Call,
    ) -> AsyncGenerator[bytes]:
        """An empty beginning, P's token, and behind it D's answer, or that of other engines by ``again`` if
        these fail before D has begun."""
        rest = Rest(token)
        try:
            async with AsyncExitStack() as stack:
                try:
                    with owed():
                        yield b""
                        yield token.events
                        answer = await _first_byte(prefilling, decoding)
                    chunks = self._recount(answer.chunks, prefilling)
                except EngineFailure as error:
                    entered, answer = await again(error)
                    await stack.enter_async_context(entered)
                    chunks = answer.chunks
                async for events in chunks:
                    if more := rest.of(events):
                        yield more
        except Failure as error:
            yield _error_event(error)
        except Mismatch as error:
            self._metrics.early_tokens.labels("mismatch").inc()
            logger.error("request %s: the answer is broken off: %s", call.request_id, error)
            self._incidents.note("", "an answer is broken off: decode had another first token", str(error))
            yield _error_event(failure(502, "api_error", f"the answer is broken off: {error}"))

    async def _again(
        self,
        completion: Completion,
        call: Call,
        avoid: Collection[Endpoint],
        number: int,
        end_decode: Callable[..., Awaitable[None]],
        error: EngineFailure,
    ) -> tuple[AsyncExitStack, Answer]:
        """What is behind the token, from other engines than those of attempt ``number``, which failed; raises
        its error where there are none, or the token would be another one there."""
        await end_decode(type(error), error, error.__traceback__)
        if not completion.repeats_itself():
            raise error
        avoid = self._avoid_next(error, avoid, number)
        logger.warning(
            "request %s: tried again with other engines behind its first token: %s", call.request_id, error
        )
        return await self._try(completion.behind_its_token(), call, avoid, first=number + 1)

    async def _recount(
        self, chunks: AsyncIterator[bytes], prefilling: asyncio.Task[dict[str, Any] | None]
    ) -> AsyncIterator[bytes]:
        """D's answer with the cached tokens that P counted: to D all that came from P was cached.

        Where D is asked after P, vLLM does this itself, by P's kv_transfer_params.
        """
        async for chunk in chunks:
            if _CACHED_TOKENS.search(chunk):
                await asyncio.wait({prefilling}, timeout=self._settings.patience)
                if (cached := _prefix_hits(prefilling)) is not None:
                    chunk = _CACHED_TOKENS.sub(rb"\g<1>%d" % cached, chunk)
            yield chunk

    @contextmanager
    def _owed(self, transfer_id: str, prefill: Endpoint, call: Call) -> Iterator[None]:
        """A block at whose end D has answered with what P computed.

        Where it has not, because the client left or D broke off, D may never have heard of the request, and P
        would keep the prompt's blocks for its hold time: a decode engine is made to tell P that nobody wants
        them. A transfer that is under way is left to the engines.
        """
        try:
            yield
        except BaseException as error:
            unheard = isinstance(error, EngineFailure) and [*error.blamed] == [Side.DECODE]
            if unheard or isinstance(error, asyncio.CancelledError | GeneratorExit):
                task = asyncio.create_task(self._disown(transfer_id, prefill, call))
                self._disowning.add(task)
                task.add_done_callback(self._disowning.discard)
            raise

    async def _disown(self, transfer_id: str, prefill: Endpoint, call: Call) -> None:
        try:
            async with asyncio.timeout(self._settings.patience):
                with self._pools[Side.DECODE].lease() as lease:
                    url, body = lease.endpoint.url + DISOWNED_PATH, disowned_body(transfer_id, prefill)
                    await self._client.whole("POST", url, body, lease.endpoint.headers(call.headers))
        except (*HttpError, NoEngine) as error:
            logger.info(
                "request %s: %s keeps transfer %s for its hold time, no decode engine could tell it: %s: %s",
                call.request_id,
                prefill,
                transfer_id,
                type(error).__name__,
                error,
            )

    async def _prefill(self, lease: Lease, body: bytes, call: Call) -> dict[str, Any] | None:
        """Sends P its part; returns the kv_transfer_params it answered with, if any."""
        endpoint = lease.endpoint
        try:
            async with lease.alive():
                with self.spans.client(Side.PREFILL, endpoint, endpoint.headers(call.headers)) as headers:
                    reply = await self._client.whole("POST", endpoint.url + call.path, body, headers)
        except (*HttpError, EngineLost) as error:
            raise self._broken(Side.PREFILL, endpoint, call, error) from error
        if reply.status >= 400:
            refusal = Failure(reply.status, reply.body, reply.content_type)
            raise self._failure(Side.PREFILL, endpoint, call, refusal)
        try:
            params = msgspec.json.decode(reply.body, type=_PrefillAnswer).kv_transfer_params
        except msgspec.MsgspecError as error:
            raise self._broken(Side.PREFILL, endpoint, call, error) from error
        return params

    async def _prefill_early(
        self, lease: Lease, body: bytes, call: Call, told: asyncio.Future[EarlyToken | None]
    ) -> dict[str, Any] | None:
        """As _prefill(), of a P that streams: ``told`` gets its token at once, None where there is none to
        pass on. vLLM's streams have no kv_transfer_params; what is wanted of them here is in its usage.
        """
        endpoint, stream = lease.endpoint, PrefillStream()
        try:
            async with lease.alive():
                with self.spans.client(Side.PREFILL, endpoint, endpoint.headers(call.headers)) as headers:
                    request = self._client.stream("POST", endpoint.url + call.path, body, headers)
                    async with request as response:
                        if response.status >= 400:
                            kind = content_type(response)
                            refusal = Failure(response.status, await response.read(), kind)
                            raise self._failure(Side.PREFILL, endpoint, call, refusal)
                        events = EventStream(response.content.iter_any())
                        while said := await events.read():
                            try:
                                token = stream.feed(said)
                            except Failure as problem:
                                raise self._failure(Side.PREFILL, endpoint, call, problem) from None
                            if token is not None and not told.done():
                                told.set_result(token)
        except (*HttpError, EngineLost) as error:
            raise self._broken(Side.PREFILL, endpoint, call, error) from error
        finally:
            if not told.done():
                told.set_result(None)
        cached = stream.cached_tokens
        return None if cached is None else {"remote_prefill_cached_tokens": cached}

    async def _load(
        self,
        transfer_id: str,
        prefill: Endpoint,
        lease: Lease,
        body: bytes,
        call: Call,
        stack: AsyncExitStack,
        accepted: asyncio.Future[None] | None = None,
    ) -> Answer:
        """As _decode(), of a prompt that ``prefill`` computes: that may be to blame, too, if D fails.

        vLLM answers a load that failed without the reason. A D that has registered says it.
        """
        with self.reasons.expected(transfer_id) as reason:
            try:
                return await self._decode(lease, body, call, stack, accepted)
            except EngineError as error:
                if self.members.registered(lease.endpoint):
                    await asyncio.wait({reason}, timeout=PATIENCE_S)
                told: Failure = error
                if reason.done():
                    words = f"{lease.endpoint} did not get the prompt's KV from {prefill}: {reason.result()}"
                    logger.warning("request %s: %s", call.request_id, words)
                    what = f"did not get a prompt's KV from {self.members.label(prefill)}"
                    self._incidents.note(self.members.label(lease.endpoint), what, reason.result())
                    told = failure(error.status, "api_error", words)
                raise EngineError(told, {**error.blamed, Side.PREFILL: prefill}) from None

    async def _decode(
        self,
        lease: Lease,
        body: bytes,
        call: Call,
        stack: AsyncExitStack,
        accepted: asyncio.Future[None] | None = None,
    ) -> Answer:
        """Sends D its part and waits until its answer begins. ``stack`` closes the connection. ``accepted``:
        done as soon as D has begun a stream."""
        endpoint = lease.endpoint
        try:
            async with lease.alive():
                span = self.spans.client(Side.DECODE, endpoint, endpoint.headers(call.headers))
                headers = stack.enter_context(span)
                request = self._client.stream("POST", endpoint.url + call.path, body, headers)
                response = await stack.enter_async_context(request)
                kind = content_type(response)
                if response.status >= 400:
                    refusal = Failure(response.status, await response.read(), kind)
                    raise self._failure(Side.DECODE, endpoint, call, refusal)
                if not kind.startswith("text/event-stream"):
                    return Answer(response.status, kind, _one(await response.read()))
                if accepted is not None:
                    accepted.set_result(None)
                events = EventStream(response.content.iter_any())
                try:
                    opening = await events.opening()
                except Failure as problem:
                    # vLLM has sent its status before it knew; the client has not seen it yet.
                    raise self._failure(Side.DECODE, endpoint, call, problem) from None
        except (*HttpError, EngineLost) as error:
            raise self._broken(Side.DECODE, endpoint, call, error) from error
        return Answer(response.status, kind, self._relay(opening, events, lease, call))

    async def _relay(
        self, opening: bytes, events: EventStream, lease: Lease, call: Call
    ) -> AsyncIterator[bytes]:
        yield opening
        try:
            while True:
                async with lease.alive():
                    more = await events.read()
                if not more:
                    return
                yield more
        except (*HttpError, EngineLost) as error:
            # The status is long out: the stream's own way to say it is an event.
            yield events.error(self._broken(Side.DECODE, lease.endpoint, call, error).body)

    def _failure(self, side: Side, endpoint: Endpoint, call: Call, answer: Failure) -> Failure:
        """An engine's own error: the request's fault, or from 500 on the engine's."""
        self._metrics.failures.labels(side.value, str(endpoint)).inc()
        logger.warning("request %s: %s engine %s answered %s", call.request_id, side.value, endpoint, answer)
        if answer.status < 500:
            return answer
        self._incidents.note(self.members.label(endpoint), f"answers {answer.status}", str(answer))
        return EngineError(answer, {side: endpoint})

    def _broken(self, side: Side, endpoint: Endpoint, call: Call, error: Exception) -> EngineFailure:
        """An engine that does not answer, or broke off: it is left alone until it answers again."""
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
        self._incidents.note(self.members.label(endpoint), _what_broke(error), words)
        self.members.failed(endpoint, words)
        return EngineFailure(engine_down(side.value, str(endpoint), error), {side: endpoint})


def _what_broke(error: Exception) -> str:
    """In words that name nobody: the error's own have addresses."""
    match error:
        case EngineLost():
            return "loses the requests that it has: it gives no sign of life any more"
        case aiohttp.ClientConnectorError() | TimeoutError():
            return "takes no connection"
        case msgspec.MsgspecError():
            return "gives an answer that cannot be read"
        case _:
            return "breaks off a request"


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def _prefix_hits(prefilling: asyncio.Task[dict[str, Any] | None]) -> int | None:
    """How many of the prompt's tokens P found in its prefix cache, if it has said so."""
    if not prefilling.done() or prefilling.cancelled() or prefilling.exception():
        return None
    cached = (prefilling.result() or {}).get("remote_prefill_cached_tokens")
    return cached if isinstance(cached, int) else None


async def _first_byte(prefilling: asyncio.Task[Any], decoding: asyncio.Task[Answer]) -> Answer:
    """D's answer, unless P fails before D has one: D would wait for pages that never come."""
    while True:
        if prefilling.done() and (not decoding.done() or decoding.exception()):
            prefilling.result()
        if decoding.done():
            return decoding.result()
        await asyncio.wait(
            {decoding} if prefilling.done() else {prefilling, decoding}, return_when="FIRST_COMPLETED"
        )


async def _early(
    told: asyncio.Future[EarlyToken | None], accepted: asyncio.Future[None], decoding: asyncio.Task[Answer]
) -> EarlyToken | None:
    """P's token, once D has taken the request; None if there is none to pass on, or D is first."""
    while not decoding.done():
        if told.done() and (accepted.done() or told.result() is None):
            return told.result()
        waits = [future for future in (told, accepted) if not future.done()]
        await asyncio.wait([*waits, decoding], return_when=asyncio.FIRST_COMPLETED)
    return None


class _Finish:
    """Waits for a task where all went well, `seconds` at most, and ends it then or where not."""

    def __init__(self, task: asyncio.Task[Any], seconds: float) -> None:
        self._task = task
        self._seconds = seconds

    async def __call__(self, kind: object, *_: object) -> None:
        if kind is None:
            await asyncio.wait({self._task}, timeout=self._seconds)
        await _end(self._task)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancels what still runs, and takes note of how it ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _error_event(error: Failure) -> bytes:
    return b"data: " + error.body + b"\n\n"


async def _one(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk
