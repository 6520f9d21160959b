"""Queries the workers of some engines for the timelines that they keep, and for their clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import ControlPlane
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.wire.messages import Recall, Recalled

ROUND_TRIPS = 16
"""The shortest of them shows a worker's clock best."""


class Unanswered(RuntimeError):
    """A worker does not answer."""


@dataclass(frozen=True)
class WorkerTimelines:
    """One worker's timelines. Adding ``to_ours`` nanoseconds converts its times to the local clock, with an
    error of at most ``error``."""

    recalled: Recalled
    to_ours: int
    error: int

    @property
    def name(self) -> str:
        return f"{self.recalled.engine_id}/{self.recalled.rank}"


def boot_id() -> str:
    """A text that is equal for processes that share CLOCK_MONOTONIC."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def ask_workers(
    engines: Sequence[Address], key: ClusterKey | None, text: str, limit: int, timeout: float
) -> list[WorkerTimelines]:
    """Queries all workers of the engines at these addresses. Raises Unanswered. Blocks up to ``timeout``
    seconds a worker."""
    sockets = ControlPlane(key)
    try:
        workers: list[WorkerTimelines] = []
        asked = list(dict.fromkeys(engines))
        for address in asked:  # the list grows in the loop
            with _connection(sockets, address) as source:
                worker = _ask(sockets, address, source, Recall(text, limit), timeout)
            workers.append(worker)
            others = (Address(host, port) for host, port in worker.recalled.others)
            asked += [other for other in others if other not in asked]
    finally:
        sockets.close()
    return _aligned(workers)


@contextmanager
def _connection(sockets: ControlPlane, address: Address) -> Iterator[Source]:
    source = sockets.dial(address)
    try:
        yield source
    finally:
        sockets.hang_up(source)


def _ask(
    sockets: ControlPlane, address: Address, source: Source, recall: Recall, timeout: float
) -> WorkerTimelines:
    recalled, _, _ = _round_trip(sockets, address, source, recall, timeout)
    best: tuple[int, int] | None = None
    for _ in range(ROUND_TRIPS):
        answer, sent, came = _round_trip(sockets, address, source, Recall(), timeout)
        # The worker's clock was read between the two times.
        error, offset = (came - sent + 1) // 2, (sent + came) // 2 - answer.now
        best = min(best, (error, offset)) if best is not None else (error, offset)
    assert best is not None
    return WorkerTimelines(recalled, to_ours=best[1], error=best[0])


def _round_trip(
    sockets: ControlPlane, address: Address, source: Source, recall: Recall, timeout: float
) -> tuple[Recalled, int, int]:
    """The answer, with the times at which the query was sent and the answer arrived."""
    sent = time.monotonic_ns()
    sockets.send(source, recall)
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        sockets.wait(left)
        for received in sockets.receive():
            if received.source == source and isinstance(received.message, Recalled):
                return received.message, sent, time.monotonic_ns()
    raise Unanswered(
        f"no answer from {address} within {timeout:g} s. Is a worker's agent of this release listening there "
        f"(control_host and control_port of an engine), with the same cluster key?"
    )


def _aligned(workers: Sequence[WorkerTimelines]) -> list[WorkerTimelines]:
    """Aligns workers that share a clock by their best round trip. Workers that share the local clock need
    none."""
    best: dict[str, tuple[int, int]] = {}
    for worker in workers:
        host, measured = worker.recalled.host, (worker.error, worker.to_ours)
        best[host] = min(best.get(host, measured), measured)
    ours = boot_id()
    if ours in best and abs(best[ours][1]) <= best[ours][0]:  # otherwise it is in another time namespace
        best[ours] = (0, 0)
    return [
        WorkerTimelines(
            worker.recalled, to_ours=best[worker.recalled.host][1], error=best[worker.recalled.host][0]
        )
        for worker in workers
    ]
