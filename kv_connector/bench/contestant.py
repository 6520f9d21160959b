"""A contestant: two processes, each with its end of one way to move pages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection

from kv_connector.bench.bench_memory import BenchMemory
from kv_connector.bench.workloads import PageWorkload, Slots


class SideRole(StrEnum):
    INITIATOR = "initiator"
    """The side that writes."""
    TARGET = "target"
    """The side to which is written."""


class Face(StrEnum):
    """The code that is notified of a landed write, in the latency case."""

    WORKER = "worker"
    """A callback on the engine's own thread, without Python."""
    THREAD = "thread"
    """A thread that sleeps until it is notified, without Python."""
    PYTHON = "python"
    """A Python thread, through the contestant's Python interface."""


class ContestantSide:
    """One process's end of a contestant. The other process holds the second end.

    `transfer`, `ping` and `prepare` are called on the initiator's side, `pong` on the target's.
    """

    faces: tuple[Face, ...] = ()
    """The kinds of latency for which this contestant can be measured."""

    polls = False
    """Whether the target has to call `progress` all the time for the initiator's writes to proceed."""

    def __init__(self, role: SideRole, pool: BenchMemory) -> None:
        self.role = role
        self.pool = pool

    def connect(self, peer: Connection) -> None:
        """Connects the sides. Called on both at the same time; `peer` leads to the other side's `connect`."""
        raise NotImplementedError

    def prepare(self, workload: PageWorkload, source_slots: Slots, target_slots: Slots) -> None:
        """Does the work that an application does once and not for each batch. Not timed."""
        raise NotImplementedError

    def transfer(self) -> None:
        """Writes the whole prepared batch. Returns when every page is known to be in place."""
        raise NotImplementedError

    def progress(self) -> None:
        """Makes progress. See `polls`."""

    def ping(self, face: Face, iterations: int, pause_us: int) -> list[float]:
        """Returns half of each round trip in microseconds. Sleeps `pause_us` before each write."""
        raise NotImplementedError

    def pong(self, face: Face, iterations: int) -> None:
        """Answers `iterations` pings."""
        raise NotImplementedError

    def prepare_singles(self) -> None:
        """Prepares the initiator's `singles`. Called once, on both sides at the same time."""
        raise NotImplementedError

    def singles(self, nbytes: int, iterations: int) -> list[float]:
        """Returns the seconds of each of these writes, one after the other."""
        raise NotImplementedError

    def add_peers(self, count: int) -> None:
        """Connects `count` times more, each time as another peer. Called on both sides at the same time."""
        raise NotImplementedError

    def write_to_peers(self) -> None:
        """Writes one page to each peer that was added since the last call. For the initiator."""
        raise NotImplementedError

    def describe(self) -> list[str]:
        """Returns the descriptions of this side's ends of the lane."""
        return []


@dataclass(frozen=True)
class Contestant:
    """One row of the tables."""

    name: str
    """Value of --contestants."""
    label: str
    make: Callable[[SideRole, BenchMemory], ContestantSide]
    """Creates a side. Called in each of the two processes."""
    shared_pool: bool = False
    module: str | None = None
    """Python module that the contestant needs and that is no dependency of this project."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set in its two processes before anything is imported there."""
