"""CANCEL and RELEASE, in every phase."""

from __future__ import annotations

from prefill_setup import MOVING, OTHER, PEER, active, assert_over, message, pushed, sealed, states
from protocol_setup import (
    computed,
    every,
    only,
    prefill_request,
    reserve,
)

from kv_connector.protocol.actions import (
    CancelWrites,
    Ended,
    FinishedSending,
    Outcome,
    Reached,
    Seal,
    Share,
    State,
)
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.wire.messages import Cancel, CancelAck, Fail, FailCode, Release, Role


def test_cancel_stops_drains_and_is_acknowledged(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.cancel(0.0, PEER, Cancel("t", 1)) == [CancelWrites(Share("t"))]
    assert machine.cancel(0.0, PEER, Cancel("t", 1)) == []  # the answer will follow
    actions = machine.writes_ended(1.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert message(actions) == CancelAck("t", 1, drained=True)
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert every(actions, FinishedSending) == []
    assert only(machine.request_finished(2.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_cancel_of_a_finished_request_frees_it_when_drained(machine: PrefillMachine) -> None:
    sealed(machine)
    assert machine.cancel(0.0, PEER, Cancel("t", 1)) == [CancelWrites(Share("t"))]
    # The last page arrived before the cancellation.
    actions = machine.writes_ended(1.0, Share("t"), WritesEnd.DONE, True, "")
    assert message(actions) == CancelAck("t", 1, drained=True)
    assert only(actions, FinishedSending)
    assert_over(machine)


def test_undrained_cancel_is_acknowledged_as_undrained_and_so_is_its_repetition(
    machine: PrefillMachine,
) -> None:
    active(machine)
    machine.cancel(0.0, PEER, Cancel("t", 1))
    actions = machine.writes_ended(1.0, Share("t"), WritesEnd.CANCELLED, False, "")
    assert message(actions) == CancelAck("t", 1, drained=False)
    assert message(machine.cancel(1.0, PEER, Cancel("t", 1))) == CancelAck("t", 1, drained=False)
    machine.request_finished(1.0, "t", True, "")
    assert message(machine.cancel(1.0, PEER, Cancel("t", 1))) == CancelAck("t", 1, drained=False)
    assert message(machine.cancel(1.0, PEER, Cancel("t", 2))) == CancelAck("t", 2, drained=True)


def test_cancel_before_anything_was_written_is_acknowledged_at_once(machine: PrefillMachine) -> None:
    machine.reserve(0.0, PEER, reserve())
    assert message(machine.cancel(0.0, PEER, Cancel("t", 1))) == CancelAck("t", 1, drained=True)
    assert_over(machine)
    machine.expect(0.0, prefill_request())
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_an_unknown_cancel_keeps_its_late_reserve_from_starting_anything(machine: PrefillMachine) -> None:
    assert message(machine.cancel(0.0, PEER, Cancel("t", 1))) == CancelAck("t", 1, drained=True)
    assert machine.reserve(0.0, PEER, reserve()) == []
    machine.expect(0.0, prefill_request())
    assert machine.pages_computed(0.0, computed((1, 2, 3))) == []
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_cancel_that_overtakes_reserve_frees_a_waiting_request(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2, 3)))
    machine.request_finished(0.0, "t", True, "")
    actions = machine.cancel(0.0, PEER, Cancel("t", 1))
    assert message(actions) == CancelAck("t", 1, drained=True)
    assert only(actions, FinishedSending)
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert_over(machine)


def test_cancel_of_another_attempt_leaves_the_transfer_alone(machine: PrefillMachine) -> None:
    active(machine)
    assert message(machine.cancel(0.0, PEER, Cancel("t", 2))) == CancelAck("t", 2, drained=True)
    assert message(machine.cancel(0.0, OTHER, Cancel("t", 1))) == CancelAck("t", 1, drained=True)
    machine.pages_computed(0.0, computed((3,), first=2))
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]


def test_cancel_while_an_abort_drains_is_answered_by_its_fail(machine: PrefillMachine) -> None:
    active(machine)
    machine.request_finished(0.0, "t", False, "x")
    assert machine.cancel(0.0, PEER, Cancel("t", 1)) == []
    assert isinstance(message(machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "")), Fail)


def test_release_frees_the_request_when_it_finishes(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    actions = machine.release(0.0, PEER, Release("t"))
    assert only(actions, Ended).outcome is Outcome.RELEASED
    # An adapter that reads states learns that decode has answered.
    assert states(actions) == [("p-t", State.MOVING)]
    assert machine.pages_computed(0.0, computed((1, 2, 3))) == []
    # It ends as DONE, as if decode had received pages: everything that decode wanted has arrived.
    done = Reached(Role.PREFILL, "t", "p-t", State.DONE)
    assert machine.request_finished(0.0, "t", True, "") == [done, FinishedSending("p-t")]
    assert_over(machine)


def test_release_of_a_finished_request_frees_it_at_once(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.request_finished(0.0, "t", True, "")
    assert only(machine.release(0.0, PEER, Release("t")), FinishedSending)
    assert_over(machine)


def test_release_may_come_before_the_request(machine: PrefillMachine) -> None:
    assert only(machine.release(0.0, PEER, Release("t")), Ended).outcome is Outcome.RELEASED
    assert machine.release(0.0, PEER, Release("t")) == []
    assert machine.expect(0.0, prefill_request()) == MOVING
    fail = message(machine.reserve(0.0, PEER, reserve()))
    assert isinstance(fail, Fail)
    # A router has disowned the transfer of a client that left, which is no failure for decode.
    assert fail.code is FailCode.PREFILL_ABORTED
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_reserve_outranks_release(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.release(0.0, OTHER, Release("t")) == []
    assert pushed(machine.pages_computed(0.0, computed((3,), first=2))) == {3: 13}
