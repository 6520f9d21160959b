"""Mooncake's TransferEngine over tcp, through its Python interface, used as in vLLM's MooncakeConnector."""

import importlib
from multiprocessing.connection import Connection

from kv_connector.bench.bench_memory import BenchMemory
from kv_connector.bench.contestant import ContestantSide, Face, SideRole
from kv_connector.bench.contestants.python_loop import ping_pong
from kv_connector.bench.workloads import LATENCY_BYTES, PageWorkload, Slots

# Pages of one call. With the default settings, the queue of its tcp transport refuses more.
_PAGES_PER_CALL = 1024


class MooncakeSide(ContestantSide):
    """Two engines that know each other by address alone (P2PHANDSHAKE)."""

    faces = (Face.PYTHON,)

    def __init__(self, role: SideRole, pool: BenchMemory) -> None:
        super().__init__(role, pool)
        self.library = importlib.import_module("mooncake.engine")
        self.engine = self.library.TransferEngine()
        _check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        _check(self.engine.register_memory(pool.address, pool.size), "register_memory")

    def connect(self, peer: Connection) -> None:
        peer.send((f"127.0.0.1:{self.engine.get_rpc_port()}", self.pool.address))
        self.peer, self.target = peer.recv()

    def prepare(self, workload: PageWorkload, source_slots: Slots, target_slots: Slots) -> None:
        # Plain lists of addresses, as MooncakeConnector builds them.
        size = workload.page_bytes
        sources = [self.pool.address + int(slot) * size for slot in source_slots]
        targets = [self.target + int(slot) * size for slot in target_slots]
        parts = [slice(i, i + _PAGES_PER_CALL) for i in range(0, workload.pages, _PAGES_PER_CALL)]
        sizes = [size] * workload.pages
        self.calls = [(sources[part], targets[part], sizes[part]) for part in parts]

    def transfer(self) -> None:
        for sources, targets, sizes in self.calls:
            status = self.engine.batch_transfer_sync_write(self.peer, sources, targets, sizes)
            _check(status, "batch_transfer_sync_write")

    def ping(self, face: Face, iterations: int, pause_us: int) -> list[float]:
        return ping_pong(self._write, self._await_notice, iterations, pause_us)

    def pong(self, face: Face, iterations: int) -> None:
        for _ in range(iterations):
            self._await_notice()
            self._write()

    def _write(self) -> None:
        notice = self.library.TransferNotify("landed", "landed")
        status = self.engine.transfer_sync(
            self.peer,
            self.pool.address,
            self.target,
            LATENCY_BYTES,
            self.library.TransferOpcode.Write,
            notice,
        )
        _check(status, "transfer_sync")

    def _await_notice(self) -> None:
        while not self.engine.get_notifies():
            pass


def _check(status: int, call: str) -> None:
    if status != 0:
        raise RuntimeError(f"Mooncake: {call} returned {status}")
