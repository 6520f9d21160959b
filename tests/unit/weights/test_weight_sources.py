"""Sources whose tensors have no memory, and modules whose parameters are not sharded at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weight_engines import Engine, drawn

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


def test_tensor_source_refuses_a_tensor_without_memory() -> None:
    freed = torch.ones(3, 4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(SourceError, match=r"gate\.weight has no memory"):
        TensorSource([("gate.weight", freed)])
    TensorSource([("none.weight", torch.empty(0, 4))])


def test_push_of_freed_weights_fails_in_its_update_by_name() -> None:
    engine = Engine(1)
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
