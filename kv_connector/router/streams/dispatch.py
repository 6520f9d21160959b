"""Dispatcher: takes a completion to a prefill and a decode engine, and brings back the latter's answer."""

import asyncio
import functools
import itertools
import logging
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import replace
from typing import Any, TypeVar

from kv_connector.router.bodies.fields import Content
from kv_connector.router.engines.client import EngineClient, HttpError, Reply
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.models import merged, names
from kv_connector.router.engines.pool import Lease, NoEngine, Pool
from kv_connector.router.engines.settings import Settings
from kv_connector.router.failure import Failure, failure
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.observe.spans import Spans
from kv_connector.router.placement.goodput import Goodput
from kv_connector.router.placement.policy import FewestOutstanding, Placement, Policy
from kv_connector.router.requests.answers import Answer, Computed
from kv_connector.router.requests.completion import DISOWNED_PATH, Completion, decode_params, disowned_body
from kv_connector.router.requests.continuation import PATHS
from kv_connector.router.requests.early_token import EarlyToken, Mismatch, Rest
from kv_connector.router.streams.calls import EVENT_STREAM, Call, Calls, EngineFailure
from kv_connector.router.streams.moves import Moves, Stream
from kv_connector.router.streams.usage import recounted

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A request that breaks every engine it meets must not meet all of them.
ATTEMPTS = 3

MODELS_PATH = "/v1/models"

# By then an attempt has sent its requests.
_SENT_S = 0.001


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
            needed=tuple(Side) if settings.require_prefill else (Side.DECODE,),
        )
        self.calls = Calls(client, self.members, metrics, incidents, spans)
        self._policy: Policy = FewestOutstanding(self._pools)
        if settings.objectives is not None:
            self._policy = Goodput(settings.objectives, self._pools)
        self._joined_by = time.monotonic() + settings.patience
        self._disowning: set[asyncio.Task[None]] = set()
        self.moves = Moves(self._pools, self.members, self.calls, metrics, self._pair)

    @asynccontextmanager
    async def open(self, completion: Completion, call: Call) -> AsyncIterator[Answer]:
        """Waits until the answer begins; Failure if there is none.

        Until then an engine that fails is replaced by another, if there is one. Leaving the block early
        (or being cancelled before) closes the connections to both engines, which makes vLLM abort the
        request on both.
        """
        async with AsyncExitStack() as ours:
            request = ours.enter_context(self.moves.follow(completion, call))
            stack, answer = await self._try(completion, request.call)
            stream = Stream(self.moves, request, stack, answer)
            ours.push_async_exit(stream.end)
            yield stream.answer

    async def forward(
        self, method: str, path: str, body: Content, model: str | None, headers: Mapping[str, str]
    ) -> Reply:
        """Any decode engine's whole answer; of a route that changes nothing there. ``model``: the body's."""
        if path == MODELS_PATH:
            return await self._models(headers)
        return await self._forward(method, Call(path, headers, headers["x-request-id"], model), body)

    async def _forward(self, method: str, call: Call, body: Content) -> Reply:
        async def attempt(avoid: Collection[Endpoint], _: int) -> Reply:
            with ExitStack() as stack:
                lease = await self._decoder(stack, call, avoid)
                return await self.calls.whole(Side.DECODE, lease, method, body, call)

        return await self._retried(attempt, call)

    async def _models(self, headers: Mapping[str, str]) -> Reply:
        """The models of all decode engines: the answers of as many engines as it takes to have each model."""
        call = Call(MODELS_PATH, headers, headers["x-request-id"])
        first = await self._forward("GET", call, b"")
        listed = names(call.path, first)
        if listed is None:
            return first
        replies, missing = [first], self._pools[Side.DECODE].models() - listed
        while missing:
            model = missing.pop()
            reply = await self._forward("GET", replace(call, model=model), b"")
            if found := names(call.path, reply):
                replies.append(reply)
                missing -= found
        return merged(replies) if len(replies) > 1 else first

    async def close(self) -> None:
        """Waits, `patience` at most, for what engines are still to be told. No request is open any more."""
        if self._disowning:
            await asyncio.wait(self._disowning)

    async def _try(
        self, completion: Completion, call: Call, avoided: Collection[Endpoint] = (), first: int = 1
    ) -> tuple[AsyncExitStack, Answer]:
        """``avoided``, ``first``: as _retried() has them."""

        async def attempt(avoid: Collection[Endpoint], number: int) -> tuple[AsyncExitStack, Answer]:
            async with AsyncExitStack() as stack:
                answer = await self._attempt(completion, call, stack, avoid, number)
                return stack.pop_all(), answer

        return await self._retried(attempt, call, avoided, first)

    async def _retried(
        self,
        attempt: Callable[[Collection[Endpoint], int], Awaitable[T]],
        call: Call,
        avoided: Collection[Endpoint] = (),
        first: int = 1,
    ) -> T:
        """``attempt`` gets what to avoid, and its number. ``avoided``: what failed in those before the first
        one, ``first``."""
        avoid = {*avoided}
        for number in itertools.count(first):
            try:
                return await attempt(avoid, number)
            except EngineFailure as error:
                avoid = self._avoid_next(error, avoid, number, call)
                logger.warning("request %s: tried again with other engines: %s", call.request_id, error)
        raise AssertionError

    def _avoid_next(
        self, error: EngineFailure, avoided: Collection[Endpoint], attempt: int, call: Call
    ) -> set[Endpoint]:
        """What the attempt after that one, which failed, is to avoid; raises its error where it was the last,
        or there is nobody else."""
        avoid = {*avoided, *error.blamed.values()}
        model = self._known(call)
        others = any(self._pools[side].usable(avoid, model) for side in error.blamed)
        alone = [*error.blamed] == [Side.PREFILL] and self._no_prefill(model)
        if attempt >= ATTEMPTS or not (others or alone):
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
            decode = await self._decoder(stack, call, avoid)
            return await self._local(completion, call, reason, decode, stack)
        placement = await self._place(completion, call, avoid)
        self._metrics.placed(local=placement.prefill is None, reason=placement.reason, late=placement.late)
        if placement.prompt is not None:
            asyncio.get_running_loop().call_later(_SENT_S, self._policy.sent, placement)
        if placement.prefill is None:
            pool = self._pools[Side.DECODE]
            decode = stack.enter_context(pool.lease(placement.decode, placement.work))
            return await self._local(completion, call, placement.reason, decode, stack)
        # D asks a rank of P's for the pages: where vLLM chooses the rank, its answer has to say which.
        unknown_rank = not completion.goes_to_named_rank and self.members.has_ranks(Side.PREFILL)
        if self._settings.dispatch == "serial" or unknown_rank:
            return await self._serial(completion, call, placement, stack, avoid)
        return await self._concurrent(completion, call, placement, stack, avoid, number)

    async def _place(self, completion: Completion, call: Call, avoid: Collection[Endpoint]) -> Placement:
        left = self._joined_by - time.monotonic()
        if left > 0 and not self._settings.require_prefill:
            # After its start, a router does not know yet which prefill engines exist.
            await self._pools[Side.PREFILL].wait_usable(left, self._known(call))

        def place() -> Placement:
            model = self._known(call)
            if self._no_prefill(model):
                return Placement(None, self._pools[Side.DECODE].fewest(avoid, model=model), "no_prefill")
            return self._policy.place(completion, call.path, avoid, model)

        placement = await self._where(place)
        if placement.reason == "no_prefill":
            self._note_lack(Side.PREFILL)
        return placement

    def _known(self, call: Call) -> str | None:
        """The model by which engines are chosen: a model that no decode engine lists is theirs to refuse."""
        return self._pools[Side.DECODE].known(call.model)

    def _no_prefill(self, model: str | None) -> bool:
        """Whether decode engines compute the prompts because no prefill engine can."""
        return not self._settings.require_prefill and self._pools[Side.PREFILL].failing(model)

    def _note_lack(self, side: Side) -> str:
        """Notes for the status page that no engine of this side takes requests. Returns their states."""
        states = self.members.states()[side]
        known = ", ".join(f"{name} is {state.value}" for name, state in states.items()) or "none is known"
        self._incidents.note("", f"no {side.value} engine takes requests", known)
        return known

    async def _decoder(
        self, stack: AsyncExitStack | ExitStack, call: Call, avoid: Collection[Endpoint] = ()
    ) -> Lease:
        """Any decode engine of the model."""
        pool = self._pools[Side.DECODE]
        decode = await self._where(lambda: pool.fewest(avoid, model=self._known(call)))
        return stack.enter_context(pool.lease(decode))

    async def _partner(
        self, stack: AsyncExitStack, prefill: Endpoint, call: Call, avoid: Collection[Endpoint]
    ) -> Lease:
        """A decode engine for what that one has computed."""
        pool, prefills = self._pools[Side.DECODE], self._pools[Side.PREFILL]
        decode = await self._where(lambda: pool.partner(prefills, prefill, avoid, self._known(call)))
        return stack.enter_context(pool.lease(decode))

    async def _where(self, choose: Callable[[], T]) -> T:
        """What that chooses, of engines that must be used before anything else is awaited. A router that has
        just started waits for the first of each side to register."""
        deadlines: dict[Pool, float] = {}
        while True:
            try:
                return choose()
            except NoEngine as none:
                now = time.monotonic()
                left = deadlines.setdefault(none.pool, now + self._settings.patience) - now
                if left > 0:
                    await none.pool.wait_usable(left, none.model)
                    continue
                side = next(side for side, pool in self._pools.items() if pool is none.pool)
                of = f" of the model {none.model[:100]}" if none.model and none.pool.usable() else ""
            known = self._note_lack(side)
            raise failure(503, "api_error", f"no {side.value} engine{of} takes requests: {known}")

    async def _local(
        self,
        completion: Completion,
        call: Call,
        reason: str,
        decode: Lease,
        stack: AsyncExitStack,
    ) -> Answer:
        self._metrics.local_prefills.labels(reason).inc()
        logger.debug("request %s: prefilled by its decode engine: %s", call.request_id, reason)
        ids = self._begin(call, decode)
        answer = await self.calls.decode(decode, completion.local_body(ids=ids), call, stack)
        decode.computed()
        return answer

    async def _serial(
        self,
        completion: Completion,
        call: Call,
        placement: Placement,
        stack: AsyncExitStack,
        avoid: Collection[Endpoint],
    ) -> Answer:
        transfer_id = uuid.uuid4().hex
        self.spans.name_transfer(transfer_id)
        assert placement.prefill is not None
        prefilling = self._pools[Side.PREFILL].lease(placement.prefill, placement.work)
        with prefilling as prefill, self._owed(transfer_id, prefill, call):
            body = completion.prefill_body(transfer_id, serial=True)
            computed = await self.calls.prefill(prefill, body, call)
        self._policy.computed(placement, computed)
        params = computed.params
        if not params:
            # Going on would compute the prompt twice, and nobody would notice.
            raise failure(
                502,
                "api_error",
                f"the prefill engine {prefill.endpoint} answered without kv_transfer_params: "
                "was it started with --kv-transfer-config and a role that produces?",
            )
        with self._owed(transfer_id, prefill, call):
            decode = await self._partner(stack, placement.prefill, call, avoid)
            ids = self._begin(call, decode)
            body = completion.decode_body(params, ids=ids)
            answer = await self.calls.load(transfer_id, prefill.endpoint, decode, body, call, stack)
        call.running.cached = computed.cached
        return answer

    def _begin(self, call: Call, decode: Lease) -> bool:
        """D is asked. Returns whether it is to say token ids: the stream may be moved from there."""
        return call.running.begin(decode.endpoint, parts=self.members.of_both_sides(decode.endpoint))

    async def _concurrent(
        self,
        completion: Completion,
        call: Call,
        placement: Placement,
        stack: AsyncExitStack,
        avoid: Collection[Endpoint],
        number: int,
    ) -> Answer:
        transfer_id = uuid.uuid4().hex
        self.spans.name_transfer(transfer_id)
        assert placement.prefill is not None
        held = ExitStack()
        stack.callback(held.close)
        prefill = held.enter_context(self._pools[Side.PREFILL].lease(placement.prefill, placement.work))
        serving = ExitStack()
        stack.callback(serving.close)
        decode = serving.enter_context(self._pools[Side.DECODE].lease(placement.decode))
        late = self._late_reason(completion, call, prefill.endpoint, decode.endpoint)
        loop = asyncio.get_running_loop()
        told: asyncio.Future[EarlyToken | None] = loop.create_future()
        at_prefill: asyncio.Future[None] = loop.create_future()
        at_decode: asyncio.Future[None] = loop.create_future()
        prompt = completion.prefill_body(transfer_id, serial=False, early=late is None)
        prefilling = asyncio.create_task(
            self.calls.prefill(prefill, prompt, call)
            if late
            else self.calls.prefill_early(prefill, prompt, call, at_prefill, told)
        )

        def prefilled(task: asyncio.Task[Computed]) -> None:
            held.close()
            if not task.cancelled() and task.exception() is None:
                call.running.cached = task.result().cached
                self._policy.computed(placement, task.result())

        prefilling.add_done_callback(prefilled)
        # D is served by then. P's own answer is a matter of milliseconds, and closing its connection would
        # abort it.
        stack.push_async_exit(_Finish(prefilling, self._settings.patience))
        ids = self._begin(call, decode)
        params = decode_params(transfer_id, prefill.endpoint, early=late is None)
        body = completion.decode_body(params, ids=ids)
        ours = AsyncExitStack()
        load = self.calls.load(transfer_id, prefill.endpoint, decode, body, call, ours, at_decode)
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
        owed = functools.partial(self._owed, transfer_id, prefill, call)
        with owed():
            if late is None:
                token = await _early(told, (at_prefill, at_decode), decoding, call)
                if token is not None:
                    self._metrics.early_tokens.labels("sent").inc()
                    again = functools.partial(self._again, completion, call, avoid, number, end_decode)
                    chunks = self._splice(token, prefilling, decoding, owed, again, call)
                    # A generator that was never begun runs none of its code when it is closed.
                    await anext(chunks)
                    stack.push_async_callback(chunks.aclose)
                    return Answer(200, EVENT_STREAM, chunks)
                late = "decode_first" if decoding.done() else "no_text"
            self._metrics.early_tokens.labels(late).inc()
            answer = await _first_byte(prefilling, decoding)
        return replace(answer, chunks=self._recounted(answer, prefilling))

    async def _pair(
        self, completion: Completion, call: Call, prefill: Endpoint, decode: Endpoint
    ) -> tuple[AsyncExitStack, Answer]:
        """As _try(), of these two engines alone, whether they take requests or not."""
        for side, engine in ((Side.PREFILL, prefill), (Side.DECODE, decode)):
            if not self._pools[side].has(engine):
                raise failure(503, "api_error", f"{engine} is gone")
        async with AsyncExitStack() as stack:
            placement = Placement(prefill, decode, "moved")
            answer = await self._concurrent(completion, call, placement, stack, (), ATTEMPTS)
            return stack.pop_all(), answer

    def _late_reason(
        self, completion: Completion, call: Call, prefill: Endpoint, decode: Endpoint
    ) -> str | None:
        """Why the client does not get P's token; None if it does."""
        if call.path not in PATHS:
            return "other_api"
        if not (self.members.early_tokens(prefill) and self.members.early_tokens(decode)):
            return "engines"
        return completion.late_reason()

    async def _splice(
        self,
        token: EarlyToken,
        prefilling: asyncio.Task[Computed],
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
                    chunks = self._recounted(answer, prefilling)
                except EngineFailure as error:
                    entered, answer = await again(error)
                    await stack.enter_async_context(entered)
                    chunks = answer.chunks
                async for events in chunks:
                    if more := rest.of(events):
                        yield more
        except Mismatch as error:
            self._metrics.early_tokens.labels("mismatch").inc()
            logger.error("request %s: the answer is broken off: %s", call.request_id, error)
            self._incidents.note("", "an answer is broken off: decode had another first token", str(error))
            raise failure(502, "api_error", f"the answer is broken off: {error}") from None

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
        avoid = self._avoid_next(error, avoid, number, call)
        logger.warning(
            "request %s: tried again with other engines behind its first token: %s", call.request_id, error
        )
        return await self._try(completion.behind_its_token(), call, avoid, first=number + 1)

    def _recounted(self, answer: Answer, prefilling: asyncio.Task[Computed]) -> AsyncIterator[bytes]:
        return recounted(answer, functools.partial(_computed, prefilling, self._settings.patience))

    @contextmanager
    def _owed(self, transfer_id: str, prefill: Lease, call: Call) -> Iterator[None]:
        """A block at whose end D has answered with what P computed. P is not idle until then.

        Where it has not, nobody will ask for this transfer again, as each attempt has an id of its own: the
        client left, D broke off, or D refused a body that P took. D may never have known of the request, and
        P would keep the prompt's blocks for its hold time. A decode engine is made to tell P that nobody
        wants them. A transfer that is under way is left to the engines, as is one that P alone failed.
        """
        try:
            with prefill.owing():
                yield
        except BaseException as error:
            if not (isinstance(error, EngineFailure) and [*error.blamed] == [Side.PREFILL]):
                task = asyncio.create_task(self._disown(transfer_id, prefill.endpoint, call))
                self._disowning.add(task)
                task.add_done_callback(self._disowning.discard)
            raise

    async def _disown(self, transfer_id: str, prefill: Endpoint, call: Call) -> None:
        try:
            async with asyncio.timeout(self._settings.patience):
                pool = self._pools[Side.DECODE]
                with pool.lease(pool.fewest(model=pool.known(call.model))) as lease:
                    url, body = lease.endpoint.url + DISOWNED_PATH, disowned_body(transfer_id, prefill)
                    await self._client.whole("POST", url, body, lease.endpoint.headers(call.headers))
        except (*HttpError, NoEngine, Failure) as error:
            logger.info(
                "request %s: %s keeps transfer %s for its hold time, no decode engine could tell it: %s: %s",
                call.request_id,
                prefill,
                transfer_id,
                type(error).__name__,
                error,
            )


async def _computed(prefilling: asyncio.Task[Computed], seconds: float) -> Computed | None:
    """P's account of the prompt, if it comes within that time."""
    await asyncio.wait({prefilling}, timeout=seconds)
    if not prefilling.done() or prefilling.cancelled() or prefilling.exception():
        return None
    return prefilling.result()


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
    told: asyncio.Future[EarlyToken | None],
    accepted: Sequence[asyncio.Future[None]],
    decoding: asyncio.Task[Answer],
    call: Call,
) -> EarlyToken | None:
    """P's token, once both engines have taken the request, which the client is told before; None if there is
    none to pass on, or D is first."""
    while not decoding.done():
        if begun := all(future.done() for future in accepted):
            await call.begin()
        if told.done() and (begun or told.result() is None):
            return told.result()
        events: list[asyncio.Future[Any]] = [*accepted, told, decoding]
        waits = [event for event in events if not event.done()]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
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
