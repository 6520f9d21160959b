"""The settings of encoder disaggregation, from ``ec_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv_connector.agent.settings import AgentSettings, SettingsError, nearest, parse_settings
from kv_connector.engine.rank_placement import Device, place_nics
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Fingerprint
from kv_connector.vllm.encoder.session import SessionConfig

# Settings that mean the same as for the KV connector.
_SHARED = ("control_host", "control_key_file", "allow_unauthenticated", "providers", "data_host", "nics")
_TIMEOUT = "fetch_timeout"
# A picture of 1,000 tokens with 8,192 features of two bytes has 16 MB. At 1 Gbit/s that takes 0.13 s.
_DEFAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class EncoderSettings:
    shared: AgentSettings
    timeout: float

    def link(self, name: str, own_host: str, fingerprint: Fingerprint) -> SessionConfig:
        """The configuration of this engine's side. ``own_host``: this host's address.

        Raises SettingsError.
        """
        key = self.shared.key()
        return SessionConfig(
            name=name,
            fingerprint=fingerprint,
            providers=self.shared.providers,
            data_host=self.shared.data_host or self.shared.host(own_host, key),
            nics=place_nics(Device("cpu"), providers=self.shared.providers, nics=self.shared.nics_of(0)),
            key=key,
            timeout=self.timeout,
        )

    def address(self, own_host: str, port: int) -> Address:
        """The address to listen on. Raises SettingsError if the port is not valid."""
        if not 0 <= port <= 65535:
            raise SettingsError(f"ec_port leads to port {port}. Set a lower one.")
        return Address(self.shared.host(own_host, self.shared.key()), port)


def parse_encoder_settings(config: Mapping[str, Any]) -> EncoderSettings:
    """Raises SettingsError, which names the first wrong key or value."""
    known = (*_SHARED, _TIMEOUT)
    for key in config:
        if key not in known:
            raise SettingsError(f"ec_connector_extra_config: unknown field `{key}`{nearest(key, known)}")
    timeout = config.get(_TIMEOUT, _DEFAULT_TIMEOUT_S)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 3600:
        raise SettingsError(f"{_TIMEOUT} must be a number of seconds up to 3600, not {timeout!r:.100}")
    # The arena is in host memory, whatever the device.
    shared = parse_settings({key: value for key, value in config.items() if key != _TIMEOUT})
    return EncoderSettings(shared.for_device("cpu"), float(timeout))
