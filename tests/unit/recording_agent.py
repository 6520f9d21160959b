"""An agent that only writes down what it is told."""

from typing import Any

from kv_connector.agent.ledger import Reports


class RecordingAgent:
    """Takes every call of Agent's adapter face; ``calls`` has them in order, the signal's stores included."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.steps = 0
        self.reports = Reports()
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

    def take_reports(self) -> Reports:
        reports, self.reports = self.reports, Reports()
        return reports

    def take_calls(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls
