"""CacheAware chooses the same engines by vectors as by loops over engines, in random states of a fleet."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from checkpoints import BASE, QUANTISED, TUNED
from plain_placement import PlainPlacement

from kv_connector.control.membership import PromptCost, WorkloadReport
from kv_connector.protocol.session.checkpoint import Weights
from kv_connector.router.bodies.messages import ChatMessage
from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.breaker import FAILURES, Breaker
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import TEXT_SIDES, Side
from kv_connector.router.engines.pool import Lease, NoEngine, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement.cache_aware import CacheAware
from kv_connector.router.placement.policy import NO_PREFILL, Placement, PlacementRequest
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.transcript import Said

CHAT = "/v1/chat/completions"
ENGINES = 9
WEIGHTS = [
    *[Weights()] * 4,
    *[Weights("", BASE)] * 3,
    Weights("", TUNED),
    Weights("", QUANTISED),
    *[Weights("v2")] * 2,
]
SYSTEM = {"role": "system", "content": "Answer in few words. " * 150}


class Chaos:
    """A fleet to which random events happen."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.pools = {side: Pool() for side in TEXT_SIDES}
        self.index = PrefixIndex()
        self.caches = CacheRecords()
        parts = self.pools, self.index, self.caches.sizes, self.caches.sessions, lambda: self.now
        self.vectors, self.plain = CacheAware(*parts), PlainPlacement(*parts)
        self.engines: dict[Endpoint, tuple[tuple[Side, ...], Workload, Breaker]] = {}
        self.running: list[tuple[Placement, Lease | None, Lease]] = []
        self.seen: Counter[str] = Counter()
        for _ in range(self.rng.randrange(4, ENGINES)):
            self.change()

    def change(self) -> None:
        """An engine joins, or is reported with other properties."""
        rng = self.rng
        endpoint = Endpoint.parse(f"http://e{rng.randrange(ENGINES)}:1")
        if endpoint not in self.engines:
            sides = rng.choice([(Side.PREFILL,), (Side.DECODE,), (Side.PREFILL,), (Side.DECODE,), TEXT_SIDES])
            self.engines[endpoint] = sides, Workload(lambda: self.now), Breaker()
        sides, workload, breaker = self.engines[endpoint]
        usable, weights = rng.random() < 0.9, rng.choice(WEIGHTS)
        models = rng.choice([None, frozenset({"m"}), frozenset({"m", "n"}), frozenset({"n"})])
        prefixes, borrows = rng.choice(["same", "same", "", "else"]), rng.random() < 0.8
        for side in sides:
            self.pools[side].set_usable(
                endpoint,
                usable,
                workload,
                breaker,
                reserve=side is Side.PREFILL and len(sides) > 1,
                weights=weights,
                models=models,
                prefixes=prefixes,
                borrows=borrows,
            )
        if rng.random() < 0.7:
            self.index.add(workload.cache)

    def join_index(self) -> None:
        for _, workload, _ in self.engines.values():
            self.index.add(workload.cache)

    def leave(self) -> None:
        endpoint = self.rng.choice([*self.engines])
        sides, workload, _ = self.engines.pop(endpoint)
        self.index.remove(workload.cache)
        for side in sides:
            self.pools[side].remove(endpoint, lost=False)

    def report(self) -> None:
        """An engine reports its workload."""
        rng = self.rng
        cost = rng.choice([None, PromptCost(0, 0, 0), PromptCost(5_000_000, 20_000, 100)])
        load = WorkloadReport(
            step_tokens=8192,
            prompt_tokens=8192,
            cache_tokens=rng.choice([2000, 400_000]),
            waiting=rng.choice([0, 0, 500, 20_000]),
            running=rng.choice([0, 1, 20]),
            decode_ns=20_000_000,
            prompt=cost,
            block_tokens=rng.choice([0, 16, 256]),
        )
        _, workload, _ = self.engines[rng.choice([*self.engines])]
        workload.hear(rng.choice([load, load, None]))

    def fail(self) -> None:
        """An engine's breaker opens, allows a trial, or closes."""
        endpoint = self.rng.choice([*self.engines])
        sides, workload, breaker = self.engines[endpoint]
        if not breaker.open:
            for _ in range(FAILURES):
                breaker.failed(self.now)
        elif self.rng.random() < 0.5:
            breaker.tick(self.now + 100.0)
            breaker.tick(self.now + 200.0)
            return
        else:
            breaker.succeeded(self.now)
        for side in sides:
            self.pools[side].set_usable(endpoint, True, workload, breaker)

    def begin(self) -> None:
        """A request comes. Both formulations place it, each before the other at times."""
        rng = self.rng
        topic, lengths = rng.randrange(4), [rng.choice([1, 40, 400]) for _ in range(rng.randrange(1, 4))]
        turns = [f"{topic} and {turn}. " * length for turn, length in enumerate(lengths)]
        said = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
        body = {"model": "m", "messages": [SYSTEM, *said], "stream": rng.random() < 0.8}
        if rng.random() < 0.1:
            body["n"] = 2
        avoid = [rng.choice([*self.engines])] if rng.random() < 0.2 else []
        request = PlacementRequest(
            Completion.decode(json.dumps(body).encode()),
            CHAT,
            avoid,
            rng.choice([None, "m", "n", "m"]),
            rng.choice([None, topic]),
        )
        place, place_plainly = self.vectors.place, self.plain.place
        if rng.random() < 0.3:
            place, place_plainly = self.vectors.alone, self.plain.alone
        try:
            if rng.random() < 0.5:
                placement = place(request)
                expected = place_plainly(request)
            else:
                expected = place_plainly(request)
                placement = place(request)
        except NoEngine:
            self.seen["no engine"] += 1
            with pytest.raises(NoEngine):
                place(request)
            return
        assert (placement.prefill, placement.decode, placement.prefix) == expected
        self.seen[placement.reason] += 1
        if placement.prefix is not None:
            self.seen["loan" if placement.prefill is not None else "loan alone"] += 1
        work = placement.work if placement.prefill is None else None
        prefill = None
        if placement.prefill is not None:
            pool = self.pools[Side.PREFILL]
            prefill = pool.acquire(placement.prefill, placement.work, prompt=placement.prompt)
        tokens, prompt = placement.tokens, placement.prompt
        decode = self.pools[Side.DECODE].acquire(placement.decode, work, tokens, prompt)
        self.running.append((placement, prefill, decode))

    def end(self) -> None:
        """A request ends, or is refused."""
        if not self.running:
            return
        placement, prefill, decode = self.running.pop(self.rng.randrange(len(self.running)))
        if self.rng.random() < 0.8:
            if prefill is not None:
                cached = self.rng.choice([0, placement.tokens // 2, None])
                report = Computed(tokens=placement.tokens + 3, cached=cached)
                self.caches.prefilled(prefill, report, placement.prefix)
            self.caches.began(decode, placement)
            said = Said(ChatMessage(role="assistant", content="Because."))
            self.caches.answered(decode, said, placement, moved=None)
        for lease in (prefill, decode):
            if lease is not None:
                lease.release()

    def step(self) -> None:
        if len(self.engines) < 2:
            self.change()
        self.now += self.rng.choice([0.0, 0.0, 0.25, 1.0, 30.0])
        events = (self.begin, self.end, self.change, self.report, self.leave, self.fail, self.join_index)
        (event,) = self.rng.choices(events, weights=(12, 9, 3, 4, 1, 1, 1))
        event()


def test_vectors_choose_as_loops_over_engines() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        chaos = Chaos(seed)
        for _ in range(120):
            chaos.step()
        seen += chaos.seen
    cases = (
        "cached",
        "least_work",
        "loan",
        "loan alone",
        "other_weights",
        "one_engine",
        NO_PREFILL,
        "no engine",
    )
    assert all(seen[case] >= 10 for case in cases), f"cases that have hardly occurred: {seen}"


def test_unreported_prompt_leaves_the_vectors_when_it_ends_as_forecast() -> None:
    now = 0.0
    pool, endpoint = Pool(), Endpoint.parse("http://d:1")
    pool.set_usable(endpoint, True, Workload(lambda: now))
    pool.acquire(endpoint, Work(500, 2.0, reported=False))
    assert pool.rows().queued(now).tolist() == [500]
    now = 3.0
    assert pool.rows().queued(now).tolist() == [0]
