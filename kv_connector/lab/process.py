"""One child process with everything it starts: its log, its health, and an end that leaves nothing behind."""

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# An engine shuts its connector and its workers down in a second or two. Processes left after this are killed.
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
# Nine processes import torch while three engines start: 60 s on two idle cores. The rest is for a busy
# machine.
START_SECONDS = 300.0
# For each health check SGLang generates a token, and a second later checks whether it has arrived.
ANSWER_SECONDS = 5.0

# Runs behind setpriv. If the parent died before setpriv requested the signal, the signal would never come.
UNLESS_ORPHANED = '[ "$PPID" = "$0" ] && exec "$@"'


# Their default actions end this process without its processes. A busy engine ignores the SIGTERM that it then
# gets from the kernel.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def leave_on_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP leave the block by SystemExit, so that process groups in the block end.

    The exit status is 128 plus the signal. Does nothing outside of the main thread, which receives no signal.
    """
    with _handlers(_ENDING, _leave):
        yield


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Delays SIGINT, SIGTERM and SIGHUP to the end of the block, in which a process is started and adopted.

    On a busy machine a start takes a while. A signal in the middle would leave a process that no group knows.
    """
    came: list[int] = []
    # A default action cannot wait.
    handled = [number for number in (signal.SIGINT, *_ENDING) if callable(signal.getsignal(number))]
    try:
        with _handlers(handled, lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _handlers(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Sets a handler for these signals in the block. Does nothing outside of the main thread."""
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class StartError(RuntimeError):
    """A process ended, or did not become healthy in time. The message ends with the tail of its log."""


class Process:
    """A child that leads its own process group, so that its children end with it.

    The group also ends (by SIGTERM to its leader) when this process dies. Not safe to share between threads.
    Start it from the main thread: the kernel ties that SIGTERM to the thread that started the child.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        if shutil.which("setpriv"):
            orphans_end = ["sh", "-c", UNLESS_ORPHANED, str(os.getpid())]
            command = ["setpriv", "--pdeathsig", "TERM", *orphans_end, *command]
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The leader's process id, which is the group's id too."""
        return self._child.pid

    def running(self) -> bool:
        """Returns whether the leader still runs."""
        return self._child.poll() is None

    def wait(self, seconds: float) -> int | None:
        """Returns the leader's exit status. None: it still runs after ``seconds``. BLOCKS."""
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def members(self) -> list[int]:
        """Returns the process ids of the group that still run (a zombie does not)."""
        self._child.poll()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # The fields after the command's name, which may contain any character: state, parent, process
                # group.
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):
                continue  # it ended meanwhile
            if int(group) == self.pid and state != "Z":
                found.append(int(entry.name))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group."""
        if self.members():
            os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Requests the leader's end. Returns at once."""
        if self.running():
            self._child.terminate()

    def kill(self) -> None:
        """Ends the whole group now and waits until it is gone."""
        while self.members():
            self.signal(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self._child.wait()

    def log_tail(self, lines: int = 30) -> str:
        text = self.log.read_text(errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def healthy(self, url: str) -> bool:
        """Returns whether `url` answers 200. StartError: it does not, and the process has ended."""
        if answers(url):
            return True
        if not self.running():
            raise StartError(
                f"{self.name} ended with status {self._child.returncode} before it was ready; "
                f"the end of {self.log}:\n{self.log_tail()}"
            )
        return False


def wait_healthy(urls: Mapping[Process, str], *, deadline: float) -> None:
    """Blocks until each process's URL answers 200.

    StartError: one of them ended, or `deadline` has passed.
    """
    waiting = dict(urls)
    while waiting := {process: url for process, url in waiting.items() if not process.healthy(url)}:
        if time.monotonic() > deadline:
            process, url = next(iter(waiting.items()))
            raise StartError(
                f"{process.name} was not ready in time ({url}); the end of {process.log}:\n"
                f"{process.log_tail()}"
            )
        time.sleep(POLL_SECONDS)


def answers(url: str) -> bool:
    """Returns whether `url` answers 200 in time.

    A router without prefill engines is `degraded`, which is not ready.
    """
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as response:
            return response.status == 200 and b'"status":"degraded"' not in response.read()
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        # An answer that is not HTTP comes from another program that has taken the port.
        return False


def stop(processes: Iterable[Process]) -> None:
    """Ends all of them, first with SIGTERM to all at once.

    Leaves none running, even if interrupted meanwhile.
    """
    processes = list(processes)
    try:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while any(process.members() for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            process.kill()


class ProcessGroup:
    """Processes that start side by side (start all, then call `wait_ready`) and end together.

    They end when the `with` block is left in any way. In a `leave_on_signals` block, SIGTERM leaves it too.
    """

    def __init__(self) -> None:
        self._processes: list[Process] = []
        self._health: dict[Process, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process. Idempotent."""
        stop(self._processes)

    def wait_ready(self, *processes: Process, seconds: float = START_SECONDS) -> None:
        """Blocks until these processes (default: all started ones) are healthy.

        StartError: one of them ended, or one is not healthy in time.
        """
        waiting = {
            process: url for process, url in self._health.items() if not processes or process in processes
        }
        wait_healthy(waiting, deadline=time.monotonic() + seconds)
        for process in waiting:
            del self._health[process]

    def stop(self, process: Process) -> None:
        """Ends one of the processes, first with SIGTERM."""
        stop([process])

    def _adopt(self, process: Process, health: str) -> None:
        """Adds a process. Start and add it in one `with starting()` block."""
        self._processes.append(process)
        self._health[process] = health
