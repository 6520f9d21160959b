"""Labels: names of engines that do not reveal their addresses, such as "decode 2"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Labels:
    """The label of each place of an engine. An engine that comes back to its place gets its old label."""

    def __init__(self, most: int) -> None:
        """``most``: places that are remembered, also of engines that are gone."""
        self._most = most
        self._labels: dict[tuple[str, int], str] = {}  # by Endpoint.place
        self._labelled: Counter[str] = Counter()

    def get(self, place: tuple[str, int]) -> str:
        """Returns the label of a place. A place without one is "an engine"."""
        return self._labels.get(place, "an engine")

    def assign(self, place: tuple[str, int], sides: Sequence[str]) -> str:
        """Returns the label for a new engine with these sides."""
        role = " and ".join(sides)
        label = self._labels.get(place, "")
        if label.rpartition(" ")[0] != role:
            if len(self._labels) > self._most:
                self._labels.clear()  # most are of engines long gone
            self._labelled[role] += 1
            label = self._labels[place] = f"{role} {self._labelled[role]}"
        return label
