"""Board and rules as files: the series that they name exist, and each alert has its chapter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kv_connector.agent.exposition import NAMES
from kv_connector.router.observe.metrics import Metrics
from kv_connector.weights.metrics import NAMES as WEIGHT_NAMES

ROOT = Path(__file__).parents[2]
FILES = ROOT / "integration" / "observability"

BOARD = json.loads((FILES / "board.json").read_text())
GROUPS = yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}

# Series of vLLM 0.32 and 0.33.
VLLM = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}


def expressions() -> Iterator[str]:
    """Yields the expressions of the board and of the rules."""
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (rule["expr"] for rule in RULES)


def exposed() -> set[str]:
    """Returns the names of series that a router or an engine exposes, or that a rule records."""
    ours = {family.name for family in Metrics().registry.collect()} | NAMES | {*WEIGHT_NAMES}
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    return {name + suffix for name in ours for suffix in suffixes} | recorded | VLLM


def test_every_queried_series_exists() -> None:
    asked = {name for text in expressions() for name in re.findall(r"\b(?:kv_connector|vllm)[\w:]+", text)}
    assert len(asked) > 20
    assert asked - exposed() == set()


def test_the_board_has_its_rows_and_every_panel_a_question() -> None:
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Requests", "Engines", "Transfers", "Peers"]
    panels = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] for panel in panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_leads_to_its_chapter(alert: str) -> None:
    rule: dict[str, Any] = ALERTS[alert]
    assert rule["labels"]["severity"] in ("critical", "warning")
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    # GitHub and mkdocs make an anchor of a heading in this way.
    headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor == alert.lower()
    assert alert in headings


def test_monitoring_page_lists_the_critical_alerts() -> None:
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    listed = page.partition("`severity` is `critical`")[2].partition("`warning`")[0]
    critical = {name for name, rule in ALERTS.items() if rule["labels"]["severity"] == "critical"}
    assert set(re.findall(r"`(Kv\w+)`", listed)) == critical


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(alert: str) -> None:
    cases = yaml.safe_load((FILES / "rules_test.yaml").read_text())["tests"]
    tried = [test for case in cases for test in case.get("alert_rule_test", ()) if test["alertname"] == alert]
    assert any(test["exp_alerts"] for test in tried)
    assert any(not test["exp_alerts"] for test in tried)
