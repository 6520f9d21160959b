"""Describes SGLang's pages: from its KVArgs to a layout and memory ranges.

KV group 0 has the pages: MLA's latent, or K and V of each layer with each token of each head by itself. The
latter is [tokens, heads, dims], the only order that SGLang registers. Group 1 has the metadata rows. Each
further kind of state is a group of rows after them. Examples are the window of a sliding-window layer, a
Mamba state and an indexer's cache. SGLang pairs P's list of states and D's by position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kv_connector.agent.config import PageMemory
from kv_connector.protocol.pages.geometry import Place, Units, latent, opaque_page, token_major, units_of_rank
from kv_connector.protocol.pages.layout import Axis, GroupLayout, KvLayout, LayerLayout, Part
from kv_connector.sglang.refusals import REFUSED_STATES

PAGES, METADATA, STATES = 0, 1, 2
"""Numbers of the groups. STATES is the first group of states."""

# Kinds of state that are the same on all ranks.
_REPLICATED = {"dsa"}


class UnsupportedPool(ValueError):
    """The pool cannot be described. The message says what to change."""


@dataclass(frozen=True)
class PoolShape:
    """The facts that KVArgs lacks, or has on one side only."""

    mla: bool
    kv_heads: int
    """Heads of the model."""
    first_layer: int
    """First layer of this stage of the pipeline."""
    rank: int
    ranks: int
    """Number of ranks in attention's tensor parallelism."""
    page_size: int
    with_metadata: bool
    """Whether this worker's metadata row is transferred. Of P's stages, only the last one's is."""


class _Regions:
    """The memory ranges, each once."""

    def __init__(self) -> None:
        self.ranges: dict[int, PageMemory] = {}

    def add(self, address: int, nbytes: int) -> int:
        """Adds a range, and returns its number."""
        self.ranges.setdefault(address, PageMemory(address, nbytes))
        return list(self.ranges).index(address)


@dataclass(frozen=True)
class _Entry:
    """One of SGLang's buffers: consecutive pages or rows of ``item`` bytes."""

    address: int
    nbytes: int
    item: int

    @property
    def items(self) -> int:
        return self.nbytes // self.item


def pool_layout(
    args: Any, shape: PoolShape, row: tuple[int, int, tuple[int, ...]]
) -> tuple[KvLayout, tuple[PageMemory, ...]]:
    """The layout and memory of SGLang's pool. Raises UnsupportedPool.

    ``row``: address and length in bytes of the table of metadata rows, and the widths of a row's parts.
    """
    regions = _Regions()
    groups: list[GroupLayout] = []
    layers: list[LayerLayout] = []
    entries = _entries(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    pages = [entry for entry in entries if entry is not None]
    groups.append(GroupLayout(_least(pages), shape.page_size, "full"))
    layers += _page_layers(args, shape, entries, regions)
    address, nbytes, widths = row
    row_bytes = nbytes // (slots := _slots(args))
    groups.append(GroupLayout(slots, 0, "metadata"))
    if shape.with_metadata:
        place = Place(regions.add(address, nbytes), 0, row_bytes)
        words = f"rows of {', '.join(map(str, widths))} bytes"
        layers.append(LayerLayout("metadata", METADATA, words, opaque_page(place, row_bytes)))
    for number, kind in enumerate(args.state_types):
        name = str(getattr(kind, "value", kind))
        if name in REFUSED_STATES:
            raise UnsupportedPool(f"write_imm does not carry the state {name}: {REFUSED_STATES[name]}")
        states = _entries(
            args.state_data_ptrs[number], args.state_data_lens[number], args.state_item_lens[number]
        )
        groups.append(GroupLayout(_least([entry for entry in states if entry is not None]), 0, name))
        layers += _state_layers(args, shape, number, name, states, regions)
    return KvLayout(tuple(groups), tuple(layers)), tuple(regions.ranges.values())


def _entries(pointers: Sequence[int], lengths: Sequence[int], items: Sequence[int]) -> list[_Entry | None]:
    """SGLang's buffers. None: left out by SGLang, which then has nothing to send there."""
    return [
        _Entry(int(pointer), int(nbytes), int(item)) if pointer and nbytes and item else None
        for pointer, nbytes, item in zip(pointers, lengths, items, strict=True)
    ]


def _least(entries: Sequence[_Entry]) -> int:
    return min((entry.items for entry in entries), default=1)


def _slots(args: Any) -> int:
    return int(min(n // item for n, item in zip(args.aux_data_lens, args.aux_item_lens, strict=True)))


def _place(entry: _Entry, regions: _Regions) -> Place:
    return Place(regions.add(entry.address, entry.nbytes), 0, entry.item)


def _page_layers(
    args: Any, shape: PoolShape, entries: Sequence[_Entry | None], regions: _Regions
) -> list[LayerLayout]:
    """The model's layers, followed by its drafter's."""
    count = len(entries) - args.num_draft_entries
    of_model, of_drafter = entries[:count], entries[count:]
    planes = 1 if shape.mla else 2
    if len(of_model) % planes:
        raise UnsupportedPool(f"SGLang's pool has {len(of_model)} buffers: not the same number of K and V")
    layers = len(of_model) // planes
    ids = list(args.kv_layer_ids)[:layers] or [shape.first_layer + index for index in range(layers)]
    found = []
    for index, number in enumerate(ids):
        parts: tuple[Part, ...] = ()
        for name, entry in zip(("k", "v"), of_model[index::layers], strict=False):
            if entry is not None:
                parts += _page_parts(name, entry, shape, regions)
        if parts:
            found.append(LayerLayout(f"layer {number}", PAGES, str(args.kv_cache_dtype_str), parts))
    holder = (shape.rank, shape.ranks)
    for index, entry in enumerate(of_drafter):
        if entry is None:
            continue
        same = shape.mla and entry.item == next((other.item for other in of_model if other is not None), None)
        page = opaque_page(_place(entry, regions), entry.item, None if same else holder)
        words = f"{args.kv_cache_dtype_str}, whole pages"
        found.append(LayerLayout(f"draft {index}", PAGES, words, page, needed=False))
    return found


def _page_parts(name: str, entry: _Entry, shape: PoolShape, regions: _Regions) -> tuple[Part, ...]:
    place, tokens = _place(entry, regions), shape.page_size
    if shape.mla:
        return latent(place, tokens, entry.item // tokens)
    units = units_of_rank(shape.kv_heads, shape.rank, shape.ranks)
    content, rest = divmod(entry.item, tokens * units.count)
    if rest:
        raise UnsupportedPool(
            f"a page of {entry.item} bytes does not hold {tokens} tokens of {units.count} KV heads, "
            f"as the model has {shape.kv_heads} on {shape.ranks} ranks"
        )
    (part,) = token_major(place, units, tokens, content)
    return (msgspec.structs.replace(part, name=name),)


def _state_layers(
    args: Any,
    shape: PoolShape,
    number: int,
    kind: str,
    entries: Sequence[_Entry | None],
    regions: _Regions,
) -> list[LayerLayout]:
    ids = list(args.state_layer_ids[number]) or list(range(len(entries)))
    dims = list(args.state_dim_per_tensor[number]) or [None] * len(entries)
    counts = list(args.state_slice_outer_counts[number]) or [1] * len(entries)
    pieces = list(args.state_conv_shard_groups[number]) or [None] * len(entries)
    seen: dict[int, int] = {}
    found = []
    for index, entry in enumerate(entries):
        if entry is None:
            continue
        # Several tensors may belong to one layer.
        tensor = seen[ids[index]] = seen.get(ids[index], -1) + 1
        place = _place(entry, regions)
        words, parts = kind, _state_parts(args, shape, kind, place, entry)
        if kind == "mamba" and dims[index] is not None:
            parts = _divided_state(shape, place, entry, dims[index], counts[index], pieces[index])
            words += f", {counts[index]} rows, pieces {pieces[index]}"
        found.append(LayerLayout(f"{kind} {ids[index]}.{tensor}", STATES + number, words, parts))
    return found


def _state_parts(args: Any, shape: PoolShape, kind: str, place: Place, entry: _Entry) -> tuple[Part, ...]:
    """The parts of a state's row. It is a page of a window if SGLang describes that window's layout,
    otherwise it is opaque."""
    if kind == "swa" and not shape.mla and args.swa_kv_cache_layout == "nhd":
        units = units_of_rank(shape.kv_heads, shape.rank, shape.ranks)
        content, rest = divmod(entry.item, shape.page_size * units.count)
        if not rest:
            axes = [
                Axis("row", shape.page_size, units.count * content),
                Axis("shard", units.count, content),
            ]
            return (place.part("window", axes, content, units),)
    replicated = kind in _REPLICATED or (kind == "swa" and shape.mla)
    return opaque_page(place, entry.item, None if replicated else (shape.rank, shape.ranks))


def _divided_state(
    shape: PoolShape, place: Place, entry: _Entry, dim: int, rows: int, pieces: Sequence[int] | None
) -> tuple[Part, ...]:
    """The parts of a recurrent state, or of the inputs of a convolution, [rows, dims, ...]. The ranks divide
    the dims of each piece separately. 0 dims: all ranks have the same."""
    if dim == 0:
        return opaque_page(place, entry.item)
    width = entry.item // (rows * dim)
    whole = [dim * shape.ranks]
    parts: tuple[Part, ...] = ()
    for number, total in enumerate(pieces if pieces and sum(pieces) == sum(whole) else whole):
        units = Units(shape.rank * total // shape.ranks, total // shape.ranks, total)
        axes = [Axis("row", rows, dim * width), Axis("shard", units.count, width)]
        parts += (place.part(f"piece {number}", axes, width, units),)
        place = place.after(units.count * width)
    return parts
