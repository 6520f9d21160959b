"""Time to first token with few blocks at the decode engine and a long queue at the prefill engine, on CPUs.

Long prompts go to a router at once. Meanwhile the decode engine gets short requests that it computes alone.
The program starts the engines of the package that it imports, so that two builds can be compared.
"""

# ruff: noqa: T201  (its output are lines of JSON)

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import kv_connector
from kv_connector.lab.cluster import EngineSettings, LocalCluster
from kv_connector.lab.completion import CompletionTokens, complete
from kv_connector.lab.model import make_llama

BLOCK = 32
LONG_TOKENS = 1600
SHORT_TOKENS = 64
OUTPUT_TOKENS = 8


def settings(blocks: int) -> EngineSettings:
    return EngineSettings(
        max_model_len=1984,
        max_batched_tokens=512,
        block_size=BLOCK,
        arguments=("--num-gpu-blocks-override", str(blocks)),
    )


def prompt(name: str, tokens: int) -> list[int]:
    return random.Random(name).choices(range(256), k=tokens)


def p50(answers: list[CompletionTokens]) -> float:
    return statistics.median(answer.first_token_seconds for answer in answers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", type=int, default=16, help="prompts that queue at the prefill engine")
    parser.add_argument("--short", type=int, default=24, help="requests of the decode engine alone")
    parser.add_argument(
        "--room", type=int, default=4, help="long prompts that the decode engine has room for"
    )
    parser.add_argument("--interval", type=float, default=0.25, help="seconds between two short requests")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    blocks = options.room * (-(-(LONG_TOKENS + OUTPUT_TOKENS) // BLOCK)) + 8
    with tempfile.TemporaryDirectory() as directory:
        model = make_llama(Path(directory) / "model", layers=16)
        with LocalCluster(Path(directory) / "logs", model) as cluster:
            prefill = cluster.start_engine("prefill", role="kv_producer", settings=settings(1200))
            decode = cluster.start_engine("decode", role="kv_consumer", settings=settings(blocks))
            router = cluster.start_router("router", prefill=[prefill], decode=[decode])
            cluster.wait_ready(seconds=600)
            for url, name in ((router, "warm"), (decode.url, "warm alone")):
                complete(url, prompt(name, LONG_TOKENS), max_tokens=OUTPUT_TOKENS)
            for number in range(options.rounds):
                measured = measure(router, decode.url, options, number)
                print(
                    json.dumps({"package": str(Path(kv_connector.__file__).parent), **measured}), flush=True
                )
    return 0


def measure(router: str, decode: str, options: argparse.Namespace, number: int) -> dict[str, float]:
    begun = time.perf_counter()
    with ThreadPoolExecutor(options.long + options.short) as pool:
        long: list[Future[CompletionTokens]] = []
        short: list[Future[CompletionTokens]] = []
        for index in range(options.long):
            one = prompt(f"long {number} {index}", LONG_TOKENS)
            long.append(pool.submit(complete, router, one, max_tokens=OUTPUT_TOKENS))
        for index in range(options.short):
            time.sleep(options.interval)
            one = prompt(f"short {number} {index}", SHORT_TOKENS)
            short.append(pool.submit(complete, decode, one, max_tokens=OUTPUT_TOKENS))
        long_answers, short_answers = ([future.result() for future in some] for some in (long, short))
    return {
        "round": number,
        "ttft p50 of all, s": round(p50(long_answers + short_answers), 3),
        "ttft p50 of short, s": round(p50(short_answers), 3),
        "ttft p50 of long, s": round(p50(long_answers), 3),
        "ttft max of long, s": round(max(answer.first_token_seconds for answer in long_answers), 3),
        "total, s": round(time.perf_counter() - begun, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
