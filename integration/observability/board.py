"""The Grafana board, as code. Run `make board` after a change.

Four rows: the clients' requests, the engines, the transfers between them, and the peers.
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

# Selects one model's engines; if the board shows several models, the engines of all of them.
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
    """Grafana's name for the unit."""
    queries: Sequence[Query]
    stacked: bool = False
    highest: float | None = None


@dataclass(frozen=True)
class Listing:
    """A table of the present values."""

    title: str
    says: str
    expression: str
    hidden: Sequence[str]
    """Labels without a column."""
    value: str
    """Title of the value's column."""


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Chart | Listing]


def rate(metric: str, by: str, selector: str = ENGINES) -> str:
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def quantile(q: float, metric: str, by: str = "", selector: str = ENGINES) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels, selector)})"


def median_and_tail(metric: str) -> list[Query]:
    """Queries for the median and the tail of a time, by lane."""
    return [
        Query(quantile(0.5, metric, "lane"), "{{lane}} median"),
        Query(quantile(0.99, metric, "lane"), "{{lane}} 99th percentile"),
    ]


ROWS = (
    Row(
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
                "Requests a second, by status",
                "499: the client went away first.",
                "reqps",
                [Query(rate("kv_connector_router_requests_total", "status", ""), "{{status}}")],
                stacked=True,
            ),
            Chart(
                "In flight",
                "Completion requests that a router holds.",
                "short",
                [Query("sum by (instance) (kv_connector_router_in_flight)", "{{instance}}")],
                stacked=True,
            ),
            Chart(
                "Failures and retries a second",
                "Failures of engines. A retry sends a failed request to another engine.",
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
                "Prefilled by the decode engine, a second",
                "Requests without a prefill engine, by reason.",
                "reqps",
                [Query(rate("kv_connector_router_local_prefills_total", "reason", ""), "{{reason}}")],
                stacked=True,
            ),
        ),
    ),
    Row(
        "Engines",
        (
            Chart(
                "Engines by state",
                "Status of engines as seen by routers. With several routers, each router counts an engine.",
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
                "A prefill engine holds finished prompts until a decode engine has fetched them.",
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
    Row(
        "Transfers",
        (
            Chart(
                "KV pushed",
                "Bytes a second from each prefill engine.",
                "Bps",
                [
                    Query(
                        rate("kv_connector_bytes_pushed_total", "instance, engine"), "{{instance}} {{engine}}"
                    )
                ],
                stacked=True,
            ),
            Chart(
                "Pushed before prefill ended",
                "The part of the bytes that costs no time. Near 0: the router dispatches serially.",
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
                "From the reservation to the end of its writes. The wait for the first pages is shown too.",
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
                "docs/operations.md explains the phases.",
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
                "Transfers a second, by outcome",
                "",
                "ops",
                [Query(rate("kv_connector_transfers_total", "role, outcome"), "{{role}} {{outcome}}")],
            ),
        ),
    ),
    Row(
        "Peers",
        (
            Listing(
                "Peers by lane",
                "If tcp or bounce appears beside a faster lane, a pair has fallen back.",
                f"sum by (instance, engine, rank, lane) (kv_connector_peers{ENGINES}) > 0",
                hidden=("Time",),
                value="peers",
            ),
            Chart(
                "Fences in progress",
                "Ended sessions whose peers may still write. Each should last a moment only.",
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
                "Malformed messages a second",
                "A process that is no engine, or of another release, connects to the control sockets.",
                "ops",
                [Query(rate("kv_connector_malformed_messages_total", "instance"), "{{instance}}")],
            ),
            Chart(
                "With a cluster key",
                "0: any process that reaches the engine's control port may write its KV cache.",
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
        # Four panels beside each other, or a number that divides a line without a gap.
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
    """Returns the board in Grafana's format."""
    return json.dumps(board().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
