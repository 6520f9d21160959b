"""The numbers of some turns: times and mean tokens."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from kv_connector.bench.conversations.results import Turn
from kv_connector.bench.records import percentile


class TurnNumbers(msgspec.Struct, frozen=True):
    """Numbers of the complete turns. None: no turn has this number."""

    answers: int
    failed: int
    ttft_p50: float | None
    """Times are in milliseconds."""
    ttft_p99: float | None
    between_p50: float | None
    """Time between two tokens."""
    between_p99: float | None
    prompt: float | None
    """Tokens are means per turn."""
    cached: float | None
    """Mean of the turns whose answer reports it. The same turns count for `computed`."""
    computed: float | None
    new: float | None
    answer: float | None

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> TurnNumbers:
        complete = [turn for turn in turns if not turn.failed]
        first = [turn.ttft_ms for turn in complete]
        gaps = [gap for turn in complete for gap in turn.gaps_ms]
        known = [(turn, turn.cached_tokens) for turn in complete if turn.cached_tokens is not None]
        return cls(
            answers=len(complete),
            failed=len(turns) - len(complete),
            ttft_p50=_percentile(first, 50),
            ttft_p99=_percentile(first, 99),
            between_p50=_percentile(gaps, 50),
            between_p99=_percentile(gaps, 99),
            prompt=_mean([turn.prompt_tokens for turn in complete]),
            cached=_mean([cached for _, cached in known]),
            computed=_mean([turn.prompt_tokens - cached for turn, cached in known]),
            new=_mean([turn.new_tokens for turn in complete]),
            answer=_mean([turn.answer_tokens for turn in complete]),
        )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


def _mean(values: Sequence[int]) -> float | None:
    return fmean(values) if values else None
