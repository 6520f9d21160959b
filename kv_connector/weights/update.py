"""Update: a version that a trainer pushes, with the progress of each engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Literal

from kv_connector.weights.wire.links import LinkError

Stage = Literal["landed", "applied"]


class PushError(RuntimeError):
    """A version did not reach an engine. The message names the engine, the stage and the reason."""


class Update:
    """A version that a trainer pushes. It records the progress of each engine."""

    def __init__(self, version: str, engines: Sequence[str], identity: str = "") -> None:
        """``identity``: the name that engines give the version. Default: ``version``."""
        self.version = version
        self.identity = identity or version
        self.pause_seconds: dict[str, float] = {}
        """Pause of each engine, in seconds. Rank 0 has it if the controller applied the version."""
        self._done: dict[Stage, dict[str, Future[None]]] = {
            "landed": {engine: Future() for engine in engines},
            "applied": {engine: Future() for engine in engines},
        }

    def wait(self, stage: Stage = "applied", timeout: float = 60.0) -> None:
        """Blocks until all engines have reached the stage.

        Raises PushError with each engine that has not, and the reason. If an engine has no room beside its
        weights, its version lands when it is applied.

        Ranks other than the first learn the stage from the workers to which they write. They do not wait for
        engines to which they write nothing.
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

    def ended(self, engine: str) -> bool:
        """Returns whether the engine has applied the version, or failed."""
        return self._done["applied"][engine].done()

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
