"""Weights from a trainer's GPU into engines on GPUs. Their tokens and their parameters in kernel form must be
those of an engine that was started from the checkpoint.

Needs what gpu_pd.py needs, on two GPUs or on one (CUDA_VISIBLE_DEVICES=0,0). Small models in bfloat16, and in
block fp8, which the trainer quantises from bfloat16.

Each model is sent twice: vLLM converts the first version to the kernels' form, and the second is copied into
it. Then an engine without weights receives them from the engine that serves them.

Ends with status 1 if tokens or parameters differ, or an engine does not start. --cpu tests the models that
are not in fp8 on CPUs, where vLLM's hashes do not cover parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from safetensors.torch import load_file

from kv_connector.lab.process import stop
from kv_connector.weights.block_fp8 import BlockFp8
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import TensorSource

sys.path.append(str(Path(__file__).resolve().parents[2] / "integration" / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
import kinds
from fp8_checkpoints import WEIGHTS, change, in_bfloat16, quantised
from gpu_engines import CPU_ENVIRONMENT, HOST, Body, GpuServer, stream, wait_ready

LENGTHS, OUTPUT = (1, 33, 200, 700), 24
ARGUMENTS = ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048"]
ARGUMENTS += ["--kv-cache-memory-bytes", str(256 << 20)]
BACKEND = '{"backend": "write_imm"}'
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Path], object]
    mode: str = "shadow"
    fp8: bool = False
    ranks: int = 1
    seeds: bool = False  # its engine then seeds another one
    flags: str = ""


def make_llama(directory: Path) -> None:
    from kv_connector.lab.model import make_llama

    make_llama(directory, hidden=512, head_dim=128, intermediate=1024)


def make_qwen3_moe(directory: Path) -> None:
    from transformers import Qwen3MoeConfig

    sizes = kinds.SMALL | {"num_key_value_heads": 2, "head_dim": 128}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    kinds.write(directory, Qwen3MoeConfig(**sizes | experts))


make_mla = functools.partial(kinds.make_deepseek_v2, head_dim=128)
TRITON_MLA = "--attention-backend TRITON_MLA"
CASES = (
    Case("llama", make_llama, seeds=True),
    Case("llama of two ranks, streaming", make_llama, mode="streaming", ranks=2),
    Case("llama in block fp8", make_llama, fp8=True, seeds=True),
    Case("llama in block fp8 of two ranks, streaming", make_llama, mode="streaming", fp8=True, ranks=2),
    Case("qwen3-moe", make_qwen3_moe),
    Case("qwen3-moe in block fp8", make_qwen3_moe, fp8=True),
    Case("MLA", make_mla, flags=TRITON_MLA),
    Case("MLA in block fp8", make_mla, fp8=True, flags=TRITON_MLA),
)


def write_checkpoints(case: Case, directory: Path, device: str) -> Mapping[str, torch.Tensor]:
    """Writes two checkpoints, as the engine loads them. Returns the second one before quantisation, on the
    first GPU."""
    shutil.rmtree(directory, ignore_errors=True)
    plain = directory / "plain" if case.fp8 else directory
    (plain / "a").mkdir(parents=True)
    case.make(plain / "a")
    drawn = load_file(in_bfloat16(plain / "a") / WEIGHTS, device)
    generator = torch.Generator(device).manual_seed(1)

    def other(value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 2:
            return value
        noise = torch.randn(value.shape, generator=generator, device=device)
        return (noise * value.float().std()).bfloat16()

    b = {name: other(value) for name, value in drawn.items()}
    shutil.copytree(plain / "a", plain / "b")
    change(plain / "b", b)
    if case.fp8:
        for name in ("a", "b"):
            quantised(plain / name, directory / name, device)
    return b


class Site:
    """A case's servers. They use the forty ports from ``port`` on."""

    def __init__(self, case: Case, directory: Path, port: int, *, cpu: bool) -> None:
        self._case, self._directory, self._port, self._next, self._cpu = case, directory, port, 0, cpu
        self.servers: list[GpuServer] = []

    def start(self, name: str, model: str, *more: str, **of_weights: object) -> tuple[GpuServer, str]:
        """Starts a server, without waiting for it. Returns it with the address where it receives weights."""
        port = self._port + 10 * self._next
        self._next += 1
        settings = {"control_host": HOST, "control_port": port + 1, **of_weights}
        settings["providers"] = ["host" if self._cpu else "nvlink"]
        environment = dict(CPU_ENVIRONMENT) if self._cpu else {"VLLM_USE_DEEP_GEMM": "0"}
        environment |= {"VLLM_PLUGINS": "kv_connector", "KV_CONNECTOR_WEIGHTS": json.dumps(settings)}
        environment |= {"VLLM_SERVER_DEV_MODE": "1"}  # for checksums
        server = GpuServer(
            f"{self._directory.name}-{name}",
            [*range(2 - self._case.ranks, 2)],
            port,
            self._directory / model,
            [*ARGUMENTS, "--weight-transfer-config", BACKEND, *self._case.flags.split(), *more],
            self._directory,
            environment=environment,
        )
        server.start()
        self.servers.append(server)
        return server, f"{HOST}:{port + 1}"


async def says(client: httpx.AsyncClient, server: GpuServer) -> tuple[list[tuple[int, ...]], dict[str, str]]:
    """Returns its answers, one by one, and the hashes of its parameters."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, 250, length).tolist() for length in LENGTHS]
    answers = [(await stream(client, server.url, Body(prompt, OUTPUT))).tokens for prompt in prompts]
    response = await client.post(f"{server.url}/weight_checker", json={"action": "checksum"})
    return answers, response.raise_for_status().json()["checksums"]


async def compare(case: Case, site: Site, b: Mapping[str, torch.Tensor]) -> str:
    engine, take = site.start("engine", "a", mode=case.mode)
    oracle, _ = site.start("oracle", "b")
    await asyncio.to_thread(wait_ready, site.servers)
    source = TensorSource(b.items())
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        before, right = await says(client, engine), await says(client, oracle)
        changed = sum(a != b for a, b in zip(before[0], right[0], strict=True))
        with WeightPusher(BlockFp8(source) if case.fp8 else source, [take]) as pusher:
            await asyncio.to_thread(pusher.connect)
            for version in ("once", "again"):
                await asyncio.to_thread(pusher.push(version).wait, "applied", TIMEOUT_S)
                check(f"{version} pushed", await says(client, engine), right)
        told = f"{changed} of {len(LENGTHS)} answers changed, to an engine's that was started with them"
        told += f", and so did all {len(right[1])} parameters; twice"
        if case.seeds:
            begin = time.monotonic()
            joiner, _ = site.start("joiner", "a", "--load-format", "dummy", seed_from=[take])
            await asyncio.to_thread(wait_ready, [joiner])
            check("the joiner", await says(client, joiner), right)
            told += f"; seeded at its start, another one says the same ({time.monotonic() - begin:.0f} s)"
    return told


def check(what: str, got: tuple[object, Mapping[str, str]], right: tuple[object, Mapping[str, str]]) -> None:
    differ = sorted(name for name, value in right[1].items() if got[1].get(name) != value)
    if differ or got[0] != right[0]:
        same = "the same answers" if got[0] == right[0] else "other answers"
        raise AssertionError(
            f"{what}: {same}, {len(differ)} of {len(right[1])} parameters differ: {differ[:4]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/kvc-gpu-weights"), help="models and logs")
    names = [case.name for case in CASES]
    parser.add_argument("--case", nargs="*", default=names, choices=names)
    parser.add_argument("--port", type=int, default=9700, help="the first of forty for each case")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="as many cases side by side")
    parser.add_argument("--cpu", action="store_true")
    plan = parser.parse_args()
    plan.case = [case for case in plan.case if not (plan.cpu and "fp8" in case)]
    plan.work = plan.work.resolve()

    def result(index: int, case: Case, b: Mapping[str, torch.Tensor]) -> bool:
        site = Site(case, plan.work / str(index), plan.port + 40 * index, cpu=plan.cpu)
        try:
            print(f"{case.name}: {asyncio.run(compare(case, site, b))}", flush=True)
        except Exception as error:
            print(f"{case.name}: FAILED: {type(error).__name__}: {error}", flush=True)
            return False
        finally:
            stop([server.process for server in site.servers if server.process is not None])
        return True

    chosen = [(index, case) for index, case in enumerate(CASES) if case.name in plan.case]
    device = "cpu" if plan.cpu else "cuda"
    made = [(index, case, write_checkpoints(case, plan.work / str(index), device)) for index, case in chosen]
    with ThreadPoolExecutor(plan.at_once) as pool:
        right = [*pool.map(lambda one: result(*one), made)]
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
