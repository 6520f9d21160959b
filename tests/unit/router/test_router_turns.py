"""The prompt of a conversation's next turn: which prefixes it shares with the turn before and its answer."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.router.bodies.messages import ChatMessage, Function, ToolCall
from kv_connector.router.bodies.prompt import PREFIX_BYTES, Prompt
from kv_connector.router.requests.completion import Completion

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LONG = "All happy families are alike; each unhappy family is unhappy in its own way. " * 30


def prompt(path: str, *, dumps: dict[str, Any] | None = None, **body: Any) -> Prompt:
    return Completion.decode(json.dumps({"model": "m", **body}, **(dumps or {})).encode()).prompt(path)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def shared(one: Prompt, other: Prompt) -> int:
    """Returns how many bytes of the first prompt the other prompt begins with."""
    same = 0
    while same < min(len(one.prefixes), len(other.prefixes)) and one.prefixes[same] == other.prefixes[same]:
        same += 1
    return one.bytes_of(same)


def whole(one: Prompt, other: Prompt) -> bool:
    return shared(one, other) == one.bytes_of(len(one.prefixes)) > 0


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "Because."},
        {"content": "Because.", "role": "assistant"},
        {"role": "assistant", "content": "Because.", "refusal": None, "annotations": [], "audio": None},
        {"role": "assistant", "content": "Because.", "tool_calls": [], "function_call": None},
        {"role": "assistant", "content": [{"type": "text", "text": "Because."}]},
        {"role": "assistant", "content": "Because.", "reasoning_content": None},
    ],
)
@pytest.mark.parametrize("dumps", [{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])
def test_prompt_followed_by_its_answer_is_the_beginning_of_the_next_turn(
    answer: dict[str, Any], dumps: dict[str, Any]
) -> None:
    begin = [{"role": "system", "content": "Be brief."}, user("Pourquoi pas l'\u00e9t\u00e9?\n")]
    before = prompt(CHAT, messages=begin).followed_by(ChatMessage(role="assistant", content="Because."))
    after = prompt(CHAT, dumps=dumps, messages=[*begin, answer, user("And?")])
    assert whole(before, after)
    assert len(before.prefixes) == 3, "the system prompt, the question, and the answer"


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("kind", ["text", "output_text"])
def test_prompt_of_other_apis_continues_with_the_text_of_an_answers_parts(path: str, kind: str) -> None:
    def seen(*messages: dict[str, Any]) -> Prompt:
        return prompt(path, messages=messages) if path == MESSAGES else prompt(path, input=messages)

    before = seen(user("Why?")).followed_by(ChatMessage(role="assistant", content="Because."))
    part = {"type": kind, "text": "Because.", "cache_control": {"type": "ephemeral"}}
    parts = {"id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
    assert whole(before, seen(user("Why?"), parts, user("And?")))


def test_prompt_of_responses_may_be_a_text() -> None:
    before = prompt(RESPONSES, input="Why?").followed_by(ChatMessage(role="assistant", content="Because."))
    after = prompt(RESPONSES, input=[user("Why?"), {"role": "assistant", "content": "Because."}, user("So?")])
    assert whole(before, after)


def test_prompt_with_tool_calls_continues_whatever_their_ids() -> None:
    said = ChatMessage(role="assistant", tool_calls=[ToolCall(Function("look", '{"at": 1}'))])
    before = prompt(CHAT, messages=[user("Look!")]).followed_by(said)
    call = {"id": "call-7", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    turn = [user("Look!"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    after = prompt(CHAT, messages=[*turn, {"role": "tool", "tool_call_id": "call-7", "content": "A cat."}])
    assert whole(before, after)
    other = prompt(CHAT, messages=[user("Look!"), {**turn[1], "tool_calls": []}])
    assert shared(before, other) == before.bytes_of(1)


@pytest.mark.parametrize(
    ("said", "repeated"),
    [
        (ChatMessage(role="assistant", reasoning="Hm.", content="Because."), {"content": "Because."}),
        (ChatMessage(role="assistant", content="<think>Hm.</think>Because."), {"content": "Because."}),
        (
            ChatMessage(role="assistant", content="<think>Hm.</think>Because."),
            {"content": "<think>Hm.</think>Because."},
        ),
    ],
)
def test_prompt_with_thinking_matches_up_to_the_answer(said: ChatMessage, repeated: dict[str, Any]) -> None:
    """A template leaves the thinking out of the next turn, so its tokens differ from there on."""
    alone = prompt(CHAT, messages=[user("Why?")])
    after = prompt(CHAT, messages=[user("Why?"), {"role": "assistant", **repeated}, user("And?")])
    assert shared(alone.followed_by(said), after) == alone.bytes_of(1)


def test_prompt_with_reasoning_continues_if_the_client_repeats_it() -> None:
    said = ChatMessage(role="assistant", reasoning="Hm.", content="Because.")
    again = {"role": "assistant", "reasoning_content": "Hm.", "content": "Because."}
    before = prompt(CHAT, messages=[user("Why?")]).followed_by(said)
    assert whole(before, prompt(CHAT, messages=[user("Why?"), again, user("And?")]))


@given(st.text(max_size=700), st.text(max_size=700), st.text(max_size=10))
def test_text_followed_by_its_answer_is_the_beginning_of_a_longer_text(a: str, b: str, c: str) -> None:
    a, b, c = a * 4, b * 4, c
    before = prompt(COMPLETIONS, prompt=a).followed_by(b)
    assert before.prefixes == prompt(COMPLETIONS, prompt=a + b).prefixes
    assert before.size == len((a + b).encode())
    assert shared(before, prompt(COMPLETIONS, prompt=a + b + c)) == before.bytes_of(len(before.prefixes))


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@given(ids=st.lists(st.integers(0, 200_000), min_size=2, max_size=400), count=st.integers(1, 1000))
def test_ids_followed_by_their_answer_are_the_beginning_of_more_ids(
    separators: tuple[str, str], ids: list[int], count: int
) -> None:
    answer = [*range(1000, 1000 + count)]
    said = ",".join(map(str, answer)).encode()
    before, after, more = (
        prompt(COMPLETIONS, dumps={"separators": separators}, prompt=some)
        for some in (ids, [*ids, *answer], [*ids, *answer, 7, 8])
    )
    before = before.followed_by(said)
    assert (before.prefixes, before.size, before.tokens) == (after.prefixes, after.size, after.tokens)
    assert shared(before, more) == before.bytes_of(len(before.prefixes))


def test_answer_that_does_not_fit_the_prompt_changes_nothing() -> None:
    chat, text, ids = (
        prompt(path, messages=[user("Why?")], prompt=of)
        for path, of in ((CHAT, ""), (COMPLETIONS, "Why?"), (COMPLETIONS, [1, 2, 3]))
    )
    message = ChatMessage(role="assistant", content="Because.")
    for before, answer in (
        (chat, "Because."),
        (text, message),
        (text, b"1,2"),
        (ids, "Because."),
        (chat, b"1"),
    ):
        assert before.followed_by(answer) is before
    nested = prompt(COMPLETIONS, prompt=[[1, 2, 3]])
    assert nested.followed_by(b"4") is nested


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=600)), max_size=6),
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=600)), max_size=3),
)
def test_prompt_of_a_grown_conversation_has_all_prefixes_of_the_shorter(
    turns: list[tuple[str, str]], more: list[tuple[str, str]]
) -> None:
    before, after = (
        prompt(CHAT, messages=[{"role": role, "content": text} for role, text in some])
        for some in (turns, [*turns, *more])
    )
    assert after.prefixes[: len(before.prefixes)] == before.prefixes
    assert list(after.ends) == sorted(after.ends)
    assert after.size == (after.ends[-1] if after.ends else after.size)
    assert all(b - a <= PREFIX_BYTES for a, b in zip((0, *after.ends), after.ends, strict=False))


def test_message_with_an_unknown_field_does_not_change_the_others() -> None:
    odd = {"role": "user", "content": "Hm", "mood": [1, 2]}
    one = prompt(CHAT, messages=[user("A"), odd])
    assert shared(one, prompt(CHAT, messages=[user("A"), user("B")])) == one.bytes_of(1)
    assert whole(one, prompt(CHAT, messages=[user("A"), {**odd, "id": "7"}, user("C")]))
    other = prompt(CHAT, messages=[user("A"), {**odd, "mood": [1, 3]}, user("C")])
    assert shared(one, other) < one.bytes_of(len(one.prefixes))


def test_picture_counts_for_as_many_bytes_as_a_page_of_text() -> None:
    def seen(letter: str) -> Prompt:
        url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + letter * 100_000}}
        return prompt(CHAT, messages=[user([url, {"type": "text", "text": "What is it?"}]), user("Well?")])

    one = seen("A")
    assert one.pictures
    assert one.size < 5000
    assert shared(one, seen("A")) == one.size
    assert shared(one, seen("B")) < 100


@pytest.mark.parametrize("raw", [b"[1, {}]", b"[" + b"{}," * 40_000 + b"{}]", b'{"role": "user"}', b"null"])
def test_prompt_that_is_no_list_of_messages_is_hashed_as_it_came(raw: bytes) -> None:
    seen = Completion.decode(b'{"model": "m", "messages": %s}' % raw).prompt(CHAT)
    assert seen.followed_by(ChatMessage(role="assistant", content="x")) is seen
    assert seen.size == len(raw)


BILLING = "x-anthropic-billing-header: cc_version=2.1.15.d3f; cc_entrypoint=cli; cch=%s;"


def blocks(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


@pytest.mark.parametrize(
    "system",
    [
        lambda n: blocks(BILLING % n, "You are Claude Code.", LONG),
        lambda n: blocks("You are Claude Code.", BILLING % n, LONG),
        lambda n: blocks(f"{BILLING % n}\nMore of the header.", "You are Claude Code.", LONG),
        lambda n: f"{BILLING % n}\nYou are Claude Code.{LONG}",
    ],
)
def test_billing_header_of_claude_code_leaves_the_conversation_as_it_is(system: Callable[[str], Any]) -> None:
    """vLLM does not render the header, which differs in each request."""
    one = prompt(MESSAGES, system=system("00000"), messages=[user("Hi")])
    two = prompt(MESSAGES, system=system("a1b2c"), messages=[user("Hi"), user("Why?")])
    assert whole(one, two)
    assert one == prompt(MESSAGES, system="You are Claude Code." + LONG, messages=[user("Hi")])


@pytest.mark.parametrize("system", [blocks(BILLING % 1), "", [], None, blocks("")])
def test_system_prompt_of_nothing_is_none(system: Any) -> None:
    assert prompt(MESSAGES, system=system, messages=[user("Hi")]) == prompt(MESSAGES, messages=[user("Hi")])


@pytest.mark.parametrize("content", [lambda text: text, lambda text: blocks(*text.split("\n", 1))])
def test_billing_header_in_a_system_message_is_left_out(content: Callable[[str], Any]) -> None:
    def seen(number: int, role: str) -> Prompt:
        first = {"role": role, "content": content(f"{BILLING % number}\nYou are Claude Code.")}
        return prompt(CHAT, messages=[first, user("Hi")])

    assert whole(seen(1, "system"), seen(2, "system"))
    assert shared(seen(1, "user"), seen(2, "user")) == 0, "vLLM renders it in a message of a user"


@pytest.mark.parametrize("system", [{"text": LONG}, [LONG], [[LONG]], 7, [{"text": LONG}]])
def test_system_prompt_of_another_shape_is_hashed_as_it_came(system: Any) -> None:
    one, two = (prompt(MESSAGES, system=of, messages=[user("Hi")]) for of in (system, "You are Claude Code."))
    assert shared(one, two) == 0
    assert one.size > len(json.dumps(system))


def test_turns_of_an_agent_match_although_the_mark_of_its_cache_moves() -> None:
    """Claude Code marks the last message of each request."""

    def result(number: int, *, marked: bool) -> dict[str, Any]:
        block: dict[str, Any] = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": LONG}
        return user([{**block, "cache_control": {"type": "ephemeral"}} if marked else block])

    def call(number: int) -> dict[str, Any]:
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {"path": f"{number}"}}
        return {"role": "assistant", "content": [{"type": "text", "text": "Reading."}, use]}

    one = prompt(MESSAGES, messages=[user("Look!"), call(1), result(1, marked=True)])
    two = prompt(
        MESSAGES,
        messages=[user("Look!"), call(1), result(1, marked=False), call(2), result(2, marked=True)],
    )
    assert whole(one, two)
    other = prompt(MESSAGES, messages=[user("Look!"), call(2), result(1, marked=True)])
    assert shared(one, other) == one.bytes_of(1)


def test_picture_of_anthropics_api_counts_like_any_other() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 100_000}
    seen = prompt(MESSAGES, messages=[user([{"type": "image", "source": source}])])
    assert seen.pictures
    assert seen.size < 5000
    tiny = prompt(MESSAGES, messages=[user([{"type": "image", "source": {**source, "data": "A"}}])])
    assert tiny.size < 200, "a client could make a prompt of millions of tokens from them"
    said = prompt(MESSAGES, messages=[user([{"type": "text", "text": '{"type":"base64"} ;base64, ' * 1000}])])
    assert not said.pictures
    assert said.size > 20_000
