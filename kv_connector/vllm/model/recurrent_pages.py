"""Pages of layers with a recurrent state: a page holds a whole state, not a block of tokens.

vLLM packs the states of a layer into the page one after the other: first the state of the convolution, if it
has one, and then the recurrent state. Only the layer knows how heads, groups or channels divide the states
among the ranks. The shapes for which vLLM has made room show whether that is all. The rest of a page is
padding, and belongs to no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from kv_connector.protocol.pages.geometry import (
    Piece,
    Place,
    Units,
    convolution_state,
    opaque_page,
    recurrent_state,
    units_of_rank,
)
from kv_connector.protocol.pages.layout import Part
from kv_connector.vllm.internals import is_conv_state_dim_first


@dataclass(frozen=True)
class _Division:
    """The part of the model's states that a rank has."""

    # Names, dims of a unit, and units, of all that a convolution runs over.
    pieces: tuple[tuple[str, int, Units], ...] = ()
    units: Units | None = None  # of the recurrent state

    @property
    def dims(self) -> int:
        return sum(dims * units.count for _, dims, units in self.pieces)


def state_pages(
    spec: Any, module: Any, place: Place, rank: tuple[int, int], device: str
) -> tuple[str, tuple[Part, ...]]:
    """Returns the format and the parts of a layer's pages. ``rank``: (rank, ranks) of tensor parallelism."""
    what = f"{spec.mamba_type.name} on {device}"
    types = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    try:
        division = _division(spec.mamba_type.name, module, rank)
    except AttributeError:  # another layer of the same name
        division = _Division()
    dims_first = is_conv_state_dim_first()
    rows = spec.shapes[0][1 if dims_first else 0]
    expected: list[tuple[int, ...]] = []
    if division.pieces:
        expected.append((division.dims, rows) if dims_first else (rows, division.dims))
    if division.units is not None:
        expected.append((division.units.count, *spec.shapes[-1][1:]))
    if spec.tp_replicated or list(spec.shapes) != expected:
        sizes = ", ".join(f"{shape} {dtype}" for shape, dtype in zip(spec.shapes, types, strict=True))
        ranks = "" if spec.tp_replicated else f", each rank of {rank[1]} its own"
        page = opaque_page(place, spec.state_content_size_bytes, None if spec.tp_replicated else rank)
        return f"{what}, whole pages of {sizes}{ranks}", page
    parts: tuple[Part, ...] = ()
    if division.pieces:
        pieces = [Piece(*piece) for piece in division.pieces]
        element = spec.dtypes[0].itemsize
        parts += convolution_state(place, pieces, rows, element, dims_first)
        place = place.after(prod(spec.shapes[0]) * element)
        what += f", a convolution of {rows} rows in {types[0]}, {'DS' if dims_first else 'SD'}"
    if division.units is not None:
        parts += recurrent_state(place, division.units, spec.shapes[-1][1:], spec.dtypes[-1].itemsize)
        what += f", a state in {types[-1]}"
    return what, parts


def _division(kind: str, module: Any, rank: tuple[int, int]) -> _Division:
    """Returns a rank's part of the states.

    Raises AttributeError for a layer that is not vLLM's own of that kind.
    """

    def units(total: int) -> Units:
        return units_of_rank(total, *rank)

    match kind:
        case "MAMBA1":
            channels = units(module.intermediate_size)
            return _Division((("x", 1, channels),), channels)
        case "MAMBA2":
            # Each rank has all of a single group. The mixer counts the group once for each rank; its norm
            # counts the model's groups.
            heads, groups, size = units(module.num_heads), units(module.norm.n_groups), module.ssm_state_size
            return _Division((("x", module.head_dim, heads), ("B", size, groups), ("C", size, groups)), heads)
        case "GDN_ATTN" if hasattr(module, "num_v_heads"):
            keys, values = units(module.num_k_heads), units(module.num_v_heads)
            q, k = (("q", module.head_k_dim, keys), ("k", module.head_k_dim, keys))
            return _Division((q, k, ("v", module.head_v_dim, values)), values)
        case "GDN_ATTN":  # Kimi's layers: all heads have the same number and size
            heads = units(module.num_heads)
            return _Division(tuple((name, module.head_dim, heads) for name in "qkv"), heads)
        case "LINEAR":
            return _Division(units=units(module.num_heads))
        case "SHORT_CONV":
            return _Division((("x", 1, units(module.conv_dim)),))
    return _Division()
