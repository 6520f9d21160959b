"""Which prefill rank sends what to one decode rank, where several have it or each has a piece.

Each decode rank chooses for itself, from layouts alone: the choice can be computed anywhere, and needs no
talk among the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kv_connector.protocol.layout import KvLayout, Part
from kv_connector.protocol.plan import matching_parts
from kv_connector.protocol.runs import Misfit, naming

# By P's rank: the parts of each of D's layers, by ordinal, that it is to send. What a Plan takes as wanted.
Choice = dict[int, dict[int, tuple[int, ...]]]


@dataclass(frozen=True)
class PrefillRank:
    """A rank of P that can be asked now."""

    stage: int  # of the pipeline
    layout: KvLayout


@dataclass(frozen=True)
class DecodeRank:
    """The one that chooses, as one of the ranks that share the layers of a stage."""

    index: int
    ranks: int
    layout: KvLayout


def choose_sources(decode: DecodeRank, prefill: Mapping[int, PrefillRank]) -> Choice:
    """Every unit of every part exactly once, from the ranks of ``prefill``, by rank number.

    A replica that cannot be reached is left out of ``prefill``: another takes its share. Ranks of which
    nothing is wanted are not in the answer. Raises Misfit where something is to be had of nobody.
    """
    layers = {
        rank: {layer.name: layer for layer in source.layout.layers}
        for rank, source in sorted(prefill.items())
    }
    choice: Choice = {}
    for ordinal, layer in enumerate(decode.layout.layers):
        holders = {rank: named[layer.name] for rank, named in layers.items() if layer.name in named}
        stages = sorted({prefill[rank].stage for rank in holders})
        if not stages:
            advice = "serve the same model on both sides, with the same speculative decoding"
            raise Misfit(f"layer {layer.name}: no prefill rank has it: {advice}")
        if len(stages) > 1:
            raise Misfit(f"layer {layer.name}: prefill has it on stages {stages}, not on one")
        pairs = {
            rank: matching_parts(prefill[rank].layout, ours, decode.layout, layer)
            for rank, ours in holders.items()
        }
        for number, part in enumerate(layer.parts):
            units = {rank: parts[number][0].units for rank, parts in pairs.items()}
            with naming(f"part {part.name} of layer {layer.name}"):
                for replicas in _cover(part.units, units):
                    senders = _share(decode, part, replicas)
                    sends = choice.setdefault(senders[ordinal % len(senders)], {})
                    sends[ordinal] = (*sends.get(ordinal, ()), number)
    return dict(sorted(choice.items()))


def _cover(wanted: range, units: Mapping[int, range]) -> list[list[int]]:
    """The ranks with equal units, for each interval of which ``wanted`` is made up."""
    replicas: dict[tuple[int, int], list[int]] = {}
    for rank, has in units.items():
        if has.start < wanted.stop and wanted.start < has.stop:
            replicas.setdefault((has.start, has.stop), []).append(rank)
    begin = wanted.start
    for start, stop in sorted(replicas):
        if start > begin:
            break
        if start < begin and begin > wanted.start:
            raise Misfit(f"prefill ranks {_ranks(replicas)} have unit {start} and others, but not the same")
        begin = stop
    if begin < wanted.stop:
        raise Misfit(f"no prefill rank has unit {begin}, decode has {wanted.start} to {wanted.stop - 1}")
    return [replicas[interval] for interval in sorted(replicas)]


def _ranks(replicas: Mapping[tuple[int, int], Sequence[int]]) -> str:
    return ", ".join(str(rank) for ranks in replicas.values() for rank in ranks)


def _share(decode: DecodeRank, part: Part, replicas: Sequence[int]) -> Sequence[int]:
    """Those of the replicas that this decode rank draws on: its layers take turns among them.

    As many decode ranks want the same units as have them, one after the other. Where the replicas are more,
    each decode rank has some for itself; where they are fewer, each serves as many decode ranks.
    """
    total = 1 if part.shard is None else part.shard.total
    alike = max(1, decode.ranks * len(part.units) // total)
    index = decode.index % alike
    first = index * len(replicas) // alike
    return replicas[first : max(first + 1, (index + 1) * len(replicas) // alike)]
