"""Converts the transfer engine's types to the native module's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_connector import _native
from kv_connector.engine import (
    DomainConfig,
    Event,
    EventKind,
    Handshake,
    MemoryRange,
    PagedWrite,
    Pages,
    TransferError,
)

_Indices = npt.NDArray[np.int64]


def event_of(native: _native._EventTuple) -> Event:
    kind, subject, quiesced, pages, nbytes, error, failures = native
    return Event(
        EventKind(kind),
        subject,
        quiesced,
        pages,
        nbytes,
        None if error is None else TransferError._from_native(*error),
        tuple((peer, TransferError._from_native(*failure)) for peer, failure in failures),
    )


def native_domains(domains: Sequence[DomainConfig]) -> list[_native._DomainTuple]:
    return [
        (d.provider, d.device, d.address, d.connections, d.fabric, d.seed, d.max_delay_us, d.copy_blocks)
        for d in domains
    ]


def handshake_of(native: tuple[int, bytes, list[str]]) -> Handshake:
    peer, data, passed_over = native
    return Handshake(peer, data, tuple(passed_over))


def buffer_range(buffer: bytearray | memoryview | npt.NDArray[Any] | _native.SharedMemory) -> MemoryRange:
    """The memory range of a writable, contiguous buffer. The caller keeps the buffer alive while it is
    registered."""
    if isinstance(buffer, _native.SharedMemory):
        return MemoryRange(buffer.address, buffer.nbytes, buffer.fd)
    view = np.frombuffer(buffer, dtype=np.uint8)
    if not view.flags.writeable:
        raise ValueError("the buffer is read-only: peers could not write into it")
    return MemoryRange(view.ctypes.data, view.nbytes)


def region_list(regions: int | Sequence[int]) -> list[int]:
    return [regions] if isinstance(regions, int) else list(regions)


def _indices(pages: Pages) -> _Indices:
    array = np.asarray(pages.indices)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    # same_kind: floats are refused instead of truncated.
    return np.ascontiguousarray(array.astype(np.int64, casting="same_kind", copy=False))


def paged_arguments(write: PagedWrite) -> tuple[int, int, _Indices, int, int, int, _Indices, int, int]:
    source, target = write.source_pages, write.target_pages
    return (
        write.page_bytes,
        write.source,
        _indices(source),
        source.stride,
        source.offset,
        write.target,
        _indices(target),
        target.stride,
        target.offset,
    )
