#!/usr/bin/env python3
"""Compares vLLM's data-parallel engines with and without KV_CONNECTOR_MOE=1 on a machine with GPUs.

    gpu_experts.py [--ranks N] [--out FILE] [--seconds S] [--logs DIR] [qwen3] [deepseek]

Both engines of a shape run at the same time, with N processes each, one per GPU. They start one after the
other and are measured in turns, so that no two engines use the GPUs together. For each shape the script

- generates greedy tokens of the same prompts, uneven over the ranks, and compares them one by one,
- measures decode steps at 1, 8, 32 and 128 tokens a rank: wall time, and GPU time of the step's graph,
- counts the calls that kv-connector took, and those that it passed on to vLLM, with reasons.

Weights are random, at the scale of a trained network (kv_connector/lab/model.py has the reason). The vLLM
plugin of kv-connector must be installed (at least its entry point). Each result is a JSON line, and a table
ends the output. Exits with 1 if a token differs or an engine fails. `--tiny` runs a small shape on CPUs.

`--modes theirs,ours,deepep_low_latency` also runs another of vLLM's exchanges, by the name of
`--all2all-backend`. One that does not start is reported and left out. Its tokens are compared too, but may
differ: other exchanges bring other kernels of experts, which round differently. Three engines of a full shape
fill an H200, so `--layers` must be lower for more. Set NVSHMEM_QP_DEPTH=4096 for deepep_low_latency.
"""

# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODES = ("theirs", "ours")
"""vLLM's allgather_reducescatter, and kv-connector's exchange. Any other mode is a vLLM backend's name."""
BATCHES = (1, 8, 32, 128)
PROMPT_TOKENS = 24
WARM_STEPS, STEPS = 5, 30
"""Decode steps of one round: uncounted ones, then counted ones."""
ROUNDS = 2
"""Rounds of each batch and mode. The modes take turns."""
OUTPUT_TOKENS = 24
MAX_MODEL_LEN = 2048
BATCHED_TOKENS = 1536
"""Tokens of a step, more than the exchange takes (1,024): steps with the long prompt use vLLM's exchange."""
LONG_PROMPT_ROOM = 136
"""Tokens that the long prompt leaves free in a step."""

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 7,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
    "vocab_size": 129280,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# The same architectures, small enough for CPUs. vLLM for CPUs has no fp8 experts.
TINY_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
TINY = {
    "qwen3": QWEN3 | TINY_COMMON | {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8},
    "deepseek": {name: value for name, value in DEEPSEEK.items() if name != "quantization_config"}
    | TINY_COMMON
    | {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 64},
}
SHAPES = {"qwen3": QWEN3, "deepseek": DEEPSEEK}


@dataclass(frozen=True)
class RankPlan:
    """The settings that a rank's process receives from its parent."""

    mode: str
    rank: int
    ranks: int
    directory: str
    shape: dict[str, Any]
    batches: tuple[int, ...]
    batched_tokens: int
    compiles: bool
    cpu: bool
    log: str


# --- in a rank's process ---


def serve(plan: RankPlan, parent: Connection) -> None:
    """Runs a rank: starts its engine at the first request of the parent, then answers the parent."""
    log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        rank = EngineRank(plan)
        parent.send(("imported", None))
        while True:
            name, *given = parent.recv()
            if name == "end":
                break
            parent.send(("done", getattr(rank, name)(*given)))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            parent.send(("failed", f"{type(error).__name__}: {error}"))
    # The engines share GPUs, and the results are sent. An orderly end is not needed.
    os._exit(0)


class EngineRank:
    """One rank of one engine, in its own process, with vLLM's engine core in the same process."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_DP_RANK": str(plan.rank),
            "VLLM_DP_RANK_LOCAL": str(plan.rank),
            "VLLM_DP_SIZE": str(plan.ranks),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_CACHE_ROOT": f"{plan.directory}/cache",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_DEEP_GEMM": "0",  # compiles for each shape, which takes minutes
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "HF_HUB_OFFLINE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "KV_CONNECTOR_MOE": "1" if plan.mode == "ours" else "0",
        }
        if plan.cpu:
            os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
            sys.path.append(str(ROOT / "tests" / "support"))
        # Last, so that an installed kv_connector with its native modules comes before the sources.
        sys.path.append(str(ROOT))
        import torch
        import vllm

        self.torch, self.vllm = torch, vllm
        self.replays: list[list[tuple[Any, Any]]] | None = None
        """Begin and end of each graph, by step. None: graphs are not timed."""
        if not plan.cpu:
            self._time_replays()
        self._draw_weights()

    def _time_replays(self) -> None:
        torch = self.torch
        replay = torch.cuda.CUDAGraph.replay

        def timed(graph: Any) -> Any:
            if self.replays is None:
                return replay(graph)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = replay(graph)
            end.record()
            self.replays[-1].append((begin, end))
            return result

        torch.cuda.CUDAGraph.replay = timed

    def _draw_weights(self) -> None:
        """Makes vLLM's dummy loader draw weights with which the output depends on all of the prompt."""
        from vllm.model_executor.model_loader import dummy_loader

        torch, plan = self.torch, self.plan

        def load_weights(_: Any, model: Any, model_config: Any) -> None:
            for path, layer in model.named_modules():
                persistent = {name for name, _ in layer.named_buffers(recurse=False)}
                persistent -= layer._non_persistent_buffers_set
                tensors = dict(layer.named_parameters(recurse=False))
                tensors |= {name: layer.get_buffer(name) for name in persistent}
                for name, tensor in tensors.items():
                    draw(torch, f"{path}.{name}", tensor.data, plan)

        dummy_loader.DummyModelLoader.load_weights = load_weights

    def start(self, port: int) -> dict[str, Any]:
        """Starts the engine, whose ranks meet at ``port``. Collective over the ranks of a mode."""
        os.environ["VLLM_DP_MASTER_PORT"] = str(port)
        plan, begin = self.plan, time.monotonic()
        settings: dict[str, Any] = {
            "model": f"{plan.directory}/model",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": plan.batched_tokens,
            "max_num_seqs": max(plan.batches),
            "enable_expert_parallel": True,
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "disable_nccl_for_dp_synchronization": True,
            # In this process, because the graphs are timed and the weights drawn here.
            "distributed_executor_backend": "uni",
            "seed": 0,
            # Each of these compiles kernels that these shapes do not use.
            "kernel_config": {
                "enable_flashinfer_autotune": False,
                "enable_cutedsl_warmup": False,
                "enable_jit_warmup": False,
            },
        }
        if plan.mode not in MODES:
            settings["all2all_backend"] = plan.mode
        if plan.cpu:
            settings |= {"enforce_eager": True, "worker_extension_cls": "moe_on_cpu.Worker"}
            settings |= {"kv_cache_memory_bytes": 64 << 20}
        else:
            sizes = sorted({1, 2, 4, 8, 16, *plan.batches})
            settings |= {
                "kv_cache_memory_bytes": 4 << 30,
                "gpu_memory_utilization": 0.4,
                "compilation_config": {
                    "mode": 3 if plan.compiles else 0,
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": sizes,
                },
            }
        self.llm = self.vllm.LLM(**settings)
        return {"seconds": round(time.monotonic() - begin, 1), "manager": self._manager()}

    def _manager(self) -> str:
        from vllm.distributed import get_ep_group

        return type(get_ep_group().device_communicator.all2all_manager).__name__

    def _enqueue(self, prompts: Sequence[list[int]], tokens: int) -> list[str]:
        parameters = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        ids: list[str] = self.llm.enqueue(given, parameters, use_tqdm=False) if given else []
        return ids

    def generate(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Generates greedy tokens of this rank's prompts.

        Collective. A rank without prompts runs dummy steps.
        """
        ids = self._enqueue(prompts, tokens)
        found: dict[str, list[int]] = {}
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
        by_number = sorted(found, key=lambda one: int(one.split("-")[0]))
        assert len(by_number) == len(ids)
        return [found[one] for one in by_number]

    def decode(self, prompts: Sequence[list[int]], warm: int, steps: int) -> dict[str, Any]:
        """Times decode steps with all prompts. Collective. Each rank has the same number of prompts."""
        # The first steps also prefill. Two more tokens are requested than needed, so that no request ends in
        # a counted step.
        self._enqueue(prompts, len(prompts) + warm + steps + 2)
        engine = self.llm.llm_engine
        requests = list(engine.engine_core.engine_core.scheduler.requests.values())

        # All ranks take the same number of steps, so no rank has to agree with the others on the end.
        while any(not request.num_output_tokens for request in requests):
            engine.step()
        for _ in range(warm):
            engine.step()
        self._synchronize()
        self.replays = []
        before, times = requests[-1].num_output_tokens, [time.perf_counter()]
        for _ in range(steps):
            self.replays.append([])
            engine.step()
            times.append(time.perf_counter())
        self._synchronize()
        replays, self.replays = self.replays, None
        made = requests[-1].num_output_tokens - before
        engine.abort_request([request.request_id for request in requests], internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        return {
            "tokens": made,
            "step_us": [1e6 * (after - begin) for begin, after in itertools.pairwise(times)],
            # From the start of a step's first graph to the end of its last. A model may have several.
            "graph_us": [1e3 * step[0][0].elapsed_time(step[-1][1]) for step in replays if step],
        }

    def _synchronize(self) -> None:
        if not self.plan.cpu:
            self.torch.cuda.synchronize()

    def counts(self) -> dict[str, int]:
        """Returns the calls that kv-connector took, and those passed on by reason."""
        from prometheus_client import REGISTRY

        names = ("kv_connector_moe_taken_total", "kv_connector_moe_passed_total")
        return {
            sample.labels.get("reason", "taken"): int(sample.value)
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name in names
        }


def draw(torch: Any, path: str, tensor: Any, plan: RankPlan) -> None:
    """Fills a tensor by its name: equal in both modes and, except for experts, on all ranks."""
    name = path.rsplit(".", 1)[-1]
    if not tensor.is_floating_point():
        return
    if "scale" in name:
        # Block scales of 128 columns, for weights that are drawn with a spread of 64.
        tensor.fill_(1 / 64 / (128 * tensor.shape[-1]) ** 0.5 if tensor.dim() > 1 else 1.0)
        return
    if tensor.dim() < 2:
        # Queries and keys have unit variance before their norm's weight, so only that weight spreads the
        # scores.
        is_head_norm = ".q_norm." in path or ".k_norm." in path
        tensor.fill_(0.0 if "bias" in name else 3.0**0.5 if is_head_norm else 1.0)
        return
    of_rank = plan.rank + 1 if "experts" in path and "shared_experts" not in path else 0
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(zlib.crc32(path.encode()) + of_rank)
    is_vocabulary = "embed_tokens" in path or "lm_head" in path
    spread = 1.0 if is_vocabulary else tensor.shape[-1] ** -0.5
    if tensor.element_size() > 1:
        tensor.normal_(0.0, spread, generator=generator)
        return
    for part in tensor if tensor.dim() > 2 else (tensor,):
        drawn = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device)
        part.copy_(drawn.normal_(0.0, 64.0, generator=generator).clamp_(-448, 448))


# --- in the parent ---


class FailedEngine(RuntimeError):
    """An engine failed or did not answer in time."""


@dataclass
class Mode:
    """The processes of one engine, one per rank."""

    name: str
    processes: list[Any] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def end(self) -> None:
        """Ends the processes."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(("end",))
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()

    def answers(self, seconds: float) -> list[Any]:
        """Returns one answer of each rank, in rank order."""
        found: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(found) < len(self.connections):
            waiting = [c for rank, c in enumerate(self.connections) if rank not in found]
            ready = wait_for(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                silent = sorted(set(range(len(self.connections))) - found.keys())
                raise FailedEngine(f"{self.name}: ranks {silent} did not answer in {seconds:.0f} s")
            for rank, connection in enumerate(self.connections):
                if connection not in ready:
                    continue
                try:
                    kind, value = connection.recv()
                except EOFError:
                    kind, value = "failed", "its process ended"
                if kind == "failed":
                    raise FailedEngine(f"{self.name}: rank {rank}: {value}")
                found[rank] = value
        return [found[rank] for rank in range(len(self.connections))]

    def ask(self, seconds: float, name: str, *given: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """Makes each rank run a method. ``each`` has the first argument of each rank."""
        for rank, connection in enumerate(self.connections):
            own = () if each is None else (each[rank],)
            connection.send((name, *own, *given))
        return self.answers(seconds)


class Comparison:
    """Both engines of one shape."""

    def __init__(
        self, options: argparse.Namespace, name: str, write: Callable[[dict[str, Any]], None]
    ) -> None:
        self.options, self.name, self.write = options, name, write
        self.shape = COMMON | (TINY[name] if options.tiny else SHAPES[name])
        if options.layers:
            self.shape["num_hidden_layers"] = options.layers
        self.end = time.monotonic() + options.seconds
        self.random = random.Random(0)
        self.batches = (1, 4) if options.tiny else BATCHES
        self.modes: list[Mode] = []
        self.table: list[dict[str, Any]] = []
        self.differs = 0

    def left(self, most: float) -> float:
        """Returns the time limit of a request in seconds: ``most``, or the remaining time."""
        return float(max(1.0, min(most, self.end - time.monotonic())))

    def run(self) -> bool:
        begin = time.monotonic()
        with self._processes():
            self._start()
            self._compare()
            self._measure()
            self._count()
        self.write({"event": "end", "shape": self.name, "seconds": round(time.monotonic() - begin, 1)})
        return not self.differs

    @contextlib.contextmanager
    def _processes(self) -> Iterator[None]:
        context = multiprocessing.get_context("spawn")
        directory = Path(tempfile.mkdtemp(prefix="kvc-experts-"))
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text(json.dumps(self.shape))
        logs = Path(self.options.logs or directory)
        logs.mkdir(parents=True, exist_ok=True)
        paths = []
        try:
            for name in self.options.modes.split(","):
                mode = Mode(name)
                self.modes.append(mode)
                for rank in range(self.options.ranks):
                    log = logs / f"{self.name}-{name}-{rank}.log"
                    paths.append(log)
                    mine, theirs = context.Pipe()
                    plan = RankPlan(
                        mode=name,
                        rank=rank,
                        ranks=self.options.ranks,
                        directory=str(directory),
                        shape=self.shape,
                        batches=self.batches,
                        batched_tokens=self.options.batched_tokens,
                        compiles=self.options.compile,
                        cpu=self.options.tiny,
                        log=str(log),
                    )
                    process = context.Process(target=serve, args=(plan, theirs), name=f"{name}-{rank}")
                    process.start()
                    theirs.close()
                    mode.processes.append(process)
                    mode.connections.append(mine)
            yield
        except FailedEngine:
            for path in paths:
                lines = path.read_text(errors="replace").splitlines() if path.exists() else []
                print(
                    f"--- {path.name}",
                    *(line[:300] for line in lines[-self.options.tail :]),
                    sep="\n",
                    flush=True,
                )
            raise
        finally:
            for mode in self.modes:
                mode.end()

    def _start(self) -> None:
        begin = time.monotonic()
        for mode in self.modes:
            mode.answers(self.left(120))
        imported = time.monotonic() - begin
        for mode in list(self.modes):
            try:
                # The port is chosen now, because engines that start before would take one chosen earlier.
                started = mode.ask(self.left(self.options.start_seconds), "start", free_port())
            except FailedEngine as error:
                if mode.name in MODES:
                    raise
                mode.end()
                self.modes.remove(mode)
                self.write(
                    {"event": "left out", "shape": self.name, "mode": mode.name, "error": str(error)[:2000]}
                )
                continue
            self.write(
                {
                    "event": "started",
                    "shape": self.name,
                    "mode": mode.name,
                    "import_s": round(imported, 1),
                    "start_s": max(one["seconds"] for one in started),
                    "manager": started[0]["manager"],
                    "layers": self.shape["num_hidden_layers"],
                }
            )

    def _prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(2, self.shape["vocab_size"]) for _ in range(tokens)]

    def _compare(self) -> None:
        """Compares greedy tokens of even, uneven and idle ranks, and of a step that is too large for the
        exchange."""
        ranks = self.options.ranks
        long = self.options.batched_tokens - LONG_PROMPT_ROOM
        cases: dict[str, list[list[list[int]]]] = {
            "even": [[self._prompt(40) for _ in range(4)] for _ in range(ranks)],
            "uneven": [
                [self._prompt(10 + 37 * n + 11 * rank) for n in range(1 + 3 * rank)] for rank in range(ranks)
            ],
            "one idle rank": [[self._prompt(64)] if rank == 0 else [] for rank in range(ranks)],
            "long": [[self._prompt(long)] if rank == ranks - 1 else [] for rank in range(ranks)],
        }
        for case, prompts in cases.items():
            found = {
                mode.name: mode.ask(self.left(60), "generate", OUTPUT_TOKENS, each=prompts)
                for mode in self.modes
            }
            for mode in self.modes:
                if mode.name != "theirs" and "theirs" in found:
                    self._compare_with(mode.name, case, found["theirs"], found[mode.name])

    def _compare_with(
        self, mode: str, case: str, theirs: Sequence[list[list[int]]], others: Sequence[list[list[int]]]
    ) -> None:
        """Compares the answers of ``mode`` with those of vLLM's default exchange. Both are by rank."""
        pairs = [
            pair
            for of_theirs, of_others in zip(theirs, others, strict=True)
            for pair in zip(of_theirs, of_others, strict=True)
        ]
        # After the first difference the engines compute different texts.
        firsts = [
            next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
            for one, other in pairs
        ]
        differing = [first for first in firsts if first is not None]
        if mode == "ours":
            self.differs += len(differing)
        self.write(
            {
                "event": "tokens",
                "shape": self.name,
                "mode": mode,
                "case": case,
                "requests": len(pairs),
                "tokens": sum(len(one) for one, _ in pairs),
                "different": sum(a != b for t, o in pairs for a, b in zip(t, o, strict=True)),
                "differing_requests": len(differing),
                "first_difference": min(differing, default=None),
                "distinct_tokens": len({token for one, _ in pairs for token in one}),
            }
        )

    def _measure(self) -> None:
        """Measures decode steps of each batch.

        The modes take turns, so that a drift of the clocks affects both.
        """
        for batch in self.batches:
            prompts = [[self._prompt(PROMPT_TOKENS) for _ in range(batch)] for _ in range(self.options.ranks)]
            steps: dict[str, list[float]] = {mode.name: [] for mode in self.modes}
            graphs: dict[str, list[float]] = {mode.name: [] for mode in self.modes}
            for turn in range(ROUNDS):
                for mode in self.modes if turn % 2 == 0 else reversed(self.modes):
                    ranks = mode.ask(self.left(60), "decode", WARM_STEPS, STEPS, each=prompts)
                    if any(one["tokens"] != STEPS for one in ranks):
                        raise FailedEngine(
                            f"{mode.name}: {[one['tokens'] for one in ranks]} of {STEPS} tokens"
                        )
                    # A step ends with its slowest rank. All ranks have the same number of steps.
                    steps[mode.name] += [
                        max(each) for each in zip(*(one["step_us"] for one in ranks), strict=True)
                    ]
                    graphs[mode.name] += [
                        max(each) for each in zip(*(one["graph_us"] for one in ranks), strict=True)
                    ]
            row: dict[str, Any] = {"event": "decode", "shape": self.name, "batch": batch}
            for mode in self.modes:
                row[f"{mode.name}_step_us"] = round(statistics.median(steps[mode.name]), 1)
                if graphs[mode.name]:
                    row[f"{mode.name}_graph_us"] = round(statistics.median(graphs[mode.name]), 1)
                    row[f"{mode.name}_graphs"] = len(graphs[mode.name])
            self.table.append(row)
            self.write(row)

    def _count(self) -> None:
        for mode in self.modes:
            total: Counter[str] = Counter()
            for one in mode.ask(self.left(10), "counts"):
                total.update(one)
            taken = total.pop("taken", 0)
            self.write(
                {
                    "event": "calls",
                    "shape": self.name,
                    "mode": mode.name,
                    "taken": taken,
                    "passed_on": dict(total),
                }
            )
            if mode.name == "ours" and not taken:
                raise FailedEngine("ours: kv-connector took no call")

    def show(self) -> None:
        """Prints the table of decode steps."""
        layers = self.shape["num_hidden_layers"] - self.shape.get("first_k_dense_replace", 0)
        print(f"\n{self.name}: {self.options.ranks} ranks, {layers} layers of experts; medians, us")
        print(f"{'batch':>6}  {'exchange':<28}{'step':>10}{'graph':>10}{'less than theirs, a layer':>27}")
        for row in self.table:
            for mode in self.modes:
                cells = f"{row['batch']:>6}  {mode.name:<28}{row[f'{mode.name}_step_us']:>10.1f}"
                graph, theirs = row.get(f"{mode.name}_graph_us"), row.get("theirs_graph_us")
                if graph is not None:
                    cells += f"{graph:>10.1f}"
                    if theirs is not None:
                        cells += f"{(theirs - graph) / layers:>27.2f}"
                print(cells)
        sys.stdout.flush()


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", help="qwen3, deepseek (default: both)")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, one data-parallel rank each")
    parser.add_argument(
        "--layers", type=int, default=0, help="number of layers (default: 48 of Qwen3, 7 of DeepSeek-V3)"
    )
    parser.add_argument("--out", default="", help="file to which JSON lines are appended")
    parser.add_argument("--logs", default="", help="folder for the engines' logs")
    parser.add_argument("--modes", default=",".join(MODES), help="engines to run")
    parser.add_argument(
        "--batched-tokens",
        type=int,
        default=BATCHED_TOKENS,
        help="most tokens of a step and rank. Low-latency exchanges compute with room for all of them",
    )
    parser.add_argument("--seconds", type=float, default=220, help="time limit of a shape, in seconds")
    parser.add_argument(
        "--start-seconds", type=float, default=90, help="time limit of an engine's start, in seconds"
    )
    parser.add_argument("--tail", type=int, default=30, help="lines of each log to print after a failure")
    parser.add_argument("--compile", action="store_true", help="use torch.compile (starts take longer)")
    parser.add_argument("--tiny", action="store_true", help="run a small shape on CPUs")
    options = parser.parse_args()
    if options.batched_tokens < 2 * LONG_PROMPT_ROOM:
        parser.error(f"--batched-tokens must be at least {2 * LONG_PROMPT_ROOM}")

    def write(row: dict[str, Any]) -> None:
        row = {"ranks": options.ranks, **row}
        print(json.dumps(row), flush=True)
        if options.out:
            with Path(options.out).open("a") as file:
                file.write(json.dumps(row) + "\n")

    fine = True
    for name in options.shapes or SHAPES:
        comparison = Comparison(options, name, write)
        try:
            fine &= comparison.run()
        except FailedEngine as error:
            write({"event": "failed", "shape": name, "error": str(error)})
            fine = False
        comparison.show()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
