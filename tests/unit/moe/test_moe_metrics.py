"""Counters of the expert exchange."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kv_connector.moe.metrics import MoeMetrics


def test_metrics_count_calls_by_outcome_and_faults_by_code() -> None:
    registry = CollectorRegistry()
    metrics = MoeMetrics(registry)
    metrics.taken()
    metrics.taken()
    metrics.passed("size")
    metrics.fault("LOST")
    value = registry.get_sample_value
    assert value("kv_connector_moe_taken_total") == 2
    assert value("kv_connector_moe_passed_total", {"reason": "size"}) == 1
    assert value("kv_connector_moe_faults_total", {"code": "LOST"}) == 1
    assert value("kv_connector_moe_faults_total", {"code": "TIMEOUT_COMBINE"}) == 0


def test_metrics_of_a_second_object_replace_the_first() -> None:
    registry = CollectorRegistry()
    MoeMetrics(registry).taken()
    MoeMetrics(registry)
    assert registry.get_sample_value("kv_connector_moe_taken_total") == 0
