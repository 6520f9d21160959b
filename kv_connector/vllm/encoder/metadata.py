"""Metadata of each step between the scheduler side and the worker side of the encoder connector."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kv_connector.vllm.encoder.internals import ECConnectorMetadata, ECConnectorWorkerMetadata


@dataclass(frozen=True)
class Copy:
    """One embedding in the arena."""

    offset: int
    """Offset of its header, in bytes."""
    payload: int
    """Offset of its first row, in bytes."""
    rows: int
    nbytes: int
    number: int
    """To save: the place's stamp. To load: the number under which the worker reports the load."""


@dataclass
class EncoderMetadata(ECConnectorMetadata):  # type: ignore[misc]
    path: str
    """The file of the arena."""
    nbytes: int
    saves: dict[str, Copy] = field(default_factory=dict)
    """All places that still wait for their embedding. Places of earlier steps that are missing have another
    owner."""
    loads: dict[str, Copy] = field(default_factory=dict)


@dataclass
class Loaded(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """Finished loads by number, and how many workers have finished each."""

    workers: Counter[int]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, Loaded)
        return Loaded(self.workers + other.workers)
