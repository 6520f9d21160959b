"""A process that has imported vLLM and forks engines: an engine starts in 4 s of one core instead of 40.

For tests that often start engines. The forked engine is vLLM's own API server, with its engine core and
worker in separate processes, as in a normal start. Only the imports are shared.

    nursery.py serve SOCKET [MODULE ...]  imports (default: vLLM), then forks an engine for each `run`
    nursery.py run SOCKET -m MODULE ...   is `python -m MODULE ...`: its output, its environment, its end

The second process ends when its engine ends, and the engine ends when that process ends. No engine outlives
nursery or the nursery's parent, even after SIGKILL: a guard in a separate session kills the remaining ones.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

# Imports that an engine's three processes need in total.
PRELOADED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "kv_connector.vllm.connector",
)
_LONGEST_READ = 1 << 20
_PR_SET_PDEATHSIG = 1


@contextmanager
def nursery(directory: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yields the command that runs modules in place of a Python interpreter. `environment`: of the nursery's
    process."""
    from kv_connector.lab.process import Process, stop

    path = str(directory / "nursery")
    command = [sys.executable, __file__]
    server = Process(
        "nursery", [*command, "serve", path], environment=environment, log=directory / "nursery.log"
    )
    try:
        yield (*command, "run", path)
    finally:
        stop([server])


@dataclass
class _Engine:
    pid: int  # and process group
    process: int  # its pidfd
    client: socket.socket


class _Guard:
    """A process that kills the engines' process groups after the nursery has ended in any way.

    A killed nursery cleans up nothing, and an engine's other processes ignore the end of their leader.
    """

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        if os.fork() == 0:
            os.close(self._writing)
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            self._watch(reading)
            os._exit(0)
        os.close(reading)

    def begun(self, group: int) -> None:
        os.write(self._writing, f"+{group}\n".encode())

    def ended(self, group: int) -> None:
        os.write(self._writing, f"-{group}\n".encode())

    def leave(self) -> None:
        """Closes an engine's copy of the pipe, which would keep the guard waiting."""
        os.close(self._writing)

    @staticmethod
    def _watch(reading: int) -> None:
        groups: set[int] = set()
        with os.fdopen(reading) as lines:
            for line in lines:
                (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


class Nursery:
    def __init__(self, path: str) -> None:
        self._guard = _Guard()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Clients wait for the path. It appears once the nursery listens there.
        self._listener.bind(f"{path}.new")
        self._listener.listen()
        Path(f"{path}.new").rename(path)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is self._listener:
                    self._begin(self._listener.accept()[0])
                elif key.fd == key.data.process:
                    self._end(key.data)
                else:
                    self._hear(key.data)

    def _begin(self, client: socket.socket) -> None:
        output, order = _receive(client)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            client.close()
            self._leave()
            _become(order, output)
        self._guard.begun(pid)
        os.close(output)
        engine = _Engine(pid, os.pidfd_open(pid), client)
        self._ready.register(engine.process, selectors.EVENT_READ, engine)
        self._ready.register(client, selectors.EVENT_READ, engine)

    def _leave(self) -> None:
        """Closes what a forked child inherited from the nursery."""
        self._guard.leave()
        for key in tuple(self._ready.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        self._ready.close()

    def _hear(self, engine: _Engine) -> None:
        """Handles a signal to pass on, or the end of the client that requested the engine."""
        if engine.client.fileno() < 0:
            return  # the engine's end was handled in the same turn
        word = engine.client.recv(1)
        with suppress(ProcessLookupError):
            if word:
                os.kill(engine.pid, word[0])
            else:
                self._ready.unregister(engine.client)
                os.killpg(engine.pid, signal.SIGKILL)

    def _end(self, engine: _Engine) -> None:
        with suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)  # processes that the engine left behind
        self._guard.ended(engine.pid)
        status = os.waitstatus_to_exitcode(os.waitpid(engine.pid, 0)[1])
        self._ready.unregister(engine.process)
        os.close(engine.process)
        with suppress(KeyError, ValueError):
            self._ready.unregister(engine.client)
        with suppress(OSError):
            engine.client.send(bytes([status & 0x7F]))
        engine.client.close()


def _receive(client: socket.socket) -> tuple[int, dict[str, Any]]:
    """Receives the output descriptor and the order to run."""
    first, ancillary, _, _ = client.recvmsg(_LONGEST_READ, socket.CMSG_SPACE(array.array("i").itemsize))
    (output,) = array.array("i", ancillary[0][2])
    text = first
    while not text.endswith(b"\n"):  # JSON contains no line end
        text += client.recv(_LONGEST_READ)
    order: dict[str, Any] = json.loads(text)
    return output, order


def _become(order: dict[str, Any], output: int) -> None:
    """Turns the child into the ordered engine."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.chdir(order["directory"])
        os.environ.clear()
        os.environ.update(order["environment"])
        time.tzset()  # a new process reads TZ; this one has read another value
        sys.path[:0] = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
        sys.argv = ["", *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


def _serve(path: str, modules: list[str]) -> None:
    import gc
    import importlib
    import multiprocessing

    # Until here the parent's end causes a SIGTERM (Process). A library imported below may install a handler
    # for it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    nursery = Nursery(path)
    gc.disable()
    for module in modules or PRELOADED:
        importlib.import_module(module)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not modules:
        # Engines with the connector do this by themselves. Others poll for a second after each message.
        importlib.import_module("kv_connector.vllm.patches").sleep_for_messages()
    # Shared objects are never garbage: each engine collects only its own.
    gc.freeze()
    gc.enable()
    # vLLM spawns its processes on CPUs. Each would import everything again.
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: fork  # type: ignore[assignment]
    nursery.serve()


def _run(path: str, arguments: list[str]) -> int:
    assert arguments[0] == "-m"
    order = {
        "module": arguments[1],
        "arguments": arguments[2:],
        "environment": dict(os.environ),
        "directory": str(Path.cwd()),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nursery:
        while True:
            try:
                nursery.connect(path)
                break
            except FileNotFoundError:
                time.sleep(0.02)  # the nursery has just been started
        text = json.dumps(order).encode() + b"\n"
        sent = socket.send_fds(nursery, [text], [1])
        nursery.sendall(text[sent:])

        def pass_on(number: int, _: FrameType | None) -> None:
            nursery.send(bytes([number]))

        signal.signal(signal.SIGTERM, pass_on)
        status = nursery.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(_run(sys.argv[2], sys.argv[3:]))
