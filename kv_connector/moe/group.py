"""Group: a rank's part in the expert exchange, in tensors."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from kv_connector import _native
from kv_connector.moe import admission, columns, forming, memory, metrics
from kv_connector.moe.fault import EVICTED, LOST, NATIVE_CODES, TIMEOUTS, GroupError, LaunchFault
from kv_connector.moe.forming import Exchange, Formed
from kv_connector.moe.settings import MAX_COLUMNS, GroupSettings
from kv_connector.moe.watcher import Watcher
from kv_connector.moe.wire import Membership

__all__ = ["Dispatched", "Exchange", "Group", "GroupError", "GroupSettings", "LaunchFault", "exchange_over"]

logger = logging.getLogger("kv_connector")

# A rank of another node answers a goodbye in a round trip, unless its process is stopped or out of reach.
_LEAVE_SECONDS = 2.0
_ID_TYPES = (torch.int32, torch.int64)
# Native groups whose GPU did not come to rest. Their memory may still be written, so they are never freed.
_kept: list[_native.MoeGroup] = []


@dataclass(frozen=True)
class Dispatched:
    """The rows of all ranks, in rank order. Views of the segment: valid until the slot's next dispatch.

    ``x`` and ``scales`` have old bytes in the rows of tokens without an expert on this rank. The rows of a
    masked rank have old bytes in every column but ``ids``, which are -1.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    extras: tuple[torch.Tensor, ...]


class Group:
    """A rank of a formed group. form() makes it, or join().

    Calls come from one thread, in the same order on all ranks. fault(), raise_fault() and explanation() may
    be called from any thread. On a GPU dispatch() and combine() enqueue on the current stream and may be
    captured into CUDA graphs. On host memory they return when the rows or sums of all ranks have arrived.
    """

    def __init__(self, settings: GroupSettings, formed: Formed) -> None:
        native, connections = formed.native, formed.connections
        self.settings = settings
        self._native = native
        self._lanes = formed.lanes
        self._closed = False
        self._lock = threading.Lock()
        self._sentinels = formed.sentinels
        self._processes = {rank: connection.pid for rank, connection in connections.items()}
        if formed.lanes is not None:
            self._processes |= formed.lanes.processes
        self._first_gone: tuple[str, int, str] | None = None
        """Code, rank and sentence of the first rank that ended, or that another rank gave up."""
        self._left = ""
        """Sentence about the first rank that left in good order, or ""."""
        self._gone: dict[int, tuple[str, str]] = {}
        """Code and sentence of each rank that ended, left or was evicted. Steps without one rank may later
        fail because of another rank."""
        self._gone_lock = threading.Lock()
        """Guards the first of the gone ranks together with all of them."""
        self._ended: set[int] = set()
        """Lost ranks whose process has ended as a whole."""
        self._end_reported = threading.Condition()
        self._owners = b""
        """The rank of each expert. Empty: every row goes to every rank."""
        self._masked: frozenset[int] = frozenset()
        """Ranks that steps go on without, as far as they were logged."""
        self._reported = False
        """A fault was counted, and the other ranks know which rank this rank gave up."""
        rows = settings.ranks * settings.max_tokens
        self._dispatch_bytes = columns.dispatch_bytes(rows, settings.row_bytes)
        combine_bytes = rows * settings.hidden * 2
        segment = memory.bytes_at(native.base, native.segment_bytes, settings.device)
        self._dispatch_areas = [
            segment[native.dispatch_offset(slot) :][: self._dispatch_bytes] for slot in range(settings.slots)
        ]
        self._combine_areas = [
            segment[native.combine_offset(slot) :][:combine_bytes] for slot in range(settings.slots)
        ]
        self._watcher = Watcher(connections.values(), self, formed.lanes)

    @classmethod
    def form(cls, settings: GroupSettings, exchange: Exchange) -> Self:
        """Forms the group of all ranks. Collective: every rank calls it, and all fail if one does.

        ``exchange`` is called twice, and five times with ranks on several nodes. Each call, and the passing
        of memory, may take up to ``settings.timeout``. Raises GroupError.
        """
        return cls._of(settings, forming.form(settings, exchange))

    @classmethod
    def join(cls, settings: GroupSettings, exchange: Exchange, timeout: float | None = None) -> Self:
        """Joins a group that survives, in place of the rank of ``settings``, whose process has ended.

        Collective with admit() of all other ranks: all succeed, or all fail. The group has their placement.
        Steps go on where theirs are. Raises GroupError.
        """
        seconds = settings.timeout if timeout is None else timeout
        formed, owners = admission.join(settings, exchange, seconds)
        group = cls._of(settings, formed)
        group._owners = owners
        return group

    @classmethod
    def _of(cls, settings: GroupSettings, formed: Formed) -> Self:
        try:
            return cls(settings, formed)
        except BaseException:
            for connection in formed.connections.values():
                connection.close()
            formed.sentinels.close()
            formed.native.close(forming.CLOSE_SECONDS)
            if formed.lanes is not None:
                formed.lanes.close()
            raise

    def admit(self, rank: int, exchange: Exchange, timeout: float | None = None) -> None:
        """Goes on with a new process in place of ``rank``, which has ended and which steps go on without.

        Collective: all other ranks call it after the same step, and the new process calls join(). No step may
        be in flight. ``exchange`` is one of all ranks, the new process included. It is called twice.

        Waits up to ``timeout`` seconds for the end of the old process, and up to twice as long in each
        exchange. None: the timeout of the settings. Raises GroupError on all ranks alike, with the reason.
        The group then goes on without the rank, as before.
        """
        settings = self.settings
        if rank == settings.rank or not 0 <= rank < settings.ranks:
            raise ValueError(f"rank is {rank}. It must be another rank of the {settings.ranks}.")
        self._check_open()
        seconds = settings.timeout if timeout is None else timeout
        connection, kept = admission.admit(settings, rank, self._member(rank, seconds), exchange, seconds)
        before = self._processes[rank]
        self._forget(rank, connection.pid)
        self._watcher.replace(connection)
        logger.info(
            "moe: rank %d admitted rank %d: process %d in place of process %d",
            settings.rank, rank, connection.pid, before,
        )  # fmt: skip
        if not kept:
            logger.warning(
                "moe: rank %d reaches rank %d at other addresses. Capture its CUDA graphs again.",
                settings.rank, rank,
            )  # fmt: skip

    def place(self, owners: Sequence[int] | None) -> None:
        """Sets the rank of each expert, alike on all ranks. None: every row goes to every rank, as at first.

        No dispatch may be in flight. Raises TransferError where an owner is not in the group.
        """
        self._check_open()
        self._native.place([] if owners is None else list(owners))
        self._owners = b"" if owners is None else bytes(owners)

    def fits(self, sizes: Sequence[int], row_bytes: int) -> bool:
        """Returns whether a step of these sizes fits. Its columns together have ``row_bytes`` bytes a row.

        The answer depends on the arguments and the common settings alone, so all ranks get the same.
        """
        settings = self.settings
        return (
            len(sizes) == settings.ranks
            and all(0 <= size <= settings.max_tokens for size in sizes)
            and columns.dispatch_bytes(sum(sizes), row_bytes) <= self._dispatch_bytes
            and (self._lanes is None or row_bytes <= settings.row_bytes)  # the bound of packets
        )

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        scales: Sequence[torch.Tensor] = (),
        extras: Sequence[torch.Tensor] = (),
        sizes: Sequence[int],
        slot: int = 0,
    ) -> Dispatched:
        """Sends this rank's rows and receives those of all ranks.

        Every tensor has one row a token of this rank. ``sizes`` are the tokens of each rank. ``x`` and
        ``scales`` go to the ranks of the token's experts, the others to every rank. Raises GroupError where
        an earlier step was void, and on host memory where this one is.
        """
        self._check_usable()
        tensors = (x, *scales, ids, weights, *extras)
        masked = 1 + len(scales)
        offsets = self._check_columns(tensors, ids, sizes, slot)
        sent = [tensor.contiguous() for tensor in tensors]
        ids_sent = sent[masked]
        self._native.dispatch(
            self._stream(),
            slot,
            sizes,
            ids_sent.data_ptr(),
            ids_sent.element_size(),
            self.settings.top_k,
            [
                (tensor.data_ptr(), _row_bytes(tensor), offset, index >= masked)
                for index, (tensor, offset) in enumerate(zip(sent, offsets, strict=False))
            ],
            ids_column=masked,
        )
        self._check_host()
        area, rows = self._dispatch_areas[slot], sum(sizes)
        got = [
            memory.view(area, offset, (rows, *tensor.shape[1:]), tensor.dtype)
            for tensor, offset in zip(tensors, offsets, strict=False)
        ]
        return Dispatched(
            got[0], got[masked], got[masked + 1], tuple(got[1:masked]), tuple(got[masked + 2 :])
        )

    def combine_buffer(self, sizes: Sequence[int], slot: int = 0) -> torch.Tensor:
        """The memory for the results of all rows, [rows, hidden] of bf16. Each rank writes the rows of its
        experts' tokens before combine(); the other rows are not read.
        """
        self._check_open()
        self._check_sizes(sizes, slot)
        return memory.view(self._combine_areas[slot], 0, (sum(sizes), self.settings.hidden), torch.bfloat16)

    def combine(
        self, out: torch.Tensor, sizes: Sequence[int], slot: int = 0, accumulate: bool = False
    ) -> None:
        """Sums the results for this rank's tokens into ``out``, [tokens, hidden] of bf16.

        Adds in rank order in fp32 and rounds once. ``accumulate``: adds what ``out`` has, last. Raises
        GroupError where an earlier step was void, and on host memory where this one is. In a group that
        survives, masked() then names the ranks whose results a row may lack.
        """
        self._check_usable()
        self._check_sizes(sizes, slot)
        shape = (sizes[self.settings.rank], self.settings.hidden)
        if tuple(out.shape) != shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
            raise ValueError(f"out is {tuple(out.shape)} of {out.dtype}. It must be contiguous bf16 {shape}.")
        self._check_device(out)
        self._native.combine(self._stream(), slot, sizes, out.data_ptr(), self.settings.hidden, accumulate)
        self._check_host()

    def fault(self) -> LaunchFault | None:
        """Why a step was void, or None. On a GPU a step that is still in flight has no fault yet.

        EVICTED with this rank's number: another rank waited for this rank until its deadline. This rank's
        later steps are void as well.
        """
        gone = self._first_gone
        if gone is not None and gone[:2] == (EVICTED, self.settings.rank):
            return LaunchFault(*gone[:2])
        if (found := self._native.fault()) is None:
            return None
        code, rank = NATIVE_CODES.get(found[0], str(found[0])), found[1]
        if code == EVICTED:  # by that rank
            own = self.settings.rank
            self._note(own, EVICTED, f"{self._name(rank)} goes on without {self._name(own)}")
            return LaunchFault(EVICTED, own)
        if code == LOST and gone is not None and gone[1] == rank:
            code = gone[0]
        return LaunchFault(code, rank)

    def masked(self) -> frozenset[int]:
        """The ranks that steps of this rank go on without. Only in a group that survives.

        No row of an ended step lacks a result of another rank. On a GPU a step that is still in flight has
        masked no rank yet. After close() the ranks are those of the last step.
        """
        if self._closed:
            return self._masked
        bits = self._native.masked()
        return frozenset(rank for rank in range(self.settings.ranks) if bits >> rank & 1)

    def raise_fault(self) -> None:
        """Raises GroupError with the rank's name, if a step was void.

        The first call after a timeout reports the rank to all others, whose steps then end as well.
        """
        if self.settings.survive:
            self._report_masked()
        if (fault := self.fault()) is None:
            return
        if not self._reported:
            self._reported = True
            metrics.fault(fault.code)
            if fault.code in TIMEOUTS:
                self._watcher.evict(fault.rank)
        settings = self.settings
        raise GroupError(f"moe: rank {settings.rank} of {settings.ranks}: {self._sentence(fault)}")

    def explanation(self) -> str:
        """A sentence about the first rank that ended, was evicted, or left. "" if all ranks are present."""
        gone = self._first_gone
        return self._left if gone is None else gone[2]

    def close(self, timeout: float = 10.0) -> None:
        """Leaves the group, and frees its memory once the GPU is at rest. Idempotent.

        Steps in flight become void: synchronize before. Views of the segment must not be used any more.
        Raises GroupError where the GPU does not come to rest within ``timeout`` seconds. The memory is kept
        then, because the GPU may still write to it.
        """
        with self._lock:
            if self._closed:
                return
            if self.settings.survive:
                self._report_masked()
            self._closed = True
        self._dispatch_areas, self._combine_areas = [], []
        try:
            # Comes first, so that ranks that wait for this rank need not wait for its GPU. A rank that was
            # masked does not leave in good order: that would end the steps of ranks that have not learned it.
            if not (self.settings.survive and self.fault() == LaunchFault(EVICTED, self.settings.rank)):
                self._watcher.leave()
                if self._lanes is not None:
                    self._lanes.leave(min(timeout, _LEAVE_SECONDS))
            self._native.close(timeout)
        except Exception as error:
            _kept.append(self._native)
            raise GroupError(f"moe: rank {self.settings.rank} keeps its memory: {error}") from error
        finally:
            self._watcher.close()
            self._sentinels.close()
            if self._lanes is not None:
                self._lanes.close()

    def lost(self, rank: int, left: bool, reason: str = "") -> None:
        """A report of the watcher."""
        if self.settings.survive and (rank in self._gone or rank in self.masked()):
            left = False  # steps go on without the rank already: its process has to end
        if left:
            sentence = f"{self._name(rank)} has left the group"
            self._left = self._left or sentence
            self._gone.setdefault(rank, (LOST, sentence))
        else:
            end = f"cannot be reached: {reason}" if reason else "has ended"
            self._note(rank, LOST, f"{self._name(rank)} {end}")
        self._native.lose(rank, left)  # last, as it ends a step that then reads the reason

    def ended(self, rank: int) -> None:
        """A report of the watcher."""
        self._native.fence(rank)
        with self._end_reported:
            self._ended.add(rank)
            self._end_reported.notify_all()

    def evicted(self, rank: int, by: int) -> None:
        """A report of the watcher."""
        if rank >= self.settings.ranks:
            return
        sentence = f"{self._name(rank)} did not send in time, and {self._name(by)} evicted it"
        self._note(rank, EVICTED, sentence)
        self._native.lose(rank)

    def unreachable(self, rank: int, by: int) -> None:
        """A report of the watcher."""
        if rank >= self.settings.ranks or rank in self._gone:
            return  # a rank that has left needs no links
        self._note(rank, LOST, f"{self._name(rank)} is lost, as {self._name(by)} reports")
        self._native.lose(rank)

    def _note(self, rank: int, code: str, sentence: str) -> None:
        """Keeps the reason why a rank is gone. Its first reason stays."""
        with self._gone_lock:
            self._gone.setdefault(rank, (code, sentence))
            # In a group that survives, other ranks may be gone before this rank is evicted.
            if self._first_gone is None or (self.settings.survive and rank == self.settings.rank):
                self._first_gone = code, rank, sentence

    def _member(self, rank: int, timeout: float) -> admission.AdmittingRank:
        """This rank's part in an admission, once the process of ``rank`` has ended. Raises nothing: the other
        ranks wait for this rank's message."""
        problem, epochs, masked = "", list[int](), frozenset[int]()
        try:
            if self.settings.device is not None:
                torch.cuda.synchronize(self.settings.device)
            self.raise_fault()  # also sends what the other ranks have to know of the old process
            masked = self.masked()
            epochs = self._native.epochs()
            with self._end_reported:
                if rank in masked and not self._end_reported.wait_for(lambda: rank in self._ended, timeout):
                    problem = f"{self._name(rank)} has not ended within {timeout:g} s. Use `kill -9`."
        except Exception as error:
            problem = str(error)
        peers = {one.rank: one for one in self._watcher.connections if one.rank not in {rank, *masked}}
        membership = Membership(tuple(epochs), tuple(sorted(masked)), self._owners)
        return admission.AdmittingRank(
            self._native, self._sentinels, peers, membership, problem, self._watcher.flush
        )

    def _forget(self, rank: int, process: int) -> None:
        """Removes all traces of the old process of a rank."""
        self._processes[rank] = process
        self._masked -= {rank}
        with self._end_reported:
            self._ended.discard(rank)
        with self._gone_lock:
            self._gone.pop(rank, None)
            if self._first_gone is not None and self._first_gone[1] == rank:
                others = [(code, other, sentence) for other, (code, sentence) in self._gone.items()]
                self._first_gone = others[0] if others else None

    def _report_masked(self) -> None:
        """Logs ranks that a step went on without. The other ranks then go on without a late rank, too."""
        masked = self.masked()
        for rank in sorted(masked - self._masked):
            logger.warning(
                "moe: rank %d goes on without rank %d (process %d)",
                self.settings.rank, rank, self._processes[rank],
            )  # fmt: skip
            if self._gone.get(rank, ("", ""))[0] != LOST:
                self._watcher.evict(rank)
        self._masked = masked

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes.get(rank) or os.getpid()})"

    def _sentence(self, fault: LaunchFault) -> str:
        gone, name = self._first_gone, self._name(fault.rank)
        if fault.code in TIMEOUTS:
            reason = f"{name} {TIMEOUTS[fault.code].format(timeout=self.settings.timeout)}"
        elif fault.code == LOST and self._lanes is not None and (failure := self._lanes.failure(fault.rank)):
            reason = f"{name} {failure}"
        elif gone is not None and gone[1] == fault.rank:
            reason = gone[2]  # may be another one than the rank left with
        else:
            reason = self._gone.get(fault.rank, ("", "the group was closed meanwhile"))[1]
        return f"{reason} ({fault.code}). The results of this step are void."

    def _stream(self) -> int:
        if self.settings.device is None:
            return 0
        stream: int = torch.cuda.current_stream(self.settings.device).cuda_stream
        return stream

    def _check_open(self) -> None:
        if self._closed:
            raise GroupError(f"moe: the group of rank {self.settings.rank} is closed")

    def _check_usable(self) -> None:
        self._check_open()
        self.raise_fault()

    def _check_host(self) -> None:
        """On host memory a call is over when it returns, and its fault can be raised at once."""
        if self.settings.device is None:
            self.raise_fault()

    def _check_sizes(self, sizes: Sequence[int], slot: int) -> None:
        if not self.fits(sizes, 0):
            raise ValueError(
                f"sizes are {list(sizes)}. The group has {self.settings.ranks} ranks of up to "
                f"{self.settings.max_tokens} tokens."
            )
        if not 0 <= slot < self.settings.slots:
            raise ValueError(f"slot is {slot}. The group has {self.settings.slots} slots.")

    def _check_columns(
        self, tensors: Sequence[torch.Tensor], ids: torch.Tensor, sizes: Sequence[int], slot: int
    ) -> tuple[int, ...]:
        """The offsets of the columns in the dispatch area."""
        self._check_sizes(sizes, slot)
        settings = self.settings
        tokens = sizes[settings.rank]
        if len(tensors) > MAX_COLUMNS:
            raise ValueError(f"{len(tensors)} columns. At most {MAX_COLUMNS} fit.")
        for index, tensor in enumerate(tensors):
            if tensor.dim() == 0 or tensor.shape[0] != tokens or not _row_bytes(tensor):
                raise ValueError(
                    f"column {index} is {tuple(tensor.shape)}. It must have {tokens} rows of 1 byte or more."
                )
            self._check_device(tensor)
        if ids.dtype not in _ID_TYPES or tuple(ids.shape) != (tokens, settings.top_k):
            raise ValueError(
                f"ids are {tuple(ids.shape)} of {ids.dtype}. They must be int32 or int64 of "
                f"{(tokens, settings.top_k)}."
            )
        row_bytes = [_row_bytes(tensor) for tensor in tensors]
        if not self.fits(sizes, sum(row_bytes)):
            raise ValueError(
                f"a row has {sum(row_bytes)} bytes: {sum(sizes)} of them do not fit. "
                f"Form the group with a larger row_bytes (now {settings.row_bytes})."
            )
        return columns.column_offsets(sum(sizes), row_bytes)

    def _check_device(self, tensor: torch.Tensor) -> None:
        expected = "cpu" if self.settings.device is None else "cuda"
        device = tensor.device
        if device.type != expected or device.index not in (None, self.settings.device):
            index = "" if self.settings.device is None else f":{self.settings.device}"
            raise ValueError(f"a tensor is on {device}. The group is on {expected}{index}.")


def exchange_over(process_group: Any) -> Exchange:
    """Returns an all-gather of bytes over a gloo group of torch."""

    def exchange(message: bytes) -> list[bytes]:
        messages: list[Any] = [None] * process_group.size()
        torch.distributed.all_gather_object(messages, message, group=process_group)
        return messages

    return exchange


def _row_bytes(tensor: torch.Tensor) -> int:
    nbytes: int = tensor.element_size()
    for length in tensor.shape[1:]:
        nbytes *= length
    return nbytes
