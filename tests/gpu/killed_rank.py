#!/usr/bin/env python3
"""Kills a rank of a vLLM engine with experts on several ranks, again and again.

    tests/gpu/killed_rank.py [--rounds N] [--ranks N] [--seed N] [--out FILE] [--cpu]

Each round starts `vllm serve` with KV_CONNECTOR_MOE=1 and one stream for each rank. At a random time it kills
the process of a random rank. What has to hold: the log names that rank within a second, no stream goes on or
hangs, and the engine ends. Prints a JSON object for each round, with seconds after the kill. Exits with 1 if
a round fails. Needs vLLM, this package with its vLLM plugin, and as many GPUs as ranks. --cpu: vLLM for CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).resolve().parents[2]))

from kv_connector.lab.cluster import MODEL_NAME, EngineProcess, EngineSettings, LocalCluster
from kv_connector.lab.model import make_mixtral

ROOT = Path(__file__).resolve().parents[2]
NAMED_SECONDS = 1.0
END_SECONDS = 60.0
"""Limit for everything after the kill. It is a limit for hangs."""
OUTPUT_TOKENS = 1500
RANK = re.compile(r"pid=(?P<pid>\d+)\).*experts: rank (?P<rank>\d+) of \d+ exchanges rows")
"""A line of a rank's log, with vLLM's prefix."""


class RoundError(Exception):
    """A property that did not hold."""


class Stream(threading.Thread):
    """A streamed completion of one rank. Its outcome is the error that ended it, or "complete"."""

    def __init__(self, url: str, rank: int) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.outcome = ""
        self._url = f"{url}/v1/completions"
        self._headers = {"x-data-parallel-rank": str(rank)}

    def run(self) -> None:
        body = {
            "model": MODEL_NAME,
            "prompt": [3 + i for i in range(40)],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with httpx.stream(
                "POST", self._url, json=body, headers=self._headers, timeout=END_SECONDS
            ) as answer:
                for line in answer.iter_lines():
                    if '"error"' in line or answer.status_code != httpx.codes.OK:
                        self.outcome = line
                        return
                    self.begun.set()
            self.outcome = "complete"
        except httpx.HTTPError as error:
            self.outcome = f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Kill:
    """A rank's process, the time of its end, and where the log ended before it."""

    rank: int
    pid: int
    at: float
    offset: int

    def until(self, holds: Any, seconds: float, what: str) -> float:
        """Waits for `holds()`, and returns the seconds since the kill."""
        while not holds():
            if time.monotonic() - self.at > seconds:
                raise RoundError(f"{what}: not within {seconds:g} s")
            time.sleep(0.001)
        return round(time.monotonic() - self.at, 3)


def settings(ranks: int, cpu: bool) -> EngineSettings:
    arguments = ["--data-parallel-size", str(ranks), "--enable-expert-parallel", "--dtype", "bfloat16"]
    environment = {"KV_CONNECTOR_MOE": "1"}
    if cpu:
        arguments += ["--worker-extension-cls", "moe_on_cpu.Worker"]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    return EngineSettings(
        max_model_len=2048, max_batched_tokens=320, arguments=tuple(arguments), environment=environment
    )


def processes_of(engine: EngineProcess, ranks: int) -> dict[int, int]:
    """Returns the process of each rank, from the log lines that report the exchange."""
    found = {int(line["rank"]): int(line["pid"]) for line in RANK.finditer(engine.log.read_text())}
    if len(found) != ranks:
        raise RoundError(f"ranks {sorted(found)} of {ranks} report that they exchange rows over kv-connector")
    return found


def run_round(engine: EngineProcess, ranks: int, draw: random.Random) -> dict[str, Any]:
    pids = processes_of(engine, ranks)
    streams = [Stream(engine.url, rank) for rank in range(ranks)]
    for stream in streams:
        stream.start()
    for rank, stream in enumerate(streams):
        if not stream.begun.wait(END_SECONDS):
            raise RoundError(f"the stream of rank {rank} did not begin: {stream.outcome}")
    time.sleep(draw.uniform(0, 0.5))  # the kill meets any phase of a step
    if early := [stream.outcome for stream in streams if stream.outcome]:
        raise RoundError(f"a stream ended before the kill: {early[0]}")
    rank = draw.randrange(ranks)
    kill = Kill(rank, pids[rank], time.monotonic(), engine.log.stat().st_size)
    os.kill(kill.pid, signal.SIGKILL)
    pattern = re.compile(rf"rank {rank} \(process {kill.pid}\) (has ended|ended without leaving the group)")

    def named() -> bool:
        with engine.log.open() as log:
            log.seek(kill.offset)
            return pattern.search(log.read()) is not None

    result = {
        "rank": rank,
        "named_s": kill.until(named, NAMED_SECONDS, f"the name of rank {rank} in the log"),
    }
    result["streams_s"] = kill.until(
        lambda: not any(stream.is_alive() for stream in streams), END_SECONDS, "the end of the streams"
    )
    if whole := [rank for rank, stream in enumerate(streams) if stream.outcome == "complete"]:
        raise RoundError(f"the streams of ranks {whole} are complete, though a rank was killed")
    result["ended_s"] = kill.until(lambda: not engine.running(), END_SECONDS, "the end of the engine")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the results, a JSON object a line")
    parser.add_argument("--cpu", action="store_true", help="vLLM for CPUs")
    plan = parser.parse_args()
    draw = random.Random(plan.seed)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = make_mixtral(directory / "model", layers=2, experts=3 * plan.ranks)
        for number in range(plan.rounds):
            with LocalCluster(directory / str(number), model, settings(plan.ranks, plan.cpu)) as cluster:
                engine = cluster.start_engine("engine")
                cluster.wait_ready(seconds=600)
                result: dict[str, Any] = {"round": number}
                try:
                    result |= run_round(engine, plan.ranks, draw)
                except RoundError as error:
                    failed += 1
                    result["failed"] = str(error)
                    print(engine.log_tail(40), file=sys.stderr)
            print(json.dumps(result), flush=True)
            if plan.out is not None:
                with plan.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    print(f"{plan.rounds - failed} of {plan.rounds} rounds hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
