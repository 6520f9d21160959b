"""Links: the answers to a trainer's questions, news, and the connections that end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from weight_worker import FakeWorker

from kv_connector.protocol.actions import Source
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.wire.links import Link, LinkError, Links, News, questions
from kv_connector.weights.wire.messages import (
    Applied,
    Ask,
    Dropped,
    Leave,
    Ping,
    Ready,
    Refused,
    State,
    WeightMessage,
)

PATIENCE_S = 60.0
# Of a peer that answers no PING.
IMPATIENT = replace(Timeouts(), heartbeat=0.05, dead=0.2)


class Worker(FakeWorker):
    """The other end of a connection. It answers what `answer` says and keeps the messages that it got."""

    def __init__(self) -> None:
        self.answer: Callable[[WeightMessage], WeightMessage | None] = lambda _: None
        self._trainer: Source
        super().__init__()

    def take(self, source: Source, message: WeightMessage | None) -> WeightMessage | None:
        self._trainer = source
        self.got.put(message)
        return None if message is None else self.answer(message)

    def say(self, message: WeightMessage) -> None:
        """Sends it to whoever sent the last message."""
        self.loop.call(lambda: self.loop.sockets.send(self._trainer, message)).result(PATIENCE_S)


class Site:
    """A trainer's links to one worker, what they heard, and why they lost it."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.worker = Worker()
        self.heard: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.links = Links(
            None,
            timeouts,
            heard=lambda _, news: self.heard.put(news),
            lost=lambda _, reason: self.lost.put(reason),
        )
        self.link = self.links.dial(self.worker.address)

    def ask(self, link: Link | None = None) -> WeightMessage:
        link = link or self.link
        return self.links.wait(self.links.ask(link, Ask()), link, PATIENCE_S)

    def connect(self) -> None:
        """Has the worker learn of the connection."""
        self.worker.answer = lambda _: State("")
        self.ask()
        self.worker.answer = lambda _: None

    def close(self) -> None:
        self.links.close()
        self.worker.close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site(Timeouts())
    yield made
    made.close()


@pytest.fixture
def impatient() -> Iterator[Site]:
    made = Site(IMPATIENT)
    yield made
    made.close()


def test_question_gets_its_answer(site: Site) -> None:
    site.worker.answer = lambda message: State("v1") if isinstance(message, Ask) else None
    assert site.ask() == State("v1")
    assert site.ask() == State("v1")


def test_refusal_is_an_error_that_names_the_worker_and_the_link_stays(site: Site) -> None:
    site.worker.answer = lambda _: Refused("not now")
    with pytest.raises(LinkError, match=rf"{site.worker.address}: not now"):
        site.ask()
    site.worker.answer = lambda _: State("v1")
    assert site.ask() == State("v1")


def test_worker_that_does_not_answer_in_time_is_given_up(site: Site) -> None:
    site.connect()
    assert site.worker.got.get(timeout=PATIENCE_S) == Ask()
    with pytest.raises(LinkError, match="no answer within"):
        site.links.wait(site.links.ask(site.link, Ask()), site.link, 0.05)
    with pytest.raises(LinkError, match="no answer within"):
        site.ask()
    assert site.worker.got.get(timeout=PATIENCE_S) == Ask()
    assert isinstance(site.worker.got.get(timeout=PATIENCE_S), Leave)


def test_news_arrives_while_a_question_is_open(site: Site) -> None:
    site.connect()
    answer = site.links.ask(site.link, Ask())
    site.worker.say(Ready("v1"))
    assert site.heard.get(timeout=PATIENCE_S) == Ready("v1")
    assert not answer.done()
    site.worker.say(State("v1"))
    assert site.links.wait(answer, site.link, PATIENCE_S) == State("v1")


def test_dropped_version_is_received_and_ends_the_link(site: Site) -> None:
    site.connect()
    site.worker.say(Dropped("v1", "no room"))
    assert site.heard.get(timeout=PATIENCE_S) == Dropped("v1", "no room")
    assert "no room" in site.lost.get(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "message", [Leave("restart"), Refused("restart")], ids=lambda one: type(one).__name__
)
def test_worker_that_leaves_ends_the_question_too(site: Site, message: WeightMessage) -> None:
    site.connect()
    if isinstance(message, Leave):
        answer = site.links.ask(site.link, Ask())
        site.worker.say(message)
        with pytest.raises(LinkError, match="restart"):
            answer.result(PATIENCE_S)
    else:
        site.worker.say(message)
    assert site.lost.get(timeout=PATIENCE_S) == "restart"
    with pytest.raises(LinkError, match="restart"):
        site.ask()


def test_watched_worker_that_falls_silent_is_lost(impatient: Site) -> None:
    impatient.connect()
    impatient.links.watch(impatient.link, sends=True)
    assert "silent" in impatient.lost.get(timeout=PATIENCE_S)
    assert impatient.worker.got.get(timeout=PATIENCE_S) == Ask()
    assert impatient.worker.got.get(timeout=PATIENCE_S) == Ping(sender=True)


def test_worker_that_is_not_watched_may_be_silent(impatient: Site) -> None:
    other = impatient.links.dial(impatient.worker.address)
    impatient.connect()
    impatient.links.watch(other)
    assert "silent" in impatient.lost.get(timeout=PATIENCE_S)
    impatient.worker.answer = lambda _: Applied("v1")
    impatient.links.tell(impatient.link, Ask())
    assert impatient.heard.get(timeout=PATIENCE_S) == Applied("v1")


def test_links_that_are_closed_take_leave_and_may_be_ended_again() -> None:
    worker = Worker()
    try:
        with questions(None) as links:
            link = links.dial(worker.address)
            links.tell(link, Ask())
            assert worker.got.get(timeout=PATIENCE_S) == Ask()
        assert isinstance(worker.got.get(timeout=PATIENCE_S), Leave)
        assert link.over
        links.end(link, "again")
    finally:
        worker.close()
