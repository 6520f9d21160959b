"""A transfer from D's point of view: its phase, and a leg with each worker of P that sends some of its pages.

A transfer goes through these phases:

    phase      waits for                                         next
    LOOKING    the directory of the prefill engine               STAGED, FAILING, ABORTED, OVER
    STAGED     a session with each source, and the counter       RESERVED, FAILING, ABORTED
    RESERVED   pages, and for the token if its request wants it  CHECKING, LANDED, FAILING, ABORTED, OVER
    CHECKING   the sums of its pages: every page is here         LANDED, FAILING, ABORTED, OVER
    LANDED     the token alone: every page is here               ABORTED, OVER
    FAILING    every leg to stop: pages may still land           LINGERING, ABORTED, OVER
    LINGERING  the abort of D's request: P's was aborted         ABORTED, OVER
    ABORTED    every leg to stop: its request is aborted         OVER
    OVER       nothing: it is reported and forgotten             -

The arrival of all pages also ends a transfer in FAILING, LINGERING and ABORTED, because nothing can land
afterwards. If no RESERVE was sent, the legs stop at once, and FAILING and ABORTED take no time. CHECKING is
for transfers whose pages are verified (page_sums.py).

A leg goes through these phases:

    phase       meaning                                              next
    STAGED      no RESERVE is sent                                   RESERVED, STOPPED
    RESERVED    RESERVE is sent: pages may land from now on          CANCELLING, FENCING, STOPPED
    CANCELLING  CANCEL is sent: CANCEL_ACK or the last page is next  FENCING, STOPPED
    FENCING     the peer is being fenced: its writes may still land  STOPPED
    STOPPED     nothing of this peer can land any more               -
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from kv_connector.protocol.actions import (
    Address,
    CloseCounter,
    Dial,
    Ended,
    Fence,
    FindEngine,
    FinishedReceiving,
    Log,
    OpenCounter,
    Outcome,
    PagesChecked,
    PeerId,
    PrefixAnswered,
    PromptDue,
    Reached,
    Send,
    SumPages,
    UnderWay,
)
from kv_connector.protocol.page_sums import PageCheck
from kv_connector.protocol.plans.sources import Draw
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import Reserve, Role, Sampled

DecodeAction = (
    Send
    | Fence
    | Ended
    | Reached
    | Log
    | FindEngine
    | Dial
    | OpenCounter
    | CloseCounter
    | FinishedReceiving
    | PrefixAnswered
    | PromptDue
    | SumPages
    | PagesChecked
)
"""The actions of the decode machine."""


class LegPhase(enum.Enum):
    """The phases of a leg. The module's second table explains them."""

    STAGED = enum.auto()
    RESERVED = enum.auto()
    CANCELLING = enum.auto()
    FENCING = enum.auto()
    STOPPED = enum.auto()


LEG_NEXT = {
    LegPhase.STAGED: {LegPhase.RESERVED, LegPhase.STOPPED},
    LegPhase.RESERVED: {LegPhase.CANCELLING, LegPhase.FENCING, LegPhase.STOPPED},
    LegPhase.CANCELLING: {LegPhase.FENCING, LegPhase.STOPPED},
    LegPhase.FENCING: {LegPhase.STOPPED},
    LegPhase.STOPPED: set(),
}
"""The legal transitions of a leg."""


class Phase(enum.Enum):
    """The phases of a transfer. The module's first table explains them."""

    LOOKING = enum.auto()
    STAGED = enum.auto()
    RESERVED = enum.auto()
    CHECKING = enum.auto()
    LANDED = enum.auto()
    FAILING = enum.auto()
    LINGERING = enum.auto()
    ABORTED = enum.auto()
    OVER = enum.auto()


NEXT = {
    Phase.LOOKING: {Phase.STAGED, Phase.FAILING, Phase.ABORTED, Phase.OVER},
    Phase.STAGED: {Phase.RESERVED, Phase.FAILING, Phase.ABORTED},
    Phase.RESERVED: {Phase.CHECKING, Phase.LANDED, Phase.FAILING, Phase.ABORTED, Phase.OVER},
    Phase.CHECKING: {Phase.LANDED, Phase.FAILING, Phase.ABORTED, Phase.OVER},
    Phase.LANDED: {Phase.ABORTED, Phase.OVER},
    Phase.FAILING: {Phase.LINGERING, Phase.ABORTED, Phase.OVER},
    Phase.LINGERING: {Phase.ABORTED, Phase.OVER},
    Phase.ABORTED: {Phase.OVER},
    Phase.OVER: set(),
}
"""The legal transitions of a transfer."""


@dataclass
class Leg:
    """One source's part of a transfer."""

    address: Address
    draw: Draw
    peer: PeerId | None = None
    """The session with the source. None: STAGED, and there is no session yet."""
    phase: LegPhase = LegPhase.STAGED

    def enter(self, phase: LegPhase) -> None:
        """Changes the phase of a leg. No other code does."""
        assert phase in LEG_NEXT[self.phase], f"leg with {self.address}: {self.phase} -> {phase}"
        self.phase = phase


@dataclass
class Reception:
    """A request's transfer, from its reservation until it is reported."""

    request: DecodeRequest
    attempt: int
    deadline: float
    phase: Phase = Phase.LOOKING
    legs: tuple[Leg, ...] = ()
    since: float | None = None
    """When RESERVE was sent. None: it was not sent, and there is no counter."""
    check: PageCheck | None = None
    """The check of its pages. None: they are not checked."""
    said: Sampled | None = None
    """The first SAMPLED of a source."""
    outcome: Outcome = Outcome.FAILED
    """The outcome if the transfer is stopped, unless its request is aborted."""
    failure: str = ""
    """Why the transfer is being stopped, unless its request is aborted."""
    failed: PeerId | None = None
    """The source that caused the failure."""

    def enter(self, phase: Phase) -> None:
        """Changes the phase of a transfer. No other code does."""
        text = f"transfer {self.request.transfer_id}: {self.phase} -> {phase}"
        assert phase in NEXT[self.phase], text
        self.phase = phase

    def reserve(
        self, now: float, immediate: int, weights: str, summing: Collection[PeerId] | None
    ) -> list[DecodeAction]:
        """Enters RESERVED, and sends RESERVE to each source. ``summing``: the sources that can sum their
        pages. None: pages are not checked."""
        self.enter(Phase.RESERVED)
        self.since = now
        request, actions, draws = self.request, list[DecodeAction](), dict[PeerId, Draw]()
        for leg in self.legs:
            assert leg.peer is not None
            leg.enter(LegPhase.RESERVED)
            draws[leg.peer] = leg.draw
            reserve = Reserve(
                transfer_id=request.transfer_id,
                attempt=self.attempt,
                prompt_tokens=request.prompt_tokens,
                first_token=request.first_token,
                prompt_hash=request.prompt_hash,
                groups=request.groups,
                immediate=immediate,
                deadline_ms=max(0, round((self.deadline - now) * 1000)),
                share=leg.draw.share,
                shares=leg.draw.shares,
                wants_sampled=request.wants_sampled,
                wants_sums=summing is not None and leg.peer in summing,
                weights=weights,
            )
            actions.append(Send(leg.peer, reserve))
        if summing is not None:
            self.check = PageCheck.of(request, draws, summing)
        return actions

    def verifies_without(self, peer: PeerId) -> bool:
        """Whether its pages are being checked, and all sums of this source have arrived."""
        return self.phase is Phase.CHECKING and self.check is not None and not self.check.awaits(peer)

    def overdue(self, timeouts: Timeouts) -> tuple[str, PeerId | None]:
        """Returns why its deadline has passed, and the source that caused it, if it is one."""
        limit = self.request.limit(timeouts)
        if self.phase is not Phase.CHECKING or self.check is None:
            return f"not complete within {limit:g} s", None
        late = [leg for leg in self.legs if leg.peer is not None and self.check.awaits(leg.peer)]
        names = [f"the prefill engine at {leg.address}" for leg in late]
        if not self.check.summed_here:
            names.append("this engine")
        times = f"within {timeouts.check:g} s (timeout `check`), or {limit:g} s in all"
        why = f"NOT VERIFIED: its pages have arrived, but {' and '.join(names)} did not sum them {times}"
        return why, late[0].peer if self.check.summed_here else None

    @property
    def stopping(self) -> bool:
        """Whether its pages will not be used, unless all have arrived."""
        return self.phase in (Phase.FAILING, Phase.LINGERING, Phase.ABORTED)

    @property
    def stopped(self) -> bool:
        """Whether nothing of any source can land any more."""
        return all(leg.phase is LegPhase.STOPPED for leg in self.legs)

    def leg(self, peer: PeerId) -> Leg | None:
        """The leg with this source, if it has one."""
        return next((leg for leg in self.legs if leg.peer == peer), None)

    def ended(self, now: float, outcome: Outcome, reason: str) -> Ended:
        """Returns the report of the transfer's end. Its peer is the source that failed, or else the first."""
        first = self.legs[0].peer if self.legs else None
        return Ended(
            Role.DECODE,
            self.request.transfer_id,
            self.failed if self.failed is not None else first,
            outcome,
            reason,
            seconds=0.0 if self.since is None else now - self.since,
            request_id=self.request.request_id,
            prefix_tokens=self.request.prefix_tokens,
        )

    def under_way(self, timeouts: Timeouts) -> UnderWay:
        """The transfer as it is shown to operators: of several legs, one that is still in use."""
        legs = [(leg.peer, leg.phase) for leg in self.legs]
        in_use = (leg for leg in legs if leg[1] is not LegPhase.STOPPED)
        peer, phase = next(in_use, (*legs, (None, LegPhase.STAGED))[0])
        shown = self.phase if self.phase in (Phase.CHECKING, Phase.LANDED) else phase
        ids = self.request.transfer_id, self.request.request_id
        since = self.deadline - self.request.limit(timeouts)
        return UnderWay(Role.DECODE, *ids, peer, shown.name.lower(), since)
