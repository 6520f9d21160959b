"""Links that break and return while their peer has others: what the agent logs and counts."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent_pairs import transfer
from agent_setup import TIMES, AgentStage, stage, until

from kv_connector.agent.agent import Agent
from kv_connector.agent.reports.links import LinkWatch, PeerName
from kv_connector.engine import DomainConfig, EngineConfig, EngineStats, LostLink
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.protocol.wire.messages import Role

NAMES = {7: PeerName("decode/0", "verbs"), 8: PeerName("decode/1", "verbs")}
REASON = "PEER_DOWN in write_pages over verbs to decode: the cable is out"


class Links:
    """A transfer engine's lost links, as a test sets them."""

    def __init__(self) -> None:
        self.links: dict[tuple[int, int], LostLink] = {}
        self.lost = 0
        self.restored = 0
        self.calls = 0

    def lose(self, peer: int = 7, link: int = 1) -> None:
        before = self.links.get((peer, link))
        times = 1 if before is None else before.times_lost + 1
        self.links[peer, link] = LostLink(peer, link, 4, f"nic {link}", times, False, REASON)
        self.lost += 1

    def restore(self, peer: int = 7, link: int = 1) -> None:
        self.links[peer, link] = self.links[peer, link]._replace(up=True)
        self.restored += 1

    def stats(self) -> EngineStats:
        return replace(EngineStats(*[0] * 16), links_lost=self.lost, links_restored=self.restored)

    def lost_links(self) -> list[LostLink]:
        self.calls += 1
        return list(self.links.values())


@pytest.fixture
def tcp() -> Iterator[AgentStage]:
    with stage("tcp") as made:
        yield made


@pytest.fixture
def links() -> Links:
    return Links()


@pytest.fixture
def watch(links: Links) -> LinkWatch:
    return LinkWatch(links)


def lines(watch: LinkWatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level("INFO", "kv_connector"):
        watch.look(NAMES)
    return [record.message for record in caplog.records]


def test_link_watch_queries_no_links_before_one_is_lost(links: Links, watch: LinkWatch) -> None:
    watch.look(NAMES)
    assert links.calls == watch.lost == watch.out == 0


def test_link_watch_logs_a_loss_and_a_return_once(
    links: Links, watch: LinkWatch, caplog: pytest.LogCaptureFixture
) -> None:
    links.lose(link=1)
    links.lose(link=2)
    assert lines(watch, caplog) == [
        f"LINK LOST: peer decode/0, lane verbs: 2 of 4 links are out: nic 1: {REASON}; nic 2: {REASON}"
    ]
    assert (watch.lost, watch.restored, watch.out) == (2, 0, 2)
    assert lines(watch, caplog) == []
    links.restore(link=2)
    assert lines(watch, caplog) == [
        "LINK RESTORED: peer decode/0, lane verbs: nic 2: 1 of 4 links are still out"
    ]
    links.restore(link=1)
    assert lines(watch, caplog) == ["LINK RESTORED: peer decode/0, lane verbs: nic 1: all 4 are up"]
    assert (watch.lost, watch.restored, watch.out) == (2, 2, 0)
    assert lines(watch, caplog) == []


def test_link_watch_logs_one_line_for_a_link_that_returns_between_two_looks(
    links: Links, watch: LinkWatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        links.lose()
        links.restore()
    assert lines(watch, caplog) == [
        f"LINK LOST: peer decode/0, lane verbs: all links are up again: nic 1: {REASON}"
    ]
    assert lines(watch, caplog) == []


def test_link_watch_counts_no_link_of_a_peer_that_is_gone(
    links: Links, watch: LinkWatch, caplog: pytest.LogCaptureFixture
) -> None:
    links.lose(peer=7)
    links.lose(peer=8)
    assert len(lines(watch, caplog)) == 2
    links.links.clear()
    assert lines(watch, caplog) == []
    assert (watch.lost, watch.out) == (2, 0)


def test_link_watch_bounds_the_lines_when_a_nic_dies(
    links: Links, watch: LinkWatch, caplog: pytest.LogCaptureFixture
) -> None:
    for peer in range(100):
        links.lose(peer)
    found = lines(watch, caplog)
    assert len(found) == 9
    assert found[-1] == "LINK LOST or RESTORED: links of 92 more peers changed as well"
    assert watch.out == 100


def test_agent_names_the_peer_that_lost_a_link_and_counts_it(
    tcp: AgentStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kv_connector.agent.loop.effects.SLOW_S", 0.1)
    caplog.set_level("INFO", "kv_connector")
    times = replace(TIMES, heartbeat=0.05)
    nics = (DomainConfig("tcp", address="127.0.0.1"),) * 2
    engines = [TransferEngine(EngineConfig(name, nics)) for name in ("prefill", "decode")]
    prefill = tcp.side(Role.PREFILL, "prefill", timeouts=times, engine=engines[0])
    decode = tcp.side(Role.DECODE, "decode", timeouts=times, engine=engines[1])
    transfer(prefill, decode)
    until(lambda: [engine.stats().links for engine in engines] == [2, 2], "the second link")
    assert "LINK LOST" not in caplog.text
    _cut(int(engines[0].domains()[1].rpartition(":")[2]), int(engines[1].domains()[1].rpartition(":")[2]))
    for side, peer in ((prefill, "decode/0"), (decode, "prefill/0")):
        lost_and_restored(side.agent, peer, caplog)
    transfer(prefill, decode, "again")


def lost_and_restored(agent: Agent, peer: str, caplog: pytest.LogCaptureFixture) -> None:
    until(lambda: agent.stats().links_lost == 1, "the lost link")
    until(lambda: f"LINK LOST: peer {peer}" in caplog.text)
    until(lambda: agent.stats().links_restored == 1, "the restored link")
    until(lambda: agent.live().links_out == 0)


def _cut(*ports: int) -> None:
    """Shuts down one connection of this process with one of these ports."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:  # no socket, or closed meanwhile
            continue
        with connection:
            try:
                found = {connection.getsockname()[1], connection.getpeername()[1]} & {*ports}
            except (OSError, IndexError):  # not connected, or another kind of socket
                continue
            if found:
                connection.shutdown(socket.SHUT_RDWR)
                return
    raise AssertionError(f"no connection with a port of {ports}")
