"""P's side of a transfer: every page once, every request reported once, and D never left hanging."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from protocol_setup import (
    BLOCK,
    HASH,
    all_of,
    computed,
    every,
    layout,
    only,
    prefill_request,
    reserve,
    with_rows,
)

from kv_connector.protocol import tombstones
from kv_connector.protocol.actions import (
    CancelWrites,
    Ended,
    Fence,
    FinishedSending,
    Log,
    Outcome,
    Push,
    PushedGroup,
    Reached,
    Seal,
    Send,
    Share,
    State,
)
from kv_connector.protocol.messages import Cancel, CancelAck, Fail, FailCode, Release, Reserve, Role, Sampled
from kv_connector.protocol.plan import Plan
from kv_connector.protocol.prefill import PrefillMachine, WritesEnd
from kv_connector.protocol.shares import PrefillAction
from kv_connector.protocol.timers import Timeouts

PEER, OTHER = 1, 2
TIMES = Timeouts()
WANTS = all_of(layout())
MOVING = [Reached(Role.PREFILL, "t", "p-t", State.MOVING)]  # both halves are here


@pytest.fixture
def machine() -> PrefillMachine:
    made = PrefillMachine(layout(), TIMES)
    for peer in (PEER, OTHER):
        assert isinstance(made.admit(peer, layout(num_blocks=32), WANTS, regions=1), Plan)
    return made


def message(actions: list[PrefillAction]) -> object:
    """The one message that goes out."""
    return only(actions, Send).message


def pushed(actions: list[PrefillAction]) -> dict[int, int]:
    """P's block -> D's block, over all pushes of group 0."""
    pairs = [(push, group) for push in every(actions, Push) for group in push.groups]
    return {s: t for _, group in pairs for s, t in zip(group.source, group.target, strict=True)}


def pushed_group(group: int, source: tuple[int, ...], target: tuple[int, ...]) -> PushedGroup:
    """Whole blocks of a group that has the same number on both sides."""
    return PushedGroup((group, group), (0, 0), source, target)


def active(machine: PrefillMachine) -> None:
    """A request whose first two of three pages are on their way."""
    assert machine.expect(0.0, prefill_request()) == []
    assert machine.reserve(0.0, PEER, reserve()) == MOVING
    assert pushed(machine.computed(0.0, computed((1, 2)))) == {1: 11, 2: 12}


def sealed(machine: PrefillMachine) -> None:
    active(machine)
    assert pushed(machine.computed(0.0, computed((3,), first=2, base=2))) == {3: 13}
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]


def assert_over(machine: PrefillMachine) -> None:
    assert len(machine) == 0
    assert machine.next_deadline() is None


# --- The token behind the prompt


def wanting() -> Reserve:
    return msgspec.structs.replace(reserve(), wants_sampled=True)


@pytest.mark.parametrize("token", [7, None])
def test_decode_is_told_the_token_when_the_prompt_is_finished(
    machine: PrefillMachine, token: int | None
) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, wanting())
    machine.computed(0.0, computed((1, 2, 3)))
    said = Send(PEER, Sampled("t", reserve().attempt, token))
    assert machine.request_finished(0.0, "t", True, "", token) == [said, Seal(Share("t"))]


def test_decode_that_asks_for_a_finished_prompt_is_told_the_token_at_once(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1, 2, 3)))
    machine.request_finished(0.0, "t", True, "", 7)
    actions = machine.reserve(0.0, PEER, wanting())
    assert message(actions) == Sampled("t", reserve().attempt, 7)


def test_the_token_is_not_told_of_a_prompt_that_was_given_up(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, wanting())
    actions = machine.request_finished(0.0, "t", False, "aborted", 7, aborted=True)
    assert [type(send.message) for send in every(actions, Send)] == [Fail]


# --- The good path


def test_pages_go_as_they_are_computed_and_the_request_is_reported_when_they_have_arrived(
    machine: PrefillMachine,
) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve())
    actions = machine.computed(1.0, computed((1, 2), base=40))
    assert actions == [Push(PEER, Share("t"), 40, 100, (PushedGroup((0, 0), (0, 0), (1, 2), (11, 12)),))]
    assert pushed(machine.computed(2.0, computed((3,), first=2, base=42))) == {3: 13}
    assert machine.request_finished(3.0, "t", True, "") == [Seal(Share("t"))]
    actions = machine.writes_ended(4.0, Share("t"), WritesEnd.DONE, True, "")
    assert only(actions, FinishedSending).request_id == "p-t"
    assert only(actions, Ended).outcome is Outcome.COMPLETED
    assert only(actions, Ended).seconds == 4.0
    assert every(actions, Send) == []  # D counts; nobody tells it
    assert_over(machine)


def test_reserve_may_come_before_the_request(machine: PrefillMachine) -> None:
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert machine.expect(1.0, prefill_request()) == MOVING
    assert machine.next_deadline() == TIMES.transfer  # an orphan no more
    assert pushed(machine.computed(1.0, computed((1, 2, 3)))) == {1: 11, 2: 12, 3: 13}


def test_serial_dispatch_pushes_everything_when_reserve_comes(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1, 2), base=0))
    machine.computed(0.0, computed((3,), first=2, base=2))
    machine.request_finished(0.0, "t", True, "")
    actions = machine.reserve(5.0, PEER, reserve())
    assert [push.signal_base for push in every(actions, Push)] == [0, 2]
    assert pushed(actions) == {1: 11, 2: 12, 3: 13}
    assert actions[-1] == Seal(Share("t"))


def test_each_page_goes_once_however_often_it_is_computed(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.computed(0.0, computed((1, 2), base=2)) == []
    assert pushed(machine.computed(0.0, computed((1, 2, 3), base=4))) == {3: 13}


def test_a_page_named_again_before_it_is_wanted_keeps_its_first_step(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1,), base=0))
    machine.computed(0.0, computed((1, 2), base=2))
    actions = machine.reserve(0.0, PEER, reserve())
    assert [(push.signal_base, push.groups[0].source) for push in every(actions, Push)] == [
        (0, (1,)),
        (2, (2,)),
    ]


def test_pages_that_are_computed_already_go_without_a_step_of_their_own(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1,), base=4))
    machine.computed(0.0, computed((1, 2), base=None))  # the first is valid since its step
    machine.computed(0.0, computed((2, 3), first=1, base=8))  # and the second is
    actions = machine.reserve(0.0, PEER, reserve())
    assert [(push.signal_base, push.groups[0].source) for push in every(actions, Push)] == [
        (None, (2,)),
        (4, (1,)),
        (8, (3,)),
    ]


def test_null_blocks_are_skipped_on_both_sides(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve(blocks=(0, 12, 13)))
    assert pushed(machine.computed(0.0, computed((1, 2, 0)))) == {2: 12}
    assert pushed(machine.computed(0.0, computed((3,), first=2))) == {3: 13}
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]


def test_groups_are_pushed_by_their_own_tables() -> None:
    machine = PrefillMachine(layout(groups=(2, 1)), TIMES)
    pages = layout(groups=(2, 1))
    assert isinstance(machine.admit(PEER, pages, all_of(pages), regions=1), Plan)
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve(more=[(0, 22, 23)]))
    push = only(machine.computed(0.0, computed((1, 2, 3), more=[(0, 5, 6)])), Push)
    assert push.groups == (pushed_group(0, (1, 2, 3), (11, 12, 13)), pushed_group(1, (5, 6), (22, 23)))


def test_rows_go_with_the_step_in_which_they_are_there() -> None:
    pages = with_rows(layout(groups=(2, 1)), 8)
    machine = PrefillMachine(pages, TIMES)
    assert isinstance(machine.admit(PEER, pages, all_of(pages), regions=1), Plan)
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve(more=[(0,)]))
    push = only(machine.computed(0.0, computed((1, 2), more=[()])), Push)
    assert push.groups == (pushed_group(0, (1, 2), (11, 12)),)
    push = only(machine.computed(0.0, computed((3,), first=2, base=3, more=[(0,)])), Push)
    assert push.groups == (pushed_group(0, (3,), (13,)), pushed_group(1, (0,), (0,)))
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]


def test_a_reserve_that_wants_no_page_needs_no_writes(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve(blocks=(0, 0, 0)))
    assert machine.computed(0.0, computed((1, 2, 3))) == []
    actions = machine.request_finished(0.0, "t", True, "")
    assert only(actions, FinishedSending).request_id == "p-t"
    assert_over(machine)


def test_expect_again_changes_nothing_and_another_request_is_refused(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.expect(0.0, prefill_request()) == []
    log = only(machine.expect(0.0, prefill_request(request="p-other")), Log)
    assert log.level == logging.ERROR
    assert "p-other" in log.text
    assert "p-t" in log.text


def test_pages_of_an_unknown_request_are_ignored_with_a_word(machine: PrefillMachine) -> None:
    assert only(machine.computed(0.0, computed((1,))), Log).level == logging.WARNING
    machine.reserve(0.0, PEER, reserve())
    assert every(machine.computed(0.0, computed((1,))), Push) == []


# --- The request ends badly


def test_an_abort_stops_the_writes_and_tells_decode_once_they_have_drained(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.request_finished(0.0, "t", False, "client left", aborted=True) == [
        CancelWrites(Share("t"))
    ]
    assert machine.computed(0.0, computed((3,), first=2)) == []
    actions = machine.writes_ended(1.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert message(actions) == Fail("t", 1, FailCode.PREFILL_ABORTED, "client left", quiesced=True)
    assert only(actions, FinishedSending).request_id == "p-t"
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert_over(machine)


def test_an_abort_whose_bytes_may_still_land_says_so(machine: PrefillMachine) -> None:
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
    """Nothing was aborted: decode has to count it, too."""
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
    """The client leaves both engines, and P's abort follows decode's, or is lost with its request."""
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
    assert fail.message.startswith("1 of the pages that decode asked for were never computed")
    assert only(actions, FinishedSending)
    assert_over(machine)


def test_a_failed_write_fails_the_transfer_and_the_request_is_reported_when_it_finishes(
    machine: PrefillMachine,
) -> None:
    active(machine)
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.FAILED, False, "PEER_DOWN over tcp")
    assert message(actions) == Fail("t", 1, FailCode.WRITE_ERROR, "PEER_DOWN over tcp", quiesced=False)
    assert every(actions, FinishedSending) == []
    assert machine.computed(0.0, computed((3,), first=2)) == []
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
    assert machine.computed(0.0, computed((3,), first=2, more=[(5,)])) == [CancelWrites(Share("t"))]


def test_finished_is_heard_once(machine: PrefillMachine) -> None:
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


# --- How far a request has come


def states(actions: list[PrefillAction]) -> list[tuple[str, State]]:
    return [(reached.request_id, reached.state) for reached in every(actions, Reached)]


@pytest.mark.parametrize("first", ["request", "reserve"])
def test_a_request_moves_once_both_halves_are_here_and_is_done_with_its_report(
    machine: PrefillMachine, first: str
) -> None:
    halves = [lambda: machine.expect(0.0, prefill_request()), lambda: machine.reserve(0.0, PEER, reserve())]
    if first == "reserve":
        halves.reverse()
    assert halves[0]() == []
    assert halves[1]() == MOVING
    assert states(machine.computed(0.0, computed((1, 2, 3)))) == []
    assert states(machine.request_finished(0.0, "t", True, "")) == []
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.DONE, True, "")
    assert states(actions) == [("p-t", State.DONE)]
    assert actions[-1] == FinishedSending("p-t")


def test_a_failure_is_told_before_the_request_finishes_and_once(machine: PrefillMachine) -> None:
    active(machine)
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.FAILED, True, "PEER_DOWN over tcp")
    assert only(actions, Reached) == Reached(Role.PREFILL, "t", "p-t", State.FAILED, "PEER_DOWN over tcp")
    assert machine.request_finished(1.0, "t", True, "") == [FinishedSending("p-t")]


def test_who_names_no_tokens_takes_decodes_word_and_hears_what_decode_has(machine: PrefillMachine) -> None:
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
    assert message(actions).code is FailCode.PREFILL_ABORTED
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert states(actions) == [("p-t", State.FAILED)]
    assert actions[-1] == FinishedSending("p-t")
    assert_over(machine)


def test_what_drains_still_moves(machine: PrefillMachine) -> None:
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


def test_what_nobody_here_asked_for_has_no_state(machine: PrefillMachine) -> None:
    machine.reserve(0.0, PEER, reserve())
    assert states(machine.tick(TIMES.orphan)) == []


# --- Preemption


def test_preemption_forgets_what_was_not_pushed_and_keeps_the_ledger(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1, 2)))
    assert machine.preempt(["t", "unknown"]) == ()
    # Its old blocks belong to somebody else now; the prompt is computed again elsewhere.
    assert machine.reserve(0.0, PEER, reserve()) == MOVING
    assert pushed(machine.computed(0.0, computed((7, 8), base=4))) == {7: 11, 8: 12}
    assert machine.preempt(["t"]) == (Share("t"),)
    assert pushed(machine.computed(0.0, computed((4, 5, 6), base=8))) == {6: 13}


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
    assert machine.computed(0.0, computed((4, 5, 6))) == []
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
    machine.computed(0.0, computed((3,), first=2))
    assert machine.cache_cleared(0.0) == []
    assert pushed(machine.computed(0.0, computed((4, 5, 6), transfer="u"))) == {4: 11, 5: 12, 6: 13}


# --- Versions of the weights


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
        machine.computed(0.0, computed((1, 2, 3)))
    actions = machine.reserve(0.0, PEER, reserve_of("v1"))
    assert_refused(actions, "prefill has v2, decode has v1")
    assert only(actions, Ended).outcome is Outcome.STALE
    if not request_first:
        machine.expect(0.0, prefill_request())
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending).request_id == "p-t"
    assert_over(machine)
    assert_refused(machine.reserve(0.0, OTHER, reserve_of("v1")), "prefill has v2")


def test_decode_with_another_version_of_the_same_name_gets_nothing(machine: PrefillMachine) -> None:
    """A trainer that is started again uses its names again."""
    machine.set_weights(0.0, "1#0000000a")
    actions = machine.reserve(0.0, PEER, reserve_of("1#0000000b"))
    assert_refused(actions, "prefill has 1#0000000a, decode has 1#0000000b")


def test_an_engine_without_a_version_has_other_weights_than_one_with(machine: PrefillMachine) -> None:
    assert_refused(
        machine.reserve(0.0, PEER, reserve_of("v1")), "prefill has what it was started with, decode has v1"
    )


def test_decode_with_the_same_weights_gets_its_pages(machine: PrefillMachine) -> None:
    machine.set_weights(0.0, "v2")
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve_of("v2"))
    assert pushed(machine.computed(0.0, computed((1, 2)))) == {1: 11, 2: 12}


def test_weights_that_change_in_the_middle_of_a_prompt_end_its_transfer(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.set_weights(0.0, "v2") == [CancelWrites(Share("t"))]
    assert machine.computed(0.0, computed((4, 5, 6))) == []
    assert_refused(machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, ""), "prefill has v2")
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_weights_that_change_before_anything_is_computed_end_the_transfer(machine: PrefillMachine) -> None:
    """The rest would be of the new ones; and of a reservation whose request is still to come."""
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve())
    machine.reserve(0.0, PEER, reserve(transfer="orphan", attempt=2))
    fails = [send.message for send in every(machine.set_weights(0.0, "v2"), Send)]
    assert [fail.code for fail in fails if isinstance(fail, Fail)] == [FailCode.STALE] * 2
    assert machine.computed(0.0, computed((1, 2, 3))) == []


def test_a_prompt_that_nobody_has_asked_for_yet_is_the_new_weights(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1, 2)))  # with the old ones: these are not pushed
    machine.set_weights(0.0, "v2")
    assert machine.reserve(0.0, PEER, reserve_of("v2")) == MOVING
    assert pushed(machine.computed(0.0, computed((4, 5, 6)))) == {4: 11, 5: 12, 6: 13}


def test_a_finished_prompt_stays_the_old_weights(machine: PrefillMachine) -> None:
    for name in ("t", "u"):
        machine.expect(0.0, prefill_request(name))
        machine.computed(0.0, computed((1, 2, 3), transfer=name))
        machine.request_finished(0.0, name, True, "")
    assert machine.set_weights(0.0, "v2") == []
    assert pushed(machine.reserve(0.0, PEER, reserve())) == {1: 11, 2: 12, 3: 13}
    actions = machine.reserve(0.0, PEER, reserve_of("v2", transfer="u", attempt=2))
    assert_refused(actions, "prefill has what it was started with, decode has v2")
    assert only(actions, FinishedSending).request_id == "p-u", "its blocks are free at once"


def test_a_decode_that_waits_for_the_token_hears_it_before_it_computes_the_prompt_itself(
    machine: PrefillMachine,
) -> None:
    """The client may have it: D's own would be another."""
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, wanting())
    machine.computed(0.0, computed((1, 2)))
    assert machine.set_weights(0.0, "v2") == []
    assert machine.computed(0.0, computed((4, 5, 6))) == [], "none of the new pages goes"
    sampled, cancel = machine.request_finished(0.0, "t", True, "", 7)
    assert sampled == Send(PEER, Sampled("t", 1, 7))
    assert cancel == CancelWrites(Share("t"))
    actions = machine.writes_ended(0.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert_refused(actions, "prefill has v2")
    assert only(actions, FinishedSending)
    assert_over(machine)


@pytest.mark.parametrize("when", ["before its request", "before its end", "behind its end"])
def test_a_decode_with_other_weights_that_wants_the_token_hears_it(
    machine: PrefillMachine, when: str
) -> None:
    message = msgspec.structs.replace(wanting(), weights="v2")
    actions: list[PrefillAction] = []
    if when == "before its request":
        actions += machine.reserve(0.0, PEER, message)
    machine.expect(0.0, prefill_request())
    if when == "before its end":
        actions += machine.reserve(0.0, PEER, message)
    actions += machine.computed(0.0, computed((1, 2, 3)))
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


def test_who_waits_for_the_token_of_a_prompt_that_is_given_up_hears_that(machine: PrefillMachine) -> None:
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


# --- What RESERVE may ask


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_tokens": 3 * BLOCK - 1}, "prefill has 48 tokens, decode has 47"),
        ({"prompt_hash": bytes(16)}, "the prompts differ"),
        ({"prompt_hash": None}, "decode sends no hash of the prompt"),
    ],
)
@pytest.mark.parametrize("order", ["request first", "RESERVE first"])
def test_another_prompt_is_refused_and_the_right_one_still_served(
    machine: PrefillMachine, changes: dict[str, object], words: str, order: str
) -> None:
    wrong = msgspec.structs.replace(reserve(attempt=9), **changes)
    if order == "request first":
        machine.expect(0.0, prefill_request())
        fail = message(machine.reserve(0.0, PEER, wrong))
    else:
        machine.reserve(0.0, PEER, wrong)
        fail = message(machine.expect(0.0, prefill_request()))
    assert isinstance(fail, Fail)
    assert (fail.code, fail.attempt, fail.quiesced) == (FailCode.PROMPT_MISMATCH, 9, True)
    assert words in fail.message
    assert machine.next_deadline() is None
    if "prompt_hash" in changes and changes["prompt_hash"] is not None:
        assert all(cause in fail.message for cause in ("chat template", "tokenizer", "clock", "time zone"))
    machine.computed(0.0, computed((1, 2, 3)))
    assert pushed(machine.reserve(1.0, PEER, reserve(attempt=10))) == {1: 11, 2: 12, 3: 13}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("end", ["release", "cancel"])
def test_another_prompt_is_one_for_each_worker_of_decode(
    machine: PrefillMachine, finished: bool, end: str
) -> None:
    """The first may have given the prompt up before the others ask for it."""
    machine.expect(0.0, prefill_request())
    if finished:
        machine.request_finished(0.0, "t", True, "")
    wrong = [msgspec.structs.replace(half(share), prompt_hash=bytes(16)) for share in range(2)]
    first = message(machine.reserve(0.0, OTHER, wrong[1]))
    if end == "release":
        machine.release(0.0, OTHER, Release("t", 1))
    else:
        machine.cancel(0.0, OTHER, Cancel("t", 1, 1))
    second = message(machine.reserve(1.0, PEER, wrong[0]))
    assert isinstance(first, Fail)
    assert first.code is FailCode.PROMPT_MISMATCH
    assert second == first
    machine.release(1.0, PEER, Release("t"))
    machine.request_finished(1.0, "t", True, "")
    assert_over(machine)


@pytest.mark.parametrize("theirs", [None, HASH], ids=["neither", "decode has one"])
@pytest.mark.parametrize("order", ["request first", "RESERVE first"])
def test_a_prompt_without_a_hash_is_compared_with_none(
    machine: PrefillMachine, theirs: bytes | None, order: str
) -> None:
    """Its length still is."""
    ours = prefill_request(prompt_hash=None)
    short = msgspec.structs.replace(reserve(attempt=1, prompt_hash=theirs), prompt_tokens=3 * BLOCK - 1)
    right = reserve(attempt=2, prompt_hash=theirs)
    if order == "request first":
        machine.expect(0.0, ours)
        fail = message(machine.reserve(0.0, PEER, short))
        machine.reserve(0.0, PEER, right)
    else:
        machine.reserve(0.0, PEER, short)
        fail = message(machine.expect(0.0, ours))
        machine.reserve(0.0, PEER, right)
    assert isinstance(fail, Fail)
    assert fail.message == "prompt length: prefill has 48 tokens, decode has 47"
    assert pushed(machine.computed(0.0, computed((1, 2, 3)))) == {1: 11, 2: 12, 3: 13}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (reserve(blocks=(32,)), "block 32 of 32"),
        (reserve(more=[(1,)]), "2 KV groups"),
        (reserve(blocks=(1, 2, 3, 4)), "behind the 3"),
    ],
)
def test_a_reserve_that_does_not_fit_is_refused(machine: PrefillMachine, wrong: Reserve, words: str) -> None:
    machine.expect(0.0, prefill_request())
    fail = message(machine.reserve(0.0, PEER, wrong))
    assert isinstance(fail, Fail)
    assert (fail.code, fail.quiesced) == (FailCode.INCOMPATIBLE, True)
    assert words in fail.message
    assert machine.reserve(0.0, PEER, reserve(attempt=2)) == MOVING  # a good one is served


def test_the_same_reserve_twice_is_served_once(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert pushed(machine.computed(0.0, computed((1, 2, 3)))) == {3: 13}


@pytest.mark.parametrize(("peer", "attempt"), [(PEER, 2), (OTHER, 1)])
def test_a_second_decode_request_is_refused(machine: PrefillMachine, peer: int, attempt: int) -> None:
    active(machine)
    send = only(machine.reserve(0.0, peer, reserve(attempt=attempt)), Send)
    assert send.peer == peer
    assert isinstance(send.message, Fail)
    assert (send.message.code, send.message.attempt) == (FailCode.DUPLICATE, attempt)
    assert send.message.quiesced
    machine.computed(0.0, computed((3,), first=2))
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]  # the first one goes on


def test_after_the_end_the_served_attempt_is_ignored_and_others_are_refused(machine: PrefillMachine) -> None:
    sealed(machine)
    machine.writes_ended(0.0, Share("t"), WritesEnd.DONE, True, "")
    assert machine.reserve(1.0, PEER, reserve()) == []
    fail = message(machine.reserve(1.0, PEER, reserve(attempt=2)))
    assert isinstance(fail, Fail)
    assert fail.code is FailCode.DUPLICATE
    assert_over(machine)


def test_a_reserve_of_a_peer_without_a_session_is_ignored(machine: PrefillMachine) -> None:
    assert machine.reserve(0.0, 77, reserve()) == []
    machine.peer_down(0.0, PEER, "gone")
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert_over(machine)


def test_a_peer_whose_pages_do_not_fit_is_not_admitted() -> None:
    machine = PrefillMachine(layout(), TIMES)
    problem = machine.admit(PEER, layout(groups=(1, 1)), WANTS, regions=1)
    assert isinstance(problem, str)
    assert problem.startswith("layer layer1: kind: prefill has full, decode has sliding_window")
    problem = machine.admit(PEER, layout(), ((0,),), regions=1)
    assert problem == "it wants parts of 1 layers, and has 2"
    problem = machine.admit(PEER, layout(page=32), WANTS, regions=1)
    assert isinstance(problem, str)
    assert problem.startswith("layer layer0: part page: bytes a run: prefill has 64, decode has 32")
    problem = machine.admit(PEER, layout(), WANTS, regions=0)
    assert problem == "part page of layer layer0 names memory region 0 of 0"
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert_over(machine)


# --- Several workers of D


FIRST, SECOND = Share("t", 0), Share("t", 1)


def half(share: int, **changes: Any) -> Reserve:
    """RESERVE for one share of two, into blocks of its own."""
    first = 21 if share else 11
    return reserve(range(first, first + 3), share=share, shares=2, **changes)


def test_each_worker_of_decode_is_served_by_itself(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1, 2)))
    assert pushed(machine.reserve(0.0, PEER, half(0))) == {1: 11, 2: 12}
    pushes = every(machine.computed(0.0, computed((3,), first=2, base=2)), Push)
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
    machine.computed(0.0, computed((1, 2, 3)))
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
    machine.computed(0.0, computed((1, 2)))
    assert machine.peer_down(1.0, PEER, "gone") == []
    assert only(machine.fenced(1.0, PEER), Ended).share == 0
    assert pushed(machine.computed(2.0, computed((3,), first=2, base=2))) == {3: 23}
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
    assert pushed(machine.computed(1.0, computed((1,)))) == {1: 21}
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
    # Overtook its RESERVE, which finds it over.
    assert CancelAck("t", 1, drained=True) == message(
        [action for action in machine.cancel(0.0, OTHER, Cancel("t", 1, 1)) if isinstance(action, Send)]
    )
    assert machine.reserve(0.0, OTHER, half(1)) == []
    assert pushed(machine.computed(0.0, computed((1, 2, 3)))) == {1: 11, 2: 12, 3: 13}
    assert machine.release(0.0, OTHER, Release("t", 7)) == []
    machine.request_finished(0.0, "t", True, "")
    actions = machine.writes_ended(1.0, FIRST, WritesEnd.DONE, True, "")
    assert only(actions, FinishedSending).request_id == "p-t"
    machine.expect(2.0, prefill_request("u"))
    machine.reserve(2.0, PEER, half(0, transfer="u"))
    assert only(machine.release(2.0, OTHER, Release("u", 1)), Ended).outcome is Outcome.RELEASED
    machine.request_finished(2.0, "u", False, "aborted")
    assert_over(machine)


def test_a_prompt_that_fails_fails_for_everybody(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, half(0))
    machine.reserve(0.0, OTHER, half(1))
    actions = machine.request_finished(1.0, "t", False, "its client left", aborted=True)
    assert {ended.outcome for ended in every(actions, Ended)} == {Outcome.CANCELLED}
    assert [send.peer for send in every(actions, Send)] == [PEER, OTHER]
    assert only(actions, FinishedSending).request_id == "p-t"
    assert_over(machine)


def test_preemption_asks_for_every_share(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, half(0))
    machine.reserve(0.0, OTHER, half(1))
    machine.computed(0.0, computed((1, 2)))
    assert machine.preempt(("t", "unknown")) == (FIRST, SECOND)
    assert only(machine.quiesce_failed(1.0, SECOND), Fence).peer == OTHER
    # What had gone does not go again, what had not does.
    assert pushed(machine.computed(2.0, computed((4, 5, 6), base=4))) == {6: 23}


# --- CANCEL and RELEASE


def test_cancel_stops_drains_and_is_acknowledged(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.cancel(0.0, PEER, Cancel("t", 1)) == [CancelWrites(Share("t"))]
    assert machine.cancel(0.0, PEER, Cancel("t", 1)) == []  # the answer is under way
    actions = machine.writes_ended(1.0, Share("t"), WritesEnd.CANCELLED, True, "")
    assert message(actions) == CancelAck("t", 1, drained=True)
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert every(actions, FinishedSending) == []
    assert only(machine.request_finished(2.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_cancel_of_a_finished_request_frees_it_when_drained(machine: PrefillMachine) -> None:
    sealed(machine)
    assert machine.cancel(0.0, PEER, Cancel("t", 1)) == [CancelWrites(Share("t"))]
    # The last page beat the cancellation.
    actions = machine.writes_ended(1.0, Share("t"), WritesEnd.DONE, True, "")
    assert message(actions) == CancelAck("t", 1, drained=True)
    assert only(actions, FinishedSending)
    assert_over(machine)


def test_cancel_that_cannot_tell_says_so_and_so_does_its_repetition(machine: PrefillMachine) -> None:
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
    assert machine.computed(0.0, computed((1, 2, 3))) == []
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_cancel_that_overtakes_reserve_frees_a_waiting_request(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1, 2, 3)))
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
    machine.computed(0.0, computed((3,), first=2))
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
    # Who asks for states knows that decode has come.
    assert states(actions) == [("p-t", State.MOVING)]
    assert machine.computed(0.0, computed((1, 2, 3))) == []
    # It is done, as one of which decode had something: all that was wanted is there.
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
    # A router has disowned the transfer for a client that left: that is no failure at decode.
    assert fail.code is FailCode.PREFILL_ABORTED
    assert only(machine.request_finished(0.0, "t", True, ""), FinishedSending)
    assert_over(machine)


def test_reserve_outranks_release(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.release(0.0, OTHER, Release("t")) == []
    assert pushed(machine.computed(0.0, computed((3,), first=2))) == {3: 13}


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


def test_a_finished_request_expires_when_nobody_asks(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.computed(0.0, computed((1, 2, 3)))
    assert machine.next_deadline() is None  # as long as it computes, the engine owns it
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
    machine.computed(0.0, computed((1, 2, 3)))
    machine.waiting(0.0, PEER, ("t",))
    if finished_first:
        machine.request_finished(0.0, "t", True, "")
    machine.peer_down(10.0, PEER, "silent")
    if not finished_first:
        assert machine.next_deadline() is None
        machine.request_finished(10.0, "t", True, "")
    # One that only lost its connection has dialled again by then, and said so.
    assert machine.next_deadline() == 10.0 + TIMES.dead + TIMES.connect
    machine.admit(OTHER, layout(), WANTS, 1)
    machine.waiting(15.0, OTHER, ("t",))
    assert machine.next_deadline() == 15.0 + TIMES.hold


def test_a_reservation_that_is_not_served_in_time_ends(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(1.0, PEER, reserve(deadline_ms=2000))
    machine.computed(1.0, computed((1,)))
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


# --- The peer goes away


def test_a_dead_peers_requests_are_reported_once_it_is_fenced(machine: PrefillMachine) -> None:
    sealed(machine)
    machine.expect(0.0, prefill_request("u"))
    machine.reserve(0.0, PEER, reserve(transfer="u"))
    machine.computed(0.0, computed((4,), transfer="u"))
    machine.expect(0.0, prefill_request("other"))
    machine.reserve(0.0, OTHER, reserve(transfer="other"))
    assert machine.peer_down(1.0, PEER, "silent for 5 s") == []
    assert machine.computed(1.0, computed((5,), first=1, transfer="u")) == []
    phases = {one.transfer_id: one.phase for one in machine.under_way()}
    assert phases == {"t": "fencing", "u": "fencing", "other": "active"}
    actions = machine.fenced(2.0, PEER)
    assert only(actions, FinishedSending).request_id == "p-t"
    assert [ended.outcome for ended in every(actions, Ended)] == [Outcome.FAILED] * 2
    assert every(actions, Send) == []  # there is nobody to tell
    assert only(machine.request_finished(3.0, "u", True, ""), FinishedSending).request_id == "p-u"
    assert len(machine) == 1  # the other peer's


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
    machine.computed(0.0, computed((1, 2, 3), transfer="running"))
    machine.expect(0.0, prefill_request("finished"))
    machine.request_finished(0.0, "finished", True, "")
    actions = machine.forget_pages(1.0)
    assert only(actions, FinishedSending).request_id == prefill_request("finished").request_id
    assert every(machine.reserve(1.0, PEER, reserve(transfer="running")), Push) == []
    assert every(machine.computed(1.0, computed((1, 2, 3), transfer="running")), Push) != []


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


# --- Memory


def test_tombstones_are_forgotten_by_age() -> None:
    times = replace(TIMES, hold=1.0, orphan=1.0, transfer=2.0, cancel=1.0, drain=1.0)
    machine = PrefillMachine(layout(), times)
    assert isinstance(machine.admit(PEER, layout(), WANTS, regions=1), Plan)
    machine.cancel(0.0, PEER, Cancel("t", 1))
    machine.tick(2 * times.longest() - 0.1)
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert len(machine) == 0
    machine.tick(2 * times.longest())
    machine.reserve(7.0, PEER, reserve())
    assert len(machine) == 1


def test_tombstones_are_bounded(machine: PrefillMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 3)
    for name in "abcd":
        machine.cancel(0.0, PEER, Cancel(name, 1))
    machine.reserve(0.0, PEER, reserve(transfer="a"))
    assert len(machine) == 1  # forgotten: an orphan now
    machine.reserve(0.0, PEER, reserve(transfer="b"))
    assert len(machine) == 1
