"""Streams whose decode engine fails in the middle: the client sees a pause, or reads why the stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_vllm import LENGTH, FakeVllm, serve_vllm
from router_setup import PATIENCE, client_of, nobody, serve, until_metric, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from stream_site import BODY, CHAT, COMPLETION, MESSAGES, REQUESTS, StreamReading, alone, answer_of, said

from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Members
from kv_connector.router.failure import Failure
from kv_connector.router.front.app import create_app
from kv_connector.router.requests import early_token
from kv_connector.router.requests.continuation import ContinuationTail, resumed_prompt
from kv_connector.router.requests.transcript import Budget
from kv_connector.router.settings import PolicyName, RouterSettings
from kv_connector.router.streams import continuing, restarts, resumption
from kv_connector.router.streams.running import Running, Shown

pytestmark = pytest.mark.anyio


class Fleet:
    """Prefill engines and decode engines of one role, and a client of their router."""

    def __init__(self, prefill: list[FakeVllm], decode: list[FakeVllm]) -> None:
        self.prefill, self.decode = prefill, decode
        self.client: Any

    async def outcomes(self) -> dict[str, float]:
        """Returns {outcome: streams whose engine has failed}."""
        text = (await self.client.get("/metrics")).text
        name = "kv_connector_router_broken_streams_total{outcome="
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}

    async def begin(
        self, body: dict[str, Any] = BODY, path: str = COMPLETION, events: int = 7
    ) -> StreamReading:
        """Returns a stream that has begun on the first decode engine."""
        reading = StreamReading(self.client, path, body)
        await reading.until(events)
        return reading


@contextlib.asynccontextmanager
async def fleet(
    prefill: int = 1, decode: int = 2, more: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[Fleet]:
    """``more``: URLs of further decode engines."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(serve_vllm(number + 1)) for number in range(prefill + decode)
        ]
        made = Fleet(engines[:prefill], engines[prefill:])
        chosen = RouterSettings(
            tuple(Endpoint.parse(f"{one.url}@10.0.0.{one.created}:5600") for one in made.prefill),
            tuple(Endpoint.parse(url) for url in (*(one.url for one in made.decode), *more)),
            **settings,
        )
        url = await stack.enter_async_context(serve(create_app(chosen)))
        made.client = await stack.enter_async_context(client_of(url))
        yield made


async def ended(reading: StreamReading) -> dict[str, Any]:
    """Returns the error with which a stream ends."""
    await within(reading._task)
    assert reading.raw.endswith(b"data: [DONE]\n\n")
    error: dict[str, Any] = reading.events[-1]["error"]
    return error


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("settings", [{}, {"dispatch": "serial"}, {"policy": PolicyName.FEWEST_OUTSTANDING}])
async def test_stream_continues_on_another_engine_when_its_engine_dies(
    path: str, body: dict[str, Any], settings: dict[str, Any]
) -> None:
    async with fleet(**settings) as f:
        # The engine stops behind a token with text.
        asked = f.decode[0].ids_of_body(path, body)
        stop = next(n for n in range(6, 20) if answer_of(asked, n)[-1] % 5)
        f.decode[0].limits = (stop, LENGTH)
        reading = await f.begin(body, path, stop)
        f.decode[0].killed.set()
        events = await reading.end()
        f.decode[0].killed.clear()
        f.decode[0].limits = (LENGTH, LENGTH)
        expected = await alone(f.decode[0], path, body)
        if "usage" in events[-1] and not events[-1]["choices"]:
            expected[-1]["usage"]["prompt_tokens_details"] = events[-1]["usage"]["prompt_tokens_details"]
        assert events == expected
        assert await f.outcomes() == {"resumed": 1}
        # The prefill engine computes prompt and answer, and the other decode engine continues behind them.
        (to_decode,) = f.decode[1].bodies
        to_prefill = f.prefill[0].bodies[-1]
        assert to_prefill["prompt"] == to_decode["prompt"]
        generated = to_decode["prompt"][len(asked) :]
        assert generated == answer_of(asked, len(generated))
        assert len(generated) in (stop - 1, stop)  # the router may not have read the last one
        assert f.decode[1].headers[0]["x-request-id"] == "one-resumed-1"
        if "min_tokens" in body:
            assert to_decode["min_tokens"] == 50 - len(generated)
        await until_metric(f.client, "kv_connector_router_in_flight", 0)


async def test_stream_leaves_its_engine_when_that_has_the_fewest_requests() -> None:
    async with fleet() as f:
        for one in f.decode:
            one.limits = (8, LENGTH)
        f.decode[0].reports = True
        first = await f.begin()
        second = StreamReading(f.client, COMPLETION, BODY, "two")
        await second.until(5)
        f.decode[0].killed.set()
        f.decode[1].go.set()
        assert said(await first.end()) == said(await second.end())
        assert await f.outcomes() == {"resumed": 1}


async def test_stream_continues_when_its_engine_reports_its_death() -> None:
    async with fleet() as f:
        f.decode[0].dies_behind, f.decode[0].reports = 9, True
        events = await StreamReading(f.client, COMPLETION, BODY).end()
        assert said(events) == said(await alone(f.decode[1], COMPLETION, BODY))
        assert await f.outcomes() == {"resumed": 1}


@pytest.mark.parametrize("an_event", [2, 3, 4])
@pytest.mark.parametrize("shows_ids", [False, True])
async def test_stream_of_several_tokens_an_event_continues(an_event: int, shows_ids: bool) -> None:
    # Tokens of a multiple of 5 have no text until the next one, as parts of a character.
    prompts: dict[bool, list[int]] = {}
    for number in range(1, 90):
        prompts.setdefault(answer_of([number], 3 * an_event)[-1] % 5 == 0, [number])
    assert len(prompts) == 2
    for prompt in prompts.values():
        body = {"prompt": prompt, "max_tokens": 60, "return_token_ids": shows_ids, "temperature": 0}
        async with fleet() as f:
            f.decode[0].an_event, f.decode[0].dies_behind = an_event, 3 * an_event
            reading = StreamReading(f.client, COMPLETION, body)
            events = await reading.end()
            assert said(events) == said(await alone(f.decode[1], COMPLETION, body))
            assert await f.outcomes() == {"resumed": 1}


@pytest.mark.parametrize(
    "more", [{}, {"return_token_ids": True, "temperature": 0}, {"return_token_ids": True}]
)
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_token_without_text_is_generated_again(path: str, more: dict[str, Any]) -> None:
    """The engine dies behind a part of a character. The client may have the token's id."""
    prompts: list[dict[str, Any]] = [{"prompt": [n]} for n in range(1, 90)]
    if path == CHAT:
        prompts = [{"messages": [{"role": "user", "content": "x" * n}]} for n in range(1, 90)]

    def held(asked: dict[str, Any]) -> bool:
        ids = asked.get("prompt") or [*json.dumps(asked["messages"]).encode()]
        return answer_of(ids, 9)[-1] % 5 == 0

    body = {**next(one for one in prompts if held(one)), "max_tokens": 60, **more}
    async with fleet() as f:
        f.decode[0].dies_behind = 9
        reading = StreamReading(f.client, path, body)
        if more == {"return_token_ids": True}:
            assert "a part of a character" in (await ended(reading))["message"]
            return
        assert said(await reading.end()) == said(await alone(f.decode[1], path, body))
        assert await f.outcomes() == {"resumed": 1}


async def test_text_that_a_chats_parser_holds_back_reaches_the_client() -> None:
    """The engine dies behind a token of whose text the client has a part."""
    for number in range(1, 90):
        body = {"messages": [{"role": "user", "content": "x" * number}], "max_tokens": 60}
        if answer_of([*json.dumps(body["messages"]).encode()], 9)[-1] % 5 == 0:
            break
    async with fleet() as f:
        for one in f.decode:
            one.marks = True
        f.decode[0].dies_behind = 9
        events = await StreamReading(f.client, CHAT, body).end()
        assert said(events) == said(await alone(f.decode[1], CHAT, body))
        assert await f.outcomes() == {"resumed": 1}


@pytest.mark.parametrize(
    ("more", "reason", "words"),
    [
        ({"seed": 1}, "seed", "with a seed"),
        ({"stop": ["x"]}, "stop_strings", "stop strings"),
        ({"presence_penalty": 1}, "penalties", "penalties"),
        ({"logprobs": 1}, "more_than_text", "log probabilities"),
        ({"unknown": 1}, "other_key", "does not know"),
        ({"return_token_ids": 1}, "other_key", "does not know"),  # vLLM reports ids
    ],
)
async def test_stream_that_cannot_continue_ends_with_the_reason(
    more: dict[str, Any], reason: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet() as f:
        f.decode[0].dies_behind = 9
        error = await ended(StreamReading(f.client, COMPLETION, BODY | more))
        assert error["code"] == 502
        assert "The stream did not continue on another engine" in error["message"]
        assert words in error["message"]
        assert await f.outcomes() == {reason: 1}
        assert not f.decode[1].bodies
    assert f"request one: not resumed ({reason})" in caplog.text


async def test_reported_error_keeps_its_fields_beside_the_reason() -> None:
    async with fleet() as f:
        f.decode[0].dies_behind, f.decode[0].reports = 9, True
        error = await ended(StreamReading(f.client, COMPLETION, BODY | {"seed": 1}))
        assert (error["code"], error["type"]) == (500, "InternalServerError")
        assert error["message"].startswith("EngineCore died. The stream did not continue")


async def test_request_that_ends_engines_reaches_two_when_the_second_dies_at_once() -> None:
    async with fleet(decode=4) as f:
        f.decode[0].dies_behind = 9
        for other in f.decode[1:]:
            other.dies_behind = -1
        error = await ended(StreamReading(f.client, COMPLETION, BODY))
        assert "the next engines failed too" in error["message"]
        assert await f.outcomes() == {"engine_failed": 1}
        assert [len(one.bodies) for one in f.decode].count(1) == 2


async def test_request_that_ends_engines_reaches_two_when_it_makes_no_progress() -> None:
    async with fleet(decode=4) as f:
        f.decode[0].dies_behind = 9
        for other in f.decode[1:]:
            other.dies_behind = resumption.MIN_PROGRESS - 1
        error = await ended(StreamReading(f.client, COMPLETION, BODY))
        assert "a decode engine had failed less than 32 tokens before" in error["message"]
        assert await f.outcomes() == {"resumed": 1, "again": 1}
        assert [len(one.bodies) for one in f.decode].count(1) == 2


async def test_stream_survives_three_failures_with_progress_between_them() -> None:
    body = BODY | {"max_tokens": 300, "return_token_ids": True, "stream_options": {"include_usage": True}}
    async with fleet(decode=5) as f:
        for one in f.decode[:3]:
            one.dies_behind = 40
        events = await StreamReading(f.client, COMPLETION, body).end()
        assert said(events) == said(await alone(f.decode[4], COMPLETION, body))
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 300)
        assert await f.outcomes() == {"resumed": 3}
    async with fleet(decode=5) as f:
        for one in f.decode:
            one.dies_behind = 40
        assert (
            "3 decode engines had failed before"
            in (await ended(StreamReading(f.client, COMPLETION, body)))["message"]
        )
        assert await f.outcomes() == {"resumed": 3, "often": 1}


async def test_engine_that_takes_no_connection_is_passed_over() -> None:
    """Engines of one host die together. The router may not know it of all of them."""
    with nobody() as gone:
        async with fleet(more=(gone,)) as f:
            f.decode[0].limits = (8, LENGTH)
            f.decode[1].limits = (0, LENGTH)
            first = await f.begin()
            second = StreamReading(f.client, COMPLETION, BODY, "two")
            await within(f.decode[1].arrived.wait())
            f.decode[0].killed.set()
            f.decode[1].go.set()
            expected = said(await alone(f.decode[1], COMPLETION, BODY))
            assert said(await first.end()) == expected
            assert said(await second.end()) == expected
            assert await f.outcomes() == {"resumed": 1}


async def test_stream_ends_when_no_other_engine_takes_requests() -> None:
    async with fleet(decode=1) as f:
        f.decode[0].dies_behind = 9
        error = await ended(StreamReading(f.client, COMPLETION, BODY))
        assert "no other decode engine takes requests" in error["message"]
        assert await f.outcomes() == {"no_other_engine": 1}


@pytest.mark.parametrize(("status", "reason"), [(400, "refused"), (503, "engine_failed")])
async def test_stream_ends_when_the_next_engines_refuse(status: int, reason: str) -> None:
    async with fleet(decode=3) as f:
        f.decode[0].limits = (8, LENGTH)
        reading = await f.begin()
        for other in f.decode[1:]:
            other.refuses = status
        f.decode[0].killed.set()
        await ended(reading)
        assert await f.outcomes() == {reason: 1}


async def test_stream_is_not_refused_when_engines_do_not_report_what_the_router_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def models(_: FakeVllm, __: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})

    monkeypatch.setattr(FakeVllm, "models", models)
    async with fleet() as f:
        f.decode[0].dies_behind = 9
        await ended(StreamReading(f.client, CHAT, {"messages": MESSAGES}))
        assert await f.outcomes() == {"engine_failed": 1}


async def test_stream_ends_when_the_next_engine_sends_nothing_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumption, "MAX_PAUSE_S", 0.2)
    async with fleet() as f:
        f.decode[0].limits, f.decode[1].limits = (8, LENGTH), (0, 0)
        reading = await f.begin()
        f.decode[0].killed.set()
        await ended(reading)
        assert await f.outcomes() == {"too_late": 1}
        async with asyncio.timeout(PATIENCE):
            while not f.decode[1].closed:
                await asyncio.sleep(0.01)
        await until_metric(f.client, "kv_connector_router_in_flight", 0)


async def _crowd(f: Fleet, streams: int) -> list[StreamReading]:
    """Begins so many streams on each decode engine, and stops those of the second engine."""
    for one in f.decode:
        one.limits = (8, LENGTH)
    readings = [StreamReading(f.client, COMPLETION, BODY, str(number)) for number in range(2 * streams)]
    for reading in readings:
        await reading.until(7)
    assert [len(one.bodies) for one in f.decode] == [streams, streams]
    f.decode[1].limits = (0, LENGTH)
    return readings


async def test_streams_of_a_dead_engine_begin_anew_a_few_at_a_time() -> None:
    streams, most = 20, restarts.MOST_AT_ENGINE
    async with fleet() as f:
        readings = await _crowd(f, streams)
        f.decode[0].killed.set()
        await until_metric(f.client, "kv_connector_router_waiting_streams", streams - most)
        # A new request does not wait behind them.
        new = StreamReading(f.client, COMPLETION, BODY, "new")
        async with asyncio.timeout(PATIENCE):
            while len(f.decode[1].bodies) < streams + most + 1:
                await asyncio.sleep(0.01)
        assert "new" in [headers["x-request-id"] for headers in f.decode[1].headers]
        f.decode[1].go.set()
        expected = said(await new.end())
        for reading in readings:
            assert said(await reading.end()) == expected
        assert await f.outcomes() == {"resumed": streams}
        await until_metric(f.client, "kv_connector_router_waiting_streams", 0)


async def test_requests_without_a_token_are_retried_a_few_at_a_time() -> None:
    requests, most = 20, restarts.MOST_AT_ENGINE
    async with fleet() as f:
        for one in f.decode:
            one.limits = (0, LENGTH)
        readings = [StreamReading(f.client, COMPLETION, BODY, str(number)) for number in range(2 * requests)]
        async with asyncio.timeout(PATIENCE):
            while [len(one.bodies) for one in f.decode] != [requests, requests]:
                await asyncio.sleep(0.01)
        f.decode[0].killed.set()
        await until_metric(f.client, "kv_connector_router_waiting_streams", requests - most)
        async with asyncio.timeout(PATIENCE):
            while len(f.decode[1].bodies) < requests + most:
                await asyncio.sleep(0.01)
        # A new request does not wait behind them.
        new = StreamReading(f.client, COMPLETION, BODY, "new")
        async with asyncio.timeout(PATIENCE):
            while len(f.decode[1].bodies) < requests + most + 1:
                await asyncio.sleep(0.01)
        assert f.decode[1].headers[-1]["x-request-id"] == "new"
        f.decode[1].go.set()
        expected = said(await new.end())
        for reading in readings:
            assert said(await reading.end()) == expected
        await until_metric(f.client, "kv_connector_router_waiting_streams", 0)
        await until_metric(f.client, "kv_connector_router_in_flight", 0)


async def test_request_behind_its_first_token_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "early_tokens", lambda *_: True)
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 0)
    async with fleet() as f:
        f.decode[0].limits = (0, LENGTH)
        reading = await f.begin(BODY | {"temperature": 0}, events=1)
        f.decode[0].killed.set()
        await until_metric(f.client, "kv_connector_router_waiting_streams", 1)
        reading.leave()
        await until_metric(f.client, "kv_connector_router_waiting_streams", 0)


@pytest.mark.parametrize(
    ("early", "more"),
    [
        (False, {}),
        (False, {"prompt_logprobs": 0}),
        (False, {"stream": True, "include_reasoning": False}),
        (True, {"stream": True, "include_reasoning": False}),
    ],
)
async def test_whole_answers_wait_for_prompts_and_not_for_other_answers(
    monkeypatch: pytest.MonkeyPatch, early: bool, more: dict[str, Any]
) -> None:
    """An answer that is not streamed begins with its end, which may take minutes, and a stream begins behind
    hidden reasoning. With log probabilities of the prompt, decode engines compute the prompts."""
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 1)
    monkeypatch.setattr(Members, "early_tokens", lambda *_: early)
    monkeypatch.setattr(early_token, "_sure", lambda *_: False)  # the prefill engine's token has no text
    async with fleet() as f:
        for one in f.decode:
            one.limits = (0, LENGTH)
        body = BODY | {"model": "m"} | more
        asking = [asyncio.create_task(f.client.post(COMPLETION, json=body)) for _ in range(6)]
        async with asyncio.timeout(PATIENCE):
            while [len(one.bodies) for one in f.decode] != [3, 3]:
                await asyncio.sleep(0.01)
            f.decode[0].killed.set()
            while len(f.decode[1].bodies) < 6:
                await asyncio.sleep(0.01)
        f.decode[1].go.set()
        for answer in asking:
            assert (await within(answer)).status_code == 200


async def test_stream_that_waits_too_long_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "MAX_PAUSE_S", 0.2)
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 0)
    async with fleet() as f:
        f.decode[0].dies_behind = 9
        error = await ended(StreamReading(f.client, COMPLETION, BODY))
        assert "streams before it kept the other engines busy" in error["message"]
        assert await f.outcomes() == {"queued": 1}
        assert not f.decode[1].bodies
        await until_metric(f.client, "kv_connector_router_waiting_streams", 0)


async def test_client_that_leaves_during_the_pause_leaves_nothing_behind() -> None:
    async with fleet() as f:
        f.decode[0].limits, f.decode[1].limits = (8, LENGTH), (0, 0)
        reading = await f.begin()
        f.decode[0].killed.set()
        await within(f.decode[1].arrived.wait())
        reading.leave()
        await until_metric(f.client, "kv_connector_router_in_flight", 0)
        async with asyncio.timeout(PATIENCE):
            while not f.decode[1].closed:
                await asyncio.sleep(0.01)
        assert await f.outcomes() == {}


async def test_stream_with_only_the_prefill_engines_token_ends_when_its_engine_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Members, "early_tokens", lambda *_: True)
    async with fleet() as f:
        f.decode[0].limits = (0, LENGTH)
        reading = await f.begin(events=1)
        f.decode[0].killed.set()
        assert "had not reported token ids yet" in (await ended(reading))["message"]
        assert await f.outcomes() == {"no_ids": 1}


async def test_stream_behind_the_prefill_engines_token_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "early_tokens", lambda *_: True)
    async with fleet() as f:
        f.decode[0].limits, f.decode[0].dies_behind = (0, LENGTH), 9
        reading = await f.begin(events=1)
        f.decode[0].go.set()
        events = await reading.end()
        assert said(events) == said(await alone(f.decode[1], COMPLETION, BODY))
        assert await f.outcomes() == {"resumed": 1}
        assert {event["created"] for event in events} == {1}


async def test_stream_ends_when_the_router_has_no_room_for_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.router.streams.moves.MOST_IDS", 20)
    async with fleet() as f:
        f.decode[0].dies_behind = 20
        error = await ended(StreamReading(f.client, COMPLETION, BODY))
        assert "no room for its token ids" in error["message"]
        assert await f.outcomes() == {"memory": 1}
        # The room is free again.
        f.decode[0].dies_behind = None
        f.decode[1].dies_behind = 3
        await StreamReading(f.client, COMPLETION, BODY | {"max_tokens": 4}).end()


async def test_prefill_engine_that_has_the_prompt_computes_the_rest() -> None:
    async with fleet(prefill=3) as f:
        f.decode[0].limits = (8, LENGTH)
        reading = await f.begin({"messages": MESSAGES}, CHAT, 5)
        (before,) = (one for one in f.prefill if one.bodies)
        f.decode[0].killed.set()
        await reading.end()
        assert len(before.bodies) == 2


async def test_whole_answer_is_computed_again() -> None:
    async with fleet() as f:
        f.decode[0].limits = (0, LENGTH)
        asking = asyncio.create_task(f.client.post(COMPLETION, json=BODY | {"model": "m"}))
        await within(f.decode[0].arrived.wait())
        f.decode[0].killed.set()
        answer = await within(asking)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert await f.outcomes() == {}


# --- Where a stream can continue


def test_tail_leaves_out_the_tokens_that_the_client_has() -> None:
    tail = ContinuationTail(chunk("a", [5]), prompt=1, said=1, cached=None, known=[6, 7])
    assert tail.of(chunk("", [6])) == b""
    assert tail.of(chunk("bc", [7, 8])) == chunk("bc", [8])
    assert tail.of(chunk("d", [6])) == chunk("d", [6])
    other = ContinuationTail(chunk("a", [5]), prompt=1, said=1, cached=None, known=[6, 7])
    with pytest.raises(Failure, match="continued with token 9, where the client has 6"):
        other.of(chunk("b", [9]))


def chunk(text: str, ids: list[int] | None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish, **more, "token_ids": ids}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def chat(delta: dict[str, Any], ids: list[int] | None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids}
    event = {"choices": [choice], **more}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


BEGIN = chunk("a", [5], prompt_token_ids=[1, 2])
ROLE = chat({"role": "assistant", "content": ""}, None, prompt_token_ids=[1, 2])


@pytest.mark.parametrize(
    ("parts", "place", "shown"),
    [
        ([BEGIN], (b"1,2,5", 1), Shown.NOTHING),
        ([BEGIN, chunk("b", [6])], (b"1,2,5,6", 2), Shown.NOTHING),
        ([BEGIN, chunk("", [6])], (b"1,2,5", 1), Shown.NOTHING),
        ([BEGIN + chunk("", [6])], (b"1,2,5", 1), Shown.NOTHING),
        ([chunk("", [5], prompt_token_ids=[1, 2])], (b"1,2", 0), Shown.NOTHING),
        ([BEGIN, chunk("b", [6]) + chunk("", [7])], (b"1,2,5,6", 2), Shown.NOTHING),
        ([BEGIN, chunk("", [6]), chunk("bc", [7, 8])], (b"1,2,5", 1), Shown.TEXT),
        ([BEGIN, chunk("bc", [7, 8]) + chunk("", [9])], (b"1,2,5", 1), Shown.TEXT),
        ([BEGIN, chunk("bc", [7, 8]), chunk("d", [9])], (b"1,2,5,7,8,9", 4), Shown.NOTHING),
        ([ROLE], None, Shown.NOTHING),
        ([ROLE, chat({"reasoning": "x"}, [5])], None, Shown.THINKING),
        ([ROLE, chat({"reasoning": "x"}, [5]) + chat({}, [6])], None, Shown.THINKING),
        ([ROLE, chat({"reasoning": "x"}, [5]), chat({"content": "y"}, [6])], (b"1,2,5,6", 2), Shown.NOTHING),
        ([ROLE, chat({"content": "y"}, [6]), chat({}, [7])], (b"1,2,6", 1), Shown.NOTHING),
        ([ROLE, chat({"content": "y"}, [6]), chat({"content": ""}, [7])], (b"1,2,6", 1), Shown.NOTHING),
    ],
)
def test_running_knows_where_the_client_has_all_text(
    parts: list[bytes], place: tuple[bytes, int] | None, shown: Shown
) -> None:
    running = Running(may_move=True)
    for part in parts:
        running.read(part)
    found = running.place
    assert (None if found is None else (bytes(running.ids[: found[0]]), found[1])) == place
    assert running.shown is shown
    assert not running.ended
    running.read(chunk("", [9], "length"))
    assert running.ended


def test_running_gives_back_the_room_for_its_ids() -> None:
    budget = Budget(30)
    one, other = Running(may_move=True, budget=budget), Running(may_move=True, budget=budget)
    one.read(BEGIN)
    assert budget.left == 25
    other.read(chunk("a", [*range(10, 20)], prompt_token_ids=[1]))
    assert (other.full, other.whole, other.several, budget.left) == (True, False, b"", 25)
    assert other.read(chunk("b", [6])) == chunk("b", None)
    assert budget.left == 25
    one.begin(None)
    assert budget.left == 30


def test_continuations_prompt_has_the_prefixes_of_the_first() -> None:
    first = Prompt("m", 1000, None, (1, 2), ends=(500, 1000))
    prompt = resumed_prompt(first, 300, 100)
    assert (prompt.prefixes, prompt.size, prompt.tokens) == ((1, 2), 1500, 300)
    assert prompt.tokens_of(1000, 300) == 200


async def test_stream_continues_when_no_engine_reports_the_text_of_a_token_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hangs(*_: object) -> Response:
        await asyncio.sleep(PATIENCE)
        return Response()

    monkeypatch.setattr(FakeVllm, "detokenize", hangs)
    monkeypatch.setattr(continuing, "MAX_QUESTION_S", 0.1)
    async with fleet() as f:
        f.decode[0].dies_behind = 9
        body = {"messages": MESSAGES, "max_tokens": 60}
        assert said(await StreamReading(f.client, CHAT, body).end()) == said(
            await alone(f.decode[1], CHAT, body)
        )
        assert await f.outcomes() == {"resumed": 1}
