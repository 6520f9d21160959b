"""The NICs of trainers and of engines that take weights, and the other arguments that both check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from kv_connector.agent.settings import SettingsError
from kv_connector.cli.main import app
from kv_connector.engine import DomainConfig, EngineConfig
from kv_connector.protocol.actions import Address
from kv_connector.weights.mapping.geometry import Geometry
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.settings import SETTINGS_VARIABLE, weight_settings
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.worker.receiver import ReceiverConfig, WeightReceiver

NICS = ("mlx5_2", "mlx5_3")


class Opened(Exception):
    """Ends a constructor where it opens its transfer engine."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configurations of opened transfer engines. Nearest to any memory is the NIC `near`."""
    configs: list[EngineConfig] = []

    def open_engine(config: EngineConfig) -> None:
        configs.append(config)
        raise Opened

    monkeypatch.setattr("kv_connector.weights.pusher.TransferEngine", open_engine)
    monkeypatch.setattr("kv_connector.weights.worker.receiver.TransferEngine", open_engine)
    monkeypatch.setattr("kv_connector.engine.rank_placement._nics", lambda *_: ("near",))
    return configs


def pusher(**named: Any) -> WeightPusher:
    return WeightPusher(TensorSource([("w", torch.ones(4))]), ["127.0.0.1:5800"], **named)


def receiver(**named: Any) -> WeightReceiver:
    def record(_: object) -> Geometry:
        raise NotImplementedError

    return WeightReceiver(ReceiverConfig("w", Address("127.0.0.1", 0), ("verbs", "tcp"), **named), record)


@pytest.mark.parametrize("nics", [(), NICS])
def test_pusher_and_receiver_open_a_domain_for_each_nic(
    opened: list[EngineConfig], nics: tuple[str, ...]
) -> None:
    with pytest.raises(Opened):
        pusher(providers=("verbs", "tcp"), nics=nics)
    with pytest.raises(Opened):
        receiver(nics=nics)
    verbs = tuple(DomainConfig("verbs", address="127.0.0.1", device=nic) for nic in nics or ("near",))
    assert [tuple(config.domains) for config in opened] == [
        (*verbs, DomainConfig("tcp", address="127.0.0.1"))
    ] * 2


@pytest.mark.parametrize("command", ["push", "bench"])
def test_commands_open_a_domain_for_each_nic(
    opened: list[EngineConfig], tmp_path: Path, command: str
) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    words = [
        "--engine",
        "127.0.0.1:5800",
        "--provider",
        "verbs",
        *(w for nic in NICS for w in ("--nic", nic)),
    ]
    done = CliRunner().invoke(app, ["weights", command, str(tmp_path), *words])
    assert isinstance(done.exception, Opened), done.output
    (config,) = opened
    assert [domain.device for domain in config.domains] == [*NICS]


def test_settings_for_weights_have_the_nics_of_each_rank() -> None:
    settings = weight_settings({SETTINGS_VARIABLE: '{"nics": [["mlx5_0"], ["mlx5_1", "mlx5_2"]]}'}, "cuda")
    assert settings.nics_of(1, ranks=2) == ("mlx5_1", "mlx5_2")
    with pytest.raises(SettingsError, match=f"{SETTINGS_VARIABLE}: nics has 2 entries.*4 ranks"):
        settings.nics_of(1, ranks=4)
    assert weight_settings({}, "cuda").nics_of(3, ranks=4) == ()


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("nics", "mlx5_0", "nics is 'mlx5_0'. Give a sequence of names, such as [\"mlx5_0\"]"),
        ("nics", [["mlx5_0"]], "nics is"),
        ("providers", "verbs", "providers is 'verbs'"),
        ("staging_bytes", 0, "staging_bytes is 0. Give a positive number of bytes"),
        ("begin_timeout", -1.0, "begin_timeout is -1.0. Give a positive number of seconds"),
        ("timeouts", {"dead": 5}, "Timeouts(dead=5)"),
    ],
)
def test_pusher_refuses_an_invalid_argument_with_a_valid_one(argument: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match="Give ") as refused:
        pusher(**{argument: value})
    assert words in str(refused.value)
