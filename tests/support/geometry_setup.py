"""Engines with random geometries and separate memory, in which each byte is a cell of a numpy array.

The place of a cell in the model (layer, part, unit, token, cell) decides its content. The layout does not.
``GeometryRank.cells`` finds cells by reshaping the memory, as a framework does, without the axes under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

from kv_connector.protocol.pages.geometry import (
    Piece,
    Place,
    convolution_state,
    head_major,
    in_kernel_blocks,
    latent,
    opaque_page,
    recurrent_state,
    token_major,
    units_of_rank,
    vector_planes,
)
from kv_connector.protocol.pages.layout import GroupLayout, KvLayout, LayerLayout, Part

Cells = npt.NDArray[np.int64]
ORDERS = ("LBHNC", "BLHNC", "LBNHC", "BLNHC", "LHBNC", "BHLNC", "kernel blocks")
CONTENT = 2  # cells per token and head
HEAD = 3  # cells per head of K, and per head of V
DIMS, ROWS, STATE = 2, 3, (2, 3)  # sizes of a recurrent state
PER_STATE = 2  # tokens that share one state of a compressed cache
RING = 5  # cells of a ring, whatever the prompt's length
STATE_HEADS = 12  # at least as many as units of anything else
ROW_FAMILIES = ("state", "ring")  # a block is a row, without tokens
PARTS = ("kv", "latent", "page", "k", "v", "conv.x", "conv.B", "state")


@dataclass(frozen=True)
class ModelGroup:
    family: str  # attention, planes, latent, compressed, page, state, ring
    heads: int
    kind: str


@dataclass(frozen=True)
class GeometryModel:
    groups: tuple[ModelGroup, ...]
    layers: tuple[int, ...]  # group of each layer


@dataclass(frozen=True)
class GeometrySide:
    """The division of the model and the placement of its pages on one engine."""

    ranks: int
    stages: tuple[range, ...]  # layers of each stage
    groups: tuple[int, ...]  # the model's groups, in this side's order
    block_size: dict[int, int]  # by the model's group, as the next field
    order: dict[int, str]
    num_blocks: int


@dataclass
class GeometryRank:
    layout: KvLayout
    memory: list[Cells]
    # Cells [block, unit, token, cell] by layer and part, as indexes into the region's memory.
    cells: dict[tuple[str, str], Cells] = field(default_factory=dict)


def make_rank(model: GeometryModel, side: GeometrySide, stage: int, index: int) -> GeometryRank:
    groups = tuple(
        GroupLayout(
            side.num_blocks,
            0 if model.groups[g].family in ROW_FAMILIES else side.block_size[g],
            model.groups[g].kind,
        )
        for g in side.groups
    )
    rank = GeometryRank(KvLayout(groups, ()), [])
    layers: dict[int, LayerLayout] = {}
    for number, g in enumerate(side.groups):
        mine = [layer for layer in side.stages[stage] if model.layers[layer] == g]
        if not mine:
            continue
        parts, cells, size = _group(model.groups[g], side, g, len(rank.memory), index, len(mine))
        rank.memory.append(np.full(size, -1, np.int64))
        for layer, its_parts, its_cells in zip(mine, parts, cells, strict=True):
            name = f"layers.{layer}"
            layers[layer] = LayerLayout(name, number, model.groups[g].family, its_parts)
            for part, where in zip(its_parts, its_cells, strict=True):
                rank.cells[name, part.name] = where
    rank.layout = KvLayout(groups, tuple(layers[layer] for layer in sorted(layers)))
    return rank


def _group(
    group: ModelGroup, side: GeometrySide, g: int, region: int, index: int, layers: int
) -> tuple[list[tuple[Part, ...]], list[list[Cells]], int]:
    """Returns the parts of each layer with their cells, and the size of the group's memory."""
    blocks, tokens, order = side.num_blocks, side.block_size[g], side.order[g]
    if group.family == "attention":
        return _attention(group, blocks, tokens, order, region, index, side.ranks, layers)
    units = units_of_rank(group.heads, index, side.ranks)
    if group.family == "state":
        parts, page_cells, page = _state_page(order, index, side.ranks, region)
        page += 5  # padding
    elif group.family == "ring":
        page = RING
        parts = opaque_page(Place(region, 0, 0), page)
        page_cells = [np.arange(page).reshape(1, 1, page)]
    elif group.family == "planes":
        plane = tokens * HEAD
        page = units.count * 2 * plane
        parts = vector_planes(Place(region, 0, 0), units, tokens, HEAD, 1)
        planes = np.arange(page).reshape(units.count, 2, plane)
        k = planes[:, 0].reshape(units.count, HEAD, tokens).transpose(0, 2, 1)
        page_cells = [k, planes[:, 1].reshape(units.count, tokens, HEAD)]
    else:
        page = tokens * CONTENT
        place = Place(region, 0, 0)
        if group.family == "latent":
            parts = latent(place, tokens, CONTENT)
        elif group.family == "compressed":
            parts = latent(place, tokens // PER_STATE, CONTENT * PER_STATE)
        else:
            parts = opaque_page(place, page, (index, side.ranks))
        page_cells = [np.arange(page).reshape(1, tokens, CONTENT)]
    starts = np.arange(blocks).reshape(blocks, 1, 1, 1) * page
    placed = [
        tuple(_placed(part, layer * blocks * page + part.offset, page) for part in parts)
        for layer in range(layers)
    ]
    cells = [[starts + layer * blocks * page + c for c in page_cells] for layer in range(layers)]
    return placed, cells, layers * blocks * page


def _attention(
    group: ModelGroup,
    blocks: int,
    tokens: int,
    order: str,
    region: int,
    index: int,
    ranks: int,
    layers: int,
) -> tuple[list[tuple[Part, ...]], list[list[Cells]], int]:
    units = units_of_rank(group.heads, index, ranks)
    sizes = {"L": layers, "B": blocks, "H": units.count, "N": tokens, "C": CONTENT}
    size = layers * blocks * units.count * tokens * CONTENT
    if order == "kernel blocks":
        half = tokens // 2
        split = np.arange(size).reshape(layers, blocks, 2, units.count, half, CONTENT)
        cells = split.transpose(0, 1, 3, 2, 4, 5).reshape(layers, blocks, units.count, tokens, CONTENT)
    else:
        found = np.arange(size).reshape([sizes[axis] for axis in order])
        cells = found.transpose([order.index(axis) for axis in "LBHNC"])
    token, head = CONTENT, tokens * CONTENT
    page = units.count * head
    parts = []
    for layer in range(layers):
        match order:
            case "LBHNC":
                part = head_major(Place(region, layer * blocks * page, page), units, tokens, token)
            case "BLHNC":
                part = head_major(Place(region, layer * page, layers * page), units, tokens, token)
            case "LBNHC":
                part = token_major(Place(region, layer * blocks * page, page), units, tokens, token)
            case "BLNHC":
                part = token_major(Place(region, layer * page, layers * page), units, tokens, token)
            case "LHBNC":
                place = Place(region, layer * blocks * page, head)
                part = head_major(place, units, tokens, token, head_stride=blocks * head)
            case "BHLNC":
                place = Place(region, layer * head, layers * page)
                part = head_major(place, units, tokens, token, head_stride=layers * head)
            case _:
                place = Place(region, layer * blocks * page, page)
                part = in_kernel_blocks(head_major(place, units, half, token), 2, page // 2)
        parts.append(part)
    return parts, [[cells[layer]] for layer in range(layers)], size


def _state_page(order: str, index: int, ranks: int, region: int) -> tuple[tuple[Part, ...], list[Cells], int]:
    """Lays out a convolution over x (by heads) and B (the same on all ranks), and a recurrent state by
    heads."""
    heads = units_of_rank(STATE_HEADS, index, ranks)
    n = heads.count
    dims = n * DIMS + DIMS
    place = Place(region, 0, 0)
    pieces = [Piece("x", DIMS, heads), Piece("B", DIMS, None)]
    conv = convolution_state(place, pieces, ROWS, 1, dims_first=order == "DS")
    state = recurrent_state(place.after(dims * ROWS), heads, STATE, 1)
    found = np.arange(dims * ROWS)
    rows = found.reshape(dims, ROWS).T if order == "DS" else found.reshape(ROWS, dims)
    x = rows[:, : n * DIMS].reshape(ROWS, n, DIMS).transpose(1, 0, 2).reshape(n, 1, ROWS * DIMS)
    b = rows[:, n * DIMS :].reshape(1, 1, ROWS * DIMS)
    each = STATE[0] * STATE[1]
    ssm = np.arange(dims * ROWS, dims * ROWS + n * each).reshape(n, 1, each)
    return conv + state, [x, b, ssm], dims * ROWS + n * each


def _placed(part: Part, offset: int, block_stride: int) -> Part:
    return Part(part.name, part.region, offset, block_stride, part.axes, part.run_bytes, part.shard)


# --- Random models and sides


def random_model(random: Random) -> GeometryModel:
    families = ["attention", "planes", "latent", "compressed", "page", "state", "ring"]
    groups = [
        ModelGroup(
            random.choices(families, (4, 2, 2, 2, 1, 2, 1))[0], random.choice((1, 2, 4, 6)), f"kind {g}"
        )
        for g in range(random.randint(1, 3))
    ]
    count = random.randint(len(groups), 4)
    layers = [*range(len(groups)), *(random.randrange(len(groups)) for _ in range(count - len(groups)))]
    random.shuffle(layers)
    return GeometryModel(tuple(groups), tuple(layers))


def random_side(random: Random, model: GeometryModel, like: GeometrySide | None = None) -> GeometrySide:
    """Draws a side. ``like``: the other side, whose values are used where both must be equal."""
    sharded = [group.heads for group in model.groups if group.family in ("attention", "planes")]
    fits = [t for t in (1, 2, 3, 4, 6) if all(heads % t == 0 or t % heads == 0 for heads in sharded)]
    opaque = any(group.family == "page" for group in model.groups)
    ranks = like.ranks if like is not None and opaque else random.choice(fits)
    cuts = sorted(
        random.sample(range(1, len(model.layers)), min(random.choice((0, 0, 1)), len(model.layers) - 1))
    )
    stages = tuple(range(a, b) for a, b in zip([0, *cuts], [*cuts, len(model.layers)], strict=True))
    sizes, orders = {}, {}
    for g, group in enumerate(model.groups):
        sizes[g] = random.choice((2, 4, 8, 4, 6))
        orders[g] = random.choice(
            ORDERS if sizes[g] != 6 else ORDERS[:-1]
        )  # a granule must lie in one kernel block
        if group.family == "state":
            orders[g] = random.choice(("DS", "SD"))
        if like is not None and group.family in ("page", *ROW_FAMILIES):
            sizes[g], orders[g] = like.block_size[g], like.order[g]
    groups = random.sample(range(len(model.groups)), len(model.groups))
    return GeometrySide(ranks, stages, tuple(groups), sizes, orders, random.randint(14, 20))


def content(layer: str, part: str, cells: int, tokens: int) -> Cells:
    """Returns the model's content of a layer's part, [unit, token, cell], the same on every rank. No two
    parts are alike."""
    number = 8 * int(layer.rpartition(".")[2]) + PARTS.index(part)
    return number * 1_000_000 + np.arange(STATE_HEADS * tokens * cells).reshape(STATE_HEADS, tokens, cells)
