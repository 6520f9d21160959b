"""Prompts that P and D compute with different versions of the weights."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prefill_setup import MOVING, OTHER, PEER, active, assert_over, message, pushed, sealed, wanting
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
    Push,
    Send,
    Share,
)
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.prefill.shares import PrefillAction
from kv_connector.protocol.wire.messages import Fail, FailCode, Reserve, Sampled
from kv_connector.protocol.wire.weight_version import identity


def reserve_of(version: str, **changes: Any) -> Reserve:
    return msgspec.structs.replace(reserve(**changes), weights=version)


def assert_refused(actions: list[PrefillAction], words: str) -> None:
    fail = message(actions)
    assert isinstance(fail, Fail)
    assert (fail.code, fail.quiesced) == (FailCode.STALE, True)
    assert words in fail.message
    assert every(actions, Push) == []


@pytest.mark.parametrize("request_first", [True, False])
def test_decode_with_other_weights_gets_nothing_and_the_prompt_is_not_kept(
    machine: PrefillMachine, request_first: bool
) -> None:
    machine.set_weights(0.0, "v2")
    if request_first:
        machine.expect(0.0, prefill_request())
        machine.pages_computed(0.0, computed((1, 2, 3)))
    actions = machine.reserve(0.0, PEER, reserve_of("v1"))
    assert_refused(actions, "prefill engine has v2, decode engine has v1")
    assert only(actions, Ended).outcome is Outcome.STALE
    if not request_first:
        machine.expect(0.0, prefill_request())
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending).request_id == "p-t"
    assert_over(machine)
    assert_refused(machine.reserve(0.0, OTHER, reserve_of("v1")), "prefill engine has v2")


def test_decode_with_another_version_of_the_same_name_gets_nothing(machine: PrefillMachine) -> None:
    """A restarted trainer reuses its version names."""
    machine.set_weights(0.0, "1#0000000a")
    actions = machine.reserve(0.0, PEER, reserve_of("1#0000000b"))
    assert_refused(actions, "prefill engine has 1#0000000a, decode engine has 1#0000000b")


def test_an_engine_without_a_version_has_other_weights_than_one_with(machine: PrefillMachine) -> None:
    assert_refused(
        machine.reserve(0.0, PEER, reserve_of("v1")),
        "prefill engine has what it was started with, decode engine has v1",
    )


def test_decode_with_the_same_weights_gets_its_pages(machine: PrefillMachine) -> None:
    machine.set_weights(0.0, "v2")
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve_of("v2"))
    assert pushed(machine.pages_computed(0.0, computed((1, 2)))) == {1: 11, 2: 12}


def test_weights_that_change_in_the_middle_of_a_prompt_end_its_transfer(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.set_weights(0.0, "v2") == [CancelWrites(Share("t"))]
    assert machine.pages_computed(0.0, computed((4, 5, 6))) == []
    assert_refused(
        machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, ""), "prefill engine has v2"
    )
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_weights_that_change_before_anything_is_computed_end_the_transfer(machine: PrefillMachine) -> None:
    """The rest would be computed with the new weights. The same holds for a reservation whose request is
    still to come."""
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve())
    machine.reserve(0.0, PEER, reserve(transfer="orphan", attempt=2))
    fails = [send.message for send in every(machine.set_weights(0.0, "v2"), Send)]
    assert [fail.code for fail in fails if isinstance(fail, Fail)] == [FailCode.STALE] * 2
    assert machine.pages_computed(0.0, computed((1, 2, 3))) == []


def test_unrequested_prompt_belongs_to_the_new_weights(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2)))  # with the old weights: these pages are not pushed
    machine.set_weights(0.0, "v2")
    assert machine.reserve(0.0, PEER, reserve_of("v2")) == MOVING
    assert pushed(machine.pages_computed(0.0, computed((4, 5, 6)))) == {4: 11, 5: 12, 6: 13}


def test_a_finished_prompt_stays_the_old_weights(machine: PrefillMachine) -> None:
    for name in ("t", "u"):
        machine.expect(0.0, prefill_request(name))
        machine.pages_computed(0.0, computed((1, 2, 3), transfer=name))
        machine.request_finished(0.0, name, True, "")
    assert machine.set_weights(0.0, "v2") == []
    assert pushed(machine.reserve(0.0, PEER, reserve())) == {1: 11, 2: 12, 3: 13}
    actions = machine.reserve(0.0, PEER, reserve_of("v2", transfer="u", attempt=2))
    assert_refused(actions, "prefill engine has what it was started with, decode engine has v2")
    assert only(actions, FinishedSending).request_id == "p-u", "its blocks are free at once"


def test_decode_that_waits_for_the_token_receives_it_before_it_computes_the_prompt(
    machine: PrefillMachine,
) -> None:
    """The client may have the token already, and D would sample another one."""
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, wanting())
    machine.pages_computed(0.0, computed((1, 2)))
    assert machine.set_weights(0.0, "v2") == []
    assert machine.pages_computed(0.0, computed((4, 5, 6))) == [], "none of the new pages goes"
    sampled, cancel = machine.request_finished(0.0, "t", True, "", 7)
    assert sampled == Send(PEER, Sampled("t", 1, 7))
    assert cancel == CancelWrites(Share("t"))
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert_refused(actions, "prefill engine has v2")
    assert only(actions, FinishedSending)
    assert_over(machine)


@pytest.mark.parametrize("when", ["before its request", "before its end", "behind its end"])
def test_decode_with_other_weights_that_wants_the_token_receives_it(
    machine: PrefillMachine, when: str
) -> None:
    message = msgspec.structs.replace(wanting(), weights="v2")
    actions: list[PrefillAction] = []
    if when == "before its request":
        actions += machine.reserve(0.0, PEER, message)
    machine.expect(0.0, prefill_request())
    if when == "before its end":
        actions += machine.reserve(0.0, PEER, message)
    actions += machine.pages_computed(0.0, computed((1, 2, 3)))
    assert every(actions, Send) == every(actions, Push) == []
    actions = machine.request_finished(0.0, "t", True, "", 7)
    if when == "behind its end":
        actions += machine.reserve(0.0, PEER, message)
    sampled, fail = every(actions, Send)
    assert sampled.message == Sampled("t", 1, 7)
    assert isinstance(fail.message, Fail)
    assert fail.message.code is FailCode.STALE
    assert only(actions, FinishedSending)
    assert_over(machine)


def test_pages_are_pushed_once_prefill_has_the_weights_that_decode_had_first(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, msgspec.structs.replace(wanting(), weights="v2"))
    assert every(machine.pages_computed(0.0, computed((1, 2, 3))), Push) == []
    machine.set_weights(0.0, "v2")
    assert only(machine.pages_computed(0.0, computed((1, 2, 3))), Push).peer == PEER
    sampled = only(machine.request_finished(0.0, "t", True, "", 7), Send)
    assert sampled.message == Sampled("t", 1, 7)
    ended = only(machine.writes_ended(0.0, Share("t"), WritesEnd.DONE, True, ""), Ended)
    assert ended.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(("first", "rest"), [((1, 2, 3), ()), ((1, 2), (3,))])
@pytest.mark.parametrize("reserved_first", [True, False])
def test_pages_that_are_not_computed_again_with_new_weights_are_stale(
    machine: PrefillMachine, first: tuple[int, ...], rest: tuple[int, ...], reserved_first: bool
) -> None:
    """All pages were computed before the weights came, or the pause of the weights kept P's cache."""
    version = identity("v2", "digest")
    wanted = msgspec.structs.replace(wanting(), weights=version)
    machine.expect(0.0, prefill_request())
    if reserved_first:
        machine.reserve(0.0, PEER, wanted)
    machine.pages_computed(0.0, computed(first))
    machine.set_weights(0.0, version)
    if not reserved_first:
        machine.reserve(0.0, PEER, wanted)
    if rest:
        machine.pages_computed(0.0, computed(rest, len(first)))
    actions = machine.request_finished(0.0, "t", True, "", 7)
    failed = [one.message for one in every(actions, Send) if isinstance(one.message, Fail)]
    if rest:  # its writes are drained first
        actions = machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "")
        failed = [one.message for one in every(actions, Send) if isinstance(one.message, Fail)]
    (fail,) = failed
    assert fail.code is FailCode.STALE
    assert "not computed again: weights: prefill engine" in fail.message
    assert version not in fail.message
    assert only(actions, Ended).outcome is Outcome.STALE


def test_decode_that_waits_for_the_token_of_an_abandoned_prompt_receives_a_failure(
    machine: PrefillMachine,
) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, wanting())
    machine.set_weights(0.0, "v2")
    fail = message(machine.request_finished(0.0, "t", False, "aborted", aborted=True))
    assert isinstance(fail, Fail)
    assert fail.code is FailCode.PREFILL_ABORTED
    assert_over(machine)


def test_pages_that_are_all_on_their_way_arrive(machine: PrefillMachine) -> None:
    sealed(machine)
    assert machine.set_weights(0.0, "v2") == []
    actions = machine.writes_ended(4.0, Share("t"), WritesEnd.DONE, True, "")
    assert only(actions, Ended).outcome is Outcome.COMPLETED
