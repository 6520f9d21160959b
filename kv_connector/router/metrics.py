"""Metrics: what a router counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# From a tiny model on loopback to a prompt of 100,000 tokens in a queue.
FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kv_connector_router_requests",
            "Completion requests answered, by route and HTTP status (499: the client went away first)",
            ["route", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kv_connector_router_in_flight", "Completion requests under way", registry=self.registry
        )
        self.failures = Counter(
            "kv_connector_router_failures",
            "Requests that an engine refused or broke off",
            ["side", "engine"],
            registry=self.registry,
        )
        self.local_prefills = Counter(
            "kv_connector_router_local_prefills",
            "Requests that the decode engine prefilled itself, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.retries = Counter(
            "kv_connector_router_retries",
            "Requests that were tried again with another engine before anything was streamed",
            registry=self.registry,
        )
        self.engines = Gauge(
            "kv_connector_router_engines",
            "Engines, by side and state",
            ["side", "state"],
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "kv_connector_router_first_byte_seconds",
            "From a request's last byte to the first byte of its answer",
            buckets=FIRST_BYTE_BUCKETS,
            registry=self.registry,
        )
