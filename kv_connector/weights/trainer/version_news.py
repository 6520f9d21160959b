"""VersionNews: handles the engines' messages about a trainer's version."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class _Followed:
    """A version and its news. The next version has its own object, so late news cannot count for it."""

    update: Update
    carriers: dict[Link, str] = field(default_factory=dict)
    """Links over which the version was begun, with their engines. Other links do not concern it."""
    ready: set[TargetWorker] = field(default_factory=set)
    applied: set[TargetWorker] = field(default_factory=set)
    landed: set[str] = field(default_factory=set)
    """Engines that have all of the version and were not requested to apply it yet."""
    requested: set[str] = field(default_factory=set)
    """Engines that were requested to apply the version."""
    answered: set[str] = field(default_factory=set)
    """Engines whose controller has said whether it applied the version."""
    asked: bool = False
    """Whether VersionNews has called ``apply``."""
    begun: queue.SimpleQueue[WorkerNews] = field(default_factory=queue.SimpleQueue)


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
        self._followed: _Followed | None = None
        """Each call reads it once: the thread of push() replaces it meanwhile."""
        self._asking = threading.Lock()
        self.links = Links(key, timeouts, self.heard, self.lost)

    def begin(self, update: Update | None) -> None:
        """Follows this version from now on. None: it follows none."""
        self._followed = None if update is None else _Followed(update)

    @property
    def begun(self) -> queue.SimpleQueue[WorkerNews]:
        """The news that push() waits for. Call begin() with the version first."""
        assert self._followed is not None
        return self._followed.begun

    def carry(self, link: Link, engine: TargetEngine) -> None:
        """From now on the link's loss fails the engine's part of the version. Raises LinkError."""
        assert self._followed is not None
        self._followed.carriers[link] = str(engine.address)
        if link.over:  # lost() may have run before
            raise LinkError(f"{link.address}: {link.over}")

    def heard(self, link: Link, news: News) -> None:
        """Handles news from a worker or a controller."""
        of = self._followed
        if of is None or news.version != of.update.identity:
            return
        for engine in list(self._engines):  # push() may replace them meanwhile
            name = str(engine.address)
            if link is engine.link and isinstance(news, Applied):
                of.update.pause_seconds[name] = news.pause_seconds
                of.update.reached(name, "applied")
                of.answered.add(name)
            elif link is engine.link and isinstance(news, NotApplied):
                of.update.failed(name, news.reason)
                self._fail_later(of, name)
                of.answered.add(name)
            else:
                self._from_worker(of, engine, link, news)
        self._request_applying(of)

    def _from_worker(self, of: _Followed, engine: TargetEngine, link: Link, news: News) -> None:
        name = str(engine.address)
        mine = [worker for worker in engine.workers if worker.link is not None]  # push() may replace them
        sender = next((worker for worker in mine if worker.link is link), None)
        if sender is None or isinstance(news, Dropped):
            return  # a link ends with Dropped: lost() follows
        if isinstance(news, Begun):
            of.begun.put((sender, link, news))
            return
        reached = of.ready if isinstance(news, Ready) else of.applied
        reached.add(sender)
        if not reached.issuperset(mine):
            return
        if isinstance(news, Applied):
            # If the controller applies the version, rank 0 waits for the controller's news, sent when the
            # engine has resumed.
            if self._rank != 0 or self._apply is not None:
                of.update.reached(name, "applied")
            return
        if all(len(worker.rounds) == 1 for worker in mine):
            of.update.reached(name, "landed")
        if self._apply is not None:
            self._apply_once(of)
        elif self._rank == 0:
            of.landed.add(name)

    def request_applying(self) -> None:
        """Requests the engines that have the whole version to apply it. Any thread may call it.

        If engines take turns, an engine waits until those before it have applied the version or are gone.
        """
        self._request_applying(self._followed)

    def _request_applying(self, of: _Followed | None) -> None:
        if of is None or not of.landed:
            return
        for engine in list(self._engines):  # push() may replace them meanwhile
            name = str(engine.address)
            landed = _taken(of.landed, name)
            # An engine that was lost while it waited keeps its version, as the trainer says.
            waited_in_vain = self._in_turn and of.update.ended(name)
            if landed and engine.link is not None and not waited_in_vain:
                of.requested.add(name)
                self.links.tell(engine.link, Apply(of.update.identity))
            if self._in_turn and not self._had_turn(of, engine):
                return

    def _had_turn(self, of: _Followed, engine: TargetEngine) -> bool:
        """Returns whether the engine will not begin to apply the version, and does not do so now. The loss of
        a worker's link fails the update, but the engine goes on."""
        name = str(engine.address)
        if name not in of.requested:
            return of.update.ended(name)
        return name in of.answered or engine.link is None or bool(engine.link.over)

    def _fail_later(self, of: _Followed, engine: str) -> None:
        """If engines take turns: those after an engine that keeps its version keep theirs. A pair of engines
        needs one version."""
        names = [str(one.address) for one in self._engines]
        for later in names[names.index(engine) + 1 :] if self._in_turn else ():
            if later not in of.requested:
                of.landed.discard(later)
                of.update.failed(later, f"not requested to apply it: {engine}, which is before it, has not")

    def _apply_once(self, of: _Followed | None) -> None:
        """Applies the version once all remaining workers are ready. Any thread may call it.

        The callers are the links' thread and the threads of push() and cancel().
        """
        if self._apply is None or self._rank != 0 or of is None:
            return
        left = [
            worker for worker in workers_of(self._engines) if worker.link is not None and not worker.link.over
        ]
        if not left or not of.ready.issuperset(left):
            return
        with self._asking:
            if of.asked:
                return
            of.asked = True
        self._apply(of.update.identity)

    def lost(self, link: Link, reason: str) -> None:
        """Handles the end of a link. Any thread may call it."""
        of = self._followed
        for engine in list(self._engines):
            if link is engine.link or any(worker.link is link for worker in engine.workers):
                logger.warning("%s: lost %s: %s", self._name, link.address, reason)
        if of is not None and link in of.carriers:
            of.update.failed(of.carriers[link], f"{link.address}: {reason}")
        for worker in list(workers_of(self._engines)):
            if worker.link is link:
                self._writer.fence(worker.peer)
                if of is not None:
                    of.begun.put((worker, link, None))
        self._apply_once(of)
        self._request_applying(of)


def _taken(names: set[str], name: str) -> bool:
    """Removes the name. Returns whether this thread was the one that removed it."""
    try:
        names.remove(name)
    except KeyError:
        return False
    return True
