"""SeedingWorker: a worker's part in seeding another engine.

It writes the contents of its arena there, as a trainer's rank would. It has its own thread, transfer engine
and links, so that its engine keeps serving.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.mapping.coverage import not_loaded
from kv_connector.weights.mapping.geometry import Geometry, Tensor
from kv_connector.weights.memory.arena import Arena
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import ArenaSource
from kv_connector.weights.update import PushError, Update
from kv_connector.weights.wire.links import LinkError, questions
from kv_connector.weights.wire.messages import Describe, Described, Seed

logger = logging.getLogger("kv_connector")

# Limit for the other engine's pause, in seconds. A trainer waits as long by default.
_APPLIED_S = 60.0


@dataclass(frozen=True)
class Lender:
    """The facts of a worker that seeds others."""

    name: str
    arena: Arena
    tensors: tuple[Tensor, ...]  # for which the arena was made
    workers: tuple[Address, ...]  # of its engine, by rank
    rank: int
    providers: tuple[str, ...]
    data_host: str
    key: ClusterKey | None
    timeouts: Timeouts
    nics: tuple[str, ...]


class SeedingWorker:
    """One seeding. Call start() once. Any thread may call cancel() and join()."""

    def __init__(
        self,
        lender: Lender,
        seed: Seed,
        lend: Callable[[], str],
        give_back: Callable[[], None],
        done: Callable[[str], None],
    ) -> None:
        """``lend``: lends the arena, so that it is not written until ``give_back``. Returns the reason if it
        cannot be lent. ``done``: receives the reason why the other engine does not serve the version, or "".

        All three are called on this seeder's thread.
        """
        self._lender, self._seed = lender, seed
        self._lend, self._give_back, self._done = lend, give_back, done
        self._to = Address(seed.engine.host, seed.engine.port)
        self._pusher: WeightPusher | None = None
        self._cancelled = ""
        self._thread = threading.Thread(target=self._run, name="kvc-weights-seed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self, reason: str) -> None:
        """Ends the seeding soon. Does not block."""
        self._cancelled = reason
        if (pusher := self._pusher) is not None:
            # Fences may take a while.
            threading.Thread(target=pusher.cancel, args=[reason], name="kvc-weights-cancel").start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        name, version = self._lender.name, shown(self._seed.version)
        began, problem = time.monotonic(), ""
        try:
            nbytes = self._send()
            took = (time.monotonic() - began) * 1e3
            logger.info(
                "%s: seeded %s with version %s, %.2f GB in %.0f ms",
                name,
                self._to,
                version,
                nbytes / 1e9,
                took,
            )
        except (PushError, LinkError, ValueError, OSError, torch.OutOfMemoryError) as error:
            problem = str(error)
        except Exception as error:
            logger.exception("%s: seeding %s failed", name, self._to)
            problem = f"{type(error).__name__}: {error}"
        if problem:
            logger.warning("%s: did not seed %s with version %s: %s", name, self._to, version, problem)
        self._done(problem)

    def _send(self) -> int:
        """Seeds the other engine. Returns the bytes that were written."""
        lender = self._lender
        if lender.arena.device.type == "cuda":
            torch.cuda.set_device(lender.arena.device)
        geometries = self._geometries()
        source = ArenaSource(lender.arena, lender.tensors, lender.rank, self._seed.run, geometries)
        with WeightPusher(
            source,
            [str(self._to)],
            key=lender.key,
            providers=lender.providers,
            data_host=lender.data_host,
            timeouts=lender.timeouts,
            name=f"seeder-{lender.workers[0]}",
            partial=[tensor.name for tensor, _ in not_loaded(lender.tensors, geometries)],
            seeds=True,
            nics=lender.nics,
        ) as self._pusher:
            if self._cancelled:
                raise PushError(self._cancelled)
            self._pusher.connect()
            update = self._push(self._pusher)
            update.wait("applied", _APPLIED_S)
            return sum(part.nbytes for part in self._pusher.parts())

    def _push(self, pusher: WeightPusher) -> Update:
        """Pushes while the arena is lent, for ``timeouts.orphan`` at most.

        A trainer that begins a version meanwhile waits as long for an answer.
        """
        limit = self._lender.timeouts.orphan
        if refusal := self._lend():
            raise PushError(refusal)
        deadline = threading.Timer(limit, self.cancel, [f"the version was not written within {limit:g} s"])
        deadline.start()
        try:
            return pusher.push(self._seed.version)
        finally:
            deadline.cancel()
            self._give_back()

    def _geometries(self) -> Sequence[Geometry]:
        """Returns what all workers of this engine load, by rank.

        Each worker needs it to know what the others hold.
        """
        lender = self._lender
        with questions(lender.key, lender.timeouts) as links:
            asked = [
                (link := links.dial(worker), links.ask(link, Describe(lender.tensors)))
                for worker in lender.workers
            ]
            found = []
            for link, answer in asked:
                described = links.wait(answer, link, lender.timeouts.connect)
                assert isinstance(described, Described)
                found.append(described.geometry)
            return found
