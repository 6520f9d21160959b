"""Dispatcher: sends each completion to a prefill and a decode engine, and returns the decode engine's
answer.
"""

import functools
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
)
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import replace
from typing import TypeVar

from kv_connector.router.bodies.fields import Content
from kv_connector.router.engines.client import EngineClient, EngineReply
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.models import merged, names
from kv_connector.router.engines.pool import Lease, NoEngine, Pool
from kv_connector.router.failure import Failure, failure
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.observe.spans import Spans
from kv_connector.router.placement.policy import NO_PREFILL, Placement, PlacementRequest
from kv_connector.router.placement.session_engines import session_of
from kv_connector.router.requests.answers import Answer
from kv_connector.router.requests.completion import Body, Completion
from kv_connector.router.requests.transcript import Budget, Transcript
from kv_connector.router.settings import RouterSettings
from kv_connector.router.streams.attempt import Attempt, Components, proposal
from kv_connector.router.streams.calls import Call, EngineFailure
from kv_connector.router.streams.concurrent import ConcurrentAttempt
from kv_connector.router.streams.continuing import Continuing
from kv_connector.router.streams.moves import Moves
from kv_connector.router.streams.restarts import Restarts
from kv_connector.router.streams.resumption import Resumption
from kv_connector.router.streams.serial import answer_serially
from kv_connector.router.streams.stream import Stream

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A request that breaks every engine must not reach all engines. An attempt at an engine that has not read the
# request does not count: the request is not the cause. No process listens there, or it refuses the router's
# key.
ATTEMPTS = 3
# Such a failure takes no computation. After a key was changed wrongly, all engines may fail so, and each of
# them costs a request of the other side and several log lines.
MOST_ENGINES = 8
_NO_RETRY = ATTEMPTS + 1

MODELS_PATH = "/v1/models"


class Dispatcher:
    """Serves requests with the engines of both sides. Used from the event loop's thread only."""

    def __init__(
        self,
        settings: RouterSettings,
        client: EngineClient,
        metrics: Metrics,
        incidents: Incidents,
        spans: Spans,
    ) -> None:
        self._settings = settings
        self.parts = Components.of(settings, client, metrics, incidents, spans)
        self._joined_by = time.monotonic() + settings.patience
        self._transcripts = Budget()
        continuing = Continuing(self.parts.pools, self._forward)
        self.moves = Moves(self.parts.pools, self.parts.members, continuing, metrics, self._pair)
        self._restarts = Restarts(self.parts.pools, metrics.waiting_streams)
        self._resumption = Resumption(continuing, self._restarts, metrics, self._resume)

    @asynccontextmanager
    async def open(self, completion: Completion, call: Call) -> AsyncIterator[Answer]:
        """Waits until the answer begins and yields it; Failure if there is none.

        A failed engine is replaced by another engine, if there is one: until then by any, afterwards by one
        that can continue the stream. Failure if there is none. Leaving the block early, or
        being cancelled before, closes the connections to both engines. That makes vLLM abort the request on
        both.
        """
        completion = await self._encoded(completion, call)
        async with AsyncExitStack() as ours:
            prefetches = self.parts.prefetches is not None
            request = ours.enter_context(self.moves.follow(completion, call, prefetches=prefetches))
            stack, answer = await self._try(completion, request.call)
            stream = Stream(self.moves, self._resumption, request, stack, answer)
            ours.push_async_exit(stream.end)
            if not self.parts.learns:
                with _explained(stream):
                    yield stream.answer
                return
            echo = bool(completion.body.get("echo"))
            transcript = Transcript(call.path, self._transcripts, echo=echo)
            ours.callback(transcript.close)
            with _explained(stream):
                yield replace(stream.answer, transcript=transcript)
            # The client has the whole answer: else the block has raised.
            began, ended = request.call.running, request.running
            if began.placement is not None and began.lease is not None:
                moved = None if ended is began else ended.lease
                said = transcript.said()
                self.parts.caches.answered(began.lease, said, began.placement, moved=moved)
                if self.parts.prefetches is not None:
                    self.parts.prefetches.answered(request, began, said)

    async def forward(self, method: str, call: Call, body: Content) -> EngineReply:
        """Returns the whole answer of any decode engine, for a route that changes nothing there."""
        if call.path == MODELS_PATH:
            return await self._models(replace(call, model=None))
        return await self._forward(method, call, body)

    async def _forward(self, method: str, call: Call, body: Content) -> EngineReply:
        async def attempt(avoid: Collection[Endpoint], _: int, __: EngineFailure | None) -> EngineReply:
            with ExitStack() as stack:
                lease = await self._decoder(stack, call, avoid)
                return await self.parts.calls.whole(Side.DECODE, lease, method, body, call)

        return await self._retried(attempt, call)

    async def _models(self, call: Call) -> EngineReply:
        """Returns the models of all decode engines, merged from the answers of as many engines as needed."""
        first = await self._forward("GET", call, b"")
        listed = names(call.path, first)
        if listed is None:
            return first
        replies, missing = [first], self.parts.pools[Side.DECODE].models() - listed
        while missing:
            model = missing.pop()
            reply = await self._forward("GET", replace(call, model=model), b"")
            if found := names(call.path, reply):
                replies.append(reply)
                missing -= found
        return merged(replies) if len(replies) > 1 else first

    async def close(self) -> None:
        """Waits until engines are notified, `patience` seconds at most. No request is open any more."""
        if self.parts.prefetches is not None:
            await self.parts.prefetches.close()
        await self.parts.holds.close()

    async def _try(
        self,
        completion: Completion,
        call: Call,
        avoided: Collection[Endpoint] = (),
        first: int = 1,
        failed: EngineFailure | None = None,
    ) -> tuple[AsyncExitStack, Answer]:
        """Makes attempts until one succeeds. ``avoided``, ``first``, ``failed``: as in _retried()."""

        async def attempt(
            avoid: Collection[Endpoint], number: int, failed: EngineFailure | None
        ) -> tuple[AsyncExitStack, Answer]:
            async with self._turn(completion, call, failed) as its_call, AsyncExitStack() as stack:
                answer = await self._attempt(completion, its_call, stack, avoid, number)
                return stack.pop_all(), answer

        return await self._retried(attempt, call, avoided, first, failed)

    async def _retried(
        self,
        attempt: Callable[[Collection[Endpoint], int, EngineFailure | None], Awaitable[T]],
        call: Call,
        avoided: Collection[Endpoint] = (),
        first: int = 1,
        failed: EngineFailure | None = None,
    ) -> T:
        """Makes attempts until one succeeds, and raises the last failure.

        ``attempt`` gets the engines to avoid, its number, and the failure of the attempt before. ``avoided``:
        engines that failed in earlier attempts. ``first``: number of the first attempt here. ``failed``: the
        failure before it.
        """
        avoid, number = {*avoided}, first
        while True:
            try:
                return await attempt(avoid, number, failed)
            except EngineFailure as error:
                avoid, number = self._next(error, avoid, number, call)
                failed = error
                logger.warning("request %s: retried on other engines: %s", call.request_id, error)

    @asynccontextmanager
    async def _turn(
        self, completion: Completion, call: Call, failed: EngineFailure | None
    ) -> AsyncIterator[Call]:
        """Waits until a request whose engine has failed may begin anew, and yields its call. A stream's turn
        ends with the block, which ends when the answer begins.

        An answer that is not streamed begins with its end, and a stream with hidden reasoning behind the
        reasoning. So their turns end when the prompt is computed. A resumed stream has its turn already.
        """
        if failed is None or call.resumes:
            yield call
            return
        engine = next(iter(failed.blamed.values()))
        begins = completion.streamed and completion.body.get("include_reasoning") is not False
        async with self._restarts.turn(engine, call.model) as end:
            yield call if begins else replace(call, prompt_computed=end)

    def _next(
        self, error: EngineFailure, avoided: Collection[Endpoint], number: int, call: Call
    ) -> tuple[set[Endpoint], int]:
        """Returns the engines to avoid in the next attempt, and its number, after this attempt has failed.

        Raises the failure if it was the last attempt, or if there are no other engines.
        """
        avoid = {*avoided, *error.blamed.values()}
        model = self._known(call)
        # A request that has ended two engines may have been the cause.
        next_number = number if error.unread else number + 1
        last = next_number > ATTEMPTS or len(avoid) > MOST_ENGINES or (call.resumes and error.broke)
        others = any(self.parts.pools[side].usable(avoid, model) for side in error.blamed)
        alone = [*error.blamed] == [Side.PREFILL] and self._no_prefill(model)
        if last or not (others or alone):
            raise error
        self.parts.metrics.retries.inc()
        return avoid, next_number

    async def _attempt(
        self,
        completion: Completion,
        call: Call,
        stack: AsyncExitStack,
        avoid: Collection[Endpoint],
        number: int,
    ) -> Answer:
        """Makes one attempt. The contents of ``stack`` end with the answer."""
        reason = completion.local_reason()
        if reason is not None:
            decode = await self._decoder(stack, call, avoid)
            return await self._local(completion, call, reason, decode, stack)
        placement = await self._place(completion, call, avoid)
        if self.parts.learns and placement.prompt is None:
            placement = replace(placement, prompt=completion.prompt(call.path))
        call.running.placement = placement
        self.parts.metrics.placed(
            local=placement.prefill is None,
            reason=placement.reason,
            late=placement.late,
            seconds=0.0 if placement.work is None else placement.work.seconds,
        )
        if placement.prefill is None:
            pool = self.parts.pools[Side.DECODE]
            lease = pool.lease(placement.decode, placement.work, placement.tokens, placement.prompt)
            decode = stack.enter_context(lease)
            prefix = proposal(placement)
            answer = await self._local(completion, call, placement.reason, decode, stack, prefix)
            self.parts.caches.began(decode, placement)
            return answer
        # The decode engine requests the pages from one rank. If vLLM chooses the rank, the prefill engine's
        # answer must name it.
        unknown_rank = not completion.goes_to_named_rank and self.parts.members.has_ranks(Side.PREFILL)
        attempt = Attempt(completion, call, placement, placement.prefill)
        if self._settings.dispatch == "serial" or unknown_rank:
            partner = functools.partial(self._lease_partner, stack, placement, call, avoid)
            alone = functools.partial(self._local, completion, call, "other_weights", stack=stack)
            return await answer_serially(self.parts, attempt, stack, partner, alone)
        return await self._concurrent(attempt, stack, avoid, number)

    async def _encoded(self, completion: Completion, call: Call) -> Completion:
        """Has an encoder engine encode the request's pictures. Returns the request with their embeddings.

        If no encoder engine can, the request returns as it is, and its prefill engine encodes the pictures.
        Failure if the router requires an encoder engine.
        """
        pool = self.parts.pools[Side.ENCODER]
        if not self._settings.encoders or completion.only_text() or completion.local_reason() is not None:
            return completion

        async def attempt(avoid: Collection[Endpoint], *_: object) -> Body:
            engine = await self._wait_for_choice(lambda: pool.fewest(avoid, model=self._known(call)))
            with pool.lease(engine) as lease:
                return await self.parts.calls.encode(lease, completion.encoder_body(), call)

        required, announced = self._settings.require_encoder, Body()
        if not required and pool.failing(self._known(call)):
            self._note_lack(Side.ENCODER)
            outcome = "no_engine"
        else:
            try:
                announced = await self._retried(attempt, call)
                outcome = "encoded" if announced else "nothing"
            except Failure as error:
                if required:
                    raise
                logger.warning(
                    "request %s: a prefill engine encodes its pictures: %s", call.request_id, error
                )
                outcome = "failed"
        self.parts.metrics.encodes.labels(outcome).inc()
        return completion.with_embeddings(announced) if announced else completion

    async def _place(self, completion: Completion, call: Call, avoid: Collection[Endpoint]) -> Placement:
        left = self._joined_by - time.monotonic()
        if left > 0 and not self._settings.require_prefill:
            # A router that has just started does not know yet which prefill engines exist.
            await self.parts.pools[Side.PREFILL].wait_usable(left, self._known(call))

        session = session_of(call.headers, completion.body)

        def place() -> Placement:
            model, policy = self._known(call), self.parts.policy
            choose = policy.alone if self._no_prefill(model) else policy.place
            return choose(PlacementRequest(completion, call.path, avoid, model, session))

        placement = await self._wait_for_choice(place)
        if placement.reason == NO_PREFILL:
            self._note_lack(Side.PREFILL)
        return placement

    def _known(self, call: Call) -> str | None:
        """Returns the model by which engines are chosen. None for a model that no decode engine lists:
        engines refuse it."""
        return self.parts.pools[Side.DECODE].known(call.model)

    def _no_prefill(self, model: str | None) -> bool:
        """Returns whether decode engines compute the prompts because no prefill engine can."""
        return not self._settings.require_prefill and self.parts.pools[Side.PREFILL].failing(model)

    def _note_lack(self, side: Side) -> str:
        """Notes for the status page that no engine of this side takes requests. Returns their states."""
        states = self.parts.members.states().get(side, {})
        known = ", ".join(f"{name} is {state.value}" for name, state in states.items()) or "none is known"
        self.parts.incidents.note("", f"no {side.value} engine takes requests", known)
        return known

    async def _decoder(
        self, stack: AsyncExitStack | ExitStack, call: Call, avoid: Collection[Endpoint] = ()
    ) -> Lease:
        """Leases any decode engine that serves the model."""
        pool = self.parts.pools[Side.DECODE]
        decode = await self._wait_for_choice(lambda: pool.fewest(avoid, model=self._known(call)))
        return stack.enter_context(pool.lease(decode))

    async def _lease_partner(
        self, stack: AsyncExitStack, placement: Placement, call: Call, avoid: Collection[Endpoint]
    ) -> Lease:
        """Leases a decode engine that can load the pages of the placement's prefill engine.

        It is the placement's decode engine if that was chosen for its cache and still takes requests. Else
        the engine with the fewest requests is chosen now.
        """
        pool, prefills = self.parts.pools[Side.DECODE], self.parts.pools[Side.PREFILL]
        prefill, chosen = placement.prefill, placement.decode
        assert prefill is not None

        def choose() -> Endpoint:
            fits = self.parts.fits(prefill, chosen)
            if placement.decode_cached and fits and chosen not in avoid and pool.takes(chosen):
                return chosen
            return pool.partner(prefills, prefill, avoid, self._known(call))

        decode = await self._wait_for_choice(choose)
        lease = pool.lease(decode, context=placement.tokens, prompt=placement.prompt)
        return stack.enter_context(lease)

    async def _wait_for_choice(self, choose: Callable[[], T]) -> T:
        """Returns the result of ``choose``. The chosen engines must be used before anything else is awaited.

        A router that has just started waits for the first engine of each side to register.
        """
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
                side = next(side for side, pool in self.parts.pools.items() if pool is none.pool)
                of = f" for the model {none.model[:100]}" if none.model and none.pool.usable() else ""
            known = self._note_lack(side)
            raise failure(503, "api_error", f"no {side.value} engine{of} takes requests: {known}")

    async def _local(
        self,
        completion: Completion,
        call: Call,
        reason: str,
        decode: Lease,
        stack: AsyncExitStack,
        prefix: Body | None = None,
    ) -> Answer:
        self.parts.metrics.local_prefills.labels(reason).inc()
        logger.debug("request %s: the decode engine computes the prompt: %s", call.request_id, reason)
        ids = self.parts.calls.begin(call, decode)
        call.prompt_computed()  # decode engines do not report that
        body = completion.local_body(ids=ids, prefix=prefix)
        return await self.parts.calls.decode(decode, body, call, stack)

    async def _concurrent(
        self,
        attempt: Attempt,
        stack: AsyncExitStack,
        avoid: Collection[Endpoint],
        number: int,
    ) -> Answer:
        retry = functools.partial(self._retry_behind_token, attempt.completion, attempt.call, avoid, number)
        return await ConcurrentAttempt(self.parts, attempt, retry).answer(stack)

    async def _pair(
        self, completion: Completion, call: Call, prefill: Endpoint, decode: Endpoint
    ) -> tuple[AsyncExitStack, Answer]:
        """Does the same as _try(), with these two engines only, whether they take requests or not.

        An engine cannot use pages that were computed with other weights. It computes the prompt itself.
        """
        for side, engine in ((Side.PREFILL, prefill), (Side.DECODE, decode)):
            if not self.parts.pools[side].has(engine):
                raise failure(503, "api_error", f"the {side.value} engine {engine} has left the router")
        async with AsyncExitStack() as stack:
            if not self.parts.fits(prefill, decode):
                lease = stack.enter_context(self.parts.pools[Side.DECODE].lease(decode))
                answer = await self._local(completion, call, "other_weights", lease, stack)
                return stack.pop_all(), answer
            attempt = Attempt(completion, call, Placement(prefill, decode, "moved"), prefill)
            answer = await self._concurrent(attempt, stack, (), _NO_RETRY)
            return stack.pop_all(), answer

    async def _resume(
        self, completion: Completion, call: Call, avoided: Collection[Endpoint]
    ) -> tuple[AsyncExitStack, Answer]:
        """Does the same as _try(), for the rest of a stream, whose first attempt was another engine's."""
        return await self._try(completion, call, avoided, first=2)

    async def _retry_behind_token(
        self,
        completion: Completion,
        call: Call,
        avoid: Collection[Endpoint],
        number: int,
        error: EngineFailure,
    ) -> tuple[AsyncExitStack, Answer]:
        """Returns what follows the early first token, from other engines than those of attempt ``number``,
        which failed.

        Raises the failure if there are no other engines.
        """
        avoid, number = self._next(error, avoid, number, call)
        logger.warning(
            "request %s: retried on other engines after its first token: %s", call.request_id, error
        )
        return await self._try(completion.behind_its_token(), call, avoid, number, error)


@contextmanager
def _explained(stream: Stream) -> Iterator[None]:
    """Guards a block that sends the stream. If its engine fails, the client is to read why the stream ends
    with it."""
    try:
        yield
    except EngineFailure as error:
        raise stream.failure(error) from error
