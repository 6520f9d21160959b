"""Coverage: whether an engine loads all that is sent, and is sent all that it loads.

If no worker loads a part of a tensor, or no tensor fills a parameter, the model is neither the trainer's nor
the checkpoint's. A trainer names the tensors and parameters that are left out on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np

from kv_connector.weights.mapping.geometry import Geometry, Index, Tensor

_NAMED = 3  # names that an error lists: an error is for reading

_Boxes = frozenset[tuple[Index, Index]]
"""Parts of a tensor, each as its start and its extent."""


def is_named(name: str, partial: Sequence[str]) -> bool:
    """Returns whether a name is in ``partial``, which lists names or shell patterns."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in partial)


def not_loaded(tensors: Sequence[Tensor], workers: Sequence[Geometry]) -> Iterator[tuple[Tensor, int]]:
    """Yields the tensors that these workers together load only in part, with the number of loaded elements.

    Writes must lie within their tensors.
    """
    boxes: list[set[tuple[Index, Index]]] = [set() for _ in tensors]
    for geometry in workers:
        for write in geometry.writes:
            boxes[write.tensor].add((write.start, write.extent))
    known: dict[tuple[Index, _Boxes], int] = {}  # equal layers have equal boxes
    for tensor, parts in zip(tensors, boxes, strict=True):
        key = tensor.shape, frozenset(parts)
        if (loaded := known.get(key)) is None:
            loaded = known[key] = _elements(*key)
        if loaded < math.prod(tensor.shape):
            yield tensor, loaded


def _elements(shape: Index, boxes: _Boxes) -> int:
    """Returns the number of elements that lie in at least one of the boxes."""
    if any(extent == shape for _, extent in boxes):
        return math.prod(shape)
    edges = [
        {0, size, *(edge for start, extent in boxes for edge in (start[d], start[d] + extent[d]))}
        for d, size in enumerate(shape)
    ]
    cuts = [sorted(of_dimension) for of_dimension in edges]
    places = [{edge: number for number, edge in enumerate(cut)} for cut in cuts]
    cells = np.zeros([len(cut) - 1 for cut in cuts], dtype=bool)
    for start, extent in boxes:
        cells[
            tuple(slice(place[a], place[a + n]) for place, a, n in zip(places, start, extent, strict=True))
        ] = True
    found = cells.astype(np.int64)
    for cut in reversed(cuts):
        found = found @ np.diff(np.array(cut, dtype=np.int64))
    return int(found)


def left_out(
    engine: str,
    tensors: Sequence[Tensor],
    workers: Sequence[Geometry],
    partial: Sequence[str],
    *,
    keeps: bool = False,
) -> str:
    """Returns the reason why the engine of these workers must not take a version of these tensors, or "".

    ``keeps``: every parameter that has a value may keep it.
    """
    lost = [
        f"{tensor.name} {list(tensor.shape)} ({loaded:,} of {math.prod(tensor.shape):,} elements)"
        for tensor, loaded in not_loaded(tensors, workers)
        if not is_named(tensor.name, partial)
    ]
    if lost:
        return f"{engine} would not load all of {some_of(lost)}: push its own model's tensors. {_NAME_THEM}"
    unset = sorted({name for worker in workers for name in worker.unset})
    if unset:
        return (
            f"{engine} was started with dummy weights, and no tensor fills its {some_of(unset)}: push these "
            "parameters, too, or start the engine from its checkpoint"
        )
    kept = {name for worker in workers for name in worker.kept if not is_named(name, partial)}
    if kept and not keeps:
        return f"{engine} would keep the old {some_of(sorted(kept))}: push them, too. {_NAME_THEM}"
    return ""


_NAME_THEM = "If this is intended, name them in partial (--partial)"


def some_of(names: Sequence[str], most: int = _NAMED) -> str:
    """Returns the first ``most`` of these names, and how many there are beyond them."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
