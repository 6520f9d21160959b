"""Engines without a model: workers, their controller and their weights, in this process or in one that is
killed."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.controller import Controller
from kv_connector.weights.mapping.geometry import Constant, Geometry, Parameter, Tensor, Write
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.trainer.writer import Target
from kv_connector.weights.wire.links import Links, questions
from kv_connector.weights.wire.messages import Ask, State
from kv_connector.weights.worker.receiver import NotLanded, ReceiverConfig, WeightReceiver

# Row counts that no number of ranks divides: engines pad them.
SIZES = {"up": (31, 20), "down": (20, 32), "norm": (3, 1)}
PADDED_ROWS = 32
DEAD_S = 2.0
# A loaded machine outruns none of these. A test that waits for a limit sets it once it waits for it.
PATIENT = Timeouts(connect=60.0, dead=60.0, heartbeat=0.5)


def drawn(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and values of all weights of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    for name, (rows, columns) in SIZES.items():
        yield name, torch.randn(rows, columns, generator=generator)


Load = Callable[[int, int, Sequence[Tensor]], Geometry]
"""Function that gives the geometry of a worker, by its rank and the number of ranks."""


def loads(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
    """Returns the geometry of a worker: rows of `up`, in bfloat16 and padded, columns of `down`, and all of
    `norm`."""
    number = {tensor.name: n for n, tensor in enumerate(tensors)}
    rows, columns = PADDED_ROWS // ranks, SIZES["up"][1]
    held = min(rows, SIZES["up"][0] - rank * rows)
    inner = SIZES["down"][1] // ranks
    padding = [Constant(0, (rows - held, columns), held * columns, (columns, 1), 0.5)] if held < rows else []
    return Geometry(
        (
            Parameter("up", "bfloat16", rows * columns, round=0),
            Parameter("down", "float32", SIZES["down"][0] * inner, round=1),
            Parameter("norm", "float32", SIZES["norm"][0], round=2),
        ),
        (
            Write(number["up"], 0, (rank * rows, 0), (held, columns), 0, (columns, 1)),
            Write(number["down"], 1, (0, rank * inner), (SIZES["down"][0], inner), 0, (inner, 1)),
            Write(number["norm"], 2, (0, 0), (SIZES["norm"][0], 1), 0, (1, 0)),
        ),
        tuple(padding),
    )


def loads_nothing(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
    """Returns the geometry of a worker that loads none of the tensors."""
    return Geometry((), (), ())


def expected(seed: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Returns the expected weights, by rank."""
    values = dict(drawn(seed))
    up = torch.full((PADDED_ROWS, SIZES["up"][1]), 0.5)
    up[: SIZES["up"][0]] = values["up"]
    return [
        {
            "up": up.bfloat16().chunk(ranks)[rank].flatten(),
            "down": values["down"].chunk(ranks, 1)[rank].flatten(),
            "norm": values["norm"].flatten(),
        }
        for rank in range(ranks)
    ]


class PausedModel:
    """A stand-in for the model that a controller pauses and changes. ``labels``: the reported versions.

    ``broken``: the reason for which workers reject a version. ``broken_worker``: the only worker that rejects
    it and holds half of the version; all others have it whole. ``no_pause``, ``no_label``: the reason for
    which these calls fail.
    """

    def __init__(self, workers: Sequence[WeightReceiver], ranks: int) -> None:
        self._workers, self._ranks = workers, ranks
        self._threads = ThreadPoolExecutor(len(workers))
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in workers]
        self.labels: list[str] = []
        self.paused = False
        self.broken = ""
        self.broken_worker: int | None = None
        self.no_pause = ""
        self.no_label = ""

    def _apply(self, rank: int, version: str) -> None:
        worker = self._workers[rank]
        problem = self.broken if self.broken_worker in (None, rank) else ""
        try:
            for contents in worker.take(version):
                self.weights[rank] |= {name: content.clone() for name, content in contents.items()}
        except NotLanded as error:
            problem = str(error)
        worker.finish(problem, torn=bool(problem))

    async def pause(self) -> None:
        if self.no_pause:
            raise RuntimeError(self.no_pause)
        self.paused = True

    async def update(self, version: str) -> None:
        def all_apply() -> None:
            list(self._threads.map(self._apply, range(len(self._workers)), [version] * len(self._workers)))

        await asyncio.to_thread(all_apply)

    async def label(self, version: str) -> None:
        if self.no_label:
            raise RuntimeError(self.no_label)
        self.labels.append(shown(version))

    async def resume(self) -> None:
        self.paused = False

    def serves(self, seed: int) -> bool:
        """Returns whether the engine serves the whole checkpoint of this seed."""
        wanted = expected(seed, self._ranks) * (len(self.weights) // self._ranks)
        return not self.paused and all(
            mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
            for mine, theirs in zip(self.weights, wanted, strict=True)
        )


class WeightEngine:
    """An engine. ``address``: of its controller. ``ports``: of the controller and the workers. ``replicas``:
    data-parallel ranks, whose workers know only the workers of their rank."""

    def __init__(
        self,
        ranks: int = 1,
        *,
        replicas: int = 1,
        streaming: bool = False,
        ports: Sequence[int] = (),
        key: ClusterKey | None = None,
        timeouts: Timeouts | None = None,
        idle: Sequence[int] = (),
        load: Load | None = None,
    ) -> None:
        """Starts the engine. ``idle``: workers that load nothing of a pushed version. ``load``: default
        ``loads``."""
        timeouts = timeouts or PATIENT
        self.port, *of_workers = ports or [*free_ports(1), *[0] * (ranks * replicas)]
        self.controlled: queue.SimpleQueue[tuple[int, Address]] = queue.SimpleQueue()
        """Workers that were given the address of the controller, and this address."""
        self.workers = [
            WeightReceiver(
                ReceiverConfig(
                    f"weights/{rank}",
                    Address("127.0.0.1", of_workers[rank]),
                    ("tcp",),
                    key=key,
                    timeouts=timeouts,
                    streaming=streaming,
                ),
                lambda tensors, rank=rank: (loads_nothing if rank in idle else load or loads)(  # type: ignore[misc]
                    rank % ranks, ranks, tensors
                ),
                controlled=lambda controller, rank=rank: self.controlled.put((rank, controller)),  # type: ignore[misc]
            )
            for rank in range(ranks * replicas)
        ]
        addresses = [worker.start() for worker in self.workers]
        for number, worker in enumerate(self.workers):
            first = number - number % ranks
            worker.set_workers(addresses[first : first + ranks])
        self.model = PausedModel(self.workers, ranks)
        self.address = Address("127.0.0.1", self.port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._controller = Controller(self.model, addresses[::ranks], key, timeouts=timeouts)
        self._call(self._controller.start(self.address))

    def _call(self, coroutine: object) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)  # type: ignore[arg-type]

    def state(self) -> State:
        """Returns the state that the controller reports."""
        with questions(None) as links:
            controller = links.dial(self.address)
            state = links.wait(links.ask(controller, Ask()), controller, links.timeouts.connect)
        assert isinstance(state, State)
        return state

    @property
    def served(self) -> list[str]:
        return [shown(worker.state().served) for worker in self.workers]

    @property
    def seeding(self) -> list[str]:
        return [worker.state().seeding for worker in self.workers]

    def close(self) -> None:
        self._controller.close()
        for worker in self.workers:
            worker.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _HeldTimer(threading.Timer):
    def __init__(
        self, held: threading.Event, interval: float, function: Callable[..., object], args: Sequence[object]
    ) -> None:
        super().__init__(interval, function, args)
        self._held = held

    def run(self) -> None:
        self._held.wait(self.interval)
        self.interval = 0.0
        super().run()


class WriterGate:
    """Stops writers in place of a slow network: ``begun`` is set when a write is held, which then waits for
    ``go``."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.pushers: list[WeightPusher] = []

    def timer(
        self, interval: float, function: Callable[..., object], args: Sequence[object]
    ) -> threading.Timer:
        """Returns a timer whose time is over once a write is held. It takes the place of threading.Timer."""
        return _HeldTimer(self.begun, interval, function, args)

    def pusher(self, *arguments: object, **named: object) -> WeightPusher:
        pusher = WeightPusher(*arguments, **named)  # type: ignore[arg-type]
        write, fence = pusher._writer.write, pusher._writer.fence

        def held(target: Target) -> None:
            self.begun.set()
            assert self.go.wait(60)
            write(target)

        def fenced(peer: int) -> None:
            self.go.set()  # no held write is waited for any more
            fence(peer)

        pusher._writer.write, pusher._writer.fence = held, fenced  # type: ignore[method-assign]
        self.pushers.append(pusher)
        return pusher


def notice_silence(links: Links) -> None:
    """From now on the links lose a peer that is silent for DEAD_S."""
    links.timeouts = replace(links.timeouts, dead=DEAD_S)


def main(told: Connection, ranks: int, holds: bool) -> None:
    """Runs an engine in a process that the test kills. ``holds``: it reports "begun" when it seeds, and then
    blocks."""
    gate = WriterGate()
    if holds:
        import kv_connector.weights.seeding.seeding_worker as seeder

        seeder.WeightPusher = gate.pusher  # type: ignore[assignment, misc]
    told.send(str(WeightEngine(ranks).address))
    gate.begun.wait()
    told.send("begun")
    threading.Event().wait()
