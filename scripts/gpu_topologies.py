"""Pairs of engines on GPUs whose pages are not alike, or hold states: one engine's tokens, and no block left.

Needs what bench_gpu_pd.py needs, on two GPUs or on one (CUDA_VISIBLE_DEVICES=0,0). Ends with status 1 if a
pair's tokens are others, or one does not start.
"""
# ruff: noqa: T201  (its output is a report)

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from bench_gpu_pd import Body, Server, direct, ours, stream, wait_ready
from gpu_faults import rests

from kv_connector.lab.process import stop

sys.path.append(str(Path(__file__).parent.parent / "tests" / "topologies"))
import kinds

LENGTHS = (1, 2, 7, 33, 100, 300, 700, 1500)
OUTPUT = 16
ARGUMENTS = ["--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(1 << 30)]
ARGUMENTS += ["--max-num-batched-tokens", "1024"]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Path], Path]
    prefill: str = ""  # flags
    decode: str = ""  # the single engine's, too
    dtype: str = "float32"
    shifted: bool = False  # D decodes the single engine's first token, which that has decoded, too
    environment: Mapping[str, str] = field(default_factory=dict)  # of P


TRITON = "--attention-backend TRITON_ATTN"
GDN = "--gdn-prefill-backend triton"  # which needs no other package
CASES = (
    Case("block 16 to 128", kinds.make_llama, f"{TRITON} --block-size 16", f"{TRITON} --block-size 128"),
    Case("block 128 to 16", kinds.make_llama, f"{TRITON} --block-size 128", f"{TRITON} --block-size 16"),
    Case(
        "tokens first to heads first",
        kinds.make_llama,
        f"{TRITON} --block-size 16",
        f"{TRITON} --block-size 64",
        environment={"VLLM_KV_CACHE_LAYOUT": "NHD"},
    ),
    Case("granite", kinds.make_granite, TRITON, TRITON),
    Case("qwen3-next", kinds.make_qwen3_next, GDN, GDN, dtype="bfloat16", shifted=True),
    Case(
        "MLA block 16 to 64",
        functools.partial(kinds.make_deepseek_v2, head_dim=128),
        "--attention-backend TRITON_MLA --block-size 16",
        "--attention-backend TRITON_MLA --block-size 64",
        dtype="bfloat16",
        shifted=True,
    ),
)


async def compare(case: Case, prefill: Server, decode: Server, alone: Server) -> str:
    rng = np.random.default_rng(5)
    equal, wrong = 0, []
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        for length in LENGTHS:
            tokens: list[int] = rng.integers(8, 250, length).tolist()
            right = (await stream(client, alone.url, Body(tokens, OUTPUT + case.shifted))).tokens
            if case.shifted:
                tokens, right = [*tokens, right[0]], right[1:]
            got = (await direct(client, prefill, decode, Body(tokens, OUTPUT))).tokens
            if got == right:
                equal += 1
            else:
                wrong.append(f"{length} tokens: {got}, not {right}")
        for server in (prefill, decode):
            await rests(client, server)
    if wrong:
        raise AssertionError("; ".join(wrong))
    return f"{equal} of {len(LENGTHS)} answers of {OUTPUT} tokens are one engine's, every block is free"


def run(case: Case, work: Path, port: int, provider: str) -> str:
    model = case.make(work / case.name.replace(" ", "-"))
    base = [*ARGUMENTS, "--dtype", case.dtype]

    def server(side: str, gpu: int, number: int, flags: str) -> Server:
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(side)
        control = port + 10 + number
        return Server(
            f"{case.name.replace(' ', '-')}-{side}",
            [gpu],
            port + number,
            model,
            [*base, *flags.split()],
            work,
            None if role is None else ours(role, control, provider),
            control,
            case.environment if side == "prefill" else {},
        )

    servers = [
        server("prefill", 0, 0, case.prefill),
        server("decode", 1, 1, case.decode),
        server("alone", 0, 2, case.decode),
    ]
    try:
        for one in servers:
            one.start()
        wait_ready(servers)
        return asyncio.run(compare(case, *servers))
    finally:
        stop([one.process for one in servers if one.process is not None])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/kvc-gpu-topologies"), help="models and logs")
    parser.add_argument("--provider", default="nvlink")
    parser.add_argument("--case", nargs="*", default=[case.name for case in CASES])
    plan = parser.parse_args()
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    failed = 0
    for index, case in enumerate(CASES):
        if case.name not in plan.case:
            continue
        try:
            print(f"{case.name}: {run(case, plan.work, 9100 + 40 * index, plan.provider)}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{case.name}: FAILED: {type(error).__name__}: {error}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
