"""The parts of the usual caches: what a framework's adapter describes its memory with.

N: tokens of a block. H: the units (KV heads, mostly) that this rank has. C: bytes of one token of one unit,
K and V together. All strides in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import msgspec

from kv_connector.protocol.layout import Axis, Part, Shard


@dataclass(frozen=True)
class Units:
    """What of the model's units a rank has. Ranks with equal units are replicas."""

    first: int
    count: int
    total: int


@dataclass(frozen=True)
class Place:
    """Where the pages of a layer begin, and how far apart they are."""

    region: int
    offset: int
    block_stride: int

    def part(self, name: str, axes: Sequence[Axis], run_bytes: int, units: Units | None = None) -> Part:
        shard = None if units is None else Shard(units.first, units.total)
        return Part(name, self.region, self.offset, self.block_stride, tuple(axes), run_bytes, shard)

    def after(self, nbytes: int) -> Place:
        return replace(self, offset=self.offset + nbytes)


def units_of_rank(total: int, rank: int, ranks: int) -> Units:
    """As tensor parallelism divides them; where the ranks are more than the units, neighbours share one."""
    return Units(rank * total // ranks, max(1, total // ranks), total)


def opaque_page(place: Place, page_bytes: int, holder: tuple[int, int] | None = None) -> tuple[Part, ...]:
    """A page of which nothing is known but its length: it can be copied as a whole only.

    ``holder`` (rank, ranks): each rank's page is another, and only as many ranks can have the same. None: all
    ranks hold the same.
    """
    units = None if holder is None else Units(holder[0], 1, holder[1])
    axes = [] if units is None else [Axis("shard", 1, page_bytes)]
    return (place.part("page", axes, page_bytes, units),)


def head_major(
    place: Place, units: Units, tokens: int, content: int, head_stride: int | None = None
) -> tuple[Part, ...]:
    """[H, N, C], vLLM's LBHNC and BLHNC.

    ``head_stride``: where a block's heads do not adjoin, as in LHBNC (blocks * N * C) and BHLNC.
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
    """[H, 2, N * D], vLLM on CPUs without AMX: of each head a plane of K, [D, N], and one of V, [N, D].

    With blocks of another size a token of K is D runs of one element.
    """
    plane = tokens * head_size * element
    heads = Axis("shard", units.count, 2 * plane)
    rows = Axis("row", head_size, tokens * element)
    k = place.part("k", [heads, rows, Axis("token", tokens, element)], element, units)
    v_axes = [heads, Axis("token", tokens, head_size * element)]
    return k, place.after(plane).part("v", v_axes, head_size * element, units)


def in_kernel_blocks(parts: Sequence[Part], blocks: int, stride: int) -> tuple[Part, ...]:
    """A block that a kernel sees as several: ``parts`` describe the first of them."""
    outer = Axis("token", blocks, stride)
    return tuple(msgspec.structs.replace(part, axes=(outer, *part.axes)) for part in parts)


class Piece(NamedTuple):
    """One of the things that a convolution runs over: x, B and C of Mamba2; Q, K and V of a delta net."""

    name: str
    dims: int  # of a unit, or all of them where they are not sharded
    units: Units | None  # None: every rank has all


def convolution_state(
    place: Place, pieces: Sequence[Piece], rows: int, element: int, dims_first: bool
) -> tuple[Part, ...]:
    """The last ``rows`` inputs of a convolution over the pieces side by side.

    ``dims_first``: [dims, rows], vLLM's DS: a piece is one run. Else [rows, dims], SD: one a row. The two are
    not copied into each other (each element would be a run): their layers' ``format`` should say which.
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
