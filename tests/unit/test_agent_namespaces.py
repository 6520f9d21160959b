"""Agents in namespaces of their own: each pair finds a lane that leads both ways, whoever is inside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("namespaced_agent.py")
NAMESPACES = {
    "host": [],
    "pid": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "user": ["unshare", "--user", "--map-root-user"],
    "ipc": ["unshare", "--ipc"],
}


@dataclass
class Process:
    popen: subprocess.Popen[str]
    log: Path

    def heard(self) -> dict[str, Any]:
        """The next line that it says; its log, where it has ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        said: dict[str, Any] = json.loads(line)
        return said


@contextmanager
def started(inside: str, log: Path, *arguments: str) -> Iterator[Process]:
    command = [*NAMESPACES[inside], sys.executable, str(PROGRAM), *arguments]
    with log.open("w") as errors:
        popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield Process(popen, log)
        popen.communicate(timeout=20)  # ends its input, and with it the program
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
    ],
)
def test_agents_take_a_lane_that_leads_both_ways(
    tmp_path: Path, prefill: str, decode: str, lane: str
) -> None:
    need(prefill)
    need(decode)
    with ExitStack() as stack:
        p = stack.enter_context(started(prefill, tmp_path / "p.log", "prefill"))
        port = str(p.heard()["port"])
        d = stack.enter_context(started(decode, tmp_path / "d.log", "decode", port))
        d.heard()
        for side in (d, p):
            assert side.heard() == {"lanes": [lane], "right": True, "failed": []}, side.log.read_text()
    logs = {side: (tmp_path / f"{side}.log").read_text() for side in ("p", "d")}
    passed = [
        line for line in "".join(logs.values()).splitlines() if "not host: " in line or "passed" in line
    ]
    assert len(passed) == (lane == "tcp"), logs
    assert all("namespace" in line for line in passed)
    assert "DEAD" not in logs["d"]
