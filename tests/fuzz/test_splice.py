"""A sample of `make fuzz-splice`, and planted faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kv_connector.router.requests.early_token import Mismatch, Rest
from tests.fuzz.splice import problem, report, scenario, splice


def test_client_gets_the_answer_of_decode_behind_the_token_of_prefill() -> None:
    for seed in range(1000):
        if text := report(seed):
            pytest.fail(text)


def test_scenarios_are_of_all_sorts() -> None:
    """The fuzzer proves something only if its scenarios are of all sorts."""
    counts: Counter[str] = Counter()
    for seed in range(300):
        try:
            token, _ = asyncio.run(splice(scenario(seed)))
        except Mismatch:
            counts["broken off"] += 1
        else:
            counts["not early" if token is None else "early"] += 1
    assert min(counts["broken off"], counts["early"], counts["not early"]) > 20, counts


PLANTED: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "ids are not cut": (Rest, "_cut_tokens", lambda self, choice: None),
    "nothing is left out": (Rest, "of", lambda self, events: events),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*PLANTED[fault])
    assert any(problem(scenario(seed)) for seed in range(200))
