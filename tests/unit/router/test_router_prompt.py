"""The router's view of a prompt, and its forecast of the prompt's tokens."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.router.bodies.prompt import (
    ID_PREFIX_BYTES,
    PREFIX_BYTES,
    PRIOR_BYTES_PER_TOKEN,
    Prompt,
    TokenSizes,
)
from kv_connector.router.requests.completion import Completion

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"

LONG = "All happy families are alike; each unhappy family is unhappy in its own way. " * 100


def prompt(path: str = COMPLETIONS, **body: Any) -> Prompt:
    return Completion.decode(json.dumps({"model": "m", **body}).encode()).prompt(path)


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def shared(one: Prompt, other: Prompt) -> int:
    """Returns how many prefixes the prompts share. Shared prefixes must be the first ones."""
    same = sum(a == b for a, b in zip(one.prefixes, other.prefixes, strict=False))
    assert {*one.prefixes} & {*other.prefixes} == {*one.prefixes[:same]}
    return same


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n ", " : ")])
@pytest.mark.parametrize("ids", [[7], [1, 2, 3], [*range(32000)], [[1, 2, 3]]])
def test_token_ids_are_counted(ids: list[Any], separators: tuple[str, str]) -> None:
    raw = json.dumps({"prompt": ids}, separators=separators).encode()
    seen = Completion.decode(raw).prompt(COMPLETIONS)
    assert seen.tokens == len(ids[0] if isinstance(ids[0], list) else ids)


@pytest.mark.parametrize(
    ("text", "size"), [("", 0), ("1, 2, 3", 7), ("[1, 2, 3]", 9), ("\u00e9\n", 3), (["a, b"], 8), ([], 2)]
)
def test_text_has_no_known_number_of_tokens(text: Any, size: int) -> None:
    seen = prompt(prompt=text)
    assert seen.tokens is None
    assert seen.size == size


def test_spaces_before_a_text_are_read_once() -> None:
    """Backtracking over 1 MiB of spaces would take hours of the event loop."""
    spaces = b" " * (1 << 20)
    for text, tokens in ((b'[%s"a"]' % spaces, None), (b"[%s[%s7]]" % (spaces, spaces), 1)):
        assert Completion.decode(b'{"prompt":%s}' % text).prompt(COMPLETIONS).tokens == tokens


def test_the_size_has_what_the_template_puts_before_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    alone, behind_tools = (prompt(CHAT, messages=turns("Hello"), tools=of) for of in (None, tools))
    assert alone.size == len("user") + len("Hello") + 2
    assert 0 <= behind_tools.size - alone.size - len(LONG) < 100


def test_a_prefix_has_its_hash_and_the_remainder_has_none() -> None:
    whole = [len(prompt(prompt="x" * size).prefixes) for size in (1, PREFIX_BYTES - 1, PREFIX_BYTES)]
    assert whole == [0, 0, 1]
    assert len(prompt(prompt="x" * (4 * PREFIX_BYTES - 1)).prefixes) == 3


def test_prefix_of_token_ids_ends_each_256_bytes() -> None:
    """So an answer of 50 tokens makes the prefix longer that an engine is known to have."""
    before = prompt(prompt=[1000 + number for number in range(400)])
    assert [len(before.prefixes), before.ends[:2]] == [400 * 6 // ID_PREFIX_BYTES, (256, 512)]
    answer = ",".join(str(2000 + number) for number in range(50)).encode()
    after = before.followed_by(answer)
    assert len(before.prefixes) < len(after.prefixes)
    assert after.tokens == 450
    whole = [*(1000 + number for number in range(400)), *(2000 + number for number in range(50)), 7, 7]
    assert prompt(prompt=whole).prefixes[: len(after.prefixes)] == after.prefixes


def test_only_the_beginning_of_a_huge_prompt_is_hashed() -> None:
    seen = prompt(prompt="x" * (3 << 20))
    assert seen.size == (3 << 20) + 2
    assert len(seen.prefixes) == (1 << 20) // PREFIX_BYTES


@given(st.binary(max_size=8 * PREFIX_BYTES), st.binary(max_size=8 * PREFIX_BYTES), st.integers(0, 7000))
def test_prompts_share_what_is_the_same_at_their_beginning(one: bytes, other: bytes, length: int) -> None:
    beginning = (LONG * 2)[:length]
    first, second = (beginning + tail.hex() for tail in (one, other))
    same = len(first)
    if first != second:
        same = next(
            (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
    seen = [prompt(prompt=text) for text in (first, second)]
    assert shared(*seen) == same // PREFIX_BYTES


@pytest.mark.parametrize("at", range(PREFIX_BYTES, PREFIX_BYTES + 8))
@pytest.mark.parametrize("letter", ["y", "@", "\x7f"])
def test_one_letter_makes_another_prompt(at: int, letter: str) -> None:
    text = "x" * (4 * PREFIX_BYTES)
    other = text[:at] + letter + text[at + 1 :]
    assert shared(prompt(prompt=text), prompt(prompt=other)) == 1


def test_pieces_in_another_order_make_another_prompt() -> None:
    a, b, c = ("x" * PREFIX_BYTES, "y" * PREFIX_BYTES, "z" * PREFIX_BYTES)
    assert shared(prompt(prompt=a + b + c + a), prompt(prompt=a + c + b + a)) == 1


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_conversation_that_has_grown_begins_as_it_did(path: str) -> None:
    before = prompt(path, messages=turns(LONG, "Why?"), system="Be brief.")
    after = prompt(path, messages=turns(LONG, "Why?", LONG), system="Be brief.")
    assert shared(before, after) == len(before.prefixes) > 0


@pytest.mark.parametrize("closing", range(60))
def test_so_does_one_that_ends_with_a_prefix(closing: int) -> None:
    text = "x" * (3 * PREFIX_BYTES - closing)
    before, after = (prompt(CHAT, messages=turns(text, *more)) for more in ((), ("And then?",)))
    assert shared(before, after) == len(before.prefixes)


def test_conversations_share_their_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    one, other = (prompt(CHAT, messages=turns(text * 1000), tools=tools) for text in ("a", "b"))
    assert shared(one, other) == len(LONG) // PREFIX_BYTES + 1, "a prefix ends with the tools"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "another"),
        ("cache_salt", "tenant"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("system", "Be brief."),
        ("instructions", "Be brief."),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("documents", [{"title": "a"}]),
        ("reasoning_effort", "high"),
        ("output_config", {"effort": "high"}),
        ("add_special_tokens", False),
        ("mm_processor_kwargs", {"fps": 1}),
    ],
)
def test_fields_that_change_the_kv_change_the_prefixes(field: str, value: Any) -> None:
    plain, other = (prompt(CHAT, messages=turns(LONG), **more) for more in ({}, {field: value}))
    assert plain.prefixes
    assert shared(plain, other) == 0


def test_a_text_and_a_chat_have_nothing_in_common() -> None:
    one, other = (prompt(path, prompt=LONG, messages=turns(LONG)) for path in (COMPLETIONS, CHAT))
    assert shared(one, other) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("max_tokens", 7),
        ("stream", True),
        ("seed", 3),
        ("stop", ["x"]),
        ("n", 2),
        ("user", "somebody"),
        ("cache_salt", None),
    ],
)
def test_fields_that_keep_the_kv_keep_the_prefixes(field: str, value: Any) -> None:
    assert prompt(CHAT, messages=turns(LONG), **{field: value}) == prompt(CHAT, messages=turns(LONG))


def test_a_request_without_a_prompt_is_seen_too() -> None:
    assert prompt(CHAT) == Prompt("m", 0, None, ())
    assert Completion.decode(b'{"model": 3}').prompt(COMPLETIONS).model == ""


def text(size: int, model: str = "m") -> Prompt:
    return Prompt(model, size, None, ())


def test_tokens_are_forecast_by_the_prior_until_an_answer_arrives() -> None:
    sizes = TokenSizes()
    assert sizes.tokens(text(4000)) == 4000 / PRIOR_BYTES_PER_TOKEN
    assert sizes.tokens(text(0)) == 1
    sizes.learn(text(4000), 2000)
    assert 1000 < sizes.tokens(text(4000)) < 2000


@given(st.floats(1.0, 16.0), st.integers(1000, 1_000_000))
def test_forecast_approaches_the_measured_tokens(bytes_per_token: float, size: int) -> None:
    sizes = TokenSizes()
    for _ in range(500):
        sizes.learn(text(size), round(size / bytes_per_token))
    assert sizes.tokens(text(100_000)) == pytest.approx(100_000 / bytes_per_token, rel=0.05)


def test_each_model_has_its_own_tokens() -> None:
    sizes = TokenSizes()
    sizes.learn(text(100_000, "a"), 50_000)
    assert sizes.tokens(text(4000, "b")) == 1000


def test_long_prompt_weighs_more_than_a_short_prompt() -> None:
    short, long = TokenSizes(), TokenSizes()
    short.learn(text(10), 5)
    long.learn(text(100_000), 50_000)
    assert short.tokens(text(4000)) < long.tokens(text(4000))


@pytest.mark.parametrize(("size", "tokens", "least"), [(10, 1000, 1.0), (1_000_000, 10, 16.0)])
def test_implausible_token_sizes_do_not_spoil_the_forecast(size: int, tokens: int, least: float) -> None:
    sizes = TokenSizes()
    for _ in range(1000):
        sizes.learn(text(size), tokens)
    assert sizes.tokens(text(16_000)) == pytest.approx(16_000 / least, rel=0.01)


def test_a_nonsensical_answer_teaches_nothing() -> None:
    sizes = TokenSizes()
    sizes.learn(text(4000), 0)
    sizes.learn(Prompt("m", 100_000, 10_000, ()), 10_000)
    assert sizes.tokens(text(4000)) == 1000


def test_token_ids_need_no_forecast() -> None:
    assert TokenSizes().tokens(Prompt("m", 4000, 700, ())) == 700


def test_models_that_come_and_go_are_forgotten() -> None:
    sizes = TokenSizes()
    for number in range(5000):
        sizes.learn(text(100_000, f"m{number}"), 50_000)
    assert sizes.tokens(text(4000, "m0")) == 1000
    assert sizes.tokens(text(4000, "m4999")) > 1000
