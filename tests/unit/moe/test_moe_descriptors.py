"""Descriptors between ranks: strangers are refused, and every failure names the rank."""

from __future__ import annotations

import array
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from moe_ranks import PATIENCE, open_files, settings_of

from kv_connector.moe.descriptors import LEAVE, Connection, Meeting, Passed
from kv_connector.moe.sentinels import Sentinels
from kv_connector.moe.watcher import Watcher
from kv_connector.moe.wire import Facts, Hello, Introduction, encode


def hello_of(meeting: Meeting, rank: int, ranks: int = 2, **more: Any) -> Hello:
    fields: dict[str, Any] = {
        "release": "1.0",
        "rank": rank,
        "facts": Facts.of(settings_of(rank, ranks)),
        "machine": "here",
        "pid": os.getpid(),
        "uid": os.geteuid(),
        "name": meeting.name,
        "secret": meeting.secret,
    }
    return Hello(**(fields | more))


@pytest.fixture
def meetings() -> Iterator[list[Meeting]]:
    made = [Meeting() for _ in range(4)]
    yield made
    for meeting in made:
        meeting.close()


def file_with(text: str) -> int:
    descriptor = os.memfd_create(text)
    os.write(descriptor, text.encode())
    return descriptor


def test_every_rank_gets_the_descriptor_of_every_other_rank(meetings: list[Meeting]) -> None:
    hellos = [hello_of(meeting, rank, 4) for rank, meeting in enumerate(meetings)]
    files = [file_with(f"rank {rank}") for rank in range(4)]
    ends: list[Passed] = [Passed()] * 4

    def pass_around(rank: int) -> None:
        deadline = time.monotonic() + PATIENCE
        ends[rank] = meetings[rank].pass_around(rank, hellos, files[rank], deadline)

    threads = [threading.Thread(target=pass_around, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, passed in enumerate(ends):
        others = set(range(4)) - {rank}
        assert (set(passed.descriptors), set(passed.connections), passed.problems) == (others, others, {})
        for other, descriptor in passed.descriptors.items():
            assert os.pread(descriptor, 100, 0) == f"rank {other}".encode()
            assert not os.get_inheritable(descriptor)
        passed.close()
    for descriptor in files:
        os.close(descriptor)


def connect(meeting: Meeting) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE)
    connection.connect(b"\0kv-connector-moe-" + meeting.name.hex().encode())
    return connection


def send(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([message], rights)


def passed_with(
    meetings: list[Meeting], act: Callable[[socket.socket], None], seconds: float = PATIENCE, **more: Any
) -> Passed:
    """Returns the result of rank 0 of two, where rank 1 connects and does ``act``."""
    hellos = [hello_of(meetings[0], 0), hello_of(meetings[1], 1, **more)]
    own = file_with("rank 0")
    with connect(meetings[0]) as connection:
        act(connection)
        passed = meetings[0].pass_around(0, hellos, own, time.monotonic() + seconds)
    os.close(own)
    return passed


@pytest.mark.parametrize(
    ("descriptors", "words"),
    [(0, "has 0 descriptors instead of 1 to 3"), (4, "has 4 descriptors instead"), (9, "was cut off")],
)
def test_introduction_with_too_few_or_too_many_descriptors_is_refused(
    meetings: list[Meeting], descriptors: int, words: str
) -> None:
    before = open_files()
    message = encode(Introduction(1, meetings[0].secret))
    passed = passed_with(meetings, lambda connection: send(connection, message, [1] * descriptors))
    assert words in passed.problems[1]
    assert passed.problems[1].startswith(f"rank 1 (process {os.getpid()}): ")
    passed.close()
    assert open_files() == before


@pytest.mark.parametrize(
    ("rank", "secret", "words"),
    [(1, bytes(32), "wrong secret"), (0, None, "the introduction of rank 0"), (2, None, "of rank 2")],
)
def test_introduction_of_another_rank_or_secret_is_refused(
    meetings: list[Meeting], rank: int, secret: bytes | None, words: str
) -> None:
    before = open_files()
    message = encode(Introduction(rank, secret or meetings[0].secret))
    passed = passed_with(meetings, lambda connection: send(connection, message, [1]))
    assert words in passed.problems[1]
    passed.close()
    assert open_files() == before


def test_malformed_introduction_is_refused(meetings: list[Meeting]) -> None:
    passed = passed_with(meetings, lambda connection: send(connection, b"\xc1", [1]))
    assert "a malformed message" in passed.problems[1]
    assert not passed.descriptors


def test_connection_that_ends_early_names_its_rank(meetings: list[Meeting]) -> None:
    passed = passed_with(meetings, lambda connection: connection.shutdown(socket.SHUT_RDWR))
    assert passed.problems[1].endswith("it closed the connection")


def test_silent_rank_is_named_at_the_deadline(meetings: list[Meeting]) -> None:
    passed = passed_with(meetings, lambda connection: None, seconds=0.05)
    assert "no descriptor of its segment came within" in passed.problems[1]


def test_connection_of_another_process_is_refused(
    meetings: list[Meeting], caplog: pytest.LogCaptureFixture
) -> None:
    """The right secret does not help, because the kernel names another process than the exchange did."""
    message = encode(Introduction(1, meetings[0].secret))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        with caplog.at_level(logging.WARNING, "kv_connector"):
            passed = passed_with(
                meetings, lambda connection: send(connection, message, [1]), seconds=0.05, pid=other.pid
            )
        other.communicate()
    assert set(passed.problems) == {1}
    assert not passed.descriptors
    assert f"refused a connection of process {os.getpid()}" in caplog.text


def test_socket_of_another_process_gets_no_descriptor(meetings: list[Meeting]) -> None:
    """Rank 1 connects to rank 0, whose socket belongs to another process than the exchange named."""
    own = file_with("rank 1")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        hellos = [hello_of(meetings[0], 0, pid=other.pid), hello_of(meetings[1], 1)]
        passed = meetings[1].pass_around(1, hellos, own, time.monotonic() + PATIENCE)
        other.communicate()
    assert "another process listens at its socket" in passed.problems[0]
    os.close(own)


def test_rank_without_a_socket_is_named(meetings: list[Meeting]) -> None:
    hellos = [hello_of(meetings[0], 0, name=bytes(16)), hello_of(meetings[1], 1)]
    passed = meetings[1].pass_around(1, hellos, 1, time.monotonic() + PATIENCE)
    assert "Connection refused" in passed.problems[0]


def test_process_that_ends_while_passing_is_named_at_once(meetings: list[Meeting]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        hellos = [hello_of(meetings[0], 0), hello_of(meetings[1], 1, pid=other.pid)]
        passed = meetings[0].pass_around(0, hellos, 1, time.monotonic() + PATIENCE)
    assert passed.problems[1] == f"rank 1 (process {other.pid}): the process has ended"


def test_process_that_ended_before_the_passing_is_named_at_once(meetings: list[Meeting]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait()  # the process id is free
    hellos = [hello_of(meetings[0], 0), hello_of(meetings[1], 1, pid=other.pid)]
    passed = meetings[0].pass_around(0, hellos, 1, time.monotonic() + PATIENCE)
    assert passed.problems[1] == f"rank 1 (process {other.pid}): the process has ended"


class Lost:
    """Collects a watcher's reports, and sets an event at each."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, bool]] = []
        self.accusations: list[tuple[int, int]] = []
        self.processes: list[int] = []
        self.event = threading.Event()
        self.process_event = threading.Event()

    def lost(self, rank: int, left: bool, reason: str = "") -> None:
        self.ranks.append((rank, left))
        self.event.set()

    def ended(self, rank: int) -> None:
        self.processes.append(rank)
        self.process_event.set()

    def evicted(self, rank: int, by: int) -> None:
        self.accusations.append((rank, by))
        self.event.set()

    def unreachable(self, rank: int, by: int) -> None:
        raise AssertionError(f"rank {by} lost rank {rank}")


@pytest.mark.parametrize("pidfd", [True, False])
def test_watcher_reports_a_rank_once_when_its_process_ends(
    pidfd: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]) as other:
        theirs.close()
        lost = Lost()
        descriptors = [os.pidfd_open(other.pid)] if pidfd else []
        with caplog.at_level(logging.INFO, "kv_connector"):
            watcher = Watcher([Connection(3, other.pid, ours, descriptors)], lost)
            assert not lost.ranks
            other.kill()
            assert lost.event.wait(PATIENCE)
            watcher.close()
    assert lost.ranks == [(3, False)]
    assert f"moe: rank 3 (process {other.pid}) ended without leaving the group" in caplog.text


def test_watcher_reports_a_rank_when_a_sentinel_ends() -> None:
    """The process still has its memory and its connections."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sentinels = Sentinels()
    lost = Lost()
    watcher = Watcher([Connection(3, os.getpid(), ours, [os.dup(one) for one in sentinels.pidfds])], lost)
    if sentinels.pidfds:  # from Linux 6.9 on
        assert len(sentinels.pidfds) == 2
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        for thread in sentinels._threads:
            assert thread.ident is not None
            signal.pthread_kill(thread.ident, signal.SIGUSR1)  # does not end it
        assert not lost.event.wait(0.05)
        signal.signal(signal.SIGUSR1, before)
        sentinels.close()
        assert lost.event.wait(PATIENCE)
        assert lost.ranks == [(3, False)]
    else:
        sentinels.close()
    watcher.close()
    theirs.close()


def test_watcher_reports_the_end_of_a_process_after_that_of_a_sentinel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lost = Lost()
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as sentinel,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other,
    ):
        process = os.pidfd_open(other.pid)
        pidfds = [os.pidfd_open(sentinel.pid), process]
        watcher = Watcher([Connection(3, other.pid, ours, pidfds, process)], lost)
        sentinel.kill()
        assert lost.event.wait(PATIENCE)
        assert not lost.processes
        other.kill()
        assert lost.process_event.wait(PATIENCE)
    watcher.close()
    theirs.close()
    assert (lost.ranks, lost.processes) == ([(3, False)], [3])


def test_watcher_reports_a_rank_as_left_although_its_sentinels_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sentinels = Sentinels()
    lost = Lost()
    pidfds = [os.dup(one) for one in sentinels.pidfds]
    Connection(0, os.getpid(), theirs, []).send(LEAVE)
    sentinels.close()
    watcher = Watcher([Connection(3, os.getpid(), ours, pidfds)], lost)
    assert lost.event.wait(PATIENCE)
    watcher.close()
    theirs.close()
    assert lost.ranks == [(3, True)]


def test_watcher_reports_a_rank_that_was_evicted_and_its_accusers_end_later() -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lost = Lost(), Lost()
    watchers = [Watcher([Connection(1 - rank, 7, ends[rank], [])], lost[rank]) for rank in range(2)]
    watchers[0].evict(2)
    assert lost[1].event.wait(PATIENCE)
    assert (lost[1].accusations, lost[1].ranks) == ([(2, 0)], [])
    lost[1].event.clear()
    watchers[0].leave()
    assert lost[1].event.wait(PATIENCE)
    for watcher in watchers:
        watcher.close()
    assert (lost[1].accusations, lost[1].ranks) == ([(2, 0)], [(0, True)])


def test_watcher_of_a_rank_that_leaves_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lost = Lost(), Lost()
    with caplog.at_level(logging.INFO, "kv_connector"):
        watchers = [Watcher([Connection(1 - rank, 7, ends[rank], [])], lost[rank]) for rank in range(2)]
        watchers[1].leave()
        assert lost[0].event.wait(PATIENCE)
        watchers[0].leave()
        for watcher in watchers:
            watcher.close()
    assert lost[0].ranks == [(1, True)]
    assert "moe: rank 1 (process 7) left the group" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_watcher_frees_its_descriptors_and_its_thread() -> None:
    before = open_files(), threading.active_count()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watcher = Watcher([Connection(1, os.getpid(), ours, [os.pidfd_open(os.getpid())])], Lost())
    watcher.close()
    theirs.close()
    assert (open_files(), threading.active_count()) == before
