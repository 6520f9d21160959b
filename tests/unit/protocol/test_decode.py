"""D's side of a transfer: every request reported once, and never while a page may still land."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from protocol_setup import (
    BLOCK,
    HASH,
    P_ADDRESS,
    T,
    all_of,
    decode_request,
    every,
    layout,
    only,
    worker,
)

from kv_connector.protocol.actions import (
    Address,
    CloseCounter,
    Dial,
    Ended,
    Fence,
    FindEngine,
    FinishedReceiving,
    Log,
    OpenCounter,
    Outcome,
    Reached,
    Send,
    State,
)
from kv_connector.protocol.decode.decode_machine import ABORT_LAG_S, DecodeAction, DecodeMachine
from kv_connector.protocol.pages.geometry import Place, Units, head_major, token_major
from kv_connector.protocol.pages.layout import GroupLayout, KvLayout, LayerLayout, Part
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import (
    Cancel,
    CancelAck,
    Fail,
    FailCode,
    Release,
    Reserve,
    Role,
    Sampled,
)

PEER, OTHER = 1, 2
OTHER_ADDRESS = Address("127.0.0.2", 5600)
TIMES = Timeouts()
IMMEDIATE = 100


PAGES = layout(num_blocks=32)
WANTS = all_of(PAGES)


@pytest.fixture
def machine() -> DecodeMachine:
    """The machine of a worker that has found two engines with one worker each."""
    made = DecodeMachine(PAGES, TIMES)
    for address in (P_ADDRESS, OTHER_ADDRESS):
        assert made.engine_found(0.0, address, (worker(PAGES),)) == [Dial(address, address, WANTS, PAGES)]
    return made


def reserved(machine: DecodeMachine, transfer: str = "t", now: float = 0.0, peer: int = PEER) -> Reserve:
    """A request whose RESERVE has been sent."""
    machine.peer_up(now, P_ADDRESS, peer)
    machine.reserve(now, decode_request(transfer))
    return sent(machine.counter_opened(now, f"d-{transfer}", IMMEDIATE), Reserve)


def sent(actions: list[DecodeAction], kind: type[T]) -> T:
    message = only(actions, Send).message
    assert isinstance(message, kind)
    return message


def report(actions: list[DecodeAction]) -> FinishedReceiving:
    """The one report; the counters are closed before it."""
    index = actions.index(only(actions, FinishedReceiving))
    for close in every(actions, CloseCounter):
        assert actions.index(close) < index
    return actions[index]  # type: ignore[return-value]


def done(request: str = "d-t") -> FinishedReceiving:
    return FinishedReceiving(request, failed=False)


def failed(request: str = "d-t") -> FinishedReceiving:
    return FinishedReceiving(request, failed=True)


def reached(state: State, reason: str = "") -> Reached:
    return Reached(Role.DECODE, "t", "d-t", state, reason)


# --- The state of a request


def test_a_request_moves_with_its_reserve_and_is_done_with_its_last_page(machine: DecodeMachine) -> None:
    assert every(machine.reserve(0.0, decode_request()), Reached) == []
    assert every(machine.peer_up(0.0, P_ADDRESS, PEER), Reached) == []
    assert only(machine.counter_opened(0.0, "d-t", IMMEDIATE), Reached) == reached(State.MOVING)
    assert machine.counter_reached(1.0, "d-t")[-2:] == [reached(State.DONE), done()]


def test_an_aborted_request_has_failed_once_nothing_can_land(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    assert every(machine.cancel(0.0, "d-t"), Reached) == []
    actions = machine.cancel_ack(1.0, PEER, CancelAck("t", attempt, drained=True))
    assert actions[-2:] == [reached(State.FAILED), done()]


def test_a_request_without_a_session_has_failed(machine: DecodeMachine) -> None:
    machine.reserve(0.0, decode_request())
    assert machine.dial_failed(1.0, P_ADDRESS, "refused")[-2:] == [reached(State.FAILED, "refused"), failed()]


# --- Versions of the weights


def test_decode_requests_pages_of_the_weights_that_it_serves(machine: DecodeMachine) -> None:
    assert reserved(machine).weights == ""
    machine.set_weights("v2")
    assert reserved(machine, "u").weights == "v2"


@pytest.mark.parametrize("quiesced", [True, False])
def test_stale_load_fails_without_blame(machine: DecodeMachine, quiesced: bool) -> None:
    attempt = reserved(machine).attempt
    actions = machine.fail(1.0, PEER, Fail("t", attempt, FailCode.STALE, "prefill engine has v2", quiesced))
    if not quiesced:
        machine.peer_down(1.0, PEER, "fenced")
        actions = machine.fenced(1.0, PEER)
    assert only(actions, Ended).outcome is Outcome.STALE
    assert "prefill engine has v2" in only(actions, Ended).reason
    assert report(actions) == FinishedReceiving("d-t", failed=True, stale=True)


def test_other_prompt_at_prefill_fails_without_blame_and_releases_the_prefill(
    machine: DecodeMachine,
) -> None:
    """A clock in a chat template: decode computes its own rendering, whatever the policy."""
    attempt = reserved(machine).attempt
    words = "the prompts differ: chat template"
    actions = machine.fail(1.0, PEER, Fail("t", attempt, FailCode.PROMPT_MISMATCH, words, True))
    assert sent(actions, Release) == Release("t")
    assert only(actions, Log).level == logging.WARNING
    assert words in only(actions, Log).text
    assert only(actions, Ended).outcome is Outcome.STALE
    assert report(actions) == FinishedReceiving("d-t", failed=True, stale=True)


def test_another_prompt_with_writes_in_flight_is_fenced_first(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    actions = machine.fail(1.0, PEER, Fail("t", attempt, FailCode.PROMPT_MISMATCH, "differ", False))
    assert only(actions, Fence).peer == PEER
    machine.peer_down(1.0, PEER, "fenced")
    assert only(machine.fenced(1.0, PEER), Ended).outcome is Outcome.STALE


def test_a_stale_load_that_is_aborted_meanwhile_is_cancelled(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    machine.cancel(0.5, "d-t")
    actions = machine.fail(1.0, PEER, Fail("t", attempt, FailCode.STALE, "prefill engine has v2", True))
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert report(actions) == done()


# --- The token that P sampled


def waiting_for_token(machine: DecodeMachine, blocks: Sequence[int] = (11, 12, 13)) -> Reserve:
    """All pages of the request have landed."""
    machine.peer_up(0.0, P_ADDRESS, PEER)
    machine.reserve(0.0, replace(decode_request(blocks=blocks), wants_sampled=True))
    message = sent(machine.counter_opened(0.0, "d-t", IMMEDIATE), Reserve)
    assert message.wants_sampled
    assert machine.counter_reached(1.0, "d-t") == []
    return message


def with_token(token: int | None) -> FinishedReceiving:
    return FinishedReceiving("d-t", failed=False, sampled=token)


@pytest.mark.parametrize("token", [7, None])
def test_a_request_that_wants_the_token_is_over_once_it_is_here(
    machine: DecodeMachine, token: int | None
) -> None:
    attempt = waiting_for_token(machine).attempt
    assert machine.sampled(2.0, OTHER, Sampled("t", attempt, 8)) == []
    assert machine.sampled(2.0, PEER, Sampled("t", attempt + 1, 8)) == []
    assert report(machine.sampled(2.0, PEER, Sampled("t", attempt, token))) == with_token(token)
    assert_over(machine)


def test_a_token_may_come_before_the_last_page(machine: DecodeMachine) -> None:
    machine.peer_up(0.0, P_ADDRESS, PEER)
    machine.reserve(0.0, replace(decode_request(), wants_sampled=True))
    attempt = sent(machine.counter_opened(0.0, "d-t", IMMEDIATE), Reserve).attempt
    assert machine.sampled(1.0, PEER, Sampled("t", attempt, 7)) == []
    assert report(machine.counter_reached(2.0, "d-t")) == with_token(7)
    assert_over(machine)


def test_cancel_is_sent_to_prefill_when_only_the_token_was_wanted(machine: DecodeMachine) -> None:
    """P may still be computing the prompt, unlike P of a request whose pages have all arrived."""
    attempt = waiting_for_token(machine, blocks=(0, 0)).attempt
    cancel = sent(machine.cancel(2.0, "d-t"), Cancel)
    assert (cancel.transfer_id, cancel.attempt) == ("t", attempt)
    assert machine.sampled(2.0, PEER, Sampled("t", attempt, 7)) == []
    actions = machine.cancel_ack(3.0, PEER, CancelAck("t", attempt, drained=True))
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert_over(machine)


def test_request_that_does_not_want_the_token_does_not_wait_for_it(machine: DecodeMachine) -> None:
    assert not reserved(machine).wants_sampled
    assert report(machine.counter_reached(1.0, "d-t")) == done()


@pytest.mark.parametrize(
    "lose",
    [
        lambda machine, attempt: machine.peer_down(2.0, PEER, "gone"),
        lambda machine, attempt: machine.fail(
            2.0, PEER, Fail("t", attempt, FailCode.PREFILL_ABORTED, "aborted", quiesced=False)
        ),
        lambda machine, attempt: machine.tick(TIMES.transfer + 1),
        lambda machine, attempt: machine.close(2.0),
    ],
    ids=["lost", "failed", "late", "closed"],
)
def test_request_with_all_pages_continues_without_an_unavailable_token(
    machine: DecodeMachine, lose: Callable[[DecodeMachine, int], list[DecodeAction]]
) -> None:
    attempt = waiting_for_token(machine).attempt
    assert report(lose(machine, attempt)) == with_token(None)
    assert_over(machine)


def test_an_aborted_request_does_not_wait_for_the_token(machine: DecodeMachine) -> None:
    waiting_for_token(machine)
    actions = machine.cancel(2.0, "d-t")
    assert report(actions) == with_token(None)
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert every(actions, Send) == []
    assert_over(machine)


def assert_over(machine: DecodeMachine) -> None:
    assert len(machine) == 0
    assert machine.next_deadline() is None


# --- The good path


def test_reserve_leaves_at_once_where_there_is_a_session(machine: DecodeMachine) -> None:
    machine.peer_up(0.0, P_ADDRESS, PEER)
    assert machine.reserve(10.0, decode_request(blocks=(11, 0, 13))) == [OpenCounter((PEER,), "d-t", 4)]
    actions = machine.counter_opened(10.0, "d-t", IMMEDIATE)
    assert only(actions, Send).peer == PEER
    message = sent(actions, Reserve)
    assert (message.transfer_id, message.prompt_tokens, message.prompt_hash) == ("t", 3 * BLOCK, HASH)
    assert message.groups == decode_request(blocks=(11, 0, 13)).groups
    assert message.immediate == IMMEDIATE
    assert message.deadline_ms == TIMES.transfer * 1000


def test_reserve_waits_for_its_session(machine: DecodeMachine) -> None:
    assert machine.reserve(0.0, decode_request()) == []
    assert machine.peer_up(0.5, OTHER_ADDRESS, OTHER) == []
    assert machine.peer_up(1.0, P_ADDRESS, PEER) == [OpenCounter((PEER,), "d-t", 6)]
    message = sent(machine.counter_opened(1.0, "d-t", IMMEDIATE), Reserve)
    assert message.deadline_ms == (TIMES.transfer - 1.0) * 1000


def test_the_last_page_ends_the_transfer(machine: DecodeMachine) -> None:
    reserved(machine, now=3.0)
    actions = machine.counter_reached(10.0, "d-t")
    assert report(actions) == done()
    assert every(actions, CloseCounter) == [CloseCounter("d-t")]
    assert (only(actions, Ended).outcome, only(actions, Ended).seconds) == (Outcome.COMPLETED, 7.0)
    assert machine.counter_reached(7.0, "d-t") == []
    assert_over(machine)


def test_prompt_without_a_hash_is_reserved_without_a_hash(machine: DecodeMachine) -> None:
    machine.peer_up(0.0, P_ADDRESS, PEER)
    machine.reserve(0.0, decode_request(prompt_hash=None))
    assert sent(machine.counter_opened(0.0, "d-t", IMMEDIATE), Reserve).prompt_hash is None


def test_attempts_differ(machine: DecodeMachine) -> None:
    assert reserved(machine, "t").attempt != reserved(machine, "u").attempt


def test_a_request_is_received_once(machine: DecodeMachine) -> None:
    reserved(machine)
    log = only(machine.reserve(0.0, decode_request()), Log)
    assert log.level == logging.ERROR
    assert len(machine) == 1


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (decode_request(blocks=(32,)), "block 32 of 32"),
        (decode_request(blocks=(1, 2, 3, 4)), "beyond the 3"),
        (decode_request(prompt_hash=b"short"), "the prompt hash has 5 bytes instead of 16"),
        (decode_request(prompt_hash=b""), "the prompt hash has 0 bytes instead of 16"),
        (decode_request(transfer=""), "a transfer id has 1 to 256 characters, this one 0"),
        (decode_request(transfer="x" * 257), "this one 257"),
        (decode_request(transfer="\ud800"), "valid Unicode"),
    ],
)
def test_unusable_request_fails_at_once(machine: DecodeMachine, request_: object, words: str) -> None:
    actions = machine.reserve(0.0, request_)  # type: ignore[arg-type]
    assert report(actions).failed
    assert words in only(actions, Ended).reason
    assert every(actions, Send) == []
    assert_over(machine)


def test_without_counters_the_request_fails_and_nothing_was_sent(machine: DecodeMachine) -> None:
    machine.peer_up(0.0, P_ADDRESS, PEER)
    machine.reserve(0.0, decode_request())
    actions = machine.counter_failed(0.0, "d-t", "RESOURCES in alloc_counters")
    why = "RESOURCES in alloc_counters"
    ended = Ended(Role.DECODE, "t", PEER, Outcome.FAILED, why, request_id="d-t")
    # P need not wait for a RESERVE.
    assert actions == [ended, reached(State.FAILED, why), failed(), Send(PEER, Release("t"))]
    assert_over(machine)


# --- P reports a failure


def test_a_quiesced_fail_is_reported_at_once(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    fail = Fail("t", attempt, FailCode.WRITE_ERROR, "no memory", quiesced=True)
    actions = machine.fail(1.0, PEER, fail)
    assert report(actions) == failed()
    assert only(actions, Ended).reason == "write_error: no memory"
    assert only(actions, Ended).outcome is Outcome.FAILED
    assert_over(machine)


@pytest.mark.parametrize("quiesced", [True, False])
def test_an_abort_at_prefill_cancels_the_load_that_its_request_cannot_use(
    machine: DecodeMachine, quiesced: bool
) -> None:
    """The client left only P. The transfer has not failed, and the blocks lack their pages."""
    attempt = reserved(machine).attempt
    actions = machine.fail(1.0, PEER, Fail("t", attempt, FailCode.PREFILL_ABORTED, "client left", quiesced))
    if not quiesced:
        assert every(actions, Ended) == []
        machine.peer_down(1.0, PEER, "fenced")
        actions = machine.fenced(1.0, PEER)
    assert every(actions, Ended) == []
    assert [one.phase for one in machine.under_way()] == ["stopped"]
    assert machine.next_deadline() == 1.0 + ABORT_LAG_S
    actions = machine.tick(1.0 + ABORT_LAG_S)
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert only(actions, Ended).reason == "prefill_aborted: client left"
    assert report(actions) == failed()
    assert_over(machine)


def test_a_client_that_leaves_prefill_first_is_answered_by_neither(machine: DecodeMachine) -> None:
    """D's abort follows within a step, before the failure is reported."""
    attempt = reserved(machine).attempt
    fail = Fail("t", attempt, FailCode.PREFILL_ABORTED, "client left", quiesced=True)
    assert machine.fail(1.0, PEER, fail) == []
    actions = machine.cancel(1.5, "d-t")
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert report(actions) == done()
    assert_over(machine)


def test_a_decode_engine_that_shuts_down_waits_for_no_abort(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    machine.fail(1.0, PEER, Fail("t", attempt, FailCode.PREFILL_ABORTED, "client left", quiesced=True))
    assert report(machine.close(1.1)) == failed()
    assert_over(machine)


def test_abort_at_prefill_does_not_hide_an_earlier_failure(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    (cancel,) = machine.tick(TIMES.transfer)
    assert cancel == Send(PEER, Cancel("t", attempt))
    fail = Fail("t", attempt, FailCode.PREFILL_ABORTED, "client left", quiesced=True)
    actions = machine.fail(TIMES.transfer + 1, PEER, fail)
    assert only(actions, Ended).outcome is Outcome.FAILED
    assert only(actions, Ended).reason == f"not complete within {TIMES.transfer:g} s"
    assert report(actions) == failed()


def test_a_fail_with_writes_in_flight_waits_for_the_fence(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    reserved(machine, "u")
    fail = Fail("t", attempt, FailCode.WRITE_ERROR, "x", quiesced=False)
    assert only(machine.fail(1.0, PEER, fail), Fence).peer == PEER
    assert machine.peer_down(1.0, PEER, "fenced") == []
    assert machine.tick(1000.0) == []
    actions = machine.fenced(2.0, PEER)
    # The fence also ended all other transfers with that peer.
    assert every(actions, FinishedReceiving) == [failed("d-t"), failed("d-u")]
    assert [ended.reason for ended in every(actions, Ended)] == ["write_error: x", "fenced"]
    assert_over(machine)


def test_messages_about_other_transfers_change_nothing(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    for peer, transfer, number in ((OTHER, "t", attempt), (PEER, "u", attempt), (PEER, "t", attempt + 1)):
        fail = Fail(transfer, number, FailCode.WRITE_ERROR, "", quiesced=True)
        assert machine.fail(0.0, peer, fail) == []
        assert machine.cancel_ack(0.0, peer, CancelAck(transfer, number, drained=True)) == []
    assert machine.cancel_ack(0.0, PEER, CancelAck("t", attempt, drained=True)) == []  # not requested
    assert len(machine) == 1


# --- Abort


def test_abort_before_reserve_was_sent_is_reported_at_once_and_releases_prefill(
    machine: DecodeMachine,
) -> None:
    machine.reserve(0.0, decode_request())
    actions = machine.cancel(0.0, "d-t")
    assert report(actions) == done()
    assert only(actions, Ended).outcome is Outcome.CANCELLED
    assert_over(machine)
    assert sent(machine.peer_up(1.0, P_ADDRESS, PEER), Release) == Release("t")


def test_abort_is_reported_when_prefill_has_stopped(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    actions = machine.cancel(1.0, "d-t")
    assert actions == [Send(PEER, Cancel("t", attempt))]
    assert machine.cancel(1.0, "d-t") == []
    actions = machine.cancel_ack(2.0, PEER, CancelAck("t", attempt, drained=True))
    assert report(actions) == done()  # the request is gone: not failed
    assert every(actions, CloseCounter) == [CloseCounter("d-t")]
    assert_over(machine)


def test_the_last_page_beats_the_cancellation(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    machine.cancel(1.0, "d-t")
    assert report(machine.counter_reached(1.5, "d-t")) == done()
    assert machine.cancel_ack(2.0, PEER, CancelAck("t", attempt, drained=True)) == []
    assert_over(machine)


def test_a_fail_ends_a_cancellation(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    machine.cancel(1.0, "d-t")
    fail = Fail("t", attempt, FailCode.PREFILL_ABORTED, "", quiesced=True)
    assert report(machine.fail(2.0, PEER, fail)) == done()
    assert_over(machine)


def test_acknowledgement_without_a_drain_is_fenced(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    machine.cancel(1.0, "d-t")
    actions = machine.cancel_ack(2.0, PEER, CancelAck("t", attempt, drained=False))
    assert only(actions, Fence).peer == PEER
    machine.peer_down(2.0, PEER, "fenced")
    assert report(machine.fenced(3.0, PEER)) == done()
    assert_over(machine)


def test_a_cancellation_without_an_answer_is_fenced(machine: DecodeMachine) -> None:
    reserved(machine)
    machine.cancel(1.0, "d-t")
    assert machine.tick(1.0 + TIMES.cancel - 0.1) == []
    assert only(machine.tick(1.0 + TIMES.cancel), Fence).peer == PEER
    machine.peer_down(7.0, PEER, "fenced")
    assert report(machine.fenced(8.0, PEER)) == done()


def test_an_abort_during_the_fence_is_not_a_failure(machine: DecodeMachine) -> None:
    reserved(machine)
    machine.peer_down(1.0, PEER, "gone")
    assert machine.cancel(1.0, "d-t") == []
    assert report(machine.fenced(2.0, PEER)) == done()


def test_an_abort_of_an_unknown_or_finished_request_is_nothing(machine: DecodeMachine) -> None:
    assert machine.cancel(0.0, "d-t") == []
    reserved(machine)
    machine.counter_reached(0.0, "d-t")
    assert machine.cancel(0.0, "d-t") == []


# --- Deadlines


def test_a_transfer_that_takes_too_long_is_cancelled_and_fails(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    assert machine.tick(TIMES.transfer - 0.1) == []
    assert machine.tick(TIMES.transfer) == [Send(PEER, Cancel("t", attempt))]
    actions = machine.cancel_ack(301.0, PEER, CancelAck("t", attempt, drained=True))
    assert report(actions) == failed()
    assert only(actions, Ended).reason == "not complete within 300 s"
    assert_over(machine)


def test_all_pages_after_the_deadline_are_still_all_pages(machine: DecodeMachine) -> None:
    reserved(machine)
    machine.tick(TIMES.transfer)
    assert report(machine.counter_reached(300.5, "d-t")) == done()


def test_an_abort_after_the_deadline_is_not_a_failure(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    machine.tick(TIMES.transfer)
    assert machine.cancel(300.5, "d-t") == []
    actions = machine.cancel_ack(301.0, PEER, CancelAck("t", attempt, drained=True))
    assert report(actions) == done()


def test_a_request_that_waits_for_its_session_too_long_fails(machine: DecodeMachine) -> None:
    machine.reserve(0.0, decode_request())
    actions = machine.tick(TIMES.transfer)
    assert report(actions) == failed()
    assert every(actions, Send) == []
    assert_over(machine)


# --- Several sources


@pytest.fixture
def divided() -> DecodeMachine:
    """The machine has found an engine of two workers, with one layer each."""
    made = DecodeMachine(PAGES, TIMES)
    ranks = (worker(PAGES, layers=(1,)), worker(PAGES, OTHER_ADDRESS, 1, layers=(0,)))
    assert made.engine_found(0.0, P_ADDRESS, ranks) == [
        Dial(P_ADDRESS, P_ADDRESS, ((), (0,)), ranks[0].layout),
        Dial(P_ADDRESS, OTHER_ADDRESS, ((0,), ()), ranks[1].layout),
    ]
    return made


def halves(machine: DecodeMachine, wants_sampled: bool = False) -> int:
    """A request whose RESERVE was sent to both workers."""
    machine.peer_up(0.0, P_ADDRESS, PEER)
    machine.peer_up(0.0, OTHER_ADDRESS, OTHER)
    machine.reserve(0.0, replace(decode_request(), wants_sampled=wants_sampled))
    sends = every(machine.counter_opened(0.0, "d-t", IMMEDIATE), Send)
    assert [send.peer for send in sends] == [PEER, OTHER]
    reserve, same = (send.message for send in sends)
    assert isinstance(reserve, Reserve)
    assert reserve == same
    return reserve.attempt


def test_all_sources_are_reserved_at_once_and_counted_together(divided: DecodeMachine) -> None:
    assert divided.reserve(0.0, decode_request()) == []
    assert divided.peer_up(0.0, OTHER_ADDRESS, OTHER) == []
    assert divided.peer_up(0.0, P_ADDRESS, PEER) == [OpenCounter((PEER, OTHER), "d-t", 6)]
    divided.counter_opened(0.0, "d-t", IMMEDIATE)
    assert report(divided.counter_reached(1.0, "d-t")) == done()
    assert_over(divided)


@pytest.mark.parametrize("quiesced", [True, False])
def test_failure_of_one_source_stops_the_others(divided: DecodeMachine, quiesced: bool) -> None:
    attempt = halves(divided)
    actions = divided.fail(1.0, PEER, Fail("t", attempt, FailCode.WRITE_ERROR, "x", quiesced))
    if not quiesced:
        assert only(actions, Fence).peer == PEER
        actions = divided.peer_down(1.0, PEER, "fenced")
    assert actions == [Send(OTHER, Cancel("t", attempt))]
    if not quiesced:
        assert divided.fenced(2.0, PEER) == []
    actions = divided.cancel_ack(3.0, OTHER, CancelAck("t", attempt, drained=True))
    assert report(actions) == failed()
    assert (only(actions, Ended).peer, only(actions, Ended).reason) == (PEER, "write_error: x")
    assert_over(divided)


def test_a_second_failure_changes_nothing(divided: DecodeMachine) -> None:
    attempt = halves(divided)
    divided.fail(1.0, OTHER, Fail("t", attempt, FailCode.EXPIRED, "first", quiesced=True))
    actions = divided.fail(2.0, PEER, Fail("t", attempt, FailCode.EXPIRED, "second", quiesced=True))
    assert report(actions) == failed()
    assert (only(actions, Ended).peer, only(actions, Ended).reason) == (OTHER, "expired: first")
    assert_over(divided)


def test_a_dead_source_is_fenced_and_the_others_stop(divided: DecodeMachine) -> None:
    attempt = halves(divided)
    assert divided.peer_down(1.0, PEER, "silent") == [Send(OTHER, Cancel("t", attempt))]
    assert divided.cancel_ack(2.0, OTHER, CancelAck("t", attempt, drained=True)) == []
    assert divided.next_deadline() is None, "the fence has its own bound"
    assert report(divided.fenced(3.0, PEER)) == failed()
    assert_over(divided)


def test_an_abort_waits_for_every_source(divided: DecodeMachine) -> None:
    attempt = halves(divided)
    cancel = Cancel("t", attempt)
    assert divided.cancel(1.0, "d-t") == [Send(PEER, cancel), Send(OTHER, cancel)]
    assert divided.cancel_ack(2.0, PEER, CancelAck("t", attempt, drained=True)) == []
    assert divided.cancel_ack(2.0, PEER, CancelAck("t", attempt, drained=True)) == []
    # Only the other source, which sends nothing, is fenced.
    assert [fence.peer for fence in every(divided.tick(1.0 + TIMES.cancel), Fence)] == [OTHER]
    divided.peer_down(7.0, OTHER, "fenced")
    assert report(divided.fenced(8.0, OTHER)) == done()
    assert_over(divided)


def test_the_last_page_beats_the_end_of_a_source(divided: DecodeMachine) -> None:
    halves(divided)
    divided.peer_down(1.0, PEER, "left")
    assert report(divided.counter_reached(1.0, "d-t")) == done()
    assert divided.fenced(2.0, PEER) == []
    assert_over(divided)


def test_token_of_one_source_is_enough(divided: DecodeMachine) -> None:
    attempt = halves(divided, wants_sampled=True)
    assert divided.counter_reached(1.0, "d-t") == []
    assert divided.peer_down(1.0, PEER, "left") == []
    assert report(divided.sampled(2.0, OTHER, Sampled("t", attempt, 7))) == with_token(7)
    assert divided.fenced(2.0, PEER) == []
    assert_over(divided)


def test_without_any_source_the_token_is_not_waited_for(divided: DecodeMachine) -> None:
    attempt = halves(divided, wants_sampled=True)
    assert divided.counter_reached(1.0, "d-t") == []
    assert divided.fail(1.0, PEER, Fail("t", attempt, FailCode.EXPIRED, "late", quiesced=True)) == []
    assert report(divided.peer_down(2.0, OTHER, "left")) == with_token(None)
    assert_over(divided)


def test_unreachable_source_fails_the_request_and_releases_the_others(
    divided: DecodeMachine,
) -> None:
    divided.peer_up(0.0, OTHER_ADDRESS, OTHER)
    assert divided.reserve(0.0, decode_request()) == []
    actions = divided.dial_failed(1.0, P_ADDRESS, "nobody answers")
    assert report(actions) == failed()
    assert only(actions, Send) == Send(OTHER, Release("t"))
    assert_over(divided)


def test_a_source_that_dies_before_all_are_there_fails_the_request(divided: DecodeMachine) -> None:
    divided.peer_up(0.0, OTHER_ADDRESS, OTHER)
    divided.reserve(0.0, decode_request())
    actions = divided.peer_down(1.0, OTHER, "silent")
    assert report(actions) == failed()
    assert every(actions, Send) == []
    assert divided.peer_up(1.0, P_ADDRESS, PEER) == []
    assert divided.fenced(1.0, OTHER) == []
    assert_over(divided)


def test_a_counter_that_comes_after_the_end_is_closed(machine: DecodeMachine) -> None:
    machine.peer_up(0.0, P_ADDRESS, PEER)
    machine.reserve(0.0, decode_request())
    assert report(machine.peer_down(0.0, PEER, "gone")) == failed()
    assert machine.counter_opened(0.0, "d-t", IMMEDIATE) == [CloseCounter("d-t")]
    assert machine.counter_failed(0.0, "d-t", "x") == []


def test_requests_to_an_engine_that_cannot_serve_fail_with_the_reason() -> None:
    for ranks, words in (
        ((worker(PAGES, layers=(0,)),), "layer layer1: no prefill rank has it"),
        (
            (worker(PAGES), worker(PAGES, OTHER_ADDRESS, 1)),
            r"layer layer0: prefill engine has it on stages [0, 1], not on one",
        ),
        (
            (worker(PAGES, layers=(0,)), worker(PAGES, P_ADDRESS, 1, layers=(1,))),
            "two of its workers listen at one address",
        ),
        (
            (worker(PAGES), worker(layout(stride=32), OTHER_ADDRESS)),
            "rank 1: part page of layer layer0 spac",
        ),
        (
            (worker(layout(page=32)),),
            "layer layer0: part page: bytes a run: prefill engine has 32, decode engine has 64",
        ),
    ):
        machine = DecodeMachine(PAGES, TIMES)
        machine.reserve(0.0, decode_request())
        machine.release(0.0, "other", P_ADDRESS)
        actions = machine.engine_found(0.0, P_ADDRESS, ranks)
        assert report(actions) == failed()
        assert f"the prefill engine at {P_ADDRESS} does not fit: {words}" in only(actions, Ended).reason
        assert every(actions, Send) == []
        assert_over(machine)
        assert machine.reserve(1.0, decode_request("u")) == [FindEngine(P_ADDRESS)]


def test_a_drafter_goes_without_its_layers() -> None:
    """The prefill engine has no drafter."""
    pages = msgspec.structs.replace(
        PAGES, layers=(PAGES.layers[0], msgspec.structs.replace(PAGES.layers[1], needed=False))
    )
    machine = DecodeMachine(pages, TIMES)
    actions = machine.engine_found(0.0, P_ADDRESS, (worker(PAGES, layers=(0,)),))
    assert only(actions, Dial).wants == ((0,), ())
    log = only(actions, Log)
    assert log.level == logging.WARNING
    assert "lacks 1 layers of a drafter, such as layer1. Fewer drafts" in log.text
    machine.reserve(0.0, decode_request())
    assert only(machine.peer_up(0.0, P_ADDRESS, PEER), OpenCounter).writes == 3
    machine = DecodeMachine(pages, TIMES)
    assert every(machine.engine_found(0.0, P_ADDRESS, (worker(PAGES),)), Log) == []


def test_pages_that_arrive_in_many_writes_are_logged() -> None:
    """Tokens first on one side, heads first on the other: one write for each head of each token."""

    def pages(parts: tuple[Part, ...]) -> KvLayout:
        return KvLayout((GroupLayout(32, BLOCK, "full"),), (LayerLayout("layer0", 0, "", parts),))

    place, units = Place(0, 0, 4 * BLOCK * 8), Units(0, 4, 4)
    heads, tokens = head_major(place, units, BLOCK, 8), token_major(place, units, BLOCK, 8)
    for ours, writes in ((heads, 4 * BLOCK), (tokens, 0)):
        machine = DecodeMachine(pages(ours), TIMES)
        actions = machine.engine_found(0.0, P_ADDRESS, (worker(pages(tokens)),))
        texts = [log.text for log in every(actions, Log)]
        assert len(texts) == (writes > 0)
        assert all(
            f"arrive in up to {writes} writes per layer and block, of 8 bytes" in text for text in texts
        )


def test_workers_of_decode_share_a_worker_of_prefill() -> None:
    """Pages that are the same on all ranks: two decode workers draw on one prefill worker."""
    machine = DecodeMachine(PAGES, TIMES)
    machine.set_ranks(1, [worker(PAGES), worker(PAGES, OTHER_ADDRESS)])
    machine.engine_found(0.0, P_ADDRESS, (worker(PAGES),))
    message = reserved(machine)
    assert (message.share, message.shares) == (1, 2)
    assert sent(machine.cancel(0.0, "d-t"), Cancel).share == 1
    assert sent(machine.release(0.0, "u", P_ADDRESS), Release) == Release("u", 1)


def test_unused_prefill_worker_is_released() -> None:
    """Three prefill workers with the same layer, two decode workers: each draws from one of them."""
    pages = layout(groups=(1,))
    third = Address("127.0.0.3", 5600)
    ranks = [worker(pages), worker(pages, OTHER_ADDRESS), worker(pages, third)]
    idle: list[Address] = []
    for rank in range(2):
        machine = DecodeMachine(pages, TIMES)
        machine.set_ranks(rank, ranks[:2])
        dials = every(machine.engine_found(0.0, P_ADDRESS, ranks), Dial)
        peers = {dial.address: number for number, dial in enumerate(dials)}
        for dial in dials:
            machine.peer_up(0.0, dial.address, peers[dial.address])
        unwanted = [dial.address for dial in dials if dial.wants == ((),)]
        idle += unwanted
        actions = machine.reserve(0.0, decode_request())
        assert [action for action in actions if isinstance(action, Send)] == [
            Send(peers[address], Release("t")) for address in unwanted
        ]
        assert only(actions, OpenCounter).peers == tuple(
            peer for address, peer in peers.items() if address not in unwanted
        )
    assert idle == [third]


# --- The session


def test_an_address_that_leads_nowhere_fails_its_requests_only(machine: DecodeMachine) -> None:
    machine.reserve(0.0, decode_request("t"))
    machine.reserve(0.0, decode_request("u"))
    machine.reserve(0.0, decode_request("v", engine=OTHER_ADDRESS))
    actions = machine.dial_failed(1.0, P_ADDRESS, "refused: incompatible")
    assert every(actions, FinishedReceiving) == [failed("d-t"), failed("d-u")]
    assert {ended.reason for ended in every(actions, Ended)} == {"refused: incompatible"}
    assert len(machine) == 1


def test_a_dead_peers_requests_fail_once_it_is_fenced(machine: DecodeMachine) -> None:
    reserved(machine)
    machine.peer_up(0.0, OTHER_ADDRESS, OTHER)
    machine.reserve(0.0, decode_request("v", engine=OTHER_ADDRESS))
    machine.counter_opened(0.0, "d-v", IMMEDIATE)
    assert machine.peer_down(1.0, PEER, "silent for 5 s") == []
    assert machine.fail(1.0, PEER, Fail("t", 1, FailCode.WRITE_ERROR, "", quiesced=True)) == []
    actions = machine.fenced(2.0, PEER)
    assert report(actions) == failed()
    assert only(actions, Ended).reason == "silent for 5 s"
    assert len(machine) == 1


def test_the_last_page_may_come_before_the_fence(machine: DecodeMachine) -> None:
    reserved(machine)
    machine.peer_down(1.0, PEER, "gone")
    assert report(machine.counter_reached(1.0, "d-t")) == done()
    assert machine.fenced(2.0, PEER) == []
    assert_over(machine)


def test_after_a_death_the_next_request_dials_again(machine: DecodeMachine) -> None:
    reserved(machine)
    machine.peer_down(1.0, PEER, "gone")
    assert machine.reserve(1.0, decode_request("u")) == [FindEngine(P_ADDRESS)]
    machine.fenced(2.0, PEER)
    assert machine.engine_found(2.0, P_ADDRESS, (worker(PAGES),)) == [
        Dial(P_ADDRESS, P_ADDRESS, WANTS, PAGES)
    ]
    assert machine.peer_up(3.0, P_ADDRESS, OTHER) == [OpenCounter((OTHER,), "d-u", 6)]


def test_engine_is_located_once(machine: DecodeMachine) -> None:
    elsewhere = Address("10.0.0.9", 5600)
    assert machine.reserve(0.0, decode_request("t", engine=elsewhere)) == [FindEngine(elsewhere)]
    assert machine.reserve(0.0, decode_request("u", engine=elsewhere)) == []
    assert machine.release(0.0, "v", elsewhere) == []
    actions = machine.engine_found(1.0, elsewhere, (worker(PAGES),))
    assert set(every(actions, Dial)) == {Dial(elsewhere, elsewhere, WANTS, PAGES)}
    actions = machine.peer_up(2.0, elsewhere, PEER)
    assert sent(actions, Release) == Release("v")
    assert [action.request_id for action in every(actions, OpenCounter)] == ["d-t", "d-u"]
    assert machine.engine_found(3.0, elsewhere, (worker(PAGES),)) == [], "for requests that queue"


def test_an_engine_that_is_not_there_fails_its_requests_only(machine: DecodeMachine) -> None:
    elsewhere = Address("10.0.0.9", 5600)
    machine.reserve(0.0, decode_request("t", engine=elsewhere))
    machine.reserve(0.0, decode_request("u"))
    machine.release(0.0, "v", elsewhere)
    actions = machine.engine_not_found(1.0, elsewhere, "no answer")
    assert report(actions) == failed("d-t")
    assert only(actions, Ended).reason == "no answer"
    assert len(machine) == 1
    actions = machine.engine_found(2.0, elsewhere, (worker(PAGES),))
    assert machine.peer_up(2.0, elsewhere, PEER) == [], "the release is forgotten"


def test_an_abort_before_the_engine_is_found_is_reported_at_once(machine: DecodeMachine) -> None:
    elsewhere = Address("10.0.0.9", 5600)
    machine.reserve(0.0, decode_request("t", engine=elsewhere))
    assert machine.under_way()[0].phase == "staged"
    assert report(machine.cancel(0.0, "d-t")) == done()
    assert_over(machine)
    machine.engine_found(1.0, elsewhere, (worker(PAGES),))
    assert sent(machine.peer_up(2.0, elsewhere, PEER), Release) == Release("t")


def test_release_goes_out_now_or_when_the_session_is_there(machine: DecodeMachine) -> None:
    assert machine.release(0.0, "t", P_ADDRESS) == [Dial(P_ADDRESS, P_ADDRESS, WANTS, PAGES)]
    assert machine.release(0.0, "u", P_ADDRESS) == [Dial(P_ADDRESS, P_ADDRESS, WANTS, PAGES)]
    actions = machine.peer_up(1.0, P_ADDRESS, PEER)
    assert [send.message for send in every(actions, Send)] == [Release("t"), Release("u")]
    assert machine.release(2.0, "v", P_ADDRESS) == [Send(PEER, Release("v"))]


def test_releases_for_an_address_that_leads_nowhere_are_dropped(machine: DecodeMachine) -> None:
    machine.release(0.0, "t", P_ADDRESS)
    machine.dial_failed(1.0, P_ADDRESS, "no answer")
    assert machine.peer_up(2.0, P_ADDRESS, PEER) == []


def test_a_transfer_id_that_cannot_be_sent_is_not_released(machine: DecodeMachine) -> None:
    assert only(machine.release(0.0, "x" * 1000, P_ADDRESS), Log).level == logging.WARNING


def test_shutting_down_cancels_everything_and_calls_nothing_received(machine: DecodeMachine) -> None:
    attempt = reserved(machine).attempt
    machine.reserve(0.0, decode_request("u", engine=OTHER_ADDRESS))
    actions = machine.close(0.0)
    assert Send(PEER, Cancel("t", attempt)) in actions
    assert report(actions) == failed("d-u")
    actions = machine.cancel_ack(0.0, PEER, CancelAck("t", attempt, drained=True))
    assert report(actions) == failed("d-t")
    assert_over(machine)
