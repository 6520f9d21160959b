"""P's side of a transfer: every page is sent once, every request is reported once, and D always gets an
answer."""

from __future__ import annotations

import logging

import pytest
from prefill_setup import MOVING, PEER, TIMES, active, assert_over, message, pushed, wanting
from protocol_setup import (
    all_of,
    computed,
    every,
    layout,
    only,
    prefill_request,
    reserve,
    with_rows,
)

from kv_connector.protocol.actions import (
    Ended,
    FinishedSending,
    Log,
    Outcome,
    Push,
    PushedGroup,
    Seal,
    Send,
    Share,
)
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.wire.messages import Fail, Sampled


def pushed_group(group: int, source: tuple[int, ...], target: tuple[int, ...]) -> PushedGroup:
    """Whole blocks of a group that has the same number on both sides."""
    return PushedGroup((group, group), (0, 0), source, target)


# --- The token behind the prompt


@pytest.mark.parametrize("token", [7, None])
def test_decode_receives_the_token_when_the_prompt_is_finished(
    machine: PrefillMachine, token: int | None
) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, wanting())
    machine.pages_computed(0.0, computed((1, 2, 3)))
    said = Send(PEER, Sampled("t", reserve().attempt, token))
    assert machine.request_finished(0.0, "t", True, "", token) == [said, Seal(Share("t"))]


def test_decode_that_requests_a_finished_prompt_receives_the_token_at_once(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2, 3)))
    machine.request_finished(0.0, "t", True, "", 7)
    actions = machine.reserve(0.0, PEER, wanting())
    assert message(actions) == Sampled("t", reserve().attempt, 7)


def test_token_of_an_abandoned_prompt_is_not_sent(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, wanting())
    actions = machine.request_finished(0.0, "t", False, "aborted", 7, aborted=True)
    assert [type(send.message) for send in every(actions, Send)] == [Fail]


# --- The good path


def test_pages_are_sent_when_computed_and_the_request_is_reported_on_their_arrival(
    machine: PrefillMachine,
) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve())
    actions = machine.pages_computed(1.0, computed((1, 2), base=40))
    assert actions == [Push(PEER, Share("t"), 40, 100, (PushedGroup((0, 0), (0, 0), (1, 2), (11, 12)),))]
    assert pushed(machine.pages_computed(2.0, computed((3,), first=2, base=42))) == {3: 13}
    assert machine.request_finished(3.0, "t", True, "") == [Seal(Share("t"))]
    actions = machine.writes_ended(4.0, Share("t"), WritesEnd.DONE, True, "")
    assert only(actions, FinishedSending).request_id == "p-t"
    assert only(actions, Ended).outcome is Outcome.COMPLETED
    assert only(actions, Ended).seconds == 4.0
    assert every(actions, Send) == []  # D counts its pages, and gets no message
    assert_over(machine)


def test_reserve_may_come_before_the_request(machine: PrefillMachine) -> None:
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert machine.expect(1.0, prefill_request()) == MOVING
    assert machine.next_deadline() == TIMES.transfer  # no longer an orphan
    assert pushed(machine.pages_computed(1.0, computed((1, 2, 3)))) == {1: 11, 2: 12, 3: 13}


def test_serial_dispatch_pushes_everything_when_reserve_comes(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1, 2), base=0))
    machine.pages_computed(0.0, computed((3,), first=2, base=2))
    machine.request_finished(0.0, "t", True, "")
    actions = machine.reserve(5.0, PEER, reserve())
    assert [push.signal_base for push in every(actions, Push)] == [0, 2]
    assert pushed(actions) == {1: 11, 2: 12, 3: 13}
    assert actions[-1] == Seal(Share("t"))


def test_each_page_goes_once_however_often_it_is_computed(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.pages_computed(0.0, computed((1, 2), base=2)) == []
    assert pushed(machine.pages_computed(0.0, computed((1, 2, 3), base=4))) == {3: 13}


def test_a_page_named_again_before_it_is_wanted_keeps_its_first_step(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1,), base=0))
    machine.pages_computed(0.0, computed((1, 2), base=2))
    actions = machine.reserve(0.0, PEER, reserve())
    assert [(push.signal_base, push.groups[0].source) for push in every(actions, Push)] == [
        (0, (1,)),
        (2, (2,)),
    ]


def test_pages_that_are_computed_already_go_without_a_step_of_their_own(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(0.0, computed((1,), base=4))
    machine.pages_computed(0.0, computed((1, 2), base=None))  # the first page is valid since its step
    machine.pages_computed(0.0, computed((2, 3), first=1, base=8))  # the second is valid already
    actions = machine.reserve(0.0, PEER, reserve())
    assert [(push.signal_base, push.groups[0].source) for push in every(actions, Push)] == [
        (None, (2,)),
        (4, (1,)),
        (8, (3,)),
    ]


def test_null_blocks_are_skipped_on_both_sides(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve(blocks=(0, 12, 13)))
    assert pushed(machine.pages_computed(0.0, computed((1, 2, 0)))) == {2: 12}
    assert pushed(machine.pages_computed(0.0, computed((3,), first=2))) == {3: 13}
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]


def test_groups_are_pushed_by_their_own_tables() -> None:
    machine = PrefillMachine(layout(groups=(2, 1)), TIMES)
    pages = layout(groups=(2, 1))
    assert isinstance(machine.admit(PEER, pages, all_of(pages), regions=1), Plan)
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve(more=[(0, 22, 23)]))
    push = only(machine.pages_computed(0.0, computed((1, 2, 3), more=[(0, 5, 6)])), Push)
    assert push.groups == (pushed_group(0, (1, 2, 3), (11, 12, 13)), pushed_group(1, (5, 6), (22, 23)))


def test_rows_go_with_the_step_in_which_they_are_there() -> None:
    pages = with_rows(layout(groups=(2, 1)), 8)
    machine = PrefillMachine(pages, TIMES)
    assert isinstance(machine.admit(PEER, pages, all_of(pages), regions=1), Plan)
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve(more=[(0,)]))
    push = only(machine.pages_computed(0.0, computed((1, 2), more=[()])), Push)
    assert push.groups == (pushed_group(0, (1, 2), (11, 12)),)
    push = only(machine.pages_computed(0.0, computed((3,), first=2, base=3, more=[(0,)])), Push)
    assert push.groups == (pushed_group(0, (3,), (13,)), pushed_group(1, (0,), (0,)))
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]


def test_a_reserve_that_wants_no_page_needs_no_writes(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, reserve(blocks=(0, 0, 0)))
    assert machine.pages_computed(0.0, computed((1, 2, 3))) == []
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
    assert only(machine.pages_computed(0.0, computed((1,))), Log).level == logging.WARNING
    machine.reserve(0.0, PEER, reserve())
    assert every(machine.pages_computed(0.0, computed((1,))), Push) == []
