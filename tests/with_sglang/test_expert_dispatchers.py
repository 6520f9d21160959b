"""SGLang's classes around layers of experts, with kv-connector in the place of FlashInfer's exchange.

The two ranks are threads of this process. Their rows travel over the host memory of a real group.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_group import FakeGroup, RankThreads
from moe_steps import same
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import set_dp_buffer_len, set_is_extend_in_batch
from sglang.srt.layers.moe.fused_moe_triton.layer import create_moe_dispatcher
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig, PermuteMethodPool
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.layers.moe.token_dispatcher.flashinfer import (
    FlashinferCombineInput,
    FlashinferDispatcher,
    FlashinferDispatchOutput,
)
from sglang.srt.layers.moe.token_dispatcher.standard import (
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
)
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackend, initialize_moe_config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_context, get_flags, get_parallel

from kv_connector.moe.group import Group, GroupError
from kv_connector.moe.settings import linear_owners
from kv_connector.sglang import plugin
from kv_connector.sglang.experts import dispatcher, internals
from kv_connector.sglang.experts.dispatcher import KvConnectorDispatcher, create_dispatcher
from kv_connector.sglang.experts.exchange import SglangExperts
from kv_connector.sglang.experts.internals import expert_layer, expert_rank
from kv_connector.sglang.experts.layers import ExpertRank, SglangLayer

HIDDEN, EXPERTS, TOP_K = 64, 8, 2
SERVER = {
    "tp_size": 2,
    "attn_dp_size": 2,
    "ep_size": 2,
    "moe_a2a_backend": "flashinfer",
    "moe_runner_backend": "deep_gemm",
}
METHOD = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(internals, "is_cpu", lambda: True)
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")
    yield
    set_is_extend_in_batch(False)
    get_flags().moe.a2a_backend = get_flags().moe.runner_backend = None


def configured(**changes: Any) -> Any:
    """A server's configuration, as SGLang publishes it."""
    return get_context().override_server_args(**SERVER | changes)


def problem_of(**changes: Any) -> str:
    with configured(**changes), get_parallel().override(tp_rank=0):
        initialize_moe_config()
        return expert_rank().problem


def layer_config(runner: MoeRunnerBackend = MoeRunnerBackend.DEEP_GEMM, **changes: Any) -> MoeRunnerConfig:
    given = {
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS // 2,
        "hidden_size": HIDDEN,
        "top_k": TOP_K,
        "params_dtype": torch.bfloat16,
        "num_fused_shared_experts": 0,
    }
    config = MoeRunnerConfig(**given | changes)
    config.runner_backend = runner
    return config


class GatheringGroup:
    """Stands in for SGLang's tensor parallel group, whose collectives need NCCL."""

    def __init__(self, ranks: RankThreads) -> None:
        self._ranks = ranks
        self.of_thread = threading.local()

    def _all(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        rank = self.of_thread.rank
        group = SimpleNamespace(_exchange=self._ranks.exchange(rank))
        return FakeGroup._all_tensors(group, tensors)  # type: ignore[arg-type]

    def all_gatherv(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        assert len(tensors[0]) == sizes[self.of_thread.rank]
        return [torch.cat(column) for column in zip(*self._all(tensors), strict=True)]

    def reduce_scatterv(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        total = sum(one.float() for (one,) in self._all([tensor]))
        assert isinstance(total, torch.Tensor)
        return total.bfloat16().split([*sizes])[self.of_thread.rank]


def dispatchers(ranks: RankThreads, config: MoeRunnerConfig) -> list[KvConnectorDispatcher]:
    """The objects of a layer, one a rank, as SGLang's hook makes them."""
    facts = expert_layer(config, METHOD)

    def layer(rank: int) -> Any:
        return SglangExperts(ExpertRank(rank, 2, None), ranks.exchange(rank)).layer(facts)

    made = []
    for rank, served in enumerate(ranks.run(layer)):
        assert isinstance(served._group, Group)
        with get_parallel().override(tp_rank=rank, moe_ep_rank=rank):
            made.append(KvConnectorDispatcher(config, served))
    return made


def batch(size: int, seed: int) -> tuple[torch.Tensor, StandardTopKOutput]:
    """Rows of a rank. The ids are int64, as some routers give them."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(size, HIDDEN, generator=random).bfloat16()
    ids = torch.randint(0, EXPERTS, (size, TOP_K), generator=random)
    return rows, StandardTopKOutput(
        torch.rand(size, TOP_K, generator=random), ids, torch.zeros(size, EXPERTS)
    )


def computed(rows: torch.Tensor, topk: StandardTopKOutput, first: int) -> torch.Tensor:
    """Results of a rank's experts. ``first``: the id of its first expert. Expert e multiplies by e + 1."""
    results = torch.zeros(rows.shape)
    for place in range(TOP_K):
        for expert in range(EXPERTS // 2):
            chosen = topk.topk_ids[:, place] == first + expert
            results[chosen] += rows[chosen].float() * topk.topk_weights[chosen, place, None] * (expert + 1)
    return results.bfloat16()


@pytest.mark.parametrize("runner", [MoeRunnerBackend.DEEP_GEMM, MoeRunnerBackend.FLASHINFER_CUTLASS])
@pytest.mark.parametrize("sizes", [(3, 5), (4, 4), (6, 0), (0, 0)])
def test_sums_equal_sglangs_all_gather(sizes: tuple[int, int], runner: MoeRunnerBackend) -> None:
    """Each step runs twice: as decode over the group, and as prefill over SGLang's collectives."""
    ranks = RankThreads(2)
    group = GatheringGroup(ranks)
    with configured(moe_runner_backend=runner.value), get_parallel().override(tp_rank=0, tp_group=group):
        initialize_moe_config()
        both = dispatchers(ranks, layer_config(runner))
        set_dp_buffer_len(sum(sizes), sizes[0], False, [*sizes])

        def step(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
            group.of_thread.rank = rank
            rows, topk = batch(sizes[rank], 7 + rank)
            own = both[rank]
            set_is_extend_in_batch(False)
            got = own.dispatch(hidden_states=rows, topk_output=topk)
            assert isinstance(got, FlashinferDispatchOutput)
            assert got.format.is_flashinfer()
            assert got.hidden_states_scale is None
            assert got.output_dtype == torch.bfloat16
            assert got.topk_output.topk_ids.dtype == torch.int32
            assert got.topk_output.router_logits is topk.router_logits
            results = computed(got.hidden_states, got.topk_output, rank * EXPERTS // 2)
            assert (got.moe_output is None) is runner.is_deep_gemm()
            if got.moe_output is not None:  # as FlashInfer's kernel does
                results = got.moe_output.copy_(results)
                assert results.data_ptr() == own.layer._group.combine_buffer(sizes).data_ptr()
            sums = own.combine(combine_input=FlashinferCombineInput(results))
            ranks.exchange(rank)(b"")
            set_is_extend_in_batch(True)
            prefilled = own.dispatch(hidden_states=rows, topk_output=topk)
            assert isinstance(prefilled, StandardDispatchOutput)
            # Runners with a workspace of their own get ids of all experts, others those of this rank.
            first = 0 if runner.is_deep_gemm() else rank * EXPERTS // 2
            results = computed(prefilled.hidden_states, prefilled.topk_output, first)
            return sums, own.combine(combine_input=StandardCombineInput(results))

        for rank, (ours, theirs) in enumerate(ranks.run(step)):
            assert ours.shape == (sizes[rank], HIDDEN)
            assert same(ours, theirs)


def test_large_steps_take_sglangs_all_gather() -> None:
    ranks = RankThreads(2)
    group = GatheringGroup(ranks)
    sizes = (1025, 1)
    with configured(), get_parallel().override(tp_rank=0, tp_group=group):
        initialize_moe_config()
        both = dispatchers(ranks, layer_config())
        set_dp_buffer_len(sum(sizes), sizes[0], False, [*sizes])

        def step(rank: int) -> Any:
            group.of_thread.rank = rank
            set_is_extend_in_batch(False)
            rows, topk = batch(sizes[rank], rank)
            return both[rank].dispatch(hidden_states=rows, topk_output=topk)

        assert all(isinstance(got, StandardDispatchOutput) for got in ranks.run(step))


def test_unknown_tokens_of_ranks_end_the_step() -> None:
    ranks = RankThreads(2)
    with configured(), get_parallel().override(tp_rank=0, tp_group=None):
        initialize_moe_config()
        own = dispatchers(ranks, layer_config())[0]
        set_dp_buffer_len(4, 4, False, None)
        with pytest.raises(
            RuntimeError, match=r"the tokens of 0 ranks instead of 2\. Unset KV_CONNECTOR_MOE"
        ):
            own.dispatch(*batch(4, 0))


def test_other_types_of_rows_end_the_step() -> None:
    ranks = RankThreads(2)
    with configured(), get_parallel().override(tp_rank=0, tp_group=None):
        initialize_moe_config()
        own = dispatchers(ranks, layer_config())[0]
        set_dp_buffer_len(8, 4, True, [4, 4])
        rows, topk = batch(4, 0)
        with pytest.raises(TypeError, match=r"rows are torch\.float16 instead of bfloat16"):
            own.dispatch(rows.half(), topk)


def test_sglang_has_the_forms_between_dispatch_and_runner() -> None:
    assert PermuteMethodPool.get_pre_permute("flashinfer", "deep_gemm")
    assert PermuteMethodPool.get_post_permute("deep_gemm", "flashinfer")


def test_facts_of_a_layer() -> None:
    assert expert_layer(layer_config(num_fused_shared_experts=None), METHOD) == SglangLayer(
        hidden=HIDDEN,
        experts=EXPERTS,
        local=EXPERTS // 2,
        shared=0,
        top_k=TOP_K,
        dtype="bfloat16",
        runner="deep_gemm",
        method="UnquantizedFusedMoEMethod",
    )


# --- Servers that are refused


def test_a_server_with_attention_dp_and_experts_is_served() -> None:
    assert problem_of() == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_a2a_backend": "none"}, "--moe-a2a-backend is none. Set flashinfer"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend is deepep. Set flashinfer"),
        ({"nnodes": 2}, "the ranks are on several nodes (--nnodes)"),
        ({"attn_dp_size": 1}, "--attn-dp-size differs from --tp-size"),
        ({"ep_size": 1}, "--ep-size differs from --tp-size"),
        ({"pp_size": 2}, "pipeline parallelism is on (--pp-size)"),
        ({"enable_layernorm_sp": True}, "layer norm sequence parallelism is on (--enable-layernorm-sp)"),
        ({"dwdp_size": 2}, "distributed weight data parallelism is on (--dwdp-size)"),
        ({"elastic_ep_backend": "nixl"}, "elastic expert parallelism is on (--elastic-ep-backend)"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding is on (--speculative-algorithm)"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap is on (--enable-two-batch-overlap)"),
        ({"enable_single_batch_overlap": True}, "single-batch overlap is on (--enable-single-batch-overlap)"),
        ({"enable_pdmux": True}, "--enable-pdmux is on"),
        (
            {"flashinfer_a2a_dispatch_type": "nvfp4"},
            "rows travel in another type than bf16 (--flashinfer-a2a-dispatch-type)",
        ),
        (
            dict.fromkeys(("tp_size", "attn_dp_size", "ep_size"), 16),
            "16 ranks exchange rows instead of 2 to 8",
        ),
    ],
)
def test_a_server_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    assert problem_of(**changes) == reason


def test_a_server_whose_ranks_do_not_know_each_others_tokens_is_refused() -> None:
    with envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.override(True):
        assert problem_of() == "SGLANG_SCHEDULER_SKIP_ALL_GATHER is set"


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "is_cpu", lambda: False)
    assert problem_of() == "the platform is neither CUDA nor a CPU"


def test_a_refused_layer_gets_sglangs_own_object(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with configured(moe_a2a_backend="none"), get_parallel().override(tp_rank=0, moe_ep_rank=0):
        initialize_moe_config()
        exchange = SglangExperts(expert_rank(), lambda message: [message, message])
        monkeypatch.setattr(dispatcher, "of_process", lambda: exchange)
        made = plugin._create_dispatcher(create_moe_dispatcher, layer_config(), quant_method=METHOD)
    assert type(made) is StandardDispatcher
    assert "--moe-a2a-backend is none. Set flashinfer" in caplog.text


def test_a_served_layer_gets_our_object(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(*_: Any) -> Any:
        raise AssertionError

    with configured(), get_parallel().override(tp_rank=0, moe_ep_rank=0):
        initialize_moe_config()
        exchange = SglangExperts(expert_rank(), lambda message: [message, message], form=FakeGroup.form)
        monkeypatch.setattr(dispatcher, "of_process", lambda: exchange)
        made = create_dispatcher(original, layer_config(), METHOD)
        other = create_dispatcher(original, layer_config(), METHOD)
    assert isinstance(made, FlashinferDispatcher)
    assert isinstance(made, KvConnectorDispatcher)
    assert made.layer is other.layer
    assert made.layer._group.owners == linear_owners(EXPERTS, 2)
    made.set_quant_config({"weight_dtype": torch.bfloat16})
    assert made.prefill_dispatcher.quant_config == {"weight_dtype": torch.bfloat16}


# --- Hooks


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_variable_hooks_sglangs_function_and_steps(value: str) -> None:
    code = (
        "import sys\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.layers.moe.fused_moe_triton import layer\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "print(hasattr(layer.create_moe_dispatcher, '__wrapped__'),\n"
        "      *(f'sglang.srt.managers.scheduler.Scheduler.{name}' in HookRegistry._patched\n"
        "        for name in ('process_batch_result', 'run_event_loop')),\n"
        "      any(name.startswith('kv_connector.sglang.experts') for name in sys.modules))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"KV_CONNECTOR_MOE": value},
    )
    hooked = str(value == "1")
    assert answer.stdout.splitlines()[-1].split() == [hooked, hooked, hooked, "False"]


def test_this_release_has_the_known_parameters() -> None:
    def parameters(function: Any) -> list[str]:
        return [*inspect.signature(function).parameters]

    assert parameters(create_moe_dispatcher) == ["moe_runner_config", "quant_method"]
    assert parameters(Scheduler.process_batch_result) == ["self", "batch", "result"]
    assert parameters(Scheduler.run_event_loop) == ["self"]
    assert parameters(FlashinferDispatcher.dispatch) == ["self", "hidden_states", "topk_output"]
    assert parameters(FlashinferDispatcher.combine) == ["self", "combine_input"]
    allgather = FlashinferDispatcher._dispatch_prefill_allgather
    assert parameters(allgather) == ["self", "hidden_states", "topk_output"]


def test_another_release_keeps_its_own_exchange(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kv_connector.sglang.experts.dispatcher", None)  # an import raises
    assert plugin._create_dispatcher(lambda config, method: (config, method), "config", "method") == (
        "config",
        "method",
    )
    assert "experts: SGLang's own exchange stays in use" in caplog.text
    plugin._check_step("scheduler", "batch", "result")
    assert plugin._run(lambda scheduler: f"{scheduler} ran", "a scheduler") == "a scheduler ran"


class LostRank:
    """Stands in for the exchange of a process."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def check(self, wait: Any) -> None:
        wait()
        self.order.append("checked")
        raise GroupError("rank 1 (process 7) has ended")

    def close(self) -> None:
        self.order.append("closed")

    def explain(self, error: BaseException) -> BaseException:
        return GroupError(f"rank 1 (process 7) has ended: {error}") if "closed" in str(error) else error


def test_a_void_step_is_never_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = LostRank()
    monkeypatch.setattr(dispatcher, "of_process", lambda: lost)
    done = SimpleNamespace(synchronize=lambda: lost.order.append("waited"))
    with pytest.raises(GroupError, match=r"rank 1 \(process 7\) has ended"):
        plugin._check_step("scheduler", "batch", SimpleNamespace(copy_done=done))
    assert lost.order == ["waited", "checked"]
    with pytest.raises(GroupError, match="has ended"):
        plugin._check_step("scheduler", "batch", None)


def test_an_error_of_the_loop_names_the_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "of_process", LostRank)

    def fails(scheduler: str) -> None:
        raise RuntimeError(scheduler)

    with pytest.raises(GroupError, match="has ended: connection closed"):
        plugin._run(fails, "connection closed")
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        plugin._run(fails, "out of memory")
    assert not isinstance(raised.value, GroupError)


def test_the_groups_are_left_after_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = LostRank()
    monkeypatch.setattr(dispatcher, "of_process", lambda: lost)
    assert plugin._run(lambda scheduler: f"{scheduler} ran", "a scheduler") == "a scheduler ran"
    assert lost.order == ["closed"]
