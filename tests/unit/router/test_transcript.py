"""Transcript: what is collected of an answer, and how it continues the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.router.bodies.messages import ChatMessage, Function, ToolCall
from kv_connector.router.requests.transcript import MOST_IN_ALL, Budget, Said, Transcript

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def event(data: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: %s\n\n" % json.dumps(data).encode()


def chat(**delta: Any) -> bytes:
    return event({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]})


def said(path: str, *chunks: bytes, whole: Any = None, **more: Any) -> Said:
    budget = Budget()
    transcript = Transcript(path, budget, **more)
    for chunk in chunks:
        transcript.add(chunk)
    if whole is not None:
        transcript.whole(json.dumps(whole).encode())
    result = transcript.said()
    transcript.close()
    assert budget.left == MOST_IN_ALL, "the budget is given back"
    return result


def answer(text: str = "", **more: Any) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, **more)


@given(st.lists(st.text(max_size=40), max_size=60), st.integers(1, 5))
def test_transcript_of_a_chat_has_the_text_of_all_events(texts: list[str], together: int) -> None:
    events = [
        chat(role="assistant", content=""),
        *(chat(content=text) for text in texts),
        b"data: [DONE]\n\n",
    ]
    chunks = [b"".join(events[at : at + together]) for at in range(0, len(events), together)]
    assert said(CHAT, *chunks).answer == answer("".join(texts))


def test_transcript_of_a_chat_has_reasoning_and_tool_calls() -> None:
    calls = [
        [{"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"at":'}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
        [{"index": 1, "id": "b", "type": "function", "function": {"name": "stop", "arguments": "{}"}}],
    ]
    chunks = [chat(reasoning_content="Hm"), chat(reasoning="."), *(chat(tool_calls=some) for some in calls)]
    both = [ToolCall(Function("look", '{"at":1}')), ToolCall(Function("stop", "{}"))]
    assert said(CHAT, *chunks).answer == answer(reasoning="Hm.", tool_calls=both)


def test_transcript_of_a_whole_chat_is_that_of_its_stream() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}},
        {"id": "b", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
    ]
    message = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": calls}
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8}}
    result = said(CHAT, whole={"choices": [{"index": 0, "message": message}], "usage": usage})
    both = [ToolCall(Function("look", '{"at":1}')), ToolCall(Function("stop", "{}"))]
    assert result == Said(answer(reasoning="Hm.", tool_calls=both), b"", 10, 8)


def test_transcript_of_a_completion_has_text_and_token_ids() -> None:
    events = [
        event({"choices": [{"index": 0, "text": "a", "token_ids": [1, 2]}]}),
        event({"choices": [{"index": 0, "text": "b", "token_ids": None}, {"index": 1, "text": "x"}]}),
        event({"choices": [{"index": 0, "text": "c", "token_ids": [3]}]}),
        event({"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}),
        b"data: [DONE]\n\n",
    ]
    assert said(COMPLETIONS, *events) == Said("abc", b"1,2,3", 5, None)


def test_transcript_of_an_echo_is_none() -> None:
    assert said(COMPLETIONS, event({"choices": [{"text": "ab"}]}), echo=True).answer is None


def test_transcript_of_anthropics_api_has_text_and_thinking() -> None:
    stream = [
        event({"type": "message_start", "message": {"role": "assistant", "content": []}}, "message_start"),
        event({"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "H"}}, "x"),
        event({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "m"}}, "x"),
        event({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, "x"),
        event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Because"}}, "x"),
        event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "."}}, "x"),
        event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}}, "x"),
    ]
    assert said(MESSAGES, *stream).answer == answer("Because.", reasoning="Hm")
    content = [{"type": "text", "text": "Because."}]
    assert said(MESSAGES, whole={"role": "assistant", "content": content}).answer == answer("Because.")
    usage = {"input_tokens": 300, "cache_read_input_tokens": 7700, "output_tokens": 2}
    result = said(MESSAGES, whole={"role": "assistant", "content": content, "usage": usage})
    assert (result.prompt_tokens, result.cached_tokens) == (8000, 7700), "this API counts cached tokens apart"
    tool = event({"type": "content_block_start", "content_block": {"type": "tool_use", "id": "t"}}, "x")
    assert said(MESSAGES, *stream, tool).answer is None, "its form in the next turn is not known"


def test_transcript_of_responses_has_text() -> None:
    stream = [
        event({"type": "response.output_item.added", "item": {"type": "message", "content": []}}, "x"),
        event({"type": "response.output_text.delta", "delta": "Because"}, "x"),
        event({"type": "response.output_text.delta", "delta": "."}, "x"),
        event({"type": "response.output_text.done", "text": "Because."}, "x"),
    ]
    assert said(RESPONSES, *stream).answer == answer("Because.")
    output = [{"type": "message", "content": [{"type": "output_text", "text": "Because."}]}]
    usage = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 3}}
    assert said(RESPONSES, whole={"output": output, "usage": usage}) == Said(answer("Because."), b"", 7, 3)
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    both = said(RESPONSES, whole={"output": [thought, *output]}).answer
    assert both == answer("Because.", reasoning="Hm.")
    assert said(RESPONSES, whole={"output": [{"type": "function_call", "name": "f"}]}).answer is None


@pytest.mark.parametrize("chunk", [b"data: {oops}\n\n", b'data: {"choices": 7}\n\n'])
def test_transcript_of_an_unreadable_event_is_none(chunk: bytes) -> None:
    assert said(CHAT, chat(content="a"), chunk).answer is None


def test_transcript_keeps_the_beginning_of_a_long_answer() -> None:
    result = said(CHAT, *(chat(content="x" * 1000) for _ in range(100))).answer
    assert isinstance(result, ChatMessage)
    assert isinstance(result.content, str)
    assert 64 << 10 <= len(result.content) <= (64 << 10) + 1000


def test_transcripts_share_one_budget() -> None:
    budget = Budget(1500)
    first, second = Transcript(CHAT, budget), Transcript(CHAT, budget)
    for transcript in (first, second):
        for _ in range(40):
            transcript.add(chat(content="x" * 100))
    lengths = [len(one.content or "") for one in (first.said().answer, second.said().answer) if one]  # type: ignore[union-attr]
    assert 1500 <= sum(lengths) <= 1800
    first.close()
    second.close()
    assert budget.left == 1500
