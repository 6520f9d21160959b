"""WriteImmCheckpointEngine: verl's interface of a checkpoint engine, under the name ``write_imm``.

verl imports this module where its option ``custom_backend_module`` names it. For each update verl calls
prepare() on all workers, build_topology() on its driver, init_process_group() on all workers, send_weights()
on trainers beside receive_weights() on rollout workers, and finalize() on all workers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import torch

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import MessageSockets
from kv_connector.protocol.actions import Address
from kv_connector.verl.internals import CheckpointEngine, CheckpointEngineRegistry, node_address
from kv_connector.weights.tensor_stream.stream import Control, StreamConfig, listen, sockets_of
from kv_connector.weights.tensor_stream.stream_receiver import StreamReceiver
from kv_connector.weights.tensor_stream.stream_sender import StreamSender, drawn

BACKEND = "write_imm"

# verl's own engines wait without a limit, or as long as NCCL does (600 s). A bucket of 2 GiB takes a NIC of
# 50 GB/s 43 ms. The rest of a step is a trainer's gather, or an engine that loads the bucket.
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class PreparedWorker:
    """The result of prepare(), for build_topology(). Ray carries it, and with it the key of this update."""

    host: str
    listener: Address | None = None
    """A trainer's control socket."""
    key: ClusterKey | None = None


@dataclass(frozen=True)
class RolloutSender:
    """The sender of one rollout worker."""

    rank: int
    address: Address
    key: ClusterKey

    def __str__(self) -> str:
        return f"trainer rank {self.rank} at {self.address.host}"


@CheckpointEngineRegistry.register(BACKEND)
class WriteImmCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl is not typed for mypy
    """The checkpoint engine of one worker, a trainer's or a rollout worker's.

    Each trainer rank sends to its share of the rollout workers, because each rank draws all weights. Links
    and buffers last for one update.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        providers: Sequence[str] = (),
        timeout: float = TIMEOUT_S,
    ) -> None:
        """``bucket_size``: bytes of one of two buffers. ``is_master``: verl sets it for trainers only.

        ``providers``: lanes in order of preference. Default: ``nvlink`` for weights in a GPU, else ``host``
        and ``tcp``. ``timeout``: seconds that each step of a live peer may take.
        """
        if isinstance(providers, str):
            raise ValueError(f'providers is {providers!r}. Give a list of lanes, such as ["verbs"].')
        self._bucket_size = bucket_size
        self._trains = is_master is not None
        self._providers = tuple(providers)
        self._timeout = float(timeout)
        self._sockets: MessageSockets[Control] | None = None
        self._sender: StreamSender | None = None
        self._receiver: StreamReceiver | None = None

    def prepare(self) -> PreparedWorker:
        """Opens the control socket of a trainer. Ends what a failed update has left behind."""
        self.finalize()
        self._host = node_address()
        if not self._trains:
            return PreparedWorker(self._host)
        key = ClusterKey.generate()
        self._sockets, listener = listen(self._host, key)
        return PreparedWorker(self._host, listener, key)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[PreparedWorker]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Gives each rollout worker a trainer rank as its sender: of the ranks with the fewest receivers, the
        first on its host.
        """
        trainers, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        served: list[dict[int, str]] = [{} for _ in trainers]
        senders = []
        for rank, rollout in enumerate(rollouts):
            costs = [(len(served[n]), trainer.host != rollout.host) for n, trainer in enumerate(trainers)]
            number = costs.index(min(costs))
            trainer = trainers[number]
            assert trainer.listener is not None
            assert trainer.key is not None
            served[number][rank] = f"rollout worker {rank} at {rollout.host}"
            senders.append(RolloutSender(number, trainer.listener, trainer.key))
        actor: dict[str, list[Any]] = {
            "rank": list(range(actor_wg_world_size)),
            "receivers": served,
            "sender": [None] * actor_wg_world_size,
        }
        rollout_kwargs: dict[str, list[Any]] = {
            "rank": list(range(rollout_world_size)),
            "receivers": [{} for _ in rollouts],
            "sender": senders,
        }
        return actor, rollout_kwargs

    def init_process_group(self, rank: int, receivers: dict[int, str], sender: RolloutSender | None) -> None:
        """Opens the buffers, and connects a trainer with its receivers, or a rollout worker with its sender.

        Blocks. A trainer without receivers opens nothing. Raises StreamError, or TransferError if a lane does
        not open.
        """
        name = f"trainer rank {rank}" if sender is None else f"rollout worker {rank}"
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        config = StreamConfig(name, self._host, device, self._bucket_size, self._timeout, self._providers)
        if sender is not None:
            self._sockets = sockets_of(sender.key)
            self._receiver = StreamReceiver(config)
            self._receiver.connect(self._sockets, sender.address, str(sender), rank)
        elif receivers:
            assert self._sockets is not None, "prepare() comes first"
            self._sender = StreamSender(config)
            self._sender.connect(self._sockets, receivers)

    def finalize(self) -> None:
        """Ends the links and frees the buffers, which an engine's KV cache may need. Idempotent."""
        for end in (self._sender, self._receiver):
            if end is not None:
                end.close()
        if self._sockets is not None:
            self._sockets.close()
        self._sender = self._receiver = self._sockets = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Sends all weights. Returns once the receivers have loaded them. Raises StreamError.

        A trainer without receivers draws the weights: each one is a collective of all trainers.
        """
        if self._sender is None:
            async for _ in drawn(weights):
                pass
            return
        await self._sender.send(weights)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields names and whole tensors. A tensor is valid until the next one is requested.

        Raises StreamError, which names the trainer.
        """
        assert self._receiver is not None, "init_process_group() comes first"
        async with aclosing(self._receiver.receive()) as weights:
            async for one in weights:
                yield one
