"""Recorder: finds out what a model's loader does with a checkpoint, by having it load tensors without data.

A view of a tensor knows its offset and its strides, however the loader made it, and its storage identifies
the tensor. A dispatch mode sees every operation. It needs to understand only those that write: it records
their copies in the terms of ``geometry`` and does not carry them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kv_connector.weights.mapping.geometry import Constant, Geometry, Index, Parameter, Tensor, Write

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# Boxes of one copy, at most. Most copies of loaders are one box. A slice with a step has a box for each row.
# 65,536 boxes take 0.8 s on one core of an AMD EPYC, and 1.3 MB in a message.
MAX_BOXES = 1 << 16


class RecordError(ValueError):
    """The loader does more with a checkpoint than copies can express.

    The message names operation, tensor and parameter.
    """


def record(load: Load, parameters: Mapping[str, torch.Tensor], tensors: Sequence[Tensor]) -> Geometry:
    """Returns what ``load``, a model's ``load_weights``, does with a checkpoint of ``tensors``.

    ``parameters`` are the model's, on meta or not. They are not written. A tensor that the loader does not
    take is in no write.

    Raises RecordError if the loader computes with a tensor, puts two tensors in one place, or raises.
    """
    recorder = _Recorder(parameters, tensors)
    try:
        with torch.no_grad(), recorder:
            load(recorder.checkpoint())
    except RecordError:
        raise
    except Exception as error:  # an error of the loader: an unknown name, or a shape that does not fit
        raise RecordError(
            f"the model does not load {recorder.current or 'the checkpoint'}: {type(error).__name__}: {error}"
        ) from error
    return recorder.geometry()


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, parameters: Mapping[str, torch.Tensor], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._targets = [_RecordedParameter(name, parameter) for name, parameter in parameters.items()]
        # The owner of each storage. All owners live as long as this object, so no other storage can be
        # mistaken for theirs.
        self._owners: dict[int, list[_RecordedParameter] | _CheckpointTensor] = {}
        for target in self._targets:
            owners = self._owners.setdefault(_storage(target.tensor), [])
            assert isinstance(owners, list)
            owners.append(target)
        self.current: str | None = None
        """Description of what the loader received last."""

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, tensor in enumerate(self._tensors):
            self.current = f"tensor {tensor.name!r}"
            dtype = getattr(torch, tensor.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise RecordError(f"{self.current} has the dtype {tensor.dtype!r}, which torch does not know")
            empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
            self._owners[_storage(empty)] = _CheckpointTensor(index, tensor.name, empty)
            yield tensor.name, empty
        self.current = None

    def geometry(self) -> Geometry:
        for target in self._targets:
            if target not in _targets(self._owner(target.tensor)):
                raise RecordError(f"the loader puts another tensor in the place of parameter {target.name!r}")
            target.check(self._tensors)
        written = [target for target in self._targets if target.copied or target.filled]
        return Geometry(
            parameters=tuple(
                Parameter(target.name, _name(target.tensor.dtype), target.elements) for target in written
            ),
            writes=tuple(
                Write(tensor, index, *box)
                for index, target in enumerate(written)
                for tensor, box in target.copied
            ),
            constants=tuple(
                Constant(index, box.extent, *target.grid.place(box), value)
                for index, target in enumerate(written)
                for box, value in target.filled
            ),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if self._owner(one) is not None]
        if not given:
            return func(*args, **(kwargs or {}))
        operation = func._schema.name.removeprefix("aten::")
        if operation in ("copy_", "fill_") and isinstance(args[1], torch.Tensor):
            self._copy(operation, args[0], args[1])
            return args[0]
        if operation in ("fill_", "zero_"):
            value = float(args[1]) if operation == "fill_" else 0.0
            self._target(operation, args[0]).fill(operation, args[0], value, self._tensors)
            return args[0]
        whose = " and ".join(dict.fromkeys(self._whose(one) for one in given))
        if func._schema.is_mutable:
            raise RecordError(f"{operation} on {whose}: of all writes, only copies and fills can be recorded")
        made = func(*args, **(kwargs or {})) if operation not in _COMPUTE else None
        if operation == "clone":
            self._follow(args[0], made)
        if all(self._owner(one) is not None for one in tree_leaves(made)):
            return made
        raise RecordError(f"{operation} computes with {whose}: only copies of parts of it can be recorded")

    def _follow(self, given: torch.Tensor, copy: torch.Tensor) -> None:
        source = self._owner(given)
        if (
            isinstance(source, _CheckpointTensor)
            and given.dtype == source.tensor.dtype
            and copy.is_contiguous()
        ):
            self._owners[_storage(copy)] = _CheckpointTensor(
                source.number, source.name, copy, (source, given)
            )

    def _copy(self, operation: str, to: torch.Tensor, given: torch.Tensor) -> None:
        target = self._target(operation, to, given)
        source = self._owner(given)
        if isinstance(source, _CheckpointTensor):
            if given.dtype != source.tensor.dtype:
                raise RecordError(
                    f"{operation} of tensor {source.name!r} to {target.name!r} reads it as {given.dtype}"
                )
            target.copy(operation, to, source, given.expand(to.shape))
        elif source is not None:
            raise RecordError(f"{operation} copies {self._whose(given)} to parameter {target.name!r}")
        else:
            target.fill(operation, to, _one_value(operation, target, given), self._tensors)

    def _target(
        self, operation: str, to: torch.Tensor, given: torch.Tensor | None = None
    ) -> _RecordedParameter:
        """Returns the parameter of which ``to`` is a view."""
        for target in _targets(self._owner(to)):
            if to.dtype == target.tensor.dtype and target.has(to):
                return target
        what = f" of {self._whose(given)}" if self._owner(given) is not None and given is not None else ""
        raise RecordError(
            f"{operation}{what} writes into {self._whose(to)}, not into a part of one parameter in its dtype"
        )

    def _owner(self, one: Any) -> list[_RecordedParameter] | _CheckpointTensor | None:
        return self._owners.get(_storage(one)) if isinstance(one, torch.Tensor) else None

    def _whose(self, one: torch.Tensor) -> str:
        owner = self._owner(one)
        if isinstance(owner, _CheckpointTensor):
            return f"tensor {owner.name!r}"
        return (
            " or ".join(f"parameter {target.name!r}" for target in _targets(owner))
            or "a tensor of the loader"
        )


# For these, torch raises errors on tensors without data that would not name the tensor.
_COMPUTE = ("_local_scalar_dense", "_to_copy", "equal", "is_nonzero")


@dataclass(frozen=True)
class _CheckpointTensor:
    """A tensor of the checkpoint, or a contiguous copy of a view of one."""

    number: int
    name: str
    tensor: torch.Tensor
    copied: tuple[_CheckpointTensor, torch.Tensor] | None = None
    """The tensor of which this is a copy, and the view that was copied."""

    def boxes(self, axes: Sequence[ViewAxis], at: int, to: int) -> Iterator[ViewBox]:
        """Yields boxes as ``_Grid.boxes`` does, in terms of the checkpoint's tensor."""
        boxes = _Grid(self.tensor.shape).boxes(axes, at, to)
        if self.copied is None:
            yield from boxes
            return
        source, view = self.copied
        for box in boxes:
            start = view.storage_offset() + _dot(box.start, view.stride())
            parts = [ViewAxis(*part) for part in zip(box.extent, view.stride(), box.strides, strict=True)]
            yield from source.boxes(parts, start, box.offset)


def _targets(owner: list[_RecordedParameter] | _CheckpointTensor | None) -> list[_RecordedParameter]:
    return owner if isinstance(owner, list) else []


class _RecordedParameter:
    """A parameter, and a record of what was put into it."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        self.elements = last + 1 if tensor.numel() else 0
        # A parameter with gaps, or with permuted dimensions, is handled as a flat range of memory.
        self.grid = _Grid(tensor.shape if tensor.is_contiguous() and tensor.dim() else (self.elements,))
        self.copied: list[tuple[int, ViewBox]] = []
        """Number of a tensor, and a box of it with its place in this parameter."""
        self.filled: list[tuple[ViewBox, float]] = []
        """Boxes of this parameter and the constant in each. None lies where a tensor is copied."""
        self._taken: list[tuple[int, ViewBox]] = []
        """Number of a tensor, and the box of this parameter that it fills."""

    def has(self, view: torch.Tensor) -> bool:
        """Returns whether a view of the same storage lies between the parameter's first and last element."""
        first = view.storage_offset() - self.tensor.storage_offset()
        last = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
        return bool(first >= 0 and first + last < max(self.elements, 1))

    def copy(self, operation: str, to: torch.Tensor, source: _CheckpointTensor, given: torch.Tensor) -> None:
        offset = to.storage_offset() - self.tensor.storage_offset()
        axes = [ViewAxis(*axis) for axis in zip(to.shape, given.stride(), to.stride(), strict=True)]
        boxes = list(islice(source.boxes(axes, given.storage_offset(), offset), MAX_BOXES + 1))
        if len(boxes) > MAX_BOXES:
            raise RecordError(
                f"{operation} of tensor {source.name!r} to parameter {self.name!r} falls into more than "
                f"{MAX_BOXES:,} boxes"
            )
        self.copied += [(source.number, box) for box in boxes]
        for box in self._places(to):
            self._clear(box)
            self._taken.append((source.number, box))

    def fill(self, operation: str, to: torch.Tensor, value: float, tensors: Sequence[Tensor]) -> None:
        for box in self._places(to):
            self._clear(box)
            self.filled.append((box, value))
            for index, taken in self._taken:
                if box.meets(taken):
                    raise RecordError(
                        f"{operation} of {value} over tensor {tensors[index].name!r} in {self.name!r}"
                    )

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raises RecordError if two tensors were put in one place."""
        if len(self._taken) < 2:
            return
        # Boxes that overlap do so in each dimension. In the dimension that they divide most, the fewest pairs
        # have to be compared.
        dimension = min(
            range(len(self.grid.shape)),
            key=lambda one: sum(box.extent[one] for _, box in self._taken) / self.grid.shape[one],
        )
        near: list[tuple[int, ViewBox]] = []
        for index, box in sorted(self._taken, key=lambda one: one[1].start[dimension]):
            near = [one for one in near if one[1].end(dimension) > box.start[dimension]]
            for other, taken in near:
                if box.meets(taken):
                    names = " and ".join(sorted({repr(tensors[one].name) for one in (other, index)}))
                    raise RecordError(
                        f"the loader copies {names} to the same place in parameter {self.name!r}"
                    )
            near.append((index, box))

    def _places(self, to: torch.Tensor) -> Iterator[ViewBox]:
        axes = [ViewAxis(size, step, 0) for size, step in zip(to.shape, to.stride(), strict=True)]
        return self.grid.boxes(axes, to.storage_offset() - self.tensor.storage_offset(), 0)

    def _clear(self, box: ViewBox) -> None:
        """Removes earlier constants from the box: what is put there last stays."""
        if self.filled:
            self.filled = [(part, value) for filled, value in self.filled for part in filled.without(box)]


class ViewAxis(NamedTuple):
    """One axis of two views of the same shape: its length, and its step in each view."""

    extent: int
    step: int
    target_step: int


class ViewBox(NamedTuple):
    """A part of a view, and its place. The fields are those of ``geometry.Write``."""

    start: Index
    extent: Index
    offset: int
    strides: Index

    def end(self, dimension: int) -> int:
        return self.start[dimension] + self.extent[dimension]

    def meets(self, other: ViewBox) -> bool:
        return all(
            start < theirs + their_extent and theirs < start + extent
            for start, extent, theirs, their_extent in zip(
                self.start, self.extent, other.start, other.extent, strict=True
            )
        )

    def without(self, other: ViewBox) -> Iterator[ViewBox]:
        """Yields what is left of the box without ``other``.

        That is a box before and a box behind it in each dimension. Only starts and extents count.
        """
        if not self.meets(other):
            yield self
            return
        start, extent = list(self.start), list(self.extent)
        for dimension in range(len(start)):
            first, end = start[dimension], start[dimension] + extent[dimension]
            inner, inner_end = max(first, other.start[dimension]), min(end, other.end(dimension))
            for since, until in ((first, inner), (inner_end, end)):
                if since < until:
                    start[dimension], extent[dimension] = since, until - since
                    yield ViewBox(tuple(start), tuple(extent), 0, self.strides)
            start[dimension], extent[dimension] = inner, inner_end - inner


class _Grid:
    """The elements of a contiguous tensor, by their indices."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.strides = tuple(math.prod(self.shape[dimension + 1 :]) for dimension in range(len(self.shape)))
        self._dimensions = {
            stride: dimension
            for dimension, (stride, size) in enumerate(zip(self.strides, self.shape, strict=True))
            if size > 1
        }

    def place(self, box: ViewBox) -> tuple[int, Index]:
        """Returns the offset of the box's first element, and its strides."""
        strides = tuple(
            stride if extent > 1 else 0 for stride, extent in zip(self.strides, box.extent, strict=True)
        )
        return _dot(box.start, self.strides), strides

    def boxes(self, axes: Sequence[ViewAxis], at: int, to: int) -> Iterator[ViewBox]:
        """Yields the view that ``axes`` span from element ``at``, as boxes.

        ``to``: the place of its first element.
        """
        if all(axis.extent for axis in axes):
            yield from self._boxes(_joined(axes), at, to)

    def _boxes(self, axes: list[ViewAxis], at: int, to: int) -> Iterator[ViewBox]:
        along: dict[int, ViewAxis] = {}
        for axis in sorted(axes, reverse=True):
            dimension = self._dimensions.get(axis.step)
            # a step over several elements, or a second axis along the same dimension
            if dimension is None or dimension in along:
                rest = _but(axes, axis)
                for index in range(axis.extent):
                    yield from self._boxes(rest, at + index * axis.step, to + index * axis.target_step)
                return
            along[dimension] = axis
        start = [at // stride % size for stride, size in zip(self.strides, self.shape, strict=True)]
        for dimension, axis in along.items():
            size = self.shape[dimension]
            if start[dimension] + axis.extent > size:  # it continues in the next dimension
                rest = _but(axes, axis)
                head = -start[dimension] % size
                rows, tail = divmod(axis.extent - head, size)
                across = ViewAxis(rows, size * axis.step, size * axis.target_step)
                for since, parts in (
                    (0, [axis._replace(extent=head)]),
                    (head, [across, axis._replace(extent=size)]),
                    (head + rows * size, [axis._replace(extent=tail)]),
                ):
                    if all(part.extent for part in parts):
                        left = rest + [part for part in parts if part.extent > 1]
                        yield from self._boxes(left, at + since * axis.step, to + since * axis.target_step)
                return
        extent, strides = [1] * len(start), [0] * len(start)
        for dimension, axis in along.items():
            extent[dimension], strides[dimension] = axis.extent, axis.target_step
        yield ViewBox(tuple(start), tuple(extent), to, tuple(strides))


def _joined(axes: Iterable[ViewAxis]) -> list[ViewAxis]:
    """Joins two axes if one continues where the other ends, in both views."""
    left = [axis for axis in axes if axis.extent > 1]
    for outer in left:
        for inner in left:
            if inner is not outer and (outer.step, outer.target_step) == (
                inner.extent * inner.step,
                inner.extent * inner.target_step,
            ):
                joined = inner._replace(extent=inner.extent * outer.extent)
                return _joined([joined, *_but(_but(left, inner), outer)])
    return left


def _but(axes: Sequence[ViewAxis], axis: ViewAxis) -> list[ViewAxis]:
    return [one for one in axes if one is not axis]


def _one_value(operation: str, target: _RecordedParameter, given: torch.Tensor) -> float:
    """Returns the single value of a tensor that the loader made itself."""
    if not given.is_meta and given.numel():
        first = given.flatten()[0]
        if bool((given == first).all()):
            return float(first)
    raise RecordError(f"{operation} puts the loader's own values into parameter {target.name!r}")


def _dot(indices: Sequence[int], strides: Sequence[int]) -> int:
    return sum(index * stride for index, stride in zip(indices, strides, strict=True))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
