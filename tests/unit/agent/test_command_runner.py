"""A worker's CommandRunner over an agent that only records its calls."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_setup import layout
from protocol_setup import worker as worker_of
from recording_agent import EXPECT, PAGES, PEER, RESERVE, RecordingAgent, agent

from kv_connector.agent.command_runner import CommandRunner
from kv_connector.agent.commands import (
    AnswerPrefix,
    CacheCleared,
    CancelLoad,
    Command,
    DeferLoad,
    EndLendings,
    FailLoad,
    FinishPrefill,
    NewPages,
    PromptNext,
    RefuseLending,
    ReleaseTransfer,
    SetRanks,
    WithdrawPrefix,
)
from kv_connector.agent.reports.ledger import Reports
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, PrefillRequest, PrefixRequest
from kv_connector.protocol.wire.content_key import chain
from kv_connector.protocol.wire.messages import LendOutcome

__all__ = ["agent"]


PREFIX = PrefixRequest("x", PEER, chain(range(32), 16), 0, 16)


@pytest.fixture
def runner(agent: RecordingAgent) -> CommandRunner:
    return CommandRunner(agent)  # type: ignore[arg-type]


def test_commands_reach_the_agent_in_order(agent: RecordingAgent, runner: CommandRunner) -> None:
    ranks = SetRanks((worker_of(layout()), worker_of(layout(), stage=1)))
    runner.execute(
        (
            ranks,
            EXPECT,
            RESERVE,
            CancelLoad("d"),
            ReleaseTransfer("r", PEER),
            DeferLoad("s", PEER),
            PromptNext("t"),
            FinishPrefill("p", "t", False, "client left", aborted=True),
            CacheCleared(),
            PREFIX,
            WithdrawPrefix("x"),
            AnswerPrefix("y", 32),
            RefuseLending("paused"),
            EndLendings("paused"),
        )
    )
    assert agent.take_calls() == [
        ("set_ranks", ranks.ranks),
        ("expect", EXPECT),
        ("reserve", RESERVE),
        ("cancel", "d"),
        ("release", "r", PEER),
        ("defer", "s", PEER),
        ("prompt_next", "t"),
        ("request_finished", "t", False, "client left", None, True),
        ("cache_cleared",),
        ("request_prefix", PREFIX),
        ("withdraw_prefix", "x"),
        ("answer_prefix", "y", 32, LendOutcome.LENT, ""),
        ("refuse_lending", "paused"),
        ("end_lendings", "paused"),
    ]


def test_load_that_cannot_be_deferred_is_due_once(agent: RecordingAgent, runner: CommandRunner) -> None:
    agent.refused = {"defer"}
    agent.prompts_due = {"u"}
    runner.execute((DeferLoad("t", PEER),))
    assert runner.take_prompts_due() == {"t", "u"}
    assert runner.take_prompts_due() == set()


def test_prefix_that_cannot_be_requested_is_answered_once(
    agent: RecordingAgent, runner: CommandRunner
) -> None:
    agent.refused = {"request_prefix"}
    agent.prefix_answers = {"z": 48}
    runner.execute((PREFIX,))
    assert runner.take_prefix_answers() == {"x": 0, "z": 48}
    assert runner.take_prefix_answers() == {}


@pytest.mark.parametrize("refused", [True, False], ids=["by the agent", "by the scheduler"])
def test_prefix_whose_load_cannot_begin_is_stale(
    agent: RecordingAgent, runner: CommandRunner, refused: bool
) -> None:
    load = replace(RESERVE, request_id="x", engine=replace(PEER, prefixes=True))
    agent.refused = {"reserve"}
    runner.execute((load if refused else FailLoad("x", stale=True), FailLoad("d")))
    reports = runner.take_reports()
    assert reports.finished_recving == reports.failed_recving == {"x", "d"}
    assert reports.stale == {"x"}


def test_waiting_transfers_are_passed_to_the_agent(agent: RecordingAgent, runner: CommandRunner) -> None:
    runner.waiting((("t", PEER), ("u", PEER)))
    assert agent.take_calls() == [("set_waiting", (("t", PEER), ("u", PEER)))]


def test_sent_is_reported_once_and_only_after_the_scheduler_has_finished(
    agent: RecordingAgent, runner: CommandRunner
) -> None:
    agent.reports.finished_sending = {"p"}
    assert runner.take_reports() == Reports()
    runner.execute([FinishPrefill("p", "t", True, "")])
    assert runner.take_reports() == Reports(finished_sending={"p"})
    assert runner.take_reports() == Reports()
    runner.execute([FinishPrefill("q", "u", True, "")])
    assert runner.take_reports() == Reports()
    agent.reports.finished_sending = {"q"}
    assert runner.take_reports() == Reports(finished_sending={"q"})


def test_received_is_reported_with_its_failures(agent: RecordingAgent, runner: CommandRunner) -> None:
    agent.reports = Reports(finished_recving={"good", "bad"}, failed_recving={"bad"})
    runner.execute([FailLoad("broken")])
    expected = Reports(finished_recving={"good", "bad", "broken"}, failed_recving={"bad", "broken"})
    assert runner.take_reports() == expected
    assert runner.take_reports() == Reports()


def test_an_agent_that_refuses_fails_only_what_it_refused(
    agent: RecordingAgent, runner: CommandRunner
) -> None:
    agent.refused = {"reserve", "pages_computed", "request_finished"}
    runner.execute([EXPECT, RESERVE, FinishPrefill("p", "t", True, ""), CancelLoad("other")])
    runner.pages_computed([NewPages("t", PAGES, last=False), NewPages("u", PAGES, last=False)], 3)
    assert agent.take_calls()[-3:] == [
        ("cancel", "other"),
        ("pages_computed", ComputedPages("t", 3, PAGES)),
        ("pages_computed", ComputedPages("u", 3, PAGES)),
    ]
    assert runner.take_reports() == Reports({"p"}, {"d"}, {"d"})


def test_runner_does_not_wait_for_news_that_has_arrived(agent: RecordingAgent, runner: CommandRunner) -> None:
    def waits() -> bool:
        runner.await_news(0.001)
        return agent.take_calls() == [("await_news", 0.001)]

    assert waits()
    runner.execute([FailLoad("d")])
    assert not waits()
    runner.take_reports()
    assert waits()
    agent.refused = {"request_finished"}
    runner.execute([FinishPrefill("p", "t", True, "")])
    agent.take_calls()
    assert not waits()


class FickleAgent:
    """Refuses commands on demand, and reports the accepted ones, as Agent does."""

    def __init__(self) -> None:
        self.refuses = False
        self.expected: dict[str, str] = {}  # transfer -> request
        self.loads: set[str] = set()
        self.reports = Reports()

    def _maybe(self) -> None:
        if self.refuses:
            raise RuntimeError("refused")

    def expect(self, request: PrefillRequest) -> None:
        self._maybe()
        self.expected[request.transfer_id] = request.request_id

    def request_finished(
        self, transfer_id: str, ok: bool, reason: str, sampled: int | None, aborted: bool
    ) -> None:
        self._maybe()

    def reserve(self, request: DecodeRequest) -> None:
        self._maybe()
        self.loads.add(request.request_id)

    def cancel(self, request_id: str) -> None:
        self._maybe()

    def end(self, transfer_id: str, request_id: str) -> None:
        """Both requests of a transfer. Here they belong to one engine."""
        if request := self.expected.pop(transfer_id, None):
            self.reports.finished_sending.add(request)
        if request_id in self.loads:
            self.loads.remove(request_id)
            self.reports.finished_recving.add(request_id)

    def take_reports(self) -> Reports:
        reports, self.reports = self.reports, Reports()
        return reports


@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_each_request_is_reported_exactly_once_despite_refusals(random: Any, requests: int) -> None:
    agent = FickleAgent()
    runner = CommandRunner(agent)  # type: ignore[arg-type]
    sent: list[str] = []
    received: list[str] = []

    def take() -> None:
        reports = runner.take_reports()
        sent.extend(reports.finished_sending)
        received.extend(reports.finished_recving)

    lives: list[list[Command]] = []
    for number in range(requests):
        p, d, t = f"p{number}", f"d{number}", f"t{number}"
        lives.append([PrefillRequest(p, t, 100, bytes(16)), FinishPrefill(p, t, True, "")])
        lives.append(
            random.choice(
                [
                    [DecodeRequest(d, t, PEER, 100, 0, bytes(16), ()), CancelLoad(d)],
                    [FailLoad(d), CancelLoad(d)],
                ]
            )
        )
    while lives:
        life = random.choice(lives)
        agent.refuses = random.random() < 0.5
        runner.execute([life.pop(0)])
        if not life:
            lives.remove(life)
        if random.random() < 0.3:
            number = random.randrange(requests)
            agent.end(f"t{number}", f"d{number}")
            take()
    for number in range(requests):
        agent.end(f"t{number}", f"d{number}")
    take()
    assert sorted(sent) == [f"p{number}" for number in range(requests)]
    assert sorted(received) == [f"d{number}" for number in range(requests)]
