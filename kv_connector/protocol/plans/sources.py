"""Which prefill rank sends what to which decode rank, if several ranks have it or each has a part.

Every rank computes it for itself, from the layouts alone, without exchanging messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kv_connector.protocol.pages.layout import MAX_LAYER_PARTS, KvLayout, LayerLayout, Part
from kv_connector.protocol.plans.plan import Plan, matching_parts
from kv_connector.protocol.plans.runs import Misfit, naming
from kv_connector.protocol.wire.messages import Rank, Wants


@dataclass(frozen=True)
class Draw:
    """The relation of one decode worker to one prefill worker."""

    share: int  # number among the ``shares`` that decode workers want of the prefill worker
    shares: int
    plan: Plan | None  # None: the prefill worker sends nothing, and must be notified of that
    wants: Wants
    layout: KvLayout  # the prefill worker's; the draw is computed from it


def scattered(draws: Iterable[Draw]) -> tuple[int, int] | None:
    """Finds pages that arrive in many writes at a decode worker. Returns the writes of the worst layer and
    block, and the bytes of the smallest write.

    None for pages that keep their parts together, because these take at most one write a part.
    """
    plans = (draw.plan for draw in draws if draw.plan is not None)
    writes, nbytes = max((plan.pieces() for plan in plans), default=(0, 0))
    return (writes, nbytes) if writes > MAX_LAYER_PARTS else None


def warnings(layout: KvLayout, ranks: Sequence[Rank], draws: Iterable[Draw]) -> Iterator[str]:
    """Yields warnings for the operator of a decode worker about the pages of a prefill engine with these
    ranks."""
    has = {layer.name for rank in ranks for layer in rank.layout.layers}
    missing = [layer.name for layer in layout.layers if layer.name not in has]
    if missing:
        yield (
            f"lacks {len(missing)} layers of a drafter, such as {missing[0]}. Fewer drafts are right without "
            f"them: start it with the same speculative decoding"
        )
    if (found := scattered(draws)) is not None:
        writes, nbytes = found
        yield (
            f"pages arrive in up to {writes} writes per layer and block, of {nbytes} bytes or more. For "
            f"fewer writes use equal block sizes and a layout with heads first"
        )


class Holders:
    """The parts of each layer that an engine's ranks have, by rank."""

    def __init__(self, ranks: Mapping[int, Rank]) -> None:
        self.units: dict[str, dict[str, dict[int, range]]] = {}
        """Layer, part, rank: the units of the part that the rank has."""
        self.stages: dict[str, set[int]] = defaultdict(set)
        self.any: dict[str, tuple[KvLayout, LayerLayout]] = {}
        """Each layer as one of the ranks has it, with that rank's layout."""
        for number, rank in sorted(ranks.items()):
            for layer in rank.layout.layers:
                self.stages[layer.name].add(rank.stage)
                self.any.setdefault(layer.name, (rank.layout, layer))
                parts = self.units.setdefault(layer.name, {})
                for part in layer.parts:
                    parts.setdefault(part.name, {})[number] = part.units


def draws(decode: Sequence[Rank], rank: int, prefill: Sequence[Rank]) -> dict[int, Draw]:
    """The draws of the decode worker of this rank, by rank of ``prefill``.

    Raises Misfit if no rank has a part that it wants, or if a part cannot be copied.
    """
    holders = Holders(dict(enumerate(prefill)))
    for layer in decode[rank].layout.layers:
        if layer.name in holders.any:  # explains a difference; the Plan checks the other ranks
            matching_parts(*holders.any[layer.name], decode[rank].layout, layer)
    chosen = [choose_sources(decode, number, holders) for number in range(len(decode))]
    found = {}
    for number, source in enumerate(prefill):
        consumers = [index for index, choice in enumerate(chosen) if number in choice]
        if rank in consumers:
            wants = chosen[rank][number]
            plan = Plan(source.layout, decode[rank].layout, wants)
            found[number] = Draw(consumers.index(rank), len(consumers), plan, wants, source.layout)
        elif not consumers and number % len(decode) == rank:
            nothing = ((),) * len(decode[rank].layout.layers)
            found[number] = Draw(0, 1, None, nothing, source.layout)
    return found


def choose_sources(decode: Sequence[Rank], rank: int, prefill: Holders) -> dict[int, Wants]:
    """The wants of the decode worker of this rank, by rank of P: every unit of every part exactly once.
    Layers that are not needed and that P lacks are left out.

    Ranks from which nothing is wanted are not in the result. Raises Misfit if no rank has a wanted unit.
    """
    own = decode[rank]
    peers = [number for number, other in enumerate(decode) if other.stage == own.stage]
    index = peers.index(rank)
    choice: dict[int, list[tuple[int, ...]]] = {}
    for ordinal, layer in enumerate(own.layout.layers):
        stages = sorted(prefill.stages.get(layer.name, ()))
        if not stages and not layer.needed:
            continue
        if not stages:
            advice = "serve the same model on both sides, with the same speculative decoding"
            raise Misfit(f"layer {layer.name}: no prefill rank has it: {advice}")
        if len(stages) > 1:
            raise Misfit(f"layer {layer.name}: prefill engine has it on stages {stages}, not on one")
        for number, part in enumerate(layer.parts):
            units = prefill.units[layer.name].get(part.name, {})
            with naming(f"part {part.name} of layer {layer.name}"):
                for replicas in _cover(part.units, units):
                    senders = _share(part, replicas, index, len(peers))
                    sender = senders[ordinal % len(senders)]
                    wants = choice.setdefault(sender, [()] * len(own.layout.layers))
                    wants[ordinal] = (*wants[ordinal], number)
    return {sender: tuple(wants) for sender, wants in choice.items()}


def _cover(wanted: range, units: Mapping[int, range]) -> list[list[int]]:
    """The ranks with equal units, for each of the intervals that make up ``wanted``."""
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
        raise Misfit(
            f"no prefill rank has unit {begin}, decode engine has {wanted.start} to {wanted.stop - 1}"
        )
    return [replicas[interval] for interval in sorted(replicas)]


def _ranks(replicas: Mapping[tuple[int, int], Sequence[int]]) -> str:
    return ", ".join(str(rank) for ranks in replicas.values() for rank in ranks)


def _share(part: Part, replicas: Sequence[int], index: int, ranks: int) -> Sequence[int]:
    """The replicas from which one of ``ranks`` decode workers draws. Its layers alternate among them.

    A group of consecutive decode ranks wants the same units. If there are more replicas than such ranks, each
    decode rank has some replicas for itself. If there are fewer, each replica serves the same number of
    decode ranks.
    """
    total = 1 if part.shard is None else part.shard.total
    alike = max(1, ranks * len(part.units) // total)
    place = index % alike
    first = place * len(replicas) // alike
    return replicas[first : max(first + 1, (place + 1) * len(replicas) // alike)]
