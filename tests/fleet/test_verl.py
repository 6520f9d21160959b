"""verl's own manager, workers and registry, in Ray actors on CPUs, with this project's checkpoint engine.

The trainers draw tensors of no model, and the rollout workers hash them instead of loading them.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_streams import bits, drawn

pytest.importorskip("verl", reason="verl is not installed: run scripts/setup fleet")

import ray
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from kv_connector.verl.checkpoint_engine import BACKEND, WriteImmCheckpointEngine

MODULE = "kv_connector.verl.checkpoint_engine"
BUCKET_MB = 1
TRAINERS, ROLLOUTS = 2, 2
DEADLY_STEP = 3
CONFIG = CheckpointEngineConfig(
    backend=BACKEND,
    update_weights_bucket_megabytes=BUCKET_MB,
    engine_kwargs={BACKEND: {"providers": ["tcp"], "timeout": 60}},
    custom_backend_module=MODULE,
)


def weights(step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A few MB in tensors of all kinds, of which one is larger than a bucket."""
    yield from drawn(step)
    yield "embedding", torch.randn(700, 1000, generator=torch.Generator().manual_seed(step)).bfloat16()


def digest(named: Any) -> dict[str, str]:
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(bits(tensor)).hexdigest()}"
        for name, tensor in named
    }


class Trainer(Worker):  # type: ignore[misc]
    """A trainer that treats its checkpoint engine as verl's ActorRolloutRefWorker does, without a model."""

    def __init__(self) -> None:
        super().__init__()
        import_external_libs(CONFIG.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            BACKEND, is_master=(self.rank == 0), bucket_size=BUCKET_MB << 20, **CONFIG.engine_kwargs[BACKEND]
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[misc]
    async def update_weights(self, global_steps: int, mode: str = "auto") -> dict[str, Any]:
        metrics = await self.checkpoint_engine.send_weights(weights(global_steps), global_steps=global_steps)
        return metrics or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[misc]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter:
    """A rollout's server adapter that hashes what it receives. The last rank kills itself at one step."""

    def __init__(self) -> None:
        self.replica_rank, self.is_leader_rank = 0, True
        self.found: dict[str, str] = {}

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], global_steps: int, wire_format: str
    ) -> None:
        assert wire_format == "named_tensors"
        self.found = {}
        async for name, tensor in weights:
            if global_steps == DEADLY_STEP and int(os.environ["RANK"]) == ROLLOUTS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.found |= digest([(name, tensor)])


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    def found(self) -> dict[str, str]:
        return self.server_adapter.found


class Replica:
    """One rollout replica, whose engine does nothing."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def __getattr__(self, name: str) -> Any:
        async def nothing(**arguments: Any) -> None:
            await asyncio.sleep(0)

        return nothing


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = [str(Path(of).parent) for of in (__file__, inspect.getfile(drawn))]
    path = os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=8, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield
    ray.shutdown()


def group(cls: Any, ranks: int, *arguments: Any, **named: Any) -> RayWorkerGroup:
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), *arguments, **named), device_name="cpu")


def test_the_engine_has_the_calls_of_verls_interface() -> None:
    assert CheckpointEngineRegistry.get(BACKEND) is WriteImmCheckpointEngine
    for name in CheckpointEngine.__abstractmethods__:
        ours, theirs = (getattr(cls, name) for cls in (WriteImmCheckpointEngine, CheckpointEngine))
        if name != "init_process_group":  # its arguments are those that build_topology returns
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), (
                name
            )
        assert inspect.iscoroutinefunction(ours) == (name == "send_weights"), name
    assert inspect.isasyncgenfunction(WriteImmCheckpointEngine.receive_weights)
    assert WriteImmCheckpointEngine.wire_format == "named_tensors"


def test_verls_manager_updates_rollout_workers_that_leave_join_and_die(cluster: None) -> None:
    trainers = group(Trainer, TRAINERS)
    config = RolloutConfig(name="vllm", checkpoint_engine=CONFIG)
    rollouts = group(
        Rollout, ROLLOUTS, rollout_config=config, model_config=None, server_adapter=Adapter()
    ).workers
    manager = CheckpointEngineManager(CONFIG, trainers, [Replica([worker]) for worker in rollouts])
    replicas = manager.replicas

    def updated(step: int) -> list[dict[str, str]]:
        manager.update_weights(global_steps=step)
        return ray.get([worker.found.remote() for replica in manager.replicas for worker in replica.workers])

    for step in range(2):
        assert updated(step) == [digest(weights(step))] * ROLLOUTS
    manager.replicas = replicas[1:]
    assert updated(2) == [digest(weights(2))] * (ROLLOUTS - 1)
    manager.replicas = replicas
    with pytest.raises(ray.exceptions.RayError, match=r"rollout worker \d at .* is lost|died"):
        updated(DEADLY_STEP)
    # verl does not finalize after a failure: what is left is ended when the next update begins.
    manager.replicas = replicas[:-1]
    assert updated(DEADLY_STEP + 1) == [digest(weights(DEADLY_STEP + 1))] * (ROLLOUTS - 1)
