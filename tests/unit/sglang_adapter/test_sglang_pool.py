"""SGLang's buffers as a layout, which determines how P and D may differ."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from protocol_setup import misfit

from kv_connector.protocol.pages.layout import GroupTarget, KvLayout, memory_problem
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.plans.sources import draws
from kv_connector.protocol.wire.messages import Rank
from kv_connector.sglang.pool import METADATA, PAGES, STATES, PoolShape, UnsupportedPool, pool_layout

PAGE_SIZE, BLOCKS, HEAD = 4, 8, 32
WIDTHS = (64, 64)
TABLE = (1 << 40, 5 * 128, WIDTHS)  # five slots


def buffers(count: int, item: int, base: int) -> tuple[list[int], list[int], list[int]]:
    return [base + (index << 20) for index in range(count)], [BLOCKS * item] * count, [item] * count


def args(item: int, planes: int, **more: Any) -> Any:
    pointers, lengths, items = buffers(planes, item, 1 << 30)
    given = {
        "kv_data_ptrs": pointers,
        "kv_data_lens": lengths,
        "kv_item_lens": items,
        "kv_layer_ids": [],
        "num_draft_entries": 0,
        "kv_cache_dtype_str": "bfloat16",
        "aux_data_lens": [5 * 64, 6 * 64],
        "aux_item_lens": list(WIDTHS),
        "swa_kv_cache_layout": None,
    }
    states = ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids")
    divided = ("dim_per_tensor", "slice_outer_counts", "conv_shard_groups")
    given |= {f"state_{name}": [] for name in (*states, *divided)}
    return SimpleNamespace(**given | more)


def shape(**more: Any) -> PoolShape:
    given = {"mla": False, "kv_heads": 4, "first_layer": 0, "rank": 0, "ranks": 1}
    return PoolShape(**given | {"page_size": PAGE_SIZE, "with_metadata": True} | more)


def heads(rank: int, ranks: int, **more: Any) -> KvLayout:
    """A rank with two layers of four KV heads."""
    item = PAGE_SIZE * max(1, 4 // ranks) * HEAD
    return pool_layout(args(item, 4, **more), shape(rank=rank, ranks=ranks), TABLE)[0]


def states(kind: str, item: int, count: int = 1, **more: Any) -> dict[str, Any]:
    pointers, lengths, items = buffers(count, item, 1 << 36)
    given = {"types": [SimpleNamespace(value=kind)], "data_ptrs": [pointers], "data_lens": [lengths]}
    given |= {"item_lens": [items], "layer_ids": [[]], "dim_per_tensor": [[]]}
    given |= {"slice_outer_counts": [[]], "conv_shard_groups": [[]]}
    return {f"state_{name}": value for name, value in (given | more).items()}


def test_k_and_v_of_a_layer_are_its_parts_and_each_buffer_is_registered_once() -> None:
    layout, memory = pool_layout(args(PAGE_SIZE * 4 * HEAD, 4), shape(), TABLE)
    assert [layer.name for layer in layout.layers] == ["layer 0", "layer 1", "metadata"]
    regions = [[part.region for part in layer.parts] for layer in layout.layers]
    assert [[memory[region].address for region in some] for some in regions] == [
        [1 << 30, (1 << 30) + (2 << 20)],
        [(1 << 30) + (1 << 20), (1 << 30) + (3 << 20)],
        [1 << 40],
    ]
    assert memory_problem(layout, [part.nbytes for part in memory]) is None
    assert [(group.num_blocks, group.block_size) for group in layout.groups] == [(8, 4), (5, 0)]
    assert (layout.groups[PAGES].null_block, layout.groups[METADATA].null_block) == (0, None)


def test_alike_a_page_is_one_run_of_k_and_one_of_v_and_the_metadata_one_write() -> None:
    targets = (GroupTarget(0, (3, 4)), GroupTarget(0, (2,)))
    plan = Plan(heads(0, 1), heads(0, 1))
    assert plan.counts(targets, 2 * PAGE_SIZE) == {0: 4, 1: 4, 2: 1}


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2), (2, 4), (2, 2), (8, 4), (4, 8)])
def test_heads_are_divided_by_other_ranks_and_the_metadata_comes_once(prefill: int, decode: int) -> None:
    """With 8 ranks and 4 heads, two ranks have the same head."""

    def ranks(count: int) -> list[Rank]:
        return [Rank("h", 1 + rank, 0, heads(rank, count)) for rank in range(count)]

    for rank in range(decode):
        came: dict[str, int] = defaultdict(int)
        mine = ranks(decode)[rank].layout
        for draw in draws(ranks(decode), rank, ranks(prefill)).values():
            for layer, numbers in zip(mine.layers, draw.wants, strict=True):
                came[layer.name] += len(numbers)
        units = len(mine.layers[0].parts[0].units)
        assert came["metadata"] == 1
        assert came["layer 0"] == 2 * max(1, units // max(1, 4 // prefill))


def test_a_stage_of_the_pipeline_has_its_layers_by_their_numbers_in_the_model() -> None:
    item = PAGE_SIZE * 4 * HEAD
    stages = [
        Rank("h", 1, 0, pool_layout(args(item, 2), shape(with_metadata=False), TABLE)[0]),
        Rank("h", 2, 1, pool_layout(args(item, 2), shape(first_layer=1), TABLE)[0]),
    ]
    decode = [Rank("d", 1, 0, heads(0, 1))]
    wants = {number: draw.wants for number, draw in draws(decode, 0, stages).items()}
    assert wants == {0: ((0, 1), (), ()), 1: ((), (0, 1), (0,))}


def test_a_latent_is_the_same_on_all_ranks() -> None:
    def latent(rank: int, ranks: int) -> KvLayout:
        return pool_layout(args(PAGE_SIZE * 64, 3), shape(mla=True, rank=rank, ranks=ranks), TABLE)[0]

    assert [part.name for part in latent(0, 1).layers[0].parts] == ["latent"]
    ranks = [Rank("h", 1 + rank, 0, latent(rank, 2)) for rank in range(2)]
    # each prefill rank sends something to D
    assert len(draws([Rank("d", 1, 0, latent(0, 1))], 0, ranks)) == 2


def test_servers_with_other_metadata_are_refused() -> None:
    other = (TABLE[0], TABLE[1], (64, 32, 32))
    layout = pool_layout(args(PAGE_SIZE * 4 * HEAD, 4), shape(), other)[0]
    assert "rows of 64, 64 bytes" in misfit(heads(0, 1), layout)
    assert "rows of 64, 32, 32 bytes" in misfit(heads(0, 1), layout)


def test_a_drafter_may_be_missing_at_prefill() -> None:
    item = PAGE_SIZE * 4 * HEAD
    pointers, lengths, items = buffers(6, item, 1 << 30)
    more = {"kv_data_ptrs": pointers, "kv_data_lens": lengths, "kv_item_lens": items, "num_draft_entries": 2}
    layout = heads(0, 1, **more)
    assert [(layer.name, layer.needed) for layer in layout.layers] == [
        ("layer 0", True),
        ("layer 1", True),
        ("draft 0", False),
        ("draft 1", False),
        ("metadata", True),
    ]
    (draw,) = draws([Rank("d", 1, 0, layout)], 0, [Rank("h", 1, 0, heads(0, 1))]).values()
    assert draw.wants == ((0, 1), (0, 1), (), (), (0,))


def test_buffers_that_sglang_leaves_out_are_left_out() -> None:
    item = PAGE_SIZE * 4 * HEAD
    pointers, lengths, items = buffers(4, item, 1 << 30)
    lengths[3] = 0
    layout = heads(0, 1, kv_data_ptrs=pointers, kv_data_lens=lengths, kv_item_lens=items)
    assert [part.name for part in layout.layers[1].parts] == ["k"]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_a_window_is_divided_by_heads(prefill: int, decode: int) -> None:
    def window(rank: int, ranks: int) -> KvLayout:
        item = PAGE_SIZE * 4 // ranks * HEAD
        return heads(rank, ranks, **states("swa", item, 2), swa_kv_cache_layout="nhd")

    layouts = [Rank("d", 1 + rank, 0, window(rank, decode)) for rank in range(decode)]
    sources = [Rank("h", 1 + rank, 0, window(rank, prefill)) for rank in range(prefill)]
    targets = (GroupTarget(0, ()), GroupTarget(0, (1,)), GroupTarget(0, (5, 6)))
    found = draws(layouts, 0, sources)
    writes = sum(sum(draw.plan.counts(targets, 0).values()) for draw in found.values() if draw.plan)
    # Two pages of two layers, in one run per token of each source's heads, and the metadata.
    assert writes == 2 * 2 * PAGE_SIZE * prefill + 1
    assert window(0, 1).groups[STATES].block_size == 0


@pytest.mark.parametrize(("pieces", "parts"), [(None, 1), ([4, 4, 8], 3)])
def test_recurrent_state_is_divided_like_in_sglang(pieces: list[int] | None, parts: int) -> None:
    def state(rank: int, ranks: int) -> KvLayout:
        given: dict[str, Any] = {"layer_ids": [[3]], "dim_per_tensor": [[16 // ranks]]}
        given |= {"slice_outer_counts": [[2]], "conv_shard_groups": [[pieces]]}
        return heads(rank, ranks, **states("mamba", 2 * 16 // ranks * 4, **given))

    layer = state(1, 2).layers[-1]
    assert (layer.name, len(layer.parts)) == ("mamba 3.0", parts)
    sources = [Rank("h", 1 + rank, 0, state(rank, 2)) for rank in range(2)]
    found = draws([Rank("d", 1, 0, state(0, 1))], 0, sources)
    targets = (GroupTarget(0, ()), GroupTarget(0, ()), GroupTarget(0, (5,)))
    writes = sum(sum(draw.plan.counts(targets, 0).values()) for draw in found.values() if draw.plan)
    assert writes == 2 * 2 * parts  # sources, rows


def test_a_state_of_which_only_the_length_is_known_takes_as_many_ranks() -> None:
    one, two = (heads(0, ranks, **states("qsa_pending", 48)) for ranks in (1, 2))
    assert misfit(two, one)


def test_a_state_that_is_more_than_rows_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedPool, match="dsa_tail: serve the model without kpool compression"):
        heads(0, 1, **states("dsa_tail", 48))


def test_heads_that_do_not_fill_a_page_are_refused() -> None:
    with pytest.raises(UnsupportedPool, match="as the model has 4 on 1 ranks"):
        pool_layout(args(PAGE_SIZE * 3, 2), shape(), TABLE)
