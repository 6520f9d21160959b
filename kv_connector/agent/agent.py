"""The agent of a worker, for engine adapters: every method of ``Agent`` may be called from any thread.

One thread (kv_connector.agent.loop.thread) owns the sockets, the events of the transfer engine and the
deadlines. The decisions are made in kv_connector.protocol and carried out in
kv_connector.agent.loop.effects.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence

import zmq

from kv_connector.agent.config import AgentConfig, AgentError, PageMemory, bind_problem, open_engine
from kv_connector.agent.loop.effects import Action, Effects
from kv_connector.agent.loop.memory import KvMemory
from kv_connector.agent.loop.page_summer import PageSummer
from kv_connector.agent.loop.preemption import Preemption
from kv_connector.agent.loop.thread import AgentThread
from kv_connector.agent.reports.ledger import AgentStats, Ledger, LiveState, Reports, Timing
from kv_connector.agent.reports.page_checks import PageChecks
from kv_connector.agent.reports.timeline import Timelines
from kv_connector.control.sockets import ControlPlane
from kv_connector.control.timelines import boot_id
from kv_connector.engine import TransferError
from kv_connector.engine.transfer_engine import LayerSignal, TransferEngine, close_or_log
from kv_connector.protocol.actions import Address, Ended, PrefixRequested, Reached, State
from kv_connector.protocol.decode.decode_machine import DecodeMachine
from kv_connector.protocol.pages.layout import memory_problem
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine
from kv_connector.protocol.requests import (
    ComputedPages,
    DecodeRequest,
    GroupPages,
    PrefillRequest,
    PrefixRequest,
)
from kv_connector.protocol.session.peers import PeerTable
from kv_connector.protocol.session.sessions import Identity
from kv_connector.protocol.wire.messages import LendOutcome, Rank, Role

logger = logging.getLogger("kv_connector")


class Agent:
    """Moves KV pages between this worker and others. start() it once, close() it once."""

    def __init__(
        self, config: AgentConfig, memory: Sequence[PageMemory], engine: TransferEngine | None = None
    ) -> None:
        """Opens the transfer engine and registers the memory. Raises AgentError. ``engine``: a transfer
        engine that is already open. The agent owns it from then on."""
        problem = memory_problem(config.layout, [part.nbytes for part in memory])
        if problem is not None:
            raise AgentError(f"{config.engine_id}: {problem}")
        self._config = config
        self._engine = engine if engine is not None else open_engine(config)
        try:
            self._memory = KvMemory(self._engine, memory, config.engine_id, config.timeouts)
            descriptors = self._memory.descriptors()
            self.signal: LayerSignal = (
                self._engine.create_stream_signal() if config.on_gpu else self._engine.create_signal()
            )
            self._summer = PageSummer(memory, on_gpu=config.on_gpu)
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
        prefill = PrefillMachine(config.layout, config.timeouts)
        decode = DecodeMachine(config.layout, config.timeouts, verify=config.verify_pages)
        page_checks = PageChecks(
            f"{config.engine_id}/{config.rank}", self._summer, prefill, decode, self._ledger
        )
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
                    checkpoint=config.checkpoint,
                ),
                config.timeouts,
            ),
            prefill=prefill,
            decode=decode,
            page_checks=page_checks,
            ledger=self._ledger,
            timelines=self.timelines,
            allow_fallback=config.allow_fallback,
        )
        self._thread = AgentThread(config.engine_id, self._control, self._effects, config.timeouts.drain)
        page_checks.submit = self._thread.submit
        self._preemption = Preemption(
            self._engine, self.signal, self._effects, self._thread, config.timeouts.drain
        )
        self._block_bytes = tuple(  # bytes of one block in all its layers, by group
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
        """Whether only holders of the cluster key may connect to this agent."""
        return self._config.key is not None

    def described(self, address: Address) -> Rank:
        """This worker at ``address``, as the other workers of its engine and their peers know it."""
        return Rank(address.host, address.port, self._config.stage, self._config.layout)

    def set_ranks(self, ranks: Sequence[Rank]) -> None:
        """Sets all workers of this engine, by rank. Each worker needs the list before the first request.
        Peers find the workers through the address of the first one."""

        def command(now: float) -> Sequence[Action]:
            self._effects.peers.set_ranks(ranks)
            self._effects.decode.set_ranks(self._config.rank, ranks)
            return ()

        self._thread.submit(command)

    def report_ends(self, transfer_over: Callable[[Ended, Timing], None]) -> None:
        """Registers a callback for each transfer that is over, whatever its outcome. It runs on the agent's
        thread."""
        self._effects.transfer_over = transfer_over

    def set_weights(self, version: str, *, of_checkpoint: bool = False) -> None:
        """The engine computes with this version from now on. The call keeps its order with the other
        commands: call it between two steps. ``of_checkpoint``: the version names the weights of the
        checkpoint. Other versions have replaced them, so that peers compare only versions."""

        def command(now: float) -> Sequence[Action]:
            if not of_checkpoint:
                self._effects.peers.weights_replaced()
            self._effects.decode.set_weights(version)
            return self._effects.prefill.set_weights(now, version)

        self._thread.submit(command)

    def forget_checkpoint(self) -> None:
        """The engine computes with other weights than its checkpoint's, which have no version. Peers do not
        compare its checkpoint from now on."""

        def command(now: float) -> Sequence[Action]:
            self._effects.peers.weights_replaced()
            return ()

        self._thread.submit(command)

    # --- Decode

    def report_failures(self, load_failed: Callable[[str, str], None]) -> None:
        """Registers a callback for each transfer whose pages will not arrive, with the reason. It runs on the
        agent's thread."""
        self._effects.load_failed = load_failed

    def set_waiting(self, waiting: Collection[tuple[str, Address]]) -> None:
        """Transfers whose requests still queue here, with the engines that compute their prompts. The agent
        opens sessions with these engines and requests that they hold the blocks."""
        transfers = tuple(waiting)
        self._thread.submit(lambda now: self._effects.peers.set_waiting(now, transfers))

    def note_step(self) -> None:
        """The engine takes a step. So it is not paused, and prompts that it waits for are worth holding."""
        self._effects.peers.note_step(time.monotonic())

    def reserve(self, request: DecodeRequest) -> None:
        """Requests the prompt's pages. Ends in one finished_recving report, and also in failed_recving if the
        transfer failed."""

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
        """Aborts a reserved request. Ends in finished_recving once nothing can land in its blocks."""
        self._thread.submit(lambda now: self._effects.decode.cancel(now, request_id))

    def release(self, transfer_id: str, engine: Address) -> None:
        """Reports to P that nothing of the transfer is needed. Best effort."""
        self._thread.submit(lambda now: self._effects.decode.release(now, transfer_id, engine))

    def defer(self, transfer_id: str, engine: Address) -> None:
        """The transfer gets no blocks here before P is about to compute its prompt. Rank 0 waits for that for
        all ranks, and take_prompts_due() returns it there, also after a failure. reserve() and release() end
        the wait, too."""
        if self._config.rank == 0:
            self._thread.submit(lambda now: self._effects.decode.deferring.defer(now, transfer_id, engine))

    def take_prompts_due(self) -> set[str]:
        """The deferred transfers that wait for nothing any more, since the last call."""
        return self._ledger.take_prompts_due()

    # --- Prefill

    def expect(self, request: PrefillRequest) -> None:
        """The request has reached the scheduler."""
        self._thread.submit(lambda now: self._effects.prefill.expect(now, request))

    def prompt_next(self, transfer_id: str) -> None:
        """The next steps compute this prompt, so a D that waits for it may reserve. pages_computed() reports
        that, too."""
        self._thread.submit(lambda now: self._effects.prefill.due(now, transfer_id))

    def order_layers(self, signal_base: int, ordinals: Sequence[int]) -> None:
        """Sets the order in which layers are computed, from this step on. The signal reaches ``signal_base +
        k`` when the first k of these layers are computed. Without a call, the order is the layout's. Call it
        before the step's pages_computed()."""

        def command(now: float) -> Sequence[Action]:
            self._effects.writes.order_layers(signal_base, ordinals)
            self.timelines.order = ordinals
            return ()

        self._thread.submit(command)

    def no_prompt_ends(self, signal_base: int) -> None:
        """No prompt ends in this step, so its pages may wait for a later step. Call it before the step's
        pages_computed()."""

        def command(now: float) -> Sequence[Action]:
            self._effects.writes.no_prompt_ends(signal_base)
            return ()

        self._thread.submit(command)

    def pages_computed(self, pages: ComputedPages) -> None:
        """These pages become valid in this step, or are valid already. Each page is pushed once, when D wants
        it."""

        # Measured here, because the layers may be computed before the agent's thread executes the command.
        named = time.monotonic_ns() if self.timelines.on else 0

        def command(now: float) -> Sequence[Action]:
            if self.timelines.on:
                self.timelines.named(pages.signal_base, named)
            return self._effects.prefill.pages_computed(now, pages)

        self._thread.submit(command)

    def begin_launch(self) -> None:
        """This thread is about to prepare and launch a step that computes prompts.

        A GPU waits for launches where a prompt is short or has just begun, and Python runs one thread at a
        time. On lanes where pages wait for a prompt's end anyway, the agent handles new events only after
        end_launch().
        """
        if self._effects.gathered:
            self._thread.hold_off()

    def leaves_by_layer(self, pages: Iterable[GroupPages]) -> bool:
        """Whether some of these pages of one step may be sent before its end, so that its single layers must
        be signalled. Call it before their pages_computed()."""
        blocks = zip(pages, itertools.cycle(self._block_bytes))
        most = self._effects.gathered
        return not most or sum(len(group.blocks) * nbytes for group, nbytes in blocks) > most

    def end_launch(self) -> None:
        """The step is launched, so the agent's thread may run again."""
        self._thread.go_on()

    def preempt(self, transfer_ids: Sequence[str]) -> None:
        """The requests lose their blocks. On return nothing reads these blocks any more.

        BLOCKS for about ``timeouts.drain`` at most, while the transfer thread runs. Pages that were not
        pushed are forgotten until pages_computed() names them again.
        """
        self._thread.go_on()  # the engine is waiting for this call
        self._preemption.preempt(transfer_ids)

    def request_finished(
        self,
        transfer_id: str,
        ok: bool,
        reason: str = "",
        sampled: int | None = None,
        aborted: bool = False,
    ) -> None:
        """The request left the scheduler, with its prompt computed or not. ``sampled`` is the token behind
        the prompt.

        Ends in one finished_sending report. A computed prompt that is still being sent can be given up by a
        second call, with ``ok`` False.

        ``aborted``: the request is not ``ok`` because its client left. The transfer then counts as cancelled
        on both sides. Without ``aborted`` it counts as failed.
        """
        if sampled is not None:
            self._thread.go_on()  # D waits for the token, which must not wait for another prompt's launch
        prefill = self._effects.prefill
        self._thread.submit(
            lambda now: prefill.request_finished(now, transfer_id, ok, reason, sampled, aborted=aborted)
        )

    def cache_cleared(self) -> None:
        """KV computed before is worthless. Transfers of which a part has been pushed fail."""
        self._thread.submit(lambda now: self._effects.prefill.cache_cleared(now))

    def note_prefill_end(self, transfer_ids: Sequence[str]) -> None:
        """The last layer of the last chunk is about to be signalled. Records for stats() how much has
        arrived."""
        for outgoing in self._effects.writes.of(transfer_ids):
            with contextlib.suppress(TransferError):  # the transfer has ended
                outgoing.at_prefill_end = self._engine.progress(outgoing.number)

    def catch_up(self, seconds: float) -> bool:
        """BLOCKS until the thread has handled all earlier commands and arrived messages, at most ``seconds``.
        For an adapter that is about to read states. Returns whether the thread has caught up."""
        done = threading.Event()

        def command(now: float) -> Sequence[Action]:
            done.set()
            return ()

        self._thread.submit(command)
        return done.wait(seconds)

    def report_reached(self, reached: Callable[[Reached], None]) -> None:
        """Registers a callback for each change of a prompt's state(), for adapters that do not poll. It runs
        on the agent's thread."""
        self._effects.reached = reached

    # --- Prefixes

    def request_prefix(self, request: PrefixRequest) -> None:
        """Requests the pages of a prompt's leading tokens from another engine. Rank 0 does so for all ranks,
        and take_prefix_answers() returns the one answer there. After a good answer each rank calls reserve()
        or release() with the same transfer id and lender."""
        if self._config.rank == 0:
            self._thread.submit(lambda now: self._effects.decode.borrowing.ask(now, request))

    def withdraw_prefix(self, transfer_id: str) -> None:
        """The answer to request_prefix() is not needed any more. It may have arrived already."""
        self._thread.submit(lambda now: self._effects.decode.borrowing.withdraw(now, transfer_id))

    def take_prefix_answers(self) -> dict[str, int]:
        """The answers since the last call, by transfer id: the number of tokens that are lent, or 0."""
        return self._ledger.take_prefix_answers()

    def take_prefix_loads(self) -> dict[str, float]:
        """The borrowed prefixes that have arrived since the last call, by transfer id: the seconds from the
        reservation to the last page. One rank gets each."""
        return self._ledger.take_prefix_loads()

    def take_prefix_requests(self) -> list[PrefixRequested]:
        """The questions of other engines since the last call. One rank gets each, and all ranks get the
        scheduler's answer."""
        return self._ledger.take_prefix_requests()

    def report_prefix_requests(self, requested: Callable[[], None]) -> None:
        """Registers a callback for each question of another engine, for adapters that poll only in steps. It
        runs on the agent's thread, once take_prefix_requests() has the question."""
        self._ledger.on_prefix_request = requested

    def answer_prefix(
        self,
        transfer_id: str,
        tokens: int,
        outcome: LendOutcome = LendOutcome.LENT,
        reason: str = "",
    ) -> None:
        """Lends the first ``tokens`` tokens, or none. Before a good answer come expect() with a request that
        is ``lent``, pages_computed() and request_finished(). The lending ends as a prompt does, in one
        finished_sending report."""
        self._thread.submit(lambda now: self._effects.prefill.lend(now, transfer_id, tokens, outcome, reason))

    def refuse_lending(self, reason: str) -> None:
        """Refuses all borrowers from now on, also while the engine takes no step. "": the scheduler answers
        them again."""
        self._thread.submit(lambda now: self._effects.prefill.refuse_lending(now, reason))

    def end_lendings(self, reason: str) -> None:
        """Ends all prefixes that are lent. Each ends in its finished_sending report, once nothing reads its
        blocks."""
        self._thread.submit(lambda now: self._effects.prefill.end_lendings(now, reason))

    # --- Both

    def take_reserved(self) -> set[str]:
        """Transfers for which both the request and D's RESERVE have arrived since the last call."""
        return self._ledger.take_reserved()

    def await_news(self, timeout: float) -> None:
        """Blocks until one of the take methods for a scheduler has something, at most ``timeout`` seconds."""
        self._ledger.await_news(timeout)

    def take_reports(self) -> Reports:
        """The requests that ended since the last call. Their states are forgotten."""
        return self._ledger.take_reports()

    def state(self, request_id: str) -> State | None:
        """The state of a request, in one look-up: for adapters that query each request in each turn.

        None: the request waits for the other side, or is unknown. Nothing reads or writes the pages of a DONE
        or FAILED request any more. A FAILED prompt may still be computed by its engine until
        request_finished().

        An end is kept until take_reports() or forget(). An adapter uses one of the two.
        """
        return self._ledger.state(request_id)

    def failure(self, request_id: str) -> str:
        """The reason why a request is FAILED."""
        return self._ledger.failure(request_id)

    def first_token(self, request_id: str) -> int:
        """For a MOVING prompt: decode has the tokens before this one and does not request them."""
        return self._ledger.first_token(request_id)

    def forget(self, request_id: str) -> None:
        """Drops everything that is kept of a request for its adapter, in order with the other commands.

        Call it for a prompt after request_finished(), and for a load when it is DONE, FAILED or cancelled. A
        transfer in flight stays until it is over, and its end is not reported.
        """

        def command(now: float) -> Sequence[Action]:
            self._ledger.forget(request_id)
            return ()

        self._thread.submit(command)

    def stats(self) -> AgentStats:
        """Counters for metrics."""
        links = self._effects.link_watch
        return self._ledger.stats(
            self._effects.peers.peers(), self._control.malformed, links.lost, links.restored
        )

    @property
    def turns(self) -> int | None:
        """A number that grows when the thread has acted on something. Until then stats() and phases() return
        the same values. None while the thread acts: reports may already be out, and numbers not."""
        return None if self._thread.in_turn else self._thread.turns

    def take_timings(self) -> list[Timing]:
        """Durations of the transfers that completed since the last call."""
        return self._ledger.take_timings()

    def live(self) -> LiveState:
        """The transfers and resources that are in use right now."""
        # Read in the order in which a request passes through them, so that no request is missed between two.
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
            links_out=self._effects.link_watch.out,
            remembered=self._effects.prefill.remembered,
        )

    def unregister_memory(self) -> None:
        """Ends all sessions and deregisters the memory, which may then be unmapped. Peers that connect
        meanwhile are refused with the reason that this engine is asleep.

        BLOCKS until nothing can be written to the memory or read from it. A second call does nothing. Raises
        AgentError if the memory must stay mapped.
        """
        self._memory.unregister(self._effects, self._thread, self._summer)

    def register_memory(self) -> None:
        """Registers the memory again after unregister_memory(), once the same addresses are mapped. Sessions
        are opened as they are needed, and their peers get the new descriptors.

        BLOCKS. A second call does nothing. Raises AgentError if the memory cannot be registered. The agent
        then stays asleep.
        """
        self._memory.register(self._effects, self._thread)

    def phases(self) -> dict[str, int]:
        """Transfers by side and phase ("decode reserved"), which shows where requests wait. Visits every
        transfer."""
        return self._effects.phases()

    def close(self) -> None:
        """Ends all transfers, reports the end to the peers and frees the memory. A second call does nothing.

        BLOCKS for about ``timeouts.drain`` at most when peers do not answer. If a GPU hangs while it sums
        pages, BLOCKS for ``timeouts.check`` more."""
        with self._closing:
            if self._thread.closed:
                return
            self._thread.end()
            self._control.close()
            try:
                self._summer.close(self._config.timeouts.check)
            except TransferError as error:
                logger.error(
                    "%s: closed with a thread that still reads pages: %s", self._config.engine_id, error
                )
            close_or_log(self._engine, self._config.engine_id)
