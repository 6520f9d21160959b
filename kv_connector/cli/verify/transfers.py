"""Transfers: whether prefill engines computed the prompts, by the metrics of the router and the engines."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client import Metric

from kv_connector.cli.verify.server import ServerError, Trouble, VerifiedServer
from kv_connector.router.engines.endpoint import Endpoint

# Engines whose metrics are read. More take too long, and then only the router's metrics count.
MOST_ENGINES = 64
# An engine's counters reach its /metrics with one of its next steps, and no event announces that.
SETTLE_SECONDS, POLL_SECONDS = 10.0, 0.2

_LOCAL = "kv_connector_router_local_prefills"
_TRANSFERS = "kv_connector_transfers"


class _Health(msgspec.Struct):
    prefill: dict[str, str] = {}
    decode: dict[str, str] = {}


class ListedEngines(msgspec.Struct, frozen=True):
    """URLs of the ready engines that the router lists."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


async def engines(router: VerifiedServer) -> ListedEngines:
    """Returns the ready engines of a kv-connector router. ServerError: it lists none."""
    health: _Health = await router.decoded("/health", _Health)
    return ListedEngines(_ready(health.prefill), _ready(health.decode))


def _ready(states: dict[str, str]) -> tuple[str, ...]:
    found = []
    for name, state in states.items():
        try:
            # Ranks of a data-parallel engine share a URL: "http://host:port rank 1".
            url = Endpoint.parse(name.partition(" ")[0]).url
        except ValueError:
            continue
        if state == "ready" and url not in found:
            found.append(url)
    return tuple(found)


class Counts(msgspec.Struct):
    """Counters since the start of the processes, or between two readings."""

    local: dict[str, int]
    """Local prefills that the router counted, by reason."""
    completed: int | None
    """Completed transfers to decode engines; None: some decode engine's metrics are not readable."""

    def since(self, before: Counts) -> Counts:
        local = {reason: count - before.local.get(reason, 0) for reason, count in self.local.items()}
        both = self.completed is not None and before.completed is not None
        return Counts(
            {reason: count for reason, count in local.items() if count > 0},
            (self.completed or 0) - (before.completed or 0) if both else None,
        )


class Meter:
    """Reads the counters of a router and its decode engines."""

    def __init__(self, router: VerifiedServer, decode: Sequence[VerifiedServer]) -> None:
        self._router = router
        self._decode = decode if len(decode) <= MOST_ENGINES else ()

    async def read(self) -> Counts:
        """ServerError: the router is not a kv-connector router, or does not answer."""
        found = await self._router.metrics()
        if not any(metric.name == _LOCAL for metric in found):
            words = (
                f"{self._router.url}/metrics has no {_LOCAL}_total: it is not a kv-connector router, or its "
                "metrics are at its --admin address"
            )
            raise ServerError(Trouble.UNREADABLE, words)
        local = dict(_samples(found, _LOCAL, "reason"))
        return Counts(local, await self._completed())

    async def settled(self, before: Counts, completed: int) -> Counts:
        """Reads until this many transfers have completed since `before`, for SETTLE_SECONDS at most."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            counts = (await self.read()).since(before)
            if counts.completed is None or counts.completed >= completed or time.monotonic() > deadline:
                return counts
            await asyncio.sleep(POLL_SECONDS)

    async def _completed(self) -> int | None:
        if not self._decode:
            return None
        total = 0
        for engine in self._decode:
            try:
                found = await engine.metrics()
            except ServerError:
                return None
            if not any(metric.name == _TRANSFERS for metric in found):
                return None
            completed = _samples(found, _TRANSFERS, "outcome", role="decode", outcome="completed")
            total += sum(count for _, count in completed)
        return total


def _samples(found: Iterable[Metric], name: str, label: str, **wanted: str) -> Iterator[tuple[str, int]]:
    """Yields (value of the label, count) of a counter's samples that have the wanted labels."""
    for metric in found:
        for sample in metric.samples if metric.name == name else ():
            if sample.name == f"{name}_total" and wanted.items() <= sample.labels.items():
                count = int(sample.value) if math.isfinite(sample.value) else 0
                yield sample.labels.get(label, ""), count


def problem(counts: Counts, expected: int) -> str | None:
    """Returns why some prompts were not computed at a prefill engine; None if all were.

    `expected`: answers that needed pages of a prefill engine.
    """
    if counts.local:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.local.items()))
        return f"decode engines computed {sum(counts.local.values())} prompts themselves ({reasons})"
    if counts.completed is not None and counts.completed < expected:
        return (
            f"decode engines completed {counts.completed} transfers for {expected} prompts that needed one. "
            "They computed the others themselves, or had them in their prefix caches"
        )
    return None
