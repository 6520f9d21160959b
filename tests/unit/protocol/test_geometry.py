"""Two sides that divide and place the same model differently: each byte arrives once, in its place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np
from geometry_setup import (
    Cells,
    GeometryModel,
    GeometryRank,
    GeometrySide,
    content,
    make_rank,
    random_model,
    random_side,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from samples import sample

from kv_connector.protocol.pages.layout import (
    Axis,
    GroupLayout,
    GroupTarget,
    KvLayout,
    LayerLayout,
    Part,
    layout_problem,
    memory_problem,
)
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.plans.sources import Holders, choose_sources
from kv_connector.protocol.wire import messages

TOKENS = 24  # of the longest prompt
NOTHING, LOST = -1, -2  # content of a cell: D's before the transfer, P's outside of the request

EXAMPLES = sample(2200)
PAIRS = sample(10_000)
"""The least number of pairs of ranks in these examples."""


@dataclass(frozen=True)
class Engine:
    side: GeometrySide
    ranks: dict[int, GeometryRank]

    def stage(self, rank: int) -> int:
        return rank // self.side.ranks


def make_engine(model: GeometryModel, side: GeometrySide) -> Engine:
    ranks = [
        make_rank(model, side, stage, index)
        for stage in range(len(side.stages))
        for index in range(side.ranks)
    ]
    return Engine(side, dict(enumerate(ranks)))


def random_tables(random: Random, layout: KvLayout, prompt: int) -> list[list[int]]:
    """One block for each logical block that the prompt reaches. For a state, one row."""
    return [
        random.sample(range(1, group.num_blocks), -(-prompt // group.block_size))
        if group.block_size
        else [random.randrange(group.num_blocks)]
        for group in layout.groups
    ]


def fill(rank: GeometryRank, tables: list[list[int]]) -> None:
    """Computes the prompt: each of its blocks gets the model's content, also behind the prompt."""
    for memory in rank.memory:
        memory[:] = LOST
    for layer in rank.layout.layers:
        for part in layer.parts:
            cells = rank.cells[layer.name, part.name]
            units, tokens = part.units, cells.shape[2]
            values = content(layer.name, part.name, cells.shape[3], 2 * TOKENS)
            for logical, block in enumerate(tables[layer.group]):
                first = logical * tokens
                wanted = values[units.start : units.stop, first : first + tokens]
                rank.memory[part.region][cells[block]] = wanted


def targets_of(random: Random, layout: KvLayout, tables: list[list[int]], prompt: int) -> list[GroupTarget]:
    """The blocks that D wants: without those it has already, and without those outside of a window.

    A window may begin within a block, of which D then needs the later tokens alone.
    """
    targets = []
    for group, table in zip(layout.groups, tables, strict=True):
        first = random.randrange(len(table)) if group.block_size else 0
        gone = random.choice((0.0, 0.3)) if group.block_size else 0.0
        blocks = [0 if random.random() < gone else block for block in table[first:]]
        begin = first * group.block_size
        needed = random.choice((0, random.randint(begin, max(begin, prompt - 1)))) if group.block_size else 0
        targets.append(GroupTarget(first, tuple(blocks), needed))
    return targets


def execute(
    plan: Plan,
    source: GeometryRank,
    tables: list[list[int]],
    target: GeometryRank,
    targets: list[GroupTarget],
    prompt: int,
) -> tuple[Counter[int], list[Cells]]:
    """Writes as a transfer engine does. Returns the counts of each layer of D, and the writes of each of its
    cells."""
    counted: Counter[int] = Counter()
    written = [np.zeros_like(memory) for memory in target.memory]
    names = [layer.name for layer in target.layout.layers]
    for pair in plan.pairs.values():
        for granule, target_block in pair.granules(targets[pair.target], prompt).items():
            source_block = tables[pair.source][granule // pair.cut.source_granules]
            for run in pair.runs[pair.cut.places(granule)]:
                for layer in run.layers:
                    for source_offset, target_offset in run.offsets:
                        begin = layer.source_offset + source_offset + source_block * run.source_stride
                        to = layer.target_offset + target_offset + target_block * run.target_stride
                        taken = source.memory[run.source_region][begin : begin + run.page_bytes]
                        assert len(taken) == run.page_bytes
                        target.memory[run.target_region][to : to + run.page_bytes] = taken
                        written[run.target_region][to : to + run.page_bytes] += 1
                        counted[names.index(source.layout.layers[layer.ordinal].name)] += 1
    return counted, written


def expected(
    rank: GeometryRank, targets: list[GroupTarget], prompt: int, block_sizes: dict[str, int]
) -> list[Cells]:
    """D's memory after the transfer. ``block_sizes`` are P's, by layer."""
    memories = [np.full_like(memory, NOTHING) for memory in rank.memory]
    for layer in rank.layout.layers:
        target, size = targets[layer.group], rank.layout.groups[layer.group].block_size
        granule = np.gcd(size, block_sizes[layer.name])
        for part in layer.parts:
            cells = rank.cells[layer.name, part.name]
            values = content(layer.name, part.name, cells.shape[3], 2 * TOKENS)
            for logical, block in enumerate(target.blocks, target.first):
                if size > 0 and block == 0:
                    continue
                first = logical * size
                tokens = min(size, -(-(prompt - first) // granule) * granule) if size else 1
                skipped = max(target.needed // granule * granule - first, 0) if size else 0
                wanted = values[part.units.start : part.units.stop, first + skipped : first + tokens]
                memories[part.region][cells[block][:, skipped:tokens]] = wanted
    return memories


def transfer(random: Random, model: GeometryModel, source: Engine, target: Engine) -> int:
    """Transfers one request to each of D's ranks. Returns the number of pairs of ranks with a common part."""
    prompt = random.randint(1, TOKENS)
    some = source.ranks[0].layout
    tables = random_tables(random, some, prompt)
    for rank in source.ranks.values():
        fill(rank, tables)
    prefill, decode = (
        [messages.Rank("localhost", 1, side.stage(n), side.ranks[n].layout) for n in sorted(side.ranks)]
        for side in (source, target)
    )
    holders = Holders(dict(enumerate(prefill)))
    block_sizes = {
        layer.name: rank.layout.groups[layer.group].block_size
        for rank in source.ranks.values()
        for layer in rank.layout.layers
    }
    pairs = 0
    decode_tables = random_tables(random, target.ranks[0].layout, prompt)
    for number, rank in target.ranks.items():
        targets = targets_of(random, rank.layout, decode_tables, prompt)
        choice = choose_sources(decode, number, holders)
        counted: Counter[int] = Counter()
        awaited: Counter[int] = Counter()
        written = [np.zeros_like(memory) for memory in rank.memory]
        for sender, wanted in choice.items():
            plan = Plan(prefill[sender].layout, rank.layout, wanted)
            awaited.update(plan.counts(targets, prompt))
            counts, cells = execute(plan, source.ranks[sender], tables, rank, targets, prompt)
            counted += counts
            for all_of_them, these in zip(written, cells, strict=True):
                all_of_them += these
        for memory, wants, times in zip(
            rank.memory, expected(rank, targets, prompt, block_sizes), written, strict=True
        ):
            np.testing.assert_array_equal(memory, wants)
            np.testing.assert_array_equal(times, wants != NOTHING)
        assert counted == +awaited
        assert set(awaited) == set(range(len(rank.layout.layers))), "each layer comes from somewhere"
        pairs += len(choice)
    return pairs


def test_each_byte_arrives_once_and_in_its_place() -> None:
    """Covers at least PAIRS pairs of ranks, of random models, engines and requests."""
    pairs = 0

    @settings(max_examples=EXAMPLES, database=None, derandomize=True)
    @given(st.integers(0, 1 << 64))
    def check(seed: int) -> None:
        nonlocal pairs
        random = Random(seed)
        model = random_model(random)
        side = random_side(random, model)
        source = make_engine(model, side)
        target = make_engine(model, random_side(random, model, side))
        for rank in [*source.ranks.values(), *target.ranks.values()]:
            sizes = [len(memory) for memory in rank.memory]
            assert memory_problem(rank.layout, sizes) is None
        pairs += transfer(random, model, source, target)

    check()
    assert pairs >= PAIRS, pairs


@st.composite
def small_parts(draw: st.DrawFn) -> tuple[Part, ...]:
    sizes, strides = st.sampled_from((1, 2, 3, 4)), st.sampled_from((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48))
    axes = st.lists(st.builds(Axis, st.just("row"), sizes, strides), max_size=2).map(tuple)
    part = st.builds(Part, st.just(""), st.just(0), st.integers(0, 32), strides, axes, sizes, shard=st.none())
    return tuple(
        msgspec.structs.replace(part, name=str(number))
        for number, part in enumerate(draw(st.lists(part, min_size=1, max_size=3)))
    )


@settings(max_examples=sample(500), database=None, derandomize=True)
@given(small_parts(), st.integers(1, 3))
def test_accepted_layout_has_no_overlap(parts: tuple[Part, ...], blocks: int) -> None:
    layout = KvLayout((GroupLayout(blocks, 1, "full"),), (LayerLayout("layer", 0, "", parts),))
    taken = layout_problem(layout, 1) is None
    event(f"taken: {taken}")
    if not taken:
        return
    addresses: list[int] = []
    for part in parts:
        steps = [(blocks, part.block_stride), *((axis.count, axis.stride) for axis in part.axes)]
        starts = [part.offset]
        for count, stride in steps:
            starts = [start + i * stride for start in starts for i in range(count)]
        addresses += [start + byte for start in starts for byte in range(part.run_bytes)]
    assert len(set(addresses)) == len(addresses)
    assert layout.bytes_per_region() == {0: max(addresses) + 1}
    moved = Plan(layout, layout).runs(0, 0)
    assert sum(run.page_bytes * len(run.offsets) for run in moved) == len(addresses) // blocks
