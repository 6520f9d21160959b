"""Runs the newest model families as prefill and decode engine beside one engine.

Checks tokens, prefix hits, aborts and preemption. Models have random weights, few layers and few experts.
Needs vLLM from 0.33 on with the kernels of the families, on two GPUs or on one (CUDA_VISIBLE_DEVICES=0,0).
Ends with status 1 if a family fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kv_connector.lab.model import write_tokenizer
from kv_connector.lab.process import stop

sys.path.append(str(Path(__file__).resolve().parents[2] / "integration" / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
import drawn_weights
import family_configs as configs
from gpu_engines import Body, GpuServer, direct, rests, stream, wait_ready
from side_by_side import counted, run_cases, server

# Around the edges of blocks (16, 64, 256 tokens), of windows (128) and of compressed states (4, 16, 128).
LENGTHS = (1, 3, 5, 63, 64, 65, 127, 128, 129, 255, 257, 511, 700, 1025, 2100)
OUTPUT = 16
MAX_LEN = 4096
POOL = 1 << 30
SMALL_POOL = 2.5  # requests of MAX_LEN tokens
CROWD, CROWD_PROMPT, CROWD_OUTPUT = 14, 900, 200
# A token counts as right if one engine finds it less likely than its best token by at most this (natural
# logarithm). Kernels of bfloat16 round differently for other batches. A wrong page costs whole units.
TIE = 0.1
ARGUMENTS = ["--load-format", "dummy", "--enforce-eager", "--max-model-len", str(MAX_LEN)]
ARGUMENTS += ["--max-num-batched-tokens", "1024", "--dtype", "bfloat16", "--max-num-seqs", "64"]
ARGUMENTS += ["--gpu-memory-utilization", "0.05"]
CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")


@dataclass(frozen=True)
class Family:
    name: str
    config: dict[str, Any]
    flags: str = ""
    caching: bool = True
    """Whether the engines keep prefixes."""
    crowded: bool = True
    """Whether a request's blocks grow with its tokens, so that a small pool preempts."""


GDN = "--gdn-prefill-backend triton"  # this backend needs no other package
FAMILIES = (
    Family("DeepSeek-V4", configs.DEEPSEEK_V4, "--kv-cache-dtype fp8"),
    Family("DeepSeek-V3.2", configs.DEEPSEEK_V32, "--attention-backend FLASHMLA_SPARSE"),
    Family("GLM-5-next", configs.GLM5_NEXT, caching=False),
    Family("Qwen4-Exp", configs.QWEN4_EXP, GDN, caching=False),
    Family("Kimi-Linear", configs.KIMI_LINEAR, caching=False),
    Family("Mamba", configs.MAMBA, caching=False, crowded=False),
    Family("Jamba", configs.JAMBA, caching=False),
    Family("OLMo-hybrid", configs.OLMO_HYBRID, GDN, caching=False),
    Family("MiniMax-M3", configs.MINIMAX_M3),
)


async def rated(
    client: httpx.AsyncClient, alone: GpuServer, prompt: Sequence[int], said: Sequence[int]
) -> float:
    """Returns by how much one engine finds the worst of these tokens less likely than its best one."""
    body = {"model": "model", "prompt": [*prompt, *said], "max_tokens": 1, "temperature": 0}
    body |= {"prompt_logprobs": 1, "detokenize": False}
    answer = await client.post(f"{alone.url}/v1/completions", json=body)
    answer.raise_for_status()
    likely = answer.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    return max(
        max(other["logprob"] for other in one.values()) - one[str(token)]["logprob"]
        for token, one in zip(said, likely, strict=True)
    )


class Check:
    """The answers of a family's engines, and what is wrong with them."""

    def __init__(self, family: Family, prefill: GpuServer, decode: GpuServer, alone: GpuServer) -> None:
        self._family = family
        self._prefill, self._decode, self._alone = prefill, decode, alone
        self._rng = np.random.default_rng(5)
        self._equal = self._answers = self._wrong = 0
        self._worst = self._noise = 0.0
        self._words: list[str] = []

    async def run(self) -> str:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=200.0, trust_env=False, limits=limits) as self._client:
            prompts = [self._draw(length) for length in LENGTHS]
            for prompt in prompts:
                await self._compare(prompt, OUTPUT)
            self._note("lengths")
            if self._family.caching:
                await self._prefixes(prompts)
            await self._aborts()
            self._note("aborts")
            await self._crowd()
            self._note("crowd")
            for server in (self._prefill, self._decode):
                await rests(self._client, server)
        said = f"{self._equal} of {self._answers} answers are one engine's; "
        said += f"worst token {self._worst:.3f} (one engine's own {self._noise:.3f}); "
        said += "; ".join([*self._words, "every block is free"])
        if self._wrong:
            raise AssertionError(f"{self._wrong} answers are wrong: {said}")
        return said

    def _note(self, what: str) -> None:
        print(
            f"  {self._family.name}: {what}: {self._equal}/{self._answers} equal, {self._wrong} wrong, "
            f"worst {self._worst:.3f}, noise {self._noise:.3f} {self._words[-1:]}",
            flush=True,
        )

    def _draw(self, length: int) -> list[int]:
        tokens: list[int] = self._rng.integers(8, 250, length).tolist()
        return tokens

    async def _compare(self, prompt: list[int], output: int) -> None:
        right = (await stream(self._client, self._alone.url, Body(prompt, output))).tokens
        got = (await direct(self._client, self._prefill, self._decode, Body(prompt, output))).tokens
        await self._judge(prompt, got, right)

    async def _judge(self, prompt: list[int], got: Sequence[int], right: Sequence[int]) -> None:
        self._answers += 1
        self._equal += got == right
        if got == right:
            return
        self._noise = max(self._noise, await rated(self._client, self._alone, prompt, right))
        short = await rated(self._client, self._alone, prompt, got)
        self._worst = max(self._worst, short)
        if short > max(TIE, self._noise):
            self._wrong += 1
            print(
                f"  {self._family.name}: {len(prompt)} tokens: {got[:20]}, not {right[:20]}: {short:.3f}",
                flush=True,
            )

    async def _prefixes(self, prompts: list[list[int]]) -> None:
        """Sends the longest prompts again, and with more tokens. Both engines have their blocks."""
        servers = (self._prefill, self._decode)
        before = [await counted(self._client, one, "prefix_cache_hits") for one in servers]
        for prompt in prompts[-3:]:
            await self._compare(prompt, OUTPUT)
            await self._compare(prompt + self._draw(150), OUTPUT)
        hits = [await counted(self._client, one, "prefix_cache_hits") for one in servers]
        found = [after - one for after, one in zip(hits, before, strict=True)]
        self._words.append(f"prefix hits of {found[0]:.0f} tokens by P, {found[1]:.0f} by D")
        if not all(found):
            self._wrong += 1
            self._words.append("NO PREFIX HIT")
        self._note("prefixes")

    async def _aborts(self) -> None:
        """Aborts requests in the prefill, in the transfer, and in the decode. Others go on beside them."""
        beside = asyncio.create_task(self._compare(self._draw(1500), 64))
        for wait in (0.0, 0.005, 0.02, 0.06, 0.2, 0.6):
            body = Body(self._draw(1800), 400)
            task = asyncio.create_task(direct(self._client, self._prefill, self._decode, body))
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await beside

    async def _crowd(self) -> None:
        prompts = [self._draw(CROWD_PROMPT + 7 * index) for index in range(CROWD)]
        before = await counted(self._client, self._decode, "num_preemptions")
        bodies = [Body(prompt, CROWD_OUTPUT) for prompt in prompts]
        right = await asyncio.gather(*(stream(self._client, self._alone.url, one) for one in bodies))
        got = await asyncio.gather(
            *(direct(self._client, self._prefill, self._decode, one) for one in bodies)
        )
        for prompt, one, other in zip(prompts, got, right, strict=True):
            await self._judge(prompt, one.tokens, other.tokens)
        preempted = await counted(self._client, self._decode, "num_preemptions") - before
        self._words.append(f"{preempted:.0f} preemptions by D")


def write_model(family: Family, directory: Path) -> None:
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(family.config))
    write_tokenizer(model)


def run(family: Family, directory: Path, port: int, provider: str) -> str:
    model = directory / "model"
    path = ":".join(filter(None, [drawn_weights.install(directory / "plugin"), os.environ.get("PYTHONPATH")]))
    caching = "--enable-prefix-caching" if family.caching else "--no-enable-prefix-caching"

    def engine(side: str, pool: int) -> GpuServer:
        flags = [*ARGUMENTS, "--kv-cache-memory-bytes", str(pool), caching, *family.flags.split()]
        more = {"PYTHONPATH": path}
        return server(family.name, side, port, model, flags, directory.parent, provider, more)

    begin = time.monotonic()
    prefill, alone = engine("prefill", POOL), engine("alone", POOL)
    started = [prefill, alone]
    try:
        for one in started:
            one.start()
        log = directory.parent / f"{alone.name}.log"
        decode = engine("decode", int(POOL / _concurrency(log, alone) * SMALL_POOL))
        started.append(decode)
        decode.start()
        wait_ready(started)
        said = asyncio.run(Check(family, prefill, decode, alone).run())
        return f"{said} ({time.monotonic() - begin:.0f} s)"
    finally:
        stop([one.process for one in started if one.process is not None])


def _concurrency(log: Path, server: GpuServer) -> float:
    """Returns how many requests of MAX_LEN tokens the pool of a server holds, which it logs at its start."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert server.process is not None
        if log.exists() and (found := CONCURRENCY.search(log.read_text(errors="replace"))):
            return float(found[1])
        if not server.process.running():
            break
        time.sleep(0.2)
    raise RuntimeError(f"{server.name} did not start: see {log}")


def main() -> None:
    families = {family.name: family for family in FAMILIES}
    run_cases(
        __doc__,
        "family",
        list(families),
        lambda name, directory: write_model(families[name], directory),
        lambda name, *where: run(families[name], *where),
    )


if __name__ == "__main__":
    main()
