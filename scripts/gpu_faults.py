"""kill -9 of a prefill and of a decode engine in the middle of a transfer between two GPUs.

Needs what bench_gpu_pd.py needs. The one that lives on must answer a request of its own, hold no KV block and
no transfer, and work with the other one's successor at the same address. Ends with status 1 if it does not.
"""
# ruff: noqa: T201  (its output is a report)

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from pathlib import Path

import httpx
import numpy as np
from bench_gpu_pd import (
    Body,
    Deployment,
    Server,
    deployment,
    direct,
    stream,
    wait_ready,
)
from gpu_shapes import SHAPES

from kv_connector.lab.process import stop

# Its prefill takes 0.5 s on an H200.
VICTIM_TOKENS = 16384
MIDDLE_SECONDS = 0.3
# Dead after 5 s without a word; a process of this machine that ended is noticed at once.
REST_SECONDS = 8.0
IN_USE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


async def used(client: httpx.AsyncClient, server: Server) -> float:
    """The part of its KV blocks that the engine has in use."""
    found = IN_USE.findall((await client.get(f"{server.url}/metrics")).text)
    return sum(float(value) for value in found)


async def rests(client: httpx.AsyncClient, server: Server) -> float:
    """Seconds until no block is in use and the connector has nothing in hand (else it refuses the reset)."""
    begin = time.monotonic()
    while True:
        answer = await client.post(f"{server.url}/reset_prefix_cache?reset_external=true")
        seconds = time.monotonic() - begin
        if answer.status_code == 200 and answer.json().get("success") and await used(client, server) == 0:
            return seconds
        if seconds > REST_SECONDS:
            raise AssertionError(f"{server.name} is not at rest after {seconds:.1f} s: {answer.text}")
        await asyncio.sleep(0.05)


async def kill(client: httpx.AsyncClient, pair: Deployment, victim: str) -> None:
    prefill, decode = pair.pairs["ours"]
    dead, alive = (prefill, decode) if victim == "prefill" else (decode, prefill)
    rng = np.random.default_rng(3)
    short, long = (
        Body(rng.integers(1000, 100000, count).tolist(), tokens)
        for count, tokens in ((200, 16), (VICTIM_TOKENS, 4))
    )
    expected = (await stream(client, pair.alone.url, short)).tokens
    # bfloat16 may round the first token otherwise where it is computed by itself, as D does.
    through_both = (await direct(client, prefill, decode, short)).tokens
    transfer = asyncio.create_task(direct(client, prefill, decode, long))
    await asyncio.sleep(MIDDLE_SECONDS)
    assert not transfer.done(), "the transfer was over before the kill"
    assert dead.process is not None
    begin = time.monotonic()
    dead.process.kill()
    outcome = (await asyncio.gather(transfer, return_exceptions=True))[0]
    ended = time.monotonic() - begin
    rest = await rests(client, alive)
    answer = await stream(client, alive.url, short)
    assert answer.tokens == expected, "the survivor's own answer"
    dead.start()
    wait_ready([dead])
    again = await direct(client, prefill, decode, short)
    assert again.tokens == through_both, "with the successor"
    await rests(client, prefill)
    await rests(client, decode)
    print(
        f"kill -9 of {victim}: its request ended after {ended:.2f} s ({type(outcome).__name__}), "
        f"the other was at rest after {rest:.2f} s more and answered; "
        "equal tokens with the successor at the same address",
        flush=True,
    )


async def run(pair: Deployment) -> None:
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        for victim in ("decode", "prefill"):
            await kill(client, pair, victim)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/kvc-gpu-faults"), help="models and logs")
    plan = parser.parse_args()
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    arguments = ["--load-format", "dummy", "--max-model-len", "40000", "--enforce-eager"]
    arguments += ["--kv-cache-memory-bytes", str(8 << 30)]
    pair = deployment("faults", 9300, SHAPES["llama"].write(plan.work / "llama"), arguments, plan.work)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    try:
        for server in pair.servers:
            server.start()
        wait_ready(pair.servers)
        asyncio.run(run(pair))
    except AssertionError as error:
        print(f"FAILED: {error}")
        sys.exit(1)
    finally:
        stop([server.process for server in pair.servers if server.process is not None])


if __name__ == "__main__":
    main()
