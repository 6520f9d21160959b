"""Members: which engines there are, and whether each may be sent requests. Sans-IO: the time comes in.

An engine is in a router's list from the start (command line), or registers by itself. A registered one is
used once its API server has answered, not used while it is silent, draining or unreachable, and lost when
it has been silent for too long: the requests that it has are then failed at once, not when TCP notices.

Each rank of a data-parallel deployment is an engine. Their API server is one: whether it answers, and whether
it drains, holds for all of them.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kv_connector.control.membership import Activity, Leave, Register
from kv_connector.protocol.actions import Address
from kv_connector.protocol.messages import Role
from kv_connector.router.engines.breaker import Breaker
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.pool import Pool
from kv_connector.router.engines.workload import Workload

logger = logging.getLogger(__name__)

# Engines that one router keeps: far more than it can serve. Whoever has the key could else fill its memory.
MAX_ENGINES = 4096
# Looks in a row without an answer after which an engine is taken for gone.
_MISSES = 2
# Between two looks at an engine's list of models: adapters come and go while it serves.
_LEARN_S = 10.0
# Characters of that list in the log.
_LOGGED = 200
# Over which the bytes that an engine pushes are told: they are counted a transfer at a time.
_PUSHING_S = 5.0


class RefusedError(Exception):
    """A well-formed registration is refused for now. The same engine may be accepted later."""


class Side(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


_SIDES = {
    Role.PREFILL: (Side.PREFILL,),
    Role.DECODE: (Side.DECODE,),
    Role.BOTH: (Side.PREFILL, Side.DECODE),
}


class State(enum.Enum):
    READY = "ready"
    JOINING = "joining"  # its API server has not answered yet
    UNREACHABLE = "unreachable"  # it did not answer a request, and has not answered a look since
    FAILING = "failing"  # its requests fail: it gets one now and then, or where no other engine takes any
    SILENT = "silent"  # no REGISTER for a while
    DRAINING = "draining"
    ASLEEP = "asleep"  # it says so: its KV cache is not mapped
    TORN = "torn"  # it says so: new weights were not applied, and it stays paused


# FAILING is better than a refusal where no other engine is there.
TAKES_REQUESTS = (State.READY, State.FAILING)

_TROUBLES = {
    State.SILENT: "is silent: its registrations stopped",
    State.UNREACHABLE: "does not answer",
    State.FAILING: "fails one request after another",
    State.TORN: "stays paused: its new weights were not applied",
}


@dataclass
class _Engine:
    endpoint: Endpoint
    sides: tuple[Side, ...]
    listed: bool  # on the command line
    answers: bool  # its API server, as far as is known
    name: str
    label: str = ""  # EngineInfo.label
    engine_id: str = ""
    incarnation: str = ""
    replaced: str = ""  # the incarnation that was here before
    seen: float | None = None  # the last REGISTER
    activity: Activity | None = None  # what that said
    pushing: float = 0.0  # bytes a second lately, of its first worker
    joined: bool = False  # it was usable once
    misses: int = 0  # looks in a row without an answer, since it last answered
    gone: bool = False  # nothing listened there, or it missed looks: another process answers next
    draining: bool = False
    reports_drain: bool = False  # its last REGISTER
    emptied: bool = False  # its drain moves what it has to other engines
    asleep: bool = False
    torn: bool = False
    weights: str = ""
    models: frozenset[str] | None = None  # None: unknown
    learn_at: float = 0.0  # when to ask for them next
    silent: bool = False
    early_tokens: bool = False  # Register's
    workload: Workload = field(default_factory=Workload)
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def state(self) -> State:
        if self.silent:
            return State.SILENT
        if self.torn:
            return State.TORN
        if self.draining:
            return State.DRAINING
        if self.asleep:
            return State.ASLEEP
        if not self.answers:
            return State.UNREACHABLE if self.joined else State.JOINING
        return State.FAILING if self.breaker.open else State.READY


@dataclass(frozen=True)
class EngineInfo:
    """An engine as those who look at this router see it."""

    label: str
    """What it is called where its address is not to be known: "decode 2"."""
    endpoint: Endpoint
    sides: tuple[Side, ...]
    state: State
    outstanding: int
    silence: float | None
    """Seconds since its last word; None: it does not register."""
    activity: Activity | None
    pushing: float
    """Bytes a second that its first worker has pushed in the last seconds."""
    weights: str
    """The version that it serves; empty: what it was started with."""
    models: frozenset[str] | None
    """The models that its API server lists; None: unknown."""


class Members:
    """Used from the event loop's thread only; every change of an engine's state is one log line."""

    def __init__(
        self,
        pools: Mapping[Side, Pool],
        listed: Mapping[Side, Sequence[Endpoint]],
        incidents: Incidents,
        *,
        suspect: float,
        dead: float,
        needed: Collection[Side] = (Side.DECODE,),
    ) -> None:
        """``listed``: a URL that one side has several times is that of as many ranks, in their order.
        ``needed``: the sides without which no request is served.
        ``suspect``, ``dead``: seconds of silence after which a registered engine is not used, is lost.
        """
        self.needed = needed
        self._pools = pools
        self._incidents = incidents
        self._suspect = suspect
        self._dead = dead
        self._engines: dict[tuple[str, int], _Engine] = {}  # by Endpoint.place
        self._labels: dict[tuple[str, int], str] = {}  # by Endpoint.place, of those that are gone too
        self._labelled: Counter[tuple[Side, ...]] = Counter()
        self._ticked: float | None = None
        for side, endpoints in listed.items():
            ranks: Counter[str] = Counter()
            for named in endpoints:
                endpoint = replace(named, rank=ranks[named.url])
                ranks[named.url] += 1
                known = self._engines.get(endpoint.place)
                if known is not None:
                    known.sides = (*known.sides, side)
                    continue
                self._engines[endpoint.place] = _Engine(
                    endpoint, (side,), listed=True, answers=True, name=str(endpoint), joined=True
                )
        for engine in self._engines.values():
            engine.label = self._label(engine)
            self._publish(engine)

    def states(self) -> dict[Side, dict[str, State]]:
        """By side and the endpoint's name."""
        found: dict[Side, dict[str, State]] = {side: {} for side in Side}
        for engine in self._engines.values():
            for side in engine.sides:
                found[side][str(engine.endpoint)] = engine.state
        return found

    def engines(self, now: float) -> Iterator[EngineInfo]:
        """All, in the order in which they came."""
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
            )

    def label(self, endpoint: Endpoint) -> str:
        """What the engine is called where its address is not to be known."""
        return self._labels.get(endpoint.place, "an engine")

    def has_ranks(self, side: Side) -> bool:
        """Whether engines of this side share an API server."""
        return any(engine.endpoint.rank for engine in self._engines.values() if side in engine.sides)

    def registered(self, endpoint: Endpoint) -> bool:
        """Whether the engine speaks to this router by itself."""
        engine = self._engines.get(endpoint.place)
        return engine is not None and engine.seen is not None

    def early_tokens(self, endpoint: Endpoint) -> bool:
        """Whether the engine says, or goes on with, the token that was sampled behind a prompt. One that is
        listed and does not register is not known to."""
        engine = self._engines.get(endpoint.place)
        return engine is not None and engine.early_tokens

    def emptied(self, endpoint: Endpoint) -> bool:
        """Whether what it has is to go to other engines."""
        engine = self._engines.get(endpoint.place)
        return engine is not None and engine.emptied

    def of_both_sides(self, endpoint: Endpoint) -> bool:
        """Whether the engine can be a P for what it has as a D."""
        engine = self._engines.get(endpoint.place)
        return engine is not None and engine.endpoint == endpoint and len(engine.sides) == len(Side)

    def outstanding(self, url: str) -> int | None:
        """Requests from here that this API server's engines have, or still owe pages to; None if there is
        no such server."""
        served = self._served_at(url)
        if not served:
            return None
        return sum(self._pools[side].unfinished(e.endpoint) for e in served for side in e.sides)

    # --- What engines say

    def register(self, now: float, message: Register) -> Endpoint:
        """REGISTER. Returns the engine as it is known here; ValueError if the message is malformed,
        RefusedError if the engine cannot be accepted now."""
        control = Address(message.control_host, message.control_port)
        endpoint = replace(Endpoint.parse(f"{message.url}@{control}"), rank=message.rank)
        engine = self._engines.get(endpoint.place)
        if engine is not None and message.incarnation != engine.incarnation:
            # Two live processes cannot have one control address: with the same address the engine has
            # restarted. With another address, each REGISTER of either would fail the other's requests.
            heard = engine.seen is not None and now - engine.seen < self._dead
            if engine.replaced == message.incarnation or (heard and engine.endpoint != endpoint):
                raise RefusedError(
                    f"engines {message.engine_id} and {engine.name} both register as rank {message.rank} of "
                    f"{endpoint.url}. Set api_url of each engine to the URL of its own API server"
                )
        if engine is None and len(self._engines) >= MAX_ENGINES:
            raise RefusedError(f"the router has {MAX_ENGINES} engines already, its maximum")
        if engine is None or engine.endpoint != endpoint or engine.incarnation != message.incarnation:
            sides, name = _SIDES[message.role], f"{message.engine_id} at {endpoint} (control {control})"
            replacement = _Engine(endpoint, sides, listed=False, answers=False, name=name)
            replacement.engine_id, replacement.incarnation = message.engine_id, message.incarnation
            replacement.label = self._label(replacement)
            if engine is not None:
                registered = engine.seen is not None
                replacement.listed, replacement.replaced = engine.listed, engine.incarnation
                # The process that the command line named, and not another in its place?
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
        engine.early_tokens, engine.weights = message.early_tokens, message.weights
        engine.workload.hear(message.load)
        # A REGISTER that was sent before the engine knew of its drain does not end it.
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

    def leave(self, message: Leave) -> None:
        """LEAVE. What the engine still has ends by itself."""
        for engine in list(self._engines.values()):
            one, leaving = (engine.engine_id, engine.incarnation), (message.engine_id, message.incarnation)
            if engine.seen is not None and one == leaving:
                self._forget(engine, "LEFT", lost=False)

    def drain(self, url: str, *, move: bool = False) -> bool:
        """No new requests for this API server's engines. ``move``: what they have goes to others. Returns
        whether that is new."""
        served = self._served_at(url)
        new = move and any(not engine.emptied for engine in served)
        for engine in served:
            engine.emptied = engine.emptied or move
            self._update(engine, draining=True)
        return new

    def undrain(self, url: str) -> bool | None:
        """New requests again for this API server's engines. An engine that reports its drain has to end that
        first: returns whether there is one; None if there is no such server."""
        served = self._served_at(url)
        for engine in served:
            if not engine.reports_drain:
                engine.emptied = False
                self._update(engine, draining=False)
        return any(engine.draining for engine in served) if served else None

    def last(self, url: str) -> Side | None:
        """The side that has no engine for some requests without this API server's; None if other engines
        take them, of all its models, or its engines drain already."""
        served = self._served_at(url)
        if all(engine.draining for engine in served):
            return None
        endpoints = {engine.endpoint for engine in served}
        sides = {side for engine in served for side in engine.sides}
        models = {None, *(model for engine in served for model in engine.models or ())}
        for side in self.needed:
            if side in sides and not all(self._pools[side].usable(endpoints, model) for model in models):
                return side
        return None

    # --- What the router finds out itself

    def served(self, now: float, endpoint: Endpoint) -> None:
        """The engine has done its part of a request, whose answer has begun."""
        if (engine := self._known(endpoint)) is not None:
            self._update(engine, outcome=lambda breaker: breaker.succeeded(now))

    def erred(
        self, now: float, endpoint: Endpoint, reason: str, *, begun: bool = False, unsure: bool = False
    ) -> None:
        """The engine answered a request with an error of its own, or broke it off. ``begun``: after the
        beginning of its answer, which ``served`` has reported. ``unsure``: another engine may be to blame."""
        if (engine := self._known(endpoint)) is not None:
            self._update(
                engine,
                outcome=lambda breaker: breaker.failed(now, begun=begun, unsure=unsure),
                reason=reason,
            )

    def failed(self, endpoint: Endpoint, reason: str, *, gone: bool = False, missed: bool = False) -> None:
        """The engine's API server took no connection, or says that it serves nothing: it is not used until it
        answers again. ``gone``: nothing listens there. ``missed``: a look had no answer."""
        for engine in self._served_with(endpoint):
            engine.misses += missed
            engine.gone = engine.gone or gone or engine.misses >= _MISSES
            self._update(engine, answers=False, reason=reason)

    def hangs(self, endpoint: Endpoint, reason: str) -> None:
        """The engine's API server has left looks unanswered for long: as ``failed``, and what waits for its
        engines is ended, which TCP would not do where the host is well."""
        self.failed(endpoint, reason, gone=True)
        for engine in self._served_with(endpoint):
            for side in engine.sides:
                self._pools[side].end_waits(engine.endpoint)

    def to_probe(self) -> list[Endpoint]:
        """Returns one engine of each API server that is not used because it does not answer."""
        return _one_a_server(e.endpoint for e in self._engines.values() if not e.answers and not e.silent)

    def to_watch(self) -> list[Endpoint]:
        """Whose API servers are to be looked at while they are used: those that have requests, which a live
        worker's heartbeats say nothing of, answering or not; and those that answer and do not register, as
        nothing else reports their end."""
        return _one_a_server(
            e.endpoint
            for e in self._engines.values()
            if any(self._pools[side].outstanding(e.endpoint) for side in e.sides)
            or (e.answers and e.seen is None)
        )

    def answered(self, endpoint: Endpoint) -> None:
        """The API server is healthy."""
        for engine in self._served_with(endpoint):
            if not engine.answers:
                engine.breaker.close()
            # An engine that registers reports by itself that it is another process.
            restarted = engine.seen is None and engine.gone
            engine.misses, engine.gone = 0, False
            engine.emptied = engine.emptied and not restarted
            self._update(engine, answers=True, draining=engine.draining and not restarted)

    def to_learn(self, now: float) -> list[Endpoint]:
        """Returns one engine of each API server that answers and whose models are due to be read again."""
        due = [
            one for one in self._engines.values() if one.answers and not one.silent and one.learn_at <= now
        ]
        for engine in due:
            engine.learn_at = now + _LEARN_S
        return _one_a_server(engine.endpoint for engine in due)

    def learnt(self, endpoint: Endpoint, models: frozenset[str] | None) -> None:
        """The API server lists these models; None: it is unknown which."""
        for engine in self._served_with(endpoint):
            if models != engine.models:
                words = "unknown" if models is None else ", ".join(sorted(models))[:_LOGGED]
                logger.info("MODELS of %s: %s", engine.name, words)
                engine.models = models
                self._publish(engine)

    def lacks(self, side: Side, endpoint: Endpoint, model: str) -> bool:
        """The API server has answered that it does not serve this model. Returns whether another engine of
        the side may."""
        known = self._known(endpoint)
        if known is not None and known.models is not None:
            self.learnt(endpoint, known.models - {model})
        return self._pools[side].known(model) is not None

    def tick(self, now: float) -> None:
        """Acts on silence. To be called several times a second."""
        last, self._ticked = self._ticked, now
        if last is not None and now - last > self._suspect:
            # This router was not running: that it heard nothing says nothing about the engines.
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
        """None if another process is in its place by now."""
        engine = self._engines.get(endpoint.place)
        return engine if engine is not None and engine.endpoint == endpoint else None

    def _served_at(self, url: str) -> list[_Engine]:
        return [engine for engine in self._engines.values() if engine.endpoint.url == url]

    def _served_with(self, endpoint: Endpoint) -> list[_Engine]:
        """The engines of this one's API server; none if another process is in its place by now."""
        return [] if self._known(endpoint) is None else self._served_at(endpoint.url)

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
        if state is State.READY:
            engine.joined = True
        if state is not before:
            level = logging.INFO if state in (State.READY, State.DRAINING, State.ASLEEP) else logging.WARNING
            logger.log(level, "%s: %s%s", state.name, engine.name, f": {reason}" if reason else "")
            if state in _TROUBLES:
                self._incidents.note(engine.label, _TROUBLES[state], reason)
        self._publish(engine)

    def _publish(self, engine: _Engine) -> None:
        # What is both prefills for others only where nothing else does: it has streams, and their next engine
        # asks it for pages.
        for side in engine.sides:
            reserve = side is Side.PREFILL and len(engine.sides) == len(Side)
            self._pools[side].set_usable(
                engine.endpoint,
                engine.state in TAKES_REQUESTS,
                engine.workload,
                engine.breaker,
                reserve=reserve,
                weights=engine.weights,
                models=engine.models,
            )

    def _withdraw(self, engine: _Engine, *, lost: bool) -> None:
        for side in engine.sides:
            self._pools[side].remove(engine.endpoint, lost=lost)

    def _forget(self, engine: _Engine, why: str, *, lost: bool) -> None:
        logger.log(logging.WARNING if lost else logging.INFO, "%s: %s", why, engine.name)
        if lost:
            self._incidents.note(engine.label, "is declared dead: it gives no sign of life", "")
        self._withdraw(engine, lost=lost)
        del self._engines[engine.endpoint.place]
        if engine.listed:
            # The command line's word stands: it may come back without registering.
            again = _Engine(engine.endpoint, engine.sides, True, answers=False, name=engine.name, joined=True)
            again.label = engine.label
            self._engines[engine.endpoint.place] = again
            self._publish(again)

    def _label(self, engine: _Engine) -> str:
        """For a new engine; one that comes back to its place has its old one."""
        role = " and ".join(side.value for side in engine.sides)
        label = self._labels.get(engine.endpoint.place, "")
        if label.rpartition(" ")[0] != role:
            if len(self._labels) > 2 * MAX_ENGINES:
                self._labels.clear()  # of engines long gone, most
            self._labelled[engine.sides] += 1
            label = self._labels[engine.endpoint.place] = f"{role} {self._labelled[engine.sides]}"
        return label


def _one_a_server(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    return list({endpoint.url: endpoint for endpoint in endpoints}.values())
