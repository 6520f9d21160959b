"""The actions that a landing asks its driver to take, in the order in which it returns them."""

from __future__ import annotations

from dataclasses import dataclass

from kv_connector.protocol.actions import Source
from kv_connector.weights.mapping.geometry import Tensor
from kv_connector.weights.wire.messages import WeightMessage

Peer = int
"""Number of a peer in the transfer engine."""


@dataclass(frozen=True)
class LandingReply:
    source: Source
    message: WeightMessage


@dataclass(frozen=True)
class Record:
    """Find out what the model would load of these tensors. ``recorded`` answers."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class LandingAccept:
    """Have the transfer engine accept the offer. ``accepted`` or ``not_accepted`` answers."""

    source: Source
    name: str
    offer: bytes


@dataclass(frozen=True)
class LandingOpenCounter:
    """Open a counter that only these peers raise, for pages in the round's room.

    ``opened`` answers, and ``reached`` once all pages are counted.
    """

    peers: tuple[Peer, ...]
    pages: int
    round: int = 0


@dataclass(frozen=True)
class LandingCloseCounter:
    round: int = 0


@dataclass(frozen=True)
class HandOver:
    """To the caller of ``take``: this round is here, until it is ``released``."""

    round: int = 0


@dataclass(frozen=True)
class GiveUp:
    """To the caller of ``take``: no further round will arrive."""

    reason: str


@dataclass(frozen=True)
class LandingFence:
    """Fence the peer: prove that none of its writes can land any more. ``fenced`` answers."""

    peer: Peer
    reason: str


@dataclass(frozen=True)
class LandingLog:
    level: int
    text: str


Action = (
    LandingReply
    | Record
    | LandingAccept
    | LandingOpenCounter
    | LandingCloseCounter
    | HandOver
    | GiveUp
    | LandingFence
    | LandingLog
)
