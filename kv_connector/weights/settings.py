"""Settings of an engine that takes weights, from the environment, as vLLM has no other place for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv_connector.agent.settings import AgentSettings, SettingsError, parse_settings, settings_in_environment
from kv_connector.control.addresses import parse_address
from kv_connector.protocol.actions import Address

SETTINGS_VARIABLE = "KV_CONNECTOR_WEIGHTS"

# Default port of the controller. The workers' ports follow it. The KV cache connector of the same engine has
# 5600.
CONTROL_PORT = 5800

_MODES = ("shadow", "streaming")
# The connector's settings that have a meaning for weights.
_USED = (
    "control_host",
    "control_port",
    "control_key_file",
    "allow_unauthenticated",
    "providers",
    "data_host",
    "nics",
    "timeouts",
)


@dataclass(frozen=True)
class WeightSettings:
    """Settings of an engine that takes weights. ``agent``: those that the KV cache connector has as well."""

    agent: AgentSettings
    streaming: bool
    """Whether versions land round by round in a pause, instead of beside the weights in use."""
    clear_cache: bool
    """Whether an update drops the KV of all requests and the prefix cache."""
    seed_from: tuple[Address, ...]
    """Engines that are requested, in this order, to write their version to this engine when it starts."""

    def nics_of(self, rank: int, ranks: int) -> tuple[str, ...]:
        """The NICs of one of this engine's ranks, if the operator has set them. Raises SettingsError."""
        try:
            self.agent.check_ranks(ranks)
        except SettingsError as error:
            raise SettingsError(f"{SETTINGS_VARIABLE}: {error}") from None
        return self.agent.nics_of(rank)


def weight_settings(environment: Mapping[str, str], device_type: str) -> WeightSettings:
    """Parses ``KV_CONNECTOR_WEIGHTS``, a JSON object. Raises SettingsError."""
    given = settings_in_environment(environment, SETTINGS_VARIABLE, CONTROL_PORT)
    mode = given.pop("mode", _MODES[0])
    if given["control_port"] == 0:
        raise SettingsError(
            f"{SETTINGS_VARIABLE}: control_port is 0, but trainers and the controller need known ports. "
            f"Set the first of the ports, for example {CONTROL_PORT}."
        )
    if mode not in _MODES:
        raise SettingsError(f"{SETTINGS_VARIABLE}: mode is {mode!r}. Valid: {', '.join(_MODES)}.")
    clear_cache = given.pop("clear_cache", True)
    if not isinstance(clear_cache, bool):
        raise SettingsError(f"{SETTINGS_VARIABLE}: clear_cache is {clear_cache!r}. Valid: true, false.")
    seed_from = _addresses(given.pop("seed_from", []))
    if unused := sorted(given.keys() - set(_USED)):
        valid = ", ".join(("mode", "clear_cache", "seed_from", *_USED))
        raise SettingsError(
            f"{SETTINGS_VARIABLE}: {', '.join(unused)} cannot be set for weights. Valid: {valid}."
        )
    try:
        agent = parse_settings(given).for_device(device_type)
    except SettingsError as error:
        raise SettingsError(f"{SETTINGS_VARIABLE}: {error}") from None
    return WeightSettings(agent, mode == "streaming", clear_cache, seed_from)


def _addresses(given: Any) -> tuple[Address, ...]:
    example = 'a list of engines by their control_host and control_port: ["10.0.0.5:5800"]'
    try:
        if not isinstance(given, list):
            raise ValueError(repr(given))
        return tuple(parse_address(str(one)) for one in given)
    except ValueError as error:
        raise SettingsError(f"{SETTINGS_VARIABLE}: seed_from: {error}. It must be {example}.") from None
