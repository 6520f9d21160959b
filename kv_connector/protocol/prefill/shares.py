"""P's records of a prompt that it is to send: the request, and the share of each worker of D."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kv_connector.protocol.actions import (
    CancelWrites,
    Ended,
    Fence,
    FinishedSending,
    Log,
    Outcome,
    PeerId,
    PrefixDecided,
    PrefixRequested,
    Push,
    Reached,
    Seal,
    Send,
    Share,
    SummedPages,
    SumPages,
    UnderWay,
)
from kv_connector.protocol.plans.plan import Groups
from kv_connector.protocol.plans.runs import Places
from kv_connector.protocol.prefill.tombstones import RecordedEnd
from kv_connector.protocol.requests import PrefillRequest
from kv_connector.protocol.wire.messages import Reserve, Role

PrefillAction = (
    Send
    | Fence
    | Ended
    | Reached
    | Log
    | Push
    | Seal
    | CancelWrites
    | SumPages
    | FinishedSending
    | PrefixRequested
    | PrefixDecided
)
"""The actions of the prefill machine."""


class SharePhase(enum.Enum):
    WAITING = enum.auto()
    ACTIVE = enum.auto()
    DRAINING = enum.auto()
    CLOSED = enum.auto()


@dataclass
class Reservation:
    """D's RESERVE while it is being served."""

    peer: PeerId
    message: Reserve
    since: float
    deadline: float
    # The ledger: the granules that are wanted and not yet pushed, with D's blocks for them, by pair of
    # groups.
    wanted: dict[Groups, dict[int, int]]
    left: int  # number of granules in the ledger
    writing: bool = False  # granules were pushed: there is an open native transfer
    peer_lost: bool = False
    cancelled: bool = False  # by D, which waits for CANCEL_ACK
    stale: str = ""  # why its pages are stale for D; D gets the reason after the token that it waits for
    # Blocks of P and of D that were pushed, if D wants their sums.
    pushed: dict[tuple[Groups, Places], list[tuple[int, int]]] = field(default_factory=dict)
    to_sum: tuple[SummedPages, ...] | None = None  # its pages, once all are pushed and D wants their sums
    unsummed: str = ""  # why these blocks can no longer be summed
    summed: bool = False  # D has the sums, or the reason why there are none

    @property
    def key(self) -> tuple[PeerId, int]:
        return self.peer, self.message.attempt


@dataclass
class PromptShares:
    """A request of P's engine, or the facts known about it before it arrives."""

    transfer_id: str
    weights: str  # the version with which it is computed, or was
    request: PrefillRequest | None = None
    finished: bool = False
    due: bool = False  # P is about to compute it, or has begun to
    sampled: int | None = None  # the token behind the prompt, once finished
    moving: bool = False  # State.MOVING was reported
    shares_known: bool = False  # whether the number of shares is known; until then one share stands for all
    mismatch: str = ""  # why the RESERVE of a worker of D was refused as one for another prompt
    shares: list[ShareTransfer] = field(default_factory=list)

    @property
    def lent(self) -> bool:
        """Whether it is a prefix that this engine lends."""
        return self.request is not None and self.request.lent

    @property
    def over(self) -> bool:
        """Whether nothing will move any more."""
        return all(transfer.phase is SharePhase.CLOSED for transfer in self.shares)


@dataclass
class ShareTransfer:
    """A share of a prompt, for one worker of D."""

    share: Share
    prompt: PromptShares
    phase: SharePhase = SharePhase.WAITING
    claimed: PeerId | None = None  # the last peer that claimed the share in a PING
    reservation: Reservation | None = None
    verdict: RecordedEnd | None = None  # the future end in DRAINING, the actual end in CLOSED
    # Computed pages that are not pushed, per group: logical block -> (P's block, signal base).
    pages: list[dict[int, tuple[int, int | None]]] = field(default_factory=list)
    stale: str = ""  # why computed pages were forgotten as stale. P may compute them again, but need not

    def forget_pages(self, stale: str = "") -> None:
        """``stale``: why the pages are stale for D, if they are."""
        if any(self.pages):
            self.stale = stale or self.stale
        for known in self.pages:
            known.clear()


def prompt_problem(request: PrefillRequest, reserve: Reserve) -> str | None:
    if request.prompt_tokens not in (None, reserve.prompt_tokens):
        return (
            f"prompt length: prefill engine has {request.prompt_tokens} tokens, "
            f"decode engine has {reserve.prompt_tokens}"
        )
    if request.prompt_hash is None:
        return None
    if reserve.prompt_hash is None:  # otherwise an id alone, with any prompt, would get these pages
        return "the decode engine sends no hash of the prompt: run the same release on both sides"
    if request.prompt_hash != reserve.prompt_hash:
        return (
            "the prompts differ: compare both engines' chat template, tokenizer, clock, time zone (templates "
            "may print the date), model path (for pictures) and adapter. Or two requests share a transfer id"
        )
    return None


def share_problem(prompt: PromptShares | None, message: Reserve) -> str | None:
    if message.share >= message.shares:
        return f"there is no share {message.share} of {message.shares}"
    if prompt is not None and prompt.shares_known and len(prompt.shares) != message.shares:
        return f"one decode worker wants a share of {message.shares}, another one of {len(prompt.shares)}"
    return None


def verdict_on(prompt: PromptShares) -> RecordedEnd:
    """The verdict on a prompt whose shares are all over: the first that is no success, for all of them."""
    verdicts = [transfer.verdict for transfer in prompt.shares if transfer.verdict is not None]
    worst = next((one for one in verdicts if one.outcome is not Outcome.COMPLETED), verdicts[0])
    return replace(
        worst,
        served=tuple(key for one in verdicts for key in one.served),
        quiesced=all(one.quiesced for one in verdicts),
    )


def under_way(prompts: Iterable[PromptShares]) -> list[UnderWay]:
    """The shares of these prompts that are not over, and prompts that P's engine still works on."""
    found = []
    for prompt in prompts:
        request = prompt.request
        for transfer in list(prompt.shares):
            reservation = transfer.reservation
            if transfer.phase is SharePhase.CLOSED and not prompt.over:
                continue
            found.append(
                UnderWay(
                    Role.PREFILL,
                    prompt.transfer_id,
                    "" if request is None else request.request_id,
                    None if reservation is None else reservation.peer,
                    _phase(transfer),
                    None if reservation is None else reservation.since,
                    transfer.share.number,
                )
            )
    return found


def _phase(transfer: ShareTransfer) -> str:
    """The phase of a share, as shown to operators."""
    if transfer.prompt.request is None:
        return "orphan"
    lost = transfer.reservation is not None and transfer.reservation.peer_lost
    return "fencing" if lost and transfer.phase is SharePhase.DRAINING else transfer.phase.name.lower()
