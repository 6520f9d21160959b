"""WeightReceiver: a worker's side.

Weights land in its arena while it serves, and the model takes them in one step. If there is no room for that,
weights land round by round while the engine is paused. ``Landing`` decides, and this module carries out its
actions, on its own thread and transfer engine. The worker's main thread only takes what has landed.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import zmq

from kv_connector.agent.reports.links import LinkWatch, PeerName
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import Received
from kv_connector.engine import EngineConfig, ErrorCode, EventKind, TransferError
from kv_connector.engine.rank_placement import domains_of, place_nics
from kv_connector.engine.transfer_engine import TransferEngine, close_or_log
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import clip
from kv_connector.weights.mapping.geometry import Geometry, Tensor, digest
from kv_connector.weights.mapping.hashes import hashes
from kv_connector.weights.memory.arena import SLOTS, Arena
from kv_connector.weights.memory.buffer import device_of
from kv_connector.weights.seeding.seeding_worker import Lender, SeedingWorker
from kv_connector.weights.wire.loop import Loop
from kv_connector.weights.wire.messages import (
    NOT_DESCRIBED,
    Controls,
    Described,
    Hashed,
    Joined,
    Leave,
    Refused,
    Seed,
    Seeded,
    State,
    Torn,
    Verify,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)
from kv_connector.weights.worker.landing import Landing
from kv_connector.weights.worker.landing_actions import (
    Action,
    GiveUp,
    HandOver,
    LandingAccept,
    LandingCloseCounter,
    LandingFence,
    LandingLog,
    LandingOpenCounter,
    LandingReply,
    Record,
)

logger = logging.getLogger("kv_connector")

# A fence takes one turn of the transfer thread. A fence that takes longer is tried again.
_FENCE_TIMEOUT_S, _FENCE_RETRY_S = 0.005, 0.05
# A round of 2 GB takes 16 s over a network of 1 Gbit/s. Live senders that have not written it after this time
# never will.
_ROUND_S = 60.0

# Interval between two looks at the links of senders, as of an agent.
_LOOK_S = 5.0

_NOTHING = "no complete version lies beside the model to be compared: push a version, then verify it"


class NotLanded(RuntimeError):
    """The version has not landed. The message says which version is here."""


@dataclass(frozen=True)
class ReceiverConfig:
    name: str  # in logs and at peers
    address: Address  # of the control socket; port 0 takes a free port
    providers: tuple[str, ...]
    data_host: str = ""  # empty: the host of the control socket
    key: ClusterKey | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the arena
    timeouts: Timeouts = field(default_factory=Timeouts)
    streaming: bool = False
    nics: tuple[str, ...] = ()  # empty: the NICs nearest to the device


class WeightReceiver:
    """The receiver of one worker. Call start() once and close() once. Any thread may call any method."""

    def __init__(
        self,
        config: ReceiverConfig,
        record: Callable[[Sequence[Tensor]], Geometry],
        torn: Callable[[str], None] = lambda reason: None,
        controlled: Callable[[Address], None] = lambda controller: None,
    ) -> None:
        """``record``: finds out what the worker would load of a checkpoint. It is called on a separate
        thread, and raises ValueError with a message for the trainer.

        ``torn``: called on the engine's first worker with the reason why the engine stays paused, or "" when
        it resumes. ``controlled``: called on the first worker of each data-parallel rank with the address of
        the engine's controller, once that has started.

        Raises TransferError if a provider does not open.
        """
        self._config = config
        self._record = record
        self._torn = torn
        self._controlled = controlled
        placed = place_nics(device_of(config.device), providers=config.providers, nics=config.nics)
        domains = domains_of(config.providers, config.data_host or config.address.host, placed)
        self._engine = TransferEngine(EngineConfig(config.name, domains))
        self._loop = Loop("kvc-weights", config.key)
        self._recorder = ThreadPoolExecutor(1, "kvc-weights-record")
        self._landing = Landing(config.timeouts.dead, slots=SLOTS if config.streaming else 0)
        self._arena: Arena | None = None
        self._tensors: tuple[Tensor, ...] = ()  # for which the arena was made
        self._seeders: dict[Source, SeedingWorker] = {}  # by requester
        self._region = -1
        self._counters: dict[int, int] = {}  # round of each counter
        self._handed: queue.SimpleQueue[HandOver | GiveUp] = queue.SimpleQueue()
        self._fencing: dict[int, str] = {}
        self._peers: dict[int, PeerName] = {}  # senders
        self._link_watch, self._next_look = LinkWatch(self._engine), 0.0
        self._workers: tuple[WorkerAddress, ...] = ()

    def start(self) -> Address:
        """Binds the control socket and starts the thread.

        Raises zmq.ZMQError if the address cannot be bound.
        """
        try:
            self._address = address = self._loop.sockets.bind(self._config.address)
        except zmq.ZMQError:
            self.close()
            raise
        self._workers = (WorkerAddress(address.host, address.port),)
        self._loop.sockets.watch(self._engine.event_fd())
        self._loop.start(self)
        if self._config.device.type == "cuda":
            # The loop's thread allocates and registers memory.
            self._loop.call(lambda: torch.cuda.set_device(self._config.device)).result()
        return address

    def set_workers(self, workers: Sequence[Address]) -> None:
        """Sets the addresses of all workers of this engine, by rank. Before, this worker is the only one."""
        self._workers = tuple(WorkerAddress(worker.host, worker.port) for worker in workers)

    def take(self, version: str) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yields the version's rounds as they land: the arena's content of each parameter by name, flat.

        A round stays valid until the next round is requested. Raises NotLanded. Call finish() in any case.

        Blocks for one turn of the loop, and in streaming mode until a round has landed.
        """

        def take() -> tuple[queue.SimpleQueue[HandOver | GiveUp], int]:
            self._handed = queue.SimpleQueue()
            self._run(self._landing.take(version))
            return self._handed, 0 if self._arena is None else self._arena.geometry.rounds

        handed, rounds = self._loop.call(take).result()
        for left in range(max(rounds, 1), 0, -1):
            try:
                what = handed.get(timeout=_ROUND_S)
            except queue.Empty:
                raise NotLanded(f"{left} rounds have not arrived within {_ROUND_S:g} s") from None
            if isinstance(what, GiveUp):
                raise NotLanded(what.reason)
            assert self._arena is not None
            yield self._arena.contents(round := what.round)
            self._loop.call(lambda round=round: self._run(self._landing.released(round))).result()  # type: ignore[misc]

    def finish(self, problem: str, *, torn: bool = False) -> None:
        """Reports the result of the taken version.

        Empty: it is served. ``torn``: the model has a part of it.
        """
        self._loop.call(lambda: self._run(self._landing.applied(problem, torn=torn))).result()

    def state(self) -> State:
        return self._loop.call(self._landing.state).result()

    def close(self) -> None:
        for seeder in list(self._seeders.values()):
            seeder.cancel("the worker shuts down")
            seeder.join()
        self._recorder.shutdown(cancel_futures=True)
        self._loop.stop()
        close_or_log(self._engine, self._engine.config.name)

    # --- Called by the loop

    def received(self, now: float, received: Received[WeightMessage]) -> None:
        if received.message is None:
            self._run(self._landing.lost(received.source, "it sent a malformed message"))
        elif isinstance(received.message, Workers):
            self._loop.sockets.send(received.source, WorkersAre(self._workers))
        elif isinstance(received.message, WorkersAre):
            self._workers = received.message.workers
        elif isinstance(received.message, Torn):
            self._torn(received.message.reason)
        elif isinstance(received.message, Controls):
            controller = received.message.controller
            self._controlled(Address(controller.host, controller.port))
        elif isinstance(received.message, Verify):
            self._verify(received.source, received.message)
        elif isinstance(received.message, Seed):
            self._seed(received.source, received.message)
        elif isinstance(received.message, Leave) and received.source in self._seeders:
            said = received.message.reason or "it has left"
            self._seeders[received.source].cancel(f"the requester ended it: {said}")
        else:
            self._run(self._landing.receive(now, received.source, received.message))

    def readable(self, now: float) -> None:
        for event in self._engine.poll_events():
            if event.kind is EventKind.COUNTERS_REACHED and event.id in self._counters:
                self._run(self._landing.reached(self._counters[event.id]))
            elif event.kind in (EventKind.PEER_DOWN, EventKind.PEER_LEFT):
                self._landing.peer_lost(now, event.id, str(event.error or "it has left"))

    def tick(self, now: float) -> float | None:
        self._run(self._landing.tick(now))
        if self._peers and now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._link_watch.look(self._peers)
        for peer in list(self._fencing):
            self._fence(peer)
        deadline = self._landing.next_deadline()
        waits = [] if deadline is None else [deadline - now]
        return min([*waits, _FENCE_RETRY_S] if self._fencing else waits, default=None)

    def _run(self, actions: Sequence[Action]) -> None:
        pending = list(actions)
        while pending:
            pending = [*self._execute(pending[0]), *pending[1:]]

    def _execute(self, action: Action) -> Sequence[Action]:
        match action:
            case LandingReply(source, message):
                # A peer that takes no messages is silent, and is lost for that.
                self._loop.sockets.send(source, message)
            case Record(tensors):
                self._recorder.submit(self._record, tensors).add_done_callback(
                    lambda recorded: self._loop.call(lambda: self._recorded(tensors, recorded)) and None
                )
            case LandingAccept(source, name, offer):
                return self._accept(source, name, offer)
            case LandingOpenCounter(peers, pages, round):
                return self._open_counter(peers, pages, round)
            case LandingCloseCounter(round):
                for counter in [counter for counter, of in self._counters.items() if of == round]:
                    self._engine.release_counters(counter)
                    del self._counters[counter]
            case HandOver() | GiveUp():
                self._handed.put(action)
            case LandingFence(peer, reason):
                self._fencing[peer] = reason
                self._fence(peer)
            case LandingLog(level, text):
                logger.log(level, "%s: %s", self._config.name, text)
        return ()

    def _open_counter(self, peers: tuple[int, ...], pages: int, round: int) -> Sequence[Action]:
        assert self._arena is not None
        try:
            self._arena.clear(round)
            counters = self._engine.alloc_counters(1, peers)
            self._counters[counters.id] = round
            self._engine.expect(counters.id, [pages])
        except TransferError as error:  # a peer is lost; its event follows
            return self._landing.not_opened(str(error))
        return self._landing.opened(counters.immediates[0], round)

    def _accept(self, source: bytes, name: str, offer: bytes) -> Sequence[Action]:
        assert self._arena is not None
        try:
            shaken = self._engine.accept(name, offer)
        except TransferError as error:
            return self._landing.not_accepted(source, str(error))
        lane, region = self._engine.lane(shaken.peer), self._engine.region_descriptor(self._region)
        logger.info("%s: %s sends weights to this worker, over %s", self._config.name, name, lane)
        self._peers[shaken.peer] = PeerName(name, lane)
        joined = Joined(shaken.data, region, self._arena.offsets, lane)
        return self._landing.accepted(source, shaken.peer, joined)

    def _fence(self, peer: int) -> None:
        try:
            self._engine.fence(peer, _FENCE_TIMEOUT_S)
        except TransferError as error:
            if error.code is ErrorCode.TIMEOUT:
                return  # tick() tries again
        del self._fencing[peer]
        self._peers.pop(peer, None)
        self._run(self._landing.fenced(peer))

    def _recorded(self, tensors: tuple[Tensor, ...], recorded: Future[Geometry]) -> None:
        try:
            geometry = recorded.result()
            geometry = geometry.in_few_rounds() if self._config.streaming else geometry.in_one_round()
            self._make_arena(geometry)
        except (ValueError, OSError, TransferError, torch.OutOfMemoryError) as error:
            self._run(self._landing.not_recorded(f"{self._config.name}: {error}"))
            return
        except Exception as error:  # an error of the model; the requester waits for an answer
            logger.exception(
                "%s: cannot record how the model loads %d tensors", self._config.name, len(tensors)
            )
            self._run(self._landing.not_recorded(f"{self._config.name}: {type(error).__name__}: {error}"))
            return
        assert self._arena is not None
        self._tensors = tensors
        logger.info(
            "%s: the model loads %d of %d tensors, through %.2f GB beside the model, in %d rounds",
            self._config.name,
            len({write.tensor for write in geometry.writes}),
            len(tensors),
            self._arena.nbytes / 1e9,
            geometry.rounds,
        )
        self._run(self._landing.recorded(digest(tensors), Described(geometry), self._arena.loaded_bytes))

    def _verify(self, source: Source, asked: Verify) -> None:
        """Hashes the arena beside the loop.

        It uses the recorder's thread: recording another checkpoint would replace the arena.
        """
        arena, version = self._arena, self._landing.state().landed
        if not self._landing.has_recorded(asked.tensors):
            self._loop.sockets.send(source, Refused(NOT_DESCRIBED))
        elif arena is None or not version or self._config.streaming:
            self._loop.sockets.send(source, Refused(_NOTHING))
        else:

            def hashed(done: Future[tuple[bytes, ...]]) -> None:
                if self._landing.state().landed != version:
                    answer: WeightMessage = Refused(_NOTHING)  # overwritten meanwhile
                elif (error := done.exception()) is not None:
                    answer = Refused(clip(f"{type(error).__name__}: {error}"))
                else:
                    answer = Hashed(version, arena.geometry, done.result())
                self._loop.sockets.send(source, answer)

            hashing = self._recorder.submit(hashes, arena.geometry, arena.box)
            hashing.add_done_callback(lambda done: self._loop.call(lambda: hashed(done)) and None)

    def _seed(self, source: Source, seed: Seed) -> None:
        """Seeds another engine beside the loop. The arena is lent once the other engine can be written to."""
        arena, config, me = self._arena, self._config, self._address
        to = str(Address(seed.engine.host, seed.engine.port))
        refusal = self._landing.why_not_lent(seed.version)
        if refusal or arena is None or source in self._seeders:
            why = refusal or "it already does so for this requester"
            self._loop.sockets.send(source, Refused(clip(f"{me} cannot seed {to}: {why}")))
            return

        def lend() -> str:
            return "its arena was replaced" if self._arena is not arena else self._landing.lend(seed, to)

        def done(problem: str) -> None:
            del self._seeders[source]
            failed = Refused(clip(f"{me} did not seed {to}: {problem}"))
            self._loop.sockets.send(source, failed if problem else Seeded(seed.version))

        def when_done(problem: str) -> None:
            self._loop.call(lambda: done(problem))

        workers = tuple(Address(worker.host, worker.port) for worker in self._workers)
        lender = Lender(
            config.name,
            arena,
            self._tensors,
            workers,
            workers.index(me),
            config.providers,
            config.data_host or config.address.host,
            config.key,
            config.timeouts,
            config.nics,
        )
        self._seeders[source] = SeedingWorker(
            lender,
            seed,
            lambda: self._loop.call(lend).result(),
            lambda: self._loop.call(lambda: self._run(self._landing.returned(seed))).result(),
            when_done,
        )
        self._seeders[source].start()

    def _make_arena(self, geometry: Geometry) -> None:
        if self._arena is not None and self._arena.geometry == geometry:
            return
        if self._arena is not None:
            # No sender is connected, so nothing is in flight.
            self._engine.deregister_memory(self._region, self._config.timeouts.drain)
            self._arena = None
        self._arena = Arena(geometry, self._config.device)
        self._region = self._engine.register_ranges([self._arena.range])[0]
