"""integration/benchmarks/goodput_load.py: the workload with which goodput is measured, and its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from goodput_load import (
    CHUNK,
    WORKLOADS,
    AnswerTimes,
    LoadObjectives,
    answers,
    lateness,
    report,
    spread,
    summary,
    trace,
)

RANDOM, PREFIXES = WORKLOADS["random"], WORKLOADS["prefixes"]
PAIR = LoadObjectives(400, 15)


def lengths(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["input_length"], row["output_length"]) for row in rows]


def result(**columns: list[Any]) -> dict[str, Any]:
    """A result as `vllm bench serve --save-detailed` writes it: two complete answers, with the given columns
    changed."""
    whole = {"ttfts": [0.3, 0.3], "itls": [[0.01, 0.02], [0.01, 0.01]], "output_lens": [3, 3]}
    return {**whole, "errors": ["", ""], **columns}


def test_a_trace_is_the_same_again() -> None:
    assert trace(RANDOM, 4, 40, seed=1, salt=1) == trace(RANDOM, 4, 40, seed=1, salt=1)
    one, other = (trace(RANDOM, 4, 40, seed=seed, salt=1) for seed in (1, 2))
    assert lengths(one) != lengths(other)
    assert [row["timestamp"] for row in one] != [row["timestamp"] for row in other]


def test_another_rate_has_the_same_requests() -> None:
    slow, fast = trace(RANDOM, 4, 40, seed=1, salt=1), trace(RANDOM, 7, 40, seed=1, salt=1)
    assert lengths(fast)[: len(slow)] == lengths(slow)


def test_arrivals_are_a_poisson_process() -> None:
    rows = trace(RANDOM, 50, 400, seed=1, salt=1)
    times = np.array([row["timestamp"] for row in rows])
    gaps = np.diff(times)
    assert len(rows) == 20_000
    assert 0 <= times[0] <= times[-1] <= 400
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.01)
    # an exponential distribution's deviation is its mean
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)


def test_prompts_are_log_uniform_within_their_bounds() -> None:
    rows = trace(RANDOM, 500, 40, seed=1, salt=1)
    tokens, output = np.array(lengths(rows)).T
    assert 256 <= tokens.min() < 260
    assert 11_500 < tokens.max() <= 11_585
    assert np.median(tokens) == pytest.approx((256 * 11_585) ** 0.5, rel=0.03)
    assert (output.min(), output.max()) == (32, 199)
    assert output.mean() == pytest.approx(115.5, rel=0.02)


def test_no_token_comes_twice_without_shared_prefixes() -> None:
    rows = [*trace(RANDOM, 20, 40, seed=1, salt=1), *trace(RANDOM, 20, 40, seed=1, salt=2)]
    ids = [number for row in rows for number in row["hash_ids"]]
    assert len(ids) == len(set(ids))
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // CHUNK) for row in rows)


def test_each_prompt_begins_with_one_of_the_shared_prefixes() -> None:
    chunks = PREFIXES.prefix_tokens // CHUNK
    rows = [*trace(PREFIXES, 10, 40, seed=1, salt=0), *trace(PREFIXES, 10, 40, seed=1, salt=1)]
    heads = {tuple(row["hash_ids"][:chunks]) for row in rows}
    own = [number for row in rows for number in row["hash_ids"][chunks:]]
    assert len(heads) == PREFIXES.prefixes
    assert len({number for head in heads for number in head}) == PREFIXES.prefixes * chunks
    assert len(own) == len(set(own))
    assert not {number for head in heads for number in head} & set(own)
    assert {row["input_length"] - PREFIXES.prefix_tokens for row in rows} <= {*range(64, 2049)}


def test_shorter_prompts_keep_whole_chunks_of_their_prefixes() -> None:
    assert PREFIXES.prefix_tokens % CHUNK == 0
    assert PREFIXES.shorter(16).prefix_tokens == CHUNK
    assert min(tokens for tokens, _ in lengths(trace(RANDOM.shorter(16), 10, 40, seed=1, salt=1))) >= 16


@pytest.mark.parametrize(
    ("answer", "met"),
    [
        (AnswerTimes(400.0, [15.0, 15.0], 3), True),
        (AnswerTimes(400.1, [15.0, 15.0], 3), False),
        (AnswerTimes(400.0, [15.0, 15.1], 3), False),
        (AnswerTimes(100.0, [1.0, 28.0], 3), True),  # the mean counts
        (AnswerTimes(100.0, [30.0], 3), True),  # two tokens in one event
        (AnswerTimes(100.0, [], 1), True),  # no second token
    ],
)
def test_goodput_counts_as_vllm_does(answer: AnswerTimes, met: bool) -> None:
    assert answer.meets(PAIR) is met


def test_answers_are_in_milliseconds() -> None:
    rows = [{"output_length": 3}, {"output_length": 3}]
    first, second = answers(result(), rows)
    assert (first.ttft, first.gaps, first.tokens) == (pytest.approx(300), pytest.approx([10, 20]), 3)
    assert second.gaps == pytest.approx([10, 10])


@pytest.mark.parametrize(
    "broken",
    [
        {"ttfts": [0.3, 0.0]},  # no token came
        {"output_lens": [3, 2]},  # the stream ended early
        {"errors": ["", "ClientPayloadError"]},
    ],
)
def test_incomplete_answer_has_failed(broken: dict[str, list[Any]]) -> None:
    rows = [{"output_length": 3}, {"output_length": 3}]
    whole = answers(result(**broken), rows)
    assert len(whole) == 1
    pair = LoadObjectives(400, 30)
    told = summary(whole, len(rows), 1.0, [pair])
    assert (told["completed"], told["failed"], told["holds"]) == (1, 1, {"400:30": False})
    assert summary(whole, 1, 1.0, [pair])["holds"] == {"400:30": True}


def test_percentiles_are_vllms() -> None:
    assert spread([*map(float, range(101))]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert spread([0.0, 10.0])["p99"] == pytest.approx(9.9)
    assert np.isnan(spread([])["p99"])


def test_a_pair_holds_by_the_percentile_of_all_gaps() -> None:
    """Goodput uses a request's mean, which a few long gaps do not change."""
    stalled = [AnswerTimes(100.0, [5.0] * 97 + [30.0] * 3, 101)] * 10
    told = summary(stalled, 10, 5.0, [PAIR, LoadObjectives(400, 30), LoadObjectives(90, 30)])
    assert told["goodput"] == {"400:15": 2.0, "400:30": 2.0, "90:30": 0.0}
    assert told["holds"] == {"400:15": False, "400:30": True, "90:30": False}
    assert told["requests/s"] == 2.0


def test_nothing_that_came_holds_nothing() -> None:
    assert summary([], 4, 1.0, [PAIR])["holds"] == {"400:15": False}


def test_a_client_is_late_by_what_it_sends_after_its_time() -> None:
    rows = [{"timestamp": 0.5}, {"timestamp": 1.0}, {"timestamp": 2.0}]
    assert lateness({"start_times": [7.5, 8.0, 9.004]}, rows) == pytest.approx(4)


def line(system: str, rate: float, holds: bool) -> dict[str, Any]:
    gaps = 5.0 if holds else 30.0
    told = summary([AnswerTimes(100.0, [gaps, gaps], 3)] * 4, 4, 4 / rate, [PAIR])
    return {**told, "workload": "random", "at once": False, "system": system, "rate": rate}


def test_a_system_holds_up_to_the_last_rate_before_it_breaks() -> None:
    lines = [line("plain", 2, True), line("plain", 4, False), line("plain", 6, True)]
    lines += [
        line("goodput 400:15", 2, True),
        line("goodput 400:15", 4, True),
        line("goodput 900:90", 2, True),
    ]
    table = report(lines).splitlines()
    assert "| 400:15 | plain | 2 | 4 | 6.00 |" in table
    assert "| 400:15 | goodput 400:15 | 4 | inf | 4.00 |" in table
    assert not [row for row in table if row.startswith("| 400:15 | goodput 900:90")]
    assert "| 4 | plain | 4.00 | 100 / 100 / 100 | 30.0 / 30.0 / 30.0 | 0.00 (over) | 0 |" in table


def test_new_measurement_replaces_the_earlier() -> None:
    table = report([line("plain", 2, False), line("plain", 2, True)]).splitlines()
    assert [row for row in table if row.startswith("| 2 ")] == [
        "| 2 | plain | 2.00 | 100 / 100 / 100 | 5.0 / 5.0 / 5.0 | 2.00 | 0 |"
    ]


def test_crowds_have_a_table_of_their_own_and_break_at_no_rate() -> None:
    table = report([line("plain", 2, True), {**line("plain", 8, False), "at once": True}]).splitlines()
    assert [row for row in table if row.startswith("| at once |")]
    assert [row for row in table if row.startswith("| 8 | plain |")]
    assert "| 400:15 | plain | 2 | inf | 2.00 |" in table
