"""Members: which engines there are, and whether each may be sent requests. Sans-IO: the time comes in.

An engine is in a router's list from the start (command line), or registers by itself. A registered one is
used once its API server has answered, not used while it is silent, draining or unreachable, and lost when
it has been silent for too long: the requests that it has are then failed at once, not when TCP notices.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kv_connector.membership import Leave, Register
from kv_connector.protocol.actions import Address
from kv_connector.protocol.messages import Role
from kv_connector.router.endpoint import Endpoint
from kv_connector.router.pool import Pool

logger = logging.getLogger(__name__)

# Engines that one router keeps: far more than it can serve. Whoever has the key could else fill its memory.
MAX_ENGINES = 4096


class Side(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


_SIDES = {
    Role.PREFILL: (Side.PREFILL,),
    Role.DECODE: (Side.DECODE,),
    Role.BOTH: (Side.PREFILL, Side.DECODE),
}


class State(enum.Enum):
    READY = "ready"
    JOINING = "joining"  # its API server has not answered yet
    UNREACHABLE = "unreachable"  # it did not answer a request, and has not answered a look since
    SILENT = "silent"  # no REGISTER for a while
    DRAINING = "draining"
    ASLEEP = "asleep"  # it says so: its KV cache is not mapped


@dataclass
class _Engine:
    endpoint: Endpoint
    sides: tuple[Side, ...]
    listed: bool  # on the command line
    answers: bool  # its API server, as far as is known
    name: str
    engine_id: str = ""
    incarnation: str = ""
    seen: float | None = None  # the last REGISTER
    joined: bool = False  # it was usable once
    draining: bool = False
    asleep: bool = False
    silent: bool = False

    @property
    def state(self) -> State:
        if self.silent:
            return State.SILENT
        if self.draining:
            return State.DRAINING
        if self.asleep:
            return State.ASLEEP
        if not self.answers:
            return State.UNREACHABLE if self.joined else State.JOINING
        return State.READY


class Members:
    """Used from the event loop's thread only; every change of an engine's state is one log line."""

    def __init__(
        self,
        pools: Mapping[Side, Pool],
        listed: Mapping[Side, Sequence[Endpoint]],
        *,
        suspect: float,
        dead: float,
    ) -> None:
        """``suspect``, ``dead``: seconds of silence after which a registered engine is not used, is lost."""
        self._pools = pools
        self._suspect = suspect
        self._dead = dead
        self._engines: dict[str, _Engine] = {}  # by URL
        self._ticked: float | None = None
        for side, endpoints in listed.items():
            for endpoint in endpoints:
                known = self._engines.get(endpoint.url)
                sides = (side,) if known is None else (*known.sides, side)
                self._engines[endpoint.url] = _Engine(
                    endpoint, sides, listed=True, answers=True, name=endpoint.url, joined=True
                )
        for engine in self._engines.values():
            self._publish(engine)

    def states(self) -> dict[Side, dict[str, State]]:
        """By side and URL."""
        found: dict[Side, dict[str, State]] = {side: {} for side in Side}
        for url, engine in self._engines.items():
            for side in engine.sides:
                found[side][url] = engine.state
        return found

    def outstanding(self, url: str) -> int | None:
        """Requests that this engine has from here; None if there is no such engine."""
        engine = self._engines.get(url)
        return (
            None if engine is None else sum(self._pools[s].outstanding(engine.endpoint) for s in engine.sides)
        )

    # --- What engines say

    def register(self, now: float, message: Register) -> str:
        """REGISTER. Returns the engine's URL as it is known here; ValueError where it is none."""
        control = Address(message.control_host, message.control_port)
        endpoint = Endpoint.parse(f"{message.url}@{control}")
        engine = self._engines.get(endpoint.url)
        if engine is None and len(self._engines) >= MAX_ENGINES:
            raise ValueError(f"there are {MAX_ENGINES} engines already")
        if engine is None or engine.endpoint != endpoint or engine.incarnation != message.incarnation:
            sides, name = _SIDES[message.role], f"{message.engine_id} at {endpoint.url} (control {control})"
            replacement = _Engine(endpoint, sides, listed=False, answers=False, name=name)
            replacement.engine_id, replacement.incarnation = message.engine_id, message.incarnation
            if engine is not None:
                registered = engine.seen is not None
                replacement.listed = engine.listed
                # The process that the command line named, and not another in its place?
                replacement.answers = replacement.joined = not registered and engine.answers
                self._withdraw(engine, lost=registered)
            logger.info("%s: %s engine %s", replacement.state.name, message.role.value, name)
            engine = self._engines[endpoint.url] = replacement
        engine.seen, engine.asleep = now, message.asleep
        self._update(engine, silent=False, draining=engine.draining or message.draining)
        return endpoint.url

    def leave(self, message: Leave) -> None:
        """LEAVE. What the engine still has ends by itself."""
        for engine in list(self._engines.values()):
            one, leaving = (engine.engine_id, engine.incarnation), (message.engine_id, message.incarnation)
            if engine.seen is not None and one == leaving:
                self._forget(engine, "LEFT", lost=False)

    def drain(self, url: str) -> None:
        """No new requests for this engine."""
        engine = self._engines.get(url)
        if engine is not None:
            self._update(engine, draining=True)

    # --- What the router finds out itself

    def failed(self, endpoint: Endpoint, reason: str) -> None:
        """The engine broke a connection, or took none: it is not used until it answers again."""
        engine = self._engines.get(endpoint.url)
        if engine is not None and engine.endpoint == endpoint:
            self._update(engine, answers=False, reason=reason)

    def to_probe(self) -> list[Endpoint]:
        """Engines whose API servers are to be looked at: those not used because they do not answer."""
        return [e.endpoint for e in self._engines.values() if not e.answers and not e.silent]

    def unwatched(self) -> list[Endpoint]:
        """Engines that give no sign of life by themselves: those that are listed and have not registered."""
        return [e.endpoint for e in self._engines.values() if e.seen is None]

    def answered(self, endpoint: Endpoint) -> None:
        """The API server is healthy."""
        engine = self._engines.get(endpoint.url)
        if engine is not None and engine.endpoint == endpoint:
            self._update(engine, answers=True)

    def tick(self, now: float) -> None:
        """Acts on silence. To be called several times a second."""
        last, self._ticked = self._ticked, now
        if last is not None and now - last > self._suspect:
            # This router was not running: that it heard nothing says nothing about the engines.
            for engine in self._engines.values():
                engine.seen = None if engine.seen is None else now
        for engine in list(self._engines.values()):
            if engine.seen is None:
                continue
            silence = now - engine.seen
            if silence >= self._dead:
                self._forget(engine, "DEAD", lost=True)
            elif silence >= self._suspect:
                self._update(engine, silent=True)

    # --- Steps

    def _update(
        self,
        engine: _Engine,
        *,
        answers: bool | None = None,
        silent: bool | None = None,
        draining: bool | None = None,
        reason: str = "",
    ) -> None:
        before = engine.state
        engine.answers = engine.answers if answers is None else answers
        engine.silent = engine.silent if silent is None else silent
        engine.draining = engine.draining if draining is None else draining
        state = engine.state
        if state is State.READY:
            engine.joined = True
        if state is not before:
            level = logging.INFO if state in (State.READY, State.DRAINING, State.ASLEEP) else logging.WARNING
            logger.log(level, "%s: %s%s", state.name, engine.name, f": {reason}" if reason else "")
        self._publish(engine)

    def _publish(self, engine: _Engine) -> None:
        for side in engine.sides:
            self._pools[side].set_usable(engine.endpoint, engine.state is State.READY)

    def _withdraw(self, engine: _Engine, *, lost: bool) -> None:
        for side in engine.sides:
            self._pools[side].remove(engine.endpoint, lost=lost)

    def _forget(self, engine: _Engine, why: str, *, lost: bool) -> None:
        logger.log(logging.WARNING if lost else logging.INFO, "%s: %s", why, engine.name)
        self._withdraw(engine, lost=lost)
        del self._engines[engine.endpoint.url]
        if engine.listed:
            # The command line's word stands: it may come back without registering.
            again = _Engine(engine.endpoint, engine.sides, True, answers=False, name=engine.name, joined=True)
            self._engines[engine.endpoint.url] = again
            self._publish(again)
