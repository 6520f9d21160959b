"""The operator's settings for weights: KV_CONNECTOR_WEIGHTS, and the errors of the command."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kv_connector.agent.settings import SettingsError
from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.main import app
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.settings import CONTROL_PORT, SETTINGS_VARIABLE, weight_settings


def test_defaults() -> None:
    settings = weight_settings({}, "cuda")
    assert not settings.streaming
    assert settings.clear_cache
    assert settings.seed_from == ()
    assert settings.agent.control_port == CONTROL_PORT
    assert settings.agent.providers == ("nvlink",)
    given = '{"control_port": 1, "mode": "streaming", "seed_from": ["10.0.0.5:5800", "[::1]:5801"]}'
    settings = weight_settings({SETTINGS_VARIABLE: given}, "cpu")
    assert settings.streaming
    assert settings.agent.control_port == 1
    assert settings.seed_from == (Address("10.0.0.5", 5800), Address("::1", 5801))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", f"{SETTINGS_VARIABLE}: Expecting property name"),
        ("[]", f"{SETTINGS_VARIABLE} must be a JSON object"),
        (
            '{"routers": []}',
            f"{SETTINGS_VARIABLE}: routers cannot be set for weights. Valid: mode, clear_cache, seed_from",
        ),
        ('{"clear_cache": "no"}', f"{SETTINGS_VARIABLE}: clear_cache is 'no'. Valid: true, false."),
        ('{"mode": "in place"}', f"{SETTINGS_VARIABLE}: mode is 'in place'. Valid: shadow, streaming."),
        (
            '{"seed_from": "10.0.0.5:5800"}',
            f"{SETTINGS_VARIABLE}: seed_from: '10.0.0.5:5800'. It must be a list",
        ),
        ('{"seed_from": ["10.0.0.5"]}', f"{SETTINGS_VARIABLE}: seed_from: '10.0.0.5' must be host:port"),
        ('{"seed_from": [5800]}', f"{SETTINGS_VARIABLE}: seed_from: '5800' must be host:port"),
        ('{"control_port": 0}', f"{SETTINGS_VARIABLE}: control_port is 0, but"),
        ('{"control_port": "x"}', f"{SETTINGS_VARIABLE}: Expected `int`"),
        ('{"providers": ["host"]}', f"{SETTINGS_VARIABLE}: providers: host cannot move"),
    ],
)
def test_unusable_setting_is_reported(text: str, words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        weight_settings({SETTINGS_VARIABLE: text}, "cuda")
    assert words in str(refused.value)


@pytest.mark.parametrize("command", ["push", "plan"])
def test_directory_without_weights_is_reported(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["weights", command, str(tmp_path), "--engine", "127.0.0.1:1"])
    assert done.exit_code == ExitStatus.USAGE
    assert "no .safetensors files are in" in done.output


def test_unreachable_engine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.weights.wire.links.Timeouts", partial(Timeouts, connect=0.2))
    done = CliRunner().invoke(app, ["weights", "status", "--engine", "127.0.0.1:1"])
    assert done.exit_code == ExitStatus.FAILURE
    assert "127.0.0.1:1: no answer within 0.2 s: check that it runs" in done.output
