"""Prompts that a decode engine computes alone, with prefixes from other engines, beside its loads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from vllm_stage import ADDRESS, BLOCK, FULL, PARAMS_OF_D, Stage, model, prompt, vllm_config

from kv_connector.agent.commands import DeferLoad, WithdrawPrefix
from kv_connector.protocol.actions import Address
from kv_connector.protocol.requests import DecodeRequest, PrefixRequest
from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.scheduling.first_token import FirstTokenScheduler

__all__ = ["model"]

LENDER = Address("10.0.0.2", 5700, prefixes=True)
TOKENS = 6 * BLOCK + 5
LENT = 4 * BLOCK
PREFIX = {"prefix_from": {"host": LENDER.host, "port": LENDER.port, "tokens": TOKENS}}


class Workers:
    """The commands that the workers have, and their reports in any order."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._asked: list[str] = []
        self._loading: list[str] = []
        self._deferred: list[str] = []
        self.loads: Counter[Address] = Counter()
        """Number of loads by the engine that sends the pages."""

    def take(self, metadata: StepMetadata) -> None:
        for command in metadata.commands:
            match command:
                case PrefixRequest():
                    self._asked.append(command.transfer_id)
                case WithdrawPrefix() if command.transfer_id in self._asked:
                    self._asked.remove(command.transfer_id)
                case DecodeRequest():
                    self._loading.append(command.request_id)
                    self.loads[command.engine] += 1
                case DeferLoad():
                    self._deferred.append(command.transfer_id)

    def report(self, engine: Stage, *, all_at_once: bool = False) -> None:
        """Runs a step that reports some of what the workers have, or all."""
        output, metadata = engine.schedule()
        picked = [self._pick(some, all_at_once) for some in (self._asked, self._loading, self._deferred)]
        asked, received, due = picked
        answers = {one: 0 if all_at_once else self._rng.choice([0, LENT, 5 * BLOCK]) for one in asked}
        discarded = [one for one in received if self._rng.randrange(4) == 0]
        engine.update(output, answers=answers, received=received, discarded=discarded, due=due)
        self.take(metadata)

    def _pick(self, some: list[str], every: bool) -> list[str]:
        picked = [one for one in some if every or self._rng.randrange(2)]
        some[:] = [one for one in some if one not in picked]
        return picked


@pytest.mark.parametrize("blocks", [16, 24, 60])
def test_prompts_alone_in_any_order_with_loads_leave_nothing(model: Path, blocks: int) -> None:
    """The pool is short: loads are deferred, prompts are preempted, and prefixes wait for blocks."""
    loads: Counter[Address] = Counter()
    for seed in range(6):
        rng = Random(f"{blocks} {seed}")
        engine = Stage(vllm_config(model, "kv_consumer"), (FULL,), blocks, FirstTokenScheduler)
        workers, begun, left = Workers(rng), list[str](), set[str]()
        for number in range(60):
            kind, name = rng.randrange(8), f"r{number}"
            tokens, length = prompt(TOKENS + rng.randrange(40), rng.randrange(1, 9)), rng.choice([1, 1, 9])
            if kind < 3:
                engine.add(name, tokens, PREFIX, max_tokens=length)
            elif kind == 3:
                engine.add(name, tokens, {**PARAMS_OF_D, "transfer_id": name}, max_tokens=length)
            elif kind == 4 and (live := [one for one in begun if one in engine.scheduler.requests]):
                engine.abort(gone := rng.choice(live))
                left.add(gone)
            elif kind == 5 and rng.randrange(4) == 0 and not left.intersection(engine.scheduler.requests):
                # vLLM refuses a reset while pages may land for a request that was left.
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            if kind <= 3:
                begun.append(name)
            workers.report(engine)
        for _ in range(200):
            workers.report(engine, all_at_once=True)
        engine.assert_idle()
        ended = {output.request_id for output in engine.outputs if output.finish_reason is not None}
        assert ended >= set(begun) - left, "each prompt is computed, with or without its prefix"
        loads += workers.loads
    assert loads[LENDER] > 4
    assert loads[ADDRESS] > 4
