"""The router's access log: one JSON line for each request."""

import asyncio
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke
from router_setup import PATIENCE, FedStream, answer_ok, cluster, metric, refuse, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kv_connector.cli.main import app
from kv_connector.router.front.app import DONE
from kv_connector.router.observe import line_writer
from kv_connector.router.observe.access_log import AccessLog, AccessLogError, Exchange
from kv_connector.router.observe.line_writer import LineWriter, QueuedHandler

pytestmark = pytest.mark.anyio

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
}


async def counted(request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse({"choices": [{"text": "ok"}], "usage": USAGE})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def until_lines(path: Path, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(PATIENCE):
        while len(found := lines(path)) < count:
            await asyncio.sleep(0.01)  # polled: a line is written after the client has its answer
    return found


async def test_access_log_has_one_line_with_the_facts_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    async with cluster(counted, counted, access_log=str(path)) as (p, d, client):
        body = {"model": "m", "prompt": "x"}
        await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        (line,) = await until_lines(path, 1)
        transfer = d.bodies[0]["kv_transfer_params"]["transfer_id"]
    assert 0 < line.pop("first_byte") <= line.pop("duration") < PATIENCE
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "request_id": "mine",
        "client": "127.0.0.1",
        "key": None,
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "model": "m",
        "prefill": [p.url],
        "decode": [d.url],
        "transfer_id": transfer,
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "completion_tokens": 3,
    }


async def test_access_log_counts_tokens_of_a_stream_by_its_last_usage(tmp_path: Path) -> None:
    path, streams = tmp_path / "access.log", FedStream()
    async with cluster(answer_ok, streams, access_log=str(path)) as (_, _, client):
        usage = json.dumps({"choices": [], "usage": USAGE}).encode()
        first = b'data: {"choices":[{"text":"\\"completion_tokens\\":9"}]}\n\n'
        for chunk in (first, b"data: " + usage + b"\n\n" + DONE, None):
            streams.queue.put_nowait(chunk)
        await client.post("/v1/completions", json={"prompt": "x", "stream": True})
        (line,) = await until_lines(path, 1)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (7, 3)


async def test_access_log_has_the_status_of_every_end(tmp_path: Path) -> None:
    path, streams = tmp_path / "access.log", FedStream()
    async with cluster(answer_ok, refuse(400, "no"), access_log=str(path)) as (_, d, client):
        long = {"x-request-id": "a" * 129}
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=long)
        await client.post("/v1/completions", content=b"{")
        await client.get("/v1/unknown/" + "x" * 1000)
        await client.get("/v1/models")
        for own in ("/live", "/health", "/metrics"):
            await client.get(own)  # no lines: probes and scrapes would be most of the log
        d.handler = streams
        streams.queue.put_nowait(b'data: {"error": {"message": "m", "code": 500}}\n\n')
        await client.post("/v1/completions", json={"prompt": "x", "stream": True})
        d.arrived.clear()
        leaving = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await within(d.arrived.wait())
        leaving.cancel()
        found = await until_lines(path, 6)
    refused, malformed, unknown, models, failed, left = found
    # A request id that is too long for a log line is replaced.
    assert refused["request_id"] == answer.headers["x-request-id"]
    assert len(refused["request_id"]) == 32
    assert [line["status"] for line in found] == [400, 400, 404, 200, 500, 499]
    assert (malformed["decode"], malformed["first_byte"] > 0) == ([], True)
    assert len(unknown["path"]) == 256
    assert models["decode"] == [d.url]
    assert failed["decode"] == [d.url] * len(failed["decode"])
    assert (left["decode"], left["first_byte"]) == ([d.url], None)


async def test_access_log_continues_in_a_new_file_after_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    async with cluster(answer_ok, answer_ok, access_log=str(path)) as (_, _, client):
        await client.get("/nothing")
        await until_lines(path, 1)
        path.rename(tmp_path / "access.log.1")
        await client.get("/nothing")
        async with asyncio.timeout(PATIENCE):
            while not path.exists():
                await asyncio.sleep(0.01)  # polled, as above
        assert [line["path"] for line in await until_lines(path, 1)] == ["/nothing"]


async def test_every_answer_has_the_request_id() -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        for path in ("/live", "/v1/models", "/nothing"):
            answer = await client.get(path, headers={"x-request-id": "mine"})
            assert answer.headers.get_list("x-request-id") == ["mine"]
        answer = await client.post("/v1/completions", content=b"{", headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]


def test_exchange_keeps_few_engines_and_each_once_in_a_row() -> None:
    exchange = Exchange()
    for engine in ("a", "a", "b", "a"):
        exchange.decoding(engine)
    assert exchange.decode == ["a", "b", "a"]
    for number in range(100):
        exchange.prefilling(number)
    assert len(exchange.prefill) == 16


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        (b'{"usage":{"input_tokens":4,"output_tokens":2,"cache_read_input_tokens":3}}', (7, 3, 2)),
        (b'event: x\ndata: {"response":{"usage":{"input_tokens":4,"output_tokens":2}}}\n\n', (4, 1, 2)),
        (b'{"usage":{"completion_tokens":"many"}}', (5, 1, None)),
        (b'data: {"completion_tokens":\n\n', (5, 1, None)),
        (b'{"completion_tokens":' + b"[" * 100_000, (5, 1, None)),
        (b'["completion_tokens":1]', (5, 1, None)),
    ],
)
def test_exchange_reads_the_usage_of_every_api(said: bytes, tokens: tuple[int | None, ...]) -> None:
    exchange = Exchange()
    exchange.computed(5, 1)
    exchange.computed(50, 49)
    exchange.send(said)
    assert tuple(exchange.usage().values()) == tokens


def test_access_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AccessLogError, match="No such file or directory"):
        AccessLog.to(str(tmp_path / "missing" / "access.log"))
    engines = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
    status, output = invoke(app, "router", *engines, "--access-log", str(tmp_path))
    assert (status, "Change --access-log" in output) == (2, True)


def test_full_disk_costs_a_line_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[None] = []
    log = AccessLog.to("/dev/full", lambda: lost.append(None))
    scope = {"method": "GET", "path": "/", "client": None}
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with log.request(Exchange("r"), scope):
                pass
        log.close()
    assert caplog.text.count("access log: a line was not written") == 1
    assert len(lost) == 3


def test_file_that_cannot_be_opened_again_costs_lines_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    log = AccessLog.to(str(directory / "access.log"))
    scope = {"method": "GET", "path": "/", "client": None}
    directory.rename(tmp_path / "moved")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with log.request(Exchange("lost"), scope):
                pass
        while "access log" not in caplog.text:
            time.sleep(0.01)  # polled: the log's thread writes, and a log gives no event to wait for
    assert caplog.text.count("access log: a line was not written") == 1
    directory.mkdir()
    with log.request(Exchange("written"), scope):
        pass
    log.close()
    assert [line["request_id"] for line in lines(directory / "access.log")] == ["written"]


def test_access_log_writes_to_standard_output() -> None:
    words = (
        "from kv_connector.router.observe.access_log import AccessLog, Exchange\n"
        "log = AccessLog.to('-')\n"
        "with log.request(Exchange('r'), {'method': 'GET', 'path': '/live'}):\n"
        "    pass\n"
        "log.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, check=True, text=True)
    assert json.loads(done.stdout)["request_id"] == "r"


def test_line_writer_drops_lines_beyond_its_queue_and_writes_the_others_in_order() -> None:
    taken: list[str] = []
    reading, begun = threading.Event(), threading.Event()

    def write(line: str) -> None:
        begun.set()
        assert reading.wait(PATIENCE)
        taken.append(line)

    writer = LineWriter(write)
    assert writer.put("first")
    assert begun.wait(PATIENCE)  # the thread has the first line
    kept = [str(number) for number in range(line_writer.MOST_LINES)]
    assert all(map(writer.put, kept))
    assert not writer.put("dropped")
    reading.set()
    assert writer.flush()
    assert writer.close()
    assert taken == ["first", *kept]


def test_line_writer_does_not_wait_for_a_reader_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "CLOSE_S", 0.01)
    reading = threading.Event()

    def write(line: str) -> None:
        reading.wait(PATIENCE)

    writer = LineWriter(write)
    writer.put("line")
    assert not writer.close()
    reading.set()


def test_line_writer_takes_a_line_that_interrupts_another_line() -> None:
    """The garbage collector may run at any moment. It calls destructors, and that of a failed task logs."""
    taken: list[str] = []
    writer = LineWriter(taken.append)

    def interrupt(*_: Any) -> None:
        sys.setprofile(None)
        writer.put("interrupting")
        sys.setprofile(interrupt)

    def work() -> None:
        sys.setprofile(interrupt)  # called at each call of a function, and at its end
        writer.put("line")
        sys.setprofile(None)

    writer.put("first")
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert writer.close()
    assert {*taken} == {"first", "line", "interrupting"}


async def test_reader_that_takes_no_lines_delays_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_writer, "MOST_LINES", 5)
    monkeypatch.setattr(line_writer, "CLOSE_S", 0.01)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it never reads
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    async with cluster(answer_ok, answer_ok, access_log=str(path)) as (_, _, client):
        dropped = "kv_connector_router_access_log_dropped_lines_total"
        async with asyncio.timeout(PATIENCE):
            while await metric(client, dropped) < 2:
                assert (await client.get("/nothing")).status_code == 404
    os.close(reader)
    assert caplog.text.count("access log: a line was dropped") == 1
    assert caplog.text.count("access log: its last lines were dropped") == 1


def test_handler_of_the_process_log_counts_dropped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "MOST_LINES", 1)
    read, write = os.pipe()
    monkeypatch.setattr(line_writer, "CLOSE_S", PATIENCE)
    handler = QueuedHandler(write)
    log = logging.Logger("router")
    log.addHandler(handler)
    long = "x" * (1 << 20)  # more than the pipe holds: the thread blocks in its write
    log.error(long)
    while not handler._writer._lines.empty():
        time.sleep(0.001)  # polled: the thread takes the line
    for line in ("kept", "dropped", "dropped"):
        log.error(line)
    reader = threading.Thread(target=lambda: lines_read.append(_read_until(read, "last\n")))
    lines_read: list[str] = []
    reader.start()
    while not handler._writer._lines.empty():
        time.sleep(0.001)
    log.error("last")
    reader.join()
    handler.close()
    os.close(read)
    os.close(write)
    (text,) = lines_read
    assert text.splitlines()[1:] == [
        "kept",
        "log: 2 lines before this one were dropped: the reader is too slow",
        "last",
    ]


def _read_until(descriptor: int, end: str) -> str:
    text = ""
    while not text.endswith(end):
        text += os.read(descriptor, 1 << 16).decode()
    return text
