"""The connector's description of pages matches vLLM's own tensors over the same memory.

On a CPU it also matches what vLLM's kernels write there.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from protocol_setup import layout, misfit, worker
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm_pages import BLOCKS, PagesRank, attention, caches, engine, make_rank, name, transfer
from vllm_stage import ADDRESS, FULL, SLIDING, kv_cache_config, model, vllm_config

from kv_connector.protocol.plans.plan import ALIKE, Plan
from kv_connector.protocol.plans.runs import Misfit
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.internals import KVConnectorHandshakeMetadata, KVConnectorRole
from kv_connector.vllm.metadata import DescribedRank
from kv_connector.vllm.model import configuration
from kv_connector.vllm.model.configuration import UnsupportedConfiguration, check_configuration
from kv_connector.vllm.model.kv_cache import kv_layout

__all__ = ["model"]

MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.float32, max_tp_shards=1)
WIDE = replace(FULL, head_size=128, head_size_v=128)
COMPRESSED = replace(MLA, tokens_per_state=4)
WINDOW_MLA = SlidingWindowMLASpec(
    block_size=32,
    num_kv_heads=1,
    head_size=576,
    dtype=torch.float32,
    sliding_window=64,
    max_tp_shards=1,
)
RING = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, dtype=torch.float32)
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    return vllm_config(model, "kv_both")


def layers_of(layers: int, spec: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([name(layer) for layer in range(layers)], spec)


def assert_runs_are_the_tensors(rank: PagesRank) -> None:
    """Asserts that each run of each page is vLLM's view of one token of one head."""
    for layer in rank.layout.layers:
        (part,) = layer.parts
        tensor = rank.tensors[layer.name]
        tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape))
        split = tensor.shape[0] // BLOCKS
        heads = range(tensor.shape[1])
        for block in range(BLOCKS):
            tokens = tensor[block * split : (block + 1) * split].transpose(1, 2).flatten(0, 1)
            expected = {
                (head, token, 0): tokens[token, head].numpy().tobytes()
                for head in heads
                for token in range(len(tokens))
            }
            assert rank.runs(part, block) == expected


# --- Where pages lie


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spec", [FULL, MLA], ids=["full", "mla"])
def test_one_group(config: Any, order: str, spec: Any) -> None:
    rank = make_rank(config, [KVCacheGroupSpec([name(2), name(0), name(10)], spec)], order=order)
    assert [layer.name for layer in rank.layout.layers] == [name(0), name(2), name(10)], "forward order"
    assert len(rank.memory) == 1
    assert {layer.page_bytes for layer in rank.layout.layers} == {spec.page_size_bytes}
    assert_runs_are_the_tensors(rank)


def test_two_attention_modules_a_layer(config: Any) -> None:
    """LongCat calls the hooks of its two modules one after the other."""
    names = [f"model.layers.{layer}.self_attn.{module}.attn" for layer in (2, 10) for module in (0, 1)]
    rank = make_rank(config, [KVCacheGroupSpec([names[i] for i in (3, 0, 2, 1)], MLA)])
    assert [layer.name for layer in rank.layout.layers] == names


def test_groups_share_the_memory(config: Any) -> None:
    groups = [KVCacheGroupSpec([name(0), name(2)], FULL), KVCacheGroupSpec([name(1), name(3)], SLIDING)]
    rank = make_rank(config, groups)
    layers = rank.layout.layers
    assert [layer.group for layer in layers] == [0, 1, 0, 1]
    assert layers[0].parts == layers[1].parts
    assert [group.kind for group in rank.layout.groups] == ["full_attention", "sliding_window 64"]
    assert len(rank.memory) == 1


def test_a_window_that_a_drafter_reads_behind_is_another_kind(config: Any) -> None:
    rank = make_rank(config, [KVCacheGroupSpec([name(0)], replace(SLIDING, extra_retained_tokens=2))])
    assert [group.kind for group in rank.layout.groups] == ["sliding_window 66"]


def test_layers_of_one_group_with_pages_of_two_sizes(config: Any) -> None:
    specs = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={name(0): FULL, name(1): WIDE})
    rank = make_rank(config, [KVCacheGroupSpec([name(0), name(1)], specs)])
    sizes = [layer.page_bytes for layer in rank.layout.layers]
    assert sizes == [FULL.page_size_bytes, WIDE.page_size_bytes]
    assert_runs_are_the_tensors(rank)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_a_scheduler_block_of_several_kernel_blocks_is_one_page(config: Any, order: str) -> None:
    spec = replace(FULL, block_size=128)
    rank = make_rank(config, [layers_of(2, spec)], order=order, kernel_blocks=[32])
    assert rank.tensors[name(0)].shape[0] == 4 * BLOCKS
    assert rank.layout.layers[0].page_bytes == spec.page_size_bytes
    assert_runs_are_the_tensors(rank)


def test_padded_pages_are_read_without_the_padding(config: Any) -> None:
    spec = replace(FULL, page_size_padded=FULL.page_size_bytes + 4096)
    rank = make_rank(config, [layers_of(2, spec)])
    assert rank.layout.layers[0].page_bytes == FULL.page_size_bytes
    assert rank.layout.layers[0].parts[0].block_stride == spec.page_size_bytes
    assert_runs_are_the_tensors(rank)


def test_layers_that_share_anothers_pages_are_left_out(config: Any) -> None:
    cache, tensors = caches(config, [layers_of(2, FULL)])
    tensors[name(2)] = tensors[name(1)]
    layers = {name(layer): attention() for layer in range(3)}
    layout, _ = kv_layout(engine(layers), cache, tensors, 0)
    assert [layer.name for layer in layout.layers] == [name(0), name(1)]


def test_a_tensor_that_lies_elsewhere_is_refused(config: Any) -> None:
    cache, tensors = caches(config, [layers_of(2, FULL)])
    tensors[name(0)], tensors[name(1)] = tensors[name(1)], tensors[name(0)]
    with pytest.raises(UnsupportedConfiguration, match="bytes into its KV cache storage"):
        kv_layout(engine({name(0): attention(), name(1): attention()}), cache, tensors, 0)


def test_blocks_that_lie_elsewhere_are_refused(config: Any) -> None:
    cache, tensors = caches(config, [layers_of(1, FULL)])
    tensors[name(0)] = tensors[name(0)][::2]
    with pytest.raises(UnsupportedConfiguration, match=r"5 blocks every \d+ bytes.* LBHNC or LBNHC"):
        kv_layout(engine({name(0): attention()}), cache, tensors, 0)


def test_memory_of_another_kind_of_device_is_refused(config: Any) -> None:
    cache, tensors = caches(config, [layers_of(1, FULL)])

    class Elsewhere:
        device = torch.device("xpu:0")

        def __getattr__(self, attribute: str) -> Any:
            return getattr(tensors[name(0)], attribute)

    with pytest.raises(UnsupportedConfiguration, match="CPU and CUDA memory; this one is on xpu:0"):
        kv_layout(engine({name(0): attention()}), cache, {name(0): Elsewhere()}, 0)


# --- What two engines can copy


HEADS = 4
TABLES = [[3, 1, 4, 2]]


def ranks_of(config: Any, ranks: int, tokens: int, order: str) -> list[PagesRank]:
    groups = [layers_of(2, replace(FULL, num_kv_heads=max(1, HEADS // ranks), block_size=tokens))]
    return [
        make_rank(config, groups, order=order, rank=rank, ranks=ranks, kv_heads=HEADS)
        for rank in range(ranks)
    ]


def heads_of(rank: int, ranks: int) -> slice:
    first = rank * HEADS // ranks
    return slice(first, first + max(1, HEADS // ranks))


def compute(rank: PagesRank, values: torch.Tensor, heads: slice) -> None:
    """Writes a prompt, [layers, heads of the model, tokens, content], into the blocks of the table."""
    for layer, tensor in enumerate(rank.tensors.values()):
        tokens = tensor.shape[2]
        for logical, block in enumerate(TABLES[0][: values.shape[2] // tokens]):
            tensor[block] = values[layer, heads, logical * tokens : (logical + 1) * tokens]


@pytest.mark.parametrize(
    ("a", "b", "tokens", "orders"),
    [
        (1, 2, (32, 32), ("LBHNC", "LBHNC")),
        (4, 1, (32, 32), ("LBNHC", "LBHNC")),
        (2, 2, (32, 64), ("LBHNC", "BLNHC")),
        (1, 4, (64, 32), ("BHLNC", "LBHNC")),
        (2, 1, (32, 64), ("LHBNC", "LBNHC")),
        (8, 2, (32, 32), ("LBHNC", "LBHNC")),  # two replicas of each head
        (2, 8, (64, 32), ("LBHNC", "LHBNC")),
    ],
)
def test_each_head_of_each_token_arrives_in_its_place(
    config: Any, a: int, b: int, tokens: tuple[int, int], orders: tuple[str, str]
) -> None:
    values = torch.rand(2, HEADS, 128, 128, generator=torch.Generator().manual_seed(1))
    prefill = ranks_of(config, a, tokens[0], orders[0])
    for rank, source in enumerate(prefill):
        compute(source, values, heads_of(rank, a))
    decode = [ranks_of(config, b, tokens[1], orders[1]) for _ in range(2)]
    for rank, (target, expected) in enumerate(zip(*decode, strict=True)):
        compute(expected, values, heads_of(rank, b))
        transfer(prefill, target, rank, b, TABLES, 128)
        for layer, tensor in target.tensors.items():
            assert torch.equal(tensor, expected.tensors[layer])


@pytest.mark.parametrize(
    ("orders", "a", "b", "runs"),
    [  # of a page, from each source
        (("LBHNC", "LBHNC"), 2, 2, 1),
        (("LBHNC", "LBHNC"), 1, 2, 1),
        (("LBHNC", "LBHNC"), 2, 1, 1),
        (("LBNHC", "LBNHC"), 2, 2, 1),
        (("LBNHC", "LBNHC"), 1, 2, 32),
        (("LBHNC", "LBNHC"), 2, 2, 32 * 2),
        (("LHBNC", "LBHNC"), 1, 2, 2),
        (("BHLNC", "BHLNC"), 2, 2, 2),
    ],
)
def test_the_runs_of_a_page(config: Any, orders: tuple[str, str], a: int, b: int, runs: int) -> None:
    """The number of runs is that of the study's section "Different TP" for heads in these orders."""
    source = ranks_of(config, a, 32, orders[0])[0]
    target = ranks_of(config, b, 32, orders[1])[0]
    plan = Plan(source.layout, target.layout)
    assert sum(len(run.offsets) * len(run.layers) for run in plan.runs(0, 0)) == runs * 2
    whole = [run for run in plan.runs(0, 0) if runs == 1]
    heads = HEADS // max(a, b)
    assert all(run.page_bytes == heads * 32 * 512 for run in whole)


@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 1)])
def test_a_latent_comes_from_any_rank(config: Any, a: int, b: int) -> None:
    prefill = [make_rank(config, [layers_of(2, MLA)], rank=rank, ranks=a) for rank in range(a)]
    spec = replace(MLA, block_size=64)
    for source in prefill:
        for layer, tensor in enumerate(source.tensors.values()):
            tensor[:] = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + layer
    for index in range(b):
        target = make_rank(config, [layers_of(2, spec)], order="LBNHC", rank=index, ranks=b)
        # P has four blocks of 32. Each of D's two ranks has a part of two of them.
        assert transfer(prefill, target, index, b, TABLES, 128) == 2 * 4
        for held, tensor in target.tensors.items():
            sent = prefill[0].tensors[held][TABLES[0]].flatten(0, 2)
            assert torch.equal(tensor[TABLES[0][:2]].flatten(0, 2), sent)


# --- Compressed caches, windows of latents, and rings


@pytest.mark.parametrize("spec", [COMPRESSED, WINDOW_MLA], ids=["compressed", "window"])
@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 1)])
def test_a_compressed_or_windowed_latent_comes_from_any_rank(config: Any, spec: Any, a: int, b: int) -> None:
    prefill = [make_rank(config, [layers_of(2, spec)], rank=rank, ranks=a) for rank in range(a)]
    states = 32 // spec.tokens_per_state
    for source in prefill:
        for layer, tensor in enumerate(source.tensors.values()):
            assert tensor.shape[2] == states
            tensor[:] = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + layer
    for index in range(b):
        target = make_rank(
            config, [layers_of(2, replace(spec, block_size=64))], order="LBNHC", rank=index, ranks=b
        )
        transfer(prefill, target, index, b, TABLES, 128)
        for held, tensor in target.tensors.items():
            sent = prefill[0].tensors[held][TABLES[0]].flatten(0, 2)
            assert torch.equal(tensor[TABLES[0][:2]].flatten(0, 2), sent)


@pytest.mark.parametrize("spec", [MLA, COMPRESSED, WINDOW_MLA], ids=["mla", "compressed", "window"])
def test_a_latent_without_declared_replicas_goes_from_rank_to_rank(config: Any, spec: Any) -> None:
    group = layers_of(1, replace(spec, max_tp_shards=None))
    prefill = [make_rank(config, [group], rank=rank, ranks=2) for rank in range(2)]
    for index, source in enumerate(prefill):
        source.tensors[name(0)].fill_(index + 1)
    for index in range(2):
        target = make_rank(config, [group], rank=index, ranks=2)
        transfer(prefill, target, index, 2, TABLES, 128)
        assert torch.all(target.tensors[name(0)][TABLES[0]] == index + 1)
    one = make_rank(config, [group])
    assert "each rank of 2 its own" in misfit(prefill[0].layout, one.layout)


def test_window_whose_merged_spec_lost_its_quantization_is_copied_in_whole_blocks(config: Any) -> None:
    spec = SlidingWindowMLASpec.merge([replace(WINDOW_MLA, kv_quant_mode=KVQuantMode.NVFP4)])
    assert spec.kv_quant_mode is KVQuantMode.NONE
    for dtype, part in (("auto", "latent"), ("nvfp4", "page")):
        rank = make_rank(config, [layers_of(1, spec)], fake("FLASHINFER_MLA", kv_cache_dtype=dtype))
        assert [one.name for one in rank.layout.layers[0].parts] == [part]


def test_a_compressed_cache_of_an_unknown_backend_is_copied_in_whole_blocks(config: Any) -> None:
    def packed(_: str) -> Any:
        return attention("FLASHMLA_SPARSE_DSV4")

    rank = make_rank(config, [layers_of(2, COMPRESSED)], packed)
    (part,) = rank.layout.layers[0].parts
    assert (part.name, part.run_bytes) == ("page", COMPRESSED.page_size_bytes)
    longer = make_rank(config, [layers_of(2, replace(COMPRESSED, block_size=64))], packed)
    with pytest.raises(Misfit, match="format"):
        Plan(rank.layout, longer.layout)


def test_compressed_pages_of_two_kernel_page_sizes_do_not_fit(config: Any) -> None:
    """An indexer's kernel page has 64 tokens on one GPU and 128 on another, keys first, then scales."""

    def bound(rows: int) -> Any:
        page = torch.empty((1, rows, MLA.head_size), dtype=torch.float32)
        return make_rank(config, [layers_of(1, COMPRESSED)], fake("DEEPSEEK_V41_INDEXER", kv_cache=page))

    whole, half = bound(8), bound(4)
    Plan(half.layout, bound(4).layout)
    assert "in kernel pages of 9216 bytes" in misfit(half.layout, whole.layout)
    assert "kernel pages" not in layer_format(whole)


def test_another_number_of_tokens_a_state_is_another_format(config: Any) -> None:
    ranks = [
        make_rank(config, [layers_of(1, replace(MLA, tokens_per_state=tokens))], order="LBNHC")
        for tokens in (4, 8)
    ]
    with pytest.raises(Misfit, match="8 tokens a state"):
        Plan(ranks[0].layout, ranks[1].layout)


def test_the_padding_of_compressed_pages_is_left_out(config: Any) -> None:
    spec = replace(COMPRESSED, head_size=146, dtype=torch.float32, alignment=576)
    rank = make_rank(config, [layers_of(2, spec)])
    (part,) = rank.layout.layers[0].parts
    assert rank.layout.layers[0].page_bytes == 146 * 4 * 8
    assert part.block_stride == spec.page_size_bytes > 146 * 4 * 8


def test_a_ring_is_one_row_whatever_the_prompts_length(config: Any) -> None:
    groups = [KVCacheGroupSpec([name(0)], FULL), KVCacheGroupSpec([name(1)], RING)]
    rank, target = (make_rank(config, groups, order="BLHNC") for _ in range(2))
    kinds = [(group.block_size, group.kind) for group in rank.layout.groups]
    assert kinds == [(32, "full_attention"), (0, "ring of open keys")]
    assert rank.layout.layers[1].page_bytes == RING.page_size_bytes
    for tokens in (1, 7, 96):
        ring = torch.rand(rank.tensors[name(1)][2].shape)
        rank.tensors[name(1)][2] = ring
        transfer([rank], target, 0, 1, [[3, 1, 4][: -(-tokens // 32)], [2]], tokens)
        assert torch.equal(target.tensors[name(1)][2], ring)


def test_rings_of_two_lengths_do_not_fit(config: Any) -> None:
    """A key's place is its position modulo the length, so no run of bytes corresponds."""
    short, long = (
        make_rank(config, [KVCacheGroupSpec([name(0)], replace(RING, block_size=size))]) for size in (8, 16)
    )
    with pytest.raises(Misfit, match="format"):
        Plan(short.layout, long.layout)


@pytest.mark.parametrize(("shards", "fits"), [(None, False), (1, True)])
def test_a_ring_fits_another_number_of_ranks_if_all_ranks_have_the_same(
    config: Any, shards: int | None, fits: bool
) -> None:
    group = KVCacheGroupSpec([name(0)], replace(RING, max_tp_shards=shards))
    one, two = (make_rank(config, [group], ranks=ranks) for ranks in (1, 2))
    with nullcontext() if fits else pytest.raises(Misfit, match="format"):
        Plan(one.layout, two.layout)


# --- What a CPU's kernels make of a block


def cpu_rank(
    config: Any, isa: str, head_size: int, tokens: int, rank: int, ranks: int, dtype: torch.dtype
) -> PagesRank:
    spec = replace(
        FULL,
        num_kv_heads=HEADS // ranks,
        head_size=head_size,
        head_size_v=head_size,
        dtype=dtype,
        block_size=tokens,
    )
    return make_rank(
        config,
        [layers_of(1, spec)],
        lambda _: attention("CPU_ATTN", isa=isa),
        rank=rank,
        ranks=ranks,
        kv_heads=HEADS,
    )


def write(rank: PagesRank, isa: str, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes K and V, [tokens, heads, head size], as vLLM's CPU attention does."""
    (tensor,) = rank.tensors.values()
    blocks, heads, size, _ = tensor.shape
    planes = tensor.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
    slots = torch.tensor(
        [block * size + token for block in TABLES[0] for token in range(size)], dtype=torch.int64
    )
    kind = "fp8" if tensor.dtype == torch.uint8 else "auto"
    ops.cpu_attn_reshape_and_cache(
        k.contiguous(), v.contiguous(), *planes, slots[: len(k)], isa, kv_cache_dtype=kind
    )


@pytest.mark.skipif(not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"), reason="no CPU kernels here")
@pytest.mark.parametrize(
    ("isa", "head_size", "dtype"),
    [
        ("vec", 64, torch.float32),
        ("vec", 64, torch.bfloat16),
        ("vec16", 80, torch.float32),
        ("vec16", 80, torch.bfloat16),
        pytest.param(
            *("vec", 64, torch.uint8),
            marks=pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="fp8 needs AVX-512"),
        ),
    ],
)
def test_pages_written_by_kernels_are_copied_into_other_block_sizes_and_ranks(
    config: Any, isa: str, head_size: int, dtype: torch.dtype
) -> None:
    """K is stored by dimension and V by token, in a plane of each for every head.

    The arriving bytes are those that the same kernel would have written there.
    """
    numbers = dtype if dtype.is_floating_point else torch.float32
    k, v = torch.rand(2, 128, HEADS, head_size, generator=torch.Generator().manual_seed(1)).to(numbers)
    for (a, n), (b, m) in [((1, 32), (2, 64)), ((2, 64), (1, 32)), ((2, 64), (2, 64))]:
        prefill = [cpu_rank(config, isa, head_size, n, rank, a, dtype) for rank in range(a)]
        for rank, source in enumerate(prefill):
            write(source, isa, k[:, heads_of(rank, a)], v[:, heads_of(rank, a)])
        for rank in range(b):
            target, expected = (cpu_rank(config, isa, head_size, m, rank, b, dtype) for _ in range(2))
            write(expected, isa, k[:, heads_of(rank, b)], v[:, heads_of(rank, b)])
            runs = transfer(prefill, target, rank, b, TABLES, 128)
            each = head_size + 1  # K's dimensions, and V
            assert runs == (128 // m if (a, n) == (b, m) else 128 // 32 * HEADS // b * each)
            for one, other in zip(target.tensors.values(), expected.tensors.values(), strict=True):
                assert other.any()
                assert torch.equal(one, other)


def test_heads_that_are_packed_by_the_block_are_copied_whole(config: Any) -> None:
    """With AMX, K is groups of 16 tokens, and the columns of V run through the block."""

    def amx(tokens: int, rank: int, ranks: int) -> PagesRank:
        return cpu_rank(config, "amx", 64, tokens, rank, ranks, torch.bfloat16)

    one, two = amx(32, 0, 1), amx(32, 1, 2)
    (tensor,) = one.tensors.values()
    tensor[:] = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1))
    assert transfer([one], two, 1, 2, TABLES, 128) == 4
    assert torch.equal(two.tensors[name(0)][TABLES[0]], tensor[TABLES[0]][:, 2:])
    assert misfit(one.layout, amx(64, 0, 1).layout) == (
        f"layer {name(0)}: format: prefill engine has {layer_format(one)!r}, decode engine has "
        f"{layer_format(one).replace('blocks of 32', 'blocks of 64')!r}: {ALIKE}"
    )


def layer_format(rank: PagesRank) -> str:
    return rank.layout.layers[0].format


# --- Pages of which less is known


NVFP4 = replace(
    FULL, kv_quant_mode=KVQuantMode.NVFP4, num_head_slots=4, state_content_bytes=72, dtype=torch.uint8
)
INDEXER = replace(MLA, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)


def fake(backend: str, **more: Any) -> Callable[[str], Any]:
    return lambda _: attention(backend, **more)


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        (NVFP4, "FLASHINFER"),
        (replace(FULL, kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC, state_content_bytes=72), "TURBOQUANT"),
        (FULL, "SOMEBODY_ELSES"),
        (replace(FULL, num_head_slots=2, state_content_bytes=256), "FLASH_ATTN"),  # ROCm's shuffled pages
    ],
    ids=["nvfp4", "turboquant", "unknown", "shuffled"],
)
def test_indivisible_pages_go_from_rank_to_rank(config: Any, spec: Any, backend: str) -> None:
    def make(rank: int, ranks: int, block_size: int = 32) -> PagesRank:
        groups = [layers_of(2, replace(spec, block_size=block_size))]
        return make_rank(config, groups, fake(backend), rank=rank, ranks=ranks, kv_heads=4)

    prefill = [make(rank, 2) for rank in range(2)]
    for source in prefill:
        for tensor in source.tensors.values():
            tensor.view(torch.uint8).random_(generator=torch.Generator().manual_seed(id(source)))
    for index in range(2):
        target = make(index, 2)
        assert transfer(prefill, target, index, 2, TABLES, 128) == 2 * 4
        for layer, tensor in target.tensors.items():
            source = prefill[index].tensors[layer]
            copied, sent = (one[TABLES[0]].view(torch.uint8) for one in (tensor, source))
            assert torch.equal(copied, sent)
    for other in (make(0, 1), make(0, 4), make(0, 2, 64)):
        problem = misfit(prefill[0].layout, other.layout)
        assert "whole pages of" in problem
        assert problem.endswith(ALIKE)


def test_kernel_blocks_of_a_larger_page_are_copied_whole(config: Any) -> None:
    source, target = (
        make_rank(config, [layers_of(1, replace(FULL, block_size=n))], fake("HPC"), kernel_blocks=[32])
        for n in (32, 64)
    )
    source.tensors[name(0)].random_(generator=torch.Generator().manual_seed(1))
    assert transfer([source], target, 0, 1, TABLES, 128) == 2 * 2
    copied = target.tensors[name(0)].view(BLOCKS, 2, 2, 32, 128)[TABLES[0][:2]]
    assert torch.equal(copied.flatten(0, 1), source.tensors[name(0)][TABLES[0]])


def test_an_indexers_pages_are_whole_and_on_every_rank(config: Any) -> None:
    """The scales of a block's keys lie behind the keys."""
    layer = fake("DEEPSEEK_V32_INDEXER")
    one = make_rank(config, [layers_of(1, INDEXER)], layer)
    two = make_rank(config, [layers_of(1, INDEXER)], layer, rank=1, ranks=2)
    assert transfer([one], two, 1, 2, TABLES, 128) == 4
    other = make_rank(config, [layers_of(1, replace(INDEXER, block_size=64))], layer)
    problem = misfit(one.layout, other.layout)
    assert (
        "32 tokens x 132 bytes', decode engine has 'uint8 of DEEPSEEK_V32_INDEXER, whole pages of 64"
        in problem
    )


def test_whole_pages_in_pieces_are_refused(config: Any) -> None:
    with pytest.raises(
        UnsupportedConfiguration, match=r"2 heads x 32 tokens\) in several pieces.*VLLM_KV_CACHE_LAYOUT"
    ):
        make_rank(config, [layers_of(2, FULL)], fake("SOMEBODY_ELSES"), order="LHBNC")


def test_heads_of_an_unknown_number_are_whole_pages(config: Any) -> None:
    """A rank with one head may have a fourth of four heads, or share one of two with other ranks."""
    spec = replace(FULL, num_kv_heads=1)
    rank = make_rank(config, [layers_of(1, spec)], ranks=4, kv_heads=32)
    assert [part.name for part in rank.layout.layers[0].parts] == ["page"]
    with pytest.raises(Misfit, match="format"):
        Plan(rank.layout, make_rank(config, [layers_of(1, spec)], ranks=4, kv_heads=4).layout)


class OtherState(MambaSpec):
    """A state of a plugin, for example."""


SINKS = SinkFullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sink_len=32)
OTHER_STATE = OtherState(block_size=32, shapes=((2, 512),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        (KVCacheGroupSpec([name(0)], OTHER_STATE), f"layer {name(0)} has OtherState: this release"),
        (
            KVCacheGroupSpec([name(0)], replace(FULL, tokens_per_state=Fraction(1, 4))),
            "does not hold whole states of 1/4 tokens",
        ),
        (KVCacheGroupSpec([name(0)], replace(FULL, tokens_per_state=5)), "whole states of 5 tokens"),
        (
            KVCacheGroupSpec([name(0)], replace(WINDOW_MLA, bounded_replay=True)),
            "SlidingWindowMLASpec with bounded replay.*--no-swa-bounded-replay",
        ),
        (
            KVCacheGroupSpec(
                [name(0), name(1)],
                UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={name(0): FULL, name(1): SINKS}),
            ),
            f"layer {name(1)} has SinkFullAttentionSpec",
        ),
        (KVCacheGroupSpec([name(0)], FULL, host_resident=True), "Leave HiSparse out"),
        (KVCacheGroupSpec([name(0)], FULL, enable_kv_transfer=False), "Leave HiSparse out"),
    ],
)
def test_unknown_caches_are_refused(config: Any, group: KVCacheGroupSpec, problem: str) -> None:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
    with pytest.raises(UnsupportedConfiguration, match=f"group 0 of LlamaForCausalLM: .*{problem}"):
        check_configuration(config, cache)


@pytest.mark.parametrize(
    ("spec", "warned"),
    [
        (FULL, False),
        (COMPRESSED, False),
        (RING, False),
        (WINDOW_MLA, True),
        (replace(FULL, tokens_per_state=4), True),
    ],
)
def test_cache_without_a_right_run_is_named_at_the_start(
    config: Any, spec: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [KVCacheGroupSpec([name(0)], spec)]
    check_configuration(config, KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups))
    lines = [one.getMessage() for one in caplog.records if "no run has shown" in one.getMessage()]
    assert len(lines) == warned
    assert all(f"{name(0)} ({type(spec).__name__}" in line for line in lines)


@pytest.mark.parametrize("follows", [False, True])
def test_sleep_is_refused_when_vllm_does_not_report_it(
    config: Any, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    monkeypatch.setattr(configuration, "release", SimpleNamespace(FOLLOWS_SLEEP=follows))
    problem = pytest.raises(UnsupportedConfiguration, match="--enable-sleep-mode")
    with nullcontext() if follows else problem:
        check_configuration(config, cache)


@pytest.mark.parametrize(
    "parallel",
    [
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"enable_dbo": True},
    ],
)
def test_unsupported_parallelism_is_refused(
    config: Any, parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    check_configuration(config, cache)
    for key, value in parallel.items():
        monkeypatch.setattr(config.parallel_config, key, value)
    with pytest.raises(UnsupportedConfiguration, match="does not support"):
        check_configuration(config, cache)


def test_anothers_handshake_metadata_is_refused(config: Any) -> None:
    """vLLM's MultiConnector passes the metadata of one connector to all its connectors."""

    class Another(KVConnectorHandshakeMetadata):  # type: ignore[misc]
        pass

    connector = WriteImmConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config((FULL,), blocks=1))
    with pytest.raises(
        UnsupportedConfiguration, match=r"another connector's \(Another\): put WriteImmConnector first"
    ):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Another()})
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): DescribedRank(worker(layout(), ADDRESS))})
    assert connector.scheduler is not None
    assert connector.scheduler._prefill.address == ADDRESS


@pytest.mark.parametrize(("latent", "layout"), [(False, "LBHNC"), (True, "LBNHC")])
def test_connector_requests_the_heads_first_layout_of_vllm(
    latent: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kernels prefer tokens first."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=None),
        kv_transfer_config=SimpleNamespace(),
        model_config=SimpleNamespace(use_mla=latent),
        scheduler_config=SimpleNamespace(scheduler_cls="another"),
    )
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda _: WriteImmConnector)
    assert resolve_kv_cache_layout(config, [["LBNHC", "LBHNC"]]).name == layout
