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
        self._marks: list[tuple[set[int], int]] = []
        self.cache = PrefixCache(self.changed)
        self.use = CacheUse()
        """Use of the prefix cache, for observers."""
        self.keeps_answers = True
        """Whether the prefix cache keeps what the engine generates, and not prompts alone."""
        self.load: WorkloadReport | None = None
        """Latest report of the engine, if it reports its workload."""
        self.cost: Cost | None = None
        """Cost of prompts according to that report."""
        self.longest: int | None = None
        """Most tokens of a prompt and its answer, as the engine lists it; None: unknown."""
        self.others = 0
        """Tokens of other routers' prompts in that report."""
        self.said_at = 0.0
        """When that report came."""

    def hear(self, load: WorkloadReport | None, *, keeps_answers: bool = True) -> None:
        """Takes the engine's latest report. ``keeps_answers``: as of Register."""
        self.load, self.keeps_answers = load, keeps_answers
        self.cost = None if load is None or load.prompt is None else Cost.of(load.prompt)
        self.others = 0 if load is None else max(0, load.waiting - self.backlog.tokens)
        self.said_at = self.clock()
        self.changed()

    def mark(self, stale: set[int], row: int) -> None:
        """Has the row added to the set now, and whenever a number of the engine changes."""
        self._marks.append((stale, row))
        stale.add(row)

    def unmark(self, stale: set[int], row: int) -> None:
        """Ends mark()."""
        self._marks = [mark for mark in self._marks if mark[0] is not stale or mark[1] != row]

    def changed(self) -> None:
        """Notes that a number of the engine has changed (columns.py), here or in a pool."""
        for stale, row in self._marks:
            stale.add(row)

    def hit(self, tokens: int) -> int:
        """Returns the tokens of a hit, if the engine has computed so many: those of whole blocks."""
        block = 0 if self.load is None else self.load.block_tokens
        return tokens // block * block if block else tokens

    def wait(self, cost: Cost) -> float:
        """Returns the seconds until the engine has computed its queue, if prompts have this cost."""
        return self.backlog.left() + self._others_left(cost)

    def in_a_step(self, cost: Cost, chunk: int) -> int:
        """Returns the tokens of the engine's prompts in a step that takes at most ``chunk`` tokens of each.

        Other routers' tokens count in full, because the number of their prompts is not known.
        """
        return self.backlog.in_a_step(chunk) + self._others_tokens(cost)

    def _others_tokens(self, cost: Cost | None) -> int:
        """Returns the tokens of other routers' prompts that are left."""
        if not self.others or cost is None or not cost.token:
            return self.others
        return round(self._others_left(cost) / cost.token)

    def _others_left(self, cost: Cost) -> float:
        """Returns the seconds for other routers' prompts that are left. The engine computes them
        meanwhile."""
        return max(0.0, self.others * cost.token - (self.clock() - self.said_at))
