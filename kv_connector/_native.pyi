"""The native engine as pybind11 exposes it, in tuples and numbers. its typed face is
`kv_connector.engine.transfer_engine`.

Every method may raise `kv_connector.engine.TransferError`. Timeouts are in seconds.
"""

from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

# code, provider, peer, operation, message
_ErrorTuple: TypeAlias = tuple[str, str, str, str, str]
# kind, id, quiesced, pages, bytes, error, (peer, error) of each member of a group that failed
_EventTuple: TypeAlias = tuple[int, int, bool, int, int, _ErrorTuple | None, list[tuple[int, _ErrorTuple]]]
# provider, device, address, connections, fabric, seed, max_delay_us, copy_blocks
_DomainTuple: TypeAlias = tuple[str, str, str, int, str, int, int, int]
_Indices: TypeAlias = npt.NDArray[np.int64]

MAX_MESSAGE_BYTES: int

def probe_providers() -> list[tuple[str, bool, str]]: ...

@final
class SharedMemory:
    """Memory behind a memfd of this process, which peers on this machine can map. Zero at first.

    Has the buffer protocol (writable bytes). Unmapped when the last reference goes: keep one while it is
    registered.
    """

    def __init__(self, name: str, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def fd(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class LayerSignal:
    """A 64-bit word that says how far a forward pass has come. Starts at 0."""

    def store(self, value: int) -> None:
        """Publishes that everything up to `value` is computed; values must not shrink. Never blocks."""

    def load(self) -> int: ...

@final
class StreamSignal(LayerSignal):
    """One that a CUDA stream writes, in the order of its other work. `stream`: as torch shows it
    (torch.cuda.Stream.cuda_stream).
    """

    def store_on_stream(self, stream: int, value: int) -> None:
        """The word becomes `value` once all that was enqueued on the stream before is done. Never blocks."""

    def advance_on_stream(self, stream: int) -> None:
        """The same with the word's value then plus one; may be captured into a CUDA graph."""

@final
class PageSummer:
    """Sums of pages, by which two engines compare their copies (native/base/page_sum.h).

    `on_gpu`: the pages are in the memory of the GPU whose context is current on this thread.
    """

    def __init__(self, on_gpu: bool) -> None: ...
    def sum(
        self,
        address: int,
        nbytes: int,
        layers: Sequence[int],
        blocks: Sequence[int],
        stride: int,
        runs: Sequence[int],
        run_bytes: int,
    ) -> bytes:
        """Returns 8 bytes for each layer and block. Blocks, without the GIL; one thread at a time.

        The page of a layer in a block consists of a run of bytes at `layer + block * stride + run` for each
        run. The region begins at `address`. OUT_OF_RANGE: a page lies outside its `nbytes`.
        """

@final
class CounterReader:
    def __len__(self) -> int: ...
    def value(self, counter: int) -> int: ...

class _CompletionWord: ...

@final
class CompletionWord(_CompletionWord):
    """A 64-bit word, 0 at first, that the engine stores and kernels of the GPU `device` poll.

    It lies in page-locked host memory or, `on_gpu`, in the GPU's, where a store is on a stream, and may
    still be on its way, when store() returns. `remote_writes`: NICs write what it stands for into that
    GPU's memory, which each store shows to running kernels first.
    """

    def __init__(self, device: int, on_gpu: bool = False, remote_writes: bool = True) -> None:
        """Blocks. TransferError REFUSED where the GPU, or the machine, cannot do what is asked."""

    def store(self, value: int) -> None: ...
    @property
    def device_pointer(self) -> int:
        """The word's address for kernels. They load it with acquire semantics at system scope."""

MOE_MAX_RANKS: int
MOE_MAX_COLUMNS: int
MOE_MAX_TOP_K: int
MOE_COLUMN_ALIGNMENT: int

@final
class MoeFarRanks:
    """The lanes of a rank to ranks of other nodes (native/moe/far_ranks.h), for one MoeGroup.

    Of two ranks the lower one calls offer(), the higher one accept(), the lower one complete(), the higher
    one meet(), each with the bytes of the call before. Then both call begin(). These calls block.
    """

    def __init__(
        self,
        name: str,
        domains: list[_DomainTuple],
        rank: int,
        ranks: int,
        far: list[int],
        slots: int,
        max_tokens: int,
        row_bytes: int,
        hidden: int,
    ) -> None:
        """`far`: the ranks of other nodes. `row_bytes`: most bytes of one token's columns together."""

    def offer(self, rank: int) -> bytes: ...
    def accept(self, rank: int, offer: bytes) -> bytes: ...
    def complete(self, rank: int, accepted: bytes) -> bytes: ...
    def meet(self, rank: int, completed: bytes) -> None: ...
    def begin(self) -> None: ...
    def departures(self) -> list[tuple[int, bool, str]]:
        """Far ranks that have ended, or left (True), since the last call, with the reason."""

    def departure_fd(self) -> int: ...
    def send(self, rank: int, message: bytes) -> None: ...
    def receive(self) -> list[tuple[int, bytes]]: ...
    def message_fd(self) -> int: ...
    def failure(self, rank: int) -> str:
        """Why steps fail because of this rank, or ""."""

    def counts(self) -> tuple[int, int, int, int, int]:
        """Submitted scatters, received immediates, pages written again, links up now, and lost links."""

    def leave(self, timeout: float) -> None:
        """Leaves all far ranks in good order. Blocks. No launch may follow."""

    def close(self) -> None:
        """Ends this object's share. With the last share the transfer engine closes, which blocks."""

@final
class MoeGroup:
    """A rank's part in the expert exchange (native/moe/group.h); kv_connector.moe.Group is its typed face.

    One thread at a time, but for lose() and fault(). On a GPU dispatch() and combine() enqueue and return; on
    host memory they return when all ranks' rows, or results, are there.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: int,
        dispatch_bytes: int,
        combine_bytes: int,
        max_tokens: int,
        experts: int,
        slots: int,
        timeout: float,
        survive: bool = False,
    ) -> None:
        """`device`: the GPU's ordinal, -1 for host memory. Bytes are of one slot. `timeout`: seconds that a
        launch waits for another rank. `survive`: launches go on without a rank that is lost or late."""

    @property
    def segment_bytes(self) -> int: ...
    @property
    def base(self) -> int:
        """The address of this rank's segment."""

    def dispatch_offset(self, slot: int) -> int: ...
    def combine_offset(self, slot: int) -> int: ...
    def descriptor(self) -> int:
        """A new file descriptor of the segment, which the caller closes."""

    def attach(self, rank: int, descriptor: int) -> None:
        """Maps another rank's segment; the descriptor stays the caller's."""

    def join(self, far: MoeFarRanks) -> None:
        """Reaches the ranks of other nodes by `far`, of which the group keeps a share until close()."""

    def place(self, owners: Sequence[int]) -> None:
        """The rank of each expert; empty: every row to every rank. Not while a launch is in flight."""

    def dispatch(
        self,
        stream: int,
        slot: int,
        sizes: Sequence[int],
        ids: int,
        ids_bytes: int,
        top_k: int,
        columns: Sequence[tuple[int, int, int, bool]],
        phases: int = 3,
        ids_column: int | None = None,
    ) -> None:
        """`columns`: address, bytes of a row, offset in the dispatch area, whether every rank gets it.
        `phases`: 1 sends, 2 receives. `ids_column`: the column in which rows of masked ranks become -1."""

    def combine(
        self,
        stream: int,
        slot: int,
        sizes: Sequence[int],
        out: int,
        hidden: int,
        accumulate: bool = False,
        phases: int = 3,
    ) -> None: ...
    def lose(self, rank: int, left: bool = False) -> None:
        """Ends all waits, because the rank ended. The first such rank is named. `left`: it closed its group;
        ends the waits for it. `rank` may be this rank, if the others continue without it. In a group that
        survives, waits for another rank that ended go on without it."""

    def fence(self, rank: int) -> None:
        """Reports that the process of a lost rank has ended. A group that survives goes on only then."""

    def masked(self) -> int:
        """The ranks that launches went on without, one bit for each."""

    def epochs(self) -> list[int]:
        """The number of dispatches in each slot, modulo 2^32. Not while a launch is in flight."""

    def begin(self, epochs: Sequence[int]) -> None:
        """Begins with the epochs of the other ranks, before the first dispatch."""

    def prepare_admission(self, rank: int, descriptor: int) -> None:
        """Maps the segment of a new process in place of a masked rank's, which has ended. The descriptor
        stays the caller's. Launches go on without the rank until admit()."""

    def cancel_admission(self) -> None: ...
    def admit(self) -> bool:
        """Goes on with the prepared rank. False: captured graphs must be captured again."""

    def fault(self) -> tuple[int, int] | None:
        """1 a timeout in dispatch, 2 in combine, 3 a lost rank; and the rank that was awaited. 4: that rank
        goes on without this rank."""

    def close(self, timeout: float) -> None:
        """TransferError TIMEOUT where the GPU does not come to rest; nothing is freed then."""

@final
class TransferEngine:
    def __init__(
        self,
        name: str,
        domains: list[_DomainTuple],
        allow_fallback: bool,
        spin_us: int,
        workers: int,
        worker_cpu: int,
    ) -> None: ...
    def close(self) -> None: ...
    # ranges: address, bytes, memfd, its offset
    def register_memory(self, ranges: Sequence[tuple[int, int, int, int]]) -> list[int]: ...
    def deregister_memory(self, regions: list[int], timeout: float) -> None: ...
    def region_descriptor(self, regions: list[int]) -> bytes: ...
    def import_regions(self, peer: int, descriptor: bytes) -> list[int]: ...
    def offer(self, name: str, without: list[str]) -> tuple[int, bytes, list[str]]: ...
    def accept(self, name: str, offer: bytes) -> tuple[int, bytes, list[str]]: ...
    def complete(self, peer: int, answer: bytes) -> None: ...
    def fence(self, peer: int, timeout: float) -> None: ...
    def disconnect(self, peer: int, timeout: float) -> None: ...
    def lane(self, peer: int) -> str: ...
    # `callback`: the token under which next_callback() reports the event, 0 for none.
    def open_transfer(self, peer: int, callback: int) -> int: ...
    def write(
        self,
        transfer: int,
        source: int,
        source_offset: int,
        target: int,
        target_offset: int,
        nbytes: int,
        immediate: int | None,
        domain: int | None,
    ) -> None: ...
    def write_pages(
        self,
        transfer: int,
        page_bytes: int,
        source: int,
        source_indices: _Indices,
        source_stride: int,
        source_offset: int,
        target: int,
        target_indices: _Indices,
        target_stride: int,
        target_offset: int,
        immediate: int | None,
    ) -> None: ...
    # layers: signal value, source offset, target offset, immediate
    def arm(
        self,
        transfer: int,
        signal: LayerSignal,
        page_bytes: int,
        source: int,
        source_indices: _Indices,
        source_stride: int,
        source_offset: int,
        target: int,
        target_indices: _Indices,
        target_stride: int,
        target_offset: int,
        layers: list[tuple[int, int, int, int]],
    ) -> None: ...
    # slices: signal value, source region, source offset, target region, target offset, bytes, immediate
    def arm_slices(
        self,
        transfer: int,
        signal: LayerSignal,
        slices: list[tuple[int, int, int, int, int, int, int | None]],
    ) -> None: ...
    def wait_drained(self, transfer: int, signal_value: int, timeout: float) -> None: ...
    def seal(self, transfer: int) -> None: ...
    def cancel(self, transfer: int) -> None: ...
    def quiesce(self, transfer: int, timeout: float) -> None: ...
    def progress(self, transfer: int) -> tuple[int, int, int, int]: ...
    def write_one(
        self,
        peer: int,
        source: int,
        source_offset: int,
        target: int,
        target_offset: int,
        nbytes: int,
        immediate: int | None,
        callback: int,
        domain: int | None,
    ) -> int: ...
    def add_peer_group(self, members: list[int]) -> int: ...
    def remove_peer_group(self, group: int) -> None: ...
    # slices: source offset, target region, target offset, bytes, immediate
    def scatter(
        self, group: int, source: int, slices: list[tuple[int, int, int, int, int | None]], callback: int
    ) -> int: ...
    def barrier(self, group: int, immediates: list[int], callback: int) -> int: ...
    # slices: member, source region, source offset, target region, target offset, bytes, immediate
    def prepare_scatter(
        self,
        group: int,
        slices: list[tuple[int, int, int, int, int, int, int | None]],
        callback: int,
    ) -> int: ...
    # updates: source offset, target offset, bytes of each slice
    def submit_scatter(self, scatter: int, updates: npt.NDArray[np.uint64]) -> int: ...
    def release_scatter(self, scatter: int) -> None: ...
    def send(self, peer: int, message: bytes, callback: int) -> int: ...
    def receive(self, limit: int) -> list[tuple[int, bytes]]: ...
    def wait_message(self, timeout: float) -> tuple[int, bytes]: ...
    def message_fd(self) -> int: ...
    def alloc_counters(self, count: int, raisers: list[int]) -> tuple[int, list[int]]: ...
    def expect(
        self, counters: int, targets: list[int], callback: int, word: CompletionWord | None, value: int
    ) -> None: ...
    def counter_reader(self, counters: int) -> CounterReader: ...
    def counter_values(self, counters: int) -> list[int]: ...
    def release_counters(self, counters: int) -> None: ...
    def wait_transfer(self, transfer: int, timeout: float) -> _EventTuple: ...
    def wait_counters(self, counters: int, timeout: float) -> _EventTuple: ...
    def poll_events(self, limit: int) -> list[_EventTuple]: ...
    # Blocks for the next event that has a callback; None once the engine is closed and all were taken.
    def next_callback(self) -> tuple[int, _EventTuple] | None: ...
    def event_fd(self) -> int: ...
    def create_signal(self) -> LayerSignal: ...
    def create_stream_signal(self) -> StreamSignal: ...
    # In the order of kv_connector.engine.EngineStats.
    def stats(
        self,
    ) -> tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]: ...
    # Each in the order of kv_connector.engine.LostLink.
    def lost_links(self) -> list[tuple[int, int, int, str, int, bool, str]]: ...
    def start_trace(self, steps: int) -> None: ...
    # Each in the order of kv_connector.engine.TraceStep; and how many were lost.
    def take_trace(self) -> tuple[list[tuple[int, int, int, int, int, int, int]], int]: ...
    def domains(self) -> list[str]: ...
    def unusable(self) -> list[str]: ...
