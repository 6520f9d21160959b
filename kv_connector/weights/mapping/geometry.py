"""Geometry: what a model's loader does with a checkpoint, as data.

It names which part of which tensor goes where. Nothing here needs torch. Extents, offsets and strides count
elements.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Dtype = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
Index = tuple[Natural, ...]


# Bytes of an element, by torch's name of its dtype.
_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def item_bytes(dtype: str) -> int:
    """Returns the bytes of an element. Raises ValueError for a dtype that weights cannot have."""
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise ValueError(f"weights of dtype {dtype} cannot be sent") from None


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole tensor of a checkpoint, with its name in the checkpoint."""

    name: Name
    dtype: Dtype  # as torch prints it, without "torch."
    shape: Index


class Parameter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A parameter to which a loader writes, in the form before a rank processes it for its kernels."""

    name: Name
    dtype: Dtype
    elements: Natural  # from the first to the last element in memory
    round: Natural = 0  # the round in which it lands; a round is taken as a whole

    @property
    def nbytes(self) -> int:
        return self.elements * item_bytes(self.dtype)


class Write(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box of a tensor that a loader copies into a parameter.

    Element ``start + i`` of the tensor goes to ``offset + sum(i * strides)`` of the parameter, for all ``i``
    below ``extent``. The indices have one number for each dimension of the tensor. The value is converted to
    the parameter's dtype.
    """

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
    """A value that the loader itself writes into a parameter: padding."""

    parameter: Natural
    extent: Index
    offset: Natural
    strides: Index
    value: float


class Geometry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that one rank's loader does with a checkpoint.

    ``tensor`` numbers count in the checkpoint for which it was recorded. Each element of a parameter is in
    one write or constant at most, so their order does not matter.
    """

    parameters: tuple[Parameter, ...]
    writes: tuple[Write, ...]
    constants: tuple[Constant, ...]
    kept: tuple[Name, ...] = ()
    """Names of the model's other parameters. No tensor fills them, and they keep their values."""
    unset: tuple[Name, ...] = ()
    """Names of those parameters in ``kept`` that still have the random values from the engine's start."""

    @property
    def rounds(self) -> int:
        return 1 + max((parameter.round for parameter in self.parameters), default=0)

    def digest(self) -> bytes:
        return digest(self)

    def in_one_round(self) -> Geometry:
        return self._renumbered({parameter.round: 0 for parameter in self.parameters})

    def in_few_rounds(self) -> Geometry:
        """Joins neighbouring rounds as long as they have no more bytes than the largest single round."""
        sizes: dict[int, int] = {}
        for parameter in sorted(self.parameters, key=lambda parameter: parameter.round):
            sizes[parameter.round] = sizes.get(parameter.round, 0) + parameter.nbytes
        numbers: dict[int, int] = {}
        number = taken = 0
        for round, nbytes in sizes.items():
            if taken and taken + nbytes > max(sizes.values()):
                number, taken = number + 1, 0
            numbers[round] = number
            taken += nbytes
        return self._renumbered(numbers)

    def _renumbered(self, numbers: Mapping[int, int]) -> Geometry:
        parameters = tuple(
            msgspec.structs.replace(parameter, round=numbers[parameter.round])
            for parameter in self.parameters
        )
        return msgspec.structs.replace(self, parameters=parameters)


def is_float8(dtype: str) -> bool:
    """Returns whether values of this dtype need scales, so that a plain conversion is not enough."""
    return dtype.startswith("float8")


def to_be_quantised(tensors: Sequence[Tensor], geometry: Geometry) -> frozenset[int]:
    """Returns the numbers of the tensors of another dtype that are loaded into float8 parameters."""
    return frozenset(
        write.tensor
        for write in geometry.writes
        if is_float8(geometry.parameters[write.parameter].dtype)
        and not is_float8(tensors[write.tensor].dtype)
    )


def digest(value: object) -> bytes:
    """Returns a digest of a value that msgspec encodes. Equal values have equal digests."""
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=16).digest()
