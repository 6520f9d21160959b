"""The types of the transfer engine: its arguments, results and errors. The engine itself is in
transfer_engine.py.

Nothing here needs the native module or numpy at run time. So code that only handles these types, such as
Effects and the simulator, works without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ErrorCode(Enum):
    """The kind of a failure. The values are the stable names that logs show."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"  # can never succeed
    UNKNOWN_PEER = "UNKNOWN_PEER"  # no such peer, or it was fenced
    UNKNOWN_REGION = "UNKNOWN_REGION"  # no such memory region, or its key was revoked
    OUT_OF_RANGE = "OUT_OF_RANGE"  # bytes outside a registered region
    NOT_REACHABLE = "NOT_REACHABLE"  # no lane leads to that peer
    REFUSED = "REFUSED"  # the kernel, the library or the peer forbids it
    PEER_DOWN = "PEER_DOWN"  # the link to the peer broke, or its process is gone
    RESOURCES = "RESOURCES"  # a bounded resource is used up
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    CLOSED = "CLOSED"  # the transfer engine is closed
    SYSTEM = "SYSTEM"  # a system call failed with an error that has no better code


class TransferError(Exception):
    """An operation of the transfer engine failed: provider, peer, operation, and the library's message."""

    def __init__(self, code: ErrorCode, provider: str, peer: str, operation: str, message: str) -> None:
        super().__init__(code, provider, peer, operation, message)
        self.code = code
        self.provider = provider
        self.peer = peer
        self.operation = operation
        self.message = message

    def __str__(self) -> str:
        text = self.code.value
        for preposition, what in (("in", self.operation), ("over", self.provider), ("to", self.peer)):
            if what:
                text += f" {preposition} {what}"
        return f"{text}: {self.message}" if self.message else text

    @classmethod
    def _from_native(cls, code: str, provider: str, peer: str, operation: str, message: str) -> Self:
        """Called by the native side to raise its errors."""
        return cls(ErrorCode(code), provider, peer, operation, message)


class EventKind(Enum):
    TRANSFER_DONE = 0  # every write is in the peer's memory; source pages may be reused
    TRANSFER_FAILED = 1  # at least one write failed; nothing is in flight on this side any more
    TRANSFER_CANCELLED = 2  # cancelled and drained: nothing is in flight any more
    COUNTERS_REACHED = 3  # every counter of the set reached its target; the pages are visible
    PEER_DOWN = 4  # the peer's links broke; its transfers end with their own events
    PEER_LEFT = 5  # the peer disconnected in good order: both directions are drained, and its id is forgotten


@dataclass(frozen=True, slots=True)
class Event:
    kind: EventKind
    id: int  # the transfer, the counter set, or the peer
    # For a failed or cancelled transfer: nothing of it can land at the peer any more. False: only the peer's
    # own fence() can guarantee that.
    quiesced: bool
    pages: int  # of a transfer: pages known to have arrived
    nbytes: int
    error: TransferError | None
    failures: tuple[
        tuple[int, TransferError], ...
    ] = ()  # scatter, barrier: (peer, error) of each member that failed


@dataclass(frozen=True, slots=True)
class DomainConfig:
    """One NIC, or one substitute for a NIC. A provider ignores the fields that it does not use."""

    provider: str  # "host", "tcp", "sim", ...: see providers()
    device: str = ""  # which NIC or GPU, in the provider's names; empty: the provider's choice
    address: str = "127.0.0.1"  # tcp: the one local address to listen on
    connections: int = 2  # tcp: connections to each peer
    fabric: str = "default"  # sim: domains in this process with the same fabric name are connected
    seed: int = 1  # sim: decides every delay and reorder
    max_delay_us: int = 50  # sim: each page is delivered after 0..max_delay_us
    copy_blocks: int = 16  # nvlink, bounce: how many of the GPU's SMs a copy may occupy


@dataclass(frozen=True, slots=True)
class EngineConfig:
    name: str  # the name of this transfer engine in logs and at peers
    domains: Sequence[DomainConfig]  # in order of preference; all domains of one provider form one lane
    # If a preferred provider is not usable here, or reaches the peer's machine but does not work, use the
    # next one instead of refusing the peer.
    allow_fallback: bool = False
    spin_us: int = 20  # how long an idle transfer thread polls before it sleeps
    # Number of transfer threads. Of several, the first one schedules, and the domains are distributed among
    # the others. Use several if one thread cannot post the small pages of several NICs.
    workers: int = 1
    worker_cpu: int | None = None  # pin the transfer threads to this core and the following ones


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one region. Page i begins at offset + indices[i] * stride."""

    indices: Sequence[int] | npt.NDArray[np.integer[Any]]
    stride: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class PagedWrite:
    """Copies of page_bytes bytes, from each source page to the target page at the same position.

    `immediate` (one of the peer's counters) is raised by exactly the number of pages. None: not counted.
    """

    page_bytes: int
    source: int  # local region
    source_pages: Pages
    target: int  # imported region
    target_pages: Pages
    immediate: int | None = None


@dataclass(frozen=True, slots=True)
class ArmedLayer:
    """One layer of an armed write: posted when the signal reaches signal_value, counted on its immediate."""

    signal_value: int
    source_offset: int  # added to source_pages.offset
    target_offset: int  # added to target_pages.offset
    immediate: int


@dataclass(frozen=True, slots=True)
class ScatterSlice:
    """One member's part of a scatter: `nbytes` from the source region, counted as one page.

    0 bytes: the immediate alone, if there is one.
    """

    source_offset: int
    target: int  # imported region of that member
    target_offset: int
    nbytes: int
    immediate: int | None = None  # a counter of that member


@dataclass(frozen=True, slots=True)
class ArmedSlice:
    """One slice of a list that a sender releases step by step.

    It is written when the signal reaches `signal_value`, and counted as one page.
    """

    signal_value: int
    source: int  # local region
    source_offset: int
    target: int  # imported region
    target_offset: int
    nbytes: int
    immediate: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedSlice:
    """The limits of one slice of a prepared scatter, for one member of a peer group.

    A submission may write up to `nbytes`, from and to places within the `nbytes` that begin at the two
    offsets. 0 bytes: the immediate alone.
    """

    member: int  # its place in the group
    source: int = 0  # local region
    source_offset: int = 0
    target: int = 0  # imported region of that member
    target_offset: int = 0
    nbytes: int = 0
    immediate: int | None = None  # a counter of that member


class ScatterUpdate(NamedTuple):
    """The part of a prepared slice that one submission writes, beyond its prepared offsets. 0 bytes: the
    immediate alone."""

    source_offset: int = 0
    target_offset: int = 0
    nbytes: int = 0


class MemoryRange(NamedTuple):
    """[address, address + nbytes). `memfd`: the memfd behind it from `memfd_offset` on, if there is one."""

    address: int
    nbytes: int
    memfd: int = -1
    memfd_offset: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    peer: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TransferProgress:
    pages_posted: int
    bytes_posted: int
    pages_done: int  # in the peer's memory
    bytes_done: int


@dataclass(frozen=True, slots=True)
class CounterSet:
    id: int
    immediates: tuple[int, ...]  # for the sender, one per counter


@dataclass(frozen=True, slots=True)
class Handshake:
    """The state of a peer after offer() or accept(): its id here, and the bytes to send to it."""

    peer: int
    data: bytes
    # accept(): the lanes passed over before the one in use, with the reason
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    pages_written: int
    bytes_written: int
    batches_posted: int
    immediates_received: int  # pages counted, including stale ones
    immediates_stale: int  # of an older generation, or of no counter at all
    immediates_foreign: int  # of a counter that belongs to another peer; the link was closed
    links: int  # links that are up now, of all peers
    # links taken out of use while their peer had others; links_restored counts those up again
    links_lost: int
    links_restored: int
    pages_rewritten: int  # pages written again over another link, after their link broke
    sleeps: int  # how often a transfer thread went to sleep
    callback_errors: int
    transfers_open: int
    counters_allocated: int
    peers: int
    regions: int


class LostLink(NamedTuple):
    """A lost link of a connected peer: it broke while it was up and the peer had other links."""

    peer: int
    link: int  # index among the peer's links, the same on both sides
    links: int  # number of the peer's links, up or not
    domain: str  # this side's domain, as its provider describes it
    times_lost: int  # since the peer connected
    up: bool  # restored since
    reason: str  # of the last loss


class StepKind(Enum):
    """The actions of the transfer thread, for armed writes and counters only."""

    RELEASED = 0  # it saw that the signal has reached the layer's value
    POSTED = 1  # a batch of a layer's pages was given to a lane
    LANDED = 2  # a batch is in the peer's memory
    COUNTED = 3  # a counter here was raised


class TraceStep(NamedTuple):
    kind: StepKind
    nanoseconds: int  # CLOCK_MONOTONIC
    request: int  # id of a live armed layer, from RELEASED on; for COUNTED: the immediate
    transfer: int  # RELEASED
    signal_value: int  # RELEASED: the value that the layer waited for
    source: int  # RELEASED: the address from which its source pages count
    pages: int  # POSTED, LANDED, COUNTED


class ProviderStatus(NamedTuple):
    name: str
    usable: bool
    reason: str  # why it is not usable; empty if it is
