"""vLLM's KV cache events of blocks that arrive by push, under its real scheduler and block pool.

Other projects' routers read these events. A decode engine must report the blocks that it received as an
engine reports the blocks that it computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm_stage import BLOCK, FULL, PARAMS_OF_D, SLIDING, Stage, model, prompt, vllm_config

from kv_connector.vllm.scheduling.first_token import FirstTokenScheduler

__all__ = ["model"]

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 600)
LORA = LoRARequest("adapter", 1, "/adapter")


@dataclass(frozen=True)
class Stored:
    """A block that an engine reported as stored, with all that a reader needs to find it by content."""

    group: int | None
    block_hash: Any
    parent: Any
    tokens: tuple[int, ...]
    size: int
    medium: str | None
    lora: str | None
    extra: Any


def blocks_of(event: BlockStored) -> Iterable[Stored]:
    """Returns the blocks of an event. It must name each block of its range of tokens."""
    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    parent = event.parent_block_hash
    for index, block_hash in enumerate(event.block_hashes):
        tokens = tuple(event.token_ids[index * event.block_size : (index + 1) * event.block_size])
        extra = event.extra_keys[index] if event.extra_keys else None
        where = event.block_size, event.medium, event.lora_name
        yield Stored(event.group_idx, block_hash, parent, tokens, *where, extra)
        parent = block_hash


class Reporter(Stage):
    """An engine's scheduler that publishes events to ``events``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events: list[Any] = []
        self.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: KVEventBatch) -> None:
        self.events += batch.events

    def take(self, kind: type[Any] = BlockStored) -> list[Any]:
        """Returns the events of a kind since the last call, and drops all others."""
        taken, self.events = self.events, []
        return [event for event in taken if isinstance(event, kind)]

    def stored(self) -> list[Stored]:
        return [block for event in self.take() for block in blocks_of(event)]

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.step()


MakeReporter = Callable[..., Reporter]


@pytest.fixture
def reporter(model: Path) -> MakeReporter:
    def make(
        role: str, *specs: Any, blocks: int = 100, scheduler: type[Scheduler] = Scheduler, **options: Any
    ) -> Reporter:
        config = vllm_config(model, role, **options)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return Reporter(config, specs or (FULL,), blocks, scheduler)

    return make


def compute(engine: Reporter, text: list[int], max_tokens: int = 3, **more: Any) -> None:
    """Computes the prompt without a transfer."""
    engine.add("own", text, max_tokens=max_tokens, **more)
    engine.run()


def load(engine: Reporter, text: list[int], max_tokens: int = 3, **more: Any) -> None:
    """Receives the prompt's pages, and decodes."""
    request = engine.add("d", text, dict(PARAMS_OF_D), max_tokens=max_tokens, **more)
    engine.step()
    if len(text) > 1:  # vLLM computes the last token itself
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert not engine.take(), "no page has arrived"
        engine.step(received=["d"])
    engine.run()


def test_pushed_blocks_are_reported_as_computed_ones(reporter: MakeReporter) -> None:
    computed, pushed = reporter("kv_consumer"), reporter("kv_consumer")
    for more in ({}, {"cache_salt": "tenant"}, {"lora_request": LORA}):
        for seed, tokens in enumerate(LENGTHS):  # no prompt is the beginning of another
            compute(computed, prompt(tokens, seed), **more)
            load(pushed, prompt(tokens, seed), **more)
            expected = computed.stored()
            assert len(expected) == (tokens + 2) // BLOCK
            assert pushed.stored() == expected, (tokens, more)
    pushed.assert_idle()


def test_pushed_blocks_behind_a_local_hit_name_the_hit_as_their_parent(reporter: MakeReporter) -> None:
    computed, pushed = reporter("kv_consumer"), reporter("kv_consumer")
    compute(computed, prompt(3 * BLOCK + 5))
    load(pushed, prompt(3 * BLOCK + 5))
    hit = pushed.stored()
    assert hit == computed.stored()
    compute(computed, prompt(6 * BLOCK + 5))
    load(pushed, prompt(6 * BLOCK + 5))
    behind = pushed.stored()
    assert (len(hit), len(behind)) == (3, 3)
    assert behind[0].parent == hit[-1].block_hash
    assert behind == computed.stored()


def test_pushed_blocks_are_reported_once_for_requests_that_share_them(reporter: MakeReporter) -> None:
    pushed = reporter("kv_consumer")
    load(pushed, prompt(5 * BLOCK + 5))
    assert len(pushed.stored()) == 5
    load(pushed, prompt(5 * BLOCK + 5))
    assert not pushed.stored()


def test_evicted_pushed_blocks_are_reported_as_removed(reporter: MakeReporter) -> None:
    pushed = reporter("kv_consumer", blocks=12)
    load(pushed, prompt(8 * BLOCK + 5))
    stored = {block.block_hash for block in pushed.stored()}
    pushed.add("d", prompt(8 * BLOCK + 5, seed=2), dict(PARAMS_OF_D), max_tokens=3)
    pushed.step()
    removed = [one for event in pushed.take(BlockRemoved) for one in event.block_hashes]
    assert len(removed) == 6
    assert set(removed) < stored
    pushed.step(received=["d"])
    pushed.run()
    pushed.assert_idle()


def test_reset_during_a_load_is_reported_before_the_blocks_that_arrive_later(reporter: MakeReporter) -> None:
    pushed = reporter("kv_consumer")
    load(pushed, prompt(3 * BLOCK))
    pushed.take()
    pushed.add("d", prompt(3 * BLOCK + 5, seed=2), dict(PARAMS_OF_D), max_tokens=3)
    pushed.step()
    assert pushed.scheduler.reset_prefix_cache()
    pushed.step()
    assert [type(event) for event in pushed.events] == [AllBlocksCleared]
    pushed.events.clear()
    pushed.step(received=["d"])
    pushed.run()
    # The load is from before the reset, so that the engine computes the prompt itself.
    assert len(pushed.stored()) == 3
    pushed.assert_idle()


@pytest.mark.parametrize("fate", ["failed", "aborted"])
def test_blocks_of_a_load_that_ends_early_are_not_reported(reporter: MakeReporter, fate: str) -> None:
    pushed = reporter("kv_consumer", policy="recompute")
    pushed.add("d", prompt(3 * BLOCK + 5), dict(PARAMS_OF_D), max_tokens=3)
    pushed.step()
    if fate == "aborted":
        pushed.abort("d")
        pushed.step()
        pushed.step(received=["d"])
        pushed.run()
        assert not pushed.stored()
    else:
        pushed.step(received=["d"], failed=["d"])
        assert not pushed.take()
        pushed.run()
        assert len(pushed.stored()) == 3, "computed"
    pushed.assert_idle()


def test_pushed_blocks_behind_an_early_first_token_are_reported_as_computed_ones(
    reporter: MakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine begins with the token that the prefill engine sampled (model runner V2)."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    computed, pushed = reporter("kv_consumer"), reporter("kv_consumer", scheduler=FirstTokenScheduler)
    for seed, tokens in enumerate(LENGTHS):
        compute(computed, prompt(tokens, seed), max_tokens=BLOCK)
        pushed.add("d", prompt(tokens, seed), PARAMS_OF_D | {"early_token": True}, max_tokens=BLOCK)
        pushed.step()
        pushed.step(received=["d"], sampled={"d": 7})
        pushed.run()
        assert pushed.stored() == computed.stored(), tokens
    pushed.assert_idle()


def test_pushed_windows_are_reported_without_the_blocks_before_them(
    reporter: MakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A computing engine had each block of a sliding window once. A decode engine receives the last ones."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")  # whole hashes, to look them up
    computed, pushed = (reporter("kv_consumer", FULL, SLIDING) for _ in range(2))
    compute(computed, prompt(600))
    load(pushed, prompt(600))
    both: list[dict[int, list[Any]]] = []
    for engine in (pushed, computed):
        hashes: dict[int, list[Any]] = {0: [], 1: []}
        for event in engine.take():
            hashes[event.group_idx] += event.block_hashes
        both.append(hashes)
    mine, theirs = both
    assert mine[0] == theirs[0], "full attention"
    assert mine[1] == theirs[1][-len(mine[1]) :], "the last blocks of the window"
    pool = pushed.scheduler.kv_cache_manager.block_pool
    for group, stored in mine.items():
        assert all(pool.get_cached_block(one, [group]) for one in stored), "it has what it reported"
    pushed.assert_idle()
