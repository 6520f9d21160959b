"""Landing: a worker's side of the weights protocol, without I/O.

It decides who may write, which version lands, and when it is discarded. A version lands in three steps. Each
sender sends BEGIN. When all have, the worker opens one counter that only they can raise, and sends it to
them. When it has counted all their pages, the version has landed, and can be applied as often as needed. If a
sender is lost before, the version is discarded, and every sender's link ends: no late write can then land in
the room of the next version.

With ``streaming`` there is room for two rounds of a version only. The version is ready when all senders have
sent BEGIN. When it is taken, the first rounds open. Each further round opens when the previous one in its
room was applied. If a sender is lost meanwhile, the model is torn, and the next version repairs it.

Beside a trainer's run there may be the run of an engine that seeds this one. A trainer has precedence: its
version comes next if it begins during a seed, and a seed is refused if a trainer has begun before it. If this
engine seeds others, its landed version is lent to them, and nothing is written there until its return.

The engine's controller holds a landed version at all workers before one of them takes it. The workers have
different senders, and would leave the version for the next one at different times.
"""

from __future__ import annotations

import enum
import logging
import math
from dataclasses import dataclass, field

from kv_connector.protocol.actions import Source
from kv_connector.protocol.wire.messages import clip
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.mapping.geometry import digest
from kv_connector.weights.wire.messages import (
    NOT_DESCRIBED,
    PROTOCOL,
    REASON_S,
    RETRY_LATER,
    Applied,
    Ask,
    Begin,
    Begun,
    Describe,
    Described,
    Dropped,
    Hold,
    Join,
    Joined,
    Leave,
    Ping,
    Pong,
    Ready,
    Refused,
    Release,
    Seed,
    State,
    WeightMessage,
)
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
    Peer,
    Record,
)

_BUSY = f"the worker is busy with another checkpoint: {RETRY_LATER}"


class LandingPhase(enum.Enum):
    EMPTY = "empty"
    BEGINNING = "beginning"  # some senders have not sent BEGIN
    LANDING = "landing"
    READY = "ready"  # can be taken
    APPLYING = "applying"


@dataclass
class _Sender:
    source: Source
    run: str
    rank: int
    name: str
    last_seen: float
    seeds: bool = False
    peer: Peer | None = None  # None: its offer is being accepted
    begin: Begin | None = None
    following: Begin | None = None  # sent before the previous version has ended
    broken: str = ""  # why the transfer engine's link to it broke
    reason_due: float = math.inf  # if it has not sent the reason by then, it is lost with that one


@dataclass
class _Holder:
    """The engine's controller, while it holds the landed version."""

    source: Source
    last_seen: float


@dataclass
class Landing:
    """The state machine of one worker. Every method but state() returns the actions to take, in order.
    ``dead``: seconds of silence after which a sender is lost."""

    dead: float
    slots: int = 0
    """Rounds that have room. 0: whole versions have room, and land while the engine serves."""
    arena_bytes: int = 0
    """Bytes of a version, as recorded. 0: no checkpoint is recorded."""
    served: str = ""
    phase: LandingPhase = LandingPhase.EMPTY
    _rounds: int = 1
    _torn: bool = False
    _version: str = ""
    _run: str = ""  # run of the version's senders
    _problem: str = ""
    _holder: _Holder | None = None
    _lent: dict[str, str] = field(default_factory=dict)  # the engine that the version is lent to, by run
    _digest: bytes = b""  # of the recorded tensors
    _recording: list[Source] = field(default_factory=list)
    _looked_at: bytes = b""  # digest of the tensors that are being recorded
    _senders: dict[Source, _Sender] = field(default_factory=dict)
    _fencing: set[Peer] = field(default_factory=set)
    _opening: set[int] = field(default_factory=set)  # rounds
    _counting: set[int] = field(default_factory=set)
    _answer: Described | None = None

    def state(self) -> State:
        return State(
            self.served,
            landing=self._version if self.phase in (LandingPhase.BEGINNING, LandingPhase.LANDING) else "",
            landed=self._version if self.phase in (LandingPhase.READY, LandingPhase.APPLYING) else "",
            senders=len(self._senders),
            arena_bytes=self.arena_bytes,
            problem=self._problem,
            torn=self._torn,
            seeding=", ".join(self._lent.values())[:1024],
        )

    def has_recorded(self, digest: bytes) -> bool:
        """Returns whether the tensors of this digest are recorded."""
        return bool(digest) and digest == self._digest

    def next_deadline(self) -> float | None:
        due = [min(one.last_seen + self.dead, one.reason_due) for one in self._senders.values()]
        due += [] if self._holder is None else [self._holder.last_seen + self.dead]
        return min(due, default=None)

    # --- Messages

    def receive(self, now: float, source: Source, message: WeightMessage) -> list[Action]:
        sender = self._senders.get(source)
        if sender is not None:
            sender.last_seen = now
        if self._holder is not None and source == self._holder.source:
            self._holder.last_seen = now
        match message:
            case Ping():
                gone = message.sender and sender is None
                return [LandingReply(source, Leave("this worker has no such sender") if gone else Pong())]
            case Ask():
                return [LandingReply(source, self.state())]
            case Hold():
                return self._hold(now, source, message)
            case Release():
                return self._release(source)
            case Describe():
                return self._describe(source, message)
            case Join():
                return self._join(now, source, message)
            case Begin() if sender is not None:
                return self._begin(sender, message)
            case Leave() if sender is not None:
                return self._lose(sender, message.reason or "it has left")
            case Leave():
                return []
        return [LandingReply(source, Refused(f"this worker does not expect {type(message).__name__} here"))]

    def lost(self, source: Source, reason: str) -> list[Action]:
        """The connection has ended."""
        sender = self._senders.get(source)
        lost = [] if sender is None else self._lose(sender, reason)
        return [*lost, *self._lose_holder(source, reason)]

    def peer_lost(self, now: float, peer: Peer, reason: str) -> None:
        """The transfer engine's link to the peer broke. The sender is lost once it has sent its own reason,
        or has had the time to."""
        for sender in self._senders.values():
            if sender.peer == peer:
                sender.broken, sender.reason_due = reason, now + REASON_S

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        silent = f"it was silent for {self.dead:g} s"
        if self._holder is not None and now - self._holder.last_seen >= self.dead:
            actions += self._lose_holder(self._holder.source, silent)
        for sender in list(self._senders.values()):
            if self._senders.get(sender.source) is not sender:
                continue  # lost with the sender before it
            if now >= sender.reason_due:
                actions += self._lose_with_notice(sender, sender.broken)
            elif now - sender.last_seen >= self.dead:
                actions += self._lose(sender, silent)
        return actions

    # --- What would be loaded

    def _describe(self, source: Source, message: Describe) -> list[Action]:
        if message.protocol != PROTOCOL:
            theirs = f"the trainer uses version {message.protocol} of the weights protocol, this worker"
            advice = f"version {PROTOCOL}: install the same release of kv-connector on both"
            return [LandingReply(source, Refused(f"{theirs} {advice}"))]
        wanted = digest(message.tensors)
        if self._answer is not None and wanted == self._digest:
            return [LandingReply(source, self._answer)]
        if self._recording and wanted == self._looked_at:
            self._recording.append(source)
            return []
        actions = self._lose_broken("")
        for sender in self._senders.values():
            return [*actions, LandingReply(source, Refused(_taken(sender)))]
        if self._lent:
            return [*actions, LandingReply(source, Refused(f"the worker {self._lends()}: {RETRY_LATER}"))]
        if self._recording or self._is_held() or self.phase is LandingPhase.APPLYING:
            return [*actions, LandingReply(source, Refused(_BUSY))]
        self._recording, self._looked_at = [source], wanted
        return [*actions, Record(message.tensors)]

    def recorded(self, digest: bytes, answer: Described, nbytes: int) -> list[Action]:
        self._digest, self._answer, self.arena_bytes = digest, answer, nbytes
        self._rounds = answer.geometry.rounds
        self.phase, self._version = LandingPhase.EMPTY, ""  # the arena was replaced
        return [LandingReply(source, answer) for source in self._asked()]

    def not_recorded(self, reason: str) -> list[Action]:
        """Recording failed. The previous recording is gone, too."""
        self._digest, self._answer, self.arena_bytes = b"", None, 0
        return [LandingReply(source, Refused(clip(reason))) for source in self._asked()]

    def _asked(self) -> list[Source]:
        asked, self._recording = self._recording, []
        return asked

    # --- Who may write

    def _join(self, now: float, source: Source, message: Join) -> list[Action]:
        if not self._digest or message.tensors != self._digest:
            return [LandingReply(source, Refused(NOT_DESCRIBED))]
        if self._recording:  # it replaces the arena
            return [LandingReply(source, Refused(_BUSY))]
        actions = self._lose_broken(message.run)
        if message.seeds and (refusal := self._not_seeded()):
            return [*actions, LandingReply(source, Refused(refusal))]
        for sender in list(self._senders.values()):
            if sender.run != message.run and sender.seeds == message.seeds:
                return [*actions, LandingReply(source, Refused(_taken(sender)))]
            if sender.run == message.run and sender.rank == message.rank:
                actions += self._lose(sender, "the same rank joined again")
        self._senders[source] = _Sender(source, message.run, message.rank, message.name, now, message.seeds)
        return [*actions, LandingAccept(source, message.name, message.offer)]

    def accepted(self, source: Source, peer: Peer, answer: Joined) -> list[Action]:
        sender = self._senders.get(source)
        if sender is None:
            self._fencing.add(peer)
            return [LandingFence(peer, "it has left meanwhile")]
        sender.peer = peer
        return [LandingReply(source, answer)]

    def not_accepted(self, source: Source, reason: str) -> list[Action]:
        self._senders.pop(source, None)
        return [LandingReply(source, Refused(clip(reason)))]

    def _not_seeded(self) -> str:
        """Returns the reason why another engine may not write here, or ""."""
        for sender in self._senders.values():
            if not sender.seeds and (begin := sender.following or sender.begin) is not None:
                return f"{sender.name} (run {sender.run}) has begun version {shown(begin.version)} here"
        return f"the worker {self._lends()} itself" if self._lent else ""

    def _lose_broken(self, run: str) -> list[Action]:
        """Loses the senders of other runs whose link broke: they keep no trainer out."""
        actions: list[Action] = []
        for sender in list(self._senders.values()):
            if sender.broken and sender.run != run and self._senders.get(sender.source) is sender:
                actions += self._lose_with_notice(sender, sender.broken)
        return actions

    def _lose_with_notice(self, sender: _Sender, reason: str) -> list[Action]:
        return [LandingReply(sender.source, Leave(clip(reason))), *self._lose(sender, reason)]

    def fenced(self, peer: Peer) -> list[Action]:
        self._fencing.discard(peer)
        return self._open()

    # --- A version

    def _begin(self, sender: _Sender, begin: Begin) -> list[Action]:
        actions: list[Action] = []
        if sender.seeds:
            if refusal := self._not_seeded():
                return self._lose_with_notice(sender, refusal)
        else:
            for seeder in list(self._senders.values()):
                if seeder.seeds and seeder.begin is None and seeder.source in self._senders:
                    actions += self._lose_with_notice(
                        seeder, f"{sender.name} begins version {shown(begin.version)}"
                    )
        return actions + self._begin_or_wait(sender, begin)

    def _begin_or_wait(self, sender: _Sender, begin: Begin) -> list[Action]:
        another = self.phase is LandingPhase.BEGINNING and sender.run != self._run
        if another or self.phase in (LandingPhase.LANDING, LandingPhase.READY, LandingPhase.APPLYING):
            first = not any(one.following for one in self._senders.values())
            sender.following = begin
            if self._lent and first:
                return [
                    LandingLog(
                        logging.INFO, f"version {shown(begin.version)} waits: the worker {self._lends()}"
                    )
                ]
            return self._follow()
        if self.phase is LandingPhase.EMPTY:
            self.phase, self._version, self._run = LandingPhase.BEGINNING, begin.version, sender.run
            for other in self._begun():
                other.begin = None  # of the previous version
        sender.begin = begin
        begun = [other.begin for other in self._senders.values() if other.begin is not None]
        if len({(b.version, b.plan, b.senders) for b in begun}) > 1:
            said = ", ".join(sorted({f"version {shown(b.version)} of {b.senders} senders" for b in begun}))
            return self._drop(f"the senders announced different versions or plans: {said}")
        if len(begin.pages) != self._rounds:
            return self._drop(f"a sender announced {len(begin.pages)} rounds of {self._rounds} expected")
        if len(begun) < begin.senders:
            return []
        if (nbytes := sum(b.nbytes for b in begun)) != self.arena_bytes:
            return self._drop(f"the senders announced {nbytes} bytes of {self.arena_bytes} expected")
        return self._open()

    def _follow(self) -> list[Action]:
        """Goes on to the next version if this one was applied, or if all its senders go on to the next.

        A version that lands, is held or is being applied is not left. A landed seed is not left either, as
        long as its sender is connected.
        """
        following = [(s, s.following) for s in self._senders.values() if s.following is not None]
        if self.phase not in (LandingPhase.EMPTY, LandingPhase.READY) or not following:
            return []
        if self._lent or self._is_held():
            return []
        wanted = self.phase is LandingPhase.READY and self.served != self._version
        others = [s for s in self._senders.values() if s.run == self._run != following[0][0].run]
        if wanted and (others or len(following) < following[0][1].senders):
            return []
        self.phase = LandingPhase.EMPTY
        actions: list[Action] = []
        for sender, begin in following:
            sender.following = None
            if sender.source in self._senders:  # else it was discarded with the senders before it
                actions += self._begin_or_wait(sender, begin)
        return actions

    def _open(self) -> list[Action]:
        begun = [sender.begin for sender in self._begun() if sender.begin is not None]
        if self.phase is not LandingPhase.BEGINNING or self._opening or not begun or self._fencing:
            return []
        if len(begun) < begun[0].senders:
            return []
        return self._ready() if self.slots else self._open_round(0)

    def _ready(self) -> list[Action]:
        self.phase = LandingPhase.READY
        return [LandingReply(sender.source, Ready(self._version)) for sender in self._begun()]

    def _begun(self) -> list[_Sender]:
        return [sender for sender in self._senders.values() if sender.begin is not None]

    def _open_round(self, round: int) -> list[Action]:
        begun = self._begun()
        pages = sum(sender.begin.pages[round] for sender in begun if sender.begin is not None)
        self._opening.add(round)
        return [LandingOpenCounter(tuple(s.peer for s in begun if s.peer is not None), pages, round)]

    def opened(self, immediate: int, round: int = 0) -> list[Action]:
        if round not in self._opening:
            return [LandingCloseCounter(round)]  # discarded meanwhile
        self._opening.discard(round)
        self._counting.add(round)
        if self.phase is LandingPhase.BEGINNING:
            self.phase = LandingPhase.LANDING
        begun = Begun(self._version, immediate, round)
        return [LandingReply(sender.source, begun) for sender in self._begun()]

    def not_opened(self, reason: str) -> list[Action]:
        return self._drop(reason)

    def reached(self, round: int = 0) -> list[Action]:
        self._counting.discard(round)
        if self.slots:
            return [LandingCloseCounter(round), HandOver(round)]
        return [LandingCloseCounter(round), *self._ready(), *self._follow()]

    def _lose(self, sender: _Sender, reason: str) -> list[Action]:
        del self._senders[sender.source]
        said = f"rank {sender.rank} of run {sender.run} ({sender.name}): {reason}"
        actions: list[Action] = [LandingLog(logging.INFO, f"lost a sender of weights: {said}")]
        actions += self._fence(sender, reason)
        unfinished = self.slots and self.phase in (LandingPhase.READY, LandingPhase.APPLYING)
        if sender.run == self._run and (
            unfinished or self.phase in (LandingPhase.BEGINNING, LandingPhase.LANDING)
        ):
            return actions + self._drop(said)
        # A trainer's version may wait for a landed seed whose sender is gone now.
        return actions + self._follow()

    def _drop(self, reason: str) -> list[Action]:
        """Discards the version and ends every link of its run. The remaining senders have to join again."""
        actions: list[Action] = [
            LandingLog(logging.WARNING, f"discarded version {shown(self._version)} of the weights: {reason}")
        ]
        actions += [LandingCloseCounter(round) for round in sorted(self._opening | self._counting)]
        for sender in [sender for sender in self._senders.values() if sender.run == self._run]:
            del self._senders[sender.source]
            actions.append(LandingReply(sender.source, Dropped(self._version, clip(reason))))
            actions += self._fence(sender, "the version was discarded")
        for done in (self._opening, self._counting):
            done.clear()
        self._problem = reason[:1024]
        if self.phase is LandingPhase.APPLYING:
            actions.append(GiveUp(reason))  # the taker reads what has arrived, until applied()
        else:
            self.phase, self._version = LandingPhase.EMPTY, ""
        return [*actions, *self._follow()]

    def _fence(self, sender: _Sender, reason: str) -> list[Action]:
        if sender.peer is None:
            return []  # accepted() fences it
        self._fencing.add(sender.peer)
        return [LandingFence(sender.peer, reason)]

    # --- Applying

    def take(self, version: str) -> list[Action]:
        """Takes the version to apply it, in all its rounds. Nothing else may land until applied()."""
        if self.phase is LandingPhase.READY and self._version == version and not self._recording:
            self.phase = LandingPhase.APPLYING
            if not self.slots:
                return [HandOver(round) for round in range(self._rounds)]
            return [
                action for round in range(min(self.slots, self._rounds)) for action in self._open_round(round)
            ]
        return [GiveUp(f"version {shown(version)} has not landed: {self._here()}")]

    def _here(self) -> str:
        here = (
            f"version {shown(self._version)} is {self.phase.value}" if self._version else "no version is here"
        )
        return f"{here} ({self._problem})" if self._problem else here

    def released(self, round: int) -> list[Action]:
        """The round has been read. Its room is free for the next round."""
        following = round + self.slots
        if not self.slots or not self._begun() or following >= self._rounds:
            return []
        return self._open_round(following)

    def applied(self, problem: str, *, torn: bool = False) -> list[Action]:
        """The taken version is served, or not. One that has landed whole may be tried again.
        ``torn``: the model has a part of it."""
        if self.phase is not LandingPhase.APPLYING:
            return []  # take() gave up
        version, actions = self._version, list[Action]()
        if problem:
            self._torn = self._torn or torn
            what = f"version {shown(version)} of the weights was not applied: {problem}"
            actions.append(LandingLog(logging.ERROR, what))
        else:
            self.served, self._torn = version, False
            actions += [LandingReply(sender.source, Applied(version)) for sender in self._begun()]
        self.phase, self._problem = LandingPhase.READY, problem[:1024]
        if self.slots and problem and self._begun():
            actions += self._drop(problem)
        elif self.slots:
            self.phase, self._version = LandingPhase.EMPTY, ""
        return [*actions, *self._follow()]

    # --- Holding

    def _hold(self, now: float, source: Source, hold: Hold) -> list[Action]:
        if self.phase is not LandingPhase.READY or self._version != hold.version:
            return [LandingReply(source, Refused(clip(self._here())))]
        if self._recording:
            return [LandingReply(source, Refused("the worker is busy with another checkpoint"))]
        self._holder = _Holder(source, now)
        return [LandingReply(source, self.state())]

    def _release(self, source: Source) -> list[Action]:
        if self._holder is None or self._holder.source != source:
            return []
        self._holder = None
        return self._follow()

    def _lose_holder(self, source: Source, reason: str) -> list[Action]:
        if self._holder is None or self._holder.source != source:
            return []
        what = f"the controller no longer holds version {shown(self._version)} of the weights: {reason}"
        return [LandingLog(logging.WARNING, what), *self._release(source)]

    def _is_held(self) -> bool:
        """Returns whether the version is held. Rounds that were applied are gone, and cannot be held."""
        return self._holder is not None and self.phase is LandingPhase.READY

    # --- Lending

    def why_not_lent(self, version: str) -> str:
        """Returns the reason why this worker cannot write the version to another engine, or ""."""
        here = f"version {shown(self._version)} is {self.phase.value}" if self._version else "nothing is"
        following = [one.following.version for one in self._senders.values() if one.following is not None]
        reasons = {
            "it is in streaming mode, and keeps no copy of its weights": bool(self.slots),
            "it has weights of more than one version": self._torn,
            "it serves the weights that it was started with": not self.served,
            f"it serves version {shown(self.served)}, not {shown(version)}": self.served != version,
            f"in its arena, from which it would send, {here}": self.phase is not LandingPhase.READY
            or self._version != version,
            "it is busy with another checkpoint: retry later": bool(self._recording),
            "it is being seeded itself": any(one.seeds for one in self._senders.values()),
            f"version {shown(''.join(following[:1]))} is being pushed to it: retry later": bool(following),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def lend(self, seed: Seed, to: str) -> str:
        """Lends the version: nothing is written here until its return. Returns why it is not lent, or ""."""
        if refusal := self.why_not_lent(seed.version):
            return refusal
        self._lent[seed.run] = to
        return ""

    def returned(self, seed: Seed) -> list[Action]:
        """The version that was lent for this seed is returned."""
        del self._lent[seed.run]
        return self._follow()

    def _lends(self) -> str:
        return f"writes its weights to {', '.join(self._lent.values())}"


def _taken(sender: _Sender) -> str:
    return (
        f"{sender.name} (run {sender.run}) sends weights to this worker: end that run first, or {RETRY_LATER}"
    )
