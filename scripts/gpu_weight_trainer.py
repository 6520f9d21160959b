"""A trainer for measurements: a process that draws a checkpoint's weights, and sends them when it is told."""

from __future__ import annotations

import cProfile
import io
import multiprocessing
import os
import pstats
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

Named = list[tuple[str, torch.Tensor]]
Figures = dict[str, float]
"""Times are time.monotonic()'s, which all processes of a machine share."""

_TIMEOUT_S, _END_S = 90.0, 10.0
_PROFILED = 14  # functions
_COPIED_BYTES, _COPIES = 2 << 30, 10


@dataclass(frozen=True)
class Order:
    """What a trainer is made of."""

    backend: str  # ours, nccl
    config: Mapping[str, Any]  # the model's
    device: str
    dtype: str  # of its weights
    engine: str  # ours: the controller's address; nccl: the API's
    meeting_port: int = 0  # nccl: where ranks find each other


class Trainer:
    """In this process: what the other one is asked. close() it."""

    def __init__(self, order: Order) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_main, args=(theirs, order), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Blocks for the answer; RuntimeError with the other's traceback, or where none comes."""
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(_TIMEOUT_S):
                raise RuntimeError(f"the trainer does not answer {method} within {_TIMEOUT_S:g} s")
            good, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError("the trainer has ended, for the reason above") from None
        if not good:
            raise RuntimeError(f"the trainer: {answer}")
        return answer

    def close(self) -> None:
        self._pipe.close()  # it ends
        self._process.join(_END_S)
        self._process.kill()


def _main(pipe: Connection, order: Order) -> None:
    # As in the servers' environment, before NCCL looks for it.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.set_num_threads(1)
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


def llama_weights(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as in a checkpoint of LlamaForCausalLM."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


class _Sender(Protocol):
    def connect(self, *, applies: bool) -> Figures:
        """Anew, where it was connected. ``applies``: whether what is pushed is applied, too."""

    def push(self, version: str) -> Figures: ...

    def close(self) -> None: ...


class _Rank:
    def __init__(self, order: Order) -> None:
        self._device = torch.device(order.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dtype = getattr(torch, order.dtype)
        self._named: Named = [
            (name, torch.empty(shape, dtype=dtype, device=self._device))
            for name, shape in llama_weights(order.config)
        ]
        wire = getattr(torch, order.config["torch_dtype"])
        self._nbytes: int = sum(tensor.numel() for _, tensor in self._named) * wire.itemsize
        senders: dict[str, Callable[[], _Sender]] = {
            "ours": lambda: _Ours(self._named, order.engine),
            "nccl": lambda: _Nccl(self._named, order.engine, order.meeting_port, wire),
        }
        self._sender = senders[order.backend]()

    def nbytes(self) -> int:
        """Of the checkpoint, as an engine has it."""
        return self._nbytes

    def draw(self, seed: int) -> None:
        """Weights from which tokens come that depend on all of the prompt (as in kv_connector.lab.model). The
        same seed gives the same ones on any GPU of a kind."""
        generator = torch.Generator(self._device).manual_seed(seed)
        for name, tensor in self._named:
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                scale = 1.0 if "embed" in name else tensor.shape[1] ** -0.5
                tensor.normal_(0.0, scale, generator=generator)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def connect(self, applies: bool = True) -> Figures:
        return self._with_memory(lambda: self._sender.connect(applies=applies))

    def push(self, version: str) -> Figures:
        return self._with_memory(lambda: self._sender.push(version))

    def push_for(self, seconds: float) -> Figures:
        """One version after another."""
        begin, count = time.monotonic(), 0
        while time.monotonic() < begin + seconds:
            self._sender.push(f"again{count}")
            count += 1
        return {"begin": begin, "end": time.monotonic(), "pushes": count}

    def profile(self, version: str) -> str:
        """Of the thread that pushes a version: where it spends its time."""
        profile, text = cProfile.Profile(), io.StringIO()
        profile.runcall(self._sender.push, version)
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(_PROFILED)
        return text.getvalue()

    def copy_peak(self, other: str) -> float:
        """Bytes a second of a plain copy to another GPU."""
        source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=self._device)
        target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=other)
        rates = []
        for _ in range(_COPIES):
            torch.cuda.synchronize(self._device)
            begin = time.monotonic()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(self._device)
            rates.append(_COPIED_BYTES / (time.monotonic() - begin))
        return statistics.median(rates)

    def close(self) -> None:
        self._sender.close()

    def _with_memory(self, work: Callable[[], Figures]) -> Figures:
        """Beside what it gives: the most bytes of torch's beyond the weights, and the thread's seconds on a
        processor."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        cpu = time.thread_time()
        figures = work() | {"cpu": time.thread_time() - cpu}
        if self._device.type == "cuda":
            weights = sum(tensor.nbytes for _, tensor in self._named)
            figures["extra bytes"] = torch.cuda.max_memory_allocated() - weights
        return figures


class _Ours:
    def __init__(self, named: Named, engine: str) -> None:
        from kv_connector.weights.pusher import WeightPusher
        from kv_connector.weights.sources import TensorSource

        self._make = WeightPusher
        self._source, self._engine, self._applies = TensorSource(named), engine, True
        self._pusher: WeightPusher | None = None

    def connect(self, *, applies: bool) -> Figures:
        self.close()
        begin = time.monotonic()
        self._pusher = self._make(self._source, [self._engine], applies=applies)
        made = time.monotonic()
        self._pusher.connect()
        self._applies = applies
        return {"begin": begin, "made": made, "end": time.monotonic()}

    def push(self, version: str) -> Figures:
        assert self._pusher is not None
        figures = {"begin": time.monotonic()}
        update = self._pusher.push(version)
        figures["sent"] = time.monotonic()
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


class _Nccl:
    """vLLM's own. A version is sent in a pause."""

    def __init__(self, named: Named, engine: str, port: int, wire: torch.dtype) -> None:
        self._named, self._url, self._port, self._wire = named, engine, port, wire
        self._trainer: Any = None

    def connect(self, *, applies: bool) -> Figures:
        del applies
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        named, wire = self._named, self._wire

        class Weights(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, wire, tuple(tensor.shape)) for name, tensor in named]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in named:
                    yield name, tensor.to(wire)

        begin = time.monotonic()
        info = NCCLTrainerInitInfo("127.0.0.1", self._port, 2, packed=True, rank=0)
        client = HTTPVLLMWeightSyncClient(self._url)
        self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Weights())
        return {"begin": begin, "made": begin, "end": time.monotonic()}

    def push(self, version: str) -> Figures:
        import requests

        del version
        # As ours does it: frozen requests go on with new weights, and are computed anew.
        figures = {"begin": time.monotonic()}
        pause = {"mode": "keep", "clear_cache": "true"}
        requests.post(f"{self._url}/pause", params=pause, timeout=_TIMEOUT_S).raise_for_status()
        figures["paused"] = time.monotonic()
        self._trainer.send_weights()
        figures["sent"] = time.monotonic()
        requests.post(f"{self._url}/resume", timeout=_TIMEOUT_S).raise_for_status()
        figures["end"] = time.monotonic()
        return figures

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()
