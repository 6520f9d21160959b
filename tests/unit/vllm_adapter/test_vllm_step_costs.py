"""An engine's measurements of its steps and counts of its requests, alone and under vLLM's real scheduler."""

import random
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_stage import (
    BLOCK,
    FULL,
    PARAMS_OF_D,
    PARAMS_OF_P,
    SLIDING,
    MakeStage,
    Stage,
    model,
    prompt,
    stage,
)

from kv_connector.agent.start import RunningAgent
from kv_connector.control.membership import PromptCost, WorkloadReport
from kv_connector.protocol.actions import Address
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.scheduling.step_costs import Sample, StepCosts, fit

__all__ = ["model", "stage"]

MS = 1_000_000

# --- What a prompt costs

# About those of an 8B model.
STEP_NS, TOKEN_NS, PAIR_NS = 5 * MS, 25_000, 0.4


def sample(tokens: int, behind: int = 0, off: float = 1.0) -> Sample:
    pairs = tokens * (behind + tokens / 2)
    return Sample(tokens, pairs, round((STEP_NS + TOKEN_NS * tokens + PAIR_NS * pairs) * off))


def various(noise: float = 0.0, steps: int = 60) -> list[Sample]:
    r = random.Random(1)
    return [
        sample(r.randint(64, 8192), r.choice([0, 0, 8192, 40_000]), r.gauss(1, noise)) for _ in range(steps)
    ]


def seconds(cost: PromptCost, tokens: int, behind: int = 0) -> float:
    """Returns the duration as the readers of a WorkloadReport compute it."""
    pairs = tokens * (behind + tokens / 2)
    return (cost.step_ns + cost.token_ns * tokens + cost.pair_ps / 1000 * pairs) / 1e9


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.02), (0.05, 0.1)])
def test_the_costs_are_found(noise: float, within: float) -> None:
    cost = fit(various(noise))
    assert cost.step_ns == pytest.approx(STEP_NS, rel=within)
    assert cost.token_ns == pytest.approx(TOKEN_NS, rel=within)
    assert cost.pair_ps == pytest.approx(PAIR_NS * 1000, rel=within)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_one_step_that_was_held_up_changes_nothing(noise: float) -> None:
    samples = various(noise, steps=16)
    held_up = [*samples[1:], samples[0]._replace(took_ns=5_000 * MS)]
    assert seconds(fit(held_up), 2000) == pytest.approx(seconds(fit(samples), 2000), rel=0.05)


def test_no_cost_is_below_zero() -> None:
    """Small steps took less than a line through the large ones predicts, and large ones even less."""
    lengths = range(64, 2000, 60)
    below_0_at_0 = fit([Sample(n, n * n / 2, 25_000 * n - 500_000) for n in lengths])
    assert below_0_at_0.step_ns == 0
    assert seconds(below_0_at_0, 1500) == pytest.approx(0.037, rel=0.03)
    flatter = fit([Sample(n, n * n / 2, 5 * MS + 25_000 * n - 2 * n * n) for n in lengths])
    assert flatter.pair_ps == 0
    assert flatter.step_ns > 0
    assert seconds(flatter, 1500) == pytest.approx(0.038, rel=0.05)


def test_steps_of_one_size_put_the_cost_on_the_tokens() -> None:
    """Such steps do not show what the cost depends on.

    A cost for each pair would give an absurd cost for a prompt ten times as long.
    """
    cost = fit([sample(1000)] * 30)
    assert seconds(cost, 1000) == pytest.approx(seconds(fit(various()), 1000), rel=0.03)
    assert (cost.step_ns, cost.pair_ps) == (0, 0)


# --- Steps


@dataclass
class Asked:
    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0


class Engine:
    """The steps of a scheduler that a test describes, and their time."""

    def __init__(self, in_flight: int = 1, loading: Collection[str] = ()) -> None:
        self.now = 1_000 * MS
        self.costs = StepCosts(
            WorkloadReport(8192, 8192, 100_000), in_flight, loading.__contains__, lambda: self.now
        )
        self.requests: dict[str, Asked] = {}

    def ask(self, request_id: str, tokens: int, computed: int = 0) -> None:
        self.requests[request_id] = Asked(request_id, tokens, computed)
        self.costs.arrived(self.requests[request_id])

    def schedule(self, preempted: Sequence[str] = (), **tokens: int) -> WorkloadReport | None:
        step = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            preempted_req_ids=set(preempted),
        )
        load = self.costs.scheduled(step)
        for request_id, count in tokens.items():
            self.requests[request_id].num_computed_tokens += count
        return load

    def end(self, after_ms: float = 0.0) -> None:
        self.now += round(after_ms * MS)
        self.costs.step_ended()

    def step(self, took_ms: float, **tokens: int) -> WorkloadReport | None:
        load = self.schedule(**tokens)  # type: ignore[arg-type]
        self.end(took_ms)
        return load

    def prefill(self, tokens: int, behind: int = 0) -> None:
        """Runs a request's whole life: one step that computes it, with the duration of `sample`."""
        self.ask("p", behind + tokens, computed=behind)
        self.step(sample(tokens, behind).took_ns / MS, p=tokens)
        self.costs.request_finished("p")


def decoding(in_flight: int = 1) -> Engine:
    engine = Engine(in_flight)
    engine.ask("d", 1)
    engine.step(1.0, d=1)
    return engine


def test_a_step_lasts_from_its_scheduling_to_its_end() -> None:
    engine = decoding()
    engine.now += 1000 * MS  # the engine is idle
    for _ in range(3):
        engine.step(5.0, d=1)
        engine.now += 1 * MS
    assert engine.costs.load().decode_ns == 5 * MS


def test_a_step_that_was_scheduled_early_lasts_from_the_end_of_the_one_before() -> None:
    engine = decoding(in_flight=2)
    engine.schedule(d=1)
    for _ in range(4):
        engine.now += 1 * MS
        engine.schedule(d=1)
        engine.end(4.0)
    engine.end(5.0)
    assert list(engine.costs._decodes) == [1 * MS, *[5 * MS] * 5]


def test_prompts_and_decodes_are_distinguished_though_steps_overlap() -> None:
    engine = decoding(in_flight=2)
    engine.ask("p", 100)
    engine.schedule(d=1)
    engine.schedule(d=1, p=100)
    engine.end(5.0)
    engine.schedule(d=1, p=1)
    engine.end(70.0)
    engine.end(5.0)
    assert list(engine.costs._decodes) == [1 * MS, 5 * MS, 5 * MS]
    assert list(engine.costs._samples) == [(100).bit_length()]
    assert [*engine.costs._samples[7]] == [Sample(100, 5000.0, 70 * MS)]


def test_an_end_that_is_missed_is_made_up_for() -> None:
    engine = decoding(in_flight=2)
    engine.end(3.0)  # without a step
    engine.schedule(d=1)  # its end is missed
    engine.ask("p", 400)
    for _ in range(3):
        engine.schedule(d=1)
        engine.schedule(d=1, p=100)
        engine.end(5.0)
        engine.end(50.0)
    assert {s.took_ns for s in engine.costs._samples[7]} == {50 * MS}
    assert len(engine.costs._steps) == 0


def test_costs_are_fitted_once_a_second() -> None:
    """They are fitted at most so often, because the same thread sends tokens."""
    engine = Engine()
    for tokens in range(64, 864, 100):
        engine.prefill(tokens)
    engine.step(1.0)
    first = engine.costs.load().prompt
    assert first is not None
    engine.prefill(5000)
    engine.step(1.0)
    assert engine.costs.load().prompt == first
    engine.now += 1000 * MS
    engine.step(1.0)
    assert engine.costs.load().prompt != first


def test_a_prompt_that_comes_to_an_engine_at_rest_does_not_wait_for_a_fit() -> None:
    engine = Engine(in_flight=2)
    for tokens in range(64, 864, 100):
        engine.prefill(tokens)
    engine.now += 1000 * MS
    engine.ask("p", 100)
    engine.schedule(p=100)
    assert engine.costs.load().prompt is None
    engine.schedule()  # beside that step
    assert engine.costs.load().prompt is not None


def test_the_first_step_does_not_stand_for_all() -> None:
    """Kernels are compiled in the first step.

    An engine that looks slow gets no requests with which it could show that it is not.
    """
    engine = Engine()
    engine.ask("d", 1)
    engine.step(3000.0, d=1)
    for _ in range(2):
        engine.step(5.0, d=1)
    assert engine.costs.load().decode_ns == 5 * MS
    for _ in range(40):
        engine.step(8.0, d=1)
    assert engine.costs.load().decode_ns == 8 * MS, "of late"


def test_a_step_that_computes_nothing_is_no_decode() -> None:
    engine = Engine()
    engine.ask("p", 100)
    for _ in range(3):
        engine.step(0.1)
    assert engine.costs.load().decode_ns is None


def test_a_loaded_prompts_last_token_is_a_decodes() -> None:
    engine = decoding()
    engine.ask("loaded", 500, computed=499)
    engine.step(5.0, d=1, loaded=1)
    engine.step(5.0, d=1, loaded=1)
    load = engine.costs.load()
    assert (load.running, load.decode_ns) == (2, 5 * MS)
    assert not engine.costs._samples


def test_the_rest_behind_a_cached_prefix_is_neither_a_decode_nor_a_prompt() -> None:
    engine = decoding()
    engine.ask("hit", 500, computed=488)
    engine.step(60.0, d=1, hit=12)
    assert engine.costs.load().decode_ns == 1 * MS
    assert not engine.costs._samples


def test_a_step_of_several_prompts_has_the_tokens_and_pairs_of_all() -> None:
    engine = Engine()
    engine.ask("a", 100)
    engine.ask("b", 2100, computed=2000)
    engine.step(8.0, a=100, b=100)
    (found,) = engine.costs._samples[8]
    assert found == Sample(200, 100 * 50 + 100 * 2050, 8 * MS)


def test_cost_is_reported_once_enough_steps_show_it() -> None:
    engine = Engine()
    for _ in range(20):
        engine.prefill(40)  # mostly the cost of a step
    for tokens in range(100, 800, 100):
        assert engine.costs.load().prompt is None
        engine.prefill(tokens)
    engine.prefill(3000)
    engine.step(1.0)
    cost = engine.costs.load().prompt
    assert cost is not None
    assert seconds(cost, 2000) == pytest.approx(sample(2000).took_ns / 1e9, rel=0.05)


def test_many_short_prompts_do_not_push_out_the_long_ones() -> None:
    engine = Engine()
    for number in range(16):
        engine.prefill(4096, behind=4096 * (number % 8))
    for _ in range(1000):
        engine.prefill(70)
    cost = engine.costs.load().prompt
    assert cost is not None
    took = sample(4096, 20_000).took_ns / 1e9
    assert seconds(cost, 4096, 20_000) == pytest.approx(took, rel=0.05)
    assert sum(len(samples) for samples in engine.costs._samples.values()) < 100


# --- When it is reported


def test_workload_is_reported_ten_times_a_second_and_at_once_when_it_ends() -> None:
    engine = Engine()
    engine.ask("a", 3000)
    first = engine.step(50.0, a=1000)
    assert first == WorkloadReport(8192, 8192, 100_000, waiting=3000)
    assert engine.step(50.0, a=1000) is None
    second = engine.step(5.0, a=1000)
    assert second is not None
    assert second.waiting == 1000, "what this step computes is still to be computed"
    assert engine.step(5.0, a=1) is None
    engine.costs.request_finished("a")
    last = engine.schedule()
    assert last is not None
    assert (last.waiting, last.running) == (0, 0)
    engine.end()
    assert engine.schedule() is None, "it is told once"


# --- Requests, under vLLM's scheduler

ROUTERS = {"routers": ["127.0.0.1:1"], "api_url": "http://127.0.0.1:2"}


def costs_of(stage: Stage) -> StepCosts:
    connector = stage.scheduler.connector
    assert isinstance(connector, WriteImmConnector)
    assert connector._step_costs is not None
    return connector._step_costs


def counts(stage: Stage) -> tuple[int, int]:
    """Returns the tokens that wait, and the requests that run."""
    load = costs_of(stage).load()
    return load.waiting, load.running


def test_a_prompts_life(stage: MakeStage) -> None:
    engine = stage("kv_both", budget=256, extra=ROUTERS)
    assert counts(engine) == (0, 0)
    engine.add("a", prompt(600), max_tokens=3)
    assert counts(engine) == (600, 0)
    engine.step()
    assert counts(engine) == (344, 0)
    engine.step()
    engine.step()
    assert counts(engine) == (0, 1)
    engine.step()
    engine.step()
    assert counts(engine) == (0, 0)
    engine.add("again", prompt(600), max_tokens=3)
    assert counts(engine) == (600, 0), "vLLM looks into its prefix cache when it schedules it"
    engine.step()
    assert counts(engine) == (0, 1)
    load = costs_of(engine).load()
    assert load.decode_ns is not None
    assert load.decode_ns > 0
    assert not costs_of(engine)._steps, "every step's end was told"


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_aborted_request_is_not_counted(stage: MakeStage, steps: int) -> None:
    engine = stage("kv_both", budget=256, extra=ROUTERS)
    engine.add("a", prompt(600), max_tokens=9)
    for _ in range(steps):
        engine.step()
    assert counts(engine) != (0, 0)
    engine.abort("a")
    assert counts(engine) == (0, 0)


def test_preempted_tokens_are_counted_as_uncomputed_again(stage: MakeStage) -> None:
    engine = stage("kv_both", blocks=20, budget=400, extra=ROUTERS)
    engine.add("old", prompt(250, seed=1), max_tokens=60)
    engine.step()
    engine.add("young", prompt(300, seed=2), max_tokens=60)
    output, _ = engine.schedule()
    while not output.preempted_req_ids:
        engine.update(output)
        assert counts(engine) == (0, 2)
        output, _ = engine.schedule()
    young = engine.scheduler.requests["young"]
    assert counts(engine) == (young.num_tokens, 1)
    assert young.num_tokens > 300
    engine.update(output)
    while young.num_computed_tokens == 0:
        engine.step()
    assert counts(engine) == (0, 1), "old has ended"


def test_prompt_of_a_prefill_engine_is_not_counted_until_it_arrives(stage: MakeStage) -> None:
    decode = stage("kv_consumer", extra=ROUTERS)
    decode.add("first", prompt(600), dict(PARAMS_OF_D), max_tokens=5)
    decode.add("sample", prompt(600), dict(PARAMS_OF_D), max_tokens=5)
    assert counts(decode) == (0, 0)
    decode.step()
    assert counts(decode) == (0, 0)
    decode.step(received=["first"])
    assert counts(decode)[0] == 1 + 600, "the last token, and what is found in the prefix cache for the other"
    decode.step()
    assert counts(decode) == (0, 2)


def test_prompt_without_a_prefill_engine_is_counted(stage: MakeStage) -> None:
    decode = stage("kv_consumer", policy="recompute", extra=ROUTERS)
    decode.add("d", prompt(200), dict(PARAMS_OF_D), max_tokens=5)
    decode.add("own", prompt(100, seed=2), max_tokens=5)
    decode.add("refused", prompt(100, seed=3), dict(PARAMS_OF_P), max_tokens=5)
    assert counts(decode) == (200, 0)
    decode.step()
    assert counts(decode) == (0, 2)
    decode.step(received=["d"], failed=["d"])
    assert counts(decode) == (200, 2)


def test_a_prefill_engines_requests_end_with_their_prompts(stage: MakeStage) -> None:
    prefill = stage("kv_producer", extra=ROUTERS)
    prefill.add("p", prompt(200), dict(PARAMS_OF_P))
    first = prefill.step()
    assert first.load is not None
    assert first.load.waiting == 200
    assert counts(prefill) == (0, 0), "though its pages are still to be sent"
    last = prefill.step()
    assert last.load is not None
    assert last.load.waiting == 0, "vLLM takes one more step when a request has ended"


def test_report_has_the_engines_capacity_and_step_sizes(stage: MakeStage) -> None:
    load = costs_of(stage("kv_both", budget=512, extra=ROUTERS)).load()
    assert (load.step_tokens, load.prompt_tokens, load.cache_tokens) == (512, 512, 100 * BLOCK)
    assert load.prompt is load.decode_ns is None
    of_two = costs_of(stage("kv_both", FULL, SLIDING, extra=ROUTERS)).load()
    assert 50 * BLOCK < of_two.cache_tokens < 100 * BLOCK, "a window takes little of the pool"


@pytest.mark.parametrize("other", [FULL, SLIDING, replace(SLIDING, block_size=2 * BLOCK, head_size=32)])
def test_reported_block_is_the_unit_of_prefix_hits(stage: MakeStage, other: Any) -> None:
    """Groups with blocks of two sizes hit in blocks of both, and hash the smaller ones."""
    engine = stage("kv_both", FULL, other, extra=ROUTERS)
    block = costs_of(engine).load().block_tokens
    assert block == max(FULL.block_size, other.block_size)
    for seed, shared in enumerate(range(BLOCK, 8 * BLOCK, BLOCK // 2)):
        first = prompt(shared, seed)
        engine.add(f"first {seed}", first)
        while engine.scheduler.has_requests():
            engine.step()
        request = engine.add(f"next {seed}", [*first, *[299] * 10])
        found = engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        assert found == shared // block * block
        while engine.scheduler.has_requests():
            engine.step()


def test_report_has_the_threshold_for_long_prompts(stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm_stage

    made = vllm_stage.vllm_config

    def with_threshold(*given: Any, **more: Any) -> Any:
        config = made(*given, **more)
        config.scheduler_config.long_prefill_token_threshold = 64
        return config

    monkeypatch.setattr(vllm_stage, "vllm_config", with_threshold)
    load = costs_of(stage("kv_both", budget=512, extra=ROUTERS)).load()
    assert (load.step_tokens, load.prompt_tokens) == (512, 64)


def test_without_a_router_nothing_is_reported(stage: MakeStage) -> None:
    engine = stage("kv_both")
    engine.add("a", prompt(100))
    assert engine.step().load is None


def test_prompt_seconds_are_those_of_the_fitted_cost() -> None:
    costs = StepCosts(WorkloadReport(256, 100, 0), 1, lambda request_id: False)
    assert costs.prompt_seconds(0, 250) is None
    costs._prompt = PromptCost(step_ns=1_000_000, token_ns=2000, pair_ps=1000)
    # Three steps, 250 tokens, and pairs with 1,000 tokens before them and half of their own.
    assert costs.prompt_seconds(1000, 250) == pytest.approx(0.003 + 0.0005 + 250 * 1125 * 1e-9)


def test_a_step_is_not_lost_with_its_load(stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = stage("kv_producer", extra=ROUTERS)
    monkeypatch.setattr(costs_of(prefill), "scheduled", lambda step: 1 / 0)
    prefill.add("p", prompt(100), dict(PARAMS_OF_P))
    metadata = prefill.step()
    assert metadata.load is None
    assert metadata.new_pages
    assert metadata.commands


# --- The worker's half


@pytest.mark.parametrize("registers", [True, False])
def test_the_worker_hands_it_to_its_registrar(registers: bool) -> None:
    told: list[WorkloadReport] = []
    connector: WriteImmConnector = object.__new__(WriteImmConnector)
    hits: dict[str, tuple[int, int]] = {}
    registrar: Any = SimpleNamespace(set_load=told.append, add_hits=hits.update) if registers else None
    nothing: Any = None
    connector._running = RunningAgent(nothing, Address("127.0.0.1", 5600), nothing, registrar, ExitStack())
    connector.worker = SimpleNamespace(begin_step=lambda metadata: None)  # type: ignore[assignment]
    load = WorkloadReport(1, 1, 1, waiting=5)
    for metadata in (StepMetadata(), StepMetadata(load=load), StepMetadata(hits={"t": (9, 4)})):
        connector._begin_step(metadata)
    assert hits == ({"t": (9, 4)} if registers else {})
    assert told == ([load] if registers else [])
