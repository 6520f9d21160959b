"""Ray Serve LLM itself, through examples/ray: P and D are replicas that it places."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import BLOCK, CacheGroup, CacheShape, Client, wait_until

from kv_connector.lab.cluster import EngineSettings, LocalCluster
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import Process

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray"
MODEL = CacheShape((CacheGroup(layers=4),))
PAGE_BYTES = 2 * 2 * BLOCK * 64 * 4  # key and value, heads, tokens, head_dim, float32
# Seconds. Ray starts six processes that import vLLM.
SECONDS = 300.0


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "app.py"), run_name="example")


@pytest.mark.anyio
async def test_tokens_are_those_of_one_engine(
    client: Client, tmp_path: Path, interpreter: tuple[str, ...], example: dict[str, Any]
) -> None:
    """D fetches the whole prompt, some of it before P has computed all: D was requested while P computed."""
    model = make_llama(tmp_path / "model")
    with LocalCluster(tmp_path, model, EngineSettings()) as cluster:
        cluster.interpreter = interpreter
        alone = cluster.start_engine("alone")
        cluster.wait_ready()
        expected = await client.complete(alone.url, example["PROMPT"], example["OUTPUT"])
    log = tmp_path / "ray.log"
    driver = Process("ray", [sys.executable, str(EXAMPLE / "app.py")], environment={}, log=log)

    async def running() -> str:
        return "the example's end" if driver.running() else ""

    try:
        await wait_until(running, SECONDS)
    finally:
        driver.kill()
    answer = log.read_text().splitlines()[-1]
    print(answer)
    said = json.loads(answer)
    assert said["tokens"] == expected
    assert said["bytes_pushed"] == MODEL.pages(len(example["PROMPT"])) * PAGE_BYTES
    assert said["before_prefill_end"] > 0


def test_the_file_for_serve_deploy_is_what_ray_reads() -> None:
    from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load((EXAMPLE / "serve.yaml").read_text()))
    (application,) = schema.applications
    module, _, function = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    args = PDServingArgs.model_validate(application.args)
    roles = [
        config.engine_kwargs["kv_transfer_config"]["kv_role"]
        for config in (args.prefill_config, args.decode_config)
    ]
    assert roles == ["kv_producer", "kv_consumer"]
