"""Deadlines, and peers that disappear."""

from __future__ import annotations

import pytest
from prefill_setup import OTHER, PEER, TIMES, WANTS, active, assert_over, message, sealed
from protocol_setup import (
    computed,
    every,
    layout,
    only,
    prefill_request,
    reserve,
)

from kv_connector.protocol.actions import (
    CancelWrites,
    Ended,
    Fence,
    FinishedSending,
    Outcome,
    Push,
    Send,
    Share,
)
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.wire.messages import Cancel, Fail, FailCode

# --- Deadlines


def test_an_orphaned_reserve_fails_when_no_request_comes(machine: PrefillMachine) -> None:
    machine.reserve(0.0, PEER, reserve())
    assert machine.next_deadline() == TIMES.orphan
    assert machine.tick(TIMES.orphan - 0.1) == []
    fail = message(machine.tick(TIMES.orphan))
    assert isinstance(fail, Fail)
    assert (fail.code, fail.quiesced) == (FailCode.UNKNOWN_TRANSFER, True)
    assert_over(machine)
    machine.expect(TIMES.orphan, prefill_request())  # too late: freed as soon as it finishes
    assert only(machine.request_finished(TIMES.orphan, "t", True, ""), FinishedSending)


def test_an_orphan_waits_no_longer_than_its_own_deadline(machine: PrefillMachine) -> None:
    machine.reserve(0.0, PEER, reserve(deadline_ms=2000))
    assert machine.next_deadline() == 2.0


def test_finished_request_expires_when_no_decode_engine_requests_it(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2, 3)))
    assert machine.next_deadline() is None  # the engine owns the request while it computes
    machine.request_finished(10.0, "t", True, "")
    assert machine.tick(10.0 + TIMES.hold - 0.1) == []
    actions = machine.tick(10.0 + TIMES.hold)
    assert only(actions, FinishedSending)
    assert only(actions, Ended).outcome is Outcome.EXPIRED
    assert_over(machine)
    fail = message(machine.reserve(75.0, PEER, reserve()))
    assert isinstance(fail, Fail)
    assert (fail.code, fail.quiesced) == (FailCode.EXPIRED, True)


def test_pings_that_list_the_transfer_renew_the_hold(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.waiting(0.0, PEER, ("t",))
    assert machine.next_deadline() is None
    machine.request_finished(0.0, "t", True, "")
    for now in (50.0, 100.0, 150.0):
        machine.waiting(now, PEER, ("t", "unknown"))
        assert machine.tick(now + TIMES.hold - 0.1) == []
    assert only(machine.tick(150.0 + TIMES.hold), FinishedSending)


@pytest.mark.parametrize("finished_first", [True, False])
def test_a_prompt_is_not_held_long_for_a_decode_engine_that_died(
    machine: PrefillMachine, finished_first: bool
) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2, 3)))
    machine.waiting(0.0, PEER, ("t",))
    if finished_first:
        machine.request_finished(0.0, "t", True, "")
    machine.peer_down(10.0, PEER, "silent")
    if not finished_first:
        assert machine.next_deadline() is None
        machine.request_finished(10.0, "t", True, "")
    # A D that only lost its connection has reconnected and listed the transfer by then.
    assert machine.next_deadline() == 10.0 + TIMES.dead + TIMES.connect
    machine.admit(OTHER, layout(), WANTS, 1)
    machine.waiting(15.0, OTHER, ("t",))
    assert machine.next_deadline() == 15.0 + TIMES.hold


def test_a_reservation_that_is_not_served_in_time_ends(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(1.0, PEER, reserve(deadline_ms=2000))
    machine.pages_computed(1.0, computed((1,)))
    assert machine.tick(2.9) == []
    assert machine.tick(3.0) == [CancelWrites(Share("t"))]
    actions = machine.writes_ended(3.1, Share("t"), WritesEnd.CANCELLED, True, "")
    assert message(actions).code is FailCode.EXPIRED  # type: ignore[attr-defined]
    assert every(actions, FinishedSending) == []
    assert only(machine.request_finished(9.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_writes_that_do_not_drain_are_fenced(machine: PrefillMachine) -> None:
    active(machine)
    machine.cancel(1.0, PEER, Cancel("t", 1))
    assert machine.tick(1.0 + TIMES.drain - 0.1) == []
    assert only(machine.tick(1.0 + TIMES.drain), Fence).peer == PEER
    assert machine.tick(100.0) == []
    machine.peer_down(100.0, PEER, "fenced")
    assert every(machine.fenced(100.0, PEER), Send) == []
    assert only(machine.request_finished(100.0, "t", True, ""), FinishedSending)


# --- The peer disappears


def test_a_dead_peers_requests_are_reported_once_it_is_fenced(machine: PrefillMachine) -> None:
    sealed(machine)
    machine.expect(0.0, prefill_request("u"))
    machine.reserve(0.0, PEER, reserve(transfer="u"))
    machine.pages_computed(0.0, computed((4,), transfer="u"))
    machine.expect(0.0, prefill_request("other"))
    machine.reserve(0.0, OTHER, reserve(transfer="other"))
    assert machine.peer_down(1.0, PEER, "silent for 5 s") == []
    assert machine.pages_computed(1.0, computed((5,), first=1, transfer="u")) == []
    phases = {one.transfer_id: one.phase for one in machine.under_way()}
    assert phases == {"t": "fencing", "u": "fencing", "other": "active"}
    actions = machine.fenced(2.0, PEER)
    assert only(actions, FinishedSending).request_id == "p-t"
    assert [ended.outcome for ended in every(actions, Ended)] == [Outcome.FAILED] * 2
    assert every(actions, Send) == []  # the peer is gone
    assert only(machine.request_finished(3.0, "u", True, ""), FinishedSending).request_id == "p-u"
    assert len(machine) == 1  # the request of OTHER


def test_writes_that_end_before_the_fence_are_reported_then(machine: PrefillMachine) -> None:
    sealed(machine)
    machine.peer_down(0.0, PEER, "gone")
    assert only(machine.writes_ended(0.0, Share("t"), WritesEnd.FAILED, False, "PEER_DOWN"), FinishedSending)
    assert machine.fenced(0.0, PEER) == []
    assert_over(machine)


def test_a_dead_peers_orphan_is_forgotten(machine: PrefillMachine) -> None:
    machine.reserve(0.0, PEER, reserve())
    machine.peer_down(0.0, PEER, "gone")
    assert_over(machine)


def test_a_cancelled_transfer_of_a_dead_peer_ends_with_the_fence(machine: PrefillMachine) -> None:
    sealed(machine)
    machine.cancel(0.0, PEER, Cancel("t", 1))
    machine.peer_down(0.0, PEER, "gone")
    assert machine.next_deadline() is None
    actions = machine.fenced(0.0, PEER)
    assert only(actions, FinishedSending)
    assert every(actions, Send) == []
    assert_over(machine)


def test_pages_that_are_forgotten_are_computed_again_or_given_up(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request("running"))
    machine.pages_computed(0.0, computed((1, 2, 3), transfer="running"))
    machine.expect(0.0, prefill_request("finished"))
    machine.request_finished(0.0, "finished", True, "")
    actions = machine.forget_pages(1.0)
    assert only(actions, FinishedSending).request_id == prefill_request("finished").request_id
    assert every(machine.reserve(1.0, PEER, reserve(transfer="running")), Push) == []
    assert every(machine.pages_computed(1.0, computed((1, 2, 3), transfer="running")), Push) != []


def test_shutting_down_ends_every_reservation_and_takes_no_other(machine: PrefillMachine) -> None:
    active(machine)
    machine.expect(0.0, prefill_request("waiting"))
    machine.reserve(0.0, PEER, reserve(transfer="orphan"))
    actions = machine.close(0.0)
    assert CancelWrites(Share("t")) in actions
    assert message(actions) == Fail(
        "orphan", 1, FailCode.DRAINING, "the prefill engine is shutting down", quiesced=True
    )
    assert machine.reserve(0.0, PEER, reserve()) == [], "repeated: its writes are still in flight"
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert message(actions).code is FailCode.DRAINING  # type: ignore[attr-defined]
    assert every(actions, FinishedSending) == []
    assert message(machine.reserve(0.0, PEER, reserve(transfer="new"))).code is FailCode.DRAINING  # type: ignore[attr-defined]
    assert_over(machine)
