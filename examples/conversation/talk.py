"""A conversation of ten turns over two prefill and two decode engines. One prefill engine is killed."""

import random
import tempfile
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kv_connector.lab.cluster import HOST, EngineProcess, EngineSettings, LocalCluster, Role
from kv_connector.lab.completion import complete
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import leave_on_signals

TURNS, KILLED_AFTER = 10, 5
FIRST, QUESTION, ANSWER = 1000, 200, 100

HITS = "kv_connector_router_actual_hit_tokens_total"
LOADED = "kv_connector_router_borrowed_tokens_total"


def talk(cluster: LocalCluster) -> None:
    (port,) = free_ports(1)

    def start(name: str, role: Role) -> EngineProcess:
        return cluster.start_engine(name, role=role, routers=[f"{HOST}:{port}"])

    router = cluster.start_router("router", registration=port)
    prefill = [start(f"prefill-{n}", "kv_producer") for n in (1, 2)]
    decode = [start(f"decode-{n}", "kv_consumer") for n in (1, 2)]
    cluster.wait_ready()
    cluster.wait_joined(router, *prefill, *decode)

    print("turn  prompt  own cache  loaded  computed  first token")
    prompt = words(FIRST, seed=0)
    for turn in range(1, TURNS + 1):
        before = counters(router)
        answer = complete(router, prompt, max_tokens=ANSWER)
        hits, loaded = (now - then for now, then in zip(counters(router), before, strict=True))
        computed = len(prompt) - hits - loaded
        numbers = f"{turn:4} {len(prompt):7} {hits:10} {loaded:7} {computed:9}"
        print(f"{numbers} {answer.first_token_seconds * 1e3:9.0f} ms", flush=True)
        prompt += [*answer.tokens, *words(QUESTION, seed=turn)]
        if turn == KILLED_AFTER:
            victim = max(prefill, key=lambda engine: engine.metric("vllm:prompt_tokens_total"))
            victim.kill()
            print(f"      {victim.name} is killed")


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def counters(router: str) -> list[int]:
    """Returns the tokens that prefill engines found in their own caches, and those that they loaded."""
    with urllib.request.urlopen(f"{router}/metrics", timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    prefill = [one for one in samples if one.labels.get("side", "prefill") == "prefill"]
    return [round(sum(one.value for one in prefill if one.name == name)) for name in (HITS, LOADED)]


if __name__ == "__main__":
    with leave_on_signals(), tempfile.TemporaryDirectory() as directory:
        model = make_llama(Path(directory, "model"), layers=8)
        # The router learns from prefill engines what they had cached.
        settings = EngineSettings(arguments=("--enable-prompt-tokens-details",))
        with LocalCluster(Path(directory), model, settings) as cluster:
            talk(cluster)
