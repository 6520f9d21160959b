"""Applies a landed version to a worker's model, and reports the result. It never raises.

Engines answer one worker's error with another call's reply, or end. The senders of a version and the
controller receive its result in messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.worker.receiver import NotLanded, WeightReceiver

logger = logging.getLogger("kv_connector")

Take = Callable[[Mapping[str, torch.Tensor]], None]
"""Gives a model contents: the elements of each recorded parameter by name, flat. It has copied them when it
returns."""


class Updatable(Protocol):
    """A loaded model that takes new contents."""

    @property
    def changed(self) -> bool:
        """Whether the last new_contents() has written into the model."""

    def new_contents(self) -> AbstractContextManager[Take]: ...


def apply_version(
    receiver: WeightReceiver, name: str, version: str, model: Updatable, applied: Callable[[str], None]
) -> None:
    """Has a model take a version that has landed, or that lands round by round.

    Call it on the thread that computes, while nothing is computed. ``name``: of the worker, for logs.
    ``applied`` is called with the version once the model has it, and before the result is reported.
    """
    began = time.monotonic()
    problem = ""
    try:
        with model.new_contents() as take:
            for contents in receiver.take(version):
                take(contents)
        applied(version)
        took = (time.monotonic() - began) * 1e3
        logger.info("%s: applied version %s, in %.0f ms", name, shown(version), took)
    except NotLanded as error:
        problem = str(error)
    except Exception as error:
        logger.exception("%s: version %s was not applied", name, shown(version))
        problem = f"{type(error).__name__}: {error}"
    receiver.finish(problem, torn=bool(problem) and model.changed)
