"""What the two halves of the connector tell each other, once per engine step. Pickled by vLLM.

A peer's address is that of its rank 0, which tells each worker where the one of its own rank listens.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_connector.protocol.actions import Address
from kv_connector.protocol.decode import DecodeRequest
from kv_connector.protocol.prefill import GroupPages, PrefillRequest
from kv_connector.vllm.internals import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True)
class FinishPrefill:
    """The request has left P's scheduler; its blocks are held until the workers report it sent."""

    request_id: str
    transfer_id: str
    ok: bool
    reason: str


@dataclass(frozen=True)
class Cancel:
    """D's request was aborted while its pages were on their way."""

    request_id: str


@dataclass(frozen=True)
class Release:
    """D needs nothing of this transfer."""

    transfer_id: str
    peer: Address


@dataclass(frozen=True)
class FailLoad:
    """D's scheduler could not even build the reservation: the load is to be reported as failed."""

    request_id: str


@dataclass(frozen=True)
class RankAddresses:
    """Where each worker of this engine listens."""

    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class CacheCleared:
    """All KV of before is worthless, as after a change of weights: no prompt may be part old, part new."""


Command = (
    RankAddresses
    | PrefillRequest
    | FinishPrefill
    | DecodeRequest
    | Cancel
    | Release
    | FailLoad
    | CacheCleared
)


@dataclass(frozen=True)
class NewPages:
    """Pages of one prompt that are valid after this step: cached ones, and those that the step computes."""

    transfer_id: str
    groups: tuple[GroupPages, ...]
    last: bool  # with these, the whole prompt is computed


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    preempted: tuple[str, ...] = ()
    """Transfers whose blocks the scheduler has taken back in this step."""
    commands: tuple[Command, ...] = ()
    """In the order in which the scheduler saw the events."""
    new_pages: tuple[NewPages, ...] = ()
    waiting: tuple[tuple[str, Address], ...] | None = None
    """Transfers whose requests still queue at D, with their P. None: as before."""
    computes: bool = True
    """False: no request has a token to compute in this step; the engine only waits for transfers."""


@dataclass
class RankAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    """Where a worker's control socket really is bound."""

    address: Address


@dataclass
class Reserved(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    """From P's workers to its scheduler: transfers for which a D has room."""

    transfer_ids: set[str]

    def aggregate(self, other: Reserved) -> Reserved:
        return Reserved(self.transfer_ids | other.transfer_ids)
