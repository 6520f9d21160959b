"""The layouts that doctor predicts for a model equal those that the connector makes of vLLM's own model.

vLLM reads the configuration, builds the model without memory, groups its layers and places their pages.
"""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import CONFIGS, write
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_tp_group,
    init_distributed_environment,
)
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm_pages import caches
from vllm_stage import get_kv_cache_groups

from kv_connector.cli.fit.layout import engine
from kv_connector.cli.fit.model import read_model
from kv_connector.cli.fit.pair import costs
from kv_connector.cli.fit.side import parse_side
from kv_connector.protocol.pages.layout import KvLayout, Part
from kv_connector.protocol.wire.messages import Rank
from kv_connector.vllm.model import kv_cache

LAYOUTS = {"tokens": "LBNHC", "heads": "LBHNC", "planes": "LBHNC"}
TOKENS = 1000


class OnGpu(AttentionBackend):  # type: ignore[misc]
    """A stand-in for the usual backends of a GPU, with all that a layout depends on."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes this process one of an engine's ranks."""
    init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('ranks')}/file", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        ensure_model_parallel_initialized(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def vllms(path: Path, patch: pytest.MonkeyPatch, *, tp: int, order: str, **arguments: Any) -> list[Rank]:
    """Returns the ranks of an engine, as its workers would describe them."""
    patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: order == "planes")  # states in float32
    patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # planes are the order without AMX
    patch.setattr(get_tp_group(), "world_size", tp)
    patch.setattr(kv_cache, "kv_scales", lambda _, names: dict.fromkeys(names, ()))
    arguments = {"block_size": 16, **arguments} if order != "planes" else arguments
    config = EngineArgs(
        model=str(path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        tensor_parallel_size=tp,
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
        **arguments,
    ).create_engine_config()
    with set_current_vllm_config(config), torch.device("meta"):
        initialize_model(config)
    layers = {
        name: layer
        for name, layer in config.compilation_config.static_forward_context.items()
        if isinstance(layer, AttentionLayerBase)
    }
    for layer in layers.values():
        if not isinstance(layer, MambaBase) and order != "planes":
            layer.attn_backend = OnGpu
        layer.isa = "vec"
    current_platform.update_block_size_for_backend(config)
    config.cache_config.kv_cache_layout = LAYOUTS[order]
    groups = get_kv_cache_groups(config, {n: layer.get_kv_cache_spec(config) for n, layer in layers.items()})
    cache, tensors = caches(config, groups, LAYOUTS[order])
    return [
        Rank("127.0.0.1", 1, 0, kv_cache.kv_layout(config, cache, tensors, rank)[0]) for rank in range(tp)
    ]


def pages(layout: KvLayout) -> list[Any]:
    """Returns, for each layer, all facts on which a plan depends.

    Runs count from the layer's beginning. Attention layers include their index (vLLM numbers Falcon-H1's
    states differently).
    """
    found = []
    for layer in layout.layers:
        group, begin = layout.groups[layer.group], min(part.offset for part in layer.parts)
        parts = {part.name: (part.shard, part.run_bytes, runs(part, begin)) for part in layer.parts}
        index = re.findall(r"\d+", layer.name)[0] if group.block_size else ""
        found.append((group.block_size, group.kind, layer.format, index, layer.needed, sorted(parts.items())))
    return sorted(found, key=repr)


def runs(part: Part, begin: int) -> dict[tuple[int, ...], int]:
    """Returns the place of each run, by shard, token and row."""
    found = {}
    for places in product(*(range(axis.count) for axis in part.axes)):
        at = {"shard": 0, "token": 0, "row": 0}
        for place, axis in zip(places, part.axes, strict=True):
            at[axis.what] = at[axis.what] * axis.count + place
        steps = (place * axis.stride for place, axis in zip(places, part.axes, strict=True))
        found[tuple(at.values())] = part.offset - begin + sum(steps)
    return found


def in_our_words(found: list[Any], order: str) -> list[Any]:
    """Replaces the machine in each format: the test runs on a CPU, whatever it simulates."""
    if order == "planes":
        return [(a, b, re.sub(r", vec on .*", ", in planes", words), *more) for a, b, words, *more in found]
    return [(a, b, words.replace(" on cpu", " on cuda"), *more) for a, b, words, *more in found]


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_layouts_and_costs_are_those_of_vllms_own_model(
    ranks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, order: str
) -> None:
    path = write(tmp_path, CONFIGS[kind])
    model = read_model(path)
    sides = []
    for tp in (2, 1):
        real = vllms(path, monkeypatch, tp=tp, order=order)
        ours = engine(model, parse_side(f"tp={tp},order={order}"))
        sides.append((real, ours.ranks))
        for one, other in zip(real, ours.ranks, strict=True):
            assert pages(other.layout) == in_our_words(pages(one.layout), order)
    (prefill, our_prefill), (decode, our_decode) = sides
    assert [*costs(our_prefill, our_decode, TOKENS)] == [*costs(prefill, decode, TOKENS)]
    assert [*costs(our_decode, our_prefill, TOKENS)] == [*costs(decode, prefill, TOKENS)]


@pytest.mark.parametrize(
    ("kind", "side", "arguments"),
    [
        ("llama", "block=64", {"block_size": 64}),
        ("llama", "kv-cache-dtype=fp8", {"kv_cache_dtype": "fp8"}),
        ("llama", "dtype=float32", {"dtype": "float32"}),
        ("granite", "block=128", {"block_size": 128}),
        ("granite", "ssm-dtype=float32", {"mamba_ssm_cache_dtype": "float32"}),
        (
            *("qwen3-next", "drafts=2"),
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        ),
    ],
)
def test_doctor_computes_the_layout_that_vllm_makes_for_a_side(
    ranks: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    side: str,
    arguments: dict[str, Any],
) -> None:
    path = write(tmp_path, CONFIGS[kind])
    try:
        (real,) = vllms(path, monkeypatch, tp=1, order="heads", **arguments)
    except ValueError as error:
        if "on this host" not in str(error):
            raise
        pytest.skip(f"vLLM: {error}")  # 0.33 supports fp8 caches only if the processor does
    (ours,) = engine(read_model(path), parse_side(side)).ranks
    assert pages(ours.layout) == in_our_words(pages(real.layout), "heads")


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_pipeline_stages_have_the_layers_that_vllm_gives_them(tmp_path: Path, stages: int) -> None:
    for depth in range(stages, 3 * stages + 1):
        model = read_model(write(tmp_path, {**CONFIGS["llama"], "num_hidden_layers": depth}))
        found = [
            [int(layer.name.split(".")[2]) for layer in rank.layout.layers]
            for rank in engine(model, parse_side(f"pp={stages}")).ranks
        ]
        assert found == [[*range(*get_pp_indices(depth, stage, stages))] for stage in range(stages)]
