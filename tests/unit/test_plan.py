"""Which page goes where, how many each counter sees, and what does not fit."""

from __future__ import annotations

import msgspec
import pytest
from protocol_setup import BLOCK, PAGE, layout, region_bytes, with_rows

from kv_connector.protocol.layout import (
    GroupLayout,
    GroupTarget,
    KvLayout,
    Part,
    layout_problem,
    memory_problem,
)
from kv_connector.protocol.plan import (
    ALIKE,
    LayerRun,
    Plan,
    PushLayer,
    expected_pages,
    layouts_problem,
    sources_problem,
    tables_problem,
    targets_problem,
    used_blocks,
)


def with_layer(pages: KvLayout, ordinal: int, **changes: object) -> KvLayout:
    """Of the layer, or of its one part."""
    layers = list(pages.layers)
    part = {field: changes.pop(field) for field in Part.__struct_fields__[1:] if field in changes}
    changes["parts"] = (msgspec.structs.replace(layers[ordinal].parts[0], **part),)
    layers[ordinal] = msgspec.structs.replace(layers[ordinal], **changes)
    return msgspec.structs.replace(pages, layers=tuple(layers))


def test_expected_pages_are_the_non_null_blocks_of_each_layers_group() -> None:
    groups = (GroupTarget(0, (5, 6, 7)), GroupTarget(0, (0, 0, 8)))
    # Layers take turns: full, sliding, full, sliding.
    assert expected_pages(layout(groups=(2, 2)), groups) == 8
    assert expected_pages(layout(), (GroupTarget(2, (0, 0)),)) == 0


def test_rows_have_no_null_and_do_not_depend_on_the_prompt() -> None:
    pages = with_rows(layout(groups=(2, 1)), 8)
    assert layout_problem(pages, regions=1) is None
    groups = (GroupTarget(0, (0, 5)), GroupTarget(0, (0, 7)))
    assert targets_problem(pages, groups, 2 * BLOCK) is None
    assert targets_problem(pages, (*groups[:1], GroupTarget(0, (8,))), BLOCK) is not None
    assert expected_pages(pages, groups) == 2 * 1 + 2
    assert used_blocks(pages.groups[1], 0, (0, 7)) == {0: 0, 1: 7}
    fewer = with_rows(pages, 4)
    problem = tables_problem(pages, fewer) or layouts_problem(pages, fewer)
    assert problem is None, "how many there are is each side's affair"
    problem = tables_problem(pages, layout(groups=(2, 1)))
    assert problem is not None
    assert "prefill has full of 16 tokens a block, rows of state, decode has full of 16" in problem
    assert memory_problem(pages, [region_bytes(pages)]) is None


def test_a_plan_takes_one_run_for_layers_of_one_geometry() -> None:
    source, target = layout(num_blocks=64), layout(num_blocks=32)
    layers = (PushLayer(0, 0, 0), PushLayer(1, 64 * PAGE, 32 * PAGE))
    assert Plan(source, target).runs(0, 0) == (LayerRun(0, 0, PAGE, PAGE, PAGE, layers),)


def test_a_plan_keeps_groups_regions_and_strides_apart() -> None:
    source = layout(groups=(2, 2))
    target = with_layer(layout(groups=(2, 2), stride=2 * PAGE), 2, region=1, offset=4096)
    plan = Plan(source, target)
    assert [[layer.ordinal for layer in run.layers] for run in plan.runs(0, 0)] == [[0], [2]]
    assert [[layer.ordinal for layer in run.layers] for run in plan.runs(1, 1)] == [[1, 3]]
    first, moved = plan.runs(0, 0)
    assert (first.target_region, moved.target_region) == (0, 1)
    assert (first.source_stride, first.target_stride) == (PAGE, 2 * PAGE)
    assert moved.layers[0].target_offset == 4096


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        (layout(num_blocks=0), "group 0 has 0 blocks"),
        (msgspec.structs.replace(layout(), layers=()), "no layers"),
        (with_layer(layout(), 1, name="layer0"), "two layers"),
        (with_layer(layout(), 1, group=1), "layer1 names group 1 of 1"),
        (with_layer(layout(), 1, group=-1), "layer1 names group -1 of 1"),
        (with_layer(layout(), 0, region=1), "layer0 names memory region 1 of 1"),
        (with_layer(layout(), 0, region=-1), "layer0 names memory region -1 of 1"),
        (with_layer(layout(), 0, offset=-64), "layer0 begins at -64"),
        (with_layer(layout(), 0, run_bytes=0), "layer0 has runs of 0 bytes"),
        (
            with_layer(layout(), 0, block_stride=PAGE - 1),
            f"layer0 spaces its runs of {PAGE} bytes so that they overlap",
        ),
        (msgspec.structs.replace(layout(), groups=(GroupLayout(64, -1, "full"),)), "blocks of -1 tokens"),
    ],
)
def test_an_inconsistent_layout_is_named(pages: KvLayout, words: str) -> None:
    problem = layout_problem(pages, regions=1)
    assert problem is not None
    assert words in problem


def test_our_own_pages_must_lie_in_their_memory() -> None:
    need = region_bytes(layout())
    assert memory_problem(layout(), [need]) is None
    problem = memory_problem(layout(), [need - 1])
    assert problem == f"memory region 0 has {need - 1} bytes, its layers need {need}"
    assert memory_problem(layout(), []) is not None


def test_places_may_differ_between_the_sides_but_pages_may_not() -> None:
    ours = layout(groups=(2, 1))
    moved = with_layer(layout(groups=(2, 1), num_blocks=7, stride=4 * PAGE), 1, offset=1 << 20)
    assert layouts_problem(ours, moved) is None
    for changes, words in (
        (
            {"group": 0},
            "layer layer1: kind: prefill has sliding_window, decode has full: "
            "keep the same windows on both sides",
        ),
        (
            {"run_bytes": 32},
            "layer layer1: part page: bytes a run: prefill has 64, decode has 32: "
            "serve the same model on both sides",
        ),
        (
            {"format": "fp8"},
            f"layer layer1: format: prefill has '', decode has 'fp8': {ALIKE}",
        ),
    ):
        assert layouts_problem(ours, with_layer(ours, 1, **changes)) == words
    fewer = msgspec.structs.replace(ours, layers=ours.layers[:2])
    assert layouts_problem(ours, fewer) is None, "nobody asks for the rest"
    assert layouts_problem(fewer, ours) is None, "the rest may come from somewhere else"
    problem = "group of layer layer1: prefill has 1, decode has 0"
    assert tables_problem(ours, with_layer(ours, 1, group=0)) == problem
    problem = tables_problem(ours, layout(groups=(3,)))
    assert problem is not None
    assert problem.startswith("KV groups: prefill has full of 16")


def test_each_layer_comes_from_one_source() -> None:
    pages = layout(groups=(3,))
    assert sources_problem(pages, [(0, 1, 2)]) is None
    assert sources_problem(pages, [(2,), (), (1, 0)]) is None
    problem = "0 of 2 prefill engines have layer layer1, not one"
    assert sources_problem(pages, [(0,), (2,)]) == problem
    assert sources_problem(pages, [(0, 1), (1, 2)]) == problem.replace("0", "2", 1)


def test_a_plan_finds_its_layers_by_name() -> None:
    target = layout(groups=(3,), num_blocks=32)
    source = msgspec.structs.replace(layout(groups=(3,)), layers=layout(groups=(3,)).layers[:0:-1])
    plan = Plan(source, target)
    assert plan.layers == (2, 1)
    (run,) = plan.runs(0, 0)
    assert run.layers == (PushLayer(0, 128 * PAGE, 64 * PAGE), PushLayer(1, 64 * PAGE, 32 * PAGE))


def test_targets_must_fit_the_layout_and_the_prompt() -> None:
    pages = layout(num_blocks=8)
    assert targets_problem(pages, (GroupTarget(1, (7, 0)),), 3 * BLOCK) is None
    assert targets_problem(pages, (GroupTarget(0, (7,)),), 1) is None
    # Blocks behind the prompt are fine as long as nothing is wanted there.
    assert targets_problem(pages, (GroupTarget(0, (7, 0, 0)),), BLOCK) is None
    for groups, tokens, words in (
        ((), BLOCK, "has 0 KV groups, the layout 1"),
        ((GroupTarget(0, (8,)),), BLOCK, "block 8 of 8"),
        ((GroupTarget(0, (6, 7)),), BLOCK, "behind the 1 that 16 tokens fill"),
        ((GroupTarget(3, (6,)),), 2 * BLOCK, "behind the 2 that 32 tokens fill"),
    ):
        problem = targets_problem(pages, groups, tokens)
        assert problem is not None
        assert words in problem
