"""Ranks that quantise their own rows get the result of vLLM for the whole matrix, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from kv_connector.weights.block_fp8 import BLOCK, BlockFp8
from kv_connector.weights.mapping.geometry import Geometry, Parameter, Tensor, Write
from kv_connector.weights.mapping.plan import Box, PlanError, TensorShard, make_plan
from kv_connector.weights.sources import Engines, Held, TensorSource

PATIENCE_S = 60
NAMES = ["w.weight", "w.weight_scale_inv", "bias"]
T = TypeVar("T")


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """Runs vLLM's function without compilation, which takes 40 s a process.

    A single comparison showed the same results.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


@dataclass
class Meeting:
    """A meeting point for ranks that are threads."""

    ranks: int
    values: dict[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=PATIENCE_S)

    def gather(self, rank: int, value: object) -> list[object]:
        self.values[rank] = value
        self.barrier.wait()
        gathered = [self.values[rank] for rank in range(self.ranks)]
        self.barrier.wait()
        return gathered


class Rank(TensorSource):
    """A rank with a box of a matrix, and all of a bias."""

    def __init__(self, meeting: Meeting, rank: int, whole: torch.Tensor, box: Box) -> None:
        super().__init__([("w.weight", whole), ("bias", torch.zeros(3))])
        self.rank, self.meeting = rank, meeting
        self.part = torch.zeros(box.extent, dtype=whole.dtype)
        self._held[0] = Held(TensorShard(0, box), lambda: self.part)
        self.collectives = 0

    def step(self, whole: torch.Tensor) -> None:
        """Changes the weights."""
        self.part.copy_(part_of(whole, self._held[0].shard.box))

    def exchange(self, value: object) -> list[object]:
        return self.meeting.gather(self.rank, value)

    def maximum(self, values: torch.Tensor) -> None:
        self.collectives += 1
        everybody = self.meeting.gather(self.rank, values.clone())
        values.copy_(torch.stack(everybody).amax(0))  # type: ignore[arg-type]


class RankOfBoxes(Rank):
    """A rank with several boxes of a matrix, as Megatron's fused matrices have."""

    def __init__(self, whole: torch.Tensor, boxes: Sequence[Box]) -> None:
        super().__init__(Meeting(1), 0, whole, boxes[0])
        self.parts = [torch.zeros(box.extent) for box in boxes]
        matrix = [
            Held(TensorShard(0, box), lambda part=part: part)  # type: ignore[misc]
            for box, part in zip(boxes, self.parts, strict=True)
        ]
        self._held[:1] = matrix

    def step(self, whole: torch.Tensor) -> None:
        for part, held in zip(self.parts, self._held, strict=False):
            part.copy_(part_of(whole, held.shard.box))


def part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))]


def loads(tensors: Sequence[Tensor], dtype: str = "float8_e4m3fn") -> Geometry:
    """An engine that has the matrix in ``dtype`` and all other tensors as they are."""
    parameters, writes = [], []
    for number, tensor in enumerate(tensors):
        size = torch.Size(tensor.shape).numel()
        own = dtype if tensor.name == "w.weight" else tensor.dtype
        parameters.append(Parameter(tensor.name, own, size))
        strides = torch.empty(tensor.shape, device="meta").stride()
        writes.append(Write(number, number, (0,) * len(strides), tensor.shape, 0, tuple(strides)))
    return Geometry(tuple(parameters), tuple(writes), ())


def asks(source: BlockFp8, *dtypes: str) -> Callable[[], Engines | str]:
    """Returns a query for engines that load these dtypes."""

    def ask() -> Engines:
        packed = [msgspec.msgpack.encode(loads(source.tensors(), dtype)) for dtype in dtypes]
        return Engines([("host", 0)], [[("host", 1)]], packed)

    return ask


@dataclass
class Trainer:
    """Ranks that have these boxes, and an engine that has the matrix in float8."""

    whole: torch.Tensor
    boxes: Sequence[Box]
    ue8m0: bool = False

    def __post_init__(self) -> None:
        meeting = Meeting(len(self.boxes))
        self.ranks = [Rank(meeting, rank, self.whole, box) for rank, box in enumerate(self.boxes)]
        self.sources = [BlockFp8(rank, ue8m0=self.ue8m0) for rank in self.ranks]
        self.agreed = self.all(lambda source: source.agree(asks(source, "float8_e4m3fn")))[0]

    def all(self, do: Callable[[BlockFp8], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.sources)) as threads:
            return list(threads.map(do, self.sources))

    def sends(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the values and scales of a version, put together."""
        for rank in self.ranks:
            rank.step(whole)
        self.all(BlockFp8.refresh)
        _, scales, _ = self.sources[0].tensors()
        made = torch.zeros(whole.shape, dtype=torch.float8_e4m3fn), torch.zeros(scales.shape)
        for source in self.sources:
            for held in source.held():
                if held.shard.tensor < len(made):
                    part_of(made[held.shard.tensor], held.shard.box).copy_(held.local())
        return made


def vllms(whole: torch.Tensor, made: tuple[torch.Tensor, torch.Tensor], *, ue8m0: bool = False) -> bool:
    """Returns whether the result equals vLLM's, bit for bit."""
    wanted = per_block_cast_to_fp8(whole, use_ue8m0=ue8m0)
    return all(
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        for mine, theirs in zip(made, wanted, strict=True)
    )


def rows(*extents: int, columns: int) -> list[Box]:
    return [Box((sum(extents[:number]), 0), (extent, columns)) for number, extent in enumerate(extents)]


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Draws matrices with blocks of very different size, some of zeros."""
    rows, columns = draw(st.integers(1, 400)), draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    whole = torch.randn(rows, columns, generator=generator)
    grid = [-(-size // BLOCK) for size in (rows, columns)]
    powers = [draw(st.sampled_from([None, -38, -12, -4, 0, 3, 30])) for _ in range(grid[0] * grid[1])]
    scale = torch.tensor([0.0 if power is None else 10.0**power for power in powers]).view(grid)
    whole *= scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return whole.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    inner = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    return list(zip([0, *inner], [*inner, size], strict=True))


def test_block_of_several_boxes_of_one_rank_has_the_largest_value_of_all() -> None:
    """Each of the two boxes has the largest value of one of the blocks that they share."""
    whole = torch.full((200, 256), 0.5)
    whole[3, 3], whole[100, 200] = 40.0, 50.0
    boxes = rows(64, 136, columns=256)
    trainer = Trainer(whole, boxes[:1])
    trainer.ranks = [RankOfBoxes(whole, boxes)]
    trainer.sources = [BlockFp8(rank) for rank in trainer.ranks]
    trainer.all(lambda source: source.agree(asks(source, "float8_e4m3fn")))
    assert vllms(whole, trainer.sends(whole))


@given(data=st.data())
@settings(max_examples=50)
def test_a_matrix_that_is_cut_anywhere_is_what_vllm_makes_of_it(data: st.DataObject) -> None:
    whole = data.draw(matrices())
    dimension = data.draw(st.sampled_from([0, 0, 0, 1]), label="dimension")
    boxes = []
    for since, until in data.draw(cuts(whole.shape[dimension]), label="bounds"):
        start, extent = [0, 0], list(whole.shape)
        start[dimension], extent[dimension] = since, until - since
        boxes.append(Box(tuple(start), tuple(extent)))
    ue8m0 = data.draw(st.booleans(), label="ue8m0")
    trainer = Trainer(whole, boxes, ue8m0)
    assert [tensor.name for tensor in trainer.sources[0].tensors()] == NAMES
    assert isinstance(trainer.agreed.engines, Engines)
    geometry = msgspec.msgpack.decode(trainer.agreed.engines.geometries[0], type=Geometry)
    make_plan(trainer.sources[0].tensors(), trainer.agreed.held, [geometry], 0)  # each element is held once
    assert vllms(whole, trainer.sends(whole), ue8m0=ue8m0)


def test_each_version_is_made_anew_in_the_same_memory() -> None:
    trainer = Trainer(torch.zeros(300, 200), rows(100, 200, columns=200))
    places = [held.local().data_ptr() for source in trainer.sources for held in source.held()]
    for seed in range(2):
        whole = torch.randn(300, 200, generator=torch.Generator().manual_seed(seed))
        assert vllms(whole, trainer.sends(whole))
    again = trainer.all(lambda source: source.agree(asks(source, "float8_e4m3fn")))
    assert again[0].held == trainer.agreed.held
    assert places == [held.local().data_ptr() for source in trainer.sources for held in source.held()]
    assert vllms(whole, trainer.sends(whole))


def test_scale_of_a_block_with_a_nan_is_nan() -> None:
    whole = torch.randn(256, 256)
    whole[3, 5], whole[200, 200] = float("nan"), float("-inf")
    values, scales = Trainer(whole, rows(64, 100, 92, columns=256)).sends(whole)
    wanted, wanted_scales = per_block_cast_to_fp8(whole)
    assert torch.equal(values.float().nan_to_num(500), wanted.float().nan_to_num(500))
    assert torch.equal(scales.nan_to_num(1e30), wanted_scales.nan_to_num(1e30))
    assert scales.isnan().tolist() == [[True, False], [False, False]]


def test_replicas_have_the_same_and_whole_blocks_need_no_collective() -> None:
    whole = torch.randn(256, 40)
    replicas = rows(100, 156, columns=40) * 2
    assert vllms(whole, (trainer := Trainer(whole, replicas)).sends(whole))
    assert [rank.collectives for rank in trainer.ranks] == [1] * 4
    assert vllms(whole, (trainer := Trainer(whole, rows(128, 128, columns=40) * 2)).sends(whole))
    assert [rank.collectives for rank in trainer.ranks] == [0] * 4


def alone(*named: tuple[str, torch.Tensor]) -> BlockFp8:
    return BlockFp8(TensorSource(named))


def test_tensor_that_no_engine_has_in_float8_is_sent_unchanged() -> None:
    source = alone(("w.weight", torch.ones(4, 4)))
    source.agree(asks(source, "bfloat16"))
    source.refresh()
    assert [(tensor.name, tensor.dtype) for tensor in source.tensors()] == [("w.weight", "float32")]
    assert source.held()[0].local().tolist() == [[1.0] * 4] * 4


def test_tensor_that_cannot_be_quantised_is_named() -> None:
    source = alone(("w.weight", torch.ones(4, 4)))
    with pytest.raises(PlanError, match=r"some of the engines load w\.weight in float8 and some do not"):
        source.agree(asks(source, "float8_e4m3fn", "bfloat16"))
    source = alone(("w.weight", torch.ones(2, 4, 4)))
    with pytest.raises(PlanError, match=r"w\.weight \(float32, \[2, 4, 4\]\) is float8 at the engine"):
        source.agree(asks(source, "float8_e4m3fn"))
    assert alone(("w.weight", torch.ones(4, 4))).agree(lambda: "nobody is there").engines == "nobody is there"


@pytest.mark.parametrize("dtypes", [("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")])
def test_nothing_is_converted_to_float8_or_from_it_without_scales(dtypes: tuple[str, str]) -> None:
    here, there = dtypes
    tensors = [Tensor("w.weight", here, (4, 4))]
    shards = [[TensorShard(0, Box((0, 0), (4, 4)))]]
    with pytest.raises(PlanError, match=rf"w\.weight is {here} here and {there} at the engine.*BlockFp8"):
        make_plan(tensors, shards, [loads(tensors, there)], 0)
