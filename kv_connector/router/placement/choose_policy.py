"""choose_policy: the policy that the router's settings select."""

from __future__ import annotations

from collections.abc import Mapping

from kv_connector.router.bodies.prompt import TokenSizes
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.placement.cache_aware import CacheAware
from kv_connector.router.placement.goodput import Goodput
from kv_connector.router.placement.policy import FewestOutstanding, Policy
from kv_connector.router.placement.session_engines import SessionEngines
from kv_connector.router.settings import PolicyName, RouterSettings


def choose_policy(
    settings: RouterSettings,
    pools: Mapping[Side, Pool],
    index: PrefixIndex,
    sizes: TokenSizes,
    sessions: SessionEngines,
) -> Policy:
    """Creates the policy by which the router chooses engines."""
    if settings.objectives is not None:
        return Goodput(settings.objectives, pools, index, sizes)
    if settings.policy is PolicyName.FEWEST_OUTSTANDING:
        return FewestOutstanding(pools)
    return CacheAware(pools, index, sizes, sessions)
