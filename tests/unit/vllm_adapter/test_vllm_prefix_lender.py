"""Prefixes that an engine lends, under vLLM's real scheduler, prefix cache and block pool."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.interface import PauseState
from vllm_stage import BLOCK, FULL, SLIDING, WINDOW, MakeStage, Stage, model, prompt, stage

from kv_connector.agent.commands import AnswerPrefix, EndLendings, FinishPrefill, NewPages, RefuseLending
from kv_connector.protocol.actions import PrefixRequested
from kv_connector.protocol.requests import GroupPages, PrefillRequest
from kv_connector.protocol.wire.content_key import ContentKey, chain
from kv_connector.protocol.wire.messages import LendOutcome
from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.scheduling.content import content_key_of, hash_basis

__all__ = ["model", "stage"]

TOKENS = 6 * BLOCK
PAUSED = "the lending engine is paused"


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


@pytest.mark.parametrize(("taken", "lends"), [(26, True), (28, False)])
def test_engine_lends_at_most_half_of_its_free_blocks(stage: MakeStage, taken: int, lends: bool) -> None:
    lender = stage("kv_consumer", blocks=40)
    request = run(lender)
    stream = lender.add("stream", prompt(taken * BLOCK - 20, seed=2), max_tokens=100)
    while not stream.output_token_ids:
        lender.step()
    answer = ask(lender, key(request)).after_pages[-1]
    assert isinstance(answer, AnswerPrefix)
    assert answer.tokens == (TOKENS if lends else 0)
    assert answer.reason == ("" if lends else "too few blocks are free")
    assert answer.outcome is (LendOutcome.LENT if lends else LendOutcome.BUSY)


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


def test_prefix_of_another_adapter_is_not_lent(stage: MakeStage) -> None:
    lender, borrower = stage("kv_consumer"), stage("kv_producer")
    french, german = (LoRARequest(name, number, f"/{name}") for number, name in enumerate("fg", 1))
    run(lender, lora_request=french)
    for number, adapter in enumerate((None, german)):
        request = borrower.add(f"b{number}", prompt(TOKENS + 5), lora_request=adapter)
        assert refused(lender, key(request)) == "0 of its tokens are cached"
    request = borrower.add("same", prompt(TOKENS + 5), lora_request=french)
    assert ask(lender, key(request)).after_pages[-1] == AnswerPrefix("x", TOKENS)


def test_prefix_with_another_picture_is_lent_up_to_the_picture(stage: MakeStage) -> None:
    """The token ids of all pictures are alike."""
    lender, borrower = stage("kv_consumer"), stage("kv_producer")
    run(lender)
    place = PlaceholderRange(offset=3 * BLOCK + 1, length=BLOCK)
    picture = MultiModalFeatureSpec(data=None, modality="image", identifier="a", mm_position=place)
    request = borrower.add("b", prompt(TOKENS + 5), mm_features=[picture])
    assert ask(lender, key(request)).after_pages[-1] == AnswerPrefix("x", 3 * BLOCK)


def test_lender_that_has_evicted_the_answer_lends_what_is_left(stage: MakeStage) -> None:
    """The lender answers by what it has at the question, whatever a router has proposed."""
    lent = []
    for others in range(5):
        lender = stage("kv_consumer", blocks=30)
        content = key(run(lender))
        for seed in range(2, 2 + others):
            run(lender, f"r{seed}", 8 * BLOCK, seed)
        answer = ask(lender, content).after_pages[-1]
        assert isinstance(answer, AnswerPrefix)
        lent.append(answer.tokens // BLOCK)
    assert (lent[0], lent[-1]) == (6, 0)
    assert lent == sorted(lent, reverse=True)
    assert any(0 < blocks < 6 for blocks in lent), "a part is evicted, and the rest is lent"


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


@pytest.mark.parametrize("connector", [False, True])
def test_reset_ends_what_is_lent(stage: MakeStage, connector: bool) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    (pages,) = ask(lender, key(request)).new_pages
    # The connector reports that KV of before the reset is still in flight.
    reset = lender.scheduler.reset_prefix_cache(reset_connector=connector)
    assert reset is not connector
    assert all(pool(lender).blocks[block].ref_cnt == 1 for block in pages.groups[0].blocks)
    metadata = lender.step(sent=["x"])
    assert metadata.commands == (EndLendings("the lending engine has emptied its prefix cache"),)
    lender.step()
    assert refused(lender, key(request)) == "0 of its tokens are cached"
    assert lender.scheduler.reset_prefix_cache(reset_connector=True)


def test_reset_ends_what_the_workers_have_not_lent_yet(stage: MakeStage) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    output, _ = lender.schedule()
    lender.update(output, requested=[PrefixRequested("x", key(request), 0, BLOCK)])
    lender.scheduler.reset_prefix_cache()
    metadata = lender.step()
    # The workers know the lending when they end it, and they end it before they answer.
    assert [type(command) for command in metadata.commands] == [PrefillRequest, EndLendings]
    assert metadata.after_pages[-1] == AnswerPrefix("x", TOKENS)
    lender.step(sent=["x"])
    lender.step()
    lender.assert_idle()


def pause(engine: Stage, state: PauseState) -> None:
    engine.scheduler.set_pause_state(state)


@pytest.mark.parametrize("state", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
def test_pause_ends_what_is_lent_and_refuses_until_it_is_over(stage: MakeStage, state: PauseState) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    (pages,) = ask(lender, key(request)).new_pages
    pause(lender, state)
    assert lender.scheduler.has_requests()  # vLLM's pause waits, and steps until nothing is lent
    metadata = lender.step()
    assert metadata.commands == (RefuseLending(PAUSED), EndLendings(PAUSED))
    assert all(pool(lender).blocks[block].ref_cnt == 1 for block in pages.groups[0].blocks)
    lender.step(sent=["x"])
    lender.step()
    lender.assert_idle()
    assert refused(lender, key(request)) == PAUSED  # it was in flight
    pause(lender, PauseState.UNPAUSED)
    metadata = ask(lender, key(request))
    assert metadata.after_pages[-1] == AnswerPrefix("x", TOKENS)


def test_pause_of_an_engine_without_borrowers_costs_no_step(stage: MakeStage) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    lender.step()
    pause(lender, PauseState.PAUSED_ALL)
    lender.assert_idle()
    output, _ = lender.schedule()
    lender.update(output, requested=[PrefixRequested("x", key(request), 0, BLOCK)])
    metadata = lender.step()
    assert metadata.commands == (RefuseLending(PAUSED),)
    assert metadata.after_pages == (AnswerPrefix("x", 0, LendOutcome.PAUSED, PAUSED),)
    pause(lender, PauseState.UNPAUSED)
    assert lender.step().commands == (RefuseLending(""),)
    lender.assert_idle()


def test_prefix_that_cannot_be_looked_up_is_refused(
    stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = stage("kv_consumer")
    request = run(lender)
    monkeypatch.setattr(lender.side._lender, "cache", None)
    assert refused(lender, key(request)) == "its look-up failed"
