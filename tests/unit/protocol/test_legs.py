"""The phases of a decode engine's transfers and legs: only the legal transitions are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from protocol_setup import P_ADDRESS, all_of, decode_request, layout, worker

from kv_connector.protocol.actions import OpenCounter
from kv_connector.protocol.decode.decode_machine import ABORT_LAG_S, DecodeMachine
from kv_connector.protocol.decode.legs import LEG_NEXT, NEXT, Leg, LegPhase, Phase, Reception
from kv_connector.protocol.plans.sources import Draw
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import CancelAck, Fail, FailCode, Sampled

PEER = 1
PAGES = layout(num_blocks=32)
TIMES = Timeouts()


# --- The tables


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("after", Phase)
def test_a_transfer_takes_legal_transitions_alone(before: Phase, after: Phase) -> None:
    transfer = Reception(decode_request(), 1, 0.0, before)
    if after in NEXT[before]:
        transfer.enter(after)
        assert transfer.phase is after
    else:
        with pytest.raises(AssertionError, match="transfer t"):
            transfer.enter(after)
        assert transfer.phase is before


@pytest.mark.parametrize("before", LegPhase)
@pytest.mark.parametrize("after", LegPhase)
def test_a_leg_takes_legal_transitions_alone(before: LegPhase, after: LegPhase) -> None:
    leg = Leg(P_ADDRESS, Draw(0, 1, None, all_of(PAGES), PAGES), PEER, before)
    if after in LEG_NEXT[before]:
        leg.enter(after)
        assert leg.phase is after
    else:
        with pytest.raises(AssertionError, match=r"127\.0\.0\.1:5600"):
            leg.enter(after)
        assert leg.phase is before


def test_no_phase_comes_back_and_each_leads_to_the_end() -> None:
    """Both enumerations are in the order in which phases follow each other."""
    for phase, following in NEXT.items():
        assert all(later.value > phase.value for later in following)
        assert following or phase is Phase.OVER
    for leg, after in LEG_NEXT.items():
        assert all(later.value > leg.value for later in after)
        assert after or leg is LegPhase.STOPPED
    assert set(NEXT) == set(Phase)
    assert set(LEG_NEXT) == set(LegPhase)


# --- The machine: each event, in each phase that a transfer can be in


def looking() -> DecodeMachine:
    machine = DecodeMachine(PAGES, TIMES)
    machine.reserve(0.0, replace(decode_request(), wants_sampled=True))
    return machine


def staged() -> DecodeMachine:
    machine = looking()
    machine.engine_found(0.0, P_ADDRESS, (worker(PAGES),))
    return machine


def opening() -> DecodeMachine:
    """STAGED with a session: the counter is being opened."""
    machine = staged()
    assert isinstance(machine.peer_up(0.0, P_ADDRESS, PEER)[-1], OpenCounter)
    return machine


def reserved() -> DecodeMachine:
    machine = opening()
    machine.counter_opened(0.0, "d-t", 100)
    return machine


def landed() -> DecodeMachine:
    machine = reserved()
    machine.counter_reached(0.0, "d-t")
    return machine


def cancelling() -> DecodeMachine:
    """FAILING: the deadline has passed."""
    machine = reserved()
    machine.tick(TIMES.transfer)
    return machine


def fencing() -> DecodeMachine:
    """FAILING: the source is lost."""
    machine = reserved()
    machine.peer_down(0.0, PEER, "silent")
    return machine


def lingering() -> DecodeMachine:
    machine = reserved()
    machine.fail(0.0, PEER, Fail("t", 1, FailCode.PREFILL_ABORTED, "its client left", quiesced=True))
    return machine


def aborted() -> DecodeMachine:
    machine = reserved()
    machine.cancel(0.0, "d-t")
    return machine


def aborted_and_fencing() -> DecodeMachine:
    machine = aborted()
    machine.peer_down(0.0, PEER, "silent")
    return machine


WAYS: dict[Callable[[], DecodeMachine], tuple[Phase, LegPhase | None]] = {
    looking: (Phase.LOOKING, None),
    staged: (Phase.STAGED, LegPhase.STAGED),
    opening: (Phase.STAGED, LegPhase.STAGED),
    reserved: (Phase.RESERVED, LegPhase.RESERVED),
    landed: (Phase.LANDED, LegPhase.RESERVED),
    cancelling: (Phase.FAILING, LegPhase.CANCELLING),
    fencing: (Phase.FAILING, LegPhase.FENCING),
    lingering: (Phase.LINGERING, LegPhase.STOPPED),
    aborted: (Phase.ABORTED, LegPhase.CANCELLING),
    aborted_and_fencing: (Phase.ABORTED, LegPhase.FENCING),
}

# A time after every deadline of a transfer.
LATE = TIMES.transfer + TIMES.cancel + ABORT_LAG_S

EVENTS: dict[str, Callable[[DecodeMachine], object]] = {
    "abort": lambda machine: machine.cancel(0.0, "d-t"),
    "directory": lambda machine: machine.engine_found(0.0, P_ADDRESS, (worker(PAGES),)),
    "no-directory": lambda machine: machine.engine_not_found(0.0, P_ADDRESS, "nobody answers"),
    "session": lambda machine: machine.peer_up(0.0, P_ADDRESS, PEER + 1),
    "no-session": lambda machine: machine.dial_failed(0.0, P_ADDRESS, "nobody answers"),
    "lost": lambda machine: machine.peer_down(0.0, PEER, "silent"),
    "fenced": lambda machine: machine.fenced(0.0, PEER),
    "no-counter": lambda machine: machine.counter_failed(0.0, "d-t", "none is free"),
    "sampled": lambda machine: machine.sampled(0.0, PEER, Sampled("t", 1, 7)),
    "not-sampled": lambda machine: machine.sampled(0.0, PEER, Sampled("t", 1, None)),
    "drained": lambda machine: machine.cancel_ack(0.0, PEER, CancelAck("t", 1, drained=True)),
    "not-drained": lambda machine: machine.cancel_ack(0.0, PEER, CancelAck("t", 1, drained=False)),
    "late": lambda machine: machine.tick(LATE),
    "close": lambda machine: machine.close(0.0),
    **{
        f"{code.value}-{quiesced}": lambda machine, code=code, quiesced=quiesced: machine.fail(  # type: ignore[misc]
            0.0, PEER, Fail("t", 1, code, "reason", quiesced)
        )
        for code in FailCode
        for quiesced in (True, False)
    },
}
# The transfer engine opens a counter before RESERVE, and reports its end once.
OPENING = {"no-counter": EVENTS.pop("no-counter")}
COUNTING: dict[str, Callable[[DecodeMachine], object]] = {
    "every-page": lambda machine: machine.counter_reached(0.0, "d-t")
}


def possible() -> Iterator[tuple[Callable[[], DecodeMachine], str]]:
    for way, (phase, leg) in WAYS.items():
        counting = leg not in (None, LegPhase.STAGED) and phase is not Phase.LANDED
        for event in (*EVENTS, *(OPENING if way is opening else ()), *(COUNTING if counting else ())):
            yield way, event


def phases(machine: DecodeMachine) -> tuple[Phase, LegPhase | None]:
    transfer = machine._transfers.get("d-t")
    if transfer is None:
        return Phase.OVER, None
    return transfer.phase, transfer.legs[0].phase if transfer.legs else None


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_phase_is_reached(way: Callable[[], DecodeMachine]) -> None:
    assert phases(way()) == WAYS[way]


@pytest.mark.parametrize(("way", "event"), list(possible()))
def test_each_event_leads_to_a_legal_phase(way: Callable[[], DecodeMachine], event: str) -> None:
    machine = way()
    phase, leg = phases(machine)
    (EVENTS | OPENING | COUNTING)[event](machine)  # raises for an illegal transition
    after, leg_after = phases(machine)
    assert after.value >= phase.value
    # Pages may land until every leg has stopped, or all pages have arrived.
    if after is Phase.OVER and leg in (LegPhase.RESERVED, LegPhase.CANCELLING, LegPhase.FENCING):
        assert phase is Phase.LANDED or event in ("every-page", "drained", "fenced") or event.endswith("True")
    if phase in (Phase.FAILING, Phase.ABORTED) and after is phase:
        assert leg_after in (LegPhase.CANCELLING, LegPhase.FENCING)


@pytest.mark.parametrize("event", [*EVENTS, *OPENING, *COUNTING])
def test_no_event_wakes_a_transfer_that_is_over(event: str) -> None:
    machine = aborted()
    machine.counter_reached(0.0, "d-t")
    assert phases(machine)[0] is Phase.OVER
    (EVENTS | OPENING | COUNTING)[event](machine)
    assert len(machine) == 0
