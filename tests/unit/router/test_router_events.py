"""EventStream: whole events, however their bytes are cut, and the beginning of an answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kv_connector.router.failure import Failure
from kv_connector.router.requests.events import EventStream


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def role(index: int = 0) -> bytes:
    """Returns the event with which vLLM begins each choice of a chat."""
    delta = {"role": "assistant", "content": "", "reasoning": None}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
    return event(id="c", choices=[choice], usage=None, prompt_token_ids=None)


def said(**delta: Any) -> bytes:
    return event(id="c", choices=[{"index": 0, "delta": delta, "finish_reason": None}])


def named(kind: str, **fields: Any) -> bytes:
    """Returns an event of vLLM's streams of messages and responses."""
    return f"event: {kind}\n".encode() + event(type=kind, **fields)


MESSAGE = named("message_start", message={"id": "m", "content": []})
RESPONSE = named("response.created", response={"id": "r", "error": None}) + named("response.in_progress")
ERROR = event(error={"message": "KV load failed", "type": "InternalServerError", "code": 503})


async def cut(data: bytes, size: int) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_come_whole_and_nothing_is_lost(size: int) -> None:
    data = role() + said(content="a\\n\\nb") + b": a comment\n\n" + b"data: [DONE]\n\n" + b"no end"

    async def read() -> list[bytes]:
        events = EventStream(cut(data, size))
        found = []
        while more := await events.read():
            found.append(more)
        return found

    found = asyncio.run(read())
    assert b"".join(found) == data
    assert all(part.endswith(b"\n\n") for part in found[:-1])


@pytest.mark.parametrize("size", [1, 50, 10_000])
@pytest.mark.parametrize(
    "first",
    [
        said(content="a"),
        said(reasoning="hm"),
        said(tool_calls=[{"index": 0}]),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        event(choices=[{"index": 0, "delta": {"content": ""}, "token_ids": [7], "finish_reason": None}]),
        event(choices=[{"index": 0, "text": "a"}]),
        event(choices=[], usage={"prompt_tokens": 1}),
        b"data: [DONE]\n\n",
        b"data: 1\n\n",
    ],
)
def test_answer_begins_with_its_first_event_that_has_content(first: bytes, size: int) -> None:
    async def opening() -> tuple[bytes, bytes]:
        events = EventStream(cut(b": hello\n\n" + role(0) + role(1) + first + b"data: next\n\n", size))
        begun = await events.opening()
        return begun, await events.read()

    begun, after = asyncio.run(opening())
    told = b": hello\n\n" + role(0) + role(1) + first
    assert begun.startswith(told)
    assert begun + after == told + b"data: next\n\n"


@pytest.mark.parametrize("size", [1, 50, 10_000])
@pytest.mark.parametrize("beginning", [MESSAGE, RESPONSE])
def test_named_events_that_open_an_answer_have_no_content(beginning: bytes, size: int) -> None:
    async def opening(first: bytes) -> bytes:
        return await EventStream(cut(beginning + first + b": more\n\n" * 50, size)).opening()

    for kind in ("content_block_start", "response.output_item.added", "response.completed"):
        begun = asyncio.run(opening(named(kind)))
        assert begun.startswith(beginning + named(kind))
        assert len(begun) < len(beginning + named(kind)) + size
    with pytest.raises(Failure) as raised:
        asyncio.run(opening(named("error", error={"type": "internal_error", "message": "no"})))
    assert (raised.value.status, json.loads(raised.value.body)["error"]["message"]) == (500, "no")


@pytest.mark.parametrize("size", [1, 50, 10_000])
@pytest.mark.parametrize("before", [b"", role(0), role(0) + role(1), b": hello\n\n"])
def test_an_error_before_that_is_a_failure(before: bytes, size: int) -> None:
    with pytest.raises(Failure) as raised:
        asyncio.run(EventStream(cut(before + ERROR + b"data: [DONE]\n\n", size)).opening())
    assert raised.value.status == 503
    assert json.loads(raised.value.body)["error"]["message"] == "KV load failed"


def test_an_error_after_it_is_the_clients_to_see() -> None:
    data = said(content="a") + ERROR
    assert asyncio.run(EventStream(cut(data, 10_000)).opening()) == data


@pytest.mark.parametrize("code", [None, "bad", 200, 99999])
def test_an_error_without_a_status_is_500(code: object) -> None:
    with pytest.raises(Failure) as raised:
        asyncio.run(EventStream(cut(event(error={"code": code}), 1)).opening())
    assert raised.value.status == 500


def test_a_stream_without_an_answer_ends() -> None:
    assert asyncio.run(EventStream(cut(role(), 5)).opening()) == role()
    assert asyncio.run(EventStream(cut(b"", 5)).opening()) == b""
