"""A fuzzer of the connector's scheduler half: checks the contents of every block under vLLM's real Scheduler.

A world is two engines, and a model of each slot of their KV caches. The content of a slot is the weight
version, the KV cache group, and all tokens up to that slot. Pretended workers copy P's pages into D's blocks
at any moment that the protocol allows.

A world fails if a step reads a slot with other contents than its request's, or if a page lands in a free
block. It fails if a request of any weight version would find other contents in the prefix cache than its own.
It also fails if requests or blocks are left at the end.

A scenario is a list of operations, so a failing one is reduced to the few that it needs.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_stage import BLOCK, FULL, PARAMS_OF_D, PARAMS_OF_P, SLIDING, WINDOW, Stage, vllm_config

from kv_connector.agent.commands import (
    CacheCleared,
    CancelLoad,
    DeferLoad,
    FailLoad,
    FinishPrefill,
    PromptNext,
    ReleaseTransfer,
)
from kv_connector.lab.model import make_llama
from kv_connector.protocol.requests import DecodeRequest, PrefillRequest
from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.scheduling.first_token import FirstTokenScheduler, choose_scheduler
from tests.fuzz.seeds import chosen_seeds, search

Mark = tuple[int, int, int]  # weight version, KV cache group, hash of the tokens up to the slot
MIXED = 0  # the weight version of KV that was computed behind KV of an earlier version
SAMPLED = 7  # the token that Stage's model always samples
BUDGET = 256  # tokens per step
PAUSE_ROUNDS = 8  # a report of a worker, a load and its report, with some to spare
QUIET_ROUNDS = 120  # without the end of any request; the longest prompt and its answer take some 60 steps


@dataclass(frozen=True)
class Kind:
    """One sort of world."""

    both: bool = False
    """Whether both engines are P and D. Otherwise the first is P, the second D."""
    sliding: bool = False
    """Whether a second KV cache group has a sliding window."""
    v2: bool = False
    """Whether model runner V2 is used, whose D begins with P's first token."""
    policy: str = "fcfs"
    recompute: bool = False
    """Whether the policy for failed loads is to recompute."""
    blocks: int = 60
    keeps: bool = False
    """Whether most updates keep the KV cache."""


@dataclass(frozen=True)
class Op:
    """One operation. ``salt`` seeds its random choices."""

    name: str
    salt: int


NAMES = {  # with their frequencies
    "transfer": 14,  # a prompt for P and its KV load for D, some steps apart
    "burst": 1,  # twelve transfers at once
    "local": 3,  # a request without a transfer
    "step": 60,
    "push": 25,
    "abort": 4,
    "leave": 1,  # many clients leave at once
    "break": 2,  # a lane breaks
    "pause": 2,  # a pause for new weights
}
KEEPING = NAMES | {"local": 10, "pause": 8}
"""Frequencies where updates keep the KV cache. Streams and updates must coincide, and prompts and updates."""


def scenario(seed: int, length: int = 120) -> tuple[Kind, list[Op]]:
    rng = Random(seed)
    kind = Kind(
        both=rng.random() < 0.4,
        sliding=rng.random() < 0.5,
        v2=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "priority"]),
        recompute=rng.random() < 0.5,
        blocks=rng.choice([44, 60, 100]),
        keeps=seed % 2 == 1,
    )
    frequencies = KEEPING if kind.keeps else NAMES
    names = rng.choices(list(frequencies), list(frequencies.values()), k=length)
    return kind, [Op(name, rng.randrange(1 << 30)) for name in names]


class Wrong(AssertionError):
    """The connector or vLLM has broken a rule."""


class Tokens:
    """Marks of a token sequence. Each is computed once."""

    def __init__(self) -> None:
        self._hashes: dict[str, list[int]] = {}

    def mark(self, request: Any, position: int) -> int:
        hashes = self._hashes.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        while len(hashes) <= position:
            hashes.append(hash((hashes[-1] if hashes else 0, tokens[len(hashes)])))
        return hashes[position]

    def forget(self, request_id: str) -> None:
        self._hashes.pop(request_id, None)


@dataclass
class Transfer:
    """One transfer, as the workers of both engines know it."""

    p: Engine
    d: Engine
    request: PrefillRequest | None = None
    pages: dict[tuple[int, int], int] = field(default_factory=dict)
    """P's valid pages: {(group, logical block): block}."""
    version: int = 0
    """Weight version with which P computed the pages."""
    last: bool = False
    finish: FinishPrefill | None = None
    sent: bool = False
    """Whether P's scheduler has been, or is about to be, notified."""
    load: DecodeRequest | None = None
    wanted: dict[tuple[int, int], int] = field(default_factory=dict)
    load_version: int = 0
    writing: bool = False
    released: bool = False
    deferred: bool = False
    begun: bool = False
    """Whether P has begun with the prompt, or is about to."""
    failed: bool = False
    stale: bool = False
    over: bool = False
    """Whether D's scheduler has been, or is about to be, notified."""


class Engine:
    """A scheduler, its KV cache, and the reports of its workers."""

    def __init__(self, world: World, number: int, role: str) -> None:
        config = world.config(role)
        self.name = f"engine {number}"
        self.world = world
        self.role = role
        self.groups = world.groups
        choose_scheduler(config)
        self.stage = Stage(
            config, world.groups, world.kind.blocks, config.scheduler_config.get_scheduler_cls()
        )
        config.scheduler_config.scheduler_cls = None
        self.pool = self.stage.scheduler.kv_cache_manager.block_pool
        self.contents: dict[int, list[Mark | None]] = {}
        self.version = 1
        self.kept: dict[str | None, int] = {None: 1}
        """Weight version of the blocks that requests of each version of ``keep_cache`` find in the cache."""
        self.mixed: set[str] = set()
        """Streams that have KV of two versions."""
        self.tokens = Tokens()
        self.sent: set[str] = set()
        self.reserved: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.discarded: set[str] = set()
        self.due: set[str] = set()
        self.sampled: dict[str, int] = {}

    @property
    def scheduler(self) -> Scheduler:
        return self.stage.scheduler

    def slot(self, block: int) -> list[Mark | None]:
        return self.contents.setdefault(block, [None] * BLOCK)

    def in_use(self, block: int) -> bool:
        return bool(self.pool.blocks[block].ref_cnt > 0)

    def step(self) -> None:
        before = [*self.scheduler.requests.values()]
        output, metadata = self.stage.schedule()
        self.mixed -= set(output.preempted_req_ids or ())
        self.world.commands(self, metadata)
        for request_id, count in output.num_scheduled_tokens.items():
            self._compute(self.scheduler.requests[request_id], count)
        self.world.computed(self, metadata)
        reports, self.sent, self.reserved = (self.sent, self.reserved), set(), set()
        loads = self.received, self.failed, self.discarded, self.sampled
        self.received, self.failed, self.discarded, self.sampled = set(), set(), set(), {}
        due, self.due = self.due, set()
        self.stage.update(
            output,
            sent=reports[0],
            reserved=reports[1],
            received=loads[0],
            failed=loads[1],
            discarded=loads[2],
            sampled=loads[3],
            due=due,
        )
        self.stage.outputs.clear()
        gone = [request for request in before if request.request_id not in self.scheduler.requests]
        self.check_cache(gone)
        for request in gone:
            self.tokens.forget(request.request_id)
            self.mixed.discard(request.request_id)

    def keep_cache(self) -> None:
        name = f"version {self.version}"
        self.stage.keep_cache(name)
        self.kept[name] = self.version
        self.mixed = {
            request.request_id
            for request in self.scheduler.running
            if request.num_computed_tokens >= request.num_prompt_tokens
        }

    def clear_cache(self) -> None:
        """The cache was emptied. Later blocks have the hashes of the last ``keep_cache``."""
        self.kept = {[*self.kept][-1]: self.version}
        self.mixed.clear()

    def check_cache(self, requests: Iterable[Any]) -> None:
        """Checks the contents that requests with the tokens of these would find, at each version.

        A version may be pushed again, and its requests find its earlier blocks.
        """
        for request in requests:
            for name, version in self.kept.items():
                found = self.stage.cached(list(request.all_token_ids), name)
                for group, blocks in enumerate(found):
                    for number, block in enumerate(blocks):
                        if block is not None:
                            self._check_block(request, group, number, block, version)

    def _check_block(self, request: Any, group: int, number: int, block: int, version: int) -> None:
        for position in range(number * BLOCK, (number + 1) * BLOCK):
            expected = version, group, self.tokens.mark(request, position)
            if (mark := self.slot(block)[position % BLOCK]) != expected:
                raise Wrong(
                    f"{self.name}: a request with the tokens of {request.request_id}, of weights {version}, "
                    f"finds position {position} of group {group} in block {block}: {mark}, not {expected}"
                )

    def _compute(self, request: Any, count: int) -> None:
        """Runs the forward pass of one request: reads all slots that it attends to, writes the new ones."""
        end: int = request.num_computed_tokens
        start = end - count
        tables = self.stage.tables(request.request_id)
        mixed = request.request_id in self.mixed
        for group, (spec, table) in enumerate(zip(self.groups, tables, strict=True)):
            first = max(0, start - WINDOW + 1) if spec is SLIDING else 0
            for position in range(first, start):
                expected = (self.version, group, self.tokens.mark(request, position))
                block = table[position // BLOCK]
                found = self.slot(block)[position % BLOCK] if block else None
                if found is None or found[mixed:] != expected[mixed:]:
                    raise Wrong(
                        f"{self.name}: {request.request_id} reads position {position} of group {group} in "
                        f"block {block}: {found} instead of {expected} (computes {start} to {end})"
                    )
            for position in range(start, min(end, request.num_tokens)):
                block = table[position // BLOCK]
                if not block:
                    raise Wrong(f"{self.name}: {request.request_id} computes {position} into no block")
                version = MIXED if mixed else self.version
                mark = version, group, self.tokens.mark(request, position)
                self.slot(block)[position % BLOCK] = mark

    def report_load(self, transfer: Transfer, *, failed: bool) -> None:
        load, finish = transfer.load, transfer.finish
        assert load is not None
        transfer.over = True
        self.received.add(load.request_id)
        if transfer.stale:
            self.discarded.add(load.request_id)
        elif failed:
            self.failed.add(load.request_id)
        if load.wants_sampled and finish is not None and finish.sampled is not None:
            self.sampled[load.request_id] = finish.sampled


class World:
    """Two engines and the transfers between them."""

    def __init__(self, kind: Kind, model: Path) -> None:
        self.kind = kind
        self._model = model
        self.groups = (FULL, SLIDING) if kind.sliding else (FULL,)
        self.transfers: dict[str, Transfer] = {}
        self.of_load: dict[str, Transfer] = {}
        self.later: list[tuple[int, Engine, dict[str, Any]]] = []
        # A prompt above a gate's quota may wait for another one: see admission.py. While it is computed, a
        # chunk and a window of its last group exist beside its pages.
        chunk = (BUDGET + WINDOW) // BLOCK + 1 if kind.sliding else 0
        self._largest = min(15, kind.blocks // (3 if kind.both else 2) - 1 - chunk)
        """Blocks of the longest prompt, in a group without a sliding window."""
        self.clock = 0
        self.names = 0
        roles = ("kv_both", "kv_both") if kind.both else ("kv_producer", "kv_consumer")
        self.engines = tuple(Engine(self, number, role) for number, role in enumerate(roles))

    def config(self, role: str) -> Any:
        policy = "recompute" if self.kind.recompute else "fail"
        config = vllm_config(self._model, role, budget=BUDGET, policy=policy)
        config.scheduler_config.policy = self.kind.policy  # type: ignore[assignment]
        return config

    # --- The pretended workers

    def commands(self, engine: Engine, metadata: StepMetadata) -> None:
        for name in metadata.preempted:
            self.transfers[name].pages.clear()
            self.transfers[name].last = False
        for command in metadata.commands:
            match command:
                case PrefillRequest():
                    transfer = self.transfers[command.transfer_id]
                    transfer.request, transfer.version = command, engine.version
                    if transfer.load is not None or transfer.released:
                        engine.reserved.add(command.transfer_id)
                    self._compare_weights(transfer)
                case FinishPrefill():
                    self.transfers[command.transfer_id].finish = command
                    self.transfers[command.transfer_id].last &= command.ok
                    self._begin(self.transfers[command.transfer_id])
                case PromptNext():
                    self._begin(self.transfers[command.transfer_id])
                case DeferLoad():
                    self.transfers[command.transfer_id].deferred = True
                    if self.transfers[command.transfer_id].begun:
                        self._begin(self.transfers[command.transfer_id])
                case DecodeRequest():
                    self._reserve(engine, command)
                case ReleaseTransfer():
                    self._release(command.transfer_id)
                case CancelLoad():
                    self._fail(self.of_load[command.request_id])
                case FailLoad():
                    raise Wrong(f"{engine.name}: no reservation for {command.request_id}")
                case CacheCleared():
                    self._cache_cleared(engine)

    def _begin(self, transfer: Transfer) -> None:
        transfer.begun = True
        if transfer.deferred:
            transfer.d.due.add(next(name for name, one in self.transfers.items() if one is transfer))

    def _reserve(self, engine: Engine, command: DecodeRequest) -> None:
        transfer = self.transfers[command.transfer_id]
        transfer.load, transfer.load_version = command, engine.version
        self.of_load[command.request_id] = transfer
        for group, target in enumerate(command.groups):
            for number, block in enumerate(target.blocks):
                logical = target.first + number
                if block and (logical + 1) * BLOCK > target.needed:
                    transfer.wanted[group, logical] = block
        if transfer.request is not None and not transfer.finish:
            transfer.p.reserved.add(command.transfer_id)
        if transfer.sent:
            transfer.failed = True  # P does not hold the prompt any more
        self._compare_weights(transfer)

    def _compare_weights(self, transfer: Transfer) -> None:
        both = transfer.request is not None and transfer.load is not None
        if both and not transfer.over and transfer.version != transfer.load_version:
            self._go_stale(transfer)

    def _release(self, name: str) -> None:
        transfer = self.transfers[name]
        transfer.released = True
        if transfer.request is not None and not transfer.finish:
            transfer.p.reserved.add(name)

    def _go_stale(self, transfer: Transfer) -> None:
        transfer.stale = transfer.failed = True
        transfer.pages.clear()

    def _fail(self, transfer: Transfer) -> None:
        transfer.failed = True

    def _cache_cleared(self, engine: Engine) -> None:
        for transfer in self.transfers.values():
            if transfer.p is engine and transfer.wanted and transfer.writing and not transfer.over:
                self._go_stale(transfer)

    def new_weights(self, engine: Engine) -> None:
        engine.version += 1
        for transfer in self.transfers.values():
            if transfer.p is engine and transfer.request is not None and transfer.finish is None:
                transfer.version = engine.version
                transfer.pages.clear()
                self._compare_weights(transfer)

    def computed(self, engine: Engine, metadata: StepMetadata) -> None:
        for pages in metadata.new_pages:
            transfer = self.transfers[pages.transfer_id]
            transfer.last |= pages.last
            if not transfer.begun:
                self._begin(transfer)
            if transfer.stale:
                continue
            for group, run in enumerate(pages.groups):
                for number, block in enumerate(run.blocks):
                    if block:
                        transfer.pages[group, run.first + number] = block

    def push(self, rng: Random, share: float) -> None:
        """Lands pages, and ends transfers."""
        for transfer in list(self.transfers.values()):
            if transfer.load is not None and not transfer.over and not transfer.failed:
                for place in sorted(transfer.wanted.keys() & transfer.pages.keys()):
                    if rng.random() < share:
                        self._copy(transfer, place)
            if rng.random() < share:
                self._end(transfer)

    def _copy(self, transfer: Transfer, place: tuple[int, int]) -> None:
        assert transfer.load is not None
        source, target = transfer.pages[place], transfer.wanted.pop(place)
        transfer.writing = True
        if not transfer.d.in_use(target):
            raise Wrong(f"{transfer.load.transfer_id}: page {place} lands in free block {target} of D")
        transfer.d.contents[target] = list(transfer.p.slot(source))

    def _end(self, transfer: Transfer) -> None:
        finish = transfer.finish
        load = transfer.load
        if load is not None and not transfer.over:
            complete = not transfer.wanted and (finish is not None or not load.wants_sampled)
            gone = transfer.sent or (finish is not None and (not finish.ok or not transfer.last))
            waits = load.wants_sampled and transfer.request is not None and finish is None
            if finish is not None and finish.ok and transfer.wanted and not transfer.failed:
                missing = transfer.wanted.keys() - transfer.pages.keys()
                if missing and transfer.last:
                    raise Wrong(f"{load.transfer_id}: P has not named pages {sorted(missing)}")
            if transfer.failed or gone:
                if not (transfer.stale and waits):
                    transfer.d.report_load(transfer, failed=True)
            elif complete:
                transfer.d.report_load(transfer, failed=False)
        unread = transfer.over or transfer.released or transfer.failed
        if finish is not None and not transfer.sent and (unread or not finish.ok):
            transfer.sent = True
            transfer.p.sent.add(finish.request_id)

    # --- Operations

    def run(self, op: Op) -> None:
        rng = Random(op.salt)
        self.clock += 1
        due = [one for one in self.later if one[0] <= self.clock]
        self.later = [one for one in self.later if one[0] > self.clock]
        for _, engine, arguments in due:
            engine.stage.add(**arguments)
        getattr(self, f"_{op.name}")(rng)

    def _transfer(self, rng: Random) -> None:
        self.names += 1
        name = f"t{self.names}"
        p, d = self.engines if rng.random() < 0.5 or not self.kind.both else self.engines[::-1]
        self.transfers[name] = Transfer(p, d)
        tokens = self._prompt(rng)
        early = self.kind.v2 and rng.random() < 0.7
        for_p = dict(PARAMS_OF_P, transfer_id=name)
        if rng.random() < 0.2:
            for_p["serial"] = True
        for_d = dict(PARAMS_OF_D, transfer_id=name) | ({"early_token": True} if early else {})
        priority = rng.choice([0, 0, 0, 1, -1]) if self.kind.policy == "priority" else 0
        max_tokens = rng.choice([1, 2, 5, 40])
        halves: list[tuple[Engine, dict[str, Any]]] = [
            (p, {"request_id": f"p-{name}", "prompt": tokens, "params": for_p, "priority": priority}),
            (
                d,
                {
                    "request_id": f"d-{name}",
                    "prompt": tokens,
                    "params": for_d,
                    "max_tokens": max_tokens,
                    "priority": priority,
                },
            ),
        ]
        rng.shuffle(halves)
        halves[0][0].stage.add(**halves[0][1])
        if rng.random() < 0.95:
            self.later.append((self.clock + rng.choice([0, 0, 3, 30]), *halves[1]))
        else:
            self.later.append((self.clock + 200, *halves[1]))

    def _prompt(self, rng: Random) -> list[int]:
        """Draws a prompt of one of three families, so that prompts share beginnings. Lengths favour edges of
        blocks and of the window."""
        blocks = self._largest
        edge = rng.randrange(1, blocks + 1) * BLOCK
        length = rng.choice([rng.randrange(1, blocks * BLOCK), edge - 1, edge, min(edge + 1, blocks * BLOCK)])
        family = rng.randrange(3)
        shared = rng.choice([length, rng.randrange(length + 1), 0])
        own = rng.randrange(1 << 20)
        return [
            (position * 31 + family) % 300 if position < shared else (position * 17 + own) % 300
            for position in range(length)
        ]

    def _burst(self, rng: Random) -> None:
        for _ in range(12):
            self._transfer(Random(rng.randrange(1 << 30)))

    def _local(self, rng: Random) -> None:
        self.names += 1
        engine = rng.choice(self.engines)
        engine.stage.add(f"l-t{self.names}", self._prompt(rng), max_tokens=rng.choice([1, 5, 60]))

    def _step(self, rng: Random) -> None:
        rng.choice(self.engines).step()

    def _push(self, rng: Random) -> None:
        self.push(rng, rng.choice([0.2, 0.5, 1.0]))

    def _abort(self, rng: Random) -> None:
        engine = rng.choice(self.engines)
        if live := sorted(engine.scheduler.requests):
            engine.stage.abort(rng.choice(live))

    def _leave(self, rng: Random) -> None:
        for engine in self.engines:
            for request_id in sorted(engine.scheduler.requests):
                if rng.random() < 0.7:
                    engine.stage.abort(request_id)

    def _break(self, rng: Random) -> None:
        loads = [one for one in self.transfers.values() if one.load is not None and not one.over]
        if loads:
            self._fail(rng.choice(loads))

    def _pause(self, rng: Random) -> None:
        """Gives one engine new weights, as pause_generation(mode="keep") does, with its cache or without."""
        engine = rng.choice(self.engines)
        engine.check_cache(engine.scheduler.running)
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(rng.randrange(3)):
            engine.step()
        if self.kind.keeps and rng.random() < 0.7:
            updated = self._settle(engine, rng)
            if updated:
                self.new_weights(engine)
                engine.keep_cache()
        else:
            held = any(request.is_finished() for request in engine.scheduler.requests.values())
            try:
                updated = engine.scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=True
                )
            except RuntimeError:
                updated = False
            if updated:
                self.new_weights(engine)
                engine.clear_cache()
            elif not held:
                raise Wrong(f"{engine.name}: a reset fails, and no finished request is left")
        if updated:
            engine.step()
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _settle(self, engine: Engine, rng: Random) -> bool:
        """Runs a paused engine until its finished prompts have been sent, for which vLLM's pause waits.

        Returns False if some stay because no decode engine loads them.
        """
        for _ in range(PAUSE_ROUNDS):
            if not engine.scheduler.has_requests():
                return True
            for one in self.engines:
                one.step()
            self.push(rng, 1.0)
        return False

    def finish(self) -> None:
        """Ends all requests, and checks that nothing of them is left."""
        rng = Random(0)
        for _, engine, arguments in self.later:
            engine.stage.add(**arguments)
        self.later.clear()
        rounds = quiet = left = 0
        while any(engine.scheduler.has_requests() for engine in self.engines):
            for engine in self.engines:
                engine.step()
            self.push(rng, 1.0)
            rounds += 1
            if rounds % 50 == 0:
                self._expire()
            before, left = left, sum(len(engine.scheduler.requests) for engine in self.engines)
            quiet = quiet + 1 if left == before else 0
            if quiet > QUIET_ROUNDS:
                names = [sorted(engine.scheduler.requests) for engine in self.engines]
                raise Wrong(f"requests wait for ever: {names}")
        for engine in self.engines:
            engine.stage.assert_idle()

    def _expire(self) -> None:
        """Passes deadlines, for halves whose other half was aborted or refused before the workers knew it."""
        for transfer in self.transfers.values():
            if transfer.finish is not None and transfer.load is None:
                transfer.failed = True
            if transfer.deferred and transfer.request is None:
                self._begin(transfer)
            if transfer.load is not None and transfer.request is None:
                transfer.failed = True


@contextmanager
def runner(*, v2: bool) -> Iterator[None]:
    """Configures engines as on a GPU, which V2 needs. No model runner runs here."""
    with ExitStack() as stack:
        if v2:
            stack.enter_context(patch("vllm.config.vllm.HAS_TRITON", True))
            stack.enter_context(patch.dict(os.environ, {"VLLM_USE_V2_MODEL_RUNNER": "1"}))
        yield


def play(kind: Kind, ops: Sequence[Op], model: Path) -> None:
    """Plays the operations. Raises if a rule is broken."""
    with runner(v2=kind.v2):
        world = World(kind, model)
        assert isinstance(world.engines[1].scheduler, FirstTokenScheduler) == kind.v2
        for op in ops:
            world.run(op)
        world.finish()


def failure(kind: Kind, ops: Sequence[Op], model: Path) -> BaseException | None:
    try:
        play(kind, ops, model)
    except Exception as error:
        return error
    return None


def smallest(kind: Kind, ops: Sequence[Op], model: Path) -> list[Op]:
    """Returns the failing scenario without the operations that it does not need. Ever smaller pieces are left
    out."""
    left = list(ops)
    size = len(left) // 2
    while size:
        start = 0
        while start < len(left):
            shorter = left[:start] + left[start + size :]
            if failure(kind, shorter, model):
                left = shorter
            else:
                start += size
        size //= 2
    return left


def report(seed: int, model: Path) -> str | None:
    """Returns a description of the fault that this seed finds, with its smallest scenario, or None."""
    kind, ops = scenario(seed)
    if failure(kind, ops, model) is None:
        return None
    ops = smallest(kind, ops, model)
    return f"seed {seed}: {failure(kind, ops, model)!r}\n  the smallest scenario: {kind}, {ops}"


def main() -> None:
    seeds = chosen_seeds(__doc__, 1000, "scenarios")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        model = make_llama(Path(folder), layers=1, hidden=64, intermediate=64)
        search(seeds, "scenarios", lambda seed: report(seed, model))


if __name__ == "__main__":
    main()
