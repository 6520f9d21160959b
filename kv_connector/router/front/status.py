"""Status: the data of the router's status page. It is computed on request, at most twice a second for all
readers.
"""

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from kv_connector.protocol.wire.weight_version import shown
from kv_connector.router.engines.incidents import Incident, Incidents
from kv_connector.router.engines.members import EngineInfo, Members
from kv_connector.router.engines.workload import CacheUse
from kv_connector.router.observe.first_bytes import SLICE_SECONDS, Slice
from kv_connector.router.observe.metrics import Metrics

# A reader who requests the status earlier gets the same answer: many readers cost as much as one.
_FRESH_SECONDS = 0.5


class CacheStatus(msgspec.Struct, frozen=True):
    """Tokens of prompts, as far as the engine has reported its hits."""

    predicted: int
    """Tokens that the router expected in the engine's prefix cache."""
    actual: int
    """Tokens that were there."""
    borrowed: dict[str, int]
    """Tokens that the engine loaded from other engines' caches, by the name of that engine."""


class EngineStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    roles: tuple[str, ...]
    state: str
    outstanding: int
    """This router's requests at the engine, and requests whose pages are still to be fetched from it."""
    silence: float | None
    """Seconds since the engine's latest registration. null: the engine does not register, so the next three
    fields are unknown."""
    lanes: dict[str, int] | None
    """Number of connected peers, by lane."""
    transfers: int | None
    """Prompts whose KV is in flight from or to the engine."""
    pushing: float | None
    """Bytes of KV per second that the engine's first worker pushes."""
    cache: CacheStatus | None = None
    """Use of the prefix cache; absent until the engine has reported hits."""
    weights: str = ""
    """Weight version that the engine serves; only with --status-details."""
    checkpoint: str = ""
    """Digest of the checkpoint whose weights the engine serves; only with --status-details, and if it is
    known."""
    models: tuple[str, ...] | None = None
    """Models that the engine lists; only with --status-details, and if they are known."""
    address: str | None = None
    """Address of the engine; only with --status-details."""


class FirstByteStatus(msgspec.Struct, frozen=True):
    """Seconds that clients waited for the first byte of an answer."""

    slice_seconds: int
    answers: tuple[int, ...]
    """Answers in each slice of time, the oldest slice first."""
    p50: tuple[float | None, ...]
    p99: tuple[float | None, ...]
    latest: Slice
    """The latest one or two slices together."""


class FailureStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    ago: float
    """Seconds since the failure happened last."""
    engine: str
    """Label of the engine; "" if the failure belongs to no single engine."""
    what: str
    times: int
    detail: str | None = None
    """Error message with addresses and ids; only with --status-details."""


class RouterStatus(msgspec.Struct, frozen=True):
    uptime: float
    in_flight: int
    answered: dict[str, int]
    """Requests answered since the start, by HTTP status."""
    retried: int
    prefilled_locally: dict[str, int]
    """Local prefills, by reason."""
    engines: tuple[EngineStatus, ...]
    first_byte: FirstByteStatus
    failures: tuple[FailureStatus, ...]
    """Recent failures, the latest first."""


class Status:
    """Computes the status. ``details``: include facts that only operators may know.

    Used from the event loop's thread only.
    """

    def __init__(
        self,
        members: Members,
        metrics: Metrics,
        incidents: Incidents,
        *,
        details: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._metrics = metrics
        self._incidents = incidents
        self._details = details
        self._clock = clock
        self._started = clock()
        self._made: tuple[float, bytes] | None = None  # time and JSON of the latest status

    def json(self) -> bytes:
        """Returns a RouterStatus as JSON."""
        now = self._clock()
        if self._made is None or now - self._made[0] >= _FRESH_SECONDS:
            self._made = now, msgspec.json.encode(self._look(now))
        return self._made[1]

    def _look(self, now: float) -> RouterStatus:
        metrics, slices = self._metrics, self._metrics.first_bytes.slices()
        return RouterStatus(
            uptime=round(now - self._started, 1),
            in_flight=metrics.requests_in_flight(),
            answered=metrics.answered(),
            retried=metrics.retried(),
            prefilled_locally=metrics.prefilled_locally(),
            engines=tuple(self._engine(engine) for engine in self._members.engines(now)),
            first_byte=FirstByteStatus(
                SLICE_SECONDS,
                tuple(one.answers for one in slices),
                tuple(one.p50 for one in slices),
                tuple(one.p99 for one in slices),
                metrics.first_bytes.latest(),
            ),
            failures=tuple(self._failure(now, incident) for incident in self._incidents.latest()),
        )

    def _engine(self, engine: EngineInfo) -> EngineStatus:
        activity, checkpoint = engine.activity, engine.weights.checkpoint
        return EngineStatus(
            name=engine.label,
            roles=tuple(side.value for side in engine.sides),
            state=engine.state.value,
            outstanding=engine.outstanding,
            silence=None if engine.silence is None else round(engine.silence, 1),
            lanes=None if activity is None else activity.lanes,
            transfers=None if activity is None else activity.transfers,
            pushing=None if activity is None else round(engine.pushing),
            cache=self._cache(engine.use),
            weights=shown(engine.weights.version) if self._details else "",
            checkpoint=checkpoint.digest if self._details and checkpoint is not None else "",
            models=tuple(sorted(engine.models)) if self._details and engine.models is not None else None,
            address=str(engine.endpoint) if self._details else None,
        )

    def _cache(self, use: CacheUse) -> CacheStatus | None:
        if not (use.predicted or use.actual or use.borrowed):
            return None
        borrowed: Counter[str] = Counter()
        for lender, tokens in use.borrowed.items():
            borrowed[self._members.label(lender)] += tokens
        return CacheStatus(use.predicted, use.actual, borrowed)

    def _failure(self, now: float, incident: Incident) -> FailureStatus:
        return FailureStatus(
            ago=round(now - incident.at, 1),
            engine=incident.engine,
            what=incident.what,
            times=incident.times,
            detail=incident.detail if self._details else None,
        )
