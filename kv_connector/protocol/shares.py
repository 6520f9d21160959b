"""What P knows of a prompt that it is to send: the request, and the share that each worker of D gets."""

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
    Push,
    Reached,
    Seal,
    Send,
    Share,
    UnderWay,
)
from kv_connector.protocol.messages import Reserve, Role
from kv_connector.protocol.plan import Groups
from kv_connector.protocol.requests import PrefillRequest
from kv_connector.protocol.tombstones import Verdict

PrefillAction = Send | Fence | Ended | Reached | Log | Push | Seal | CancelWrites | FinishedSending
"""What the prefill machine decides."""


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
    # The ledger: by pair of groups, the granules that are wanted and not yet pushed, and D's blocks for them.
    wanted: dict[Groups, dict[int, int]]
    left: int  # of them
    writing: bool = False  # some were pushed: the engine has an open transfer
    peer_lost: bool = False
    cancelled: bool = False  # by D, which waits for CANCEL_ACK
    stale: str = ""  # why its pages are of no use to D, which is told so with the token that it waits for

    @property
    def key(self) -> tuple[PeerId, int]:
        return self.peer, self.message.attempt


@dataclass
class Prompt:
    """A request of P's engine, or what is known of it before it comes."""

    transfer_id: str
    weights: str  # with which it is computed, or was
    request: PrefillRequest | None = None
    finished: bool = False
    sampled: int | None = None  # the token behind it, once finished
    moving: bool = False  # it was said that pages go
    shares_known: bool = False  # how many workers of D want one; until then there is one, for whoever comes
    mismatch: str = ""  # why the RESERVE of a worker of D was refused as one for another prompt
    shares: list[ShareTransfer] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Nothing will move any more."""
        return all(transfer.phase is SharePhase.CLOSED for transfer in self.shares)


@dataclass
class ShareTransfer:
    """A share of a prompt, for one worker of D."""

    share: Share
    prompt: Prompt
    phase: SharePhase = SharePhase.WAITING
    claimed: PeerId | None = None  # who said last that it will come for it
    reservation: Reservation | None = None
    verdict: Verdict | None = None  # in DRAINING what it will be, in CLOSED what it is
    # Computed and not pushed, per group: logical block -> (P's block, signal base).
    pages: list[dict[int, tuple[int, int | None]]] = field(default_factory=list)

    def forget_pages(self) -> None:
        for known in self.pages:
            known.clear()


def prompt_problem(request: PrefillRequest, reserve: Reserve) -> str | None:
    if request.prompt_tokens not in (None, reserve.prompt_tokens):
        return (
            f"prompt length: prefill has {request.prompt_tokens} tokens, decode has {reserve.prompt_tokens}"
        )
    if request.prompt_hash is None:
        return None
    if reserve.prompt_hash is None:  # else an id alone, with whatever prompt, would get these pages
        return "the decode engine sends no hash of the prompt: run the same release on both sides"
    if request.prompt_hash != reserve.prompt_hash:
        return (
            "the prompts differ: compare both engines' chat template, tokenizer, clock, time zone (templates "
            "may print the date), model path (for pictures) and adapter. Or two requests share a transfer id"
        )
    return None


def share_problem(prompt: Prompt | None, message: Reserve) -> str | None:
    if message.share >= message.shares:
        return f"there is no share {message.share} of {message.shares}"
    if prompt is not None and prompt.shares_known and len(prompt.shares) != message.shares:
        return f"one decode worker wants a share of {message.shares}, another one of {len(prompt.shares)}"
    return None


def verdict_on(prompt: Prompt) -> Verdict:
    """On a prompt whose shares are all over: the first that is no success, for all."""
    verdicts = [transfer.verdict for transfer in prompt.shares if transfer.verdict is not None]
    worst = next((one for one in verdicts if one.outcome is not Outcome.COMPLETED), verdicts[0])
    return replace(
        worst,
        served=tuple(key for one in verdicts for key in one.served),
        quiesced=all(one.quiesced for one in verdicts),
    )


def under_way(prompts: Iterable[Prompt]) -> list[UnderWay]:
    """The shares of these that are not over, and what P's engine still works on."""
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
    """For an operator."""
    if transfer.prompt.request is None:
        return "orphan"
    lost = transfer.reservation is not None and transfer.reservation.peer_lost
    return "fencing" if lost and transfer.phase is SharePhase.DRAINING else transfer.phase.name.lower()
