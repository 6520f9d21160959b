"""UnlikeCheckpoints: models whose engines were started from checkpoints that differ."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict

from kv_connector.router.engines.members import EngineInfo, Members, Side

logger = logging.getLogger(__name__)

_Served = tuple[str, str, str]
"""A model, its weight version, and the element types of its quantised checkpoint."""
# Checkpoints that the line names.
_MOST = 8


class UnlikeCheckpoints:
    """Warns once of each model while this lasts. Used from the event loop's thread only.

    A replacement of the checkpoint is one cause, and two models under one name are the other. The router does
    not pair such engines in either case.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reported: set[_Served] = set()

    def look(self) -> None:
        """Compares the checkpoints of all engines that list a model."""
        found: defaultdict[_Served, defaultdict[str, Counter[Side]]]
        found = defaultdict(lambda: defaultdict(Counter))
        for engine in self._members.engines(time.monotonic()):
            for served, digest in _served(engine):
                found[served][digest].update(engine.sides)
        unlike = {served: digests for served, digests in found.items() if len(digests) > 1}
        for served in sorted(unlike.keys() - self._reported):
            digests = unlike[served]
            logger.warning(
                "UNLIKE CHECKPOINTS: model %s is served from %s. The router does not pair prefill and decode "
                "engines of different ones.",
                served[0] or "(unknown)",
                ", ".join(f"{one} ({_counted(digests[one])})" for one in sorted(digests)[:_MOST]),
            )
        self._reported = set(unlike)


def _served(engine: EngineInfo) -> list[tuple[_Served, str]]:
    """Returns what the engine serves, with the digest of its checkpoint; nothing if that is unknown."""
    version, checkpoint = engine.weights
    if checkpoint is None:
        return []
    # The models of an engine are unknown until its API server answers.
    models = engine.models or {""}
    return [((model, version, checkpoint.storage), checkpoint.digest) for model in models]


def _counted(sides: Counter[Side]) -> str:
    return ", ".join(f"{count} {side.value}" for side, count in sides.items())
