"""Pairs of engines on GPUs with unlike pages or recurrent states: one engine's tokens, and no block left.

Needs what gpu_pd.py needs, on two GPUs or on one (CUDA_VISIBLE_DEVICES=0,0). Ends with status 1 if a pair's
tokens differ, or an engine does not start.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kv_connector.lab.process import stop

sys.path.append(str(Path(__file__).resolve().parents[2] / "integration" / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
import kinds
from gpu_engines import Body, GpuServer, direct, rests, stream, wait_ready
from side_by_side import counted, run_cases, server

LENGTHS = (1, 2, 7, 33, 100, 300, 700, 1500)
OUTPUT = 16
ARGUMENTS = ["--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(1 << 30)]
ARGUMENTS += ["--max-num-batched-tokens", "1024"]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Path], Path]
    prefill: str = ""  # flags
    decode: str = ""  # flags of D and of the single engine
    dtype: str = "float32"
    shifted: bool = False  # the single engine's first token becomes part of P's and D's prompt
    models: Mapping[str, Callable[[Path], Path]] = field(default_factory=dict)  # by the names in flags
    environment: Mapping[str, str] = field(default_factory=dict)  # environment of P
    tier: str = ""  # place of OffloadingConnector in a MultiConnector: "first" or "last"


TRITON = "--attention-backend TRITON_ATTN"
TRITON_MLA = "--attention-backend TRITON_MLA"
EAGLE3 = '--speculative-config {"method":"eagle3","model":"@eagle3","num_speculative_tokens":3}'
MTP = '--speculative-config {"method":"mtp","num_speculative_tokens":2}'
FETCHED = "external_prefix_cache_hits"
ACCEPTED = "spec_decode_num_accepted_tokens"
FP8 = "--kv-cache-dtype fp8"
GDN = "--gdn-prefill-backend triton"  # this backend needs no other package
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
        f"{TRITON_MLA} --block-size 16",
        f"{TRITON_MLA} --block-size 64",
        dtype="bfloat16",
        shifted=True,
    ),
    Case(
        "MLA with MTP",
        functools.partial(kinds.make_mtp, head_dim=128),
        f"{TRITON_MLA} {MTP}",
        f"{TRITON_MLA} {MTP}",
        dtype="bfloat16",
        shifted=True,
    ),
    Case(
        "EAGLE3",
        kinds.make_quiet,
        f"{TRITON} {EAGLE3}",
        f"{TRITON} {EAGLE3}",
        models={"eagle3": kinds.make_eagle3},
    ),
    Case("fp8", kinds.KINDS["fp8-scales"], FP8, FP8, dtype="bfloat16", shifted=True),
    Case("CPU tier last", kinds.make_llama, TRITON, TRITON, tier="last"),
    Case("CPU tier first", kinds.make_llama, TRITON, TRITON, tier="first"),
)


async def compare(case: Case, prefill: GpuServer, decode: GpuServer, alone: GpuServer) -> str:
    rng = np.random.default_rng(5)
    equal, wrong = 0, []
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        for length in LENGTHS:
            tokens: list[int] = rng.integers(8, 250, length).tolist()
            right = (await stream(client, alone.url, Body(tokens, OUTPUT + case.shifted))).tokens
            if case.shifted:
                tokens, right = [*tokens, right[0]], right[1:]
            # The second time, each engine has the prompt in its tier. These engines have no prefix cache.
            for again in range(1 + bool(case.tier)):
                got = (await direct(client, prefill, decode, Body(tokens, OUTPUT))).tokens
                if got != right:
                    wrong.append(f"{length} tokens{', again' * again}: {got}, not {right}")
                elif not again:
                    equal += 1
        if case.tier:
            hits = await counted(client, prefill, FETCHED)
            wrong += [] if hits else ["the prefill engine's tier has no prompt"]
        for server in (prefill, decode):
            await rests(client, server)
        drafts = [await counted(client, server, ACCEPTED) for server in (alone, decode)]
    if wrong:
        raise AssertionError("; ".join(wrong))
    told = f"{equal} of {len(LENGTHS)} answers of {OUTPUT} tokens are one engine's, every block is free"
    return (
        f"{told}; drafts accepted: {drafts[0]:.0f} by one engine, {drafts[1]:.0f} by D"
        if any(drafts)
        else told
    )


def beside_tier(settings: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the settings of a MultiConnector with this connector and a tier in CPU memory. "": no tier."""
    if not place:
        return settings
    tier: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    tier["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 30}
    connectors = [tier, settings] if place == "first" else [settings, tier]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": settings["kv_role"],
        "kv_connector_extra_config": {"connectors": connectors},
    }


def write_models(case: Case, directory: Path) -> None:
    for name, make in {"model": case.make, **case.models}.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        make(directory / name)


def run(case: Case, models: Path, port: int, provider: str) -> str:
    base = [*ARGUMENTS, "--dtype", case.dtype]

    def engine(side: str, flags: str) -> GpuServer:
        return server(
            case.name.replace(" ", "-"),
            side,
            port,
            models / "model",
            [*base, *re.sub(r"@([\w-]+)", lambda name: str(models / name[1]), flags).split()],
            models.parent,
            provider,
            case.environment if side == "prefill" else {},
            lambda transfer: beside_tier(transfer, case.tier),
        )

    servers = [engine("prefill", case.prefill), engine("decode", case.decode), engine("alone", case.decode)]
    try:
        for one in servers:
            one.start()
        wait_ready(servers)
        return asyncio.run(compare(case, *servers))
    finally:
        stop([one.process for one in servers if one.process is not None])


def main() -> None:
    cases = {case.name: case for case in CASES}
    run_cases(
        __doc__,
        "case",
        list(cases),
        lambda name, directory: write_models(cases[name], directory),
        lambda name, *where: run(cases[name], *where),
    )


if __name__ == "__main__":
    main()
