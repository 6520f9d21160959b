"""Comments in idle streams, for proxies that end idle connections."""

import asyncio
import json
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from router_setup import FedStream, answer_ok, cluster, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kv_connector.router.front.app import DONE
from kv_connector.router.front.keep_alive import COMMENT, KeepAlive
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

EVENT = b'data: {"choices": []}\n\n'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_idle_stream_gets_comments_between_its_events(path: str, tmp_path: Path) -> None:
    streams, log = FedStream(), tmp_path / "access.log"
    async with cluster(answer_ok, streams, stream_comments=0.01, access_log=str(log)) as (_, _, client):
        body = {"prompt": "x", "messages": [], "stream": True}
        async with client.stream("POST", path, json=body) as answer:
            chunks = answer.aiter_bytes()
            begun = time.perf_counter()  # after the router has the request
            text = await within(anext(chunks))
            assert text.startswith(COMMENT)
            waited = time.perf_counter() - begun
            streams.queue.put_nowait(EVENT)
            while COMMENT not in text.partition(EVENT)[2]:
                text += await within(anext(chunks))
            for last in (DONE, None):
                streams.queue.put_nowait(last)
            text += b"".join([chunk async for chunk in chunks])
    first, _, rest = text.partition(EVENT)
    between, end, after = rest.partition(DONE)
    assert first == COMMENT * first.count(COMMENT)
    assert between == COMMENT * between.count(COMMENT) != b""
    assert (end, after) == (DONE, b"")
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["status"] == 200
    assert line["first_byte"] >= waited  # a comment is not the first byte of the answer


async def test_stream_without_the_option_has_the_engines_bytes() -> None:
    streams = FedStream()
    async with cluster(answer_ok, streams) as (_, _, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
        await asyncio.sleep(0)
        for chunk in (EVENT, DONE, None):
            streams.queue.put_nowait(chunk)
        assert (await within(asking)).content == EVENT + DONE


async def test_stream_that_an_engine_refuses_after_a_comment_ends_with_an_error_event() -> None:
    release = asyncio.Event()

    async def late(request: Request, body: dict[str, Any]) -> Response:
        await within(release.wait())
        return JSONResponse({"error": {"message": "no such thing"}}, 400)

    async with cluster(answer_ok, late, stream_comments=0.01) as (_, _, client):
        body = {"prompt": "x", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.aiter_bytes()
            assert (answer.status_code, (await within(anext(chunks)))[: len(COMMENT)]) == (200, COMMENT)
            release.set()
            rest = b"".join([chunk async for chunk in chunks])
    assert b"no such thing" in rest
    assert rest.endswith(DONE)


async def test_event_restarts_the_time_of_the_next_comment() -> None:
    sent: list[bytes] = []

    async def begin() -> None:
        sent.append(b"head")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["body"])
        done.set()

    done = asyncio.Event()
    async with KeepAlive(0.01, begin, send) as comments:
        comments._sent += 3600.0
        await asyncio.sleep(0.05)  # long enough for a wrong comment, and a slow machine makes none
        assert not sent
        comments.end()
    async with KeepAlive(0.01, begin, send):
        await within(done.wait())
    assert sent[:2] == [b"head", COMMENT]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_interval_that_cannot_be_used_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="--stream-comments"):
        RouterSettings((), (), stream_comments=seconds)
