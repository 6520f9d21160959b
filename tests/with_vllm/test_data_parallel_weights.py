"""An engine of two data-parallel ranks receives weights: all ranks, in one pause."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import httpx
import pytest
from deployment import PATIENCE_SECONDS, completion_body, engine_settings, prompt
from test_data_parallel import MODELS, RANKS, SMALL, TOKENS
from typer.testing import CliRunner

from kv_connector.cli.main import app
from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster
from kv_connector.lab.free_ports import free_ports


@pytest.mark.anyio
@pytest.mark.parametrize("kind", MODELS)
async def test_all_ranks_take_weights(kind: str, tmp_path: Path, interpreter: tuple[str, ...]) -> None:
    """Each rank's tokens are those of an engine that was started with these weights."""
    model, weights = (MODELS[kind](tmp_path / name, seed=n, **SMALL) for n, name in enumerate("ab"))
    (port,) = free_ports(1)
    of_weights = {"control_host": HOST, "control_port": port, "providers": ["host"]}
    ranks = ("--data-parallel-size", str(RANKS), "--worker-extension-cls", "moe_on_cpu.Worker")
    settings = engine_settings(*ranks, "--weight-transfer-config", '{"backend": "write_imm"}')
    environment = {"KV_CONNECTOR_WEIGHTS": json.dumps(of_weights), "VLLM_PLUGINS": "kv_connector"}
    settings = dataclasses.replace(settings, environment={**settings.environment, **environment})
    body = completion_body(prompt("weights", 300), TOKENS)

    async def answer(http: httpx.AsyncClient, engine: EngineProcess, rank: int) -> list[int]:
        headers = {"x-data-parallel-rank": str(rank)}
        said = await http.post(f"{engine.url}/v1/completions", json=body, headers=headers)
        said.raise_for_status()
        return list(said.json()["choices"][0]["token_ids"])

    with LocalCluster(tmp_path, model, settings) as cluster:
        cluster.interpreter = interpreter
        trained = cluster.start_engine("trained")
        cluster.model = weights
        other = cluster.start_engine("other", settings=engine_settings())
        await asyncio.to_thread(cluster.wait_ready)
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as http:
            wanted = await answer(http, other, 0)
            assert all([await answer(http, trained, rank) != wanted for rank in range(RANKS)])
            words = ["weights", "push", str(weights), "--engine", f"{HOST}:{port}"]
            done = await asyncio.to_thread(CliRunner().invoke, app, words)
            assert done.exit_code == 0, done.output
            assert f"for {RANKS} workers" in done.output
            assert [await answer(http, trained, rank) for rank in range(RANKS)] == [wanted] * RANKS
