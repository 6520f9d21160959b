"""Running streams that move to another decode engine: the client sees one stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_vllm import LENGTH, serve_vllm
from router_setup import PATIENCE, client_of, metric, serve, until_metric, within
from stream_site import (
    BODY,
    CHAT,
    COMPLETION,
    MESSAGES,
    REQUESTS,
    StreamReading,
    StreamSite,
    alone,
    answer_of,
    moving,
    said,
    site,
)

from kv_connector.cli import drain
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.front.app import create_app
from kv_connector.router.placement.balance import EvenStreams
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.continuation import stay_reason, tokens_left
from kv_connector.router.settings import PolicyName, RouterSettings
from kv_connector.router.streams.moves import Moves
from kv_connector.router.streams.running import Running

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "REPEAT_SECONDS", 0.05)
    monkeypatch.setattr("kv_connector.router.front.registry._TICK_S", 0.02)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_drained_engines_stream_goes_on_elsewhere_and_back(path: str, body: dict[str, Any]) -> None:
    async with site() as s:
        reading = StreamReading(s.client, path, body)
        await reading.until(7)
        drained = await s.drain(s.first)
        assert (drained.exit_code, drained.output.strip()) == (
            0,
            f"{s.first.url} is idle, 1 streams have moved",
        )
        events = await reading.end()
        s.first.limits = (LENGTH, LENGTH)
        expected = await alone(s.first, path, body)
        if "usage" in events[-1] and not events[-1]["choices"]:
            expected[-1]["usage"]["prompt_tokens_details"] = events[-1]["usage"]["prompt_tokens_details"]
        assert events == expected
        assert await s.outcomes() == {"moved": 1}
        assert s.first.closed == 1
        # The old engine was asked for the pages of prompt and answer, and the new engine continues behind
        # them.
        (to_first,), (to_second,) = s.first.bodies[1:2], s.second.bodies
        assert to_first["kv_transfer_params"]["do_remote_decode"]
        transfer = to_second["kv_transfer_params"]
        assert transfer["transfer_id"] == to_first["kv_transfer_params"]["transfer_id"]
        assert (transfer["remote_host"], transfer["do_remote_prefill"]) == ("10.0.0.2", True)
        assert to_first["prompt"] == to_second["prompt"]
        assert to_first["max_tokens"] == 1
        said = len(to_second["prompt"]) - len(s.first.ids_of_body(path, body))
        assert said >= 5
        if "min_tokens" in body:
            assert to_second["min_tokens"] == 50 - said
        assert "seed" not in to_second


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_noting_the_ids_leaves_no_trace(path: str, body: dict[str, Any]) -> None:
    async with site() as s:
        s.first.limits = (LENGTH, LENGTH)
        reading = StreamReading(s.client, path, body)
        await reading.end()
        assert s.first.bodies[0]["return_token_ids"] is True
        async with client_of(s.first.url) as client:
            asked = StreamReading(client, path, body)
            await asked.end()
        assert reading.raw == asked.raw


async def test_a_stream_moves_again_and_its_tokens_are_counted_together() -> None:
    body = BODY | {"stream_options": {"include_usage": True}, "return_token_ids": True}
    async with serve_vllm(4) as third, site(third) as s:
        s.second.limits = (12, 24)
        reading = await moving(s, body)
        await s.drain(s.first)
        await reading.until(20)
        await s.drain(s.second)
        events = await reading.end()
        assert await s.outcomes() == {"moved": 2}
        assert len(third.bodies) == 1
        expected = await alone(third, COMPLETION, body)
    assert said(events) == said(expected)
    assert {event["created"] for event in events} == {2}
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 60, 63)


@pytest.mark.parametrize("an_event", [2, 3, 4])
async def test_a_stream_of_several_tokens_an_event_moves_where_a_character_ends(an_event: int) -> None:
    # The first possible move is behind the fifth event, which ends within a character.
    within_one = (n for n in range(1, 90) if answer_of([n], 5 * an_event)[-1] % 5 == 0)
    body = {"prompt": [next(within_one)], "max_tokens": 60, "return_token_ids": True}
    async with site() as s:
        s.first.an_event = an_event
        s.first.limits, s.first.pace = (4 * an_event, LENGTH), 0.01
        reading = StreamReading(s.client, COMPLETION, body)
        await reading.until(4)
        assert (await s.drain(s.first)).exit_code == 0
        events = await reading.end()
        assert await s.outcomes() == {"moved": 1}
        assert said(events) == said(await alone(s.second, COMPLETION, body))
        behind = len(s.second.bodies[0]["prompt"]) - 1
        assert behind % an_event == 0
        assert behind > 5 * an_event


async def test_chat_moves_where_its_parser_holds_no_text_back() -> None:
    chats = ({"messages": [{"role": "user", "content": "x" * n}], "max_tokens": 60} for n in range(1, 90))
    async with site() as s:
        s.first.marks = s.second.marks = True
        # The first possible move is behind the ninth token.
        body = next(one for one in chats if answer_of(s.first.ids_of_body(CHAT, one), 9)[-1] % 5 == 0)
        s.first.limits, s.first.pace = (8, LENGTH), 0.01
        reading = StreamReading(s.client, CHAT, body)
        await reading.until(9)
        assert (await s.drain(s.first)).exit_code == 0
        assert said(await reading.end()) == said(await alone(s.second, CHAT, body))
        assert await s.outcomes() == {"moved": 1}


async def test_stream_stays_when_the_text_of_several_tokens_is_unknown() -> None:
    async with site() as s:
        s.second.app.router.routes.pop(0)
        s.first.an_event, s.first.limits, s.first.pace = 3, (24, LENGTH), 0.01
        reading = await moving(s, BODY | {"max_tokens": 100})
        assert (await s.drain(s.first)).exit_code == 0
        assert said(await reading.end()) == said(
            await alone(s.second, COMPLETION, BODY | {"max_tokens": 100})
        )
        assert await s.outcomes() == {"no_text": 3}


async def test_stream_without_an_event_moves_after_its_first_event() -> None:
    async with site() as s:
        s.first.limits = (0, 24)
        reading = StreamReading(s.client, COMPLETION, BODY)
        await within(s.first.arrived.wait())
        assert (await s.drain(s.first)).exit_code == 0
        assert s.second.bodies
        s.first.limits = (LENGTH, LENGTH)
        assert await reading.end() == await alone(s.first, COMPLETION, BODY)


async def test_stream_whose_first_token_came_from_prefill_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "early_tokens", lambda self, endpoint: True)
    async with site() as s:
        s.first.limits = (0, 24)
        reading = StreamReading(s.client, COMPLETION, BODY)
        await reading.until(1)
        assert s.p.bodies[0]["stream"] is True
        assert "return_token_ids" not in s.p.bodies[0]
        await s.drain(s.first)
        events = await reading.end()
        assert await metric(s.client, 'kv_connector_router_early_tokens_total{outcome="sent"}') == 1
        assert await s.outcomes() == {"moved": 1}
        s.first.limits = (LENGTH, LENGTH)
        assert said(events) == said(await alone(s.first, COMPLETION, BODY))
        assert {event["created"] for event in events} == {1}


@pytest.mark.parametrize(("status", "outcome"), [(400, {"refused": 3}), (500, {"engine_failed": 3})])
async def test_stream_continues_when_the_new_engine_refuses(status: int, outcome: dict[str, float]) -> None:
    async with site() as s:
        s.first.limits, s.second.refuses = (8, LENGTH), status
        s.first.pace = 0.01  # it sends an event after each failed move
        reading = await moving(s)
        drained = await s.drain(s.first)
        assert f"{s.first.url} is idle, 0 streams have moved" in drained.output
        events = await reading.end()
        assert await s.outcomes() == outcome
        assert events == await alone(s.first, COMPLETION, BODY)


async def test_stream_continues_when_the_new_engine_dies_before_its_first_event() -> None:
    async with site() as s:
        s.first.limits, s.second.dies_behind = (8, LENGTH), 0
        reading = await moving(s)
        await s.drain(s.first)
        events = await reading.end()
        assert (await s.outcomes())["engine_failed"] >= 1
        assert events == await alone(s.first, COMPLETION, BODY)


async def test_an_answer_that_ends_meanwhile_ends() -> None:
    async with site() as s:
        s.first.limits, s.second.limits = (8, LENGTH), (0, 0)
        reading = await moving(s)
        assert (await s.drain(s.first)).exit_code == 0
        events = await reading.end()
        assert await s.outcomes() == {"ended": 1}
        assert s.second.closed == 1
        assert events == await alone(s.first, COMPLETION, BODY)


async def test_new_engine_without_an_event_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.router.streams.stream._MAX_PAUSE_S", 0.1)
    async with site() as s:
        s.first.limits, s.second.limits = (8, LENGTH), (0, 0)
        s.first.pace = 0.01  # it sends an event after each failed move
        reading = await moving(s)
        await s.drain(s.first)
        events = await reading.end()
        assert await s.outcomes() == {"too_late": 3}
        assert s.second.disowned == 3
        assert events == await alone(s.first, COMPLETION, BODY)


async def test_so_many_streams_move_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other streams continue on their engine meanwhile."""
    monkeypatch.setattr("kv_connector.router.streams.moves._MAX_CONCURRENT_MOVES", 1)
    async with site() as s:
        s.first.limits, s.first.pace = (8, LENGTH), 0.01
        s.second.limits = (8, LENGTH)
        readings: list[StreamReading] = []
        others: list[StreamReading] = []
        for number in range(2):
            for streams, name in ((readings, f"{number}"), (others, f"{number} at the other engine")):
                streams.append(StreamReading(s.client, COMPLETION, BODY, name))
                await streams[-1].until(7)
        s.second.go.set()
        for other in others:
            await other.end()
        s.second.go.clear()
        s.second.limits = (0, LENGTH)
        draining = await s.begin_drain(s.first)
        untils = [asyncio.create_task(reading.until(30)) for reading in readings]
        await asyncio.wait(untils, return_when=asyncio.FIRST_COMPLETED)
        assert min(len(reading.events) for reading in readings) < 20
        assert len(s.second.bodies) == 2 + 1
        s.second.go.set()
        await within(draining)
        assert [said(await reading.end()) for reading in readings] == [
            said(await alone(s.first, COMPLETION, BODY))
        ] * 2
        await asyncio.gather(*untils)


@pytest.mark.parametrize("early", [False, True])
async def test_a_client_that_leaves_in_mid_move_leaves_nothing_behind(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Members, "early_tokens", lambda *_: early)
    async with site() as s:
        s.first.limits, s.second.limits = (8, 9), (0, 0)  # both engines stop in the middle of their streams
        reading = await moving(s)
        draining = await s.begin_drain(s.first)
        await within(s.second.arrived.wait())
        reading.leave()
        assert (await within(draining)).exit_code == 0
        await until_metric(s.client, "kv_connector_router_in_flight", 0)
        async with asyncio.timeout(PATIENCE):
            while (s.first.closed, s.second.closed) != (1, 1):
                await asyncio.sleep(0.01)
        assert await s.outcomes() == {}
        assert (await s.client.get("/status.json")).json()["failures"] == []


async def test_drain_logs_how_many_requests_stay_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kv_connector.router.streams.moves")
    async with site() as s:
        s.first.limits = (8, LENGTH)
        s.second.limits = (8, LENGTH)
        readings = []
        for more in ({"seed": 1, "temperature": 1}, {"seed": 2}, {"stop": ["x"]}, {}, {"stream": False}):
            for engine in (s.first, s.second):  # the engines take turns
                asked = len(engine.bodies)
                readings.append(StreamReading(s.client, COMPLETION, BODY | more))
                async with asyncio.timeout(PATIENCE):
                    while len(engine.bodies) == asked:
                        await asyncio.sleep(0.001)
        drained = await s.drain(s.first)
        assert (
            f"{s.first.url}: 4 requests end on this engine: 2 seed, 1 stop_strings, 1 not_streamed"
            in drained.output
        )
        assert f"{s.first.url} is idle, 1 streams have moved" in drained.output
        s.second.go.set()
        for reading in readings:
            await within(reading._task)
            assert reading.raw
        assert await s.outcomes() == {"seed": 2, "stop_strings": 1, "not_streamed": 1, "moved": 1}
    (line,) = [record.getMessage() for record in caplog.records if "drain of" in record.getMessage()]
    assert "1 streams moved in" in line
    assert "(2 seed, 1 stop_strings" in line


async def test_no_stream_moves_when_there_is_no_other_engine() -> None:
    async with site() as s:
        s.first.limits = (8, LENGTH)
        reading = await moving(s)
        assert (await s.drain(s.second)).exit_code == 0
        drained = await s.drain(s.first, "--json")
        told = json.loads(drained.stdout)
        assert (told["idle"], told["moved"], told["staying"]) == (True, 0, {"no_other_engine": 1})
        assert "1 requests end on this engine: 1 no_other_engine" in drained.stderr
        assert len(await reading.end()) == 60


async def test_a_decode_engine_that_is_nothing_else_keeps_its_streams() -> None:
    async with serve_vllm(1) as p, serve_vllm(2) as first, serve_vllm(3) as second:
        s = StreamSite(p, first, second)
        decode = tuple(Endpoint.parse(one.url) for one in (first, second))
        settings = RouterSettings((Endpoint.parse(p.url),), decode, registration=s.registration)
        async with (
            serve(create_app(settings)) as url,
            client_of(url) as s.client,
        ):
            first.limits = (8, LENGTH)
            reading = await moving(s)
            assert "1 requests end on this engine: 1 engine" in (await s.drain(first)).output
            assert len(await reading.end()) == 60


async def test_engine_of_both_roles_gets_no_ordinary_prompt_beside_a_prefill_engine() -> None:
    async with site(dispatch="serial") as s:
        s.first.limits = (LENGTH, LENGTH)
        for _ in range(4):
            assert (await s.client.post(COMPLETION, json=BODY)).status_code == 200
        assert len(s.p.bodies) == 4
        prefills = [b for e in (s.first, s.second) for b in e.bodies if b["max_tokens"] == 1]
        assert not prefills
        s.p.refuses = 503
        assert (await s.client.post(COMPLETION, json=BODY)).status_code == 200
        prefills = [b for e in (s.first, s.second) for b in e.bodies if b["max_tokens"] == 1]
        assert len(prefills) == 1


def test_engines_in_reserve_are_chosen_where_the_others_take_nothing() -> None:
    one, other, reserve = (Endpoint.parse(f"http://h:{port}") for port in (1, 2, 3))
    pool = Pool()
    for endpoint in (one, other):
        pool.set_usable(endpoint, True)
    pool.set_usable(reserve, True, reserve=True)
    assert {member.endpoint for member in pool.choices()} == {one, other}
    assert {member.endpoint for member in pool.choices({one})} == {other}
    # The reserve is chosen before an engine that has just failed.
    assert {member.endpoint for member in pool.choices({one, other})} == {reserve}
    pool.set_usable(one, False)
    pool.set_usable(other, False)
    assert {member.endpoint for member in pool.choices()} == {reserve}


# --- Balance


@pytest.mark.parametrize(
    ("streams", "pairs"),
    [
        ((8, 4), [(0, 1)]),
        ((4, 0), [(0, 1)]),
        ((3, 0), []),
        ((9, 5), []),
        ((7, 4), []),
        ((2, 9, 5), [(1, 0)]),
        ((1, 9, 8, 2), [(1, 0), (2, 3)]),
        ((9,), []),
        ((), []),
    ],
)
def test_engines_with_far_more_streams_give_one_to_those_with_far_fewer(
    streams: tuple[int, ...], pairs: list[tuple[int, int]]
) -> None:
    engines = [Endpoint.parse(f"http://h:{port + 1}") for port in range(len(streams))]
    found = EvenStreams().pairs(dict(zip(engines, streams, strict=True)))
    assert found == [(engines[most], engines[fewest]) for most, fewest in pairs]


async def test_the_youngest_streams_move_until_it_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.router.streams.moves._REBALANCE_INTERVAL_S", 0.05)
    body = BODY | {"max_tokens": 200}
    async with site(rebalance=True) as s:
        s.first.limits, s.first.pace, s.second.limits = (LENGTH, LENGTH), 0.02, (8, LENGTH)
        readings = []
        for number in range(12):
            readings.append(StreamReading(s.client, COMPLETION, body, f"{number}"))
            await readings[-1].until(1)
        s.second.go.set()
        await asyncio.gather(*(one.end() for one in readings[1::2]))
        s.second.pace = 0.02
        streams = [await one.end() for one in readings[::2]]
        assert await s.outcomes() == {"moved": 2}
        moved = [headers["x-request-id"] for headers in s.second.headers[6:]]
        assert moved == ["10-moved", "8-moved"]
        s.first.pace = 0
        assert said(streams[5]) == said(await alone(s.first, COMPLETION, body))


async def test_a_stream_stays_where_the_engine_that_is_chosen_for_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Moves] = []

    def remembered(self: Moves, *arguments: Any) -> None:
        made.append(self)
        begun(self, *arguments)

    begun = Moves.__init__
    monkeypatch.setattr(Moves, "__init__", remembered)
    async with site(policy=PolicyName.FEWEST_OUTSTANDING) as s:
        s.first.limits, s.second.limits = (8, LENGTH), (LENGTH, LENGTH)
        readings = []
        for number in range(12):
            readings.append(StreamReading(s.client, CHAT, {"messages": MESSAGES}, f"{number}"))
            await readings[-1].until(7)
        await asyncio.gather(*(one.end() for one in readings[1::2]))
        asked = len(s.second.bodies)
        made[0].balance_once(EvenStreams())
        assert sum(one.to is not None for one in made[0]._requests) == 1
        made[0]._pools[Side.DECODE].set_usable(Endpoint.parse(f"{s.second.url}@10.0.0.3:5600"), False)
        s.first.go.set()
        await asyncio.gather(*(one.end() for one in readings[::2]))
        assert await s.outcomes() == {}
        assert len(s.second.bodies) == asked


async def test_a_move_to_an_engine_that_has_gone_fails_and_the_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pool, "takes", lambda *_: True)
    monkeypatch.setattr(Moves, "where", lambda self, request: nowhere)
    nowhere: Endpoint = Endpoint.parse("http://127.0.0.1:1")
    async with site() as s:
        s.first.limits = (8, LENGTH)
        s.first.go.set()
        for body in ({"messages": MESSAGES}, {"messages": MESSAGES, "max_tokens": 60}):
            assert await StreamReading(s.client, CHAT, body).end()
        outcomes = await s.outcomes()
        assert outcomes["refused"] > 0


@pytest.mark.parametrize(
    ("path", "limits", "left"),
    [
        (COMPLETION, {}, 11),
        (COMPLETION, {"max_tokens": None}, 11),  # vLLM's own default too
        (COMPLETION, {"max_tokens": 60}, 55),
        (CHAT, {}, None),
        (CHAT, {"max_tokens": None}, None),
        (CHAT, {"max_tokens": 60}, 55),
        (CHAT, {"max_tokens": 60, "max_completion_tokens": 50}, 45),
        (CHAT, {"max_tokens": 60, "max_completion_tokens": None}, 55),
    ],
)
def test_an_answer_is_as_long_as_it_would_have_been(
    path: str, limits: dict[str, Any], left: int | None
) -> None:
    completion = Completion.decode(json.dumps({"prompt": [1], **limits}).encode())
    assert tokens_left(path, completion, said=5) == left


# --- Which requests


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}, None),
        ({"n": 1, "seed": None, "stop": [], "logprobs": None, "presence_penalty": 0.0}, None),
        ({"seed": 7, "temperature": 0}, None),
        ({"response_format": {"type": "text"}, "tool_choice": "none", "tools": None}, None),
        ({"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [1], "logit_bias": {"5": 1}}, None),
        ({"stream": False}, "not_streamed"),
        ({"seed": 0}, "seed"),
        ({"seed": 7, "temperature": 0.5}, "seed"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"frequency_penalty": -0.1}, "penalties"),
        ({"stop": "x"}, "stop_strings"),
        ({"n": 2}, "several_answers"),
        ({"use_beam_search": True}, "several_answers"),
        ({"prompt": ["a", "b"]}, "several_answers"),
        ({"logprobs": 0}, "more_than_text"),
        ({"logprobs": True}, "more_than_text"),
        ({"prompt_logprobs": 0}, "more_than_text"),
        ({"echo": True}, "more_than_text"),
        ({"response_format": {"type": "json_object"}}, "constrained"),
        ({"structured_outputs": {"regex": "a"}}, "constrained"),
        ({"bad_words": ["x"]}, "constrained"),
        ({"tools": [{}]}, "tools"),
        ({"vllm_xargs": {"a": 1}}, "other_key"),
        ({"stream_interval": 4}, "other_key"),
        ({"thinking_token_budget": 4}, "other_key"),
        ({"min_tokens": "3"}, "other_key"),
        ({"anything": None}, "other_key"),
    ],
)
def test_request_determines_whether_it_may_move(more: dict[str, Any], reason: str | None) -> None:
    body = json.dumps({"model": "m", "prompt": [1], "stream": True, **more}).encode()
    assert stay_reason(COMPLETION, Completion.decode(body)) == reason
    assert stay_reason("/v1/messages", Completion.decode(body)) == "other_api"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", True),
        (None, True),
        ([{"type": "text", "text": "a"}], True),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}], False),
        (["a"], True),
        ({"type": "image_url"}, False),
    ],
)
def test_chat_with_more_than_text_is_recognised(content: Any, text: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    assert Completion.decode(body).only_text() is text


# --- Ids in events


def chunk(text: str, ids: list[int] | None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish, **more, "token_ids": ids}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def chat(delta: dict[str, Any], ids: list[int] | None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def test_ids_are_taken_out_and_kept() -> None:
    running = Running()
    assert running.read(chunk("a", [5], prompt_token_ids=[1, 2])) == chunk("a", None, prompt_token_ids=None)
    text = ' "token_ids":[7] and "prompt_token_ids":[8] in a text'
    assert running.read(chunk(text, [6]) + chunk("c", [7, 8])) == chunk(text, None) + chunk("c", None)
    assert (bytes(running.ids), running.prompt, running.said) == (b"1,2,5,6,7,8", 2, 4)
    shown = Running(shows_ids=True)
    event = chunk("a", [5], prompt_token_ids=[1, 2]) + chunk("b", [])
    assert shown.read(event) == event
    assert bytes(shown.ids) == b"1,2,5"


@pytest.mark.parametrize(
    ("event", "whole"),
    [
        (chunk("a", [5]), True),
        (chunk('"', [5]), True),
        (chunk("", [5]), False),  # half of a character
        (chunk("ab", [5, 6]), False),  # half of a character may follow
        (chunk("a", None), False),
        (chunk("a", []), False),
        (chunk("a", [5], "length"), False),
        (chat({"content": "a"}, [5]), True),
        (chat({"content": ""}, [5]), False),
        (chat({"reasoning": "a"}, [5]), False),
        (chat({}, [5]), False),
        (b"data: [DONE]\n\n", False),
    ],
)
def test_a_stream_may_be_left_where_nothing_is_held_back(event: bytes, whole: bool) -> None:
    running = Running()
    running.read(chunk("x", [4], prompt_token_ids=[1]))
    running.read(event)
    assert running.whole is whole
    assert running.several == (b"5,6" if event == chunk("ab", [5, 6]) else b"")
    running.read(chunk("x", [4]) + event)
    assert running.whole is whole
    unprompted = Running()
    unprompted.read(event)
    assert not unprompted.whole


def test_events_that_come_for_their_ids_alone_are_left_out() -> None:
    running = Running()
    end = chat({}, None, "stop")
    given = chat({"content": "a"}, [5]) + chat({}, [6]) + chat({}, [7], "stop")
    assert running.read(given) == chat({"content": "a"}, None) + end
    assert running.said == 3
    assert running.read(chat({}, [6])) == b""
