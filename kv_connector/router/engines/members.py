"""Members: which engines exist, and whether each may be sent requests. Sans-IO: the time is an argument.

An engine is in a router's list from the start (command line), or registers by itself. A registered engine is
used once its API server has answered. It is not used while it is silent, draining or unreachable. It is lost
when it has been silent for too long: its requests then fail at once, not when TCP notices.

Each rank of a data-parallel deployment is an engine. The ranks share one API server: whether it answers, and
whether it drains, holds for all of them.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kv_connector.control.membership import Activity, Leave, Register
from kv_connector.protocol.actions import Address
from kv_connector.protocol.session.checkpoint import UNREPORTED, Weights
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.breaker import Breaker
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.labels import Labels
from kv_connector.router.engines.places import Places
from kv_connector.router.engines.pool import Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.workload import CacheUse, Workload

logger = logging.getLogger(__name__)

# Engines that one router keeps: far more than it can serve. Else a holder of the key could fill its memory.
MAX_ENGINES = 4096
# Unanswered health checks in a row after which an engine is assumed to be gone.
_MISSES = 2
# Pause between two requests for an engine's list of models: adapters come and go while it serves.
_LEARN_S = 10.0
# Engines of which that is requested at the same moment, or a tenth of all engines if that is more.
_LEARN_AT_ONCE = 16
# Characters of that list in the log.
_LOGGED = 200
# Time over which an engine's push rate is averaged: bytes are counted per transfer.
_PUSHING_S = 5.0


class RefusedRegistrationError(Exception):
    """A well-formed registration is refused for now. The same engine may be accepted later."""


class Side(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"  # for pictures: listed only, and on no other side


# The sides that every request needs.
TEXT_SIDES = (Side.PREFILL, Side.DECODE)
_SIDES = {Role.PREFILL: (Side.PREFILL,), Role.DECODE: (Side.DECODE,), Role.BOTH: TEXT_SIDES}


class MemberStatus(enum.Enum):
    READY = "ready"
    JOINING = "joining"  # its API server has not answered yet
    UNREACHABLE = "unreachable"  # a request was not answered, and no health check has been answered since
    FAILING = "failing"  # its requests fail: it gets one now and then, or if no other engine takes requests
    SILENT = "silent"  # no REGISTER for a while
    DRAINING = "draining"
    ASLEEP = "asleep"  # as it reports: its KV cache is not mapped
    TORN = "torn"  # as it reports: new weights were not applied, and it stays paused


# If no other engine is available, FAILING is better than a refusal.
TAKES_REQUESTS = (MemberStatus.READY, MemberStatus.FAILING)

_TROUBLES = {
    MemberStatus.SILENT: "is silent: its registrations stopped",
    MemberStatus.UNREACHABLE: "does not answer",
    MemberStatus.FAILING: "fails one request after another",
    MemberStatus.TORN: "stays paused: its new weights were not applied",
}


@dataclass
class _Engine:
    endpoint: Endpoint
    sides: tuple[Side, ...]
    listed: bool  # named on the command line
    answers: bool  # whether its API server answers, as far as is known
    name: str
    label: str = ""  # see EngineInfo.label
    engine_id: str = ""
    incarnation: str = ""
    replaced: str = ""  # the previous incarnation at this place
    seen: float | None = None  # time of the latest REGISTER
    activity: Activity | None = None  # the activity in the latest REGISTER
    pushing: float = 0.0  # bytes per second lately, from its first worker
    joined: bool = False  # it has been usable once
    misses: int = 0  # unanswered health checks in a row since its last answer
    gone: bool = False  # no process listened, or health checks were missed: another process answers next
    draining: bool = False
    reports_drain: bool = False  # whether its latest REGISTER reports a drain
    emptied: bool = False  # its drain moves its streams to other engines
    asleep: bool = False
    torn: bool = False
    weights: Weights = UNREPORTED
    models: frozenset[str] | None = None  # None: unknown
    learn_at: float = 0.0  # when to request the models next
    silent: bool = False
    early_tokens: bool = False  # as reported by its REGISTER, like the next three
    prefixes: str = ""
    borrows: bool = False
    prefetches: bool = False
    workload: Workload = field(default_factory=Workload)
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def state(self) -> MemberStatus:
        if self.silent:
            return MemberStatus.SILENT
        if self.torn:
            return MemberStatus.TORN
        if self.draining:
            return MemberStatus.DRAINING
        if self.asleep:
            return MemberStatus.ASLEEP
        if not self.answers:
            return MemberStatus.UNREACHABLE if self.joined else MemberStatus.JOINING
        return MemberStatus.FAILING if self.breaker.open else MemberStatus.READY


@dataclass(frozen=True)
class EngineInfo:
    """An engine as the status page and other observers see it."""

    label: str
    """Label that does not reveal the address, such as "decode 2"."""
    endpoint: Endpoint
    sides: tuple[Side, ...]
    state: MemberStatus
    outstanding: int
    silence: float | None
    """Seconds since its latest REGISTER; None: it does not register."""
    activity: Activity | None
    pushing: float
    """Bytes per second that its first worker has pushed in the last seconds."""
    weights: Weights
    """The weights that it serves."""
    models: frozenset[str] | None
    """Models that its API server lists; None: unknown."""
    use: CacheUse
    """Use of its prefix cache by this router's requests."""


class Members:
    """The known engines and their states. Every change of a state is one log line.

    Used from the event loop's thread only.
    """

    def __init__(
        self,
        pools: Mapping[Side, Pool],
        listed: Mapping[Side, Sequence[Endpoint]],
        incidents: Incidents,
        *,
        suspect: float,
        dead: float,
        needed: Collection[Side] = (Side.DECODE,),
        index: PrefixIndex | None = None,
    ) -> None:
        """``listed``: engines of the command line by side. A URL that a side lists several times has as many
        ranks, in that order. ``needed``: the sides without which no request is served. ``suspect``, ``dead``:
        seconds of silence after which a registered engine is not used, and is lost. ``index``: gets the
        prefix caches of all engines."""
        self.needed = needed
        self.index = PrefixIndex() if index is None else index
        self._pools = pools
        self._incidents = incidents
        self._suspect = suspect
        self._dead = dead
        self._engines: Places[_Engine] = Places()
        self._labels = Labels(2 * MAX_ENGINES)
        self._ticked: float | None = None
        for endpoint, sides in _listed(listed):
            self._list(_Engine(endpoint, sides, listed=True, answers=True, name=str(endpoint), joined=True))

    def states(self) -> dict[Side, dict[str, MemberStatus]]:
        """Returns {side: {endpoint as text: state}}. A router without encoder engines has two sides."""
        found: dict[Side, dict[str, MemberStatus]] = {Side.PREFILL: {}, Side.DECODE: {}}
        for engine in self._engines.values():
            for side in engine.sides:
                found.setdefault(side, {})[str(engine.endpoint)] = engine.state
        return found

    def engines(self, now: float) -> Iterator[EngineInfo]:
        """Yields all engines, in the order in which they came."""
        for engine in self._engines.values():
            yield EngineInfo(
                engine.label,
                engine.endpoint,
                engine.sides,
                engine.state,
                sum(self._pools[side].unfinished(engine.endpoint) for side in engine.sides),
                None if engine.seen is None else now - engine.seen,
                engine.activity,
                engine.pushing,
                engine.weights,
                engine.models,
                engine.workload.use,
            )

    def label(self, endpoint: Endpoint) -> str:
        """Returns the engine's label, which does not reveal its address."""
        return self._labels.get(endpoint.place)

    def has_ranks(self, side: Side) -> bool:
        """Returns whether engines of this side share an API server."""
        return any(engine.endpoint.rank for engine in self._engines.values() if side in engine.sides)

    def registered(self, endpoint: Endpoint) -> bool:
        """Returns whether the engine registers with this router."""
        engine = self._engines.get(endpoint.place)
        return engine is not None and engine.seen is not None

    def early_tokens(self, endpoint: Endpoint) -> bool:
        """Returns whether the engine supports early first tokens, as its REGISTER reports. A listed engine
        that does not register is not known to."""
        engine = self._engines.get(endpoint.place)
        return engine is not None and engine.early_tokens

    def emptied(self, endpoint: Endpoint) -> bool:
        """Returns whether a drain moves the engine's streams to other engines."""
        engine = self._engines.get(endpoint.place)
        return engine is not None and engine.emptied

    def of_both_sides(self, endpoint: Endpoint) -> bool:
        """Returns whether the engine can be the prefill engine for streams that it has as a decode engine."""
        engine = self._engines.get(endpoint.place)
        return engine is not None and engine.endpoint == endpoint and len(engine.sides) > 1

    def outstanding(self, url: str) -> int | None:
        """Returns this router's requests at the API server's engines, including those whose pages are still
        to be fetched; None if no engine has this API server."""
        served = self._engines.at(url)
        if not served:
            return None
        return sum(self._pools[side].unfinished(e.endpoint) for e in served for side in e.sides)

    # --- What engines report

    def register(self, now: float, message: Register) -> Endpoint:
        """Handles REGISTER; returns the engine's endpoint.

        ValueError if the message is malformed, RefusedRegistrationError if the engine cannot be accepted now.
        """
        control = Address(message.control_host, message.control_port)
        endpoint = replace(Endpoint.parse(f"{message.url}@{control}"), rank=message.rank)
        engine = self._engines.get(endpoint.place)
        if engine is not None and message.incarnation != engine.incarnation:
            # Two live processes cannot have one control address: with the same address the engine has
            # restarted. With another address, each REGISTER of either would fail the other's requests.
            heard = engine.seen is not None and now - engine.seen < self._dead
            if engine.replaced == message.incarnation or (heard and engine.endpoint != endpoint):
                raise RefusedRegistrationError(
                    f"engines {message.engine_id} and {engine.name} both register as rank {message.rank} of "
                    f"{endpoint.url}. Set each engine's api_url to the URL of the API server that serves it"
                )
        if engine is None and len(self._engines) >= MAX_ENGINES:
            raise RefusedRegistrationError(f"the router has {MAX_ENGINES} engines already, its maximum")
        if engine is None or engine.endpoint != endpoint or engine.incarnation != message.incarnation:
            sides, name = _SIDES[message.role], f"{message.engine_id} at {endpoint} (control {control})"
            replacement = _Engine(endpoint, sides, listed=False, answers=False, name=name)
            replacement.engine_id, replacement.incarnation = message.engine_id, message.incarnation
            replacement.label = self._label(replacement)
            if engine is not None:
                registered = engine.seen is not None
                replacement.listed, replacement.replaced = engine.listed, engine.incarnation
                # Whether this may be the process that the command line named, and not another in its place.
                replacement.answers = replacement.joined = not registered and engine.answers
                self._withdraw(engine, lost=registered)
            logger.info("%s: %s engine %s", replacement.state.name, message.role.value, name)
            engine = self._engines[endpoint.place] = replacement
        if engine.seen is not None and engine.activity is not None and message.activity is not None:
            pushed = message.activity.bytes_pushed - engine.activity.bytes_pushed
            elapsed = now - engine.seen
            engine.pushing *= max(0.0, 1 - elapsed / _PUSHING_S)
            engine.pushing += pushed / max(_PUSHING_S, elapsed)
        engine.seen, engine.activity = now, message.activity
        weights = Weights(message.weights, message.checkpoint)
        if message.asleep or engine.weights != weights:
            # Sleep unmaps the KV cache. With other weights the engine has dropped its KV.
            engine.workload.cache.clear()
        engine.weights, engine.early_tokens, engine.prefixes = weights, message.early_tokens, message.prefixes
        engine.borrows, engine.prefetches = message.borrows, message.prefetches
        engine.workload.hear(message.load, keeps_answers=message.keeps_answers)
        # A REGISTER that was sent before the engine knew of its drain does not end the drain.
        draining = message.draining or (engine.draining and not engine.reports_drain)
        engine.reports_drain, engine.emptied = message.draining, engine.emptied and draining
        self._update(
            engine,
            silent=False,
            draining=draining,
            asleep=message.asleep,
            torn=bool(message.torn),
            reason=message.torn,
        )
        return endpoint

    def relist(self, listed: Mapping[Side, Sequence[Endpoint]]) -> None:
        """Replaces the list of the command line. An engine that is listed anew is used once it answers.

        Requests of an engine that is no longer listed continue. An engine that registers stays.
        """
        wanted = {endpoint.place: (endpoint, sides) for endpoint, sides in _listed(listed)}
        for engine in list(self._engines.values()):
            engine.listed = engine.endpoint.place in wanted
            registers = engine.seen is not None
            if not registers and wanted.get(engine.endpoint.place) != (engine.endpoint, engine.sides):
                engine.listed = False
                self._forget(engine, "REMOVED", lost=False)
        for place, (endpoint, sides) in wanted.items():
            if place not in self._engines:
                engine = _Engine(endpoint, sides, listed=True, answers=False, name=str(endpoint))
                logger.info("%s: %s, which is listed now", engine.state.name, engine.name)
                self._list(engine)

    def leave(self, message: Leave) -> None:
        """Handles LEAVE. The engine's running requests end by themselves."""
        for engine in list(self._engines.values()):
            one, leaving = (engine.engine_id, engine.incarnation), (message.engine_id, message.incarnation)
            if engine.seen is not None and one == leaving:
                self._forget(engine, "LEFT", lost=False)

    def drain(self, url: str, *, move: bool = False) -> bool:
        """Stops new requests for this API server's engines.

        ``move``: their streams go to other engines. Returns whether that is new.
        """
        served = self._engines.at(url)
        new = move and any(not engine.emptied for engine in served)
        for engine in served:
            engine.emptied = engine.emptied or move
            self._update(engine, draining=True)
        return new

    def undrain(self, url: str) -> bool | None:
        """Allows new requests again for this API server's engines. An engine that reports its drain has to
        end it first.

        Returns whether an engine still drains; None if no engine has this API server.
        """
        served = self._engines.at(url)
        for engine in served:
            if not engine.reports_drain:
                engine.emptied = False
                self._update(engine, draining=False)
        return any(engine.draining for engine in served) if served else None

    def last(self, url: str) -> Side | None:
        """Returns the side that would lack an engine for some requests without this API server's engines.

        None if other engines take the requests of all its models, or if all its engines drain already.
        """
        served = self._engines.at(url)
        if all(engine.draining for engine in served):
            return None
        endpoints = {engine.endpoint for engine in served}
        sides = {side for engine in served for side in engine.sides}
        models = {None, *(model for engine in served for model in engine.models or ())}
        for side in self.needed:
            if side in sides and not all(self._pools[side].usable(endpoints, model) for model in models):
                return side
        return None

    # --- What the router observes itself

    def served(self, now: float, endpoint: Endpoint) -> None:
        """Notes that the engine has done its part of a request, whose answer has begun."""
        if (engine := self._known(endpoint)) is not None:
            self._update(engine, outcome=lambda breaker: breaker.succeeded(now))

    def erred(
        self, now: float, endpoint: Endpoint, reason: str, *, begun: bool = False, unsure: bool = False
    ) -> None:
        """Notes that the engine answered a request with its own error, or broke the request off.

        ``begun``: after the beginning of its answer, which ``served`` has reported. ``unsure``: another
        engine may be to blame.
        """
        if (engine := self._known(endpoint)) is not None:
            self._update(engine, outcome=lambda b: b.failed(now, begun=begun, unsure=unsure), reason=reason)

    def failed(self, endpoint: Endpoint, reason: str, *, gone: bool = False, missed: bool = False) -> None:
        """Notes that the engine's API server accepted no connection, or reports that it serves nothing. The
        engine is not used until it answers again.

        ``gone``: no process listens there. ``missed``: a health check had no answer.
        """
        for engine in self._served_with(endpoint):
            engine.misses += missed
            engine.gone = engine.gone or gone or engine.misses >= _MISSES
            self._update(engine, answers=False, reason=reason)

    def hangs(self, endpoint: Endpoint, reason: str) -> None:
        """Notes that the engine's API server has left health checks unanswered for long.

        Does the same as ``failed``, and ends what waits for its engines. TCP would not do that while the host
        is well.
        """
        self.failed(endpoint, reason, gone=True)
        for engine in self._served_with(endpoint):
            for side in engine.sides:
                self._pools[side].end_waits(engine.endpoint)

    def to_probe(self) -> list[Endpoint]:
        """Returns one engine of each API server that is not used because it does not answer."""
        return _one_a_server(e.endpoint for e in self._engines.values() if not e.answers and not e.silent)

    def to_watch(self) -> list[Endpoint]:
        """Returns one engine of each API server whose health is to be checked while it is used.

        That includes API servers with requests: a worker's heartbeats do not show whether its API server
        answers. It also includes API servers that answer and do not register: nothing else reports their end.
        """
        return _one_a_server(
            e.endpoint
            for e in self._engines.values()
            if any(self._pools[side].outstanding(e.endpoint) for side in e.sides)
            or (e.answers and e.seen is None)
        )

    def answered(self, endpoint: Endpoint) -> None:
        """Notes that the API server is healthy."""
        for engine in self._served_with(endpoint):
            if not engine.answers:
                engine.breaker.close()
            # An engine that registers reports by itself that it is another process.
            restarted = engine.seen is None and engine.gone
            engine.misses, engine.gone = 0, False
            if restarted:
                engine.workload.cache.clear()
            engine.emptied = engine.emptied and not restarted
            self._update(engine, answers=True, draining=engine.draining and not restarted)

    def to_learn(self, now: float) -> list[Endpoint]:
        """Returns one engine of each API server whose models are due to be read again: a part of many."""
        answering = (one for one in self._engines.values() if one.answers and not one.silent)
        # Engines that joined together would all be read at once: a thousand connections every ten seconds.
        # New engines come first: an engine without a list gets requests for any model.
        due = sorted((one for one in answering if one.learn_at <= now), key=lambda one: one.learn_at)
        due = due[: max(_LEARN_AT_ONCE, len(self._engines) // 10)]
        for engine in due:
            engine.learn_at = now + _LEARN_S
        return _one_a_server(engine.endpoint for engine in due)

    def learnt(self, endpoint: Endpoint, models: frozenset[str] | None, longest: int | None = None) -> None:
        """Notes the models that the API server lists; None: unknown. ``longest``: the most tokens that they
        accept; None: no news."""
        for engine in self._served_with(endpoint):
            engine.workload.longest = longest or engine.workload.longest
            if models != engine.models:
                words = "unknown" if models is None else ", ".join(sorted(models))[:_LOGGED]
                logger.info("MODELS of %s: %s", engine.name, words)
                engine.models = models
                self._publish(engine)

    def lacks(self, side: Side, endpoint: Endpoint, model: str) -> bool:
        """Notes the API server's answer that it does not serve this model. Returns whether another engine of
        the side may."""
        known = self._known(endpoint)
        if known is not None and known.models is not None:
            self.learnt(endpoint, known.models - {model})
        return self._pools[side].known(model) is not None

    def tick(self, now: float) -> None:
        """Acts on silence. To be called several times a second."""
        last, self._ticked = self._ticked, now
        if last is not None and now - last > self._suspect:
            # This router was not running: that it received nothing indicates nothing about the engines.
            for engine in self._engines.values():
                engine.seen = None if engine.seen is None else now
        for engine in list(self._engines.values()):
            engine.breaker.tick(now)
            if engine.seen is None:
                continue
            silence = now - engine.seen
            if silence >= self._dead:
                self._forget(engine, "DEAD", lost=True)
            elif silence >= self._suspect:
                self._update(engine, silent=True)

    # --- Steps

    def _known(self, endpoint: Endpoint) -> _Engine | None:
        """Returns the engine; None if another process is in its place by now."""
        engine = self._engines.get(endpoint.place)
        return engine if engine is not None and engine.endpoint == endpoint else None

    def _served_with(self, endpoint: Endpoint) -> list[_Engine]:
        """Returns the engines of this engine's API server; none if another process is in its place by now."""
        return [] if self._known(endpoint) is None else self._engines.at(endpoint.url)

    def _update(
        self,
        engine: _Engine,
        *,
        answers: bool | None = None,
        silent: bool | None = None,
        draining: bool | None = None,
        asleep: bool | None = None,
        torn: bool | None = None,
        outcome: Callable[[Breaker], None] | None = None,
        reason: str = "",
    ) -> None:
        before = engine.state
        if outcome is not None:
            outcome(engine.breaker)
        engine.answers = engine.answers if answers is None else answers
        engine.silent = engine.silent if silent is None else silent
        engine.draining = engine.draining if draining is None else draining
        engine.asleep = engine.asleep if asleep is None else asleep
        engine.torn = engine.torn if torn is None else torn
        state = engine.state
        if state is MemberStatus.READY:
            engine.joined = True
        if state is not before:
            expected = (MemberStatus.READY, MemberStatus.DRAINING, MemberStatus.ASLEEP)
            level = logging.INFO if state in expected else logging.WARNING
            logger.log(level, "%s: %s%s", state.name, engine.name, f": {reason}" if reason else "")
            if state in _TROUBLES:
                self._incidents.note(engine.label, _TROUBLES[state], reason)
        self._publish(engine)

    def _list(self, engine: _Engine) -> None:
        """Adds an engine of the command line."""
        self._engines[engine.endpoint.place] = engine
        engine.label = self._label(engine)
        self._publish(engine)

    def _publish(self, engine: _Engine) -> None:
        self.index.add(engine.workload.cache)
        # An engine of both roles prefills for others only if no other engine does. It has streams, and each
        # decode engine that gets such a prompt requests pages from it.
        for side in engine.sides:
            reserve = side is Side.PREFILL and len(engine.sides) > 1
            self._pools[side].set_usable(
                engine.endpoint,
                engine.state in TAKES_REQUESTS,
                engine.workload,
                engine.breaker,
                reserve=reserve,
                weights=engine.weights,
                models=engine.models,
                prefixes=engine.prefixes,
                borrows=engine.borrows,
                prefetches=engine.prefetches,
            )

    def _withdraw(self, engine: _Engine, *, lost: bool) -> None:
        self.index.remove(engine.workload.cache)
        for side in engine.sides:
            self._pools[side].remove(engine.endpoint, lost=lost)

    def _forget(self, engine: _Engine, why: str, *, lost: bool) -> None:
        logger.log(logging.WARNING if lost else logging.INFO, "%s: %s", why, engine.name)
        if lost:
            self._incidents.note(engine.label, "is declared dead: it gives no sign of life", "")
        self._withdraw(engine, lost=lost)
        del self._engines[engine.endpoint.place]
        if engine.listed:
            # The command line still names the engine: it may come back without registering.
            again = _Engine(engine.endpoint, engine.sides, True, answers=False, name=engine.name, joined=True)
            again.label = engine.label
            self._engines[engine.endpoint.place] = again
            self._publish(again)

    def _label(self, engine: _Engine) -> str:
        return self._labels.assign(engine.endpoint.place, [side.value for side in engine.sides])


def _one_a_server(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    return list({endpoint.url: endpoint for endpoint in endpoints}.values())


def _listed(listed: Mapping[Side, Sequence[Endpoint]]) -> list[tuple[Endpoint, tuple[Side, ...]]]:
    """Returns the listed engines with their sides.

    A URL that a side lists several times has as many ranks, in that order.
    """
    found: dict[tuple[str, int], tuple[Endpoint, tuple[Side, ...]]] = {}
    for side, endpoints in listed.items():
        ranks: Counter[str] = Counter()
        for named in endpoints:
            endpoint = replace(named, rank=ranks[named.url])
            ranks[named.url] += 1
            first, sides = found.get(endpoint.place, (endpoint, ()))
            found[endpoint.place] = first, (*sides, side)
    return list(found.values())
