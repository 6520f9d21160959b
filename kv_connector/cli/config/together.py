"""Checks of engines and routers that work together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple
from urllib.parse import urlsplit

from kv_connector.cli.common.findings import Finding, Verdict
from kv_connector.cli.config.alone import CheckedEngine, CheckedRouter
from kv_connector.cli.config.deployment import PortScope
from kv_connector.control.addresses import is_loopback

_SGLANG_BOOTSTRAP = 8998
_ALIKE = {"model": "model", "dtype": "--dtype", "kv-cache-dtype": "--kv-cache-dtype"}
_THE_MODELS = ("model", "dtype")
"""Options that default to the model's value."""
_ALIKE_IN_SGLANG = _ALIKE | {"page-size": "--page-size"}


class Listener(NamedTuple):
    """A socket that a process will bind."""

    where: str
    what: str
    machine: PortScope
    host: str | None
    """Address. None: an address of the machine that no setting contains."""
    ports: range


def check_together(engines: Sequence[CheckedEngine], routers: Sequence[CheckedRouter]) -> Iterator[Finding]:
    yield from _ports(engines, routers)
    yield from _roles(engines)
    for one in engines:
        for other in engines:
            roles = one.engine.role, other.engine.role
            if roles == ("prefill", "decode") and not _of_two_models(one, other, engines):
                yield from _pair(one, other)
    for router in routers:
        for engine in engines:
            yield from _routed(router, engine)
        yield from _listed(router, engines)


def _ports(engines: Sequence[CheckedEngine], routers: Sequence[CheckedRouter]) -> Iterator[Finding]:
    listeners = [one for engine in engines for one in _of_engine(engine)]
    listeners += [one for router in routers for one in _of_router(router)]
    for one, other in combinations(listeners, 2):
        shared = range(max(one.ports[0], other.ports[0]), min(one.ports[-1], other.ports[-1]) + 1)
        if shared and _may_meet(one, other):
            yield _fail(
                one,
                other,
                f"port {shared[0]} is used twice, by {one.what} and {other.what}. Change one of them",
            )


def _of_engine(checked: CheckedEngine) -> Iterator[Listener]:
    engine = checked.engine
    if checked.control_ports:
        yield Listener(
            checked.where, "a control socket", engine.machine, checked.control_host, checked.control_ports
        )
    host = (engine.options or {}).get("host")
    if engine.api_port is not None:
        yield Listener(checked.where, "the API server", engine.machine, host, _one(engine.api_port))
    if engine.framework == "SGLang" and engine.role == "prefill":
        port = engine.number("disaggregation-bootstrap-port", _SGLANG_BOOTSTRAP)
        yield Listener(checked.where, "the bootstrap server", engine.machine, host, _one(port))


def _of_router(router: CheckedRouter) -> Iterator[Listener]:
    machine = router.router.machine
    yield Listener(router.where, "the router", machine, router.host, _one(router.port))
    if router.registration is not None:
        host, port = router.registration.host, router.registration.port
        yield Listener(router.where, "the registration", machine, host, _one(port))
    if router.admin is not None:
        yield Listener(router.where, "the admin address", machine, router.admin.host, _one(router.admin.port))


def _one(port: int) -> range:
    return range(port, port + 1)


def _may_meet(one: Listener, other: Listener) -> bool:
    """Whether both sockets are bound on one machine, at one address.

    The files may be for several machines.
    """
    named = one.host is not None and other.host is not None
    if one.machine == other.machine:
        return not named or "0.0.0.0" in (one.host, other.host) or _same(one.host, other.host)
    return named and not (one.machine.container or other.machine.container) and _same(one.host, other.host)


def _same(one: str | None, other: str | None) -> bool:
    return one == other or bool(one and other and is_loopback(one) and is_loopback(other))


def _roles(engines: Sequence[CheckedEngine]) -> Iterator[Finding]:
    """One file may be that of a host whose engines all have one role. Several files are a deployment."""
    roles = {engine.engine.role for engine in engines}
    if len(engines) > 1 and len(roles) == 1 and roles < {"prefill", "decode"}:
        (role,) = roles
        other, kv_role = ("decode", "kv_consumer") if role == "prefill" else ("prefill", "kv_producer")
        remedy = f"kv_role {kv_role} (or kv_both) for one of them; in SGLang the other mode"
        verdict, words = Verdict.FAIL, f"all are {role} engines. Set {remedy}"
        if len({engine.where.partition(": ")[0] for engine in engines}) == 1:
            verdict = Verdict.NOTE
            words = (
                f"all are {role} engines. If the {other} engines have files of their own, check all files "
                f"together. Otherwise set {remedy}"
            )
        yield Finding(" and ".join(engine.where for engine in engines), verdict, words)


def _of_two_models(p: CheckedEngine, d: CheckedEngine, engines: Sequence[CheckedEngine]) -> bool:
    """Returns whether the engines are of two models that both have engines of both roles.

    A router places requests by the names that engines serve, so these two engines exchange nothing.
    """
    roles = {(_served(one), one.engine.role) for one in engines}
    ours, theirs = _served(p), _served(d)
    return None not in (ours, theirs) and ours != theirs and {(ours, "decode"), (theirs, "prefill")} <= roles


def _served(checked: CheckedEngine) -> str | None:
    options = checked.engine.options or {}
    return options.get("served-model-name", options.get("model"))


def _pair(p: CheckedEngine, d: CheckedEngine) -> Iterator[Finding]:
    if p.engine.framework and d.engine.framework and p.engine.framework != d.engine.framework:
        yield _fail(
            p,
            d,
            f"the prefill engine is {p.engine.framework}, the decode engine "
            f"{d.engine.framework}. Use one of the two",
        )
    same = _ALIKE_IN_SGLANG if p.engine.framework == "SGLang" else _ALIKE
    ours, theirs = p.engine.options, d.engine.options
    if ours is not None and theirs is not None and not {"config"} & (ours.keys() | theirs.keys()):
        for option, name in same.items():
            values = ours.get(option), theirs.get(option)
            if values[0] != values[1] and (all(values) or option not in _THE_MODELS):
                said = [value or "not set" for value in values]
                yield _fail(
                    p, d, f"{name} is {said[0]} at the prefill engine and {said[1]} at the decode engine"
                )
        if ("speculative-config" in ours) != ("speculative-config" in theirs):
            words = "--speculative-config is set on one engine only. Set a drafter with a KV cache on both"
            yield Finding(_both(p.where, d.where), Verdict.NOTE, words)
    lanes = p.settings.providers, d.settings.providers
    if all(lanes) and not set(lanes[0]) & set(lanes[1]):
        yield _fail(
            p,
            d,
            f"no common lane: the prefill engine has {', '.join(lanes[0])}, the decode engine "
            f"{', '.join(lanes[1])}",
        )
    if (p.key_file is None) != (d.key_file is None):
        keyed, other = ("prefill", "decode") if p.key_file else ("decode", "prefill")
        yield _fail(
            p,
            d,
            f"the {keyed} engine has a cluster key and the {other} engine has none. Give both the same key",
        )
    host, far = p.control_host, d.control_host
    contained = p.engine.machine != d.engine.machine and p.engine.machine.container
    if host and is_loopback(host) and (contained or (far and not is_loopback(far))):
        whence = "from another container" if contained else f"at {far}"
        yield _fail(
            p,
            d,
            f"the decode engine {whence} cannot reach the prefill engine at {host}. Set the "
            "prefill engine's control_host",
        )


def _routed(router: CheckedRouter, checked: CheckedEngine) -> Iterator[Finding]:
    if checked.engine.framework == "SGLang":
        words = (
            "this router serves vLLM engines only. SGLang has its own (python -m sglang_router.launch_router)"
        )
        yield _fail(router, checked, words)
        return
    if not checked.settings.routers:
        return
    if router.registration is None:
        yield _fail(router, checked, "the engine's setting routers needs the router's --registration")
        return
    if router.registration.port not in [one.port for one in checked.settings.router_addresses()]:
        names = ", ".join(checked.settings.routers)
        yield _fail(
            router,
            checked,
            f"the engine registers at {names}, but the router listens at {router.registration}",
        )
    if (router.key_file is None) != (checked.key_file is None):
        keyed = "router" if router.key_file else "engine"
        yield _fail(router, checked, f"only the {keyed} has a cluster key: the engine cannot register")


def _listed(router: CheckedRouter, engines: Sequence[CheckedEngine]) -> Iterator[Finding]:
    """Compares the router's lists with the ports of engines that do not register."""
    lists = {"--prefill": router.prefill, "--decode": router.decode}
    for checked in engines:
        engine = checked.engine
        if engine.framework != "vLLM" or engine.api_port is None or checked.settings.routers:
            continue
        if engine.role is None:
            continue
        # An engine of both roles may serve in one of them. Configurations of NixlConnector often have kv_both
        # on both sides.
        options = list(lists) if engine.role == "both" else [f"--{engine.role}"]
        found = {
            option: [one for one in lists[option] if urlsplit(one.url).port == engine.api_port]
            for option in options
        }
        if not any(found.values()):
            names = " or ".join(options)
            words = f"no {names} has port {engine.api_port}, at which this engine's API server listens"
            yield _fail(router, checked, words)
        for one in found.get("--prefill", ()):
            if checked.control_ports and one.control_port not in checked.control_ports:
                words = (
                    "--prefill has the control socket at "
                    f"{one.control_host}:{one.control_port}, but the engine's "
                    f"control_port is {checked.settings.control_port}"
                )
                yield _fail(router, checked, words)


def _fail(
    one: CheckedEngine | CheckedRouter | Listener, other: CheckedEngine | CheckedRouter | Listener, words: str
) -> Finding:
    return Finding(_both(one.where, other.where), Verdict.FAIL, words)


def _both(one: str, other: str) -> str:
    """Joins the names of two places, in one file or in two."""
    if one == other:
        return one
    file, _, name = other.partition(": ")
    return f"{one} and {name if name and one.startswith(file + ': ') else other}"
