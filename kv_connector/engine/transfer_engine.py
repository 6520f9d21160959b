"""The typed interface of the native TransferEngine: counted one-sided writes between registered memory, and
messages.

Threads: every method may be called from any thread. The docstrings of methods that can block mention it.
These methods release the GIL and can be interrupted with Ctrl-C. The engine's own threads never take the GIL,
so Python is never on the path of a page or its completion.

Units: sizes and offsets in bytes, timeouts in seconds. Failures raise `TransferError`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kv_connector import _native
from kv_connector.engine import (
    ArmedLayer,
    ArmedSlice,
    CounterSet,
    EngineConfig,
    EngineStats,
    Event,
    Handshake,
    LostLink,
    MemoryRange,
    Message,
    PagedWrite,
    PreparedSlice,
    ProviderStatus,
    ScatterSlice,
    ScatterUpdate,
    StepKind,
    TraceStep,
    TransferError,
    TransferProgress,
)
from kv_connector.engine.callbacks import EventCallback, EventCallbacks, MessageCallback, MessageReader
from kv_connector.engine.convert import (
    buffer_range,
    event_of,
    handshake_of,
    native_domains,
    paged_arguments,
    region_list,
)

SharedMemory = _native.SharedMemory
CompletionWord = _native.CompletionWord
CounterReader = _native.CounterReader
LayerSignal = _native.LayerSignal
PageSummer = _native.PageSummer
StreamSignal = _native.StreamSignal

MAX_MESSAGE_BYTES = _native.MAX_MESSAGE_BYTES

logger = logging.getLogger("kv_connector")

_STEP_KINDS = tuple(StepKind)


def providers() -> list[ProviderStatus]:
    """Every provider of this build, fastest first, and whether a domain of it opens here. Blocks briefly."""
    return [ProviderStatus(*status) for status in _native.probe_providers()]


def close_or_log(engine: TransferEngine, name: str) -> None:
    """Closes the transfer engine of a worker that ends, and logs an error instead of raising it."""
    try:
        engine.close()
    except TransferError as error:
        logger.error("%s: the transfer engine is closed, but not cleanly: %s", name, error)


class TransferEngine:
    """Domains and their threads, registered memory and peers. As a context manager it closes at the end."""

    def __init__(self, config: EngineConfig) -> None:
        """Opens the domains and starts the transfer threads. Blocks until they are open.

        TransferError: a configured provider is not usable here (with its reason), unless `allow_fallback`.
        """
        self.config = config
        self._native = _native.TransferEngine(
            config.name,
            native_domains(config.domains),
            config.allow_fallback,
            config.spin_us,
            config.workers,
            -1 if config.worker_cpu is None else config.worker_cpu,
        )
        self._callbacks = EventCallbacks(self._native)
        self._reader: MessageReader | None = None
        self._scatters: dict[int, int] = {}  # prepared scatters, with the tokens of their callbacks

    def close(self) -> None:
        """Ends open transfers with CLOSED, fences every peer, and stops the transfer thread. Blocks.
        Idempotent.

        Afterwards nothing reads or writes registered memory any more, and every method raises CLOSED.

        TIMEOUT: the engine is closed, but this process's GPU hangs. Its copies may still read registered
        memory. Do not free or reuse that memory before the process ends.
        """
        self.on_message(None)
        try:
            self._native.close()
        finally:
            self._callbacks.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # an error of close() would replace the error that ended the block
            close_or_log(self, self.config.name)

    # --- Memory

    def register_memory(self, address: int, nbytes: int, memfd: int = -1, memfd_offset: int = 0) -> int:
        """Registers [address, address+nbytes) and returns the region. Blocks; writes continue meanwhile.

        The memory must stay mapped until deregister_memory() or close() has returned. `memfd`: the memfd
        behind it, if any. The host lane then maps it at the peer. Create it with os.MFD_ALLOW_SEALING.
        """
        return self.register_ranges([MemoryRange(address, nbytes, memfd, memfd_offset)])[0]

    def register_buffer(self, buffer: bytearray | memoryview | npt.NDArray[Any] | SharedMemory) -> int:
        """Registers a writable, contiguous buffer. The caller keeps it alive. Blocks."""
        return self.register_ranges([buffer_range(buffer)])[0]

    def register_ranges(self, ranges: Sequence[MemoryRange]) -> list[int]:
        """Registers all ranges or none, and returns their regions. Blocks.

        Ranges in one GPU allocation, or adjacent ranges in host memory, are registered in one piece and share
        its keys. The piece reaches from the first byte to the last. `buffer_range()` makes a range of a
        buffer.
        """
        return self._native.register_memory(list(ranges))

    def deregister_memory(self, regions: int | Sequence[int], timeout: float) -> None:
        """Revokes the regions' keys and waits until no write can land there any more. Blocks up to `timeout`.

        TIMEOUT: the regions stay registered. Fence the peer that is stuck, and call again. Regions that share
        keys must be deregistered together: INVALID_ARGUMENT if one is missing.
        """
        self._native.deregister_memory(region_list(regions), timeout)

    def region_descriptor(self, regions: int | Sequence[int]) -> bytes:
        """The bytes that a peer needs to write into the regions, for its import_region() or
        import_regions()."""
        return self._native.region_descriptor(region_list(regions))

    def import_region(self, peer: int, descriptor: bytes) -> int:
        """The region of a descriptor with exactly one region."""
        (region,) = self._native.import_regions(peer, descriptor)
        return region

    def import_regions(self, peer: int, descriptor: bytes) -> list[int]:
        """The regions of a descriptor, in the order in which they were given to region_descriptor()."""
        return self._native.import_regions(peer, descriptor)

    # --- Peers: offer() here -> accept() there -> complete() here, over an authenticated control plane.

    def offer(self, name: str, without: Sequence[str] = ()) -> Handshake:
        """Makes an offer for a peer. Blocks as long as making a link takes (milliseconds on a NIC), as
        accept() and complete() do.

        ``without``: providers that were found, by complete() of an earlier offer, not to lead to this peer.
        """
        return handshake_of(self._native.offer(name, list(without)))

    def accept(self, name: str, offer: bytes) -> Handshake:
        return handshake_of(self._native.accept(name, offer))

    def complete(self, peer: int, answer: bytes) -> None:
        """Completes an offer with the peer's answer. A refused answer uses up the offer: the peer's id is
        forgotten."""
        self._native.complete(peer, answer)

    def fence(self, peer: int, timeout: float) -> None:
        """Ends the peer in both directions. Then none of its writes can land here any more, and its id is
        forgotten.

        Blocks up to `timeout`. TIMEOUT: call again.
        """
        self._native.fence(peer, timeout)

    def disconnect(self, peer: int, timeout: float) -> None:
        """Disconnects from the peer in good order: both sides end their open work, then release each other.

        Nothing new can be opened towards the peer from now on. Neither side gets an error event. The peer's
        side gets PEER_LEFT. Blocks up to `timeout`.

        TIMEOUT: transfers are still open on one side, or messages are unread. Seal or cancel the transfers
        and call again, or call fence().
        """
        self._native.disconnect(peer, timeout)

    def lane(self, peer: int) -> str:
        """The provider of this peer's writes."""
        return self._native.lane(peer)

    # --- Writing

    def open_transfer(self, peer: int, callback: EventCallback | None = None) -> int:
        """Opens a growing set of writes with exactly one final event, for `callback` or to wait or poll
        for."""
        return self._callbacks.give(callback, lambda token: self._native.open_transfer(peer, token))

    def write(
        self,
        transfer: int,
        source: int,
        source_offset: int,
        target: int,
        target_offset: int,
        nbytes: int,
        immediate: int | None = None,
        domain: int | None = None,
    ) -> None:
        """Adds one contiguous write of any size. It counts as one page.

        A large write is split over the domains of the peer's lane, unless `domain` pins it to one (a number
        in the order of EngineConfig.domains). While that domain is broken, the others carry it.
        """
        self._native.write(transfer, source, source_offset, target, target_offset, nbytes, immediate, domain)

    def write_pages(self, transfer: int, write: PagedWrite) -> None:
        """Adds pages. OUT_OF_RANGE adds nothing. The list may be empty."""
        self._native.write_pages(transfer, *paged_arguments(write), write.immediate)

    def arm(
        self, transfer: int, signal: LayerSignal, pages: PagedWrite, layers: Sequence[ArmedLayer]
    ) -> None:
        """Adds the pages of each layer, posted when `signal` (of this engine) reaches that layer's value.

        `pages.immediate` is ignored, because each layer has its own. OUT_OF_RANGE adds nothing.
        """
        self._native.arm(
            transfer,
            signal,
            *paged_arguments(pages),
            [
                (layer.signal_value, layer.source_offset, layer.target_offset, layer.immediate)
                for layer in layers
            ],
        )

    def arm_slices(self, transfer: int, signal: LayerSignal, slices: Sequence[ArmedSlice]) -> None:
        """Adds slices of any regions of the two sides, each posted when `signal` reaches its value.

        It serves senders that fill their source memory step by step. If one slice is invalid, nothing is
        added. RESOURCES: 65,536 slices of the transfer wait or are in flight. Call wait_drained() first.
        """
        self._native.arm_slices(
            transfer,
            signal,
            [
                (s.signal_value, s.source, s.source_offset, s.target, s.target_offset, s.nbytes, s.immediate)
                for s in slices
            ],
        )

    def wait_drained(self, transfer: int, signal_value: int, timeout: float) -> None:
        """Blocks until all slices with values up to `signal_value` are in the peer's memory.

        Their source bytes may then be overwritten. Raises the transfer's error if it fails meanwhile.
        """
        self._native.wait_drained(transfer, signal_value, timeout)

    def seal(self, transfer: int) -> None:
        """No more writes follow. The transfer ends when all have completed."""
        self._native.seal(transfer)

    def cancel(self, transfer: int) -> None:
        """Cancels a transfer. After the return nothing more is posted. TRANSFER_CANCELLED follows once it has
        drained.

        Blocks for one turn of the transfer thread.
        """
        self._native.cancel(transfer)

    def quiesce(self, transfer: int, timeout: float) -> None:
        """Blocks until all writes whose signal has passed have completed. Layers still armed stay armed."""
        self._native.quiesce(transfer, timeout)

    def progress(self, transfer: int) -> TransferProgress:
        return TransferProgress(*self._native.progress(transfer))

    def write_one(
        self,
        peer: int,
        source: int,
        source_offset: int,
        target: int,
        target_offset: int,
        nbytes: int,
        immediate: int | None = None,
        callback: EventCallback | None = None,
        domain: int | None = None,
    ) -> int:
        """Does open_transfer(), one write and seal() in one call."""
        return self._callbacks.give(
            callback,
            lambda token: self._native.write_one(
                peer, source, source_offset, target, target_offset, nbytes, immediate, token, domain
            ),
        )

    # --- Peer groups: one call for many peers. The event's `failures` name the peers that are down or fail.
    # They do not stop the others.

    def add_peer_group(self, members: Sequence[int]) -> int:
        """Makes a group of connected peers, each once. A member that is fenced later stays in the group and
        fails."""
        return self._native.add_peer_group(list(members))

    def remove_peer_group(self, group: int) -> None:
        self._native.remove_peer_group(group)

    def scatter(
        self,
        group: int,
        source: int,
        slices: Sequence[ScatterSlice],
        callback: EventCallback | None = None,
    ) -> int:
        """Writes slices[i] to member i: a transfer with one final event. OUT_OF_RANGE sends nothing."""
        native = [(s.source_offset, s.target, s.target_offset, s.nbytes, s.immediate) for s in slices]
        return self._callbacks.give(
            callback, lambda token: self._native.scatter(group, source, native, token)
        )

    def barrier(self, group: int, immediates: Sequence[int], callback: EventCallback | None = None) -> int:
        """Raises immediates[i], a counter of member i, by one: a transfer with one final event."""
        return self._callbacks.give(
            callback, lambda token: self._native.barrier(group, list(immediates), token)
        )

    def prepare_scatter(
        self, group: int, slices: Sequence[PreparedSlice], callback: EventCallback | None = None
    ) -> int:
        """Prepares a scatter that is checked once and submitted often: several slices a member, in the
        members' order.

        `callback` gets each submission's event. A barrier is a scatter whose slices have no bytes.
        """
        native = [
            (s.member, s.source, s.source_offset, s.target, s.target_offset, s.nbytes, s.immediate)
            for s in slices
        ]
        token = self._callbacks.keep(callback)
        try:
            scatter = self._native.prepare_scatter(group, native, token)
        except BaseException:
            self._callbacks.drop(token)
            raise
        self._scatters[scatter] = token
        return scatter

    def submit_scatter(self, scatter: int, updates: Sequence[ScatterUpdate] | npt.NDArray[np.uint64]) -> int:
        """Submits a prepared scatter: slice i as in updates[i] (an array: rows of source offset, target
        offset, bytes).

        It is a transfer with one final event. OUT_OF_RANGE, beyond the prepared limits, sends nothing.
        RESOURCES: 16 submissions are in flight. Wait for one of them.
        """
        rows = np.ascontiguousarray(updates, dtype=np.uint64).reshape(-1, 3)
        return self._native.submit_scatter(scatter, rows)

    def release_scatter(self, scatter: int) -> None:
        """Releases a prepared scatter. Submissions in flight end normally, but their events reach no callback
        any more."""
        self._native.release_scatter(scatter)
        self._callbacks.drop(self._scatters.pop(scatter))

    # --- Messages: small, reliable, unordered. Messages that the peer's user does not read wait here.

    def send(
        self, peer: int, message: bytes | bytearray | memoryview, callback: EventCallback | None = None
    ) -> int:
        """Sends 1 to MAX_MESSAGE_BYTES bytes, copied before the return: a transfer with one final event.

        TRANSFER_DONE: the peer's engine has taken the message. RESOURCES: too many sends to this peer have
        not ended, because it does not read.
        """
        return self._callbacks.give(callback, lambda token: self._native.send(peer, bytes(message), token))

    def receive(self, limit: int = 256) -> list[Message]:
        """Takes up to `limit` messages. Never blocks."""
        return [Message(*message) for message in self._native.receive(limit)]

    def wait_message(self, timeout: float) -> Message:
        """Blocks for the next message and takes it."""
        return Message(*self._native.wait_message(timeout))

    def message_fd(self) -> int:
        """A descriptor that is readable while receive() would return something. The caller must not close
        it."""
        return self._native.message_fd()

    def on_message(self, callback: MessageCallback | None) -> None:
        """Passes each message to `callback` from now on, on a separate thread. None: messages go to receive()
        again.

        A slow callback delays its peers and nothing else. Its exceptions are logged. A call from within the
        callback takes effect after it. Otherwise no callback is running any more when the call returns.
        """
        if self._reader is not None:
            self._reader.stop()
        self._reader = None if callback is None else MessageReader(self, callback)

    # --- Counting

    def alloc_counters(self, count: int, raisers: Sequence[int] = ()) -> CounterSet:
        """Allocates `count` counters at zero. They count from now on, so an arrival before expect() is not
        lost.

        `raisers`: the peers that receive the immediates. Another peer that raises one of these counters loses
        its link, and the counter is not raised. Empty: any connected peer may raise them, for peers that
        trust each other.
        """
        set_id, immediates = self._native.alloc_counters(count, list(raisers))
        return CounterSet(set_id, tuple(immediates))

    def expect(
        self,
        counters: int,
        targets: Sequence[int],
        callback: EventCallback | None = None,
        word: CompletionWord | None = None,
        value: int = 0,
    ) -> None:
        """Reports one event when each counter has reached its target (at once if they have).

        Counts only grow. After that event, new targets may be set, above the last ones. Pages of a later
        target must be written only after the earlier target was reached. If a link of several then breaks,
        pages that may have been used since are not written again: their transfer fails.

        `value` is stored into `word` before the event is reported, for a kernel that polls the word. A word
        in a GPU's memory is stored on a stream, and may still be on its way. If it could not be stored, the
        event carries the error.
        """
        self._callbacks.give(
            callback, lambda token: self._native.expect(counters, list(targets), token, word, value)
        )

    def counter_reader(self, counters: int) -> CounterReader:
        """The set's counters without a lock, for polling. A released set's counters are 0.

        Pages may be used as soon as a count is read, so a link that breaks can fail transfers: see `expect`.
        """
        return self._native.counter_reader(counters)

    def counter_values(self, counters: int) -> list[int]:
        return self._native.counter_values(counters)

    def release_counters(self, counters: int) -> None:
        """Frees the set. Later immediates count as stale. No event follows."""
        self._native.release_counters(counters)

    # --- Waiting

    def wait_transfer(self, transfer: int, timeout: float) -> Event:
        """Blocks for the transfer's final event and takes it. For transfers without a callback."""
        return event_of(self._native.wait_transfer(transfer, timeout))

    def wait_counters(self, counters: int, timeout: float) -> Event:
        """Blocks for the set's event and takes it. For sets without a callback."""
        return event_of(self._native.wait_counters(counters, timeout))

    def poll_events(self, limit: int = 256) -> list[Event]:
        """Takes up to `limit` events that no call waits for. Never blocks."""
        return [event_of(event) for event in self._native.poll_events(limit)]

    def event_fd(self) -> int:
        """A descriptor that is readable while poll_events() would return something. The caller must not close
        it."""
        return self._native.event_fd()

    # --- Signals, statistics and traces

    def create_signal(self) -> LayerSignal:
        return self._native.create_signal()

    def create_stream_signal(self) -> StreamSignal:
        """Creates a signal that a CUDA stream writes. Call it where the forward pass runs, with its device
        current."""
        return self._native.create_stream_signal()

    def stats(self) -> EngineStats:
        return EngineStats(*self._native.stats())

    def lost_links(self) -> list[LostLink]:
        """The links that have been lost, of all connected peers. Losses of peers that are down or fenced are
        forgotten. Blocks for one turn of the transfer thread."""
        return [LostLink(*lost) for lost in self._native.lost_links()]

    def start_trace(self, steps: int) -> None:
        """Starts recording steps of the transfer thread for armed writes and counters. Costs nothing before
        the call.

        At most `steps` steps are recorded between two calls of take_trace(). Blocks for one turn of the
        transfer thread.
        """
        self._native.start_trace(steps)

    def take_trace(self) -> tuple[list[TraceStep], int]:
        """The steps since the last call, and the number of steps that were lost for lack of room."""
        steps, lost = self._native.take_trace()
        return [TraceStep(_STEP_KINDS[kind], *rest) for kind, *rest in steps], lost

    def domains(self) -> list[str]:
        """One line per open domain, as its provider describes it."""
        return self._native.domains()

    def unusable(self) -> list[str]:
        """The reasons why configured domains could not be opened. Only with allow_fallback."""
        return self._native.unusable()
