"""Preemption and cleared caches, which take blocks away."""

from __future__ import annotations

from prefill_setup import MOVING, PEER, active, assert_over, message, pushed
from protocol_setup import (
    computed,
    only,
    prefill_request,
    reserve,
)

from kv_connector.protocol.actions import (
    CancelWrites,
    Fence,
    FinishedSending,
    Share,
)
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.wire.messages import Cancel, Fail, FailCode


def test_preemption_forgets_what_was_not_pushed_and_keeps_the_ledger(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2)))
    assert machine.preempt(["t", "unknown"]) == ()
    # Its old blocks belong to another request now. The prompt is computed again in other blocks.
    assert machine.reserve(0.0, PEER, reserve()) == MOVING
    assert pushed(machine.pages_computed(0.0, computed((7, 8), base=4))) == {7: 11, 8: 12}
    assert machine.preempt(["t"]) == (Share("t"),)
    assert pushed(machine.pages_computed(0.0, computed((4, 5, 6), base=8))) == {6: 13}


def test_writes_of_a_stopped_transfer_are_quiesced_too(machine: PrefillMachine) -> None:
    active(machine)
    machine.cancel(0.0, PEER, Cancel("t", 1))
    assert machine.preempt(["t"]) == (Share("t"),)
    machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert machine.preempt(["t"]) == ()


def test_preempted_writes_that_do_not_drain_are_fenced(machine: PrefillMachine) -> None:
    active(machine)
    assert only(machine.quiesce_failed(0.0, Share("t")), Fence).peer == PEER
    machine.peer_down(0.0, PEER, "fenced")
    assert machine.quiesce_failed(0.0, Share("t")) == []
    machine.fenced(0.0, PEER)
    assert machine.quiesce_failed(0.0, Share("t")) == []
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)


def test_a_prompt_of_which_a_part_has_gone_is_not_completed_from_a_cleared_cache(
    machine: PrefillMachine,
) -> None:
    active(machine)
    assert machine.cache_cleared(0.0) == [CancelWrites(Share("t"))]
    assert machine.pages_computed(0.0, computed((4, 5, 6))) == []
    fail = message(machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, ""))
    assert isinstance(fail, Fail)
    assert (fail.code, fail.quiesced) == (FailCode.STALE, True)
    assert "cleared its KV cache" in fail.message
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_a_prompt_that_has_gone_as_a_whole_or_not_at_all_survives_a_cleared_cache(
    machine: PrefillMachine,
) -> None:
    machine.expect(0.0, prefill_request("u"))
    machine.reserve(0.0, PEER, reserve(transfer="u", attempt=2))
    active(machine)
    machine.pages_computed(0.0, computed((3,), first=2))
    assert machine.cache_cleared(0.0) == []
    assert pushed(machine.pages_computed(0.0, computed((4, 5, 6), transfer="u"))) == {4: 11, 5: 12, 6: 13}
