"""`kv-connector bench conversations` against fake endpoints. Speed is not tested."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line
from router_setup import FakeEngine, no_answer, nobody, refuse, serve_engine, within
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kv_connector.bench.conversations import counters
from kv_connector.cli.bench import app

# Tokens of the fake template: of a prompt, and of each message.
PROMPT, MESSAGE = 7, 3


class Speaker:
    """Answers with words that depend on the whole prompt, and counts tokens: one per word of a text."""

    def __init__(self) -> None:
        self.engine: FakeEngine
        self.stop_after = -1
        """Answers after which every stream hangs; -1: none."""
        self.other_word: tuple[int, int] | None = None
        """(answer, word) that differs from what a right engine says."""
        self.answers = 0
        self.hanging = asyncio.Event()
        self.computed = 0

    async def __call__(self, request: Request, body: dict[str, Any]) -> Response:
        return StreamingResponse(self._events(request, body), media_type="text/event-stream")

    async def _events(self, request: Request, body: dict[str, Any]) -> AsyncIterator[bytes]:
        chat = request.url.path.endswith("chat/completions")
        number, self.answers = self.answers, self.answers + 1
        if 0 <= self.stop_after <= number:
            self.hanging.set()
            await no_answer(request)
            return
        tokens = prompt_tokens(body)
        self.computed += tokens
        seed = len(json.dumps(body.get("messages", body.get("prompt"))))
        for index in range(body["max_tokens"]):
            word = (seed + index + (self.other_word == (number, index))) % 89 + 32
            text = f" w{word}"
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = [word]
            yield event(choices=[choice])
        yield event(choices=[{"index": 0, "finish_reason": "length", "delta": {}}])
        details = {"cached_tokens": tokens // 2}
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
        yield event(choices=[], usage={**usage, "prompt_tokens_details": details})
        yield b"data: [DONE]\n\n"

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            f"vllm:prompt_tokens_total {self.computed}\nvllm:prompt_tokens_cached_total 0\n"
            f"kv_connector_bytes_pushed_total {self.computed * 1000}\n"
            f"kv_connector_router_predicted_hit_tokens_total {self.answers}\n"
        )


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def prompt_tokens(body: dict[str, Any]) -> int:
    if "messages" in body:
        return PROMPT + sum(MESSAGE + len(one["content"].split()) for one in body["messages"])
    return len(body["prompt"].split()) if isinstance(body["prompt"], str) else len(body["prompt"])


@contextlib.asynccontextmanager
async def speaking() -> AsyncIterator[Speaker]:
    speaker = Speaker()
    async with serve_engine(speaker) as speaker.engine:
        speaker.engine.app.router.routes.append(Route("/metrics", speaker.metrics))
        yield speaker


SMALL = ("--preset", "small", "--conversations", "3", "--turns", "3", "--answer-tokens", "5")


async def bench(*words: str) -> tuple[int, str]:
    status, output = await within(asyncio.to_thread(partial(invoke, app, "conversations", *words)))
    return status, one_line(output)


@pytest.fixture(autouse=True)
def _settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "SETTLE_SECONDS", 0.001)


def records(file: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [one for one in found if one["type"] == kind]


@pytest.mark.anyio
@pytest.mark.parametrize("api", ["chat", "completions", "tokens"])
async def test_each_turn_repeats_the_conversation_and_has_the_wanted_tokens(tmp_path: Path, api: str) -> None:
    file = tmp_path / "results"
    async with speaking() as speaker:
        status, output = await bench(
            "--url", f"{speaker.engine.url}/v1", *SMALL, "--api", api, "--json", str(file)
        )
    assert status == 0, output
    turns = records(file, "turn")
    assert [
        (one["conversation"], one["turn"]) for one in sorted(turns, key=lambda one: one["conversation"])
    ] == [(conversation, turn) for conversation in (1, 2, 3) for turn in (1, 2, 3)]
    for one in turns:
        assert one["cause"] == ""
        assert len(one["gaps_ms"]) == 4
        assert one["ttft_ms"] > 0
        assert one["prompt_tokens"] == 408 + (one["turn"] - 1) * (124 + 5)
        assert one["answer_tokens"] == 5
        assert one["cached_tokens"] == one["prompt_tokens"] // 2
        if one["turn"] > 1:
            assert one["new_tokens"] - one["unseen_tokens"] == 5
    bodies = [body for body in speaker.engine.bodies if body["max_tokens"] == 5]
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in bodies)
    sessions = {one["x-session-id"] for one in speaker.engine.headers if "x-session-id" in one}
    assert sessions == {"0-1", "0-2", "0-3"}
    if api == "chat":
        last = max(bodies, key=lambda body: len(body["messages"]))["messages"]
        assert [one["role"] for one in last] == ["user", "assistant", "user", "assistant", "user"]
        assert last[1]["content"].startswith(" w")
        assert len(last[1]["content"].split()) == 5


@pytest.mark.anyio
async def test_conversations_share_a_system_prompt_that_is_new_once(tmp_path: Path) -> None:
    file = tmp_path / "results"
    async with speaking() as speaker:
        status, output = await bench(
            "--url", speaker.engine.url, *SMALL, "--system-tokens", "100", "--json", str(file)
        )
    assert status == 0, output
    first = [one for one in records(file, "turn") if one["turn"] == 1]
    assert sorted(one["prompt_tokens"] - one["new_tokens"] for one in first) == [0, 100, 100]
    systems = {
        b["messages"][0]["content"] for b in speaker.engine.bodies if b["messages"][0]["role"] == "system"
    }
    assert len(systems) == 1


@pytest.mark.anyio
async def test_engines_counters_and_totals_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "results"
    async with speaking() as one, speaking() as two:
        status, output = await bench(
            "--url", one.engine.url, "--url", two.engine.url, *SMALL, "--json", str(file),
            "--engine", f"e0={one.engine.url}", "--engine", f"e1={two.engine.url}/metrics",
            "--engine", f"gone={two.engine.url}/nothing", "--rate", "1000",
        )  # fmt: skip
    assert status == 0, output
    by_name = {engine["name"]: engine for engine in records(file, "engine")}
    turns = records(file, "turn")
    sent = {
        url: sum(t["prompt_tokens"] for t in turns if t["endpoint"] == url)
        for url in (one.engine.url, two.engine.url)
    }
    assert by_name["e0"]["computed_tokens"] == sent[one.engine.url] == 2 * sent[two.engine.url]
    assert by_name["e1"]["bytes_pushed"] == 1000 * sent[two.engine.url]
    assert by_name["gone"]["problem"].endswith("/nothing answered 404")
    (total,) = records(file, "totals")
    assert total["computed_tokens"] == total["prompt_tokens"] == sum(sent.values())
    assert total["spread"] == {"e": 2.0}
    assert (total["turns"], total["conversations"], total["failures"]) == (9, 3, {})
    assert {one["name"] for one in records(file, "prediction")} == {
        "kv_connector_router_predicted_hit_tokens_total"
    }
    assert "no counters of engine gone" in output
    assert "computed per new token" in output
    assert "2 and later" in output


@pytest.mark.anyio
async def test_trace_is_sent_with_equal_words_for_equal_blocks(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "results"
    lines = [(0, 1100, [1, 2, 3]), (5, 1030, [1, 2, 4])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": tokens, "output_length": 4, "hash_ids": ids}) + "\n"
            for at, tokens, ids in lines
        )
    )
    async with speaking() as speaker:
        status, output = await bench(
            "--url", speaker.engine.url, "--trace", str(trace), "--api", "completions", "--json", str(file)
        )
    assert status == 0, output
    prompts = [b["prompt"].split() for b in speaker.engine.bodies if b["max_tokens"] == 4]
    two, one = sorted(prompts, key=len)
    assert (len(one), len(two), one[:1024] == two[:1024], one[1024:1030] == two[1024:]) == (
        1100,
        1030,
        True,
        False,
    )
    assert {(t["turn"], t["new_tokens"]) for t in records(file, "turn")} == {(1, 1100), (2, 6)}


@pytest.mark.anyio
async def test_compare_names_the_first_difference(tmp_path: Path) -> None:
    file = tmp_path / "results"
    arguments = (*SMALL, "--at-once", "1", "--json", str(file))
    async with speaking() as one, speaking() as right:
        urls = ("--url", one.engine.url, "--compare", right.engine.url)
        assert (await bench(*urls, *arguments))[0] == 0
        # Conversation 2, turn 2. The three requests of the calibration come first.
        one.other_word = one.answers + 3 + 4, 2
        status, output = await bench(*urls, *arguments, "--seed", "1")
    assert status == 1
    assert "different answers: 1. The first: conversation 2, turn 2, character " in output
    assert re.search(r"'\d w\d\d w\d\d' instead of '\d w\d\d w\d\d'", output)
    assert [t["turn"] for t in records(file, "turn") if t["difference"]] == [2]


@pytest.mark.anyio
async def test_compare_of_token_ids_names_the_token(tmp_path: Path) -> None:
    async with speaking() as one, speaking() as right:
        one.other_word = 0, 2
        status, output = await bench(
            "--url",
            one.engine.url,
            "--compare",
            right.engine.url,
            *SMALL,
            "--api",
            "tokens",
            "--at-once",
            "1",
        )
    assert status == 1
    assert "The first: conversation 1, turn 1, token 3: " in output


def broken(*events: bytes) -> Any:
    """Returns a handler that streams these events after the first three requests, and then ends."""
    speaker, seen = Speaker(), [0]

    async def handler(request: Request, body: dict[str, Any]) -> Response:
        seen[0] += 1
        if seen[0] <= 3:
            return await speaker(request, body)

        async def chunks() -> AsyncIterator[bytes]:
            for one in events:
                yield one

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return handler


WORD = event(choices=[{"index": 0, "delta": {"content": "a"}}])
END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((WORD,), "failed turns, broken stream: 3. conversation 1, turn 1: http"),
        ((WORD, event(error={"message": "no blocks", "code": 500})), "failed turns, error in the stream: 3"),
        ((WORD, b"data: {nonsense\n\n"), "failed turns, malformed answer: 3"),
        ((WORD, b'data: {"choices": [{"text": "\xff"}]}\n\n'), "failed turns, malformed answer: 3"),
        ((WORD, event(choices="none")), "failed turns, malformed answer: 3"),
        ((WORD, b'data: {"x":' + b"[" * 100_000 + b"\n\n"), "failed turns, malformed answer: 3"),
        ((WORD, END), "failed turns, no usage: 3"),
    ],
)
async def test_incomplete_answers_are_counted_by_cause(
    tmp_path: Path, events: tuple[bytes, ...], words: str
) -> None:
    file = tmp_path / "results"
    async with serve_engine(broken(*events)) as engine:
        status, output = await bench("--url", engine.url, *SMALL, "--at-once", "1", "--json", str(file))
    assert status == 1
    assert words in output
    # No conversation goes on after a failed turn.
    assert {(one["turn"], bool(one["reason"])) for one in records(file, "turn")} == {(1, True)}
    (total,) = records(file, "totals")
    assert total["turns"] == 0
    assert sum(total["failures"].values()) == 3


@pytest.mark.anyio
async def test_refused_turns_are_counted_by_status_and_quote_the_server(tmp_path: Path) -> None:
    async with speaking() as speaker:
        handler = speaker.engine.handler

        async def limited(request: Request, body: dict[str, Any]) -> Response:
            if len(body["messages"]) > 2 and body["max_tokens"] == 5:
                return await refuse(400, "the prompt is too long")(request, body)
            return await handler(request, body)

        speaker.engine.handler = limited
        status, output = await bench("--url", speaker.engine.url, *SMALL)
    assert status == 1
    assert "failed turns, HTTP 400: 3." in output
    assert "the prompt is too long" in output


@pytest.mark.anyio
async def test_stream_that_stops_is_a_timeout() -> None:
    async with speaking() as speaker:
        speaker.stop_after = 5
        status, output = await bench(
            "--url", speaker.engine.url, *SMALL, "--at-once", "1", "--timeout", "0.3"
        )
    assert status == 1
    assert "failed turns, timeout: 3." in output
    assert "no complete answer within 0.3 s" in output


@pytest.mark.anyio
async def test_unreachable_endpoint_ends_the_run_before_its_first_turn() -> None:
    with nobody() as url:
        status, output = await bench("--url", url, *SMALL)
    assert status == 1
    assert f"failed before the first turn: {url} is unreachable" in output


@pytest.mark.anyio
async def test_endpoint_lost_during_the_run_is_counted(tmp_path: Path) -> None:
    async with speaking() as speaker:
        with nobody() as url:
            status, output = await bench("--url", speaker.engine.url, "--url", url, *SMALL)
    assert status == 1
    assert "failed turns, unreachable: 1. conversation 2, turn 1" in output


@pytest.mark.anyio
async def test_endpoint_without_usage_is_refused() -> None:
    async def answer(request: Request, body: dict[str, Any]) -> Response:
        return StreamingResponse(iter([WORD, END]), media_type="text/event-stream")

    async with serve_engine(answer) as engine:
        status, output = await bench("--url", engine.url, *SMALL)
    assert status == 1
    assert "failed before the first turn" in output
    assert "sent no usage" in output


@pytest.mark.anyio
async def test_endpoint_without_models_needs_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(self: FakeEngine, request: Request) -> Response:
        return JSONResponse({"data": []})

    monkeypatch.setattr(FakeEngine, "models", none)
    async with speaking() as speaker:
        status, output = await bench("--url", speaker.engine.url, *SMALL)
        assert (status, "names no model. Set --model" in output) == (1, True)
        assert (await bench("--url", speaker.engine.url, *SMALL, "--model", "mine"))[0] == 0
        assert {body["model"] for body in speaker.engine.bodies} == {"mine"}


@pytest.mark.anyio
async def test_key_is_sent_and_session_header_and_full_length_are_optional(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with speaking() as speaker:
        status, output = await bench(
            "--url", speaker.engine.url, *SMALL, "--session-header", "", "--stop-at-eos"
        )
    assert status == 0, output
    assert not any("ignore_eos" in body for body in speaker.engine.bodies)
    assert {headers["authorization"] for headers in speaker.engine.headers} == {"Bearer secret"}
    assert not any("x-session-id" in headers for headers in speaker.engine.headers)
    assert "secret" not in output


@pytest.mark.anyio
async def test_interrupt_prints_the_turns_that_ended(tmp_path: Path) -> None:
    file = tmp_path / "results"
    async with speaking() as speaker:
        speaker.stop_after = 3 + 4  # the calibration's requests come first
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kv_connector.cli.main", "bench", "conversations", *SMALL),
            *("--url", speaker.engine.url, "--at-once", "1", "--json", str(file)),
            stdout=asyncio.subprocess.PIPE,
            # A shell's jobs in the background ignore SIGINT, and so would this process.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            await asyncio.wait_for(speaker.hanging.wait(), 60)
            process.send_signal(signal.SIGINT)
            output, _ = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 130
    assert b"interrupted:" in output
    assert len(records(file, "turn")) == 4
    (total,) = records(file, "totals")
    assert (total["turns"], total["interrupted"]) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing option '--url'"),
        (("--url", "localhost:8000"), "--url: 'localhost:8000' is not a URL such as http://127.0.0.1:8000"),
        (("--url", "http://a:b"), "--url: 'http://a:b' is not a URL"),
        (("--url", "http://a", "--compare", "ftp://a"), "--compare: 'ftp://a' is not a URL"),
        (("--url", "http://a", "--at-once", "2", "--rate", "1"), "--at-once and --rate exclude each other"),
        (("--url", "http://a", "--engine", "http://b"), "--engine: 'http://b' is not NAME=URL"),
        (("--url", "http://a", "--engine", "b=c"), "--engine: 'c' is not a URL"),
        (
            ("--url", "http://a", "--engine", "b=http://c", "--engine", "b=http://d"),
            "--engine: the name 'b' is used twice",
        ),
        (("--url", "http://a", "--trace-lines", "3"), "--trace-lines and --trace-speed need --trace FILE"),
        (("--url", "http://a", "--trace", "/nowhere"), "--trace: /nowhere: No such file or directory"),
        (("--url", "http://a", "--trace", "/nowhere", "--turns", "3"), "--trace brings its own lengths"),
        (("--url", "http://a", "--session-header", "a b"), "--session-header: 'a b' is not a header's name"),
        (("--url", "http://a", "--turns", "0"), "Invalid value for '--turns'"),
        (("--url", "http://a", "--preset", "huge"), "Invalid value for '--preset'"),
    ],
)
def test_options_are_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    status, output = invoke(app, "conversations", *arguments)
    assert status == 2
    assert words in one_line(output)


def test_trace_with_a_bad_line_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text('{"timestamp": 0}\n')
    status, output = invoke(app, "conversations", "--url", "http://a", "--trace", str(file))
    assert status == 2
    assert "line 1: Object missing required field" in one_line(output)
