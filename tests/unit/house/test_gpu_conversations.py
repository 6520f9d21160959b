"""integration/benchmarks/gpu_conversations.py: its results, its goals, and the order of its measurements."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from conversation_goals import Goal, goals, load_line, report, turn_row
from conversation_systems import BIDIRECTIONAL, CPU, GPU, ConversationSystem, bidirectional_answer
from gpu_conversations import PLAN, ConversationBench, ConversationRun, Results, growth
from rich.console import Console

from kv_connector.bench.conversations.client import TurnError
from kv_connector.bench.conversations.counters import MetricsSource, Reading
from kv_connector.bench.conversations.report import print_results, totals
from kv_connector.bench.conversations.results import EngineGrowth, Turn
from kv_connector.lab.process import StartError


def turn(number: int, ttft: float = 10.0, *, gaps: tuple[float, ...] = (), **fields: Any) -> Turn:
    return Turn(
        conversation=1,
        turn=number,
        endpoint="http://e",
        sent_s=0.0,
        late_s=0.0,
        ttft_ms=ttft,
        gaps_ms=list(gaps),
        **fields,
    )


def load(
    phase: str, system: str, turns: list[Turn], computed: tuple[int | None, ...] = (100,)
) -> dict[str, Any]:
    engines = [
        EngineGrowth(name=f"{system}-{number}", side=system, computed_tokens=tokens)
        for number, tokens in enumerate(computed)
    ]
    return load_line(phase, system, turns, engines, 1.0, interrupted=False)


def lost(system: str, case: str, ttft: float) -> dict[str, Any]:
    line = {"kind": "lost", "phase": "lost", "system": system, "case": case, "round": 1}
    return {**line, "ttft_ms": ttft, "prompt_tokens": 32_400, "cached_tokens": 32_000}


def values(lines: list[dict[str, Any]]) -> list[float | None]:
    return [goal.value for goal in goals(lines)]


# --- results ---


def test_turn_row_counts_computed_tokens_of_complete_turns_only() -> None:
    turns = [
        turn(2, 10.0, gaps=(5.0, 7.0), prompt_tokens=900, cached_tokens=800),
        turn(2, 30.0, gaps=(6.0,), prompt_tokens=1_100, cached_tokens=900),
        turn(2, cause="HTTP 500", reason="gone"),
    ]
    row = turn_row("2", turns)
    assert (row["answers"], row["failed"]) == (2, 1)
    assert (row["TTFT p50"], row["between p50"], row["between p99"]) == (30.0, 6.0, 7.0)
    assert (row["prompt"], row["cached"], row["computed"]) == (1_000, 850, 150)


def test_turn_row_has_no_numbers_without_answers() -> None:
    row = turn_row("1", [turn(1, cause="timeout")])
    assert {row[name] for name in ("TTFT p50", "between p99", "prompt", "computed")} == {None}


def test_table_of_a_bench_and_row_of_a_goal_have_the_same_numbers() -> None:
    turns = [
        turn(1, 10.26, gaps=(5.0, 7.0), prompt_tokens=900, cached_tokens=800),
        turn(1, 30.0, prompt_tokens=1_101),
        turn(1, cause="HTTP 500", reason="gone"),
    ]
    row, text = turn_row("1", turns), io.StringIO()
    print_results(Console(file=text, width=200), turns, [], [], totals(turns, [], 1.0, interrupted=False))
    lines = [line.replace("\u2502", " ").split() for line in text.getvalue().splitlines()]
    assert ["1", "2", "1", "30.0", "30.0", "7.0", "7.0", "1,000", "800"] in [line[:9] for line in lines]
    assert [row["TTFT p50"], row["between p99"], row["prompt"], row["cached"]] == [30.0, 7.0, 1000.5, 800]


def test_load_line_is_json_with_a_row_for_each_turn() -> None:
    line = load("chat", "ours", [turn(1), turn(2), turn(2)])
    assert [(row["turn"], row["answers"]) for row in line["turns"]] == [
        ("1", 1),
        ("2", 2),
        ("2+", 2),
        ("all", 3),
    ]
    assert json.loads(json.dumps(line)) == line


# --- goals ---


def test_goals_compare_the_connector_with_plain_engines_in_turns_after_the_first() -> None:
    lines = [
        load(
            "chat",
            "plain",
            [turn(1, 1.0), turn(2, 90.0, gaps=(5.0, 5.0, 40.0)), turn(2, 100.0), turn(3, 500.0)],
        ),
        load(
            "chat",
            "ours",
            [turn(1, 900.0), turn(2, 95.0, gaps=(6.0, 6.0, 10.0)), turn(2, 105.0), turn(3, 900.0)],
        ),
    ]
    assert values(lines) == [None, pytest.approx(1.05), pytest.approx(0.25), None]
    assert [goal.verdict for goal in goals(lines)] == ["not measured", "yes", "yes", "not measured"]


def test_goal_of_agents_counts_all_engines_over_unseen_tokens() -> None:
    turns = [turn(1, unseen_tokens=1_000), turn(2, unseen_tokens=500), turn(3, cause="x", unseen_tokens=9)]
    assert values([load("agent", "ours", turns, (1_590, 15))])[0] == pytest.approx(1.07)
    assert values([load("agent", "ours", turns, (1_590, None))])[0] is None
    assert values([load("agent", "plain", turns)])[0] is None


def test_goal_of_lost_caches_is_a_ratio_of_medians() -> None:
    lines = [lost("ours", "loaded", ms) for ms in (90.0, 100.0, 500.0)]
    lines += [lost("ours", "recomputed", ms) for ms in (1_000.0, 1_000.0, 2_000.0)]
    lines.append(lost("bidirectional", "loaded", 1.0))
    assert values(lines)[3] == pytest.approx(0.1)


@pytest.mark.parametrize(("value", "verdict"), [(0.15, "yes"), (0.151, "no"), (None, "not measured")])
def test_goal_verdict(value: float | None, verdict: str) -> None:
    assert Goal("x", 0.15, value).verdict == verdict


def test_report_names_what_is_missing() -> None:
    text = report(
        [
            load("chat", "plain", [turn(1, prompt_tokens=2_300)]),
            lost("nixl", "recomputed", 1_234.5),
            {"kind": "out", "phase": "start", "system": "nixl", "reason": "status 1\nlog"},
            {"kind": "turn", "phase": "chat", "system": "plain"},
        ]
    )
    assert "chat, plain" in text
    assert "2,300.0" in text
    assert "nixl, recomputed: 1234.5" in text
    assert "not measured: nixl, start: status 1" in text
    assert "log" not in text
    assert text.count("not measured: ") == 1 + len(goals([]))


def test_growth_has_only_counters_that_grew() -> None:
    def reading(**values: float) -> Reading:
        labels = frozenset({("model_name", "m"), ("side", "borrow")})
        return Reading({(name.replace("vllm_", "vllm:"), labels): value for name, value in values.items()})

    before = reading(kv_connector_prefix_requests_total=2, vllm_nixl_bytes_transferred_sum=5)
    after = reading(
        kv_connector_prefix_requests_total=5,
        vllm_nixl_bytes_transferred_sum=5,
        kv_connector_other_total=9,
        kv_connector_prefix_created=9,
    )
    assert growth([(MetricsSource("p", "u"), before, after)]) == {
        "p kv_connector_prefix_requests_total side=borrow": 3.0
    }


# --- NixlConnector's bidirectional mode ---

COMPUTED = {
    "usage": {"prompt_tokens": 50, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 40}}
}
ANSWERED = {
    "choices": [{"token_ids": [7, 8, 9]}],
    "usage": {"prompt_tokens": 50, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 50}},
    "metrics": {"queue_time_ms": 20.0, "time_to_first_token_ms": 30.0, "mean_itl_ms": 6.0},
}


def test_bidirectional_answer_adds_the_times_of_both_engines() -> None:
    answer = bidirectional_answer(0.1, COMPUTED, ANSWERED)
    assert answer.first == pytest.approx(0.15)
    assert answer.gaps == [0.006]
    assert answer.token_ids == [7, 8, 9]
    assert (answer.usage.completion_tokens, answer.usage.cached_tokens) == (3, 40)


def test_bidirectional_answer_needs_metrics() -> None:
    with pytest.raises(TurnError, match="enable-per-request-metrics"):
        bidirectional_answer(0.1, COMPUTED, {**ANSWERED, "metrics": None})


# --- the order of measurements ---


class FakeSystem(ConversationSystem):
    """A system without engines. ``events`` receives what happens to it."""

    def __init__(self, name: str, events: list[str], *, fails: bool = False) -> None:
        super().__init__(name, [])
        self._events, self._fails = events, fails

    def start(self) -> None:
        self._events.append(f"start {self.name}")

    def wait(self, deadline: float) -> None:
        if self._fails:
            raise StartError("no module named nixl")
        self.up = True

    def end(self) -> None:
        if self.up:
            self._events.append(f"end {self.name}")
        self.up = False


class FakeBench(ConversationBench):
    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def measure(self, phase: str, system: ConversationSystem, seconds: float) -> None:
        assert system.up
        self._events.append(f"{phase} {system.name}")
        if (phase, system.name) == ("lost", "plain"):
            raise RuntimeError("no reset")


def ran(fails: tuple[str, ...] = (), **options: float) -> tuple[list[str], list[dict[str, Any]]]:
    """Runs the whole plan without engines. Returns the events and the lines."""
    events: list[str] = []
    systems = {
        name: FakeSystem(name, events, fails=name in fails)
        for name in ("plain", "ours", "nixl", "bidirectional", "no-prefetch")
    }
    results = Results(io.StringIO())
    run = ConversationRun(dataclasses.replace(CPU, at_once=3), systems, results, **options)
    run.run(PLAN, FakeBench(events))
    return events, results.lines


def test_run_starts_as_many_systems_as_fit_and_replaces_a_finished_one() -> None:
    events, lines = ran()
    assert events[:3] == ["start plain", "start ours", "start nixl"]
    assert events[events.index("lost nixl") :][:3] == ["lost nixl", "end nixl", "start bidirectional"]
    assert [event for event in events if event.split()[0] in ("chat", "lost", "agent")] == [
        f"{phase} {name}" for phase, name in PLAN
    ]
    assert [(line["phase"], line["system"]) for line in lines] == [("lost", "plain")]


def test_run_goes_on_without_a_system_that_does_not_start() -> None:
    events, lines = ran(fails=("nixl",))
    assert "chat nixl" not in events
    assert events.count("start nixl") == 1
    assert "agent bidirectional" in events
    assert [line["reason"] for line in lines if line["system"] == "nixl"] == ["no module named nixl"]


def test_run_measures_nothing_after_its_limit() -> None:
    events, lines = ran(limit=0.0)
    assert events == []
    assert [(line["phase"], line["system"]) for line in lines] == PLAN
    assert {line["reason"] for line in lines} == {"no time is left (--limit)"}


def test_loads_fit_into_the_engines() -> None:
    """The Llama shape has 128 KiB of KV per token."""
    room = next(one for one in GPU.arguments if one.startswith("--kv-cache-memory-bytes="))
    tokens = int(room.partition("=")[2]) // (128 << 10)
    longest = next(one for one in GPU.arguments if one.startswith("--max-model-len="))
    for shape in (GPU.chat, GPU.agent):
        assert shape.last_prompt + shape.answer <= int(longest.partition("=")[2])
    agents = GPU.agent
    each = agents.last_prompt + agents.answer - agents.system
    assert agents.system + agents.conversations * each <= tokens
    # Pauses are shorter than the time for which the decode engine keeps a turn's blocks.
    assert GPU.pace.think_seconds * 10 <= BIDIRECTIONAL["decoder_kv_blocks_ttl"]
