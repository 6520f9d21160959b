"""Prefill and decode servers behind SGLang's own router, and the same prompt to one server alone."""

import json
import tempfile
import urllib.request
from pathlib import Path

from kv_connector.lab.model import make_llama
from kv_connector.lab.process import leave_on_signals
from kv_connector.lab.sglang_cluster import SglangCluster

PROMPT = list(range(32, 127)) * 4


def main(cluster: SglangCluster) -> None:
    prefill = cluster.start_server("prefill", role="prefill")
    decode = cluster.start_server("decode", role="decode")
    alone = cluster.start_server("alone")
    cluster.wait_ready()
    router = cluster.start_router("router", prefill=[prefill], decode=[decode])
    cluster.wait_ready()
    expected, answer = (generate(url) for url in (alone.url, router))
    print(f"one server alone:   {expected}\nprefill and decode: {answer}")
    if answer != expected:
        raise SystemExit("the answers differ")


def generate(url: str) -> list[int]:
    parameters = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": parameters}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        tokens: list[int] = json.load(response)["output_ids"]
    return tokens


if __name__ == "__main__":
    with leave_on_signals(), tempfile.TemporaryDirectory() as directory:
        model = make_llama(Path(directory, "model"))
        with SglangCluster(Path(directory), model) as cluster:
            main(cluster)
