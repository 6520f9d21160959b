"""The plan: for any shards and loaders, carrying it out has the result of loading."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.weights.mapping.geometry import Geometry, Parameter, Tensor, Write
from kv_connector.weights.mapping.plan import Box, PlanError, ShardPiece, TensorShard, make_plan, runs
from kv_connector.weights.trainer.staging import laid_out, split

Shape = tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Draws a dimension in parts, also uneven ones: (start, extent)."""
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


@st.composite
def meshes(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Draws a tensor in boxes, along any of its dimensions."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        parts = draw(cuts(size))
        boxes = [((*b, s), (*e, n)) for b, e in boxes for s, n in parts]
    return [Box(start, extent) for start, extent in boxes]


@st.composite
def writes(draw: st.DrawFn, tensor: int, shape: Shape, parameter: int) -> tuple[Write, int]:
    """Draws a write of a box with any order of dimensions and with gaps. Returns it with the elements."""
    start = [draw(st.integers(0, n - 1)) for n in shape]
    extent = [draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True)]
    order = draw(st.permutations(range(len(shape))))
    strides, reach = [0] * len(shape), 1
    for dimension in order:
        if extent[dimension] > 1:
            strides[dimension] = reach
        reach *= extent[dimension] + draw(st.integers(0, 1))
    offset = draw(st.integers(0, 3))
    elements = offset + 1 + sum((n - 1) * s for n, s in zip(extent, strides, strict=True))
    return Write(tensor, parameter, tuple(start), tuple(extent), offset, tuple(strides)), elements


def load(write: Write, tensor: np.ndarray, parameter: np.ndarray) -> None:
    """Writes as a loader would, element by element."""
    for at in np.ndindex(*write.extent):
        source = tuple(a + s for a, s in zip(at, write.start, strict=True))
        parameter[write.offset + sum(a * s for a, s in zip(at, write.strides, strict=True))] = tensor[source]


@given(st.data())
def test_carrying_out_the_plan_is_loading(data: st.DataObject) -> None:
    shape_of = data.draw(st.lists(shapes(), min_size=1, max_size=3))
    tensors = [Tensor(f"t{n}", "float32", shape) for n, shape in enumerate(shape_of)]
    values = [np.arange(math.prod(s), dtype=np.float64).reshape(s) + 1000 * n for n, s in enumerate(shape_of)]
    senders: list[list[TensorShard]] = [[] for _ in range(data.draw(st.integers(1, 4)))]
    for number, shape in enumerate(shape_of):
        replicas = data.draw(st.integers(1, 2))
        for box in data.draw(meshes(shape)):
            for rank in data.draw(st.permutations(range(len(senders))))[:replicas]:
                senders[rank].append(TensorShard(number, box))
    receivers = []
    for _ in range(data.draw(st.integers(1, 3))):
        loaded = data.draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=4))
        parts = [
            data.draw(writes(number, shape_of[number], parameter)) for parameter, number in enumerate(loaded)
        ]
        parameters = tuple(Parameter(f"p{n}", "float32", size) for n, (_, size) in enumerate(parts))
        receivers.append(Geometry(parameters, tuple(write for write, _ in parts), ()))

    plans = [make_plan(tensors, senders, receivers, rank) for rank in range(len(senders))]
    assert len({plan.digest for plan in plans}) == 1
    assert all(plan.nbytes == plans[0].nbytes for plan in plans)
    limit = data.draw(st.integers(1, 40))
    for receiver, geometry in enumerate(receivers):
        expected = [np.full(p.elements, -1.0) for p in geometry.parameters]
        for write in geometry.writes:
            load(write, values[write.tensor], expected[write.parameter])
        found = [np.full(p.elements, -1.0) for p in geometry.parameters]
        for rank, shards in enumerate(senders):
            for piece in plans[rank].pieces[receiver]:
                shard = shards[piece.shard]
                span = tuple(slice(a, a + n) for a, n in zip(shard.box.start, shard.box.extent, strict=True))
                for part in split(piece, limit):
                    assert part.elements <= limit
                    carry_out(part, np.ascontiguousarray(values[shard.tensor][span]), found[piece.parameter])
        for a, b in zip(found, expected, strict=True):
            assert (a == b).all()
    # No rank has more than the mean and one piece more.
    loads = [sum(bytes_of) for bytes_of in plans[0].nbytes]
    everything = []
    for plan, load_of in zip(plans, loads, strict=True):
        own = [piece.elements * 4 for pieces in plan.pieces for piece in pieces]
        assert sum(own) == load_of
        everything += own
    if all(sorted(map(repr, shards)) == sorted(map(repr, senders[0])) for shards in senders):
        assert max(loads) <= sum(loads) / len(loads) + max(everything)


def carry_out(piece: ShardPiece, shard: np.ndarray, parameter: np.ndarray) -> None:
    """Writes a piece by its runs, each element once."""
    strides = [s // shard.itemsize for s in shard.strides]
    flat = shard.reshape(-1)
    for pack in (False, True):
        laid = runs(piece, strides, least=3, pack=pack)
        if laid.packed:
            part = shard[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.extent, strict=True))]
            single = [d for d in range(shard.ndim) if d not in laid.order]
            flat_part = part.transpose(*single, *laid.order).reshape(-1)
        else:
            flat_part = flat
        target = parameter.copy()
        seen = 0
        for source, place in zip(laid.source, laid.target, strict=True):
            run = slice(place, place + laid.elements)
            assert (target[run] == -1).all()
            target[run] = flat_part[source : source + laid.elements]
            seen += laid.elements
        assert seen == piece.elements
    parameter[:] = target


def geometry_of(shape: Shape) -> Geometry:
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    write = Write(0, 0, (0,) * len(shape), shape, 0, strides)
    return Geometry((Parameter("p", "float32", math.prod(shape)),), (write,), ())


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([], "no rank holds it"),
        ([Box((0, 0), (2, 4))], "held by no rank"),
        ([Box((0, 0), (3, 4)), Box((2, 0), (2, 4))], "overlap"),
        ([Box((0, 0), (5, 4))], "elements up to 5 of dimension 0"),
        ([Box((0,), (4,))], "in 1 dimensions"),
    ],
)
def test_elements_that_are_not_held_once_are_refused_by_name(boxes: list[Box], problem: str) -> None:
    tensor = Tensor("model.norm.weight", "float32", (4, 4))
    with pytest.raises(PlanError, match=f"model.norm.weight of shape .*{problem}"):
        make_plan([tensor], [[TensorShard(0, box) for box in boxes]], [geometry_of((4, 4))], 0)


def test_rows_of_an_inner_part_are_laid_out_where_they_are_short() -> None:
    """A row-parallel layer's columns are one run at the receiver, and one run for each row at the sender."""
    piece = ShardPiece(0, 0, (0, 4), (3, 4), 0, (4, 1))
    long_enough = runs(piece, (8, 1), least=4)
    assert not long_enough.packed
    assert long_enough.source.tolist() == [4, 12, 20]
    assert (long_enough.elements, long_enough.target.tolist()) == (4, [0, 4, 8])
    short = runs(piece, (8, 1), least=5)
    assert (short.packed, short.elements, short.target.tolist()) == (True, 12, [0])


def test_a_tensor_without_dimensions_is_laid_out_as_it_is() -> None:
    assert laid_out(torch.tensor(3.0), ShardPiece(0, 0, (), (), 0, ()), ()).item() == 3


def test_a_transposed_part_is_packed() -> None:
    laid = runs(ShardPiece(0, 0, (0, 0), (3, 4), 0, (1, 3)), (4, 1), least=1000)
    assert laid.packed
    assert (laid.elements, laid.order, laid.target.tolist()) == (12, (1, 0), [0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_rounds_are_few_and_none_is_larger_than_the_largest(sizes: list[int]) -> None:
    """Rounds of one parameter each or two, in any order, and with gaps in their numbers."""
    parameters = [Parameter(f"p{n}", "int8", size, round=3 * n) for n, size in enumerate(sizes)]
    parameters.insert(0, Parameter("q", "int8", 1, round=3 * (len(sizes) - 1)))
    before = Geometry(tuple(parameters), (), ())
    after = before.in_few_rounds()
    numbers = [parameter.round for parameter in after.parameters]
    assert numbers[0] == numbers[-1], "what is taken together stays so"
    assert numbers[1:] == sorted(numbers[1:])
    assert set(numbers) == set(range(after.rounds))
    largest = max([*sizes[:-1], sizes[-1] + 1])
    totals = [sum(p.nbytes for p in after.parameters if p.round == round) for round in range(after.rounds)]
    assert max(totals) == largest
    assert all(a + b > largest for a, b in itertools.pairwise(totals)), "two neighbours would fit in one"
    assert before.in_one_round().rounds == 1
