"""SGLang's experts over kv-connector, without SGLang: layers that are served, steps, and lost ranks."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_group import FakeGroup, RankThreads
from moe_ranks import EndedRank, RankPipe, run_ranks
from moe_steps import same

from kv_connector.moe import metrics, oracle
from kv_connector.moe.fault import ExchangeError
from kv_connector.moe.group import Group, GroupError
from kv_connector.moe.settings import linear_owners
from kv_connector.sglang.experts.exchange import MOST_TOKENS, LayerExchange, SglangExperts
from kv_connector.sglang.experts.layers import ExpertRank, SglangLayer, ranks_problem

HIDDEN, EXPERTS, TOP_K = 64, 12, 2
LAYER = SglangLayer(
    hidden=HIDDEN,
    experts=EXPERTS,
    local=EXPERTS // 2,
    shared=0,
    top_k=TOP_K,
    dtype="bfloat16",
    runner="deep_gemm",
    method="Fp8MoEMethod",
)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts steps of a layer by the reason why SGLang serves them, and those that were taken."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(metrics, "passed", lambda reason: counts.update([reason]))
    monkeypatch.setattr(metrics, "taken", lambda: counts.update(["taken"]))
    return counts


def layer_of(ranks: int, **facts: Any) -> SglangLayer:
    return replace(LAYER, local=EXPERTS // ranks, **facts)


def exchange_of(
    ranks: RankThreads, rank: int, problem: str = "", form: Any = FakeGroup.form
) -> SglangExperts:
    place = ExpertRank(rank, ranks.number, None, problem)
    return SglangExperts(place, ranks.exchange(rank), form=form)


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows, ids and weights."""
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(size, HIDDEN, generator=random).bfloat16(),
        torch.randint(0, EXPERTS, (size, TOP_K), generator=random, dtype=torch.int32),
        torch.rand(size, TOP_K, generator=random),
    )


def computed(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rank: int, ranks: int
) -> torch.Tensor:
    """Returns the results of a rank's experts: expert e multiplies a row by e + 1. Other rows are NaN."""
    owners = linear_owners(EXPERTS, ranks)
    results = torch.zeros(rows.shape)
    for place in range(TOP_K):
        for expert in (expert for expert, owner in enumerate(owners) if owner == rank):
            chosen = ids[:, place] == expert
            results[chosen] += rows[chosen].float() * (expert + 1) * weights[chosen, place, None]
    results[~oracle.wanted(ids, owners, rank)] = float("nan")
    return results.bfloat16()


def expected(batches: Sequence[tuple[torch.Tensor, ...]], rank: int) -> torch.Tensor:
    """Returns a rank's sums after an all-gather of all rows and a reduce-scatter of all results."""
    ranks = len(batches)
    gathered = [torch.cat(columns) for columns in zip(*batches, strict=True)]
    results = [computed(gathered[0], gathered[1], gathered[2], other, ranks) for other in range(ranks)]
    return oracle.combine(results, [ids for _, ids, _ in batches], linear_owners(EXPERTS, ranks), rank)


# --- Layers that are served


def test_a_layer_of_hopper_is_served() -> None:
    assert LAYER.problem(2) == ""
    assert replace(LAYER, method="UnquantizedFusedMoEMethod").problem(2) == ""
    assert replace(LAYER, method="UnquantizedFusedMoEMethod", runner="flashinfer_cutlass").problem(2) == ""


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": "float16"}, "the layer computes in float16 instead of bfloat16"),
        ({"runner": "flashinfer_trtllm"}, "the runner is flashinfer_trtllm instead of deep_gemm or"),
        (
            {"runner": ""},
            r"the runner is  instead of deep_gemm or flashinfer_cutlass \(--moe-runner-backend\)",
        ),
        ({"method": "W4AFp8MoEMethod"}, "the runner deep_gemm is not served with weights of W4AFp8MoEMethod"),
        ({"runner": "flashinfer_cutlass"}, "flashinfer_cutlass is not served with weights of Fp8MoEMethod"),
        ({"shared": 1}, r"shared experts are part of the layer \(--disable-shared-experts-fusion\)"),
        ({"local": 5}, "this rank has 5 of 12 experts, with 2 ranks"),
        ({"hidden": 68}, "rows have 68 elements, which is no multiple of 8"),
        ({"top_k": 33}, "a token has 33 experts instead of 1 to 32"),
    ],
)
def test_a_layer_is_refused_with_the_reason(
    facts: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = replace(LAYER, **facts)
    ranks = RankThreads(2)
    assert ranks.run(lambda rank: exchange_of(ranks, rank).layer(layer)) == [None, None]
    assert [line.levelno for line in caplog.records] == [logging.WARNING] * 2
    assert all(
        line.message.startswith(f"experts: SGLang's own exchange serves layers of {layer.experts} experts")
        for line in caplog.records
    )
    assert re.search(reason, layer.problem(2))
    assert layer.problem(2) in caplog.text


@pytest.mark.parametrize(("ranks", "served"), [(1, False), (2, True), (8, True), (9, False)])
def test_two_to_eight_ranks_are_served(ranks: int, served: bool) -> None:
    assert ranks_problem(ranks) == ("" if served else f"{ranks} ranks exchange rows instead of 2 to 8")


def test_a_problem_of_one_rank_refuses_the_layer_on_all(caplog: pytest.LogCaptureFixture) -> None:
    ranks = RankThreads(3)

    def layer(rank: int) -> Any:
        return exchange_of(ranks, rank, "the moon is full" if rank == 1 else "").layer(layer_of(3))

    assert ranks.run(layer) == [None] * 3
    assert caplog.text.count("rank 1: the moon is full") == 3


def test_different_layers_are_refused_on_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    ranks = RankThreads(2)
    found = ranks.run(lambda rank: exchange_of(ranks, rank).layer(layer_of(2, top_k=1 + rank)))
    assert found == [None, None]
    assert caplog.text.count("the ranks have different layers of experts") == 2


def test_a_layer_that_only_one_rank_has_not_had_before_is_compared_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank that had compared it alone would have paired it with another collective of SGLang's."""
    ranks, other = RankThreads(2), layer_of(2, method="UnquantizedFusedMoEMethod")

    def layers(rank: int) -> list[Any]:
        exchange = exchange_of(ranks, rank)
        return [exchange.layer(one) for one in (LAYER, (LAYER, other)[rank], LAYER)]

    for one, two, three in ranks.run(layers):
        assert one is three is not None
        assert two is None
    assert caplog.text.count("the ranks have different layers of experts") == 2


def test_a_group_that_is_not_formed_leaves_the_layer_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    def form(settings: Any, exchange: Any) -> Any:
        raise GroupError(f"rank {settings.rank} cannot form a group: rank 1 has no memory")

    ranks = RankThreads(2)
    assert ranks.run(lambda rank: exchange_of(ranks, rank, form=form).layer(LAYER)) == [None, None]
    assert caplog.text.count("rank 1 has no memory") == 2


def test_an_exchange_that_broke_ends_the_server() -> None:
    """A call of it may still wait in SGLang's group of processes."""

    def form(settings: Any, exchange: Any) -> Any:
        raise ExchangeError("no message of rank 1")

    ranks = RankThreads(2)
    with pytest.raises(ExchangeError, match="no message of rank 1"):
        ranks.run(lambda rank: exchange_of(ranks, rank, form=form).layer(LAYER))


def test_each_layer_is_compared_and_equal_shapes_have_one_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    formed: list[Any] = []
    messages: list[bytes] = []
    ranks = RankThreads(2)

    def form(settings: Any, exchange: Any) -> Any:
        formed.append(settings)
        return FakeGroup.form(settings, exchange)

    def layers(rank: int) -> list[Any]:
        def counting(message: bytes) -> Sequence[bytes]:
            messages.append(message)
            return ranks.exchange(rank)(message)

        exchange = SglangExperts(ExpertRank(rank, 2, None), counting, form=form)
        other = layer_of(2, method="UnquantizedFusedMoEMethod")
        return [exchange.layer(one) for one in (LAYER, LAYER, other, layer_of(2, hidden=128))]

    for one, two, three, four in ranks.run(layers):
        assert one is two
        assert one._group is three._group
        assert four._group is not one._group
    assert len(formed) == 4
    assert len(messages) == 2 * (4 + 2)  # for each layer, and in each forming
    settings = formed[0]
    assert (settings.max_tokens, settings.row_bytes, settings.device) == (MOST_TOKENS, 144, None)
    assert caplog.text.count("of 2 exchanges rows of 64 elements over kv-connector") == 2


# --- Steps


@pytest.mark.parametrize(
    ("sizes", "prefill", "reason"),
    [
        ((3, 4), False, "taken"),
        ((0, 0), False, "taken"),
        ((MOST_TOKENS, 1), False, "taken"),
        ((MOST_TOKENS + 1, 1), False, "size"),
        ((), True, "prefill"),
    ],
)
def test_steps_are_taken_by_facts_of_all_ranks_and_counted(
    sizes: tuple[int, ...],
    prefill: bool,
    reason: str,
    counted: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ranks = RankThreads(2)
    layers = ranks.run(lambda rank: exchange_of(ranks, rank).layer(LAYER))
    caplog.clear()
    for _ in range(2):
        assert {layer.takes(sizes, prefill) for layer in layers} == {reason == "taken"}
    assert counted == {reason: 4}
    said = f"experts: SGLang's all-gather serves some steps, for this reason: {reason}"
    assert [line.message for line in caplog.records] == ([] if reason == "taken" else [said] * 2)


def run_layer(
    layer: LayerExchange, rank: int, sizes: Sequence[int], tokens: Sequence[int], seed: int, in_place: bool
) -> None:
    """Runs a step, and compares it with the all-gather of all rows. ``tokens``: rows without padding."""
    ranks = len(sizes)
    batches = [batch(count, seed + other) for other, count in enumerate(tokens)]
    got = layer.dispatch(*batches[rank], sizes)
    padded = []
    for (rows, ids, weights), size in zip(batches, sizes, strict=True):
        missing = size - len(rows)
        padded.append(
            (
                torch.cat([rows, rows.new_zeros(missing, HIDDEN)]),
                torch.cat([ids, ids.new_full((missing, TOP_K), -1)]),
                torch.cat([weights, weights.new_zeros(missing, TOP_K)]),
            )
        )
    rows, ids, weights = (torch.cat(columns) for columns in zip(*padded, strict=True))
    assert same(got.ids, ids)
    assert same(got.weights, weights)
    wanted = oracle.wanted(ids, linear_owners(EXPERTS, ranks), rank)
    assert same(got.x[wanted], rows[wanted])
    results = computed(got.x, got.ids, got.weights, rank, ranks)
    if in_place:
        results = layer.combine_input().copy_(results)
    sums = layer.combine(results)
    assert same(sums, expected(batches, rank)), (sizes, tokens)
    assert not sums.isnan().any()


def run_steps(side: RankPipe, ranks: int) -> int:
    exchange = SglangExperts(ExpertRank(side.rank, ranks, None), side.exchange)
    layer = exchange.layer(layer_of(ranks))
    assert layer is not None
    assert isinstance(layer._group, Group)
    steps: list[tuple[Sequence[int], Sequence[int]]] = [
        ([4] * ranks, [4] * ranks),
        ([0] * ranks, [0] * ranks),
        ([1, *[0] * (ranks - 1)], [1, *[0] * (ranks - 1)]),
        ([3, 7, 2][:ranks], [3, 7, 2][:ranks]),
        ([8] * ranks, [5, 8, 0][:ranks]),  # as SGLang pads steps to the largest rank
        ([MOST_TOKENS] * ranks, [MOST_TOKENS] * ranks),
    ]
    for number, (sizes, tokens) in enumerate(steps * 2):
        assert layer.takes(sizes, prefill=False)
        run_layer(layer, side.rank, sizes, tokens, 100 * number, in_place=number % 2 == 1)
        exchange.check(lambda: None)
    side.exchange(b"")
    return len(steps)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_processes_are_those_of_an_all_gather(ranks: int) -> None:
    assert run_ranks(ranks, run_steps, ranks) == [6] * ranks


def test_a_padded_row_gets_the_id_that_the_runner_takes_for_no_expert() -> None:
    cutlass = layer_of(2, runner="flashinfer_cutlass", method="UnquantizedFusedMoEMethod")
    assert LAYER.no_expert == -1
    assert cutlass.no_expert == EXPERTS
    given: list[torch.Tensor] = []

    class Keeping(FakeGroup):
        def dispatch(self, x: Any, ids: Any, weights: Any, **more: Any) -> Any:
            given.append(ids)
            return super().dispatch(x, ids.clamp(0, EXPERTS - 1), weights, **more)

    ranks = RankThreads(2)

    def step(rank: int) -> None:
        layer = exchange_of(ranks, rank, form=Keeping.form).layer(cutlass)
        assert layer is not None
        layer.dispatch(*batch(1, rank), [2, 2])

    ranks.run(step)
    assert [ids[1].tolist() for ids in given] == [[EXPERTS] * TOP_K] * 2


def one_layer() -> LayerExchange:
    """A layer of one of two ranks. Its dispatch would wait for the second rank."""
    ranks = RankThreads(2)
    found: LayerExchange = ranks.run(lambda rank: exchange_of(ranks, rank).layer(LAYER))[0]
    return found


def test_more_rows_than_the_ranks_know_of_end_the_step() -> None:
    with pytest.raises(
        GroupError, match=r"rank 0 has 3 rows, and the ranks know of 2\. Unset KV_CONNECTOR_MOE"
    ):
        one_layer().dispatch(*batch(3, 0), [2, 2])


def test_results_of_another_shape_end_the_step() -> None:
    layer = one_layer()
    layer._sizes = 2, 2
    with pytest.raises(GroupError, match=r"returns \(4, 64\) torch.float32 for a dispatch of \(4, 64\)"):
        layer.combine(torch.zeros(4, HIDDEN))


# --- Lost ranks


def served_exchange(gone: str) -> SglangExperts:
    ranks = RankThreads(2)

    def serve(rank: int) -> SglangExperts:
        exchange = exchange_of(ranks, rank)
        assert exchange.layer(LAYER) is not None
        return exchange

    exchange: SglangExperts = ranks.run(serve)[0]
    for group in exchange._groups.values():
        group.gone = gone
    return exchange


def test_a_step_is_checked_after_its_end() -> None:
    order: list[str] = []
    exchange = served_exchange("")
    exchange.check(lambda: order.append("ended"))
    (group,) = exchange._groups.values()
    group.gone = "rank 1 (process 7) has ended"
    with pytest.raises(GroupError, match=r"rank 1 \(process 7\) has ended"):
        exchange.check(lambda: order.append("ended"))
    assert order == ["ended", "ended"]


def test_a_server_without_a_group_does_not_wait_for_its_steps() -> None:
    def fails() -> None:
        raise AssertionError

    exchange_of(RankThreads(2), 0).check(fails)


def test_errors_of_collectives_get_the_name_of_the_lost_rank() -> None:
    error = RuntimeError("Connection closed by peer")
    named = served_exchange("rank 1 (process 7) has ended").explain(error)
    assert isinstance(named, GroupError)
    assert str(named) == "experts: rank 0 of 2: rank 1 (process 7) has ended: Connection closed by peer"


def test_the_groups_are_left_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    exchange = served_exchange("")
    (group,) = exchange._groups.values()
    exchange.close()
    assert group.closed
    exchange.close()

    def busy() -> None:
        raise GroupError("the GPU does not come to rest")

    exchange = served_exchange("")
    (group,) = exchange._groups.values()
    group.close = busy
    exchange.close()
    assert "the group for rows of 64 elements stays open: the GPU does not come to rest" in caplog.text


def lose_rank(side: RankPipe, ranks: int) -> str:
    exchange = SglangExperts(ExpertRank(side.rank, ranks, None), side.exchange)
    layer = exchange.layer(layer_of(ranks))
    assert layer is not None
    run_layer(layer, side.rank, [2] * ranks, [2] * ranks, 0, in_place=False)
    side.exchange(b"")
    if side.rank == 1:
        os._exit(3)
    try:
        run_layer(layer, side.rank, [2] * ranks, [2] * ranks, 1, in_place=False)
    except GroupError as error:
        return str(error)
    raise AssertionError


def test_a_rank_that_ends_is_named_by_the_other_processes() -> None:
    first, second, third = run_ranks(3, lose_rank, 3)
    assert second == EndedRank(3)
    for error in (first, third):
        assert re.search(r"rank 1 \(process \d+\) .*\(LOST\)\. The results of this step are void", error)


def test_errors_without_a_lost_rank_stay() -> None:
    error = RuntimeError("out of memory")
    assert served_exchange("").explain(error) is error
    assert exchange_of(RankThreads(2), 0).explain(error) is error
    own = GroupError("rank 1 has ended")
    assert served_exchange("rank 1 has ended").explain(own) is own
