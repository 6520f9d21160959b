"""Time to first token of SGLang P/D on two GPUs beside one server and beside SGLang's nixl and mooncake.

    sglang_gpu.py --logs DIR --json FILE [--only NAME,NAME] [--attention fa3] [--seconds 480]

The prefill server is on the first GPU, the decode server and the single server on the second: a Llama of 8
billion random weights. Deployments that fit on the GPUs together start together and are measured one after
the other. If one does not start, its error is printed, and the next one is measured. Needs SGLang for CUDA
with kv_connector, nixl and mooncake. If kv_connector is installed, run it outside the repository's root:
Python would otherwise take the repository's.
"""
# ruff: noqa: T201

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import sglang_cpu as lab
from shapes import SHAPES

from kv_connector.lab.sglang_cluster import Role, ServerSettings, SglangCluster, SglangServer

# Tokens of a prompt, requests at a time, number of requests.
LOADS = ((1024, 1, 8), (1024, 8, 32), (4096, 1, 8), (4096, 8, 24), (16384, 1, 4), (16384, 8, 16))
SETTINGS = ServerSettings(
    page_size=16, max_total_tokens=150_000, chunked_prefill_size=8192, context_length=32768
)
# Names of SGLang's backends, with their environments.
FLAGS: dict[str, dict[str, str]] = {
    "one server": {},
    "write_imm": {},
    "nixl": {},
    "mooncake_tcp": {},
    # Mooncake's transport for GPUs of one machine.
    "mooncake": {"MC_INTRANODE_NVLINK": "1", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK"},
}


class GpuCluster(SglangCluster):
    def start_gpu(
        self, name: str, gpu: int, attention: str, role: Role | None = None, backend: str = ""
    ) -> SglangServer:
        words = {
            "load-format": "dummy", "device": "cuda", "attention-backend": attention, "dtype": "bfloat16",
            "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.9,
            "cuda-graph-max-bs-decode": 8,
        }  # fmt: skip
        flags = ("--skip-tokenizer-init", "--disable-radix-cache", "--disable-prefill-cuda-graph")
        environment = {"CUDA_VISIBLE_DEVICES": str(gpu), **FLAGS.get(backend, {})}
        return self._launch(name, role, replace(self.settings, backend=backend), words, flags, environment)


def note(path: Path, **row: Any) -> None:
    print(json.dumps(row), flush=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


async def measure(
    one: lab.SglangDeployment, path: Path, expected: dict[tuple[int, int, int], Any], deadline: float
) -> None:
    for _ in range(20):  # the first requests build kernels
        try:
            await asyncio.wait_for(lab.load(one, lab.prompts(300, 2, 99), 1), 60)
            break
        except Exception as error:
            note(path, name=one.name, warm=repr(error)[:300])
            if any(not server.running() for server in one.servers) or time.monotonic() > deadline:
                return
            await asyncio.sleep(1)
    else:
        return
    for tokens, at_once, _ in LOADS:  # every shape once, uncounted
        if at_once > 1 and time.monotonic() < deadline:
            await asyncio.wait_for(lab.load(one, lab.prompts(tokens, 8, 5), at_once), 60)
    for each in LOADS:
        tokens, at_once, count = each
        if time.monotonic() > deadline:
            note(path, name=one.name, tokens=tokens, at_once=at_once, left_out="no time")
            continue
        try:
            found = await asyncio.wait_for(
                lab.load(one, lab.prompts(tokens, count, tokens + at_once), at_once), 60
            )
        except Exception as error:
            note(path, name=one.name, tokens=tokens, at_once=at_once, error=repr(error)[:300])
            continue
        ttft = sorted(found["ttft"])
        expected.setdefault(each, found["tokens"])
        note(
            path, name=one.name, tokens=tokens, at_once=at_once, requests=count,
            ttft_ms_median=round(statistics.median(ttft) * 1e3, 2), ttft_ms_max=round(ttft[-1] * 1e3, 2),
            per_second=round(count / found["seconds"], 3),
            equal=sum(a == b for a, b in zip(found["tokens"], expected[each], strict=True)),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--attention", default="fa3")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument(
        "--start", type=float, default=170, help="time limit for a group to start, in seconds"
    )
    parser.add_argument("--only", default=",".join(FLAGS))
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"sglang_gpu needs a machine with two GPUs, and nvidia-smi shows none here: {error}")
    name, memory = answer.stdout.splitlines()[0].split(", ")
    names = options.only.split(",")
    # One server of 8 billion weights and 150,000 tokens takes 40 GB.
    groups = (
        [names[:3], names[3:]] if float(memory) > 120_000 else [names[n : n + 1] for n in range(len(names))]
    )
    note(options.json, gpu=name, attention=options.attention, groups=groups)
    model = SHAPES["llama"].write(options.logs / "model")
    expected: dict[tuple[int, int, int], Any] = {}
    for group in filter(None, groups):
        if deadline - time.monotonic() < 60:
            note(options.json, group=group, left_out="no time")
            continue
        began = time.monotonic()
        with GpuCluster(options.logs, model, SETTINGS) as cluster:
            ones = []
            for one in group:
                if one == "one server":
                    ones.append(lab.SglangDeployment(one, cluster.start_gpu("one", 1, options.attention)))
                    continue
                prefill = cluster.start_gpu(f"{one}-prefill", 0, options.attention, "prefill", one)
                decode = cluster.start_gpu(f"{one}-decode", 1, options.attention, "decode", one)
                ones.append(lab.SglangDeployment(one, decode, prefill))
            limit = time.monotonic() + min(options.start, deadline - time.monotonic() - 30)
            for one in ones:
                try:
                    cluster.wait_ready(*one.servers, seconds=max(limit - time.monotonic(), 1))
                    note(options.json, name=one.name, ready_s=round(time.monotonic() - began, 1))
                except Exception as error:
                    note(options.json, name=one.name, not_ready=str(error)[-1500:])
                    continue
                try:
                    asyncio.run(measure(one, options.json, expected, deadline))
                except Exception as error:
                    note(options.json, name=one.name, error=repr(error)[:500])


if __name__ == "__main__":
    main()
