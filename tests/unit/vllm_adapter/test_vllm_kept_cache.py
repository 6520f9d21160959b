"""KV that outlives an update of the weights, under vLLM's real scheduler and block pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm_stage import (
    BLOCK,
    FULL,
    PARAMS_OF_D,
    PARAMS_OF_P,
    MakeStage,
    Stage,
    model,
    prompt,
    stage,
)

from kv_connector.agent.commands import AnswerPrefix, CacheCleared, CancelLoad
from kv_connector.protocol.actions import PrefixRequested
from kv_connector.protocol.requests import PrefixRequest
from kv_connector.protocol.wire.content_key import ContentKey
from kv_connector.protocol.wire.messages import LendOutcome
from kv_connector.vllm.kept_cache import install
from kv_connector.vllm.patches import keep_cache_over_updates
from kv_connector.vllm.plugin import KEEP_CACHE

__all__ = ["model", "stage"]

PROMPT = prompt(4 * BLOCK + 8)
FULL_BLOCKS = 4 * BLOCK


def hit(engine: Stage, name: str, ids: list[int], **more: Any) -> int:
    """Runs a request of one token. Returns how many tokens of its prompt are found in the cache."""
    engine.add(name, ids, **more)
    output, _ = engine.schedule()
    computed = output.num_scheduled_tokens[name]
    engine.update(output)
    engine.step()
    return len(ids) - computed


def test_new_request_finds_only_kv_of_the_same_weight_version(stage: MakeStage) -> None:
    engine = stage("kv_both")
    assert hit(engine, "first", PROMPT) == 0
    assert hit(engine, "second", PROMPT) == FULL_BLOCKS
    engine.keep_cache("1")
    assert hit(engine, "third", PROMPT) == 0
    assert hit(engine, "fourth", PROMPT) == FULL_BLOCKS
    engine.keep_cache("2")
    assert hit(engine, "fifth", PROMPT) == 0
    engine.keep_cache("1")
    assert hit(engine, "sixth", PROMPT) == FULL_BLOCKS, "these blocks are of version 1 alone"
    engine.assert_idle()


def test_stream_goes_on_with_its_kv_and_no_request_finds_what_it_computes_then(stage: MakeStage) -> None:
    engine = stage("kv_both")
    stream = engine.add("stream", PROMPT, max_tokens=3 * BLOCK)
    for _ in range(5):
        engine.step()
    engine.keep_cache("1")
    steps = 0
    while engine.scheduler.has_requests():
        output, _ = engine.schedule()
        assert set(output.num_scheduled_tokens.values()) <= {1}, "nothing is computed anew"
        engine.update(output)
        steps += len(output.num_scheduled_tokens)
    assert (steps, stream.num_preemptions) == (3 * BLOCK - 5, 0)
    answer = list(stream.all_token_ids)
    assert hit(engine, "next turn", answer) == 0
    engine.keep_cache("2")
    assert hit(engine, "next turn with other weights", answer) == 0


@pytest.mark.parametrize("tokens", [BLOCK - 2, 4 * BLOCK - 2])
def test_block_that_two_versions_fill_is_found_by_no_request(stage: MakeStage, tokens: int) -> None:
    """vLLM hashes a block that ends with the last sampled token before that token is computed."""
    engine = stage("kv_both")
    stream = engine.add("stream", prompt(tokens), max_tokens=2 * BLOCK)
    engine.step()
    engine.step()
    assert len(stream.block_hashes) * BLOCK == tokens + 2 == stream.num_computed_tokens + 1
    before = [*stream.block_hashes]
    engine.keep_cache("1")
    engine.step()
    engine.keep_cache("2")
    while engine.scheduler.has_requests():
        engine.step()
    answer = list(stream.all_token_ids)
    assert not set(before[-1:]) & set(stream.block_hashes)
    for version in "12":
        engine.keep_cache(version)
        assert hit(engine, f"version {version}", answer) == 0


def test_preempted_stream_is_cached_under_the_version_it_is_computed_with(stage: MakeStage) -> None:
    """Two streams want more blocks than the pool has, so vLLM preempts the younger one."""
    engine = stage("kv_both", blocks=13)
    engine.keep_cache("1")
    engine.add("older", prompt(len(PROMPT), seed=2), max_tokens=6 * BLOCK)
    stream = engine.add("younger", PROMPT, max_tokens=2 * BLOCK)
    while stream.num_computed_tokens < len(PROMPT):
        engine.step()
    engine.keep_cache("2")
    while not (stream.num_preemptions and stream.num_computed_tokens):
        assert not stream.is_finished()
        engine.step()
    (found,) = engine.cached(PROMPT, "1")
    assert len(found) <= 1, "the older stream needed the other blocks"
    assert not set(found) & set(engine.tables("younger")[0])
    while engine.scheduler.has_requests():
        engine.step()
    assert hit(engine, "next turn", PROMPT) == FULL_BLOCKS, "computed with version 2 alone"
    engine.keep_cache("3")
    engine.assert_idle()


def test_prompt_that_is_not_computed_begins_anew(stage: MakeStage) -> None:
    engine = stage("kv_both", budget=64)
    request = engine.add("long", PROMPT, max_tokens=2)
    waiting = engine.add("waiting", PROMPT, max_tokens=2)
    engine.step()
    assert request.num_computed_tokens == 64
    engine.keep_cache("1")
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 1)
    computed = 0
    while engine.scheduler.has_requests():
        output, _ = engine.schedule()
        computed += sum(output.num_scheduled_tokens.values())
        engine.update(output)
    assert waiting.num_preemptions == 0
    assert computed >= len(PROMPT) + 2, "of version 1 nothing was cached"
    assert hit(engine, "same version", PROMPT) == FULL_BLOCKS
    engine.keep_cache("2")
    engine.assert_idle()


def test_engines_of_one_version_have_equal_hashes_and_no_client_can_choose_them(stage: MakeStage) -> None:
    one, other = stage("kv_both"), stage("kv_both")
    one.keep_cache("1")
    for version in "01":
        other.keep_cache(version)
    ours, theirs = one.add("r", PROMPT), other.add("r", PROMPT)
    assert ours.block_hashes == theirs.block_hashes
    assert ours.cache_salt is None
    plain = stage("kv_both")
    forged = [plain.add(name, PROMPT, cache_salt=name).block_hashes for name in ("1", "('1', '')")]
    assert ours.block_hashes not in forged
    assert one.add("salted", PROMPT, cache_salt="tenant").block_hashes != ours.block_hashes


def test_prompt_for_a_decode_engine_is_of_one_version(stage: MakeStage) -> None:
    """Its first pages may have left, and its request may want more tokens than the first."""
    engine = stage("kv_producer")
    request = engine.add("p-t", PROMPT, PARAMS_OF_P, max_tokens=1)
    later = engine.add("p-u", prompt(40), dict(PARAMS_OF_P, transfer_id="u"), max_tokens=8)
    output, _ = engine.schedule()
    engine.update(output)
    assert request.is_finished()
    assert later.num_computed_tokens >= later.num_prompt_tokens
    engine.keep_cache("1")
    assert later.num_computed_tokens == 0
    metadata = engine.step(sent=["p-t"])
    assert metadata.preempted == ("u",)
    assert CacheCleared() in metadata.commands


def test_load_in_flight_is_given_up_and_computed_here(stage: MakeStage) -> None:
    engine = stage("kv_consumer")
    request = engine.add("d-t", PROMPT, PARAMS_OF_D, max_tokens=2)
    engine.step()
    assert engine.blocks_in_use
    engine.keep_cache("1")
    metadata = engine.step()
    assert CancelLoad("d-t") in metadata.commands
    engine.step(received=["d-t"])
    computed = 0
    while engine.scheduler.has_requests():
        output, _ = engine.schedule()
        computed += sum(output.num_scheduled_tokens.values())
        engine.update(output)
    assert computed == len(PROMPT) + 1
    assert request.num_output_tokens == 2
    engine.assert_idle()


def question(borrower: Stage, name: str) -> ContentKey:
    """Returns the content key with which an engine asks for PROMPT."""
    proposed = {"host": "10.0.0.2", "port": 5700, "tokens": FULL_BLOCKS}
    borrower.add(name, PROMPT, dict(PARAMS_OF_P, transfer_id=name, prefix_from=proposed))
    (found,) = (one for one in borrower.step().commands if isinstance(one, PrefixRequest))
    return found.content


def answer(lender: Stage, name: str, content: ContentKey) -> AnswerPrefix:
    output, _ = lender.schedule()
    lender.update(output, requested=[PrefixRequested(name, content, 0, BLOCK)])
    found = lender.step().after_pages[-1]
    assert isinstance(found, AnswerPrefix)
    return found


def test_engine_that_clears_its_cache_borrows_no_kv_of_an_earlier_version(stage: MakeStage) -> None:
    """Its hashes have no version. They are those of the blocks that the lender has kept."""
    lender, clears, keeps = stage("kv_consumer"), stage("kv_producer"), stage("kv_producer")
    keeps.keep_cache("1")
    hit(lender, "first", PROMPT)
    assert answer(lender, "a", question(clears, "a")).outcome is LendOutcome.LENT
    lender.keep_cache("1")
    lender.step(sent=["a"])
    assert answer(lender, "b", question(clears, "b")).outcome is LendOutcome.UNLIKE
    assert answer(lender, "c", question(keeps, "c")).outcome is LendOutcome.NOT_CACHED
    hit(lender, "second", PROMPT)
    assert answer(lender, "d", question(keeps, "d")).tokens == FULL_BLOCKS


def test_kv_events_report_that_no_earlier_block_is_found(stage: MakeStage) -> None:
    engine = stage("kv_both", FULL)
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.keep_cache("1")
    assert not pool.kv_event_queue
    pool.enable_kv_cache_events = True
    engine.keep_cache("2")
    assert pool.kv_event_queue == [AllBlocksCleared()]


def test_request_made_with_the_previous_hasher_gets_the_hashes_of_the_version(
    stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's input thread may have made it before the update, and the scheduler gets it later."""
    install(KEEP_CACHE)
    assert hasattr(EngineCore, KEEP_CACHE)
    engine = stage("kv_both")
    early = engine.add("early", PROMPT)
    engine.abort("early")
    added: list[Request] = []
    core = SimpleNamespace(
        scheduler=engine.scheduler, request_block_hasher=engine._hasher, reset_encoder_cache=lambda: None
    )
    getattr(EngineCore, KEEP_CACHE)(core, "1")
    monkeypatch.setattr(engine.scheduler, "add_request", added.append)
    before = [*early.block_hashes]
    EngineCore.add_request(core, early)
    engine._hasher = core.request_block_hasher
    monkeypatch.undo()
    assert added == [early]
    assert early.block_hashes == engine.add("late", PROMPT).block_hashes != before


def test_second_installation_changes_nothing() -> None:
    install(KEEP_CACHE)
    add_request = EngineCore.add_request
    keep_cache_over_updates(KEEP_CACHE, lambda *_: None, lambda *_: None)
    assert EngineCore.add_request is add_request
