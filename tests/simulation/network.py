"""The control network: the interface of ControlPlane in virtual time.

A connection behaves like ZMQ's over TCP. Messages keep their order. A partition holds them back until it
heals. A broken connection loses the messages in flight, and the dialling side reconnects with a new identity.

In chaos messages also overtake each other and arrive twice.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.wire.messages import Hello, MalformedMessage, decode, encode

if TYPE_CHECKING:
    from .actor import Actor
    from .surroundings import Surroundings

_RECONNECT_S = 0.1  # ZMQ_RECONNECT_IVL


class Received(NamedTuple):
    source: Source
    message: Any


class _Way:
    """One direction of a connection."""

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        self.last = 0.0  # arrival of the latest message: later ones do not overtake it
        self.held: list[bytes] = []  # held back by a partition


class Connection:
    """A connection from one process that dials to the process that listens at an address."""

    def __init__(self, world: Surroundings, dealer: Port, source: Source, address: Address) -> None:
        self.world, self.dealer, self.source = world, dealer, source
        self.target = world.name_at(address)
        self.router: Port | None = None  # None: not connected
        self.identity = Source(b"")
        self.closed = False
        self._rng = random.Random(f"{world.scenario.seed} {dealer.process.name} {self.target} {source!r}")
        self._waiting: list[bytes] = []  # messages that wait for a connection
        self._life = 0  # number of the TCP connection: messages in flight do not survive it
        self._reset_ways()
        self._connect_soon()

    def send(self, frame: bytes, to_router: bool) -> None:
        if self.router is None:
            self._waiting.append(frame)
            return
        way = self._there if to_router else self._back
        rng, scenario, life = self._rng, self.world.scenario, self._life
        for _ in range(2 if scenario.chaos and rng.random() < 0.1 else 1):
            if self.world.loses(way.source, way.target):
                self.world.books.note("a message from %s to %s is lost", way.source, way.target)
                continue
            late = rng.random() < (0.2 if scenario.chaos else 0.05)
            delay = rng.expovariate(1 / scenario.jitter) + (rng.uniform(0, 0.5) if late else 0.0)
            when = self.world.clock.now + delay
            if not scenario.chaos:
                when = way.last = max(when, way.last)
            self.world.clock.at(when, lambda: self._arrive(way, frame, life))

    def hang_up(self) -> None:
        """Closes the dialling side. Messages that it has sent still leave."""
        self.closed = True
        router, identity = self.router, self.identity
        if router is not None:
            when = max(self.world.clock.now + self.world.scenario.jitter, self._there.last + 1e-6)
            self.world.clock.at(when, lambda: router.gone(identity))

    def broken(self, silently: bool = False) -> None:
        """Ends the TCP connection. ``silently``: without notice to the listening side."""
        router, self.router = self.router, None
        self._life += 1
        self._reset_ways()
        if router is not None and not silently:
            router.gone(self.identity)
        if not self.closed and not self.dealer.process.dead:
            self._connect_soon()

    def _reset_ways(self) -> None:
        name = self.dealer.process.name
        self._there, self._back = _Way(name, self.target), _Way(self.target, name)

    def _connect_soon(self) -> None:
        delay = _RECONNECT_S * self._rng.uniform(0.1, 2.0)
        self.world.clock.after(delay, self._connect)

    def _connect(self) -> None:
        if self.closed or self.router is not None or self.dealer.process.dead:
            return
        process = self.world.processes.get(self.target)
        name = self.dealer.process.name
        heals = [self.world.heals(name, self.target), self.world.heals(self.target, name)]
        if process is None or not process.port.listening or any(at is not None for at in heals):
            self._connect_soon()
            return
        self.router = process.port
        self.identity = process.port.admit(self)
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            self.send(frame, to_router=True)

    def _arrive(self, way: _Way, frame: bytes, life: int) -> None:
        if life != self._life:
            return
        heals = self.world.heals(way.source, way.target)
        if heals is not None or way.held:
            if not way.held and heals is not None:
                self.world.clock.at(heals, lambda: self._healed(way, life))
            way.held.append(frame)
            return
        port, source = (self.router, self.identity) if way is self._there else (self.dealer, self.source)
        if port is None:
            return
        if port.process.dead and way is self._there and self.target in self.world.processes:
            self.broken(silently=True)  # unnoticed until now; a new process answers with a reset
            return
        port.take(source, frame)

    def _healed(self, way: _Way, life: int) -> None:
        heals = self.world.heals(way.source, way.target)
        if heals is not None:
            self.world.clock.at(heals, lambda: self._healed(way, life))
            return
        held, way.held = way.held, []
        for frame in held:
            self._arrive(way, frame, life)


class Port:
    """The control sockets of one process."""

    def __init__(
        self,
        world: Surroundings,
        process: Actor,
        encode: Callable[[Any], bytes] = encode,
        decode: Callable[[bytes], Any] = decode,
    ) -> None:
        """``encode`` and ``decode``: of this port's messages; default: those of the KV protocol."""
        self.process = process
        self._world, self._encode, self._decode = world, encode, decode
        self.listening = True
        self.malformed = 0
        self.dialled: dict[Source, Connection] = {}
        self.callers: dict[Source, Connection] = {}
        self._inbox: list[Received] = []
        self._distrusted: set[Source] = set()
        self._numbers = 0

    # --- Called by effects.py

    def dial(self, address: Address) -> Source:
        self._numbers += 1
        source = Source(b"dialled %d" % self._numbers)
        self.dialled[source] = Connection(self._world, self, source, address)
        return source

    def hang_up(self, source: Source) -> None:
        connection = self.dialled.pop(source, None)
        if connection is not None:
            connection.hang_up()

    def send(self, source: Source, message: Any) -> bool:
        shown = "Hello" if isinstance(message, Hello) else message
        self._world.books.note("%s says %s", self.process, shown)
        frame = self._encode(message)
        dialled = source in self.dialled
        connection = self.dialled.get(source) or self.callers.get(source)
        if connection is None:
            return False
        other = connection.target if dialled else connection.dealer.process.name
        if self._world.full(self.process.name, other):
            return False
        connection.send(frame, to_router=dialled)
        return True

    def distrust(self, source: Source) -> None:
        self._distrusted.add(source)

    def receive(self) -> list[Received]:
        inbox, self._inbox = self._inbox, []
        return inbox

    # --- Called by connections

    def admit(self, connection: Connection) -> Source:
        self._numbers += 1
        identity = Source(b"router %d" % self._numbers)
        self.callers[identity] = connection
        return identity

    def gone(self, identity: Source) -> None:
        self.callers.pop(identity, None)

    def take(self, source: Source, frame: bytes) -> None:
        if source in self._distrusted or self.process.dead:
            return
        if source not in self.dialled and source not in self.callers:
            return  # the connection was closed in the meantime
        try:
            received = Received(source, self._decode(frame))
        except MalformedMessage:
            self.malformed += 1
            self._distrusted.add(source)
            received = Received(source, None)
        self._inbox.append(received)
        self.process.wake(self.process.latency())

    # --- The end of the process

    def close(self, silently: bool = False) -> None:
        """Closes all connections. ``silently``: without notice to their other ends."""
        self.listening = False
        steps: list[Callable[[], None]] = []
        for connection in list(self.dialled.values()):
            steps.append(
                functools.partial(setattr, connection, "closed", True) if silently else connection.hang_up
            )
        for connection in list(self.callers.values()):
            if not silently:
                steps.append(connection.broken)
        self.dialled.clear()
        for step in steps:
            step()
