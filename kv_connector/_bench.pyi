"""Baselines and native latency loops of `kv-connector bench`.

Memory is named by its address and must stay mapped meanwhile; page i of a pool lies at slots[i] * page_bytes.
Failures raise RuntimeError.
"""

from typing import TypeAlias, TypedDict, final

import numpy as np
import numpy.typing as npt

_Slots = npt.NDArray[np.int64]

def copy_pages(target: int, target_slots: _Slots, source: int, source_slots: _Slots, page_bytes: int) -> None:
    """One memcpy a page within this process."""

def write_pages_to_process(
    pid: int,
    target: int,
    target_slots: _Slots,
    source: int,
    source_slots: _Slots,
    page_bytes: int,
    pages_per_call: int,
) -> None:
    """Writes pages into the memory of another process with process_vm_writev."""

@final
class SocketTarget:
    """Serves its pool to one SocketInitiator, on a separate thread."""

    def __init__(self, pool: int, pool_bytes: int) -> None: ...
    @property
    def port(self) -> int: ...

@final
class SocketInitiator:
    """Writes pages over one plain blocking TCP connection to 127.0.0.1."""

    def __init__(self, pool: int, port: int) -> None: ...
    def write_pages(
        self, target_slots: _Slots, source: int, source_slots: _Slots, page_bytes: int
    ) -> None: ...
    def ping_pong(self, bytes: int, iterations: int, pause_us: int) -> list[float]:
        """Half of each round trip, in microseconds."""

_Domain: TypeAlias = tuple[str, str, str]
"""provider, device, address"""

class EngineEnd:
    """One side of a measurement between two transfer engines in two processes."""

    def offer(self) -> bytes: ...
    def accept(self, offer: bytes) -> bytes: ...
    def complete(self, answer: bytes) -> None: ...
    def descriptor(self) -> bytes: ...
    def import_region(self, descriptor: bytes) -> None: ...
    def singles(self, bytes: int, iterations: int, immediate: int) -> list[float]:
        """Seconds that each of these writes took, one after the other."""

    def register_once(self, memory: int, bytes: int) -> None:
        """Registers memory and deregisters it again. Any thread, beside what else is called."""

@final
class EnginePingPong(EngineEnd):
    """prepare() on both sides comes before each ping() and pong()."""

    @final
    class Face:
        WORKER: EnginePingPong.Face
        """Answers in the counter's callback, on the worker thread."""
        THREAD: EnginePingPong.Face
        """Answers on a thread that sleeps in wait_counters()."""

    def __init__(
        self, domains: list[_Domain], spin_us: int, buffer: int, buffer_bytes: int, memfd: int
    ) -> None: ...
    def prepare(self, iterations: int) -> list[int]:
        """The immediates for the other side's ping() or pong()."""

    def ping(
        self, face: EnginePingPong.Face, peer_immediates: list[int], bytes: int, pause_us: int
    ) -> list[float]:
        """Half of each round trip, in microseconds."""

    def pong(self, face: EnginePingPong.Face, peer_immediates: list[int], bytes: int) -> None: ...

class _Steps(TypedDict):
    """Nanoseconds, one entry an iteration."""

    submit: list[float]
    dequeue: list[float]
    first: list[float]
    last: list[float]
    done: list[float]

@final
class GroupSteps:
    """One engine that writes to `peers` engines, all of this process."""

    def __init__(
        self, domains: list[_Domain], peer_domains: list[_Domain], spin_us: int, peers: int, slice_bytes: int
    ) -> None: ...
    def domains(self) -> list[str]: ...
    def scatter(self, iterations: int) -> _Steps: ...
    def barrier(self, iterations: int) -> _Steps: ...
    def prepared_scatter(self, iterations: int) -> _Steps: ...
    def prepared_barrier(self, iterations: int) -> _Steps: ...

class _ExpertPhase(TypedDict):
    """Nanoseconds, one entry an iteration."""

    submit: list[float]
    first: list[float]

class _ExpertTimes(TypedDict):
    dispatch: _ExpertPhase
    combine: _ExpertPhase

@final
class ExpertSteps:
    """One rank and `peers` ranks of other nodes, in this process. Each sends `tokens` rows to all others."""

    def __init__(
        self,
        domains: list[_Domain],
        peer_domains: list[_Domain],
        spin_us: int,
        peers: int,
        tokens: int,
        row_bytes: int,
    ) -> None: ...
    def steps(self, iterations: int) -> _ExpertTimes: ...

def submit_write(iterations: int) -> list[float]:
    """Nanoseconds of each call that adds one page to an open transfer."""

def submit_write_one(iterations: int) -> list[float]:
    """Nanoseconds of each call that opens a transfer, adds one page and seals it."""

def post_pages(iterations: int, pages: int, page_bytes: int) -> list[float]:
    """Nanoseconds a page that the worker takes to post one request, for each request."""

def count_immediates(immediates: int, counters: int) -> float:
    """Immediates a second that one thread counts."""

def clock_cost() -> float:
    """Nanoseconds that reading the clock twice takes."""
