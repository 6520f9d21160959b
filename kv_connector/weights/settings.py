"""What an operator may set for an engine that takes weights. vLLM has no place for it but the environment."""

from __future__ import annotations

from collections.abc import Mapping

from kv_connector.agent.settings import Settings, SettingsError, parse_settings, settings_in_environment

SETTINGS_VARIABLE = "KV_CONNECTOR_WEIGHTS"

# Of the controller; the workers' follow. Not the KV cache's (5600), which one engine may have as well.
CONTROL_PORT = 5800

_MODES = ("shadow", "streaming")
# Of the connector's settings, those that mean something here.
_USED = (
    "control_host",
    "control_port",
    "control_key_file",
    "allow_unauthenticated",
    "providers",
    "data_host",
    "timeouts",
)


def weight_settings(environment: Mapping[str, str], device_type: str) -> tuple[Settings, bool]:
    """``KV_CONNECTOR_WEIGHTS``, a JSON object; and whether versions land round by round in a pause, instead
    of beside what is served. Raises SettingsError."""
    given = settings_in_environment(environment, SETTINGS_VARIABLE, CONTROL_PORT)
    mode = given.pop("mode", _MODES[0])
    if mode not in _MODES:
        raise SettingsError(f"{SETTINGS_VARIABLE}: mode is {mode!r}. Valid: {', '.join(_MODES)}.")
    if unused := sorted(given.keys() - set(_USED)):
        valid = ", ".join(("mode", *_USED))
        raise SettingsError(
            f"{SETTINGS_VARIABLE}: {', '.join(unused)} mean nothing for weights. Valid: {valid}."
        )
    try:
        return parse_settings(given).for_device(device_type), mode == "streaming"
    except SettingsError as error:
        raise SettingsError(f"{SETTINGS_VARIABLE}: {error}") from None
