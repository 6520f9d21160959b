"""Buckets: named tensors laid out one after another in a buffer, with their list behind them.

A tensor that is larger than a bucket travels in chunks, which the receiver puts together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import msgspec
import torch

from kv_connector.protocol.wire.messages import Natural
from kv_connector.weights.memory.buffer import aligned

_MAX_NAME = 4096
# The longest MessagePack head of a list.
_LIST_HEAD = 5
_LONGEST = (1 << 48) - 1  # as a Natural
_NONE = torch.empty(0, dtype=torch.uint8)


class StreamError(RuntimeError):
    """An update of weights failed. The message names the peer or the tensor, and has the reason."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor in a bucket, or a part of a large tensor."""

    name: Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
    dtype: Annotated[str, msgspec.Meta(max_length=64)]
    shape: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=64)]
    begin: Natural
    """Offset of the chunk in the tensor, in bytes."""
    nbytes: Natural
    place: Natural
    """Offset of the chunk in the bucket, in bytes."""


_CHUNKS = msgspec.msgpack.Decoder(tuple[Chunk, ...])


class Filling:
    """A bucket that is being filled. ``memory``: flat, in bytes, on any device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._chunks: list[Chunk] = []
        self._used = 0
        self._list_bytes = _LIST_HEAD

    def put(self, name: str, tensor: torch.Tensor, begin: int) -> int | None:
        """Copies a contiguous tensor's bytes from ``begin`` on, as many as have room.

        Returns the offset behind them in the tensor.

        None: the bucket has no room. Only a tensor that is larger than a bucket is split. The copy may still
        run when the call returns. Raises StreamError if the tensor can fit into no bucket.
        """
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        entry = len(msgspec.msgpack.encode(Chunk(name, dtype, shape, _LONGEST, _LONGEST, _LONGEST)))
        whole = len(self._memory) - _LIST_HEAD - entry
        place = aligned(self._used)
        room = len(self._memory) - place - self._list_bytes - entry
        left = tensor.nbytes - begin
        if len(name) > _MAX_NAME or len(shape) > 64 or whole < min(left, 1):
            raise StreamError(f"{name[:200]}: its name and shape do not fit into a bucket")
        if room < left and (room < 1 or (begin == 0 and left <= whole)):
            return None
        nbytes: int = min(room, left)
        if nbytes:
            source = tensor.view(-1).view(torch.uint8)[begin : begin + nbytes]
            # A source in page-locked memory may be overwritten once the caller has its thread back.
            same = source.device == self._memory.device
            self._memory[place : place + nbytes].copy_(source, non_blocking=same)
            self._used = place + nbytes
        self._chunks.append(Chunk(name, dtype, shape, begin, nbytes, place))
        self._list_bytes += entry
        return begin + nbytes

    def seal(self) -> tuple[int, int]:
        """Writes the list of the chunks. Returns its offset and the bucket's length, in bytes."""
        chunks = msgspec.msgpack.encode(self._chunks)
        end = self._used + len(chunks)
        self._memory[self._used : end].copy_(torch.frombuffer(bytearray(chunks), dtype=torch.uint8))
        return self._used, end


class Merging:
    """Takes the tensors out of buckets. A large tensor is complete with its last chunk."""

    def __init__(self) -> None:
        self._chunk: Chunk | None = None  # the last one of a tensor that is not complete
        self._bytes = _NONE
        self._tensor = _NONE

    def take(self, bucket: torch.Tensor, list_offset: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and tensors. ``bucket``: its bytes, which end with the list at ``list_offset``.

        A tensor may be a view of the bucket. Raises StreamError if the content is invalid.
        """
        try:
            chunks = _CHUNKS.decode(bytes(bucket[list_offset:].cpu().numpy()))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StreamError(f"the list of a bucket is invalid: {error}") from None
        for chunk in chunks:
            if (tensor := self._take(bucket[:list_offset], chunk)) is not None:
                yield chunk.name, tensor

    def missing(self) -> str:
        """The name of a tensor whose last chunk has not arrived, or empty."""
        return "" if self._chunk is None else self._chunk.name

    def _take(self, bucket: torch.Tensor, chunk: Chunk) -> torch.Tensor | None:
        dtype = getattr(torch, chunk.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise StreamError(f"{chunk.name}: this torch has no dtype {chunk.dtype!r}")
        nbytes = math.prod(chunk.shape) * dtype.itemsize
        content = bucket[chunk.place : chunk.place + chunk.nbytes]
        if len(content) != chunk.nbytes or chunk.begin + chunk.nbytes > nbytes or not self._follows(chunk):
            raise StreamError(f"{chunk.name}: the bucket's list does not describe its content")
        if chunk.nbytes == nbytes:
            if not nbytes:
                return torch.empty(chunk.shape, dtype=dtype, device=bucket.device)
            return content.view(dtype).view(chunk.shape)
        if chunk.begin == 0:
            self._tensor = torch.empty(chunk.shape, dtype=dtype, device=bucket.device)
            self._bytes = self._tensor.view(-1).view(torch.uint8)
        self._bytes[chunk.begin : chunk.begin + chunk.nbytes].copy_(content)
        self._chunk = chunk
        if chunk.begin + chunk.nbytes < nbytes:
            return None
        tensor = self._tensor
        self._chunk, self._tensor, self._bytes = None, _NONE, _NONE
        return tensor

    def _follows(self, chunk: Chunk) -> bool:
        """Whether the chunk continues the tensor that is not complete, or begins one if none is."""
        if self._chunk is None:
            return chunk.begin == 0
        last = self._chunk
        return (chunk.name, chunk.dtype, chunk.shape) == (last.name, last.dtype, last.shape) and (
            chunk.begin == last.begin + last.nbytes
        )
