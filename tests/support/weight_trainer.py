"""A trainer of a small model under FSDP2 or HSDP, over gloo, whose ranks push versions on command, and a
trainer that is killed while it pushes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.block_fp8 import BlockFp8
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import CheckpointSource, TensorSource, module_source
from kv_connector.weights.update import PushError, Stage

# Row counts that no number of ranks divides, and one that is below the number of ranks.
SIZES = {"up": (31, 20), "down": (20, 32), "norm": (3, 1)}
PATIENCE_S = 180

# A fork server that has loaded torch, which takes each rank many seconds. With Python 3.11 the server does
# not find the files of the tests.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch.distributed.fsdp", "kv_connector.weights.pusher"])


def drawn(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and values of all weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, (rows, columns) in SIZES.items():
        yield f"{name}.weight", torch.randn(rows, columns, generator=generator)


class TrainedModel(torch.nn.Module):
    """A module with parameters of any names."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        for name, value in named:
            *path, own = name.split(".")
            module: torch.nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, torch.nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(own, torch.nn.Parameter(value))

    def forward(self) -> None:
        """Is never called."""


def in_checkpoint(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in directory.glob("*.safetensors"):
        yield from load_file(path).items()


class RankProcesses:
    """One process per rank, driven by a test.

    ``work(told, store, rank, *more)`` is the process's function. ``told`` is its connection to the test. The
    ranks connect through the file ``store`` in ``directory``.
    """

    def __init__(self, work: Callable[..., None], directory: Path, ranks: int, *more: object) -> None:
        self.ranks = []
        self._ends = []
        store = str(directory / f"store-{uuid.uuid4().hex}")
        for rank in range(ranks):
            ours, theirs = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=work, args=(theirs, store, rank, *more), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(process)
            self._ends.append(ours)

    def say(self, words: str, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            self._ends[rank].send(words)

    def heard(self, rank: int) -> str:
        assert self._ends[rank].poll(PATIENCE_S), f"rank {rank} says nothing"
        return str(self._ends[rank].recv())

    def all_say(self, words: str) -> None:
        assert [self.heard(rank) for rank in range(len(self.ranks))] == [words] * len(self.ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


class Trainer(RankProcesses):
    """A trainer. ``main`` describes the arguments."""

    def __init__(
        self,
        directory: Path,
        engines: Sequence[str],
        weights: int | Path,
        *,
        ranks: int,
        replicas: int = 1,
        applies: bool = False,
        fp8: bool = False,
        router: str | None = None,
    ) -> None:
        super().__init__(main, directory, ranks, ranks, replicas, weights, engines, applies, fp8, router)


def main(
    told: Connection,
    store: str,
    rank: int,
    ranks: int,
    replicas: int,
    weights: int | Path,
    engines: Sequence[str],
    applies: bool = False,
    fp8: bool = False,
    router: str | None = None,
) -> None:
    """Runs one rank of a trainer.

    ``replicas``: of each shard; 0: every rank has all weights. ``weights``: the seed of `drawn`, or a
    checkpoint. On "VERSION" the rank pushes that version and reports the result. On "stop VERSION" it begins
    the push, reports that, and hangs. ``fp8``: it quantises the tensors that the engines hold in float8.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    named = drawn(weights) if isinstance(weights, int) else in_checkpoint(weights)
    if replicas:
        names = ("replicate", "shard") if replicas > 1 else ("shard",)
        shape = (replicas, ranks // replicas) if replicas > 1 else (ranks,)
        model = TrainedModel(named)
        source = module_source(fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names)))
    else:
        source = TensorSource(named)
    # No test waits for an engine that falls silent.
    timeouts = Timeouts(connect=PATIENCE_S, dead=PATIENCE_S, heartbeat=0.5)
    with WeightPusher(
        BlockFp8(source) if fp8 else source,
        engines,
        router=router,
        apply=None if applies else lambda _: None,
        timeouts=timeouts,
        staging_bytes=1024,
    ) as pusher:
        pusher.connect()
        told.send("connected")
        while True:
            *stop, version = told.recv().split()
            if stop:

                def hang(_: object) -> None:
                    told.send("begun")
                    threading.Event().wait()

                pusher._writer.write = hang  # type: ignore[method-assign, assignment]
            try:
                stage: Stage = "applied" if applies else "landed"
                pusher.push(version).wait(stage, PATIENCE_S)
                told.send(stage)
            except PushError as error:
                told.send(str(error))


def main_until_killed(checkpoint: Path, version: str, engines: Sequence[str], writes: int) -> None:
    """Pushes a checkpoint, and is killed (-9) after it has posted this many writes."""
    left = writes
    with WeightPusher(CheckpointSource(checkpoint), engines, providers=("host", "tcp")) as pusher:
        pusher.connect()
        post = pusher._writer._post

        def count(*arguments: object) -> None:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            post(*arguments)  # type: ignore[arg-type]

        pusher._writer._post = count  # type: ignore[method-assign, assignment]
        pusher.push(version)
        os.kill(os.getpid(), signal.SIGKILL)
