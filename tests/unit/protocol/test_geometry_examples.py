"""The number of runs of pairs of geometries, the ranks that send them, and the texts of refusals."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from protocol_setup import misfit

from kv_connector.protocol.pages.geometry import (
    Piece,
    Place,
    Units,
    convolution_state,
    head_major,
    in_kernel_blocks,
    latent,
    opaque_page,
    recurrent_state,
    token_major,
    units_of_rank,
    vector_planes,
)
from kv_connector.protocol.pages.layout import (
    MAX_PARTS,
    Axis,
    GroupLayout,
    GroupTarget,
    KvLayout,
    LayerLayout,
    Part,
    Shard,
    layout_problem,
)
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.plans.runs import Misfit
from kv_connector.protocol.plans.sources import Holders, choose_sources, draws
from kv_connector.protocol.wire.messages import Rank, Wants

# Tokens of a block, bytes of one token of a head, and bytes of one token of a K or V plane.
N, C, HEAD = 16, 4, 8
BLOCKS = 32
Parts = Callable[[Units, int], tuple[Part, ...]]  # by units and tokens of a block


def one_layer(parts: tuple[Part, ...], block_size: int = N, **changes: object) -> KvLayout:
    layer = LayerLayout("layer", 0, "float16", parts)
    kind = "full" if block_size else "state"
    return KvLayout((GroupLayout(BLOCKS, block_size, kind),), (msgspec.structs.replace(layer, **changes),))


def heads_first(units: Units, tokens: int) -> tuple[Part, ...]:
    return head_major(Place(0, 0, units.count * tokens * C), units, tokens, C)


def tokens_first(units: Units, tokens: int) -> tuple[Part, ...]:
    return token_major(Place(0, 0, units.count * tokens * C), units, tokens, C)


def heads_outside(units: Units, tokens: int) -> tuple[Part, ...]:
    """LHBNC."""
    return head_major(Place(0, 0, tokens * C), units, tokens, C, head_stride=BLOCKS * tokens * C)


def planes(units: Units, tokens: int) -> tuple[Part, ...]:
    return vector_planes(Place(0, 0, units.count * 2 * tokens * HEAD), units, tokens, HEAD, 1)


def mla(units: Units, tokens: int) -> tuple[Part, ...]:
    return latent(Place(0, 0, tokens * C), tokens, C)


def state(units: Units, dims_first: bool) -> tuple[Part, ...]:
    """x by heads, B and C by groups (the same number here), and the state by heads."""
    rows, dims = 3, 2
    place = Place(0, 0, 4096)
    conv = convolution_state(
        place, [Piece(name, dims, units) for name in "xBC"], rows, 1, dims_first=dims_first
    )
    after = place.after(3 * dims * units.count * rows)
    return conv + recurrent_state(after, units, (4, 4), 2)


def states_dims_first(units: Units, tokens: int) -> tuple[Part, ...]:
    return state(units, True)


def states_rows_first(units: Units, tokens: int) -> tuple[Part, ...]:
    return state(units, False)


def on_rank(layout: KvLayout, stage: int = 0) -> Rank:
    return Rank("localhost", 1, stage, layout)


def runs_from(
    heads: int,
    prefill: tuple[int, Parts, int],
    decode: tuple[int, Parts, int],
    index: int,
    tokens: int,
) -> dict[int, int]:
    """The number of runs to D's rank ``index``, by P's rank. A side is: ranks, parts, block size."""
    a, parts, size = prefill
    sources = [on_rank(one_layer(parts(units_of_rank(heads, rank, a), size), size)) for rank in range(a)]
    b, parts, size = decode
    targets = [on_rank(one_layer(parts(units_of_rank(heads, rank, b), size), size)) for rank in range(b)]
    for rank in (*sources, *targets):
        assert layout_problem(rank.layout, 1) is None
    blocks = -(-tokens // size) if size else 1
    wanted = [GroupTarget(0, tuple(range(1, blocks + 1)))]
    return {
        rank: sum(draw.plan.counts(wanted, tokens).values())
        for rank, draw in draws(targets, index, sources).items()
        if draw.plan is not None
    }


@pytest.mark.parametrize(
    ("heads", "a", "source", "b", "target", "index", "runs"),
    [
        (8, 2, heads_first, 2, heads_first, 1, {1: 1}),
        (8, 2, heads_first, 4, heads_first, 3, {1: 1}),
        (8, 4, heads_first, 2, heads_first, 1, {2: 1, 3: 1}),
        (6, 2, heads_first, 3, heads_first, 1, {0: 1, 1: 1}),
        (6, 3, heads_first, 2, heads_first, 0, {0: 1, 1: 1}),
        (8, 2, tokens_first, 2, tokens_first, 1, {1: 1}),
        (8, 4, tokens_first, 2, tokens_first, 0, {0: N, 1: N}),
        (8, 2, tokens_first, 4, tokens_first, 0, {0: N}),
        (8, 2, heads_first, 2, tokens_first, 0, {0: 4 * N}),
        (8, 2, tokens_first, 4, heads_first, 3, {1: 2 * N}),
        (8, 2, heads_outside, 2, heads_outside, 0, {0: 4}),
        (8, 2, heads_first, 2, heads_outside, 0, {0: 4}),
        (8, 2, planes, 2, planes, 0, {0: 1}),
        (8, 4, planes, 2, planes, 0, {0: 1, 1: 1}),
        # Replicas: each head is sent once.
        (4, 8, heads_first, 2, heads_first, 0, {0: 1, 2: 1}),
        (4, 2, heads_first, 8, heads_first, 7, {1: 1}),
        (1, 2, heads_first, 4, heads_first, 3, {1: 1}),
        (1, 4, mla, 2, mla, 1, {2: 1}),
    ],
)
def test_runs_a_page_by_tensor_parallelism(
    heads: int, a: int, source: Parts, b: int, target: Parts, index: int, runs: dict[int, int]
) -> None:
    assert runs_from(heads, (a, source, N), (b, target, N), index, N) == runs
    five = {rank: 5 * times for rank, times in runs.items()}
    assert runs_from(heads, (a, source, N), (b, target, N), index, 5 * N - 1) == five


@pytest.mark.parametrize(
    ("parts", "runs"),
    [(mla, 1), (heads_first, 4), (tokens_first, 1), (planes, 4 * (HEAD + 1))],
)
def test_runs_a_granule_of_blocks_of_two_sizes(parts: Parts, runs: int) -> None:
    for sizes in ((N, 2 * N), (2 * N, N)):
        source, target = ((1, parts, size) for size in sizes)
        assert runs_from(4, source, target, 0, 3 * N) == {0: 3 * runs}
        assert runs_from(4, source, target, 0, 3 * N + 1) == {0: 4 * runs}
    assert runs_from(4, (1, parts, 4), (1, parts, 6), 0, 6) == {0: 3 * runs}, "granules of two tokens"


@pytest.mark.parametrize(
    ("parts", "equal", "divided"),
    [(states_dims_first, 1, 3 + 1), (states_rows_first, 1, 3 * 3 + 1)],
)
def test_runs_of_a_state(parts: Parts, equal: int, divided: int) -> None:
    """One page for prompts of any length: whole, or the convolution's pieces (by rows) and the state."""
    assert runs_from(4, (2, parts, 0), (2, parts, 0), 1, 1000) == {1: equal}
    assert runs_from(4, (4, parts, 0), (2, parts, 0), 1, 1000) == {2: divided, 3: divided}
    assert runs_from(4, (2, parts, 0), (4, parts, 0), 3, 1000) == {1: divided}


@pytest.mark.parametrize(
    "parts", [heads_first, tokens_first, planes, mla, states_dims_first, states_rows_first]
)
def test_equal_pages_are_one_run_whatever_they_are_made_of(parts: Parts) -> None:
    """The plan of opaque pages: one armed write for all layers of a group with equal places."""
    page = parts(Units(0, 2, 2), N)
    size = 0 if page[0].name.startswith("conv") else N
    stride = page[0].block_stride
    nbytes = one_layer(page, size).layers[0].page_bytes

    def layers(blocks: int, opaque: bool) -> KvLayout:
        layers = []
        for k in range(3):
            first = k * blocks * stride
            whole = opaque_page(Place(0, first, stride), nbytes)
            moved = tuple(msgspec.structs.replace(p, offset=p.offset + first) for p in page)
            layers.append(LayerLayout(f"layer{k}", 0, "float16", whole if opaque else moved))
        return KvLayout((GroupLayout(blocks, size, "full"),), tuple(layers))

    plan, opaque = (Plan(layers(BLOCKS, kind), layers(2 * BLOCKS, kind)) for kind in (False, True))
    assert plan.pairs == opaque.pairs
    (run,) = plan.runs(0, 0)
    assert (run.page_bytes, run.offsets, len(run.layers)) == (nbytes, ((0, 0),), 3)


def test_kernel_blocks_are_one_page() -> None:
    kernel = N // 4
    units = Units(0, 2, 2)
    small = head_major(Place(0, 0, 2 * N * C), units, kernel, C)
    split = one_layer(in_kernel_blocks(small, 4, 2 * kernel * C))
    assert layout_problem(split, 1) is None
    wanted = [GroupTarget(0, (1,))]
    assert Plan(split, split).counts(wanted, N) == {0: 1}
    assert Plan(split, one_layer(heads_first(units, N))).counts(wanted, N) == {0: 2 * 4}


def test_units_are_divided_as_tensor_parallelism_does() -> None:
    assert [units_of_rank(8, rank, 4) for rank in (0, 3)] == [Units(0, 2, 8), Units(6, 2, 8)]
    assert [units_of_rank(2, rank, 4).first for rank in range(4)] == [0, 0, 1, 1]


# --- Senders


def latent_layers(count: int) -> KvLayout:
    page = latent(Place(0, 0, N * C), N, C)
    layers = tuple(LayerLayout(f"layer{k}", 0, "float16", page) for k in range(count))
    return KvLayout((GroupLayout(BLOCKS, N, "full"),), layers)


def senders(ranks: int, decode: int, layers: int = 20, lost: Sequence[int] = ()) -> list[dict[int, int]]:
    """For each of D's ranks: P's ranks, with the number of layers that each sends."""
    layout = latent_layers(layers)
    prefill = Holders({rank: on_rank(layout) for rank in reversed(range(ranks)) if rank not in lost})
    own = [on_rank(layout)] * decode
    choices = [choose_sources(own, index, prefill) for index in range(decode)]
    for choice in choices:
        assert sorted(layer for wants in choice.values() for layer in drawn(wants)) == [*range(layers)]
    return [{rank: len(drawn(wants)) for rank, wants in choice.items()} for choice in choices]


def drawn(wants: Wants) -> dict[int, tuple[int, ...]]:
    return {layer: parts for layer, parts in enumerate(wants) if parts}


def test_replicas_share_the_work() -> None:
    assert senders(8, 8) == [{rank: 20} for rank in range(8)]
    assert senders(16, 1) == [{rank: 2 if rank < 4 else 1 for rank in range(16)}]
    assert senders(4, 2) == [{0: 10, 1: 10}, {2: 10, 3: 10}]
    assert senders(2, 8) == [{index // 4: 20} for index in range(8)]
    assert senders(3, 2) == [{0: 20}, {1: 10, 2: 10}]
    assert senders(4, 2, lost=[0, 1]) == [{2: 20}, {3: 20}], "any replica has the bytes"


def test_layers_come_from_the_stage_that_has_them() -> None:
    layout = latent_layers(4)
    halves = [msgspec.structs.replace(layout, layers=layout.layers[first:][:2]) for first in (0, 2)]
    stages = [on_rank(halves[rank // 2], rank // 2) for rank in range(4)]
    own = [on_rank(layout)] * 2
    choice = choose_sources(own, 1, Holders(dict(enumerate(stages))))
    assert {rank: drawn(wants) for rank, wants in choice.items()} == {
        1: {0: (0,), 1: (0,)},
        3: {2: (0,), 3: (0,)},
    }
    with pytest.raises(Misfit, match=r"layer layer0: prefill engine has it on stages \[0, 2\], not on one"):
        draws(own, 0, [*stages, on_rank(layout, 2)])
    with pytest.raises(Misfit, match="layer layer2: no prefill rank has it: serve the same model"):
        draws(own, 0, stages[:1])


def test_units_that_no_rank_has_are_refused() -> None:
    def rank(first: int, count: int) -> Rank:
        return on_rank(one_layer(heads_first(Units(first, count, 8), N)))

    whole = rank(0, 8)
    for ranks, words in (
        ([rank(0, 4)], "part kv of layer layer: no prefill rank has unit 4, decode engine has 0 to 7"),
        (
            [rank(0, 2), rank(4, 4)],
            "part kv of layer layer: no prefill rank has unit 2, decode engine has 0 to 7",
        ),
        ([rank(0, 4), rank(2, 6)], "prefill ranks 0, 1 have unit 2 and others, but not the same"),
    ):
        with pytest.raises(Misfit, match=words):
            draws([whole], 0, ranks)


def test_an_opaque_page_goes_to_the_rank_of_the_same_number_only() -> None:
    def engine(ranks: int) -> list[Rank]:
        return [on_rank(one_layer(opaque_page(Place(0, 0, 64), 64, (i, ranks)))) for i in range(ranks)]

    (found,) = draws(engine(2), 1, engine(2)).items()
    assert (found[0], found[1].wants) == (1, ((0,),))
    with pytest.raises(Misfit, match="units in all: prefill engine has 2, decode engine has 1"):
        draws(engine(1), 0, engine(2))


# --- Misfits

UNITS = Units(0, 2, 2)
OURS = one_layer(heads_first(UNITS, N))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            one_layer(heads_first(UNITS, N), format="fp8"),
            "format: prefill engine has 'float16', decode engine has 'fp8'",
        ),
        (one_layer(mla(UNITS, N)), "parts: prefill engine has kv, decode engine has latent"),
        (
            one_layer(head_major(Place(0, 0, 1 << 20), UNITS, N, 2 * C)),
            "part kv: bytes a run: prefill engine has 4, decode engine has 8",
        ),
        (
            one_layer(heads_first(Units(0, 2, 4), N)),
            "part kv: units in all: prefill engine has 2, decode engine has 4",
        ),
        (
            one_layer((Part("kv", 0, 0, 1 << 20, (Axis("token", N, C),), C, None),)),
            "part kv: units in all: prefill engine has 2, decode engine has no",
        ),
        (
            one_layer((Part("kv", 0, 0, 1 << 20, (Axis("shard", 2, C),), C, Shard(0, 2)),)),
            "part kv: tokens a run: prefill engine has 1, decode engine has 16",
        ),
        (
            msgspec.structs.replace(OURS, groups=(GroupLayout(BLOCKS, N, "window"),)),
            "kind: prefill engine has full, decode engine has window",
        ),
        (
            one_layer(heads_first(UNITS, 1024 * N), 1024 * N),
            "blocks of full differ too much: 16 tokens and 16384",
        ),
    ],
)
def test_layouts_that_cannot_be_copied_are_named_with_both_values(theirs: KvLayout, words: str) -> None:
    assert layout_problem(theirs, 1) is None
    assert words in misfit(OURS, theirs)


def test_pages_that_cannot_be_cut() -> None:
    pages = [one_layer(opaque_page(Place(0, 0, 64 * size), 64), size) for size in (N, 2 * N)]
    words = (
        "layer layer: part page: tokens a run: prefill engine has 16, decode engine has 32: "
        "such pages cannot be cut, start both sides with the same block size"
    )
    assert misfit(*pages) == words
    kernels = in_kernel_blocks(head_major(Place(0, 0, 12 * C), Units(0, 1, 1), 6, C), 2, 6 * C)
    words = "layer layer: part kv: its blocks of 2 x 6 tokens cannot be cut into 3"
    assert misfit(one_layer(kernels, 12), one_layer(heads_first(Units(0, 1, 1), 4), 4)) == words


def test_layouts_that_take_too_many_runs_are_refused() -> None:
    units = Units(0, 64, 64)
    source, target = one_layer(heads_first(units, 128), 128), one_layer(tokens_first(units, 128), 128)
    words = "layer layer: part kv: it takes 8192 runs of 4 bytes a granule, at most 4096 are supported"
    assert misfit(source, target) == words


def spaced(parts: tuple[Part, ...], more: int) -> tuple[Part, ...]:
    return tuple(msgspec.structs.replace(p, block_stride=p.block_stride + more) for p in parts)


# --- Layouts that no engine has


def part(**changes: object) -> Part:
    axes = (Axis("shard", 2, N * C), Axis("token", N, C))
    return msgspec.structs.replace(Part("kv", 0, 0, 2 * N * C, axes, C, Shard(0, 2)), **changes)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((), "layer layer has 0 parts"),
        ((part(), part()), "layer layer has 2 parts, or two of one name"),
        ((part(), part(name="other", offset=C)), "parts kv and other of layer layer may overlap"),
        ((part(offset=-1),), "part kv of layer layer begins at -1 bytes"),
        ((part(run_bytes=0),), "has runs of 0 bytes"),
        ((part(run_bytes=C + 1),), "spaces its runs of 5 bytes so that they overlap"),
        ((part(block_stride=2 * N * C - 1),), "spaces its runs of 4 bytes so that they overlap"),
        ((part(axes=(Axis("token", N, -C),), shard=None),), "has 16 tokens every -4 bytes"),
        ((part(axes=(Axis("token", 0, C),), shard=None),), "has 0 tokens every 4 bytes"),
        ((part(axes=(Axis("token", 1 << 60, C),), shard=None),), "tokens every 4 bytes"),
        ((part(shard=None),), "needs one shard axis together with its first shard"),
        ((part(axes=(Axis("token", N, C),)),), "needs one shard axis"),
        ((part(axes=(*part().axes, Axis("shard", 2, 1 << 20))),), "needs one shard axis"),
        ((part(shard=Shard(1, 2)),), "has units 1 to 3 of 2"),
        ((part(shard=Shard(-1, 2)),), "has units -1 to 1 of 2"),
        ((part(axes=(Axis("shard", 2, 128), Axis("token", 3, C))),), "divides blocks of 16 tokens by 3"),
        ((part(offset=(1 << 48) - 1),), "at most 281474976710656 are supported"),
        ((part(block_stride=1 << 47),), "at most 281474976710656 are supported"),
        ((part(axes=(Axis("row", 1, C),) * 7, shard=None),), "has 7 axes, at most 6 are supported"),
    ],
)
def test_a_part_that_cannot_be_is_named(parts: tuple[Part, ...], words: str) -> None:
    problem = layout_problem(one_layer(parts), 1)
    assert problem is not None
    assert words in problem


def test_a_row_has_no_tokens() -> None:
    problem = layout_problem(one_layer(heads_first(UNITS, 1), 0), 1)
    assert problem == "part kv of layer layer divides blocks of 0 tokens by 1"


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": -1},
        {"block_stride": 1 << 60},
        {"run_bytes": -1},
        {"axes": [{"what": "token", "count": 1 << 40, "stride": 1}]},
        {"axes": [{"what": "token", "count": 2, "stride": -1}]},
        {"axes": [{"what": "head", "count": 2, "stride": 1}]},
        {"axes": [{"what": "row", "count": 1, "stride": 1}] * 7},
        {"shard": {"first": -1, "total": 2}},
        {"more": 1},
    ],
)
def test_a_peers_numbers_have_bounds(changes: Mapping[str, object]) -> None:
    layout = msgspec.to_builtins(OURS)
    assert msgspec.convert(layout, KvLayout) == OURS
    layout["layers"][0]["parts"][0].update(changes)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KvLayout)


def costly(*axes: Axis, block_size: int = N) -> KvLayout:
    """A layout with as many layers as are supported, each placed differently, with runs that cannot be
    joined."""
    whole = Part("kv", 0, 0, 1 << 40, axes, C, None)
    group = GroupLayout(2, block_size, "full")
    layers = (LayerLayout(f"layer{k}", 0, "", spaced((whole,), k)) for k in range(MAX_PARTS))
    return KvLayout((group,), tuple(layers))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (costly(*(Axis("row", 32, 2 * C * 32**k) for k in reversed(range(6)))), "takes 1073741824 runs"),
        (costly(Axis("row", 1 << 32, 2 * C)), "takes 4294967296 runs of 4 bytes a granule"),
        (costly(Axis("row", 4096, 2 * C)), "more than 65536 different runs"),
        (costly(Axis("token", 1 << 20, 2 * C), block_size=1 << 20), "takes 1048576 runs"),
    ],
)
def test_a_hostile_layout_costs_little(theirs: KvLayout, words: str) -> None:
    """The layout may describe many runs, but they are never written out."""
    tracemalloc.start()
    try:
        assert layout_problem(theirs, 1) is None
        problem = misfit(theirs, theirs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert words in problem
    assert peak < 40 << 20
