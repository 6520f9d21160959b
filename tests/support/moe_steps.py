"""Steps of an expert exchange for tests, with inputs that every rank can make, checked against the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from moe_ranks import RankPipe, settings_of

from kv_connector.moe import oracle
from kv_connector.moe.group import Group

HIDDEN, TOP_K, EXPERTS = 64, 4, 8
POISON = 0xEE


@dataclass(frozen=True)
class Step:
    """One dispatch and combine."""

    sizes: tuple[int, ...]
    rows: torch.dtype
    ids: torch.dtype
    scales: int
    extras: int
    slot: int
    owners: tuple[int, ...] | None
    accumulate: bool


def steps_of(ranks: int, count: int) -> list[Step]:
    """The same for all ranks. Every value of every field occurs."""
    draw = random.Random(ranks)
    linear = tuple(expert * ranks // EXPERTS for expert in range(EXPERTS))
    mixed = tuple(draw.randrange(ranks) for _ in range(EXPERTS))
    sizes = [
        (0,) * ranks,
        (16,) * ranks,
        (1,) * ranks,
        (0, 16, *(3,) * ranks)[:ranks],
        (7, 0, *(1,) * ranks)[:ranks],
        tuple(draw.randrange(17) for _ in range(ranks)),
    ]
    rows = [torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
    owners = [linear, mixed, (ranks - 1,) * EXPERTS, None]
    return [
        Step(
            sizes=sizes[number % 6],
            rows=rows[number % 3],
            ids=(torch.int64, torch.int32)[number // 2 % 2],
            scales=number // 3 % 3,
            extras=number // 4 % 3,
            slot=number // 5 % 2,
            owners=owners[number // 6 % 4],
            accumulate=number % 4 == 3,
        )
        for number in range(count)
    ]


def random_bytes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def tokens_of(number: int, step: Step, rank: int) -> oracle.Tokens:
    """Inputs of a rank, which every rank can make."""
    draw = torch.Generator().manual_seed(1000 * number + rank)
    size = step.sizes[rank]
    # Ids repeat within a token, and -1 and EXPERTS are no experts.
    ids = torch.randint(-1, EXPERTS + 1, (size, TOP_K), generator=draw).to(step.ids)
    return oracle.Tokens(
        random_bytes(draw, size, HIDDEN * step.rows.itemsize).view(step.rows),
        ids,
        torch.rand((size, TOP_K), generator=draw),
        tuple(random_bytes(draw, size, 4 * (1 + index)) for index in range(step.scales)),
        tuple(random_bytes(draw, size, 3, 1 + 2 * index) for index in range(step.extras)),
    )


def results_of(number: int, step: Step, rank: int) -> torch.Tensor:
    """Computes the results of a rank's experts for all rows. Rows that the rank did not get are poisoned."""
    draw = torch.Generator().manual_seed(5000 + 1000 * number + rank)
    made = torch.randn((sum(step.sizes), HIDDEN), generator=draw).to(torch.bfloat16)
    ids = torch.cat([tokens_of(number, step, other).ids for other in range(len(step.sizes))])
    made[~oracle.wanted(ids, step.owners, rank)] = float("nan")
    return made


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


class RankSide(Protocol):
    """A rank's access to the other ranks: RankPipe, or a thread of the test."""

    rank: int

    def exchange(self, message: bytes) -> Sequence[bytes]: ...


def run_steps(side: RankPipe, ranks: int, count: int) -> tuple[int, int]:
    """Counts the rows that came and those that did not, over all steps."""
    group = Group.form(settings_of(side.rank, ranks, slots=2), side.exchange)
    counts = steps_in(group, side, count)
    group.close()
    return counts


def steps_in(group: Group, side: RankSide, count: int) -> tuple[int, int]:
    """Runs the steps in a group with two slots, and compares every array with the oracle."""
    rank, ranks = side.rank, group.settings.ranks
    came = missed = 0
    owners: tuple[int, ...] | None = None
    for number, step in enumerate(steps_of(ranks, count)):
        if step.owners != owners:
            group.place(step.owners)
            owners = step.owners
        area = group._dispatch_areas[step.slot]
        area.fill_(POISON)
        side.exchange(b"")  # no rank sends before all have poisoned their memory
        inputs = [tokens_of(number, step, other) for other in range(ranks)]
        own = inputs[rank]
        got = group.dispatch(
            own.x,
            own.ids,
            own.weights,
            scales=own.scales,
            extras=own.extras,
            sizes=step.sizes,
            slot=step.slot,
        )
        expected, wanted = oracle.dispatch(inputs, step.owners, rank)
        assert same(got.ids, expected.ids), step
        assert same(got.weights, expected.weights), step
        assert all(map(same, got.extras, expected.extras)), step
        for column, right in zip((got.x, *got.scales), (expected.x, *expected.scales), strict=True):
            assert column.untyped_storage().data_ptr() == area.untyped_storage().data_ptr()
            assert same(column[wanted], right[wanted]), step
            assert (column[~wanted].contiguous().view(torch.uint8) == POISON).all(), step
        came += int(wanted.sum())
        missed += int((~wanted).sum())
        group.combine_buffer(step.sizes, step.slot).copy_(results_of(number, step, rank))
        out = torch.full((step.sizes[rank], HIDDEN), 0.5, dtype=torch.bfloat16)
        base = out.clone() if step.accumulate else None
        group.combine(out, step.sizes, step.slot, step.accumulate)
        results = [results_of(number, step, other) for other in range(ranks)]
        sums = oracle.combine(results, [one.ids for one in inputs], step.owners, rank, base)
        assert not sums.isnan().any()
        assert same(out, sums), step
        side.exchange(b"")  # the next step poisons memory that other ranks may still read
    return came, missed
