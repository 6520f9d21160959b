"""vLLM's weight transfer backend ``write_imm``: weights land in an arena of each worker while it serves.

In streaming mode they land in a pause. vLLM constructs the backend after it has loaded the model. From then
on trainers may join and write. Only an update uses vLLM's own calls: the controller requests it in a pause.
These calls never raise, because vLLM answers one worker's error with another call's reply. The senders of a
version and the controller receive its result in messages.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from kv_connector.protocol.actions import Address
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.internals import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from kv_connector.vllm.process import adopt_vllm_logging, default_host, gather_from_workers, worker_connectors
from kv_connector.vllm.weights.loaded_model import LoadedModel
from kv_connector.weights.settings import weight_settings
from kv_connector.weights.worker.applying import apply_version
from kv_connector.weights.worker.start_receiver import WorkerPlace, start_receiver

logger = logging.getLogger("kv_connector")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Has no fields: trainers connect to the workers."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    version: str


class WriteImmWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        """Starts the receiver.

        Raises ValueError if this engine cannot take weights, or its settings are wrong.
        """
        super().__init__(config, vllm_config, device, model)
        adopt_vllm_logging()
        self._model = LoadedModel(model, vllm_config, device)
        if (refusal := self._model.refusal()) is not None:
            raise ValueError(f"this engine cannot take weights: {refusal}")
        parallel = vllm_config.parallel_config
        place = WorkerPlace(parallel.rank, parallel.world_size, default_host(), parallel.data_parallel_index)
        self._name = place.name
        self._receiver = start_receiver(
            weight_settings(os.environ, device.type),
            place,
            device,
            self._model.record,
            gather_from_workers,
            self._torn,
            self._controlled,
        )
        if (method := self._model.drafter()) is not None:
            logger.warning(
                "%s: updates do not change the draft model (%s), which keeps its weights. Fewer of its "
                "tokens are accepted with each update",
                self._name,
                method,
            )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Does nothing: the constructor has done all."""

    def start_weight_update(self) -> None:
        """Does nothing: the model stays as it is until weights have landed."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Applies the version that has landed, or that lands round by round.

        Does not raise: see the module.
        """
        apply_version(self._receiver, self._name, update_info.version, self._model, self._applied)

    def finish_weight_update(self) -> None:
        """Does nothing: receive_weights() has done all."""

    def shutdown(self) -> None:
        self._receiver.close()

    def _applied(self, version: str) -> None:
        for connector in _connectors():
            connector.set_weights(version)

    def _torn(self, reason: str) -> None:
        for connector in _connectors():
            connector.set_torn(reason)

    def _controlled(self, controller: Address) -> None:
        for connector in _connectors():
            connector.set_controller(controller)


def _connectors() -> list[WriteImmConnector]:
    """Returns the WriteImmConnectors of this worker, which are made after its model."""
    return [one for one in worker_connectors() if isinstance(one, WriteImmConnector)]
