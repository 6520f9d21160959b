"""Policy: the choice of engines for a completion."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kv_connector.router.bodies.prompt import Prompt, TokenSizes
from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.columns import fitting_weights
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Member, Pool, least
from kv_connector.router.placement.lender import Prefix
from kv_connector.router.requests.completion import Completion

# Reason of a placement without a prefill engine.
NO_PREFILL = "no_prefill"

# Longest prompt in tokens if an engine does not list the length of its model: the longest context of models
# of 2026. Engines refuse longer prompts, so no forecast is higher.
_LONGEST = 1 << 20


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
    session: int | None = None
    """Key of the client's conversation, if the policy looks at it."""
    prefix: Prefix | None = None
    """Engine from which the engine that computes the prompt may load its beginning; None: no proposal."""
    late: bool = False
    """Whether the first token is forecast to come later than the objective."""


@dataclass(frozen=True)
class PlacementRequest:
    """An attempt of a completion that needs engines."""

    completion: Completion
    path: str
    avoid: Collection[Endpoint] = ()
    """Engines that are chosen only if no others take requests."""
    model: str | None = None
    """Only engines that serve this model; None: any."""
    session: int | None = None
    """Key of the client's conversation (session_engines.py)."""


class Policy(Protocol):
    """Chooses engines for each attempt of a request that a prefill and a decode engine can share.

    Called in the event loop: each call returns within 200 us. A policy keeps nothing that only it could free.
    """

    def place(self, request: PlacementRequest) -> Placement:
        """Chooses among engines that take requests; NoEngine if there are none."""
        ...

    def alone(self, request: PlacementRequest) -> Placement:
        """Chooses a decode engine that computes the prompt itself, because no prefill engine can. NoEngine if
        there is none."""
        ...


class FewestOutstanding:
    """Lets a prefill engine compute every prompt; chooses the engine with the fewest requests on each
    side."""

    def __init__(self, pools: Mapping[Side, Pool]) -> None:
        self._pools = pools

    def place(self, request: PlacementRequest) -> Placement:
        return split(self._pools, request, "fewest_outstanding")

    def alone(self, request: PlacementRequest) -> Placement:
        return without_prefill(self._pools, request)


def split(pools: Mapping[Side, Pool], request: PlacementRequest, reason: str) -> Placement:
    """Chooses a prefill and a decode engine whose weights fit by the fewest requests.

    The decode engine computes the prompt if the only engine has both roles, or if no two engines' weights
    fit.
    """
    prefills, decodes = choices(pools, request)
    receivers = fitting(decodes, prefills)
    if not receivers:
        return Placement(None, least(decodes).endpoint, "other_weights")
    # If several weights are possible, the decode engines' streams decide: streams last longer than prompts.
    prefill = least(fitting(prefills, [least(receivers)]))
    # An engine of both roles does not send pages to itself.
    decode = pools[Side.DECODE].fewest({*request.avoid, prefill.endpoint}, prefill.weights, request.model)
    if decode == prefill.endpoint:
        return Placement(None, decode, "one_engine")
    return Placement(prefill.endpoint, decode, reason)


def without_prefill(pools: Mapping[Side, Pool], request: PlacementRequest) -> Placement:
    """Chooses the decode engine with the fewest requests, which computes the prompt itself."""
    decode = pools[Side.DECODE].fewest(request.avoid, model=request.model)
    return Placement(None, decode, NO_PREFILL)


def choices(pools: Mapping[Side, Pool], request: PlacementRequest) -> tuple[list[Member], list[Member]]:
    """Returns the prefill and the decode engines to choose from; NoEngine if a side has no engine."""
    prefills = pools[Side.PREFILL].choices(request.avoid, model=request.model)
    return prefills, pools[Side.DECODE].choices(request.avoid, model=request.model)


def forecast_tokens(sizes: TokenSizes, prompt: Prompt, engines: Iterable[Member]) -> int:
    """Returns the forecast tokens of a prompt, at most as many as one of these engines accepts."""
    tokens = sizes.tokens(prompt)
    longest = 0
    for one in engines:
        longest = max(longest, one.workload.longest or _LONGEST)
        if longest >= tokens:
            return tokens
    return longest


def fitting(engines: Iterable[Member], others: Iterable[Member]) -> list[Member]:
    """Returns the engines whose weights fit those of some of the others.

    An engine cannot use pages that were computed with other weights.
    """
    found = list(engines)
    fit = fitting_weights({one.weights for one in found}, {one.weights for one in others})
    return [one for one in found if one.weights in fit]
