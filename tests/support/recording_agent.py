"""An agent that only records calls, and reports what its test sets."""

from collections.abc import Iterable
from typing import Any

import pytest

from kv_connector.agent.reports.ledger import Reports
from kv_connector.protocol.actions import Address, PrefixRequested
from kv_connector.protocol.requests import DecodeRequest, GroupPages, PrefillRequest

PEER = Address("10.0.0.1", 5600)
EXPECT = PrefillRequest("p", "t", 100, bytes(16))
RESERVE = DecodeRequest("d", "t", PEER, 100, 0, bytes(16), ())
PAGES = (GroupPages(0, (1, 2)),)


class RecordingAgent:
    """Records every call of Agent's adapter interface in ``calls``, in order, with the signal's stores."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.steps = 0
        self.held: int | None = None  # calls before the step's launch began, until its end
        self.by_layer = True
        self.reports = Reports()
        self.prefix_requests: list[PrefixRequested] = []
        self.prefix_answers: dict[str, int] = {}
        self.prefix_loads: dict[str, float] = {}
        self.prompts_due: set[str] = set()
        self.refused: set[str] = set()
        self.signal = self

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            self.calls.append((name, *arguments))
            if name in self.refused:
                raise RuntimeError(f"{name} is refused")

        return call

    def note_step(self) -> None:
        self.steps += 1

    def begin_launch(self) -> None:
        self.held = len(self.calls)

    def leaves_by_layer(self, pages: Iterable[GroupPages]) -> bool:
        return self.by_layer

    def end_launch(self) -> None:
        self.held = None

    def take_reports(self) -> Reports:
        reports, self.reports = self.reports, Reports()
        return reports

    def take_prefix_requests(self) -> list[PrefixRequested]:
        requests, self.prefix_requests = self.prefix_requests, []
        return requests

    def take_prefix_answers(self) -> dict[str, int]:
        answers, self.prefix_answers = self.prefix_answers, {}
        return answers

    def take_prefix_loads(self) -> dict[str, float]:
        loads, self.prefix_loads = self.prefix_loads, {}
        return loads

    def take_prompts_due(self) -> set[str]:
        due, self.prompts_due = self.prompts_due, set()
        return due

    def take_calls(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def agent() -> RecordingAgent:
    return RecordingAgent()
