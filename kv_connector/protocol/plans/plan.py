"""The plan of a transfer: which bytes of the source's pages go where in the target's, and how many writes
each counter must see.

Pure functions of the two sides' layouts. Problems are returned as text that explains the misfit (None: it
fits), because they travel to the other side in a HELLO_NAK or a FAIL.

Layers and parts are matched by name. Blocks of two sizes are cut into granules, the tokens that lie in one
block on each side. Of each granule the shards that both sides have are copied, run by run (``runs``). Pages
that are alike are one run, whatever their content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

import msgspec

from kv_connector.protocol.pages.layout import GroupLayout, GroupTarget, KvLayout, LayerLayout, Part
from kv_connector.protocol.plans.runs import (
    MAX_PLAN_RUNS,
    Cut,
    Misfit,
    Places,
    Run,
    check_parts,
    merged,
    naming,
    part_runs,
    same,
)
from kv_connector.protocol.wire.messages import Wants

# For all groups of a request: 1 M tokens in blocks of 16, in 8 groups, which fill a message.
MAX_TARGETS = 1 << 19

# Enough for the most unequal block sizes in use: 2,048 tokens beside 16, or two sizes of which neither
# divides the other. Each place is a separate write for a request.
_MAX_PLACES = 128

ALIKE = (
    "the bytes cannot be converted, start both sides with the same checkpoint, dtypes, attention "
    "backend and kind of machine; where pages are copied whole, with the same parallelism and block size too"
)


def targets_problem(layout: KvLayout, groups: Sequence[GroupTarget], prompt_tokens: int) -> str | None:
    """The problem with D's targets in D's own ``layout`` and for the prompt, or None."""
    if sum(len(target.blocks) for target in groups) > MAX_TARGETS:
        return f"the reservation requests more than {MAX_TARGETS} blocks"
    if len(groups) != len(layout.groups):
        return f"the reservation has {len(groups)} KV groups, the layout {len(layout.groups)}"
    for index, (target, group) in enumerate(zip(groups, layout.groups, strict=True)):
        highest = max(target.blocks, default=0)
        if highest >= group.num_blocks:
            return f"group {index} requests block {highest} of {group.num_blocks}"
        if group.block_size == 0:
            continue
        filled = -(-prompt_tokens // group.block_size)
        if any(target.blocks[max(filled - target.first, 0) :]):
            return f"group {index} requests blocks beyond the {filled} that {prompt_tokens} tokens fill"
    return None


def wants_problem(prefill: KvLayout, decode: KvLayout, wants: Wants) -> str | None:
    """The problem if parts that D wants of P are not in both layouts, or None."""
    if len(wants) != len(decode.layers):
        return f"HELLO requests parts of {len(wants)} layers, its layout has {len(decode.layers)}"
    names = {layer.name for layer in prefill.layers}
    for layer, numbers in zip(decode.layers, wants, strict=True):
        if len(set(numbers)) < len(numbers) or any(number >= len(layer.parts) for number in numbers):
            return f"HELLO requests parts {numbers} of layer {layer.name}, which has {len(layer.parts)}"
        if numbers and layer.name not in names:
            return f"HELLO requests layer {layer.name}, which the prefill engine lacks"
    return None


def used_blocks(group: GroupLayout, first: int, blocks: Sequence[int]) -> dict[int, int]:
    """Logical block -> block, for blocks with content. ``blocks`` begin at logical block ``first``."""
    null = group.null_block
    return {logical: block for logical, block in enumerate(blocks, first) if block != null}


@dataclass(frozen=True)
class PushLayer:
    """One layer of a LayerRun: its ordinal, and its beginning in the source and the target region."""

    ordinal: int
    source_offset: int
    target_offset: int


@dataclass(frozen=True)
class LayerRun:
    """Runs of several layers that one armed write can carry. They have the same blocks and regions, the same
    length, and the same strides on each side.

    ``page_bytes``: of one run. ``offsets``: of each layer's runs, from the beginning of the layer on either
    side. Each run raises the counter by one for each block.
    """

    source_region: int
    target_region: int
    page_bytes: int
    source_stride: int
    target_stride: int
    layers: tuple[PushLayer, ...]
    offsets: tuple[tuple[int, int], ...] = ((0, 0),)


Groups = tuple[int, int]  # a group of the source, a group of the target
Step = TypeVar("Step")


@dataclass(frozen=True)
class TablePair:
    """A group of the source and a group of the target that have layers in common."""

    cut: Cut
    source: int  # the group
    target: int
    blocks: GroupLayout  # the target's blocks
    runs: Mapping[Places, tuple[LayerRun, ...]]  # by the places of a granule in its blocks

    @property
    def whole(self) -> bool:
        """Whether a granule is a block on either side."""
        return len(self.runs) == 1

    def granules(self, target: GroupTarget, prompt_tokens: int) -> dict[int, int]:
        """Granule -> D's block that it goes to, for all granules that D wants: in its table, needed, and
        reached by the prompt."""
        each, tokens = self.cut.target_granules, self.cut.tokens
        blocks = used_blocks(self.blocks, target.first, target.blocks)
        if each == 1 and target.needed <= target.first * tokens:
            return blocks  # no request wants a block that the prompt does not reach
        granules = (
            (granule, block)
            for logical, block in blocks.items()
            for granule in range(logical * each, (logical + 1) * each)
        )
        if tokens == 0:
            return dict(granules)
        begin, end = target.needed // tokens, -(-prompt_tokens // tokens)
        return {granule: block for granule, block in granules if begin <= granule < end}

    def take(
        self, known: Mapping[int, tuple[int, Step]], wanted: dict[int, int]
    ) -> dict[tuple[Step, Places], list[tuple[int, int]]]:
        """Removes the known granules from the wanted ones. Returns their pairs of source block and target
        block, by the step that computes the granule and by its places.

        ``known``: logical block -> block and step.
        """
        found: dict[tuple[Step, Places], list[tuple[int, int]]] = {}
        cut, whole = self.cut, self.whole
        for logical, (block, step) in known.items():
            for granule in (logical,) if whole else cut.of_source(logical):
                target = wanted.pop(granule, None)
                if target is not None:
                    at = step, (0, 0) if whole else cut.places(granule)
                    found.setdefault(at, []).append((block, target))
        return found


class Plan:
    """The bytes that go from one rank's pages to another's, and the number of runs that they make.

    A pure function of the two layouts and of the parts that the target wants of this source, so both sides
    compute the same. The place and order of the runs, the tokens of a block and the shards of each side may
    differ. The meaning of the content may not. Built once per peer.
    """

    def __init__(
        self, source: KvLayout, target: KvLayout, wanted: Sequence[Collection[int]] | None = None
    ) -> None:
        """``wanted``: for each of the target's layers, the numbers of the parts that come from this source.
        None: all parts that both have. Raises Misfit if one of them cannot be copied."""
        ordinals = {layer.name: ordinal for ordinal, layer in enumerate(target.layers)}
        self._ordinals = {
            ordinal: theirs
            for ordinal, layer in enumerate(source.layers)
            if (theirs := ordinals.get(layer.name)) is not None and (wanted is None or wanted[theirs])
        }
        self.layers = tuple(self._ordinals.values())
        """The target's ordinal of each of the source's layers that it wants."""
        self.drafting = frozenset(
            ordinal
            for ordinal, theirs in self._ordinals.items()
            if not (source.layers[ordinal].needed and target.layers[theirs].needed)
        )
        """The source's ordinals of layers without which a request can run: a drafter's."""
        shapes: dict[_Shape, list[PushLayer]] = {}
        for ordinal, theirs in self._ordinals.items():
            ours, layer = source.layers[ordinal], target.layers[theirs]
            parts = matching_parts(source, ours, target, layer)
            if wanted is not None:
                parts = [pair for number, pair in enumerate(parts) if number in wanted[theirs]]
            push = PushLayer(ordinal, min(s.offset for s, _ in parts), min(t.offset for _, t in parts))
            shapes.setdefault((ours.group, layer.group, _moved(parts, push)), []).append(push)
        cuts = {(a, b): cut_blocks(source.groups[a], target.groups[b]) for a, b, _ in shapes}
        drafts = {groups: _Draft(cut.all_places()) for groups, cut in cuts.items()}
        left = MAX_PLAN_RUNS
        for (a, b, moved), layers in shapes.items():
            name = source.layers[layers[0].ordinal].name
            for places in cuts[a, b].all_places():
                runs = _shape_runs(name, moved, cuts[a, b], places)
                left -= len(runs) + len(moved)
                if left < 0:
                    raise Misfit(
                        f"the layouts differ too much: pages take more than {MAX_PLAN_RUNS} different runs"
                    )
                drafts[a, b].add(places, merged(runs), layers)
        self.pairs = {
            (a, b): TablePair(cut, a, b, target.groups[b], drafts[a, b].finished())
            for (a, b), cut in cuts.items()
        }

    def runs(self, source_group: int, target_group: int, places: Places = (0, 0)) -> tuple[LayerRun, ...]:
        """The armed writes of one batch of granules at these places of their blocks. Usually one."""
        pair = self.pairs.get((source_group, target_group))
        return () if pair is None else pair.runs[places]

    def pieces(self) -> tuple[int, int]:
        """The number of writes of a layer's worst granule, and the bytes of the smallest of them."""
        worst = 0, 0
        for pair in self.pairs.values():
            for runs in pair.runs.values():
                writes = Counter[int]()
                for run in runs:
                    writes.update({layer.ordinal: len(run.offsets) for layer in run.layers})
                if runs:
                    worst = max(worst, (max(writes.values()), min(run.page_bytes for run in runs)))
        return worst

    def wanted(self, targets: Sequence[GroupTarget], prompt_tokens: int) -> dict[Groups, dict[int, int]]:
        """The granules that a request wants, with D's blocks for them, by pair of groups."""
        return {
            groups: pair.granules(targets[pair.target], prompt_tokens) for groups, pair in self.pairs.items()
        }

    def counts(self, targets: Sequence[GroupTarget], prompt_tokens: int) -> dict[int, int]:
        """How often a request raises its counter for each layer, by the target's ordinal."""
        counts = dict.fromkeys(self.layers, 0)
        for pair in self.pairs.values():
            granules = pair.granules(targets[pair.target], prompt_tokens)
            times_at = {(0, 0): len(granules)} if pair.whole else Counter(map(pair.cut.places, granules))
            for places, times in times_at.items():
                for run in pair.runs[places]:
                    for layer in run.layers:
                        counts[self._ordinals[layer.ordinal]] += times * len(run.offsets)
        return counts


def matching_parts(
    source: KvLayout, ours: LayerLayout, target: KvLayout, theirs: LayerLayout
) -> list[tuple[Part, Part]]:
    """The parts of a layer on both sides, in the target's order. Raises Misfit if the contents differ."""
    groups = source.groups[ours.group], target.groups[theirs.group]
    with naming(f"layer {theirs.name}"):
        same("kind", groups[0].kind, groups[1].kind, "keep the same windows on both sides")
        formats = repr(ours.format), repr(theirs.format)
        same("format", *formats, ALIKE)
        parts = {part.name: part for part in ours.parts}
        names = ", ".join(sorted(parts)), ", ".join(sorted(part.name for part in theirs.parts))
        same("parts", *names, ALIKE)
        pairs = [(parts[part.name], part) for part in theirs.parts]
        for pair in pairs:
            with naming(f"part {pair[0].name}"):
                check_parts(*pair, *groups)
    return pairs


def cut_blocks(source: GroupLayout, target: GroupLayout) -> Cut:
    """The largest granules that lie in one block on each side."""
    sizes = source.block_size, target.block_size
    if sizes == (0, 0):
        return Cut(0, 1, 1)
    if 0 in sizes:
        raise Misfit(
            f"blocks of {source.kind}: prefill engine has {sizes[0]} tokens in each, decode engine {sizes[1]}"
        )
    tokens = gcd(*sizes)
    cut = Cut(tokens, sizes[0] // tokens, sizes[1] // tokens)
    if cut.source_granules * cut.target_granules > _MAX_PLACES:
        raise Misfit(f"blocks of {source.kind} differ too much: {sizes[0]} tokens and {sizes[1]}")
    return cut


# Groups, and parts whose offsets count from the beginning of the layer. Layers of one shape have the same
# runs.
_Shape = tuple[int, int, tuple[tuple[Part, Part], ...]]


def _moved(parts: Sequence[tuple[Part, Part]], layer: PushLayer) -> tuple[tuple[Part, Part], ...]:
    return tuple(
        (
            msgspec.structs.replace(source, offset=source.offset - layer.source_offset),
            msgspec.structs.replace(target, offset=target.offset - layer.target_offset),
        )
        for source, target in parts
    )


def _shape_runs(layer: str, parts: Sequence[tuple[Part, Part]], cut: Cut, places: Places) -> list[Run]:
    runs: list[Run] = []
    for source, target in parts:
        with naming(f"layer {layer}: part {target.name}"):
            runs += part_runs(source, target, cut, places)
    return runs


class _Draft:
    """Collects the layers that one armed write can carry."""

    def __init__(self, places: Sequence[Places]) -> None:
        # Layers by the fields of a LayerRun before ``layers``, and by its offsets.
        self._writes: dict[Places, dict[tuple[_Write, _Offsets], list[PushLayer]]] = {p: {} for p in places}

    def add(self, places: Places, runs: Sequence[Run], layers: Sequence[PushLayer]) -> None:
        writes: dict[_Write, list[tuple[int, int]]] = {}
        for run in runs:
            write = run.source_region, run.target_region, run.nbytes, run.source_stride, run.target_stride
            writes.setdefault(write, []).append((run.source_offset, run.target_offset))
        for write, offsets in writes.items():
            self._writes[places].setdefault((write, tuple(offsets)), []).extend(layers)

    def finished(self) -> dict[Places, tuple[LayerRun, ...]]:
        return {
            places: tuple(
                LayerRun(*write, tuple(sorted(layers, key=lambda layer: layer.ordinal)), offsets)
                for (write, offsets), layers in writes.items()
            )
            for places, writes in self._writes.items()
        }


_Write = tuple[int, int, int, int, int]
_Offsets = tuple[tuple[int, int], ...]
