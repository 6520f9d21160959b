"""Which source page goes to which destination page, and how many pages each counter must see.

Pure functions of the two sides' layouts. Problems come back as text that says what does not fit (None: it
fits), because they travel to the other side in a HELLO_NAK or a FAIL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kv_connector.protocol.layout import GroupLayout, GroupTarget, KvLayout, LayerLayout


def layout_problem(layout: KvLayout, regions: int) -> str | None:
    """Whether the layout is consistent and names only ``regions`` memory regions.

    It may come from a peer: nothing in it is believed. That its pages lie inside of the regions is checked
    by the engine, with each write.
    """
    if not layout.layers or not layout.groups:
        return "the KV layout has no layers or no groups"
    for index, group in enumerate(layout.groups):
        if group.num_blocks < 1 or group.block_size < 0:
            return f"KV group {index} has {group.num_blocks} blocks of {group.block_size} tokens"
    if len({layer.name for layer in layout.layers}) < len(layout.layers):
        return "two layers of the KV layout have one name"
    for layer in layout.layers:
        if not 0 <= layer.group < len(layout.groups):
            return f"layer {layer.name} names group {layer.group} of {len(layout.groups)}"
        if not 0 <= layer.region < regions:
            return f"layer {layer.name} names memory region {layer.region} of {regions}"
        if layer.offset < 0:
            return f"layer {layer.name} begins at {layer.offset} bytes"
        if layer.page_bytes < 1 or layer.block_stride < layer.page_bytes:
            sizes = f"{layer.page_bytes} bytes every {layer.block_stride} bytes"
            return f"layer {layer.name} has pages of {sizes}"
    return None


def memory_problem(layout: KvLayout, region_bytes: Sequence[int]) -> str | None:
    """Whether all pages of our own layout lie inside regions of these lengths."""
    problem = layout_problem(layout, len(region_bytes))
    if problem is not None:
        return problem
    for region, need in sorted(layout.bytes_per_region().items()):
        if need > region_bytes[region]:
            return f"memory region {region} has {region_bytes[region]} bytes, its layers need {need}"
    return None


def layouts_problem(prefill: KvLayout, decode: KvLayout) -> str | None:
    """Whether pages of ``prefill`` can be copied into pages of ``decode`` one to one.

    Where the pages lie (regions, offsets, strides, number of blocks) may differ; what they are may not. A
    layer that prefill lacks may come from somewhere else.
    """
    if (ours := _groups(prefill)) != (theirs := _groups(decode)):
        return f"KV groups: prefill has {ours}, decode has {theirs}"
    targets = {layer.name: layer for layer in decode.layers}
    for source in prefill.layers:
        target = targets.get(source.name)
        if target is None:
            return f"layers: prefill has {source.name}, which decode lacks"
        for field in ("group", "page_bytes"):
            a, b = getattr(source, field), getattr(target, field)
            if a != b:
                return f"{field} of layer {source.name}: prefill has {a}, decode has {b}"
    return None


def sources_problem(layout: KvLayout, sources: Sequence[Sequence[int]]) -> str | None:
    """Whether each layer of D's ``layout`` comes from one source; each has the layers of these ordinals."""
    times = Counter(ordinal for layers in sources for ordinal in layers)
    for ordinal, layer in enumerate(layout.layers):
        if times[ordinal] != 1:
            return f"{times[ordinal]} of {len(sources)} prefill engines have layer {layer.name}, not one"
    return None


def _groups(layout: KvLayout) -> str:
    return ", ".join(
        f"{group.kind} of {group.block_size} tokens a block" if group.block_size else f"rows of {group.kind}"
        for group in layout.groups
    )


def targets_problem(layout: KvLayout, groups: Sequence[GroupTarget], prompt_tokens: int) -> str | None:
    """Whether D's targets fit D's own ``layout`` and the prompt."""
    if len(groups) != len(layout.groups):
        return f"the reservation has {len(groups)} KV groups, the layout {len(layout.groups)}"
    for index, (target, group) in enumerate(zip(groups, layout.groups, strict=True)):
        highest = max(target.blocks, default=0)
        if highest >= group.num_blocks:
            return f"group {index} asks for block {highest} of {group.num_blocks}"
        if group.block_size == 0:
            continue
        filled = -(-prompt_tokens // group.block_size)
        if any(target.blocks[max(filled - target.first, 0) :]):
            return f"group {index} asks for blocks behind the {filled} that {prompt_tokens} tokens fill"
    return None


def used_blocks(group: GroupLayout, first: int, blocks: Sequence[int]) -> dict[int, int]:
    """Logical block -> block, of those that hold something; ``blocks`` begin at logical block ``first``."""
    return {logical: block for logical, block in enumerate(blocks, first) if block != group.null_block}


def expected_pages(layout: KvLayout, groups: Sequence[GroupTarget]) -> int:
    """Pages that will land: in each layer, the blocks of its group that hold something."""
    wanted = [
        len(used_blocks(group, target.first, target.blocks))
        for group, target in zip(layout.groups, groups, strict=True)
    ]
    return sum(wanted[layer.group] for layer in layout.layers)


@dataclass(frozen=True)
class PushLayer:
    """One layer of a LayerRun: its ordinal, and the offset of its block 0 in the source and the target
    region."""

    ordinal: int
    source_offset: int
    target_offset: int


@dataclass(frozen=True)
class LayerRun:
    """Layers that one armed write can carry: same group, same pair of regions, same geometry on each side."""

    source_region: int
    target_region: int
    page_bytes: int
    source_stride: int
    target_stride: int
    layers: tuple[PushLayer, ...]


class PushPlan:
    """How each group's pages go from one layout to another. Built once per peer."""

    def __init__(self, source: KvLayout, target: KvLayout) -> None:
        """The layouts must fit each other (``layouts_problem``)."""
        runs: list[dict[_Geometry, list[PushLayer]]] = [{} for _ in source.groups]
        ordinals = {layer.name: ordinal for ordinal, layer in enumerate(target.layers)}
        self.layers = tuple(ordinals[layer.name] for layer in source.layers)
        """The target's ordinal of each of the source's layers."""
        for ordinal, ours in enumerate(source.layers):
            theirs = target.layers[self.layers[ordinal]]
            layer = PushLayer(ordinal, ours.offset, theirs.offset)
            runs[ours.group].setdefault(_geometry(ours, theirs), []).append(layer)
        self._runs = tuple(
            tuple(LayerRun(*geometry, tuple(layers)) for geometry, layers in group.items()) for group in runs
        )

    def runs(self, group: int) -> tuple[LayerRun, ...]:
        """The armed writes that one batch of the group's pages takes; usually one."""
        return self._runs[group]


_Geometry = tuple[int, int, int, int, int]


def _geometry(source: LayerLayout, target: LayerLayout) -> _Geometry:
    return (source.region, target.region, source.page_bytes, source.block_stride, target.block_stride)
