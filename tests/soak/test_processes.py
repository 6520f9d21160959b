"""The samples that the soak takes of processes and their metrics."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.soak.processes import (
    ENGINE_GAUGES,
    SERIES_OF_METRICS,
    Sample,
    engine_gauges,
    listener,
    of_group,
    read,
    router_gauges,
    write,
)

pytestmark = pytest.mark.anyio

MIB = 1 << 20
# Leads a group, touches memory, opens descriptors, listens, and forks a child that inherits the socket.
PROGRAM = f"""
import os, socket, sys, threading
os.setsid()
memory = bytearray(int(sys.argv[1]) * {MIB})
memory[::4096] = b"x" * len(memory[::4096])
files = [open("/dev/null") for _ in range(int(sys.argv[2]))]
one = socket.create_server(("127.0.0.1", 0))
begun, beginning = os.pipe()
child = os.fork()
if not child:
    if len(sys.argv) > 3:
        open("/proc/self/comm", "w").write("kvc-worker")
    os.write(beginning, b"x")
    threading.Event().wait()
os.read(begun, 1)
print(one.getsockname()[1], child, flush=True)
sys.stdin.read()
os.kill(child, 9)
"""


@contextmanager
def program(mib: int, files: int, *more: str) -> Iterator[tuple[int, int, int]]:
    """Yields the leader's process id, its child's, and its port."""
    command = [sys.executable, "-c", PROGRAM, str(mib), str(files), *more]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port, child = map(int, process.stdout.readline().split())
        yield process.pid, child, port
        process.communicate()


def test_group_has_memory_and_descriptors_of_each_process() -> None:
    with program(8, 10) as (small, child, _), program(72, 50) as (large, _, _):
        first, second = dict_of("a", small), dict_of("b", large)
        assert first.keys() == {("a", small), ("a child 1", child)}
        one, other = first["a", small], second["b", large]
        assert 60 * MIB < other["memory"] - one["memory"] < 70 * MIB
        assert other["descriptors"] - one["descriptors"] == 40
        assert one["threads"] == 1
        forked = first["a child 1", child]
        assert forked["memory"] > 8 * MIB, "memory that a child shares with its parent counts"
    assert dict_of("a", small) == {}


def test_worker_is_the_process_with_the_transfer_engines_threads() -> None:
    with program(1, 1, "worker") as (leader, child, _):
        assert dict_of("a", leader).keys() == {("a", leader), ("a worker", child)}


def dict_of(name: str, leader: int) -> dict[tuple[str, int], dict[str, float]]:
    return {(one, pid): values for one, pid, values in of_group(name, leader)}


def test_listener_is_the_leader_of_processes_with_the_socket() -> None:
    with program(1, 1) as (leader, _, port):
        assert listener(port) == leader
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert listener(unused.getsockname()[1]) is None


async def test_gauges_are_summed_over_their_labels() -> None:
    pages = {
        "/metrics": '# HELP x\nkv_connector_peers{lane="tcp"} 2.0\nkv_connector_peers{lane="host"} 1.0\n'
        "kv_connector_router_sessions 4.0\n",
        "/status.json": "{}",
    }

    def answer(request: httpx.Request) -> httpx.Response:
        page = pages.get(request.url.path)
        return httpx.Response(404) if page is None else httpx.Response(200, text=page)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        found = await engine_gauges(http, "http://engine")
        assert found == dict.fromkeys(ENGINE_GAUGES, 0.0) | {"kv_connector_peers": 3.0}
        router = await router_gauges(http, "http://router")
        assert router["kv_connector_router_sessions"] == 4
        assert router[SERIES_OF_METRICS] == 3
        pages.clear()
        assert await engine_gauges(http, "http://engine") == {}


def test_samples_are_read_up_to_a_line_that_was_broken_off(tmp_path: Path) -> None:
    samples = [Sample(1.0, 2, "router", os.getpid(), {"memory": 3.0}), Sample(2.0, 4, "p0", 7, {})]
    file = tmp_path / "samples.jsonl"
    for sample in samples:
        write(file, [sample])
    assert read(file) == samples
    file.write_text(file.read_text()[:-5])
    assert read(file) == samples[:1]
