"""Prefixes that an engine borrows, under vLLM's real scheduler and block pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest
from vllm_stage import BLOCK, FULL, PARAMS_OF_P, SLIDING, MakeStage, Stage, model, prompt, stage

from kv_connector.agent.commands import CancelLoad, Command, FinishPrefill, ReleaseTransfer, WithdrawPrefix
from kv_connector.protocol.actions import Address
from kv_connector.protocol.requests import DecodeRequest, PrefillRequest, PrefixRequest
from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.scheduling.content import content_key_of, hash_basis
from kv_connector.vllm.scheduling.prefix_borrower import MOST_AT_ONCE, PrefixBorrower

__all__ = ["model", "stage"]

LENDER = Address("10.0.0.2", 5700, prefixes=True)
TOKENS = 6 * BLOCK + 5
LENT = 4 * BLOCK
PREFIX = {"prefix_from": {"host": LENDER.host, "port": LENDER.port, "tokens": LENT}}
# The request's role beside its prefix: for a decode engine, or for its own client.
HALVES: dict[str, tuple[str, dict[str, Any]]] = {
    "for a decode engine": ("kv_producer", PARAMS_OF_P),
    "alone": ("kv_consumer", {}),
}
T = TypeVar("T")


def borrower(engine: Stage) -> PrefixBorrower:
    return engine.side._borrower


def only(commands: tuple[Command, ...], kind: type[T]) -> T:
    (found,) = (command for command in commands if isinstance(command, kind))
    return found


def asked(
    stage: MakeStage, half: str = "for a decode engine", *specs: Any, **options: Any
) -> tuple[Stage, PrefixRequest, Any]:
    """Brings an engine to a request "r" whose question the workers have."""
    role, params = HALVES[half]
    engine = stage(role, *specs, **options)
    request = engine.add("r", prompt(TOKENS), {**params, **PREFIX})
    metadata = engine.step()
    assert metadata.new_pages == ()
    return engine, only(metadata.commands, PrefixRequest), request


def held(stage: MakeStage, half: str = "for a decode engine", **options: Any) -> tuple[Stage, str]:
    """Brings an engine to a request whose prefix a lender holds. Returns the lending's transfer id."""
    engine, question, _ = asked(stage, half, **options)
    output, _ = engine.schedule()
    assert output.total_num_scheduled_tokens == 0
    engine.update(output, answers={question.transfer_id: LENT})
    return engine, question.transfer_id


def loading(stage: MakeStage, half: str = "for a decode engine", **options: Any) -> tuple[Stage, str]:
    engine, transfer_id = held(stage, half, **options)
    load = only(engine.step().commands, DecodeRequest)
    assert (load.request_id, load.transfer_id, load.engine) == (transfer_id, transfer_id, LENDER)
    assert (load.prompt_tokens, load.first_token) == (LENT, 0)
    return engine, transfer_id


def finish(engine: Stage, half: str) -> None:
    """Runs a request to its end, and reports its prompt as sent."""
    for _ in range(3):
        engine.step()
    engine.step(sent=["r"] if half == "for a decode engine" else [])
    engine.step()
    engine.assert_idle()


@pytest.mark.parametrize("half", HALVES)
def test_engine_loads_the_prefix_and_computes_the_rest(stage: MakeStage, half: str) -> None:
    engine, question, request = asked(stage, half)
    content = content_key_of(request, hash_basis("sha256", BLOCK), BLOCK)
    assert question == PrefixRequest(question.transfer_id, LENDER, content, 0, BLOCK)
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: LENT})
    load = only(engine.step().commands, DecodeRequest)
    (group,) = load.groups
    assert load.prompt_hash == content.prompt_hash(LENT)
    assert (group.first, len(group.blocks)) == (0, 4)
    assert group.blocks == tuple(engine.tables("r")[0])
    engine.step(received=[question.transfer_id])
    output, metadata = engine.schedule()
    assert output.num_scheduled_tokens == {"r": TOKENS - LENT}
    if half == "for a decode engine":
        (pages,) = metadata.new_pages  # those that came and those that are computed
        assert (pages.groups[0].first, len(pages.groups[0].blocks), pages.last) == (0, 7, True)
        assert pages.groups[0].blocks[:4] == group.blocks
    engine.update(output)
    finish(engine, half)


def test_loaded_prefix_serves_later_requests(stage: MakeStage) -> None:
    engine, transfer_id = loading(stage, "alone")
    engine.step(received=[transfer_id])
    finish(engine, "alone")
    engine.add("later", prompt(TOKENS))
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {"later": 5}
    engine.update(output)


def test_engine_loads_only_what_it_lacks(stage: MakeStage) -> None:
    engine = stage("kv_producer")
    engine.add("before", [*prompt(2 * BLOCK), *[9] * 10])
    while engine.scheduler.has_requests():
        engine.step()
    engine.add("r", prompt(TOKENS), {**PARAMS_OF_P, **PREFIX})
    question = only(engine.step().commands, PrefixRequest)
    assert question.first_token == 2 * BLOCK
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: LENT})
    load = only(engine.step().commands, DecodeRequest)
    assert load.first_token == 2 * BLOCK
    assert load.groups[0].first == 2
    assert load.groups[0].blocks == tuple(engine.tables("r")[0][2:4])
    engine.step(received=[question.transfer_id])
    finish(engine, "for a decode engine")


def test_window_loads_only_the_blocks_that_the_next_token_needs(stage: MakeStage) -> None:
    engine, question, _ = asked(stage, "alone", FULL, SLIDING)
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: LENT})
    load = only(engine.step().commands, DecodeRequest)
    full, sliding = load.groups
    assert all(full.blocks)
    assert len(sliding.blocks) == 4
    assert sliding.blocks[-1]
    assert sliding.needed > full.needed == 0
    engine.step(received=[question.transfer_id])
    finish(engine, "alone")


@pytest.mark.parametrize("half", HALVES)
def test_prompt_is_computed_when_nothing_is_lent(stage: MakeStage, half: str) -> None:
    engine, question, _ = asked(stage, half)
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: 0})
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {"r": TOKENS}
    engine.update(output)
    finish(engine, half)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("half", HALVES)
def test_prompt_is_computed_when_its_prefix_does_not_come(stage: MakeStage, half: str, policy: str) -> None:
    engine, transfer_id = loading(stage, half, policy=policy)
    engine.step(received=[transfer_id], discarded=[transfer_id])
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {"r": TOKENS}
    engine.update(output)
    finish(engine, half)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("half", HALVES)
def test_prompt_is_computed_when_its_prefix_fails_at_one_of_several_workers(
    stage: MakeStage, half: str, policy: str
) -> None:
    """One worker reports the failure at once. vLLM gets the end of the load from the last worker, later."""
    engine, transfer_id = loading(stage, half, policy=policy)
    steps: list[tuple[list[str], list[str]]] = [([transfer_id], []), ([], []), ([], [transfer_id])]
    for discarded, received in steps:
        output, _ = engine.schedule()
        assert output.total_num_scheduled_tokens == 0
        engine.update(output, discarded=discarded, received=received)
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {"r": TOKENS}
    engine.update(output)
    finish(engine, half)


def test_prefix_of_less_than_a_block_is_computed_without_a_question(stage: MakeStage) -> None:
    engine = stage("kv_producer")
    short = {"prefix_from": {**PREFIX["prefix_from"], "tokens": BLOCK - 1}}
    engine.add("r", prompt(TOKENS), {**PARAMS_OF_P, **short})
    output, metadata = engine.schedule()
    assert output.num_scheduled_tokens == {"r": TOKENS}
    assert [type(command) for command in metadata.commands] == [PrefillRequest]
    engine.update(output)
    finish(engine, "for a decode engine")


def measured(engine: Stage, *, compute: float, question: float = 0.0, load: float = 0.0) -> None:
    """Sets the seconds of computing a token, of a question and of loading a token."""
    costs = borrower(engine).costs
    costs.compute_seconds = lambda before, tokens: compute * tokens
    costs.answered(LENDER, question)
    costs.loaded(LENDER, 1000, 1000 * load, 1000 * load)


@pytest.mark.parametrize(
    ("costs", "asks"),
    [
        ({"compute": 0.01, "load": 0.009}, True),
        ({"compute": 0.01, "load": 0.011}, False),
        ({"compute": 0.01, "question": LENT * 0.009}, True),
        ({"compute": 0.01, "question": LENT * 0.011}, False),
    ],
)
def test_prefix_is_requested_if_its_load_takes_less_time_than_computing_it(
    stage: MakeStage, costs: dict[str, float], asks: bool
) -> None:
    engine = stage("kv_consumer")
    measured(engine, **costs)
    engine.add("r", prompt(TOKENS), PREFIX)
    output, metadata = engine.schedule()
    assert bool(output.num_scheduled_tokens) is not asks
    assert any(isinstance(command, PrefixRequest) for command in metadata.commands) is asks
    engine.update(output)


def test_prefix_is_released_if_the_lender_has_too_little_of_it(stage: MakeStage) -> None:
    engine, question, _ = asked(stage, "alone")
    costs = borrower(engine).costs
    costs.compute_seconds = lambda before, tokens: 0.01 * tokens
    costs.loaded(LENDER, 1000, 10.0, 2.0)  # eight seconds beside the wire's
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: 2 * BLOCK})
    output, metadata = engine.schedule()
    assert only(metadata.commands, ReleaseTransfer) == ReleaseTransfer(question.transfer_id, LENDER)
    assert output.num_scheduled_tokens == {"r": TOKENS}
    engine.update(output)
    finish(engine, "alone")


def test_refusal_is_measured(stage: MakeStage) -> None:
    engine, question, _ = asked(stage, "alone")
    begin = borrower(engine)._prefixes["r"].since
    borrower(engine).clock = lambda: begin + 0.25
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: 0})
    (lender,) = borrower(engine).costs._lenders.values()
    assert list(lender.questions) == [0.25]
    finish(engine, "alone")


def test_load_is_measured(stage: MakeStage) -> None:
    engine, question, _ = asked(stage, "alone")
    now = [100.0]
    borrower(engine).clock = borrower(engine).costs.clock = lambda: now[0]
    borrower(engine)._prefixes["r"].since = 100.0
    output, _ = engine.schedule()
    now[0] += 0.25
    engine.update(output, answers={question.transfer_id: LENT})
    engine.step()
    now[0] += 0.5
    engine.step(received=[question.transfer_id], arrived={question.transfer_id: 0.125})
    (lender,) = borrower(engine).costs._lenders.values()
    assert (list(lender.questions), list(lender.overheads)) == ([0.25], [0.375])
    assert list(lender.rates) == [LENT / 0.125]
    finish(engine, "alone")


@pytest.mark.parametrize("half", HALVES)
def test_load_that_takes_longer_than_computing_its_tokens_is_discarded(stage: MakeStage, half: str) -> None:
    now = [100.0]
    engine, question, _ = asked(stage, half)
    borrower(engine).clock = borrower(engine).costs.clock = lambda: now[0]
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: LENT})
    engine.step()
    borrower(engine).costs.compute_seconds = lambda before, tokens: 5.0
    now[0] += 4.9
    assert not engine.step().commands
    now[0] += 0.2
    assert only(engine.step().commands, CancelLoad) == CancelLoad(question.transfer_id)
    assert not engine.step().commands  # the lender may still write
    engine.step(received=[question.transfer_id])
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {"r": TOKENS}
    engine.update(output)
    finish(engine, half)
    engine.add("next", prompt(TOKENS, seed=2), PREFIX)
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {"next": TOKENS}
    engine.update(output)


def test_short_prefix_may_take_as_long_as_a_question(stage: MakeStage) -> None:
    engine, transfer_id = loading(stage, "alone")
    begin = borrower(engine)._prefixes["r"].since
    borrower(engine).costs.compute_seconds = lambda before, tokens: 0.01
    borrower(engine).clock = lambda: begin + 0.9
    assert not engine.step().commands
    borrower(engine).clock = lambda: begin + 1.1
    assert only(engine.step().commands, CancelLoad) == CancelLoad(transfer_id)


def test_load_that_failed_as_late_is_not_repeated_if_the_cost_is_not_known(stage: MakeStage) -> None:
    engine, transfer_id = loading(stage, "alone")
    begin = borrower(engine)._prefixes["r"].since
    borrower(engine).clock = lambda: begin + 30.0
    assert not engine.step().commands
    engine.step(received=[transfer_id], discarded=[transfer_id])
    engine.add("next", prompt(TOKENS, seed=2), PREFIX)
    metadata = engine.step()
    assert not any(isinstance(command, PrefixRequest) for command in metadata.commands)


def test_prompts_do_not_wait_for_the_lender_of_another(stage: MakeStage) -> None:
    """The gate for early prompts holds three prompts of seven blocks in turn: its share is 20 blocks."""
    engine = stage("kv_producer", blocks=40)
    for seed, name in enumerate(("a", "b", "borrows", "c"), 1):
        prefix = PREFIX if name == "borrows" else {}
        engine.add(name, prompt(TOKENS, seed), {"do_remote_decode": True, "transfer_id": name, **prefix})
    gate = engine.side._prefill.gate
    assert gate is not None
    while engine.scheduler.running or "b" not in gate._held:
        engine.step()
    output, metadata = engine.schedule()
    assert (output.num_scheduled_tokens, names(metadata)) == ({}, 0)
    engine.update(output, reserved=["a", "b"])
    output, metadata = engine.schedule()
    assert (output.num_scheduled_tokens, names(metadata)) == ({"c": TOKENS}, 1)
    engine.update(output)


def names(metadata: StepMetadata) -> int:
    return sum(isinstance(command, PrefixRequest) for command in metadata.commands)


def queue(engine: Stage, number: int, compute: float = 60.0) -> None:
    """Adds requests with different prompts, all with a prefix. They may be computed after ``compute`` s."""
    borrower(engine).costs.compute_seconds = lambda before, tokens: compute
    for index in range(number):
        engine.add(f"r{index:02}", prompt(TOKENS, seed=index + 1), PREFIX)


def test_few_prefixes_are_requested_at_once_and_the_others_follow_in_order(stage: MakeStage) -> None:
    engine = stage("kv_consumer", blocks=1000)
    queue(engine, MOST_AT_ONCE + 4)
    metadata = engine.step()
    assert names(metadata) == MOST_AT_ONCE
    asked = list(borrower(engine)._by_transfer.values())
    assert [one.request.request_id for one in asked] == [f"r{index:02}" for index in range(MOST_AT_ONCE)]
    assert names(engine.step()) == 0
    output, _ = engine.schedule()
    engine.update(output, answers={one.transfer_id: 0 for one in asked[:2]})
    # The first two are computed, in steps that have no room for others.
    assert sum(names(engine.step()) for _ in range(4)) == 2
    later = list(borrower(engine)._by_transfer.values())[-2:]
    assert [one.request.request_id for one in later] == [f"r{MOST_AT_ONCE + i}" for i in range(2)]


def test_loads_hold_a_share_of_the_pool_and_one_load_may_be_larger(stage: MakeStage) -> None:
    engine = stage("kv_consumer", blocks=40)  # ten for loads, and each needs four
    queue(engine, 4)
    assert names(engine.step()) == 2
    large = stage("kv_consumer", blocks=12)
    queue(large, 2)
    assert names(large.step()) == 1


def test_request_waits_for_others_no_longer_than_its_prompt_takes(stage: MakeStage) -> None:
    engine = stage("kv_consumer", blocks=40)
    now = [100.0]
    borrower(engine).clock = lambda: now[0]
    queue(engine, 3, compute=5.0)
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {}
    engine.update(output)
    now[0] += 4.9
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {}
    engine.update(output)
    now[0] += 0.2
    output, _ = engine.schedule()
    assert list(output.num_scheduled_tokens) == ["r02"]
    engine.update(output)


def test_request_does_not_wait_for_others_if_its_cost_is_not_known(stage: MakeStage) -> None:
    engine = stage("kv_consumer", blocks=40)
    queue(engine, 3)
    borrower(engine).costs.compute_seconds = lambda before, tokens: None
    output, metadata = engine.schedule()
    assert (list(output.num_scheduled_tokens), names(metadata)) == (["r02"], 2)
    engine.update(output)


def test_prefix_that_the_lender_may_have_freed_is_requested_again(stage: MakeStage) -> None:
    engine, question, _ = asked(stage, "alone")
    now = [100.0]
    borrower(engine).clock = lambda: now[0]
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: LENT})
    now[0] += 1.5  # half of the time for which it is held
    commands = engine.step().commands
    assert only(commands, ReleaseTransfer) == ReleaseTransfer(question.transfer_id, LENDER)
    again = only(commands, PrefixRequest)
    assert again == replace(question, transfer_id=again.transfer_id)
    output, _ = engine.schedule()
    engine.update(output, answers={again.transfer_id: LENT})
    assert only(engine.step().commands, DecodeRequest).transfer_id == again.transfer_id
    engine.step(received=[again.transfer_id])
    finish(engine, "alone")


def test_engine_without_blocks_requests_a_prefix_when_the_prompt_finds_blocks(stage: MakeStage) -> None:
    engine = stage("kv_consumer", blocks=12)
    now = [100.0]
    borrower(engine).clock = lambda: now[0]
    engine.add("r", prompt(TOKENS), PREFIX)
    question = only(engine.step().commands, PrefixRequest)
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: LENT})
    found: list[Command] = []
    for _ in range(40):
        now[0] += 0.5
        found += engine.step().commands
    assert found == [ReleaseTransfer(question.transfer_id, LENDER)]
    pool.free_blocks(taken[:5])  # enough for the load, and not for the prompt
    assert engine.step().commands == ()
    pool.free_blocks(taken[5:])
    again = only(engine.step().commands, PrefixRequest)
    output, _ = engine.schedule()
    engine.update(output, answers={again.transfer_id: LENT})
    assert only(engine.step().commands, DecodeRequest).transfer_id == again.transfer_id
    engine.step(received=[again.transfer_id])
    finish(engine, "alone")


def test_prefix_is_requested_three_times_at_most(stage: MakeStage) -> None:
    engine = stage("kv_consumer", blocks=12)
    now = [100.0]
    borrower(engine).clock = lambda: now[0]
    engine.add("r", prompt(TOKENS), PREFIX)
    for _ in range(3):
        question = only(engine.step().commands, PrefixRequest)
        output, _ = engine.schedule()
        engine.update(output, answers={question.transfer_id: LENT})
        now[0] += 1.5
    output, metadata = engine.schedule()
    assert not any(isinstance(one, PrefixRequest) for one in metadata.commands)
    assert output.num_scheduled_tokens == {"r": TOKENS}
    engine.update(output)
    finish(engine, "alone")


def test_prefix_is_requested_again_when_own_tokens_are_evicted_meanwhile(stage: MakeStage) -> None:
    engine = stage("kv_consumer", blocks=12)
    engine.add("before", [*prompt(2 * BLOCK), *[9] * 10])
    while engine.scheduler.has_requests():
        engine.step()
    engine.add("r", prompt(TOKENS), PREFIX)
    question = only(engine.step().commands, PrefixRequest)
    assert question.first_token == 2 * BLOCK
    output, _ = engine.schedule()
    engine.update(output, answers={question.transfer_id: LENT})
    engine.scheduler.kv_cache_manager.block_pool.evict_blocks(set(range(12)))
    commands = engine.step().commands
    assert only(commands, ReleaseTransfer) == ReleaseTransfer(question.transfer_id, LENDER)
    again = only(commands, PrefixRequest)
    assert again.first_token == 0
    output, _ = engine.schedule()
    engine.update(output, answers={again.transfer_id: LENT})
    assert only(engine.step().commands, DecodeRequest).first_token == 0
    engine.step(received=[again.transfer_id])
    finish(engine, "alone")


@pytest.mark.parametrize("half", HALVES)
def test_request_that_is_left_before_its_answer_withdraws_the_question(stage: MakeStage, half: str) -> None:
    engine, question, _ = asked(stage, half)
    engine.abort("r")
    output, metadata = engine.schedule()
    assert only(metadata.commands, WithdrawPrefix) == WithdrawPrefix(question.transfer_id)
    engine.update(output, answers={question.transfer_id: LENT})  # it was on its way
    assert only(engine.step().commands, ReleaseTransfer) == ReleaseTransfer(question.transfer_id, LENDER)
    finish_left(engine, half)


def finish_left(engine: Stage, half: str) -> None:
    engine.step(sent=["r"] if half == "for a decode engine" else [])
    engine.step()
    engine.assert_idle()


@pytest.mark.parametrize("half", HALVES)
def test_request_that_is_left_before_its_load_releases_the_prefix(stage: MakeStage, half: str) -> None:
    engine, transfer_id = held(stage, half)
    engine.abort("r")
    assert only(engine.step().commands, ReleaseTransfer) == ReleaseTransfer(transfer_id, LENDER)
    finish_left(engine, half)


@pytest.mark.parametrize("order", ["received first", "sent first", "both at once"])
def test_prompt_that_is_left_during_its_load_is_reported_to_vllm_once(stage: MakeStage, order: str) -> None:
    """EngineCore ends with a second report. With the first of two, its blocks would be free too early."""
    engine, transfer_id = loading(stage)
    engine.abort("r")
    commands = engine.step().commands
    assert only(commands, CancelLoad) == CancelLoad(transfer_id)
    assert only(commands, FinishPrefill).aborted
    assert engine.blocks_in_use == 4
    if order == "both at once":
        engine.step(received=[transfer_id], sent=["r"])
    else:
        first, second = {"received": [transfer_id]}, {"sent": ["r"]}
        if order == "sent first":
            first, second = second, first
        engine.step(**first)
        assert engine.blocks_in_use == 4
        assert "r" in engine.scheduler.requests
        engine.step(**second)
    engine.step()
    engine.assert_idle()


def test_request_alone_that_is_left_during_its_load_is_free_with_its_end(stage: MakeStage) -> None:
    engine, transfer_id = loading(stage, "alone")
    engine.abort("r")
    assert only(engine.step().commands, CancelLoad) == CancelLoad(transfer_id)
    assert engine.blocks_in_use == 4
    engine.step(received=[transfer_id])
    engine.step()
    engine.assert_idle()


@pytest.mark.parametrize("loaded", [False, True])
def test_prefix_of_before_a_reset_is_computed(stage: MakeStage, loaded: bool) -> None:
    engine, transfer_id = loading(stage, "alone")
    if loaded:
        engine.step(received=[transfer_id])
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    if not loaded:
        metadata = engine.step()
        assert only(metadata.commands, CancelLoad) == CancelLoad(transfer_id)
        engine.step(received=[transfer_id])
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {"r": TOKENS}
    engine.update(output)
    finish(engine, "alone")


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("phase", ["asked", "held"])
def test_reset_ends_what_a_lender_has_promised(stage: MakeStage, phase: str, half: str) -> None:
    if phase == "asked":
        engine, question, _ = asked(stage, half)
        transfer_id = question.transfer_id
    else:
        engine, transfer_id = held(stage, half)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    output, metadata = engine.schedule()
    assert output.num_scheduled_tokens == {"r": TOKENS}
    if phase == "asked":
        assert only(metadata.commands, WithdrawPrefix) == WithdrawPrefix(transfer_id)
        engine.update(output, answers={transfer_id: LENT})  # it was in flight
        assert only(engine.step().commands, ReleaseTransfer) == ReleaseTransfer(transfer_id, LENDER)
    else:
        assert only(metadata.commands, ReleaseTransfer) == ReleaseTransfer(transfer_id, LENDER)
        engine.update(output)
    finish(engine, half)


def test_reset_ends_what_routers_have_proposed(stage: MakeStage) -> None:
    engine = stage("kv_consumer")
    engine.add("r", prompt(TOKENS), PREFIX)
    assert engine.scheduler.reset_prefix_cache()
    metadata = engine.step()
    assert not any(isinstance(command, PrefixRequest) for command in metadata.commands)
    finish(engine, "alone")


def test_preempted_request_does_not_borrow_again(stage: MakeStage) -> None:
    engine, transfer_id = loading(stage, "alone")
    engine.step(received=[transfer_id])
    output, _ = engine.schedule()
    engine.update(output)
    metadata: StepMetadata = engine.step()
    assert not any(isinstance(command, PrefixRequest) for command in metadata.commands)
    finish(engine, "alone")
