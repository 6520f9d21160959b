"""Policy: the choice of engines for a completion."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Pool, least
from kv_connector.router.engines.prompt import Prompt
from kv_connector.router.engines.workload import Workload
from kv_connector.router.requests.completion import Completion

# Reason of a placement without a prefill engine.
NO_PREFILL = "no_prefill"


@dataclass(frozen=True)
class Hits:
    """The tokens of a prompt that an engine was expected to have cached."""

    workload: Workload
    tokens: int
    of: int
    """Tokens of the whole prompt, by the same forecast."""
    confirmed: int
    """Bytes of the prompt that answers had confirmed as cached when the prompt was sent."""


@dataclass(frozen=True)
class Placement:
    prefill: Endpoint | None
    """Prefill engine that computes the prompt; None: the decode engine computes it."""
    decode: Endpoint
    reason: str
    """Reason of the choice, for the metrics."""
    work: Work | None = None
    """Forecast work of the prompt, for the engine that computes it; None: no forecast."""
    prompt: Prompt | None = None
    """The prompt; None: the policy has not looked at it."""
    tokens: int = 0
    """Forecast tokens of the prompt, for the load of the decode engine; 0: no forecast."""
    decode_cached: int = 0
    """Tokens of the prompt for which the decode engine was chosen."""
    hits: dict[Side, Hits] = field(default_factory=dict, compare=False, repr=False)
    """Expected hits of both engines, filled by CacheRecords.sent()."""
    late: bool = False
    """Whether the first token is forecast to come later than the objective."""


class Policy(Protocol):
    """Chooses engines for each attempt of a request that a prefill and a decode engine can share.

    Called in the event loop: each call returns within 200 us. A policy keeps nothing that only it could free.
    """

    def place(
        self,
        completion: Completion,
        path: str,
        avoid: Collection[Endpoint],
        model: str | None = None,
        session: int | None = None,
    ) -> Placement:
        """Chooses among engines that take requests; NoEngine if there are none.

        ``avoid``: engines that are chosen only if no others take requests. ``model``: only engines that serve
        it. ``session``: key of the client's conversation (sessions.py).
        """
        ...

    def alone(
        self,
        completion: Completion,
        path: str,
        avoid: Collection[Endpoint],
        model: str | None = None,
        session: int | None = None,
    ) -> Placement:
        """Chooses a decode engine that computes the prompt itself, because no prefill engine can. NoEngine if
        there is none."""
        ...


class FewestOutstanding:
    """Lets a prefill engine compute every prompt; chooses the engine with the fewest requests on each
    side."""

    def __init__(self, pools: Mapping[Side, Pool]) -> None:
        self._pools = pools

    def place(
        self,
        completion: Completion,
        path: str,
        avoid: Collection[Endpoint],
        model: str | None = None,
        session: int | None = None,
    ) -> Placement:
        return split(self._pools, avoid, "fewest_outstanding", model)

    def alone(
        self,
        completion: Completion,
        path: str,
        avoid: Collection[Endpoint],
        model: str | None = None,
        session: int | None = None,
    ) -> Placement:
        return Placement(None, self._pools[Side.DECODE].fewest(avoid, model=model), NO_PREFILL)


def split(
    pools: Mapping[Side, Pool], avoid: Collection[Endpoint], reason: str, model: str | None
) -> Placement:
    """Chooses a prefill and a decode engine of the same weight version by the fewest requests.

    The decode engine computes the prompt if the only engine has both roles, or if no two engines share a
    version.
    """
    shared = shared_weights(pools, avoid, model)
    if not shared:
        return Placement(None, pools[Side.DECODE].fewest(avoid, model=model), "other_weights")
    # If several versions are possible, the decode engines' streams decide: streams last longer than prompts.
    weights = least(
        [one for one in pools[Side.DECODE].choices(avoid, model=model) if one.weights in shared]
    ).weights
    prefill = pools[Side.PREFILL].fewest(avoid, weights, model)
    decode = pools[Side.DECODE].fewest({*avoid, prefill}, weights, model)
    if decode == prefill:
        return Placement(None, decode, "one_engine")
    return Placement(prefill, decode, reason)


def shared_weights(pools: Mapping[Side, Pool], avoid: Collection[Endpoint], model: str | None) -> set[str]:
    """Returns the weight versions that both a prefill and a decode engine serve; NoEngine if a side has no
    engine.

    An engine cannot use pages that were computed with another version.
    """
    prefill, decode = ({one.weights for one in pools[side].choices(avoid, model=model)} for side in Side)
    return prefill & decode
