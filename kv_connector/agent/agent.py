"""The agent: the one thread of a worker that owns its sockets, its engine's events and its deadlines.

An engine adapter talks to it through ``Agent``; every method may be called from any thread. What it decides
is decided in kv_connector.protocol, how that is done stands in kv_connector.agent.effects.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq

from kv_connector.agent.effects import Action, Effects
from kv_connector.agent.ledger import AgentStats, Ledger, LiveState, Reports, Timing
from kv_connector.agent.timeline import Timelines
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import ControlPlane
from kv_connector.control.timelines import boot_id
from kv_connector.engine import DomainConfig, EngineConfig, ErrorCode, TransferError
from kv_connector.engine.transfer_engine import LayerSignal, TransferEngine, close_or_log
from kv_connector.protocol.actions import Address, Ended, Reached, Share, State
from kv_connector.protocol.decode import DecodeMachine
from kv_connector.protocol.layout import KvLayout, memory_problem
from kv_connector.protocol.messages import Fingerprint, Rank, Role
from kv_connector.protocol.peers import Identity, PeerTable
from kv_connector.protocol.prefill import PrefillMachine
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, GroupPages, PrefillRequest
from kv_connector.protocol.timers import Timeouts

__all__ = ["Address", "Agent", "AgentConfig", "AgentError", "MemoryRange"]

logger = logging.getLogger("kv_connector")

# How often preempt() looks whether the forward pass it follows has signalled its last layer. On a CPU
# engine it always has; on a GPU the stream runs behind by some milliseconds.
_SIGNAL_POLL_S = 0.0002
# How long the thread holds off at most while a step is prepared and launched. A prompt's step takes 10 to 35
# ms for that (32 layers, H200), and nothing that a peer waits for has a deadline below a second.
_HOLD_OFF_S = 0.05


_T = TypeVar("_T")


class AgentError(RuntimeError):
    """The agent cannot start; the message says what to change."""


@dataclass(frozen=True)
class AgentConfig:
    """One worker's agent."""

    engine_id: str
    role: Role
    rank: int
    ranks: int  # of this engine; where it is the only one, it need not be told of them
    stage: int = field(default=0, kw_only=True)  # of the pipeline
    address: Address  # of the control socket; port 0 takes a free one
    fingerprint: Fingerprint
    layout: KvLayout
    advice: Mapping[str, str] = field(default_factory=dict)  # by the name of a pair of the fingerprint
    providers: tuple[str, ...] = ("host", "tcp")  # in order of preference
    allow_fallback: bool = False
    data_host: str = ""  # address that the providers' listeners bind; empty: the control socket's
    spin_us: int | None = None  # how long the engine's idle worker polls; None: the engine's default
    on_gpu: bool = False  # a CUDA stream computes the pages; its context is current where the agent is made
    nics: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of a provider; without: its own choice
    worker_cpu: int | None = None  # the core that the engine's worker is pinned to
    timeouts: Timeouts = field(default_factory=Timeouts)
    key: ClusterKey | None = None  # of the cluster; None: anybody who reaches the port is listened to
    timelines: int = 0  # of how many transfers they are kept


@dataclass(frozen=True)
class MemoryRange:
    """Memory that holds KV pages, one for each region of the layout. It must stay mapped until close(), but
    between unregister_memory() and register_memory()."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class _Draining:
    """A preempted request's writes."""

    share: Share
    number: int
    last_signal: int


class Agent:
    """Moves KV pages between this worker and others. start() it once, close() it once."""

    def __init__(
        self, config: AgentConfig, memory: Sequence[MemoryRange], engine: TransferEngine | None = None
    ) -> None:
        """Opens the engine and registers the memory; raises AgentError. ``engine``: one that is open
        already, which the agent then owns."""
        problem = memory_problem(config.layout, [part.nbytes for part in memory])
        if problem is not None:
            raise AgentError(f"{config.engine_id}: {problem}")
        self._config = config
        self._engine = engine if engine is not None else _open_engine(config)
        self._memory = tuple(memory)
        self._regions: list[int] = []  # of the engine; empty while the memory is not registered
        try:
            self._regions = self._register()
            descriptors = self._descriptors()
            self.signal: LayerSignal = (
                self._engine.create_stream_signal() if config.on_gpu else self._engine.create_signal()
            )
        except TransferError as error:
            close_or_log(self._engine, config.engine_id)
            raise AgentError(f"{config.engine_id}: cannot register the KV cache: {error}") from error
        self._ledger = Ledger()
        self.timelines = Timelines(
            engine=self._engine,
            layout=config.layout,
            addresses=[part.address for part in memory],
            keep=config.timelines,
            engine_id=config.engine_id,
            rank=config.rank,
            role=config.role,
            host=boot_id(),
            on_gpu=config.on_gpu,
        )
        self._control = ControlPlane(config.key)
        self._effects = Effects(
            engine=self._engine,
            signal=self.signal,
            regions=self._regions,
            layout=config.layout,
            control=self._control,
            peers=PeerTable(
                Identity(
                    engine_id=config.engine_id,
                    incarnation=uuid.uuid4().hex,
                    role=config.role,
                    rank=config.rank,
                    fingerprint=config.fingerprint,
                    layout=config.layout,
                    regions=descriptors,
                    advice=config.advice,
                ),
                config.timeouts,
            ),
            prefill=PrefillMachine(config.layout, config.timeouts),
            decode=DecodeMachine(config.layout, config.timeouts),
            ledger=self._ledger,
            timelines=self.timelines,
            allow_fallback=config.allow_fallback,
        )
        self._commands: deque[Callable[[float], Sequence[Action]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._main, name=f"kv-agent-{config.engine_id}", daemon=True)
        self._in_turn = False  # the thread is acting on what it heard
        self._turns = 0
        self._block_bytes = tuple(  # of each group, in all its layers
            sum(layer.page_bytes for layer in config.layout.layers if layer.group == group)
            for group in range(len(config.layout.groups))
        )
        self._launched = threading.Event()  # the thread need not hold off
        self._launched.set()
        self._hold_until = 0.0
        self._leave_by: float | None = None  # close() was called: when to leave at the latest
        self._closing = threading.Lock()  # held by close()
        self._closed = False
        self._wake_lock = threading.Lock()  # of _closed, and of _wake's life

    def start(self) -> Address:
        """Binds the control socket and starts the thread; raises AgentError."""
        try:
            address = self._control.bind(self._config.address)
        except zmq.ZMQError as error:
            self.close()
            raise AgentError(_bind_problem(self._config, error)) from error
        self._control.watch(self._wake)
        self._control.watch(self._engine.event_fd())
        if self._config.ranks == 1:
            self.set_ranks([self.described(address)])
        self._thread.start()
        return address

    @property
    def authenticated(self) -> bool:
        """Whether only who has the cluster key may speak to this agent."""
        return self._config.key is not None

    def described(self, address: Address) -> Rank:
        """This worker, which listens there, as others of its engine and their peers know it."""
        return Rank(address.host, address.port, self._config.stage, self._config.layout)

    def set_ranks(self, ranks: Sequence[Rank]) -> None:
        """All workers of this engine, by rank: each of them has to know, before the first request. Peers find
        them by the address of the first."""

        def command(now: float) -> Sequence[Action]:
            self._effects.peers.set_ranks(ranks)
            self._effects.decode.set_ranks(self._config.rank, ranks)
            return ()

        self._submit(command)

    def tell_ends(self, transfer_over: Callable[[Ended, Timing], None]) -> None:
        """Calls this, on the agent's thread, with each transfer that is over, however it ended."""
        self._effects.transfer_over = transfer_over

    def set_weights(self, version: str) -> None:
        """The engine computes with this version from now on. In order with the other commands: to be called
        between two steps."""

        def command(now: float) -> Sequence[Action]:
            self._effects.decode.set_weights(version)
            return self._effects.prefill.set_weights(now, version)

        self._submit(command)

    # --- Decode

    def tell_failures(self, load_failed: Callable[[str, str], None]) -> None:
        """Calls this, on the agent's thread, with each transfer whose pages will not come, and the reason."""
        self._effects.load_failed = load_failed

    def set_waiting(self, waiting: Collection[tuple[str, Address]]) -> None:
        """Transfers whose requests still queue here, and the engines that compute their prompts: sessions are
        made with these, and they are told to hold the blocks."""
        transfers = tuple(waiting)
        self._submit(lambda now: self._effects.peers.set_waiting(now, transfers))

    def note_step(self) -> None:
        """The engine takes a step: it is not paused, and what it waits for is worth holding."""
        self._effects.peers.last_step = time.monotonic()

    def reserve(self, request: DecodeRequest) -> None:
        """Asks for the prompt's pages. Ends in one finished_recving report, and failed_recving if it
        failed."""

        def command(now: float) -> Sequence[Action]:
            try:
                return self._effects.decode.reserve(now, request)
            except Exception as error:
                if request.request_id not in self._effects.decode:
                    transfer, receiver = request.transfer_id, request.request_id
                    why = f"{type(error).__name__}: {error}"
                    self._ledger.reached(Reached(Role.DECODE, transfer, receiver, State.FAILED, why))
                    self._ledger.received(receiver, failed=True)
                    self._effects.load_failed(transfer, why)
                raise

        self._submit(command)

    def cancel(self, request_id: str) -> None:
        """Aborts a reserved request: ends in finished_recving once nothing can land in its blocks."""
        self._submit(lambda now: self._effects.decode.cancel(now, request_id))

    def release(self, transfer_id: str, engine: Address) -> None:
        """Tells P that nothing of the transfer is needed; best effort."""
        self._submit(lambda now: self._effects.decode.release(now, transfer_id, engine))

    # --- Prefill

    def expect(self, request: PrefillRequest) -> None:
        """The request has reached the scheduler."""
        self._submit(lambda now: self._effects.prefill.expect(now, request))

    def order_layers(self, signal_base: int, ordinals: Sequence[int]) -> None:
        """From this step on the signal reaches ``signal_base + k`` when the first k of these layers are
        computed; without it, in the layout's order. To be called before the step's computed()."""

        def command(now: float) -> Sequence[Action]:
            self._effects.writes.order_layers(signal_base, ordinals)
            self.timelines.order = ordinals
            return ()

        self._submit(command)

    def no_prompt_ends(self, signal_base: int) -> None:
        """In this step: its pages may wait for a later one. To be called before the step's computed()."""

        def command(now: float) -> Sequence[Action]:
            self._effects.writes.no_prompt_ends(signal_base)
            return ()

        self._submit(command)

    def computed(self, pages: ComputedPages) -> None:
        """These pages become valid in this step, or are already; each is pushed once, when D wants it."""

        # By this thread's clock: the layers may be computed before the agent's thread hears of it.
        named = time.monotonic_ns() if self.timelines.on else 0

        def command(now: float) -> Sequence[Action]:
            if self.timelines.on:
                self.timelines.named(pages.signal_base, named)
            return self._effects.prefill.computed(now, pages)

        self._submit(command)

    def begin_launch(self) -> None:
        """A step that computes prompts is about to be prepared and launched by this thread.

        A GPU waits for launches where a prompt is short, or has just begun, and Python runs one thread at a
        time: on lanes where pages wait for a prompt's end anyway, what comes meanwhile is looked at behind
        end_launch()."""
        if self._effects.gathered:
            self._hold_until = time.monotonic() + _HOLD_OFF_S
            self._launched.clear()

    def leaves_by_layer(self, pages: Iterable[GroupPages]) -> bool:
        """Whether some of these, of one step, may leave before its end, and its single layers are to be
        signalled; before their computed()."""
        blocks = zip(pages, itertools.cycle(self._block_bytes))
        most = self._effects.gathered
        return not most or sum(len(group.blocks) * nbytes for group, nbytes in blocks) > most

    def end_launch(self) -> None:
        """The step is launched."""
        self._launched.set()

    def preempt(self, transfer_ids: Sequence[str]) -> None:
        """The requests lose their blocks. On return nothing reads these any more; BLOCKS, about
        ``timeouts.drain`` at most while the transfer engine's worker runs. Pages that were not pushed are
        forgotten until computed() names them again."""
        self._launched.set()  # the engine waits
        future: Future[list[_Draining]] = Future()
        self._ask(lambda now: self._preempt(now, transfer_ids, future), future)
        draining = self._insist(future, "preemption")
        deadline = time.monotonic() + self._config.timeouts.drain
        stuck = [writes for writes in draining if not self._drained(writes, deadline)]
        if stuck:
            self._fence_preempted(stuck)

    def finished(
        self,
        transfer_id: str,
        ok: bool,
        reason: str = "",
        sampled: int | None = None,
        aborted: bool = False,
    ) -> None:
        """The request left the scheduler, its prompt computed or not, with the token that was sampled behind
        it. Ends in one finished_sending report. A computed one that is still being sent may be given up by a
        second call, with ``ok`` False.

        ``aborted``: it is not ``ok`` because its client left. The transfer counts as cancelled then, on both
        sides; without it, as failed."""
        if sampled is not None:
            self._launched.set()  # D waits for the token, and not for another prompt's launch
        prefill = self._effects.prefill
        self._submit(lambda now: prefill.finished(now, transfer_id, ok, reason, sampled, aborted=aborted))

    def cache_cleared(self) -> None:
        """What was computed before is worthless: transfers of which a part has been pushed fail."""
        self._submit(lambda now: self._effects.prefill.cache_cleared(now))

    def note_prefill_end(self, transfer_ids: Sequence[str]) -> None:
        """The last layer of the last chunk is about to be signalled: notes, for stats(), what has arrived."""
        for outgoing in self._effects.writes.of(transfer_ids):
            with contextlib.suppress(TransferError):  # it has ended
                outgoing.at_prefill_end = self._engine.progress(outgoing.number)

    def catch_up(self, seconds: float) -> bool:
        """BLOCKS until the thread has looked at all that was handed over before, and at what had arrived: for
        an adapter that is about to ask for states. At most for so long; returns whether it has."""
        done = threading.Event()

        def command(now: float) -> Sequence[Action]:
            done.set()
            return ()

        self._submit(command)
        return done.wait(seconds)

    def tell_reached(self, reached: Callable[[Reached], None]) -> None:
        """Calls this, on the agent's thread, as soon as state() has something new to say of a prompt: for
        adapters that do not ask."""
        self._effects.reached = reached

    # --- Both

    def take_reserved(self) -> set[str]:
        """Transfers for which both the request and D's RESERVE have come since the last call."""
        return self._ledger.take_reserved()

    def await_news(self, timeout: float) -> None:
        """Blocks until take_reports() or take_reserved() has something, or for ``timeout`` seconds."""
        self._ledger.await_news(timeout)

    def take_reports(self) -> Reports:
        """The requests that ended since the last call. Their states are forgotten."""
        return self._ledger.take_reports()

    def state(self, request_id: str) -> State | None:
        """How far a request has come, in one look-up: for adapters that ask of each one, in each turn. None:
        it waits for the other side, or is not known. What is DONE or FAILED nobody reads or writes for any
        more; a prompt that has FAILED may still be under way in its engine, which finished() ends.

        An end is kept until take_reports() or forget(): an adapter uses one of them."""
        return self._ledger.state(request_id)

    def failure(self, request_id: str) -> str:
        """Why a request is FAILED."""
        return self._ledger.failure(request_id)

    def first_token(self, request_id: str) -> int:
        """Of a prompt that is MOVING: decode has the tokens before this one, and will not ask for them."""
        return self._ledger.first_token(request_id)

    def forget(self, request_id: str) -> None:
        """Drops all that is kept of a request for its adapter, in order with the other commands: to be called
        for a prompt after finished(), and for a load when it is DONE or FAILED, or cancelled. What still
        moves stays until it is over, and nobody is told of its end."""

        def command(now: float) -> Sequence[Action]:
            self._ledger.forget(request_id)
            return ()

        self._submit(command)

    def stats(self) -> AgentStats:
        """Counters for metrics."""
        return self._ledger.stats(self._effects.peers.peers(), self._control.malformed)

    @property
    def turns(self) -> int | None:
        """Grows when the thread has acted on something: until then stats() and phases() say the same. None
        while it does: reports may be out, and numbers not."""
        return None if self._in_turn else self._turns

    def take_timings(self) -> list[Timing]:
        """How long the transfers took that completed since the last call."""
        return self._ledger.take_timings()

    def live(self) -> LiveState:
        """What is under way right now."""
        # Read in the order in which a request goes through them, so that none slips by between two.
        commands = len(self._commands)
        engine = self._engine.stats() if not self._closed else None
        return LiveState(
            prefill_requests=len(self._effects.prefill),
            decode_requests=len(self._effects.decode),
            engine_transfers=engine.transfers_open if engine is not None else 0,
            counter_sets=self._effects.counter_sets,
            fences=self._effects.fences,
            commands=commands,
            acting=self._in_turn,
            peers=len(self._effects.peers),
        )

    def unregister_memory(self) -> None:
        """Ends all sessions and lets go of the memory, which may be unmapped then; peers that dial meanwhile
        are told that this engine is asleep. BLOCKS until nothing can be written to the memory, or read from
        it. The second call does nothing; raises AgentError where the memory must stay mapped."""
        if not self._regions:
            return
        future: Future[None] = Future()
        self._ask(lambda now: self._fall_asleep(now, future), future)
        self._insist(future, "sleep")
        try:
            self._engine.deregister_memory(self._regions, self._config.timeouts.drain)
        except TransferError as error:
            self._wake_up(self._descriptors())
            raise AgentError(f"{self._config.engine_id}: the KV cache must stay mapped: {error}") from error
        self._regions = []

    def register_memory(self) -> None:
        """After unregister_memory(), once the same addresses are mapped again: sessions are made anew as they
        are needed, and their peers get the new descriptors. BLOCKS. The second call does nothing; raises
        AgentError where the memory cannot be registered, and stays asleep."""
        if self._regions:
            return
        try:
            self._regions = self._register()
            self._wake_up(self._descriptors())
        except TransferError as error:
            raise AgentError(
                f"{self._config.engine_id}: cannot register the KV cache again, restart this engine: {error}"
            ) from error

    def phases(self) -> dict[str, int]:
        """Transfers, by side and phase ("decode reserved"): where requests are waiting. Looks at each one."""
        return self._effects.phases()

    def close(self) -> None:
        """Ends everything, tells the peers and frees the memory. BLOCKS, at most about ``timeouts.drain``
        when peers do not answer. The second call does nothing."""
        with self._closing:
            if self._closed:
                return
            if self._thread.is_alive():
                self._submit(self._begin_close)
                self._thread.join()
            with self._wake_lock:
                self._closed = True
                os.close(self._wake)
            self._control.close()
            close_or_log(self._engine, self._config.engine_id)

    # --- Sleep

    def _register(self) -> list[int]:
        regions: list[int] = []
        try:
            for part in self._memory:
                regions.append(self._engine.register_memory(part.address, part.nbytes))
        except TransferError:
            if regions:  # all or none
                self._engine.deregister_memory(regions, self._config.timeouts.drain)
            raise
        return regions

    def _descriptors(self) -> tuple[bytes, ...]:
        """What peers need to write to the memory."""
        return tuple(self._engine.region_descriptor(region) for region in self._regions)

    def _fall_asleep(self, now: float, future: Future[None]) -> Sequence[Action]:
        # Executed before the next command, so that all sessions are being fenced when that is asked for.
        self._effects.run(now, self._effects.peers.sleep())
        self._effects.run(now, self._effects.prefill.forget_pages(now))
        self._effects.writes.regions = ()
        self._effects.when_fenced(lambda: future.set_result(None))
        return ()

    def _wake_up(self, descriptors: tuple[bytes, ...]) -> None:
        regions, future = tuple(self._regions), Future[None]()

        def command(now: float) -> Sequence[Action]:
            self._effects.writes.regions = regions
            actions = self._effects.peers.wake(now, descriptors)
            future.set_result(None)
            return actions

        self._ask(command, future)
        self._insist(future, "wake-up")

    # --- Preemption, on the caller's thread

    def _preempt(
        self, now: float, transfer_ids: Sequence[str], future: Future[list[_Draining]]
    ) -> Sequence[Action]:
        draining = []
        actions: list[Action] = []
        for share in self._effects.prefill.preempt(transfer_ids):
            actions += self._effects.release(now, share)
            outgoing = self._effects.writes.open.get(share)
            if outgoing is not None:
                draining.append(_Draining(share, outgoing.number, outgoing.last_signal))
        future.set_result(draining)
        return actions

    def _drained(self, writes: _Draining, deadline: float) -> bool:
        """Waits until nothing of the transfer is in flight; False at the deadline."""
        while self.signal.load() < writes.last_signal:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_SIGNAL_POLL_S)
        try:
            self._engine.quiesce(writes.number, max(deadline - time.monotonic(), 0.0))
        except TransferError as error:
            return error.code is not ErrorCode.TIMEOUT  # anything else: it has ended
        return True

    def _fence_preempted(self, stuck: Sequence[_Draining]) -> None:
        """Ends the sessions of these writes, which ends the writes."""
        future: Future[None] = Future()

        def command(now: float) -> Sequence[Action]:
            for writes in stuck:
                self._effects.run(now, self._effects.prefill.quiesce_failed(now, writes.share))
            self._effects.writes.when_over(
                [writes.share for writes in stuck], lambda: future.set_result(None)
            )
            return ()

        self._ask(command, future)
        self._insist(future, "preemption")

    def _insist(self, future: Future[_T], what: str) -> _T:
        """Waits for the agent's thread however long it takes: to go on would let another request's pages be
        written into blocks that are still being read for this one, and nobody would ever notice."""
        waited = 0.0
        while True:
            try:
                return future.result(self._config.timeouts.drain)
            except FutureTimeoutError:
                if not self._thread.is_alive() and not future.done():
                    raise AgentError(f"{what}: the agent was closed meanwhile") from None
                waited += self._config.timeouts.drain
                logger.error("%s waits for the agent's thread, for %g s so far", what, waited)

    # --- The thread

    def _submit(self, command: Callable[[float], Sequence[Action]]) -> None:
        """Hands the thread something to do; commands are executed in order."""
        with self._wake_lock:
            if not self._closed:
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)

    def _ask(self, command: Callable[[float], Sequence[Action]], future: Future[Any]) -> None:
        """Like _submit; an exception goes to ``future``."""

        def guarded(now: float) -> Sequence[Action]:
            try:
                return command(now)
            except Exception as error:
                future.set_exception(error)
                return ()

        if self._thread.is_alive():
            self._submit(guarded)
        else:
            guarded(time.monotonic())

    def _begin_close(self, now: float) -> Sequence[Action]:
        self._leave_by = now + self._config.timeouts.drain
        self._effects.peers.drain()
        return [*self._effects.decode.close(now), *self._effects.prefill.close(now)]

    def _main(self) -> None:
        while not self._may_leave():
            try:
                self._turn()
            except Exception:
                logger.exception("the agent's thread goes on after an error that it did not expect")
                time.sleep(0.01)  # it may come again at once
        try:
            self._effects.run(time.monotonic(), self._effects.peers.farewells())
            self._control.close()  # the BYEs are out before the data links end
            self._effects.run(time.monotonic(), self._effects.peers.leave(time.monotonic()))
        except Exception:
            logger.exception("the agent could not take its leave")

    def _turn(self) -> None:
        readable = self._control.wait(self._timeout())
        if not self._launched.wait(self._hold_until - time.monotonic()):
            self._launched.set()  # for the next turns, too
        self._in_turn = True
        try:
            self._act(readable)
        finally:
            self._turns += 1
            self._in_turn = False

    def _act(self, readable: Collection[int]) -> None:
        if self._wake in readable:
            os.eventfd_read(self._wake)
        # The time is taken anew for each step: what one transfer took is measured with it.
        self._effects.receive(time.monotonic())
        self._effects.engine_events(time.monotonic())
        while self._commands:
            now = time.monotonic()
            try:
                self._effects.run(now, self._commands[0](now))
            except Exception:
                logger.exception("a command failed")
            finally:
                self._commands.popleft()  # only now: live() counts it as long as it is under way
        self._effects.tick(time.monotonic())

    def _timeout(self) -> float | None:
        deadlines = [d for d in (self._effects.next_deadline(), self._leave_by) if d is not None]
        return min(deadlines) - time.monotonic() if deadlines else None

    def _may_leave(self) -> bool:
        if self._leave_by is None:
            return False
        effects = self._effects
        busy = len(effects.prefill) + len(effects.decode) + effects.fences
        return busy == 0 or time.monotonic() >= self._leave_by


def _open_engine(config: AgentConfig) -> TransferEngine:
    address = config.data_host or config.address.host
    domains = tuple(
        DomainConfig(provider=provider, address=address, device=device)
        for provider in config.providers
        for device in config.nics.get(provider) or ("",)
    )
    options = {} if config.spin_us is None else {"spin_us": config.spin_us}
    name = f"{config.engine_id}/{config.rank}"
    try:
        return TransferEngine(
            EngineConfig(
                name=name,
                domains=domains,
                allow_fallback=config.allow_fallback,
                worker_cpu=config.worker_cpu,
                **options,
            )
        )
    except TransferError as error:
        raise AgentError(
            f"{name}: cannot open the transfer engine with providers {', '.join(config.providers)}: {error}"
        ) from error


def _bind_problem(config: AgentConfig, error: zmq.ZMQError) -> str:
    where = f"{config.engine_id}/{config.rank}: cannot listen on {config.address}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where}: the port is in use. Set control_port to a free one (rank r takes control_port plus r)."
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return (
            f"{where}: that is no address of this machine. Set control_host to one of its own; for an engine "
            f"on several machines leave it out, and set VLLM_HOST_IP, or SGLANG_HOST_IP, on each."
        )
    return f"{where}: {error}. Check control_host and control_port."
