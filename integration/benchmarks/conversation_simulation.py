"""Conversations without GPUs: the router's policies over a model of vLLM's steps and prefix caches.

Each turn of a conversation repeats the turns before and their answers. The table shows what each policy lets
the prefill engines compute, what moves to the decode engines, and how evenly both sides are used. The steps
are those of goodput_simulation.py. A prefill engine has no answer in its cache. With `cache_aware, lending`
it loads what the router proposes and another engine has.

`thresholds CACHE, ABS, REL` is the rule of sglang-router and vllm-router, as their documentation describes
it, for each side by itself:

- If the engines' requests differ by more than ABS and by more than a factor of REL, the engine with the
  fewest requests is chosen.
- Else the engine with the longest match is chosen, if the match is more than CACHE of the prompt.
- Else the engine to which the fewest characters were sent is chosen.

`affinity` sends each turn to the engines of the turn before.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import goodput_simulation as steps
from goodput_simulation import LANDING_S, Clock, SimulatedEngine, SimulatedRequest
from msgspec.structs import replace
from second_source import SECOND_HEADS, RequestTimes, SecondSource, second_cells

from kv_connector.control.membership import HEARTBEAT_S
from kv_connector.router.bodies.messages import ChatMessage
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import TEXT_SIDES, Side
from kv_connector.router.engines.pool import Member, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement import cache_aware
from kv_connector.router.placement.cache_aware import CacheAware
from kv_connector.router.placement.policy import FewestOutstanding, Placement, PlacementRequest
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.transcript import Said

PATH = "/v1/chat/completions"
BLOCK = 16
TOKEN_CHARACTERS = 4
# Tokens that a template puts around a message, and behind the last one.
AROUND, BEHIND = 4, 3
# KV of a token in bytes, of the model with which the table of docs/decisions/012 was measured on CPUs.
TOKEN_BYTES = 4096
# Seconds to load a token from another engine: 128 KiB (8 billion parameters) at 2/3 of 400 Gb/s.
LOAD_S = (128 << 10) / (400e9 / 8 * 2 / 3)
# Seconds until an idle engine answers a question for a prefix. A busy engine ends its step first, which takes
# half a step on average.
ANSWER_S = 1e-3

LENDING = "cache_aware, lending"

Tokens = list[str]


@dataclass(frozen=True)
class Workshape:
    conversations: int
    turns: int
    shared: int
    """Tokens of a system prompt that all conversations have; 0: none."""
    first: int
    """Tokens of the first question."""
    more: int
    """Tokens of each later question."""
    answer: int
    at_once: int
    think: float
    """Seconds between an answer and the next turn."""
    rewritten: bool = False
    """Whether the next turn has other tokens for the same answer."""


class HeldBlocks:
    """The blocks of one request."""

    def __init__(self, ids: list[int], hit: int) -> None:
        self.ids = ids
        self.hit = hit
        """Tokens that were in the prefix cache."""


class SimulatedBlocks:
    """An engine's blocks, as vLLM's block pool has them.

    A block with contents stays in the prefix cache until another request takes it. Free blocks are taken in
    the order in which they became free, the last block of a request first, and those without contents before
    all others.
    """

    def __init__(self, room: int) -> None:
        self._free = OrderedDict.fromkeys(range(room // BLOCK))
        self._refs = [0] * len(self._free)
        self._keys: dict[int, int] = {}  # {block: hash of the prompt's beginning up to its end}
        self._cached: dict[int, list[int]] = {}  # {hash: blocks}

    def hit(self, tokens: Tokens) -> int:
        """Returns the tokens at the beginning that need not be computed."""
        return len(self._found(tokens)) * BLOCK

    def take(self, tokens: Tokens) -> HeldBlocks | None:
        """Returns blocks for the prompt; None: too few are free."""
        found = self._found(tokens)
        new = -(-len(tokens) // BLOCK) - len(found)
        if len(self._free) - sum(not self._refs[block] for block in found) < new:
            return None
        for block in found:
            self._refs[block] += 1
            self._free.pop(block, None)
        return HeldBlocks([*found, *(self._new() for _ in range(new))], len(found) * BLOCK)

    def grow(self, held: HeldBlocks, tokens: int) -> None:
        """Takes the blocks for so many tokens in all, as far as blocks are free."""
        for _ in range(min(-(-tokens // BLOCK) - len(held.ids), len(self._free))):
            held.ids.append(self._new())

    def computed(self, held: HeldBlocks, tokens: Tokens) -> None:
        """Notes that the blocks have the KV of these tokens. Later prompts find the full blocks."""
        for block, key in zip(held.ids, _keys(tokens), strict=False):
            if block not in self._keys:
                self._keys[block] = key
                self._cached.setdefault(key, []).append(block)

    def give_back(self, held: HeldBlocks) -> None:
        for block in reversed(held.ids):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._keys)

    def _found(self, tokens: Tokens) -> list[int]:
        found = []
        for key in _keys(tokens[: len(tokens) - 1]):
            if key not in self._cached:
                break
            found.append(self._cached[key][0])
        return found

    def _new(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._refs[block] = 1
        if (key := self._keys.pop(block, None)) is not None:
            self._cached[key].remove(block)
            if not self._cached[key]:
                del self._cached[key]
        return block


def _keys(tokens: Tokens) -> Iterator[int]:
    key = 0
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[at : at + BLOCK]))
        yield key


@dataclass
class Conversation:
    number: int
    rng: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)
    new: int = 0
    """Tokens that no turn before had."""

    def say(self, role: str, count: int) -> str:
        text = "".join(self.word() for _ in range(count))
        self.messages.append({"role": role, "content": text})
        self.new += count + AROUND
        return text

    def word(self) -> str:
        """Returns a token of TOKEN_CHARACTERS."""
        return "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz", k=TOKEN_CHARACTERS))

    def tokens(self) -> Tokens:
        found: Tokens = []
        for message in self.messages:
            text = message["content"]
            found += [message["role"]] * AROUND
            found += [text[at : at + TOKEN_CHARACTERS] for at in range(0, len(text), TOKEN_CHARACTERS)]
        return found + ["assistant"] * BEHIND


class Thresholds:
    """The rule of sglang-router and vllm-router, for each side by itself."""

    def __init__(self, pools: dict[Side, Pool], cache: float, most: int, times: float) -> None:
        self.name = f"thresholds {cache:g}, {most}, {times:g}"
        self._pools = pools
        self._cache, self._most, self._times = cache, most, times
        self._sent: dict[tuple[Side, Endpoint], list[str]] = {}
        self._sizes: dict[tuple[Side, Endpoint], int] = {}

    def place(self, request: PlacementRequest) -> Placement:
        text = bytes(request.completion.body["messages"]).decode()
        prefill, decode = (self._choose(side, text) for side in TEXT_SIDES)
        return Placement(prefill, decode, "thresholds")

    def _choose(self, side: Side, text: str) -> Endpoint:
        members = self._pools[side].choices()
        loads = [one.outstanding for one in members]

        def match(one: Member) -> int:
            sent = self._sent.get((side, one.endpoint), [])
            return max((_common(text, other) for other in sent), default=0)

        matches = {one.endpoint: match(one) for one in members}
        if max(loads) - min(loads) > self._most and max(loads) > self._times * min(loads):
            chosen = min(members, key=lambda one: one.outstanding).endpoint
        else:
            chosen = max(matches, key=matches.__getitem__)
            if matches[chosen] <= self._cache * len(text):
                chosen = min(matches, key=lambda one: self._sizes.get((side, one), 0))
        key = side, chosen
        self._sizes[key] = self._sizes.get(key, 0) + len(text) - matches[chosen]
        self._sent.setdefault(key, []).append(text)
        return chosen


def _common(one: str, other: str) -> int:
    """Returns the number of characters with which both texts begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


class Affinity:
    """Each turn goes to the engines of the turn before; new conversations to the fewest requests."""

    name = "affinity"

    def __init__(self, pools: dict[Side, Pool]) -> None:
        self._first = FewestOutstanding(pools)
        self._places: dict[int | None, Placement] = {}

    def place(self, request: PlacementRequest) -> Placement:
        if request.session not in self._places:
            self._places[request.session] = self._first.place(request)
        return self._places[request.session]


@dataclass
class Forecast:
    """Forecast hits of a side's prefix caches, in tokens."""

    predicted: int = 0
    right: int = 0
    """Predicted tokens that were cached."""

    def add(self, predicted: int, actual: int) -> None:
        self.predicted += predicted
        self.right += min(predicted, actual)

    @property
    def share(self) -> float:
        return self.right / self.predicted if self.predicted else 1.0


class SimulatedFleet:
    """Prefill and decode engines behind one policy."""

    def __init__(
        self, make: Callable[[SimulatedFleet], Any], prefills: int, decodes: int, room: int, *, lends: bool
    ) -> None:
        """``lends``: whether engines lend prefixes to prefill engines."""
        self.clock = Clock()
        self._room = room
        self.pools = {side: Pool() for side in TEXT_SIDES}
        self.index = PrefixIndex()
        self.forecasts = {side: Forecast() for side in TEXT_SIDES}
        self.caches = CacheRecords(count=self._count)
        self.engines: dict[Endpoint, SimulatedEngine] = {}
        self.kept: dict[Endpoint, SimulatedBlocks] = {}
        self._short: dict[Endpoint, list[Callable[[], None]]] = defaultdict(list)
        """Requests that wait for blocks of a decode engine."""
        self._names = itertools.count()
        self.computed: dict[Endpoint, int] = {}
        self.generated: dict[Endpoint, int] = {}
        self.moved = self.lent = 0
        self.second_source = SecondSource(LOAD_S)
        self._reported = -1.0
        self.firsts: list[float] = []
        self._rewritten = False
        for side, count in ((Side.PREFILL, prefills), (Side.DECODE, decodes)):
            for number in range(count):
                endpoint = Endpoint.parse(f"http://{side.value}{number}:1")
                workload = Workload(self.clock)
                self.pools[side].set_usable(endpoint, True, workload, prefixes="same", borrows=lends)
                self.index.add(workload.cache)
                self.engines[endpoint] = SimulatedEngine(self.clock, cost=steps.COST)
                self.kept[endpoint] = SimulatedBlocks(room)
                (self.computed if side is Side.PREFILL else self.generated)[endpoint] = 0
        self.policy = make(self)

    def _count(self, side: Side, predicted: int, actual: int) -> None:
        self.forecasts[side].add(predicted, actual)

    def turn(self, one: Conversation, answer: int, then: Callable[[], None]) -> None:
        """Serves a turn; ``then`` is called at its end."""
        raw = json.dumps({"model": "m", "messages": one.messages, "stream": True}).encode()
        completion = Completion.decode(raw)
        self._report()
        placement = self.policy.place(PlacementRequest(completion, PATH, session=one.number))
        if placement.prompt is None:
            placement = Placement(placement.prefill, placement.decode, "", prompt=completion.prompt(PATH))
        p, d, tokens = placement.prefill, placement.decode, one.tokens()
        assert p is not None
        prompt = placement.prompt
        prefill = self.pools[Side.PREFILL].acquire(p, placement.work, prompt=prompt)
        decode = self.pools[Side.DECODE].acquire(d, context=placement.tokens, prompt=prompt)
        name = str(next(self._names))
        self.caches.sent(name, decode)
        at_prefill, at_decode = self.kept[p], self.kept[d]
        request = SimulatedRequest(len(tokens), answer, self.clock.now)
        held: dict[Endpoint, HeldBlocks] = {}
        computed, cached = False, 0
        times = RequestTimes()

        def admitted() -> bool:
            nonlocal cached
            if (blocks := at_prefill.take(tokens)) is None:
                return False
            held[p] = blocks
            times.begins = self.clock.now
            request.computed = cached = max(blocks.hit, loaded)
            self.lent += cached - blocks.hit
            self.computed[p] += len(tokens) - cached
            return True

        def reserve() -> None:
            others = {one: kept.hit(tokens) for one, kept in self.kept.items() if one not in (p, d)}
            if (blocks := at_decode.take(tokens)) is None:
                self._short[d].append(reserve)
                return
            held[d] = blocks
            times.reserved = self.clock.now
            times.missing = len(tokens) - blocks.hit
            third = max(others, key=others.__getitem__)
            times.third = max(0, others[third] - blocks.hit)
            times.lends = placement.prefix is not None and placement.prefix.lender == third
            self.moved += times.missing
            counts = len(tokens), blocks.hit
            self.clock.after(HEARTBEAT_S / 2, lambda: self.caches.received(name, *counts))
            if computed:
                sent()

        def first() -> None:
            nonlocal computed
            computed = True
            self.engines[p].leave(request)
            times.first = self.clock.now
            self.firsts.append(self.clock.now - request.arrives)
            at_prefill.computed(held[p], tokens)
            report = Computed(tokens=len(tokens), cached=cached)
            self.caches.prefilled(prefill, report, placement.prefix)
            prefill.release()
            decode.counted(len(tokens))
            if d in held:
                sent()

        def sent() -> None:
            self.second_source.add(times, cached - held[p].hit)
            self.clock.after(LANDING_S, landed)

        def landed() -> None:
            at_prefill.give_back(held[p])
            self.engines[p].step()
            at_decode.computed(held[d], tokens)
            at_decode.grow(held[d], len(tokens) + answer - 1)
            self.caches.began(decode, placement)
            request.begins = lambda: True
            self.engines[d].add(request)

        def end() -> None:
            decode.release()
            text = one.say("assistant", answer)
            self.generated[d] += answer
            # The last token of the answer is not computed.
            generated = one.tokens()[: -BEHIND - 1]
            if self._rewritten:
                generated[1 - answer :] = map(str.upper, generated[1 - answer :])
            at_decode.computed(held[d], generated)
            at_decode.give_back(held[d])
            short, self._short[d] = self._short[d], []
            for again in short:
                again()
            said = Said(ChatMessage(role="assistant", content=text))
            self.caches.answered(decode, said, placement, moved=None)
            then()

        request.begins, request.on_first, request.on_end = admitted, first, end
        loaded, wait = self._loads(p, placement, tokens)
        self.clock.after(wait, lambda: self.engines[p].add(request))
        self.clock.after(steps.DECODE_S / 2 if self.engines[d].running else 0.0, reserve)

    def _report(self) -> None:
        """Reports the engines' workloads to the router, each second."""
        if self.clock.now < self._reported + 1.0:
            return
        self._reported = self.clock.now
        for pool in self.pools.values():
            for member in pool.choices():
                load = self.engines[member.endpoint].load
                member.workload.hear(replace(load, cache_tokens=self._room, block_tokens=BLOCK))

    def _loads(self, p: Endpoint, placement: Placement, tokens: Tokens) -> tuple[int, float]:
        """Returns the end of the prefix that the prefill engine loads, and the seconds that this takes."""
        if placement.prefix is None:
            return 0, 0.0
        lender = placement.prefix.lender
        wait = steps.DECODE_S / 2 if self.engines[lender].running else ANSWER_S
        end = self.kept[lender].hit(tokens)
        return end, wait + max(0, end - self.kept[p].hit(tokens)) * LOAD_S

    def run(self, shape: Workshape, seed: int) -> int:
        """Serves all conversations; returns their new tokens."""
        self._rewritten = shape.rewritten
        rng = random.Random(seed)
        system = Conversation(-1, rng).say("system", shape.shared) if shape.shared else ""
        waiting = iter(
            [Conversation(number, random.Random(rng.random())) for number in range(shape.conversations)]
        )
        done: list[Conversation] = []

        def begin() -> None:
            if (one := next(waiting, None)) is None:
                return
            if system:
                one.messages.append({"role": "system", "content": system})
                one.new += shape.shared + AROUND
            one.say("user", shape.first)
            turns = itertools.count(1)

            def over() -> None:
                if next(turns) == shape.turns:
                    done.append(one)
                    begin()
                else:
                    one.say("user", shape.more)
                    self.clock.after(shape.think, lambda: self.turn(one, answer(), over))

            def answer() -> int:
                return max(2, round(one.rng.gauss(shape.answer, shape.answer / 4)))

            self.turn(one, answer(), over)

        for number in range(shape.at_once):
            self.clock.after(number * 0.01, begin)
        self.clock.run()
        assert len(done) == shape.conversations
        return sum(one.new for one in done)


def spread(counts: Collection[int]) -> float:
    return max(counts) / max(1, min(counts))


def policies() -> dict[str, Callable[[SimulatedFleet], Any]]:
    return {
        "fewest_outstanding": lambda fleet: FewestOutstanding(fleet.pools),
        "thresholds 0.3, 64, 1.5": lambda fleet: Thresholds(fleet.pools, 0.3, 64, 1.5),
        "thresholds 0.5, 32, 1.0001": lambda fleet: Thresholds(fleet.pools, 0.5, 32, 1.0001),
        "affinity": lambda fleet: Affinity(fleet.pools),
        "cache_aware": _cache_aware,
        LENDING: _cache_aware,
    }


def _cache_aware(fleet: SimulatedFleet) -> CacheAware:
    return CacheAware(fleet.pools, fleet.index, fleet.caches.sizes, fleet.caches.sessions, fleet.clock)


def line(name: str, shape: Workshape, plan: argparse.Namespace) -> list[str]:
    """Returns the cells of one policy, as means over the seeds."""
    runs = []
    for seed in plan.seeds:
        fleet = SimulatedFleet(policies()[name], plan.prefill, plan.decode, plan.room, lends=name == LENDING)
        new = fleet.run(shape, seed)
        runs.append(
            (
                sum(fleet.computed.values()) / new,
                fleet.moved * TOKEN_BYTES / 1e6 / shape.conversations,
                fleet.lent * TOKEN_BYTES / 1e6 / shape.conversations,
                spread(fleet.computed.values()),
                spread(fleet.generated.values()),
                statistics.median(fleet.firsts) * 1e3,
                statistics.quantiles(fleet.firsts, n=100)[-1] * 1e3,
                100 * fleet.forecasts[Side.PREFILL].share,
                100 * fleet.forecasts[Side.DECODE].share,
                *fleet.second_source.columns(),
            )
        )
    means = [statistics.fmean(column) for column in zip(*runs, strict=True)]
    computed, moved, lent, p, d, p50, p99, right_p, right_d, *second = means
    cells = [
        f"{computed:.2f}",
        f"{moved:.1f}",
        f"{lent:.1f}",
        f"{p:.2f}",
        f"{d:.2f}",
        f"{p50:.1f} / {p99:.1f}",
        f"{right_p:.1f}, {right_d:.1f}",
    ]
    return [name, *cells, *second_cells(second)]


def table(rows: Sequence[Sequence[str]]) -> str:
    head = [
        "policy",
        "tokens computed per new token",
        "MB moved per conversation",
        "MB lent",
        "spread P",
        "spread D",
    ]
    head += ["first token, ms, p50 / p99", "right of predicted hits, %, P, D"]
    head += SECOND_HEADS
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def main() -> None:
    global BLOCK, TOKEN_CHARACTERS, LOAD_S
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=list(policies()), choices=list(policies()))
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--shared", type=int, default=0, help="tokens of a system prompt that all have")
    parser.add_argument("--first", type=int, default=440, help="tokens of the first question")
    parser.add_argument("--more", type=int, default=124, help="tokens of each later question")
    parser.add_argument("--answer", type=int, default=36, help="tokens of an answer, on average")
    parser.add_argument("--at-once", type=int, default=4, help="conversations at a time")
    parser.add_argument(
        "--think", type=float, default=0.0, help="seconds between an answer and the next turn"
    )
    parser.add_argument(
        "--rewritten", action="store_true", help="the next turn has other tokens for the same answer"
    )
    parser.add_argument("--prefill", type=int, default=2, help="prefill engines")
    parser.add_argument("--decode", type=int, default=2, help="decode engines")
    parser.add_argument("--room", type=int, default=1 << 20, help="tokens that a prefix cache has room for")
    parser.add_argument("--block", type=int, default=BLOCK, help="tokens of a block")
    parser.add_argument("--characters", type=int, default=TOKEN_CHARACTERS, help="characters of a token")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--recent", type=float, help="weight of the last minute's work (cache_aware._RECENT)")
    parser.add_argument("--queued", type=float, help="weight of queued tokens (_QUEUED)")
    parser.add_argument("--borrowed", type=float, help="weight of tokens to load (_BORROWED)")
    parser.add_argument("--context", type=float, help="weight of a decode engine's contexts (_CONTEXT)")
    parser.add_argument("--token-us", type=int, help="time of a prompt's token, in us (COST)")
    parser.add_argument("--step-ms", type=int, help="time of a step, in ms (DECODE_S and COST)")
    parser.add_argument("--load-us", type=float, help="time of a token between two engines, in us (LOAD_S)")
    plan = parser.parse_args()
    if plan.load_us is not None:
        LOAD_S = plan.load_us * 1e-6
    BLOCK, TOKEN_CHARACTERS = plan.block, plan.characters
    if plan.step_ms is not None:
        steps.DECODE_S = plan.step_ms * 1e-3
        steps.COST = replace(steps.COST, step_ns=plan.step_ms * 1_000_000)
    if plan.token_us is not None:
        steps.COST = replace(steps.COST, token_ns=plan.token_us * 1000, pair_ps=0)
    for name, value in (
        ("_RECENT", plan.recent),
        ("_QUEUED", plan.queued),
        ("_BORROWED", plan.borrowed),
        ("_CONTEXT", plan.context),
    ):
        if value is not None:
            setattr(cache_aware, name, value)
    shape = Workshape(
        plan.conversations,
        plan.turns,
        plan.shared,
        plan.first,
        plan.more,
        plan.answer,
        plan.at_once,
        plan.think,
        plan.rewritten,
    )
    print(table([line(name, shape, plan) for name in plan.policies]))


if __name__ == "__main__":
    main()
