"""A trainer's ranks with bfloat16 weights, and an engine that serves block fp8.

Its tokens are those of an engine that was started from vLLM's own quantisation of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from deployment import Client, engine_settings, prompt
from test_weight_loading import FP8
from test_weights import TOKENS, settled, start
from typer.testing import CliRunner
from weight_trainer import Trainer

from kv_connector.cli.main import app
from kv_connector.lab.cluster import EngineProcess, LocalCluster
from kv_connector.lab.model import make_llama

pytestmark = pytest.mark.anyio

RANKS = 3
PROMPTS = [(number, tokens) for number, tokens in enumerate((1, 33, 200))]
ON_CPU = ("--worker-extension-cls", "fp8_on_cpu.Worker", "--dtype", "bfloat16")


@dataclass(frozen=True)
class Site:
    engine: EngineProcess  # started with "a" in block fp8
    take: str  # address where it receives weights
    oracle: EngineProcess  # started with "b" in block fp8
    plain: dict[str, Path]  # the checkpoints in bfloat16
    fp8: dict[str, Path]


@pytest.fixture(scope="module")
def site(interpreter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from fp8_checkpoints import in_bfloat16, quantised

    directory = tmp_path_factory.mktemp("fp8")
    plain = {
        name: in_bfloat16(make_llama(directory / name / "plain", **FP8, seed=seed))
        for seed, name in enumerate("ab")
    }
    fp8 = {name: quantised(path, directory / name / "fp8") for name, path in plain.items()}
    with LocalCluster(directory / "logs", fp8["a"], engine_settings()) as cluster:
        cluster.interpreter = interpreter
        engine, take = start(cluster, "fp8", 1, ON_CPU, providers=("host", "tcp"))
        cluster.model = fp8["b"]
        oracle, _ = start(cluster, "oracle", 1, ON_CPU)
        cluster.wait_ready()
        yield Site(engine, take, oracle, plain, fp8)


async def answers(client: Client, engine: EngineProcess) -> list[list[int]]:
    """Returns the answers to single requests: in bfloat16 the last digits depend on the other requests of a
    step."""
    return [await client.complete(engine.url, prompt(*which), TOKENS) for which in PROMPTS]


async def test_weights_quantised_by_a_trainers_ranks_are_served(
    site: Site, client: Client, tmp_path: Path
) -> None:
    """Three FSDP2 ranks push, whose rows end within blocks. Then the first checkpoint is pushed in block
    fp8."""
    a, b = await answers(client, site.engine), await answers(client, site.oracle)
    assert all(before != after for before, after in zip(a, b, strict=True))
    with Trainer(tmp_path, [site.take], site.plain["b"], ranks=RANKS, applies=True, fp8=True) as trainer:
        await asyncio.to_thread(trainer.all_say, "connected")
        for version in ("step-1", "step-2"):  # converted to the kernels' form by vLLM, then copied into it
            trainer.say(version)
            await asyncio.to_thread(trainer.all_say, "applied")
            assert await answers(client, site.engine) == b
    await settled(site.take)
    assert "version fp8 is served" in await asyncio.to_thread(said, "push", site.fp8["a"], site.take)
    assert await answers(client, site.engine) == a
    verified = await asyncio.to_thread(said, "verify", site.fp8["a"], site.take)
    assert "parameters are the checkpoint's" in verified
    refused = await asyncio.to_thread(said, "push", site.plain["b"], site.take)
    assert "bfloat16 here and float8_e4m3fn at the engine" in refused


def said(command: str, checkpoint: Path, engine: str) -> str:
    return CliRunner().invoke(app, ["weights", command, str(checkpoint), "--engine", engine]).output
