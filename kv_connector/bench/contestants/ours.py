"""Our TransferEngine over one lane: batches from Python, single writes and latency without Python."""

from multiprocessing.connection import Connection

from kv_connector import _bench
from kv_connector.bench.bench_memory import BenchMemory
from kv_connector.bench.contestant import ContestantSide, Face, SideRole
from kv_connector.bench.contestants.python_loop import ping_pong
from kv_connector.bench.lane import Lane
from kv_connector.bench.workloads import LATENCY_BYTES, PageWorkload, Slots
from kv_connector.engine import EngineConfig, EventKind, PagedWrite, Pages
from kv_connector.engine.transfer_engine import TransferEngine

# Seconds after which an answer counts as lost.
_PATIENCE = 30.0

_NATIVE_FACES = {
    Face.WORKER: _bench.EnginePingPong.Face.WORKER,
    Face.THREAD: _bench.EnginePingPong.Face.THREAD,
}


class EngineSide(ContestantSide):
    """One transfer engine over one lane, with default settings. All its writes are counted."""

    faces = (Face.WORKER, Face.THREAD, Face.PYTHON)

    def __init__(self, role: SideRole, pool: BenchMemory, *, lane: Lane) -> None:
        super().__init__(role, pool)
        self.lane = lane
        self.config = EngineConfig(name=role, domains=lane.domains(role))
        self.engine = TransferEngine(self.config)
        self.region = self.engine.register_memory(pool.address, pool.size, pool.memfd)
        self.counter = self.engine.alloc_counters(1)
        self.added: list[int] = []  # peers that were added and not written to

    def connect(self, peer: Connection) -> None:
        self.control = peer
        self.peer = self._shake_hands()
        peer.send((self.engine.region_descriptor(self.region), self.counter.immediates[0]))
        self.descriptor, self.immediate = peer.recv()
        self.target = self.engine.import_region(self.peer, self.descriptor)

    def describe(self) -> list[str]:
        return self.engine.domains()

    def add_peers(self, count: int) -> None:
        self.added += [self._shake_hands() for _ in range(count)]

    def write_to_peers(self) -> None:
        transfers = []
        while self.added:
            peer = self.added.pop()
            target = self.engine.import_region(peer, self.descriptor)
            transfers.append(
                self.engine.write_one(peer, self.region, 0, target, 0, LATENCY_BYTES, self.immediate)
            )
        for transfer in transfers:
            self._wait(transfer)

    def _shake_hands(self) -> int:
        """Connects the two sides; the other side calls this too. Returns the other side's id here."""
        if self.role is SideRole.INITIATOR:
            offer = self.engine.offer(SideRole.TARGET)
            self.control.send(offer.data)
            self.engine.complete(offer.peer, self.control.recv())
            return offer.peer
        answer = self.engine.accept(SideRole.INITIATOR, self.control.recv())
        self.control.send(answer.data)
        return answer.peer

    def prepare(self, workload: PageWorkload, source_slots: Slots, target_slots: Slots) -> None:
        self.batch = PagedWrite(
            page_bytes=workload.page_bytes,
            source=self.region,
            source_pages=Pages(source_slots, stride=workload.page_bytes),
            target=self.target,
            target_pages=Pages(target_slots, stride=workload.page_bytes),
            immediate=self.immediate,
        )

    def transfer(self) -> None:
        transfer = self.engine.open_transfer(self.peer)
        self.engine.write_pages(transfer, self.batch)
        self.engine.seal(transfer)
        self._wait(transfer)

    def _wait(self, transfer: int) -> None:
        event = self.engine.wait_transfer(transfer, _PATIENCE)
        if event.kind is not EventKind.TRANSFER_DONE:
            raise RuntimeError(f"the transfer ended as {event.kind.name}: {event.error}")

    def ping(self, face: Face, iterations: int, pause_us: int) -> list[float]:
        if face is not Face.PYTHON:
            native, immediates = self._native_ping_pong(iterations)
            halves = native.ping(_NATIVE_FACES[face], immediates, LATENCY_BYTES, pause_us)
            self.control.recv()  # the other side still waits for our acknowledgement of its last answer
            return halves
        loop = _PythonLoop(self, iterations)
        return ping_pong(loop.write, loop.wait, iterations, pause_us)

    def pong(self, face: Face, iterations: int) -> None:
        if face is not Face.PYTHON:
            native, immediates = self._native_ping_pong(iterations)
            native.pong(_NATIVE_FACES[face], immediates, LATENCY_BYTES)
            self.control.send("all acknowledged")
            return
        loop = _PythonLoop(self, iterations)
        for _ in range(iterations):
            loop.wait()
            loop.write()

    def prepare_singles(self) -> None:
        # All writes count on one counter, because no thread waits for it.
        self.single, (self.single_immediate,) = self._native_ping_pong(1)

    def singles(self, nbytes: int, iterations: int) -> list[float]:
        return self.single.singles(nbytes, iterations, self.single_immediate)

    def _native_ping_pong(self, iterations: int) -> tuple[_bench.EnginePingPong, list[int]]:
        """Opens and connects a transfer engine for this measurement.

        Returns it and the other side's immediates.
        """
        native = _bench.EnginePingPong(
            self.lane.native_domains(self.role),
            self.config.spin_us,
            self.pool.address,
            self.pool.size,
            self.pool.memfd,
        )
        if self.role is SideRole.INITIATOR:
            self.control.send(native.offer())
            native.complete(self.control.recv())
        else:
            self.control.send(native.accept(self.control.recv()))
        self.control.send((native.descriptor(), native.prepare(iterations)))
        descriptor, immediates = self.control.recv()
        native.import_region(descriptor)
        return native, immediates


class _PythonLoop:
    """The writes and waits of one measurement: one counter each, all allocated beforehand."""

    def __init__(self, side: EngineSide, iterations: int) -> None:
        self.side = side
        self.engine = side.engine
        counters = [self.engine.alloc_counters(1) for _ in range(iterations)]
        for counter in counters:
            self.engine.expect(counter.id, [1])
        side.control.send([counter.immediates[0] for counter in counters])
        self.immediates = iter(side.control.recv())
        self.counters = iter(counters)

    def write(self) -> None:
        side = self.side
        self.engine.write_one(side.peer, side.region, 0, side.target, 0, LATENCY_BYTES, next(self.immediates))

    def wait(self) -> None:
        counter = next(self.counters).id
        self.engine.wait_counters(counter, _PATIENCE)
        self.engine.release_counters(counter)
