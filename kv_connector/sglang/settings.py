"""The operator's settings. SGLang has no place for a backend's settings, so they come from the
environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from kv_connector.agent.settings import (
    SETTINGS_VARIABLE,
    AgentSettings,
    SettingsError,
    parse_settings,
    settings_in_environment,
)
from kv_connector.weights.settings import SETTINGS_VARIABLE as WEIGHTS_VARIABLE
from kv_connector.weights.settings import WeightSettings, weight_settings


def read_settings(environment: Mapping[str, str]) -> AgentSettings:
    """The settings in ``KV_CONNECTOR_SETTINGS``. Raises SettingsError."""
    given = settings_in_environment(environment)
    try:
        return parse_settings(given)
    except SettingsError as error:
        raise SettingsError(f"{SETTINGS_VARIABLE}: {error}") from None


def read_weight_settings(environment: Mapping[str, str], device_type: str) -> WeightSettings:
    """The settings in ``KV_CONNECTOR_WEIGHTS``. Raises SettingsError."""
    given = weight_settings(environment, device_type)
    if given.streaming:
        raise SettingsError(f"{WEIGHTS_VARIABLE}: SGLang's engines have no mode streaming. Use shadow.")
    if not given.clear_cache:
        raise SettingsError(
            f"{WEIGHTS_VARIABLE}: SGLang's engines keep no KV over an update. Leave clear_cache out."
        )
    return given


def with_nics(settings: AgentSettings, ib_device: str | None, gpu: int, ranks: int) -> AgentSettings:
    """The settings with the NICs of ``--disaggregation-ib-device``: for all ranks (``a,b``), or by GPU
    (``{"0": "a"}``). NICs in ``settings`` have precedence."""
    if not ib_device or settings.nics:
        return settings
    names: Any = ib_device
    if ib_device.lstrip().startswith("{"):
        try:
            names = json.loads(ib_device)[str(gpu)]
        except (ValueError, KeyError) as error:
            raise SettingsError(
                f"--disaggregation-ib-device {ib_device}: no NIC of GPU {gpu}: {error}"
            ) from None
    nics = tuple(name.strip() for name in names.split(",") if name.strip())
    # Each rank reads only its own entry, and this rank does not know the others.
    return msgspec.structs.replace(settings, nics=(nics,) * ranks)
