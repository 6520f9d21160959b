"""What a contestant is: two processes' ends of one way to move pages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection

from kv_connector.bench.pool import Pool
from kv_connector.bench.workloads import Slots, Workload


class Role(StrEnum):
    INITIATOR = "initiator"
    """Writes."""
    TARGET = "target"
    """Is written to."""


class Face(StrEnum):
    """Who is told that a write has landed, in the latency case."""

    WORKER = "worker"
    """A callback on the engine's own thread, no Python."""
    THREAD = "thread"
    """A thread that sleeps until it is told, no Python."""
    PYTHON = "python"
    """A Python thread, by the contestant's Python interface."""


class Side:
    """One process's end of a contestant. The other process holds the other one.

    `transfer`, `ping` and `prepare` are called on the initiator's side, `pong` on the target's.
    """

    faces: tuple[Face, ...] = ()
    """The kinds of latency that this contestant can be measured in."""

    polls = False
    """The target has to call `progress` all the time for the initiator's writes to get anywhere."""

    def __init__(self, role: Role, pool: Pool) -> None:
        self.role = role
        self.pool = pool

    def connect(self, peer: Connection) -> None:
        """Both sides at the same time: `peer` leads to the other side's `connect`."""
        raise NotImplementedError

    def prepare(self, workload: Workload, source_slots: Slots, target_slots: Slots) -> None:
        """Whatever an application does once and not for each batch. Not timed."""
        raise NotImplementedError

    def transfer(self) -> None:
        """Writes the whole batch that was prepared; returns when every page is known to be in place."""
        raise NotImplementedError

    def progress(self) -> None:
        """See `polls`."""

    def ping(self, face: Face, iterations: int, pause_us: int) -> list[float]:
        """Half of each round trip in microseconds; sleeps `pause_us` before each write."""
        raise NotImplementedError

    def pong(self, face: Face, iterations: int) -> None:
        """Answers as many pings."""
        raise NotImplementedError

    def prepare_singles(self) -> None:
        """Both sides at the same time, once, before the initiator's `singles`."""
        raise NotImplementedError

    def singles(self, nbytes: int, iterations: int) -> list[float]:
        """Seconds of each of these writes, one after the other."""
        raise NotImplementedError

    def add_peers(self, count: int) -> None:
        """Both sides at the same time: connects `count` times more, each time as another peer."""
        raise NotImplementedError

    def write_to_peers(self) -> None:
        """The initiator's: one page to each peer that was added since the last time."""
        raise NotImplementedError

    def describe(self) -> list[str]:
        """What this side's ends of the lane call themselves."""
        return []


@dataclass(frozen=True)
class Contestant:
    """One row of the tables."""

    name: str
    """What --contestants takes."""
    label: str
    make: Callable[[Role, Pool], Side]
    """Called in each of the two processes."""
    shared_pool: bool = False
    module: str | None = None
    """The Python module that it needs and that we do not depend on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in its two processes before anything is imported there."""
