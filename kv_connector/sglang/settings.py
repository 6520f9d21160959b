"""The operator's settings: SGLang has no place for a backend's own, so they come from the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from kv_connector.agent.settings import Settings, SettingsError, parse_settings

VARIABLE = "KV_CONNECTOR_SETTINGS"


def read_settings(environment: Mapping[str, str]) -> Settings:
    """``KV_CONNECTOR_SETTINGS``, a JSON object. Ports are free ones unless named: peers learn them from
    SGLang's bootstrap server. Raises SettingsError."""
    text = environment.get(VARIABLE, "")
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise SettingsError(f"{VARIABLE}: {error} in {text!r}") from None
    if not isinstance(given, dict):
        raise SettingsError(f"{VARIABLE} must be a JSON object, not {text!r}")
    try:
        return parse_settings({"control_port": 0, **given})
    except SettingsError as error:
        raise SettingsError(f"{VARIABLE}: {error}") from None


def with_nics(settings: Settings, ib_device: str | None, gpu: int, ranks: int) -> Settings:
    """``--disaggregation-ib-device``: NICs for all ranks (``a,b``), or by GPU (``{"0": "a"}``). What the
    settings name outranks it."""
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
    # Each rank reads its own entry alone, and this one knows no other's.
    return msgspec.structs.replace(settings, nics=(nics,) * ranks)
