"""Pool: the engines of one side, which of them take requests, and the requests of each."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from kv_connector.protocol.session.checkpoint import UNREPORTED, Weights
from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.breaker import Breaker
from kv_connector.router.engines.columns import Columns, Rows
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.prefix_cache import Pin
from kv_connector.router.engines.recent_work import RecentWork
from kv_connector.router.engines.workload import Workload

# Models whose engines are kept in rows: more than the engines of one router list.
_MOST_ROWS = 64


class NoEngine(Exception):
    """No engine of this side takes requests, or no engine that serves the model."""

    def __init__(self, pool: Pool, model: str | None = None) -> None:
        super().__init__("no engine takes requests")
        self.pool = pool
        self.model = model


class EngineLost(Exception):
    """An engine was declared dead while it had a request."""

    def __init__(self) -> None:
        super().__init__("the engine gives no sign of life")


@dataclass(eq=False)
class Member:
    endpoint: Endpoint
    workload: Workload
    usable: bool
    reserve: bool = False
    """Whether it takes requests only if no regular engine does."""
    weights: Weights = UNREPORTED
    """The weights that it serves."""
    models: frozenset[str] | None = None
    """Models that it lists; None: unknown."""
    prefixes: str = ""
    """Key of its block hashes: it lends prefixes to engines with the same key. Empty: it lends none."""
    borrows: bool = False
    """Whether it loads the prefixes that this router proposes."""
    prefetches: bool = False
    """Whether it loads prefixes for later requests, and computes nothing for that."""
    breaker: Breaker = field(default_factory=Breaker)
    outstanding: int = 0
    context: int = 0
    """Forecast tokens of the prompts of its outstanding requests, where the lease names them."""
    begun: int = 0
    """The part of ``context`` whose prompts are computed."""
    recent: RecentWork | None = None
    """Tokens that it was given lately; None: it has come, or come back, and begins at its peers' level."""
    used: int = 0
    """Its place in the order of last use."""
    row: int = -1
    """Its row in the pool's columns."""
    owes: int = 0
    """Requests that it has answered, and whose pages are still to be fetched from it."""
    lost: bool = False
    chosen_by: tuple[bool, bool, Weights, frozenset[str] | None] | None = None
    """The properties by which requests chose it, as of the latest set_usable()."""
    waits: set[Callable[[], None]] = field(default_factory=set)
    """Functions that end what waits for the engine, to be called when it is lost."""

    @property
    def takes(self) -> bool:
        """Whether it takes requests, and they do not fail."""
        return self.usable and not self.breaker.open

    @property
    def failing(self) -> bool:
        """Whether its requests fail. It takes requests only if no other engine does, except for a trial now
        and then."""
        return self.breaker.open and not self.breaker.trial

    def serves(self, model: str | None) -> bool:
        """Returns whether it may have the model. None: any model."""
        return model is None or self.models is None or model in self.models

    def end_waits(self) -> None:
        for end in list(self.waits):
            end()


class Lease:
    """The claim of one request on an engine, until it is released.

    The engine's recent work includes the request from the beginning, so that the next placement sees it. It
    does so no longer if the lease is released before the prompt is computed: the engine has refused the
    request, or the request was cancelled.
    """

    def __init__(
        self, member: Member, work: Work | None, context: int = 0, prompt: Prompt | None = None
    ) -> None:
        self._member = member
        self._work = work
        self.context = context
        """Tokens of the prompt that it decodes behind: a forecast, or the engine's count."""
        self.prompt = prompt
        """The prompt; None: nothing is to be learned from it."""
        self.expected = 0 if prompt is None else member.workload.cache.cached(prompt)
        """Bytes of the prompt that the engine was expected to have cached."""
        self._recent = member.recent
        self._charged_at = member.workload.clock()
        self._charge = 0
        self._set_charge(context or (0 if work is None else work.tokens))
        self._computed = False
        self._released = False
        self._owing = 0  # number of `owing` blocks
        self._pin: Pin | None = None
        member.outstanding += 1
        member.context += context
        member.breaker.taken()
        self._loading = 0  # tokens of the engine's room that are counted for what it is about to have
        if work is not None:
            member.workload.backlog.add(work)
        tokens = context if work is None else work.tokens + work.cached
        if prompt is not None and 0 < tokens < (member.workload.longest or math.inf):
            # A forecast ends at the longest prompt. The engine refuses that prompt, and drops nothing for it.
            self._loading = tokens - prompt.tokens_of(self.expected, tokens)
            self.pin()  # first: the engine drops other prefixes for the rest of the prompt
            member.workload.cache.load(self._loading)
        member.workload.changed()

    @property
    def endpoint(self) -> Endpoint:
        return self._member.endpoint

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Guards a block that waits for the engine: raises EngineLost as soon as the engine is lost."""
        try:
            async with asyncio.timeout(None) as scope:
                with self.when_lost(lambda: _expire(scope)):
                    yield
        except TimeoutError:
            if scope.expired():
                raise EngineLost from None
            raise

    @contextmanager
    def when_lost(self, end: Callable[[], None]) -> Iterator[None]:
        """Has ``end`` called if the engine is lost within a block; EngineLost if it is lost already. For many
        short waits this costs less than alive() in each of them."""
        if self._member.lost:
            raise EngineLost
        self._member.waits.add(end)
        try:
            yield
        finally:
            self._member.waits.discard(end)

    @property
    def workload(self) -> Workload:
        """The workload of the engine's process."""
        return self._member.workload

    def prompt_computed(self) -> None:
        """Notes that the engine has computed the prompt, or has received its KV."""
        if not self._computed and not self._released:
            self._member.begun += self.context
        self._computed = True
        self._leave_queue()
        self.workload.changed()

    def pin(self) -> None:
        """Notes that the engine uses the blocks of what it has of the prompt, until the lease is released and
        all `owing` blocks have ended.

        A further call notes that the engine has more of the prompt by then.
        """
        if self.prompt is not None and not self._released:
            self._pin = self._pin or Pin(self.prompt.prefixes)
            self.workload.cache.pin(self._pin)

    def answers(self, tokens: int) -> None:
        """Notes that the engine takes blocks for an answer of about so many tokens, until the lease is
        released."""
        if self.prompt is not None and not self._released:
            self._loading += tokens
            self.workload.cache.load(tokens)

    def end_loading(self) -> None:
        """Notes that the engine has what it was about to have, or that it does not come."""
        self.workload.cache.load(-self._loading)
        self._loading = 0

    def _end_pin(self) -> None:
        if self._pin is not None:
            self.workload.cache.unpin(self._pin)
        self._pin = None

    def counted(self, tokens: int) -> None:
        """Corrects the forecast of the tokens that the request costs the engine."""
        if self.context and not self._released:
            self._member.context += tokens - self.context
            self._member.begun += tokens - self.context if self._computed else 0
            self.context = tokens
        if self._computed or not self._released:
            self._set_charge(tokens)
        self.workload.changed()

    @contextmanager
    def owing(self) -> Iterator[None]:
        """Guards a block until whose end pages are to be fetched from the engine.

        The engine counts as busy until then, whether the lease is released or not. Blocks may overlap, and
        count once.
        """
        self._member.owes += self._released and not self._owing
        self._owing += 1
        try:
            yield
        finally:
            self._owing -= 1
            if self._released and not self._owing:
                self._member.owes -= 1
                self._end_pin()

    def release(self) -> None:
        """Ends the lease. To be called once."""
        self._leave_queue()
        if not self._owing:
            self._end_pin()
        if not self._computed:
            self._set_charge(0)
        self._released = True
        self._member.outstanding -= 1
        self._member.context -= self.context
        self._member.begun -= self.context if self._computed else 0
        self._member.owes += bool(self._owing)
        self.workload.changed()

    def _leave_queue(self) -> None:
        if self._work is not None:
            self._member.workload.backlog.remove(self._work)
        self.end_loading()

    def _set_charge(self, tokens: int) -> None:
        """Makes the request count for so many tokens of the engine's recent work."""
        if self._recent is not None:
            more = tokens - self._charge
            self._recent.add(more, self._charged_at, self._member.workload.clock())
        self._charge = tokens


class Pool:
    """Hands out engines. Used from the event loop's thread only."""

    def __init__(self, endpoints: Sequence[Endpoint] = ()) -> None:
        # Kept in the order of last use: min() takes the first of equals, so equals take turns.
        self._members: dict[Endpoint, Member] = {}
        self._columns = Columns()
        self._uses = itertools.count()
        self._rows: dict[str | None, Rows] = {}
        """The latest rows() without engines to avoid, by model, while they are valid."""
        self._changed: asyncio.Event = asyncio.Event()
        self._watchers: list[Callable[[], None]] = []
        for endpoint in endpoints:
            self._add(Member(endpoint, Workload(), usable=True))

    def watch(self, changed: Callable[[], None]) -> None:
        """Has ``changed`` called when the engines that can be chosen change."""
        self._watchers.append(changed)

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._members)

    def usable(self, avoid: Collection[Endpoint] = (), model: str | None = None) -> bool:
        """Returns whether an engine that is not in ``avoid`` takes requests for the model."""
        return any(member.endpoint not in avoid for member in self._usable(model))

    def failing(self, model: str | None = None) -> bool:
        """Returns whether no engine takes requests for the model, or only engines whose requests fail."""
        return all(one.failing for one in self._members.values() if one.usable and one.serves(model))

    def known(self, model: str | None) -> str | None:
        """Returns the model, if an engine may serve it. None: engines are chosen without regard to the model,
        and the chosen engine answers for itself."""
        return model if any(member.serves(model) for member in self._members.values()) else None

    def models(self) -> set[str]:
        """Returns all models that are listed by engines which take requests."""
        return {name for member in self._usable(None) for name in member.models or ()}

    def has(self, endpoint: Endpoint) -> bool:
        """Returns whether the pool has the engine, which may take no requests."""
        return endpoint in self._members

    def takes(self, endpoint: Endpoint) -> bool:
        """Returns whether the pool has the engine, and it takes requests that do not fail."""
        member = self._members.get(endpoint)
        return member is not None and member.takes

    def outstanding(self, endpoint: Endpoint) -> int:
        return self._members[endpoint].outstanding if endpoint in self._members else 0

    def unfinished(self, endpoint: Endpoint) -> int:
        """Returns the outstanding requests, and the requests that are to fetch pages from the engine. If the
        engine ends, all of them fail."""
        member = self._members.get(endpoint)
        return 0 if member is None else member.outstanding + member.owes

    def caches_filled(self) -> float:
        """Returns the KV caches that the computed prompts of outstanding requests fill, in whole caches of an
        engine. Engines that do not report the size of their cache are left out."""
        return sum(
            member.begun / load.cache_tokens
            for member in self._members.values()
            if (load := member.workload.load) is not None and load.cache_tokens
        )

    def workload(self, endpoint: Endpoint) -> Workload | None:
        """Returns the engine's workload; None: the pool does not have the engine."""
        member = self._members.get(endpoint)
        return None if member is None else member.workload

    def member(self, endpoint: Endpoint) -> Member | None:
        """Returns the engine; None: the pool does not have it."""
        return self._members.get(endpoint)

    def weights(self, endpoint: Endpoint) -> Weights:
        """Returns the weights that the engine serves."""
        return self._members[endpoint].weights if endpoint in self._members else UNREPORTED

    def set_usable(
        self,
        endpoint: Endpoint,
        usable: bool,
        workload: Workload | None = None,
        breaker: Breaker | None = None,
        *,
        reserve: bool = False,
        weights: Weights = UNREPORTED,
        models: frozenset[str] | None = None,
        prefixes: str = "",
        borrows: bool = False,
        prefetches: bool = False,
    ) -> None:
        """Sets whether the engine takes new requests; its running requests continue.

        A new engine is added, with its workload and its breaker. ``reserve``: use it only if no regular
        engine is usable. ``weights``, ``prefixes``, ``borrows``, ``prefetches``: as of Member. ``models``:
        the models that it lists.
        """
        member = self._members.get(endpoint)
        before = None if member is None else member.chosen_by
        if member is None:
            member = Member(endpoint, workload or Workload(), usable, breaker=breaker or Breaker())
            self._add(member)
        member.usable, member.reserve, member.weights = usable, reserve, weights
        member.models, member.prefixes = models, prefixes
        member.borrows, member.prefetches = borrows, prefetches
        if not member.takes:
            # Its recent work halves while its peers work. When it comes back, it gets no more than its part.
            member.recent = None
        member.workload.changed()
        member.chosen_by = (member.takes, reserve, weights, models)
        self._changed.set()
        if member.chosen_by != before:
            self._notify()

    def remove(self, endpoint: Endpoint, *, lost: bool) -> None:
        """Removes the engine. ``lost``: its requests fail; else they end by themselves."""
        member = self._members.pop(endpoint, None)
        if member is None:
            return
        self._columns.remove(member)
        if lost:
            member.lost = True
            member.end_waits()
        self._notify()

    def end_waits(self, endpoint: Endpoint) -> None:
        """Ends what waits for the engine as if it were lost; the engine stays."""
        if endpoint in self._members:
            self._members[endpoint].end_waits()

    def choices(
        self, avoid: Collection[Endpoint] = (), weights: Weights | None = None, model: str | None = None
    ) -> list[Member]:
        """Returns the engines that take requests; NoEngine if there is none.

        Engines of ``avoid`` are left out if others remain, then failing engines, then engines in reserve.
        ``weights``, ``model``: only engines whose weights fit these, that serve this model.
        """
        usable = self._usable(model)
        if weights is not None:
            usable = [member for member in usable if member.weights.fits(weights)]
        if not usable:
            raise NoEngine(self, model)
        if avoid:
            usable = [member for member in usable if member.endpoint not in avoid] or usable
        if any(member.breaker.open for member in usable):
            usable = [member for member in usable if not member.failing] or usable
        return [member for member in usable if not member.reserve] or usable

    def rows(self, avoid: Collection[Endpoint] = (), model: str | None = None) -> Rows:
        """Returns the ``choices`` as rows, to be used before anything else is awaited."""
        found = None if avoid else self._rows.get(model)
        if found is None:
            found = Rows.of(self._columns, self.choices(avoid, model=model))
            # A breaker allows its trial, and takes it back, without a change of the engine's properties.
            if not avoid and not any(member.breaker.open for member in self._members.values()):
                if len(self._rows) >= _MOST_ROWS:  # an engine without a list may have any model
                    self._rows.clear()
                self._rows[model] = found
        return found

    def fewest(
        self, avoid: Collection[Endpoint] = (), weights: Weights | None = None, model: str | None = None
    ) -> Endpoint:
        """Returns, of the ``choices``, the engine with the fewest outstanding requests; equals take turns."""
        return least(self.choices(avoid, weights, model)).endpoint

    def partner(
        self, other: Pool, engine: Endpoint, avoid: Collection[Endpoint], model: str | None = None
    ) -> Endpoint:
        """Returns a partner for an engine of the other side, or of this side.

        It is the engine with the fewest requests among those whose weights fit, or among all if no engine's
        do.
        """
        choices, weights = self.choices({*avoid, engine}, model=model), other.weights(engine)
        return least([one for one in choices if one.weights.fits(weights)] or choices).endpoint

    def peer(self, other: Pool, engine: Endpoint, model: str | None = None) -> Endpoint:
        """Returns an engine that may have a session with an engine of the other side; NoEngine if none has.

        One that takes no requests, such as one that is drained, is better than none. An engine whose weights
        do not fit has no session.
        """
        weights = other.weights(engine)
        with suppress(NoEngine):
            return self.fewest(weights=weights, model=model)
        fit = [one for one in self._serving(model) if one.weights.fits(weights)]
        if not fit:
            raise NoEngine(self, model)
        return least(fit).endpoint

    def acquire(
        self,
        endpoint: Endpoint,
        work: Work | None = None,
        context: int = 0,
        prompt: Prompt | None = None,
    ) -> Lease:
        """Leases one of the ``choices``; NoEngine if it has been removed.

        ``work``: what it is to compute. ``context``: forecast tokens of the prompt that it decodes behind.
        ``prompt``: the prompt, if the engine's cache is to be learned.
        """
        if endpoint not in self._members:
            raise NoEngine(self)
        member = self._members[endpoint] = self._members.pop(endpoint)
        member.used = next(self._uses)
        return Lease(member, work, context, prompt)

    @contextmanager
    def lease(
        self,
        endpoint: Endpoint,
        work: Work | None = None,
        context: int = 0,
        prompt: Prompt | None = None,
    ) -> Iterator[Lease]:
        """Leases an engine for the length of a block."""
        lease = self.acquire(endpoint, work, context, prompt)
        try:
            yield lease
        finally:
            lease.release()

    async def wait_usable(self, seconds: float, model: str | None = None) -> None:
        """Returns as soon as an engine takes requests for the model, or when the time is up."""
        try:
            async with asyncio.timeout(seconds):
                while not self.usable(model=model):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _add(self, member: Member) -> None:
        self._members[member.endpoint] = member
        member.used = next(self._uses)
        self._columns.add(member)

    def _notify(self) -> None:
        self._rows.clear()
        for changed in self._watchers:
            changed()

    def _usable(self, model: str | None) -> list[Member]:
        return [member for member in self._serving(model) if member.usable]

    def _serving(self, model: str | None) -> Iterable[Member]:
        members = self._members.values()
        return members if model is None else [member for member in members if member.serves(model)]


def _expire(scope: asyncio.Timeout) -> None:
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


def least(members: Sequence[Member]) -> Member:
    """Returns the member with the fewest outstanding requests; of equals the first."""
    return min(members, key=lambda member: member.outstanding)
