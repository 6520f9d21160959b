"""A sample of `make fuzz-router`, and planted faults."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kv_connector.protocol.session.checkpoint import Weights
from kv_connector.router import failure
from kv_connector.router.bodies.fields import Pieces
from kv_connector.router.engines.pool import Lease
from kv_connector.router.front.limits import Limits, LimitsPlace
from kv_connector.router.front.server import BoundedProtocol, ReadTurns, _Flow
from kv_connector.router.streams.request import Request
from kv_connector.router.streams.resumption import Resumption
from kv_connector.router.streams.running import Running
from tests.fuzz.router import BODY_LIMIT, Plan, Scenario, problem, report, scenario


def test_each_client_gets_an_answer_within_the_limits_and_nothing_is_left() -> None:
    for seed in range(40):
        if text := report(seed):
            pytest.fail(text)


def test_scenarios_are_of_all_sorts_and_run_alike_twice() -> None:
    counts: Counter[int | None] = Counter()
    for seed in range(20):
        first: list[tuple[float, int | None]] = []
        again: list[tuple[float, int | None]] = []
        assert problem(scenario(seed), first) is None
        assert problem(scenario(seed), again) is None
        assert first == again
        counts.update(status for _, status in first)
    assert counts.keys() >= {None, 200, 400, 408, 413, 431, 502, 503}, counts
    assert counts[200] > 20


def test_second_answer_of_a_pipelining_client_is_not_judged_when_it_stopped_reading() -> None:
    """The smallest scenario of seed 155: after its pause, the client reads both answers at once."""
    asked = Plan("pipelined", 0.0, 100, chunked=True, stops=1.0, stream=True, tokens=2000)
    given = Scenario("concurrent", 5 * BODY_LIMIT, 8, 100, trouble=False, clients=(asked,), salt=934928766)
    answers: list[tuple[float, int | None]] = []
    assert problem(given, answers) is None
    assert [status for _, status in answers] == [200]


@contextmanager
def _keeps_its_place(self: Limits) -> Iterator[LimitsPlace]:
    task = asyncio.current_task()
    assert task is not None
    self._tasks.add(task)
    yield LimitsPlace(self)


_enter = Limits.enter


@contextmanager
def _without_limit(self: Limits) -> Iterator[LimitsPlace]:
    self._most_requests = sys.maxsize
    with _enter(self) as place:
        yield place


def _without_budget(self: Limits, nbytes: int, *, had: int, expected: int) -> None:
    self._bytes += nbytes


def _gives_back_more(self: LimitsPlace) -> None:
    self._limits.take(-self.nbytes, had=self.nbytes, expected=0)


def _one_turn(self: ReadTurns) -> None:
    for first in self._waiting:
        del self._waiting[first]
        first.read()
        break


def _without_the_last(self: Pieces) -> Iterator[bytes | memoryview]:
    return itertools.chain(*(([part] if len(part) < 100 else [part[:-1], b"?"]) for part in self.parts))


async def _too_early(self: Resumption, request: Request) -> Any:
    place = await _place(self, request)
    return replace(place, ids=place.ids.rpartition(b",")[0] or place.ids, said=place.said - 1)


_place = Resumption._place


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "bodies are not counted": (Limits, "take", lambda self, nbytes, had, expected: None),
    "bodies have no limit": (Limits, "take", _without_budget),
    "a body whose answer has begun is given back twice": (LimitsPlace, "answered", _gives_back_more),
    "requests keep their place": (Limits, "enter", _keeps_its_place),
    "requests have no limit": (Limits, "enter", _without_limit),
    "one connection alone gets its turn": (ReadTurns, "_turn", _one_turn),
    "what nobody took is read on": (_Flow, "pause_reading", lambda self: None),
    "late headers are waited for": (BoundedProtocol, "_headers_are_late", lambda self: None),
    "an idle connection is kept": (BoundedProtocol, "timeout_keep_alive_handler", lambda self: None),
    "leases are kept": (Lease, "release", lambda self: None),
    "a refusal does not say when to come again": (failure, "_RETRY_AFTER_S", None),
    "a long body's bytes are changed": (Pieces, "slices", _without_the_last),
    "a stream continues a token too early": (Resumption, "_place", _too_early),
    "the router ignores checkpoints": (Weights, "fits", lambda self, other: self.version == other.version),
    "a stream continues where text is held back": (Running, "_look_back", lambda self, events: None),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*PLANTED[fault])
    assert any(problem(scenario(seed)) for seed in range(100))
