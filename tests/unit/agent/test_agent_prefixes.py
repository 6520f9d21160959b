"""Agents that lend and borrow prefixes over real sockets and a real transfer engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agent_pairs import SOURCE, TARGET, every_lane, sim
from agent_setup import TIMES, AgentSide, AgentStage, content, until
from protocol_setup import BLOCK, layout

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address, PrefixRequested
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.requests import (
    ComputedPages,
    DecodeRequest,
    GroupPages,
    PrefillRequest,
    PrefixRequest,
)
from kv_connector.protocol.wire.content_key import chain
from kv_connector.protocol.wire.messages import LendOutcome, Role

__all__ = ["every_lane", "sim"]

KEY = chain(range(4 * BLOCK), BLOCK)
TOKENS = 3 * BLOCK
# Long enough for a machine that is busy with other tests.
PATIENT = replace(TIMES, ask=60.0, lend=60.0)


def prefixes(side: AgentSide) -> Address:
    return replace(side.address, prefixes=True)


def ask(borrower: AgentSide, lender: AgentSide, name: str = "x") -> PrefixRequested:
    """Returns the question as the lender's scheduler gets it."""
    borrower.agent.request_prefix(PrefixRequest(name, prefixes(lender), KEY, 0, BLOCK))
    found: list[PrefixRequested] = []
    until(lambda: found.extend(lender.agent.take_prefix_requests()) or found, "the question")
    (request,) = found
    assert request == PrefixRequested(name, KEY, 0, BLOCK)
    return request


def lend(lender: AgentSide, name: str = "x") -> None:
    """Lends the tokens of three blocks, as the lender's scheduler does."""
    for ordinal in range(len(lender.layout.layers)):
        for block in SOURCE:
            lender.pages[ordinal, block] = content(name, ordinal, block)
    agent = lender.agent
    agent.expect(PrefillRequest(name, name, TOKENS, KEY.prompt_hash(TOKENS), lent=True))
    agent.pages_computed(ComputedPages(name, None, (GroupPages(0, SOURCE),)))
    agent.request_finished(name, ok=True)
    agent.answer_prefix(name, TOKENS)


def answer(borrower: AgentSide) -> dict[str, int]:
    found: dict[str, int] = {}
    until(lambda: found.update(borrower.agent.take_prefix_answers()) or found, "the answer")
    return found


def load(borrower: AgentSide, lender: AgentSide, name: str = "x") -> None:
    groups = (GroupTarget(0, TARGET),)
    borrower.agent.reserve(
        DecodeRequest(name, name, prefixes(lender), TOKENS, 0, KEY.prompt_hash(TOKENS), groups)
    )


@pytest.mark.parametrize(
    ("borrows", "lends"),
    [(Role.PREFILL, Role.DECODE), (Role.DECODE, Role.DECODE), (Role.PREFILL, Role.PREFILL)],
)
def test_prefix_travels_between_engines_of_any_roles(
    every_lane: AgentStage, borrows: Role, lends: Role
) -> None:
    shape = layout(num_blocks=32)
    borrower = every_lane.side(borrows, "borrower", pages=shape, timeouts=PATIENT)
    lender = every_lane.side(lends, "lender", pages=shape, timeouts=PATIENT)
    ask(borrower, lender)
    lend(lender)
    assert answer(borrower) == {"x": TOKENS}
    load(borrower, lender)
    borrower.wait(received=["x"])
    lender.wait(sent=["x"])
    assert borrower.failed == []
    assert borrower.holds("x", SOURCE, TARGET)
    borrower.idle()
    lender.idle()
    ours, theirs = borrower.agent.stats().prefixes, lender.agent.stats().prefixes
    assert (ours.borrow, theirs.lend) == ({LendOutcome.LENT: 1}, {LendOutcome.LENT: 1})
    assert (ours.tokens_borrowed, theirs.tokens_lent) == (TOKENS, TOKENS)
    assert ours.answer_seconds > 0 < ours.load_seconds


def test_prefill_engine_borrows_while_it_sends_to_a_decode_engine(sim: AgentStage) -> None:
    """One agent, one request, both halves: its pages [0, 3) come from the lender and go on to D."""
    prefill, decode = sim.pair(PATIENT)
    lender = sim.side(Role.DECODE, "lender", pages=layout(num_blocks=32), timeouts=PATIENT)
    prefill.expect("t", tokens=4 * BLOCK)
    decode.reserve(prefill.address, (21, 22, 23, 24), tokens=4 * BLOCK)
    ask(prefill, lender)
    lend(lender)
    assert answer(prefill) == {"x": TOKENS}
    load(prefill, lender)
    prefill.wait(received=["x"])
    assert prefill.holds("x", SOURCE, TARGET)
    prefill.compute((14,), first=3)
    prefill.agent.pages_computed(ComputedPages("t", None, (GroupPages(0, TARGET),)))
    prefill.agent.request_finished("t", ok=True)
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert decode.holds("x", SOURCE, (21, 22, 23))
    assert decode.holds("t", (14,), (24,))
    for side in (prefill, decode, lender):
        side.idle()


def test_prefix_that_is_not_lent_is_answered_and_leaves_nothing(sim: AgentStage) -> None:
    borrower = sim.side(Role.PREFILL, "borrower", pages=layout(num_blocks=32), timeouts=PATIENT)
    lender = sim.side(Role.DECODE, "lender", pages=layout(num_blocks=32), timeouts=PATIENT)
    request = ask(borrower, lender)
    lender.agent.answer_prefix(request.transfer_id, 0, LendOutcome.NOT_CACHED, "it is not cached")
    assert answer(borrower) == {"x": 0}
    borrower.idle()
    lender.idle()


def test_lender_frees_a_prefix_that_its_borrower_releases(sim: AgentStage) -> None:
    borrower = sim.side(Role.PREFILL, "borrower", pages=layout(num_blocks=32), timeouts=PATIENT)
    lender = sim.side(Role.DECODE, "lender", pages=layout(num_blocks=32), timeouts=PATIENT)
    ask(borrower, lender)
    lend(lender)
    assert answer(borrower) == {"x": TOKENS}
    borrower.agent.release("x", prefixes(lender))
    lender.wait(sent=["x"])


def test_lender_ends_its_lendings_and_refuses_while_its_engine_takes_no_step(sim: AgentStage) -> None:
    borrower = sim.side(Role.PREFILL, "borrower", pages=layout(num_blocks=32), timeouts=PATIENT)
    lender = sim.side(Role.DECODE, "lender", pages=layout(num_blocks=32), timeouts=PATIENT)
    ask(borrower, lender)
    lend(lender)
    assert answer(borrower) == {"x": TOKENS}
    lender.agent.refuse_lending("paused")
    lender.agent.end_lendings("paused")
    lender.wait(sent=["x"])
    load(borrower, lender)
    until(lambda: borrower.agent.failure("x") or borrower.received, "the failure")
    borrower.agent.request_prefix(PrefixRequest("y", prefixes(lender), KEY, 0, BLOCK))
    assert answer(borrower) == {"y": 0}
    assert lender.agent.take_prefix_requests() == []
    assert borrower.agent.stats().prefixes.borrow[LendOutcome.PAUSED] == 1
    lender.agent.refuse_lending("")
    lender.idle()  # the question must not overtake the command
    ask(borrower, lender, "z")


def test_address_without_an_engine_costs_one_question_and_a_connection_for_a_time(sim: AgentStage) -> None:
    """A request may name any address."""
    quick = replace(PATIENT, ask=0.2, connect=0.4, remember=60.0)
    borrower = sim.side(Role.PREFILL, "borrower", pages=layout(num_blocks=32), timeouts=quick)
    wrong = Address("127.0.0.1", 1, prefixes=True)
    outcomes = []
    for name in ("x", "y"):
        borrower.agent.request_prefix(PrefixRequest(name, wrong, KEY, 0, BLOCK))
        assert answer(borrower) == {name: 0}
        outcomes.append(borrower.agent.stats().prefixes.borrow)
    assert outcomes == [
        {LendOutcome.SILENT: 1},
        {LendOutcome.SILENT: 1, LendOutcome.SKIPPED: 1},
    ]
    until(lambda: borrower.agent.live().peers == 0, "the end of the connection")
    borrower.idle()


@pytest.mark.parametrize("has_key", [False, True], ids=["no key", "another key"])
def test_prefix_is_lent_to_no_engine_without_the_cluster_key(sim: AgentStage, has_key: bool) -> None:
    """The answer to a question would show what another tenant has sent."""
    key = ClusterKey.generate()
    quick = replace(PATIENT, ask=0.5, handshake=0.1, connect=0.5)
    pages = layout(num_blocks=32)
    lender = sim.side(Role.DECODE, "lender", pages=pages, timeouts=PATIENT, key=key)
    wrong = ClusterKey.generate() if has_key else None
    stranger = sim.side(Role.PREFILL, "stranger", pages=pages, timeouts=quick, key=wrong)
    stranger.agent.request_prefix(PrefixRequest("x", prefixes(lender), KEY, 0, BLOCK))
    assert answer(stranger) == {"x": 0}
    borrower = sim.side(Role.PREFILL, "borrower", pages=pages, timeouts=PATIENT, key=key)
    ask(borrower, lender, "y")  # the lender has read the stranger's messages by now, if it reads them
    assert not lender.agent.stats().prefixes.lend


def test_only_the_first_rank_requests_a_prefix(sim: AgentStage) -> None:
    borrower = sim.side(Role.PREFILL, "borrower", pages=layout(num_blocks=32), rank=1, ranks=2)
    borrower.agent.request_prefix(PrefixRequest("x", Address("127.0.0.1", 1, prefixes=True), KEY, 0, BLOCK))
    assert borrower.agent.catch_up(20.0)
    assert borrower.agent.live().peers == 0


def test_stopped_lender_costs_the_time_limit_of_a_question(sim: AgentStage) -> None:
    quick = replace(PATIENT, ask=5.0)
    borrower = sim.side(Role.PREFILL, "borrower", pages=layout(num_blocks=32), timeouts=quick)
    lender = sim.side(Role.DECODE, "lender", pages=layout(num_blocks=32), timeouts=PATIENT)
    ask(borrower, lender)  # its scheduler takes the question, and does not answer
    assert answer(borrower) == {"x": 0}
    lend(lender)  # too late
    lender.wait(sent=["x"])
    borrower.idle()
    lender.idle()
