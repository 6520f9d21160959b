"""The effect of registering memory on the writes of the same engine: a ping-pong by itself, and beside it."""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from rich.console import Console

from kv_connector import _bench
from kv_connector.bench.contestant import SideRole
from kv_connector.bench.lane import Lane
from kv_connector.bench.measurement import LaneMeasurement
from kv_connector.bench.records import Registering, percentile
from kv_connector.bench.tables import print_table, verdict
from kv_connector.bench.workloads import LATENCY_BYTES
from kv_connector.engine import EngineConfig

# Limit for the time of a write meanwhile, as a multiple at the 99th percentile.
LIMIT = 2.0
_WARM_UP = 100
_FACE = _bench.EnginePingPong.Face.WORKER


@dataclass(kw_only=True)
class Registration(LaneMeasurement[Registering]):
    """Measures latency over each lane, with and without registrations beside it."""

    tolerated = (RuntimeError,)

    registered_bytes: int
    iterations: int
    repeats: int
    """Measurements of each lane, over the same two engines."""

    def settings(self) -> dict[str, str]:
        return {
            "lanes": self.lane_names,
            "engines": "two in this process; answers on their workers, back to back",
            "write": f"{LATENCY_BYTES >> 10} KiB to its counter: half of a round trip",
            "beside it": f"a thread that registers {self.registered_bytes >> 20} MiB with the engine that "
            "pings, and deregisters it, in a loop; private memory, all touched before",
            "rounds": f"{self.repeats}: {self.iterations} round trips by themselves, as many beside it",
            "spin time": f"{_spin_us()} us",
            "pinned": "no",
        }

    @cached_property
    def _memory(self) -> np.ndarray:
        """The memory that is registered over each lane in turn."""
        return _touched(self.registered_bytes)

    def measure(self, number: int, contestant: Lane, console: Console) -> Iterator[Registering]:
        memory = self._memory
        ends = _Ends(contestant, _spin_us())
        ends.ping_pong(_WARM_UP)
        for repeat in range(1, self.repeats + 1):
            yield _measure(repeat, ends, memory, self.iterations)

    def show(self, console: Console, contestants: Sequence[Lane], records: Sequence[Registering]) -> None:
        print_table(
            console,
            "One way, microseconds, medians over rounds: p50 / p99",
            ["", "by itself", "registering", "registrations/s", "p99, ratio", "aim", ""],
            (_row(lane.name, found) for lane in contestants if (found := _of(lane, records))),
        )


def _spin_us() -> int:
    return EngineConfig(name="", domains=()).spin_us


class _Ends:
    """Two engines of this process, connected over one lane."""

    def __init__(self, lane: Lane, spin_us: int) -> None:
        self.lane = lane
        self._buffers = [np.zeros(LATENCY_BYTES, np.uint8) for _ in SideRole]
        self.pings, self.pongs = (
            _bench.EnginePingPong(
                lane.native_domains(role), spin_us, buffer.ctypes.data, LATENCY_BYTES, memfd=-1
            )
            for role, buffer in zip(SideRole, self._buffers, strict=True)
        )
        self.pings.complete(self.pongs.accept(self.pings.offer()))
        self.pings.import_region(self.pongs.descriptor())
        self.pongs.import_region(self.pings.descriptor())

    def ping_pong(self, iterations: int) -> list[float]:
        of_pings, of_pongs = self.pings.prepare(iterations), self.pongs.prepare(iterations)
        with ThreadPoolExecutor(1) as other:
            answers = other.submit(self.pongs.pong, _FACE, of_pings, LATENCY_BYTES)
            halves = self.pings.ping(_FACE, of_pongs, LATENCY_BYTES, 0)
            answers.result()
        return halves


def _measure(number: int, ends: _Ends, memory: np.ndarray, iterations: int) -> Registering:
    undisturbed = ends.ping_pong(iterations)
    ended = threading.Event()
    with ThreadPoolExecutor(1) as other:
        start = time.monotonic()
        registered = other.submit(
            _until, ended, lambda: ends.pings.register_once(memory.ctypes.data, memory.nbytes)
        )
        try:
            disturbed = ends.ping_pong(iterations)
        finally:
            ended.set()
        times = registered.result()
        seconds = time.monotonic() - start
    return Registering(
        round=number,
        lane=ends.lane.name,
        undisturbed=undisturbed,
        disturbed=disturbed,
        registrations_a_second=times / seconds,
    )


def _until(ended: threading.Event, work: Callable[[], None]) -> int:
    """Repeats ``work`` until ``ended`` is set. Returns the number of repetitions."""
    times = 0
    while not ended.is_set():
        work()
        times += 1
    return times


def _touched(nbytes: int) -> np.ndarray:
    """Returns private memory with every page resident."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    return memory


def _of(lane: Lane, records: Sequence[Registering]) -> list[Registering]:
    return [record for record in records if record.lane == lane.name]


def _row(name: str, found: Sequence[Registering]) -> list[str]:
    def median(percent: float, halves: Callable[[Registering], list[float]]) -> float:
        return statistics.median(percentile(halves(record), percent) for record in found)

    (p50, p99), (p50_beside, p99_beside) = (
        (median(50, halves), median(99, halves))
        for halves in (lambda record: record.undisturbed, lambda record: record.disturbed)
    )
    rate = statistics.median(record.registrations_a_second for record in found)
    ratio = p99_beside / p99
    return [
        name,
        f"{p50:.1f} / {p99:.1f}",
        f"{p50_beside:.1f} / {p99_beside:.1f}",
        f"{rate:,.1f}",
        f"{ratio:.2f}",
        f"at most {LIMIT:g}",
        verdict(ratio <= LIMIT),
    ]
