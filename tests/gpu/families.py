"""Runs the newest model families as prefill and decode engine beside one engine.

Checks tokens, received pages, prefix hits, aborts and preemption. Models have random weights, few layers and
few experts. Prefix caching is as vLLM has it by default.
Needs vLLM from 0.33 on with the kernels of the families, on two GPUs or on one (CUDA_VISIBLE_DEVICES=0,0).
Ends with status 1 if a family fails.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from gpu_engines import Body, GpuServer, direct, rests, stream, transfer_params, wait_ready
from side_by_side import counted, run_cases, server

# Around the edges of blocks (16, 64, 256 tokens), of windows (128) and of compressed states (4, 16, 128).
LENGTHS = (1, 3, 5, 63, 64, 65, 127, 128, 129, 255, 257, 511, 700, 1025, 2100)
OUTPUT = 16
MAX_LEN = 4096
POOL = 1 << 30
SMALL_POOL = 2.5  # requests of MAX_LEN tokens in the decode engine's pool, so that it preempts
START_SECONDS = 540.0  # DeepSeek-V4 compiles kernels for minutes at its first start
CHANGED = 64  # tokens of a prompt whose effect on an answer is measured
CROWD, CROWD_PROMPT, CROWD_OUTPUT = 14, 900, 200
# A token counts as right if one engine finds it less likely than its best token by at most this (natural
# logarithm). Kernels of bfloat16 round differently for other batches. What other pages cost is printed.
TIE = 0.1
ARGUMENTS = ["--load-format", "dummy", "--enforce-eager", "--max-model-len", str(MAX_LEN)]
ARGUMENTS += ["--max-num-batched-tokens", "1024", "--dtype", "bfloat16", "--max-num-seqs", "64"]
ARGUMENTS += ["--gpu-memory-utilization", "0.05"]


@dataclass(frozen=True)
class Family:
    name: str
    config: dict[str, Any]
    requests: float
    """Requests of MAX_LEN tokens in a pool of POOL bytes, as vLLM's log has it ("Maximum concurrency")."""
    flags: str = ""
    caching: bool = True
    """Whether vLLM keeps prefixes by default."""


GDN = "--gdn-prefill-backend triton"  # this backend needs no other package
FAMILIES = (
    Family("DeepSeek-V4", configs.DEEPSEEK_V4, 13.08, "--kv-cache-dtype fp8"),
    Family("DeepSeek-V3.2", configs.DEEPSEEK_V32, 68.05, "--attention-backend FLASHMLA_SPARSE"),
    Family("GLM-5-next", configs.GLM5_NEXT, 72.5),
    Family("Qwen4-Exp", configs.QWEN4_EXP, 92.89, GDN),
    Family("Kimi-Linear", configs.KIMI_LINEAR, 130),
    Family("Mamba", configs.MAMBA, 6898, caching=False),
    Family("Jamba", configs.JAMBA, 124.1),
    Family("OLMo-hybrid", configs.OLMO_HYBRID, 113, GDN),
    Family("MiniMax-M3", configs.MINIMAX_M3, 100),  # not run yet: the number of requests is a guess
)


@dataclass(frozen=True)
class Said:
    """An answer: its tokens and their log probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def apart(self, other: Said) -> float:
        """Returns the largest difference of log probabilities up to the first token that differs."""
        pairs = [*zip(self.tokens, other.tokens, self.logprobs, other.logprobs, strict=True)]
        same = [*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return max((abs(one - two) for _, _, one, two in same), default=0.0)


async def ask(
    client: httpx.AsyncClient,
    server: GpuServer,
    prompt: Sequence[int],
    output: int,
    params: dict[str, Any] | None = None,
) -> Said:
    body: dict[str, Any] = {"model": "model", "prompt": [*prompt], "max_tokens": output, "temperature": 0}
    body |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
    body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
    if params is not None:
        body["kv_transfer_params"] = params
    answer = await client.post(f"{server.url}/v1/completions", json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{server.name}: HTTP {answer.status_code}: {answer.text[:500]}")
    (choice,) = answer.json()["choices"]
    if len(choice["token_ids"]) != output:
        raise RuntimeError(f"{server.name}: {len(choice['token_ids'])} tokens instead of {output}")
    return Said((*choice["token_ids"],), (*choice["logprobs"]["token_logprobs"],))


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


@dataclass
class Kind:
    """Answers of one kind, and how likely one engine finds the tokens of those that differ from its own."""

    name: str
    answers: int = 0
    equal: int = 0
    apart: float = 0.0
    """The largest difference of a token's log probability, where the tokens are equal."""
    firsts: int = 0
    """Answers whose first token is not one engine's."""
    short: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """The largest distance that counts as right."""
        return max([TIE, *self.noise])

    @property
    def wrong(self) -> int:
        return sum(one > self.limit for one in self.short)

    def __str__(self) -> str:
        said = f"{self.equal} of {self.answers} answers {self.name} are one engine's, "
        said += f"log probabilities within {self.apart:.4f}, {self.firsts} first tokens differ"
        if self.short:
            said += f", worst token {max(self.short):.3f} (one engine's own {max(self.noise):.3f})"
        return said


class Check:
    """The answers of a family's engines, and what is wrong with them."""

    def __init__(self, family: Family, prefill: GpuServer, decode: GpuServer, alone: GpuServer) -> None:
        self._family = family
        self._prefill, self._decode, self._alone = prefill, decode, alone
        self._rng = np.random.default_rng(5)
        self._begin = time.monotonic()
        self._alike, self._crowded, self._itself = Kind("alone"), Kind("in the crowd"), Kind("of its own")
        self._words: list[str] = []
        self._faults: list[str] = []

    async def run(self) -> str:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=400.0, trust_env=False, limits=limits) as self._client:
            await self._warm_up()
            self._note("kernels compiled")
            prompts = [self._draw(length) for length in LENGTHS]
            for prompt in prompts:
                await self._compare(prompt, OUTPUT)
            self._note("lengths")
            await self._sensitivity(prompts)
            self._note("sensitivity")
            if self._family.caching:
                await self._prefixes(prompts)
                self._note("prefixes")
            await self._aborts()
            self._note("aborts")
            await self._crowd()
            self._note("crowd")
            for server in (self._prefill, self._decode):
                await rests(self._client, server)
            await self._pages()
        said = "; ".join([str(self._alike), str(self._crowded), *self._words, "every block is free"])
        wrong = [f"{kind.wrong} wrong {kind.name}" for kind in (self._alike, self._crowded) if kind.wrong]
        if self._faults or wrong:
            raise AssertionError("; ".join([*wrong, *self._faults, said]))
        return said

    def _note(self, what: str) -> None:
        print(
            f"  {self._family.name}: {time.monotonic() - self._begin:.0f} s: {what}: {self._alike} "
            f"{self._words[-1:]}",
            flush=True,
        )

    def _draw(self, length: int) -> list[int]:
        tokens: list[int] = self._rng.integers(8, 250, length).tolist()
        return tokens

    async def _warm_up(self) -> None:
        """Has each engine by itself compile the kernels of its first steps.

        A process that compiles may hold Python's lock for longer than a peer waits for its heartbeat.
        """
        for length in (2100, 3, 300):
            body = Body(self._draw(length), OUTPUT)
            await asyncio.gather(
                *(stream(self._client, one.url, body) for one in (self._alone, self._prefill, self._decode))
            )

    async def _compare(self, prompt: list[int], output: int) -> None:
        """The pair's prompt ends with one engine's first token, so that both decode from there alike.

        An engine may compute a token otherwise as the last of a prompt than by itself.
        """
        right = await ask(self._client, self._alone, prompt, output + 1)
        asked = [*prompt, right.tokens[0]]
        got = await self._of_pair(asked, output)
        await self._judge(self._alike, asked, got, Said(right.tokens[1:], right.logprobs[1:]))

    async def _of_pair(self, prompt: list[int], output: int) -> Said:
        at_prefill, at_decode = transfer_params(self._prefill)
        _, said = await asyncio.gather(
            ask(self._client, self._prefill, prompt, 1, at_prefill),
            ask(self._client, self._decode, prompt, output, at_decode),
        )
        return said

    async def _judge(self, kind: Kind, prompt: list[int], got: Said, right: Said) -> None:
        kind.answers += 1
        kind.equal += got.tokens == right.tokens
        kind.apart = max(kind.apart, got.apart(right))
        kind.firsts += got.tokens[0] != right.tokens[0]
        if got.tokens == right.tokens:
            return
        kind.noise.append(await rated(self._client, self._alone, prompt, right.tokens))
        if kind is self._alike:  # a crowd has a second one for this
            for _ in range(2):
                again = await ask(self._client, self._alone, prompt, len(right.tokens))
                kind.noise.append(await rated(self._client, self._alone, prompt, again.tokens))
        kind.short.append(await rated(self._client, self._alone, prompt, got.tokens))
        pairs = zip(got.tokens, right.tokens, strict=True)
        first = next(place for place, (one, other) in enumerate(pairs) if one != other)
        print(
            f"  {self._family.name}: {kind.name}, {len(prompt)} tokens: token {first} differs: "
            f"{kind.short[-1]:.3f}, one engine's own {max(kind.noise):.3f}",
            flush=True,
        )

    async def _sensitivity(self, prompts: list[list[int]]) -> None:
        """Measures what wrong pages would do to the first token of an answer: one engine gets other prompts.

        CHANGED of their tokens differ, in the middle of the prompt or before its last tokens.
        """
        found, apart = 0, []
        for prompt in prompts[-4:]:
            right = await ask(self._client, self._alone, prompt, 1)
            for at in (len(prompt) // 2, len(prompt) - CHANGED - 8):
                other = [*prompt[:at], *self._draw(CHANGED), *prompt[at + CHANGED :]]
                said = await ask(self._client, self._alone, other, 1)
                found += said.tokens != right.tokens
                apart += [said.apart(right)] * (said.tokens == right.tokens)
        self._words.append(
            f"with {CHANGED} other tokens in the prompt {found} of {found + len(apart)} first tokens differ, "
            f"and the others' log probabilities by {', '.join(f'{one:.4f}' for one in sorted(apart))}"
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
            self._faults.append("no prefix hit")

    async def _pages(self) -> None:
        """The decode engine has compared each page that it received, and none differs."""
        names = ("pages_verified", "pages_corrupt", "transfers_unverified")
        verified, corrupt, skipped = [await counted(self._client, self._decode, name) for name in names]
        self._words.append(f"{verified:.0f} pages compared, {corrupt:.0f} differ, {skipped:.0f} not compared")
        if corrupt or skipped or not verified:
            self._faults.append("pages differ or were not compared")

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

    async def _crowd_alone(self, prompts: list[list[int]]) -> list[Said]:
        """Returns one engine's answers to prompts that it gets at once, in a random order."""
        await rests(self._client, self._alone)  # empties its prefix cache
        asked = {
            index: ask(self._client, self._alone, prompts[index], CROWD_OUTPUT)
            for index in self._rng.permutation(len(prompts)).tolist()
        }
        said = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        return [said[index] for index in range(len(prompts))]

    async def _crowd(self) -> None:
        prompts = [self._draw(CROWD_PROMPT + 7 * index) for index in range(CROWD)]
        before = await counted(self._client, self._decode, "num_preemptions")
        right, again = [await self._crowd_alone(prompts) for _ in range(2)]
        asked = [[*prompt, own.tokens[0]] for prompt, own in zip(prompts, right, strict=True)]
        got = await asyncio.gather(*(self._of_pair(one, CROWD_OUTPUT - 1) for one in asked))
        for prompt, mine, own, other in zip(asked, got, right, again, strict=True):
            await self._judge(self._itself, prompt[:-1], other, own)
            await self._judge(self._crowded, prompt, mine, Said(own.tokens[1:], own.logprobs[1:]))
        self._crowded.noise += self._itself.short
        self._words.append(f"one engine in two crowds: {self._itself}")
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

    def engine(side: str, pool: float) -> GpuServer:
        flags = [*ARGUMENTS, "--kv-cache-memory-bytes", str(int(pool)), caching, *family.flags.split()]
        # DeepSeek-V4 would compile 213 kernels at its start, 0.7 s each. The requests here use few of them.
        more = {"PYTHONPATH": path, "VLLM_DEEP_GEMM_WARMUP": "skip"}
        return server(family.name, side, port, model, flags, directory.parent, provider, more, verified)

    begin = time.monotonic()
    # All start at once: each compiles kernels, and none waits for what another one logs.
    decode = engine("decode", POOL / family.requests * SMALL_POOL)
    prefill, alone = engine("prefill", POOL), engine("alone", POOL)
    servers = [prefill, decode, alone]
    try:
        for one in servers:
            one.start()
        wait_ready(servers, START_SECONDS)
        print(f"  {family.name}: engines up after {time.monotonic() - begin:.0f} s", flush=True)
        said = asyncio.run(Check(family, prefill, decode, alone).run())
        return f"{said} ({time.monotonic() - begin:.0f} s)"
    finally:
        stop([one.process for one in servers if one.process is not None])


def verified(transfer: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of an engine that compares the pages that it receives with those sent."""
    transfer["kv_connector_extra_config"]["verify_pages"] = True
    return transfer


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
