"""Sleep and wake of a prefill and of a decode engine, at rest and in the middle of a transfer, on two GPUs or
on one (CUDA_VISIBLE_DEVICES=0,0).

Needs what gpu_pd.py needs, and vLLM 0.33 or newer. After each wake-up P and D must give the tokens that they
gave before, with no KV block left in use. Ends with status 1 if they do not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import httpx
import numpy as np

from kv_connector.lab.process import stop

sys.path.append(str(Path(__file__).resolve().parents[2] / "integration" / "benchmarks"))
from faults import MIDDLE_SECONDS, VICTIM_TOKENS
from gpu_engines import (
    TINY_ARGUMENTS,
    Body,
    GpuDeployment,
    GpuServer,
    deployment,
    direct,
    rests,
    wait_ready,
    write_tiny,
)
from shapes import SHAPES

SMALLEST_VOCABULARY = 256


async def ask(client: httpx.AsyncClient, server: GpuServer, what: str) -> None:
    answer = await client.post(f"{server.url}/{what}")
    assert answer.status_code == 200, f"{server.name}: {what}: {answer.text}"


async def sleep_and_wake(client: httpx.AsyncClient, pair: GpuDeployment, mode: str, long_tokens: int) -> None:
    prefill, decode = pair.pairs["ours"]
    rng = np.random.default_rng(3)
    short, long = (
        Body(rng.integers(1, SMALLEST_VOCABULARY, count).tolist(), tokens)
        for count, tokens in ((200, 16), (long_tokens, 4))
    )
    expected = [(await direct(client, prefill, decode, body)).tokens for body in (short, long)]
    for sleepers in ([prefill], [decode], [prefill, decode]):
        names = " and ".join(server.name for server in sleepers)
        transfer = asyncio.create_task(direct(client, prefill, decode, long))
        await asyncio.sleep(MIDDLE_SECONDS)
        assert transfer.done() == (long_tokens < VICTIM_TOKENS), "the sleep was to begin amid the transfer"
        # P's prompt ends when D has it. If both are to sleep, D waits for it, and both requests are sent
        # together.
        await asyncio.gather(*(ask(client, server, f"sleep?level=1&mode={mode}") for server in sleepers))
        outcome = (await asyncio.gather(transfer, return_exceptions=True))[0]
        if mode == "wait":
            assert getattr(outcome, "tokens", None) == expected[1], f"{names} did not wait: {outcome!r}"
        for server in sleepers:
            await ask(client, server, "wake_up")
        for body, tokens in zip((short, long), expected, strict=True):
            assert (await direct(client, prefill, decode, body)).tokens == tokens, f"{names} woke up"
        for server in (prefill, decode):
            await rests(client, server)
        print(
            f"sleep and wake of {names}, mode {mode}: {type(outcome).__name__}, then equal tokens", flush=True
        )


async def run(pair: GpuDeployment, long_tokens: int) -> None:
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        for mode in ("wait", "abort"):
            await sleep_and_wake(client, pair, mode, long_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/kvc-gpu-sleep"), help="models and logs")
    parser.add_argument("--provider", default="bounce", help="nvlink refuses the memory of vLLM's sleep mode")
    plan = parser.parse_args()
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /sleep and /wake_up
    large = ["--load-format", "dummy", "--max-model-len", "40000", "--enforce-eager"]
    large += ["--kv-cache-memory-bytes", str(8 << 30)]
    tiny = [*TINY_ARGUMENTS, "--no-enable-prefix-caching"]
    # The large model is slow enough for a sleep amid a transfer. The tiny model's tokens depend on each page.
    sleep(plan, "large", 9400, SHAPES["llama"].write(plan.work / "llama"), large, VICTIM_TOKENS)
    sleep(plan, "tiny", 9600, write_tiny(plan.work / "tiny"), tiny, 1000)


def sleep(
    plan: argparse.Namespace, name: str, port: int, model: Path, arguments: list[str], long_tokens: int
) -> None:
    arguments = [*arguments, "--enable-sleep-mode"]
    pair = deployment(f"sleep-{name}", port, model, arguments, plan.work, provider=plan.provider)
    servers = pair.pairs["ours"]
    try:
        for server in servers:
            server.start()
        wait_ready(list(servers))
        asyncio.run(run(pair, long_tokens))
    except AssertionError as error:
        print(f"FAILED: {error}")
        sys.exit(1)
    finally:
        stop([server.process for server in servers if server.process is not None])


if __name__ == "__main__":
    main()
