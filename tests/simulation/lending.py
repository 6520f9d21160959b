"""A model of a lender: prefixes in its cache, look-ups by content, references that hold their blocks, and
evictions.

An engine has one scheduler, whose decision all its workers carry out, each a moment later (World.lend).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kv_connector.agent.loop.effects import Action
from kv_connector.protocol.actions import Address, PrefixRequested, State
from kv_connector.protocol.requests import ComputedPages, GroupPages, PrefillRequest
from kv_connector.protocol.wire.content_key import ContentKey, chain
from kv_connector.protocol.wire.messages import LendOutcome

from .scenario import Plan
from .shape import GROUP_OF_LAYER, GROUPS, ROWS, STEP

if TYPE_CHECKING:
    from .process import Process

HASHED = 16  # tokens of a hashed block


def prefix_id(plan: Plan) -> str:
    """Returns the transfer id under which the prefix of a request is lent."""
    return f"prefix of {plan.name}"


def lender_address(address: Address) -> Address:
    return replace(address, prefixes=True)


def content_of(prompt: str, tokens: int) -> ContentKey:
    """Returns the key of a prompt's first tokens."""
    first = zlib.crc32(prompt.encode()) & ~0xFFFF
    return chain(range(first, first + tokens), HASHED)


def cached_content(plan: Plan) -> ContentKey:
    """Returns the key of what the lender has: the prompt, or another one from ``diverges`` on."""
    own, other = content_of(plan.computed_prompt, plan.prefix), content_of("another", plan.prefix)
    return replace_from(own, other, plan.diverges)


def replace_from(key: ContentKey, other: ContentKey, tokens: int) -> ContentKey:
    same = key.up_to(tokens).digests
    return ContentKey(key.basis, key.tokens, key.size, same + other.digests[len(same) :])


@dataclass(eq=False)
class _Cached:
    plan: Plan
    tables: list[list[int]]  # by group
    lent: int = 0  # lendings that hold it
    evicted: bool = False

    @property
    def blocks(self) -> list[int]:
        return [block for table in self.tables for block in table]


@dataclass
class _Lending:
    cached: _Cached
    since: float


class LendingSide:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._cached: dict[str, _Cached] = {}  # by the name of the request that wants it
        self._lent: dict[str, _Lending] = {}  # by transfer id
        self._events: deque[Callable[[], None]] = deque()  # of the next steps, in their order
        self.paused = False

    def __len__(self) -> int:
        return len(self._lent)

    def requests(self) -> list[str]:
        return list(self._lent)

    def blocks(self, transfer_id: str) -> list[int]:
        return self._lent[transfer_id].cached.blocks

    # --- The cache

    def fill(self, plan: Plan) -> bool:
        """Caches the prefix of a request. Returns whether there was room."""
        process, pool = self._process, self._process.pool
        filled = plan.prefix // process.worker.block
        if pool.room() <= 2 * ROWS * filled:
            return False
        tables = [pool.take(f"cache of {plan.name}", 0 if g == ROWS else filled) for g in range(len(GROUPS))]
        self._cached[plan.name] = _Cached(plan, tables)
        end, same = filled * process.worker.block, plan.diverges // STEP
        for layer in process.worker.layers:
            group = GROUP_OF_LAYER[layer]
            if group != ROWS:
                for prompt, steps in (
                    (plan.computed_prompt, range(min(same, end // STEP))),
                    ("another", range(min(same, end // STEP), end // STEP)),
                ):
                    pool.compute(layer, prompt, steps, tables[group])
        return True

    def has(self, name: str) -> bool:
        return name in self._cached and not self._cached[name].evicted

    def evict(self, name: str) -> None:
        """Evicts a prefix, once no lending holds it."""
        cached = self._cached.get(name)
        if cached is not None:
            cached.evicted = True
            self._free(cached)

    def evict_all(self) -> None:
        for name in list(self._cached):
            self.evict(name)

    def look_up(self, content: ContentKey) -> tuple[str, int]:
        """Returns the prefix with the most leading tokens of this content, and their number."""
        found = [
            (self._shared(cached, content), name) for name, cached in self._cached.items() if self.has(name)
        ]
        tokens, name = max(found, default=(0, ""))
        return name, tokens

    def _shared(self, cached: _Cached, content: ContentKey) -> int:
        size = self._process.worker.block
        key = cached_content(cached.plan).up_to(len(cached.tables[0]) * size)
        pairs = zip(key.each(), content.each(), strict=False)
        return HASHED * next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(key.covered, content.covered) // HASHED
        )

    # --- Lendings

    def requested(self, request: PrefixRequested) -> None:
        """Handles a question, at the end of the scheduler's step."""
        self.later(lambda: self._world.lend(self._process, request))

    def hold(self, transfer_id: str, name: str) -> None:
        """Holds the blocks. The scheduler does so when it decides."""
        cached = self._cached[name]
        cached.lent += 1
        self._lent[transfer_id] = _Lending(cached, self._world.clock.now)

    def lend(self, transfer_id: str, tokens: int, prompt_hash: bytes) -> None:
        """Carries out the scheduler's decision."""
        process, prefill = self._process, self._process.effects.prefill
        cached = self._lent[transfer_id].cached
        named = tokens // process.worker.block
        tables = (*(tuple(table[:named]) for table in cached.tables[:ROWS]), ())
        pages = ComputedPages(transfer_id, None, tuple(GroupPages(0, table) for table in tables))
        request = PrefillRequest(transfer_id, transfer_id, tokens, prompt_hash, lent=True)
        commands: tuple[Callable[[float], Sequence[Action]], ...] = (
            lambda now: prefill.expect(now, request),
            lambda now: prefill.pages_computed(now, pages),
            lambda now: prefill.request_finished(now, transfer_id, ok=True, reason=""),
            lambda now: prefill.lend(now, transfer_id, tokens),
        )
        for command in commands:
            process.submit(command)

    def refuse(self, transfer_id: str) -> None:
        prefill = self._process.effects.prefill
        self._process.submit(lambda now: prefill.lend(now, transfer_id, 0, LendOutcome.NOT_CACHED))

    def sent(self, transfer_id: str, state: State | None) -> None:
        """Handles the agent's report that nothing reads the blocks."""
        lending = self._lent.pop(transfer_id)
        if self._process.leaving:
            return
        books, world = self._world.books, self._world
        books.note("%s: %s is no longer lent, %s", self._process, transfer_id, state)
        books.ended["lent" if state is State.DONE else "lent for nothing"] += 1
        held = world.clock.now - lending.since
        books.check(held < world.lending_bound(), "%s was lent for %.1f s", transfer_id, held)
        lending.cached.lent -= 1
        self._free(lending.cached)

    def pause(self) -> None:
        """Ends what is lent, and lends nothing until resume()."""
        self.paused = True
        self.later(lambda: self._refuse("paused"))
        self.later(self._end_all)

    def resume(self) -> None:
        self.paused = False
        self.later(lambda: self._refuse(""))

    def empty(self) -> None:
        """Empties the cache, and ends what is lent."""
        self.evict_all()
        self.later(self._end_all)

    def _refuse(self, reason: str) -> None:
        prefill = self._process.effects.prefill
        self._process.submit(lambda now: prefill.refuse_lending(now, reason))

    def _end_all(self) -> None:
        process, prefill, lent = self._process, self._process.effects.prefill, frozenset(self._lent)

        def none_is_left(now: float) -> Sequence[Action]:
            for one in prefill.under_way():
                moves = one.transfer_id in lent and one.phase in ("waiting", "active")
                self._world.books.check(
                    not moves, "%s still lends %s: %s", process, one.transfer_id, one.phase
                )
            return ()

        process.submit(lambda now: prefill.end_lendings(now, "ended"))
        process.submit(none_is_left)
        self._world.books.ended["lent, and ended"] += len(lent)

    def later(self, event: Callable[[], None]) -> None:
        """Runs the event at the next step of the engine."""
        process = self._process
        self._events.append(event)

        def guarded() -> None:
            if process.dead or process.leaving:
                return
            if process.stopped:
                self._world.clock.after(0.05, guarded)
            else:
                self._events.popleft()()

        self._world.clock.after(process.rng.uniform(0, self._world.scenario.step / 2), guarded)

    def _free(self, cached: _Cached) -> None:
        if cached.lent or not cached.evicted or self._cached.get(cached.plan.name) is not cached:
            return
        busy = self._process.engine.reading(set(cached.blocks))
        self._world.books.check(
            not busy, "%s evicts %s while it may be read", self._process, cached.plan.name
        )
        self._process.pool.give(cached.blocks)
        del self._cached[cached.plan.name]
