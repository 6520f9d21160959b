"""The state of a request of P's engine."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from prefill_setup import MOVING, PEER, TIMES, active, assert_over, message, sealed, states
from protocol_setup import (
    BLOCK,
    computed,
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
    Share,
    State,
)
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.wire.messages import Cancel, Fail, FailCode, Role


@pytest.mark.parametrize("first", ["request", "reserve"])
def test_a_request_moves_once_both_halves_are_here_and_is_done_with_its_report(
    machine: PrefillMachine, first: str
) -> None:
    halves = [lambda: machine.expect(0.0, prefill_request()), lambda: machine.reserve(0.0, PEER, reserve())]
    if first == "reserve":
        halves.reverse()
    assert halves[0]() == []
    assert halves[1]() == MOVING
    assert states(machine.pages_computed(0.0, computed((1, 2, 3)))) == []
    assert states(machine.request_finished(0.0, "t", True, "")) == []
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.DONE, True, "")
    assert states(actions) == [("p-t", State.DONE)]
    assert actions[-1] == FinishedSending("p-t")


def test_failure_is_reported_once_and_before_the_request_finishes(machine: PrefillMachine) -> None:
    active(machine)
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.FAILED, True, "PEER_DOWN over tcp")
    assert only(actions, Reached) == Reached(Role.PREFILL, "t", "p-t", State.FAILED, "PEER_DOWN over tcp")
    assert machine.request_finished(1.0, "t", True, "") == [FinishedSending("p-t")]


def test_prompt_without_tokens_takes_the_prefix_length_from_decode(machine: PrefillMachine) -> None:
    machine.expect(0.0, replace(prefill_request(prompt_hash=None), prompt_tokens=None))
    asked = msgspec.structs.replace(reserve(blocks=(12, 13), prompt_hash=None), first_token=BLOCK)
    (moving,) = machine.reserve(0.0, PEER, asked)
    assert moving == Reached(Role.PREFILL, "t", "p-t", State.MOVING, first_token=BLOCK)


def test_a_computed_prompt_is_given_up_while_it_is_sent(machine: PrefillMachine) -> None:
    sealed(machine)
    assert machine.request_finished(1.0, "t", True, "") == []
    aborted = machine.request_finished(1.0, "t", False, "its request was aborted", aborted=True)
    assert aborted == [CancelWrites(Share("t"))]
    actions = machine.writes_ended(2.0, Share("t"), WritesEnd.CANCELLED, True, "")
    failed = message(actions)
    assert isinstance(failed, Fail)
    assert failed.code is FailCode.PREFILL_ABORTED
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert states(actions) == [("p-t", State.FAILED)]
    assert actions[-1] == FinishedSending("p-t")
    assert_over(machine)


def test_cancelled_transfer_fails_only_after_its_writes_have_ended(machine: PrefillMachine) -> None:
    active(machine)
    assert states(machine.cancel(0.0, PEER, Cancel("t", 1))) == []
    assert states(machine.writes_ended(1.0, Share("t"), WritesEnd.CANCELLED, True, "")) == [
        ("p-t", State.FAILED)
    ]


def test_a_request_that_decode_gave_up_before_it_came_has_failed(machine: PrefillMachine) -> None:
    assert states(machine.cancel(0.0, PEER, Cancel("t", 1))) == []
    reached = only(machine.expect(1.0, prefill_request()), Reached)
    assert (reached.state, reached.reason) == (State.FAILED, "the decode engine cancelled the transfer")


def test_a_second_request_of_a_transfer_that_is_complete_has_failed(machine: PrefillMachine) -> None:
    sealed(machine)
    machine.writes_ended(0.0, Share("t"), WritesEnd.DONE, True, "")
    again = machine.expect(1.0, prefill_request(request="again"))
    assert states(again) == [("again", State.FAILED)]
    assert machine.request_finished(2.0, "t", True, "") == [FinishedSending("again")]


def test_reservation_without_a_local_request_has_no_state(machine: PrefillMachine) -> None:
    machine.reserve(0.0, PEER, reserve())
    assert states(machine.tick(TIMES.orphan)) == []
