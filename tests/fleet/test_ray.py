"""Ray Serve LLM itself, by examples/ray: P and D are replicas that it places."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from deployment import Client

from kv_connector.lab.cluster import EngineSettings, LocalCluster
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import Process

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: scripts/setup fleet"
    ),
]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "app.py"), run_name="example")


async def test_tokens_are_those_of_one_engine(
    client: Client, tmp_path: Path, interpreter: tuple[str, ...], example: dict[str, Any]
) -> None:
    model = make_llama(tmp_path / "model")
    with LocalCluster(tmp_path, model, EngineSettings()) as cluster:
        cluster.interpreter = interpreter
        alone = cluster.start_engine("alone")
        cluster.wait_ready()
        expected = await client.complete(alone.url, example["PROMPT"], example["OUTPUT"])
    log = tmp_path / "ray.log"
    driver = Process("ray", [sys.executable, str(EXAMPLE / "app.py")], environment={}, log=log)
    try:
        driver._child.wait(300)
    finally:
        driver.kill()
    said = json.loads(log.read_text().splitlines()[-1])
    print(said)
    assert said["tokens"] == expected
    assert said["bytes_pushed"] > 0


def test_the_file_for_serve_deploy_is_what_ray_reads() -> None:
    yaml = pytest.importorskip("yaml")
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
