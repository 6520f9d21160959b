"""The machine's own limits: memcpy, process_vm_writev and a plain socket loop, all in C++."""

import mmap
import os
from multiprocessing.connection import Connection

import numpy as np

from kv_connector import _bench
from kv_connector.bench.bench_memory import BenchMemory
from kv_connector.bench.contestant import ContestantSide, Face, SideRole
from kv_connector.bench.workloads import LATENCY_BYTES, PageWorkload, Slots


class _BatchSide(ContestantSide):
    """A side whose batch consists of its lists of pages only."""

    def prepare(self, workload: PageWorkload, source_slots: Slots, target_slots: Slots) -> None:
        self.page_bytes = workload.page_bytes
        self.source_slots = source_slots
        self.target_slots = target_slots


class MemoryCopySide(_BatchSide):
    """memcpy into the target's shared memory, which the initiator has mapped."""

    def connect(self, peer: Connection) -> None:
        if self.role is SideRole.TARGET:
            peer.send((os.getpid(), self.pool.memfd))
            peer.recv()
            return
        pid, memfd = peer.recv()
        descriptor = os.open(f"/proc/{pid}/fd/{memfd}", os.O_RDWR | os.O_CLOEXEC)
        mapping = mmap.mmap(descriptor, self.pool.size)
        os.close(descriptor)
        self.target = np.frombuffer(mapping, dtype=np.uint8)
        self.target[:: mmap.PAGESIZE] = 1
        peer.send("mapped")

    def transfer(self) -> None:
        _bench.copy_pages(
            target=int(self.target.ctypes.data),
            target_slots=self.target_slots,
            source=self.pool.address,
            source_slots=self.source_slots,
            page_bytes=self.page_bytes,
        )


class ProcessWriteSide(_BatchSide):
    """process_vm_writev with many pages a call: the way to memory of another process that is not shared."""

    # At 4 KiB pages this is twice as fast as one page a call. More pages gained nothing.
    pages_per_call = 256

    def connect(self, peer: Connection) -> None:
        if self.role is SideRole.TARGET:
            peer.send((os.getpid(), self.pool.address))
        else:
            self.pid, self.target = peer.recv()

    def transfer(self) -> None:
        _bench.write_pages_to_process(
            pid=self.pid,
            target=self.target,
            target_slots=self.target_slots,
            source=self.pool.address,
            source_slots=self.source_slots,
            page_bytes=self.page_bytes,
            pages_per_call=self.pages_per_call,
        )


class PlainSocketSide(_BatchSide):
    """One blocking TCP connection over loopback. The target answers each batch with one byte."""

    faces = (Face.THREAD,)

    def __init__(self, role: SideRole, pool: BenchMemory) -> None:
        super().__init__(role, pool)
        if role is SideRole.TARGET:
            self.server = _bench.SocketTarget(pool.address, pool.size)

    def connect(self, peer: Connection) -> None:
        if self.role is SideRole.TARGET:
            peer.send(self.server.port)
        else:
            self.client = _bench.SocketInitiator(self.pool.address, peer.recv())

    def transfer(self) -> None:
        self.client.write_pages(
            target_slots=self.target_slots,
            source=self.pool.address,
            source_slots=self.source_slots,
            page_bytes=self.page_bytes,
        )

    def ping(self, face: Face, iterations: int, pause_us: int) -> list[float]:
        return self.client.ping_pong(LATENCY_BYTES, iterations, pause_us)

    def pong(self, face: Face, iterations: int) -> None:
        """Does nothing: the server's thread answers."""
