"""Policy: which engines a completion goes to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Pool, least
from kv_connector.router.engines.prompt import Prompt
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion


@dataclass(frozen=True)
class Placement:
    prefill: Endpoint | None
    """Computes the prompt; None: the decode engine does."""
    decode: Endpoint
    reason: str
    """For whoever counts decisions."""
    work: Work | None = None
    """That the prompt is, for the one that computes it, where that was forecast."""
    prompt: Prompt | None = None
    """Where the policy wants to hear of it again."""
    late: bool = False
    """The first token is forecast to come later than it is meant to."""


class Policy(Protocol):
    """Asked in the event loop for each attempt of a request that P and D can share: it answers in 200 us, and
    keeps nothing that only it could free."""

    def place(
        self, completion: Completion, path: str, avoid: Collection[Endpoint], model: str | None = None
    ) -> Placement:
        """Of engines that take requests, those of ``avoid`` only where there are no others; NoEngine where
        there are none. ``model``: only engines that serve it."""
        ...

    def sent(self, placement: Placement) -> None:
        """Its engines have the request: here is time for what a decision need not wait for. Only of a
        placement that has its prompt."""
        ...

    def prompt_computed(self, placement: Placement, report: Computed) -> None:
        """A prefill engine has computed the prompt, and said this of it."""
        ...


class FewestOutstanding:
    """Every prompt is computed by a prefill engine; of each side, the engine with the fewest requests."""

    def __init__(self, pools: Mapping[Side, Pool]) -> None:
        self._pools = pools

    def place(
        self, completion: Completion, path: str, avoid: Collection[Endpoint], model: str | None = None
    ) -> Placement:
        return split(self._pools, avoid, "fewest_outstanding", model)

    def sent(self, placement: Placement) -> None:
        pass

    def prompt_computed(self, placement: Placement, report: Computed) -> None:
        pass


def split(
    pools: Mapping[Side, Pool], avoid: Collection[Endpoint], reason: str, model: str | None
) -> Placement:
    """A prefill and a decode engine of the same weights by the fewest requests; one that is both, and alone,
    computes the prompt where it decodes, and so does one where no two have the same."""
    shared = shared_weights(pools, avoid, model)
    if not shared:
        return Placement(None, pools[Side.DECODE].fewest(avoid, model=model), "other_weights")
    # Which of several versions: streams last longer than prompts.
    weights = least(
        [one for one in pools[Side.DECODE].choices(avoid, model=model) if one.weights in shared]
    ).weights
    prefill = pools[Side.PREFILL].fewest(avoid, weights, model)
    decode = pools[Side.DECODE].fewest({*avoid, prefill}, weights, model)
    if decode == prefill:
        return Placement(None, decode, "one_engine")
    return Placement(prefill, decode, reason)


def shared_weights(pools: Mapping[Side, Pool], avoid: Collection[Endpoint], model: str | None) -> set[str]:
    """The versions that both a prefill and a decode engine serve: what one of another has computed is of no
    use. NoEngine where a side has none."""
    prefill, decode = ({one.weights for one in pools[side].choices(avoid, model=model)} for side in Side)
    return prefill & decode
