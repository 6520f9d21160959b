"""UnlikeCheckpoints: models whose engines were started from checkpoints that differ."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict

from kv_connector.router.engines.members import Members, Side

logger = logging.getLogger(__name__)

_Served = tuple[str, str]
"""A weight version, and the element types of the quantised checkpoint."""
# Models and checkpoints that the line names, and characters of a model's name.
_MOST = 8
_LONGEST = 100


class UnlikeCheckpoints:
    """Warns once of each model while this lasts. Used from the event loop's thread only.

    A replacement of the checkpoint is one cause, and two models under one name are the other. The router does
    not pair such engines in either case. The models of engines that have not joined are unknown.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reported: set[tuple[str, _Served]] = set()

    def look(self) -> None:
        """Compares the checkpoints of all engines that list a model."""
        found: defaultdict[tuple[str, _Served], defaultdict[str, Counter[Side]]]
        found = defaultdict(lambda: defaultdict(Counter))
        for engine in self._members.engines(time.monotonic()):
            version, checkpoint = engine.weights
            if checkpoint is None:
                continue
            for model in engine.models or ():
                found[model, (version, checkpoint.storage)][checkpoint.digest].update(engine.sides)
        unlike = {served: digests for served, digests in found.items() if len(digests) > 1}
        # A model and its adapters are one line.
        lines: defaultdict[str, list[str]] = defaultdict(list)
        for model, served in sorted(unlike.keys() - self._reported):
            digests = unlike[model, served]
            counts = ", ".join(f"{one} ({_counted(digests[one])})" for one in sorted(digests)[:_MOST])
            lines[counts].append(model[:_LONGEST])
        for counts, models in lines.items():
            more = f" and {len(models) - _MOST} more" if len(models) > _MOST else ""
            logger.warning(
                "UNLIKE CHECKPOINTS: model %s%s is served from %s. The router does not pair prefill and "
                "decode engines of different ones.",
                ", ".join(models[:_MOST]),
                more,
                counts,
            )
        self._reported = set(unlike)


def _counted(sides: Counter[Side]) -> str:
    return ", ".join(f"{count} {side.value}" for side, count in sides.items())
