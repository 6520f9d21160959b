"""Attempt: one try to serve a request with a prefill and a decode engine, and the router's parts that it
uses.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from kv_connector.router.bodies.fields import Content
from kv_connector.router.bodies.prompt import TokenSizes
from kv_connector.router.engines.client import EngineClient
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import Lease, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.observe.spans import Spans
from kv_connector.router.placement.choose_policy import choose_policy
from kv_connector.router.placement.policy import FewestOutstanding, Placement, Policy
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.placement.session_engines import SessionEngines
from kv_connector.router.requests.completion import Body, Completion, prefix_params
from kv_connector.router.settings import RouterSettings
from kv_connector.router.streams.calls import Call, Calls
from kv_connector.router.streams.holds import PrefillHold, PrefillHolds
from kv_connector.router.streams.prefetches import Prefetches


@dataclass(frozen=True)
class Components:
    """The parts of the router that its dispatcher and attempts use."""

    pools: Mapping[Side, Pool]
    members: Members
    calls: Calls
    policy: Policy
    learns: bool
    """Whether prompts and answers are recorded in the index: only if the policy looks there."""
    caches: CacheRecords
    holds: PrefillHolds
    metrics: Metrics
    incidents: Incidents
    spans: Spans
    prefetches: Prefetches | None
    """None: no answers are prefetched."""
    patience: float
    """Seconds that a prefill engine has for its own answer after the decode engine's."""

    @classmethod
    def of(
        cls,
        settings: RouterSettings,
        client: EngineClient,
        metrics: Metrics,
        incidents: Incidents,
        spans: Spans,
    ) -> Components:
        """Creates the parts for these settings."""
        pools = {side: Pool() for side in Side}
        index, sizes, sessions = PrefixIndex(), TokenSizes(), SessionEngines()
        members = Members(
            pools,
            {
                Side.PREFILL: settings.prefill,
                Side.DECODE: settings.decode,
                Side.ENCODER: settings.encoders,
            },
            incidents,
            suspect=settings.suspect,
            dead=settings.dead,
            needed=(
                Side.DECODE,
                *([Side.PREFILL] if settings.require_prefill else []),
                *([Side.ENCODER] if settings.require_encoder else []),
            ),
            index=index,
        )
        policy = choose_policy(settings, pools, index, sizes, sessions)
        learns = not isinstance(policy, FewestOutstanding)
        caches = CacheRecords(sizes, sessions, metrics.hit, metrics.proposed)
        prefetches = None
        if learns and settings.prefetch_answers:
            prefetches = Prefetches(pools, client, caches, metrics, settings.patience)
        return cls(
            pools=pools,
            members=members,
            calls=Calls(client, members, metrics, incidents, spans),
            policy=policy,
            learns=learns,
            caches=caches,
            holds=PrefillHolds(pools, client, settings.patience),
            metrics=metrics,
            incidents=incidents,
            spans=spans,
            prefetches=prefetches,
            patience=settings.patience,
        )

    def fits(self, prefill: Endpoint, decode: Endpoint) -> bool:
        """Returns whether the decode engine can use the prefill engine's pages, by the weights of both."""
        return self.pools[Side.DECODE].weights(decode).fits(self.pools[Side.PREFILL].weights(prefill))


@dataclass(frozen=True)
class Attempt:
    """A request, and the engines that are chosen to serve it."""

    completion: Completion
    call: Call
    placement: Placement
    prefill: Endpoint
    """The placement's prefill engine."""
    transfer_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def prefill_body(self, *, serial: bool, early: bool = False) -> Content:
        """Returns the body for the prefill engine. ``serial``, ``early``: as of Completion.prefill_body()."""
        prefix = proposal(self.placement)
        return self.completion.prefill_body(self.transfer_id, serial=serial, early=early, prefix=prefix)

    def begin_decode(self, parts: Components, decode: Lease) -> bool:
        """Does the same as Calls.begin(), for an answer that may be prefetched."""
        engines = self.prefill, decode.endpoint
        prefetches = parts.prefetches is not None and parts.prefetches.able(*engines)
        return parts.calls.begin(self.call, decode, prefetches=prefetches)

    def hold(self, holds: PrefillHolds, prefill: Lease) -> PrefillHold:
        return PrefillHold(holds, self.transfer_id, prefill, self.call)


def proposal(placement: Placement) -> Body | None:
    """Returns the placement's proposal as parameters for the engine that computes the prompt; None: it has
    none."""
    prefix = placement.prefix
    return None if prefix is None else prefix_params(prefix.lender, prefix.tokens)
