"""The parts of the usual caches, with which an adapter describes a framework's memory.

N: tokens of a block. H: the units (mostly KV heads) that this rank has. C: bytes of one token of one unit, K
and V together. All strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import msgspec

from kv_connector.protocol.pages.layout import Axis, Part, Shard


@dataclass(frozen=True)
class Units:
    """The part of the model's units that a rank has. Ranks with equal units are replicas."""

    first: int
    count: int
    total: int


@dataclass(frozen=True)
class Place:
    """The place of a layer's pages: where they begin, and how far apart they are."""

    region: int
    offset: int
    block_stride: int

    def part(self, name: str, axes: Sequence[Axis], run_bytes: int, units: Units | None = None) -> Part:
        shard = None if units is None else Shard(units.first, units.total)
        return Part(name, self.region, self.offset, self.block_stride, tuple(axes), run_bytes, shard)

    def after(self, nbytes: int) -> Place:
        return replace(self, offset=self.offset + nbytes)


def units_of_rank(total: int, rank: int, ranks: int) -> Units:
    """The units of a rank under tensor parallelism. If there are more ranks than units, neighbours share a
    unit."""
    return Units(rank * total // ranks, max(1, total // ranks), total)


def opaque_page(place: Place, page_bytes: int, holder: tuple[int, int] | None = None) -> tuple[Part, ...]:
    """A page of which only the length is known. It can only be copied as a whole.

    ``holder`` (rank, ranks): each rank has a different page, and the other side must have as many ranks.
    None: all ranks have the same page.
    """
    units = None if holder is None else Units(holder[0], 1, holder[1])
    axes = [] if units is None else [Axis("shard", 1, page_bytes)]
    return (place.part("page", axes, page_bytes, units),)


def head_major(
    place: Place, units: Units, tokens: int, content: int, head_stride: int | None = None
) -> tuple[Part, ...]:
    """[H, N, C], vLLM's LBHNC and BLHNC.

    ``head_stride``: needed if a block's heads do not adjoin, as in LHBNC (blocks * N * C) and BHLNC.
    """
    stride = tokens * content if head_stride is None else head_stride
    axes = [Axis("shard", units.count, stride), Axis("token", tokens, content)]
    return (place.part("kv", axes, content, units),)


def token_major(place: Place, units: Units, tokens: int, content: int) -> tuple[Part, ...]:
    """[N, H, C], vLLM's LBNHC and BLNHC: a slice of the heads is a run for each token."""
    axes = [Axis("token", tokens, units.count * content), Axis("shard", units.count, content)]
    return (place.part("kv", axes, content, units),)


def latent(place: Place, tokens: int, content: int) -> tuple[Part, ...]:
    """[N, C], the same on all ranks: MLA, and the cache of a sparse attention's indexer."""
    return (place.part("latent", [Axis("token", tokens, content)], content),)


def vector_planes(place: Place, units: Units, tokens: int, head_size: int, element: int) -> tuple[Part, ...]:
    """[H, 2, N * D], vLLM on CPUs without AMX: for each head a plane of K, [D, N], and a plane of V, [N, D].

    If the other side has another block size, a token of K is D runs of one element.
    """
    plane = tokens * head_size * element
    heads = Axis("shard", units.count, 2 * plane)
    rows = Axis("row", head_size, tokens * element)
    k = place.part("k", [heads, rows, Axis("token", tokens, element)], element, units)
    v_axes = [heads, Axis("token", tokens, head_size * element)]
    return k, place.after(plane).part("v", v_axes, head_size * element, units)


def in_kernel_blocks(parts: Sequence[Part], blocks: int, stride: int) -> tuple[Part, ...]:
    """A block that a kernel divides into several. ``parts`` describe the first of them."""
    outer = Axis("token", blocks, stride)
    return tuple(msgspec.structs.replace(part, axes=(outer, *part.axes)) for part in parts)


class Piece(NamedTuple):
    """One input of a convolution: x, B and C of Mamba2; Q, K and V of a delta net."""

    name: str
    dims: int  # of one unit; if they are not sharded, all dims
    units: Units | None  # None: every rank has all of them


def convolution_state(
    place: Place, pieces: Sequence[Piece], rows: int, element: int, dims_first: bool
) -> tuple[Part, ...]:
    """The last ``rows`` inputs of a convolution over the adjoining pieces.

    ``dims_first``: [dims, rows], vLLM's DS: a piece is one run. Otherwise [rows, dims], SD: a piece is one
    run per row. The two are not converted into each other, because each element would be a run. Their layers'
    ``format`` should differ.
    """
    counts = [1 if piece.units is None else piece.units.count for piece in pieces]
    all_dims = sum(piece.dims * count for piece, count in zip(pieces, counts, strict=True))
    parts: list[Part] = []
    for piece, count in zip(pieces, counts, strict=True):
        run = piece.dims * element * (rows if dims_first else 1)
        axes = [] if dims_first else [Axis("row", rows, all_dims * element)]
        if piece.units is not None:
            axes.append(Axis("shard", count, run))
        parts.append(place.part(f"conv.{piece.name}", axes, run, piece.units))
        place = place.after(run * count)
    return tuple(parts)


def recurrent_state(place: Place, units: Units, shape: Sequence[int], element: int) -> tuple[Part, ...]:
    """[units, *shape]: the state of an SSM or of linear attention, by heads."""
    nbytes = prod(shape) * element
    return (place.part("state", [Axis("shard", units.count, nbytes)], nbytes, units),)
