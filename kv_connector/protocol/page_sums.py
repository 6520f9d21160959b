"""Sums of pages, by which D checks that its pages are those of P.

D requests sums in RESERVE. P sums the pages of a transfer after its last write, while it still holds their
blocks, and sends the sums in SUMS. D sums its own pages when all have landed, before any request reads them.
So the comparison also finds pages that were overwritten after they were sent, and pages of a layer that were
sent before they were computed. The last write waits for the prompt's last layer. P does not wait until its
engine reports the end of the request. The rest of the step, the sampling and vLLM's next steps come before
that report, and D would wait for them.

A sum covers what a write moves: the runs of one layer in one granule that a LayerRun names. These bytes are
equal on both sides, whatever the layouts. Both sides list the sums in the order of the plan and of D's
blocks, so a sum needs no address. native/base/page_sum.h has the function and the probability of a collision.

A drafter's pages have no sums. P's drafter writes behind the end of the prompt, into its last block, after
the layer was signalled. D does not use these bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kv_connector.protocol.actions import CorruptPage, PagesChecked, PeerId, SummedPages
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.plans.plan import Groups, LayerRun, Plan, PushLayer
from kv_connector.protocol.plans.runs import Places
from kv_connector.protocol.plans.sources import Draw
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.protocol.wire.messages import MAX_SUMS_BYTES, Reserve, Sums

SUM_BYTES = 8

Moved = Mapping[tuple[Groups, Places], Sequence[tuple[int, int]]]
"""Blocks of P and of D, by the groups and places of the granules that lie in them."""


def source_pages(plan: Plan, moved: Moved) -> tuple[SummedPages, ...]:
    """P's pages that were written, in the order of their sums."""
    return _joined(
        SummedPages(
            layers=tuple((batch.run.source_region, layer.source_offset) for layer in batch.layers),
            blocks=batch.sources,
            stride=batch.run.source_stride,
            runs=tuple(source for source, _ in batch.run.offsets),
            run_bytes=batch.run.page_bytes,
        )
        for batch in _in_order(plan, moved)
    )


def target_pages(plan: Plan, targets: Sequence[GroupTarget], prompt_tokens: int) -> tuple[SummedPages, ...]:
    """D's pages that P writes for a request, in the order of their sums."""
    return _joined(
        SummedPages(
            layers=tuple((batch.run.target_region, layer.target_offset) for layer in batch.layers),
            blocks=batch.targets,
            stride=batch.run.target_stride,
            runs=tuple(target for _, target in batch.run.offsets),
            run_bytes=batch.run.page_bytes,
        )
        for batch in _in_order(plan, _moved(plan, plan.wanted(targets, prompt_tokens)))
    )


def sums_messages(reserve: Reserve, sums: bytes, reason: str = "") -> Iterator[Sums]:
    """The messages that carry the sums of a transfer. ``reason``: why P has none."""
    transfer_id, attempt = reserve.transfer_id, reserve.attempt
    for begin in range(0, max(len(sums), 1), MAX_SUMS_BYTES):
        yield Sums(transfer_id, attempt, begin, sums[begin : begin + MAX_SUMS_BYTES], reason)


@dataclass
class CheckedSource:
    """One worker of P whose pages D checks."""

    draw: Draw
    pages: tuple[SummedPages, ...]  # D's, in the order of the sums
    sums: bytearray = field(default_factory=bytearray)  # P's, as far as they have arrived

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        return SUM_BYTES * count(self.pages)


class PageCheck:
    """The check of one transfer's pages at D."""

    def __init__(
        self, request: DecodeRequest, sources: dict[PeerId, CheckedSource], unverified: dict[PeerId, str]
    ) -> None:
        """``unverified``: sources whose pages cannot be checked, with the reasons."""
        self._request = request
        self._sources = sources
        self._unverified = unverified
        self._ours: bytes | None = None

    @classmethod
    def of(
        cls, request: DecodeRequest, draws: Mapping[PeerId, Draw], summing: Collection[PeerId]
    ) -> PageCheck | None:
        """The check of a request's pages, or None if it wants none. ``summing``: the sources that can sum
        their pages."""
        found = {
            peer: CheckedSource(draw, pages)
            for peer, draw in draws.items()
            if draw.plan is not None
            and (pages := target_pages(draw.plan, request.groups, request.prompt_tokens))
        }
        if not found:
            return None
        sources = {peer: source for peer, source in found.items() if peer in summing}
        return cls(
            request, sources, {peer: "it runs an older release" for peer in found if peer not in sources}
        )

    @property
    def pages(self) -> tuple[SummedPages, ...]:
        """D's pages of all sources."""
        return tuple(pages for source in self._sources.values() for pages in source.pages)

    @property
    def summed_here(self) -> bool:
        """Whether D has summed its own pages, or cannot."""
        return self._ours is not None

    @property
    def complete(self) -> bool:
        """Whether all sums are there."""
        return self._ours is not None and not any(map(self.awaits, self._sources))

    def awaits(self, peer: PeerId) -> bool:
        """Whether sums of this source are still to come."""
        source = self._sources.get(peer)
        missing = source is not None and len(source.sums) < source.nbytes
        return missing and peer not in self._unverified

    def receive(self, peer: PeerId, message: Sums) -> str:
        """Takes sums of P. Returns the problem with them, or ""."""
        source = self._sources.get(peer)
        if message.reason:
            self._unverified[peer] = message.reason
        if message.reason or source is None:  # without pages it sends no sums, but the message
            return ""
        if message.first < len(source.sums):
            return ""  # it is a repetition
        if message.first > len(source.sums) or message.first + len(message.sums) > source.nbytes:
            return f"it sent other sums than those of {source.nbytes // SUM_BYTES} pages"
        source.sums += message.sums
        return ""

    def summed(self, sums: bytes, problem: str) -> None:
        """Takes the sums of D's own pages. ``problem``: why there are none."""
        self._ours = sums
        if problem:
            self._unverified |= dict.fromkeys(self._sources, problem)

    def result(self) -> PagesChecked:
        """The result of the comparison. Call it once all sums are there."""
        assert self._ours is not None
        checked = corrupt = begin = 0
        first: CorruptPage | None = None
        for peer, source in self._sources.items():
            ours = self._ours[begin : begin + source.nbytes]
            begin += source.nbytes
            if peer in self._unverified:
                continue
            checked += count(source.pages)
            if ours != source.sums:
                differing = _differing(ours, source.sums)
                first = first or self._page(peer, source, next(differing))
                corrupt += 1 + sum(1 for _ in differing)
        request, unverified = self._request, tuple(self._unverified.items())
        return PagesChecked(request.transfer_id, request.request_id, checked, corrupt, first, unverified)

    def _page(self, peer: PeerId, source: CheckedSource, number: int) -> CorruptPage:
        """The page whose sum has this number among the source's."""
        plan, request = source.draw.plan, self._request
        assert plan is not None
        wanted = plan.wanted(request.groups, request.prompt_tokens)
        for batch in _in_order(plan, _moved(plan, wanted)):
            blocks = len(batch.targets)
            if number < len(batch.layers) * blocks:
                break
            number -= len(batch.layers) * blocks
        layer, block = batch.layers[number // blocks], batch.targets[number % blocks]
        granule = next(
            granule
            for granule, target in wanted[batch.groups].items()
            if target == block and _places(plan, batch.groups, granule) == batch.places
        )
        tokens = plan.pairs[batch.groups].cut.tokens
        name = source.draw.layout.layers[layer.ordinal].name
        return CorruptPage(peer, name, block, granule * tokens, tokens)


@dataclass(frozen=True)
class _Batch:
    """The pages of one run of the plan, in the order of D's blocks."""

    groups: Groups
    places: Places
    run: LayerRun
    layers: tuple[PushLayer, ...]
    sources: tuple[int, ...]  # blocks of P
    targets: tuple[int, ...]  # blocks of D


def count(pages: Iterable[SummedPages]) -> int:
    """The number of sums."""
    return sum(len(one.layers) * len(one.blocks) for one in pages)


def _joined(batches: Iterable[SummedPages]) -> tuple[SummedPages, ...]:
    """The same pages in the same order, in few batches, each of which takes a launch on a GPU. vLLM has a
    region for each layer, so the layers come in a batch each."""
    found: list[tuple[SummedPages, list[tuple[int, int]]]] = []
    for one in batches:
        if found and _alike(found[-1][0], one):
            found[-1][1].extend(one.layers)
        else:
            found.append((one, list(one.layers)))
    return tuple(replace(one, layers=tuple(layers)) for one, layers in found)


def _alike(one: SummedPages, other: SummedPages) -> bool:
    """Whether a batch can hold both. Batches of one entry of ``Moved`` share their blocks."""
    shapes = ((pages.stride, pages.runs, pages.run_bytes) for pages in (one, other))
    return one.blocks is other.blocks and next(shapes) == next(shapes)


def _differing(ours: bytes, theirs: bytearray) -> Iterator[int]:
    """The numbers of the sums that differ."""
    pairs = zip(memoryview(ours).cast("Q"), memoryview(theirs).cast("Q"), strict=True)
    return (number for number, (our, their) in enumerate(pairs) if our != their)


def _in_order(plan: Plan, moved: Moved) -> Iterator[_Batch]:
    """The pages that have sums. Both sides go the same way. The batches of one entry of ``moved`` share their
    blocks: there may be one for each layer, and 65,536 blocks."""
    for groups, places in sorted(moved):
        blocks = sorted(moved[groups, places], key=lambda pair: pair[1])
        sources, targets = (tuple(side) for side in zip(*blocks, strict=True))
        for run in plan.runs(*groups, places):
            layers = tuple(layer for layer in run.layers if layer.ordinal not in plan.drafting)
            if layers:
                yield _Batch(groups, places, run, layers, sources, targets)


def _places(plan: Plan, groups: Groups, granule: int) -> Places:
    pair = plan.pairs[groups]
    return (0, 0) if pair.whole else pair.cut.places(granule)


def _moved(plan: Plan, wanted: Mapping[Groups, Mapping[int, int]]) -> Moved:
    """The blocks that P writes for a request with these granules. D does not know P's blocks."""
    moved: dict[tuple[Groups, Places], list[tuple[int, int]]] = {}
    for groups, granules in wanted.items():
        for granule, block in granules.items():
            moved.setdefault((groups, _places(plan, groups, granule)), []).append((0, block))
    return moved
