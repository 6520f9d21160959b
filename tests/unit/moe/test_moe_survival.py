"""Groups that survive: steps go on without a killed rank, and a rank that others mask ends."""

from __future__ import annotations

import itertools
import os
import queue
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from moe_ranks import EndedRank, Kill, RankPipe, errors, form_in_threads, random_death, run_ranks, settings_of
from moe_surviving import OWNERS_OF, checked_step, same, survivors, tokens_of

from kv_connector import _native
from kv_connector.moe import descriptors
from kv_connector.moe.group import Group, GroupError, LaunchFault
from kv_connector.moe.settings import GroupSettings

RANKS = 3
STEPS, LAST_OF_VICTIM = 30, 20
# Seconds. A rank that comes later than that on a busy machine would be masked in place of the stopped rank.
STOP_TIMEOUT = 6.0


def steps_with_a_death(side: RankPipe, victim: int) -> tuple[frozenset[int], LaunchFault | None, str]:
    group = Group.form(settings_of(side.rank, RANKS, survive=True), side.exchange)
    group.place(OWNERS_OF[RANKS])
    side.note("begins")
    for number in range(STEPS):
        if side.rank == victim and number == LAST_OF_VICTIM:
            threading.Event().wait()
        checked_step(group, number)
    result = group.masked(), group.fault(), group.explanation()
    group.close()
    return result


@pytest.mark.parametrize("turn", range(int(os.environ.get("KVC_TEST_MOE_DEATHS", "4"))))
def test_steps_go_on_without_a_killed_rank(turn: int) -> None:
    """The timeout is 30 s, and its end would be a fault."""
    victim, noted = random_death(turn, RANKS)
    results = run_ranks(RANKS, steps_with_a_death, victim, noted=noted)
    assert results.pop(victim) == EndedRank(-9)
    for masked, fault, explanation in results:
        assert masked == {victim}
        assert fault is None
        assert explanation.startswith(f"rank {victim} (process ")


def steps_with_a_stop(side: RankPipe, ranks: int, victim: int) -> tuple[frozenset[int], LaunchFault | None]:
    """Steps until ten have ended without the victim. The victim ends as soon as a step fails.

    Forming has more time than a step, because processes begin at different times.
    """
    with pytest.MonkeyPatch.context() as patch:
        real = _native.MoeGroup
        patch.setattr(_native, "MoeGroup", lambda *given: real(*(*given[:-2], STOP_TIMEOUT, given[-1])))
        group = Group.form(settings_of(side.rank, ranks, survive=True), side.exchange)
    group.place(OWNERS_OF[ranks])
    side.exchange(b"")
    side.note("begins")
    try:
        numbers = itertools.count()
        while not group.masked():
            checked_step(group, next(numbers))
        side.note("goes on")
        for _ in range(10):
            checked_step(group, next(numbers))
    except GroupError as error:
        if side.rank != victim:
            raise
        side.note(str(error))
        os._exit(7)
    result = group.masked(), group.fault()
    group.close()
    return result


@pytest.mark.parametrize("turn", range(int(os.environ.get("KVC_TEST_MOE_STOPS", "2"))))
def test_steps_go_on_without_a_stopped_rank_that_ends_when_it_wakes(turn: int) -> None:
    ranks = 3 + turn % 2
    victim, noted_begin = random_death(turn, ranks, signal.SIGSTOP)
    reports: list[str] = []

    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        noted_begin(notes, kill)
        rank, text = notes[-1]
        if rank == victim and text != "begins":
            reports.append(text)
        elif [text for _, text in notes].count("goes on") == ranks - 1 and text == "goes on":
            kill(victim, signal.SIGCONT)

    results = run_ranks(ranks, steps_with_a_stop, ranks, victim, noted=noted)
    assert results.pop(victim) == EndedRank(7)
    assert results == [({victim}, None)] * (ranks - 1)
    assert len(reports) == 1
    assert re.search(
        rf"moe: rank {victim} of {ranks}: .*rank {victim} \(process \d+\).*\(EVICTED\)", reports[0]
    )


def test_masked_rank_that_lives_ends_with_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no message, only the flag in its memory."""
    first, second = form_in_threads([settings_of(rank, 2, survive=True) for rank in range(2)])
    assert isinstance(first, Group)
    assert isinstance(second, Group)
    monkeypatch.setattr(first._watcher, "evict", lambda rank: None)
    inputs = [tokens_of(3, rank) for rank in range(2)]
    sizes = [one.ids.shape[0] for one in inputs]
    first.lost(1, left=False)
    first.ended(1)
    own = inputs[0]
    got = first.dispatch(own.x, own.ids, own.weights, sizes=sizes)
    assert first.masked() == {1}
    assert same(got.ids[: sizes[0]], own.ids)
    assert (got.ids[sizes[0] :] == -1).all()
    with pytest.raises(GroupError, match=r"rank 0 \(process \d+\) goes on without rank 1 .*\(EVICTED\)"):
        second.dispatch(inputs[1].x, inputs[1].ids, inputs[1].weights, sizes=sizes)
    assert second.fault() == LaunchFault("EVICTED", 1)
    first.close()
    second.close()


def dispatch(group: Group) -> None:
    inputs = [tokens_of(3, rank) for rank in range(group.settings.ranks)]
    own = inputs[group.settings.rank]
    group.dispatch(own.x, own.ids, own.weights, sizes=[one.ids.shape[0] for one in inputs])


def test_masked_rank_that_leaves_before_its_process_ends_ends_no_step() -> None:
    first, second = survivors(2)
    first.lost(1, left=False)
    first.lost(1, left=True)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(dispatch, first)
        while not (first.masked() or step.done()):
            time.sleep(0.001)
        first.ended(1)
        step.result(30)
    first.close()
    second.close()


def test_rank_that_others_go_on_without_does_not_leave_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has not yet learned that the rank was masked would end."""
    first, second = survivors(2)
    reports: queue.Queue[tuple[int, bool]] = queue.Queue()
    monkeypatch.setattr(first, "lost", lambda rank, left, _reason: reports.put((rank, left)))
    second.evicted(1, 0)
    second.close()
    assert reports.get(timeout=30) == (1, False)
    first.close()


def test_fault_names_the_rank_that_ended_the_step_and_not_an_earlier_death() -> None:
    groups = survivors(3)
    first = groups[0]
    first.lost(2, left=False)
    first.ended(2)
    first.lost(1, left=True)
    with pytest.raises(GroupError, match=r": rank 1 \(process \d+\) has left the group \(LOST\)"):
        dispatch(first)
    for group in groups:
        group.close()


def test_rank_that_is_evicted_after_a_death_gets_its_own_name() -> None:
    groups = survivors(3)
    first = groups[0]
    first.lost(2, left=False)
    first.evicted(0, 1)
    assert first.fault() == LaunchFault("EVICTED", 0)
    for group in groups:
        group.close()


def test_dead_ranks_are_not_reported_as_late(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = survivors(3)
    first = groups[0]
    late: list[int] = []
    monkeypatch.setattr(first._watcher, "evict", late.append)
    for rank in (1, 2):
        first.lost(rank, left=False)
        first.ended(rank)
    dispatch(first)
    assert first.masked() == {1, 2}
    assert not late
    for group in groups:
        group.close()
    assert first.masked() == {1, 2}


def test_group_that_survives_is_refused_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them no rank would learn that the stores of a dead rank have ended."""

    def forbidden(pid: int, flags: int = 0) -> int:
        raise PermissionError("pidfd_open")

    monkeypatch.setattr(descriptors, "open_pidfd", forbidden)
    for problem in errors(form_in_threads([settings_of(rank, 2, survive=True) for rank in range(2)])):
        assert "cannot watch processes by pidfds" in problem
    for group in form_in_threads([settings_of(rank, 2) for rank in range(2)]):
        assert isinstance(group, Group)
        group.close()


def test_settings_refuse_rows_that_a_surviving_group_cannot_combine() -> None:
    given: dict[str, Any] = {"rank": 0, "ranks": 2, "top_k": 1, "experts": 2, "row_bytes": 64}
    assert GroupSettings(**given, hidden=8192, survive=True).survive
    with pytest.raises(ValueError, match="8192 at most"):
        GroupSettings(**given, hidden=8200, survive=True)
