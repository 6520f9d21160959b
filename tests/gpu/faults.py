"""kill -9 of a prefill and of a decode engine in the middle of a transfer between two GPUs.

Needs what gpu_pd.py needs. The surviving engine must answer a request by itself and hold no KV block and no
transfer. It must work with the dead engine's successor at the same address. Otherwise the status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import httpx
import numpy as np

from kv_connector.lab.process import stop

sys.path.append(str(Path(__file__).resolve().parents[2] / "integration" / "benchmarks"))
from gpu_engines import (
    Body,
    GpuDeployment,
    deployment,
    direct,
    rests,
    stream,
    wait_ready,
)
from shapes import SHAPES

# The prefill of this prompt takes 0.5 s on an H200.
VICTIM_TOKENS = 16384
MIDDLE_SECONDS = 0.3


async def kill(client: httpx.AsyncClient, pair: GpuDeployment, victim: str) -> None:
    prefill, decode = pair.pairs["ours"]
    dead, alive = (prefill, decode) if victim == "prefill" else (decode, prefill)
    rng = np.random.default_rng(3)
    short, long = (
        Body(rng.integers(1000, 100000, count).tolist(), tokens)
        for count, tokens in ((200, 16), (VICTIM_TOKENS, 4))
    )
    expected = (await stream(client, pair.alone.url, short)).tokens
    # bfloat16 may round the first token differently if it is computed alone, as D does.
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


async def run(pair: GpuDeployment) -> None:
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
