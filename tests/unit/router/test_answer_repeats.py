"""AnswerRepeats: the router learns whether next turns have the token ids of answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from test_cache_aware import LONG, Fleet, assistant, user

from kv_connector.control.membership import WorkloadReport
from kv_connector.router.bodies.messages import ChatMessage, Function, ToolCall
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.placement import answer_repeats
from kv_connector.router.placement.answer_repeats import AnswerKind, AnswerRepeats
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.transcript import Said

BLOCK = 16
# Tokens, of 4 bytes each.
PROMPT, ANSWER, QUESTION = len(LONG) // 4, 400, 40
TEXT = "x" * (4 * ANSWER)


class Talk:
    """Conversations of two turns over one prefill and one decode engine."""

    def __init__(self, fleet: Fleet, model: str = "m") -> None:
        self.fleet = fleet
        self.model = model
        self._numbers = itertools.count()
        self.block(BLOCK)

    def block(self, tokens: int) -> None:
        """Makes the decode engine report blocks of this size."""
        report = WorkloadReport(8192, 8192, 1 << 20, block_tokens=tokens)
        self.fleet.workload("d0").hear(report)

    def turn(
        self, cached: int, *, before_second: Callable[[], None] = lambda: None, elsewhere: bool = False
    ) -> None:
        """Serves a conversation whose second turn finds so many tokens at the decode engine.

        ``elsewhere``: the second turn goes to the other decode engine, which has the prompt as well.
        """
        name = f"{next(self._numbers)}"
        first = self.fleet.begin(user(name + LONG), model=self.model)
        first.prefilled(Computed(tokens=PROMPT, cached=0))
        first.decode.counted(PROMPT)
        first.answer(text=name + TEXT)
        before_second()
        away = first.placement.decode.control_host
        if elsewhere:
            for number in (0, 1):
                assert first.placement.prompt is not None
                self.fleet.workload(f"d{number}").cache.prompt_computed(first.placement.prompt)
        turns = user(name + LONG), assistant(name + TEXT), user("?" * 160)
        second = self.fleet.begin(*turns, model=self.model, avoid=(away,) if elsewhere else ())
        second.prefilled(Computed(tokens=PROMPT + ANSWER + QUESTION, cached=0))
        self.fleet.caches.sent(name, second.decode)
        self.fleet.caches.received(name, PROMPT + ANSWER + QUESTION, cached)
        second.decode.release()

    def expected(self) -> int:
        """Returns the tokens behind the prompt that are expected of a new conversation's second turn."""
        name = f"new {next(self._numbers)}"
        first = self.fleet.begin(user(name + LONG), model=self.model)
        first.prefilled(Computed(tokens=PROMPT, cached=0))
        first.decode.counted(PROMPT)
        first.answer(text=name + TEXT)
        second = self.fleet.place(
            user(name + LONG), assistant(name + TEXT), user("?" * 160), model=self.model
        )
        return second.decode_cached - PROMPT


@pytest.fixture
def talk() -> Talk:
    return Talk(Fleet(1, 1))


def test_answer_is_expected_before_the_first_report(talk: Talk) -> None:
    assert talk.expected() == pytest.approx(ANSWER, abs=60)


@pytest.mark.parametrize("cached", [PROMPT, PROMPT - 48, PROMPT + 64])
def test_answer_is_not_expected_if_next_turns_have_other_ids(talk: Talk, cached: int) -> None:
    """Templates may even end the prompt otherwise, and the answer may begin with the same ids."""
    for _ in range(6):
        talk.turn(cached)
    assert talk.expected() == pytest.approx(0, abs=60)


@pytest.mark.parametrize("cached", [PROMPT + ANSWER, PROMPT + 208])
def test_answer_is_expected_if_next_turns_have_half_of_it(talk: Talk, cached: int) -> None:
    for _ in range(20):
        talk.turn(cached)
    assert talk.expected() == pytest.approx(ANSWER, abs=60)


def test_answer_is_expected_again_once_next_turns_have_it(talk: Talk) -> None:
    for _ in range(20):
        talk.turn(PROMPT)
    for _ in range(6):
        talk.turn(PROMPT + ANSWER)
    assert talk.expected() == pytest.approx(ANSWER, abs=60)


def test_turn_whose_engine_has_dropped_the_prompt_shows_nothing(talk: Talk) -> None:
    for _ in range(20):
        talk.turn(PROMPT - 80)
    assert talk.expected() == pytest.approx(ANSWER, abs=60)


def test_turn_at_another_engine_shows_nothing() -> None:
    """Another conversation has brought the prompt there."""
    talk = Talk(Fleet(1, 2))
    for _ in range(20):
        talk.turn(PROMPT, elsewhere=True)
    assert talk.expected() == pytest.approx(ANSWER, abs=60)


def test_turn_whose_prompt_was_expected_to_be_dropped_shows_nothing(talk: Talk) -> None:
    cache = talk.fleet.workload("d0").cache
    for _ in range(20):
        talk.turn(PROMPT, before_second=cache.clear)
    assert talk.expected() == pytest.approx(ANSWER, abs=60)


def test_answer_within_a_block_of_its_prompt_shows_nothing(talk: Talk) -> None:
    for _ in range(6):
        talk.turn(PROMPT)
    talk.block(1900)
    for _ in range(20):
        talk.turn(1900)
    talk.block(BLOCK)
    assert talk.expected() == pytest.approx(0, abs=60)


@pytest.mark.parametrize(
    ("of", "answer", "noted"), [([7] * 4000, b"8," * 999 + b"8", 0), ("a" * 9000, "b" * 9000, 1)]
)
def test_client_that_sends_token_ids_repeats_them(
    of: list[int] | str, answer: bytes | str, noted: int
) -> None:
    """Such a client uses no template. An engine without the answer's KV has dropped it."""
    prompt = Completion.decode(json.dumps({"model": "m", "prompt": of}).encode()).prompt("/v1/completions")
    repeats, said = AnswerRepeats(), Said(answer if isinstance(answer, str) else None)
    repeats.answered(
        AnswerKind.of(prompt, said), Endpoint.parse("http://d0:1"), 4000, prompt, prompt.followed_by(answer)
    )
    assert len(repeats._answers) == noted


def test_answer_that_adds_no_prefix_shows_nothing(talk: Talk) -> None:
    """Only the end of a longer text is looked for."""
    first = talk.fleet.begin(user(LONG))
    assert first.placement.prompt is not None
    same = first.placement.prompt
    repeats = talk.fleet.caches._repeats
    repeats.answered(AnswerKind.of(same, Said()), first.decode.endpoint, PROMPT, same, same)
    assert not repeats._answers


def test_answer_that_next_turns_lack_takes_room_in_the_cache(talk: Talk) -> None:
    for _ in range(6):
        talk.turn(PROMPT)
    cache = talk.fleet.workload("d0").cache
    before = cache._bytes
    talk.expected()
    assert cache._bytes - before == pytest.approx(len(LONG) + len(TEXT), rel=0.01)


def test_answer_at_an_engine_that_keeps_no_answers_takes_room_and_shows_nothing() -> None:
    """Its next turns find the prompt alone. Other engines of the model keep their answers."""
    fleet = Fleet(1, 1)
    talk = Talk(fleet)
    engine = fleet.workload("d0")
    engine.keeps_answers, cache = False, engine.cache
    before = cache._bytes
    assert talk.expected() == pytest.approx(0, abs=60)
    assert cache._bytes - before == pytest.approx(len(LONG) + len(TEXT), rel=0.01)
    for _ in range(6):
        talk.turn(PROMPT)
    engine.keeps_answers = True
    assert talk.expected() == pytest.approx(ANSWER, abs=60)


def test_answer_that_thinks_aloud_takes_room_in_the_cache(talk: Talk) -> None:
    """Templates strip the thinking, so next turns do not find it."""
    first = talk.fleet.begin(user(LONG))
    first.prefilled(Computed(tokens=PROMPT, cached=0))
    text = f"<think>{TEXT}</think>Because."
    first.answer(text=text)
    assert talk.fleet.workload("d0").cache._bytes == pytest.approx(len(LONG) + len(text), rel=0.01)
    for again in (text, "Because."):
        second = talk.fleet.place(user(LONG), assistant(again), user("Why?"))
        assert second.decode_cached == pytest.approx(PROMPT, abs=BLOCK)


def test_answer_that_thinks_aloud_is_not_expected_if_next_turns_have_other_ids(talk: Talk) -> None:
    """Both causes together hide the answer, too."""
    for _ in range(6):
        talk.turn(PROMPT)
    first = talk.fleet.begin(user(LONG), model=talk.model)
    first.prefilled(Computed(tokens=PROMPT, cached=0))
    text = f"<think>{TEXT}</think>Because."
    first.answer(text=text)
    second = talk.fleet.place(user(LONG), assistant(text), user("Why?"), model=talk.model)
    assert second.decode_cached == pytest.approx(PROMPT, abs=60)


def test_each_model_has_a_separate_forecast(talk: Talk) -> None:
    for _ in range(6):
        talk.turn(PROMPT)
    assert Talk(talk.fleet, "other").expected() == pytest.approx(ANSWER, abs=60)


def test_calls_of_tools_and_thinking_answers_are_kinds_of_their_own(talk: Talk) -> None:
    prompt = talk.fleet.place(user(LONG)).prompt
    assert prompt is not None
    calls = [ToolCall(Function("look", "{}"))]
    answers = [
        ChatMessage(role="assistant", content="a"),
        ChatMessage(role="assistant", content="a", tool_calls=calls),
        ChatMessage(role="assistant", content="a", reasoning="b"),
    ]
    assert len({AnswerKind.of(prompt, Said(one)) for one in answers}) == 3


def test_memory_of_answers_and_kinds_is_bounded(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_repeats, "MOST_ANSWERS", 3)
    monkeypatch.setattr(answer_repeats, "_MOST_KINDS", 2)
    repeats = talk.fleet.caches._repeats
    for _ in range(5):
        talk.expected()
        assert len(repeats._answers) <= 3
    for model in "abcd":
        Talk(talk.fleet, model).turn(PROMPT)
    assert [kind.model for kind in repeats._shares] == ["c", "d"]
