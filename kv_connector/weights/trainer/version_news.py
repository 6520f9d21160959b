"""VersionNews: handles the engines' messages about a trainer's version."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.trainer.joining import TargetEngine, TargetWorker, workers_of
from kv_connector.weights.trainer.writer import Writer
from kv_connector.weights.update import Update
from kv_connector.weights.wire.links import Link, LinkError, Links, News
from kv_connector.weights.wire.messages import Applied, Apply, Begun, Dropped, NotApplied, Ready

logger = logging.getLogger("kv_connector")

WorkerNews = tuple[TargetWorker, Link | None, Begun | None]
"""A worker, its link, and the round that it has begun. None in the last place: the worker is lost."""


class VersionNews:
    """Follows the last version that one rank has begun. The links' thread calls heard() and lost()."""

    def __init__(
        self,
        rank: int,
        engines: Sequence[TargetEngine],
        writer: Writer,
        key: ClusterKey | None,
        timeouts: Timeouts,
        name: str,
        apply: Callable[[str], None] | None,
        in_turn: bool,
    ) -> None:
        """Opens the links. ``apply``, ``in_turn``: the arguments of WeightPusher."""
        self._rank = rank
        self._engines = engines
        self._writer = writer
        self._name = name
        self._apply = apply
        self._in_turn = in_turn
        self._update: Update | None = None
        self._carriers: set[Link] = set()
        """Links over which the last version was begun. The loss of an earlier link does not concern it."""
        self._asked_for: Update | None = None
        self._asking = threading.Lock()
        self._ready: set[int] = set()
        self._applied: set[int] = set()
        self._landed: dict[str, str] = {}
        """The version's identity, by engine that has all of it and was not requested to apply it yet."""
        self._requested: set[str] = set()
        """Engines that were requested to apply the version."""
        self._answered: set[str] = set()
        """Engines whose controller has said whether it applied the version."""
        self.begun: queue.SimpleQueue[WorkerNews] = queue.SimpleQueue()
        """The news that push() waits for."""
        self.links = Links(key, timeouts, self.heard, self.lost)

    def begin(self, update: Update | None) -> None:
        """Follows this version from now on. None: it follows none."""
        self._ready, self._applied, self.begun = set(), set(), queue.SimpleQueue()
        self._carriers, self._landed = set(), {}
        self._requested, self._answered = set(), set()
        self._update = update

    def carry(self, link: Link) -> None:
        """From now on the link's loss fails its engine's part of the version. Raises LinkError."""
        self._carriers.add(link)
        if link.over:  # lost() may have run before
            raise LinkError(f"{link.address}: {link.over}")

    def heard(self, link: Link, news: News) -> None:
        """Handles news from a worker or a controller."""
        update = self._update
        if update is None or news.version != update.identity:
            return
        for engine in list(self._engines):  # push() may replace them meanwhile
            name = str(engine.address)
            if link is engine.link and isinstance(news, Applied):
                update.pause_seconds[name] = news.pause_seconds
                update.reached(name, "applied")
                self._answered.add(name)
            elif link is engine.link and isinstance(news, NotApplied):
                update.failed(name, news.reason)
                self._fail_later(update, name)
                self._answered.add(name)
            elif any(worker.link is link for worker in engine.workers):
                self._from_worker(update, engine, link, news)
        self.request_applying()

    def _from_worker(self, update: Update, engine: TargetEngine, link: Link, news: News) -> None:
        name = str(engine.address)
        if isinstance(news, Dropped):
            return  # the link ends with it: lost() follows
        mine = [worker for worker in engine.workers if worker.link is not None]
        if isinstance(news, Begun):
            for worker in mine:
                if worker.link is link:
                    self.begun.put((worker, link, news))
            return
        reached = self._ready if isinstance(news, Ready) else self._applied
        reached |= {worker.number for worker in mine if worker.link is link}
        if not all(worker.number in reached for worker in mine):
            return
        if isinstance(news, Applied):
            # If the controller applies the version, rank 0 waits for the controller's news, sent when the
            # engine has resumed.
            if self._rank != 0 or self._apply is not None:
                update.reached(name, "applied")
            return
        if all(len(worker.rounds) == 1 for worker in mine):
            update.reached(name, "landed")
        if self._apply is not None:
            self._apply_once()
        elif self._rank == 0:
            self._landed[name] = update.identity

    def request_applying(self) -> None:
        """Requests the engines that have the whole version to apply it. Any thread may call it.

        If engines take turns, an engine waits until those before it have applied the version or are gone.
        """
        update = self._update
        if update is None or not self._landed:
            return
        for engine in list(self._engines):  # push() may replace them meanwhile
            name = str(engine.address)
            version = self._landed.pop(name, None)
            # An engine that was lost while it waited keeps its version, as the trainer says.
            waited_in_vain = self._in_turn and update.ended(name)
            if version is not None and engine.link is not None and not waited_in_vain:
                self._requested.add(name)
                self.links.tell(engine.link, Apply(version))
            if self._in_turn and not self._had_turn(update, engine):
                return

    def _had_turn(self, update: Update, engine: TargetEngine) -> bool:
        """Returns whether the engine will not begin to apply the version, and does not do so now. The loss of
        a worker's link fails the update, but the engine goes on."""
        name = str(engine.address)
        if name not in self._requested:
            return update.ended(name)
        return name in self._answered or engine.link is None or bool(engine.link.over)

    def _fail_later(self, update: Update, engine: str) -> None:
        """If engines take turns: those after an engine that keeps its version keep theirs. A pair of engines
        needs one version."""
        names = [str(one.address) for one in self._engines]
        for later in names[names.index(engine) + 1 :] if self._in_turn else ():
            if later not in self._requested:
                self._landed.pop(later, None)
                update.failed(later, f"not requested to apply it: {engine}, which is before it, has not")

    def _apply_once(self) -> None:
        """Applies the version once all remaining workers are ready. Any thread may call it.

        The callers are the links' thread and the threads of push() and cancel().
        """
        update = self._update
        if self._apply is None or self._rank != 0 or update is None:
            return
        left = [
            worker for worker in workers_of(self._engines) if worker.link is not None and not worker.link.over
        ]
        if not left or any(worker.number not in self._ready for worker in left):
            return
        with self._asking:
            if update is self._asked_for:
                return
            self._asked_for = update
        self._apply(update.identity)

    def lost(self, link: Link, reason: str) -> None:
        """Handles the end of a link. Any thread may call it."""
        for engine in list(self._engines):
            if link is engine.link or any(worker.link is link for worker in engine.workers):
                logger.warning("%s: lost %s: %s", self._name, link.address, reason)
                if self._update is not None and link in self._carriers:
                    self._update.failed(str(engine.address), f"{link.address}: {reason}")
        for worker in list(workers_of(self._engines)):
            if worker.link is link:
                self._writer.fence(worker.peer)
                self.begun.put((worker, link, None))
        self._apply_once()
        self.request_applying()
