"""The settings of an engine's agents, and the values that follow from them for each rank."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from kv_connector.control.addresses import LOOPBACK, is_loopback, parse_address
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey, KeyFileError, find_key
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.timeline import MAX_TIMELINES

SETTINGS_VARIABLE = "KV_CONNECTOR_SETTINGS"
"""The environment variable for frameworks without a place for a connector's settings, such as SGLang."""

DEFAULT_PROVIDERS = {"cpu": ("host", "tcp"), "cuda": ("nvlink",)}
"""Lanes in order of preference, by the device that holds the KV cache."""


class SettingsError(ValueError):
    """A setting that cannot be used. The message says which value to set. The adapter puts the place of the
    setting in front of the message."""


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one engine. Every rank of an engine gets the same settings, with consecutive ports from
    ``control_port`` on.
    """

    control_host: str | None = None
    """Address that the control sockets bind and that peers connect to. If an engine spans several hosts,
    leave it out: each host then uses its `VLLM_HOST_IP`. Default: with a cluster key this host's own address
    (`VLLM_HOST_IP`, where it is set), without a key 127.0.0.1.
    """
    control_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 5600
    """Port of the first rank. Another rank's port is `control_port` plus data-parallel rank times ranks, plus
    rank. Two engines on one host therefore need separate ranges. Routers need only the first rank's port;
    peers request the other ports there. With 0, SGLang's default, the kernel chooses free ports.
    """
    control_key_file: str | None = None
    """File of the cluster key (`kv-connector keygen FILE`). Peers without the key are rejected. Default: the
    file that `KV_CONNECTOR_KEY_FILE` names.
    """
    allow_unauthenticated: bool = False
    """Whether to serve other machines without a cluster key. Every machine that reaches the port can then
    read and write the KV cache."""
    routers: tuple[str, ...] = ()
    """Routers to register with, as `host:port`. Each data-parallel rank registers by itself. Default:
    none."""
    api_url: str | None = None
    """URL at which routers reach this engine's API server. Required with `routers` or `announce`. Default:
    none."""
    announce: tuple[str, ...] = ()
    """Discovery addresses of vllm-routers in moriio mode, as `host:port`. This engine is announced there
    until it drains, sleeps or ends. The protocol is vllm-router's and uses no key: see docs/compatibility.md.
    Default: none.
    """
    providers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ()
    """Lanes in order of preference. For GPUs that neither NVLink nor a NIC connects, use `bounce`: tcp,
    through host memory on both sides. Default: `["host", "tcp"]`; for a KV cache in GPU memory `["nvlink"]`.
    """
    allow_fallback: bool = False
    """Whether a peer may use a later lane if an earlier lane that both engines have does not work."""
    data_host: str | None = None
    """Address that the listeners of the lanes bind. Default: `control_host`."""
    spin_us: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Time for which an idle transfer thread polls before it sleeps, in microseconds. Default: the transfer
    engine's (20)."""
    worker_cpu: Literal["auto", "none"] | tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = "auto"
    """CPU core to which each rank's transfer thread is pinned: a list with one core for each rank, `"none"`,
    or `"auto"`. `"auto"` takes a spare core on the GPU's NUMA node, if one is free. The log names the core,
    or the reason for none.
    """
    nics: tuple[tuple[str, ...], ...] = ()
    """NICs for the transfers of each rank, such as `[["mlx5_0"], ["mlx5_1"]]`. For `libfabric` the names have
    the form `"efa:rdmap79s0-rdm"`. Default: the NICs nearest to the rank's GPU.
    """
    compare_checkpoints: bool = True
    """Whether engines that were started from different checkpoints refuse each other, and routers do not pair
    them. Set it to false on one of two engines whose checkpoints hold the same weights in different forms.
    Quantised checkpoints are not compared with others. See docs/wrong-answers.md.
    """
    verify_pages: bool = False
    """Whether a decode engine compares each page that it receives with the prefill engine's, by a sum. A page
    that differs fails its KV load. The prefill engine needs no setting. See docs/operate/verified-pages.md.
    """
    timelines: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIMELINES)] = 0
    """Number of transfers whose timelines each worker keeps for `kv-connector trace`. 0 records no
    timelines."""
    timeouts: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    """Timeouts in seconds by name, such as `{"transfer": 60}`. Default: see the table of timeouts."""

    def for_device(self, device_type: str) -> AgentSettings:
        """These settings for a KV cache on such a device ("cpu", "cuda"), with providers that can all move
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
        """The core of one rank's transfer thread, if the operator has set one."""
        return self.worker_cpu[rank] if isinstance(self.worker_cpu, tuple) else self.worker_cpu

    def nics_of(self, rank: int) -> tuple[str, ...]:
        """The NICs of one rank, if the operator has set them."""
        return self.nics[rank] if self.nics else ()

    def check_ranks(self, ranks: int) -> None:
        """Raises SettingsError if a list has more or fewer entries than the engine has ranks."""
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
        """The address to bind. ``own``: this host's address. Raises SettingsError for a host name, and for an
        address that other machines can reach without a key.

        The refusal also protects the peer: RESERVE and HELLO contain what is needed to write into a KV cache.
        """
        host = self.control_host or (LOOPBACK if key is None else own)
        if problem := _wrong_interface("VLLM_HOST_IP, or SGLANG_HOST_IP,", host):
            raise SettingsError(f"control_host is not set, and {problem}")
        if key is None and not self.allow_unauthenticated and not is_loopback(host):
            raise SettingsError(
                f"control_host {host!r} is reachable from other machines, and no cluster key is set. "
                f"Create one (kv-connector keygen FILE) and set control_key_file, or {KEY_FILE_VARIABLE}, "
                f"on every engine. If every machine on the network may use the KV cache, set "
                f'"allow_unauthenticated": true instead.'
            )
        return host

    def router_addresses(self) -> tuple[Address, ...]:
        return tuple(parse_address(router) for router in self.routers)

    def announce_addresses(self) -> tuple[Address, ...]:
        return tuple(parse_address(router) for router in self.announce)

    def port(self, *, data_parallel_index: int, ranks: int, rank: int) -> int:
        """The control port of one rank of one data-parallel engine with ``ranks`` ranks."""
        if self.control_port == 0:
            return 0
        port = self.control_port + data_parallel_index * ranks + rank
        if port > 65535:
            raise SettingsError(
                f"control_port {self.control_port} leaves no port for rank {rank} "
                f"of data-parallel rank {data_parallel_index} (it would be {port}). Set a lower one."
            )
        return port


def parse_settings(config: Mapping[str, Any]) -> AgentSettings:
    """Parses the settings. Raises SettingsError, which names the first wrong key or value and the valid
    ones."""
    settings, problems = examine_settings(config)
    if problems:
        raise SettingsError(problems[0])
    return settings


def settings_in_environment(
    environment: Mapping[str, str], variable: str = SETTINGS_VARIABLE, control_port: int = 0
) -> dict[str, Any]:
    """The settings in an environment variable, a JSON object. ``control_port`` is the default for the port,
    because SGLang's peers learn free ports from its bootstrap server. Raises SettingsError for anything but a
    JSON object.
    """
    text = environment.get(variable) or "{}"
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{variable}: {error} in {text!r}") from None
    if not isinstance(given, dict):
        raise SettingsError(f"{variable} must be a JSON object, not {text!r}")
    return {"control_port": control_port, **given}


def examine_settings(config: Mapping[str, Any]) -> tuple[AgentSettings, list[str]]:
    """The usable settings, and the problem with each of the others."""
    usable, problems = dict[str, Any](), list[str]()
    for key, value in config.items():
        problem = _problem(key, value)
        if problem is None:
            usable[key] = value
        else:
            problems.append(problem)
    settings = msgspec.convert(usable, AgentSettings)
    for key in ("routers", "announce"):
        if getattr(settings, key) and not settings.api_url:
            problems.append(
                f"{key} needs api_url, the URL of this engine's API server, such as http://10.0.0.5:8100"
            )
    return settings, problems


def nearest(word: str, known: Collection[str]) -> str:
    """The end of a message about an unknown word: the word that is probably meant, or all valid words."""
    found = difflib.get_close_matches(word, known, 1)
    return f": did you mean `{found[0]}`?" if found else f". Valid: {', '.join(known)}."


SETTINGS = tuple(field.name for field in msgspec.structs.fields(AgentSettings))
TIMEOUTS = tuple(field.name for field in dataclasses.fields(Timeouts))


def _problem(key: str, value: object) -> str | None:
    """The problem with one setting by itself, or None."""
    if key not in SETTINGS:
        return f"unknown field `{key}`{nearest(str(key), SETTINGS)}"  # in YAML `on` is true, and no text
    try:
        setting = getattr(msgspec.convert({key: value}, AgentSettings), key)
    except msgspec.ValidationError as error:
        return str(error)
    if key == "timeouts":
        return _unknown_timeouts(setting)
    if key in ("routers", "announce"):
        return _wrong_address(key, setting)
    return _wrong_interface(key, setting) if key in ("control_host", "data_host") else None


def _unknown_timeouts(timeouts: Mapping[str, float]) -> str | None:
    unknown = sorted(timeouts.keys() - set(TIMEOUTS))
    if not unknown:
        return None
    return f"unknown timeouts {', '.join(unknown)}{nearest(unknown[0], TIMEOUTS)}"


def _wrong_address(key: str, routers: Sequence[str]) -> str | None:
    try:
        for router in routers:
            parse_address(router)
    except ValueError as error:
        return f"{key}: {error}"
    return None


def _wrong_interface(key: str, host: str | None) -> str | None:
    """The problem with an address to bind, or None. Peers connect to it, and the lanes' listeners accept no
    names."""
    if host is None:
        return None
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        if host and "*" not in host:
            return f"{key} {host!r} is a name. Write an interface's numeric IP address, such as 10.0.0.5."
        wildcard = True
    if not wildcard:
        return None
    return (
        f"{key} {host!r} is not an address that a peer can dial. "
        f"Write the address of the network interface that the other engines reach."
    )
