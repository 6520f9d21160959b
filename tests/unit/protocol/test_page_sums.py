"""Verified pages in both state machines: when sums are requested, sent and compared, and each other end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from prefill_setup import machine as prefill
from prefill_setup import sealed
from protocol_setup import (
    BLOCK,
    P_ADDRESS,
    PAGE,
    computed,
    decode_request,
    every,
    layout,
    only,
    prefill_request,
    reserve,
    worker,
)

from kv_connector.protocol.actions import (
    CorruptPage,
    Ended,
    Fence,
    FinishedReceiving,
    FinishedSending,
    Outcome,
    PagesChecked,
    Seal,
    Send,
    Share,
    SummedPages,
    SumPages,
)
from kv_connector.protocol.decode.decode_machine import DecodeMachine
from kv_connector.protocol.page_sums import SUM_BYTES, source_pages, sums_messages, target_pages
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import (
    MAX_SUMS_BYTES,
    Cancel,
    CancelAck,
    Fail,
    FailCode,
    Reserve,
    Sampled,
    Sums,
    decode,
    encode,
)

__all__ = ["prefill"]

PEER = 1
TIMES = Timeouts()
PAGES = layout(num_blocks=32)
ATTEMPT = 1  # the first one of a machine
GOOD = bytes(range(48))  # the sums of 3 blocks in 2 layers
SOURCE = SummedPages(((0, 0), (0, 64 * PAGE)), (1, 2, 3), PAGE, (0,), PAGE)
TARGET = SummedPages(((0, 0), (0, 32 * PAGE)), (11, 12, 13), PAGE, (0,), PAGE)


def verifying(
    *, knows_defer: bool = True, verify: bool = True, wants_sampled: bool = False
) -> tuple[DecodeMachine, Reserve]:
    """A machine whose RESERVE for a request has been sent, and the RESERVE."""
    machine = DecodeMachine(PAGES, TIMES, verify=verify)
    machine.engine_found(0.0, P_ADDRESS, (worker(PAGES),))
    machine.peer_up(0.0, P_ADDRESS, PEER, knows_defer=knows_defer)
    machine.reserve(0.0, replace(decode_request(), wants_sampled=wants_sampled))
    message = only(machine.counter_opened(0.0, "d-t", 100), Send).message
    assert isinstance(message, Reserve)
    return machine, message


def sums(attempt: int, data: bytes = GOOD, first: int = 0, reason: str = "") -> Sums:
    return Sums("t", attempt, first, data, reason)


PREEMPTED = sums(1, b"", reason="its prompt was preempted at the prefill engine")


# --- Of the prefill side


def test_blocks_are_summed_after_the_last_write_and_then_given_back(prefill: PrefillMachine) -> None:
    wanted = msgspec.structs.replace(reserve(), wants_sums=True)
    prefill.expect(0.0, prefill_request())
    prefill.reserve(0.0, PEER, wanted)
    # In another order than D's blocks.
    prefill.pages_computed(0.0, computed((2, 3), first=1))
    prefill.pages_computed(0.0, computed((1,), base=2))
    prefill.request_finished(0.0, "t", True, "")
    ended = prefill.writes_ended(1.0, Share("t"), WritesEnd.DONE, True, "")
    assert ended == [SumPages(Share("t"), (SOURCE,))]
    actions = prefill.pages_summed(2.0, Share("t"), GOOD, "")
    assert only(actions, Send).message == sums(1)
    assert actions.index(only(actions, Send)) < actions.index(only(actions, FinishedSending))
    assert only(actions, Ended).outcome is Outcome.COMPLETED


def test_nothing_is_summed_unless_decode_wants_it(prefill: PrefillMachine) -> None:
    sealed(prefill)
    actions = prefill.writes_ended(1.0, Share("t"), WritesEnd.DONE, True, "")
    assert every(actions, SumPages) == []
    only(actions, FinishedSending)


def test_problem_of_the_summer_is_sent_in_place_of_sums(prefill: PrefillMachine) -> None:
    _summing(prefill)
    actions = prefill.pages_summed(2.0, Share("t"), b"", "no kernels")
    assert only(actions, Send).message == sums(1, b"", reason="no kernels")
    only(actions, FinishedSending)


def test_preempted_prompt_has_no_sums(prefill: PrefillMachine) -> None:
    prefill.expect(0.0, prefill_request())
    prefill.reserve(0.0, PEER, msgspec.structs.replace(reserve(), wants_sums=True))
    prefill.pages_computed(0.0, computed((1,)))
    assert prefill.preempt(("t",)) == (Share("t"),)
    prefill.pages_computed(0.0, computed((4, 2, 3)))
    prefill.request_finished(0.0, "t", True, "")
    only(prefill.writes_ended(1.0, Share("t"), WritesEnd.DONE, True, ""), SumPages)
    actions = prefill.pages_summed(2.0, Share("t"), GOOD, "")
    assert only(actions, Send).message == PREEMPTED
    only(actions, FinishedSending)


def test_prompt_that_is_preempted_while_it_is_summed_has_no_sums(prefill: PrefillMachine) -> None:
    _summing(prefill, finished=False)
    assert prefill.preempt(("t",)) == ()
    actions = prefill.pages_summed(2.0, Share("t"), GOOD, "")
    assert only(actions, Send).message == PREEMPTED
    prefill.pages_computed(3.0, computed((4, 5, 6)))
    only(prefill.request_finished(3.0, "t", True, ""), FinishedSending)


def test_sums_are_wanted_until_the_share_ends(prefill: PrefillMachine) -> None:
    _summing(prefill, finished=False)
    assert prefill.wants_sums(Share("t"))
    assert not prefill.wants_sums(Share("another"))
    prefill.cancel(3.0, PEER, Cancel("t", 1, 0))
    assert not prefill.wants_sums(Share("t"))


@pytest.mark.parametrize("finished", ["before the sums", "after the sums"])
def test_sums_do_not_wait_for_the_end_of_the_request(prefill: PrefillMachine, finished: str) -> None:
    """vLLM reports the end two steps later. The share does not end before, because D may want the token."""
    wanted = msgspec.structs.replace(reserve(), wants_sums=True, wants_sampled=True)
    prefill.expect(0.0, prefill_request())
    prefill.reserve(0.0, PEER, wanted)
    assert every(prefill.pages_computed(0.0, computed((1, 2))), Seal) == []
    assert prefill.pages_computed(0.0, computed((3,), first=2, base=2))[-1] == Seal(Share("t"))
    ended = prefill.writes_ended(1.0, Share("t"), WritesEnd.DONE, True, "")
    assert ended == [SumPages(Share("t"), (SOURCE,))]
    token = Send(PEER, Sampled("t", 1, 42))
    if finished == "before the sums":
        assert prefill.request_finished(2.0, "t", True, "", 42) == [token]
        actions = prefill.pages_summed(3.0, Share("t"), GOOD, "")
        assert actions[0] == Send(PEER, sums(1))
    else:
        assert prefill.pages_summed(2.0, Share("t"), GOOD, "") == [Send(PEER, sums(1))]
        assert prefill.writing(Share("t")) is False
        actions = prefill.request_finished(3.0, "t", True, "", 42)
        assert actions[0] == token
    assert only(actions, Ended).outcome is Outcome.COMPLETED
    only(actions, FinishedSending)


def test_request_that_fails_after_its_sums_ends(prefill: PrefillMachine) -> None:
    _summing(prefill, finished=False)
    prefill.pages_summed(2.0, Share("t"), GOOD, "")
    actions = prefill.request_finished(3.0, "t", False, "aborted", aborted=True)
    fail = only(actions, Send).message
    assert isinstance(fail, Fail)
    assert fail.quiesced
    only(actions, FinishedSending)


def test_share_ends_without_waiting_for_the_summer(prefill: PrefillMachine) -> None:
    """Nothing is in flight. A slow summer must not cost D its session."""
    _summing(prefill)
    actions = prefill.cancel(2.0, PEER, Cancel("t", 1))
    assert only(actions, Send).message == CancelAck("t", 1, drained=True)
    only(actions, FinishedSending)
    assert prefill.pages_summed(3.0, Share("t"), GOOD, "") == []


def test_sums_are_not_awaited_beyond_the_deadline(prefill: PrefillMachine) -> None:
    _summing(prefill)
    actions = prefill.tick(reserve().deadline_ms / 1000)
    fail = only(actions, Send).message
    assert isinstance(fail, Fail)
    assert fail.quiesced
    only(actions, FinishedSending)


def test_sums_of_a_share_that_is_over_are_dropped(prefill: PrefillMachine) -> None:
    _summing(prefill)
    only(prefill.peer_down(2.0, PEER, "lost"), FinishedSending)
    assert prefill.fenced(2.0, PEER) == []
    assert prefill.pages_summed(3.0, Share("t"), GOOD, "") == []


def test_many_sums_take_several_messages() -> None:
    data = bytes(2 * MAX_SUMS_BYTES + SUM_BYTES)
    messages = list(sums_messages(reserve(), data))
    assert [(one.first, len(one.sums)) for one in messages] == [
        (0, MAX_SUMS_BYTES),
        (MAX_SUMS_BYTES, MAX_SUMS_BYTES),
        (2 * MAX_SUMS_BYTES, SUM_BYTES),
    ]
    assert [decode(encode(one)) for one in messages] == messages


# --- Of the decode side


@pytest.mark.parametrize(("knows_defer", "verify"), [(True, False), (False, True), (True, True)])
def test_sums_are_requested_from_engines_that_know_them(knows_defer: bool, verify: bool) -> None:
    """An older engine cannot decode a RESERVE with the field."""
    _, message = verifying(knows_defer=knows_defer, verify=verify)
    assert message.wants_sums is (knows_defer and verify)


@pytest.mark.parametrize("theirs_first", [True, False])
def test_load_ends_once_both_sums_are_there(theirs_first: bool) -> None:
    machine, message = verifying()
    if theirs_first:
        assert machine.sums(1.0, PEER, sums(message.attempt)) == []
    assert machine.counter_reached(1.0, "d-t") == [SumPages(ATTEMPT, (TARGET,))]
    if theirs_first:
        actions = machine.pages_summed(2.0, ATTEMPT, GOOD, "")
    else:
        assert machine.pages_summed(2.0, ATTEMPT, GOOD, "") == []
        actions = machine.sums(2.0, PEER, sums(message.attempt))
    assert only(actions, PagesChecked) == PagesChecked("t", "d-t", 6, 0, None, ())
    assert only(actions, FinishedReceiving) == FinishedReceiving("d-t", failed=False)


def test_pages_that_differ_fail_the_load_and_are_named() -> None:
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    ours = bytearray(GOOD)
    ours[1 * SUM_BYTES] ^= 1  # layer 0, second block
    ours[5 * SUM_BYTES + 7] ^= 128  # layer 1, third block
    machine.pages_summed(1.0, ATTEMPT, bytes(ours), "")
    actions = machine.sums(1.0, PEER, sums(message.attempt))
    checked = only(actions, PagesChecked)
    assert (checked.corrupt, checked.first) == (2, CorruptPage(PEER, "layer0", 12, BLOCK, BLOCK))
    assert only(actions, Send).message == Cancel("t", message.attempt)
    ended = machine.cancel_ack(2.0, PEER, CancelAck("t", message.attempt, drained=True))
    assert only(ended, FinishedReceiving) == FinishedReceiving("d-t", failed=True)
    assert "2 of 6 pages differ" in only(ended, Ended).reason


def test_page_of_any_layer_is_named() -> None:
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    machine.pages_summed(1.0, ATTEMPT, GOOD[:-1] + b"!", "")
    actions = machine.sums(1.0, PEER, sums(message.attempt))
    assert only(actions, PagesChecked).first == CorruptPage(PEER, "layer1", 13, 2 * BLOCK, BLOCK)


@pytest.mark.parametrize("drafts", ["prefill", "decode", "both"])
def test_pages_of_a_drafter_have_no_sums(drafts: str) -> None:
    """P's drafter writes behind the prompt's end, into its last block, after its layer was signalled."""
    first, last = PAGES.layers
    of_drafter = msgspec.structs.replace(PAGES, layers=(first, msgspec.structs.replace(last, needed=False)))
    source = PAGES if drafts == "decode" else of_drafter
    target = PAGES if drafts == "prefill" else of_drafter
    plan = Plan(source, target)
    ours = target_pages(plan, decode_request().groups, 3 * BLOCK)
    theirs = source_pages(plan, {((0, 0), (0, 0)): [(1, 11)]})
    assert [pages.layers for pages in (*ours, *theirs)] == [((0, 0),), ((0, 0),)]


def test_layers_of_several_regions_are_summed_together() -> None:
    """vLLM has a region for each layer. On a GPU each SummedPages takes a launch."""
    layers = [
        msgspec.structs.replace(layer, parts=(msgspec.structs.replace(layer.parts[0], region=region),))
        for region, layer in enumerate(PAGES.layers)
    ]
    regions = msgspec.structs.replace(PAGES, layers=tuple(layers))
    (pages,) = source_pages(Plan(regions, regions), {((0, 0), (0, 0)): [(3, 13), (2, 12)]})
    assert pages.layers == ((0, 0), (1, 32 * PAGE))
    assert pages.blocks == (2, 3)


def test_sums_have_one_order_where_the_sides_join_other_layers() -> None:
    """D joins all layers, and P none, because its layers have different strides."""
    first, last = PAGES.layers
    wide = msgspec.structs.replace(last.parts[0], region=1, offset=0, block_stride=2 * PAGE)
    apart = msgspec.structs.replace(PAGES, layers=(first, msgspec.structs.replace(last, parts=(wide,))))
    plan = Plan(apart, PAGES)
    theirs = source_pages(plan, {((0, 0), (0, 0)): [(3, 12), (2, 11)]})
    ours = target_pages(plan, (GroupTarget(0, (11, 12)),), 2 * BLOCK)
    assert [pages.layers for pages in theirs] == [((0, 0),), ((1, 0),)]
    assert [pages.layers for pages in ours] == [((0, 0), (0, 32 * PAGE))]
    assert all(pages.blocks == (2, 3) for pages in theirs)


def test_sums_come_in_parts_and_repetitions_are_dropped() -> None:
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    machine.pages_summed(1.0, ATTEMPT, GOOD, "")
    assert machine.sums(1.0, PEER, sums(message.attempt, GOOD[:16])) == []
    assert machine.sums(1.0, PEER, sums(message.attempt, GOOD[:16])) == []
    actions = machine.sums(1.0, PEER, sums(message.attempt, GOOD[16:], 16))
    assert only(actions, PagesChecked) == PagesChecked("t", "d-t", 6, 0, None, ())


@pytest.mark.parametrize("wrong", [sums(1, GOOD + bytes(8)), sums(1, GOOD[16:], 16)], ids=["long", "gap"])
def test_other_sums_than_those_of_the_pages_fail_the_load(wrong: Sums) -> None:
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    machine.pages_summed(1.0, ATTEMPT, GOOD, "")
    machine.sums(1.0, PEER, msgspec.structs.replace(wrong, attempt=message.attempt))
    ended = machine.cancel_ack(2.0, PEER, CancelAck("t", message.attempt, drained=True))
    assert only(ended, FinishedReceiving).failed


def test_pages_of_an_older_engine_are_used_without_a_check() -> None:
    machine, _ = verifying(knows_defer=False)
    assert machine.counter_reached(1.0, "d-t") == [SumPages(ATTEMPT, ())]
    actions = machine.pages_summed(1.0, ATTEMPT, b"", "")
    assert only(actions, PagesChecked).unverified == ((PEER, "it runs an older release"),)
    assert only(actions, FinishedReceiving) == FinishedReceiving("d-t", failed=False)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pages_without_sums_are_used_without_a_check(side: str) -> None:
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    if side == "prefill":
        machine.pages_summed(1.0, ATTEMPT, GOOD, "")
        actions = machine.sums(1.0, PEER, sums(message.attempt, b"", reason="no kernels"))
    else:
        actions = machine.pages_summed(1.0, ATTEMPT, b"", "no kernels")
    assert only(actions, PagesChecked) == PagesChecked("t", "d-t", 0, 0, None, ((PEER, "no kernels"),))
    assert only(actions, FinishedReceiving) == FinishedReceiving("d-t", failed=False)


def test_source_that_is_lost_before_its_sums_fails_the_load() -> None:
    machine, _ = verifying()
    machine.counter_reached(1.0, "d-t")
    machine.pages_summed(1.0, ATTEMPT, GOOD, "")
    assert every(machine.peer_down(1.0, PEER, "lost"), FinishedReceiving) == []
    assert only(machine.fenced(1.0, PEER), FinishedReceiving) == FinishedReceiving("d-t", failed=True)


def test_source_that_is_lost_after_its_sums_is_not_missed() -> None:
    machine, message = verifying()
    machine.sums(1.0, PEER, sums(message.attempt))
    machine.counter_reached(1.0, "d-t")
    assert every(machine.peer_down(1.0, PEER, "lost"), Ended) == []
    actions = machine.pages_summed(2.0, ATTEMPT, GOOD, "")
    assert only(actions, FinishedReceiving) == FinishedReceiving("d-t", failed=False)


def test_prefill_engine_that_fails_before_its_sums_fails_the_load() -> None:
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    machine.pages_summed(1.0, ATTEMPT, GOOD, "")
    fail = Fail("t", message.attempt, FailCode.EXPIRED, "deadline", quiesced=True)
    assert only(machine.fail(1.0, PEER, fail), FinishedReceiving) == FinishedReceiving("d-t", failed=True)


def test_last_page_of_a_transfer_that_fails_does_not_save_it() -> None:
    """Its pages were not checked."""
    machine, _ = verifying()
    machine.peer_down(1.0, PEER, "lost")
    assert only(machine.counter_reached(1.0, "d-t"), FinishedReceiving) == FinishedReceiving(
        "d-t", failed=True
    )


def test_request_that_is_aborted_during_the_check_is_not_reported_as_failed() -> None:
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    machine.sums(1.0, PEER, sums(message.attempt))
    machine.cancel(1.0, "d-t")
    assert machine.pages_summed(1.0, ATTEMPT, GOOD, "") == []
    ended = machine.cancel_ack(2.0, PEER, CancelAck("t", message.attempt, drained=True))
    assert only(ended, FinishedReceiving) == FinishedReceiving("d-t", failed=False)


def test_sums_for_an_aborted_request_do_not_count_for_the_next_one_of_its_id() -> None:
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    machine.cancel(1.0, "d-t")
    machine.cancel_ack(1.0, PEER, CancelAck("t", message.attempt, drained=True))
    machine.reserve(2.0, decode_request())
    again = only(machine.counter_opened(2.0, "d-t", 100), Send).message
    assert isinstance(again, Reserve)
    machine.sums(3.0, PEER, sums(again.attempt))
    machine.counter_reached(3.0, "d-t")
    assert machine.pages_summed(4.0, message.attempt, GOOD, "") == []
    only(machine.pages_summed(5.0, again.attempt, GOOD, ""), FinishedReceiving)


def test_wrong_sums_of_a_prompt_that_was_aborted_are_dropped() -> None:
    machine, message = verifying()
    machine.fail(1.0, PEER, Fail("t", message.attempt, FailCode.PREFILL_ABORTED, "left", quiesced=True))
    assert machine.sums(1.0, PEER, sums(message.attempt, GOOD[16:], 16)) == []


@pytest.mark.parametrize(
    ("summed", "side"),
    [
        ("decode", f"the prefill engine at {P_ADDRESS} did not"),
        ("prefill", "but this engine did not"),
        ("", f"the prefill engine at {P_ADDRESS} and this engine did not"),
    ],
)
def test_check_without_sums_fails_the_load_and_names_the_engine(summed: str, side: str) -> None:
    """A GPU that hangs must not keep the request for the time of a whole transfer."""
    machine, message = verifying()
    machine.counter_reached(1.0, "d-t")
    assert [one.phase for one in machine.under_way()] == ["checking"]
    if summed == "decode":
        machine.pages_summed(2.0, ATTEMPT, GOOD, "")
    elif summed == "prefill":
        machine.sums(2.0, PEER, sums(message.attempt))
    assert machine.next_deadline() == 1.0 + TIMES.check
    assert machine.tick(0.9 + TIMES.check) == []
    assert isinstance(only(machine.tick(1.0 + TIMES.check), Send).message, Cancel)
    actions = machine.cancel_ack(40.0, PEER, CancelAck("t", message.attempt, drained=True))
    assert only(actions, FinishedReceiving) == FinishedReceiving("d-t", failed=True)
    assert f"{side} sum them within 30 s (timeout `check`)" in only(actions, Ended).reason
    # Sums that come afterwards change nothing.
    assert machine.pages_summed(50.0, ATTEMPT, GOOD, "") == []
    assert machine.sums(50.0, PEER, sums(message.attempt)) == []


def test_check_without_sums_fences_a_peer_that_does_not_answer() -> None:
    machine, _ = verifying()
    machine.counter_reached(1.0, "d-t")
    assert machine.wants_sums(ATTEMPT)
    machine.tick(1.0 + TIMES.check)
    assert not machine.wants_sums(ATTEMPT)
    assert isinstance(only(machine.tick(1.0 + TIMES.check + TIMES.cancel), Fence), Fence)


def test_check_that_begins_late_is_over_with_the_transfers_deadline() -> None:
    machine, _ = verifying()
    machine.counter_reached(TIMES.transfer - 1.0, "d-t")
    assert isinstance(only(machine.tick(TIMES.transfer), Send).message, Cancel)


def test_check_that_is_over_leaves_the_token_its_time() -> None:
    machine, message = verifying(wants_sampled=True)
    machine.counter_reached(1.0, "d-t")
    machine.sums(2.0, PEER, sums(message.attempt))
    machine.pages_summed(2.0, ATTEMPT, GOOD, "")
    assert [one.phase for one in machine.under_way()] == ["landed"]
    assert machine.next_deadline() == TIMES.transfer


@pytest.mark.parametrize("token_first", [True, False])
def test_token_and_check_are_both_awaited(token_first: bool) -> None:
    machine, message = verifying(wants_sampled=True)
    token = Sampled("t", message.attempt, 42)
    if token_first:
        machine.sampled(1.0, PEER, token)
    machine.counter_reached(1.0, "d-t")
    machine.sums(1.0, PEER, sums(message.attempt))
    actions = machine.pages_summed(1.0, ATTEMPT, GOOD, "")
    if not token_first:
        assert every(actions, FinishedReceiving) == []
        actions = machine.sampled(1.0, PEER, token)
    assert only(actions, FinishedReceiving) == FinishedReceiving("d-t", failed=False, sampled=42)


def _summing(machine: PrefillMachine, *, finished: bool = True) -> None:
    """Brings the machine to a share whose pages are being summed."""
    machine.expect(0.0, prefill_request())
    machine.reserve(0.0, PEER, msgspec.structs.replace(reserve(), wants_sums=True))
    machine.pages_computed(0.0, computed((1, 2, 3)))
    if finished:
        machine.request_finished(0.0, "t", True, "")
    only(machine.writes_ended(1.0, Share("t"), WritesEnd.DONE, True, ""), SumPages)
