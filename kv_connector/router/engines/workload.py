"""Workload: what an engine has to compute, what of it it has already, and how fast it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from kv_connector.control.membership import PromptCost, WorkloadReport
from kv_connector.router.engines.backlog import Backlog
from kv_connector.router.engines.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Cost:
    """Of prompts, in seconds: control.membership.PromptCost."""

    step: float
    token: float
    pair: float

    @classmethod
    def of(cls, said: PromptCost) -> Self:
        return cls(said.step_ns * 1e-9, said.token_ns * 1e-9, said.pair_ps * 1e-12)

    def seconds(self, tokens: int, cached: int, chunk: int) -> float:
        """So many tokens behind the cached ones, in steps of ``chunk``."""
        pairs = tokens * (cached + tokens / 2)
        return -(-tokens // chunk) * self.step + tokens * self.token + pairs * self.pair


class Workload:
    """One engine's, as long as it is the same process. Used from the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.backlog = Backlog(clock)
        """What it has from this router."""
        self.cache = PrefixCache()
        self.load: WorkloadReport | None = None
        """What it said last, if it does."""
        self.cost: Cost | None = None
        """By that."""
        self._others = 0
        self._said_at = 0.0

    def hear(self, load: WorkloadReport | None) -> None:
        """The engine says so."""
        self.load = load
        self.cost = None if load is None or load.prompt is None else Cost.of(load.prompt)
        self._others = 0 if load is None else max(0, load.waiting - self.backlog.tokens)
        self._said_at = self._clock()

    def wait(self, cost: Cost) -> float:
        """Until it has computed what it has, in seconds, if that costs so much."""
        return self.backlog.left() + self._others_left(cost)

    def in_a_step(self, cost: Cost, chunk: int) -> int:
        """Tokens of its prompts in a step that takes at most ``chunk`` of each; of other routers' all, as it
        is not known how many prompts they are."""
        others = round(self._others_left(cost) / cost.token) if cost.token else self._others
        return self.backlog.in_a_step(chunk) + others

    def _others_left(self, cost: Cost) -> float:
        """Seconds of other routers' prompts, which it goes on with meanwhile."""
        return max(0.0, self._others * cost.token - (self._clock() - self._said_at))
