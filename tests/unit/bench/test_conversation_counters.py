"""The growth of counters, as `kv-connector bench conversations` reports it per engine and router."""

from __future__ import annotations

import pytest

from kv_connector.bench.conversations.counters import MetricsSource, Reading, engine, predictions
from kv_connector.bench.conversations.counters import _samples as samples

PREFILL = MetricsSource("prefill-0", "http://p/metrics")
SOURCES = "vllm:prompt_tokens_by_source_total"


def page(text: str) -> Reading:
    return Reading(dict(samples(text)))


def vllm(prompt: float, computed: float, local: float, moved: float, pushed: float) -> Reading:
    return page(
        "# TYPE vllm:prompt_tokens counter\n"
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\n'
        f'vllm:prompt_tokens_total{{engine="1"}} {prompt}\n'
        "# TYPE vllm:prompt_tokens_by_source counter\n"
        f'{SOURCES}{{engine="0",source="local_compute"}} {computed}\n'
        f'{SOURCES}{{engine="0",source="local_cache_hit"}} {local}\n'
        f'{SOURCES}{{engine="0",source="external_kv_transfer"}} {moved}\n'
        "# TYPE vllm:request_success counter\n"
        f'vllm:request_success_total{{finished_reason="stop"}} {prompt / 10}\n'
        f'vllm:request_success_total{{finished_reason="length"}} {prompt / 10}\n'
        "# TYPE kv_connector_bytes_pushed counter\n"
        f"kv_connector_bytes_pushed_total {pushed}\n"
    )


def test_engine_has_the_growth_of_each_counter_over_its_labels() -> None:
    got = engine(PREFILL, vllm(100, 60, 30, 10, 1000), vllm(300, 120, 130, 50, 5000))
    assert (got.name, got.side, got.problem) == ("prefill-0", "prefill", "")
    assert (got.prompt_tokens, got.computed_tokens) == (400, 60)
    assert (got.local_hit_tokens, got.transferred_tokens) == (100, 40)
    assert (got.requests, got.bytes_pushed, got.answer_tokens) == (40, 4000, None)


def test_engine_without_sources_computes_what_is_not_cached() -> None:
    text = "vllm:prompt_tokens_total {}\nvllm:prompt_tokens_cached_total {}\n"
    got = engine(PREFILL, page(text.format(10, 5)), page(text.format(110, 65)))
    assert (got.computed_tokens, got.local_hit_tokens, got.bytes_pushed) == (40, None, None)


def test_engine_that_restarted_has_no_numbers() -> None:
    got = engine(PREFILL, vllm(100, 60, 30, 10, 1000), vllm(50, 20, 20, 10, 500))
    assert "restarted during the run" in got.problem
    assert got.prompt_tokens is None


def test_engine_whose_answer_tokens_fell_restarted() -> None:
    text = "vllm:prompt_tokens_total 10\nvllm:generation_tokens_total {}\n"
    assert engine(PREFILL, page(text.format(5)), page(text.format(7))).answer_tokens == 2
    assert "restarted during the run" in engine(PREFILL, page(text.format(5)), page(text.format(4))).problem


@pytest.mark.parametrize("side", ["before", "after"])
def test_engine_has_the_problem_of_a_reading(side: str) -> None:
    good, bad = vllm(1, 1, 0, 0, 0), Reading({}, "http://p/metrics answered 404")
    got = engine(PREFILL, *((bad, good) if side == "before" else (good, bad)))
    assert got.problem == "http://p/metrics answered 404"


def test_engine_needs_metrics_of_an_engine() -> None:
    other = page("process_cpu_seconds_total 3\n")
    assert "has no metrics of vLLM or kv-connector" in engine(PREFILL, other, other).problem


@pytest.mark.parametrize(
    ("name", "side"),
    [("decode-0", "decode"), ("p1", "p"), ("decode 12", "decode"), ("alone", "alone"), ("7", "7")],
)
def test_side_is_the_name_without_its_number(name: str, side: str) -> None:
    assert MetricsSource(name, "").side == side


def test_predictions_are_the_routers_counters_of_predicted_and_actual_hits() -> None:
    text = (
        'kv_connector_router_predicted_hit_tokens_total{{side="prefill"}} {0}\n'
        'kv_connector_router_hit_tokens_total{{kind="actual"}} {1}\n'
        'kv_connector_router_confirmed_hit_tokens_total{{side="prefill"}} {0}\n'
        'kv_connector_router_requests_total{{status="200"}} {1}\n'
        "kv_connector_router_actual_hits 3\n"
    )
    found = predictions(MetricsSource("http://r", ""), page(text.format(5, 10)), page(text.format(105, 100)))
    assert [(one.name, one.labels, one.tokens) for one in found] == [
        ("kv_connector_router_confirmed_hit_tokens_total", {"side": "prefill"}, 100.0),
        ("kv_connector_router_hit_tokens_total", {"kind": "actual"}, 90.0),
        ("kv_connector_router_predicted_hit_tokens_total", {"side": "prefill"}, 100.0),
    ]
