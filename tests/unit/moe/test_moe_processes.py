"""Ranks as processes over host memory: every array against the oracle, ranks that are killed or stopped."""

from __future__ import annotations

import itertools
import os
import re
import signal
from typing import Any

import pytest
import torch
from moe_ranks import EndedRank, Kill, RankPipe, random_death, run_ranks, settings_of
from moe_steps import HIDDEN, Step, results_of, run_steps, same, tokens_of

from kv_connector import _native
from kv_connector.moe import oracle
from kv_connector.moe.group import Group, GroupError, LaunchFault

RANKS = 3


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_array_equals_the_oracle(ranks: int) -> None:
    for came, missed in run_ranks(ranks, run_steps, ranks, 48):
        assert came > 100
        assert missed > 20


def step_without_one(side: RankPipe, victim: int, phase: str, timeout: float, wakes: bool = False) -> Any:
    """One good step; then ``victim`` stops before its dispatch or its combine, and the others go on.

    If it wakes, it goes on as well, until a step fails. The others then wait for its end.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Steps have the timeout of the test. Forming has more, because processes begin at different times.
        real = _native.MoeGroup
        patch.setattr(_native, "MoeGroup", lambda *given: real(*(*given[:-2], timeout, given[-1])))
        group = Group.form(settings_of(side.rank, RANKS), side.exchange)
    sizes = (2,) * RANKS
    tokens = tokens_of(0, Step(sizes, torch.bfloat16, torch.int64, 0, 0, 0, None, False), side.rank)
    out = torch.zeros((2, HIDDEN), dtype=torch.bfloat16)

    def step(*, last: bool) -> None:
        for name in ("dispatch", "combine"):
            if last and name == phase:
                side.exchange(b"")  # on a busy machine a rank may come later than the timeout
                side.note(name)
                if side.rank == victim:
                    if not wakes:
                        side.stop()
                    side.pause()
            if name == "dispatch":
                group.dispatch(tokens.x, tokens.ids, tokens.weights, sizes=sizes)
            else:
                group.combine(out, sizes)

    side.exchange(b"")  # a rank that formed its group late would be evicted in the good step
    step(last=False)

    def steps() -> None:
        step(last=True)
        while True:  # the last step of a rank that wakes may have all results
            step(last=False)

    with pytest.raises(GroupError) as raised:
        steps()
    # From now on no call waits any more.
    with pytest.raises(GroupError):
        group.dispatch(tokens.x, tokens.ids, tokens.weights, sizes=sizes)
    side.note("failed")
    result = str(raised.value), group.fault(), os.getpid()
    if wakes:
        side.exchange(b"")  # no rank leaves or ends before the victim has failed
    group.close()
    return result


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_ends_the_step_with_its_name(victim: int, phase: str) -> None:
    """The timeout is 30 s: without the watcher the code would be another, after that time."""

    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if len(notes) == RANKS:
            kill(victim)

    results = run_ranks(RANKS, step_without_one, victim, phase, 30.0, noted=noted)
    assert results.pop(victim) == EndedRank(-9)
    for error, fault, _ in results:
        named = rf"rank {victim} \(process \d+\) has ended \(LOST\)\. The results of this step are void\."
        assert re.search(named, error), error
        assert fault == LaunchFault("LOST", victim)


@pytest.mark.parametrize(("phase", "noun"), [("dispatch", "rows"), ("combine", "results")])
def test_stopped_rank_is_named_and_ends_its_own_step_when_it_wakes(phase: str, noun: str) -> None:
    """The rank that wakes has all rows of the step, and its own deadline would name another rank."""

    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if [text for _, text in notes].count("failed") == RANKS - 1:
            kill(1, signal.SIGCONT)

    results = run_ranks(RANKS, step_without_one, 1, phase, 6.0, True, noted=noted)
    pid = results[1][2]
    code = f"TIMEOUT_{phase.upper()}"
    codes = set()
    for rank, (error, fault, _) in enumerate(results):
        codes.add(fault.code)
        assert fault.rank == 1
        assert f"moe: rank {rank} of 3: rank 1 (process {pid}) did not send " in error
        if fault.code == code:
            assert f"its {noun} within 30 s ({code})" in error  # the setting, which forming had
        else:
            assert re.search(r"in time, and rank [02] \(process \d+\) evicted it \(EVICTED\)", error), error
    assert results[1][1] == LaunchFault("EVICTED", 1)
    assert codes == {code, "EVICTED"}


def checked_step(group: Group, number: int) -> None:
    """A step whose rows and sums are compared with the oracle."""
    rank = group.settings.rank
    step = Step((3,) * RANKS, torch.bfloat16, torch.int64, 0, 0, 0, None, False)
    inputs = [tokens_of(number, step, other) for other in range(RANKS)]
    own = inputs[rank]
    got = group.dispatch(own.x, own.ids, own.weights, sizes=step.sizes)
    assert same(got.x, oracle.dispatch(inputs, None, rank)[0].x)
    results = [results_of(number, step, other) for other in range(RANKS)]
    group.combine_buffer(step.sizes).copy_(results[rank])
    out = torch.zeros((3, HIDDEN), dtype=torch.bfloat16)
    group.combine(out, step.sizes)
    assert same(out, oracle.combine(results, [one.ids for one in inputs], None, rank, None))


def steps_until_a_death(side: RankPipe) -> tuple[LaunchFault | None, str]:
    group = Group.form(settings_of(side.rank, RANKS), side.exchange)
    side.note("begins")
    error = ""
    for number in itertools.count():
        try:
            checked_step(group, number)
        except GroupError as raised:
            error = str(raised)
            break
    fault = group.fault()
    group.close()
    return fault, error


@pytest.mark.parametrize("turn", range(int(os.environ.get("KVC_TEST_MOE_DEATHS", "20"))))
def test_killed_rank_is_named_wherever_it_is(turn: int) -> None:
    """The timeout is 30 s, and its end would have another code."""
    victim, noted = random_death(turn, RANKS)
    results = run_ranks(RANKS, steps_until_a_death, noted=noted)
    assert results.pop(victim) == EndedRank(-9)
    for fault, error in results:
        assert fault == LaunchFault("LOST", victim), error
        assert re.search(rf"rank {victim} \(process \d+\) has ended \(LOST\)", error), error


def form(side: RankPipe, stop_at: int, timeout: float) -> str:
    """Forms a group. Rank 2 stops in its exchange number ``stop_at``, before it sends, or after the first."""
    rounds = iter((1, 2))

    def exchange(message: bytes) -> list[bytes]:
        number = next(rounds)
        if side.rank == 2 and number == stop_at:
            side.note("stops")
            side.stop()
        messages = side.exchange(message)
        if side.rank == 2 and stop_at == 0:
            side.note("stops")
            side.stop()
        return messages

    try:
        Group.form(settings_of(side.rank, RANKS, timeout=timeout), exchange).close()
    except GroupError as error:
        if timeout < 30:
            side.note("failed")
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stop_at", "words"),
    [(0, ": the process has ended"), (2, " has ended during the exchange of outcomes")],
)
def test_rank_killed_while_forming_is_named(stop_at: int, words: str) -> None:
    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        kill(2)

    first, second, third = run_ranks(RANKS, form, stop_at, 30.0, noted=noted)
    assert third == EndedRank(-9)
    for error in (first, second):
        assert "rank 2 (process " in error
        assert words in error


def test_rank_stopped_while_forming_is_named_at_the_deadline() -> None:
    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if len([text for _, text in notes if text == "failed"]) == 2:
            kill(2)

    # On a busy machine the exchanges before the stop take a second.
    first, second, third = run_ranks(RANKS, form, 0, 5.0, noted=noted)
    assert third == EndedRank(-9)
    for error in (first, second):
        assert "no descriptor of its segment came within" in error or "exchange of outcomes did not" in error
