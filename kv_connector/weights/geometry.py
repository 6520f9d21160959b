"""What a model's loader does with a checkpoint, as data: which part of which tensor goes where.

Nothing here needs torch. Extents, offsets and strides count elements.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Dtype = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
Index = tuple[Natural, ...]


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One of a checkpoint, whole, by its name there."""

    name: Name
    dtype: Dtype  # as torch prints it, without "torch."
    shape: Index


class Parameter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a loader writes: what a rank holds before it processes its weights for its kernels."""

    name: Name
    dtype: Dtype
    elements: Natural  # that lie between its first byte and its last


class Write(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box of a tensor that goes into a parameter: element ``start + i`` of the tensor to
    ``offset + sum(i * strides)`` of the parameter, for all ``i`` below ``extent``. One number a dimension of
    the tensor. The value is converted to the parameter's dtype."""

    tensor: Natural
    parameter: Natural
    start: Index
    extent: Index
    offset: Natural
    strides: Index

    @property
    def elements(self) -> int:
        return math.prod(self.extent)


class Constant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a loader writes of its own: padding."""

    parameter: Natural
    extent: Index
    offset: Natural
    strides: Index
    value: float


class Geometry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a rank's loader does. ``tensor`` counts in the checkpoint that it was recorded for. No element
    of a parameter is in two of the writes and constants, so their order does not matter."""

    parameters: tuple[Parameter, ...]
    writes: tuple[Write, ...]
    constants: tuple[Constant, ...]

    def digest(self) -> bytes:
        return digest(self)


def digest(value: object) -> bytes:
    """Of anything that msgspec encodes: equal where the values are."""
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=16).digest()
