"""A model of the steps in which an engine computes prompts: chunks, layers that become valid in turn,
preemption, and blocks that are freed when they are reported as sent.

D has it too, for the prompts that it computes itself. Their blocks are free at their end.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_connector.agent.loop.effects import Action
from kv_connector.protocol.actions import Share, State
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.requests import (
    ComputedPages,
    DecodeRequest,
    GroupPages,
    PrefillRequest,
    PrefixRequest,
)
from kv_connector.protocol.wire.messages import LendOutcome

from .lending import content_of, lender_address, prefix_id
from .scenario import Plan
from .shape import GROUP_OF_LAYER, GROUPS, ROWS, STEP

if TYPE_CHECKING:
    from .process import Process

_RETRY_S = 0.05
_BATCH = 3  # requests of one step


@dataclass(eq=False)
class _PrefixLoad:
    """The load of a prefix. The prompt's blocks come back once both its report and the load's are there."""

    prompt: _Prompt
    tokens: int  # end of the prefix
    begun: float
    wanted: list[tuple[int, int, int]] = field(default_factory=list)  # layer, step of the prompt, block
    cancelled: bool = False
    sent: bool = False  # the prompt is reported as sent


@dataclass(eq=False)
class _Prompt:
    plan: Plan
    tables: list[list[int]] = field(default_factory=list)  # by group
    computed: int = 0  # tokens
    since: float = 0.0  # time of its end
    finished: bool = False
    aborted: bool = False
    preempt: bool = False
    ready_at: float = 0.0  # not scheduled again before this time
    named: int = 0  # tokens whose pages are named, since the blocks were taken
    asked_at: float | None = None  # when the question for its prefix was sent; None: it waits for no answer
    load: _PrefixLoad | None = None  # the load of its prefix, until it is reported

    @property
    def blocks(self) -> list[int]:
        return [block for table in self.tables for block in table]


class PrefillSide:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._prompts: dict[str, _Prompt] = {}  # by request id, until reported as sent
        self._prefix_loads: dict[str, _PrefixLoad] = {}  # by transfer id
        self._silences: dict[str, tuple[float, int | None]] = {}  # of dead lenders: time, and the life before
        self._base = 0  # first signal value of the next step
        self._stepping = False
        self._stuck_steps: list[Callable[[], None]] = []  # steps of a stopped process

    def __len__(self) -> int:
        return len(self._prompts) + len(self._prefix_loads)

    def loads(self) -> list[str]:
        """Returns the transfers of prefixes that are loaded."""
        return list(self._prefix_loads)

    def requests(self) -> list[str]:
        return list(self._prompts)

    def blocks(self, request_id: str) -> list[int]:
        return self._prompts[request_id].blocks

    def arrive(self, plan: Plan) -> None:
        process = self._process
        if process.leaving or any(p.plan.transfer_id == plan.transfer_id for p in self._prompts.values()):
            return  # the adapter computes a second request of one transfer without the agent
        prompt = _Prompt(plan, ready_at=self._world.clock.now + plan.scheduled_after)
        self._prompts[plan.name] = prompt
        request = PrefillRequest(
            plan.name, plan.transfer_id, plan.tokens, prompt_hash(plan, plan.computed_prompt)
        )
        if not plan.alone:
            process.submit(lambda now: process.effects.prefill.expect(now, request))
        abort = plan.decode_abort if plan.alone else plan.prefill_abort
        if abort is not None:
            self._later(abort, lambda: self._abort(prompt))
        for delay in plan.preempted:
            self._later(delay, lambda: setattr(prompt, "preempt", True))
        if plan.lender:
            self._ask(prompt)
        self._kick()

    def sent(self, request_id: str, state: State | None) -> None:
        """Handles the agent's report, and the state that it gave before."""
        prompt = self._prompts.pop(request_id, None)
        if self._process.leaving:
            return
        books = self._world.books
        if prompt is None:
            books.fail(f"{self._process}: {request_id} was reported as sent, and is not known")
            return
        books.note("%s: %s is reported as sent", self._process, request_id)
        if self._world.scenario.innocent(prompt.plan):
            books.check(state is State.DONE, "%s was sent for nothing: %s", request_id, state)
        books.check(prompt.finished, "%s was reported as sent before it finished", request_id)
        waited = self._world.clock.now - max(prompt.since, self._world.last_word(prompt.plan))
        plan, limit = prompt.plan, self._world.prefill_bound()
        if self._world.scenario.undisturbed(plan) and not plan.unknown_to_decode and not plan.other_prompt:
            limit = self._world.prompt_s
        books.check(waited < limit, "%s was reported as sent after %.1f s", request_id, waited)
        if prompt.load is not None:
            prompt.load.sent = True
        else:
            self._give(prompt)

    def resume(self) -> None:
        steps, self._stuck_steps = self._stuck_steps, []
        for step in steps:
            self._later(0.0, step)

    # --- Steps

    def _later(self, delay: float, event: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._process.dead:
                return
            if self._process.stopped:
                self._stuck_steps.append(event)
            else:
                event()

        self._world.clock.after(delay, guarded)

    def _pass(self) -> float:
        """Returns the time of one layer, or of the scheduler between two steps."""
        return self._process.rng.uniform(0, self._world.scenario.step / 2)

    def _kick(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._later(self._pass(), self._step)

    def _step(self) -> None:
        """Runs what lies between two steps: aborts and preemptions first, then a batch."""
        process, now = self._process, self._world.clock.now
        if process.leaving:
            return
        for prompt in list(self._prompts.values()):
            if prompt.aborted and not prompt.finished:
                self._finish(prompt, ok=False)
        preempted = [
            p for p in self._prompts.values() if p.preempt and p.tables and not p.finished and not p.load
        ]
        for prompt in self._prompts.values():
            prompt.preempt = False
        if preempted:
            self._preempt(preempted)
            return
        waiting = [p for p in self._prompts.values() if not p.finished]
        free = [p for p in waiting if p.asked_at is None and p.load is None]
        for prompt in waiting[: 2 * _BATCH] if self._world.scenario.noticing else ():
            if prompt.ready_at <= now + self._world.scenario.step and not prompt.plan.alone:
                self._due(prompt)
        batch = [p for p in free if p.ready_at <= now and self._allocate(p)][:_BATCH]
        if batch:
            self._forward(batch)
        elif waiting:
            self._later(_RETRY_S, self._step)
        else:
            self._stepping = False

    def _due(self, prompt: _Prompt) -> None:
        process, transfer_id = self._process, prompt.plan.transfer_id
        process.submit(lambda now: process.effects.prefill.due(now, transfer_id))

    def _allocate(self, prompt: _Prompt) -> bool:
        plan, pool = prompt.plan, self._process.pool
        if not prompt.tables:
            filled = -(-plan.tokens // self._process.worker.block)
            if pool.room() <= ROWS * filled:
                return False
            counts = [1 if group == ROWS else filled for group in range(len(GROUPS))]
            prompt.tables = [pool.take(plan.name, count) for count in counts]
            prompt.computed = self._own(plan)
            self._world.begins(plan)
            for layer in self._process.worker.layers if prompt.computed else ():
                if (group := GROUP_OF_LAYER[layer]) != ROWS:
                    steps = range(prompt.computed // STEP)
                    pool.compute(layer, plan.computed_prompt, steps, prompt.tables[group])
        return True

    def _forward(self, batch: Sequence[_Prompt]) -> None:
        process, base = self._process, self._base
        size, layers = process.worker.block, process.worker.layers
        self._base += len(layers)
        fresh: list[tuple[_Prompt, range]] = []
        late: list[ComputedPages] = []
        for prompt in batch:
            plan = prompt.plan
            begin, end = prompt.computed, min(prompt.computed + plan.chunk, plan.tokens)
            prompt.computed, over = end, end == plan.tokens
            # Blocks that become complete in this step.
            first, after = prompt.named // size, -(-end // size) if over else end // size
            prompt.named = end
            named = after - 1 if plan.truncated and over else after
            *tables, row = prompt.tables
            pages_of = [GroupPages(first, tuple(table[first:named])) for table in tables]
            groups = (*pages_of, GroupPages(0, tuple(row if over else ())))
            pages = ComputedPages(plan.transfer_id, None if plan.named_late else base, groups)
            if plan.alone:
                pass
            elif plan.named_late:
                late.append(pages)
            else:
                self._name(pages)
            fresh.append((prompt, range(begin, end)))
            self._world.books.note("%s computes %s [%d, %d)", process, plan.name, begin, end)
        self._later(self._pass(), lambda: self._layer(base, 0, fresh, late))

    def _name(self, pages: ComputedPages) -> None:
        effects = self._process.effects
        self._process.submit(lambda now: effects.prefill.pages_computed(now, pages))

    def _layer(
        self,
        base: int,
        index: int,
        fresh: Sequence[tuple[_Prompt, range]],
        late: Sequence[ComputedPages],
    ) -> None:
        process = self._process
        layers = process.worker.layers
        group = GROUP_OF_LAYER[layers[index]]
        for prompt, tokens in fresh:
            plan, over = prompt.plan, tokens.stop == prompt.plan.tokens
            # A cell is complete once its last token is computed.
            steps = range(tokens.start // STEP, -(-tokens.stop // STEP) if over else tokens.stop // STEP)
            if group == ROWS:
                steps = range(over)
            process.pool.compute(layers[index], plan.computed_prompt, steps, prompt.tables[group])
        process.engine.signal.store(base + index + 1)
        if index + 1 < len(layers):
            self._later(self._pass(), lambda: self._layer(base, index + 1, fresh, late))
            return
        for pages in late:
            self._name(pages)
        for prompt, _ in fresh:
            if prompt.computed == prompt.plan.tokens and not prompt.finished:
                self._finish(prompt, ok=True)
        self._later(self._pass(), self._step)

    def _finish(self, prompt: _Prompt, ok: bool) -> None:
        process, plan = self._process, prompt.plan
        prompt.finished, prompt.since = True, self._world.clock.now
        self._world.begins(plan)
        self._leave_prefix(prompt)
        self._world.computed(plan)
        self._world.books.note("%s has finished %s, ok=%s", process, plan.name, ok)
        if plan.alone:
            self._over(prompt, ok)
            return
        reason = "" if ok else "aborted"
        token = sampled(plan) if ok else None
        finish, transfer = process.effects.prefill.request_finished, plan.transfer_id
        process.submit(lambda now: finish(now, transfer, ok, reason, token, aborted=not ok))

    def _over(self, prompt: _Prompt, ok: bool) -> None:
        """Ends a request whose prompt no other engine has."""
        plan, books = prompt.plan, self._world.books
        del self._prompts[plan.name]
        if self._world.scenario.innocent(plan):
            books.check(ok, "%s was not computed", plan.name)
        books.ended["computed alone" if ok else "left alone"] += 1
        if prompt.load is not None:
            prompt.load.sent = True
        else:
            self._give(prompt)

    def _abort(self, prompt: _Prompt) -> None:
        prompt.aborted = True
        self._kick()

    # --- The prefix

    def _own(self, plan: Plan) -> int:
        """Returns the tokens that the engine has in its own cache."""
        size = self._process.worker.block
        return plan.own // size * size

    def _ask(self, prompt: _Prompt) -> None:
        """Asks for the prefix. The first worker does so for all, which wait for the answer."""
        process, plan, world = self._process, prompt.plan, self._world
        content = content_of(plan.computed_prompt, plan.tokens - 1)
        if not content.digests:
            return
        prompt.asked_at = world.clock.now
        borrowing, first = process.effects.decode.borrowing, process.place[1] == 0
        if first:
            lender = lender_address(world.address(plan.lender))
            multiple = process.worker.block
            request = PrefixRequest(prefix_id(plan), lender, content, self._own(plan), multiple)
            process.submit(lambda now: borrowing.ask(now, request))

        def too_late() -> None:
            if prompt.asked_at is not None:
                world.books.check(not first, "%s has no answer for its prefix", plan.name)
                self.answered(plan, 0)  # the first worker is dead

        self._later(world.ask_bound(), too_late)

    def answered(self, plan: Plan, tokens: int) -> None:
        """Handles the answer to the question for a prefix."""
        process, world = self._process, self._world
        if process.stopped:
            self._stuck_steps.append(lambda: self.answered(plan, tokens))
            return
        prompt = self._prompts.get(plan.name)
        if process.leaving:
            return
        if prompt is None or prompt.asked_at is None:
            if tokens:
                self._release(plan)
            return
        waited, prompt.asked_at = world.clock.now - prompt.asked_at, None
        own = self._own(plan)
        self._note_silence(plan, world.clock.now - waited)
        if world.scenario.answers_soon(plan):
            soon = world.prompt_s + world.scenario.step
            world.books.check(waited < soon, "%s waited %.1f s for an answer", plan.name, waited)
        if world.scenario.lends(plan):
            expected = world.cached_tokens(plan)
            expected = expected if expected > own else 0
            text = "%s may borrow %d tokens, not %d"
            world.books.check(tokens == expected, text, plan.name, tokens, expected)
        world.books.ended["lent to a prompt" if tokens else "not lent"] += 1
        if tokens and (prompt.finished or prompt.tables or not self._allocate(prompt)):
            self._release(plan)
        elif tokens:
            self._load(prompt, tokens)
        self._kick()

    def _note_silence(self, plan: Plan, asked_at: float) -> None:
        """Checks that a lender that is dead and has not answered is not asked again for some time."""
        process, world, lender = self._process, self._world, plan.lender
        if process.outcomes.pop(prefix_id(plan), None) is not LendOutcome.SILENT or lender in world.processes:
            return
        since, life = self._silences.get(lender, (0.0, None))
        asked_again = life == world.life(lender) and since < asked_at < since + 0.9 * world.times.remember
        world.books.check(not asked_again, "%s waits for %s, which was silent before", plan.name, lender)
        self._silences[lender] = world.clock.now, world.life(lender)
        world.books.ended["silent lender"] += 1

    def _release(self, plan: Plan) -> None:
        process, lender = self._process, lender_address(self._world.address(plan.lender))
        process.submit(lambda now: process.effects.decode.release(now, prefix_id(plan), lender))

    def _load(self, prompt: _Prompt, tokens: int) -> None:
        process, plan, pool = self._process, prompt.plan, self._process.pool
        size, own, name = process.worker.block, prompt.computed, prefix_id(prompt.plan)
        load = _PrefixLoad(prompt, tokens, self._world.clock.now)
        prompt.load = self._prefix_loads[name] = load
        # A window that begins in a granule needs all of it. Granules have at most 32 tokens.
        window = max(0, tokens - plan.window) // 32 * 32
        groups = []
        for group, needed in enumerate((own, max(own, window))):
            first, end = needed // size, tokens // size
            table = prompt.tables[group]
            for layer in process.worker.layers:
                if GROUP_OF_LAYER[layer] == group:
                    for logical in range(first, end):
                        pool.wait_for(layer, plan.computed_prompt, tokens, logical, table[logical])
                    steps = range(first * size // STEP, tokens // STEP)
                    load.wanted += [(layer, step, table[pool.logical(layer, step)]) for step in steps]
            groups.append(GroupTarget(first, tuple(table[first:end]), needed))
        content = content_of(plan.computed_prompt, plan.tokens - 1)
        request = DecodeRequest(
            request_id=name,
            transfer_id=name,
            engine=lender_address(self._world.address(plan.lender)),
            prompt_tokens=tokens,
            first_token=own,
            prompt_hash=content.prompt_hash(tokens),
            groups=(*groups, GroupTarget(0, ())),
        )
        self._world.books.note("%s borrows %s, tokens [%d, %d)", process, name, own, tokens)
        process.submit(lambda now: process.effects.decode.reserve(now, request))

    def loaded(self, transfer_id: str, failed: bool, stale: bool) -> None:
        """Handles the agent's report on a prefix."""
        process, world = self._process, self._world
        books, load = world.books, self._prefix_loads.pop(transfer_id)
        prompt = load.prompt
        prompt.load = None
        books.note("%s: %s is reported as received, failed=%s", process, transfer_id, failed)
        busy = process.engine.awaiting(set(prompt.blocks))
        books.check(not busy, "%s: pages may land in the blocks of %s", process, transfer_id)
        books.check(failed == stale, "%s failed, and is not to be computed", transfer_id)
        waited = world.clock.now - load.begun
        books.check(waited < world.load_bound(), "%s was received after %.1f s", transfer_id, waited)
        kind = "prefix failed" if failed else "prefix cancelled" if load.cancelled else "prefix received"
        books.ended[kind] += 1
        if world.scenario.lends(prompt.plan):
            books.check(not failed, "%s failed for no reason", transfer_id)
        missing = [one for wanted in load.wanted for one in process.pool.missing(*wanted)]
        for block in prompt.blocks:
            process.pool.awaited.pop(block, None)
        if prompt.finished:
            if load.sent and not process.leaving:
                self._give(prompt)
            return
        if failed:
            self._give(prompt)
            prompt.tables, prompt.computed = [], 0
        else:
            books.check(not missing, "%s was received and lacks %s", transfer_id, missing)
            prompt.computed = load.tokens
        self._kick()

    def _leave_prefix(self, prompt: _Prompt) -> None:
        """Ends the question and the load of a prompt that is left."""
        process, name = self._process, prefix_id(prompt.plan)
        decode = process.effects.decode
        if prompt.asked_at is not None:
            prompt.asked_at = None
            if process.place[1] == 0:
                process.submit(lambda now: decode.borrowing.withdraw(now, name))
        if prompt.load is not None:
            prompt.load.cancelled = True
            process.submit(lambda now: decode.cancel(now, name))

    # --- Preemption

    def _preempt(self, prompts: Sequence[_Prompt]) -> None:
        """Stands in for Agent.preempt: the engine's thread continues once nothing reads these blocks."""
        process, world = self._process, self._world
        ids = [prompt.plan.transfer_id for prompt in prompts if not prompt.plan.alone]
        world.books.note("%s preempts %s", process, ids)
        draining: list[tuple[Share, int, int]] = []
        begun = world.clock.now
        give_up = begun + world.times.drain

        def command(now: float) -> Sequence[Action]:
            for share in process.effects.prefill.preempt(ids):
                outgoing = process.effects.writes.open.get(share)
                if outgoing is not None:
                    draining.append((share, outgoing.number, outgoing.last_signal))
            self._later(0.0, look)
            return ()

        def look() -> None:
            draining[:] = [
                writes
                for writes in draining
                if process.engine.signal.value < writes[2] or not process.engine.quiet(writes[1])
            ]
            if not draining:
                resume()
            elif world.clock.now < give_up:
                self._later(0.01, look)
            else:
                process.submit(fence)

        def fence(now: float) -> Sequence[Action]:
            for share, _, _ in draining:
                process.effects.run(now, process.effects.prefill.quiesce_failed(now, share))
            process.effects.writes.when_over(
                [share for share, _, _ in draining], lambda: self._later(0.0, resume)
            )
            return ()

        def resume() -> None:
            waited, limit = world.clock.now - begun, world.preemption_bound()
            world.books.check(waited < limit, "%s was kept from its step for %.1f s", process, waited)
            for prompt in prompts:
                self._give(prompt)
                prompt.tables, prompt.computed, prompt.named = [], 0, 0
                prompt.ready_at = world.clock.now + process.rng.uniform(0, 0.3)
            self._step()

        process.submit(command)

    def _give(self, prompt: _Prompt) -> None:
        blocks = prompt.blocks
        busy = self._process.engine.reading(set(blocks))
        self._world.books.check(
            not busy, "%s: the blocks of %s come back while they may be read", self._process, prompt.plan.name
        )
        self._process.pool.give(blocks)


def sampled(plan: Plan) -> int:
    """Returns the token behind the prompt."""
    return zlib.crc32(plan.computed_prompt.encode())


def prompt_hash(plan: Plan, prompt: str) -> bytes | None:
    """Returns 16 bytes, as both sides compute them from their tokens, or None on both sides."""
    return prompt.encode().ljust(16, b".")[:16] if plan.hashed else None
