"""Forming a group is collective: all ranks have it, or all raise an error that names rank and reason."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from moe_ranks import PATIENCE, ThreadExchange, errors, form_in_threads, open_files, settings_of

from kv_connector import _native
from kv_connector.moe import forming, wire
from kv_connector.moe import group as group_module
from kv_connector.moe.fault import ExchangeError
from kv_connector.moe.group import Group, GroupError
from kv_connector.moe.sentinels import Sentinels, open_pidfd

RANKS = 3


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvc-moe")]


def test_all_ranks_have_a_group_and_close_it_twice() -> None:
    groups = form_in_threads([settings_of(rank, RANKS) for rank in range(RANKS)])
    for group in groups:
        assert isinstance(group, Group)
        assert group.fault() is None
        group.close()
        group.close()
        with pytest.raises(GroupError, match="is closed"):
            group.combine_buffer([1] * RANKS)


def skip_without_pidfds_of_threads() -> None:
    try:
        os.close(open_pidfd(threading.get_native_id(), os.O_EXCL))
    except OSError:
        pytest.skip("threads have pidfds from Linux 6.9 on")


@pytest.mark.parametrize("python", ["with os.pidfd_open", "without"])
def test_each_rank_watches_two_sentinels_of_every_other_rank(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python lacks os.pidfd_open if it was compiled with headers of an old kernel."""
    skip_without_pidfds_of_threads()
    if python == "without":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    groups = form_in_threads([settings_of(rank, RANKS) for rank in range(RANKS)])
    for group in groups:
        assert isinstance(group, Group)
        assert [len(one.pidfds) for one in group._watcher.connections] == [3] * (RANKS - 1)
    for group in groups:
        assert isinstance(group, Group)
        group.close()


def test_pidfd_of_a_process_that_has_ended_is_refused_without_os_pidfd_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait()
    with pytest.raises(ProcessLookupError):
        open_pidfd(other.pid)


def test_sentinels_that_cannot_start_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def second_fails(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Sentinels()
    assert not started[0].is_alive()


def test_group_of_one_rank_needs_no_other() -> None:
    (group,) = form_in_threads([settings_of(0, 1)])
    assert isinstance(group, Group)
    group.close()


def test_settings_that_differ_are_an_error_of_all_ranks() -> None:
    settings = [settings_of(rank, RANKS, **({"hidden": 128} if rank == 2 else {})) for rank in range(RANKS)]
    for rank, error in enumerate(errors(form_in_threads(settings))):
        assert error.startswith(f"moe: rank {rank} cannot form a group: rank 2 has hidden=128, rank 0 has")


def test_another_release_is_an_error_of_all_ranks() -> None:
    def change(number: int, rank: int, message: bytes) -> bytes:
        if (number, rank) != (1, 1):
            return message
        return wire.encode(msgspec.structs.replace(wire.decode(message, wire.Hello), release="0.0.1"))

    exchange = ThreadExchange(RANKS, change)
    ends = form_in_threads(
        [settings_of(rank, RANKS) for rank in range(RANKS)], [exchange.of(rank) for rank in range(RANKS)]
    )
    for error in errors(ends):
        assert "rank 1 has kv-connector 0.0.1, rank 0 has " in error
        assert "Install the same release" in error


class Failing:
    """Replaces the native class. At one rank an operation fails."""

    def __init__(self, real: Callable[..., Any], rank: int, where: str) -> None:
        self._real, self._rank, self._where = real, rank, where

    def __call__(self, rank: int, *arguments: Any) -> Any:
        if rank != self._rank:
            return self._real(rank, *arguments)
        if self._where == "create":
            raise RuntimeError("out of memory")
        return FailingGroup(self._real(rank, *arguments), self._where)


class FailingGroup:
    def __init__(self, group: Any, where: str) -> None:
        self._group, self._where = group, where

    def __getattr__(self, name: str) -> Any:
        if name == self._where:
            raise RuntimeError("no peer access")
        return getattr(self._group, name)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("create", "rank 1: it cannot make its segment: out of memory"),
        ("descriptor", "rank 1: it cannot make its segment: no peer access"),
        (
            "attach",
            "rank 1: it cannot map the segment of rank 0: no peer access; "
            "it cannot map the segment of rank 2: no peer access",
        ),
    ],
)
def test_segment_that_fails_at_one_rank_is_an_error_of_all(
    where: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "MoeGroup", Failing(_native.MoeGroup, 1, where))
    for error in errors(form_in_threads([settings_of(rank, RANKS) for rank in range(RANKS)])):
        assert error.endswith(f"cannot form a group: {words}")


def test_rank_that_gets_the_outcomes_late_has_the_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has closed its part by then. Its process has not ended."""
    skip_without_pidfds_of_threads()
    monkeypatch.setattr(_native, "MoeGroup", Failing(_native.MoeGroup, 1, "attach"))
    monkeypatch.setattr(forming, "_GRACE_SECONDS", 0.0)
    exchange, others_closed, rounds = ThreadExchange(2), threading.Event(), iter(range(1, 3))
    of_rank_0, readable = exchange.of(0), forming._readable

    def late(message: bytes) -> Sequence[bytes]:
        messages = of_rank_0(message)
        if next(rounds) == 2:
            assert others_closed.wait(PATIENCE)
        return messages

    def watched(descriptors: Sequence[int], timeout: float) -> set[int]:
        if len(descriptors) == 1 and timeout > 1 and next(waits) > 2:
            others_closed.set()
        return readable(descriptors, timeout)

    waits = iter(range(1, 100))  # both ranks wait for the settings alone
    monkeypatch.setattr(forming, "_readable", watched)
    ends = form_in_threads([settings_of(rank, 2) for rank in range(2)], [late, exchange.of(1)])
    others_closed.set()
    assert not any(isinstance(end, ExchangeError) for end in ends)
    for error in errors(ends):
        assert error.endswith("rank 1: it cannot map the segment of rank 0: no peer access")


def test_ranks_with_many_open_files_form_a_group() -> None:
    """select() refuses descriptors from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    many = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while many[-1] < 1024:
            many.append(os.dup(many[0]))
        for group in form_in_threads([settings_of(rank, RANKS) for rank in range(RANKS)]):
            assert isinstance(group, Group), group
            group.close()
    finally:
        for one in many:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_exchange_that_fails_is_an_error_with_its_reason() -> None:
    def exchange(_: bytes) -> list[bytes]:
        raise ConnectionError("the store is gone")

    with pytest.raises(GroupError, match="exchange of settings failed: the store is gone") as raised:
        Group.form(settings_of(0, 2), exchange)
    assert isinstance(raised.value.__cause__, ConnectionError)


def test_exchange_that_does_not_end_is_bounded() -> None:
    ended = threading.Event()

    def exchange(_: bytes) -> list[bytes]:
        ended.wait()
        return []

    try:
        with pytest.raises(
            ExchangeError, match=r"exchange of settings did not end within .* A rank is missing"
        ):
            Group.form(settings_of(0, 2, timeout=0.1), exchange)
    finally:
        ended.set()
        for thread in threading.enumerate():
            if thread.name == "kvc-moe-forming":
                thread.join()


def test_close_of_a_gpu_that_does_not_rest_keeps_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(group_module, "_kept", kept)
    monkeypatch.setattr(_native, "MoeGroup", Failing(_native.MoeGroup, 1, "close"))
    first, second = form_in_threads([settings_of(rank, 2) for rank in range(2)])
    assert isinstance(first, Group)
    assert isinstance(second, Group)
    with pytest.raises(GroupError, match="rank 1 keeps its memory: no peer access"):
        second.close(0.1)
    second.close()
    with pytest.raises(GroupError, match="is closed"):
        second.place(None)
    first.close()
    (native,) = kept
    native._group.close(1.0)
