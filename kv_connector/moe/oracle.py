"""Dispatch and combine in plain torch, for tests and benchmarks. Shares no code with the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tokens:
    """The columns of some tokens: of one rank before dispatch, of all ranks after it."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: tuple[torch.Tensor, ...] = ()
    extras: tuple[torch.Tensor, ...] = ()


def wanted(ids: torch.Tensor, owners: Sequence[int] | None, rank: int) -> torch.Tensor:
    """Returns for each token whether it has an expert on the rank.

    Ids below 0 or above the last expert are no experts.

    ``owners``: the rank of each expert. None: every rank has every token.
    """
    if owners is None:
        return torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
    # One more place, of no rank, for all ids that are no expert.
    table = torch.tensor([*owners, -1], device=ids.device)
    places = torch.where((ids >= 0) & (ids < len(owners)), ids.long(), len(owners))
    return (table.index_select(0, places.flatten()).view(ids.shape) == rank).any(dim=1)


def dispatch(ranks: Sequence[Tokens], owners: Sequence[int] | None, rank: int) -> tuple[Tokens, torch.Tensor]:
    """All rows in rank order, and which of them the rank gets. In other rows x and scales are not defined."""
    ids = torch.cat([one.ids for one in ranks])
    gathered = Tokens(
        torch.cat([one.x for one in ranks]),
        ids,
        torch.cat([one.weights for one in ranks]),
        tuple(torch.cat(columns) for columns in zip(*(one.scales for one in ranks), strict=True)),
        tuple(torch.cat(columns) for columns in zip(*(one.extras for one in ranks), strict=True)),
    )
    return gathered, wanted(ids, owners, rank)


def combine(
    results: Sequence[torch.Tensor],
    ids: Sequence[torch.Tensor],
    owners: Sequence[int] | None,
    rank: int,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sums for the tokens of the rank: fp32 additions in rank order, and one rounding.

    ``results``: each rank's [rows, hidden]. ``ids``: each rank's own tokens. ``base``: added last.
    """
    first = sum(one.shape[0] for one in ids[:rank])
    tokens = ids[rank].shape[0]
    sums = torch.zeros((tokens, results[0].shape[1]), dtype=torch.float32, device=results[0].device)
    for other, part in enumerate(results):
        has = wanted(ids[rank], owners, other).nonzero().flatten()
        rows = part.index_select(0, has + first).to(torch.float32)
        sums.index_copy_(0, has, sums.index_select(0, has) + rows)
    if base is not None:
        sums = sums + base.to(torch.float32)
    return sums.to(torch.bfloat16)
