"""Accuracy of the router's prefix index with engines that evict, on CPUs.

The program starts two prefill and two decode engines with small caches, and a router. It sends the turns of
`kv-connector bench conversations`, and prints the router's counters of hits by side, and the blocks that each
engine has evicted. The accuracy is the part of the predicted tokens that engines had in their caches. Status
1: a turn failed, or a side is below the limit.
"""

# ruff: noqa: T201  (its output are lines of JSON)

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import kv_connector
from kv_connector.lab.cluster import HOST, MODEL_NAME, EngineProcess, EngineSettings, LocalCluster, Role
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama

BLOCK = 32
SIDES = ("prefill", "decode")
COUNTERS = ("predicted", "actual", "confirmed")


def settings(blocks: int, *arguments: str) -> EngineSettings:
    return EngineSettings(
        max_model_len=2048,
        block_size=BLOCK,
        arguments=(
            "--num-gpu-blocks-override",
            str(blocks),
            "--enable-prompt-tokens-details",
            # Each block is sampled, so vLLM's histogram of lifetimes counts all evictions.
            "--kv-cache-metrics",
            "--kv-cache-metrics-sample",
            "1.0",
            *arguments,
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=300, help=f"blocks of {BLOCK} tokens of each engine")
    parser.add_argument(
        "--least", type=float, default=0.95, help="accuracy of each side that must be reached"
    )
    parser.add_argument("--conversations", type=int, default=126)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=30)
    parser.add_argument("--think-time", type=float, default=6.0, help="seconds between two turns")
    parser.add_argument("--api", default="chat", choices=["chat", "completions", "tokens"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start-seconds", type=float, default=600.0, help="time for all engines to start")
    plan = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_llama(Path(directory) / "model")
        with LocalCluster(Path(directory) / "logs", model) as cluster:
            (registration,) = free_ports(1)
            router = cluster.start_router("router", registration=registration)

            def start(name: str, role: Role, *arguments: str) -> EngineProcess:
                routers = [f"{HOST}:{registration}"]
                return cluster.start_engine(
                    name, role=role, routers=routers, settings=settings(plan.blocks, *arguments)
                )

            engines = [start(f"prefill-{n}", "kv_producer", "--no-async-scheduling") for n in (0, 1)]
            engines += [start(f"decode-{n}", "kv_consumer") for n in (0, 1)]
            cluster.wait_ready(seconds=plan.start_seconds)
            cluster.wait_joined(router, *engines)
            status = send(router, engines, plan)
            counts = counters(router)
            evictions = {engine.name: evicted(engine.url) for engine in engines}
    print(json.dumps({"package": str(Path(kv_connector.__file__).parent), **vars(plan)}))
    print(json.dumps({"evicted blocks": evictions}))
    good = status == 0
    for side, found in counts.items():
        accuracy = found["confirmed"] / found["predicted"] if found["predicted"] else 1.0
        good = good and accuracy >= plan.least
        print(json.dumps({"side": side, **found, "accuracy": round(accuracy, 4)}))
    return 0 if good else 1


def send(router: str, engines: list[EngineProcess], plan: argparse.Namespace) -> int:
    """Sends the conversations. Returns the status of the command."""
    command = [sys.executable, "-m", "kv_connector.cli.main", "bench", "conversations", "--preset", "small"]
    command += ["--url", router, "--model", MODEL_NAME, "--api", plan.api]
    command += ["--first-tokens", "400", "--message-tokens", "80", "--answer-tokens", "40"]
    command += ["--turns", str(plan.turns), "--conversations", str(plan.conversations)]
    command += [
        "--at-once",
        str(plan.at_once),
        "--think-time",
        str(plan.think_time),
        "--seed",
        str(plan.seed),
    ]
    for engine in engines:
        command += ["--engine", f"{engine.name}={engine.url}"]
    return subprocess.run(command, check=False).returncode


def counters(router: str) -> dict[str, dict[str, int]]:
    """Returns the router's tokens of predicted, actual and confirmed hits, by side."""
    found = {side: dict.fromkeys(COUNTERS, 0) for side in SIDES}
    for sample in samples(router):
        for counter in COUNTERS:
            if sample.name == f"kv_connector_router_{counter}_hit_tokens_total":
                found[sample.labels["side"]][counter] = round(sample.value)
    return found


def evicted(engine: str) -> int:
    """Returns the blocks with contents that the engine has taken for other contents."""
    lifetimes = "vllm:kv_block_lifetime_seconds_count"
    return sum(round(sample.value) for sample in samples(engine) if sample.name == lifetimes)


def samples(server: str) -> Iterator[Sample]:
    """Yields the samples of a router's or an engine's metrics."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as response:
        text = response.read().decode()
    for family in text_string_to_metric_families(text):
        yield from family.samples


if __name__ == "__main__":
    sys.exit(main())
