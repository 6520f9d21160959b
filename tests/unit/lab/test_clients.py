"""Clients in the background: what they record of answers, failures, and answers that differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from agent_setup import until

from kv_connector.lab import clients
from kv_connector.lab.clients import Clients
from kv_connector.lab.completion import CompletionError, CompletionTokens

Reply = Callable[[list[int]], list[int]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Reply], None]:
    """A function that answers in place of an engine."""
    monkeypatch.setattr(clients, "PAUSE_SECONDS", 0.001)

    def use(reply: Reply) -> None:
        def complete(url: str, prompt: list[int], **_: Any) -> CompletionTokens:
            assert url == "http://router"
            return CompletionTokens(reply(prompt), 0.0)

        monkeypatch.setattr(clients, "complete", complete)

    return use


def test_clients_send_requests_until_they_are_left(engine: Callable[[Reply], None]) -> None:
    asked: list[int] = []

    def reply(prompt: list[int]) -> list[int]:
        asked.append(len(prompt))
        return prompt[:3]

    engine(reply)
    with Clients("http://router", count=3) as some:
        some.wait_answered(20)
        some.wait_answered(20)
    assert some.answered >= 40
    assert len(asked) == some.answered, "nobody asks any more"
    assert not some.failures
    assert set(asked) <= set(clients.PROMPT_TOKENS)


def test_a_failure_is_noted_with_its_words_and_they_go_on(engine: Callable[[Reply], None]) -> None:
    numbers = itertools.count()

    def reply(prompt: list[int]) -> list[int]:
        if next(numbers) == 4:
            raise CompletionError("http://router broke off")
        return [1]

    engine(reply)
    with Clients("http://router", count=1) as some:
        some.wait_answered(10)
    assert some.failures == ["http://router broke off"]


def test_another_answer_to_the_same_prompt_is_a_failure(engine: Callable[[Reply], None]) -> None:
    numbers = itertools.count()
    engine(lambda prompt: [next(numbers)])
    with Clients("http://router", count=1) as some:
        until(lambda: some.failures)
        with pytest.raises(TimeoutError, match="another answer"):
            some.wait_answered(1000, seconds=0.0)


def test_waiting_in_vain_raises_the_clients_failure(engine: Callable[[Reply], None]) -> None:
    def reply(prompt: list[int]) -> list[int]:
        raise CompletionError("refused")

    engine(reply)
    with Clients("http://router", count=1) as some:
        until(lambda: some.failures)
        with pytest.raises(TimeoutError, match="refused"):
            some.wait_answered(1, seconds=0.0)
