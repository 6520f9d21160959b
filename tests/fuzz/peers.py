"""An engine under attack and an honest peer, each in a separate process."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_connector.engine import (
    DomainConfig,
    EngineConfig,
    EngineStats,
    ErrorCode,
    Event,
    EventKind,
    Handshake,
    MemoryRange,
    TransferError,
)
from kv_connector.engine.transfer_engine import MAX_MESSAGE_BYTES, SharedMemory, TransferEngine
from tests.conformance.gpu import GpuMemory

PAGE = 4096
# Pages that the honest peer writes, between stretches that no peer may write.
PAGES = 64
GUARD = 16 * PAGE
NBYTES = GUARD + PAGES * PAGE + GUARD
GUARDED = 0xA5
# Bytes that hostile peers of tcp may write: they have its key.
PLAYGROUND = 1 << 20
# A step that takes longer hangs. The conformance list has the same limit.
LIMIT = 30.0
# Two pings in a row would keep both cores busy. At this pace the engines sleep in between.
PING_EVERY = 0.0005
# A new peer takes at most 2 ms of the control thread.
NEWCOMER_EVERY = 0.1


@contextlib.contextmanager
def first_served() -> Iterator[None]:
    """Gives threads that start in here priority over all others of this machine, if the machine permits it.

    In production a hostile peer uses another machine's CPU time. Other load here would hide the effect of the
    attack. So the data paths and the measuring threads do not compete for the CPU.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def open_engine(name: str, lane: str, memory: MemoryRange) -> tuple[TransferEngine, int]:
    """Opens an engine with priority, except for its control thread. Returns it with its region of this
    memory."""
    with first_served():
        engine = TransferEngine(EngineConfig(name, [DomainConfig(lane)]))
    (control,) = _threads(f"kvc-c-{name}")
    # This starts the threads of a stand-in's GPU.
    (region,) = engine.register_ranges([memory])
    # The control thread must give way to the transfer thread, as in production. With priority it took the
    # ping-pong's p99 from 0.3 to 1.0 ms while 32 links of nvlink ended at once.
    os.sched_setscheduler(control, os.SCHED_OTHER, os.sched_param(0))
    return engine, region


def _threads(name: str) -> list[int]:
    """Returns the threads of this process with this name."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text().rstrip() == name]


class _Memory:
    """NBYTES that the engine registers, between guards, with their contents visible to the test."""

    def __init__(self, lane: str, driver: str | None) -> None:
        self.bytes: npt.NDArray[np.uint8] | GpuMemory
        self._shared: SharedMemory | None = None
        if lane == "nvlink":
            self.bytes = GpuMemory(NBYTES, 0, driver)
            address = self.bytes.address
        else:
            self._shared = SharedMemory("hostile", NBYTES)
            self.bytes = np.frombuffer(memoryview(self._shared), dtype=np.uint8)
            address = self._shared.address
        self.bytes[:] = GUARDED
        self.bytes[GUARD:-GUARD] = 0
        fd = -1 if self._shared is None else self._shared.fd
        self.range = MemoryRange(address + GUARD, PAGES * PAGE, fd, 0 if fd < 0 else GUARD)

    def pages(self) -> bytes:
        return self.bytes[GUARD:-GUARD].tobytes()

    def guarded(self) -> bool:
        return bool((self.bytes[:GUARD] == GUARDED).all() and (self.bytes[-GUARD:] == GUARDED).all())


@dataclass(frozen=True)
class State:
    """The state of the victim, read from inside."""

    stats: EngineStats
    counted: int  # count of the honest peer's counter
    pages: bytes
    guarded: bool
    resident_mib: float
    peak_mib: float
    descriptors: int
    found: tuple[str, ...]  # events that must never occur


class Victim:
    """The engine under attack. It accepts any peer: in production the control plane admits peers."""

    def __init__(self, lane: str, driver: str | None = None) -> None:
        self._memory = _Memory(lane, driver)
        self._engine, self._region = open_engine("victim", lane, self._memory.range)
        self._playground = SharedMemory("playground", PLAYGROUND)
        self._counters = 0
        self._honest = 0
        self._found: list[str] = []
        self._down: list[int] = []  # peers of the keeper thread
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        self._stop.set()
        self._keeper.join()
        self._engine.close()

    # --- The honest peer

    def meet(self, offer: bytes) -> tuple[bytes, bytes, int]:
        """Returns the answer, the descriptor of the pages, and the immediate that counts them."""
        answer = self._engine.accept("honest", offer)
        counters = self._engine.alloc_counters(1, [answer.peer])
        self._honest, self._counters = answer.peer, counters.id
        return answer.data, self._engine.region_descriptor(self._region), counters.immediates[0]

    # --- Hostile peers. No call waits long for one of them.

    def playground(self) -> bytes:
        """Returns the descriptor of memory that hostile peers may write."""
        return self._engine.region_descriptor(self._engine.register_buffer(self._playground))

    def offers(self, count: int) -> list[Handshake]:
        return [self._engine.offer("hostile") for _ in range(count)]

    def complete(self, answers: Sequence[tuple[int, bytes]], region: bytes = b"") -> list[bool]:
        """Returns whether each answer was accepted. With a region, operations to each of these peers are in
        flight."""
        return [self._complete(peer, answer, region) for peer, answer in answers]

    def _complete(self, peer: int, answer: bytes, region: bytes) -> bool:
        try:
            self._engine.complete(peer, answer)
        except TransferError:
            return False
        self._write_to(peer, region)
        return True

    def accept(self, offers: Sequence[bytes], region: bytes = b"") -> list[Handshake | None]:
        """Returns the answers to offers of hostile peers."""
        return [self._accept(offer, region) for offer in offers]

    def _accept(self, offer: bytes, region: bytes) -> Handshake | None:
        try:
            answer = self._engine.accept("hostile", offer)
        except TransferError:
            return None
        self._write_to(answer.peer, region)
        return answer

    def _write_to(self, peer: int, region: bytes) -> None:
        if not region:
            return
        with contextlib.suppress(TransferError):  # the peer is down already
            target = self._engine.import_region(peer, region)
            self._engine.write_one(peer, self._region, 0, target, 0, PAGE)
            self._engine.send(peer, b"how are you?")

    def fence(self, peers: Sequence[int]) -> None:
        """Fences peers that never connected, or that must not return."""
        for peer in peers:
            self._fence(peer, LIMIT)

    def _fence(self, peer: int, timeout: float) -> bool:
        """Returns False if the peer may still be writing."""
        try:
            self._engine.fence(peer, timeout)
        except TransferError as error:
            return error.code is not ErrorCode.TIMEOUT  # any other error: another call fenced it first
        return True

    # --- The outcome

    def settled(self) -> bool:
        """Returns whether only the honest peer is left, and every transfer to the others has ended."""
        stats = self._engine.stats()
        return stats.peers == 1 and stats.transfers_open == 0

    def counted(self) -> int:
        """Returns the count of the honest peer's counter."""
        return int(self._engine.counter_values(self._counters)[0])

    def descriptors(self) -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    def state(self) -> State:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
        )
        mib = {name: int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}
        return State(
            self._engine.stats(),
            self.counted(),
            self._memory.pages(),
            self._memory.guarded(),
            mib["VmRSS"],
            mib["VmHWM"],
            self.descriptors(),
            tuple(self._found),
        )

    # --- The keeper thread: receives what peers send, and fences those that are down.

    def _keep(self) -> None:
        files = [self._engine.event_fd(), self._engine.message_fd()]
        while not self._stop.is_set():
            select.select(files, [], [], 0.1)
            for message in self._engine.receive():
                if message.peer == self._honest and message.data != PING:
                    self._found.append(f"a message of the honest peer's came as {message.data[:40]!r}")
            for event in self._engine.poll_events():
                self._hear(event)
            self._down = [peer for peer in self._down if not self._fence(peer, 0.001)]

    def _hear(self, event: Event) -> None:
        if event.kind is EventKind.PEER_LEFT and event.id != self._honest:
            return
        if event.kind not in (EventKind.PEER_DOWN, EventKind.PEER_LEFT):
            return  # the end of an operation to a hostile peer
        if event.id == self._honest:
            self._found.append(f"the honest peer was taken for broken: {event}")
        self._down.append(event.id)


PING = (bytes(range(256)) * 16)[:MAX_MESSAGE_BYTES]


@dataclass(frozen=True)
class Times:
    """Ping-pong times of one period, in microseconds."""

    pings: int
    median: float
    p99: float
    slowest: float
    newcomers: int
    newcomers_slowest: float
    newcomers_refused: int


class Honest:
    """A peer that plays ping-pong with the victim all the time, and records what it has written.

    A ping is a counted page of 4 KiB and a message of the same size. The victim's engine sends the pong once
    it has both, so the victim's Python code is not in the path.
    """

    def __init__(self, lane: str, victim: Any, driver: str | None = None) -> None:
        self._lane = lane
        self._memory = _Memory(lane, driver)
        self._victim = victim
        self._engine, self._region = open_engine("honest", lane, self._memory.range)
        offer = self._engine.offer("victim")
        answer, descriptor, self._immediate = victim.meet(offer.data)
        self._peer = offer.peer
        self._engine.complete(offer.peer, answer)
        self._target = self._engine.import_region(offer.peer, descriptor)
        self._pings = 0
        self._times: list[int] = []
        self._newcomers: list[int] = []
        self._refused = 0
        self._failed: list[Exception] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        self._engine.close()

    def begin(self, newcomers: bool = True) -> None:
        self._times, self._newcomers, self._refused, self._failed = [], [], 0, []
        self._stop.clear()
        self._threads = []
        # Both threads: one that waits for a CPU while it holds the interpreter's lock delays the other.
        with first_served():
            self._start(self._ping, PING_EVERY)
            if newcomers:
                self._start(self._come_anew, NEWCOMER_EVERY)

    def _start(self, step: Callable[[], None], pause: float) -> None:
        self._threads.append(threading.Thread(target=self._again, args=(step, pause), daemon=True))
        self._threads[-1].start()

    def end(self) -> Times:
        """Ends the ping-pong. Raises the error that occurred."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0]
        times = np.array(self._times) / 1000
        return Times(
            len(times),
            float(np.median(times)),
            float(np.percentile(times, 99)),
            float(times.max()),
            len(self._newcomers),
            max(self._newcomers, default=0) / 1e6,
            self._refused,
        )

    def immediate(self) -> int:
        """Returns the immediate that raises the victim's counter."""
        return self._immediate

    def written(self) -> tuple[int, bytes]:
        """Returns the number of pages written, and their present contents."""
        return self._pings, self._memory.pages()

    def _again(self, step: Callable[[], None], pause: float) -> None:
        try:
            while not self._stop.is_set():
                step()
                time.sleep(pause)
        except Exception as error:
            self._failed.append(error)

    def _ping(self) -> None:
        offset = self._pings % PAGES * PAGE
        page = np.full(PAGE // 8, self._pings + 1, dtype=np.uint64).view(np.uint8)
        self._memory.bytes[GUARD + offset : GUARD + offset + PAGE] = page
        began = time.perf_counter_ns()
        write = self._engine.write_one(
            self._peer, self._region, offset, self._target, offset, PAGE, self._immediate
        )
        message = self._engine.send(self._peer, PING)
        for transfer in (write, message):
            event = self._engine.wait_transfer(transfer, LIMIT)
            if event.kind is not EventKind.TRANSFER_DONE:
                raise RuntimeError(f"the honest peer's transfer ended so: {event}")
        self._times.append(time.perf_counter_ns() - began)
        self._pings += 1

    def _come_anew(self) -> None:
        """Connects one more peer to the victim, which sends a message and leaves."""
        (offer,) = self._victim.offers(1)
        try:
            self._newcomers.append(self._say_hello(offer))
        except TransferError:
            self._refused += 1
        self._victim.fence([offer.peer])

    def _say_hello(self, offer: Handshake) -> int:
        """Returns how long the connection took. Raises TransferError if the peer was not admitted, or
        replaced by others that dial."""
        began = time.perf_counter_ns()
        answer = self._engine.accept("victim", offer.data)
        try:
            self._victim.complete([(offer.peer, answer.data)])
            event = self._engine.wait_transfer(self._engine.send(answer.peer, b"hello"), LIMIT)
            if event.error is not None:
                raise event.error
            return time.perf_counter_ns() - began
        finally:
            self._engine.fence(answer.peer, LIMIT)


class _Manager(BaseManager):
    """A process that holds one of these objects."""


_Manager.register("Victim", Victim)
_Manager.register("Honest", Honest)


@contextlib.contextmanager
def stage(lane: str, driver: str | None = None) -> Iterator[tuple[Any, Any]]:
    """Yields a victim and its honest peer, in separate processes."""
    with contextlib.ExitStack() as stack:
        victim, honest = (stack.enter_context(_Manager(ctx=get_context("spawn"))) for _ in range(2))
        attacked = victim.Victim(lane, driver)  # type: ignore[attr-defined]
        stack.callback(attacked.close)
        behaves = honest.Honest(lane, attacked, driver)  # type: ignore[attr-defined]
        stack.callback(behaves.close)
        yield attacked, behaves
