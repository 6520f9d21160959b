"""The interfaces that the agent needs of a transfer engine, of a summer of pages and of control sockets.

TransferEngine, PageSummer and ControlPlane implement them and describe each method. The simulator has its own
implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kv_connector.engine import (
    ArmedLayer,
    CounterSet,
    EngineStats,
    Event,
    Handshake,
    LostLink,
    PagedWrite,
    TransferProgress,
)
from kv_connector.protocol.actions import Address, Source, SummedPages
from kv_connector.protocol.wire.messages import AnyMessage


class LinkPort(Protocol):
    """The part of TransferEngine that shows lost links. Methods raise TransferError."""

    def stats(self) -> EngineStats: ...

    def lost_links(self) -> list[LostLink]: ...


class TransferPort(LinkPort, Protocol):
    """The part of TransferEngine that the agent uses. Methods raise TransferError."""

    def offer(self, name: str, without: Sequence[str] = ()) -> Handshake: ...

    def accept(self, name: str, offer: bytes) -> Handshake: ...

    def complete(self, peer: int, answer: bytes) -> None: ...

    def import_region(self, peer: int, descriptor: bytes) -> int: ...

    def lane(self, peer: int) -> str: ...

    def fence(self, peer: int, timeout: float) -> None: ...

    def open_transfer(self, peer: int) -> int: ...

    # `signal` must be created by the same engine.
    def arm(self, transfer: int, signal: Any, write: PagedWrite, layers: Sequence[ArmedLayer]) -> None: ...

    def seal(self, transfer: int) -> None: ...

    def cancel(self, transfer: int) -> None: ...

    def progress(self, transfer: int) -> TransferProgress: ...

    def alloc_counters(self, count: int, raisers: Sequence[int]) -> CounterSet: ...

    def expect(self, counters: int, targets: Sequence[int]) -> None: ...

    def counter_values(self, counters: int) -> list[int]: ...

    def release_counters(self, counters: int) -> None: ...

    def poll_events(self, limit: int) -> list[Event]: ...


class Summer(Protocol):
    def sum(
        self,
        pages: Sequence[SummedPages],
        summed: Callable[[bytes, str], None],
        wanted: Callable[[], bool],
    ) -> None: ...


class ReceivedMessage(Protocol):
    @property
    def source(self) -> Source: ...

    @property
    def message(self) -> AnyMessage | None: ...


class Sockets(Protocol):
    def dial(self, address: Address) -> Source: ...

    def hang_up(self, source: Source) -> None: ...

    def send(self, source: Source, message: AnyMessage) -> bool: ...

    def receive(self) -> Sequence[ReceivedMessage]: ...

    def distrust(self, source: Source) -> None: ...
