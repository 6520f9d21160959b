"""Registry: receives engines' registrations, and checks the health of their API servers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import zmq

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import (
    HEARTBEAT_S,
    PAGE,
    BeginDrain,
    ControllerAddress,
    Controllers,
    ControllersAre,
    Drain,
    Draining,
    EndDrain,
    Leave,
    LoadFailed,
    MembershipSockets,
    PromptHits,
    Register,
    Undrain,
    Undrained,
)
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.client import LOST_SECONDS, EngineClient, HttpError, refused
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import MAX_ENGINES, Members, RefusedRegistrationError
from kv_connector.router.engines.models import longest, names
from kv_connector.router.engines.reasons import Reasons
from kv_connector.router.failure import Failure
from kv_connector.router.forever import forever
from kv_connector.router.front.aliases import Aliases
from kv_connector.router.front.unlike_checkpoints import UnlikeCheckpoints
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.streams.moves import Moves

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Silence is noticed at most this much late; a heartbeat is 1 s.
_TICK_S = 0.2
# Pause behind each batch of messages. A batch costs a change of threads and a look at all engines. So a batch
# for each heartbeat of a thousand engines would take a large part of a core. A reason for a failed KV load
# may come this much later, which is little of PATIENCE_S.
_BATCH_S = 0.02
# Pause between two health checks of an engine that does not answer.
_PROBE_S = 0.5
_HEALTH_S = 2.0
# Pause between two health checks of an engine that is in use, or that does not register. An engine hangs if
# _MISSES checks in a row, each of _MISS_S, have no answer. One lost connection costs one check.
_WATCH_S = 3.0
_MISSES = 2
_MISS_S = LOST_SECONDS / _MISSES
# Time after which every engine has registered with a router that has started: engines try it again at least
# once a heartbeat.
_COMPLETE_S = 3 * HEARTBEAT_S
# Pause between two comparisons of URLs and of checkpoints. An operator looks at the log later than that.
_COMPARE_S = 10.0
# Pause between two log lines about one engine: the engine repeats a refused registration each second.
_REFUSED_LOG_S = 60.0
# The time of a health check is counted in parts. A part that took longer by _STALL_S does not count: this
# router was stopped or busy, and the answer may be in its socket.
_PARTS = 10
_STALL_S = 1.0


class RegistryError(RuntimeError):
    """The router cannot receive registrations; the message says what to change."""


class Registry:
    """Feeds Members, Reasons and CacheRecords. Run run() beside the server, in its event loop."""

    def __init__(
        self,
        members: Members,
        reasons: Reasons,
        caches: CacheRecords,
        moves: Moves,
        client: EngineClient,
        address: Address | None,
        key: ClusterKey | None,
    ) -> None:
        """``address``: where engines register; None: no engine registers."""
        self._members = members
        self._aliases, self._unlike = Aliases(members), UnlikeCheckpoints(members)
        self._reasons = reasons
        self._caches = caches
        self._moves = moves
        self._client = client
        self._address = address
        self._key = key
        self._sockets: MembershipSockets | None = None
        # place -> the connection of the latest registration
        self._engines: dict[tuple[str, int], Source] = {}
        # place -> the controller that takes weights for the engine
        self._controllers: dict[tuple[str, int], tuple[Endpoint, ControllerAddress]] = {}
        self._opened = 0.0
        self._refused: dict[Source, float] = {}  # when each refused engine was last logged
        self._probing: dict[str, asyncio.Task[None]] = {}  # by URL
        self._watching: dict[str, asyncio.Task[None]] = {}  # by URL
        self._learning: dict[str, asyncio.Task[None]] = {}  # by URL

    def open(self) -> Address | None:
        """Binds the address and returns it, with the port that was chosen for port 0; RegistryError if that
        fails."""
        if self._address is None:
            return None
        sockets = MembershipSockets(self._key)
        try:
            bound = sockets.bind(self._address)
        except zmq.ZMQError as error:
            sockets.close()
            raise RegistryError(
                f"cannot listen for engines on {self._address}: {error}. Change --registration"
            ) from error
        self._sockets, self._opened = sockets, time.monotonic()
        return bound

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen())
                group.create_task(forever("the health check of engines", self._probe, _PROBE_S))
                if self._sockets is not None:
                    group.create_task(forever("the comparison of engines", self._compare, _COMPARE_S))
        finally:
            looks = [*self._probing.values(), *self._watching.values(), *self._learning.values()]
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _listen(self) -> None:
        # wait() blocks, so it runs in a thread. Two threads never use the sockets at the same time.
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "membership") as thread:

            async def turn() -> None:
                try:
                    if self._sockets is None:
                        await asyncio.sleep(_TICK_S)
                    else:
                        await loop.run_in_executor(thread, self._sockets.wait, _TICK_S)
                        self._receive()
                finally:
                    # After the messages that had arrived: an engine is not silent because this router was
                    # stopped.
                    self._members.tick(time.monotonic())
                await asyncio.sleep(_BATCH_S)  # requests get their turn even if messages never end

            try:
                await forever("the registration of engines", turn, _TICK_S)
            finally:
                thread.shutdown()
                if self._sockets is not None:
                    self._sockets.close()

    def _receive(self) -> None:
        assert self._sockets is not None
        for received in self._sockets.receive():
            message = received.message
            try:
                match message:
                    case Register():
                        endpoint = self._members.register(time.monotonic(), message)
                        if len(self._engines) > MAX_ENGINES:
                            # most are of engines long gone; live engines register again
                            self._engines.clear()
                            self._controllers.clear()
                        self._engines[endpoint.place] = received.source
                        self._controllers.pop(endpoint.place, None)
                        if message.controller is not None:
                            self._controllers[endpoint.place] = endpoint, message.controller
                    case Leave():
                        self._members.leave(message)
                    case LoadFailed(transfer_id, reason):
                        if self._sent_from(self._reasons.awaited(transfer_id), received.source):
                            self._reasons.reported(transfer_id, reason)
                    case PromptHits(hits):
                        for transfer_id, (tokens, cached) in hits.items():
                            if self._sent_by(self._caches.awaited(transfer_id), received.source):
                                self._caches.received(transfer_id, tokens, cached)
                    case Drain():
                        self._drain(received.source, message)
                    case Undrain(url):
                        self._undrain(received.source, Endpoint.parse(url).url)
                    case Controllers():
                        self._list_controllers(received.source, message)
            except RefusedRegistrationError as error:
                self._refuse(received.source, str(error))
            except ValueError as error:
                logger.warning("a registration is ignored: %s", error)
                self._sockets.distrust(received.source)
            except Exception:
                logger.exception("the message %s was not processed", type(message).__name__)

    def _sent_by(self, engine: Endpoint | None, source: Source) -> bool:
        """Returns whether this engine has registered over this connection. Another engine's report about a
        transfer is not accepted: it would spoil what the router knows of this engine."""
        return engine is not None and self._engines.get(engine.place) == source

    def _sent_from(self, engine: Endpoint | None, source: Source) -> bool:
        """Returns whether an engine behind the same API server has registered over this connection. vLLM
        gives requests to /v1/responses to another rank than the router names."""
        return engine is not None and any(
            served_at == engine.url and one == source for (served_at, _), one in self._engines.items()
        )

    def _refuse(self, source: Source, reason: str) -> None:
        """Logs a refused registration. Its sender is not distrusted: another engine may be at fault."""
        now = time.monotonic()
        if now - self._refused.get(source, -_REFUSED_LOG_S) < _REFUSED_LOG_S:
            return
        if len(self._refused) > MAX_ENGINES:
            self._refused.clear()
        self._refused[source] = now
        logger.warning("a registration is ignored: %s", reason)

    def _drain(self, asker: Source, question: Drain) -> None:
        assert self._sockets is not None
        url = Endpoint.parse(question.url).url
        outstanding = self._members.outstanding(url)
        if question.unless_last and (side := self._members.last(url)) is not None:
            self._sockets.send(asker, Draining(outstanding, last=Role(side.value)))
            return
        if self._members.drain(url, move=question.move):
            self._moves.empty(url)
        # The engine stores the drain and reports it to the other routers, and to this router after a restart.
        self._pass_on(url, BeginDrain())
        moved, staying = self._moves.report(url) if question.move else (0, {})
        self._sockets.send(asker, Draining(outstanding, moved, staying))

    def _undrain(self, asker: Source, url: str) -> None:
        assert self._sockets is not None
        self._moves.keep(url)
        self._pass_on(url, EndDrain())
        self._sockets.send(asker, Undrained(self._members.undrain(url)))

    def _list_controllers(self, asker: Source, question: Controllers) -> None:
        """Answers with a part of the controllers. Does not answer while engines may be missing from the list:
        a trainer would leave them out."""
        assert self._sockets is not None
        now = time.monotonic()
        if now - self._opened < _COMPLETE_S:
            return
        found = [one for one in self._controllers.values() if self._members.registered(one[0])]
        without = {one.endpoint.url for one in self._members.engines(now)} - {one.url for one, _ in found}
        # The ranks of an API server have one controller.
        left = sorted({one for _, one in found if question.after is None or one > question.after})
        answer = ControllersAre(question.number, tuple(left[:PAGE]), len(left) > PAGE, len(without))
        self._sockets.send(asker, answer)

    def _pass_on(self, url: str, message: BeginDrain | EndDrain) -> None:
        """Sends the message to this API server's engines that have registered."""
        assert self._sockets is not None
        for (served_at, _), source in self._engines.items():
            if served_at == url:
                self._sockets.send(source, message)

    async def _probe(self) -> None:
        for endpoint in self._members.to_probe():
            _once(self._probing, endpoint, self._look)
        for endpoint in self._members.to_watch():
            _once(self._watching, endpoint, self._watch)
        for endpoint in self._members.to_learn(time.monotonic()):
            _once(self._learning, endpoint, self._learn)
        await asyncio.sleep(_PROBE_S)

    async def _compare(self) -> None:
        self._unlike.look()
        await self._aliases.look()
        await asyncio.sleep(_COMPARE_S)

    async def _look(self, endpoint: Endpoint) -> None:
        try:
            reply = await _patiently(lambda: self._client.whole("GET", f"{endpoint.url}/health"), _HEALTH_S)
        except HttpError as error:
            words, missed = f"{type(error).__name__}: {error}", isinstance(error, TimeoutError)
            self._members.failed(endpoint, words, gone=refused(error), missed=missed)
            return
        except Failure:
            return  # this router has no descriptor left
        if reply.status == 200:
            await self._learn(endpoint)
            self._members.answered(endpoint)
        else:
            self._members.failed(endpoint, f"its /health answers {reply.status}")

    async def _learn(self, endpoint: Endpoint) -> None:
        """Requests the API server's list of models. If it does not answer, the known list stays."""
        url = f"{endpoint.url}/v1/models"
        try:
            reply = await _patiently(lambda: self._client.whole("GET", url), _HEALTH_S)
        except (*HttpError, Failure):
            return
        self._members.learnt(endpoint, names(endpoint.url, reply), longest(reply))

    async def _watch(self, endpoint: Endpoint) -> None:
        for _ in range(_MISSES):
            try:
                reply = await _patiently(lambda: self._client.whole("GET", f"{endpoint.url}/health"), _MISS_S)
                if reply.status == 503:  # vLLM's status for an engine core that is dead
                    self._members.failed(endpoint, "its /health answers 503")
            except TimeoutError:
                continue
            except HttpError as error:
                # No process listens at the address. That includes a server that ends: it still answers what
                # it has.
                self._members.failed(endpoint, f"{type(error).__name__}: {error}", gone=refused(error))
            except Failure:
                pass  # this router has no descriptor left
            await asyncio.sleep(_WATCH_S)  # any other error is a sign of life
            return
        self._members.hangs(endpoint, f"its /health has not answered for {_MISSES * _MISS_S:g} s")


async def _patiently(look: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
    """Returns the result of ``look``. TimeoutError if it has none after so many seconds in which this loop
    ran."""
    task, part, left = asyncio.create_task(look()), seconds / _PARTS, _PARTS
    try:
        while left:
            begun = time.monotonic()
            await asyncio.wait({task}, timeout=part)
            ran = time.monotonic() - begun < part + _STALL_S
            if task.done():
                if ran or not isinstance(task.exception(), TimeoutError):
                    return task.result()
                # the client's own deadline passed while this loop did not run
                task = asyncio.create_task(look())
            left -= ran
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _once(
    tasks: dict[str, asyncio.Task[None]],
    endpoint: Endpoint,
    look: Callable[[Endpoint], Coroutine[Any, Any, None]],
) -> None:
    """Starts ``look`` for the API server, unless one is running for it."""
    if endpoint.url not in tasks:
        task = tasks[endpoint.url] = asyncio.create_task(look(endpoint))
        task.add_done_callback(lambda _: tasks.pop(endpoint.url))
