"""Groups that survive, for tests: their forming, and steps that are compared with the oracle."""

from __future__ import annotations

import random

import torch
from moe_ranks import form_in_threads, settings_of

from kv_connector.moe import oracle
from kv_connector.moe.group import Group

HIDDEN, TOP_K, EXPERTS = 64, 4, 8
OWNERS_OF = {ranks: tuple(expert * ranks // EXPERTS for expert in range(EXPERTS)) for ranks in (2, 3, 4)}


def tokens_of(number: int, rank: int) -> oracle.Tokens:
    """Inputs of a rank in a step. Sizes change, so late rows of an older step would land among other rows."""
    draw = torch.Generator().manual_seed(1000 * number + rank)
    size = random.Random(1000 * number + rank).randrange(8)
    return oracle.Tokens(
        torch.randn((size, HIDDEN), generator=draw).to(torch.bfloat16),
        torch.randint(0, EXPERTS, (size, TOP_K), generator=draw),
        torch.rand((size, TOP_K), generator=draw),
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def checked_step(group: Group, number: int) -> None:
    """Compares rows and sums with the oracle, without the rows and results of masked ranks."""
    rank, ranks = group.settings.rank, group.settings.ranks
    inputs = [tokens_of(number, other) for other in range(ranks)]
    sizes = [one.ids.shape[0] for one in inputs]
    own = inputs[rank]
    got = group.dispatch(own.x, own.ids, own.weights, sizes=sizes)
    expected, wanted = oracle.dispatch(inputs, OWNERS_OF[ranks], rank)
    sources = torch.repeat_interleave(torch.arange(ranks), torch.tensor(sizes))
    masked = torch.isin(sources, torch.tensor(sorted(group.masked()), dtype=torch.int64))
    assert (got.ids[masked] == -1).all()
    assert same(got.ids[~masked], expected.ids[~masked])
    assert same(got.weights[~masked], expected.weights[~masked])
    assert same(got.x[wanted & ~masked], expected.x[wanted & ~masked])
    draw = torch.Generator().manual_seed(number)
    results = [torch.randn((sum(sizes), HIDDEN), generator=draw).to(torch.bfloat16) for _ in range(ranks)]
    group.combine_buffer(sizes).copy_(results[rank])
    out = torch.zeros((sizes[rank], HIDDEN), dtype=torch.bfloat16)
    group.combine(out, sizes)
    for other in group.masked():
        results[other].zero_()
    assert same(out, oracle.combine(results, [one.ids for one in inputs], OWNERS_OF[ranks], rank))


def survivors(ranks: int) -> list[Group]:
    ends = form_in_threads([settings_of(rank, ranks, survive=True) for rank in range(ranks)])
    groups = [end for end in ends if isinstance(end, Group)]
    assert len(groups) == ranks, ends
    return groups
