"""Writer: sends a rank's pieces as they lie in memory, or converts or lays them out first."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kv_connector.engine import ErrorCode, EventKind, MemoryRange, PagedWrite, Pages, TransferError
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.weights.mapping.geometry import Geometry, item_bytes
from kv_connector.weights.mapping.plan import Runs, ShardPiece, runs
from kv_connector.weights.memory.buffer import settle
from kv_connector.weights.sources import Held, SourceError, WeightSource
from kv_connector.weights.trainer.staging import Staging, laid_out, split

logger = logging.getLogger("kv_connector")

# Bytes of the staging buffer, in two halves. A half of 64 MiB takes a NIC of 50 GB/s 1.3 ms, many times the
# cost of a switch.
STAGING_BYTES = 128 << 20
# Shorter runs, in bytes, are laid out before they are sent, if that makes them longer. Below this length, a
# NIC's message rate limits, not its bandwidth.
_LEAST_RUN_BYTES = 32 << 10
# Seconds after which a peer that receives nothing is lost. The heartbeat of the links notices it long before.
_STUCK_S = 300.0
_FENCE_S = 1.0
# Between two versions only writes to a lost peer can still read the sources. A fence of it needs _FENCE_S.
_DEREGISTER_S = 5.0


@dataclass(frozen=True)
class _Registered:
    """A registered storage of the source."""

    begin: int
    nbytes: int
    region: int


@dataclass(frozen=True)
class PieceSend:
    """A part of a shard for one receiver."""

    piece: ShardPiece
    held: Held
    runs: Runs
    dtype: torch.dtype  # of the receiver

    round: int = 0  # in which it lands

    # A version has thousands of these, so each value is computed once.

    @cached_property
    def pages(self) -> int:
        return len(self.runs.target)

    @cached_property
    def page_bytes(self) -> int:
        return self.runs.elements * int(self.dtype.itemsize)

    @cached_property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes

    @cached_property
    def first(self) -> tuple[int, int]:
        """Offsets of the first run, at the source and at the target, in bytes."""
        item = int(self.dtype.itemsize)
        return int(self.runs.source[0]) * item, int(self.runs.target[0]) * item


@dataclass(frozen=True)
class Target:
    """A receiver that waits for pages."""

    peer: int
    region: int
    offsets: Sequence[int]  # of its parameters, in bytes
    immediate: int
    sends: Sequence[PieceSend]


class Writer:
    """The writer of one rank. One thread calls it. Any thread may call fence()."""

    def __init__(self, engine: TransferEngine, source: WeightSource, staging_bytes: int) -> None:
        self._engine = engine
        # The key is the storage, not the address: a registration belongs to the memory at the time, and later
        # memory may have the same address. A weak reference keeps no memory alive, and no later storage
        # equals it.
        self._registered: dict[StorageWeakRef, _Registered] = {}
        self._outdated: list[int] = []  # regions whose memory is gone
        # For each shard that is sent as it lies: its address, its region, and its offset in bytes.
        self._places: dict[int, tuple[int, int, int]] = {}
        self._source = source
        self._device = source.device
        self._staging = Staging(staging_bytes, source.device)
        (self._staging_region,) = engine.register_ranges([self._staging.range])
        self._halves: list[list[tuple[int, int]]] = [[], []]  # (peer, transfer) that read each half
        self._direct: list[tuple[int, int]] = []  # (peer, transfer) of pieces that are sent as they lie
        self.failures: dict[int, str] = {}
        """The reason why a peer does not get all of this version, by peer."""
        self.broken: set[int] = set()
        """Peers among them whose link broke. Their workers report the reason, or are gone."""
        self.posted: dict[int, int] = {}
        """Bytes posted per peer for this version. At most one staging buffer of them is still in flight."""

    def prepare(self, pieces: Sequence[ShardPiece], geometry: Geometry) -> list[PieceSend]:
        """Plans the sends of these pieces. Registers the memory of those that are sent as they lie."""
        sends = []
        all_held = self._source.held()
        for piece in pieces:
            held, parameter = all_held[piece.shard], geometry.parameters[piece.parameter]
            dtype, round = parameter.dtype, parameter.round
            item = item_bytes(dtype)
            least = _LEAST_RUN_BYTES // item
            if held.resident:
                local = held.local()
                pack = str(local.dtype).removeprefix("torch.") != dtype
                laid = runs(piece, local.stride(), least=least, pack=pack)
                if not laid.packed:
                    self._place(piece.shard, local)
                    sends.append(PieceSend(piece, held, laid, getattr(torch, dtype), round))
                    continue
            for part in split(piece, self._staging.half_bytes // item):
                laid = runs(part, [0] * len(part.extent), least=least, pack=True)
                sends.append(PieceSend(part, held, laid, getattr(torch, dtype), round))
        return sends

    def start(self) -> None:
        """Starts a version. Blocks until the source has its weights."""
        self.failures = {}
        self.broken = set()
        self.posted = {}
        self._source.refresh()
        settle(self._device)  # the optimiser's last step

    def deregister_freed(self) -> None:
        """Deregisters the memory of tensors that were freed since the last version.

        Call it before a version's first write(). Blocks if such tensors exist.
        """
        # It takes 0.2 us a storage, and large models have 37,000. StorageWeakRef.expired() takes 0.7 us.
        expired = torch.UntypedStorage._expired
        self._forget([storage for storage in self._registered if expired(storage.cdata)])
        try:
            self._deregister()
        except TransferError as error:
            logger.warning("weights: memory of freed tensors stays registered until the next push: %s", error)

    def write(self, target: Target) -> None:
        """Writes to a receiver. Blocks until nothing is left to lay out."""
        try:
            self._write(target)
        except (TransferError, SourceError) as error:
            self._fail(target.peer, error)

    def finish(self) -> None:
        """Blocks until nothing is in flight."""
        for transfers in (*self._halves, self._direct):
            self._drain(transfers)

    def release(self) -> None:
        """Deregisters the memory of the source. Call it between two versions. Blocks.

        The next version registers what it sends. TransferError: some memory is still registered.
        """
        self._forget(list(self._registered))
        self._deregister()

    def fence(self, peer: int) -> None:
        """Ends the peer, and all transfers that are open to it. Any thread may call it.

        Blocks, mostly for a moment.
        """
        try:
            self._engine.fence(peer, _FENCE_S)
        except TransferError as error:
            if error.code not in (ErrorCode.UNKNOWN_PEER, ErrorCode.CLOSED):
                logger.warning("weights: the link to a lost worker is still open: %s", error)

    def _write(self, target: Target) -> None:
        with self._open(target.peer, self._direct) as direct:
            packed: list[tuple[PieceSend, int]] = []
            for send in target.sends:
                if not send.runs.packed:
                    region, offset = self._place(send.piece.shard, send.held.local())
                    self._post(direct, target, send, region, offset)
                    continue
                while (place := self._put(send)) is None:
                    self._send_half(target, packed)
                packed.append((send, place))
            self._send_half(target, packed)

    @contextmanager
    def _open(self, peer: int, transfers: list[tuple[int, int]]) -> Iterator[int]:
        """Opens a transfer and adds it to these. It is sealed behind the block.

        If it has ended meanwhile, the error that ended it is raised, and not that it has ended.
        """
        transfer = self._engine.open_transfer(peer)
        transfers.append((peer, transfer))
        try:
            try:
                yield transfer
            finally:
                self._engine.seal(transfer)
        except TransferError as error:
            try:
                ended = self._engine.wait_transfer(transfer, _FENCE_S).error
            except TransferError:
                ended = None  # it goes on
            raise ended or error from None

    def _put(self, send: PieceSend) -> int | None:
        part = laid_out(send.held.local(), send.piece, send.runs.order)
        return self._staging.put(part, send.dtype)

    def _send_half(self, target: Target, packed: list[tuple[PieceSend, int]]) -> None:
        """Sends the half that was filled, and switches to the other half."""
        self._staging.packed()
        filled, other = self._halves
        with self._open(target.peer, filled) as transfer:
            for send, place in packed:
                self._post(transfer, target, send, self._staging_region, place)
        packed.clear()
        self._staging.turn(lambda: self._drain(other))
        self._halves = [other, filled]

    def _post(self, transfer: int, target: Target, send: PieceSend, region: int, offset: int) -> None:
        to = target.offsets[send.piece.parameter]
        self.posted[target.peer] = self.posted.get(target.peer, 0) + send.nbytes
        if send.pages == 1:
            source, there = send.first
            self._engine.write(
                transfer,
                region,
                offset + source,
                target.region,
                to + there,
                send.page_bytes,
                target.immediate,
            )
            return
        laid, item = send.runs, int(send.dtype.itemsize)
        self._engine.write_pages(
            transfer,
            PagedWrite(
                send.page_bytes,
                region,
                Pages(laid.source, item, offset),
                target.region,
                Pages(laid.target, item, to),
                target.immediate,
            ),
        )

    def _drain(self, transfers: list[tuple[int, int]]) -> None:
        """Blocks until these transfers have ended."""
        for peer, transfer in transfers:
            try:
                event = self._engine.wait_transfer(transfer, _STUCK_S)
            except TransferError as error:
                self._fail(peer, error)
                continue
            if event.kind is not EventKind.TRANSFER_DONE:
                self._fail(peer, event.error or event.kind.name)
        transfers.clear()

    def _fail(self, peer: int, error: Exception | str) -> None:
        if peer not in self.failures:
            self.failures[peer] = str(error)
            if isinstance(error, TransferError) and error.code is ErrorCode.PEER_DOWN:
                self.broken.add(peer)

    def _place(self, shard: int, local: torch.Tensor) -> tuple[int, int]:
        """Returns the region and the tensor's offset in bytes. Registers memory that is new or has moved."""
        address = local.data_ptr()
        place = self._places.get(shard)
        if place is None or place[0] != address:
            place = self._places[shard] = (address, *self._region(local))
        return place[1], place[2]

    def _region(self, local: torch.Tensor) -> tuple[int, int]:
        """Returns the region and the tensor's offset in bytes. Registers whole storages."""
        storage = local.untyped_storage()
        reference = StorageWeakRef(storage)
        begin, nbytes = storage.data_ptr(), storage.nbytes()
        known = self._registered.get(reference)
        if known is not None and (known.begin, known.nbytes) != (begin, nbytes):
            self._forget([reference])
            known = None
        if known is None:
            (region,) = self._engine.register_ranges([MemoryRange(begin, nbytes)])
            known = self._registered[reference] = _Registered(begin, nbytes, region)
        return known.region, local.storage_offset() * local.element_size()

    def _forget(self, storages: Iterable[StorageWeakRef]) -> None:
        regions = {self._registered.pop(storage).region for storage in storages}
        if regions:
            self._outdated += regions
            self._places = {shard: place for shard, place in self._places.items() if place[1] not in regions}

    def _deregister(self) -> None:
        if self._outdated:
            self._engine.deregister_memory(self._outdated, _DEREGISTER_S)
            self._outdated.clear()
