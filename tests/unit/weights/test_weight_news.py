"""News of one version that arrives while the trainer begins the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.trainer import version_news
from kv_connector.weights.trainer.joining import TargetEngine, TargetWorker
from kv_connector.weights.trainer.version_news import VersionNews
from kv_connector.weights.trainer.writer import Writer
from kv_connector.weights.update import PushError, Update
from kv_connector.weights.wire.links import Link, News
from kv_connector.weights.wire.messages import Applied, Apply, Begun, NotApplied, Ready, WeightMessage

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def link(port: int) -> Link:
    return Link(Address("127.0.0.1", port), str(port).encode(), 0.0)


class Site:
    """The news of two engines in turn. The first one has two workers, the second one has one."""

    def __init__(self) -> None:
        self.engines = [self._engine(5800, 2), self._engine(5900, 1)]
        self.names = [str(engine.address) for engine in self.engines]
        writer = cast("Writer", SimpleNamespace(fence=lambda peer: None))
        self.news = VersionNews(0, self.engines, writer, None, Timeouts(), "trainer/0", None, True)
        self.requested: list[tuple[Link, str]] = []
        self.news.links.tell = self._tell  # type: ignore[method-assign]

    def _engine(self, port: int, workers: int) -> TargetEngine:
        made = TargetEngine(Address("127.0.0.1", port), link(port))
        for other in range(port + 1, port + 1 + workers):
            made.workers.append(TargetWorker(Address("127.0.0.1", other), other, link(other), rounds=((),)))
        return made

    def _tell(self, link: Link, message: WeightMessage) -> None:
        assert isinstance(message, Apply)
        self.requested.append((link, message.version))

    def begin(self, version: str) -> Update:
        update = Update(version, self.names)
        self.news.begin(update)
        for engine in self.engines:
            for link in (engine.link, *(worker.link for worker in engine.workers)):
                assert link is not None
                self.news.carry(link, engine)
        return update

    def heard(self, of: TargetEngine | TargetWorker, news: News) -> None:
        assert of.link is not None
        self.news.heard(of.link, news)

    def land(self, version: str) -> None:
        for engine in self.engines:
            for worker in engine.workers:
                self.heard(worker, Ready(version))


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.news.links.close()


def test_next_version_begins_as_soon_as_the_previous_one_is_applied(site: Site) -> None:
    """The pusher goes on in the moment at which its wait() ends. The answer must not count as the next
    version's."""
    first, second = site.engines
    v1 = site.begin("v1")
    site.land("v1")
    v1._done["applied"][site.names[0]].add_done_callback(lambda _: site.begin("v2"))
    site.heard(first, Applied("v1", 0.1))
    site.requested.clear()
    site.land("v2")
    assert site.requested == [(first.link, "v2")]
    site.heard(first, Applied("v2", 0.1))
    assert site.requested == [(first.link, "v2"), (second.link, "v2")]


class Interruption:
    """Has the thread call ``action`` before its n-th line of version_news, as another thread might."""

    def __init__(self, line: int, action: Callable[[], object]) -> None:
        self._left, self._action = line, action
        self.happened = False

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> TraceFunction | None:
        return self._line if frame.f_code.co_filename == version_news.__file__ else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> TraceFunction:
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.happened = True
                sys.settrace(None)
                self._action()
        return self._line


def each_line(check: Callable[[int], bool]) -> None:
    """Calls ``check`` for an interruption before each line, until it returns that none happened."""
    line = 1
    while check(line):
        line += 1
    assert line > 3, "the interruptions missed the code"


def test_late_news_of_workers_changes_no_later_version() -> None:
    def check(line: int) -> bool:
        site = Site()
        try:
            first, second = site.engines
            site.begin("v1")
            site.heard(first.workers[0], Ready("v1"))
            interruption = Interruption(line, lambda: site.begin("v2"))
            with interruption:
                site.heard(first.workers[1], Ready("v1"))
                site.heard(second.workers[0], Begun("v1", 7))
            if not interruption.happened:
                return False
            assert site.news.begun.empty(), f"at line {line}"
            site.requested.clear()
            site.heard(first.workers[0], Ready("v2"))
            assert site.requested == [], f"at line {line}"
            site.heard(first.workers[1], Ready("v2"))
            assert site.requested == [(first.link, "v2")], f"at line {line}"
            return True
        finally:
            site.news.links.close()

    each_line(check)


def test_late_news_while_a_version_begins_changes_no_later_version() -> None:
    def check(line: int) -> bool:
        site = Site()
        try:
            first, second = site.engines
            site.begin("v1")
            site.heard(first.workers[0], Ready("v1"))

            def late() -> None:
                site.heard(first.workers[1], Ready("v1"))
                site.heard(second.workers[0], Begun("v1", 7))

            interruption = Interruption(line, late)
            with interruption:
                site.begin("v2")
            if not interruption.happened:
                return False
            assert site.news.begun.empty(), f"at line {line}"
            site.requested.clear()
            site.heard(first.workers[0], Ready("v2"))
            assert site.requested == [], f"at line {line}"
            return True
        finally:
            site.news.links.close()

    each_line(check)


@pytest.mark.parametrize("answer", [Applied("v1", 0.1), NotApplied("v1", "the cache is in use")])
def test_late_answer_of_an_engine_changes_no_later_version(answer: Applied | NotApplied) -> None:
    def check(line: int) -> bool:
        site = Site()
        try:
            first, second = site.engines
            site.begin("v1")
            site.land("v1")
            later: list[Update] = []
            interruption = Interruption(line, lambda: later.append(site.begin("v2")))
            with interruption:
                site.heard(first, answer)
            if not interruption.happened:
                return False
            site.requested.clear()
            site.land("v2")
            assert site.requested == [(first.link, "v2")], f"at line {line}"
            site.heard(first, Applied("v2", 0.1))
            site.heard(second, Applied("v2", 0.1))
            later[0].wait("applied", 0)
            return True
        finally:
            site.news.links.close()

    each_line(check)


def test_lost_link_fails_the_version_that_it_carried() -> None:
    """The next version has not begun over this link."""

    def check(line: int) -> bool:
        site = Site()
        try:
            first = site.engines[0]
            lost = first.workers[0].link
            assert lost is not None
            v1, later = site.begin("v1"), list[Update]()

            def begin() -> None:
                first.workers[0].link = link(5999)
                later.append(site.begin("v2"))

            interruption = Interruption(line, begin)
            with interruption:
                site.news.lost(lost, "cut by the test")
            if not interruption.happened:
                return False
            assert not later[0].ended(site.names[0]), f"at line {line}"
            if line > 1:  # else the version had begun before the loss
                with pytest.raises(PushError, match="cut by the test"):
                    v1.wait("landed", 0)
            return True
        finally:
            site.news.links.close()

    each_line(check)


def test_worker_that_leaves_meanwhile_completes_no_version() -> None:
    """The engine's workers are replaced by the push that follows."""

    def check(line: int) -> bool:
        site = Site()
        try:
            first = site.engines[0]
            v1 = site.begin("v1")

            def leave() -> None:
                first.workers = []

            interruption = Interruption(line, leave)
            with interruption:
                site.heard(first.workers[0], Ready("v1"))
            if not interruption.happened:
                return False
            assert not v1._done["landed"][site.names[0]].done(), f"at line {line}"
            assert site.requested == []
            return True
        finally:
            site.news.links.close()

    each_line(check)
