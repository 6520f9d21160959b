"""Balance: the choice of decode engines between which running streams move, so that none has far more than
another.
"""

from collections.abc import Mapping
from typing import Protocol

from kv_connector.router.engines.endpoint import Endpoint

# Streams move if one engine has at least _TIMES as many streams as another, and at least _MORE more. A move
# reduces the difference by two. At least two remain, so no later move reverses it.
_TIMES = 2
_MORE = 4


class Balance(Protocol):
    """Chooses moves. Called in the event loop, once a second."""

    def pairs(self, streams: Mapping[Endpoint, int]) -> list[tuple[Endpoint, Endpoint]]:
        """Returns pairs (source, target) between which one stream is to move. An engine is in at most one
        pair.

        ``streams``: number of streams of each decode engine that takes requests and has no such move in
        flight.
        """
        ...


class EvenStreams:
    """Pairs the engine with the most streams with the engine with the fewest, and so on inwards."""

    def pairs(self, streams: Mapping[Endpoint, int]) -> list[tuple[Endpoint, Endpoint]]:
        order = sorted(streams, key=streams.__getitem__)
        half = len(order) // 2
        pairs = zip(reversed(order), order[:half], strict=False)
        return [(most, fewest) for most, fewest in pairs if _uneven(streams[most], streams[fewest])]


def _uneven(most: int, fewest: int) -> bool:
    return most >= _TIMES * fewest and most - fewest >= _MORE
