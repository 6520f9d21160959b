"""The report of `kv-connector doctor --model` about a model and a pair, as JSON or as findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kv_connector.cli.common.findings import Finding, Verdict
from kv_connector.cli.fit.layout import EngineShape, Unstartable, engine
from kv_connector.cli.fit.model import Attention, Model, RecurrentState, read_model
from kv_connector.cli.fit.pair import RankCost, costs, problems, remedy
from kv_connector.cli.fit.side import ORDERS, FitSide

# Kinds of layers for which docs/compatibility.md has no tested pair of engines.
_UNTRIED = {
    "MAMBA1": "Mamba1 was never tested. Compare tokens first",
    "chunked_local_attention": "chunked local attention was never tested. Compare tokens first",
}


class SideReport(msgspec.Struct, frozen=True):
    ranks: int
    """Ranks of each data-parallel engine."""
    engines: int
    block_tokens: int
    """Tokens per block, as the engine rounds them; 0: no layer has blocks of tokens."""
    order: str
    dtype: str
    kv_cache_dtype: str


class FitReport(msgspec.Struct, frozen=True):
    architecture: str
    model_type: str
    layers: dict[str, int]
    """Number of layers by kind."""
    kv_bytes_per_token: int
    """Bytes per token of all layers with K and V, windows included, in one engine's ranks together, each head
    once."""
    state_bytes_per_request: int
    tokens: int
    fits: bool
    problems: tuple[str, ...] = ()
    prefill: SideReport | None = None
    decode: SideReport | None = None
    costs: tuple[RankCost, ...] = ()
    remedy: str | None = None
    """Settings with which pages are few writes, if they are many now."""
    notes: tuple[str, ...] = ()


def report(path: Path, prefill: FitSide, decode: FitSide, tokens: int) -> FitReport:
    """Makes the report. Raises ConfigError."""
    model = read_model(path)
    found = FitReport(
        architecture=model.architecture,
        model_type=model.kind,
        layers=dict(Counter(layer.cache.words for layer in model.layers)),
        kv_bytes_per_token=0,
        state_bytes_per_request=0,
        tokens=tokens,
        fits=False,
    )
    if model.refused is not None:
        return msgspec.structs.replace(found, problems=(model.refused,))
    engines, unstartable = [], []
    for name, side in (("prefill", prefill), ("decode", decode)):
        try:
            engines.append(engine(model, side))
        except Unstartable as error:
            unstartable.append(f"{name} does not start: {error}")
    if unstartable:
        return msgspec.structs.replace(found, problems=tuple(unstartable))
    return _judged(found, model, *engines)


def _judged(found: FitReport, model: Model, prefill: EngineShape, decode: EngineShape) -> FitReport:
    sizes = [(layer.cache, prefill.page_bytes(layer.cache, 1, ranks=1)) for layer in model.layers]
    differs = tuple(problems(prefill, decode))
    priced = () if differs else tuple(costs(prefill.ranks, decode.ranks, found.tokens))
    return msgspec.structs.replace(
        found,
        kv_bytes_per_token=sum(size for cache, size in sizes if not isinstance(cache, RecurrentState)),
        state_bytes_per_request=sum(size for cache, size in sizes if isinstance(cache, RecurrentState)),
        prefill=_side(prefill),
        decode=_side(decode),
        fits=not differs,
        problems=differs,
        costs=priced,
        remedy=remedy(prefill, decode) if any(cost.many for cost in priced) else None,
        notes=tuple(_notes(prefill, decode)),
    )


def _side(one: EngineShape) -> SideReport:
    side = one.side
    return SideReport(side.tp * side.pp, side.dp, one.block, side.order, one.dtype, one.kv_dtype)


def _notes(prefill: EngineShape, decode: EngineShape) -> Iterator[str]:
    caches = {layer.cache for one in (prefill, decode) for layer in one.layers}
    kinds = {cache.kind for cache in caches if isinstance(cache, Attention | RecurrentState)}
    yield from (note for kind, note in _UNTRIED.items() if kind in kinds)
    if any(one.kv_dtype.startswith("fp8") for one in (prefill, decode)):
        yield "the k and v scales of a KV cache in fp8 must be equal. The engines compare them"
    drafts = [sum(not layer.needed for layer in one.layers) for one in (prefill, decode)]
    if drafts[0] < drafts[1]:
        yield (
            "the prefill engine lacks layers of the decode engine's drafter: equal text, but fewer "
            "correct drafts"
        )
    if max(prefill.side.dp, decode.side.dp) > 1:
        yield "each data-parallel engine is a separate peer: a request goes from one to one"


# --- In words


def findings(found: FitReport) -> Iterator[Finding]:
    kinds = ", ".join(f"{count} layers of {kind}" for kind, count in found.layers.items())
    sizes = []
    if found.kv_bytes_per_token:
        sizes.append(f"{size(found.kv_bytes_per_token)} of KV a token")
    if found.state_bytes_per_request:
        sizes.append(f"{size(found.state_bytes_per_request)} of state a request")
    described = "; ".join(part for part in (found.architecture, kinds, ", ".join(sizes)) if part)
    yield Finding("model", Verdict.OK, described)
    for name, side in (("prefill", found.prefill), ("decode", found.decode)):
        if side is not None:
            yield Finding(name, Verdict.OK, _side_words(side))
    for problem in found.problems:
        yield Finding("pair", Verdict.FAIL, problem)
    if found.fits:
        yield Finding("pair", Verdict.OK, "the decode engine can receive all that the prefill engine has")
    for cost in found.costs:
        yield Finding(
            f"decode rank {cost.rank}", Verdict.NOTE if cost.many else Verdict.OK, _cost_words(cost, found)
        )
    if any(cost.many for cost in found.costs):
        yield Finding("many writes", Verdict.NOTE, _remedy_words(found.remedy))
    for note in found.notes:
        yield Finding("note", Verdict.NOTE, note)


def _side_words(side: SideReport) -> str:
    parts = [f"{side.ranks} rank{'s' * (side.ranks > 1)}"]
    if side.engines > 1:
        parts[0] += f" in each of {side.engines} engines"
    if side.block_tokens:
        parts.append(f"blocks of {side.block_tokens} tokens, {ORDERS[side.order]}")
    parts.append(
        side.dtype if side.kv_cache_dtype == side.dtype else f"{side.dtype}, KV in {side.kv_cache_dtype}"
    )
    return ", ".join(parts)


def _cost_words(cost: RankCost, found: FitReport) -> str:
    ranks = f"prefill rank{'s' * (len(cost.sources) > 1)} {', '.join(map(str, cost.sources))}"
    writes = f"{cost.writes:,} writes of {size(cost.nbytes // max(cost.writes, 1))} on average"
    pieces = "one for each layer and block"
    if cost.page_writes > 1:
        pieces = f"up to {cost.page_writes} for a layer and block, of {size(cost.least_bytes)} and more"
    return f"from {ranks}: {size(cost.nbytes)} of {found.tokens:,} tokens, in {writes}: {pieces}"


def _remedy_words(remedy: str | None) -> str:
    if remedy is None:
        return (
            "small writes cost time. Start both engines with the same parallelism, block size and "
            "memory order"
        )
    return f"small writes cost time. Set {remedy}, and they are few"


def size(nbytes: int) -> str:
    """Formats a size with at least three digits: "1.5 MiB"."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.3g} {unit}"
