"""vLLM's expert exchange over kv-connector: calls that it takes, calls that vLLM serves, and lost ranks."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_group import FakeGroup, RankThreads
from vllm.config import ModelConfig, ParallelConfig
from vllm.distributed.device_communicators import all2all
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.outputs import AsyncModelRunnerOutput

from kv_connector.moe import metrics
from kv_connector.moe.fault import ExchangeError
from kv_connector.moe.group import GroupError
from kv_connector.vllm.experts.exchange import ExpertExchange
from kv_connector.vllm.experts.layers import ExpertLayer, expert_layers
from kv_connector.vllm.experts.manager import exchange_problem, manager_class, replace_exchange
from kv_connector.vllm.experts.settings import ExchangeSettings, settings_of
from kv_connector.vllm.experts.step_watch import watch_steps
from kv_connector.vllm.plugin import register

HIDDEN, EXPERTS, TOP_K = 64, 6, 2
SETTINGS = ExchangeSettings(
    rank=0,
    ranks=2,
    hidden=HIDDEN,
    experts=EXPERTS,
    top_k=TOP_K,
    max_tokens=16,
    sequence_parallel=False,
    divides_experts=True,
    device=None,
)
LAYER = ExpertLayer(
    hidden=HIDDEN,
    results=HIDDEN,
    experts=EXPERTS,
    top_k=TOP_K,
    dtype=torch.bfloat16,
    local=(0, 1, 2),
    rank=0,
    ranks=2,
    scales_whole_tensor=False,
)
KIND = all2all.AgRsAll2AllManager


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls that were passed on by reason, and calls that were taken, of all ranks together."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(metrics, "passed", lambda reason: counts.update([reason]))
    monkeypatch.setattr(metrics, "taken", lambda: counts.update(["taken"]))
    return counts


def layer_of(rank: int, ranks: int = 2, count: int = EXPERTS, **facts: Any) -> ExpertLayer:
    owners = [owner for owner in range(ranks) for _ in range(count // ranks + (owner < count % ranks))]
    local = tuple(expert for expert, owner in enumerate(owners) if owner == rank)
    return replace(LAYER, rank=rank, ranks=ranks, experts=count, local=local, **facts)


def exchange_of(
    ranks: RankThreads, rank: int, layers: Sequence[ExpertLayer] | None = None, **facts: Any
) -> ExpertExchange:
    own = replace(SETTINGS, rank=rank, ranks=ranks.number, **facts)
    return ExpertExchange(
        own,
        ranks.exchange(rank),
        form=FakeGroup.form,
        layers=lambda: [layer_of(rank, ranks.number)] if layers is None else layers,
    )


def batch(size: int, seed: int, hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows, weights and ids."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(size, hidden, generator=random).bfloat16()
    weights = torch.rand(size, TOP_K, generator=random)
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(size)] or [])
    return rows, weights, ids.to(torch.int32)


def empty(hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty(0, hidden, dtype=torch.bfloat16),
        torch.empty(0, TOP_K),
        torch.empty(0, TOP_K, dtype=torch.int32),
    )


def batches(
    sizes: Sequence[int], hidden: int = HIDDEN
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return [batch(size, seed, hidden) if size else empty(hidden) for seed, size in enumerate(sizes)]


def computed(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, local: Sequence[int]
) -> torch.Tensor:
    """Returns the results of a rank's experts: expert e multiplies a row by e + 1."""
    results = torch.zeros(rows.shape)
    for place in range(ids.shape[1]):
        for expert in local:
            chosen = ids[:, place] == expert
            results[chosen] += rows[chosen].float() * (expert + 1) * weights[chosen, place, None]
    return results.bfloat16()


# --- In vLLM's place


@pytest.mark.parametrize("value", [None, "", "0"])
def test_vllms_class_is_untouched_without_the_variable(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("KV_CONNECTOR_MOE", raising=False)
    else:
        monkeypatch.setenv("KV_CONNECTOR_MOE", value)
    monkeypatch.setattr(all2all, "AgRsAll2AllManager", KIND)
    monkeypatch.setitem(sys.modules, "kv_connector.vllm.experts.manager", None)  # an import raises
    register()
    assert all2all.AgRsAll2AllManager is KIND
    assert KIND.__module__ == all2all.__name__


def test_the_variable_puts_a_subclass_in_its_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CONNECTOR_MOE", "1")
    monkeypatch.setattr(all2all, "AgRsAll2AllManager", KIND)
    register()
    replaced = all2all.AgRsAll2AllManager
    assert replaced.__mro__[1] is KIND
    register()
    assert all2all.AgRsAll2AllManager is replaced


def test_this_release_has_the_known_methods() -> None:
    assert exchange_problem(KIND) == ""


def test_an_unknown_signature_leaves_vllms_class_in_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Changed(KIND):  # type: ignore[misc, valid-type]
        def combine(self, hidden_states: Any, is_sequence_parallel: bool = False, more: int = 0) -> Any:
            raise AssertionError

    monkeypatch.setattr(all2all, "AgRsAll2AllManager", Changed)
    replace_exchange()
    assert all2all.AgRsAll2AllManager is Changed
    assert "the parameters of combine are self, hidden_states, is_sequence_parallel, more" in caplog.text


def test_a_missing_method_is_a_problem() -> None:
    class Less:
        def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
            raise AssertionError

    assert exchange_problem(Less) == "it has no method dispatch"


# --- Settings


def configuration(**changes: Any) -> Any:
    """A configuration of vLLM, with the fields that the exchange reads."""
    model = {
        "dtype": torch.bfloat16,
        "get_num_experts": lambda: EXPERTS,
        "get_num_experts_per_tok": lambda: TOP_K,
        "get_hidden_size": lambda: HIDDEN,
    }
    parallel = {
        "use_sequence_parallel_moe": False,
        "enable_expert_parallel": True,
        "enable_eplb": False,
        "eplb_config": SimpleNamespace(num_redundant_experts=2),
        "enable_elastic_ep": False,
        "prefill_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "use_ubatching": False,
    }
    given = {"kv_transfer_config": None, "max_num_batched_tokens": 4096}
    for name, value in changes.items():
        next(known for known in (model, parallel, given) if name in known)[name] = value
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=given["max_num_batched_tokens"]),
        kv_transfer_config=given["kv_transfer_config"],
    )


def manager(**changes: Any) -> Any:
    facts = {
        "rank": 1,
        "world_size": 2,
        "dp_rank": 1,
        "dp_world_size": 2,
        "internode": False,
        "tcp_store_group": None,
    }
    return SimpleNamespace(**(facts | changes))


def connector(name: str, role: str, *children: tuple[str, str]) -> Any:
    within = [{"kv_connector": child, "kv_role": of} for child, of in children]
    return SimpleNamespace(
        kv_connector=name,
        kv_role=role,
        kv_connector_extra_config={"connectors": within} if within else {},
    )


def test_settings_are_the_configurations_facts() -> None:
    assert settings_of(configuration(), manager()) == replace(SETTINGS, rank=1, max_tokens=4096)
    assert settings_of(configuration(max_num_batched_tokens=64), manager()).max_tokens == 64
    assert settings_of(configuration(max_num_batched_tokens=16_384), manager()).max_tokens == 8192
    assert settings_of(configuration(enable_eplb=True), manager()).experts == EXPERTS + 2
    assert not settings_of(configuration(enable_expert_parallel=False), manager()).divides_experts


@pytest.mark.parametrize(
    ("memory", "most", "expected"),
    [
        (0, 8192, 1024),  # host memory
        (0, 64, 64),
        (80 << 30, 8192, 5592),  # a segment of 1.25 GiB
        (141 << 30, 8192, 8192),
        (141 << 30, 2048, 2048),
        (8 << 30, 8192, 1024),
    ],
)
def test_a_segment_has_room_for_prefill_as_far_as_a_gpus_memory_goes(
    memory: int, most: int, expected: int
) -> None:
    settings = replace(SETTINGS, ranks=8, memory=memory, max_tokens=most)
    assert settings.tokens_for(30_000) == expected


def test_the_rank_with_the_least_memory_bounds_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    """The GPU of rank 1 has less memory. Steps of all ranks fit into its segment."""
    row_bytes = 2 * HIDDEN + 12 * TOP_K + 256
    part = 64 * 2 * (row_bytes + 2 * HIDDEN)

    ranks = RankThreads(2)
    caplog.set_level(logging.INFO)
    for exchange in ranks.run(
        lambda rank: exchange_of(ranks, rank, max_tokens=8192, memory=(4000, 3000)[rank] * part)
    ):
        (formed,) = exchange._groups.values()
        assert formed.group.settings.max_tokens == 3000
    assert "in steps of up to 3000 tokens a rank" in caplog.text


def test_tensor_parallel_ranks_exchange_rows_among_those_of_one_number() -> None:
    """Each of these ranks has only the experts of one tensor parallel rank. Its rows go to all ranks."""
    found = settings_of(configuration(), manager(rank=3, world_size=4))
    assert (found.rank, found.ranks, found.divides_experts) == (1, 2, False)
    assert "tensor parallel ranks exchange rows apart" in found.problem
    spread = configuration(use_sequence_parallel_moe=True)
    found = settings_of(spread, manager(rank=3, world_size=4))
    assert (found.rank, found.ranks, found.divides_experts, found.sequence_parallel) == (3, 4, True, True)
    assert found.problem == ""


@pytest.mark.parametrize(
    ("changes", "of_manager", "problem"),
    [
        ({"dtype": torch.float16}, {}, "float16"),
        ({"use_ubatching": True}, {}, "dual batch overlap"),
        ({"enable_elastic_ep": True}, {}, "elastic"),
        ({"prefill_context_parallel_size": 2}, {}, "context parallelism"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline parallelism"),
        ({}, {"internode": True}, "several nodes"),
        ({}, {"tcp_store_group": object()}, "elastic"),
        ({}, {"dp_world_size": 9, "world_size": 9}, "9 ranks"),
        ({"kv_transfer_config": connector("NixlConnector", "kv_both")}, {}, "NixlConnector (kv_both)"),
        ({"kv_transfer_config": connector("WriteImmConnector", "kv_producer")}, {}, "kv_producer"),
        (
            {
                "kv_transfer_config": connector(
                    "MultiConnector",
                    "kv_both",
                    ("WriteImmConnector", "kv_consumer"),
                    ("LMCacheConnectorV1", "kv_both"),
                )
            },
            {},
            "LMCacheConnectorV1",
        ),
    ],
)
def test_a_configuration_that_is_not_served_is_named(
    changes: dict[str, Any], of_manager: dict[str, Any], problem: str
) -> None:
    assert problem in settings_of(configuration(**changes), manager(**of_manager)).problem


@pytest.mark.parametrize(
    "transfer",
    [
        connector("WriteImmConnector", "kv_consumer"),
        connector("MultiConnector", "kv_both", ("WriteImmConnector", "kv_consumer")),
    ],
)
def test_a_decode_engine_is_served(transfer: Any) -> None:
    assert settings_of(configuration(kv_transfer_config=transfer), manager()).problem == ""


# --- vLLM's own objects


def parallel_facts(ranks: int, rank: int) -> FusedMoEParallelConfig:
    facts = dict.fromkeys(("tp_size", "pcp_size", "sp_size"), 1) | dict.fromkeys(("tp_rank", "pcp_rank"), 0)
    return FusedMoEParallelConfig(
        **facts,
        dp_size=ranks,
        dp_rank=rank,
        ep_size=ranks,
        ep_rank=rank,
        use_ep=ranks > 1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )


def routed_experts(
    quant: FusedMoEQuantConfig | None, ranks: int = 2, rank: int = 1, experts: int = 5
) -> SimpleNamespace:
    """A layer with vLLM's own placement and quantization."""
    assert {"hidden_dim", "hidden_dim_unpadded", "num_experts", "experts_per_token", "in_dtype"} <= {
        field.name for field in dataclasses.fields(FusedMoEConfig)
    }
    config = SimpleNamespace(
        hidden_dim=HIDDEN,
        hidden_dim_unpadded=HIDDEN - 8,
        num_experts=experts,
        experts_per_token=TOP_K,
        in_dtype=torch.bfloat16,
    )
    places = ExpertMapManager(
        max_num_batched_tokens=8,
        top_k=TOP_K,
        global_num_experts=experts,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel_facts(ranks, rank),
        placement_strategy="linear",
        enable_eplb=False,
    )
    method = SimpleNamespace(
        moe_quant_config=None, get_fused_moe_quant_config=lambda _: quant, has_unpadded_output=False
    )
    assert {*vars(method)} - {"moe_quant_config"} <= {*dir(FusedMoEMethodBase)}
    return SimpleNamespace(
        routed_experts=SimpleNamespace(moe_config=config, expert_map_manager=places, quant_method=method)
    )


def layers_of(monkeypatch: pytest.MonkeyPatch, *layers: Any) -> list[ExpertLayer]:
    context = SimpleNamespace(no_compile_layers=dict(enumerate(layers)))
    monkeypatch.setattr("kv_connector.vllm.experts.layers.get_forward_context", lambda: context)
    return expert_layers()


def test_layers_are_read_from_vllms_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = SimpleNamespace()
    found = layers_of(monkeypatch, attention, routed_experts(None), routed_experts(None, ranks=1, rank=0))
    expected = layer_of(1, count=5)
    assert expected.local == (3, 4)
    assert found == [expected, replace(expected, local=None, rank=0, ranks=1)]


def test_experts_are_listed_in_the_order_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = routed_experts(None)
    layer.routed_experts.expert_map_manager = SimpleNamespace(
        expert_map=torch.tensor([1, -1, 0, -1]), ep_rank=0, ep_size=2
    )
    (found,) = layers_of(monkeypatch, layer)
    assert (found.local, found.experts) == ((2, 0), 4)


@pytest.mark.parametrize(
    ("facts", "refused"),
    [
        ({"quant_dtype": None}, False),
        ({"quant_dtype": torch.float8_e4m3fn}, True),
        ({"quant_dtype": torch.float8_e4m3fn, "a1_scale": torch.ones(1)}, False),
        ({"quant_dtype": torch.float8_e4m3fn, "per_act_token_quant": True}, False),
        ({"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}, False),
    ],
)
def test_one_scale_for_all_rows_is_found_in_vllms_quantization(
    facts: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = layers_of(monkeypatch, routed_experts(FusedMoEQuantConfig.make(**facts)))
    assert found.scales_whole_tensor is refused


def test_results_without_the_padding_of_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = routed_experts(None)
    layer.routed_experts.quant_method.has_unpadded_output = True
    (found,) = layers_of(monkeypatch, layer)
    assert (found.hidden, found.results) == (HIDDEN, HIDDEN - 8)


def test_vllms_configuration_has_the_facts_that_are_read() -> None:
    fake = configuration()
    for kind, facts in ((ModelConfig, fake.model_config), (ParallelConfig, fake.parallel_config)):
        known = {*dir(kind), *(field.name for field in dataclasses.fields(kind))}
        assert {*vars(facts)} <= known
    assert hasattr(ParallelConfig().eplb_config, "num_redundant_experts")


def test_vllms_manager_has_the_facts_that_are_read() -> None:
    source = inspect.getsource(All2AllManagerBase.__init__)
    for name in (*vars(manager()), "dp_group"):
        assert f"self.{name} = " in source


# --- Dispatch and combine


@pytest.mark.parametrize("sizes", [(3, 5), (0, 4), (1, 1), (7, 0, 2)])
@pytest.mark.parametrize("into", [False, True])
def test_sums_equal_those_of_all_experts(sizes: tuple[int, ...], into: bool, counted: Counter[str]) -> None:
    ranks = RankThreads(len(sizes))
    given = batches(sizes)

    def step(rank: int) -> torch.Tensor:
        exchange = exchange_of(ranks, rank)
        rows, weights, ids = given[rank]
        got = exchange.dispatch(rows, weights, ids, None, sizes, False)
        assert got is not None
        assert got[1].equal(torch.cat([one[1] for one in given]))
        assert got[2].equal(torch.cat([one[2] for one in given]))
        local = layer_of(rank, ranks.number).local
        assert local is not None
        results = computed(got[0], got[1], got[2], local)
        assert exchange.takes_combine()
        if not into:
            return exchange.combine(results)
        buffer = exchange.combine_input((sum(sizes), HIDDEN), torch.bfloat16)
        assert buffer is not None
        out = torch.empty_like(rows)
        assert exchange.combine(buffer.copy_(results), out) is out
        return out

    for rank, sums in enumerate(ranks.run(step)):
        parts = [
            computed(*given[rank], layer_of(owner, ranks.number).local or ()) for owner in range(len(sizes))
        ]
        assert sums.equal(sum(part.float() for part in parts).bfloat16())
    assert counted == {"taken": len(sizes)}


def test_further_tensors_keep_their_order(counted: Counter[str]) -> None:
    """Large rows travel as scales, only with the row. Small ones go to all ranks."""
    sizes, ranks = (2, 3), RankThreads(2)
    given = batches(sizes)
    small = [torch.arange(size, dtype=torch.int32) + 10 * rank for rank, size in enumerate(sizes)]
    large = [torch.full((size, 17), float(rank + 1)) for rank, size in enumerate(sizes)]

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank)
        rows, weights, ids = given[rank]
        got = exchange.dispatch(rows, weights, ids, [small[rank], large[rank]], sizes, False)
        assert got is not None
        got_small, got_large = got[3]
        assert got_small.equal(torch.cat(small))
        owned = torch.isin(got[2], torch.tensor(layer_of(rank).local)).any(dim=1)
        assert got_large[owned].equal(torch.cat(large)[owned])
        assert (got_large[~owned] < 0).all()  # old bytes

    ranks.run(step)
    assert counted == {"taken": 2}


def test_sums_reach_an_output_with_gaps() -> None:
    ranks = RankThreads(2)

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank)
        got = exchange.dispatch(*batches((2, 2))[rank], None, (2, 2), False)
        assert got is not None
        out = torch.zeros(2, 2 * HIDDEN, dtype=torch.bfloat16)[:, ::2]
        assert exchange.combine(torch.ones(4, HIDDEN, dtype=torch.bfloat16), out) is out
        assert (out > 0).all()

    ranks.run(step)


def test_without_expert_parallelism_rows_go_to_all_ranks() -> None:
    ranks = RankThreads(2)
    given = batches((2, 2))

    def step(rank: int) -> None:
        exchange = exchange_of(
            ranks, rank, [replace(layer_of(rank), local=None, ranks=1, rank=0)], divides_experts=False
        )
        got = exchange.dispatch(*given[rank], None, (2, 2), False)
        assert got is not None
        assert got[0].equal(torch.cat([one[0] for one in given]))

    ranks.run(step)


def test_a_combine_buffer_of_another_shape_is_left_to_the_kernel() -> None:
    ranks = RankThreads(2)

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank)
        exchange.dispatch(*batches((2, 2))[rank], None, (2, 2), False)
        assert exchange.combine_input((4, HIDDEN), torch.float32) is None
        assert exchange.combine_input((5, HIDDEN), torch.bfloat16) is None
        with pytest.raises(GroupError, match="Unset KV_CONNECTOR_MOE"):
            exchange.combine(torch.zeros(4, HIDDEN))

    ranks.run(step)


# --- Calls that vLLM serves, on all ranks alike


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows, weights and ids."""


def half(tensors: Tensors) -> Tensors:
    rows, weights, ids = tensors
    return rows.half(), weights, ids


@pytest.mark.parametrize(
    ("reason", "change", "sizes", "more", "sequence_parallel"),
    [
        ("dtype", half, (2, 1), None, False),
        ("dtype", lambda given: (*given[:2], given[2].short()), (2, 1), None, False),
        ("size", lambda given: given, (1, 17), None, False),
        ("size", lambda given: given, (2, 1), 4096, False),
        ("top_k", lambda given: (given[0], given[1][:, :1], given[2]), (2, 1), None, False),
        ("shape", lambda given: (given[0][:, None], *given[1:]), (2, 1), None, False),
        ("ranks", lambda given: given, (2, 1), None, True),
    ],
)
def test_a_call_that_is_not_taken_is_passed_on_by_all_ranks(
    reason: str,
    change: Callable[[Tensors], Tensors],
    sizes: tuple[int, ...],
    more: int | None,
    sequence_parallel: bool,
    counted: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kv_connector")
    ranks = RankThreads(2)
    given = batches(sizes)

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank)
        columns = None if more is None else [torch.zeros(sizes[rank], more)]
        for _ in range(3):
            rows, weights, ids = change(given[rank])
            assert exchange.dispatch(rows, weights, ids, columns, sizes, sequence_parallel) is None
            assert not exchange.takes_combine()

    ranks.run(step)
    assert counted == {reason: 6}
    lines = [one for one in caplog.messages if f"reason: {reason}" in one]
    assert len(lines) == 2  # one for each rank


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"local": (0, 2, 4)}, "linear blocks"),
        ({"local": (2, 1, 0)}, "linear blocks"),
        ({"scales_whole_tensor": True}, "one scale for all rows"),
        ({"dtype": torch.float32}, "float32"),
        ({"top_k": 3}, "3 experts a token"),
        ({"results": HIDDEN - 8}, "returns 56 elements of rows of 64"),
        ({"rank": 1, "ranks": 4}, "other ranks"),
        ({"hidden": 128}, "no layer of experts"),
    ],
)
def test_one_ranks_layer_makes_all_ranks_pass_calls_on(
    facts: dict[str, Any], problem: str, counted: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = RankThreads(2)
    given = batches((2, 2))

    def step(rank: int) -> None:
        layers = [replace(layer_of(rank), **facts)] if rank == 0 else [layer_of(rank)]
        exchange = exchange_of(ranks, rank, layers)
        for _ in range(2):  # the second call exchanges nothing
            assert exchange.dispatch(*given[rank], None, (2, 2), False) is None

    ranks.run(step)
    assert counted == {"layer": 4}
    lines = [one for one in caplog.messages if "rank 0: " in one and problem in one]
    assert len(lines) == 2  # one for each rank


def test_a_call_that_is_passed_on_ends_an_open_dispatch() -> None:
    """A step that raised between dispatch and combine leaves a dispatch open."""
    ranks = RankThreads(2)

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank)
        assert exchange.dispatch(*batches((2, 2))[rank], None, (2, 2), False) is not None
        assert exchange.dispatch(*half(batches((2, 2))[rank]), None, (2, 2), False) is None
        assert not exchange.takes_combine()

    ranks.run(step)


def test_ranks_with_different_numbers_of_experts_pass_calls_on(counted: Counter[str]) -> None:
    ranks = RankThreads(2)

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank, [layer_of(rank, count=6 + 2 * rank)])
        assert exchange.dispatch(*batches((2, 2))[rank], None, (2, 2), False) is None

    ranks.run(step)
    assert counted == {"layer": 2}


def test_one_ranks_configuration_makes_all_ranks_pass_calls_on(
    counted: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = RankThreads(2)

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank, problem="a reason" if rank == 1 else "")
        assert exchange.problem == "rank 1: a reason"
        assert exchange.dispatch(*batches((2, 2))[rank], None, (2, 2), False) is None

    ranks.run(step)
    assert counted == {"configuration": 2}
    assert "vLLM's own exchange stays in use: rank 1: a reason" in caplog.text


def test_a_group_that_cannot_form_leaves_vllms_exchange_in_use(counted: Counter[str]) -> None:
    ranks = RankThreads(2)

    def refuse(*_: Any) -> Any:
        raise GroupError("rank 1 has another release")

    def step(rank: int) -> None:
        own = replace(SETTINGS, rank=rank)
        exchange = ExpertExchange(own, ranks.exchange(rank), form=refuse, layers=lambda: [layer_of(rank)])
        assert exchange.problem == "rank 1 has another release"
        assert exchange.dispatch(*batches((2, 2))[rank], None, (2, 2), False) is None

    ranks.run(step)
    assert counted == {"configuration": 2}


def test_an_exchange_that_does_not_end_ends_the_engine() -> None:
    """Its call still waits in vLLM's group, where it could be mixed up with vLLM's next collective."""

    def never(*_: Any) -> Any:
        raise ExchangeError("the exchange of settings did not end within 30 s")

    ranks = RankThreads(2)

    def step(rank: int) -> None:
        with pytest.raises(ExchangeError, match="did not end"):
            ExpertExchange(replace(SETTINGS, rank=rank), ranks.exchange(rank), form=never)

    ranks.run(step)


def test_the_first_call_of_a_hidden_size_forms_its_group(counted: Counter[str]) -> None:
    """The size is a drafter's, or that of a model whose configuration does not name all facts."""
    ranks = RankThreads(2)

    def step(rank: int) -> None:
        layers = [layer_of(rank), layer_of(rank, hidden=32, results=32)]
        exchange = exchange_of(ranks, rank, layers, top_k=0)
        for hidden in (HIDDEN, 32, HIDDEN):
            rows, weights, ids = batches((2, 1), hidden)[rank]
            got = exchange.dispatch(rows, weights, ids, None, (2, 1), False)
            assert got is not None
            assert got[0].shape == (3, hidden)
            exchange.combine(torch.zeros(3, hidden, dtype=torch.bfloat16))

    ranks.run(step)
    assert counted == {"taken": 6}


def test_layers_that_differ_from_the_configuration_get_a_group_of_their_facts() -> None:
    formed: list[FakeGroup] = []
    ranks = RankThreads(2)

    def form(settings: Any, exchange: Any) -> FakeGroup:
        formed.append(FakeGroup.form(settings, exchange))
        return formed[-1]

    def step(rank: int) -> None:
        own = replace(SETTINGS, rank=rank, experts=4)
        exchange = ExpertExchange(own, ranks.exchange(rank), form=form, layers=lambda: [layer_of(rank)])
        assert exchange.dispatch(*batches((1, 1))[rank], None, (1, 1), False) is not None

    ranks.run(step)
    assert Counter((one.settings.experts, one.closed) for one in formed) == {
        (4, True): 2,
        (EXPERTS, False): 2,
    }


@pytest.mark.parametrize("failing", [0, 1])
def test_layers_that_cannot_be_read_make_all_ranks_pass_calls_on(failing: int, counted: Counter[str]) -> None:
    """Without an answer of this rank the other ranks would wait for it."""
    ranks = RankThreads(2)

    def layers(rank: int) -> list[ExpertLayer]:
        if rank == failing:
            raise AttributeError("no placement")
        return [layer_of(rank)]

    def step(rank: int) -> None:
        own = replace(SETTINGS, rank=rank)
        exchange = ExpertExchange(own, ranks.exchange(rank), form=FakeGroup.form, layers=lambda: layers(rank))
        assert exchange.dispatch(*batches((1, 1))[rank], None, (1, 1), False) is None

    ranks.run(step)
    assert counted == {"layer": 2}


def test_a_group_that_stays_open_is_replaced() -> None:
    """The other ranks form the new group meanwhile."""
    ranks = RankThreads(2)

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank, experts=4)
        if rank == 0:
            (formed,) = exchange._groups.values()
            formed.group.close = stay
        assert exchange.dispatch(*batches((1, 1))[rank], None, (1, 1), False) is not None

    def stay(timeout: float = 10.0) -> None:
        raise GroupError("the GPU does not come to rest")

    ranks.run(step)


def test_the_first_call_is_not_settled_inside_a_graph(
    counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange of facts does not run on the GPU, and would not be in the graph."""
    monkeypatch.setattr("kv_connector.vllm.experts.exchange._captures", lambda _: True)
    ranks = RankThreads(2)

    def step(rank: int) -> None:
        exchange = exchange_of(ranks, rank)
        assert exchange.dispatch(*batches((2, 2))[rank], None, (2, 2), False) is None

    ranks.run(step)
    assert counted == {"first call in a CUDA graph": 2}


# --- The manager


class Base:
    """vLLM's class, recording its calls."""

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.dp_rank, self.dp_world_size = 0, 2
        self.rank, self.world_size = 0, 2
        self.internode = False
        self.tcp_store_group = tcp_store_group
        self.dp_group = SimpleNamespace(cpu_group="dp")

    def _get_comm_group(self, is_sequence_parallel: bool) -> Any:
        return "group"

    def _get_sizes(self, num_local_tokens: int, comm_group: Any) -> list[int]:
        return [num_local_tokens, 1]

    def dispatch(self, *given: Any) -> Any:
        return self._note("dispatch", *given)

    def dispatch_router_logits(self, *given: Any) -> Any:
        return self._note("dispatch_router_logits", *given)

    def combine(self, *given: Any) -> Any:
        return self._note("combine", *given)

    def allocate_combine_input(self, *given: Any) -> Any:
        return self._note("allocate_combine_input", *given)

    def combine_into_output(self, *given: Any) -> Any:
        return self._note("combine_into_output", *given)

    def destroy(self) -> None:
        self._note("destroy")

    def _note(self, *call: Any) -> Any:
        self.calls.append(call)
        return "vLLM's"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A manager for a configuration that is not served."""
    monkeypatch.setattr(
        "kv_connector.vllm.experts.manager.get_current_vllm_config",
        lambda: configuration(dtype=torch.float32),
    )
    monkeypatch.setattr(
        "kv_connector.vllm.experts.manager.exchange_over", lambda group: lambda message: [message, message]
    )
    return manager_class(Base)("ep")


def test_vllms_methods_get_the_calls_that_are_passed_on(refused: Any, counted: Counter[str]) -> None:
    rows, weights, ids = batch(2, 0)
    more = [torch.zeros(2)]
    calls: list[tuple[Any, ...]] = [
        ("dispatch", rows, weights, ids, True, more),
        ("allocate_combine_input", (3, HIDDEN), torch.bfloat16, torch.device("cpu"), True),
        ("combine", rows, True),
        ("combine_into_output", rows, rows, True),
        ("dispatch_router_logits", rows, weights, True, more),
    ]
    for name, *given in calls:
        assert getattr(refused, name)(*given) == "vLLM's"
    refused.destroy()
    assert refused.calls == [*calls, ("destroy",)]
    assert counted == {"configuration": 1, "router logits": 1}


def test_router_logits_end_an_open_dispatch(refused: Any, counted: Counter[str]) -> None:
    """vLLM serves their combine, too."""
    rows, weights, _ = batch(2, 0)
    refused.experts._open = object(), (2, 1)
    assert refused.experts.takes_combine()
    refused.dispatch_router_logits(rows, weights)
    assert refused.combine(rows) == "vLLM's"
    assert counted == {"router logits": 1}


# --- A lost rank


class Worker:
    """vLLM's worker, whose steps return or raise what a test sets."""

    step: Any = "output"
    ended = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        if isinstance(self.step, Exception):
            raise self.step
        return self.step

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.execute_model(grammar_output)

    def execute_dummy_batch(self) -> None:
        self.execute_model(None)

    def shutdown(self) -> None:
        self.ended += 1


class Output(AsyncModelRunnerOutput):  # type: ignore[misc]
    def get_output(self) -> str:
        return "late"

    def get_kv_connector_output(self) -> str:
        return "pages"


def watched_worker(
    monkeypatch: pytest.MonkeyPatch, backend: str, tensor_parallel_rank: int
) -> tuple[Any, ExpertExchange, FakeGroup]:
    """A worker, its exchange, and the exchange's group."""
    monkeypatch.setattr(
        "kv_connector.vllm.experts.step_watch.get_tensor_model_parallel_rank", lambda: tensor_parallel_rank
    )
    kind = type("Worker", (Worker,), {"__module__": __name__})
    monkeypatch.setitem(globals(), "WatchedWorker", kind)
    formed: list[FakeGroup] = []

    def form(settings: Any, _: Any) -> FakeGroup:
        formed.append(FakeGroup(settings, lambda message: [message]))
        return formed[-1]

    exchange = ExpertExchange(SETTINGS, lambda message: [message, message], form=form)
    parallel = SimpleNamespace(worker_cls=f"{__name__}.WatchedWorker", distributed_executor_backend=backend)
    config = SimpleNamespace(parallel_config=parallel)
    for _ in range(2):  # an engine may be made anew
        watch_steps(config, exchange.check, exchange.explain, exchange.close)
    return kind(), exchange, formed[0]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ExpertExchange, FakeGroup]:
    return watched_worker(monkeypatch, "mp", 0)


@pytest.mark.parametrize("call", ["execute_model", "sample_tokens"])
def test_a_step_with_a_lost_rank_raises_its_name(watched: Any, call: str) -> None:
    worker, _, group = watched
    assert getattr(worker, call)(None) == "output"
    worker.execute_dummy_batch()
    group.gone = "rank 1 (process 7) has ended"
    with pytest.raises(GroupError, match="rank 1"):
        getattr(worker, call)(None)
    with pytest.raises(GroupError, match="rank 1"):
        worker.execute_dummy_batch()


@pytest.mark.parametrize(("backend", "rank", "ends"), [("mp", 1, True), ("mp", 0, False), ("uni", 1, False)])
def test_a_worker_whose_errors_vllm_drops_ends(
    monkeypatch: pytest.MonkeyPatch, backend: str, rank: int, ends: bool
) -> None:
    """The executor of several processes logs an error of a tensor parallel rank other than 0, and goes on."""
    worker, _, group = watched_worker(monkeypatch, backend, rank)
    group.gone = "rank 1 (process 7) has ended"
    kind = SystemExit if ends else GroupError
    with pytest.raises(kind, match="rank 1"):
        worker.execute_model(None)
    worker.step = RuntimeError("Connection closed by peer")
    with pytest.raises(kind, match="Connection closed by peer"):
        worker.execute_model(None)
    group.gone = ""
    monkeypatch.setattr("kv_connector.vllm.experts.exchange._NAMING_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
        worker.execute_model(None)


def test_vllm_drops_errors_of_the_ranks_that_end() -> None:
    """The executor reads the answers of tensor parallel rank 0."""
    parallel = SimpleNamespace(tensor_parallel_size=4, prefill_context_parallel_size=1)
    executor = SimpleNamespace(world_size=4, parallel_config=parallel)
    assert MultiprocExecutor._get_output_rank(executor) == 0
    told: list[Any] = []
    worker = SimpleNamespace(worker=Worker(), rank=1, handle_output=told.append)
    worker.worker.step = GroupError("rank 1")
    WorkerProc._execute_worker_rpc(worker, ("execute_model", (None,), {}, 0))
    assert not told
    worker.worker = SimpleNamespace(execute_model=lambda _: sys.exit("experts: rank 1"))
    with pytest.raises(SystemExit):
        WorkerProc._execute_worker_rpc(worker, ("execute_model", (None,), {}, 0))


def test_a_step_is_checked_once(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, group = watched
    checks: list[None] = []
    monkeypatch.setattr(group, "raise_fault", lambda: checks.append(None))
    worker.execute_model(None)
    assert len(checks) == 1


def test_a_step_on_the_gpu_is_checked_when_its_output_is_complete(watched: Any) -> None:
    worker, _, group = watched
    worker.step = Output()
    output = worker.execute_model(None)
    assert isinstance(output, AsyncModelRunnerOutput)
    assert output.get_kv_connector_output() == "pages"
    assert output.get_output() == "late"
    group.gone = "rank 1 (process 7) has ended"
    late = worker.execute_model(None)
    with pytest.raises(GroupError, match="rank 1"):
        late.get_output()


def test_a_broken_collective_is_explained_by_the_lost_rank(watched: Any) -> None:
    worker, _, group = watched
    worker.step = RuntimeError("Connection closed by peer")
    group.gone = "rank 1 (process 7) has ended"
    named = r"of 2: rank 1 \(process 7\) has ended: Connection closed by peer"
    with pytest.raises(GroupError, match=named) as raised:
        worker.execute_model(None)
    assert raised.value.__cause__ is worker.step


def test_an_error_without_a_lost_rank_stays_as_it_is(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.vllm.experts.exchange._NAMING_SECONDS", 0.0)
    worker, _, _ = watched
    worker.step = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        worker.execute_model(None)


def test_the_workers_end_closes_the_group_first(watched: Any) -> None:
    worker, exchange, group = watched
    worker.shutdown()
    assert (group.closed, worker.ended) == (True, 1)
    exchange.close()


def test_a_group_that_stays_open_is_logged(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    worker, _, group = watched

    def stay(timeout: float = 10.0) -> None:
        raise GroupError("the GPU does not come to rest")

    group.close = stay
    worker.shutdown()
    assert "stays open: the GPU does not come to rest" in caplog.text
    assert worker.ended == 1
