"""Long bodies: parsed outside the event loop, sent to engines without a copy, and read like short ones."""

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from router_setup import answer_ok, cluster, within

from kv_connector.router.bodies import body_parser, fields, messages, parser_process
from kv_connector.router.bodies.body_parser import LONG, BodyParser
from kv_connector.router.bodies.fields import LONGEST_READ, SLICE, Content, Pieces, encode, named
from kv_connector.router.bodies.parser_process import ANSWER, REQUEST, Parsed, WantedParts, parsed, serve
from kv_connector.router.engines.client import _Payload
from kv_connector.router.failure import Failure
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.responses_api import ResponsesRequest

pytestmark = pytest.mark.anyio

LETTERS = b"a" * (LONGEST_READ + 1)
NAMES = b'"kv_transfer_params":"x","ec_transfer_params":"x"'
BODIES: dict[str, bytes] = {
    "text": b'{"model":"m","prompt":"%s","max_tokens":3}' % LETTERS,
    "ids": b'{"prompt": [ [%s1] ]}' % (b"123, " * 2000),
    "messages": b'{ "messages" : [{"role":"user","content":"%s"}] , "stream":true}' % LETTERS,
    "input": b'{"input":"%s","tools":[{"type":"mcp","x":"%s"}]}' % (LETTERS, LETTERS),
    "several prompts": b'{"prompt":["a","%s"]}' % LETTERS,
    "one prompt in a list": b'{"prompt":[ "%s" ]}' % LETTERS,
    "lists of ids": b'{"prompt":[[%s1],[2]]}' % (b"1," * 5000),
    "embeds": b'{"prompt_embeds":["%s"]}' % LETTERS,
    "several embeds": b'{"prompt":[],"prompt_embeds":["%s","b"]}' % LETTERS,
    "duplicated keys": b'{"prompt":"a","model":"a","prompt":"%s","model":"b"}' % LETTERS,
    "duplicated transfers": b'{"kv_transfer_params":1,"prompt":"%s","kv_\\u0074ransfer_params":{}}' % LETTERS,
    "xargs": b'{"prompt":"x","vllm_xargs":{%s,"top":1,"more":"%s"}}' % (NAMES, LETTERS),
    "short xargs": b'{"prompt":"%s","vllm_xargs":{%s,"top":1}}' % (LETTERS, NAMES),
    "xargs that are a list": b'{"prompt":"x","vllm_xargs":["%s"]}' % LETTERS,
    "unicode": '{"prompt":"\u00e9\u6f22\U0001f600\\ud83d\\ude00%s","\u00e9":"\u2028"}'.encode() % LETTERS,
    "byte order mark": b'\xef\xbb\xbf{"prompt":"%s"}' % LETTERS,
    "documents": b'{"prompt":"%s","documents":["%s"]}' % (b"p" * 5000, LETTERS),
    "spaces": b' \n{"prompt":\t[%s"a"] }\r\n' % (b" " * 100_000),
    "system": b'{"system":[{"type":"text","text":"%s"}],"messages":[]}' % LETTERS,
    "text of a response": b'{"input": "%s\\n"}' % LETTERS,
    "agent": b'{"messages":[{"role":"user","content":[{"type":"tool_result","content":"%s"}]}]}' % LETTERS,
    "picture": b'{"messages":[{"role":"user","content":[{"type":"image_url","x":";base64,%s"}]}]}' % LETTERS,
    "text with a picture's mark": b'{"messages":[{"role":"user","content":";base64,%s"}]}' % LETTERS,
    "many messages": b'{"messages":[%s{"role":"user","content":"x"}]}' % (b'{"role":"user"},' * 2100),
    "odd messages": b'{"messages":["%s"]}' % LETTERS,
    "nested": b'{"prompt":"x","metadata":%s%s}' % (b"[" * 500, b"]" * 500),
}
REFUSED: dict[str, bytes] = {
    "list": b'["%s"]' % LETTERS,
    "text": b'"%s"' % LETTERS,
    "empty": b"",
    "no end": b'{"prompt":"%s' % LETTERS,
    "trailing": b'{"prompt":"%s"}}' % LETTERS,
    "comma": b'{"prompt":"%s",}' % LETTERS,
    "control character": b'{"prompt":"%s\x01"}' % LETTERS,
    "escape": b'{"prompt":"%s\\x"}' % LETTERS,
    "no UTF-8": b'{"prompt":"%s\xff"}' % LETTERS,
    "UTF-16": '{"prompt":"a"}'.encode("utf-16"),
    "two marks": b'\xef\xbb\xbf\xef\xbb\xbf{"prompt":"%s"}' % LETTERS,
    "NaN": b'{"prompt":"%s","top_p":NaN}' % LETTERS,
    "number": b'{"prompt":[%s01]}' % (b"1," * 5000),
    "brackets": b'{"prompt":[%s}' % (b"1," * 5000),
    "nesting": b'{"prompt":%s}' % (b"[" * 100_000),
    "many fields": b"{" + b",".join(b'"%d":0' % i for i in range(1000)) + b"}",
    "many xargs": b'{"vllm_xargs":{' + b",".join(b'"%d":0' % i for i in range(1000)) + b"}}",
    "long name": b'{"%s":1}' % LETTERS,
}


@pytest.fixture
async def child(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BodyParser]:
    """A parser whose child process reads every body."""
    monkeypatch.setattr(body_parser, "LONG", -1)
    parser = BodyParser()
    yield parser
    await parser.close()


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


def joined(body: Content) -> bytes:
    return b"".join(body.parts) if isinstance(body, Pieces) else body


def seen(completion: Completion) -> list[Any]:
    """Returns all that the router uses of a request."""
    return [
        completion.local_reason(),
        completion.late_reason(),
        completion.model,
        completion.only_text(),
        *((prompt, prompt.ends, prompt.tail) for prompt in map(completion.prompt, PATHS)),
        joined(completion.local_body(ids=True)),
        joined(completion.prefill_body("t", serial=False, early=True)),
        joined(completion.decode_body({"a": 1})),
    ]


@pytest.mark.parametrize("kind", [Completion, ResponsesRequest])
@pytest.mark.parametrize("name", BODIES)
async def test_child_reads_a_body_as_the_router_does(
    kind: type[Completion], name: str, child: BodyParser
) -> None:
    raw = BODIES[name]
    there = kind.of_fields(await child.fields(memoryview(bytearray(raw))))
    assert seen(there) == seen(kind.decode(raw))
    assert await child.model(raw) == named(raw)
    assert child._child is not None


@pytest.mark.parametrize("name", REFUSED)
async def test_child_refuses_a_body_as_the_router_does(name: str, child: BodyParser) -> None:
    with pytest.raises(Failure) as here:
        Completion.decode(REFUSED[name])
    with pytest.raises(Failure) as there:
        await child.fields(REFUSED[name])
    assert (there.value.status, there.value.body) == (400, here.value.body)
    assert await child.model(REFUSED[name]) == named(REFUSED[name])


async def test_long_body_is_parsed_by_the_child_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs the event loop."""
    decode, look = msgspec.json.decode, fields.shape
    longest = 0

    def note(value: Any) -> None:
        nonlocal longest
        longest = max(longest, len(memoryview(value)))

    def count_decoded(data: Any, **how: Any) -> Any:
        note(data)
        return decode(data, **how)

    def count_looked_at(name: str, value: msgspec.Raw) -> fields.ValueShape:
        note(value)
        return look(name, value)

    def count_read(name: str, value: msgspec.Raw) -> messages.Texts | None:
        note(value)
        return messages.read(name, value)

    def count_searched(value: msgspec.Raw) -> bool:
        note(value)
        return messages.only_text(value)

    monkeypatch.setattr(msgspec.json, "decode", count_decoded)
    monkeypatch.setattr(fields, "read", count_read)
    monkeypatch.setattr(fields, "only_text", count_searched)
    monkeypatch.setattr(fields, "shape", count_looked_at)
    parser = BodyParser()
    for prompt in (b'["%s"]' % (b"a" * LONG), b"[%s1]" % (b"1," * LONG), b"[%s1]" % (b"{}," * LONG)):
        raw = b",".join(
            b'"%s":%s' % (name, prompt)
            for name in (b"prompt", b"messages", b"input", b"system", b"documents", b"prompt_embeds")
        )
        raw = b'{"n":1,%s}' % raw
        for path in PATHS:
            completion = Completion.of_fields(await parser.fields(raw))
            completion.local_reason()
            completion.prompt(path)
            completion.only_text()
            completion.prefill_body("t", serial=False)
            completion.decode_body({})
        assert await parser.model(raw) is None
    await parser.close()
    assert 0 < longest <= LONGEST_READ


def test_child_reads_a_bounded_part_of_the_prompts() -> None:
    """The texts wait in the router's memory until the request is placed."""
    long = b'"%s"' % (b"a" * (700 << 10))
    raw = b'{"prompt":%s,"input":%s,"messages":"%s"}' % (long, long, LETTERS)
    found = {field.name: field.texts is not None for field in parsed(raw, WantedParts.PROMPT).fields}
    assert found == {"prompt": True, "input": False, "messages": False}
    assert all(field.texts is None for field in parsed(raw, WantedParts.FIELDS).fields)


def test_legs_share_the_bytes_of_a_long_body() -> None:
    long = b'"%s"' % (b"a" * (4 << 20))
    raw = b'{"prompt":%s,"vllm_xargs":{"b":%s},"model":"m"}' % (long, long)
    completion = Completion.decode(raw)
    start = np.frombuffer(raw, np.uint8).ctypes.data
    for leg in (
        completion.local_body(),
        completion.prefill_body("t", serial=True),
        completion.decode_body({"a": 1}),
    ):
        assert isinstance(leg, Pieces)
        views = [part for part in leg.parts if isinstance(part, memoryview)]
        at = [np.frombuffer(view, np.uint8).ctypes.data - start for view in views]
        assert [raw[begin : begin + len(long)] for begin in at] == [long, long]
        assert len(leg) - sum(map(len, views)) < 300
        assert json.loads(joined(leg))["vllm_xargs"] == {"b": json.loads(long)}
        assert max(map(len, leg.slices())) == SLICE
        assert b"".join(leg.slices()) == joined(leg)


def test_many_long_fields_are_not_copied_either() -> None:
    value = b'"%s"' % (b"a" * LONGEST_READ)
    raw = b'{%s,"prompt":"x"}' % b",".join(b'"f%d":%s' % (i, value) for i in range(200))
    leg = Completion.decode(raw).local_body()
    assert isinstance(leg, Pieces)
    assert sum(isinstance(part, memoryview) for part in leg.parts) == 200
    assert json.loads(joined(leg)) == json.loads(raw)


@pytest.mark.parametrize("nested", [False, True])
def test_pieces_are_what_msgspec_writes(nested: bool) -> None:
    raw = msgspec.Raw(b'"%s"' % (b"a" * 2 * SLICE))
    body: dict[str, Any] = {
        'q"\u00e9': 1,
        "a": raw,
        "b": {},
        "vllm_xargs": {"d": raw, "e": None} if nested else [raw],
    }
    for members in (body, {"a": raw}, {"a": raw, "b": raw}):
        parts = encode(members)
        assert isinstance(parts, Pieces)
        assert joined(parts) == msgspec.json.encode(members)
        assert len(parts) == len(joined(parts))


async def test_event_loop_turns_between_two_slices_of_a_body() -> None:
    written: list[int] = []
    turns = 0

    class Writer:
        async def write(self, chunk: bytes) -> None:
            written.append(turns)
            assert len(chunk) <= SLICE

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await _Payload(Pieces([b"{", bytes(10 * SLICE + 1), b"}"])).write(Writer())  # type: ignore[arg-type]
    assert written == [*range(written[0], written[0] + 13)]
    turning.cancel()


@pytest.mark.parametrize("dispatch", ["serial", "concurrent"])
async def test_engines_get_a_long_body_whole(dispatch: str) -> None:
    prompt = "\u6f22" * LONG
    async with cluster(answer_ok, answer_ok, dispatch=dispatch) as (p, d, client):
        content = b'\xef\xbb\xbf{"prompt":"?","prompt":"%s","n":1}' % prompt.encode()
        answer = await client.post("/v1/completions", content=content)
        assert answer.status_code == 200
        for engine in (p, d):
            (body,), (headers,) = engine.bodies, engine.headers
            assert body["prompt"] == prompt
            assert body["kv_transfer_params"]
            assert "transfer-encoding" not in headers
            assert int(headers["content-length"]) > 3 * LONG
        refused = await client.post("/v1/completions", content=content + b"}")
        assert refused.status_code == 400
        echoed = await client.post("/tokenize", content=content[3:])
        assert echoed.json()["echo"] == {"prompt": prompt, "n": 1}


async def test_child_that_has_ended_is_replaced(child: BodyParser) -> None:
    raw = BODIES["text"]
    await child.fields(raw)
    assert child._child is not None
    child._child.kill()
    child._child.wait()
    assert (await child.fields(raw)).values.keys() == {"model", "prompt", "max_tokens"}


async def stopped(child: BodyParser, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Stops the parser's process, which no longer answers. The parser still sends it a body, however late its
    thread begins, because the process is not dead."""
    await child.fields(b"{}")
    process = child._child
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(process, "poll", lambda: None)
    return process


async def test_body_at_which_the_child_ends_gets_503(
    child: BodyParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await stopped(child, monkeypatch)
    asking = asyncio.create_task(child.fields(BODIES["text"]))
    waiting = asyncio.create_task(child.fields(BODIES["text"]))
    await asyncio.sleep(0)
    process.kill()
    with pytest.raises(Failure) as told:
        await within(asking)
    assert (told.value.status, told.value.retry_after) == (503, "1")
    assert (await within(waiting)).values  # by the next child process


async def test_child_that_does_not_answer_gets_503(
    child: BodyParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stopped(child, monkeypatch)
    monkeypatch.setattr(body_parser, "_LONGEST_S", 0)
    with pytest.raises(Failure) as told:
        await within(child.fields(BODIES["text"]))
    assert told.value.status == 503
    assert child._child is None


async def test_cancelled_parse_discards_the_body(child: BodyParser, monkeypatch: pytest.MonkeyPatch) -> None:
    await stopped(child, monkeypatch)
    asking = asyncio.create_task(child.fields(BODIES["text"]))
    await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await within(asking)
    assert child._child is None
    assert (await within(child.fields(BODIES["text"]))).values


async def test_parse_that_is_cancelled_twice_keeps_its_turn(
    child: BodyParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    start = subprocess.Popen

    def late(*args: Any, **options: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", late)
    asking = asyncio.create_task(child.fields(BODIES["text"]))
    try:
        await within(begun.wait())
        for _ in range(2):
            asking.cancel()
            for _ in range(5):  # turns of the event loop, in which it would end
                await asyncio.sleep(0)
        assert child._turn.locked()
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await within(asking)


async def test_child_imports_nothing_of_the_working_directory(
    child: BodyParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("numpy", "msgspec", "kv_connector"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert (await child.fields(BODIES["text"])).values


async def test_child_finds_modules_where_the_router_does(
    child: BodyParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "body_parser_of_a_checkout.py").write_text(
        "from kv_connector.router.bodies.parser_process import main\nmain()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(parser_process, "__name__", "body_parser_of_a_checkout")
    assert (await child.fields(BODIES["text"])).values


async def test_signal_to_all_processes_of_a_service_leaves_the_child(child: BodyParser) -> None:
    await child.fields(b"{}")
    first = child._child
    assert first is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        first.send_signal(number)
    assert (await within(child.fields(BODIES["text"]))).values
    assert child._child is first


def test_child_ends_when_its_parent_does() -> None:
    sink = io.BytesIO()
    asked = REQUEST.pack(WantedParts.FIELDS, 2) + b"{}" + REQUEST.pack(WantedParts.MODEL, 11) + b'{"model":1}'
    serve(io.BytesIO(asked), sink)
    found = sink.getvalue()
    (nbytes,) = ANSWER.unpack(found[: ANSWER.size])
    answer = msgspec.msgpack.decode(found[ANSWER.size : ANSWER.size + nbytes], type=Parsed)
    assert answer == parsed(b"{}", WantedParts.FIELDS)
