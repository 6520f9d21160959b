"""What an operator may set for an engine's agents, and what follows from it for each rank."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kv_connector.control.addresses import LOOPBACK, is_loopback, parse_address
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey, KeyFileError, find_key
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timers import Timeouts

DEFAULT_PROVIDERS = {"cpu": ("host", "tcp"), "cuda": ("nvlink",)}
"""Lanes in order of preference, by the device that holds the KV cache."""


class SettingsError(ValueError):
    """The configuration cannot be used; the message says what to write instead. Where it is written the
    adapter knows, and puts it before the message."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's settings. Every rank of an engine gets the same; ports are counted up from
    ``control_port``.
    """

    control_host: str | None = None
    """Address that the control sockets bind and that peers dial. Default: with a cluster key the
    framework's own address; without one 127.0.0.1.
    """
    control_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 5600
    """Port of rank 0 of data-parallel rank 0; the others follow. 0: any free port."""
    control_key_file: str | None = None
    """The cluster key: who does not have it is not listened to. Default: what the environment names."""
    allow_unauthenticated: bool = False
    """Whether to serve other machines without a cluster key: all of them can read and write the KV cache."""
    routers: tuple[str, ...] = ()
    """Addresses (host:port) at which routers take registrations; this engine joins and leaves by itself."""
    api_url: str | None = None
    """Where routers reach this engine's API server; needed with ``routers``."""
    providers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ()
    """Lanes in order of preference. Default: host and tcp for a KV cache in CPU memory, nvlink for one in a
    GPU's. bounce takes a GPU's pages over tcp, through host memory on both sides.
    """
    allow_fallback: bool = False
    """Whether a peer may be served over a lane behind the first of ``providers`` that both ends have."""
    data_host: str | None = None
    """Address that data-plane listeners bind. Default: ``control_host``."""
    spin_us: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How long an idle transfer worker spins before it sleeps. Default: the engine's own."""
    worker_cpu: Literal["auto", "none"] | tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = "auto"
    """Cores that the transfer workers are pinned to, one for each rank. "auto": a spare one near the GPU,
    where there is one; "none": no pinning.
    """
    nics: tuple[tuple[str, ...], ...] = ()
    """For each rank the NICs to use, as the provider names them. Default: those nearest to its GPU."""
    timeouts: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    """Seconds by name; the names are those of ``kv_connector.protocol.timers.Timeouts``."""

    def for_device(self, device_type: str) -> Settings:
        """These settings for a KV cache on such a device ("cpu", "cuda"): with providers, all of which move
        it. Raises SettingsError.
        """
        if not self.providers:
            return msgspec.structs.replace(self, providers=DEFAULT_PROVIDERS[device_type])
        others = DEFAULT_PROVIDERS["cpu" if device_type == "cuda" else "cuda"]
        if wrong := [provider for provider in self.providers if provider in others]:
            kind = "a GPU's memory" if device_type == "cuda" else "CPU memory"
            raise SettingsError(
                f"providers: {', '.join(wrong)} cannot move a KV cache in {kind}. "
                f"Leave providers out, or write {list(DEFAULT_PROVIDERS[device_type])}"
                + (", or bounce to go through host memory." if device_type == "cuda" else ".")
            )
        return self

    def worker_cpu_of(self, rank: int) -> int | Literal["auto", "none"]:
        """The core of one rank's worker where the operator names them."""
        return self.worker_cpu[rank] if isinstance(self.worker_cpu, tuple) else self.worker_cpu

    def nics_of(self, rank: int) -> tuple[str, ...]:
        """The NICs of one rank where the operator names them."""
        return self.nics[rank] if self.nics else ()

    def check_ranks(self, ranks: int) -> None:
        """Raises SettingsError where a list has an entry for fewer or more ranks than the engine has."""
        for key, entries in (("worker_cpu", self.worker_cpu), ("nics", self.nics)):
            if isinstance(entries, tuple) and entries and len(entries) != ranks:
                raise SettingsError(
                    f"{key} has {len(entries)} entries, and this engine has {ranks} ranks. "
                    f"Write one entry for each rank, or leave it out."
                )

    def agent_timeouts(self) -> Timeouts:
        return Timeouts(**self.timeouts)

    def key(self) -> ClusterKey | None:
        """The cluster key, or None; raises SettingsError."""
        try:
            return find_key(self.control_key_file)
        except KeyFileError as error:
            raise SettingsError(f"control_key_file: {error}") from None

    def host(self, own: str, key: ClusterKey | None) -> str:
        """The address to bind. ``own``: this host's. SettingsError where strangers could reach it.

        The refusal is for the peer's sake too: RESERVE and HELLO say how to write into a KV cache.
        """
        host = self.control_host or (LOOPBACK if key is None else own)
        if key is None and not self.allow_unauthenticated and not is_loopback(host):
            raise SettingsError(
                f"other machines reach control_host {host!r}, and there is no cluster key. "
                f"Make one (kv-connector keygen FILE) and name it in control_key_file, or in "
                f"{KEY_FILE_VARIABLE}, of every engine. Where everybody on the network may use the "
                f'KV cache, say "allow_unauthenticated": true instead.'
            )
        return host

    def router_addresses(self) -> tuple[Address, ...]:
        return tuple(parse_address(router) for router in self.routers)

    def port(self, *, data_parallel_index: int, ranks: int, rank: int) -> int:
        """The control port of one rank of one data-parallel engine of ``ranks`` ranks."""
        if self.control_port == 0:
            return 0
        port = self.control_port + data_parallel_index * ranks + rank
        if port > 65535:
            raise SettingsError(
                f"control_port {self.control_port} leaves no port for rank {rank} "
                f"of data-parallel rank {data_parallel_index} (it would be {port}). Choose a lower one."
            )
        return port


def parse_settings(config: Mapping[str, Any]) -> Settings:
    """Raises SettingsError that names the wrong key or value and the valid keys."""
    try:
        settings = msgspec.convert(dict(config), Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{error}. Valid keys: {_valid_keys()}.") from error
    known = {field.name for field in dataclasses.fields(Timeouts)}
    if unknown := sorted(settings.timeouts.keys() - known):
        raise SettingsError(f"unknown timeouts {', '.join(unknown)}. Valid: {', '.join(sorted(known))}.")
    for key in ("control_host", "data_host"):
        _refuse_wildcard(key, getattr(settings, key))
    _check_routers(settings)
    return settings


def _check_routers(settings: Settings) -> None:
    try:
        settings.router_addresses()
    except ValueError as error:
        raise SettingsError(f"routers: {error}") from None
    if settings.routers and not settings.api_url:
        raise SettingsError(
            "routers needs api_url, the address at which they reach this engine's API server, "
            "such as http://10.0.0.5:8100"
        )


def _valid_keys() -> str:
    return ", ".join(field.name for field in msgspec.structs.fields(Settings))


def _refuse_wildcard(key: str, host: str | None) -> None:
    """Peers dial what we bind, and a socket open to every network is nobody's intention."""
    if host is None:
        return
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = not host or "*" in host  # a name, for the resolver to judge
    if wildcard:
        raise SettingsError(
            f"{key} {host!r} is no address that a peer can dial. "
            f"Write the address of the network interface that the other engines reach."
        )
