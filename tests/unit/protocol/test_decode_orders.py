"""Random orders of events at a decode engine: every transition is legal, and every request is reported once.

A walk models the surroundings of the machine: the agent's queue of actions, sessions, counters and fences.
The prefill engines are hostile: a message names any attempt, over any session, in any phase.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from protocol_setup import P_ADDRESS, decode_request, layout, worker

from kv_connector.protocol.actions import (
    Address,
    CloseCounter,
    Dial,
    Fence,
    FindEngine,
    FinishedReceiving,
    OpenCounter,
    Send,
)
from kv_connector.protocol.decode.decode_machine import DecodeAction, DecodeMachine
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import Cancel, CancelAck, Fail, FailCode, Reserve, Sampled

PAGES = layout(num_blocks=32)
OTHER_ADDRESS = Address("127.0.0.2", 5600)
# An engine with two workers, and an engine with one.
ENGINES = {
    P_ADDRESS: (worker(PAGES, layers=(1,)), worker(PAGES, OTHER_ADDRESS, 1, layers=(0,))),
    Address("127.0.0.3", 5600): (worker(PAGES),),
}
WORKERS = {P_ADDRESS, OTHER_ADDRESS, Address("127.0.0.3", 5600)}
TIMES = Timeouts()
# 500 walks find each of 7 planted faults. Among them are a timer left behind, an answer accepted in any
# phase, and a report while pages may land. They take 3 s of one core.
WALKS = 50
SEEDS = 10
EVENTS = 60


class Walk:
    """One decode engine with random events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = DecodeMachine(PAGES, TIMES)
        self.now = 0.0
        self.made = 0
        self.attempts: dict[int, str] = {}  # all attempts that a peer may know
        self.expected: set[str] = set()  # requests to be reported
        self.counters: dict[str, bool] = {}  # by request: whether the counter was reached
        self.writing: set[tuple[str, int]] = set()  # pairs of a request and a session whose writes may land
        self.cancelled: set[tuple[str, int]] = set()  # those whose CANCEL was sent
        self.complete: set[str] = set()  # requests whose pages have all arrived
        self.finding: list[Address] = []
        self.dialling: list[Address] = []
        self.sessions: dict[int, Address] = {}
        self.fencing: list[int] = []
        self.peers = 0

    def run(self, actions: Sequence[DecodeAction]) -> None:
        queue = list(actions)
        while queue:
            queue += self._execute(queue.pop(0))

    def _execute(self, action: DecodeAction) -> Sequence[DecodeAction]:
        match action:
            case FindEngine(engine):
                self.finding.append(engine)
            case Dial(_, address):
                known = address in self.sessions.values() or address in self.dialling
                if not known:
                    self.dialling.append(address)
                elif address in self.sessions.values():
                    peer = next(peer for peer, where in self.sessions.items() if where == address)
                    return self.machine.peer_up(self.now, address, peer)
            case OpenCounter(peers, request_id, _):
                if any(peer not in self.sessions for peer in peers) or self.random.random() < 0.1:
                    return self.machine.counter_failed(self.now, request_id, "none is free")
                assert request_id not in self.counters
                self.counters[request_id] = False
                return self.machine.counter_opened(self.now, request_id, 100)
            case CloseCounter(request_id):
                del self.counters[request_id]
            case Send(peer, _) if peer not in self.sessions:
                pass  # the session was lost meanwhile
            case Send(peer, _) if self.random.random() < 0.02:
                return self.lose(peer, "its connection takes no messages")
            case Send(peer, message):
                if isinstance(message, Reserve):
                    request = self.machine._attempts[message.attempt]
                    self.attempts[message.attempt] = message.transfer_id
                    self.writing.add((request, peer))
                elif isinstance(message, Cancel):
                    self.cancelled.add((self.machine._attempts[message.attempt], peer))
            case Fence(peer, reason):
                return self.lose(peer, reason)
            case FinishedReceiving(request_id):
                self.expected.remove(request_id)  # KeyError: reported twice
                assert request_id not in self.counters
                mine = {one for one in self.writing if one[0] == request_id}
                assert request_id in self.complete or not mine, "pages may land in blocks that are free"
                self.writing -= mine
                self.cancelled -= mine
                self.complete.discard(request_id)
        return []

    def lose(self, peer: int, reason: str) -> list[DecodeAction]:
        if self.sessions.pop(peer, None) is None:
            return []
        self.fencing.append(peer)
        return self.machine.peer_down(self.now, peer, reason)

    # --- Events

    def reserve(self) -> None:
        self.made += 1
        request = decode_request(f"t{self.random.randrange(3)}", request=f"d{self.made % 5}")
        if request.request_id in self.expected:
            return
        engine = self.random.choice(list(ENGINES))
        # Of a prompt whose pages are all cached, only the token is wanted.
        blocks = self.random.choice([request.groups, (GroupTarget(0, ()),)])
        self.expected.add(request.request_id)
        wants = self.random.random() < 0.5
        self.run(
            self.machine.reserve(
                self.now, replace(request, engine=engine, groups=blocks, wants_sampled=wants)
            )
        )

    def abort(self) -> None:
        self.run(self.machine.cancel(self.now, f"d{self.random.randrange(5)}"))

    def release(self) -> None:
        transfer = f"t{self.random.randrange(3)}"
        self.run(self.machine.release(self.now, transfer, self.random.choice(list(ENGINES))))

    def find(self) -> None:
        if self.finding:
            engine = self.finding.pop(self.random.randrange(len(self.finding)))
            if self.random.random() < 0.8:
                self.run(self.machine.engine_found(self.now, engine, ENGINES[engine]))
            else:
                self.run(self.machine.engine_not_found(self.now, engine, "nobody answers"))

    def dial(self) -> None:
        if self.dialling:
            address = self.dialling.pop(self.random.randrange(len(self.dialling)))
            if self.random.random() < 0.85:
                self.peers += 1
                self.sessions[self.peers] = address
                self.run(self.machine.peer_up(self.now, address, self.peers))
            else:
                self.run(self.machine.dial_failed(self.now, address, "nobody answers"))

    def lost(self) -> None:
        if self.sessions:
            self.run(self.lose(self.random.choice(list(self.sessions)), "silent"))

    def fenced(self) -> None:
        if self.fencing:
            peer = self.fencing.pop(self.random.randrange(len(self.fencing)))
            self.writing = {one for one in self.writing if one[1] != peer}
            self.run(self.machine.fenced(self.now, peer))

    def reached(self) -> None:
        """Every page of a request arrives, once."""
        open_ones = [request for request, done in self.counters.items() if not done]
        if open_ones:
            request = self.random.choice(open_ones)
            self.counters[request] = True
            self.complete.add(request)
            self.run(self.machine.counter_reached(self.now, request))

    def message(self) -> None:
        """A live session sends a message about any past attempt, or about another transfer."""
        if not self.sessions or not self.attempts:
            return
        peer = self.random.choice(list(self.sessions))
        attempt = self.random.choice(list(self.attempts)[-4:])
        transfer = self.attempts[attempt]
        if self.random.random() < 0.1:
            transfer = f"t{self.random.randrange(4)}"
        flag = self.random.random() < 0.5
        part = (self.machine._attempts.get(attempt, ""), peer)
        known = transfer == self.attempts[attempt]
        match self.random.randrange(3):
            case 0:
                token = self.random.choice([None, 7])
                self.run(self.machine.sampled(self.now, peer, Sampled(transfer, attempt, token)))
            case 1:
                code = self.random.choice(list(FailCode))
                if flag and known:
                    self.writing.discard(part)
                fail = Fail(transfer, attempt, code, "reason", flag)
                self.run(self.machine.fail(self.now, peer, fail))
            case _:
                if flag and known and part in self.cancelled:
                    self.writing.discard(part)
                self.run(self.machine.cancel_ack(self.now, peer, CancelAck(transfer, attempt, drained=flag)))

    def time(self) -> None:
        due = self.machine.next_deadline()
        self.now = self.now + 0.5 if due is None else max(self.now, due)
        self.run(self.machine.tick(self.now))

    def end(self) -> None:
        """Shuts down and completes all pending actions. Nothing is left."""
        self.run(self.machine.close(self.now))
        for _ in range(20):
            self.time()
            while self.fencing:
                self.fenced()
        assert len(self.machine) == 0, self.machine._transfers
        assert self.expected == set()
        assert self.counters == {}
        assert not self.machine._attempts
        assert self.machine.next_deadline() is None


WEIGHTS: dict[Callable[[Walk], None], int] = {
    Walk.reserve: 4,
    Walk.abort: 1,
    Walk.release: 1,
    Walk.find: 4,
    Walk.dial: 5,
    Walk.lost: 1,
    Walk.fenced: 2,
    Walk.reached: 2,
    Walk.message: 8,
    Walk.time: 1,
}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_request_is_reported_once_whatever_the_order_of_events(seed: int) -> None:
    for number in range(seed * WALKS, (seed + 1) * WALKS):
        walk = Walk(number)
        for event in walk.random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=EVENTS):
            event(walk)
            assert len(walk.machine) == len(walk.expected)
        walk.end()
