"""Workload: what an engine has to compute, what of it is cached, and how fast the engine is."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from kv_connector.control.membership import PromptCost, WorkloadReport
from kv_connector.router.engines.backlog import Backlog
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.prefix_cache import PrefixCache

# Lenders that are counted for one engine: more than operators read on the status page.
MOST_LENDERS = 64


@dataclass(frozen=True)
class Cost:
    """Cost of prompts in seconds, from control.membership.PromptCost."""

    step: float
    token: float
    pair: float

    @classmethod
    def of(cls, said: PromptCost) -> Self:
        return cls(said.step_ns * 1e-9, said.token_ns * 1e-9, said.pair_ps * 1e-12)

    def seconds(self, tokens: int, cached: int, chunk: int) -> float:
        """Returns the seconds for so many tokens behind the cached ones, in steps of ``chunk``."""
        pairs = tokens * (cached + tokens / 2)
        return -(-tokens // chunk) * self.step + tokens * self.token + pairs * self.pair


@dataclass
class CacheUse:
    """Tokens of prompts at one engine, as far as the engine has reported its hits."""

    predicted: int = 0
    """Tokens that the router expected in the engine's prefix cache."""
    actual: int = 0
    """Tokens that were there."""
    borrowed: Counter[Endpoint] = field(default_factory=Counter)
    """Tokens that the engine loaded from other engines, by lender. The latest MOST_LENDERS lenders."""

    def borrow(self, lender: Endpoint, tokens: int) -> None:
        """Notes a loaded prefix."""
        total = self.borrowed.pop(lender, 0) + tokens
        if len(self.borrowed) >= MOST_LENDERS:
            del self.borrowed[next(iter(self.borrowed))]
        self.borrowed[lender] = total


class Workload:
    """The workload of one engine process. Used from the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.backlog = Backlog(clock)
        """Prompts of this router at the engine."""
        self.cache = PrefixCache()
        self.use = CacheUse()
        """Use of the prefix cache, for observers."""
        self.load: WorkloadReport | None = None
        """Latest report of the engine, if it reports its workload."""
        self.cost: Cost | None = None
        """Cost of prompts according to that report."""
        self.longest: int | None = None
        """Most tokens of a prompt and its answer, as the engine lists it; None: unknown."""
        self._others = 0
        self._said_at = 0.0

    def hear(self, load: WorkloadReport | None) -> None:
        """Takes the engine's latest report."""
        self.load = load
        self.cost = None if load is None or load.prompt is None else Cost.of(load.prompt)
        self._others = 0 if load is None else max(0, load.waiting - self.backlog.tokens)
        self._said_at = self.clock()

    def hit(self, tokens: int) -> int:
        """Returns the tokens of a hit, if the engine has computed so many: those of whole blocks."""
        block = 0 if self.load is None else self.load.block_tokens
        return tokens // block * block if block else tokens

    def wait(self, cost: Cost) -> float:
        """Returns the seconds until the engine has computed its queue, if prompts have this cost."""
        return self.backlog.left() + self._others_left(cost)

    def queued(self) -> int:
        """Returns the tokens that the engine has still to compute, by this router's forecast and the engine's
        latest report."""
        own = self.backlog.uncached
        return own + self._others_tokens(self.cost) if self._others else own

    def in_a_step(self, cost: Cost, chunk: int) -> int:
        """Returns the tokens of the engine's prompts in a step that takes at most ``chunk`` tokens of each.

        Other routers' tokens count in full, because the number of their prompts is not known.
        """
        return self.backlog.in_a_step(chunk) + self._others_tokens(cost)

    def _others_tokens(self, cost: Cost | None) -> int:
        """Returns the tokens of other routers' prompts that are left."""
        if not self._others or cost is None or not cost.token:
            return self._others
        return round(self._others_left(cost) / cost.token)

    def _others_left(self, cost: Cost) -> float:
        """Returns the seconds for other routers' prompts that are left. The engine computes them
        meanwhile."""
        return max(0.0, self._others * cost.token - (self.clock() - self._said_at))
