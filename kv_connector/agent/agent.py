"""The agent of a worker, for engine adapters: every method of ``Agent`` may be called from any thread.

One thread (kv_connector.agent.thread) owns its sockets, its engine's events and its deadlines. What it
decides is decided in kv_connector.protocol, how that is done stands in kv_connector.agent.effects.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence

import zmq

from kv_connector.agent.config import AgentConfig, AgentError, MemoryRange, bind_problem, open_engine
from kv_connector.agent.effects import Action, Effects
from kv_connector.agent.ledger import AgentStats, Ledger, LiveState, Reports, Timing
from kv_connector.agent.memory import KvMemory
from kv_connector.agent.preemption import Preemption
from kv_connector.agent.thread import AgentThread
from kv_connector.agent.timeline import Timelines
from kv_connector.control.sockets import ControlPlane
from kv_connector.control.timelines import boot_id
from kv_connector.engine import TransferError
from kv_connector.engine.transfer_engine import LayerSignal, TransferEngine, close_or_log
from kv_connector.protocol.actions import Address, Ended, Reached, State
from kv_connector.protocol.decode_machine import DecodeMachine
from kv_connector.protocol.layout import memory_problem
from kv_connector.protocol.messages import Rank, Role
from kv_connector.protocol.peers import PeerTable
from kv_connector.protocol.prefill_machine import PrefillMachine
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, GroupPages, PrefillRequest
from kv_connector.protocol.sessions import Identity


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
        self._engine = engine if engine is not None else open_engine(config)
        try:
            self._memory = KvMemory(self._engine, memory, config.engine_id, config.timeouts.drain)
            descriptors = self._memory.descriptors()
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
            regions=self._memory.regions,
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
        self._thread = AgentThread(config.engine_id, self._control, self._effects, config.timeouts.drain)
        self._preemption = Preemption(
            self._engine, self.signal, self._effects, self._thread, config.timeouts.drain
        )
        self._block_bytes = tuple(  # of each group, in all its layers
            sum(layer.page_bytes for layer in config.layout.layers if layer.group == group)
            for group in range(len(config.layout.groups))
        )
        self._closing = threading.Lock()  # held by close()

    def start(self) -> Address:
        """Binds the control socket and starts the thread; raises AgentError."""
        try:
            address = self._control.bind(self._config.address)
        except zmq.ZMQError as error:
            self.close()
            raise AgentError(bind_problem(self._config, error)) from error
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

        self._thread.submit(command)

    def report_ends(self, transfer_over: Callable[[Ended, Timing], None]) -> None:
        """Calls this, on the agent's thread, with each transfer that is over, however it ended."""
        self._effects.transfer_over = transfer_over

    def set_weights(self, version: str) -> None:
        """The engine computes with this version from now on. In order with the other commands: to be called
        between two steps."""

        def command(now: float) -> Sequence[Action]:
            self._effects.decode.set_weights(version)
            return self._effects.prefill.set_weights(now, version)

        self._thread.submit(command)

    # --- Decode

    def report_failures(self, load_failed: Callable[[str, str], None]) -> None:
        """Calls this, on the agent's thread, with each transfer whose pages will not come, and the reason."""
        self._effects.load_failed = load_failed

    def set_waiting(self, waiting: Collection[tuple[str, Address]]) -> None:
        """Transfers whose requests still queue here, and the engines that compute their prompts: sessions are
        made with these, and they are told to hold the blocks."""
        transfers = tuple(waiting)
        self._thread.submit(lambda now: self._effects.peers.set_waiting(now, transfers))

    def note_step(self) -> None:
        """The engine takes a step: it is not paused, and what it waits for is worth holding."""
        self._effects.peers.note_step(time.monotonic())

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
                    self._ledger.load_ended(receiver, failed=True)
                    self._effects.load_failed(transfer, why)
                raise

        self._thread.submit(command)

    def cancel(self, request_id: str) -> None:
        """Aborts a reserved request: ends in finished_recving once nothing can land in its blocks."""
        self._thread.submit(lambda now: self._effects.decode.cancel(now, request_id))

    def release(self, transfer_id: str, engine: Address) -> None:
        """Tells P that nothing of the transfer is needed; best effort."""
        self._thread.submit(lambda now: self._effects.decode.release(now, transfer_id, engine))

    # --- Prefill

    def expect(self, request: PrefillRequest) -> None:
        """The request has reached the scheduler."""
        self._thread.submit(lambda now: self._effects.prefill.expect(now, request))

    def order_layers(self, signal_base: int, ordinals: Sequence[int]) -> None:
        """From this step on the signal reaches ``signal_base + k`` when the first k of these layers are
        computed; without it, in the layout's order. To be called before the step's pages_computed()."""

        def command(now: float) -> Sequence[Action]:
            self._effects.writes.order_layers(signal_base, ordinals)
            self.timelines.order = ordinals
            return ()

        self._thread.submit(command)

    def no_prompt_ends(self, signal_base: int) -> None:
        """In this step: its pages may wait for a later one. To be called before the step's
        pages_computed()."""

        def command(now: float) -> Sequence[Action]:
            self._effects.writes.no_prompt_ends(signal_base)
            return ()

        self._thread.submit(command)

    def pages_computed(self, pages: ComputedPages) -> None:
        """These pages become valid in this step, or are already; each is pushed once, when D wants it."""

        # By this thread's clock: the layers may be computed before the agent's thread hears of it.
        named = time.monotonic_ns() if self.timelines.on else 0

        def command(now: float) -> Sequence[Action]:
            if self.timelines.on:
                self.timelines.named(pages.signal_base, named)
            return self._effects.prefill.pages_computed(now, pages)

        self._thread.submit(command)

    def begin_launch(self) -> None:
        """A step that computes prompts is about to be prepared and launched by this thread.

        A GPU waits for launches where a prompt is short, or has just begun, and Python runs one thread at a
        time: on lanes where pages wait for a prompt's end anyway, what comes meanwhile is looked at behind
        end_launch()."""
        if self._effects.gathered:
            self._thread.hold_off()

    def leaves_by_layer(self, pages: Iterable[GroupPages]) -> bool:
        """Whether some of these, of one step, may leave before its end, and its single layers are to be
        signalled; before their pages_computed()."""
        blocks = zip(pages, itertools.cycle(self._block_bytes))
        most = self._effects.gathered
        return not most or sum(len(group.blocks) * nbytes for group, nbytes in blocks) > most

    def end_launch(self) -> None:
        """The step is launched."""
        self._thread.go_on()

    def preempt(self, transfer_ids: Sequence[str]) -> None:
        """The requests lose their blocks. On return nothing reads these any more; BLOCKS, about
        ``timeouts.drain`` at most while the transfer engine's worker runs. Pages that were not pushed are
        forgotten until pages_computed() names them again."""
        self._thread.go_on()  # the engine waits
        self._preemption.preempt(transfer_ids)

    def request_finished(
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
            self._thread.go_on()  # D waits for the token, and not for another prompt's launch
        prefill = self._effects.prefill
        self._thread.submit(
            lambda now: prefill.request_finished(now, transfer_id, ok, reason, sampled, aborted=aborted)
        )

    def cache_cleared(self) -> None:
        """What was computed before is worthless: transfers of which a part has been pushed fail."""
        self._thread.submit(lambda now: self._effects.prefill.cache_cleared(now))

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

        self._thread.submit(command)
        return done.wait(seconds)

    def report_reached(self, reached: Callable[[Reached], None]) -> None:
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
        more; a prompt that has FAILED may still be under way in its engine, which request_finished() ends.

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
        for a prompt after request_finished(), and for a load when it is DONE or FAILED, or cancelled. What
        still moves stays until it is over, and nobody is told of its end."""

        def command(now: float) -> Sequence[Action]:
            self._ledger.forget(request_id)
            return ()

        self._thread.submit(command)

    def stats(self) -> AgentStats:
        """Counters for metrics."""
        return self._ledger.stats(self._effects.peers.peers(), self._control.malformed)

    @property
    def turns(self) -> int | None:
        """Grows when the thread has acted on something: until then stats() and phases() say the same. None
        while it does: reports may be out, and numbers not."""
        return None if self._thread.in_turn else self._thread.turns

    def take_timings(self) -> list[Timing]:
        """How long the transfers took that completed since the last call."""
        return self._ledger.take_timings()

    def live(self) -> LiveState:
        """What is under way right now."""
        # Read in the order in which a request goes through them, so that none slips by between two.
        commands = self._thread.commands
        engine = self._engine.stats() if not self._thread.closed else None
        return LiveState(
            prefill_requests=len(self._effects.prefill),
            decode_requests=len(self._effects.decode),
            engine_transfers=engine.transfers_open if engine is not None else 0,
            counter_sets=self._effects.counter_sets,
            fences=self._effects.fences,
            commands=commands,
            acting=self._thread.in_turn,
            peers=len(self._effects.peers),
        )

    def unregister_memory(self) -> None:
        """Ends all sessions and lets go of the memory, which may be unmapped then; peers that dial meanwhile
        are told that this engine is asleep. BLOCKS until nothing can be written to the memory, or read from
        it. The second call does nothing; raises AgentError where the memory must stay mapped."""
        self._memory.unregister(self._effects, self._thread)

    def register_memory(self) -> None:
        """After unregister_memory(), once the same addresses are mapped again: sessions are made anew as they
        are needed, and their peers get the new descriptors. BLOCKS. The second call does nothing; raises
        AgentError where the memory cannot be registered, and stays asleep."""
        self._memory.register(self._effects, self._thread)

    def phases(self) -> dict[str, int]:
        """Transfers, by side and phase ("decode reserved"): where requests are waiting. Looks at each one."""
        return self._effects.phases()

    def close(self) -> None:
        """Ends everything, tells the peers and frees the memory. BLOCKS, at most about ``timeouts.drain``
        when peers do not answer. The second call does nothing."""
        with self._closing:
            if self._thread.closed:
                return
            self._thread.end()
            self._control.close()
            close_or_log(self._engine, self._config.engine_id)
