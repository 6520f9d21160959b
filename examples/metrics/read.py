"""Prometheus metrics of a prefill engine (P), a decode engine (D) and the router after a few prompts."""

import random
import tempfile
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kv_connector.lab.cluster import EngineSettings, LocalCluster
from kv_connector.lab.completion import complete
from kv_connector.lab.demonstration import Pushed
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import leave_on_signals

PROMPTS, TOKENS = 4, 1500

# The process, the metric as Prometheus stores it, and its meaning.
QUESTIONS = (
    ("prefill", "kv_connector_bytes_pushed_total", "bytes pushed by the prefill engine"),
    ("prefill", "kv_connector_bytes_pushed_before_prefill_end_total", "bytes pushed before prefill ended"),
    ("prefill", "kv_connector_transfers_total", "ended transfers, by outcome"),
    ("prefill", "kv_connector_send_duration_seconds_sum", "seconds from the first push to the last"),
    ("prefill", "kv_connector_peers", "peers, by lane"),
    (
        "decode",
        "kv_connector_receive_duration_seconds_sum",
        "seconds that the decode engine's requests waited for pages",
    ),
    ("decode", "kv_connector_transfers_under_way", "requests in flight, by phase"),
    ("router", "kv_connector_router_requests_total", "requests, by route and status"),
    ("router", "kv_connector_router_retries_total", "requests retried with another engine"),
    ("router", "kv_connector_router_engines", "engines, by status"),
)


def show(cluster: LocalCluster) -> None:
    prefill = cluster.start_engine("prefill", role="kv_producer")
    decode = cluster.start_engine("decode", role="kv_consumer")
    router = cluster.start_router("router", prefill=[prefill], decode=[decode])
    cluster.wait_ready()
    for seed in range(PROMPTS):
        prompt = random.Random(seed).choices(range(256), k=TOKENS)
        complete(router, prompt, max_tokens=8)
    Pushed.settled(prefill)  # P's counters appear with one of its next steps

    told = {
        "prefill": samples(prefill.url),
        "decode": samples(decode.url),
        "router": samples(router),
    }
    for who, name, question in QUESTIONS:
        print(f"\n{question}: {name}, at the {who}")
        for sample in told[who]:
            if sample.name == name and sample.value:
                labels = {key: value for key, value in sample.labels.items() if key not in VLLMS_OWN}
                print(f"    {sample.value:,.6g}  {labels or ''}")


# vLLM's labels that name an engine, which all its metrics share.
VLLMS_OWN = ("model_name", "engine")


def samples(url: str) -> list[Sample]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return [sample for family in families for sample in family.samples]


if __name__ == "__main__":
    with leave_on_signals(), tempfile.TemporaryDirectory() as directory:
        model = make_llama(Path(directory, "model"), layers=8)
        # A step has 512 tokens: a prompt of 1,500 is pushed while the rest of it is computed.
        with LocalCluster(Path(directory), model, EngineSettings(max_batched_tokens=512)) as cluster:
            show(cluster)
