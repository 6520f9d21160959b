"""Carries out the decisions of the state machines: on the sockets, on the TransferEngine and in the reports.

Owned by the agent's thread. An action that fails becomes an event for its machine. A fault of one request or
one peer affects no other.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_connector.agent.interfaces import ReceivedMessage, Sockets, TransferPort
from kv_connector.agent.loop.writes import BURSTS, Writes, WriteTarget
from kv_connector.agent.reports.end_log import log_end
from kv_connector.agent.reports.ledger import Ledger, Timing
from kv_connector.agent.reports.links import LinkWatch, PeerName
from kv_connector.agent.reports.page_checks import PageChecks
from kv_connector.agent.reports.slow_transfers import SLOW_S, SlowTransfers
from kv_connector.agent.reports.timeline import Timelines
from kv_connector.engine import ErrorCode, Event, EventKind, TransferError
from kv_connector.protocol.actions import (
    Accept,
    CancelWrites,
    CloseCounter,
    Complete,
    Connect,
    Deliver,
    Dial,
    DialFailed,
    Distrust,
    Ended,
    EngineFound,
    EngineNotFound,
    Fence,
    FindEngine,
    FinishedReceiving,
    FinishedSending,
    HangUp,
    Inquire,
    Log,
    OpenCounter,
    Outcome,
    PagesChecked,
    PeerId,
    PrefixAnswered,
    PrefixDecided,
    PrefixRequested,
    PromptDue,
    Push,
    Reached,
    Reply,
    RequestMessage,
    Seal,
    Send,
    SessionOver,
    SessionUp,
    Share,
    SumPages,
    UnderWay,
)
from kv_connector.protocol.decode.decode_machine import DecodeMachine
from kv_connector.protocol.decode.legs import DecodeAction
from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.prefill.shares import PrefillAction
from kv_connector.protocol.session.peers import PeerTable
from kv_connector.protocol.session.sessions import PeersAction
from kv_connector.protocol.timers import earliest
from kv_connector.protocol.wire.messages import (
    Borrow,
    Cancel,
    CancelAck,
    Defer,
    Due,
    Fail,
    FailCode,
    Hello,
    Lent,
    Locate,
    NakReason,
    Ping,
    Recall,
    Release,
    Reserve,
    Role,
    Sampled,
    Sums,
    clip,
    for_prefixes,
)

logger = logging.getLogger("kv_connector")

Action = PrefillAction | DecodeAction | PeersAction

# A fence usually takes one turn of the transfer thread. The agent waits this long for it, then serves all
# other peers and tries again, because a fence makes progress only while it is called. The interval grows with
# the wait, so that a fence takes at most half as long again as it must. With 300 stuck fences the agent then
# spends 0.3 s of each second on retries of 1 ms. The transfer thread turns every millisecond during a retry.
# Sessions survive that with heartbeats of 1 s.
_FENCE_TIMEOUT_S = 0.005
_FENCE_RETRY_TIMEOUT_S = 0.001
_FENCE_RETRY_S = 0.02
_FENCE_LONGEST_RETRY_S = 1.0
# Interval of the log lines about a fence that does not succeed. The blocks behind the fence stay reserved.
_FENCE_LOG_S = 10.0
# Events taken from the transfer engine at once.
_EVENTS = 256

_WRITES_END = {
    EventKind.TRANSFER_DONE: WritesEnd.DONE,
    EventKind.TRANSFER_FAILED: WritesEnd.FAILED,
    EventKind.TRANSFER_CANCELLED: WritesEnd.CANCELLED,
}


@dataclass
class _Link:
    """The transfer engine's view of one session's peer."""

    name: str
    lane: str = ""
    engine_peer: int | None = None
    target: WriteTarget | None = None  # where the peer's pages lie


@dataclass
class _Fencing:
    reason: str
    since: float
    retry: float
    log: float


class Effects:
    """Connects the state machines of one agent with its sockets, transfer engine and reports."""

    def __init__(
        self,
        *,
        engine: TransferPort,
        signal: Any,
        regions: Sequence[int],
        layout: KvLayout,
        control: Sockets,
        peers: PeerTable,
        prefill: PrefillMachine,
        decode: DecodeMachine,
        page_checks: PageChecks,
        ledger: Ledger,
        timelines: Timelines | None = None,
        allow_fallback: bool = False,
    ) -> None:
        """``regions``: as for Writes. ``timelines``: None if no operator may query timelines.
        ``allow_fallback``: as in the transfer engine's configuration."""
        self.peers = peers
        self.prefill = prefill
        self.decode = decode
        self.writes = Writes(engine, signal, regions, len(layout.layers))
        self._engine = engine
        self._control = control
        self._page_checks = page_checks
        self._ledger = ledger
        self._allow_fallback = allow_fallback
        self._timelines = timelines
        self._trace = timelines if timelines is not None and timelines.on else None
        self._actions: deque[Action] = deque()
        self._links: dict[PeerId, _Link] = {}
        self._over: list[PeerId] = []  # links whose last log lines may still be in _actions
        self._counters: dict[str, tuple[int, int]] = {}  # request id -> counter set, writes expected
        self._counting: dict[int, str] = {}  # counter set -> request id
        self._fencing: dict[PeerId, _Fencing] = {}
        self._when_fenced: list[Callable[[], None]] = []
        # Unreported transfers whose writes have ended: seconds since the first push, pages, bytes.
        self._sent: dict[Share, tuple[float, int, int]] = {}
        self._arrived: dict[str, int] = {}  # unreported requests whose pages have all arrived: pages
        self.load_failed: Callable[[str, str], None] = lambda transfer_id, reason: None
        self.reached: Callable[[Reached], None] = lambda reached: None
        self.transfer_over: Callable[[Ended, Timing], None] = lambda ended, timing: None
        self.gathered: int | None = None
        """Bytes up to which the pages of one step are sent only at its end, whichever of the known peers
        wants them. None: no peer has connected yet. Any thread may read it."""
        self.link_watch = LinkWatch(engine)
        self._next_look = 0.0
        self._slow = SlowTransfers(self._name_of, self._progress)

    @property
    def fences(self) -> int:
        """Number of sessions that are over but whose writes may still land."""
        return len(self._fencing)

    @property
    def counter_sets(self) -> int:
        return len(self._counters)

    def run(self, now: float, actions: Sequence[Action]) -> None:
        """Executes the actions, and all actions that follow from them."""
        self._actions.extend(actions)
        while self._actions:
            action = self._actions.popleft()
            try:
                self._actions.extend(self._execute(now, action))
            except TransferError as error:
                self._actions.extend(self._failed(now, action, str(error)))
            except Exception as error:
                logger.exception("action %s failed", type(action).__name__)
                self._actions.extend(self._failed(now, action, f"{type(error).__name__}: {error}"))
        for peer in self._over:
            self._links.pop(peer, None)
        self._over.clear()

    def receive(self, now: float) -> None:
        """Handles the messages that the control plane's last wait() found."""
        for received in self._control.receive():
            try:
                self.run(now, self._received(now, received))
            except Exception:  # the messages behind it come from other peers
                logger.exception("message from %s was not acted on", received.source)

    def _received(self, now: float, received: ReceivedMessage) -> Sequence[Action]:
        if received.message is None:
            return self.peers.lost(now, received.source, "it sent a malformed message")
        if isinstance(received.message, Recall) and self._timelines is not None:
            recalled = self._timelines.recalled(received.message, self.peers.other_workers())
            return [Reply(received.source, recalled)]
        return self.peers.receive(now, received.source, received.message)

    def engine_events(self, now: float) -> None:
        """Handles the events of the transfer engine."""
        self.run(now, self._engine_events(now))

    def tick(self, now: float) -> None:
        """Acts on every deadline that has passed. Call it after receive(), so that a peer that has just sent
        something is not called silent."""
        self.run(now, self.peers.tick(now))
        self.run(now, self.prefill.tick(now))
        self.run(now, self.decode.tick(now))
        for peer in [peer for peer, fencing in self._fencing.items() if fencing.retry <= now]:
            self.run(now, self._try_fence(now, peer))
        if self._trace is not None:
            self._trace.look()
        if now >= self._next_look:
            self._next_look = now + SLOW_S / 2
            self._slow.report(now, self.under_way())
            self._look_at_links()

    def under_way(self) -> list[UnderWay]:
        """All transfers that are not over. Any thread may call it."""
        return [*self.prefill.under_way(), *self.decode.under_way()]

    def phases(self) -> dict[str, int]:
        """Number of transfers in each phase. Any thread may call it."""
        return dict(Counter(f"{one.side.value} {one.phase}" for one in self.under_way()))

    def next_deadline(self) -> float | None:
        """The time at which tick() is due if nothing happens before."""
        deadlines = [machine.next_deadline() for machine in (self.peers, self.prefill, self.decode)]
        deadlines += [fencing.retry for fencing in self._fencing.values()]
        return earliest(deadlines)

    def when_fenced(self, done: Callable[[], None]) -> None:
        """Calls ``done`` once no session that is over can write or read this memory any more."""
        if self._fencing:
            self._when_fenced.append(done)
        else:
            done()

    # --- Actions

    def _execute(self, now: float, action: Action) -> Sequence[Action]:
        match action:
            case Push():
                self._push(now, action)
            case Seal(share):
                self.writes.seal(share)
            case CancelWrites(share):
                self.writes.cancel(share)
            case OpenCounter(peers, request_id, writes):
                immediate = self._open_counter(peers, request_id, writes)
                return self.decode.counter_opened(now, request_id, immediate)
            case CloseCounter(request_id):
                number, _ = self._counters.pop(request_id)
                del self._counting[number]
                self._engine.release_counters(number)
            case SumPages() | PagesChecked():
                self._page_checks.act(action, self._name_of)
            case FinishedSending(request_id):
                self._ledger.sent(request_id)
            case FinishedReceiving(request_id, failed, sampled, stale):
                self._ledger.load_ended(request_id, failed, sampled, stale=stale)
            case PrefixRequested() | PrefixAnswered() | PrefixDecided() | PromptDue():
                self._ledger.news(action)
            case Ended():
                self._ended(now, action)
            case Reached():
                self._ledger.reached(action)
                self.reached(action)
            case Send(peer, message):
                source = self.peers.source(peer)
                return [] if source is None else self._execute(now, Reply(source, message))
            case Reply(source, message):
                if not self._control.send(source, message):
                    first = isinstance(message, Hello | Locate)
                    hint = " (does only one of the two engines have a cluster key?)" if first else ""
                    return self.peers.lost(now, source, f"its control connection accepts no messages{hint}")
            case Deliver(peer, message):
                return self._deliver(now, peer, message)
            case FindEngine(engine):
                return self.peers.find(now, engine)
            case Inquire(peer, address):
                return self.peers.connected(now, peer, self._control.dial(address))
            case EngineFound(engine, ranks):
                return self.decode.engine_found(now, engine, ranks)
            case EngineNotFound(engine, reason):
                return self.decode.engine_not_found(now, engine, reason)
            case Dial(engine, address, wants, layout):
                return self.peers.dial(now, engine, address, wants, layout)
            case Connect():
                return self._connect(now, action)
            case Accept():
                return self._accept(now, action)
            case Complete():
                return self._complete(now, action)
            case SessionUp(peer, address, incarnation, defers):
                return [] if address is None else self.decode.peer_up(now, address, peer, incarnation, defers)
            case DialFailed(address, reason):
                return self.decode.dial_failed(now, address, reason)
            case Fence(peer, reason):
                return self.peers.drop(now, peer, reason)
            case SessionOver(peer, reason):
                return self._session_over(now, peer, reason)
            case HangUp(source):
                self._control.hang_up(source)
            case Distrust(source, reason):
                self._control.distrust(source)
            case Log(level, text):
                logger.log(level, "%s", text)
        return []

    def _failed(self, now: float, action: Action, reason: str) -> Sequence[Action]:
        """The event that reports a failed action to its machine."""
        match action:
            case Push(_, share) | Seal(share):
                if share in self.writes.open:
                    return self.prefill.push_failed(now, share, reason)
                return self.prefill.writes_ended(now, share, WritesEnd.FAILED, True, reason)
            case CancelWrites(share):
                # The transfer has ended already, and its event will follow.
                logger.debug("transfer %s: not cancelled, it has already ended: %s", share, reason)
            case SumPages(owner):
                return self._page_checks.summed(now, owner, b"", reason)
            case OpenCounter(_, request_id):
                return self.decode.counter_failed(now, request_id, reason)
            case Send(peer, Reserve(transfer_id, attempt)):
                # Nothing was sent, so nothing can land.
                fail = Fail(transfer_id, attempt, FailCode.INCOMPATIBLE, reason, quiesced=True)
                return self.decode.fail(now, peer, fail)
            case Deliver(peer, Reserve(transfer_id, attempt)):
                # Part of the reservation may be in flight. D must not wait for it.
                return [Send(peer, Fail(transfer_id, attempt, FailCode.WRITE_ERROR, clip(reason), False))]
            case Connect(peer) | Inquire(peer) | Complete(peer):
                return self.peers.dial_error(now, peer, reason)
            case Accept(peer):
                return self.peers.refused(now, peer, NakReason.NO_LANE, reason)
            case _:
                logger.error("action %s failed: %s", type(action).__name__, reason)
        return []

    def _deliver(self, now: float, peer: PeerId, message: RequestMessage) -> Sequence[Action]:
        match message:
            case Reserve():
                return self.prefill.reserve(now, peer, message)
            case Cancel():
                return self.prefill.cancel(now, peer, message)
            case Release():
                return self.prefill.release(now, peer, message)
            case Defer():
                return self.prefill.defer(now, peer, message)
            case Due():
                return self.decode.deferring.due(peer, message)
            case Borrow():
                return self.prefill.borrow(now, peer, message)
            case Lent():
                return self.decode.borrowing.lent(now, peer, message)
            case Ping(_, waiting):
                return self.prefill.waiting(now, peer, waiting)
            case Sampled():
                return self.decode.sampled(now, peer, message)
            case Sums():
                return self.decode.sums(now, peer, message)
            case Fail():
                return self.decode.fail(now, peer, message)
            case CancelAck():
                return self.decode.cancel_ack(now, peer, message)

    # --- Sessions

    def _connect(self, now: float, action: Connect) -> Sequence[Action]:
        link = self._links[action.peer] = _Link(action.name)
        handshake = self._engine.offer(action.name, action.without)
        link.engine_peer = handshake.peer
        return self.peers.offered(now, action.peer, self._control.dial(action.address), handshake.data)

    def _accept(self, now: float, action: Accept) -> Sequence[Action]:
        hello = action.hello
        link = self._links[action.peer] = _Link(action.name)
        handshake = self._engine.accept(action.name, hello.offer)
        link.engine_peer = handshake.peer
        regions = tuple(
            self._engine.import_region(handshake.peer, descriptor) for descriptor in hello.regions
        )
        link.lane = self._engine.lane(handshake.peer)
        for lane in handshake.passed_over:
            logger.info("decode peer %s: uses lane %s, passed over lane %s", action.name, link.lane, lane)
        plan = self.prefill.admit(
            action.peer, hello.layout, hello.wants, len(hello.regions), prefixes=for_prefixes(hello)
        )
        if isinstance(plan, str):
            return self.peers.refused(now, action.peer, NakReason.INCOMPATIBLE, plan)
        link.target = WriteTarget(handshake.peer, regions, plan, BURSTS.get(link.lane))
        most = 0 if link.target.bursts is None else link.target.bursts.most
        self.gathered = most if self.gathered is None else min(self.gathered, most)
        return self.peers.accepted(now, action.peer, link.lane, handshake.data)

    def _complete(self, now: float, action: Complete) -> Sequence[Action]:
        link = self._links[action.peer]
        link.name, link.lane = action.name, action.lane
        assert link.engine_peer is not None
        try:
            self._engine.complete(link.engine_peer, action.answer)
        except TransferError as error:
            # The same rules as in the transfer engine's accept(). If the peer is down, every other lane would
            # fail too.
            forgiven = self._allow_fallback and error.code not in (ErrorCode.PEER_DOWN, ErrorCode.CLOSED)
            if error.provider and (error.code is ErrorCode.NOT_REACHABLE or forgiven):
                return self.peers.pass_over(now, action.peer, error.provider, str(error))
            raise
        return self.peers.completed(now, action.peer)

    def _session_over(self, now: float, peer: PeerId, reason: str) -> Sequence[Action]:
        actions: list[Action] = [
            *self.prefill.peer_down(now, peer, reason),
            *self.decode.peer_down(now, peer, reason),
        ]
        link = self._links.get(peer)
        self._fencing[peer] = _Fencing(reason, now, now, now + _FENCE_LOG_S)
        if link is None or link.engine_peer is None:
            return [*actions, *self._fenced(now, peer)]
        return [*actions, *self._try_fence(now, peer)]

    def _try_fence(self, now: float, peer: PeerId) -> Sequence[Action]:
        fencing, link = self._fencing[peer], self._links[peer]
        assert link.engine_peer is not None
        timeout = _FENCE_TIMEOUT_S if now == fencing.since else _FENCE_RETRY_TIMEOUT_S
        try:
            self._engine.fence(link.engine_peer, timeout)
        except TransferError as error:
            if error.code not in (ErrorCode.UNKNOWN_PEER, ErrorCode.CLOSED):
                wait = (now - fencing.since) / 2
                fencing.retry = now + min(max(wait, _FENCE_RETRY_S), _FENCE_LONGEST_RETRY_S)
                if now >= fencing.log:
                    fencing.log = now + _FENCE_LOG_S
                    logger.warning(
                        "peer %s, lane %s: not fenced after %.0f s, its transfers' blocks stay reserved: %s",
                        link.name,
                        link.lane,
                        now - fencing.since,
                        error,
                    )
                return []
        return [*self._engine_events(now), *self._fenced(now, peer)]  # first its transfers' final events

    def _fenced(self, now: float, peer: PeerId) -> Sequence[Action]:
        self._over.append(peer)
        del self._fencing[peer]
        while self._when_fenced and not self._fencing:
            self._when_fenced.pop()()
        return [*self.prefill.fenced(now, peer), *self.decode.fenced(now, peer)]

    # --- Writing and counting

    def _push(self, now: float, push: Push) -> None:
        if not self.prefill.writing(push.share):
            return  # an earlier Push of the same step failed
        target = self._links[push.peer].target
        assert target is not None
        self.writes.push(now, push, target)
        if self._trace is not None:
            self._trace.pushed(push.share, self.writes.open[push.share].number, push.signal_base)

    def release(self, now: float, share: Share) -> Sequence[Action]:
        """Sends pages that wait for a later step, because that step may not come."""
        try:
            self.writes.release(share)
        except TransferError as error:
            return self.prefill.push_failed(now, share, str(error))
        return []

    def _open_counter(self, peers: Sequence[PeerId], request_id: str, writes: int) -> int:
        raisers = [self._links[peer].engine_peer for peer in peers]
        counters = self._engine.alloc_counters(1, [raiser for raiser in raisers if raiser is not None])
        try:
            self._engine.expect(counters.id, (writes,))
        except TransferError:
            self._engine.release_counters(counters.id)
            raise
        self._counters[request_id] = (counters.id, writes)
        self._counting[counters.id] = request_id
        if self._trace is not None:
            self._trace.counter_opened(request_id, counters.immediates[0], writes)
        return counters.immediates[0]

    # --- Results

    def _engine_events(self, now: float) -> Sequence[Action]:
        actions: list[Action] = []
        while events := self._engine.poll_events(_EVENTS):
            for event in events:
                try:
                    actions += self._event(now, event)
                except Exception:  # each event is reported once, so the remaining events must not be lost
                    logger.exception("event of the transfer engine was not acted on: %s", event)
        return actions

    def _event(self, now: float, event: Event) -> Sequence[Action]:
        reason = str(event.error) if event.error is not None else ""
        if event.kind is EventKind.COUNTERS_REACHED:
            request_id = self._counting.get(event.id)
            if request_id is None:
                return []
            pages = self._arrived[request_id] = self._counters[request_id][1]
            self._ledger.received_pages(pages)
            return self.decode.counter_reached(now, request_id)
        if event.kind in (EventKind.PEER_DOWN, EventKind.PEER_LEFT):
            peer = next((peer for peer, link in self._links.items() if link.engine_peer == event.id), None)
            why = f"its data links broke: {reason}" if event.error is not None else "its engine has left"
            return [] if peer is None else self.peers.drop(now, peer, why)
        ended = self.writes.ended(event.id)
        if ended is None:
            return []
        share, outgoing = ended
        if event.kind is EventKind.TRANSFER_DONE:
            before_end = outgoing.before_end(event)
            self._sent[share] = now - outgoing.opened, event.pages, event.nbytes
            self._ledger.pushed(event.pages, event.nbytes, len(outgoing.layers), before_end)
        else:
            self._ledger.pushed(event.pages, event.nbytes, 0, (0, 0, 0))
        return self.prefill.writes_ended(now, share, _WRITES_END[event.kind], event.quiesced, reason)

    def _name_of(self, peer: PeerId | None) -> PeerName:
        link = None if peer is None else self._links.get(peer)
        return PeerName("no peer yet", "-") if link is None else PeerName(link.name, link.lane)

    def _look_at_links(self) -> None:
        names = {
            link.engine_peer: PeerName(link.name, link.lane)
            for link in self._links.values()
            if link.engine_peer is not None
        }
        self.link_watch.look(names)

    def _progress(self, one: UnderWay) -> str:
        try:
            if one.side is Role.DECODE and one.request_id in self._counters:
                number, pages = self._counters[one.request_id]
                return f"{sum(self._engine.counter_values(number))} of {pages} pages have arrived"
            share = Share(one.transfer_id, one.share)
            if one.side is Role.PREFILL and share in self.writes.open:
                done = self._engine.progress(self.writes.open[share].number)
                return f"{done.pages_done} of {done.pages_posted} posted pages have arrived"
        except TransferError:
            pass  # the transfer has just ended
        return "no page yet"

    def _ended(self, now: float, ended: Ended) -> None:
        self._ledger.ended(ended)
        link = None if ended.peer is None else self._links.get(ended.peer)
        timing = self._timing(ended, "" if link is None else link.lane)
        if ended.outcome is Outcome.COMPLETED and link is not None:
            self._ledger.timed(timing)
        if ended.outcome is Outcome.COMPLETED and ended.prefix_tokens and self.decode.rank == 0:
            self._ledger.prefix_loaded(ended)
        if self._trace is not None:
            self._trace.ended(now, ended, "" if link is None else link.name, timing)
        self.transfer_over(ended, timing)
        if ended.outcome in (Outcome.COMPLETED, Outcome.RELEASED):
            return
        log_end(ended, None if link is None else PeerName(link.name, link.lane))
        if ended.side is Role.DECODE and ended.reason and ended.outcome is not Outcome.STALE:
            self.load_failed(ended.transfer_id, ended.reason)

    def _timing(self, ended: Ended, lane: str) -> Timing:
        if ended.side is Role.DECODE:
            return Timing(ended.side, lane, ended.seconds, pages=self._arrived.pop(ended.request_id, 0))
        unsent = ended.seconds, 0, 0
        opened, pages, nbytes = self._sent.pop(Share(ended.transfer_id, ended.share), unsent)
        return Timing(ended.side, lane, ended.seconds, max(0.0, ended.seconds - opened), nbytes, pages)
