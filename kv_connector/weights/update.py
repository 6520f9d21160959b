"""Update: a version that a trainer pushes, and how far each engine has come with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Literal

from kv_connector.weights.links import LinkError

Stage = Literal["landed", "applied"]


class PushError(RuntimeError):
    """A version did not get where it should; the message says which engine, where it stopped, and why."""


class Update:
    """A version that a trainer pushes. It records for each engine how far that has come."""

    def __init__(self, version: str, engines: Sequence[str], identity: str = "") -> None:
        """``identity``: the name that engines give the version. Default: ``version``."""
        self.version = version
        self.identity = identity or version
        self.pause_seconds: dict[str, float] = {}
        """Seconds that each engine paused. Rank 0 has them where the controller applied the version."""
        self._done: dict[Stage, dict[str, Future[None]]] = {
            "landed": {engine: Future() for engine in engines},
            "applied": {engine: Future() for engine in engines},
        }

    def wait(self, stage: Stage = "applied", timeout: float = 60.0) -> None:
        """Blocks until all engines are there; raises PushError with all that are not, and why. At an engine
        that has no room beside what it serves a version has landed when it is applied.

        Other ranks than the first hear of it from the workers that they write to; where there are none of an
        engine, they do not wait for it.
        """
        deadline = time.monotonic() + timeout
        problems = []
        for engine, future in self._done[stage].items():
            try:
                future.result(max(deadline - time.monotonic(), 0))
            except FutureTimeoutError:
                problems.append(f"{engine}: not {stage} within {timeout:g} s")
            except LinkError as error:
                problems.append(f"{engine}: {error}")
        if problems:
            raise PushError(f"version {self.version}: {'; '.join(problems)}")

    def reached(self, engine: str, stage: Stage) -> None:
        """Notes that the engine has reached this stage, and the stages before it."""
        for futures in [self._done["landed"], self._done[stage]]:
            _resolve(futures[engine], None)

    def failed(self, engine: str, reason: str) -> None:
        for futures in self._done.values():
            _resolve(futures[engine], LinkError(reason))


def _resolve(future: Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
