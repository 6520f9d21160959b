"""A model of vLLM's decode half: requests queue, get blocks, wait for their pages and free the blocks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_connector.agent.loop.effects import Action
from kv_connector.protocol.actions import Address, State
from kv_connector.protocol.decode.decode_machine import ABORT_LAG_S
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.requests import DecodeRequest

from .scenario import Plan
from .sending import prompt_hash, sampled
from .shape import GROUP_OF_LAYER, ROWS, STEP

if TYPE_CHECKING:
    from .process import Process

_RETRY_S = 0.05


def _wants_sampled(plan: Plan) -> bool:
    """Returns whether a request wants the early first token: every second one. It is not drawn, so that the
    scenarios of seeds stay the same."""
    return zlib.crc32(plan.name.encode()) % 2 == 0


def _wants_no_page(plan: Plan) -> bool:
    """Returns whether D computes the prompt itself, with an early first token that the client may already
    have."""
    return zlib.crc32(plan.name.encode()) % 12 == 0


@dataclass(eq=False)
class _Load:
    plan: Plan
    blocks: list[int] = field(default_factory=list)
    wanted: list[tuple[int, int, int]] = field(default_factory=list)  # layer, step of the prompt, block
    reserved_at: float = 0.0
    aborted: bool = False
    aborted_at: float = 0.0
    told: bool = False  # the agent has the abort
    short_until: float = 0.0
    deferred_at: float | None = None  # when the first worker sent DEFER for all
    due: bool = False


class DecodeSide:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._queue: dict[str, _Load] = {}  # without blocks
        self._loads: dict[str, _Load] = {}  # reserved and not reported

    def __len__(self) -> int:
        return len(self._queue) + len(self._loads)

    def requests(self) -> list[str]:
        """Returns the requests that the agent has received."""
        return list(self._loads)

    def arrive(self, plan: Plan) -> None:
        process = self._process
        if process.leaving:
            return
        short_until = self._world.clock.now + plan.admitted_after + (plan.short_for or 0.0)
        load = self._queue[plan.name] = _Load(plan, short_until=short_until)
        self._tell_waiting()
        self._later(plan.admitted_after, lambda: self._admit(load))
        if plan.decode_abort is not None:
            self._later(plan.decode_abort, lambda: self._abort(load))

    def received(
        self, request_id: str, failed: bool, stale: bool, state: State | None, token: int | None
    ) -> None:
        """Handles the agent's report, the state that it gave before, and the token that P sampled."""
        world, process = self._world, self._process
        books = world.books
        load = self._loads.pop(request_id, None)
        if load is None:
            books.fail(f"{process}: {request_id} was reported as received, and is not known")
            return
        plan = load.plan
        books.note("%s: %s is reported as received, failed=%s", process, request_id, failed)
        world.say(plan)
        waited = world.clock.now - load.reserved_at
        books.check(
            waited < world.decode_bound(), "%s was reported as received after %.1f s", plan.name, waited
        )
        books.check(not (failed and load.told), "%s was aborted, and is reported as failed", plan.name)
        if failed or not load.told:
            good = State.FAILED if failed else State.DONE
            books.check(state is good, "%s is %s, failed=%s", plan.name, state, failed)
        if not failed and not load.told:
            missing = [one for wanted in load.wanted for one in process.pool.missing(*wanted)]
            books.check(not missing, "%s was received and lacks %s", plan.name, missing)
        right = sampled(plan) if _wants_sampled(plan) else None
        books.check(token in (None, right), "%s got the token %s, not %s", plan.name, token, right)
        if world.scenario.innocent(plan):
            books.check(not failed, "%s failed for no reason", plan.name)
            books.check(token == right or load.told, "%s has no token for no reason", plan.name)
        # In chaos the CANCEL of one worker may overtake its RESERVE. P then takes it for the end of all
        # shares, and refuses the other workers as aborted. A connection (TCP) keeps their order.
        if world.scenario.undisturbed(plan) and not world.scenario.chaos:
            differs = plan.other_prompt and not plan.unknown_to_prefill and plan.prefill_abort is None
            fails = failed and differs and not stale
            books.check(not fails, "%s fails, and D ought to compute its own prompt", plan.name)
            # D's pages may arrive before P has computed all of the prompt.
            computed = world.computed_at(plan, failed)
            if computed is None:
                computed = 0.0 if failed or load.told else world.clock.now
            begun = max(load.reserved_at, load.aborted_at, plan.prefill_at, computed)
            waited = world.clock.now - begun
            limit = world.prompt_s + (world.times.orphan if plan.unknown_to_prefill else 0.0)
            limit += ABORT_LAG_S if plan.prefill_abort is not None else 0.0
            books.check(waited < limit, "%s had to wait %.1f s for no reason", plan.name, waited)
        books.ended["failed" if failed else "aborted" if load.told else "received"] += 1
        busy = process.engine.awaiting(set(load.blocks))
        books.check(
            not busy, "%s: the blocks of %s come back while pages may land in them", process, plan.name
        )
        process.pool.give(load.blocks)

    # --- Steps

    def _engine(self, plan: Plan) -> Address:
        return self._world.address(plan.prefill)

    def _later(self, delay: float, event: object) -> None:
        def guarded() -> None:
            if self._process.dead:
                return
            if self._process.stopped:
                self._later(_RETRY_S, event)
            else:
                event()  # type: ignore[operator]

        self._world.clock.after(delay, guarded)

    def _tell_waiting(self) -> None:
        process = self._process
        plans = [load.plan for load in self._queue.values()]
        waiting = [(plan.transfer_id, self._engine(plan)) for plan in plans]
        process.submit(lambda now: process.effects.peers.set_waiting(now, waiting))

    def _abort(self, load: _Load) -> None:
        process, plan = self._process, load.plan
        if load.aborted or process.leaving:
            return
        load.aborted, load.aborted_at = True, self._world.clock.now
        self._world.books.note("%s aborts %s", process, plan.name)
        self._world.say(plan)
        if self._queue.pop(plan.name, None) is not None:
            self._tell_waiting()
            self._release(plan)
        elif plan.name in self._loads:

            def command(now: float) -> Sequence[Action]:
                load.told = load.told or plan.name in process.effects.decode
                return process.effects.decode.cancel(now, plan.name)

            process.submit(command)

    def _defer(self, load: _Load) -> None:
        process, plan, world = self._process, load.plan, self._world
        if load.deferred_at is None:
            load.deferred_at = world.clock.now
            first, deferring = process.place[1] == 0, process.effects.decode.deferring
            if first:
                world.books.note("%s defers %s", process, plan.name)
                process.submit(lambda now: deferring.defer(now, plan.transfer_id, self._engine(plan)))

            def too_late() -> None:
                if plan.name in self._queue and not load.due and not process.leaving:
                    world.books.check(not first, "%s waits for a notice forever", plan.name)
                    load.due = True  # the first worker is dead

            self._later(world.notice_bound(), too_late)
        self._later(_RETRY_S, lambda: self._admit(load))

    def due(self, transfer_id: str) -> None:
        """Handles the notice for a deferred load."""
        world = self._world
        for load in self._queue.values():
            plan = load.plan
            if plan.transfer_id != transfer_id or load.deferred_at is None or load.due:
                continue
            load.due = True
            early = world.begun_at(plan) is None and plan.scheduled_after < 1.0
            world.books.ended["notice, early" if early else "notice"] += 1
            if world.scenario.undisturbed(plan) and plan.prefill not in world.scenario.older:
                begun, limit = world.begun_at(plan), world.prompt_s
                if plan.unknown_to_prefill:
                    begun, limit = 0.0, limit + world.times.orphan
                waited = world.clock.now - max(world.clock.now if begun is None else begun, load.deferred_at)
                world.books.check(waited < limit, "%s got its notice %.1f s late", plan.name, waited)

    def _release(self, plan: Plan) -> None:
        release, engine = self._process.effects.decode.release, self._engine(plan)
        self._process.submit(lambda now: release(now, plan.transfer_id, engine))

    def _admit(self, load: _Load) -> None:
        process, plan = self._process, load.plan
        if plan.name not in self._queue or process.leaving:
            return
        if not load.due and self._world.clock.now < load.short_until:
            self._defer(load)
            return
        size, pool = process.worker.block, process.pool
        filled = 0 if _wants_no_page(plan) else -(-plan.tokens // size)
        if pool.room() <= ROWS * filled:
            self._later(_RETRY_S, lambda: self._admit(load))
            return
        del self._queue[plan.name]
        self._tell_waiting()
        self._world.say(plan)
        if plan.needs_nothing:
            self._release(plan)
            return
        cached = plan.cached // size * size
        groups = [GroupTarget(0, ())] * 3
        if not _wants_no_page(plan):
            groups = self._take_blocks(load, cached)
        load.reserved_at = self._world.clock.now
        self._loads[plan.name] = load
        request = DecodeRequest(
            request_id=plan.name,
            transfer_id=plan.transfer_id,
            engine=self._engine(plan),
            prompt_tokens=plan.tokens,
            first_token=plan.tokens if _wants_no_page(plan) else cached,
            prompt_hash=prompt_hash(plan, plan.transfer_id),
            groups=tuple(groups),
            wants_sampled=_wants_sampled(plan),
        )
        self._world.books.note("%s reserves %s", process, plan.name)
        process.submit(lambda now: process.effects.decode.reserve(now, request))

    def _take_blocks(self, load: _Load, cached: int) -> list[GroupTarget]:
        process, plan, groups = self._process, load.plan, []
        size, pool = process.worker.block, process.pool
        filled = -(-plan.tokens // size)
        for group, needed in enumerate((cached, max(cached, plan.tokens - plan.window), 0)):
            begin, end = (0, 1) if group == ROWS else (needed // size, filled)
            blocks = pool.take(plan.name, end - begin)
            load.blocks += blocks
            for layer in process.worker.layers:
                if GROUP_OF_LAYER[layer] == group:
                    for logical, block in enumerate(blocks, begin):
                        pool.wait_for(layer, plan.transfer_id, plan.tokens, logical, block)
                    last = 1 if group == ROWS else -(-plan.tokens // STEP)
                    steps = range(needed // STEP, last)
                    load.wanted += [(layer, n, blocks[pool.logical(layer, n) - begin]) for n in steps]
            # Blocks that the window has left behind are null.
            first = 0 if group == ROWS else cached // size
            groups.append(GroupTarget(first, (*(0,) * (begin - first), *blocks), needed))
        return groups
