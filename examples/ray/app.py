"""P (prefill engine) and D (decode engine) as Ray Serve deployments on CPUs, and one request to them.

Prints, as JSON, the answer's tokens and the bytes of KV cache that P pushed for it. Everything ends with the
answer.
"""

import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
from ray import serve

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama
from kv_connector.ray.app import build_pd_app

PROMPT = list(range(32, 127)) * 20
OUTPUT = 8
SECONDS = 60
"""Seconds in which Ray's metrics have been gathered."""


def replica(model: Path, role: str) -> dict[str, Any]:
    """Returns the arguments of one role, as in serve.yaml, but on a CPU."""
    return {
        "model_loading_config": {"model_id": "model", "model_source": str(model)},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "log_engine_metrics": True,
        "engine_kwargs": {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            "block_size": 32,
            "kv_cache_memory_bytes": 256 << 20,
            "kv_transfer_config": {"kv_connector": "WriteImmConnector", "kv_role": role},
        },
    }


def ask(port: int) -> list[int]:
    body = {
        "model": "model",
        "prompt": PROMPT,
        "max_tokens": OUTPUT,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
    return tokens


def metric(port: int, name: str) -> float:
    """Returns the metric's sum over all replicas; 0 if it is not reported yet."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def main(directory: Path) -> dict[str, Any]:
    http, metrics = free_ports(2)
    key = directory / "key"
    ClusterKey.generate().write(key)
    model = make_llama(directory / "model")
    environment = {
        "KV_CONNECTOR_KEY_FILE": str(key),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Ray counts cores as promises. Two real cores are enough.
    ray.init(num_cpus=8, _metrics_export_port=metrics, runtime_env={"env_vars": environment})
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": http})
        sides = {
            "prefill_config": replica(model, "kv_producer"),
            "decode_config": replica(model, "kv_consumer"),
        }
        serve.run(build_pd_app(sides))
        tokens = ask(http)
        pushed, deadline = 0.0, time.monotonic() + SECONDS
        while not pushed and time.monotonic() < deadline:
            time.sleep(1)
            pushed = metric(metrics, "ray_kv_connector_bytes_pushed_total")
        early = metric(metrics, "ray_kv_connector_bytes_pushed_before_prefill_end_total")
        return {"tokens": tokens, "bytes_pushed": pushed, "before_prefill_end": early}
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        answer = main(Path(directory))
    # Printed after all output of Ray and the replicas.
    print(json.dumps(answer))
