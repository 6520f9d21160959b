"""Two processes for one contestant, and the measurements on them.

The coordinator (this process) holds a pipe to each side and sends it (method, arguments...). The two sides
share a third pipe, over which they connect. Both are spawned anew for each contestant and round. So no other
contestant runs meanwhile, and no round inherits another round's placement in memory.
"""

import contextlib
import gc
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from kv_connector.bench.bench_memory import BenchMemory
from kv_connector.bench.contestant import Contestant, Face, SideRole
from kv_connector.bench.machine import busy_seconds, resident_bytes, wait_quiet
from kv_connector.bench.records import (
    FailedMeasurement,
    Idle,
    Latency,
    PeerCost,
    Peers,
    Record,
    Singles,
    Throughput,
)
from kv_connector.bench.workloads import IDLE, LATENCY, POOL_BYTES, WORKLOADS, PageWorkload, Slots

# Repetitions of a batch in a round. The warm-ups before them are as many as fault everything in and settle
# it.
REPETITIONS = 9
WARM_UPS = 3
# A latency measurement aims at this duration, within these numbers of round trips: contestants differ by a
# factor of a thousand.
LATENCY_SECONDS = 1.0
LATENCY_ITERATIONS = (100, 20_000)
_LATENCY_PROBE = 20
# Pauses before a write: none, and one in which all threads fall asleep.
PAUSES_US = (0, 1000)
IDLE_SECONDS = 2.0

# Longest wait for one answer of a side. The slowest contestant needs 10 s for its slowest case.
_PATIENCE = 120.0
# Time for the other side's answer after one side has failed.
_GRACE = 2.0
_POOL_SEED, _SOURCE_SEED, _TARGET_SEED = 7, 1, 2


class BenchError(RuntimeError):
    """A side or a rank failed, ended or did not answer. The message names it and quotes its error."""


def measure_round(
    number: int, contestant: Contestant, cases: Sequence[str], *, pin: bool
) -> Iterator[Record]:
    """Measures one contestant once in each of its cases. Failures are records too."""
    case = "start"
    try:
        with ContestantPair(contestant, pin=pin) as pair:
            for workload in WORKLOADS:
                if (case := workload.name) in cases:
                    yield pair.throughput(number, workload)
            if (case := LATENCY) in cases:
                yield from pair.latencies(number)
            # A contestant without a notification (memcpy) has no waiting thread to measure either.
            if (case := IDLE) in cases and pair.faces:
                yield pair.idle(number)
    except BenchError as error:
        yield FailedMeasurement(round=number, contestant=contestant.name, case=case, reason=str(error))


class Footprint(NamedTuple):
    """The resources that a process holds."""

    memory: int
    """Resident bytes."""
    descriptors: int


class ContestantPair:
    """The two connected processes of a contestant. Not safe to share between threads."""

    def __init__(self, contestant: Contestant, *, pin: bool) -> None:
        self.contestant = contestant
        context = multiprocessing.get_context("spawn")
        peers = context.Pipe()
        cores = sorted(os.sched_getaffinity(0))
        self._processes = []
        self._pipes: dict[SideRole, Connection] = {}
        for position, role in enumerate(SideRole):
            ours, theirs = context.Pipe()
            core = cores[position % len(cores)] if pin else None
            arguments = (theirs, peers[position], contestant, role, core, POOL_BYTES)
            process = context.Process(target=_run_side, args=arguments, daemon=True)
            process.start()
            theirs.close()
            peers[position].close()
            self._processes.append(process)
            self._pipes[role] = ours

    def __enter__(self) -> Self:
        try:
            self._both("open")
            self._both("connect")
            self._call(SideRole.INITIATOR, "fill", _POOL_SEED)
            self.faces: tuple[Face, ...] = self._call(SideRole.INITIATOR, "faces")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends both processes."""
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes:
            # Its pipe is closed, so it ends by itself, unless a library of its contestant hangs.
            process.join(timeout=5)
            process.kill()
            process.join()

    def throughput(self, number: int, workload: PageWorkload) -> Throughput:
        source, target = (workload.slots(seed, POOL_BYTES) for seed in (_SOURCE_SEED, _TARGET_SEED))
        self._call(SideRole.TARGET, "zero")
        self._call(SideRole.INITIATOR, "prepare", workload, source, target)
        self._call(SideRole.INITIATOR, "transfer", 1)
        sent = self._call(SideRole.INITIATOR, "digest", source, workload.page_bytes)
        arrived = self._call(SideRole.TARGET, "digest", target, workload.page_bytes)
        nothing_else = self._call(SideRole.TARGET, "zero_outside", target, workload.page_bytes)
        self._call(SideRole.INITIATOR, "transfer", WARM_UPS - 1)
        wait_quiet(self._cpu_total)
        cpu, busy, start = self._cpu(), busy_seconds(), time.monotonic()
        seconds = self._call(SideRole.INITIATOR, "transfer", REPETITIONS)
        initiator, receiver = (after - before for after, before in zip(self._cpu(), cpu, strict=True))
        foreign = busy_seconds() - busy - initiator - receiver
        return Throughput(
            round=number,
            contestant=self.contestant.name,
            workload=workload.name,
            bytes=workload.bytes,
            seconds=seconds,
            cpu_initiator=initiator,
            cpu_target=receiver,
            foreign_cores=max(0.0, foreign) / (time.monotonic() - start),
            verified=sent == arrived and nothing_else,
        )

    def latencies(self, number: int) -> Iterator[Latency]:
        for face in self.faces:
            for pause in PAUSES_US:
                wait_quiet(self._cpu_total)
                start = time.monotonic()
                self._ping_pong(face, _LATENCY_PROBE, pause)
                each = (time.monotonic() - start) / _LATENCY_PROBE
                least, most = LATENCY_ITERATIONS
                iterations = max(least, min(most, int(LATENCY_SECONDS / each)))
                yield Latency(
                    round=number,
                    contestant=self.contestant.name,
                    face=face,
                    pause_us=pause,
                    microseconds=self._ping_pong(face, iterations, pause),
                )

    def singles(self, number: int, nbytes: int, iterations: int) -> Singles:
        """Measures single writes. Call prepare_singles() before."""
        self._call(SideRole.INITIATOR, "singles", nbytes, WARM_UPS)
        wait_quiet(self._cpu_total)
        seconds = self._call(SideRole.INITIATOR, "singles", nbytes, iterations)
        return Singles(round=number, contestant=self.contestant.name, bytes=nbytes, seconds=seconds)

    def prepare_singles(self) -> None:
        self._both("prepare_singles")

    def describe(self) -> dict[SideRole, list[str]]:
        return {role: self._call(role, "describe") for role in SideRole}

    def peers(self, number: int, peers: int) -> Peers:
        """Measures the cost of `peers` more peers for each side."""
        # loads the code and tables that the first peer needs
        self._call_each(dict.fromkeys(SideRole, ("add_peers", 1)))
        self._call(SideRole.INITIATOR, "write_to_peers")
        before = self._both("footprint")
        start = time.monotonic()
        self._call_each(dict.fromkeys(SideRole, ("add_peers", peers)))
        seconds = time.monotonic() - start
        idle = self._both("footprint")
        self._call(SideRole.INITIATOR, "write_to_peers")
        written = self._both("footprint")

        def cost(role: SideRole) -> PeerCost:
            return PeerCost(
                idle_bytes=(idle[role].memory - before[role].memory) / peers,
                written_bytes=(written[role].memory - before[role].memory) / peers,
                descriptors=(written[role].descriptors - before[role].descriptors) / peers,
            )

        return Peers(
            round=number,
            contestant=self.contestant.name,
            peers=peers,
            seconds=seconds,
            initiator=cost(SideRole.INITIATOR),
            target=cost(SideRole.TARGET),
        )

    def idle(self, number: int) -> Idle:
        self._both("rest")
        time.sleep(0.5)  # a thread that spins for a while after its last work has gone to sleep by then
        before = self._cpu()
        time.sleep(IDLE_SECONDS)
        initiator, target = (
            (end - start) / IDLE_SECONDS for end, start in zip(self._cpu(), before, strict=True)
        )
        return Idle(round=number, contestant=self.contestant.name, initiator=initiator, target=target)

    def _ping_pong(self, face: Face, iterations: int, pause_us: int) -> list[float]:
        answers = self._call_each(
            {
                SideRole.INITIATOR: ("ping", face, iterations, pause_us),
                SideRole.TARGET: ("pong", face, iterations),
            }
        )
        halves: list[float] = answers[SideRole.INITIATOR]
        return halves

    def _cpu(self) -> tuple[float, float]:
        return self._call(SideRole.INITIATOR, "cpu"), self._call(SideRole.TARGET, "cpu")

    def _cpu_total(self) -> float:
        return sum(self._cpu())

    def _both(self, method: str) -> dict[SideRole, Any]:
        return self._call_each(dict.fromkeys(SideRole, (method,)))

    def _call(self, role: SideRole, *call: Any) -> Any:
        return self._call_each({role: call})[role]

    def _call_each(self, calls: Mapping[SideRole, tuple[Any, ...]]) -> dict[SideRole, Any]:
        """Makes the sides execute their (method, arguments...) at the same time.

        BenchError: a side failed. The message quotes the errors of all sides. The pair cannot be used any
        more.
        """
        answers: dict[SideRole, Any] = {}
        errors: list[str] = []
        waiting = {self._pipes[role]: role for role in calls}
        for pipe, role in waiting.items():
            # A side that is gone is noticed below.
            with contextlib.suppress(OSError):
                pipe.send(calls[role])
        while waiting:
            # A side that waits for a failed side may wait for ever.
            ready = wait(waiting, timeout=_GRACE if errors else _PATIENCE)
            if not ready:
                errors += [f"the {role} did not answer" for role in waiting.values()]
                break
            for pipe, role in [item for item in waiting.items() if item[0] in ready]:
                del waiting[pipe]
                try:
                    ok, answer = pipe.recv()
                except (EOFError, OSError):
                    ok, answer = False, "its process ended"
                if ok:
                    answers[role] = answer
                else:
                    errors.append(f"{role}: {answer}")
        if errors:
            raise BenchError("\n".join(errors))
        return answers


class _Runner:
    """The process of a side: executes the coordinator's calls."""

    def __init__(self, contestant: Contestant, role: SideRole, peer: Connection, pool_bytes: int) -> None:
        self._contestant = contestant
        self._role = role
        self._peer = peer
        self._pool_bytes = pool_bytes
        self.polls = False

    def open(self) -> None:
        self._pool = BenchMemory(self._pool_bytes, shared=self._contestant.shared_pool)
        self._side = self._contestant.make(self._role, self._pool)

    def connect(self) -> None:
        try:
            self._side.connect(self._peer)
        except BaseException:
            self._peer.close()  # the other side waits for this connection
            raise
        self.polls = self._side.polls and self._role is SideRole.TARGET

    def progress(self) -> None:
        self._side.progress()

    def rest(self) -> None:
        """Stops polling a side that its caller has to poll."""
        self.polls = False

    def faces(self) -> tuple[Face, ...]:
        return self._side.faces

    def fill(self, seed: int) -> None:
        self._pool.fill(seed)

    def zero(self) -> None:
        self._pool.zero()

    def digest(self, slots: Slots, page_bytes: int) -> str:
        return self._pool.digest(slots, page_bytes)

    def zero_outside(self, slots: Slots, page_bytes: int) -> bool:
        return self._pool.zero_outside(slots, page_bytes)

    def prepare(self, workload: PageWorkload, source_slots: Slots, target_slots: Slots) -> None:
        self._side.prepare(workload, source_slots, target_slots)

    def transfer(self, repetitions: int) -> list[float]:
        seconds = []
        for _ in range(repetitions):
            start = time.perf_counter()
            self._side.transfer()
            seconds.append(round(time.perf_counter() - start, 7))
        return seconds

    def prepare_singles(self) -> None:
        self._side.prepare_singles()

    def singles(self, nbytes: int, iterations: int) -> list[float]:
        return [round(seconds, 8) for seconds in self._side.singles(nbytes, iterations)]

    def describe(self) -> list[str]:
        return self._side.describe()

    def add_peers(self, count: int) -> None:
        # Each peer may need some descriptors, more together than a shell's default limit for a process.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._side.add_peers(count)

    def write_to_peers(self) -> None:
        self._side.write_to_peers()

    def footprint(self) -> Footprint:
        gc.collect()
        return Footprint(resident_bytes(), sum(1 for _ in Path("/proc/self/fd").iterdir()))

    def ping(self, face: Face, iterations: int, pause_us: int) -> list[float]:
        return [round(half, 2) for half in self._side.ping(face, iterations, pause_us)]

    def pong(self, face: Face, iterations: int) -> None:
        self._side.pong(face, iterations)

    def cpu(self) -> float:
        """Returns the CPU seconds of all threads of this process so far."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime


def _run_side(
    coordinator: Connection,
    peer: Connection,
    contestant: Contestant,
    role: SideRole,
    core: int | None,
    pool_bytes: int,
) -> None:
    """The main function of a side's process: serves until the coordinator closes its pipe."""
    os.environ.update(contestant.environment)
    if core is not None:
        os.sched_setaffinity(0, {core})
    runner = _Runner(contestant, role, peer, pool_bytes)
    while True:
        while runner.polls and not coordinator.poll(0):
            runner.progress()
        try:
            method, *arguments = coordinator.recv()
        except (EOFError, OSError):
            break  # the coordinator has closed the pipe, or is gone
        try:
            answer = (True, getattr(runner, method)(*arguments))
        except Exception:
            answer = (False, traceback.format_exc(limit=-3))
        try:
            coordinator.send(answer)
        except OSError:
            break
    # Skips the interpreter's clean-up: another project's library may hang in its destructors.
    os._exit(0)
