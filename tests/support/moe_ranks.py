"""Ranks of an expert exchange for tests: threads of this process, or processes that may be killed."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from kv_connector.moe.forming import Exchange
from kv_connector.moe.group import Group, GroupError
from kv_connector.moe.settings import GroupSettings

# Seconds. Longer than any step takes on a busy machine: a test that needs it fails.
PATIENCE = 60.0


def open_files() -> int:
    """Returns the number of this process's descriptors."""
    gc.collect()  # otherwise objects of earlier tests may close theirs between two calls
    return len(list(Path("/proc/self/fd").iterdir()))


def settings_of(rank: int, ranks: int, **more: Any) -> GroupSettings:
    given = {"hidden": 64, "top_k": 4, "experts": 8, "max_tokens": 16, "row_bytes": 1024, "timeout": 30.0}
    return GroupSettings(rank=rank, ranks=ranks, **(given | more))


class Kill(Protocol):
    """Sends a signal to the process of a rank."""

    def __call__(self, rank: int, number: signal.Signals = ..., /) -> None: ...


class ThreadExchange:
    """All-gather between threads. ``change(round, rank, message)`` may replace a message."""

    def __init__(
        self, ranks: int, change: Callable[[int, int, bytes], bytes] = lambda _round, _rank, message: message
    ) -> None:
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)
        self._messages: list[bytes] = [b""] * ranks
        self._change = change

    def of(self, rank: int) -> Exchange:
        rounds = iter(range(1, 100))

        def exchange(message: bytes) -> list[bytes]:
            self._messages[rank] = self._change(next(rounds), rank, message)
            self._barrier.wait()
            messages = list(self._messages)
            self._barrier.wait()
            return messages

        return exchange


def form_in_threads(
    settings: Sequence[GroupSettings], exchanges: Sequence[Exchange] | None = None
) -> list[Group | GroupError]:
    """Forms a group with one thread per rank. Returns each rank's group or its error."""
    if exchanges is None:
        common = ThreadExchange(len(settings))
        exchanges = [common.of(rank) for rank in range(len(settings))]
    ends: list[Any] = [None] * len(settings)

    def form(rank: int) -> None:
        try:
            ends[rank] = Group.form(settings[rank], exchanges[rank])
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(len(settings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert all(isinstance(end, Group | GroupError) for end in ends), ends
    return ends


def errors(ends: Sequence[Group | GroupError]) -> list[str]:
    """Returns the errors of ranks that must all have failed."""
    assert not any(isinstance(end, Group) for end in ends), ends
    return [str(end) for end in ends]


@dataclass(frozen=True)
class EndedRank:
    """Result of a rank whose process ended early."""

    exit_code: int | None


class RankPipe:
    """A rank's end of the pipe to the test."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank = rank
        self._pipe = pipe

    def exchange(self, message: bytes) -> list[bytes]:
        """Exchanges messages with all ranks through the test. Blocks for good if a rank is dead."""
        self._pipe.send(("gather", message))
        messages: list[bytes] = self._pipe.recv()
        return messages

    def note(self, text: str) -> None:
        """Reports this rank's progress to the test."""
        self._pipe.send(("note", text))

    def stop(self) -> None:
        """Stops this process until the test kills it."""
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # this thread may be the last one that stops

    def pause(self) -> None:
        """Stops this process until the test sends SIGCONT. On the main thread."""
        continued = threading.Event()
        signal.signal(signal.SIGCONT, lambda *_: continued.set())
        os.kill(os.getpid(), signal.SIGSTOP)
        # This thread may be the last one that stops. Another one may receive the signal, which ends no wait.
        while not continued.wait(0.05):
            pass

    def _end(self, kind: str, result: Any) -> None:
        self._pipe.send((kind, result))
        self._pipe.recv()  # a process ends only after all others have finished their work


def _run(rank: int, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    side = RankPipe(rank, pipe)
    try:
        side._end("result", function(side, *arguments))
    except (EOFError, BrokenPipeError):
        pass  # the test has ended
    except BaseException:
        side._end("error", traceback.format_exc())


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    noted: Callable[[list[tuple[int, str]], Kill], None] = lambda _notes, _kill: None,
) -> list[Any]:
    """Runs ``function(side, *arguments)`` in one process per rank. Returns each result, or EndedRank.

    ``noted(notes, kill)`` is called after each note with all notes so far. ``kill(rank)`` sends SIGKILL, or
    the signal that it is given.
    """
    context = multiprocessing.get_context("forkserver")
    # The processes are forked from one that has imported torch, because that import takes seconds.
    context.set_forkserver_preload(["kv_connector.moe.group", "kv_connector.moe.oracle"])
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(rank, theirs, function, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _serve(pipes, processes, noted)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _serve(
    pipes: list[Connection],
    processes: Sequence[BaseProcess],
    noted: Callable[[list[tuple[int, str]], Kill], None],
) -> list[Any]:
    results: dict[int, Any] = {}
    notes: list[tuple[int, str]] = []
    gathered: dict[int, bytes] = {}
    deadline = time.monotonic() + PATIENCE

    def kill(rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        pid = processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks do not end: {notes}, results {results}"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, content = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join(PATIENCE)
                results[rank] = EndedRank(processes[rank].exitcode)
                continue
            if kind == "gather":
                gathered[rank] = content
                if len(gathered) == len(pipes):
                    for other in pipes:
                        other.send([gathered[index] for index in range(len(pipes))])
                    gathered.clear()
            elif kind == "note":
                notes.append((rank, content))
                noted(notes, kill)
            elif kind == "result":
                results[rank] = content
            else:
                raise AssertionError(f"rank {rank}:\n{content}")
    for rank, result in results.items():
        if not isinstance(result, EndedRank):
            with contextlib.suppress(BrokenPipeError):  # its exchange may have received the message before
                pipes[rank].send(None)
    return [results[rank] for rank in range(len(pipes))]


def random_death(
    turn: int, ranks: int, number: signal.Signals = signal.SIGKILL
) -> tuple[int, Callable[[list[tuple[int, str]], Kill], None]]:
    """Returns a rank, and a function for run_ranks() that kills it soon after each rank has a note.

    ``number`` is the signal.
    """
    draw = random.Random(turn)
    victim, moment = draw.randrange(ranks), draw.uniform(0.0, 0.02)

    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if len(notes) == ranks:
            time.sleep(moment)  # chooses the place where the rank dies
            kill(victim, number)

    return victim, noted
