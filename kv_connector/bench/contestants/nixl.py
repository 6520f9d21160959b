"""NIXL with its UCX backend, through its Python interface, used as vLLM's NixlConnector uses it."""

import importlib
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_connector.bench.bench_memory import BenchMemory
from kv_connector.bench.contestant import ContestantSide, Face, SideRole
from kv_connector.bench.contestants.python_loop import ping_pong
from kv_connector.bench.workloads import LATENCY_BYTES, PageWorkload, Slots


class NixlSide(ContestantSide):
    """One end of NIXL.

    `progress_thread` is NIXL's default; without it both sides must poll, which is its fastest setting.
    """

    faces = (Face.PYTHON,)

    def __init__(self, role: SideRole, pool: BenchMemory, *, progress_thread: bool) -> None:
        super().__init__(role, pool)
        api = importlib.import_module("nixl._api")
        self.polls = not progress_thread
        self.name = f"{role}-{os.getpid()}"
        config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
        self.agent = api.nixl_agent(self.name, config)
        self.agent.register_memory([(pool.address, pool.size, 0, "")], "DRAM")

    def connect(self, peer: Connection) -> None:
        peer.send((self.pool.address, self.agent.get_agent_metadata()))
        self.target, metadata = peer.recv()
        self.peer = self.agent.add_remote_agent(metadata)

    def prepare(self, workload: PageWorkload, source_slots: Slots, target_slots: Slots) -> None:
        # As in vLLM, one prepared list contains all pages of the pool, and each transfer picks indices from
        # it.
        ours, theirs = (
            _descriptors(base, self.pool.size, workload.page_bytes)
            for base in (self.pool.address, self.target)
        )
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM")
        self.remote = self.agent.prep_xfer_dlist(self.peer, theirs, "DRAM")
        self.source_indices = source_slots.astype(np.int32)
        self.target_indices = target_slots.astype(np.int32)

    def transfer(self) -> None:
        handle = self.agent.make_prepped_xfer(
            "WRITE", self.local, self.source_indices, self.remote, self.target_indices
        )
        self._run(handle)
        self.agent.release_xfer_handle(handle)

    def progress(self) -> None:
        self.agent.get_new_notifs()

    def ping(self, face: Face, iterations: int, pause_us: int) -> list[float]:
        return ping_pong(self._prepare_write(), self._await_notice, iterations, pause_us)

    def pong(self, face: Face, iterations: int) -> None:
        write = self._prepare_write()
        for _ in range(iterations):
            self._await_notice()
            write()

    def _prepare_write(self) -> Any:
        local = self.agent.get_xfer_descs([(self.pool.address, LATENCY_BYTES, 0)], "DRAM")
        remote = self.agent.get_xfer_descs([(self.target, LATENCY_BYTES, 0)], "DRAM")
        handle = self.agent.initialize_xfer("WRITE", local, remote, self.peer, b"landed")
        return lambda: self._run(handle)

    def _run(self, handle: Any) -> None:
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: the transfer ended in state {state}")

    def _await_notice(self) -> None:
        while not self.agent.get_new_notifs():
            pass


def _descriptors(base: int, pool_bytes: int, page_bytes: int) -> NDArray[np.uint64]:
    """Returns (address, length, device) of every page of a pool."""
    pages = np.arange(pool_bytes // page_bytes, dtype=np.uint64)
    rows = np.zeros((len(pages), 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(base) + pages * np.uint64(page_bytes)
    rows[:, 1] = page_bytes
    return rows
