"""Shards of Megatron's ranks reach engines of any size, with each element of the checkpoint once.

The reference (support/megatron_shards.py) cuts whole checkpoints by its own code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_shards import (
    MegatronMesh,
    chunks_of,
    engine_cut,
    engine_loads,
    ranks_of,
    small_config,
    whole_checkpoint,
)
from weight_engines import WeightEngine
from weight_trainer import PATIENCE_S, RankProcesses

from kv_connector.weights.mapping.megatron import FAMILIES, MegatronError, MegatronRanks
from kv_connector.weights.mapping.plan import make_plan
from kv_connector.weights.megatron import megatron_source
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import ShardSource, SourceError


class _Recorded(Exception):
    """A rank has reached the exchange."""


def all_sources(
    chunks: Sequence[Sequence[torch.nn.Module]], config: Mapping[str, Any], ranks: Sequence[MegatronRanks]
) -> list[ShardSource]:
    """Makes the sources of all ranks in this process. Each rank runs up to the exchange, and then anew."""
    told: list[object] = []

    def record(value: object, _: object) -> list[object]:
        told.append(value)
        raise _Recorded

    for of_rank, place in zip(chunks, ranks, strict=True):
        with patch("kv_connector.weights.megatron.exchange", record), pytest.raises(_Recorded):
            megatron_source(of_rank, config, place)
    with patch("kv_connector.weights.megatron.exchange", lambda value, _: told):
        return [megatron_source(of_rank, config, place) for of_rank, place in zip(chunks, ranks, strict=True)]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a model that eight ranks can share."""
    groups = draw(st.sampled_from((1, 2, 4)))
    per_group = draw(st.sampled_from((1, 2, 3, 6)))
    unit = 8 // np.gcd(8, groups * (per_group + 2))  # of a head, so that eight ranks can cut the fused rows
    head = int(np.lcm(unit, 8 // np.gcd(8, groups * per_group))) * draw(st.integers(1, 2))
    layers = draw(st.integers(1, 4))
    inner = st.sampled_from((8, 16))
    config = small_config(
        draw(st.sampled_from(sorted(FAMILIES))),
        hidden_size=draw(st.sampled_from((3, 8))),
        num_attention_heads=groups * per_group,
        num_key_value_heads=groups,
        head_dim=head,
        intermediate_size=draw(inner),
        vocab_size=draw(st.integers(1, 40)),
        num_hidden_layers=layers,
        tie_word_embeddings=draw(st.booleans()),
    )
    for field in ("num_experts", "num_local_experts"):
        if field in config:
            config[field] = draw(st.sampled_from((4, 8)))
    if "num_experts" in config:
        config["moe_intermediate_size"] = draw(inner)
        config["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), max_size=1))
    return config


@st.composite
def meshes(draw: st.DrawFn, config: Mapping[str, Any]) -> MegatronMesh:
    tp, dp = draw(st.sampled_from(((1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (2, 2), (4, 2))))
    ep, etp = draw(
        st.sampled_from([(a, b) for a in (1, 2, 4) for b in (1, 2, 4, 8) if tp * dp % (a * b) == 0])
    )
    layers = config["num_hidden_layers"]
    edges = [0, *sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else ()), layers]
    stages = [range(a, b) for a, b in itertools.pairwise(edges)]
    pp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if len(stages) % n == 0]))
    if pp == 1 and config["tie_word_embeddings"]:
        stages = [range(layers)]  # one rank has embedding and output layer: Megatron has no copy
    rows = -(-config["vocab_size"] // tp) + draw(st.integers(0, 5))
    return MegatronMesh(
        tp, pp, ep, etp, dp, stages, rows * tp, fused_norms=draw(st.booleans()), grouped=draw(st.booleans())
    )


@given(st.data())
@settings(max_examples=50)
def test_megatron_shards_reach_engines_with_each_element_once(data: st.DataObject) -> None:
    config = data.draw(configs())
    mesh = data.draw(meshes(config))
    weights = whole_checkpoint(config, 1)
    chunks = [chunks_of(mesh, rank, config, weights) for rank in range(mesh.ranks)]
    sources = all_sources(chunks, config, [ranks_of(mesh, rank)[1] for rank in range(mesh.ranks)])
    tensors = sources[0].tensors()
    assert {tensor.name: tensor.shape for tensor in tensors} == {
        name: tuple(value.shape) for name, value in weights.items()
    }
    ranks = data.draw(st.integers(1, 3))
    receivers = [engine_loads(rank, ranks, tensors) for rank in range(ranks)]
    found = [[np.full(p.elements, -1.0) for p in geometry.parameters] for geometry in receivers]
    written = [[np.zeros(p.elements, int) for p in geometry.parameters] for geometry in receivers]
    shards = [[held.shard for held in source.held()] for source in sources]
    for rank, source in enumerate(sources):
        assert source.tensors() == tensors
        for receiver, pieces in enumerate(make_plan(tensors, shards, receivers, rank).pieces):
            for piece in pieces:
                local = source.held()[piece.shard].local()
                assert local.shape == torch.Size(shards[rank][piece.shard].box.extent)
                span = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.extent, strict=True))
                places = np.full(piece.extent, piece.offset)
                for grid, stride in zip(np.indices(piece.extent), piece.strides, strict=True):
                    places += grid * stride
                found[receiver][piece.parameter][places] = local[span].numpy()
                np.add.at(written[receiver][piece.parameter], places, 1)
    for rank, geometry in enumerate(receivers):
        for parameter, values, times in zip(geometry.parameters, found[rank], written[rank], strict=True):
            whole = weights[parameter.name]
            part = whole[engine_cut(parameter.name, whole.shape, rank, ranks)]
            assert (values == part.flatten().numpy()).all(), parameter.name
            assert (times == 1).all(), parameter.name


CASES: list[tuple[dict[str, Any], MegatronMesh]] = [
    # Two ranks cut each group of three ranks' rows: fewer groups than ranks.
    (
        small_config("LlamaForCausalLM", num_key_value_heads=1, head_dim=2, num_hidden_layers=3),
        MegatronMesh(2, 2, stages=(range(2), range(2, 3)), padded=16),
    ),
    # Virtual stages, tied weights.
    (
        small_config("Qwen2ForCausalLM", tie_word_embeddings=True, num_hidden_layers=4),
        MegatronMesh(2, 2, stages=[range(n, n + 1) for n in range(4)], padded=24, fused_norms=True),
    ),
    # Experts over all four ranks, the rest over two, twice.
    (small_config("Qwen3MoeForCausalLM"), MegatronMesh(2, 1, 4, 1, 2, padded=14, grouped=True)),
    (small_config("MixtralForCausalLM"), MegatronMesh(4, 1, 2, 2, padded=16)),
]


def main(told: Connection, store: str, rank: int, engines: Sequence[str]) -> None:
    """Runs a rank of a trainer for each case, and pushes two versions of it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=4)
    for config, mesh in CASES:
        chunks = chunks_of(mesh, rank, config, whole_checkpoint(config, 1))
        source = megatron_source(chunks, config, ranks_of(mesh, rank)[1])
        with WeightPusher(source, engines, staging_bytes=1024) as pusher:
            pusher.connect()
            for version in (1, 2):
                anew = chunks_of(mesh, rank, config, whole_checkpoint(config, version))
                for chunk, other in zip(chunks, anew, strict=True):
                    chunk.load_state_dict(other.state_dict())
                pusher.push(str(version)).wait("applied", PATIENCE_S)
                told.send(f"applied {version}")
                told.recv()


def test_megatron_ranks_push_to_engines_of_another_size(tmp_path: Path) -> None:
    engines = [WeightEngine(1, load=engine_loads), WeightEngine(3, load=engine_loads)]
    try:
        with RankProcesses(main, tmp_path, 4, [str(engine.address) for engine in engines]) as ranks:
            for config, _ in CASES:
                for version in (1, 2):
                    ranks.all_say(f"applied {version}")
                    weights = whole_checkpoint(config, version)
                    for engine in engines:
                        assert_serves(engine, weights)
                        for worker in engine.model.weights:
                            worker.clear()
                    ranks.say("go on")
    finally:
        for engine in engines:
            engine.close()


def assert_serves(engine: WeightEngine, weights: Mapping[str, torch.Tensor]) -> None:
    workers = engine.model.weights
    for rank, found in enumerate(workers):
        parts = {
            name: value[engine_cut(name, value.shape, rank, len(workers))].flatten()
            for name, value in weights.items()
        }
        expected = {name: part for name, part in parts.items() if part.numel()}
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            assert torch.equal(found[name], part), name


LLAMA = small_config("LlamaForCausalLM")
EXPERTS = small_config("Qwen3MoeForCausalLM")


def one_rank(config: Mapping[str, Any] = LLAMA) -> torch.nn.Module:
    """Returns the whole model of a single rank."""
    return chunks_of(MegatronMesh(padded=16), 0, config, whole_checkpoint(config, 1))[0]


def remove(name: str) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        module, _, own = name.rpartition(".")
        delattr(model.get_submodule(module), own)

    return change


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        module, _, own = name.rpartition(".")
        value = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        setattr(model.get_submodule(module), own, value)

    return change


def no_number(model: torch.nn.Module) -> None:
    del model.get_submodule("decoder.layers.1").layer_number


def number(value: int) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        model.get_submodule("decoder.layers.1").layer_number = value  # type: ignore[assignment]

    return change


def setting(name: str, value: object) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        model.config = SimpleNamespace(**{name: value})  # type: ignore[assignment]

    return change


def expert_bias(model: torch.nn.Module) -> None:
    model.get_submodule("decoder.layers.0.mlp.router").register_buffer("expert_bias", torch.zeros(4))


def float8(model: torch.nn.Module) -> None:
    class Float8Tensor(torch.Tensor):
        pass

    norm = model.get_submodule("decoder.final_layernorm")
    norm.weight = torch.nn.Parameter(torch.zeros(8).as_subclass(Float8Tensor))


QKV = "decoder.layers.1.self_attention.linear_qkv"


@pytest.mark.parametrize(
    ("config", "change", "problem"),
    [
        (LLAMA, put(f"{QKV}.weight", 31, 8), r"linear_qkv\.weight has the shape \[31, 8\] .* \[32, 8\]"),
        (LLAMA, put("embedding.word_embeddings.weight", 12, 8), r"has 12 rows .* a vocabulary of 13"),
        (LLAMA, put("output_layer.weight", 16, 7), r"output_layer\.weight has the shape \[16, 7\]"),
        (LLAMA, put(f"{QKV}.bias", 32), r"knows no .*linear_qkv\.bias of a LlamaForCausalLM"),
        (LLAMA, put("decoder.final_layernorm.bias", 8), r"knows no decoder\.final_layernorm\.bias"),
        (LLAMA, remove("output_layer.weight"), r"no rank holds lm_head\.weight\. Pass all chunks"),
        (
            LLAMA,
            remove(f"{QKV}.weight"),
            r"no rank holds model\.layers\.1\.self_attn\.q_proj\.weight, .*, .*v_proj\.weight\. Pass",
        ),
        (LLAMA, remove("decoder.layers.1"), r"no rank holds model\.layers\.1\..*, .*, .* and 6 more\. Pass"),
        (
            LLAMA,
            put(f"{QKV}.layer_norm_weight", 8),
            r"input_layernorm\.weight and .*linear_qkv\.layer_norm_weight of one rank are the same part",
        ),
        (LLAMA, number(1), r"of one rank are the same part of model\.layers\.0\."),
        (LLAMA, number(3), r"belongs to layer 2, and the config has layers 0 to 1"),
        (LLAMA, no_number, r"decoder\.layers\.1 has no layer_number"),
        (LLAMA, float8, r"decoder\.final_layernorm\.weight is a Float8Tensor"),
        (LLAMA, setting("layernorm_zero_centered_gamma", True), "has layernorm_zero_centered_gamma"),
        (LLAMA, setting("rotary_interleaved", True), "has rotary_interleaved"),
        (LLAMA, setting("moe_mlp_glu_interleave_size", 32), "has moe_mlp_glu_interleave_size"),
        (EXPERTS, expert_bias, r"knows no decoder\.layers\.0\.mlp\.router\.expert_bias"),
        (EXPERTS, put("decoder.layers.0.mlp.experts.weight1", 8, 64), r"knows no .*experts\.weight1"),
        (
            EXPERTS,
            put("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", 8, 8),
            r"linear_fc1\.weight has the shape \[8, 8\] and should have \[16, 8\]",
        ),
        (
            {**LLAMA, "architectures": ["GemmaForCausalLM"]},
            None,
            r"\['GemmaForCausalLM'\]\. It supports Llama",
        ),
        ({**LLAMA, "architectures": []}, None, r"does not support the architectures \[\]"),
        ({**LLAMA, "attention_bias": True}, None, "attention_bias is true in the config of a Llama"),
        ({**LLAMA, "hidden_size": "8"}, None, "hidden_size is '8' in the config"),
        ({**LLAMA, "num_key_value_heads": 3}, None, "num_attention_heads 4 is not a multiple of 3 KV heads"),
    ],
)
def test_megatron_source_refuses_what_the_config_does_not_explain(
    config: Mapping[str, Any], change: Callable[[torch.nn.Module], None] | None, problem: str
) -> None:
    model = one_rank(config if change else LLAMA)
    if change:
        change(model)
    with pytest.raises(SourceError, match=problem):
        megatron_source(model, config, MegatronRanks())


@pytest.mark.parametrize("tied", [True, False])
def test_megatron_source_refuses_an_output_layer_that_is_tied_on_one_side(tied: bool) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}
    model = one_rank(config)
    model.share_embeddings_and_output_weights = not tied  # type: ignore[assignment]
    with pytest.raises(
        SourceError, match=f"weights {not tied}, and the config has tie_word_embeddings {tied}"
    ):
        megatron_source(model, config, MegatronRanks())
    model.share_embeddings_and_output_weights = tied  # type: ignore[assignment]
    megatron_source(model, config, MegatronRanks())


def test_megatron_source_refuses_a_chunk_that_is_given_twice() -> None:
    model = one_rank()
    with pytest.raises(SourceError, match=r"of one rank are the same part of .*Pass each chunk once"):
        megatron_source([model, model], LLAMA, MegatronRanks())


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ({"tp_size": 3}, r"linear_proj\.weight cannot be cut over 3 ranks: 16 is not a multiple of that"),
        ({"tp_size": 2}, r"has the shape \[8, 16\] and should have \[8, 8\] by the config and MegatronRanks"),
        ({"ep_size": 2}, r"is expert 2 of rank 0, and the config has 4 experts for 2 expert-parallel ranks"),
        ({"etp_size": 2}, r"linear_fc1\.weight has the shape \[16, 8\] and should have \[8, 8\]"),
    ],
)
def test_megatron_source_refuses_wrong_ranks(ranks: Mapping[str, int], problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        megatron_source(one_rank(EXPERTS), EXPERTS, MegatronRanks(**ranks))


def test_megatron_ranks_refuse_a_rank_behind_the_last() -> None:
    with pytest.raises(MegatronError, match=r"ep_rank is 2 of 2\. Give 0 to ep_size - 1"):
        MegatronRanks(ep_rank=2, ep_size=2)


def test_megatron_source_needs_ranks_without_megatron_core() -> None:
    with (
        patch.dict("sys.modules", {"megatron": None}),
        pytest.raises(SourceError, match=r"Megatron-Core cannot be imported .* Pass ranks=MegatronRanks"),
    ):
        megatron_source(one_rank(), LLAMA)


def test_megatron_source_takes_the_ranks_of_megatron_core() -> None:
    mesh, weights = MegatronMesh(4, 1, 2, 2, padded=16), whole_checkpoint(EXPERTS, 1)
    chunks = [chunks_of(mesh, rank, EXPERTS, weights) for rank in range(4)]
    ranks = [ranks_of(mesh, rank)[1] for rank in range(4)]
    given = all_sources(chunks, EXPERTS, ranks)[3]
    state = SimpleNamespace()
    for name, kind in (("tensor_model", "tp"), ("expert_model", "ep"), ("expert_tensor", "etp")):
        for what, field in (("rank", "rank"), ("world_size", "size")):
            value = getattr(ranks[3], f"{kind}_{field}")
            setattr(state, f"get_{name}_parallel_{what}", lambda value=value: value)
    modules = {
        "megatron": SimpleNamespace(),
        "megatron.core": SimpleNamespace(),
        "megatron.core.parallel_state": state,
    }
    others = [("", {tensor.name: tensor.dtype for tensor in given.tensors()})]
    with (
        patch.dict("sys.modules", modules),
        patch("kv_connector.weights.megatron.exchange", lambda value, _: [value, *others]),
    ):
        source = megatron_source(chunks[3], EXPERTS)
    assert [held.shard for held in source.held()] == [held.shard for held in given.held()]


def test_megatron_source_names_the_rank_whose_parameters_do_not_fit() -> None:
    """All ranks raise the error of one: otherwise they would wait for it in connect()."""
    with (
        patch("kv_connector.weights.megatron.exchange", lambda value, _: [value, ("it has no layers", {})]),
        pytest.raises(SourceError, match=r"rank 1: it has no layers"),
    ):
        megatron_source(one_rank(), LLAMA, MegatronRanks())


def test_megatron_source_refuses_ranks_with_unlike_dtypes() -> None:
    other = ("", {"model.norm.weight": "bfloat16"})
    with (
        patch("kv_connector.weights.megatron.exchange", lambda value, _: [value, other]),
        pytest.raises(
            SourceError, match=r"model\.norm\.weight is float32 on one rank and bfloat16 on rank 1"
        ),
    ):
        megatron_source(one_rank(), LLAMA, MegatronRanks())


def test_megatron_source_takes_wrapped_models_and_finds_moved_weights() -> None:
    class Wrapper(torch.nn.Module):
        """DistributedDataParallel and Float16Module of Megatron-Core."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model = one_rank()
    source = megatron_source(Wrapper(Wrapper(model)), LLAMA, MegatronRanks())
    newer = one_rank({**LLAMA})
    weights = whole_checkpoint(LLAMA, 2)
    newer.load_state_dict(chunks_of(MegatronMesh(padded=16), 0, LLAMA, weights)[0].state_dict())
    for mine, new in zip(model.parameters(), newer.parameters(), strict=True):
        mine.data = new.data
    for held in source.held():
        box = held.shard.box
        rows = tuple(slice(at, at + n) for at, n in zip(box.start, box.extent, strict=True))
        assert torch.equal(held.local(), weights[source.tensors()[held.shard.tensor].name][rows])


def test_megatron_source_refuses_freed_parameters() -> None:
    model = one_rank()
    model.get_submodule("output_layer").weight.untyped_storage().resize_(0)
    with pytest.raises(SourceError, match=r"output_layer\.weight has no memory"):
        megatron_source(model, LLAMA, MegatronRanks())
