"""Load and measures of goodput: traces for `vllm bench serve`, the reading of its results, and tables.

The load is its dataset timed_trace. A row has a request's arrival time, its lengths, and ids. An id stands
for CHUNK tokens, which are the same wherever the id appears again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

# Tokens of a prompt per id of a trace.
CHUNK = 256
# Range of an answer's tokens, both ends included.
OUTPUT = (32, 199)


@dataclass(frozen=True)
class PromptWorkload:
    """Prompts of log-uniformly many tokens, ``low`` to ``high``, behind a shared prefix or none."""

    low: int
    high: int
    prefixes: int = 0
    prefix_tokens: int = 0

    def shorter(self, by: int) -> PromptWorkload:
        low, high, prefix = self.low // by, self.high // by, self.prefix_tokens // by
        return replace(self, low=low, high=high, prefix_tokens=prefix)


WORKLOADS = {
    "random": PromptWorkload(256, 11585),
    "prefixes": PromptWorkload(64, 2048, prefixes=8, prefix_tokens=4096),
}


def trace(
    workload: PromptWorkload, rate: float, seconds: float, seed: int, salt: int
) -> list[dict[str, Any]]:
    """Returns a Poisson process with ``rate * seconds`` arrivals in ``seconds``, as rows of a timed_trace.

    Another rate has the same requests at other times. Another salt has the same lengths and prefixes, but
    other tokens behind them. So no engine has prompts of an earlier measurement in its cache.
    """
    count = max(1, round(rate * seconds))
    times = np.sort(np.random.default_rng([seed, 1]).random(count)) * seconds
    draws = np.random.default_rng([seed, 2]).random((count, 3))
    own = np.exp(np.log(workload.low) + draws[:, 0] * np.log((workload.high + 1) / workload.low)).astype(int)
    output = OUTPUT[0] + (draws[:, 1] * (OUTPUT[1] + 1 - OUTPUT[0])).astype(int)
    prefix = (draws[:, 2] * workload.prefixes).astype(int)
    chunks = workload.prefix_tokens // CHUNK
    following = (workload.prefixes * chunks) + (salt << 32)
    rows = []
    for index in range(count):
        new = -(-int(own[index]) // CHUNK)
        shared = range(int(prefix[index]) * chunks, (int(prefix[index]) + 1) * chunks)
        row: dict[str, Any] = {"timestamp": float(times[index]), "output_length": int(output[index])}
        row["input_length"] = workload.prefix_tokens + int(own[index])
        row["hash_ids"] = [*shared, *range(following, following + new)]
        following += new
        rows.append(row)
    return rows


@dataclass(frozen=True)
class LoadObjectives:
    """Milliseconds to the first token, and between two tokens."""

    ttft: float
    between: float

    @classmethod
    def parse(cls, text: str) -> Self:
        ttft, between = map(float, text.split(":"))
        return cls(ttft, between)

    def __str__(self) -> str:
        return f"{self.ttft:g}:{self.between:g}"


@dataclass(frozen=True)
class AnswerTimes:
    """Times of one answer in milliseconds.

    ``gaps`` are between events: tokens in one event have no gap between them.
    """

    ttft: float
    gaps: Sequence[float]
    tokens: int

    def meets(self, objectives: LoadObjectives) -> bool:
        """Returns whether the objectives are met by the rule of `vllm bench serve --goodput`: the mean time
        per token."""
        token = sum(self.gaps) / (self.tokens - 1) if self.tokens > 1 else 0.0
        return self.ttft <= objectives.ttft and token <= objectives.between


def answers(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[AnswerTimes]:
    """Returns the complete answers in a detailed result of `vllm bench serve`, which counts cut-off ones as
    completed."""
    whole = []
    for row, ttft, gaps, tokens, error in zip(
        rows, result["ttfts"], result["itls"], result["output_lens"], result["errors"], strict=True
    ):
        if ttft > 0 and not error and tokens == row["output_length"]:
            whole.append(AnswerTimes(ttft * 1e3, [gap * 1e3 for gap in gaps], tokens))
    return whole


def lateness(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the longest delay of a request behind its time in the trace, in milliseconds."""
    sent, due = np.array(result["start_times"]), np.array([row["timestamp"] for row in rows])
    after = sent - due
    return float((after - after.min()).max() * 1e3)


def spread(values: Sequence[float]) -> dict[str, float]:
    p50, p90, p99, most = np.percentile(values or [np.nan], [50, 90, 99, 100])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(most)}


def summary(
    whole: Sequence[AnswerTimes], asked: int, seconds: float, pairs: Sequence[LoadObjectives]
) -> dict[str, Any]:
    """Makes a line of the table.

    ``holds``: a pair of objectives that the 99th percentiles of all requests and of all gaps meet.
    """
    ttft, gaps = spread([a.ttft for a in whole]), spread([gap for a in whole for gap in a.gaps])
    met = {str(pair): sum(answer.meets(pair) for answer in whole) / seconds for pair in pairs}
    holds = {}
    for pair in pairs:
        met_p99 = ttft["p99"] <= pair.ttft and gaps["p99"] <= pair.between
        holds[str(pair)] = met_p99 and len(whole) == asked
    line = {"completed": len(whole), "failed": asked - len(whole), "requests/s": len(whole) / seconds}
    return {**line, "ttft": ttft, "gaps": gaps, "goodput": met, "holds": holds}


def row(line: Mapping[str, Any], pairs: Sequence[str]) -> str:
    ttft = " / ".join(f"{line['ttft'][name]:.0f}" for name in ("p50", "p90", "p99"))
    gaps = " / ".join(f"{line['gaps'][name]:.1f}" for name in ("p50", "p99", "max"))
    goodput = [f"{line['goodput'][pair]:.2f}{'' if line['holds'][pair] else ' (over)'}" for pair in pairs]
    cells = [f"{line['rate']:g}", line["system"], f"{line['requests/s']:.2f}", ttft, gaps, *goodput]
    cells.append(str(line["failed"]))
    return f"| {' | '.join(cells)} |"


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns Markdown tables of lines with the same objectives.

    A later line replaces an earlier one of its rate.
    """
    text = []
    for workload, at_once in dict.fromkeys((line["workload"], line["at once"]) for line in lines):
        same = [line for line in lines if (line["workload"], line["at once"]) == (workload, at_once)]
        latest = {(line["rate"], line["system"]): line for line in same}
        names = list(dict.fromkeys(line["system"] for line in same))
        ordered = sorted(latest.values(), key=lambda line: (line["rate"], names.index(line["system"])))
        pairs = list(dict.fromkeys(pair for line in ordered for pair in line["goodput"]))
        met = " | ".join(f"goodput {pair}" for pair in pairs)
        text += [f"\n{workload}, times in ms (over: a 99th percentile is over its objective)\n"]
        load = "at once" if at_once else "a second"
        times = "TTFT p50 / p90 / p99 | between tokens p50 / p99 / max"
        text += [f"| {load} | | requests/s | {times} | {met} | failed |"]
        text += ["|---|---|---|---|---|" + "---|" * (len(pairs) + 1), *(row(line, pairs) for line in ordered)]
        if at_once:
            continue
        text.append("")
        text += ["| objectives | | holds up to | breaks at | most goodput |", "|---|---|---|---|---|"]
        for pair in pairs:
            for name in names:
                if name.startswith("goodput ") and name != f"goodput {pair}":
                    continue  # it is measured against another pair
                own = [line for line in ordered if line["system"] == name]
                broken = min((line["rate"] for line in own if not line["holds"][pair]), default=np.inf)
                held = max((line["rate"] for line in own if line["rate"] < broken), default=0.0)
                most = max(line["goodput"][pair] for line in own)
                text += [f"| {pair} | {name} | {held:g} | {broken:g} | {most:.2f} |"]
    return "\n".join(text)
