"""The places of pages in a plan, the number of writes that each counter expects, and misfits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from protocol_setup import BLOCK, PAGE, layout, misfit, region_bytes, with_rows

from kv_connector.protocol.pages.layout import (
    GroupLayout,
    GroupTarget,
    KvLayout,
    Part,
    layout_problem,
    memory_problem,
)
from kv_connector.protocol.plans.plan import (
    ALIKE,
    LayerRun,
    Plan,
    PushLayer,
    targets_problem,
    used_blocks,
    wants_problem,
)
from kv_connector.protocol.wire.messages import Wants


def with_layer(pages: KvLayout, ordinal: int, **changes: object) -> KvLayout:
    """The layout with changed fields of a layer, or of its one part."""
    layers = list(pages.layers)
    part = {field: changes.pop(field) for field in Part.__struct_fields__[1:] if field in changes}
    changes["parts"] = (msgspec.structs.replace(layers[ordinal].parts[0], **part),)
    layers[ordinal] = msgspec.structs.replace(layers[ordinal], **changes)
    return msgspec.structs.replace(pages, layers=tuple(layers))


def counted(pages: KvLayout, groups: Sequence[GroupTarget], tokens: int = 3 * BLOCK) -> int:
    return sum(Plan(pages, pages).counts(groups, tokens).values())


def test_non_null_blocks_of_each_layers_group_are_counted() -> None:
    groups = (GroupTarget(0, (5, 6, 7)), GroupTarget(0, (0, 0, 8)))
    # Layers alternate: full, sliding, full, sliding.
    assert counted(layout(groups=(2, 2)), groups) == 8
    assert counted(layout(), (GroupTarget(2, (0, 0)),)) == 0


def test_tokens_before_those_needed_do_not_land() -> None:
    needed = [counted(layout(), (GroupTarget(0, (5, 6, 7), first),)) for first in (0, 15, 16, 32, 47)]
    assert needed == [6, 6, 4, 2, 2]


def test_rows_have_no_null_and_do_not_depend_on_the_prompt() -> None:
    pages = with_rows(layout(groups=(2, 1)), 8)
    assert layout_problem(pages, regions=1) is None
    groups = (GroupTarget(0, (0, 5)), GroupTarget(0, (0, 7)))
    assert targets_problem(pages, groups, 2 * BLOCK) is None
    assert targets_problem(pages, (*groups[:1], GroupTarget(0, (8,))), BLOCK) is not None
    assert counted(pages, groups) == 2 * 1 + 2
    assert used_blocks(pages.groups[1], 0, (0, 7)) == {0: 0, 1: 7}
    fewer = with_rows(pages, 4)
    assert misfit(pages, fewer) == "", "how many there are is each side's affair"
    words = "layer layer1: kind: prefill engine has state, decode engine has sliding_window"
    assert misfit(pages, layout(groups=(2, 1))).startswith(words)
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
    assert misfit(ours, moved) == ""
    for changes, words in (
        (
            {"group": 0},
            "layer layer1: kind: prefill engine has sliding_window, decode engine has full: "
            "keep the same windows on both sides",
        ),
        (
            {"run_bytes": 32},
            "layer layer1: part page: bytes a run: prefill engine has 64, decode engine has 32: "
            "serve the same model on both sides",
        ),
        (
            {"format": "fp8"},
            f"layer layer1: format: prefill engine has '', decode engine has 'fp8': {ALIKE}",
        ),
    ):
        assert misfit(ours, with_layer(ours, 1, **changes)) == words
    fewer = msgspec.structs.replace(ours, layers=ours.layers[:2])
    assert misfit(ours, fewer) == "", "nobody asks for the rest"
    assert misfit(fewer, ours) == "", "the rest may come from somewhere else"


def test_groups_are_paired_by_their_layers() -> None:
    """Two sides may number groups differently, or may divide layers differently that are otherwise alike."""
    ours = layout(groups=(2, 1))
    theirs = msgspec.structs.replace(
        ours,
        groups=ours.groups[::-1],
        layers=tuple(msgspec.structs.replace(layer, group=1 - layer.group) for layer in ours.layers),
    )
    plan = Plan(ours, theirs)
    assert sorted(plan.pairs) == [(0, 1), (1, 0)]
    targets = (GroupTarget(1, (8,)), GroupTarget(0, (5, 6)))
    assert plan.wanted(targets, 2 * BLOCK) == {(0, 1): {0: 5, 1: 6}, (1, 0): {1: 8}}


@pytest.mark.parametrize(
    ("wants", "words"),
    [
        (((0,),), "HELLO requests parts of 1 layers, its layout has 2"),
        (((0,), (1,)), "HELLO requests parts (1,) of layer layer1, which has 1"),
        (((0, 0), ()), "HELLO requests parts (0, 0) of layer layer0, which has 1"),
        (((0,), (0,)), "HELLO requests layer layer1, which the prefill engine lacks"),
    ],
)
def test_plan_refuses_to_request_missing_pages(wants: Wants, words: str) -> None:
    theirs = layout()
    ours = msgspec.structs.replace(theirs, layers=theirs.layers[:1])
    assert wants_problem(ours, theirs, wants) == words
    assert wants_problem(ours, theirs, ((0,), ())) is None
