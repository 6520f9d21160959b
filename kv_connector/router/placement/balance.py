"""Balance: between which decode engines running streams move, so that none has far more than another."""

from collections.abc import Mapping
from typing import Protocol

from kv_connector.router.engines.endpoint import Endpoint

# One engine has at least so many times as many streams as the other, and at least so many more. A move makes
# the difference smaller by two: it is two at least behind it, and never turned round.
_TIMES = 2
_MORE = 4


class Balance(Protocol):
    """Asked in the event loop, once a second."""

    def pairs(self, streams: Mapping[Endpoint, int]) -> list[tuple[Endpoint, Endpoint]]:
        """From where to where one stream is to go; an engine is in one pair at most. ``streams``: how many
        each decode engine has that takes requests, and that no move of this kind is under way at."""
        ...


class EvenStreams:
    """The engine with the most streams gives one to that with the fewest, and so on inwards."""

    def pairs(self, streams: Mapping[Endpoint, int]) -> list[tuple[Endpoint, Endpoint]]:
        order = sorted(streams, key=streams.__getitem__)
        half = len(order) // 2
        pairs = zip(reversed(order), order[:half], strict=False)
        return [(most, fewest) for most, fewest in pairs if _uneven(streams[most], streams[fewest])]


def _uneven(most: int, fewest: int) -> bool:
    return most >= _TIMES * fewest and most - fewest >= _MORE
