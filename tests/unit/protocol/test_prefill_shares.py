"""Several workers of D want a share each of one prompt."""

from __future__ import annotations

from prefill_setup import OTHER, PEER, TIMES, assert_over, half, message, pushed, states
from protocol_setup import (
    computed,
    every,
    only,
    prefill_request,
    reserve,
)

from kv_connector.protocol.actions import (
    Ended,
    Fence,
    FinishedSending,
    Outcome,
    Push,
    Reached,
    Seal,
    Send,
    Share,
    State,
)
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.wire.messages import Cancel, CancelAck, Fail, FailCode, Release, Role

FIRST, SECOND = Share("t", 0), Share("t", 1)


def test_each_worker_of_decode_is_served_by_itself(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2)))
    assert pushed(machine.reserve(0.0, PEER, half(0))) == {1: 11, 2: 12}
    pushes = every(machine.pages_computed(0.0, computed((3,), first=2, base=2)), Push)
    assert [push.share for push in pushes] == [FIRST]
    assert pushed(machine.reserve(0.0, OTHER, half(1))) == {1: 21, 2: 22, 3: 23}
    assert machine.request_finished(0.0, "t", True, "") == [Seal(FIRST), Seal(SECOND)]
    actions = machine.writes_ended(1.0, SECOND, WritesEnd.DONE, True, "")
    words = "the transfer is complete"
    assert actions == [Ended(Role.PREFILL, "t", OTHER, Outcome.COMPLETED, words, 1.0, 1, "p-t")]
    actions = machine.writes_ended(2.0, FIRST, WritesEnd.DONE, True, "")
    assert actions[1:] == [Reached(Role.PREFILL, "t", "p-t", State.DONE), FinishedSending("p-t")]
    assert_over(machine)
    assert machine.reserve(3.0, OTHER, half(1)) == []


def test_a_worker_that_comes_late_is_waited_for(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2, 3)))
    machine.reserve(0.0, PEER, half(0))
    machine.request_finished(1.0, "t", True, "")
    assert every(machine.writes_ended(2.0, FIRST, WritesEnd.DONE, True, ""), FinishedSending) == []
    assert machine.next_deadline() == 1.0 + TIMES.hold
    actions = machine.tick(1.0 + TIMES.hold)
    assert (only(actions, Ended).outcome, only(actions, Ended).share) == (Outcome.EXPIRED, 1)
    assert states(actions) == [("p-t", State.FAILED)]
    assert only(actions, FinishedSending).request_id == "p-t"
    fail = message(machine.reserve(60.0, OTHER, half(1)))
    assert isinstance(fail, Fail)
    assert fail.code is FailCode.EXPIRED
    assert machine.reserve(60.0, PEER, half(0)) == [], "the first has all it asked for"
    assert_over(machine)


def test_a_worker_of_decode_that_fails_costs_the_others_nothing(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, half(0))
    machine.reserve(0.0, OTHER, half(1))
    machine.pages_computed(0.0, computed((1, 2)))
    assert machine.peer_down(1.0, PEER, "gone") == []
    assert only(machine.fenced(1.0, PEER), Ended).share == 0
    assert pushed(machine.pages_computed(2.0, computed((3,), first=2, base=2))) == {3: 23}
    assert machine.request_finished(2.0, "t", True, "") == [Seal(SECOND)]
    actions = machine.writes_ended(3.0, SECOND, WritesEnd.DONE, True, "")
    assert only(actions, Ended).outcome is Outcome.COMPLETED
    assert states(actions) == [("p-t", State.FAILED)], "not everybody has it"
    assert only(actions, FinishedSending).request_id == "p-t"
    assert_over(machine)


def test_workers_of_decode_may_come_before_the_request(machine: PrefillMachine) -> None:
    assert machine.reserve(0.0, OTHER, half(1)) == []
    assert machine.reserve(0.0, PEER, half(0, prompt_hash=bytes(16))) == []
    actions = machine.expect(1.0, prefill_request())
    assert only(actions, Reached).state is State.MOVING
    assert isinstance(message(actions), Fail), "of the one whose prompt is another"
    assert pushed(machine.pages_computed(1.0, computed((1,)))) == {1: 21}
    assert pushed(machine.reserve(1.0, PEER, half(0, attempt=2))) == {1: 11}


def test_an_orphans_other_shares_are_waited_for_as_long(machine: PrefillMachine) -> None:
    machine.reserve(0.0, PEER, half(0))
    machine.cancel(1.0, PEER, Cancel("t", 1, 0))
    machine.reserve(2.0, OTHER, half(1))
    actions = machine.tick(2.0 + TIMES.orphan)
    assert only(actions, Send).peer == OTHER
    assert_over(machine)


def test_shares_that_do_not_fit_each_other_are_refused(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    for wrong, words in (
        (reserve(share=2, shares=2), "no share 2 of 2"),
        (reserve(), "one decode worker wants a share of 1, another one of 2"),
    ):
        fail = message(machine.reserve(0.0, OTHER, wrong))
        assert isinstance(fail, Fail)
        assert (fail.code, fail.quiesced) == (FailCode.INCOMPATIBLE, True)
        assert words in fail.message
        machine.reserve(0.0, PEER, half(0))
    fail = message(machine.reserve(0.0, OTHER, half(0)))
    assert isinstance(fail, Fail)
    assert fail.code is FailCode.DUPLICATE


def test_a_share_is_cancelled_or_released_alone(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, half(0))
    # CANCEL overtook its RESERVE, which finds the share over.
    assert CancelAck("t", 1, drained=True) == message(
        [action for action in machine.cancel(0.0, OTHER, Cancel("t", 1, 1)) if isinstance(action, Send)]
    )
    assert machine.reserve(0.0, OTHER, half(1)) == []
    assert pushed(machine.pages_computed(0.0, computed((1, 2, 3)))) == {1: 11, 2: 12, 3: 13}
    assert machine.release(0.0, OTHER, Release("t", 7)) == []
    machine.request_finished(0.0, "t", True, "")
    actions = machine.writes_ended(1.0, FIRST, WritesEnd.DONE, True, "")
    assert only(actions, FinishedSending).request_id == "p-t"
    machine.expect(2.0, prefill_request("u"))
    machine.reserve(2.0, PEER, half(0, transfer="u"))
    assert only(machine.release(2.0, OTHER, Release("u", 1)), Ended).outcome is Outcome.RELEASED
    machine.request_finished(2.0, "u", False, "aborted")
    assert_over(machine)


def test_failing_prompt_fails_for_every_decode_worker(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, half(0))
    machine.reserve(0.0, OTHER, half(1))
    actions = machine.request_finished(1.0, "t", False, "its client left", aborted=True)
    assert {ended.outcome for ended in every(actions, Ended)} == {Outcome.CANCELLED}
    assert [send.peer for send in every(actions, Send)] == [PEER, OTHER]
    assert only(actions, FinishedSending).request_id == "p-t"
    assert_over(machine)


def test_preemption_covers_every_share(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, half(0))
    machine.reserve(0.0, OTHER, half(1))
    machine.pages_computed(0.0, computed((1, 2)))
    assert machine.preempt(("t", "unknown")) == (FIRST, SECOND)
    assert only(machine.quiesce_failed(1.0, SECOND), Fence).peer == OTHER
    # Pages that were sent are not sent again. The others are.
    assert pushed(machine.pages_computed(2.0, computed((4, 5, 6), base=4))) == {6: 23}
