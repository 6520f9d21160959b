"""The comparison that two engines would make at the handshake, and the cost of a prompt.

The engines' own code (``protocol.sources``) makes the plans, of made-up layouts (``layout``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import msgspec

from kv_connector.cli.fit.layout import EngineShape, Unstartable, engine, first_needed
from kv_connector.protocol.pages.layout import GroupTarget, KvLayout
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.plans.runs import Misfit
from kv_connector.protocol.plans.sources import draws, scattered
from kv_connector.protocol.session.fingerprint import ADVICE
from kv_connector.protocol.session.mismatch import mismatch
from kv_connector.protocol.wire.messages import Rank, fingerprint


class RankCost(msgspec.Struct, frozen=True):
    """The part of a prompt that one rank of the decode engine receives."""

    rank: int
    sources: tuple[int, ...]
    """Ranks of the prefill engine."""
    nbytes: int
    writes: int
    page_writes: int
    """Writes for the worst page. ``least_bytes`` is the size of the smallest of them."""
    least_bytes: int
    many: bool
    """Whether the engines warn of so many writes."""


def problems(prefill: EngineShape, decode: EngineShape) -> list[str]:
    """Returns the engines' own messages about what does not fit; empty: they fit."""
    ours, theirs = (fingerprint({"dtype": one.dtype}) for one in (prefill, decode))
    differs = mismatch(ours, theirs, ADVICE)
    found = [] if differs is None else [differs]
    for rank in range(len(decode.ranks)):
        try:
            draws(decode.ranks, rank, prefill.ranks)
        except Misfit as misfit:
            found.append(str(misfit))
    return list(dict.fromkeys(found))


def costs(prefill: Sequence[Rank], decode: Sequence[Rank], tokens: int) -> Iterator[RankCost]:
    """Yields the cost of a prompt of this many tokens by decode rank. Raises Misfit."""
    for rank, worker in enumerate(decode):
        found = draws(decode, rank, prefill)
        plans = {number: draw.plan for number, draw in found.items() if draw.plan is not None}
        targets = wanted(worker.layout, tokens)
        moved = [_moved(plan, targets, tokens) for plan in plans.values()]
        page_writes, least = max((plan.pieces() for plan in plans.values()), default=(0, 0))
        yield RankCost(
            rank=rank,
            sources=tuple(sorted(plans)),
            nbytes=sum(nbytes for nbytes, _ in moved),
            writes=sum(writes for _, writes in moved),
            page_writes=page_writes,
            least_bytes=least,
            many=scattered(found.values()) is not None,
        )


def wanted(layout: KvLayout, tokens: int) -> tuple[GroupTarget, ...]:
    """Returns the pages that the decode engine requests.

    These are all but the prompt's last token, which it computes. For a window, they are the tokens to which
    that last one attends.
    """
    targets = []
    for group in layout.groups:
        if group.block_size == 0:
            targets.append(GroupTarget(0, (1,)))
            continue
        blocks = -(-(tokens - 1) // group.block_size)
        needed = first_needed(group.kind, tokens - 1)
        targets.append(GroupTarget(0, tuple(range(1, blocks + 1)), needed))
    return tuple(targets)


def _moved(plan: Plan, targets: Sequence[GroupTarget], tokens: int) -> tuple[int, int]:
    """Returns (bytes, writes) of all layers."""
    nbytes = writes = 0
    for pair in plan.pairs.values():
        times = Counter(map(pair.cut.places, pair.granules(targets[pair.target], tokens)))
        for places, granules in times.items():
            for run in pair.runs[places]:
                pieces = granules * len(run.layers) * len(run.offsets)
                writes += pieces
                nbytes += pieces * run.page_bytes
    return nbytes, writes


# --- What makes many writes few


def remedy(prefill: EngineShape, decode: EngineShape) -> str | None:
    """Returns the fewest settings with which every page is few writes; None: none of these settings helps."""
    blocks = max(prefill.block, decode.block)
    changes: Mapping[str, Mapping[str, Any]] = {
        "VLLM_KV_CACHE_LAYOUT=HND": {"order": "heads"},
        "VLLM_SSM_CONV_STATE_LAYOUT=DS": {"conv": "DS"},
        f"--block-size {blocks}": {"block": blocks},
    }
    kinds = {prefill.side.order, decode.side.order}
    useful = [name for name in changes if "planes" not in kinds or not name.startswith("VLLM_KV")]
    for number in range(1, len(useful) + 1):
        for names in combinations(useful, number):
            more = {key: value for name in names for key, value in changes[name].items()}
            if _few(prefill, decode, more):
                return f"{' and '.join(names)} on both sides"
    return None


def _few(prefill: EngineShape, decode: EngineShape, more: Mapping[str, Any]) -> bool:
    """Whether pages are few writes if both sides also have these settings."""
    try:
        ours, theirs = (engine(one.model, replace(one.side, **more)).ranks for one in (prefill, decode))
        found = [draws(theirs, rank, ours) for rank in range(len(theirs))]
    except (Misfit, Unstartable):
        return False
    return all(scattered(one.values()) is None for one in found)
