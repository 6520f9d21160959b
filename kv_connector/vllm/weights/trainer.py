"""The trainer's side as vLLM's trainer engine.

Importing this module registers ``write_imm`` with vLLM's trainer factory.

    WeightTransferTrainerFactory.trainer_init(
        WriteImmTrainerInitInfo(["10.0.0.5:5801"], rank=rank), client=client, source=ModuleSource(model)
    )

The caller of ``send_weights`` pauses the engines around it, as with vLLM's other backends. Engines are named
by their first workers: vLLM's client does what a controller would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kv_connector.protocol.timeouts import Timeouts
from kv_connector.vllm.internals import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferTrainerFactory,
)
from kv_connector.vllm.plugin import WEIGHTS
from kv_connector.weights.block_fp8 import BlockFp8
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import ShardSource, module_source
from kv_connector.weights.trainer.writer import STAGING_BYTES
from kv_connector.weights.update import PushError


@dataclass
class WriteImmTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """``engines``: addresses of their first workers (``control_port`` + 1), as ``host:port``. ``timeout``:
    seconds in which a version must be applied. Raises ValueError if one of the two is invalid.

    The other fields are those of WeightPusher.
    """

    backend: ClassVar[str] = WEIGHTS

    engines: Sequence[str]
    key_file: str | None = None
    providers: Sequence[str] = ()
    data_host: str = "127.0.0.1"
    timeout: float = 300.0
    partial: Sequence[str] = ()
    nics: Sequence[str] = ()
    begin_timeout: float | None = None
    timeouts: Timeouts | None = None
    staging_bytes: int = STAGING_BYTES

    def __post_init__(self) -> None:
        if isinstance(self.engines, str) or not self.engines:
            raise ValueError(
                f'engines is {self.engines!r}. Give a sequence of addresses, such as ["10.0.0.5:5801"].'
            )
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout!r}. Give a positive number of seconds.")


class WriteImmTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    init_info_cls = WriteImmTrainerInitInfo

    def __init__(self, info: WriteImmTrainerInitInfo, client: Any, source: ShardSource | BlockFp8) -> None:
        super().__init__(client=client, is_sender=info.is_sender)
        self._timeout = info.timeout
        self._driver = ThreadPoolExecutor(1, "kvc-weights-client")
        self._driven: Future[None] | None = None
        self._pushed = 0
        self._pusher = WeightPusher(
            source,
            info.engines,
            key_file=info.key_file,
            providers=info.providers,
            data_host=info.data_host,
            partial=info.partial,
            nics=info.nics,
            begin_timeout=info.begin_timeout,
            timeouts=info.timeouts,
            staging_bytes=info.staging_bytes,
            apply=self._ready,
        )
        try:
            self._pusher.connect()
        except BaseException:  # the rest of this object would be in the way of the next one
            self.shutdown()
            raise

    @classmethod
    def trainer_init(cls, init_info: WriteImmTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Makes the engine. A collective of all ranks.

        ``source``: vLLM's ModuleSource, of which nothing is gathered, or a ShardSource or BlockFp8. Raises
        PushError, and TypeError for any other source.
        """
        if isinstance(source, ModuleSource):
            source = BlockFp8(module_source(source._module))
        if not isinstance(source, ShardSource | BlockFp8):
            raise TypeError(
                f"write_imm sends shards as they lie in memory, but {type(source).__name__} gives whole "
                "tensors only. Pass a ModuleSource, or kv_connector.weights.sources.TensorSource of the "
                "named tensors"
            )
        return cls(init_info, client, source)

    def send_weights(self) -> None:
        """Writes a version and has it applied.

        Raises PushError if an engine did not take it. That engine must stay paused, and get the next version.
        """
        self._pushed += 1
        version = str(self._pushed)
        self._driven = None
        update = self._pusher.push(version)
        problem: PushError | None = None
        try:
            update.wait("applied", self._timeout)
        except PushError as error:
            problem = error
        if self._driven is not None:
            self._driven.result(self._timeout)  # its error says more
        if self.is_sender and (problem is None or self._driven is not None):
            # Otherwise vLLM would refuse to begin the next update, as this one is not over.
            self.client.finish_weight_update(None if problem else version)
        if problem is not None:
            raise problem

    def _ready(self, version: str) -> None:
        """Begins the engines' update.

        Rounds for which an engine has no room beside its weights land during it.
        """

        def drive() -> None:
            self.client.start_weight_update()
            self.client.update_weights({"version": version})

        self._driven = self._driver.submit(drive)

    def shutdown(self) -> None:
        try:
            self._pusher.close()
        finally:
            self._driver.shutdown()


if WEIGHTS not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(WEIGHTS, WriteImmTrainerEngine)
