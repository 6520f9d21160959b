"""Prefixes that an engine lends, under vLLM's real scheduler, prefix cache and block pool."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm_stage import BLOCK, FULL, SLIDING, WINDOW, MakeStage, Stage, model, prompt, stage

from kv_connector.agent.commands import AnswerPrefix, FinishPrefill, NewPages
from kv_connector.protocol.actions import PrefixRequested
from kv_connector.protocol.content_key import ContentKey, chain
from kv_connector.protocol.requests import GroupPages, PrefillRequest
from kv_connector.vllm.content import content_key_of, hash_basis
from kv_connector.vllm.metadata import StepMetadata

__all__ = ["model", "stage"]

TOKENS = 6 * BLOCK


def run(engine: Stage, name: str = "r", tokens: int = TOKENS + 5, seed: int = 1, **more: Any) -> Any:
    """Computes a prompt, so that the engine's cache has it. Returns the request."""
    request = engine.add(name, prompt(tokens, seed), **more)
    while engine.scheduler.has_requests():
        engine.step()
    return request


def key(request: Any) -> ContentKey:
    """Returns the content key of a request of any engine with the same hashes."""
    return content_key_of(request, hash_basis("sha256", BLOCK), BLOCK)


def ask(engine: Stage, content: ContentKey, first_token: int = 0, multiple: int = BLOCK) -> StepMetadata:
    """Returns the metadata of the step after the question."""
    output, _ = engine.schedule()
    engine.update(output, requested=[PrefixRequested("x", content, first_token, multiple)])
    assert engine.side.has_unsent_commands()
    return engine.step()


def refused(engine: Stage, content: ContentKey, **question: Any) -> str:
    metadata = ask(engine, content, **question)
    (answer,) = metadata.after_pages
    assert isinstance(answer, AnswerPrefix)
    assert (answer.transfer_id, answer.tokens) == ("x", 0)
    assert metadata.commands == metadata.new_pages == ()
    engine.step()
    engine.assert_idle()
    return answer.reason


def pool(engine: Stage) -> Any:
    return engine.scheduler.kv_cache_manager.block_pool


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
def test_engine_lends_the_prefix_that_another_engine_names(stage: MakeStage, role: str) -> None:
    lender, borrower = stage(role), stage("kv_producer")
    run(lender)
    longer = borrower.add("b", [*prompt(TOKENS + 5), *range(100)])
    metadata = ask(lender, key(longer), first_token=2 * BLOCK)
    (pages,) = metadata.new_pages
    (group,) = pages.groups
    assert metadata.commands == (
        PrefillRequest("x", "x", TOKENS, key(longer).prompt_hash(TOKENS), lent=True),
    )
    assert pages == NewPages("x", (GroupPages(2, group.blocks),), last=True)
    assert metadata.after_pages == (FinishPrefill("x", "x", True, ""), AnswerPrefix("x", TOKENS))
    assert len(group.blocks) == 4
    assert all(pool(lender).blocks[block].ref_cnt == 1 for block in group.blocks)
    assert lender.blocks_in_use == 4


def test_lent_blocks_are_not_evicted_until_they_are_sent(stage: MakeStage) -> None:
    lender = stage("kv_consumer", blocks=30)
    request = run(lender)
    (pages,) = ask(lender, key(request)).new_pages
    hashes = [pool(lender).blocks[block].block_hash for block in pages.groups[0].blocks]
    for seed in range(2, 9):  # each of them takes most of the other blocks
        run_beside(lender, seed)
    assert [pool(lender).blocks[block].block_hash for block in pages.groups[0].blocks] == hashes
    lender.step(sent=["x"])
    lender.step()
    lender.assert_idle()


def run_beside(engine: Stage, seed: int) -> None:
    engine.add(f"r{seed}", prompt(16 * BLOCK, seed))
    while f"r{seed}" in engine.scheduler.requests:
        engine.step()


def test_lent_prefix_is_shorter_if_the_cache_has_less_or_the_blocks_differ(stage: MakeStage) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    other = [*prompt(TOKENS)[: 5 * BLOCK], *[7] * 100]
    diverges = stage("kv_producer").add("b", other)
    metadata = ask(lender, key(diverges), multiple=2 * BLOCK)
    assert metadata.after_pages[-1] == AnswerPrefix("x", 4 * BLOCK)
    lender.step(sent=["x"])
    lender.step()
    lender.assert_idle()
    assert key(request).covered == TOKENS


def test_window_lends_only_the_blocks_that_the_next_token_needs(stage: MakeStage) -> None:
    lender = stage("kv_consumer", FULL, SLIDING)
    request = run(lender)
    metadata = ask(lender, key(request))
    (pages,) = metadata.new_pages
    full, sliding = pages.groups
    end = metadata.after_pages[-1].tokens // BLOCK  # type: ignore[union-attr]
    assert len(full.blocks) == len(sliding.blocks) == end > 0
    assert all(full.blocks)
    assert all(sliding.blocks[-(WINDOW // BLOCK - 1) :])
    lender.step(sent=["x"])
    lender.step()
    lender.assert_idle()


def test_prefix_of_another_tenant_is_not_lent(stage: MakeStage) -> None:
    """Without the salt a borrower cannot name the content, and the answer is that of an empty cache."""
    lender, borrower = stage("kv_consumer"), stage("kv_producer")
    run(lender, cache_salt="tenant")
    for number, salt in enumerate((None, "another")):
        request = borrower.add(f"b{number}", prompt(TOKENS + 5), cache_salt=salt)
        assert refused(lender, key(request)) == "0 of its tokens are cached"
    request = borrower.add("same", prompt(TOKENS + 5), cache_salt="tenant")
    assert ask(lender, key(request)).after_pages[-1] == AnswerPrefix("x", TOKENS)


def test_lender_names_the_reason_of_a_refusal(stage: MakeStage) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    content = key(request)
    assert refused(lender, content, first_token=TOKENS) == f"{TOKENS} of its tokens are cached"
    other = msgspec.structs.replace(content, basis=bytes(16))
    assert "different block hashes" in refused(lender, other)
    assert "hashes blocks of 32 tokens, not 16" in refused(lender, chain(range(64), 16))
    small = stage("kv_consumer", blocks=20)  # a quarter of it is five blocks
    assert refused(small, key(run(small))) == "too many blocks are lent"


def test_cache_is_emptied_while_a_prefix_is_lent(stage: MakeStage) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    (pages,) = ask(lender, key(request)).new_pages
    assert lender.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert all(pool(lender).blocks[block].ref_cnt == 1 for block in pages.groups[0].blocks)
    lender.step(sent=["x"])
    lender.step()
    assert refused(lender, key(request)) == "0 of its tokens are cached"


def test_prefix_that_cannot_be_looked_up_is_refused(
    stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    monkeypatch.setattr(lender.side._lender, "cache", None)
    assert refused(lender, key(request)) == "its look-up failed"
