"""The results of `gpu_conversations.py`: summaries of turns, goals, and the printed report.

A result is a JSON line. Its field ``kind`` is one of these:

- ``turn``: one turn, with the fields of `kv-connector bench conversations`
- ``load``: one contestant's load, summed over its turns and engines
- ``lost``: one turn whose prefill engine lost its cache
- ``out``: a contestant or a measurement without result, and the reason
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv_connector.bench.conversations.results import EngineGrowth, Turn
from kv_connector.bench.conversations.turn_numbers import TurnNumbers

Line = Mapping[str, Any]

# Upper limits of the goals, as ratios, for two GPUs and a model of 8 billion weights.
MOST_COMPUTED = 1.05
MOST_TTFT = 1.1
MOST_BETWEEN = 0.5
MOST_LOST = 0.15
TURN_HEADER = [
    "turn",
    "answers",
    "failed",
    "TTFT p50",
    "TTFT p99",
    "between p50",
    "between p99",
    "prompt",
    "cached",
    "computed",
]


def load_line(
    phase: str,
    system: str,
    turns: Sequence[Turn],
    engines: Sequence[EngineGrowth],
    seconds: float,
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """Returns the result of a load: a row for each turn number, and the engines' counters."""
    numbers = sorted({turn.turn for turn in turns})
    rows = [turn_row(str(number), [turn for turn in turns if turn.turn == number]) for number in numbers]
    rows.append(turn_row("2+", [turn for turn in turns if turn.turn > 1]))
    rows.append(turn_row("all", turns))
    complete = [turn for turn in turns if not turn.failed]
    return {
        "kind": "load",
        "phase": phase,
        "system": system,
        "seconds": round(seconds, 3),
        "interrupted": interrupted,
        "late_s": max((turn.late_s for turn in turns), default=0.0),
        "turns": rows,
        "unseen_tokens": sum(turn.unseen_tokens for turn in complete),
        "engines": [
            {
                "name": engine.name,
                "requests": engine.requests,
                "prompt": engine.prompt_tokens,
                "computed": engine.computed_tokens,
                "own cache": engine.local_hit_tokens,
                "loaded": engine.transferred_tokens,
                "bytes pushed": engine.bytes_pushed,
                "problem": engine.problem,
            }
            for engine in engines
        ],
    }


def turn_row(name: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns times in ms and mean tokens of some turns. ``cached`` includes the tokens that a prefill engine
    loaded from another engine."""
    row = TurnNumbers.of(turns)
    return {
        "turn": name,
        "answers": row.answers,
        "failed": row.failed,
        "TTFT p50": _rounded(row.ttft_p50, 2),
        "TTFT p99": _rounded(row.ttft_p99, 2),
        "between p50": _rounded(row.between_p50, 2),
        "between p99": _rounded(row.between_p99, 2),
        "prompt": _rounded(row.prompt, 1),
        "cached": _rounded(row.cached, 1),
        "computed": _rounded(row.computed, 1),
    }


def _rounded(number: float | None, digits: int) -> float | None:
    return None if number is None else round(number, digits)


@dataclass(frozen=True)
class Goal:
    """A goal and its measured value."""

    name: str
    limit: float
    value: float | None
    """None: a measurement is missing."""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "yes" if self.value <= self.limit else "no"


def goals(lines: Sequence[Line]) -> list[Goal]:
    """Returns all goals. A later result replaces an earlier one of the same load."""
    loads = {(line["phase"], line["system"]): line for line in lines if line["kind"] == "load"}
    later: dict[str, dict[str, Any]] = {
        system: next((row for row in line["turns"] if row["turn"] == "2+"), {})
        for (phase, system), line in loads.items()
        if phase == "chat"
    }
    ours, plain = later.get("ours", {}), later.get("plain", {})
    agent = loads.get(("agent", "ours"))
    return [
        Goal(
            "agent: prompt tokens computed by all engines, over tokens that no engine has",
            MOST_COMPUTED,
            _ratio(_computed(agent), agent["unseen_tokens"]) if agent else None,
        ),
        Goal(
            "chat, turns 2 and later: TTFT p50, over plain engines",
            MOST_TTFT,
            _ratio(ours.get("TTFT p50"), plain.get("TTFT p50")),
        ),
        Goal(
            "chat, turns 2 and later: time between tokens p99, over plain engines",
            MOST_BETWEEN,
            _ratio(ours.get("between p99"), plain.get("between p99")),
        ),
        Goal(
            "lost cache: TTFT p50 with the prefix loaded, over recomputed",
            MOST_LOST,
            _ratio(_lost(lines, "ours", "loaded"), _lost(lines, "ours", "recomputed")),
        ),
    ]


def _computed(load: Line) -> float | None:
    """Returns the prompt tokens that all engines computed; None: one of them does not report it."""
    counts = [engine["computed"] for engine in load["engines"]]
    return None if not counts or None in counts else sum(counts)


def _lost(lines: Sequence[Line], system: str, case: str) -> float | None:
    times = [
        line["ttft_ms"]
        for line in lines
        if line["kind"] == "lost" and line["system"] == system and line["case"] == case
    ]
    return statistics.median(times) if times else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def report(lines: Sequence[Line]) -> str:
    """Returns the tables of all results, then the goals."""
    return "\n".join([*_loads(lines), *_losses(lines), *_missing(lines), *_goals(lines)])


def _loads(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if line["kind"] != "load":
            continue
        cut = ", cut by its time limit" if line["interrupted"] else ""
        yield f"\n{line['phase']}, {line['system']}: {line['seconds']:.1f} s{cut}; times in ms, mean tokens"
        yield "  " + " ".join(f"{name:>11}" for name in TURN_HEADER)
        for row in line["turns"]:
            yield "  " + " ".join(f"{_cell(row[name]):>11}" for name in TURN_HEADER)
        for engine in line["engines"]:
            yield "  " + ", ".join(f"{name} {_cell(value)}" for name, value in engine.items() if value)
        for name, value in line.get("counters", {}).items():
            yield f"  {name} {_cell(value)}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _losses(lines: Sequence[Line]) -> Iterator[str]:
    found = [line for line in lines if line["kind"] == "lost"]
    if not found:
        return
    yield "\nlost cache: TTFT in ms of the next turn, median and all rounds"
    for system, case in dict.fromkeys((line["system"], line["case"]) for line in found):
        rounds = [line for line in found if (line["system"], line["case"]) == (system, case)]
        times = [line["ttft_ms"] for line in rounds]
        cached = [line["cached_tokens"] for line in rounds]
        each = " ".join(f"{one:.1f}" for one in times)
        yield (
            f"  {system}, {case}: {statistics.median(times):.1f} ({each}); "
            f"prompt {rounds[0]['prompt_tokens']:,} tokens, of which the prefill engine did not compute "
            f"{', '.join(map(_cell, cached))}"
        )


def _missing(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if line["kind"] == "out":
            reason = line["reason"].partition("\n")[0]
            yield f"\nnot measured: {line['system']}, {line['phase']}: {reason}"


def _goals(lines: Sequence[Line]) -> Iterator[str]:
    yield "\ngoals"
    for goal in goals(lines):
        value = "-" if goal.value is None else f"{goal.value:.3f}"
        yield f"  {goal.verdict}: {goal.name}: {value} (at most {goal.limit:g})"
