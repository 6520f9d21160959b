"""A trainer for measurements: processes that draw a checkpoint's weights, in shards if there are several, and
send them on request."""

from __future__ import annotations

import cProfile
import io
import math
import multiprocessing
import os
import pstats
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

Named = list[tuple[str, torch.Tensor]]
Figures = dict[str, float]
"""Times are of time.monotonic(), which all processes of a machine share."""

# vLLM's backends by arm, and whether tensors are packed into buffers. With one GPU alone they need not be.
THEIRS = {"nccl": ("nccl", True), "nccl-single": ("nccl", False), "ipc": ("ipc", False)}
_TIMEOUT_S, _END_S = 90.0, 10.0
_PROFILED = 14  # functions in a profile
_COPIED_BYTES, _COPIES = 2 << 30, 10


@dataclass(frozen=True)
class Order:
    """The configuration of a trainer's rank."""

    backend: str  # a key of THEIRS, or one of our modes
    config: Mapping[str, Any]  # the model's
    devices: Sequence[str]  # devices of all ranks
    dtype: str  # dtype of its weights
    engines: Sequence[str]  # ours: the controllers' addresses; vLLM's: the APIs' addresses
    workers: int  # workers of all engines
    meeting_port: int = 0  # first of two ports on which ranks and workers connect
    rank: int = 0


class GpuTrainer:
    """The trainer's ranks, as seen from the measuring process. Call close() at the end."""

    def __init__(self, order: Order) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(len(order.devices)):
            pipe, theirs = spawn.Pipe()
            process = spawn.Process(target=_main, args=(theirs, replace(order, rank=rank)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Blocks for the answers of all ranks, and returns the first one's.

        RuntimeError: a rank failed, with its traceback, or did not answer.
        """
        answers = []
        try:
            for pipe in self._pipes:
                pipe.send((method, arguments))
            for pipe in self._pipes:
                if not pipe.poll(_TIMEOUT_S):
                    raise RuntimeError(f"the trainer does not answer {method} within {_TIMEOUT_S:g} s")
                answers.append(pipe.recv())
        except (EOFError, OSError):
            raise RuntimeError("the trainer has ended; the reason is printed above") from None
        for good, answer in answers:
            if not good:
                raise RuntimeError(f"the trainer: {answer}")
        return answers[0][1]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # the rank ends then
        for process in self._processes:
            process.join(_END_S)
            process.kill()


def nccl_environment() -> dict[str, str]:
    """Returns variables for NCCL. vLLM looks for NCCL where the dynamic linker does, and torch's is in a
    wheel. NVLink's multicast is not available everywhere."""
    environment = {"NCCL_NVLS_ENABLE": "0"}
    if (named := os.environ.get("VLLM_NCCL_SO_PATH")) is not None:
        return environment | {"VLLM_NCCL_SO_PATH": named}
    with suppress(ImportError):
        import nvidia.nccl

        (library,) = (Path(folder) / "lib" / "libnccl.so.2" for folder in nvidia.nccl.__path__)
        environment["VLLM_NCCL_SO_PATH"] = str(library)
    return environment


def _main(pipe: Connection, order: Order) -> None:
    # Set like the servers' environment, before NCCL reads it.
    os.environ |= nccl_environment()
    torch.set_num_threads(1)
    if len(order.devices) > 1:
        torch.distributed.init_process_group(
            "gloo" if order.devices[0] == "cpu" else "cpu:gloo,cuda:nccl",
            f"tcp://127.0.0.1:{order.meeting_port + 1}",
            rank=order.rank,
            world_size=len(order.devices),
        )
    rank = _Rank(order)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            rank.close()
            return
        try:
            pipe.send((True, getattr(rank, method)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def weights_of(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Returns names and shapes as in a checkpoint of LlamaForCausalLM or Qwen3MoeForCausalLM."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        experts = [f"{prefix}.mlp"]
        if count := config.get("num_experts", 0):
            inner = config["moe_intermediate_size"]
            experts = [f"{prefix}.mlp.experts.{number}" for number in range(count)]
            yield f"{prefix}.mlp.gate.weight", (count, hidden)
            yield f"{prefix}.self_attn.q_norm.weight", (head,)
            yield f"{prefix}.self_attn.k_norm.weight", (head,)
        for expert in experts:
            yield f"{expert}.gate_proj.weight", (inner, hidden)
            yield f"{expert}.up_proj.weight", (inner, hidden)
            yield f"{expert}.down_proj.weight", (hidden, inner)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


class _Sender(Protocol):
    def connect(self, *, applies: bool) -> Figures:
        """Connects to the engines, anew if it was connected.

        ``applies``: whether pushed versions are applied, too.
        """

    def push(self, version: str) -> Figures: ...

    def close(self) -> None: ...


class _Rank:
    def __init__(self, order: Order) -> None:
        self._device = torch.device(order.devices[order.rank])
        self._rank, self._ranks = order.rank, len(order.devices)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dtype = getattr(torch, order.dtype)
        self._shapes = list(weights_of(order.config))
        self._local: Named = [
            (name, torch.empty(shape[0] // self._ranks, *shape[1:], dtype=dtype, device=self._device))
            for name, shape in self._shapes
        ]
        named = self._local if self._ranks == 1 else self._sharded()
        wire = getattr(torch, order.config["torch_dtype"])
        self._nbytes: int = sum(math.prod(shape) for _, shape in self._shapes) * wire.itemsize
        self._sender: _Sender
        if order.backend in THEIRS:
            self._sender = _Theirs(named, order, wire)
        else:
            self._sender = _Ours(named, order.engines)

    def _sharded(self) -> Named:
        """Makes the tensors of FSDP2: a rank has some of the rows."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh(self._device.type, (self._ranks,))
        return [
            (
                name,
                DTensor.from_local(
                    local,
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=torch.empty(shape, device="meta").stride(),
                ),
            )
            for (name, local), (_, shape) in zip(self._local, self._shapes, strict=True)
        ]

    def nbytes(self) -> int:
        """Bytes of the checkpoint in an engine's dtype."""
        return self._nbytes

    def draw(self, seed: int) -> None:
        """Draws weights with which tokens depend on all of the prompt (as in kv_connector.lab.model).

        The same seed gives the same weights on any GPU of a kind.
        """
        generator = torch.Generator(self._device).manual_seed(seed)
        for (name, local), (_, shape) in zip(self._local, self._shapes, strict=True):
            if local.dim() == 1:
                local.fill_(1.0)
                continue
            scale = 1.0 if "embed" in name else shape[1] ** -0.5
            if self._ranks == 1:
                local.normal_(0.0, scale, generator=generator)
            else:
                whole = torch.empty(shape, dtype=local.dtype, device=self._device)
                local.copy_(whole.normal_(0.0, scale, generator=generator).chunk(self._ranks)[self._rank])
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def connect(self, applies: bool = True) -> Figures:
        return self._with_memory(lambda: self._sender.connect(applies=applies))

    def push(self, version: str) -> Figures:
        return self._with_memory(lambda: self._sender.push(version))

    def push_for(self, seconds: float) -> Figures:
        """Pushes one version after another."""
        begin, count = time.monotonic(), 0
        while time.monotonic() < begin + seconds:
            self._sender.push(f"again{count}")
            count += 1
        return {"begin": begin, "end": time.monotonic(), "pushes": count}

    def profile(self, version: str) -> str:
        """Profiles the thread that pushes a version."""
        profile, text = cProfile.Profile(), io.StringIO()
        profile.runcall(self._sender.push, version)
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(_PROFILED)
        return text.getvalue()

    def copy_peak(self, others: Sequence[str]) -> float:
        """Returns the bytes a second of plain copies to all other GPUs at once, while other ranks do the
        same."""
        nbytes = _COPIED_BYTES // len(others)
        source = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        targets = [torch.empty(nbytes, dtype=torch.uint8, device=other) for other in others]
        streams = [torch.cuda.Stream(self._device) for _ in others]
        rates = []
        for _ in range(_COPIES):
            if self._ranks > 1:
                torch.distributed.all_reduce(torch.zeros(1))  # all begin at once
            torch.cuda.synchronize(self._device)
            begin = time.monotonic()
            for target, stream in zip(targets, streams, strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(self._device)
            rates.append(nbytes * len(others) / (time.monotonic() - begin))
        return statistics.median(rates)

    def close(self) -> None:
        self._sender.close()

    def _with_memory(self, work: Callable[[], Figures]) -> Figures:
        """Runs ``call``.

        Adds to its result torch's peak bytes beyond the weights, and the thread's CPU seconds.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        cpu = time.thread_time()
        figures = work() | {"cpu": time.thread_time() - cpu}
        if self._device.type == "cuda":
            weights = sum(tensor.nbytes for _, tensor in self._local)
            figures["extra bytes"] = torch.cuda.max_memory_allocated() - weights
        return figures


class _Ours:
    def __init__(self, named: Named, engines: Sequence[str]) -> None:
        from kv_connector.weights.pusher import WeightPusher
        from kv_connector.weights.sources import TensorSource

        self._make = WeightPusher
        self._source, self._engines, self._applies = TensorSource(named), engines, True
        self._pusher: WeightPusher | None = None

    def connect(self, *, applies: bool) -> Figures:
        self.close()
        begin = time.monotonic()
        self._pusher = self._make(self._source, self._engines, apply=None if applies else lambda _: None)
        made = time.monotonic()
        self._pusher.connect()
        self._applies = applies
        return {"begin": begin, "made": made, "end": time.monotonic()}

    def push(self, version: str) -> Figures:
        assert self._pusher is not None
        figures = {"begin": time.monotonic()}
        update = self._pusher.push(version)
        figures["sent"] = time.monotonic()
        if self._source.rank:  # only the first rank's answer is used
            return figures
        update.wait("landed", _TIMEOUT_S)
        figures["landed"] = figures["end"] = time.monotonic()
        if self._applies:
            update.wait("applied", _TIMEOUT_S)
            figures["end"] = time.monotonic()
        return figures

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None


class _Theirs:
    """A backend of vLLM. A version is sent in a pause."""

    def __init__(self, named: Named, order: Order, wire: torch.dtype) -> None:
        self._named, self._order, self._wire = named, order, wire
        self._threads = ThreadPoolExecutor(len(order.engines))
        self._trainer: Any = None

    def connect(self, *, applies: bool) -> Figures:
        del applies
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        named, wire = self._named, self._wire

        class Weights(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, wire, tuple(tensor.shape)) for name, tensor in named]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in named:
                    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                    yield name, whole.to(wire)

        order = self._order
        workers = order.workers // len(order.engines)

        class Client:
            """Sends requests to several engines at once, whose workers are numbered consecutively."""

            def __init__(self, threads: ThreadPoolExecutor) -> None:
                self._threads = threads
                self._clients = [HTTPVLLMWeightSyncClient(url) for url in order.engines]

            def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
                def one(number: int) -> None:
                    moved = {"rank_offset": info["rank_offset"] + number * workers} if offset else {}
                    self._clients[number].init_weight_transfer_engine({**info, **moved})

                offset = "rank_offset" in info

                list(self._threads.map(one, range(len(self._clients))))

            def start_weight_update(self) -> None:
                list(self._threads.map(lambda client: client.start_weight_update(), self._clients))

            def update_weights(self, info: Any) -> None:
                list(self._threads.map(lambda client: client.update_weights(info), self._clients))

            def finish_weight_update(self, version: str | None = None) -> None:
                list(self._threads.map(lambda client: client.finish_weight_update(version), self._clients))

        begin = time.monotonic()
        backend, packed = THEIRS[order.backend]
        info = (
            IPCTrainerInitInfo(packed=packed, rank=order.rank)
            if backend == "ipc"
            else NCCLTrainerInitInfo(
                "127.0.0.1", order.meeting_port, 1 + order.workers, packed=packed, rank=order.rank
            )
        )
        client = Client(self._threads)
        self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Weights())
        if getattr(getattr(self._trainer, "model_update_group", None), "disabled", False):
            # vLLM reports nothing in this case, and its broadcasts do nothing from then on.
            raise RuntimeError("vLLM has found no usable NCCL. vLLM 0.32 needs 2.29.7")
        return {"begin": begin, "made": begin, "end": time.monotonic()}

    def push(self, version: str) -> Figures:
        import requests

        del version

        def tell(path: str, parameters: Mapping[str, str] | None = None) -> None:
            def one(url: str) -> None:
                requests.post(f"{url}/{path}", params=parameters, timeout=_TIMEOUT_S).raise_for_status()

            if self._order.rank == 0:
                list(self._threads.map(one, self._order.engines))

        # As in our backend: frozen requests continue with new weights, and are computed anew.
        figures = {"begin": time.monotonic()}
        tell("pause", {"mode": "keep", "clear_cache": "true"})
        figures["paused"] = time.monotonic()
        self._trainer.send_weights()
        figures["sent"] = time.monotonic()
        tell("resume")
        figures["end"] = time.monotonic()
        return figures

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()
        self._threads.shutdown()
