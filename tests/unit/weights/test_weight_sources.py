"""Sources whose tensors have no memory, and modules whose parameters are not sharded at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from weight_engines import WeightEngine, drawn

from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import SourceError, TensorSource, module_source
from kv_connector.weights.update import PushError


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Model(torch.nn.Module):
    """A model with a weight of each name that a test engine loads, and a forward pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, value in drawn(seed):
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


@pytest.mark.usefixtures("one_rank")
def test_module_source_takes_the_shards_of_a_module_that_a_forward_pass_unsharded() -> None:
    model = fully_shard(Model(1), mesh=init_device_mesh("cpu", (1,)))
    model()
    assert not any(isinstance(one, torch.distributed.tensor.DTensor) for one in model.parameters())
    source = module_source(model)
    model().backward()  # frees the unsharded copies
    values = dict(drawn(1))
    for tensor, held in zip(source.tensors(), source.held(), strict=True):
        assert torch.equal(held.local(), values[tensor.name])


@pytest.mark.parametrize(
    ("rank", "mesh"),
    # torch remembers a mesh's offsets: a process has one rank of each shape.
    [(5, {"shard": 4, "tensor": 2}), (2, {"replica": 2, "shard": 2, "tensor": 2})],
)
def test_module_source_has_the_rows_of_fsdp2_with_tensor_parallelism(rank: int, mesh: dict[str, int]) -> None:
    """The first matrix is cut by rows twice, the second by rows and columns, into parts of two sizes."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6))
        whole = {name: value.detach().clone() for name, value in model.named_parameters()}
        styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, devices["tensor"], styles, src_data_rank=None)
        fully_shard(model, mesh=devices[tuple(mesh)[:-1]])
        source = module_source(model)
        for tensor, held in zip(source.tensors(), source.held(), strict=True):
            box = held.shard.box
            rows = tuple(slice(at, at + n) for at, n in zip(box.start, box.extent, strict=True))
            assert torch.equal(held.local(), whole[tensor.name][rows]), tensor.name
        assert {tensor.name: tensor.shape for tensor in source.tensors()} == {
            name: tuple(value.shape) for name, value in whole.items()
        }
        assert any(box.start[0] for box in (held.shard.box for held in source.held()))
    finally:
        torch.distributed.destroy_process_group()


def test_module_source_renames_the_parameters_of_wrapped_modules() -> None:
    """The function is an example of docs/weights.md."""
    model = Model(1)
    wrapped = torch.nn.ModuleDict({"layer": checkpoint_wrapper(model)})

    def rename(name: str) -> str:
        return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")

    source = module_source(torch.compile(wrapped), rename=rename)
    assert [tensor.name for tensor in source.tensors()] == [f"layer.{name}" for name, _ in drawn(1)]


def test_tensor_source_refuses_a_tensor_without_memory() -> None:
    freed = torch.ones(3, 4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(SourceError, match=r"gate\.weight has no memory"):
        TensorSource([("gate.weight", freed)])
    TensorSource([("none.weight", torch.empty(0, 4))])


def test_push_of_freed_weights_fails_in_its_update_by_name() -> None:
    engine = WeightEngine(1)
    try:
        parameters = dict(drawn(1))
        with WeightPusher(TensorSource(parameters.items()), [str(engine.address)]) as pusher:
            pusher.connect()
            pusher.push("1").wait("applied", 30)
            for value in parameters.values():
                value.untyped_storage().resize_(0)
            update = pusher.push("2")
            with pytest.raises(PushError, match=r"version 2: .* has no memory: its storage was freed"):
                update.wait("applied", 30)
            assert engine.served == ["1"]
            for name, value in drawn(2):
                parameters[name].untyped_storage().resize_(value.untyped_storage().nbytes())
                parameters[name].copy_(value)
            pusher.push("3").wait("applied", 30)
            assert engine.served == ["3"]
    finally:
        engine.close()
