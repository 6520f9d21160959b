"""What the scheduler of an engine tells its workers, as values: a framework carries them there as it likes.

An engine's address is that of its rank 0, which knows all of its workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_connector.protocol.actions import Address
from kv_connector.protocol.messages import Rank
from kv_connector.protocol.requests import DecodeRequest, GroupPages, PrefillRequest


@dataclass(frozen=True)
class FinishPrefill:
    """The request has left P's scheduler; its blocks are held until the workers report it sent."""

    request_id: str
    transfer_id: str
    ok: bool
    reason: str
    sampled: int | None = None
    """The token behind the prompt."""
    aborted: bool = False
    """Not ok because its client left, or its router gave the request up."""


@dataclass(frozen=True)
class Cancel:
    """D's request was aborted while its pages were on their way."""

    request_id: str


@dataclass(frozen=True)
class Release:
    """D needs nothing of this transfer."""

    transfer_id: str
    engine: Address


@dataclass(frozen=True)
class FailLoad:
    """D's scheduler could not even build the reservation: the load is to be reported as failed."""

    request_id: str


@dataclass(frozen=True)
class SetRanks:
    """All workers of this engine."""

    ranks: tuple[Rank, ...]


@dataclass(frozen=True)
class CacheCleared:
    """All KV of before is worthless, as after a change of weights: no prompt may be part old, part new."""


Command = (
    SetRanks | PrefillRequest | FinishPrefill | DecodeRequest | Cancel | Release | FailLoad | CacheCleared
)


@dataclass(frozen=True)
class NewPages:
    """Pages of one prompt that are valid after this step: cached ones, and those that the step computes."""

    transfer_id: str
    groups: tuple[GroupPages, ...]
    last: bool  # with these, the whole prompt is computed
