"""The verdict on the samples of a soak: each series flat or growing, as a table and as data of a picture."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak.faults import ENGINES
from tests.soak.growth import Trend, longest_life, trend
from tests.soak.processes import BYTES_OF_STATUS, CHILD, Sample

MIB = float(1 << 20)
WEEK_SECONDS = 7 * 24 * 3600.0
# Share of the run in which caches fill up and heaps find their size. Its samples are not judged.
WARM_UP = 1 / 3
# Share of the judged time that a process must live. A process that was restarted later is in its own warm-up.
SHORTEST_LIFE = 0.5
# Growth during a run that does not count: a page table here, a connection there.
RESOLUTION = {"memory": MIB, BYTES_OF_STATUS: 512.0, "vllm:kv_cache_usage_perc": 0.05}
OTHER_RESOLUTION = 2.0
# Bytes by which an API server of vLLM 0.32 may grow with each request. Without this connector it grew by
# 429 ± 12 bytes in 14 minutes of this load (tests/soak/alone.py, 2026-11-30). A prefill and a decode engine
# beside it grew by 462 ± 12 and 398 ± 10 bytes, so 70 bytes are noise.
API_SERVER_GROWTH = 500.0
# Gauges with many units also need growth by this share.
SHARE = 0.02
_COLUMNS = 12


@dataclass(frozen=True)
class Verdict:
    """The verdict on one series of one process."""

    process: str
    series: str
    trend: Trend | None
    """None: no life of the process was long enough."""
    samples: int
    requests: int
    """Requests between the first and the last judged sample."""
    seconds: float

    @property
    def word(self) -> str:
        if self.trend is None:
            return "not judged"
        return "GROWS" if self.trend.grows else "flat"

    @property
    def per_week(self) -> float:
        """Growth in a week at the pace of the run."""
        if self.trend is None or not self.seconds:
            return 0.0
        return self.trend.grown / self.seconds * WEEK_SECONDS


def judged(samples: Sequence[Sample]) -> list[Verdict]:
    """Returns a verdict for each series. Of a process that was restarted, its longest life is judged."""
    last = max((sample.at for sample in samples), default=0.0)
    warm = [sample for sample in samples if sample.at >= WARM_UP * last]
    shortest = (1 - WARM_UP) * last * SHORTEST_LIFE
    return [_verdict(process, series, found, shortest) for process, series, found in _series(warm)]


def _verdict(process: str, series: str, found: Sequence[tuple[Sample, float]], shortest: float) -> Verdict:
    life = found[longest_life([sample.pid for sample, _ in found])]
    values = [value for _, value in life]
    requests = [float(sample.requests) for sample, _ in life]
    seconds = life[-1][0].at - life[0][0].at
    share = 0.0 if series == "memory" else SHARE * abs(values[0])
    resolution = max(RESOLUTION.get(series, OTHER_RESOLUTION), share)
    if series == "memory" and process in ENGINES:
        resolution = max(resolution, API_SERVER_GROWTH * (requests[-1] - requests[0]))
    return Verdict(
        process,
        series,
        trend(requests, values, resolution) if seconds >= shortest else None,
        len(life),
        int(requests[-1] - requests[0]),
        seconds,
    )


def _series(samples: Sequence[Sample]) -> Iterator[tuple[str, str, list[tuple[Sample, float]]]]:
    """Yields (process, series, samples with their values), in the order of their first samples."""
    found: dict[tuple[str, str], list[tuple[Sample, float]]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.values.items():
            found[sample.process, name].append((sample, value))
    for (process, name), values in found.items():
        yield process, name, values


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns the verdicts as a Markdown table."""
    rows = [
        "| process | series | at first | growth for a million requests | a week at this pace | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for one in verdicts:
        found = one.trend
        if found is None:
            rows.append(f"| {one.process} | {one.series} | | | | {one.word}: {one.samples} samples |")
            continue
        scale, unit = (MIB, " MiB") if one.series == "memory" else (1.0, "")
        growth = f"{found.per_million / scale:,.0f} ± {found.error / scale:,.0f}{unit}"
        rows.append(
            f"| {one.process} | {one.series} | {found.begins / scale:,.4g}{unit} | {growth} | "
            f"{one.per_week / scale:,.0f}{unit} | {one.word} |"
        )
    return "\n".join(rows) + "\n"


def lines(verdicts: Sequence[Verdict]) -> str:
    """Returns the verdicts as JSON lines."""
    return "".join(json.dumps(_line(one)) + "\n" for one in verdicts)


def _line(one: Verdict) -> dict[str, Any]:
    line: dict[str, Any] = {"process": one.process, "series": one.series, "verdict": one.word}
    line |= {"samples": one.samples, "requests": one.requests, "seconds": round(one.seconds)}
    if one.trend is not None:
        line |= {
            "begins": one.trend.begins,
            "grown": one.trend.grown,
            "per_million_requests": one.trend.per_million,
            "standard_error": one.trend.error,
            "per_week": one.per_week,
        }
    return line


def picture(samples: Sequence[Sample], about: Mapping[str, str]) -> dict[str, Any]:
    """Returns the data of a picture for scripts/pictures, of servers and workers. ``about``: log, command,
    machine, date, method, caption."""
    last = max(sample.at for sample in samples)
    width = last / _COLUMNS
    columns = [f"{(number + 1) * width / 60:.0f}" for number in range(_COLUMNS)]
    panels = []
    for series, unit, scale in (
        ("memory", "MiB", MIB),
        ("descriptors", "descriptors", 1.0),
        ("threads", "threads", 1.0),
    ):
        drawn = []
        for process, name, found in _series(samples):
            if name != series or CHILD in process:
                continue
            parts: list[list[float]] = [[] for _ in columns]
            for sample, value in found:
                parts[min(int(sample.at / width), _COLUMNS - 1)].append(value / scale)
            medians = [round(statistics.median(part), 1) if part else None for part in parts]
            drawn.append({"name": process, "values": medians})
        panels.append(
            {
                "title": series,
                "unit": unit,
                "columns_are": "minutes",
                "columns": columns,
                "format": ".1f",
                "series": drawn,
            }
        )
    return {"kind": "lines", **about, "panels": panels}
