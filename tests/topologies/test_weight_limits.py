"""Models whose weights an engine cannot update as a whole: it reports that at its start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import no_torchvision
import pytest
from cases import EAGLE, Side
from site_of_case import Models, engine_settings_of

from kv_connector.lab.cluster import EngineProcess, LocalCluster
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import StartError
from kv_connector.weights.settings import SETTINGS_VARIABLE

TAKES_WEIGHTS = ("--weight-transfer-config", '{"backend": "write_imm"}')


def start(cluster: LocalCluster, interpreter: tuple[str, ...], path: str, *words: str) -> EngineProcess:
    """Starts an engine that receives weights, with ``path`` in its PYTHONPATH."""
    cluster.interpreter = interpreter
    settings = engine_settings_of(Side(), [*TAKES_WEIGHTS, *words])
    environment = {
        **settings.environment,
        "PYTHONPATH": f"{settings.environment['PYTHONPATH']}:{path}",
        SETTINGS_VARIABLE: json.dumps({"control_host": "127.0.0.1", "control_port": free_ports(1)[0]}),
    }
    return cluster.start_engine("engine", settings=replace(settings, environment=environment))


def test_an_engine_warns_of_a_drafter_that_keeps_its_weights(
    models: Models, interpreter: tuple[str, ...], tmp_path: Path
) -> None:
    drafting = EAGLE.replace("@eagle", str(models["eagle"])).split()
    with LocalCluster(tmp_path, models["one-layer"]) as cluster:
        engine = start(cluster, interpreter, "", *drafting)
        cluster.wait_ready()
        assert "updates do not change the draft model (eagle)" in engine.log.read_text()


def test_an_engine_refuses_a_model_that_derives_values_from_its_weights(
    models: Models, interpreter: tuple[str, ...], tmp_path: Path
) -> None:
    path = no_torchvision.install(tmp_path / "plugin", "deriving_llama")
    with LocalCluster(tmp_path, models["deriving"]) as cluster:
        engine = start(cluster, interpreter, path)
        with pytest.raises(StartError):
            cluster.wait_ready()
        words = "DerivingLlama.process_weights_after_loading() computes values from weights"
        assert words in engine.log.read_text()
