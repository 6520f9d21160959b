"""The Grafana board, as code. Run `make board` after a change.

It has four rows: what clients get, the state of the engines, the transfers between them, and their peers.
"""

from __future__ import annotations

import itertools
import json
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import prometheus, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24

# Selects the engines of one model; all engines if the board shows several models.
ENGINES = '{model_name=~"$model"}'


@dataclass(frozen=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True)
class Chart:
    title: str
    says: str
    unit: str
    """Grafana's name of the unit."""
    queries: Sequence[Query]
    stacked: bool = False
    highest: float | None = None


@dataclass(frozen=True)
class Listing:
    """A table of current values."""

    title: str
    says: str
    expression: str
    hidden: Sequence[str]
    """Labels without a column."""
    value: str
    """Title of the value's column."""


@dataclass(frozen=True)
class BoardRow:
    title: str
    panels: Sequence[Chart | Listing]


def rate(metric: str, by: str, selector: str = ENGINES) -> str:
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def quantile(q: float, metric: str, by: str = "", selector: str = ENGINES) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels, selector)})"


def median_and_tail(metric: str) -> list[Query]:
    """Returns queries for the median and the 99th percentile of a time, by lane."""
    return [
        Query(quantile(0.5, metric, "lane"), "{{lane}} median"),
        Query(quantile(0.99, metric, "lane"), "{{lane}} 99th percentile"),
    ]


ROWS = (
    BoardRow(
        "Requests",
        (
            Chart(
                "Time to first byte",
                "From a request's last byte at the router to the first byte of its answer.",
                "s",
                [
                    Query(quantile(q, "kv_connector_router_first_byte_seconds", selector=""), name)
                    for q, name in ((0.5, "median"), (0.9, "90th percentile"), (0.99, "99th percentile"))
                ],
            ),
            Chart(
                "Requests per second, by status",
                "499: the client disconnected first.",
                "reqps",
                [Query(rate("kv_connector_router_requests_total", "status", ""), "{{status}}")],
                stacked=True,
            ),
            Chart(
                "In flight",
                "Completion requests in flight at each router.",
                "short",
                [Query("sum by (instance) (kv_connector_router_in_flight)", "{{instance}}")],
                stacked=True,
            ),
            Chart(
                "Failures and retries per second",
                "A failure is an engine's. A retry sends a request to another engine after a failure.",
                "reqps",
                [
                    Query(
                        rate("kv_connector_router_failures_total", "side, engine", ""), "{{side}} {{engine}}"
                    ),
                    Query(
                        rate("kv_connector_router_retries_total", "instance", ""), "retries of {{instance}}"
                    ),
                ],
            ),
            Chart(
                "Local prefills per second",
                "Requests whose prompt the decode engine computes itself, by reason.",
                "reqps",
                [Query(rate("kv_connector_router_local_prefills_total", "reason", ""), "{{reason}}")],
                stacked=True,
            ),
        ),
    ),
    BoardRow(
        "Engines",
        (
            Chart(
                "Engines by state",
                "Engines as the routers see them. Each router counts an engine once.",
                "short",
                [
                    Query(
                        "sum by (side, state) (kv_connector_router_engines) > 0",
                        "{{side}} {{state}}",
                    )
                ],
                stacked=True,
            ),
            Chart(
                "Waiting in the engine",
                "Requests in vLLM's queue.",
                "short",
                [
                    Query(
                        f"sum by (instance, engine) (vllm:num_requests_waiting{ENGINES})",
                        "{{instance}} {{engine}}",
                    )
                ],
            ),
            Chart(
                "Running",
                "Requests in vLLM's batch.",
                "short",
                [
                    Query(
                        f"sum by (instance, engine) (vllm:num_requests_running{ENGINES})",
                        "{{instance}} {{engine}}",
                    )
                ],
            ),
            Chart(
                "KV cache in use",
                "A prefill engine holds finished prompts until the decode engine has received their pages.",
                "percentunit",
                [
                    Query(
                        f"max by (instance, engine) (vllm:kv_cache_usage_perc{ENGINES})",
                        "{{instance}} {{engine}}",
                    )
                ],
                highest=1,
            ),
        ),
    ),
    BoardRow(
        "Transfers",
        (
            Chart(
                "KV pushed",
                "Bytes per second that each prefill engine pushes.",
                "Bps",
                [
                    Query(
                        rate("kv_connector_bytes_pushed_total", "instance, engine"), "{{instance}} {{engine}}"
                    )
                ],
                stacked=True,
            ),
            Chart(
                "Pushed before the prefill ended",
                "Part of the KV that leaves before prefill ends. Near 0: the decode engine gets requests "
                "only after prefill (serial dispatch).",
                "percentunit",
                [
                    Query(
                        f"{rate('kv_connector_bytes_pushed_before_prefill_end_total', 'instance')}"
                        f" / ({rate('kv_connector_bytes_pushed_total', 'instance')} > 0)",
                        "{{instance}}",
                    )
                ],
                highest=1,
            ),
            Chart(
                "Transfer time at the prefill engine",
                "From the reservation to the end of the writes, and the wait for the first pages.",
                "s",
                [
                    *median_and_tail("kv_connector_send_duration_seconds"),
                    Query(
                        quantile(0.5, "kv_connector_send_first_push_seconds", "lane"),
                        "{{lane}} first pages, median",
                    ),
                ],
            ),
            Chart(
                "Transfer time at the decode engine",
                "From the reservation to the last page.",
                "s",
                [
                    *median_and_tail("kv_connector_receive_duration_seconds"),
                ],
            ),
            Chart(
                "Transfers in flight, by phase",
                "What transfers wait for. docs/operate/slow-request.md explains the phases.",
                "short",
                [
                    Query(
                        f"sum by (role, phase) (kv_connector_transfers_under_way{ENGINES})",
                        "{{role}} {{phase}}",
                    )
                ],
                stacked=True,
            ),
            Chart(
                "Transfers per second, by outcome",
                "",
                "ops",
                [Query(rate("kv_connector_transfers_total", "role, outcome"), "{{role}} {{outcome}}")],
            ),
        ),
    ),
    BoardRow(
        "Peers",
        (
            Listing(
                "Connected peers by lane",
                "tcp or bounce beside a faster lane: at least one pair has fallen back to it.",
                f"sum by (instance, engine, rank, lane) (kv_connector_peers{ENGINES}) > 0",
                hidden=("Time",),
                value="peers",
            ),
            Chart(
                "Links out",
                "Lost links of connected peers. The engine's LINK LOST line names the peer and the device.",
                "short",
                [
                    Query(
                        f"sum by (instance, engine, rank) (kv_connector_links_out{ENGINES})",
                        "{{instance}} {{engine}} rank {{rank}}",
                    )
                ],
            ),
            Chart(
                "Fences in progress",
                "Ended sessions whose writes may still land. A fence takes only a moment.",
                "short",
                [
                    Query(
                        "sum by (instance, engine, rank) "
                        '(kv_connector_transfers_under_way{model_name=~"$model", phase="fencing"})',
                        "{{instance}} {{engine}} rank {{rank}}",
                    )
                ],
            ),
            Chart(
                "Malformed messages per second",
                "A sender at the control sockets is not a kv-connector engine, or has another release.",
                "ops",
                [Query(rate("kv_connector_malformed_messages_total", "instance"), "{{instance}}")],
            ),
            Chart(
                "With a cluster key",
                "0: any host that reaches the engine's control port can write its KV cache.",
                "short",
                [Query(f"min by (instance) (kv_connector_authenticated{ENGINES})", "{{instance}}")],
                highest=1,
            ),
        ),
    ),
)


def board() -> dashboard_builders.Dashboard:
    made = (
        dashboard_builders.Dashboard("kv-connector")
        .uid("kv-connector")
        .description("Prefill and decode engines, their router, and the KV that moves between them.")
        .tags(["kv-connector", "vllm"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard_builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(
            dashboard_builders.QueryVariable("model")
            .label("Model")
            .datasource(PROMETHEUS)
            .query("label_values(kv_connector_bytes_pushed_total, model_name)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    numbers = itertools.count(1)
    for row in ROWS:
        made.with_row(dashboard_builders.Row(row.title).id(next(numbers)))
        # Up to four panels share a line; with more panels, three do, which leaves no gap.
        width = COLUMNS // (len(row.panels) if len(row.panels) < 5 else 3)
        for panel in row.panels:
            made.with_panel(_panel(panel).id(next(numbers)).span(width).height(8))
    return made


def _panel(panel: Chart | Listing) -> timeseries.Panel | table.Panel:
    return _chart(panel) if isinstance(panel, Chart) else _listing(panel)


def _chart(chart: Chart) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(chart.title)
        .description(chart.says)
        .datasource(PROMETHEUS)
        .unit(chart.unit)
        .min(0)
        .line_width(1)
        .fill_opacity(25 if chart.stacked else 0)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common_builders.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if chart.stacked:
        made.stacking(common_builders.StackingConfig().mode(StackingMode.NORMAL))
    if chart.highest is not None:
        made.max(chart.highest)
    for letter, query in zip(string.ascii_uppercase, chart.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query.expression).legend_format(query.legend)
        made.with_target(target.datasource(PROMETHEUS).range())
    return made


def _listing(listing: Listing) -> table.Panel:
    query = (
        prometheus.Dataquery().ref_id("A").expr(listing.expression).instant().format(PromQueryFormat.TABLE)
    )
    columns = {
        "excludeByName": dict.fromkeys(listing.hidden, True),
        "renameByName": {"Value": listing.value},
    }
    return (
        table.Panel()
        .title(listing.title)
        .description(listing.says)
        .datasource(PROMETHEUS)
        .with_target(query.datasource(PROMETHEUS))
        .with_transformation(DataTransformerConfig(id_val="organize", options=columns))
    )


def render() -> str:
    """Returns the board as Grafana reads it."""
    return json.dumps(board().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
