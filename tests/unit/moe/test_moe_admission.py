"""Groups that survive admit a new process in place of a rank that ended. All ranks do, or none."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from moe_ranks import (
    PATIENCE,
    EndedRank,
    Kill,
    RankPipe,
    ThreadExchange,
    open_files,
    random_death,
    run_ranks,
    settings_of,
)
from moe_surviving import OWNERS_OF, checked_step, survivors

from kv_connector.moe import wire
from kv_connector.moe.fault import ExchangeError, GroupError
from kv_connector.moe.forming import Exchange
from kv_connector.moe.group import Group
from kv_connector.moe.settings import GroupSettings

RANKS, VICTIM = 3, 1
NOBODY: frozenset[int] = frozenset()


# --- Ranks as processes


def exchange_at(port: int, name: str, rank: int, ranks: int = RANKS) -> Exchange:
    """An exchange as a framework makes it anew, after the end of a process."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=PATIENCE))
    rounds = itertools.count()

    def exchange(message: bytes) -> list[bytes]:
        number = next(rounds)
        store.set(f"{name}/{number}/{rank}", message)
        return [bytes(store.get(f"{name}/{number}/{other}")) for other in range(ranks)]

    return exchange


def that_dies(exchange: Exchange, call: int, *, sends: bool) -> Exchange:
    """The process dies in this call of the exchange, and sends its message before that or does not."""
    calls = itertools.count(1)

    def dying(message: bytes) -> Sequence[bytes]:
        if next(calls) != call:
            return exchange(message)
        if sends:
            exchange(message)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    return dying


@pytest.fixture
def port() -> Iterator[int]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)
    yield store.port
    del store


def checked_steps(group: Group, numbers: Sequence[int], masked: frozenset[int]) -> None:
    for number in numbers:
        checked_step(group, number)
        assert group.masked() == masked


def until_a_death(side: RankPipe, port: int, ranks: int) -> Group:
    """Ten steps of a rank. The victim dies somewhere in the first five."""
    group = Group.form(
        settings_of(side.rank, ranks, survive=True), exchange_at(port, "form", side.rank, ranks)
    )
    group.place(OWNERS_OF[ranks])
    side.note("begins")
    for number in range(10):
        if side.rank == VICTIM and number == 5:
            threading.Event().wait()
        checked_step(group, number)
    assert group.masked() == {VICTIM}
    return group


def two_admissions(side: RankPipe, port: int) -> str:
    """The processes after the ranks are the successors of the victim. The first one dies, too."""
    if side.rank < RANKS:
        group = until_a_death(side, port, RANKS)
    for turn, numbers in enumerate((range(10, 20), range(20, 40))):
        exchange = exchange_at(
            port, f"admission {turn}", min(side.rank, VICTIM) if side.rank >= RANKS else side.rank
        )
        if side.rank < RANKS:
            group.admit(VICTIM, exchange)
        elif side.rank == RANKS + turn:
            group = Group.join(settings_of(VICTIM, RANKS, survive=True), exchange)
        else:
            continue
        assert group.explanation() == ""
        checked_steps(group, numbers[:5], NOBODY)
        side.note(f"has admitted {turn}")
        if turn == 0:
            if side.rank == RANKS:
                threading.Event().wait()
            checked_step(group, 15)  # the new process dies meanwhile
            checked_steps(group, range(16, 20), frozenset({VICTIM}))
        else:
            checked_steps(group, numbers[5:], NOBODY)
    assert group.fault() is None
    group.close()
    return "has run all steps"


@pytest.mark.parametrize("turn", range(int(os.environ.get("KVC_TEST_MOE_DEATHS", "2"))))
def test_steps_have_all_rows_again_after_each_of_two_admissions(turn: int, port: int) -> None:
    _, noted_begin = random_death(turn, RANKS)

    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if len(notes) == RANKS:
            noted_begin(notes, lambda _rank, *_number: kill(VICTIM))
        if [text for _, text in notes].count("has admitted 0") == RANKS and notes[-1][1] == "has admitted 0":
            kill(RANKS)

    results = run_ranks(RANKS + 2, two_admissions, port, noted=noted)
    assert results[VICTIM] == results[RANKS] == EndedRank(-9)
    assert [results[rank] for rank in (0, 2, RANKS + 1)] == ["has run all steps"] * 3


def admission_without_end(side: RankPipe, port: int, call: int, sends: bool) -> str:
    """The first new process dies during its admission. The second one is admitted."""
    if side.rank < RANKS:
        group = until_a_death(side, port, RANKS)
        with pytest.raises(GroupError) as raised:
            group.admit(VICTIM, exchange_at(port, "first", side.rank))
        checked_steps(group, range(10, 20), frozenset({VICTIM}))
        group.admit(VICTIM, exchange_at(port, "second", side.rank))
    elif side.rank == RANKS:
        Group.join(
            settings_of(VICTIM, RANKS, survive=True),
            that_dies(exchange_at(port, "first", VICTIM), call, sends=sends),
        )
        raise AssertionError
    else:
        group = Group.join(settings_of(VICTIM, RANKS, survive=True), exchange_at(port, "second", VICTIM))
    checked_steps(group, range(20, 30), NOBODY)
    group.close()
    return str(raised.value) if side.rank < RANKS else ""


@pytest.mark.parametrize(
    ("call", "sends"), [(1, True), (2, False)], ids=["after its hello", "before its outcome"]
)
def test_new_process_that_dies_during_its_admission_changes_nothing(
    call: int, sends: bool, port: int
) -> None:
    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if len(notes) == RANKS:
            kill(VICTIM)

    results = run_ranks(RANKS + 2, admission_without_end, port, call, sends, noted=noted)
    assert results[VICTIM] == results[RANKS] == EndedRank(-9)
    for rank in (0, 2):
        found = rf"moe: rank {rank} cannot admit rank 1: rank 1 \(process \d+\)"
        assert re.search(found, results[rank]), results[rank]


def admission_with_a_death(side: RankPipe, port: int, call: int, sends: bool) -> str:
    """Rank 3 of four dies during the admission."""
    ranks, dies = 4, 3
    exchange = exchange_at(port, "first", side.rank if side.rank < ranks else VICTIM, ranks)
    if side.rank == ranks:
        with pytest.raises(GroupError) as raised:
            Group.join(settings_of(VICTIM, ranks, survive=True), exchange)
        return str(raised.value)
    group = until_a_death(side, port, ranks)
    with pytest.raises(GroupError) as raised:
        group.admit(VICTIM, that_dies(exchange, call, sends=sends) if side.rank == dies else exchange)
    checked_step(group, 10)  # the end of rank 3 may be known after its first rows
    checked_steps(group, range(11, 20), frozenset({VICTIM, dies}))
    group.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("call", "sends"), [(1, True), (2, False)], ids=["after its hello", "before its outcome"]
)
def test_member_that_dies_during_an_admission_leaves_the_others_as_before(
    call: int, sends: bool, port: int
) -> None:
    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if len(notes) == 4:
            kill(VICTIM)

    results = run_ranks(5, admission_with_a_death, port, call, sends, noted=noted)
    assert results[VICTIM] == results[3] == EndedRank(-9)
    for rank in (0, 2, 4):
        assert re.search(r"rank 3 \(process \d+\).* has ended", results[rank]), results[rank]


# --- Ranks as threads


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = open_files()
    yield
    if "port" not in request.fixturenames:
        assert open_files() == before
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvc-moe")]


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns what each call returns, or the GroupError that it raises."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except GroupError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(caught, calls))


def step_all(groups: Sequence[Group], number: int) -> None:
    ends = at_once([lambda group=group: checked_step(group, number) for group in groups])  # type: ignore[misc]
    assert ends == [None] * len(groups)


def with_a_loss(*, ended: bool = True) -> list[Group]:
    """Three ranks. Ranks 0 and 2 go on without rank 1, of which they have a report that it ended."""
    groups = survivors(RANKS)
    for group in groups:
        group.place(OWNERS_OF[RANKS])
    step_all(groups, 0)
    for group in (groups[0], groups[2]):
        group.lost(VICTIM, left=False)
        if ended:
            group.ended(VICTIM)
        else:
            group._native.fence(VICTIM)  # for the next step alone
    step_all([groups[0], groups[2]], 1)
    return groups


def admission(
    groups: Sequence[Group],
    settings: GroupSettings | None = None,
    change: Callable[[int, int, bytes], bytes] = lambda _round, _rank, message: message,
    timeout: float | None = None,
) -> list[Any]:
    """Returns what admit() and join() return or raise, by rank."""
    exchange = ThreadExchange(RANKS, change)
    new = settings or settings_of(VICTIM, RANKS, survive=True)
    return at_once(
        [
            lambda: groups[0].admit(VICTIM, exchange.of(0), timeout),
            lambda: Group.join(new, exchange.of(VICTIM), timeout),
            lambda: groups[2].admit(VICTIM, exchange.of(2), timeout),
        ]
    )


def goes_on_and_admits(groups: Sequence[Group]) -> None:
    """The group is as before a failed admission, and admits the next process. Closes all."""
    pair = [groups[0], groups[2]]
    step_all(pair, 2)
    assert [group.masked() for group in pair] == [{VICTIM}] * 2
    first, new, third = admission(groups)
    assert (first, third) == (None, None)
    assert isinstance(new, Group), new
    step_all([pair[0], new, pair[1]], 3)
    assert [group.masked() for group in (*pair, new)] == [NOBODY] * 3
    for group in (*groups, new):
        group.close()


def refused(ends: Sequence[Any], words: str) -> None:
    """All ranks raise the same reason."""
    for rank, end in enumerate(ends):
        assert isinstance(end, GroupError), end
        verb = "join its group" if rank == VICTIM else f"admit rank {VICTIM}"
        assert str(end).startswith(f"moe: rank {rank} cannot {verb}: ")
        assert re.search(words, str(end)), end


def test_old_process_has_no_effect_on_its_successor() -> None:
    groups = with_a_loss()
    first, new, third = admission(groups)
    assert (first, third) == (None, None)
    assert isinstance(new, Group), new
    groups[VICTIM]._watcher.evict(0)
    groups[VICTIM].close()
    assert groups[0]._watcher.flush()
    ranks = [groups[0], new, groups[2]]
    for number in range(2, 6):
        step_all(ranks, number)
    for group in ranks:
        assert group.masked() == NOBODY
        assert group.fault() is None
        assert group.explanation() == ""
    for group in ranks:
        group.close()


def test_settings_that_differ_are_refused_by_all_ranks() -> None:
    groups = with_a_loss()
    other = settings_of(VICTIM, RANKS, survive=True, hidden=128)
    refused(admission(groups, other), "rank 1 has hidden=128, rank 0 has hidden=64")
    goes_on_and_admits(groups)


def test_rank_that_is_not_masked_is_not_admitted() -> None:
    groups = survivors(RANKS)
    refused(admission(groups), r"rank 0 has not gone on without rank 1\. End the old process")
    for group in groups:
        group.close()


def test_rank_whose_process_has_not_ended_is_not_admitted() -> None:
    groups = with_a_loss(ended=False)
    refused(admission(groups, timeout=0.5), r"rank 1 \(process \d+\) has not ended within 0\.5 s")
    for group in (groups[0], groups[2]):
        group.ended(VICTIM)
    goes_on_and_admits(groups)


def test_rank_whose_process_ends_during_the_admission_is_admitted() -> None:
    groups = with_a_loss(ended=False)
    groups[0].ended(VICTIM)
    timer = threading.Timer(0.2, groups[2].ended, (VICTIM,))
    timer.start()
    first, new, third = admission(groups)
    timer.join()
    assert (first, third) == (None, None)
    for group in (*groups, new):
        group.close()


class Failing:
    """Replaces a native group. Its operation fails once."""

    def __init__(self, native: Any, name: str) -> None:
        self._native, self._name = native, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            self._name = ""
            raise RuntimeError("no peer access")
        return getattr(self._native, name)


def test_segment_that_one_member_cannot_map_is_refused_by_all_ranks() -> None:
    groups = with_a_loss()
    groups[2]._native = Failing(groups[2]._native, "prepare_admission")  # type: ignore[assignment]
    refused(admission(groups), "rank 2: it cannot map the segment of rank 1: no peer access")
    goes_on_and_admits(groups)


def test_state_that_the_new_process_cannot_take_over_is_refused_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = with_a_loss()
    for group in (groups[0], groups[2]):
        group._owners = bytes([9] * 8)
    refused(
        admission(groups), "rank 1: it cannot take over the state of the group: .*rank 9 is not in the group"
    )
    for group in (groups[0], groups[2]):
        group._owners = bytes(OWNERS_OF[RANKS])
    goes_on_and_admits(groups)


def test_messages_that_came_before_must_be_handled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = with_a_loss()
    with monkeypatch.context() as patch:
        patch.setattr(groups[0]._watcher, "flush", lambda: False)
        refused(admission(groups), "rank 0: it does not handle the messages of other ranks")
    goes_on_and_admits(groups)


def test_flush_reports_what_came_while_the_thread_was_busy() -> None:
    first, second, third = survivors(RANKS)
    busy, gate = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        gate.wait()

    first._watcher._requests.put(wait)
    os.eventfd_write(first._watcher._wake, 1)
    busy.wait()
    third._watcher.evict(VICTIM)
    threading.Timer(0.1, gate.set).start()
    assert first._watcher.flush()
    assert "evicted" in first.explanation()
    for group in (first, second, third):
        group.close()


def test_exchange_that_breaks_changes_nothing() -> None:
    groups = with_a_loss()

    def change(number: int, rank: int, message: bytes) -> bytes:
        if number == 2:
            raise ConnectionError("the store is gone")
        return message

    ends = admission(groups, change=change)
    # A rank that gives up first ends its threads, which other ranks may take for its end.
    refused(ends, "exchange of outcomes failed: the store is gone|has ended during the exchange of outcomes")
    assert all(isinstance(end, ExchangeError) for end in ends)
    goes_on_and_admits(groups)


def test_admit_refuses_its_own_rank_and_a_closed_group() -> None:
    groups = survivors(2)
    for rank in (0, 2, -1):
        with pytest.raises(ValueError, match=f"rank is {rank}"):
            groups[0].admit(rank, lambda _: [])
    for group in groups:
        group.close()
    with pytest.raises(GroupError, match="is closed"):
        groups[0].admit(1, lambda _: [])


def test_rank_with_a_fault_admits_no_other() -> None:
    groups = with_a_loss()
    groups[2].lost(2, left=False)  # its own steps end
    with pytest.raises(GroupError):
        checked_step(groups[2], 2)
    refused(admission(groups), "rank 2: moe: rank 2 of 3: .* results of this step are void")
    for group in groups:
        group.close()


# --- Messages


def messages(**changes: dict[str, Any]) -> list[bytes]:
    """ADMISSION of three ranks. ``changes``: fields by the rank's name r0 to r2, or of its membership."""
    member = wire.Membership(epochs=(7,), masked=(VICTIM,), owners=b"")
    sent = []
    for rank in range(RANKS):
        change = changes.get(f"r{rank}", {})
        of_member = {
            name: change.pop(name) for name in list(change) if name in ("epochs", "masked", "owners")
        }
        settings = settings_of(rank, RANKS, survive=change.pop("survive", True))
        fields: dict[str, Any] = {
            "release": "1", "rank": rank, "facts": wire.Facts.of(settings), "machine": "m", "pid": 1,
            "uid": 0, "name": bytes(16), "secret": bytes(32), "admits": VICTIM,
            "member": None if rank == VICTIM else msgspec.structs.replace(member, **of_member),
        }  # fmt: skip
        sent.append(wire.encode(wire.Admission(**(fields | change))))
    return sent


def test_admission_messages_have_the_state_of_the_members() -> None:
    hellos, member = wire.read_admissions(messages(), RANKS)
    assert [hello.rank for hello in hellos] == [0, 1, 2]
    assert member.epochs == (7,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r2": {"epochs": (8,)}}, "rank 2 has run another number of dispatches than rank 0"),
        ({"r2": {"owners": b"\0"}}, "rank 2 has another placement of experts than rank 0"),
        ({"r2": {"masked": ()}}, "rank 2 has not gone on without rank 1"),
        ({"r0": {"masked": (1, 2)}}, "rank 0 goes on without rank 2, too"),
        ({"r2": {"admits": 0}}, "rank 2 takes part in the admission of rank 0, not 1"),
        ({"r2": {"member": None}}, "only rank 1 may be a new process, and rank 2 is not as expected"),
        ({f"r{rank}": {"survive": False} for rank in range(3)}, "does not survive the end of a rank"),
        ({"r2": {"problem": "out of memory"}}, "rank 2: out of memory"),
    ],
)
def test_admission_messages_that_do_not_match_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(GroupError, match=words):
        wire.read_admissions(messages(**changes), RANKS)


def test_admission_messages_hold_the_longest_placement() -> None:
    owners = bytes(wire.limits.MAX_EXPERTS)
    _, member = wire.read_admissions(messages(r0={"owners": owners}, r2={"owners": owners}), RANKS)
    assert member.owners == owners
