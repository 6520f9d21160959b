"""From one part of a source page to the same part of a target page: which runs of bytes go where.

Both parts are sets of runs that axes space. Axis by axis, the two are brought to common steps (``_Step``: a
number of times, and the distances in the source and in the target). Steps that continue on both sides become
part of the run itself. The others are written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from kv_connector.protocol.pages.layout import Axis, GroupLayout, Part

# Runs that one part of one granule may take. The largest known number is 2,048: the K planes of 8 heads of
# 256 elements on a CPU, if the two sides' blocks differ.
MAX_PART_RUNS = 4096
# Runs of all layers placed differently, at all places of granules, before any are merged. Two such planes
# take half of it at 16 places (blocks of 512 tokens beside 32). A plan of this length is made in 0.3 s, in 9
# MB.
MAX_PLAN_RUNS = 1 << 16


class Misfit(ValueError):
    """Two layouts do not fit each other. The message explains why."""


Places = tuple[int, int]  # place of a granule in its source block, and in its target block


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Adds the name of the misfitting object to a Misfit."""
    try:
        yield
    except Misfit as misfit:
        raise Misfit(f"{what}: {misfit}") from None


def same(what: str, source: object, target: object, advice: str) -> None:
    """Raises Misfit if the two values differ. ``advice``: how to start both sides alike."""
    if source != target:
        raise Misfit(f"{what}: prefill engine has {source}, decode engine has {target}: {advice}")


class Run(NamedTuple):
    """Bytes that are contiguous on both sides, at these offsets from block 0 of their regions."""

    source_region: int
    source_stride: int  # bytes from one block to the next
    source_offset: int
    target_region: int
    target_stride: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True)
class Cut:
    """How the blocks of two groups are cut, so that each piece, a granule, lies in one block on each side.

    Granule k holds the tokens from ``k * tokens`` on. In groups of rows, each row is a granule.
    """

    tokens: int  # tokens of a granule; 0: it is a row
    source_granules: int  # granules of a block
    target_granules: int

    def of_source(self, block: int) -> range:
        """The granules of a logical block of the source."""
        return range(block * self.source_granules, (block + 1) * self.source_granules)

    def places(self, granule: int) -> Places:
        return granule % self.source_granules, granule % self.target_granules

    def all_places(self) -> list[Places]:
        """All pairs of places. The two numbers have no common divisor, so each place on one side occurs with
        each place on the other side."""
        return [self.places(granule) for granule in range(self.source_granules * self.target_granules)]


class _Step(NamedTuple):
    times: int
    source: int  # bytes
    target: int


def check_parts(source: Part, target: Part, ours: GroupLayout, theirs: GroupLayout) -> None:
    """Raises Misfit unless the runs of both parts have the same content, in any order and on any rank."""
    tokens = ours.block_size // source.places, theirs.block_size // target.places
    rows, theirs_rows = (prod(axis.count for axis in part.axes_of("row")) for part in (source, target))
    total, theirs_total = (part.shard.total if part.shard else "no" for part in (source, target))
    same("tokens a run", *tokens, "such pages cannot be cut, start both sides with the same block size")
    same("units in all", total, theirs_total, "start both sides with the same tensor parallelism")
    same("bytes a run", source.run_bytes, target.run_bytes, "serve the same model on both sides")
    advice = "serve the same model on both sides, with the same speculative decoding"
    same("rows", rows, theirs_rows, advice)


def part_runs(source: Part, target: Part, cut: Cut, places: Places) -> list[Run]:
    """The runs from one granule of a source block to one of a target block, for the shards that both have.

    Raises Misfit if that is not possible, or takes too many runs.
    """
    units = range(max(source.units.start, target.units.start), min(source.units.stop, target.units.stop))
    if not units:
        return []
    source_tokens, source_start = _granule(source, cut.source_granules, places[0])
    target_tokens, target_start = _granule(target, cut.target_granules, places[1])
    steps = [
        *_common(source_tokens, target_tokens),
        *_common(source.axes_of("row"), target.axes_of("row")),
    ]
    source_start += source.offset
    target_start += target.offset
    for ours, theirs in zip(source.axes_of("shard"), target.axes_of("shard"), strict=True):
        steps.append(_Step(len(units), ours.stride, theirs.stride))
        source_start += (units.start - source.units.start) * ours.stride
        target_start += (units.start - target.units.start) * theirs.stride
    steps, nbytes = _absorb(steps, source.run_bytes)
    if (runs := prod(step.times for step in steps)) > MAX_PART_RUNS:
        raise Misfit(
            f"it takes {runs} runs of {nbytes} bytes a granule, at most {MAX_PART_RUNS} are supported"
        )
    starts = [(source_start, target_start)]
    for step in steps:
        starts = [(s + i * step.source, t + i * step.target) for s, t in starts for i in range(step.times)]
    return [
        Run(source.region, source.block_stride, s, target.region, target.block_stride, t, nbytes)
        for s, t in starts
    ]


def merged(runs: Iterable[Run]) -> list[Run]:
    """The same bytes in the fewest runs: runs that follow each other on both sides are joined."""
    found: list[Run] = []
    for run in sorted(runs):
        if found and _continues(found[-1], run):
            found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + run.nbytes)
        else:
            found.append(run)
    return found


def _granule(part: Part, granules: int, place: int) -> tuple[list[Axis], int]:
    """The token axes within one granule of a block, and the beginning of the granule at that place."""
    left = part.places // granules  # steps within a granule, divided by those of the axes below
    inner: list[Axis] = []
    start = rest = 0
    for axis in reversed(part.axes_of("token")):
        count = min(axis.count, left)
        rest += left % count + axis.count % count
        inner.insert(0, Axis("token", count, axis.stride))
        left //= count
        place, index = divmod(place, axis.count // count)
        start += index * axis.stride * count
    if rest:
        steps = " x ".join(str(axis.count) for axis in part.axes_of("token"))
        raise Misfit(f"its blocks of {steps} tokens cannot be cut into {granules}")
    return inner, start


def _common(source: Sequence[Axis], target: Sequence[Axis]) -> list[_Step]:
    """Steps that walk two lists of axes with the same number of places together, from the inside out."""
    steps: list[_Step] = []
    ours = [(axis.count, axis.stride) for axis in source if axis.count > 1]
    theirs = [(axis.count, axis.stride) for axis in target if axis.count > 1]
    while ours and theirs:
        (n, source_stride), (m, target_stride) = ours.pop(), theirs.pop()
        count = min(n, m)
        if n % count or m % count:
            raise Misfit(f"its {source[0].what}s are divided by {n} in prefill and by {m} in decode")
        steps.append(_Step(count, source_stride, target_stride))
        if n > count:
            ours.append((n // count, source_stride * count))
        if m > count:
            theirs.append((m // count, target_stride * count))
    return steps


def _absorb(steps: Sequence[_Step], nbytes: int) -> tuple[list[_Step], int]:
    """Makes runs longer by every step that continues them on both sides."""
    left = [step for step in steps if step.times > 1]
    while (step := next((s for s in left if s.source == s.target == nbytes), None)) is not None:
        left.remove(step)
        nbytes *= step.times
    return left, nbytes


def _continues(run: Run, other: Run) -> bool:
    return other == run._replace(
        source_offset=run.source_offset + run.nbytes,
        target_offset=run.target_offset + run.nbytes,
        nbytes=other.nbytes,
    )
