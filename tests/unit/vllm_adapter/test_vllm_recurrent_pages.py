"""The pages of recurrent states: engines of other tensor parallelism each get their part of them.

The shapes are vLLM's own. A rank's state is the part of the model's state for its heads and groups, packed as
vLLM's layers unpack it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from protocol_setup import misfit
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm_pages import BLOCKS, PagesRank, attention, make_rank, name, transfer
from vllm_stage import FULL, model, vllm_config

from kv_connector.protocol.pages.geometry import Place
from kv_connector.protocol.plans.plan import Plan
from kv_connector.vllm.model import recurrent_pages

__all__ = ["model"]

ROW = 3  # the request's row in the pool


@dataclass(frozen=True)
class Model:
    """A model with recurrent states.

    ``pieces``: units and their dims of all that its convolution runs over. ``state``: the units and the rest
    of the recurrent state's shape. ``shapes``: vLLM's shapes of a rank, by the number of ranks.
    """

    kind: Kind
    module: Any
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    pieces: tuple[tuple[int, int], ...]
    state: tuple[int, tuple[int, ...]] | None


def mamba2(groups: int, spec_tokens: int = 0, head_dim: int = 4) -> Model:
    """A Mamba2 model. ``head_dim``: the value that its layer has."""
    norm = SimpleNamespace(n_groups=groups)
    module = SimpleNamespace(num_heads=8, head_dim=head_dim, ssm_state_size=16, norm=norm)
    return Model(
        Kind.MAMBA2,
        module,
        lambda tp: Shapes.mamba2_state_shape(tp, 8 * 4, groups, 8, 4, 16, 4, spec_tokens),
        ((8, 4), (groups, 16), (groups, 16)),
        (8, (4, 16)),
    )


MODELS = {
    "mamba1": Model(
        Kind.MAMBA1,
        SimpleNamespace(intermediate_size=24),
        lambda tp: Shapes.mamba1_state_shape(tp, 24, 16, 4),
        ((24, 1),),
        (24, (16,)),
    ),
    "mamba2": mamba2(groups=4),
    "mamba2 with a group that all ranks have": mamba2(groups=1),
    "mamba2 that drafts": mamba2(groups=4, spec_tokens=2),
    "gated delta net": Model(
        Kind.GDN_ATTN,
        SimpleNamespace(num_k_heads=4, num_v_heads=8, head_k_dim=8, head_v_dim=4),
        lambda tp: Shapes.gated_delta_net_state_shape(tp, 4, 8, 8, 4, 4),
        ((4, 8), (4, 8), (8, 4)),
        (8, (4, 8)),
    ),
    "kimi's delta net": Model(
        Kind.GDN_ATTN,
        SimpleNamespace(num_heads=4, head_dim=8),
        lambda tp: Shapes.kda_state_shape(tp, 4, 8),
        ((4, 8), (4, 8), (4, 8)),
        (4, (8, 8)),
    ),
    "linear attention": Model(
        Kind.LINEAR,
        SimpleNamespace(num_heads=4),
        lambda tp: Shapes.linear_attention_state_shape(4, tp, 8),
        (),
        (4, (8, 8)),
    ),
    "short convolution": Model(
        Kind.SHORT_CONV,
        SimpleNamespace(conv_dim=24),
        lambda tp: Shapes.short_conv_state_shape(tp, 24, 3),
        ((24, 1),),
        None,
    ),
}
SD, DS = False, True


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    return vllm_config(model, "kv_both")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets VLLM_SSM_CONV_STATE_LAYOUT, which vLLM reads once."""

    def choose(dims_first: bool) -> None:
        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: dims_first)
        monkeypatch.setattr(recurrent_pages, "is_conv_state_dim_first", lambda: dims_first)

    return choose


def spec_of(of: Model, ranks: int, **more: Any) -> MambaSpec:
    shapes = of.shapes(ranks)
    dtypes = (torch.bfloat16,) * (len(shapes) - 1) + (torch.float32,)
    return MambaSpec(block_size=1024, shapes=shapes, dtypes=dtypes, mamba_type=of.kind, **more)


def state_rank(config: Any, of: Model, rank: int, ranks: int, **more: Any) -> PagesRank:
    """A rank of a hybrid model. The state is padded to the length of a page of its attention."""
    attend = replace(FULL, num_kv_heads=4 // ranks)
    spec = spec_of(of, ranks, page_size_padded=attend.page_size_bytes, **more)
    groups = [KVCacheGroupSpec([name(0), name(1)], spec), KVCacheGroupSpec([name(2), name(3)], attend)]
    modules = {name(0): of.module, name(1): of.module}

    def module(layer: str) -> Any:
        return modules.get(layer, attention())

    return make_rank(config, groups, module, rank=rank, ranks=ranks, kv_heads=4)


def slices(units: int, rank: int, ranks: int) -> slice:
    first = rank * units // ranks
    return slice(first, first + max(1, units // ranks))


def whole_state(of: Model, rows: int, layer: int) -> list[torch.Tensor]:
    """Returns the whole model's state.

    It has each piece of the convolution's state [units, dims, rows], and the recurrent one.
    """
    generator = torch.Generator().manual_seed(layer)
    found = [torch.rand(units, dims, rows, generator=generator) for units, dims in of.pieces]
    return found + ([torch.rand(of.state[0], *of.state[1], generator=generator)] if of.state else [])


def fill(target: PagesRank, of: Model, rank: int, ranks: int, dims_first: bool) -> None:
    """Fills the request's row with its state, as vLLM's layers lay their views over the page."""
    shapes, spec = of.shapes(ranks), spec_of(of, ranks)
    for layer in (0, 1):
        page = target.tensors[name(layer)][ROW].flatten()
        parts = whole_state(of, shapes[0][1 if dims_first else 0], layer)
        packed = [part[slices(len(part), rank, ranks)] for part in parts]
        if of.pieces:
            conv = torch.cat([piece.flatten(0, 1) for piece in packed[: len(of.pieces)]])
            packed[: len(of.pieces)] = [conv if dims_first else conv.T]
        offset = 0
        for shape, dtype, state in zip(shapes, spec.dtypes, packed, strict=True):
            size = state.numel() * dtype.itemsize
            page[offset : offset + size].view(dtype).view(shape).copy_(state)
            offset += size


@pytest.mark.parametrize("dims_first", [SD, DS], ids=["SD", "DS"])
@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("kind", MODELS)
def test_each_rank_gets_its_part_of_the_state(
    config: Any, order: Callable[[bool], None], kind: str, a: int, b: int, dims_first: bool
) -> None:
    order(dims_first)
    of = MODELS[kind]
    prefill = [state_rank(config, of, rank, a) for rank in range(a)]
    for rank, source in enumerate(prefill):
        assert source.layout.groups[0].block_size == 0
        assert source.layout.groups[0].kind == "recurrent state"
        for tensor in source.tensors.values():
            tensor.view(torch.uint8).fill_(0xFF)  # all but the request's bytes, padding included
        fill(source, of, rank, a, dims_first)
    for index in range(b):
        target, expected = (state_rank(config, of, index, b) for _ in range(2))
        fill(expected, of, index, b, dims_first)
        runs = transfer(prefill, target, index, b, [[ROW], []], 700)
        assert a != b or runs == 2  # one for each of two layers, if the pages are alike
        for layer in (0, 1):
            assert torch.equal(target.tensors[name(layer)], expected.tensors[name(layer)])


def test_pieces_that_lie_by_dimension_are_one_run_each(config: Any, order: Callable[[bool], None]) -> None:
    runs = {}
    for dims_first in (SD, DS):
        order(dims_first)
        source, target = state_rank(config, mamba2(4), 0, 1), state_rank(config, mamba2(4), 0, 2)
        more = [()] * (len(target.layout.layers) - 1)
        plan = Plan(source.layout, target.layout, [(0, 1, 2, 3), *more])
        runs[dims_first] = sum(len(run.offsets) for run in plan.runs(0, 0))
    assert runs == {SD: 3 * 3 + 1, DS: 3 + 1}


def state_format(rank: PagesRank) -> str:
    return rank.layout.layers[0].format


def test_misfit_of_recurrent_states_names_the_difference(config: Any, order: Callable[[bool], None]) -> None:
    order(SD)
    ours = state_rank(config, mamba2(4), 0, 1)
    assert state_format(ours) == "MAMBA2 on cpu, a convolution of 3 rows in bfloat16, SD, a state in float32"
    drafts = state_rank(config, mamba2(4, spec_tokens=2), 0, 1)
    order(DS)
    turned = state_rank(config, mamba2(4), 0, 1)
    for other, words in ((drafts, "a convolution of 5 rows"), (turned, "bfloat16, DS")):
        problem = misfit(ours.layout, other.layout)
        assert problem.startswith(
            f"layer {name(0)}: format: prefill engine has {state_format(ours)!r}, decode engine has "
        )
        assert words in problem


@pytest.mark.parametrize(
    "of",
    [
        Model(Kind.MAMBA2, SimpleNamespace(), mamba2(4).shapes, (), None),
        mamba2(4, head_dim=5),
        Model(Kind.CUSTOM, mamba2(4).module, mamba2(4).shapes, (), None),
        Model(
            Kind.MAMBA2,
            mamba2(4).module,
            lambda tp: (*mamba2(4).shapes(tp), (8 // tp, 7)),  # ReplaySSM's rings
            (),
            None,
        ),
    ],
    ids=["another layer", "other shapes", "another kind", "more states"],
)
def test_states_of_an_unknown_kind_go_whole_from_rank_to_rank(
    config: Any, order: Callable[[bool], None], of: Model
) -> None:
    order(SD)
    source, target = state_rank(config, of, 1, 2), state_rank(config, of, 1, 2)
    source.tensors[name(0)][ROW].view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    assert transfer([state_rank(config, of, 0, 2), source], target, 1, 2, [[ROW], []], 700) == 2
    assert torch.equal(target.tensors[name(0)], source.tensors[name(0)])
    problem = misfit(source.layout, state_rank(config, of, 0, 1).layout)
    assert "whole pages of" in problem


def test_a_state_that_all_ranks_have_comes_from_any(config: Any, order: Callable[[bool], None]) -> None:
    order(SD)
    sharded = MODELS["short convolution"]
    of = replace(sharded, shapes=lambda _: sharded.shapes(1))
    one, two = (state_rank(config, of, 0, ranks, tp_replicated=True) for ranks in (1, 2))
    one.tensors[name(0)][ROW].view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    assert transfer([one], two, 0, 2, [[ROW], []], 700) == 2
    assert torch.equal(two.tensors[name(0)][ROW], one.tensors[name(0)][ROW])
    assert two.layout.groups[0].num_blocks == BLOCKS


@pytest.fixture
def alone(config: Any, tmp_path: Path) -> Iterator[Any]:
    """vLLM's configuration, in a process that is an engine's only rank. Layers get no memory."""
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.cache_config, "mamba_block_size", 1024)
        patch.setattr(config, "kv_transfer_config", None)
        init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            yield config
        destroy_model_parallel()
        destroy_distributed_environment()


def test_vllms_own_layers_are_known(alone: Any, order: Callable[[bool], None]) -> None:
    """The layers have the attributes that the connector reads, under these names."""
    order(SD)
    configs = {"model_config": alone.model_config, "cache_config": alone.cache_config}
    sizes = {"hidden_size": 64, "ssm_state_size": 16, "conv_kernel_size": 4, "intermediate_size": 128}
    options = {"use_conv_bias": True, "use_bias": False, **sizes, **configs}
    delta = {
        f"linear_{what}": value
        for what, value in {
            "num_key_heads": 2,
            "num_value_heads": 4,
            "key_head_dim": 32,
            "value_head_dim": 64,
            "conv_kernel_dim": 4,
            "attn_config": {"head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4},
        }.items()
    }
    of_delta = SimpleNamespace(hidden_size=64, hidden_act="silu", rms_norm_eps=1e-6, **delta)
    short = SimpleNamespace(conv_L_cache=3, conv_bias=False)
    layers = [
        MambaMixer(time_step_rank=4, use_rms_norm=False, prefix="layers.0", **options),
        MambaMixer2(n_groups=1, num_heads=8, head_dim=16, prefix="layers.1", **options),
        QwenGatedDeltaNetAttention(of_delta, alone, "layers.2"),
        KimiGatedDeltaNetAttention(of_delta, alone, "layers.3"),
        ShortConv(short, 64, 4, prefix="layers.4", **configs),
    ]
    state = ["state"]
    for layer, parts in zip(
        layers,
        (["x", *state], ["x", "B", "C", *state], ["q", "k", "v", *state], ["q", "k", "v", *state], ["x"]),
        strict=True,
    ):
        spec = layer.get_kv_cache_spec(alone)
        _, found = recurrent_pages.state_pages(spec, layer, Place(0, 0, 1 << 20), (0, 1), "cpu")
        assert [part.name.removeprefix("conv.") for part in found] == parts
        assert sum(part.run_bytes * prod(axis.count for axis in part.axes) for part in found) == (
            spec.state_content_size_bytes
        )
