"""The commands that an engine's scheduler sends to its workers. Each framework transports them in its own
way.

An engine's address is that of its rank 0, which knows all workers of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_connector.protocol.actions import Address
from kv_connector.protocol.requests import DecodeRequest, GroupPages, PrefillRequest, PrefixRequest
from kv_connector.protocol.wire.messages import LendOutcome, Rank


@dataclass(frozen=True)
class FinishPrefill:
    """The request has left P's scheduler. Its blocks are held until the workers report it as sent."""

    request_id: str
    transfer_id: str
    ok: bool
    reason: str
    sampled: int | None = None
    """The token behind the prompt."""
    aborted: bool = False
    """Whether the request failed because its client left, or because its router gave it up."""


@dataclass(frozen=True)
class CancelLoad:
    """D's request was aborted while its pages were in flight."""

    request_id: str


@dataclass(frozen=True)
class ReleaseTransfer:
    """D needs no pages of this transfer."""

    transfer_id: str
    engine: Address


@dataclass(frozen=True)
class DeferLoad:
    """D is short of blocks, and gives this transfer none before P is about to compute its prompt. The workers
    report that."""

    transfer_id: str
    engine: Address


@dataclass(frozen=True)
class PromptNext:
    """P's next steps compute this prompt. No page of it is computed yet."""

    transfer_id: str


@dataclass(frozen=True)
class FailLoad:
    """D's scheduler could not build the reservation. The load is to be reported as failed."""

    request_id: str
    stale: bool = False
    """Whether it is the load of a prefix. The request then computes its prompt."""


@dataclass(frozen=True)
class SetRanks:
    """All workers of this engine."""

    ranks: tuple[Rank, ...]


@dataclass(frozen=True)
class CacheCleared:
    """All KV computed before is worthless, as after a change of weights. No prompt may mix old and new KV."""


@dataclass(frozen=True)
class WithdrawPrefix:
    """The request of a prefix needs no answer any more."""

    transfer_id: str


@dataclass(frozen=True)
class AnswerPrefix:
    """The scheduler's answer to another engine: it holds the blocks of the first ``tokens`` tokens for this
    transfer. 0: it lends nothing, for this reason.

    Before a good answer come a PrefillRequest that is ``lent``, its NewPages and its FinishPrefill.
    """

    transfer_id: str
    tokens: int
    outcome: LendOutcome = LendOutcome.LENT
    reason: str = ""


@dataclass(frozen=True)
class RefuseLending:
    """Refuses all borrowers from now on, for this reason. Empty: the scheduler answers them again."""

    reason: str


@dataclass(frozen=True)
class EndLendings:
    """Ends all prefixes that are lent, for this reason. Each is then reported as sent."""

    reason: str


Command = (
    SetRanks
    | PrefillRequest
    | FinishPrefill
    | DecodeRequest
    | CancelLoad
    | ReleaseTransfer
    | DeferLoad
    | PromptNext
    | FailLoad
    | CacheCleared
    | PrefixRequest
    | WithdrawPrefix
    | AnswerPrefix
    | RefuseLending
    | EndLendings
)


@dataclass(frozen=True)
class NewPages:
    """Pages of one prompt that are valid after this step: cached pages and those that the step computes."""

    transfer_id: str
    groups: tuple[GroupPages, ...]
    last: bool  # the whole prompt is computed with these pages
