"""WeightWorker: one worker's side of weight updates, in SGLang's scheduler process."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch

from kv_connector.sglang.internals import (
    check_takes_weights,
    gather,
    is_disaggregated,
    own_host,
    recomputes_retracted,
    tensor_rank,
    tensor_ranks,
)
from kv_connector.sglang.settings import read_weight_settings
from kv_connector.sglang.weights.settling import Settling
from kv_connector.sglang.weights.updatable_model import UpdatableModel
from kv_connector.weights.worker.applying import apply_version
from kv_connector.weights.worker.start_receiver import WorkerPlace, start_receiver

_ATTRIBUTE = "kv_connector_weights"
"""Name of the attribute of a model, and of its scheduler, that has the WeightWorker."""


class WeightWorker:
    """Created once in each scheduler process, after SGLang has loaded the model."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """BLOCKS until all workers of the engine listen. Raises ValueError for wrong settings."""
        self.served = ""
        """Identity of the version that the model has. Empty: the weights that the server was started with."""
        self.torn = False
        """Whether the engine has parts of two versions, until the scheduler has noticed. Set at the engine's
        first worker alone."""
        self.tried = ""
        """Identity of the version that this worker tried last. Empty: none since the engine had a whole
        one."""
        self._model = UpdatableModel(model, device)
        place = WorkerPlace(tensor_rank(), tensor_ranks(), own_host())
        self._name = place.name
        self._receiver = start_receiver(
            read_weight_settings(os.environ, device.type),
            place,
            device,
            self._model.record,
            gather,
            self._stays_paused,
        )

    def apply(self, version: str) -> None:
        """Applies a version that has landed. Does not raise: the receiver reports the result."""
        self.tried, self.torn = version, False
        apply_version(self._receiver, self._name, version, self._model, self._applied)

    def close(self) -> None:
        self._receiver.close()

    def _stays_paused(self, reason: str) -> None:
        """The controller reports, on the receiver's thread, why the engine stays paused, or "" if it has
        resumed."""
        if reason:
            self.torn = True
        else:
            self.tried = ""

    def _applied(self, version: str) -> None:
        self.served = version


def start_worker(scheduler: Any) -> None:
    """Starts the worker of this scheduler. Raises errors whose messages say what to change."""
    runner = scheduler.tp_worker.model_runner
    check_takes_weights(runner.model, runner.model_config.quantization)
    device = torch.device(runner.device, runner.gpu_id) if runner.device != "cpu" else torch.device("cpu")
    worker = WeightWorker(runner.model, device)
    atexit.register(worker.close)
    for owner in (scheduler, runner.model):
        setattr(owner, _ATTRIBUTE, worker)
    if is_disaggregated():
        scheduler.kv_connector_settling = Settling(scheduler, recomputes=recomputes_retracted())


def worker_of(owner: Any) -> WeightWorker:
    """Returns the worker of a scheduler or of a model."""
    worker: WeightWorker = getattr(owner, _ATTRIBUTE)
    return worker
