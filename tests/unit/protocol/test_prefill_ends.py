"""A prompt that is aborted, that fails, or whose pages cannot be written."""

from __future__ import annotations

import pytest
from prefill_setup import PEER, active, assert_over, message, sealed
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
    Share,
)
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.wire.messages import Cancel, Fail, FailCode


def test_abort_stops_the_writes_and_notifies_decode_once_they_have_drained(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.request_finished(0.0, "t", False, "client left", aborted=True) == [
        CancelWrites(Share("t"))
    ]
    assert machine.pages_computed(0.0, computed((3,), first=2)) == []
    actions = machine.writes_ended(1.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert message(actions) == Fail("t", 1, FailCode.PREFILL_ABORTED, "client left", quiesced=True)
    assert only(actions, FinishedSending).request_id == "p-t"
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert_over(machine)


def test_abort_whose_bytes_may_still_land_is_reported_as_not_quiesced(machine: PrefillMachine) -> None:
    active(machine)
    machine.request_finished(0.0, "t", False, "", aborted=True)
    fail = message(machine.writes_ended(1.0, Share("t"), WritesEnd.CANCELLED, False, ""))
    assert isinstance(fail, Fail)
    assert not fail.quiesced


def test_an_abort_before_anything_was_written_ends_at_once(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve())
    actions = machine.request_finished(0.0, "t", False, "client left", aborted=True)
    assert message(actions) == Fail("t", 1, FailCode.PREFILL_ABORTED, "client left", quiesced=True)
    assert only(actions, FinishedSending)
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert_over(machine)


def test_an_abort_before_reserve_answers_the_late_reserve(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    actions = machine.request_finished(0.0, "t", False, "client left", aborted=True)
    assert only(actions, FinishedSending)
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert_over(machine)
    fail = message(machine.reserve(1.0, PEER, reserve()))
    assert fail == Fail("t", 1, FailCode.PREFILL_ABORTED, "client left", quiesced=True)
    assert_over(machine)


def test_an_abort_of_a_request_that_was_never_scheduled_reaches_decode(machine: PrefillMachine) -> None:
    actions = machine.request_finished(0.0, "t", False, "rejected", aborted=True)
    assert every(actions, FinishedSending) == []
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert message(machine.reserve(1.0, PEER, reserve())).code is FailCode.PREFILL_ABORTED  # type: ignore[attr-defined]
    machine.reserve(1.0, PEER, reserve(transfer="u"))
    actions = machine.request_finished(2.0, "u", False, "rejected", aborted=True)
    assert message(actions).code is FailCode.PREFILL_ABORTED  # type: ignore[attr-defined]
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert_over(machine)


@pytest.mark.parametrize("reserved", [False, True])
def test_a_prompt_that_ends_in_an_error_fails_its_transfer(machine: PrefillMachine, reserved: bool) -> None:
    """Nothing was aborted, so decode has to count a failure, too."""
    machine.expect(0.0, prefill_request())
    if reserved:
        machine.reserve(0.0, PEER, reserve())
    actions = machine.request_finished(0.0, "t", False, "FINISHED_ERROR")
    assert only(actions, Ended).outcome is Outcome.FAILED
    if not reserved:
        actions = machine.reserve(1.0, PEER, reserve())
    assert message(actions) == Fail("t", 1, FailCode.WRITE_ERROR, "FINISHED_ERROR", quiesced=True)
    assert_over(machine)


@pytest.mark.parametrize("later", [True, False])
def test_an_abort_that_decode_sends_first_is_counted_once(machine: PrefillMachine, later: bool) -> None:
    """The client leaves both engines. P's abort follows decode's, or is lost with its request."""
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve())
    assert only(machine.cancel(0.0, PEER, Cancel("t", 1)), Ended).outcome is Outcome.CANCELLED
    actions = machine.request_finished(0.0, "t", not later, "client left", aborted=later)
    assert every(actions, Ended) == []
    assert only(actions, FinishedSending)
    assert_over(machine)


def test_pages_that_were_never_computed_fail_the_transfer(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.request_finished(0.0, "t", True, "") == [CancelWrites(Share("t"))]
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "")
    fail = message(actions)
    assert isinstance(fail, Fail)
    assert fail.code is FailCode.WRITE_ERROR
    assert fail.message.startswith("1 of the pages that the decode engine requested were never computed")
    assert only(actions, FinishedSending)
    assert_over(machine)


def test_failed_write_fails_the_transfer_and_the_request_is_reported_at_its_end(
    machine: PrefillMachine,
) -> None:
    active(machine)
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.FAILED, False, "PEER_DOWN over tcp")
    assert message(actions) == Fail("t", 1, FailCode.WRITE_ERROR, "PEER_DOWN over tcp", quiesced=False)
    assert every(actions, FinishedSending) == []
    assert machine.pages_computed(0.0, computed((3,), first=2)) == []
    assert only(machine.request_finished(1.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_a_failed_write_after_the_end_reports_at_once(machine: PrefillMachine) -> None:
    sealed(machine)
    assert only(machine.writes_ended(0.0, Share("t"), WritesEnd.FAILED, True, "x"), FinishedSending)
    assert_over(machine)


def test_a_push_that_the_engine_refuses_fails_the_transfer(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.push_failed(0.0, Share("t"), "OUT_OF_RANGE in arm") == [CancelWrites(Share("t"))]
    fail = message(machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, ""))
    assert fail == Fail("t", 1, FailCode.WRITE_ERROR, "OUT_OF_RANGE in arm", quiesced=True)


def test_a_wrong_number_of_groups_fails_the_transfer(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.pages_computed(0.0, computed((3,), first=2, more=[(5,)])) == [CancelWrites(Share("t"))]


def test_finished_request_is_reported_once(machine: PrefillMachine) -> None:
    active(machine)
    machine.request_finished(0.0, "t", False, "")
    assert machine.request_finished(0.0, "t", False, "") == []
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert only(actions, FinishedSending)
    assert machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "") == []
    assert machine.request_finished(0.0, "t", True, "") == []


def test_long_reasons_are_cut_to_what_a_message_carries(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve())
    fail = message(machine.request_finished(0.0, "t", False, "x" * 5000))
    assert isinstance(fail, Fail)
    assert len(fail.message) == 1024
