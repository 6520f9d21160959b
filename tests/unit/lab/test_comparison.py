"""Comparison of greedy answers: the first difference, and the prompt whose answer came instead."""

from __future__ import annotations

import pytest

from kv_connector.lab.comparison import CHARACTERS_AROUND, Output, common, first_difference, whose


def of(text: str, margins: tuple[float | None, ...] = ()) -> Output:
    return Output(text, tuple(map(ord, text)), margins)


def test_equal_answers_have_no_difference() -> None:
    assert first_difference(of("abc"), of("abc")) is None
    assert first_difference(Output("abc"), of("abc")) is None


def test_a_difference_has_its_token_and_the_texts_around_it() -> None:
    found = first_difference(of("abcdef", (1.0, 2.0, 3.0, 0.5, 1.0, 1.0)), of("abcXef"))
    assert found is not None
    assert (found.unit, found.position, found.margin) == ("token", 3, 0.5)
    assert (found.expected, found.got) == ("abcdef", "abcXef")
    assert (found.expected_tokens[3], found.got_tokens[3]) == (ord("d"), ord("X"))


@pytest.mark.parametrize(("expected", "got"), [("abc", "abcd"), ("abcd", "abc"), ("abc", "")])
def test_a_shorter_answer_differs_where_it_ends(expected: str, got: str) -> None:
    found = first_difference(of(expected), of(got))
    assert found is not None
    assert found.position == min(len(expected), len(got))


def test_texts_are_compared_if_a_server_returns_no_token_ids() -> None:
    found = first_difference(Output("abcd"), of("abXd"))
    assert found is not None
    assert (found.unit, found.position, found.expected_tokens) == ("character", 2, ())


def test_equal_tokens_with_another_text_differ() -> None:
    found = first_difference(Output("ab", (1, 2)), Output("aX", (1, 2)))
    assert found is not None
    assert (found.unit, found.position) == ("character", 1)


def test_only_the_texts_around_the_difference_of_long_answers_are_kept() -> None:
    found = first_difference(of("a" * 5000 + "b" * 5000), of("a" * 5000 + "c" * 5000))
    assert found is not None
    assert len(found.expected) == len(found.got) == 2 * CHARACTERS_AROUND
    assert len(found.expected_tokens) < 20


def test_the_prompt_whose_answer_came_is_found_from_the_position_on() -> None:
    references = {1: of("abcdefgh"), 2: of("stuvwxyz"), 3: Output("stuvwxyz")}
    assert whose(of("stuvwxyz"), 0, references) == [2, 3]
    assert whose(of("atuvwxyz"), 1, references) == [2, 3]
    assert whose(of("atuvwxyz"), 0, references) == []
    assert whose(of("nothing!"), 0, references) == []


def test_a_short_common_end_is_a_coincidence() -> None:
    assert whose(of("abcdefyz"), 6, {2: of("stuvwxyz")}) == []
    assert whose(of("yz"), 0, {2: of("yz")}) == [2]
    assert whose(of(""), 0, {2: of("")}) == []


def test_common_counts_equal_items_at_the_beginning() -> None:
    assert common("abc", "abd") == 2
    assert common((1, 2), (1, 2, 3)) == 2
    assert common("", "a") == 0
