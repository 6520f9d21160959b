"""Checks of one engine, or of one router, by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from kv_connector.agent.settings import (
    DEFAULT_PROVIDERS,
    AgentSettings,
    SettingsError,
    examine_settings,
    nearest,
)
from kv_connector.cli.common.environment import VARIABLES
from kv_connector.cli.common.findings import Finding, Verdict
from kv_connector.cli.common.router_file import RouterFileError, defaults
from kv_connector.cli.config.deployment import STAND_IN, ConfiguredEngine, Router, Unknown
from kv_connector.cli.config.files import options_of
from kv_connector.cli.router import UsageError, message_of, router, settings_of
from kv_connector.control.addresses import LOOPBACK, is_loopback
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey, KeyFileError
from kv_connector.protocol.actions import Address
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.settings import RouterSettings


@dataclass(frozen=True)
class CheckedEngine:
    """An engine with the usable part of its settings."""

    engine: ConfiguredEngine
    settings: AgentSettings
    key_file: str | None

    @property
    def where(self) -> str:
        return self.engine.where

    @property
    def control_host(self) -> str | None:
        """Address of the control sockets. None: the address of the host on which the engine is started."""
        host = self.settings.control_host or (LOOPBACK if self.key_file is None else None)
        return None if host and STAND_IN in host else host

    @property
    def control_ports(self) -> range:
        first = self.settings.control_port
        return range(first, first + self.engine.ranks * self.engine.data_parallel if first else first)


@dataclass(frozen=True)
class CheckedRouter:
    router: Router
    prefill: tuple[Endpoint, ...]
    decode: tuple[Endpoint, ...]
    registration: Address | None
    host: str
    port: int
    admin: Address | None
    key_file: str | None

    @property
    def where(self) -> str:
        return self.router.where


def check_engine(engine: ConfiguredEngine) -> tuple[CheckedEngine, list[Finding]]:
    settings, wrong = examine_settings(engine.settings)
    named = settings.control_key_file or _variable(engine.environment, KEY_FILE_VARIABLE)
    checked = CheckedEngine(engine, settings, named)
    found = (*engine.problems, *wrong, *_engine_problems(checked))
    problems = [problem for problem in found if STAND_IN not in problem]
    return checked, [
        *(Finding(engine.where, Verdict.FAIL, problem) for problem in problems),
        *_key(engine.where, named),
        *([] if problems else [Finding(engine.where, Verdict.OK, _described(checked))]),
    ]


def check_router(written: Router) -> tuple[CheckedRouter | None, list[Finding]]:
    file = options_of(written.arguments).get("config")
    if file is not None and _is_elsewhere(Path(file)):
        words = f"configuration file {file} is not on this machine, so the router was not checked"
        return None, [Finding(written.where, Verdict.NOTE, words)]
    try:
        checked, given = _parsed(written)
    except UsageError as error:
        return None, [Finding(written.where, Verdict.FAIL, message_of(error))]
    fine = Finding(written.where, Verdict.OK, f"router at {checked.host}:{checked.port}")
    return checked, [*_key(written.where, checked.key_file), *_router_files(written.where, given), fine]


def _parsed(written: Router) -> tuple[CheckedRouter, Mapping[str, Any]]:
    """Parses the arguments as the command itself does. Returns the parameters, too. Raises UsageError."""
    alone = typer.Typer(add_completion=False)
    alone.command()(router)
    command = typer.main.get_command(alone)
    try:
        options = defaults(written.where, written.options or {}, command.params)
    except RouterFileError as error:
        raise typer.BadParameter(str(error)) from None
    given: dict[str, Any] = command.make_context(
        "router", list(written.arguments), default_map=options
    ).params
    named = str(given["key_file"] or "") or _variable(written.environment, KEY_FILE_VARIABLE)
    # The key file may be on another machine. Whether it is valid is checked by _key().
    key = None if named is None else ClusterKey(b"", b"")
    settings = settings_of(given, key, RouterSettings.requests)
    checked = CheckedRouter(
        written,
        settings.prefill,
        settings.decode,
        settings.registration,
        given["host"],
        given["port"],
        settings.admin,
        named,
    )
    return checked, given


def _router_files(where: str, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Reads the router's files of keys and certificates, as far as they are on this machine."""
    try:
        from kv_connector.router.engines.client import read_authority
        from kv_connector.router.front.api_keys import ApiKeys, read_engine_key
        from kv_connector.router.front.certificate import Certificate
    except ImportError:
        return  # the router itself names the extra to install
    readers: Mapping[tuple[str, ...], Callable[..., object]] = {
        ("api_key_file",): ApiKeys.read,
        ("engine_key_file",): read_engine_key,
        ("engine_ca",): read_authority,
        ("ssl_certfile", "ssl_keyfile"): Certificate,
    }
    for names, read in readers.items():
        files = [given[name] for name in names]
        missing = [file for file in files if file is not None and _is_elsewhere(file)]
        for file in missing:
            yield Finding(where, Verdict.NOTE, f"file {file} is not on this machine and was not checked")
        if missing or files[0] is None:
            continue
        try:
            read(*files)
        except ValueError as error:
            yield Finding(where, Verdict.FAIL, str(error))


def _engine_problems(checked: CheckedEngine) -> Iterator[str]:
    engine, settings = checked.engine, checked.settings
    try:
        if checked.key_file is None and checked.control_host is not None:
            settings.host(LOOPBACK, None)
        settings.check_ranks(engine.ranks)
        settings.port(data_parallel_index=engine.data_parallel - 1, ranks=engine.ranks, rank=engine.ranks - 1)
    except SettingsError as error:
        yield str(error)
    yield from _lane_problems(settings)
    if settings.api_url is not None:
        yield from _url_problems(settings.api_url, settings)


def _lane_problems(settings: AgentSettings) -> Iterator[str]:
    try:
        from kv_connector.engine.transfer_engine import providers
    except ImportError:
        return  # doctor reports this; the other settings can still be checked
    known = [status.name for status in providers()]
    unknown = [name for name in settings.providers if name not in known]
    for name in unknown:
        yield f"providers: this build has no lane {name!r}{nearest(name, known)}"
    of_cpu, of_gpu = (
        [name for name in settings.providers if name in DEFAULT_PROVIDERS[kind]] for kind in ("cpu", "cuda")
    )
    if of_cpu and of_gpu:
        yield (
            f"providers: {', '.join(of_cpu)} moves a KV cache in CPU memory, and "
            f"{', '.join(of_gpu)} in GPU memory. "
            "Leave out the lanes for memory that this engine does not use"
        )


def _url_problems(url: str, settings: AgentSettings) -> Iterator[str]:
    try:
        Endpoint.parse(url)
    except ValueError as error:
        yield f"api_url: {error}"
        return
    far = [str(one) for one in settings.router_addresses() if not is_loopback(one.host)]
    if far and is_loopback(urlsplit(url).hostname or ""):
        yield (
            f"api_url {url} is the loopback address, which a router at {', '.join(far)} cannot "
            "reach. Set this engine's host"
        )


def _variable(environment: Mapping[str, str], name: str) -> str | None:
    """Returns the variable's value in the file, or else in this process's environment."""
    return environment.get(name) or os.environ.get(name) or None


def check_variables(parts: Iterable[ConfiguredEngine | Router | Unknown]) -> Iterator[Finding]:
    """Reports each unknown variable that begins like ours once, whichever part it is set for."""
    found = {
        (part.machine.name, name)
        for part in parts
        if not isinstance(part, Unknown)
        for name in part.environment.keys() - VARIABLES.keys()
        if name.startswith("KV_CONNECTOR_")
    }
    for where, name in sorted(found):
        yield Finding(where, Verdict.FAIL, f"unknown variable `{name}`{nearest(name, VARIABLES)}")


def _key(where: str, named: str | None) -> Iterator[Finding]:
    """Checks the key file if it is on this machine. Often the settings are checked elsewhere."""
    if named is None:
        return
    if _is_elsewhere(Path(named)):
        yield Finding(where, Verdict.NOTE, f"key file {named} is not on this machine and was not checked")
        return
    try:
        ClusterKey.read(Path(named))
    except KeyFileError as error:
        yield Finding(where, Verdict.FAIL, str(error))


def _is_elsewhere(file: Path) -> bool:
    """Returns whether the file is not on this machine. If that cannot be known, the file's reader reports the
    reason, such as a directory that this user may not enter."""
    try:
        return not file.exists()
    except OSError:
        return False


def _described(checked: CheckedEngine) -> str:
    engine, ports = checked.engine, checked.control_ports
    what = {
        "prefill": "prefill engine",
        "decode": "decode engine",
        "both": "prefill and decode engine",
        None: "engine",
    }
    span = (
        "free ports"
        if not ports
        else f"port {ports[0]}"
        if len(ports) == 1
        else f"ports {ports[0]} to {ports[-1]}"
    )
    words = [
        f"{what[engine.role]}{f' of {engine.framework}' if engine.framework else ''}",
        f"control sockets at {checked.control_host or 'its host address'}, {span}",
        "with a cluster key" if checked.key_file else "without a cluster key",
    ]
    return "; ".join(words)
