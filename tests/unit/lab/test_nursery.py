"""tests/support/nursery.py: however a test run ends, its engines end with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NURSERY = ROOT / "tests/support/nursery.py"

# An engine: two processes that ignore SIGTERM, as a busy vLLM does. They write their ids and wait.
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
signal.pause()
"""

# The test run: starts the nursery and an engine as the fixtures do, and waits.
RUN = """
import signal, sys
from pathlib import Path
from kv_connector.lab.process import Process
nursery, directory = sys.argv[1], Path(sys.argv[2])
path = str(directory / "socket")
serve = [sys.executable, nursery, "serve", path, "json"]
server = Process("nursery", serve, environment={}, log=directory / "log")
order = [sys.executable, nursery, "run", path, "-m", "stubborn", str(directory / "pids")]
engine = Process("engine", order, environment={"PYTHONPATH": str(directory)}, log=directory / "log")
(directory / "started").write_text(f"{server.pid}\\n{engine.pid}\\n")
signal.pause()
"""


def processes(path: Path, many: int, deadline: float) -> list[int]:
    """Returns the process ids in a file once it has ``many`` of them."""
    while not path.exists() or len(path.read_text().split()) < many:
        assert os.times().elapsed < deadline, f"{path.name} has too few"
        time.sleep(0.02)
    return [int(word) for word in path.read_text().split()]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_nursery_and_engines_end_when_their_parent_is_ended(tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = [sys.executable, "-c", RUN, str(NURSERY), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT) as run:
        deadline = os.times().elapsed + 60
        found = processes(tmp_path / "pids", 2, deadline) + processes(tmp_path / "started", 2, deadline)
        watched = [os.pidfd_open(pid) for pid in found]
        run.send_signal(end)
    for pid, process in zip(found, watched, strict=True):
        ended, _, _ = select.select([process], [], [], 30)
        os.close(process)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        assert ended, f"process {pid} of {found} is left"


def test_an_engine_whose_caller_ends_is_killed_with_its_group(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    path = str(tmp_path / "socket")
    order = [sys.executable, str(NURSERY), "run", path, "-m", "stubborn", str(tmp_path / "pids")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with (
        subprocess.Popen([sys.executable, str(NURSERY), "serve", path, "json"], cwd=ROOT) as server,
        subprocess.Popen(order, cwd=ROOT, env=environment) as caller,
    ):
        try:
            found = processes(tmp_path / "pids", 2, os.times().elapsed + 60)
            watched = [os.pidfd_open(pid) for pid in found]
            caller.kill()
            for process in watched:
                assert select.select([process], [], [], 30)[0]
                os.close(process)
            assert server.poll() is None, "the nursery serves on"
        finally:
            server.kill()
