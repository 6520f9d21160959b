"""Agents in separate namespaces and containers: each pair finds a lane that works in both directions.

Containers are Docker's, for `make test-compose` alone. BASE names their image.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "support/namespaced_agent.py"
NAMESPACES = {
    "host": [],
    "pid": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "user": ["unshare", "--user", "--map-root-user"],
    "ipc": ["unshare", "--ipc"],
    # A container that shares the other namespaces: none of its processes may write memory of a process with
    # more rights.
    "container": ["unshare", "--mount", "setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"],
}


@dataclass
class Process:
    popen: subprocess.Popen[str]
    log: Path

    def heard(self) -> dict[str, Any]:
        """The next line that the process prints. If it has ended, fails with its log."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        said: dict[str, Any] = json.loads(line)
        return said


@contextmanager
def started(inside: Sequence[str], log: Path, *arguments: str) -> Iterator[Process]:
    command = [*inside, sys.executable, str(PROGRAM), *arguments]
    with log.open("w") as errors:
        popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield Process(popen, log)
        popen.communicate(timeout=20)  # closes the program's input, which ends it
    finally:
        popen.kill()
        popen.wait()


def need(kind: str) -> None:
    tried = subprocess.run([*NAMESPACES[kind], "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no {kind} namespaces here: {tried.stderr.strip()}")


@pytest.mark.parametrize(
    ("prefill", "decode", "lane"),
    [
        ("host", "host", "host"),
        ("pid", "host", "tcp"),
        ("host", "pid", "tcp"),
        ("pid", "pid", "tcp"),
        ("user", "host", "tcp"),
        ("host", "user", "tcp"),
        ("user", "user", "tcp"),
        ("user", "pid", "tcp"),
        ("pid", "user", "tcp"),
        ("ipc", "host", "host"),
        ("host", "ipc", "host"),
        ("container", "host", "tcp"),
        ("host", "container", "tcp"),
    ],
)
def test_agents_take_a_lane_that_leads_both_ways(
    tmp_path: Path, prefill: str, decode: str, lane: str
) -> None:
    need(prefill)
    need(decode)
    assert_lane(tmp_path, NAMESPACES[prefill], NAMESPACES[decode], lane)


def assert_lane(
    tmp_path: Path,
    prefill: Sequence[str],
    decode: Sequence[str],
    lane: str,
    *,
    address: str = "127.0.0.1",
) -> None:
    """A transfer takes the lane, and one log line on each side names the lane that was passed over."""
    with ExitStack() as stack:
        p = stack.enter_context(started(prefill, tmp_path / "p.log", "prefill", address))
        d = stack.enter_context(started(decode, tmp_path / "d.log", "decode", address, *p.heard()["address"]))
        d.heard()
        for side in (d, p):
            assert side.heard() == {"lanes": [lane], "right": True, "failed": []}, side.log.read_text()
    logs = {side: (tmp_path / f"{side}.log").read_text() for side in ("p", "d")}
    passed = {side: [line for line in log.splitlines() if "passed" in line] for side, log in logs.items()}
    # The line comes from the side that found the problem. The other side logs it too if it had taken the
    # lane.
    assert any(passed.values()) == (lane == "tcp"), logs
    for lines in passed.values():
        assert len(lines) <= 1
        assert all("namespace" in line for line in lines)
    assert "DEAD" not in logs["d"]


# Namespaces of two containers, by Docker's options. A container has its own PID, IPC and network namespaces.
# A Kubernetes pod shares the network, and where `shareProcessNamespace` is set, PIDs.
CONTAINERS = {
    "host network": (["--network=host"], ["--network=host"], "tcp"),
    "host network and PIDs": (["--network=host", "--pid=host"],) * 2 + ("tcp",),
    "host network and IPC": (["--network=host", "--ipc=host"],) * 2 + ("tcp",),
    "host network, PIDs of decode": (["--network=host"], ["--network=host", "--pid=host"], "tcp"),
    "host network, PIDs of prefill": (["--network=host", "--pid=host"], ["--network=host"], "tcp"),
    "a pod": ([], ["--network=container:P"], "tcp"),
    "a pod that shares PIDs": ([], ["--network=container:P", "--pid=container:P"], "tcp"),
    "a network each": ([], [], "tcp"),
}


@pytest.mark.skipif("KVC_COMPOSE" not in os.environ, reason="starts containers: make test-compose")
@pytest.mark.parametrize("pair", CONTAINERS)
def test_agents_in_containers_take_a_lane_that_leads_both_ways(tmp_path: Path, pair: str) -> None:
    prefill, decode, lane = CONTAINERS[pair]
    name = f"kv-connector-test-{uuid.uuid4().hex[:8]}"

    def container(options: Sequence[str], *more: str) -> list[str]:
        mounts = {"/usr", sys.base_prefix, str(PROGRAM.parents[2])}
        words = [f"--volume={path}:{path}:ro" for path in sorted(mounts)]
        words += [option.replace("container:P", f"container:{name}") for option in options]
        image = os.environ.get("BASE", "python:3.11-slim-bookworm")
        return ["docker", "run", "--rm", "--interactive", *more, *words, image]

    own_network = "--network=host" not in prefill
    assert_lane(
        tmp_path,
        container(prefill, f"--name={name}"),
        container(decode),
        lane,
        address="own" if own_network else "127.0.0.1",
    )
