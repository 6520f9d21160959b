"""The base of every simulated world: time, networks, live processes, and the faults of the network."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts

from .books import Books, Tap
from .clock import Clock
from .fabric import Fabric

if TYPE_CHECKING:
    from .shape import Side

_LOOK_S = 0.25  # interval of the checks whether the run is over


class Surroundings:
    """One run of one scenario."""

    def __init__(self, scenario: Any, times: Timeouts, tracing: bool) -> None:
        self.scenario = scenario
        self.seed: int = scenario.seed
        self.times = times
        self.clock = Clock()
        self.books = Books(self.clock, tracing)
        self.tap = Tap(self.books)
        self.fabric = Fabric()
        self.processes: dict[str, Any] = {}  # live processes
        self.partitions: dict[tuple[str, str], float] = {}
        self.jams: dict[tuple[str, str], float] = {}
        self.losses: dict[tuple[str, str], tuple[float, float]] = {}
        self._rng = random.Random(f"{scenario.seed} losses")
        self._lives: dict[str, int] = {}

    def run(self) -> None:
        """Runs until no event is left. Raises Violation."""
        logger = logging.getLogger("kv_connector")
        before = logger.level, logger.propagate
        logger.setLevel(logging.DEBUG if self.books.tracing else logging.ERROR)
        logger.propagate = False
        logger.addHandler(self.tap)
        try:
            self._run()
        finally:
            logger.removeHandler(self.tap)
            logger.setLevel(before[0])  # not logger.level: the cache of isEnabledFor() must be cleared, too
            logger.propagate = before[1]

    def _run(self) -> None:
        raise NotImplementedError

    def start(self, name: str) -> None:
        """Starts a new process at the address, unless one lives there."""
        raise NotImplementedError

    def start_engine(self, engine: str) -> None:
        """Starts all processes of the engine that are not alive."""
        raise NotImplementedError

    def replace(self, engine: str, side: Side, silently: bool) -> None:
        """Ends the engine. Processes that start there from now on have another shape."""
        raise NotImplementedError

    def next_life(self, name: str) -> int:
        self._lives[name] = life = self._lives.get(name, 0) + 1
        return life

    def life(self, name: str) -> int:
        """Returns the number of processes that have lived at this address."""
        return self._lives.get(name, 0)

    def address(self, name: str) -> Address:
        return Address(name, 5600)

    def name_at(self, address: Address) -> str:
        return address.host

    def heals(self, source: str, target: str) -> float | None:
        """Returns when a partition in this direction ends. None: no partition."""
        until = self.partitions.get((source, target))
        return None if until is None or until <= self.clock.now else until

    def loses(self, source: str, target: str) -> bool:
        until, probability = self.losses.get((source, target), (0.0, 0.0))
        return self.clock.now < until and self._rng.random() < probability

    def full(self, source: str, target: str) -> bool:
        """Returns whether the queue of this direction is full."""
        return self.clock.now < self.jams.get((source, target), 0.0)

    def until(self, limit: float, left: Callable[[], Mapping[str, object]]) -> None:
        """Runs until ``left`` returns nothing. What it returns at the limit is a violation."""
        next_look = self.clock.now
        while True:
            if self.clock.now >= next_look:
                found = left()
                if not found:
                    return
                late = self.clock.now >= limit
                self.books.check(not late, "after %.1f s there is left: %s", self.clock.now, found)
                next_look = self.clock.now + _LOOK_S
            if not self.clock.step():
                found = left()
                self.books.check(not found, "nothing happens any more, and there is left: %s", found)
                return
            self.books.look()
