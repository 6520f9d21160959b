"""Early first tokens: the parts of the prefill engine's and the decode engine's streams that the client
gets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
from router_setup import PATIENCE, cluster, refuse, streaming
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kv_connector.router.engines.members import Members
from kv_connector.router.failure import Failure
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.early_token import EarlyToken, Mismatch, PrefillStream, Rest


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


def completion(text: str, finish: str | None = None, created: int = 7) -> bytes:
    return event(created=created, choices=[{"index": 0, "text": text, "finish_reason": finish}])


def chat(delta: dict[str, Any], finish: str | None = None, created: int = 7) -> bytes:
    return event(created=created, choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


ROLE = {"role": "assistant", "content": ""}
USAGE = event(choices=[], usage={"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}})
DONE = b"data: [DONE]\n\n"


def told(*events: bytes) -> EarlyToken | None:
    return PrefillStream().feed(b"".join(events))


# --- The prefill engine's stream


def test_prefill_token_is_passed_on_without_the_prefill_end() -> None:
    token = told(completion(" a", finish="length"), USAGE, DONE)
    assert token == EarlyToken(completion(" a"), "text", " a", (), 7)


def test_role_of_a_chat_comes_first() -> None:
    token = told(chat(ROLE), chat({"content": "Hi"}, finish="length"))
    assert token == EarlyToken(chat(ROLE) + chat({"content": "Hi"}), "content", "Hi", (), 7)


def test_events_may_come_one_by_one() -> None:
    stream = PrefillStream()
    assert stream.feed(chat(ROLE)) is None
    token = stream.feed(chat({"reasoning": "Hm"}, finish="length"))
    assert token is not None
    assert (token.events, token.key) == (chat(ROLE) + chat({"reasoning": "Hm"}), "reasoning")


@pytest.mark.parametrize(
    "last",
    [
        completion("", finish="stop"),
        completion("\ufffd", finish="length"),
        chat({"content": None, "tool_calls": [{"index": 0}]}, finish="length"),
        chat({"content": "a", "tool_calls": [{"index": 0}]}, finish="length"),
        chat({"content": "a", "reasoning": "b"}, finish="length"),
        event(choices=[{"text": "a"}, {"text": "b"}]),
        DONE,
    ],
    ids=["end", "half-a-character", "tool", "text-and-tool", "two-texts", "two-choices", "nothing"],
)
def test_nothing_is_passed_on_that_is_not_one_text(last: bytes) -> None:
    assert told(last) is None


def test_prefill_error_is_a_failure() -> None:
    with pytest.raises(Failure) as failed:
        told(event(error={"message": "no", "code": 404}))
    assert failed.value.status == 404
    assert msgspec.json.decode(failed.value.body)["error"]["message"] == "no"


@pytest.mark.parametrize("apart", [True, False])
def test_prefill_cached_tokens_are_found(apart: bool) -> None:
    stream, events = PrefillStream(), (completion("a", finish="length"), USAGE, DONE)
    told = [stream.feed(one) for one in (events if apart else [b"".join(events)])]
    assert [token.text for token in told if token is not None] == ["a"]
    assert stream.cached_tokens == 4


@pytest.mark.parametrize("text", [" \n", "<", "<think", "[THINK]", "<|channel|>"])
def test_text_that_the_decode_parsers_may_hold_back_is_not_passed_on_in_a_chat(text: str) -> None:
    assert told(chat({"content": text}, finish="length")) is None
    assert told(completion(text, finish="length")) is not None


def test_a_fingerprint_of_an_end_is_not_passed_on() -> None:
    last = event(choices=[{"text": "a", "finish_reason": "length"}], system_fingerprint="f")
    token = told(last)
    assert token is not None
    assert token.events == event(choices=[{"text": "a", "finish_reason": None}])


# --- The decode engine's stream


def rest(first: bytes, *events: bytes) -> bytes:
    token = told(first)
    assert token is not None
    behind = Rest(token)
    return b"".join(behind.of(one) for one in events)


def test_text_that_the_client_has_is_left_out_of_the_decode_stream() -> None:
    assert rest(completion("a"), completion("a"), completion("b"), DONE) == completion("b") + DONE


def test_several_tokens_in_one_event_are_cut() -> None:
    assert rest(completion("a"), completion("ab") + completion("c")) == completion("b") + completion("c")


def test_one_token_in_several_events_is_left_out_of_all() -> None:
    assert rest(completion("abc"), completion("a"), completion("b"), completion("cd")) == completion("d")


def test_end_is_passed_on_even_without_remaining_text() -> None:
    assert rest(completion("a"), completion("a", finish="length")) == completion("", finish="length")


def test_decode_role_is_left_out() -> None:
    given = chat(ROLE), chat({"content": "Hi"}), chat({"content": " you"}, finish="stop")
    assert rest(chat({"content": "Hi"}), *given) == chat({"content": " you"}, finish="stop")


def test_the_answer_has_one_time_of_its_beginning() -> None:
    text = 'not "created":9 in a text'
    given = completion("a", created=8), completion(text, created=8)
    assert rest(completion("a", created=7), *given) == completion(text, created=7)


def test_another_token_is_a_mismatch() -> None:
    with pytest.raises(Mismatch, match="'b' where the prefill engine had sampled 'a'"):
        rest(completion("a"), completion("b"))


@pytest.mark.parametrize(
    "delta", [{"reasoning": "b"}, {"content": "a", "tool_calls": [{}]}, {"tool_calls": [{}]}]
)
def test_other_things_than_the_tokens_text_are_a_mismatch(delta: dict[str, Any]) -> None:
    with pytest.raises(Mismatch):
        rest(chat({"content": "a"}), chat(delta))


def test_text_in_one_event_with_the_tokens_text_is_passed_on() -> None:
    merged = chat({"reasoning": "Okay.", "content": "Hi"})
    assert rest(chat({"reasoning": "Okay"}), merged) == chat({"reasoning": ".", "content": "Hi"})
    with pytest.raises(Mismatch):
        rest(chat({"reasoning": "Okay"}), chat({"reasoning": "O", "content": "Hi"}))


def test_an_end_before_the_token_is_a_mismatch() -> None:
    with pytest.raises(Mismatch, match="ended before 'a'"):
        rest(completion("a"), completion("", finish="stop"))


# --- Token ids


def ids(text: str, tokens: list[int], finish: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"text": text, "token_ids": tokens, "finish_reason": finish, **more}])


def test_ids_are_cut_like_the_text_when_a_client_wants_ids() -> None:
    first = ids("a", [1], finish="length", prompt_token_ids=[8, 9])
    given = ids("a", [1], prompt_token_ids=[8, 9]), ids("b", [2], finish="length")
    assert rest(first, *given) == given[1]
    merged = ids("ab", [1, 2], prompt_token_ids=[8, 9])
    assert rest(first, merged) == ids("b", [2], prompt_token_ids=None)
    assert rest(first, ids("a", [1], finish="length")) == ids("", [], finish="length")


def test_the_prompts_ids_are_passed_on_as_they_came() -> None:
    def of_completion(finish: str | None) -> bytes:
        text = 'of "prompt_token_ids":[1]'
        return ids(text, [1], finish=finish, prompt_token_ids=[1 << 70, -2])

    token = told(of_completion("length"))
    assert token is not None
    assert token.events == of_completion(None)

    def of_chat(finish: str | None) -> bytes:
        choice = {"delta": {"content": "a"}, "token_ids": [1], "finish_reason": finish}
        return event(choices=[choice], prompt_token_ids=[8, 9])

    token = told(of_chat("length"))
    assert token is not None
    assert token.events == of_chat(None)


def test_a_token_without_text_is_passed_on_by_its_id() -> None:
    token = told(ids("", [1], finish="length"))
    assert token == EarlyToken(ids("", [1]), "text", "", (1,), None)
    assert rest(ids("", [1], finish="length"), ids("", [1]), ids("", [2])) == ids("", [2])
    assert rest(ids("", [1], finish="length"), ids("xy", [1, 2])) == ids("xy", [2])


def test_mark_that_is_known_by_its_id_may_arrive_with_the_text_behind_it() -> None:
    def of(delta: dict[str, Any], tokens: list[int]) -> bytes:
        return event(choices=[{"delta": delta, "token_ids": tokens, "finish_reason": None}])

    merged = of({"reasoning": "Hm"}, [1, 2])
    assert rest(of({"content": ""}, [1]), merged) == of({"reasoning": "Hm"}, [2])


def test_ids_may_come_before_their_text() -> None:
    given = ids("", [1]), ids("", [2]), ids("ab", [3])
    assert rest(ids("a", [1], finish="length"), *given) == ids("", [2]) + ids("b", [3])


def test_another_id_is_a_mismatch() -> None:
    with pytest.raises(Mismatch, match=r"\[2\] where the prefill engine had sampled \[1\]"):
        rest(ids("", [1], finish="length"), ids("", [2]))


# --- Which requests


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"n": 1, "stop": None, "logprobs": None, "tools": None, "min_tokens": 3}, None),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stream": False}, "not_streamed"),
        ({"stream": "false"}, "not_streamed"),
        ({"stream": "maybe"}, "not_streamed"),
        ({"stream": 2}, "not_streamed"),
        *(({"stream": value}, None) for value in (1, 1.0, "1", "on", "t", "TRUE", "y", "Yes")),
        ({"n": 2}, "several_answers"),
        ({"best_of": 2}, "several_answers"),
        ({"echo": True}, "more_than_text"),
        ({"logprobs": 0}, "more_than_text"),
        ({"logprobs": True}, "more_than_text"),
        ({"return_token_ids": True}, None),
        ({"stream_options": {"continuous_usage_stats": True}}, "more_than_text"),
        ({"stream_options": ["include_usage"]}, "more_than_text"),
        ({"stop": ["x"]}, "stop_strings"),
        ({"tools": [{}]}, "tools"),
    ],
)
def test_request_determines_whether_its_first_token_may_come_from_prefill(
    more: dict[str, Any], reason: str | None
) -> None:
    request = Completion({"prompt": [1], "stream": True, **more})
    assert request.late_reason() == reason
    assert request.behind_its_token().late_reason() == "begun"


def test_prefill_streams_one_token_and_may_not_end_where_the_client_forbids_it() -> None:
    request = Completion({"prompt": [1], "stream": True, "min_tokens": 5, "max_tokens": 9, "n": 1})
    body = json.loads(cast(bytes, request.prefill_body("t", serial=False, early=True)))
    assert (body["stream"], body["min_tokens"], body["max_tokens"]) == (True, 1, 1)
    assert "n" not in body
    request = Completion({"prompt": [1], "stream": True, "min_tokens": "3"})
    assert json.loads(cast(bytes, request.prefill_body("t", serial=False, early=True)))["min_tokens"] == 1


# --- Through the router


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the router believe that both engines support early first tokens."""
    monkeypatch.setattr(Members, "early_tokens", lambda self, endpoint: True)


REQUEST = {"prompt": [1, 2], "stream": True, "max_tokens": 3}
FROM_P = (completion("a", finish="length"), DONE)


async def outcomes(client: Any) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    name = "kv_connector_router_early_tokens_total{outcome="
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)}


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_client_has_the_prefill_token_before_decode_answers() -> None:
    go = asyncio.Event()
    decode = streaming(go, completion("a"), completion("b", finish="stop"), DONE)
    async with (
        cluster(streaming(*FROM_P), decode) as (p, d, client),
        client.stream("POST", "/v1/completions", json=REQUEST) as answer,
    ):
        chunks = answer.aiter_bytes()
        async with asyncio.timeout(PATIENCE):
            assert await anext(chunks) == completion("a")
        go.set()
        assert b"".join([chunk async for chunk in chunks]) == completion("b", finish="stop") + DONE
        assert p.bodies[0]["stream"] is True
        assert d.bodies[0]["kv_transfer_params"]["early_token"] is True
        assert await outcomes(client) == {"sent": 1}


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_stream_begins_when_both_engines_have_begun_their_streams() -> None:
    """An engine's own stream also begins before any token is sampled."""
    go = asyncio.Event()
    async with (
        cluster(streaming(go, *FROM_P), streaming(go, completion("a"), DONE)) as (_, _, client),
        asyncio.timeout(PATIENCE),
        client.stream("POST", "/v1/completions", json=REQUEST) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        go.set()
        assert await answer.aread() == completion("a") + DONE


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_failure_in_a_begun_stream_is_reported_in_the_stream() -> None:
    go, problem = asyncio.Event(), event(error={"message": "out of luck", "code": 500})
    counted = 'kv_connector_router_requests_total{route="/v1/completions",status="500"} 1.0'
    engines = cluster(streaming(go, problem), streaming(asyncio.Event()))
    async with engines as (_, _, client), asyncio.timeout(PATIENCE):
        async with client.stream("POST", "/v1/completions", json=REQUEST) as answer:
            assert answer.status_code == 200
            go.set()
            assert await answer.aread() == problem + DONE
        while counted not in (await client.get("/metrics")).text:
            pass


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.anyio
async def test_a_refusal_by_either_engine_is_a_status(side: str) -> None:
    waits, refuses = streaming(asyncio.Event()), refuse(400, "too long")
    engines = (refuses, waits) if side == "prefill" else (waits, refuses)
    async with cluster(*engines, patience=0.05) as (_, _, client), asyncio.timeout(PATIENCE):
        answer = await client.post("/v1/completions", json=REQUEST)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_decode_answers_when_prefill_has_no_text_to_pass_on() -> None:
    go, end = asyncio.Event(), completion("", finish="stop")
    async with cluster(streaming(end, DONE), streaming(go, end, DONE)) as (_, _, client):
        asking = asyncio.create_task(client.post("/v1/completions", json=REQUEST))
        async with asyncio.timeout(PATIENCE):
            while await outcomes(client) != {"no_text": 1}:
                assert not asking.done()
        go.set()
        assert (await asking).content == end + DONE


@pytest.mark.anyio
async def test_engines_without_early_token_support_get_no_request_for_it() -> None:
    async def whole(request: Request, body: dict[str, Any]) -> Response:
        return Response(b'{"choices":[]}', media_type="application/json")

    async with cluster(whole, streaming(completion("b"), DONE)) as (p, d, client):
        answer = await client.post("/v1/completions", json=REQUEST)
        assert answer.content == completion("b") + DONE
        assert p.bodies[0]["stream"] is False
        assert "early_token" not in d.bodies[0]["kv_transfer_params"]
        assert await outcomes(client) == {"engines": 1}


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_different_first_token_of_decode_ends_the_stream_with_an_error() -> None:
    go = asyncio.Event()
    async with (
        cluster(streaming(*FROM_P), streaming(go, completion("z"), DONE)) as (_, _, client),
        client.stream("POST", "/v1/completions", json=REQUEST) as answer,
    ):
        chunks = answer.aiter_bytes()
        assert await anext(chunks) == completion("a")
        go.set()
        last = b"".join([chunk async for chunk in chunks])
        assert json.loads(last.removeprefix(b"data: ").removesuffix(DONE))["error"]["code"] == 502
        assert await outcomes(client) == {"sent": 1, "mismatch": 1}


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_decode_failure_behind_the_token_is_an_error_in_the_stream() -> None:
    go = asyncio.Event()
    decode = streaming(go, event(error={"message": "broken", "code": 500}))
    async with (
        cluster(streaming(*FROM_P), decode) as (_, d, client),
        client.stream("POST", "/v1/completions", json=REQUEST | {"temperature": 0}) as answer,
    ):
        assert answer.status_code == 200
        chunks = answer.aiter_bytes()
        assert await anext(chunks) == completion("a")
        go.set()
        assert b"broken" in b"".join([chunk async for chunk in chunks])
        asked = [body for body in d.bodies if "nobody-wants/" not in body.get("model", "")]
        assert len(asked) == 1, "there is no other engine to try"


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_decode_refusal_is_the_answer_though_prefill_has_a_token() -> None:
    over = asyncio.Event()

    async def refusing(request: Request, body: dict[str, Any]) -> Response:
        await over.wait()
        return await refuse(400, "max_tokens")(request, body)

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        asyncio.get_running_loop().call_later(0.1, over.set)
        return await streaming(*FROM_P)(request, body)

    async with cluster(prefill, refusing) as (_, _, client):
        answer = await client.post("/v1/completions", json=REQUEST)
        assert (answer.status_code, "max_tokens" in answer.text) == (400, True)


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_client_that_leaves_behind_the_token_aborts_decode() -> None:
    gone = asyncio.Event()

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        async def generate() -> AsyncIterator[bytes]:
            try:
                await asyncio.Event().wait()
                yield b""
            finally:
                gone.set()

        return StreamingResponse(generate(), media_type="text/event-stream")

    # The decode engine answers nothing else either. It also gets the request by which the router ends the
    # transfer.
    async with cluster(streaming(*FROM_P), decode, patience=0.1) as (_, _, client):
        async with client.stream("POST", "/v1/completions", json=REQUEST) as answer:
            assert await anext(answer.aiter_bytes()) == completion("a")
        async with asyncio.timeout(PATIENCE):
            await gone.wait()


@pytest.mark.usefixtures("early")
@pytest.mark.anyio
async def test_prefill_refusal_is_the_answer() -> None:
    engines = refuse(422, "no such thing"), streaming(asyncio.Event())
    async with cluster(*engines, patience=0.05) as (_, _, client):
        answer = await client.post("/v1/completions", json=REQUEST)
        assert answer.status_code == 422
        assert "no such thing" in answer.text
