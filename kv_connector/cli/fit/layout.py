"""The layouts that an engine's ranks would show at the handshake, made from its model and its options.

They equal the layouts of vLLM and ``kv_connector.vllm.model.kv_cache`` with real memory: parts, formats,
block sizes and pipeline stages. Tests compare the two. The addresses of pages are made up, because no plan
depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kv_connector.cli.fit.model import (
    Attention,
    Cache,
    ConfigError,
    Latent,
    Layer,
    Model,
    RecurrentState,
    attending,
    read_model,
)
from kv_connector.cli.fit.side import DTYPES, KV_DTYPES, FitSide
from kv_connector.protocol.pages.geometry import (
    Piece,
    Place,
    convolution_state,
    head_major,
    in_kernel_blocks,
    latent,
    recurrent_state,
    token_major,
    units_of_rank,
    vector_planes,
)
from kv_connector.protocol.pages.layout import GroupLayout, KvLayout, LayerLayout, Part
from kv_connector.protocol.pages.refused_divisions import division_problem
from kv_connector.protocol.wire.messages import Rank

# Blocks of a hybrid model are multiples of this many tokens, and their pages at least as long as its states.
_KERNEL_TOKENS = {"tokens": 16, "heads": 16, "planes": 32}
_LATENT_TOKENS = 128
# Blocks of the pool: enough that layouts pass the checks of real ones.
_BLOCKS = 2


class Unstartable(ValueError):
    """vLLM, or the connector, would refuse to start such an engine.

    The message contains the reason and the remedy.
    """


@dataclass(frozen=True)
class EngineShape:
    """One engine of a side; with data parallelism, one data-parallel engine."""

    side: FitSide
    model: Model
    dtype: str
    kv_dtype: str
    layers: tuple[Layer, ...]
    block: int  # tokens, of the first attention layer; 0: there is none

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks by number: the tensor-parallel ranks of each pipeline stage."""
        stages = range(self.side.pp)
        return tuple(
            Rank("127.0.0.1", 1, stage, self._layout(stage, rank))
            for stage in stages
            for rank in range(self.side.tp)
        )

    def page_bytes(self, cache: Cache, tokens: int, ranks: int | None = None) -> int:
        """Returns the page size of one rank; with ``ranks`` 1, of the whole model."""
        side = self.side if ranks is None else replace(self.side, tp=ranks)
        _, parts = _pages(replace(self, side=side), cache, tokens, 0, Place(0, 0, 0))
        return _nbytes(parts)

    def _layout(self, stage: int, rank: int) -> KvLayout:
        ends = _stage_ends(self.model.depth, self.side.pp)
        mine = [layer for layer in self.layers if sum(layer.index >= end for end in ends[:-1]) == stage]
        tokens = _block_tokens(self)
        groups: dict[tuple[int, str], int] = {}
        layers, offset = [], 0
        for layer in mine:
            state = isinstance(layer.cache, RecurrentState)
            kind = 0 if state else tokens[layer.cache], group_kind(layer.cache)
            group = groups.setdefault(kind, len(groups))
            size = max(self.page_bytes(layer.cache, tokens[layer.cache]), 1)
            format_, parts = _pages(self, layer.cache, tokens[layer.cache], rank, Place(0, offset, size))
            layers.append(LayerLayout(layer.name, group, format_, parts, needed=layer.needed))
            offset += _BLOCKS * size
        return KvLayout(tuple(GroupLayout(_BLOCKS, *kind) for kind in groups), tuple(layers))


def group_kind(cache: Cache) -> str:
    """Returns vLLM's name of the attention, which decides which blocks a request keeps."""
    if isinstance(cache, RecurrentState):
        return "recurrent state"
    if isinstance(cache, Latent):
        return "mla_attention"
    return f"{cache.kind} {cache.window}" if cache.window else cache.kind


def first_needed(kind: str, loaded: int) -> int:
    """Returns the first token of a group to which the token after ``loaded`` tokens attends."""
    name, _, number = kind.partition(" ")
    if name == "sliding_window":
        return max(0, loaded - int(number) + 1)
    return loaded // int(number) * int(number) if name == "chunked_local_attention" else 0


def engine(model: Model, side: FitSide) -> EngineShape:
    """Returns the engine of a side. Raises Unstartable; ConfigError if the side's drafter cannot be read."""
    problem = division_problem(side.dcp, side.pcp, side.dbo)
    if problem is not None:
        raise Unstartable(problem)
    kv_dtype = side.kv_cache_dtype or ("" if model.kv_dtype == "auto" else model.kv_dtype)
    dtype = side.dtype or model.dtype
    for name, given, known in (("dtype", dtype, DTYPES), ("kv-cache-dtype", kv_dtype or dtype, KV_DTYPES)):
        if given not in known:
            raise Unstartable(f"the checkpoint requires {given}, which is unknown here. Set {name}=")
    if side.pp > model.depth:
        raise Unstartable(f"pp={side.pp} exceeds {model.depth} layers: each stage needs one")
    layers = (*model.layers, *_drafter(model, side))
    kernel = _KERNEL_TOKENS[side.order]
    if side.block % kernel and not any(isinstance(layer.cache, Latent) for layer in layers):
        where = "on a CPU" if side.order == "planes" else "on a GPU"
        raise Unstartable(f"block={side.block}: vLLM's kernels need multiples of {kernel} {where}")
    if model.attention_heads % side.tp:
        raise Unstartable(f"tp={side.tp} does not divide {model.attention_heads} attention heads")
    for cache in dict.fromkeys(layer.cache for layer in layers):
        _check_division(cache, side.tp)
    found = EngineShape(side, model, dtype, kv_dtype or dtype, layers, 0)
    attends = [cache for cache in _caches(found) if not isinstance(cache, RecurrentState)]
    return replace(found, block=_block_tokens(found)[attends[0]]) if attends else found


def _drafter(model: Model, side: FitSide) -> list[Layer]:
    """Returns the drafter's layers, which follow the model's own, on the last stage."""
    if not side.drafter:
        return []
    if side.drafter == "mtp":
        if not model.drafters:
            raise ConfigError(f"{model.architecture} has no layers that predict more tokens (MTP)")
        attends = [layer.cache for layer in model.layers if not isinstance(layer.cache, RecurrentState)]
        indices = range(model.depth, model.depth + model.drafters)
        return [replace(attending(index, attends[-1]), needed=False) for index in indices]
    layers = read_model(Path(side.drafter)).layers
    return [
        Layer(f"draft_model.{layer.name}", model.depth + layer.index, layer.cache, needed=False)
        for layer in layers
    ]


def _check_division(cache: Cache, ranks: int) -> None:
    if isinstance(cache, Attention) and cache.heads % ranks and ranks % cache.heads:
        raise Unstartable(f"tp={ranks} and {cache.heads} KV heads: neither divides the other")
    if isinstance(cache, RecurrentState):
        for name, _, units in (*cache.pieces, ("", 0, cache.heads)):
            if units % ranks and not (name in ("B", "C") and units == 1):
                what = "groups" if name in ("B", "C") else "heads"
                raise Unstartable(f"tp={ranks} does not divide the {units} {what} of {cache.words}")


def _stage_ends(depth: int, stages: int) -> list[int]:
    """Returns the end of each pipeline stage, as vLLM divides layers.

    Surplus layers go to the last but one stage and those before it.
    """
    sizes = [depth // stages] * stages
    for place in range(depth % stages):
        sizes[-2 - place] += 1
    return [sum(sizes[: stage + 1]) for stage in range(stages)]


def _caches(engine: EngineShape) -> list[Cache]:
    return list(dict.fromkeys(layer.cache for layer in engine.layers))


def _block_tokens(engine: EngineShape) -> dict[Cache, int]:
    """Returns the tokens per block for the layers of each kind; for states, any number.

    A hybrid model has blocks so long that a page of attention has room for a state. If pages differ
    otherwise, and not all layers need the same blocks, the smaller pages hold more tokens.
    """
    side, caches = engine.side, _caches(engine)
    states = [cache for cache in caches if isinstance(cache, RecurrentState)]
    attends = [cache for cache in caches if not isinstance(cache, RecurrentState)]
    latents = any(isinstance(cache, Latent) for cache in attends)
    block = side.block or (16 if side.order != "planes" or latents else 128)
    if states and attends:
        least = max(_KERNEL_TOKENS[side.order], block, _LATENT_TOKENS if latents else 0)
        state = max(engine.page_bytes(cache, 0) for cache in states)
        token = engine.page_bytes(attends[0], 1)
        block = max(block, least * -(-state // (least * token)))
        block = -(-block // _KERNEL_TOKENS[side.order]) * _KERNEL_TOKENS[side.order]
    tokens = dict.fromkeys(caches, block)
    if states or len({group_kind(cache) for cache in attends}) > 1:
        pages = {cache: engine.page_bytes(cache, block) for cache in attends}
        largest = max(pages.values(), default=0)
        tokens |= {cache: block * (largest // page) for cache, page in pages.items() if largest % page == 0}
    return tokens


Pages = tuple[str, tuple[Part, ...]]


def _pages(engine: EngineShape, cache: Cache, tokens: int, rank: int, place: Place) -> Pages:
    """Returns the format and the parts, as ``kv_connector.vllm`` describes them."""
    if isinstance(cache, RecurrentState):
        return _state_pages(engine, cache, rank, place)
    side, element = engine.side, KV_DTYPES[engine.kv_dtype]
    numbers = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}.get(engine.kv_dtype, engine.kv_dtype)
    kernel = side.kernel if 0 < side.kernel < tokens and tokens % side.kernel == 0 else tokens
    if isinstance(cache, Latent):
        content = cache.size * element
        parts = latent(place, kernel, content)
        page = kernel * content
        words = f"{numbers}, a latent of {cache.size}"
    else:
        units = units_of_rank(cache.heads, rank, side.tp)
        content = 2 * cache.head_size * element
        page = units.count * kernel * content
        words = f"{numbers}, {cache.head_size} + {cache.head_size} a head"
        if side.order == "planes":
            parts = vector_planes(place, units, kernel, cache.head_size, element)
            words += ", in planes"
        else:
            parts = (head_major if side.order == "heads" else token_major)(place, units, kernel, content)
    return words, parts if kernel == tokens else in_kernel_blocks(parts, tokens // kernel, page)


def _state_pages(engine: EngineShape, state: RecurrentState, rank: int, place: Place) -> Pages:
    side = engine.side
    kv = DTYPES[engine.dtype]
    recurrent = side.ssm_dtype or ("float32" if side.order == "planes" else state.dtype) or engine.dtype
    rows = state.rows + (side.rows if state.drafts else 0)
    pieces = [Piece(name, dims, units_of_rank(units, rank, side.tp)) for name, dims, units in state.pieces]
    parts = convolution_state(place, pieces, rows, kv, side.conv == "DS")
    device = "cpu" if side.order == "planes" else "cuda"
    words = f"{state.kind} on {device}, a convolution of {rows} rows in {engine.dtype}, {side.conv}"
    if state.heads:
        units = units_of_rank(state.heads, rank, side.tp)
        place = place.after(_nbytes(parts))
        parts += recurrent_state(place, units, state.shape, DTYPES[recurrent])
        words += f", a state in {recurrent}"
    return words, parts


def _nbytes(parts: tuple[Part, ...]) -> int:
    return LayerLayout("", 0, "", parts).page_bytes
