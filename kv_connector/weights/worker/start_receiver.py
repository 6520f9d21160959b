"""Starts the receiver of one worker of an engine, whatever the engine's program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kv_connector.protocol.actions import Address
from kv_connector.weights.mapping.geometry import Geometry, Tensor
from kv_connector.weights.settings import SETTINGS_VARIABLE, WeightSettings
from kv_connector.weights.worker.receiver import ReceiverConfig, WeightReceiver

logger = logging.getLogger("kv_connector")


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place in its engine, of which each data-parallel rank has ``ranks`` workers.

    ``host``: address of its machine.
    """

    rank: int
    ranks: int
    host: str
    data_parallel_index: int = 0

    @property
    def name(self) -> str:
        """Name of the worker in logs and at peers."""
        return f"weights/{self.data_parallel_index * self.ranks + self.rank}"


def start_receiver(
    given: WeightSettings,
    place: WorkerPlace,
    device: torch.device,
    record: Callable[[Sequence[Tensor]], Geometry],
    gather: Callable[[tuple[str, int]], Sequence[tuple[str, int]]],
    torn: Callable[[str], None] = lambda reason: None,
    controlled: Callable[[Address], None] = lambda controller: None,
) -> WeightReceiver:
    """Returns a receiver that listens and knows the other workers of its data-parallel rank.

    ``gather``: gathers a value of each of these workers, by rank. It BLOCKS until all have called it.
    ``record``, ``torn``, ``controlled``: as for WeightReceiver. Raises SettingsError, TransferError, and
    zmq.ZMQError if the control port is in use.
    """
    settings = given.agent
    key = settings.key()
    host = settings.host(place.host, key)
    # The first port is the controller's.
    port = settings.port(
        data_parallel_index=place.data_parallel_index, ranks=place.ranks, rank=place.rank + 1
    )
    receiver = WeightReceiver(
        ReceiverConfig(
            place.name,
            Address(host, port),
            settings.providers,
            settings.data_host or host,
            key,
            device,
            settings.agent_timeouts(),
            given.streaming,
            given.nics_of(place.rank, place.ranks),
        ),
        record,
        torn,
        controlled,
    )
    address = receiver.start()
    receiver.set_workers([Address(*worker) for worker in gather((address.host, address.port))])
    logger.info("%s: listens on %s (%s)", place.name, address, SETTINGS_VARIABLE)
    return receiver
