"""Status: what the router's status page shows. Made when somebody looks, at most twice a second for all."""

import time
from collections.abc import Callable

import msgspec

from kv_connector.protocol.version import shown
from kv_connector.router.engines.incidents import Incident, Incidents
from kv_connector.router.engines.members import EngineInfo, Members
from kv_connector.router.observe.first_bytes import SLICE_SECONDS, Slice
from kv_connector.router.observe.metrics import Metrics

# Whoever asks sooner gets the same answer: many readers cost what one does.
_FRESH_SECONDS = 0.5


class EngineStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    roles: tuple[str, ...]
    state: str
    outstanding: int
    """Requests of this router's that it has, or still owes pages to."""
    silence: float | None
    """Seconds since its last word; null: it does not register, so the next three are unknown."""
    lanes: dict[str, int] | None
    """Peers that are connected, by lane."""
    transfers: int | None
    """Prompts whose KV is under way from it or to it."""
    pushing: float | None
    """Bytes of KV a second, of its first worker."""
    weights: str = ""
    """The version that it serves; only with --status-details."""
    models: tuple[str, ...] | None = None
    """The models that it lists; only with --status-details, and if they are known."""
    address: str | None = None
    """Only with --status-details."""


class FirstByteStatus(msgspec.Struct, frozen=True):
    """Seconds that clients waited for the first byte of an answer."""

    slice_seconds: int
    answers: tuple[int, ...]
    """In each slice of time, the oldest first."""
    p50: tuple[float | None, ...]
    p99: tuple[float | None, ...]
    latest: Slice
    """Of the last one or two slices."""


class FailureStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    ago: float
    """Seconds since it happened last."""
    engine: str
    """"" where it is no single engine's."""
    what: str
    times: int
    detail: str | None = None
    """Only with --status-details."""


class RouterStatus(msgspec.Struct, frozen=True):
    uptime: float
    in_flight: int
    answered: dict[str, int]
    """Since the start, by HTTP status."""
    retried: int
    prefilled_locally: dict[str, int]
    """Requests that D prefilled itself, by reason."""
    engines: tuple[EngineStatus, ...]
    first_byte: FirstByteStatus
    failures: tuple[FailureStatus, ...]
    """The latest first."""


class Status:
    """``details``: tells what only operators may know. Used from the event loop's thread only."""

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
        self._made: tuple[float, bytes] | None = None  # when, and what

    def json(self) -> bytes:
        """A RouterStatus."""
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
        activity = engine.activity
        return EngineStatus(
            name=engine.label,
            roles=tuple(side.value for side in engine.sides),
            state=engine.state.value,
            outstanding=engine.outstanding,
            silence=None if engine.silence is None else round(engine.silence, 1),
            lanes=None if activity is None else activity.lanes,
            transfers=None if activity is None else activity.transfers,
            pushing=None if activity is None else round(engine.pushing),
            weights=shown(engine.weights) if self._details else "",
            models=tuple(sorted(engine.models)) if self._details and engine.models is not None else None,
            address=str(engine.endpoint) if self._details else None,
        )

    def _failure(self, now: float, incident: Incident) -> FailureStatus:
        return FailureStatus(
            ago=round(now - incident.at, 1),
            engine=incident.engine,
            what=incident.what,
            times=incident.times,
            detail=incident.detail if self._details else None,
        )
