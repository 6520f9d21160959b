"""Metrics: the router's Prometheus metrics."""

from collections.abc import Collection, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kv_connector.router.engines.members import TEXT_SIDES, EngineInfo, MemberStatus, Side
from kv_connector.router.observe.first_bytes import FirstBytes

# From a tiny model on loopback to a prompt of 100,000 tokens in a queue.
FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# From a step of each engine and a transfer, up to the longest move (streams/moves.py).
PAUSE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
# The same with the computation of the whole prompt, up to the longest pause (streams/resumption.py).
RESUME_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# How long the failures of a removed engine stay in the metrics: many scrapes, and few engines at a time.
KEEP_SECONDS = 600.0


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kv_connector_router_requests",
            "Completion requests answered, by route and HTTP status. A stream that ends with an error event "
            "counts with the event's code. 499: the client disconnected first.",
            ["route", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kv_connector_router_in_flight", "Completion requests in flight", registry=self.registry
        )
        self.failures = Counter(
            "kv_connector_router_failures",
            "Requests that an engine refused or broke off, by the engine's side and address",
            ["side", "engine"],
            registry=self.registry,
        )
        self.local_prefills = Counter(
            "kv_connector_router_local_prefills",
            "Local prefills: requests whose prompt the decode engine computed itself, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.encodes = Counter(
            "kv_connector_router_encodes",
            "Requests with pictures for an encoder engine, by outcome. encoded: the prefill engine receives "
            "the embeddings. no_engine, failed, nothing: it encodes the pictures. failed: no answer. "
            "nothing: no embedding.",
            ["outcome"],
            registry=self.registry,
        )
        self._placements = Counter(
            "kv_connector_router_placements",
            "Attempts of requests that two engines can share, by the side that computes the prompt "
            "(`prompt`) and the reason of the choice",
            ["prompt", "reason"],
            registry=self.registry,
        )
        self._late = Counter(
            "kv_connector_router_late_forecasts",
            "Attempts whose first token was forecast to come later than the objective (--ttft-ms)",
            registry=self.registry,
        )
        self._work = Counter(
            "kv_connector_router_prompt_work_seconds",
            "Forecast seconds to compute the prompts of these attempts, by the side that computes them. The "
            "rate is the number of engines that they keep busy.",
            ["side"],
            registry=self.registry,
        )
        self.caches_filled = Gauge(
            "kv_connector_router_decode_caches_filled",
            "KV caches that the prompts of this router's running streams fill at decode engines. 1.5: as "
            "much as one and a half engines have.",
            registry=self.registry,
        )
        self._predicted_hits = Counter(
            "kv_connector_router_predicted_hit_tokens",
            "Prompt tokens that the router expected in the engine's prefix cache, by side. Counted once the "
            "engine has reported its own number.",
            ["side"],
            registry=self.registry,
        )
        self._actual_hits = Counter(
            "kv_connector_router_actual_hit_tokens",
            "Prompt tokens that the engine reports as prefix-cache hits, by side.",
            ["side"],
            registry=self.registry,
        )
        self._confirmed_hits = Counter(
            "kv_connector_router_confirmed_hit_tokens",
            "Predicted prompt tokens that the engine had in its prefix cache, by side. Hits beyond the "
            "prediction of a prompt are not counted.",
            ["side"],
            registry=self.registry,
        )
        self._proposals = Counter(
            "kv_connector_router_prefix_proposals",
            "Proposals to load a prefix from another engine, by result. borrowed: loaded. computed: not "
            "loaded. unknown: the engine reports no cached tokens.",
            ["result"],
            registry=self.registry,
        )
        self._borrowed_tokens = Counter(
            "kv_connector_router_borrowed_tokens",
            "Prompt tokens that engines loaded from other engines after a proposal. A forecast: "
            "engines count loaded tokens as cached.",
            registry=self.registry,
        )
        self.prefetches = Counter(
            "kv_connector_router_answer_prefetches",
            "Answers that a prefill engine could load before the next turn, by outcome. loaded. declined: by "
            "an engine. busy: too many at once. failed: no result. unknown: its token ids are not known. "
            "rewritten: next turns have other token ids.",
            ["outcome"],
            registry=self.registry,
        )
        self.prefetched_tokens = Counter(
            "kv_connector_router_prefetched_tokens",
            "Tokens of answers that prefill engines loaded from decode engines before the next turn",
            registry=self.registry,
        )
        self.early_tokens = Counter(
            "kv_connector_router_early_tokens",
            "Requests by early first token. sent: the client got the prefill engine's token. mismatch: the "
            "decode engine sampled another token. Other outcomes: why the token was not sent.",
            ["outcome"],
            registry=self.registry,
        )
        self.retries = Counter(
            "kv_connector_router_retries",
            "Requests retried on another engine before the decode engine had streamed anything",
            registry=self.registry,
        )
        self.access_log_drops = Counter(
            "kv_connector_router_access_log_dropped_lines",
            "Lost lines of the access log: 10,000 lines waited for a slow reader or disk, or a write failed",
            registry=self.registry,
        )
        self.moves = Counter(
            "kv_connector_router_moves",
            "Moves of running streams to another decode engine, by outcome. Requests that a drain left on "
            "their engine are counted with the reason as outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.move_pause = Histogram(
            "kv_connector_router_move_pause_seconds",
            "Pause of a moved stream: from the old decode engine's last event to the new decode engine's "
            "first",
            buckets=PAUSE_BUCKETS,
            registry=self.registry,
        )
        self.broken_streams = Counter(
            "kv_connector_router_broken_streams",
            "Streams whose decode engine failed after the client had a part, by outcome. resumed: the stream "
            "continued on another engine. Other outcomes: why it ended with an error event.",
            ["outcome"],
            registry=self.registry,
        )
        self.resume_pause = Histogram(
            "kv_connector_router_resume_pause_seconds",
            "Pause of a resumed stream: from the failure of its decode engine to the first event of the next",
            buckets=RESUME_BUCKETS,
            registry=self.registry,
        )
        self.waiting_streams = Gauge(
            "kv_connector_router_waiting_streams",
            "Requests whose engine has failed, and which wait until requests before them have begun anew",
            registry=self.registry,
        )
        self.engines = Gauge(
            "kv_connector_router_engines",
            "Engines by side and state",
            ["side", "state"],
            registry=self.registry,
        )
        self._engine_ready = Gauge(
            "kv_connector_router_engine_ready",
            "Whether the engine takes requests, by side and address. 1: its state is ready. 0: any other "
            "state.",
            ["side", "engine"],
            registry=self.registry,
        )
        self._engine_requests = Gauge(
            "kv_connector_router_engine_requests",
            "Requests of this router at the engine, and requests whose pages are still to be fetched from "
            "it, by address",
            ["engine"],
            registry=self.registry,
        )
        self.prefixes = Gauge(
            "kv_connector_router_prefixes",
            "Beginnings of prompts in the router's forecast of all engines' prefix caches: at most 524,288",
            registry=self.registry,
        )
        self.sessions = Gauge(
            "kv_connector_router_sessions",
            "Sessions of clients whose latest engines the router remembers: at most 65,536",
            registry=self.registry,
        )
        self._first_byte = Histogram(
            "kv_connector_router_first_byte_seconds",
            "Time from a request's last byte to the first byte of its answer. The answer's status may be "
            "sent earlier.",
            buckets=FIRST_BYTE_BUCKETS,
            registry=self.registry,
        )
        for side in TEXT_SIDES:
            self._work.labels(side.value)  # shown from the start
        self.first_bytes = FirstBytes()
        self._gone: dict[str, float] = {}  # removed engines with failures -> when they were first missing

    def answer_began(self, seconds: float) -> None:
        """Records that an answer began, so many seconds after the request's last byte."""
        self._first_byte.observe(seconds)
        self.first_bytes.observe(seconds)

    def placed(self, *, local: bool, reason: str, late: bool, seconds: float) -> None:
        """Counts an attempt. ``local``: its decode engine computes the prompt. ``late``: its first token is
        forecast later than the objective. ``seconds``: forecast time to compute the prompt."""
        side = Side.DECODE if local else Side.PREFILL
        self._placements.labels(side.value, reason).inc()
        self._work.labels(side.value).inc(seconds)
        if late:
            self._late.inc()

    def hit(self, side: Side, predicted: int, actual: int) -> None:
        """Counts the prefix-cache hits of a prompt, in tokens."""
        self._predicted_hits.labels(side.value).inc(predicted)
        self._actual_hits.labels(side.value).inc(actual)
        self._confirmed_hits.labels(side.value).inc(min(predicted, actual))

    def engines_are(self, engines: Iterable[EngineInfo]) -> None:
        """Sets the series of single engines. Engines that are gone have no series any more."""
        self._engine_ready.clear()
        self._engine_requests.clear()
        for engine in engines:
            name = str(engine.endpoint)
            for side in engine.sides:
                self._engine_ready.labels(side.value, name).set(engine.state is MemberStatus.READY)
            self._engine_requests.labels(name).set(engine.outstanding)

    def proposed(self, result: str, tokens: int) -> None:
        """Counts a proposal to load a prefix, with the tokens that were loaded."""
        self._proposals.labels(result).inc()
        self._borrowed_tokens.inc(tokens)

    def requests_in_flight(self) -> int:
        return _total(self.in_flight)

    def answered(self) -> dict[str, int]:
        """Returns {status: requests that were answered with it}."""
        return _totals(self.requests, "status")

    def retried(self) -> int:
        return _total(self.retries)

    def prefilled_locally(self) -> dict[str, int]:
        """Returns {reason: requests with a local prefill}."""
        return _totals(self.local_prefills, "reason")

    def prune(self, now: float, known: Collection[str]) -> None:
        """Removes the failures of engines that are long gone; ``known``: the URLs of the current engines."""
        counted = {
            (sample.labels["side"], sample.labels["engine"])
            for metric in self.failures.collect()
            for sample in metric.samples
        }
        engines = {engine for _, engine in counted}
        self._gone = {engine: self._gone.get(engine, now) for engine in engines.difference(known)}
        for side, engine in counted:
            if now - self._gone.get(engine, now) >= KEEP_SECONDS:
                self.failures.remove(side, engine)


def _total(metric: Counter | Gauge) -> int:
    return sum(_totals(metric, "").values())


def _totals(metric: Counter | Gauge, label: str) -> dict[str, int]:
    """Returns the metric's totals by the values of one label."""
    totals: dict[str, int] = {}
    for family in metric.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                value = sample.labels.get(label, "")
                totals[value] = totals.get(value, 0) + int(sample.value)
    return totals
