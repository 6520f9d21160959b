"""Prefixes: the question of a borrower, the lender's answer, and the transfer that follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from prefill_setup import machine as lender
from prefill_setup import message, pushed
from protocol_setup import (
    P_ADDRESS,
    all_of,
    computed,
    decode_request,
    every,
    layout,
    only,
    pairs,
    prefill_request,
    reserve,
    worker,
)

from kv_connector.protocol.actions import (
    Accept,
    Address,
    CancelWrites,
    Connect,
    Deliver,
    Dial,
    Distrust,
    Ended,
    FindEngine,
    FinishedReceiving,
    FinishedSending,
    Inquire,
    Log,
    OpenCounter,
    Outcome,
    PrefixAnswered,
    PrefixDecided,
    PrefixRequested,
    Reply,
    Seal,
    Send,
    SessionOver,
    SessionUp,
    Share,
)
from kv_connector.protocol.decode.borrowing import _REMEMBERED, MAX_LOCATED
from kv_connector.protocol.decode.decode_machine import DecodeMachine
from kv_connector.protocol.decode.legs import DecodeAction
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.prefill.lending import MAX_QUESTIONS
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.requests import PrefillRequest, PrefixRequest
from kv_connector.protocol.session.peers import PeerTable
from kv_connector.protocol.session.sessions import Identity
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.content_key import ContentKey, chain
from kv_connector.protocol.wire.messages import (
    DEFER_PROTOCOL_VERSION,
    PREFIX_PROTOCOL_VERSION,
    Borrow,
    Cancel,
    Fail,
    FailCode,
    Hello,
    HelloAck,
    HelloNak,
    LendOutcome,
    Lent,
    Locate,
    NakReason,
    Release,
    Reserve,
    Role,
)

__all__ = ["lender"]

TIMES = Timeouts()
PAGES = layout(num_blocks=32)
WANTS = all_of(PAGES)
KEY = chain(range(48), 16)
LENDER = Address(P_ADDRESS.host, P_ADDRESS.port, prefixes=True)
ASKED = PrefixRequest("t", LENDER, KEY, 16, 16)
BORROW = Borrow("t", KEY, 16, 16, 1000)
PEER, OTHER, BORROWER = 1, 2, 3  # the machine fixture has sessions with the first two


# --- The borrower's question


@pytest.fixture
def borrower() -> DecodeMachine:
    return DecodeMachine(PAGES, TIMES)


def asked(borrower: DecodeMachine) -> None:
    """Brings the machine to a question whose BORROW is sent."""
    assert borrower.borrowing.ask(0.0, ASKED) == [FindEngine(LENDER)]
    assert Dial(LENDER, LENDER, WANTS, PAGES) in borrower.engine_found(0.1, LENDER, (worker(PAGES),))
    assert borrower.peer_up(0.2, LENDER, PEER) == [
        Send(PEER, msgspec.structs.replace(BORROW, deadline_ms=800))
    ]


def assert_over(borrower: DecodeMachine) -> None:
    assert len(borrower.borrowing) == 0
    assert borrower.next_deadline() is None


def test_borrower_reports_what_is_lent(borrower: DecodeMachine) -> None:
    asked(borrower)
    assert borrower.borrowing.lent(0.5, PEER, Lent("t", 32)) == [
        PrefixAnswered("t", 32, LendOutcome.LENT, 0.5)
    ]
    assert_over(borrower)


def test_borrower_sends_its_request_at_once_over_a_session_that_is_up(borrower: DecodeMachine) -> None:
    asked(borrower)
    borrower.borrowing.lent(0.3, PEER, Lent("t", 32))
    again = borrower.borrowing.ask(1.0, replace(ASKED, transfer_id="u"))
    assert again == [Send(PEER, msgspec.structs.replace(BORROW, transfer_id="u"))]


def test_borrower_requests_the_version_of_its_weights(borrower: DecodeMachine) -> None:
    borrower.set_weights("7")
    borrower.borrowing.ask(0.0, ASKED)
    borrower.engine_found(0.0, LENDER, (worker(PAGES),))
    (send,) = borrower.peer_up(0.0, LENDER, PEER)
    assert send == Send(PEER, msgspec.structs.replace(BORROW, weights="7"))


def test_sessions_for_prompts_and_for_prefixes_with_one_address_are_apart(borrower: DecodeMachine) -> None:
    borrower.engine_found(0.0, P_ADDRESS, (worker(PAGES),))
    borrower.peer_up(0.0, P_ADDRESS, OTHER)
    asked(borrower)
    assert only(borrower.reserve(1.0, decode_request("u")), OpenCounter).peers == (OTHER,)
    assert only(borrower.reserve(1.0, decode_request("t", engine=LENDER)), OpenCounter).peers == (PEER,)


def nothing(outcome: LendOutcome, seconds: float) -> PrefixAnswered:
    return PrefixAnswered("t", 0, outcome, seconds)


Ending = Callable[[DecodeMachine], list[DecodeAction]]
LOOKING: dict[str, tuple[Ending, PrefixAnswered]] = {
    "no engine": (
        lambda borrower: borrower.engine_not_found(0.5, LENDER, "nobody answers"),
        nothing(LendOutcome.UNREACHABLE, 0.5),
    ),
    "deadline": (lambda borrower: borrower.tick(1.0), nothing(LendOutcome.SILENT, 1.0)),
    "shutting down": (lambda borrower: borrower.close(0.5), nothing(LendOutcome.CLOSING, 0.5)),
}


@pytest.mark.parametrize(("end", "answer"), LOOKING.values(), ids=LOOKING)
def test_borrower_answers_nothing_when_no_lender_is_found(
    borrower: DecodeMachine, end: Ending, answer: PrefixAnswered
) -> None:
    borrower.borrowing.ask(0.0, ASKED)
    assert end(borrower) == [answer]
    assert_over(borrower)


def test_borrower_answers_nothing_when_it_gets_no_session(borrower: DecodeMachine) -> None:
    borrower.borrowing.ask(0.0, ASKED)
    borrower.engine_found(0.0, LENDER, (worker(PAGES),))
    assert borrower.dial_failed(0.5, LENDER, "refused") == [nothing(LendOutcome.UNREACHABLE, 0.5)]
    assert_over(borrower)


RELEASED = Send(PEER, Release("t"))
SENT: dict[str, tuple[Ending, list[DecodeAction]]] = {
    "refused": (
        lambda b: b.borrowing.lent(0.5, PEER, Lent("t", 0, "no", LendOutcome.PAUSED)),
        [nothing(LendOutcome.PAUSED, 0.5)],
    ),
    "refused without an outcome": (
        lambda b: b.borrowing.lent(0.5, PEER, Lent("t", 0, "no")),
        [nothing(LendOutcome.FAILED, 0.5)],
    ),
    "deadline": (lambda b: b.tick(1.0), [RELEASED, nothing(LendOutcome.SILENT, 1.0)]),
    "session over": (
        lambda b: b.peer_down(0.5, PEER, "silent"),
        [nothing(LendOutcome.UNREACHABLE, 0.5)],
    ),
    "withdrawn": (lambda b: b.borrowing.withdraw(0.3, "t"), [RELEASED]),
    "shutting down": (lambda b: b.close(0.5), [RELEASED, nothing(LendOutcome.CLOSING, 0.5)]),
}


@pytest.mark.parametrize(("end", "expected"), SENT.values(), ids=SENT)
def test_question_ends_once_and_releases_what_may_be_lent(
    borrower: DecodeMachine, end: Ending, expected: list[DecodeAction]
) -> None:
    asked(borrower)
    actions = end(borrower)
    assert [action for action in actions if not isinstance(action, Log)] == expected
    assert_over(borrower)
    assert borrower.borrowing.lent(2.0, PEER, Lent("t", 32)) == []


@pytest.mark.parametrize("tokens", [8, 16, 40, 64])
def test_borrower_refuses_a_length_that_it_has_not_requested(borrower: DecodeMachine, tokens: int) -> None:
    asked(borrower)
    log, *rest = borrower.borrowing.lent(0.5, PEER, Lent("t", tokens))
    assert isinstance(log, Log)
    assert log.level == logging.WARNING
    assert rest == [RELEASED, nothing(LendOutcome.FAILED, 0.5)]


def test_borrower_refuses_a_length_that_its_blocks_do_not_have(borrower: DecodeMachine) -> None:
    borrower.borrowing.ask(0.0, replace(ASKED, first_token=0, multiple=32))
    borrower.engine_found(0.1, LENDER, (worker(PAGES),))
    borrower.peer_up(0.2, LENDER, PEER)
    assert nothing(LendOutcome.FAILED, 0.5) in borrower.borrowing.lent(0.5, PEER, Lent("t", 48))


def test_answer_of_another_peer_or_to_no_question_is_ignored(borrower: DecodeMachine) -> None:
    asked(borrower)
    assert borrower.borrowing.lent(0.3, OTHER, Lent("t", 32)) == []
    assert borrower.borrowing.lent(0.3, PEER, Lent("u", 32)) == []
    assert len(borrower.borrowing) == 1


def test_question_that_cannot_be_sent_is_answered_at_once(borrower: DecodeMachine) -> None:
    empty = msgspec.structs.replace(KEY, digests=b"")
    log, answer = borrower.borrowing.ask(0.0, replace(ASKED, content=empty))
    assert isinstance(log, Log)
    assert answer == nothing(LendOutcome.FAILED, 0.0)
    assert_over(borrower)


# --- Lenders that do not answer


def again(borrower: DecodeMachine, now: float, name: str = "u") -> list[DecodeAction]:
    return borrower.borrowing.ask(now, replace(ASKED, transfer_id=name))


def skipped(name: str = "u") -> list[PrefixAnswered]:
    return [PrefixAnswered(name, 0, LendOutcome.SKIPPED, 0.0)]


@pytest.mark.parametrize("located", [False, True])
def test_lender_that_did_not_answer_is_queried_again_after_some_time(
    borrower: DecodeMachine, located: bool
) -> None:
    if located:
        asked(borrower)
    else:
        borrower.borrowing.ask(0.0, ASKED)
    borrower.tick(1.0)
    assert again(borrower, 1.0) == again(borrower, 30.9) == skipped()
    assert_over(borrower)
    again(borrower, 1.0 + TIMES.remember)
    assert len(borrower.borrowing) == 1


def test_silence_of_one_lender_concerns_no_other(borrower: DecodeMachine) -> None:
    borrower.borrowing.ask(0.0, ASKED)
    borrower.tick(1.0)
    other = replace(ASKED, transfer_id="u", lender=replace(LENDER, port=1))
    assert borrower.borrowing.ask(1.0, other) == [FindEngine(other.lender)]


@pytest.mark.parametrize("outcome", [LendOutcome.PAUSED, LendOutcome.NOT_CACHED, LendOutcome.BUSY])
def test_refusal_costs_one_question_and_does_not_count_as_silence(
    borrower: DecodeMachine, outcome: LendOutcome
) -> None:
    asked(borrower)
    borrower.borrowing.lent(0.3, PEER, Lent("t", 0, "no", outcome))
    assert only(again(borrower, 0.3), Send).peer == PEER


@pytest.mark.parametrize("located", [False, True], ids=["other layout", "other hashes"])
def test_engine_that_cannot_lend_is_not_queried_for_some_time(borrower: DecodeMachine, located: bool) -> None:
    if located:
        asked(borrower)
        answers = borrower.borrowing.lent(0.3, PEER, Lent("t", 0, "no", LendOutcome.UNLIKE))
    else:
        borrower.borrowing.ask(0.0, ASKED)
        answers = borrower.engine_not_found(0.3, LENDER, "does not fit")
    assert only(answers, PrefixAnswered).tokens == 0
    assert again(borrower, 0.3) == again(borrower, 30.2) == skipped()
    assert again(borrower, 0.3 + TIMES.remember) != skipped()


@pytest.mark.parametrize(("incarnation", "asks"), [("first", False), ("second", True)])
@pytest.mark.parametrize("prefixes", [False, True], ids=["prompts", "prefixes"])
def test_new_process_of_a_silent_lender_is_queried_at_once(
    borrower: DecodeMachine, incarnation: str, asks: bool, prefixes: bool
) -> None:
    borrower.borrowing.ask(0.0, ASKED)
    borrower.engine_found(0.1, LENDER, (worker(PAGES),))
    borrower.peer_up(0.2, LENDER, PEER, "first")
    borrower.tick(1.0)
    borrower.peer_down(2.0, PEER, "silent")
    borrower.peer_up(3.0, replace(LENDER, prefixes=prefixes), OTHER, incarnation)
    assert (again(borrower, 3.0) != skipped()) is asks


def test_late_session_of_a_silent_lender_ends_its_silence(borrower: DecodeMachine) -> None:
    borrower.borrowing.ask(0.0, ASKED)
    borrower.engine_found(0.1, LENDER, (worker(PAGES),))
    borrower.tick(1.0)
    borrower.peer_up(1.2, LENDER, PEER, "first")
    assert only(again(borrower, 1.3), Send).peer == PEER


def test_borrower_locates_few_lenders_at_once(borrower: DecodeMachine) -> None:
    """Each costs a connection for seconds, and a request can name any address."""
    wrong = [replace(ASKED, transfer_id=f"w{port}", lender=replace(LENDER, port=port)) for port in range(40)]
    found = [action for request in wrong for action in borrower.borrowing.ask(0.0, request)]
    assert len(every(found, FindEngine)) == MAX_LOCATED
    assert len(every(found, PrefixAnswered)) == 40 - MAX_LOCATED
    borrower.engine_not_found(5.0, wrong[0].lender, "nobody answers")
    assert again(borrower, 5.0) == [FindEngine(LENDER)]


def test_borrower_remembers_a_bounded_number_of_silent_lenders(borrower: DecodeMachine) -> None:
    for port in range(2 * _REMEMBERED):
        wrong = replace(LENDER, port=port)
        borrower.borrowing.ask(0.0, replace(ASKED, lender=wrong))
        borrower.tick(1.0)
        borrower.engine_not_found(1.0, wrong, "nobody answers")
    assert len(borrower.borrowing._silences) == _REMEMBERED


# --- The borrower's load


def loading(borrower: DecodeMachine) -> Reserve:
    asked(borrower)
    borrower.borrowing.lent(0.3, PEER, Lent("t", 48))
    borrower.reserve(1.0, decode_request("t", engine=LENDER))
    (send,) = every(borrower.counter_opened(1.0, "d-t", 100), Send)
    assert isinstance(send.message, Reserve)
    return send.message


@pytest.mark.parametrize(
    "code", [FailCode.WRITE_ERROR, FailCode.EXPIRED, FailCode.PREFILL_ABORTED, FailCode.UNKNOWN_TRANSFER]
)
def test_failed_prefix_is_computed_at_once_whatever_the_reason(
    borrower: DecodeMachine, code: FailCode
) -> None:
    attempt = loading(borrower).attempt
    actions = borrower.fail(2.0, PEER, Fail("t", attempt, code, "gone", quiesced=True))
    assert only(actions, FinishedReceiving) == FinishedReceiving("d-t", failed=True, stale=True)


def test_failed_prompt_of_a_prefill_engine_is_no_stale_one(borrower: DecodeMachine) -> None:
    borrower.engine_found(0.0, P_ADDRESS, (worker(PAGES),))
    borrower.peer_up(0.0, P_ADDRESS, PEER)
    borrower.reserve(1.0, decode_request("t"))
    borrower.counter_opened(1.0, "d-t", 100)
    actions = borrower.fail(2.0, PEER, Fail("t", 1, FailCode.WRITE_ERROR, "gone", quiesced=True))
    assert only(actions, FinishedReceiving) == FinishedReceiving("d-t", failed=True, stale=False)


def test_prefix_has_its_own_time_limit(borrower: DecodeMachine) -> None:
    assert loading(borrower).deadline_ms == 30_000
    assert borrower.tick(30.9) == []
    assert only(borrower.tick(31.0), Send).message == Cancel("t", 1)


# --- The lender


def lending(lender: PrefillMachine) -> None:
    """Brings the machine to a question that the scheduler has."""
    assert isinstance(lender.admit(BORROWER, PAGES, WANTS, regions=1, prefixes=True), Plan)
    assert lender.borrow(0.0, BORROWER, BORROW) == [PrefixRequested("t", KEY, 16, 16)]


def lent(lender: PrefillMachine, tokens: int = 32) -> None:
    """Brings the machine to a lending that the borrower knows."""
    lending(lender)
    assert lender.expect(0.1, prefix_request(tokens)) == []
    assert lender.pages_computed(0.1, computed(range(1, tokens // 16 + 1), base=None)) == []
    assert lender.request_finished(0.1, "t", ok=True, reason="") == []
    assert lender.lend(0.1, "t", tokens) == answered(Lent("t", tokens), tokens - 16)


def answered(lent: Lent, tokens: int = 0) -> list[object]:
    """Returns the actions for an answer of the lender, which has ``tokens`` beyond the borrower's."""
    return [Send(BORROWER, lent), PrefixDecided(lent.outcome, tokens)]


def prefix_request(tokens: int = 32) -> PrefillRequest:
    return PrefillRequest("t", "t", tokens, KEY.prompt_hash(tokens), lent=True)


def reserve_prefix(tokens: int = 32) -> Reserve:
    return reserve(range(11, 11 + tokens // 16), tokens=tokens, prompt_hash=KEY.prompt_hash(tokens))


def test_lender_pushes_a_prefix_at_once_and_is_done_when_it_has_arrived(lender: PrefillMachine) -> None:
    lent(lender)
    actions = lender.reserve(0.2, BORROWER, reserve_prefix())
    assert pushed(actions) == {1: 11, 2: 12}
    assert only(actions, Seal).share == Share("t")
    actions = lender.writes_ended(0.3, Share("t"), WritesEnd.DONE, quiesced=True, reason="")
    assert only(actions, FinishedSending) == FinishedSending("t")
    assert (len(lender), lender.next_deadline()) == (0, None)


def test_lender_frees_a_prefix_that_is_not_requested_in_time(lender: PrefillMachine) -> None:
    lent(lender)
    assert lender.waiting(1.0, BORROWER, ("t",)) == []  # as a hostile borrower would keep the pages
    assert lender.tick(3.0) == []
    assert only(lender.tick(3.1), FinishedSending) == FinishedSending("t")
    answer = message(lender.reserve(3.2, BORROWER, reserve_prefix()))
    assert isinstance(answer, Fail)
    assert answer.code is FailCode.EXPIRED


def test_lender_frees_a_prefix_that_the_borrower_releases(lender: PrefillMachine) -> None:
    lent(lender)
    assert only(lender.release(1.0, BORROWER, Release("t")), FinishedSending) == FinishedSending("t")


def test_lender_frees_a_prefix_that_was_released_before_the_answer(lender: PrefillMachine) -> None:
    lending(lender)
    assert only(lender.release(0.1, BORROWER, Release("t")), Ended).outcome is Outcome.RELEASED
    lender.expect(0.2, prefix_request())
    assert only(lender.request_finished(0.2, "t", ok=True, reason=""), FinishedSending).request_id == "t"
    assert lender.lend(0.2, "t", 32) == []


def test_lender_refuses_another_prefix_under_the_same_id(lender: PrefillMachine) -> None:
    lent(lender)
    wrong = msgspec.structs.replace(reserve_prefix(), prompt_hash=KEY.prompt_hash(48))
    answer = message(lender.reserve(0.2, BORROWER, wrong))
    assert isinstance(answer, Fail)
    assert answer.code is FailCode.PROMPT_MISMATCH


def test_lender_whose_process_is_new_soon_refuses_what_its_predecessor_lent(lender: PrefillMachine) -> None:
    lender.admit(BORROWER, PAGES, WANTS, regions=1, prefixes=True)
    assert lender.reserve(0.0, BORROWER, reserve_prefix()) == []
    assert lender.tick(2.9) == []
    answer = message(lender.tick(3.0))
    assert isinstance(answer, Fail)
    assert answer.code is FailCode.UNKNOWN_TRANSFER


def test_lender_holds_a_prompt_of_a_client_longer_than_a_prefix(lender: PrefillMachine) -> None:
    lender.expect(0.0, prefill_request())
    lender.request_finished(0.0, "t", ok=True, reason="")
    assert lender.next_deadline() == TIMES.hold


REFUSED: dict[str, tuple[Callable[[PrefillMachine], object], Borrow, LendOutcome, str]] = {
    "other weights": (
        lambda m: m.set_weights(0.0, "8"),
        BORROW,
        LendOutcome.WEIGHTS,
        "weights: lending engine has 8",
    ),
    "shutting down": (lambda m: m.close(0.0), BORROW, LendOutcome.CLOSING, "shutting down"),
    "no digests": (
        lambda m: None,
        msgspec.structs.replace(BORROW, content=ContentKey(KEY.basis, 16, 32, b"")),
        LendOutcome.FAILED,
        "0 bytes of digests",
    ),
}


@pytest.mark.parametrize(("prepare", "question", "outcome", "reason"), REFUSED.values(), ids=REFUSED)
def test_lender_refuses_a_question_with_its_reason(
    lender: PrefillMachine,
    prepare: Callable[[PrefillMachine], object],
    question: Borrow,
    outcome: LendOutcome,
    reason: str,
) -> None:
    prepare(lender)
    lender.admit(BORROWER, PAGES, WANTS, regions=1, prefixes=True)
    answer = message(lender.borrow(0.0, BORROWER, question))
    assert isinstance(answer, Lent)
    assert (answer.tokens, answer.outcome) == (0, outcome)
    assert reason in answer.reason
    assert lender.next_deadline() is None


def test_lender_ignores_a_question_that_is_repeated_or_comes_too_late(lender: PrefillMachine) -> None:
    lent(lender)
    assert lender.borrow(0.2, BORROWER, BORROW) == []
    lender.release(1.0, BORROWER, Release("t"))
    assert lender.borrow(1.1, BORROWER, BORROW) == []


def test_lender_ignores_a_question_outside_a_session_for_prefixes(lender: PrefillMachine) -> None:
    assert lender.borrow(0.0, PEER, BORROW) == []
    assert lender.borrow(0.0, 99, BORROW) == []


FORGET: dict[str, Callable[[PrefillMachine], object]] = {
    "deadline": lambda m: m.tick(1.0),
    "session over": lambda m: m.peer_down(0.5, BORROWER, "silent"),
}


@pytest.mark.parametrize("forget", FORGET.values(), ids=FORGET)
def test_lender_forgets_a_question_whose_borrower_waits_no_longer(
    lender: PrefillMachine, forget: Callable[[PrefillMachine], object]
) -> None:
    lending(lender)
    assert lender.next_deadline() == 1.0
    forget(lender)
    assert lender.next_deadline() is None
    assert lender.lend(1.5, "t", 32) == []


def test_lender_limits_the_questions_that_it_keeps(lender: PrefillMachine) -> None:
    lender.admit(BORROWER, PAGES, WANTS, regions=1, prefixes=True)
    found: list[object] = []
    for number in range(MAX_QUESTIONS + 1):
        found += lender.borrow(0.0, BORROWER, msgspec.structs.replace(BORROW, transfer_id=f"t{number}"))
    assert [type(action) for action in found] == [PrefixRequested] * MAX_QUESTIONS + [Send, PrefixDecided]


def test_lender_that_shuts_down_answers_open_questions(lender: PrefillMachine) -> None:
    lending(lender)
    assert Send(BORROWER, Lent("t", 0, "this engine is shutting down", LendOutcome.CLOSING)) in lender.close(
        0.1
    )


ENDED = "the prefix cache was emptied"


def test_lender_ends_a_prefix_that_waits_for_its_borrower_at_once(lender: PrefillMachine) -> None:
    lent(lender)
    assert only(lender.end_lendings(0.2, ENDED), FinishedSending) == FinishedSending("t")
    answer = message(lender.reserve(0.3, BORROWER, reserve_prefix()))
    assert isinstance(answer, Fail)
    assert (answer.code, answer.message, answer.quiesced) == (FailCode.STALE, ENDED, True)
    assert (len(lender), lender.next_deadline()) == (0, None)


def test_lender_gives_blocks_back_only_when_no_write_reads_them(lender: PrefillMachine) -> None:
    lent(lender)
    lender.reserve(0.2, BORROWER, reserve_prefix())
    actions = lender.end_lendings(0.3, ENDED)
    assert only(actions, CancelWrites).share == Share("t")
    assert not every(actions, FinishedSending)
    actions = lender.writes_ended(0.4, Share("t"), WritesEnd.CANCELLED, quiesced=True, reason="")
    answer = message(actions)
    assert isinstance(answer, Fail)
    assert (answer.code, answer.quiesced) == (FailCode.STALE, True)
    assert only(actions, FinishedSending) == FinishedSending("t")


def test_lender_does_not_answer_with_a_prefix_that_has_ended(lender: PrefillMachine) -> None:
    lending(lender)
    lender.expect(0.1, prefix_request())
    lender.end_lendings(0.1, ENDED)
    lender.pages_computed(0.1, computed((1, 2), base=None))
    assert only(lender.request_finished(0.1, "t", ok=True, reason=""), FinishedSending).request_id == "t"
    answer = message(lender.lend(0.1, "t", 32))
    assert isinstance(answer, Lent)
    assert answer.tokens == 0


def test_lender_that_falls_asleep_ends_what_is_lent(lender: PrefillMachine) -> None:
    lent(lender)
    assert only(lender.forget_pages(0.2), FinishedSending) == FinishedSending("t")
    assert (len(lender), lender.next_deadline()) == (0, None)


def test_end_of_lendings_leaves_prompts_of_clients_alone(lender: PrefillMachine) -> None:
    lender.expect(0.0, prefill_request())
    lender.request_finished(0.0, "t", ok=True, reason="")
    assert lender.end_lendings(0.1, ENDED) == []
    assert lender.next_deadline() == TIMES.hold


def test_paused_lender_refuses_without_its_scheduler(lender: PrefillMachine) -> None:
    lending(lender)
    assert lender.refuse_lending(0.1, "paused") == answered(Lent("t", 0, "paused", LendOutcome.PAUSED))
    assert lender.next_deadline() is None
    question = msgspec.structs.replace(BORROW, transfer_id="u")
    assert lender.borrow(0.2, BORROWER, question) == answered(Lent("u", 0, "paused", LendOutcome.PAUSED))
    assert lender.lend(0.3, "t", 0, LendOutcome.PAUSED, "the scheduler's own answer") == []
    assert lender.refuse_lending(0.4, "") == []
    again = msgspec.structs.replace(BORROW, transfer_id="v")
    assert only(lender.borrow(0.5, BORROWER, again), PrefixRequested).transfer_id == "v"


# --- Sessions


def peers(engine: str, role: Role) -> PeerTable:
    return PeerTable(Identity(engine, f"{engine}-1", role, 0, pairs(), PAGES, (b"region",)), TIMES)


def hello_of(borrower: PeerTable, to: Address) -> Hello:
    connect = only(borrower.dial(0.0, to, to, WANTS, PAGES), Connect)
    reply = only(borrower.offered(0.0, connect.peer, b"to %d" % to.prefixes, b"offer"), Reply)
    assert isinstance(reply.message, Hello)
    return reply.message


ROLES: Sequence[tuple[Role, Role]] = [
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.PREFILL),
    (Role.DECODE, Role.DECODE),
    (Role.DECODE, Role.PREFILL),
    (Role.BOTH, Role.DECODE),
]


@pytest.mark.parametrize(("borrows", "lends"), ROLES)
def test_any_engine_borrows_from_any_engine(borrows: Role, lends: Role) -> None:
    borrower, other = peers("b", borrows), peers("x", lends)
    other.set_ranks((worker(PAGES),))
    inquiry = only(borrower.find(0.0, LENDER), Inquire)
    (found,) = borrower.connected(0.0, inquiry.peer, b"inquiry")
    assert isinstance(found, Reply)
    assert isinstance(found.message, Locate)
    assert found.message.protocol == PREFIX_PROTOCOL_VERSION
    directory = only(other.receive(0.0, b"caller", found.message), Reply).message
    assert not isinstance(directory, HelloNak)
    hello = hello_of(borrower, LENDER)
    accept = only(other.receive(0.0, b"from b", hello), Accept)
    assert SessionUp(accept.peer, None, hello.incarnation) in other.accepted(
        0.0, accept.peer, "tcp", b"answer"
    )
    assert Deliver(accept.peer, BORROW) in other.receive(0.0, b"from b", BORROW)


def test_session_for_prompts_still_needs_the_right_roles() -> None:
    answers = [
        only(peers("x", Role.DECODE).receive(0.0, b"c", hello_of(peers("d", Role.DECODE), P_ADDRESS)), Reply),
        only(
            peers("x", Role.PREFILL).receive(0.0, b"c", hello_of(peers("p", Role.PREFILL), P_ADDRESS)), Reply
        ),
    ]
    for reply in answers:
        assert isinstance(reply.message, HelloNak)
        assert reply.message.reason is NakReason.WRONG_ROLE


def test_both_kinds_of_session_with_one_engine_live_side_by_side() -> None:
    borrower, other = peers("d", Role.DECODE), peers("p", Role.PREFILL)
    for address in (P_ADDRESS, LENDER):
        source = b"from %d" % address.prefixes
        hello = hello_of(borrower, address)
        assert hello.protocol == (PREFIX_PROTOCOL_VERSION if address.prefixes else DEFER_PROTOCOL_VERSION)
        accept = only(other.receive(0.0, source, hello), Accept)
        actions = other.accepted(0.0, accept.peer, "tcp", b"answer")
        assert not every(actions, SessionOver)
    assert len(other) == 2


def test_question_in_a_session_for_prompts_breaks_the_protocol() -> None:
    borrower, other = peers("d", Role.DECODE), peers("p", Role.PREFILL)
    accept = only(other.receive(0.0, b"from", hello_of(borrower, P_ADDRESS)), Accept)
    other.accepted(0.0, accept.peer, "tcp", b"answer")
    assert every(other.receive(0.0, b"from", BORROW), Distrust)


@pytest.mark.parametrize("to", [P_ADDRESS, LENDER], ids=["prompts", "prefixes"])
def test_answer_belongs_into_a_session_for_prefixes(to: Address) -> None:
    borrower = peers("d", Role.DECODE)
    hello_of(borrower, to)
    source = b"to %d" % to.prefixes
    ack = HelloAck("p", "p-1", Role.PREFILL, 0, "tcp", PAGES, b"answer")
    borrower.receive(0.0, source, ack)
    (peer,) = (info.peer for info in borrower.peers())
    borrower.completed(0.0, peer)
    actions = borrower.receive(0.0, source, Lent("t", 32))
    assert (Deliver(peer, Lent("t", 32)) in actions) is to.prefixes
    assert bool(every(actions, Distrust)) is not to.prefixes
