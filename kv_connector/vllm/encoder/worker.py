"""EncoderWorker: copies embeddings between the arena and vLLM's encoder cache."""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

from kv_connector.vllm.encoder.arena import load_stamp, store_stamp
from kv_connector.vllm.encoder.metadata import Copy, EncoderMetadata, Loaded

logger = logging.getLogger("kv_connector")


class EncoderWorker:
    """The worker side. All methods belong to the thread of the forward pass. Copies block."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, saves: bool) -> None:
        """``saves``: whether this rank saves. Every rank has the same embeddings."""
        self._dtype = dtype
        self._device = device
        self._saves = saves
        self._wanted: Mapping[str, Copy] = {}
        self._loaded: Counter[int] = Counter()
        self._path = ""

    def save_cached(self, metadata: EncoderMetadata, cache: Mapping[str, torch.Tensor]) -> None:
        """Saves what an earlier step has encoded: vLLM does not encode it again."""
        self._map(metadata)
        self._wanted = metadata.saves if self._saves else {}
        for key in self._wanted.keys() & cache.keys():
            self.save(cache, key)

    def save(self, cache: Mapping[str, torch.Tensor], key: str) -> None:
        copy = self._wanted.get(key)
        if copy is None or load_stamp(self._view, copy.offset) == copy.number:
            return
        embedding = cache[key]
        if (
            embedding.dtype != self._dtype
            or embedding.shape[0] != copy.rows
            or _size(embedding) != copy.nbytes
        ):
            logger.warning(
                "encoder: embedding %.64s is not sent: its shape is %s in %s, and %d rows in %d bytes of %s "
                "were planned",
                key,
                tuple(embedding.shape),
                embedding.dtype,
                copy.rows,
                copy.nbytes,
                self._dtype,
            )
            return
        self._rows(copy).copy_(embedding.reshape(copy.rows, -1))
        store_stamp(self._view, copy.offset, copy.number)

    def load(self, metadata: EncoderMetadata, cache: MutableMapping[str, torch.Tensor]) -> None:
        self._map(metadata)
        for key, copy in metadata.loads.items():
            if key not in cache:
                # A copy even on a CPU: the place in the arena is free after the report.
                cache[key] = self._rows(copy).to(self._device, copy=True)
            self._loaded[copy.number] += 1

    def take_loaded(self) -> Loaded | None:
        """The loads since the last call, for the scheduler side."""
        if not self._loaded:
            return None
        loaded, self._loaded = Loaded(self._loaded), Counter()
        return loaded

    def _map(self, metadata: EncoderMetadata) -> None:
        if self._path == metadata.path:
            return
        with Path(metadata.path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), metadata.nbytes)
        self._path = metadata.path
        self._view = memoryview(self._memory)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def _rows(self, copy: Copy) -> torch.Tensor:
        payload = self._bytes[copy.payload : copy.payload + copy.nbytes]
        return payload.view(self._dtype).view(copy.rows, -1)


def _size(tensor: torch.Tensor) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return size
