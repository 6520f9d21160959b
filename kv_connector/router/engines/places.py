"""Places: what a router knows of each engine, by the engine's place and by its API server."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class Places(dict[tuple[str, int], T]):
    """A dictionary by Endpoint.place that also finds all engines of one API server.

    With a thousand engines, a search through all of them for each health check would take a tenth of a core.
    Only item assignment and deletion change it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._servers: dict[str, dict[int, T]] = {}  # by URL and rank

    def __setitem__(self, place: tuple[str, int], engine: T) -> None:
        super().__setitem__(place, engine)
        url, rank = place
        self._servers.setdefault(url, {})[rank] = engine

    def __delitem__(self, place: tuple[str, int]) -> None:
        super().__delitem__(place)
        url, rank = place
        served = self._servers[url]
        del served[rank]
        if not served:
            del self._servers[url]

    def at(self, url: str) -> list[T]:
        """Returns the engines of the API server at this URL."""
        return list(self._servers.get(url, {}).values())
