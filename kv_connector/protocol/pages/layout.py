"""The place of each page of each layer in memory: one rank's own view, in bytes.

A page is what one layer keeps of one block of tokens on one rank. A page need not be contiguous: it has
parts (a K plane and a V plane; the pieces of a recurrent state). A part is a set of equally long runs of
contiguous bytes, spaced by axes. Run (i, j, ...) of a part lies at

    region base + offset + block * block_stride + i * axes[0].stride + j * axes[1].stride + ...

An axis counts shards of the model such as heads, tokens, or rows whose meaning does not matter here. The
axes determine which run of one rank corresponds to which run of another rank. Two sides may order and space
their runs differently, and each may have only some of the shards. ``geometry`` builds the parts of the usual
caches.

A request may also have a recurrent state, or a line in a table of the framework. These are pages too: rows
of a group without tokens.

These types travel in HELLO and RESERVE, so they are msgspec structs. A peer's layout is trusted only as far
as ``layout_problem`` has checked it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Annotated, Literal

import msgspec

MAX_BYTES = 1 << 48  # of a region: what a process can address
MAX_COUNT = 1 << 32  # of blocks, and of the runs along an axis: page lists have 32 bits
MAX_AXES = 6  # the deepest known layout has 4: kernel blocks, heads, rows, tokens
MAX_LAYER_PARTS = 8  # the most known are 4: three pieces of a convolution's state, and the recurrent state
MAX_PARTS = 4096  # of all layers: 512 hybrid layers. The worst layout of this size is checked in 0.4 s

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class GroupLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV cache group: layers that share one block table."""

    num_blocks: Index
    block_size: Index  # tokens a block; 0: a block is a row, without tokens
    # "full", "sliding_window", ...: the attention, which decides which blocks a request keeps. For rows, the
    # kind of their content.
    kind: Name

    @property
    def null_block(self) -> int | None:
        """The block without content: outside of a sliding window, or not needed. None for rows, which all
        have content."""
        return 0 if self.block_size > 0 else None


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``count`` places, ``stride`` bytes apart.

    The kind "shard" counts units of the model that some ranks have, such as KV heads. The kind "token" counts
    tokens of the block. The kind "row" counts anything else, which both sides have alike. Of several axes of
    one kind, the outer axes count the larger steps.
    """

    what: Literal["shard", "token", "row"]
    count: Count
    stride: Count


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The units of the model on the shard axis: ``count`` of ``total``, from ``first`` on."""

    first: Index
    total: Count


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs of one kind in each page of a layer."""

    name: Name  # the same on both sides
    region: Index  # index of the registered memory region (one per distinct storage)
    offset: Size  # bytes from the region's start to the first run of block 0
    block_stride: Size  # bytes from one block's page to the next block's
    axes: Annotated[tuple[Axis, ...], msgspec.Meta(max_length=MAX_AXES)]  # outer to inner
    run_bytes: Size  # contiguous, and never divided
    shard: Shard | None  # of the shard axis; None: the part has none, and every rank has the same content

    def axes_of(self, what: str) -> list[Axis]:
        return [axis for axis in self.axes if axis.what == what]

    @property
    def units(self) -> range:
        """The shards of this part. A part without a shard axis has the one shard that all ranks have."""
        if self.shard is None:
            return range(1)
        (axis,) = self.axes_of("shard")
        return range(self.shard.first, self.shard.first + axis.count)

    @property
    def places(self) -> int:
        """The number of pieces into which its runs divide the tokens of a block."""
        return prod(axis.count for axis in self.axes_of("token"))

    def end(self, num_blocks: int) -> int:
        """Bytes from the region's start to the end of the last run."""
        return self.offset + _extent(self.steps(num_blocks), self.run_bytes)

    def steps(self, num_blocks: int) -> list[tuple[int, int]]:
        """(stride, count) of all axes and of the blocks, the widest first, without axes of one place."""
        steps = [(axis.stride, axis.count) for axis in self.axes]
        return sorted((s for s in [*steps, (self.block_stride, num_blocks)] if s[1] > 1), reverse=True)


class LayerLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's pages on one rank."""

    name: Name
    group: Index  # index into KvLayout.groups
    # The meaning of a run's bytes: element type, quantization and its scales, order within a run. No copy can
    # change it, so it has to be equal on both sides. The places of the runs need not be.
    format: Annotated[str, msgspec.Meta(max_length=1024)]
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_LAYER_PARTS)]
    needed: bool = True  # False: a request can run without it, only slower, as with a drafter's layer

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, whichever parts they lie in."""
        return sum(part.run_bytes * prod(axis.count for axis in part.axes) for part in self.parts)


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All pages of one rank. A layer's index is its ordinal, which has a meaning on this rank only."""

    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(max_length=64)]
    layers: Annotated[tuple[LayerLayout, ...], msgspec.Meta(max_length=MAX_PARTS)]

    def bytes_per_region(self) -> dict[int, int]:
        """The minimum length of each region, in bytes, with every page inside."""
        need: dict[int, int] = {}
        for layer in self.layers:
            for part in layer.parts:
                end = part.end(self.groups[layer.group].num_blocks)
                need[part.region] = max(need.get(part.region, 0), end)
        return need


class GroupTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks in which D wants the pages of one KV group: logical block ``first + i`` goes to D's block
    ``blocks[i]``.

    D needs no page where ``blocks[i]`` is the group's null block, and no token before ``needed``.
    """

    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
    blocks: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)], ...], msgspec.Meta(max_length=1 << 20)
    ]
    needed: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)] = 0


def layout_problem(layout: KvLayout, regions: int) -> str | None:
    """The problem with a layout that must be consistent and name only ``regions`` memory regions, or None.

    The layout may come from a peer, so nothing in it is trusted. For any content the check takes little time
    and memory. The transfer engine checks with each write that pages lie inside the regions.
    """
    if not layout.layers or not layout.groups:
        return "the KV layout has no layers or no groups"
    for index, group in enumerate(layout.groups):
        if not 1 <= group.num_blocks <= MAX_COUNT or not 0 <= group.block_size <= MAX_COUNT:
            return f"KV group {index} has {group.num_blocks} blocks of {group.block_size} tokens"
    if len({layer.name for layer in layout.layers}) < len(layout.layers):
        return "two layers of the KV layout have one name"
    if (parts := sum(len(layer.parts) for layer in layout.layers)) > MAX_PARTS:
        return f"the layers of the KV layout have {parts} parts, at most {MAX_PARTS} are supported"
    for layer in layout.layers:
        if not 0 <= layer.group < len(layout.groups):
            return f"layer {layer.name} names group {layer.group} of {len(layout.groups)}"
        if not 1 <= len({part.name for part in layer.parts}) == len(layer.parts) <= MAX_LAYER_PARTS:
            return f"layer {layer.name} has {len(layer.parts)} parts, or two of one name"
        group = layout.groups[layer.group]
        for part in layer.parts:
            if (problem := _part_problem(part, group, regions)) is not None:
                return f"part {part.name} of layer {layer.name} {problem}"
        for number, part in enumerate(layer.parts):
            for other in layer.parts[:number]:
                if not _apart(part, other, group.num_blocks):
                    return f"parts {other.name} and {part.name} of layer {layer.name} may overlap"
    return None


def memory_problem(layout: KvLayout, region_bytes: Sequence[int]) -> str | None:
    """The problem if pages of this rank's own layout lie outside regions of these lengths, or None."""
    problem = layout_problem(layout, len(region_bytes))
    if problem is not None:
        return problem
    for region, need in sorted(layout.bytes_per_region().items()):
        if need > region_bytes[region]:
            return f"memory region {region} has {region_bytes[region]} bytes, its layers need {need}"
    return None


def _part_problem(part: Part, group: GroupLayout, regions: int) -> str | None:
    if not 0 <= part.region < regions:
        return f"names memory region {part.region} of {regions}"
    if part.offset < 0:
        return f"begins at {part.offset} bytes"
    if part.run_bytes < 1:
        return f"has runs of {part.run_bytes} bytes"
    if len(part.axes) > MAX_AXES:
        return f"has {len(part.axes)} axes, at most {MAX_AXES} are supported"
    for axis in part.axes:
        if not 1 <= axis.count <= MAX_COUNT or axis.stride < 1:
            return f"has {axis.count} {axis.what}s every {axis.stride} bytes"
    if len(part.axes_of("shard")) != (part.shard is not None):
        return "needs one shard axis together with its first shard, or neither"
    if part.shard is not None and not 0 <= part.units.start < part.units.stop <= part.shard.total:
        return f"has units {part.units.start} to {part.units.stop} of {part.shard.total}"
    if group.block_size % part.places or (group.block_size == 0 and part.axes_of("token")):
        return f"divides blocks of {group.block_size} tokens by {part.places}"
    if not _nested(part.steps(group.num_blocks), part.run_bytes):
        return f"spaces its runs of {part.run_bytes} bytes so that they overlap"
    if (end := part.end(group.num_blocks)) > MAX_BYTES:
        return f"ends at {end} bytes, at most {MAX_BYTES} are supported"
    return None


def _apart(one: Part, other: Part, num_blocks: int) -> bool:
    """Whether two parts surely share no byte.

    They share none if the bytes between the first and the last run of each do not overlap. The same test may
    also hold within each step of some wide axes that both parts have, such as the head of a page. Then the
    bytes must not reach the next step.
    """
    if one.region != other.region:
        return True
    steps, others = one.steps(num_blocks), other.steps(num_blocks)
    shared = [step for step in steps if step in others]
    for wide in range(len(shared) + 1):
        common = shared[:wide]
        starts = one.offset, other.offset
        ends = [
            part.offset + _extent([step for step in own if step not in common], part.run_bytes)
            for part, own in ((one, steps), (other, others))
        ]
        apart = ends[0] <= starts[1] or ends[1] <= starts[0]
        if apart and _nested(common, max(ends) - min(starts)):
            return True
    return False


def _nested(steps: Sequence[tuple[int, int]], extent: int) -> bool:
    """Whether pieces of this length and spacing do not overlap. The widest step comes first."""
    for stride, count in reversed(steps):
        if stride < extent:
            return False
        extent += (count - 1) * stride
    return True


def _extent(steps: Iterable[tuple[int, int]], nbytes: int) -> int:
    """Bytes from the first to the last byte of all runs."""
    return nbytes + sum((count - 1) * stride for stride, count in steps)
