"""Engines without a model: the KV cache tensors that vLLM lays out, the layouts that the connector derives,
and the copies that a plan makes between two engines."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from protocol_setup import worker
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_stage import get_kv_cache_config_from_groups

from kv_connector.agent.config import PageMemory
from kv_connector.protocol.pages.layout import GroupTarget, KvLayout, Part, memory_problem
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.plans.sources import Holders, choose_sources
from kv_connector.vllm.model.kv_cache import kv_layout

BLOCKS = 5


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def caches(
    config: Any, groups: list[KVCacheGroupSpec], order: str = "LBHNC", kernel_blocks: list[int] | None = None
) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Places five blocks of each group with vLLM, in separate memory."""
    config.cache_config.kv_cache_layout = KVCacheLayout[order]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(config.cache_config), "get_resolved_kv_cache_layout", lambda _: KVCacheLayout[order]
        )
        patch.setattr(config.cache_config, "num_gpu_blocks_override", BLOCKS)
        cache = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    cache.kv_cache_layout = order
    return cache, allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[order], kernel_blocks)


def attention(backend: str = "FLASH_ATTN", **more: Any) -> Any:
    """Returns an attention layer, as far as its pages depend on it."""
    return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), **more)


def model_config(kv_heads: int, **more: Any) -> Any:
    """Returns a model's configuration."""
    return SimpleNamespace(
        get_total_num_kv_heads=lambda: kv_heads,
        hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": kv_heads, **more}),
        model_arch_config=SimpleNamespace(per_layer_overrides=None),
    )


def engine(
    layers: Mapping[str, Any], ranks: int = 1, kv_heads: int = 2, drafter: Any = None, **more: Any
) -> Any:
    """Returns vLLM's configuration of an engine with these layers."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=model_config(kv_heads, **more),
        speculative_config=None if drafter is None else SimpleNamespace(draft_model_config=drafter),
        compilation_config=SimpleNamespace(static_forward_context=dict(layers)),
    )


@dataclass
class PagesRank:
    layout: KvLayout
    memory: tuple[PageMemory, ...]
    tensors: dict[str, torch.Tensor]

    def run(self, part: Part, block: int, *places: int) -> bytes:
        """Returns the run at these places along the part's axes."""
        steps = (place * axis.stride for place, axis in zip(places, part.axes, strict=True))
        address = self.memory[part.region].address + part.offset + block * part.block_stride + sum(steps)
        return ctypes.string_at(address, part.run_bytes)

    def runs(self, part: Part, block: int) -> dict[tuple[int, int, int], bytes]:
        """Returns all runs of a page, by shard, token and row."""
        found = {}
        for places in product(*(range(axis.count) for axis in part.axes)):
            key = {"shard": 0, "token": 0, "row": 0}
            for place, axis in zip(places, part.axes, strict=True):
                key[axis.what] = key[axis.what] * axis.count + place
            found[key["shard"], key["token"], key["row"]] = self.run(part, block, *places)
        return found


def make_rank(
    config: Any,
    groups: list[KVCacheGroupSpec],
    layer: Callable[[str], Any] | None = None,
    *,
    order: str = "LBHNC",
    kernel_blocks: list[int] | None = None,
    rank: int = 0,
    ranks: int = 1,
    kv_heads: int = 2,
) -> PagesRank:
    """Makes a rank with these layers, of a model with this many KV heads and attention as on a GPU."""
    cache, tensors = caches(config, groups, order, kernel_blocks)
    names = [name for group in groups for name in group.layer_names]
    modules = {name: attention() if layer is None else layer(name) for name in names}
    layout, memory = kv_layout(engine(modules, ranks, kv_heads), cache, tensors, rank)
    assert memory_problem(layout, [region.nbytes for region in memory]) is None
    return PagesRank(layout, memory, tensors)


def transfer(
    prefill: Sequence[PagesRank],
    decode: PagesRank,
    index: int,
    ranks: int,
    tables: Sequence[Sequence[int]],
    tokens: int,
) -> int:
    """Copies a prompt into one rank of an engine with ``ranks`` ranks, and returns the number of runs.

    All ranks have the same block tables: ``tables[g]`` is that of D's group g, and of P's as far as it has
    that many blocks.
    """
    sources = {number: worker(source.layout) for number, source in enumerate(prefill)}
    choice = choose_sources([worker(decode.layout)] * ranks, index, Holders(sources))
    targets = [
        GroupTarget(0, tuple(table[: -(-tokens // group.block_size)] if group.block_size else table[:1]))
        for table, group in zip(tables, decode.layout.groups, strict=True)
    ]
    written = 0
    for rank, wanted in choice.items():
        source = prefill[rank]
        for pair in Plan(source.layout, decode.layout, wanted).pairs.values():
            for granule, block in pair.granules(targets[pair.target], tokens).items():
                taken = tables[pair.source][granule // pair.cut.source_granules]
                for run in pair.runs[pair.cut.places(granule)]:
                    for layer, (begin, to) in product(run.layers, run.offsets):
                        begin += layer.source_offset + taken * run.source_stride
                        to += layer.target_offset + block * run.target_stride
                        here, there = source.memory[run.source_region], decode.memory[run.target_region]
                        assert begin + run.page_bytes <= here.nbytes
                        assert to + run.page_bytes <= there.nbytes
                        ctypes.memmove(there.address + to, here.address + begin, run.page_bytes)
                        written += 1
    return written
