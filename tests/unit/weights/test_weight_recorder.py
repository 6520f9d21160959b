"""The recording of a loader, carried out with numpy, has the loader's result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_connector.weights.mapping import recorder
from kv_connector.weights.mapping.geometry import Geometry, Tensor, Write
from kv_connector.weights.mapping.recorder import RecordError, record

Given = Iterable[tuple[str, torch.Tensor]]
View = Callable[[torch.Tensor], torch.Tensor]


def as_recorded(
    geometry: Geometry, checkpoint: Mapping[int, torch.Tensor], before: float
) -> dict[str, NDArray[np.float32]]:
    """Returns the parameters, flat, after the recorded writes. ``before``: their earlier value."""
    flat = [np.full(one.elements, before, np.float32) for one in geometry.parameters]
    for constant in geometry.constants:
        strided(flat[constant.parameter], constant.offset, constant.extent, constant.strides)[...] = (
            constant.value
        )
    for write in geometry.writes:
        box = tuple(slice(at, at + size) for at, size in zip(write.start, write.extent, strict=True))
        to = strided(flat[write.parameter], write.offset, write.extent, write.strides)
        assert np.isnan(to).all() == np.isnan(before), "nothing is written twice"
        to[...] = checkpoint[write.tensor].numpy()[box]
    return {one.name: values for one, values in zip(geometry.parameters, flat, strict=True)}


def strided(
    flat: NDArray[np.float32], offset: int, extent: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[np.float32]:
    assert all((size == 1) == (step == 0) for size, step in zip(extent, strides, strict=True))
    assert offset + sum((size - 1) * step for size, step in zip(extent, strides, strict=True)) < len(flat)
    return np.lib.stride_tricks.as_strided(flat[offset:], extent, [4 * step for step in strides])


@st.composite
def step(draw: st.DrawFn, shape: torch.Size) -> View:
    """Draws one operation that makes another view of a view."""
    dims = len(shape)
    kinds = ["unsqueeze", "flatten", "view", "contiguous"]
    if dims:
        kinds += [
            "narrow",
            "narrow",
            "slice",
            "transpose",
            "permute",
            "chunk",
            "unbind",
            "select",
            "expand",
            "unfold",
        ]
    kind = draw(st.sampled_from(kinds))
    event(kind)
    at = draw(st.integers(0, max(dims - 1, 0)))
    size = shape[at] if dims else 1
    if kind == "unsqueeze":
        return lambda view: view.unsqueeze(at)
    if kind == "flatten":  # a copy if the strides do not allow a view
        return lambda view: view.reshape(-1)
    if kind == "contiguous":
        return lambda view: view.contiguous()
    if kind == "view":
        divisors = [one for one in range(1, size + 1) if size % one == 0]
        inner = draw(st.sampled_from(divisors))
        return lambda view: view.unflatten(at, (size // inner, inner)) if dims else view
    if kind == "narrow":
        start = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size - start))
        return lambda view: view.narrow(at, start, length)
    if kind == "slice":
        by = draw(st.integers(1, 3))
        return lambda view: view[(slice(None),) * at + (slice(None, None, by),)]
    if kind == "transpose":
        other = draw(st.integers(0, dims - 1))
        return lambda view: view.transpose(at, other)
    if kind == "permute":
        order = draw(st.permutations(range(dims)))
        return lambda view: view.permute(order)
    if kind == "chunk":
        parts = draw(st.integers(1, 3))
        return lambda view: view.chunk(parts, at)[-1]
    if kind == "unbind":
        return lambda view: view.unbind(at)[0]
    if kind == "select":
        index = draw(st.integers(0, size - 1))
        return lambda view: view.select(at, index)
    if kind == "unfold":  # windows that overlap
        length = draw(st.integers(1, size))
        return lambda view: view.unfold(at, length, 1)
    times = draw(st.integers(1, 3))
    return lambda view: view.unsqueeze(at).expand(*view.shape[:at], times, *view.shape[at:])


def chain(steps: list[View]) -> View:
    def view(tensor: torch.Tensor) -> torch.Tensor:
        for one in steps:
            tensor = one(tensor)
        return tensor

    return view


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> View:
    steps: list[View] = []
    for _ in range(draw(st.integers(0, 6))):
        steps.append(draw(step(chain(steps)(tensor).shape)))
    return chain(steps)


@st.composite
def places(draw: st.DrawFn, shape: torch.Size) -> tuple[torch.Size, View]:
    """Draws a parameter, or a part of one, and a view of it with this ``shape``."""
    order = draw(st.permutations(range(len(shape))))
    before = [draw(st.integers(0, 2)) for _ in shape]
    behind = [draw(st.integers(0, 2)) for _ in shape]
    whole = [size + sum(more) for size, more in zip(shape, zip(before, behind, strict=True), strict=True)]

    def view(parameter: torch.Tensor) -> torch.Tensor:
        for dimension, (start, size) in enumerate(zip(before, shape, strict=True)):
            parameter = parameter.narrow(order.index(dimension), start, size)
        return parameter.permute([order.index(dimension) for dimension in range(len(shape))])

    return torch.Size(whole[dimension] for dimension in order), view


@settings(max_examples=200)
@given(st.data())
def test_recorded_writes_equal_those_of_the_loader(data: st.DataObject) -> None:
    sizes = st.lists(st.integers(1, 6), max_size=4)
    checkpoint = [
        torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) + 10_000 * index
        for index, shape in enumerate(data.draw(st.lists(sizes, min_size=1, max_size=3)))
    ]
    # Each tensor's views go into a part of one parameter. A part of that is filled.
    copies = [(index, data.draw(views(tensor))) for index, tensor in enumerate(checkpoint) for _ in range(2)]
    parts = [data.draw(places(view(checkpoint[index]).shape)) for index, view in copies]
    offsets = np.cumsum([0, *(shape.numel() for shape, _ in parts)]).tolist()
    offset = data.draw(st.integers(0, 2))
    filled = data.draw(st.lists(st.tuples(*[st.integers(0, offsets[-1])] * 2), max_size=2))
    filled_first = data.draw(st.booleans())

    def load_into(parameter: torch.Tensor) -> Callable[[Given], None]:
        def fill() -> None:
            for value, between in enumerate(filled):
                parameter.data[min(between) : max(between)].fill_(value + 0.5)

        def load(weights: Given) -> None:
            if filled_first:
                fill()
            for number, (_, tensor) in enumerate(weights):
                for (index, view), (shape, place), at in zip(copies, parts, offsets[:-1], strict=True):
                    if index == number:
                        place(parameter[at : at + shape.numel()].view(shape)).copy_(view(tensor))

        return load

    real = torch.full((offset + offsets[-1],), torch.nan)[offset:]
    with torch.no_grad():
        load_into(real)((str(index), tensor) for index, tensor in enumerate(checkpoint))
    tensors = [Tensor(str(index), "float32", tuple(one.shape)) for index, one in enumerate(checkpoint)]
    empty = torch.empty(offset + offsets[-1], device="meta")[offset:]
    geometry = record(load_into(empty), {"p": empty}, tensors)
    assert [one.elements for one in geometry.parameters] == [offsets[-1]]
    written = as_recorded(geometry, dict(enumerate(checkpoint)), torch.nan)["p"]
    np.testing.assert_array_equal(written, real.numpy())


def test_a_fused_parameter_is_written_by_boxes_as_large_as_they_come() -> None:
    """One of two ranks: it has rows of q, of one k head and v head, and its own experts."""
    names = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "norm": (6,), "o": (6, 8)}
    experts = {f"expert.{index}.{side}": (4, 6) for index in range(4) for side in ("gate", "up")}
    tensors = [Tensor(name, "bfloat16", shape) for name, shape in (names | experts).items()]
    parameters = {
        "qkv": torch.nn.Parameter(torch.full((8, 6), 7.0)),
        "unwritten": torch.nn.Parameter(torch.full((3,), 7.0)),
        "o": torch.nn.Parameter(torch.full((6, 4), 7.0)),
        "norm": torch.nn.Parameter(torch.full((6,), 7.0)),
        "w13": torch.nn.Parameter(torch.full((2, 4, 6), 7.0)),
    }

    def load(weights: Given) -> None:
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                start = {"q": 0, "k": 4, "v": 6}[name]
                rows = tensor.shape[0] // 2
                parameters["qkv"].data.narrow(0, start, rows).copy_(tensor.narrow(0, rows, rows))
            elif name == "o":
                parameters["o"].data.copy_(tensor[:, 4:])
            elif name == "norm":
                parameters["norm"].data.copy_(tensor)
            elif (expert := int(name.split(".")[1]) - 2) >= 0:
                start = 2 * name.endswith("up")
                parameters["w13"].data[expert][start : start + 2].copy_(tensor[2:])

    geometry = record(load, parameters, tensors)
    assert [(one.name, one.dtype, one.elements) for one in geometry.parameters] == [
        ("qkv", "float32", 48),
        ("o", "float32", 24),
        ("norm", "float32", 6),
        ("w13", "float32", 48),
    ]
    assert geometry.writes == (
        Write(0, 0, (4, 0), (4, 6), 0, (6, 1)),
        Write(1, 0, (2, 0), (2, 6), 24, (6, 1)),
        Write(2, 0, (2, 0), (2, 6), 36, (6, 1)),
        Write(4, 1, (0, 4), (6, 4), 0, (4, 1)),
        Write(3, 2, (0,), (6,), 0, (1,)),
        Write(9, 3, (2, 0), (2, 6), 0, (6, 1)),
        Write(10, 3, (2, 0), (2, 6), 12, (6, 1)),
        Write(11, 3, (2, 0), (2, 6), 24, (6, 1)),
        Write(12, 3, (2, 0), (2, 6), 36, (6, 1)),
    )
    assert geometry.constants == ()
    for parameter in parameters.values():
        assert (parameter == 7).all(), "recording writes no parameter"


def test_a_tensor_that_is_divided_and_put_together_is_one_box() -> None:
    parameter = torch.empty(3, 4, 5, device="meta")

    def load(weights: Given) -> None:
        for _, tensor in weights:
            parameter.copy_(tensor.view(3, 4, 5))

    geometry = record(load, {"p": parameter}, [Tensor("t", "float32", (12, 5))])
    assert geometry.writes == (Write(0, 0, (0, 0), (12, 5), 0, (5, 1)),)


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_padding_is_a_constant(value: float) -> None:
    parameter = torch.empty(5, 2, device="meta")

    def load(weights: Given) -> None:
        if value:
            parameter.data.fill_(value)
        else:
            parameter.data.zero_()
        for _, tensor in weights:
            parameter[:2].copy_(tensor)
        parameter[4].copy_(torch.tensor([9.0, 9.0]))

    geometry = record(load, {"p": parameter}, [Tensor("t", "float32", (2, 2))])
    written = as_recorded(geometry, {0: torch.ones(2, 2)}, torch.nan)["p"]
    assert written.tolist() == [1.0] * 4 + [value] * 4 + [9.0] * 2
    assert [(constant.extent, constant.offset) for constant in geometry.constants] == [
        ((2, 2), 4),
        ((1, 2), 8),
    ]


def test_two_parameters_of_one_storage() -> None:
    both = torch.empty(12, device="meta")
    parameters = {"a": both[:4].view(2, 2), "b": both[4:]}

    def load(weights: Given) -> None:
        ((_, tensor),) = weights
        parameters["b"][2:].copy_(tensor)

    geometry = record(load, parameters, [Tensor("t", "float32", (6,))])
    assert [one.name for one in geometry.parameters] == ["b"]
    assert geometry.writes == (Write(0, 0, (0,), (6,), 2, (1,)),)


def test_a_parameter_that_lies_transposed() -> None:
    parameter = torch.empty(3, 4, device="meta").t()

    def load(weights: Given) -> None:
        ((_, tensor),) = weights
        parameter.copy_(tensor)

    geometry = record(load, {"p": parameter}, [Tensor("t", "float32", (4, 3))])
    assert geometry.writes == (Write(0, 0, (0, 0), (4, 3), 0, (1, 4)),)


def refusal(
    load: Callable[[torch.Tensor, torch.Tensor], object],
    shape: tuple[int, ...] = (4, 6),
    dtype: torch.dtype = torch.float32,
) -> str:
    """Returns why a loader is refused that receives ``x`` for the parameter ``p``."""
    parameters = {"p": torch.nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)}
    parameters["other"] = torch.nn.Parameter(torch.zeros(4, 6))

    def load_weights(weights: Given) -> None:
        for _, tensor in weights:
            load(parameters["p"], tensor)

    with pytest.raises(RecordError) as raised:
        record(load_weights, parameters, [Tensor("x", "float32", (4, 6))])
    return str(raised.value)


@pytest.mark.parametrize(
    ("load", "operation"),
    [
        (lambda p, x: p.copy_(x + 1), "add"),
        (lambda p, x: p.copy_(-x), "neg"),
        (lambda p, x: p.copy_(x.t().clone().t()), "clone"),  # its elements are in another order
        (lambda p, x: p.copy_(x.view(torch.int32).clone()), "clone"),
        (lambda p, x: p.copy_(x.to(torch.bfloat16)), "_to_copy"),
        (lambda p, x: p.copy_(x.cpu()), "_to_copy"),
        (lambda p, x: p.copy_(torch.cat([x[2:], x[:2]])), "cat"),
        (lambda p, x: p.copy_(x[torch.tensor([1, 0, 2, 3])]), "index"),
        (lambda p, x: p.fill_(x[0, 0].item()), "_local_scalar_dense"),
        (lambda p, x: p.zero_() if x.any() else None, "any"),
        (lambda p, x: torch.equal(x, x), "equal"),
    ],
)
def test_a_loader_that_computes_is_refused(load: Callable[..., object], operation: str) -> None:
    assert f"{operation} computes with tensor 'x'" in refusal(load)


@pytest.mark.parametrize(
    ("load", "operation"),
    [
        (lambda p, x: p.mul_(x), "mul_ on parameter 'p' and tensor 'x'"),
        (lambda p, x: p.add_(1), "add_ on parameter 'p'"),
        (lambda p, x: p.index_copy_(0, torch.arange(4), x), "index_copy_ on parameter 'p' and tensor 'x'"),
        (lambda p, x: x.mul_(2), "mul_ on tensor 'x'"),
        (lambda p, x: x.zero_(), "zero_ writes into tensor 'x'"),
        (lambda p, x: torch.empty(4, 6).copy_(x), "copy_ of tensor 'x' writes into a tensor of the loader"),
        (
            lambda p, x: torch.empty(4, 6).copy_(p),
            "copy_ of parameter 'p' writes into a tensor of the loader",
        ),
        (lambda p, x: p.view(torch.int32).fill_(1), "fill_ writes into parameter 'p'"),
        (lambda p, x: p.copy_(p), "copy_ copies parameter 'p' to parameter 'p'"),
        (lambda p, x: p.copy_(x.view(torch.int32)), "copy_ of tensor 'x' to 'p' reads it as torch.int32"),
        (
            lambda p, x: p.copy_(torch.arange(24.0).view(4, 6)),
            "puts the loader's own values into parameter 'p'",
        ),
        (
            lambda p, x: p[0].copy_(torch.ones(6, device="meta")),
            "puts the loader's own values into parameter 'p'",
        ),
    ],
)
def test_a_write_that_is_no_copy_is_refused(load: Callable[..., object], operation: str) -> None:
    assert operation in refusal(load)


def test_a_parameter_that_becomes_the_tensor_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))

    def load(weights: Given) -> None:
        for _, tensor in weights:
            parameter.data = tensor

    with pytest.raises(RecordError, match="puts another tensor in the place of parameter 'p'"):
        record(load, {"p": parameter}, [Tensor("x", "float32", (2,))])


def test_two_tensors_in_one_place_are_refused() -> None:
    def load(p: torch.Tensor, x: torch.Tensor) -> None:
        p[:3].copy_(x[:3])
        p[:, 5:].copy_(x[:, :1])

    assert "copies 'x' to the same place in parameter 'p'" in refusal(load)


def test_a_fill_over_a_tensor_is_refused() -> None:
    def load(p: torch.Tensor, x: torch.Tensor) -> None:
        p.copy_(x)
        p[3].zero_()

    assert "fill of 0.0 over tensor 'x' in 'p'" in refusal(load).replace("zero_", "fill")


def test_a_scalar_is_written_once() -> None:
    def load(p: torch.Tensor, x: torch.Tensor) -> None:
        p.copy_(x[0, 0])
        p.copy_(x[0, 1])

    assert "to the same place in parameter 'p'" in refusal(load, shape=())


def test_a_copy_of_too_many_boxes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_BOXES", 3)
    message = refusal(lambda p, x: p.copy_(x[:, :1]))  # each of the 6 columns is that column
    assert message == "copy_ of tensor 'x' to parameter 'p' falls into more than 3 boxes"


def test_error_of_the_loader_names_the_tensor() -> None:
    def missing(weights: Given) -> None:
        for name, _ in weights:
            {"a": 0}[name]

    with pytest.raises(RecordError, match="the model does not load tensor 'b': KeyError: 'b'"):
        record(missing, {}, [Tensor("a", "float32", (1,)), Tensor("b", "float32", (1,))])
    message = refusal(lambda p, x: p.copy_(x), shape=(3, 6))
    assert message.startswith("the model does not load tensor 'x': RuntimeError: The expanded size")


def test_an_unknown_dtype() -> None:
    with pytest.raises(RecordError, match="'a' has the dtype 'float17', which torch does not know"):
        record(lambda weights: list(weights), {}, [Tensor("a", "float17", (1,))])
