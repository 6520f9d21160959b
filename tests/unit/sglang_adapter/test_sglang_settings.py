"""The settings of an operator for the agents of an SGLang server."""

from __future__ import annotations

import pytest

from kv_connector.agent.settings import SETTINGS_VARIABLE, SettingsError
from kv_connector.sglang.settings import read_settings, read_weight_settings, with_nics
from kv_connector.weights.settings import SETTINGS_VARIABLE as WEIGHTS_VARIABLE


def test_without_a_word_ports_are_free_ones() -> None:
    assert read_settings({}).control_port == 0


def test_settings_are_a_json_object() -> None:
    settings = read_settings({SETTINGS_VARIABLE: '{"control_port": 5700, "providers": ["tcp"]}'})
    assert (settings.control_port, settings.providers) == (5700, ("tcp",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "KV_CONNECTOR_SETTINGS: "),
        ("[1]", "must be a JSON object"),
        ('{"port": 1}', "unknown field `port`"),
    ],
)
def test_unusable_setting_is_refused_with_its_variable(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        read_settings({SETTINGS_VARIABLE: text})
    assert SETTINGS_VARIABLE in str(refused.value)


def test_weight_settings_are_those_of_vllm_in_mode_shadow() -> None:
    given = read_weight_settings({WEIGHTS_VARIABLE: '{"control_port": 5900, "mode": "shadow"}'}, "cpu")
    assert (given.agent.control_port, given.streaming, given.clear_cache) == (5900, False, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"mode": "streaming"}', "no mode streaming. Use shadow"),
        ('{"clear_cache": false}', "keep no KV over an update"),
    ],
)
def test_weight_setting_of_vllm_alone_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        read_weight_settings({WEIGHTS_VARIABLE: text}, "cpu")
    assert WEIGHTS_VARIABLE in str(refused.value)


def test_nics_option_of_sglang_applies_unless_the_setting_is_given() -> None:
    settings = read_settings({})
    assert with_nics(settings, None, 0, 2) is settings
    assert with_nics(settings, "mlx5_0, mlx5_1", 0, 2).nics_of(1) == ("mlx5_0", "mlx5_1")
    assert with_nics(settings, '{"0": "mlx5_0", "3": "mlx5_7"}', 3, 8).nics_of(5) == ("mlx5_7",)
    ours = read_settings({SETTINGS_VARIABLE: '{"nics": [["mlx5_2"]]}'})
    assert with_nics(ours, "mlx5_0", 0, 1).nics_of(0) == ("mlx5_2",)
    with pytest.raises(SettingsError, match="--disaggregation-ib-device"):
        with_nics(settings, '{"0": "mlx5_0"}', 1, 2)
