#!/usr/bin/env python3
"""Compares the greedy tokens of SGLang with its own exchange of experts and with KV_CONNECTOR_MOE=1.

    tests/gpu/sglang_experts.py [--ranks N] [--model DIR] [--runner NAME] [--backend NAME] [--logs DIR]

Starts one server after the other on the same GPUs, with attention's data parallelism and expert parallelism.
What has to hold: tokens of requests one at a time are equal, and each rank reports that it exchanges rows
over kv-connector. Requests at once are compared, too, but may differ, because steps then have other sizes.
Prints a JSON object, and exits with 1 if a property does not hold. Needs SGLang 0.5.23 for CUDA with
FlashInfer, this package with its plugin, and as many GPUs as ranks. It was not run yet.

Without --model: four layers of random weights in bf16, in the shape of Qwen3-MoE. `--model` takes a
checkpoint in fp8 with blocks of 128, too. `--backend none`: SGLang's own exchange without FlashInfer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).resolve().parents[2]))

from kv_connector.lab.sglang_cluster import ServerSettings, SglangCluster, SglangServer

SECONDS = 600.0
"""Limit for a start, which compiles kernels, and for a request."""
TOKENS = 24
SERVED = re.compile(r"experts: rank (?P<rank>\d+) of \d+ exchanges rows")


class Gpus(SglangCluster):
    def start_on_gpus(self, name: str, ranks: int, backend: str, runner: str, ours: bool) -> SglangServer:
        words = {
            "device": "cuda",
            "dtype": "bfloat16",
            "tp-size": ranks,
            "attn-dp-size": ranks,
            "ep-size": ranks,
            "moe-a2a-backend": backend,
            "moe-runner-backend": runner,
            "mem-fraction-static": 0.8,
            "cuda-graph-max-bs-decode": 16,
        }
        if backend == "none":
            words["moe-runner-backend"] = "auto"
        flags = ("--skip-tokenizer-init", "--disable-radix-cache")
        environment = {"KV_CONNECTOR_MOE": "1" if ours else "0", "NCCL_NVLS_ENABLE": "0"}
        return self._launch(name, None, replace(self.settings), words, flags, environment)


def make_model(directory: Path) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=2048,
        moe_intermediate_size=768,
        num_experts=64,
        num_experts_per_tok=8,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=4096,
        max_position_embeddings=4096,
        initializer_range=2048**-0.5,  # the output then depends on all of the prompt
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def generate(server: SglangServer, prompt: list[int]) -> list[int]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=SECONDS).raise_for_status()
    tokens: list[int] = answer.json()["output_ids"]
    return tokens


def run(server: SglangServer, prompts: list[list[int]]) -> dict[str, Any]:
    one = [generate(server, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        at_once = [*threads.map(lambda prompt: generate(server, prompt), prompts)]
    served = sorted({int(found["rank"]) for found in SERVED.finditer(server.log.read_text())})
    return {"one": one, "at_once": at_once, "served": served}


def equal(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", type=Path, help="checkpoint of a model with experts")
    parser.add_argument("--runner", default="deep_gemm", help="SGLang's --moe-runner-backend")
    parser.add_argument("--backend", default="flashinfer", help="exchange to compare with")
    parser.add_argument("--logs", type=Path, help="directory of logs; default: a temporary one")
    options = parser.parse_args()
    directory = options.logs or Path(tempfile.mkdtemp(prefix="sglang-experts-"))
    model = options.model or make_model(directory / "model")
    draw = random.Random(0)
    prompts = [[draw.randrange(10, 4000) for _ in range(draw.randrange(1, 300))] for _ in range(16)]
    settings = ServerSettings(max_total_tokens=32768, max_running_requests=32)
    found = {}
    for name, backend in (("theirs", options.backend), ("ours", "flashinfer")):
        with Gpus(directory, model, settings) as cluster:
            server = cluster.start_on_gpus(name, options.ranks, backend, options.runner, name == "ours")
            cluster.wait_ready(server, seconds=SECONDS)
            found[name] = run(server, prompts)
    theirs, ours = found["theirs"], found["ours"]
    result = {
        "ranks": options.ranks,
        "runner": options.runner,
        "requests": len(prompts),
        "equal_one_at_a_time": equal(theirs["one"], ours["one"]),
        "equal_at_once": equal(theirs["at_once"], ours["at_once"]),
        "ranks_over_kv_connector": ours["served"],
        "logs": str(directory),
    }
    print(json.dumps(result), flush=True)
    holds = (
        result["equal_one_at_a_time"] == len(prompts)
        and ours["served"] == list(range(options.ranks))
        and not theirs["served"]
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
