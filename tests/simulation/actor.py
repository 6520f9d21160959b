"""A process in virtual time, from its start to its death. It wakes, has a turn, and can be stopped and
killed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from .clock import SkewedClock

if TYPE_CHECKING:
    from .network import Port
    from .surroundings import Surroundings


class Actor:
    """One process. A restart at the same address is another Actor. A class with turn() has a port, and most
    have an engine."""

    world: Surroundings
    port: Port
    engine: Any

    def __init__(self, world: Surroundings, name: str, life: int) -> None:
        self.name, self.life = name, life
        self.rng = random.Random(f"{world.seed} {name} {life}")
        rate = self.rng.uniform(0.99, 1.01) if world.scenario.skew else 1.0
        self.clock = SkewedClock(world.clock, self.rng.uniform(0, 1e6), rate)
        self.dead = False
        self.vanished = False  # its machine lost power, so no peer was notified
        self.stopped = False
        self.leaving = False
        self.stalled_until = 0.0
        self.slow_until = 0.0
        self.slowness = 0.0
        self._surroundings = world
        self._alarm: float | None = None  # time of the next turn()

    def __str__(self) -> str:
        return f"{self.name}.{self.life}"

    def turn(self) -> None:
        """Does what is due, and calls wake_at() with the time of the next turn."""
        raise NotImplementedError

    def latency(self) -> float:
        """Returns the time that its thread takes to notice an event."""
        return self.rng.expovariate(5000.0)

    def wake(self, delay: float) -> None:
        self.wake_at(self._surroundings.clock.now + delay)

    def wake_at(self, when: float) -> None:
        if self.dead or (self._alarm is not None and self._alarm <= when):
            return
        self._alarm = when
        self._surroundings.clock.at(when, lambda: self._alarmed(when))

    def _alarmed(self, when: float) -> None:
        if self.dead or self._alarm != when:
            return  # an earlier turn came in between
        self._alarm = None
        now = self._surroundings.clock.now
        if self.stopped:
            return  # resume() wakes the process
        if now < self.stalled_until:
            self.wake_at(self.stalled_until)
            return
        self._surroundings.tap.speaker = str(self)
        self.turn()
        if now < self.slow_until and self._alarm is not None:
            self._alarm = None
            self.wake_at(now + self.rng.uniform(0, self.slowness))

    # --- Its end

    def leave(self) -> None:
        """Ends in good order, if the class has an orderly shutdown."""
        self.leaving = True
        self.die()

    def die(self, silently: bool = False) -> None:
        """Ends the process and discards its memory."""
        if self.dead:
            return
        self.dead, self.vanished = True, silently
        self._surroundings.processes.pop(self.name, None)
        self.port.close(silently)
        if self.engine is not None:
            self.engine.die()

    # --- SIGSTOP

    def stop(self) -> None:
        self.stopped = True

    def resume(self) -> None:
        self.stopped = False
        if self.engine is not None:
            self.engine.thaw()
        self._alarm = None
        self.wake(self.latency())
