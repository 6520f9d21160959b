"""The generator of `kv-connector bench conversations`: presets, times and words."""

from __future__ import annotations

from itertools import islice

import pytest

from kv_connector.bench.conversations.prompts import WORDS, Api, Scale, new_dialogue, piece
from kv_connector.bench.conversations.workload import PRESETS, Pace
from kv_connector.cli.conversations import Preset


def test_presets_are_those_of_the_command() -> None:
    assert set(Preset) == PRESETS.keys()


def test_preset_agent_grows_from_60_000_to_140_000_tokens() -> None:
    shape = PRESETS["agent"]
    assert shape.system + shape.first == 60_000
    assert shape.last_prompt == pytest.approx(140_000, abs=shape.turns)


def test_preset_small_has_the_tokens_of_the_measured_baseline() -> None:
    shape = PRESETS["small"]
    prompts = [shape.first + turn * (shape.message + shape.answer) for turn in range(shape.turns)]
    assert (sum(prompts), shape.last_prompt) == (5_178, 1_318)


def test_starts_are_equal_for_equal_seeds_and_have_the_rate() -> None:
    pace = Pace(rate=4.0)
    starts = list(islice(pace.starts(7), 2_001))
    assert starts == list(islice(pace.starts(7), 2_001))
    assert starts != list(islice(pace.starts(8), 2_001))
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert starts[-1] == pytest.approx(500.0, rel=0.1)


def test_pauses_have_the_think_time_as_their_mean() -> None:
    pauses = list(islice(Pace(at_once=1, think_seconds=3.0).pauses(1, 2), 2_000))
    assert sum(pauses) / len(pauses) == pytest.approx(3.0, rel=0.1)
    assert list(islice(Pace(at_once=1).pauses(1, 2), 3)) == [0.0, 0.0, 0.0]


def test_words_are_distinct_and_have_four_letters() -> None:
    assert len(set(WORDS)) == len(WORDS) > 300
    assert {len(word) for word in WORDS} == {4}


@pytest.mark.parametrize("api", Api)
def test_piece_is_equal_for_equal_keys(api: Api) -> None:
    assert piece(api, "a", 50) == piece(api, "a", 50) != piece(api, "b", 50)


def test_piece_begins_like_a_shorter_piece_of_its_key() -> None:
    longer, shorter = piece(Api.TOKENS, "a", 50), piece(Api.TOKENS, "a", 20)
    assert longer[:20] == shorter


def test_scale_leaves_room_for_the_tokens_of_the_template() -> None:
    scale = Scale(word=1.5, prompt=10, message=5)
    assert scale.words(305, begins=True) == round(290 / 1.5)
    assert scale.words(305) == 200
    assert scale.words(1) == 1


def test_dialogue_has_the_form_of_its_api() -> None:
    chat, text, tokens = map(new_dialogue, Api)
    for dialogue in (chat, text):
        dialogue.add("user", " one two")
        dialogue.add("assistant", "three")
    tokens.add("user", [1, 2])
    tokens.add("assistant", [3])
    assert chat.body()["messages"] == [
        {"role": "user", "content": " one two"},
        {"role": "assistant", "content": "three"},
    ]
    assert text.body() == {"prompt": " one twothree"}
    assert tokens.body() == {"prompt": [1, 2, 3], "return_token_ids": True}
