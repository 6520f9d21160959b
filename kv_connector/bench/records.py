"""The results of a run: one JSON line each, after its `Conditions`."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kv_connector.bench.contestant import Face

STANDARD_OUTPUT = Path("-")
"""Stands for standard output in place of a file's name."""


class Throughput(msgspec.Struct, tag="throughput", kw_only=True, frozen=True):
    """One contestant, one workload, one round."""

    round: int
    contestant: str
    workload: str
    bytes: int
    """Bytes of one batch."""
    seconds: list[float]
    """Seconds of each repetition, from the call until every page is known to be in place."""
    cpu_initiator: float
    cpu_target: float
    """CPU seconds over all repetitions."""
    foreign_cores: float
    """Cores that other processes kept busy meanwhile."""
    verified: bool
    """Whether the pages arrived and nothing was written beside them."""

    @property
    def gb_per_second(self) -> float:
        return self.bytes / statistics.median(self.seconds) / 1e9

    @property
    def best_gb_per_second(self) -> float:
        return self.bytes / min(self.seconds) / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        return (self.cpu_initiator + self.cpu_target) / (self.bytes * len(self.seconds) / 1e9)


class Latency(msgspec.Struct, tag="latency", kw_only=True, frozen=True):
    """One-way microseconds: half of each round trip."""

    round: int
    contestant: str
    face: Face
    pause_us: int
    """Sleep before each write, in microseconds; 0: back to back."""
    microseconds: list[float]

    def percentile(self, percent: int) -> float:
        return percentile(self.microseconds, percent)


class Idle(msgspec.Struct, tag="idle", kw_only=True, frozen=True):
    """Cores used by each side while connected and idle."""

    round: int
    contestant: str
    initiator: float
    target: float


class Singles(msgspec.Struct, tag="singles", kw_only=True, frozen=True):
    """Single writes, one after the other: each begins when the previous one is known to be in place."""

    round: int
    contestant: str
    bytes: int
    seconds: list[float]

    @property
    def gbit_per_second(self) -> float:
        return self.bytes * 8 / statistics.median(self.seconds) / 1e9


class PeerCost(msgspec.Struct, kw_only=True, frozen=True):
    """The cost of a peer for one side.

    Memory is the process's own: without the kernel's memory for sockets and queue pairs.
    """

    idle_bytes: float
    """Bytes of a peer that is connected and idle."""
    written_bytes: float
    """Bytes of a peer to which a page was written."""
    descriptors: float


class Peers(msgspec.Struct, tag="peers", kw_only=True, frozen=True):
    """Peers of one engine, all connected one after the other."""

    round: int
    contestant: str
    peers: int
    seconds: float
    """Seconds to connect all peers, the control plane's part included."""
    initiator: PeerCost
    target: PeerCost


class FirstRequest(msgspec.Struct, tag="meeting", kw_only=True, frozen=True):
    """The first request between two engines."""

    round: int
    lane: str
    prefill_ranks: int
    seconds: list[float]
    """Seconds from the request until its page is there, by rank of decode."""


class GroupRun(msgspec.Struct, tag="group", kw_only=True, frozen=True):
    """Scatters or barriers over one group: nanoseconds of each step, one entry per iteration."""

    lane: str
    operation: str
    """"scatter", "barrier", or one of them prepared."""
    peers: int
    slice_bytes: int
    submit: list[float]
    dequeue: list[float]
    first: list[float]
    last: list[float]
    done: list[float]

    @property
    def reached(self) -> list[float]:
        """From the call until the domain receives the first write."""
        return _sums(self.submit, self.first)


class ExpertSends(msgspec.Struct, tag="experts", kw_only=True, frozen=True):
    """The calls of one rank that send to ranks of other nodes: nanoseconds, one entry per iteration."""

    lane: str
    operation: str
    """"dispatch" or "combine"."""
    peers: int
    tokens: int
    """Tokens of one rank."""
    row_bytes: int
    submit: list[float]
    """The call, which also packs the rows."""
    first: list[float]
    """From its end until the domain receives the first write."""

    @property
    def reached(self) -> list[float]:
        """From the call until the domain receives the first write."""
        return _sums(self.submit, self.first)


def _sums(first: list[float], second: list[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


class ExpertPairs(msgspec.Struct, tag="moe", kw_only=True, frozen=True):
    """Dispatch and combine of experts, or a collective in their place."""

    contestant: str
    memory: str
    """"gpu" or "host"."""
    ranks: int
    hidden: int
    tokens: int
    """Tokens of one rank."""
    microseconds: list[float]
    """Duration of one pair of dispatch and combine in each repetition, as the slowest rank measured it."""


class Registering(msgspec.Struct, tag="registering", kw_only=True, frozen=True):
    """A ping-pong by itself, and while a thread registers and deregisters memory with the pinging engine.

    Values are half of each round trip in microseconds.
    """

    round: int
    lane: str
    undisturbed: list[float]
    disturbed: list[float]
    registrations_a_second: float


class Micro(msgspec.Struct, tag="micro", kw_only=True, frozen=True):
    """One figure of a hot loop."""

    name: str
    unit: str
    p50: float
    p99: float
    aim: float | None
    at_least: bool = False

    @property
    def reached(self) -> bool | None:
        if self.aim is None:
            return None
        return self.p50 >= self.aim if self.at_least else self.p50 <= self.aim


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class FailedMeasurement(msgspec.Struct, tag="failure", kw_only=True, frozen=True):
    """A contestant that could not be measured, and the reason."""

    round: int
    contestant: str
    case: str
    reason: str


Record = Throughput | Latency | Idle | Singles | Peers | FailedMeasurement
"""A record of one contestant in one round."""


def append(path: Path | None, record: msgspec.Struct) -> None:
    """Adds one line to the results; None: they are not kept."""
    if path is None:
        return
    line = msgspec.json.encode(record) + b"\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
        return
    with path.open("ab") as lines:
        lines.write(line)
