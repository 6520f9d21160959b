"""Reads the identity of a checkpoint: the headers of its safetensors files, and a sample of each tensor.

The bytes of a tensor are the same in all ways to divide a checkpoint into files, so each tensor has its own
digest. A fine-tuned model differs from its base in most bytes of each tensor that was trained, also where a
LoRA was merged into few matrices.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec

from kv_connector.protocol.session.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# The names of a checkpoint's files, and of the index that lists them.
MODEL = ("*.safetensors", "model.safetensors.index.json")
CONSOLIDATED = ("consolidated*.safetensors", "consolidated.safetensors.index.json")

# 2,048 elements of bfloat16. Where training changed 1 element in 100, all of a sample are equal once in 10^9.
_SAMPLE_BYTES = 4096
# The first, the middle and the last bytes. The last rows of an embedding are those of added tokens.
_SAMPLES = 3
# Tensors that are sampled: 24,576 reads at most. Dense models have up to about 1,000 tensors, experts make
# 20,000 and more.
_MOST_TENSORS = 8192
# safetensors refuses a longer header, too.
_MOST_HEADER_BYTES = 100_000_000
_MOST_FILES = 4096
# All headers together: a tensor takes about 150 bytes there, so this is a million of them.
_MOST_HEADERS_BYTES = 256 << 20
# The start of an engine waits for so long at most. With a cold cache, 288 tensors of 4.7 GB took 0.3 to
# 0.5 s. 44,776 tensors of 2.9 GB took 9 to 11 s. Two cores with a load of 21, virtual disk, 2026-11-30.
_MOST_SECONDS = 30.0
# Reads wait for a disk or a network, side by side.
_THREADS = 16
_TENSORS_OF_A_TASK = 64

_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")

_T = TypeVar("_T")
_V = TypeVar("_V")


class UnknownCheckpoint(ValueError):
    """The identity cannot be read. The message contains the reason."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _Tensor:
    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    """Offset of its bytes in the file."""
    nbytes: int


def identify(
    model: str,
    files: Sequence[tuple[str, str]],
    *,
    revision: str | None = None,
    cache: str | None = None,
) -> Checkpoint | None:
    """The identity of the weights that an engine has loaded, or None, with a log line, if it is unknown.
    BLOCKS for the reads.

    ``model``: a directory, or a name of the Hugging Face hub. ``files``: patterns with their indices, of
    which the first one that occurs counts. None of them: the weights are in another format. ``revision``,
    ``cache``: as for the hub.
    """
    began = time.monotonic()
    try:
        if not files:
            raise UnknownCheckpoint("the load format is not safetensors")
        checkpoint = _read(lambda: _directory(model, revision, cache), files)
    except (UnknownCheckpoint, OSError) as error:
        logger.info("weights: the checkpoint of %s is not compared with other engines': %s", model, error)
        return None
    logger.info("weights: checkpoint %s (read in %.2f s)", checkpoint.digest, time.monotonic() - began)
    return checkpoint


def read_checkpoint(directory: Path, files: Sequence[tuple[str, str]] = (MODEL,)) -> Checkpoint:
    """The identity of the checkpoint in this directory. Raises UnknownCheckpoint or OSError. BLOCKS."""
    return _read(lambda: directory, files)


def _read(find: Callable[[], Path], files: Sequence[tuple[str, str]]) -> Checkpoint:
    def found(_: None) -> tuple[Path, list[Path]]:
        directory = find()
        return directory, _files(directory, files)

    deadline = time.monotonic() + _MOST_SECONDS
    reading, threads = _Reading(deadline), _Threads(deadline)
    try:
        ((directory, paths),) = threads.map(found, [None])
        headers = threads.map(reading.header, paths)
        tensors = sorted(chain.from_iterable(headers), key=lambda one: (one.path, one.first))
        if not tensors:
            raise UnknownCheckpoint(f"{directory} has no tensors")
        chosen = _chosen(tensors)
        sampled = [one for one in tensors if one.name in chosen]
        starts = range(0, len(sampled), _TENSORS_OF_A_TASK)
        tasks = [sampled[start : start + _TENSORS_OF_A_TASK] for start in starts]
        samples = chain.from_iterable(threads.map(reading.samples, tasks))
        digests = dict(zip(sampled, samples, strict=True))
    finally:
        threads.stop()
    facts = sorted(
        msgspec.json.encode((one.name, one.dtype, one.shape, digests.get(one, b""))) for one in tensors
    )
    storage = sorted({one.dtype for one in tensors} - _FLOATS)
    digest = hashlib.blake2b(b"\n".join(facts), digest_size=8).hexdigest()
    return Checkpoint(" ".join(storage), digest)


def _directory(model: str, revision: str | None, cache: str | None) -> Path:
    """The directory of the weights, which the engine has loaded already."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (ImportError, OSError, ValueError):
        raise UnknownCheckpoint(
            "it is no directory, and the cache of the Hugging Face hub does not have it"
        ) from None


def _files(directory: Path, files: Sequence[tuple[str, str]]) -> list[Path]:
    for pattern, index in files:
        if paths := sorted(directory.glob(pattern)):
            listed = _listed(directory / index)
            paths = [path for path in paths if listed is None or path.name in listed]
            if len(paths) > _MOST_FILES:
                raise UnknownCheckpoint(f"{directory} has more than {_MOST_FILES:,} files of weights")
            return paths
    raise UnknownCheckpoint(f"{directory} has no safetensors files")


def _listed(index: Path) -> set[str] | None:
    """The files that the index names. None: there is no index, and all files count."""
    try:
        with _File(index) as file:
            text = file.read(_MOST_HEADER_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > _MOST_HEADER_BYTES:
        raise UnknownCheckpoint(f"{index} has more than {_MOST_HEADER_BYTES:,} bytes")
    return set(_decoded(text, _Index, index).weight_map.values())


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _decoded(text: bytes, kind: type[_T], path: Path) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnknownCheckpoint(f"{path}: {error}") from None


class _File:
    """A regular file that is open for reads at offsets."""

    def __init__(self, path: Path) -> None:
        # Without O_NONBLOCK, open() waits for the writer of a FIFO.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._path = path
        try:
            found = os.fstat(self._descriptor)
            self.nbytes = found.st_size
            if not stat.S_ISREG(found.st_mode):
                raise UnknownCheckpoint(f"{path} is no regular file")
            # Otherwise the kernel reads 128 KiB around each sample.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """Up to this many bytes, fewer only at the end of the file."""
        parts = []
        while nbytes and (part := os.pread(self._descriptor, nbytes, offset)):
            parts.append(part)
            nbytes, offset = nbytes - len(part), offset + len(part)
        return b"".join(parts)

    def exactly(self, nbytes: int, offset: int) -> bytes:
        """These bytes. Raises UnknownCheckpoint if the file ends before."""
        if len(found := self.read(nbytes, offset)) != nbytes:
            raise UnknownCheckpoint(f"{self._path} ends within its tensors")
        return found


class _Threads:
    """Threads for reads, until a deadline.

    A read of a network file system can be stuck for ever. The process would wait for the threads of a
    ThreadPoolExecutor when it exits, but not for these.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for number in range(_THREADS):
            threading.Thread(target=self._work, name=f"checkpoint-{number}", daemon=True).start()

    def map(self, function: Callable[[_V], _T], values: Iterable[_V]) -> list[_T]:
        """The results, in the order of the values. Raises UnknownCheckpoint after the deadline. BLOCKS."""
        futures: list[Future[_T]] = []
        for value in values:
            future: Future[_T] = Future()
            futures.append(future)
            self._tasks.put(partial(_run, future, function, value))
        try:
            return [future.result(max(self._deadline - time.monotonic(), 0.0)) for future in futures]
        except TimeoutError:
            raise _too_slow() from None

    def stop(self) -> None:
        """Drops the tasks that have not begun. Threads end after their current task."""
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in range(_THREADS):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _run(future: Future[_T], function: Callable[[_V], _T], value: _V) -> None:
    try:
        future.set_result(function(value))
    except BaseException as error:
        future.set_exception(error)


def _too_slow() -> UnknownCheckpoint:
    return UnknownCheckpoint(f"reading it takes more than {_MOST_SECONDS:g} s")


class _Reading:
    """Reads parts of files, in many threads, until a deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._header_bytes = 0

    def header(self, path: Path) -> list[_Tensor]:
        self._check_time()
        with _File(path) as file:
            length = int.from_bytes(file.exactly(8, 0), "little")
            if length > min(_MOST_HEADER_BYTES, file.nbytes - 8):
                raise UnknownCheckpoint(f"{path} claims a header of {length:,} bytes")
            # Two threads may add at once. The limit need not be exact.
            self._header_bytes += length
            if self._header_bytes > _MOST_HEADERS_BYTES:
                raise UnknownCheckpoint(f"the headers have more than {_MOST_HEADERS_BYTES:,} bytes")
            text = file.exactly(length, 8)
            end = file.nbytes
        entries = _decoded(text, dict[str, msgspec.Raw], path)
        entries.pop("__metadata__", None)
        tensors = []
        for name, raw in entries.items():
            entry = _decoded(bytes(raw), _Entry, path)
            first, last = (8 + length + offset for offset in entry.data_offsets)
            if not 8 + length <= first <= last <= end:
                raise UnknownCheckpoint(f"{path} has no bytes for tensor {name}")
            tensors.append(_Tensor(path, name, entry.dtype, entry.shape, first, last - first))
        return tensors

    def samples(self, tensors: Sequence[_Tensor]) -> list[bytes]:
        """The digest of each tensor's sampled bytes. Most of them are in one file."""
        found = []
        for path in dict.fromkeys(one.path for one in tensors):
            with _File(path) as file:
                for tensor in tensors:
                    if tensor.path != path:
                        continue
                    self._check_time()
                    parts = (file.exactly(nbytes, tensor.first + at) for at, nbytes in _places(tensor.nbytes))
                    found.append(hashlib.blake2b(b"".join(parts), digest_size=16).digest())
        return found

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _too_slow()


def _places(nbytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the samples of a tensor with this many bytes."""
    if nbytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, nbytes)]
    step = (nbytes - _SAMPLE_BYTES) / (_SAMPLES - 1)
    return [(int(number * step), _SAMPLE_BYTES) for number in range(_SAMPLES)]


def _chosen(tensors: Iterable[_Tensor]) -> set[str]:
    """The names of the tensors that are sampled: all of them, or in each layer as many of each kind.

    The first number of a name is its layer. Tensors of one kind differ in a later one, their expert.
    """
    names = sorted({one.name for one in tensors})
    if len(names) <= _MOST_TENSORS:
        return set(names)
    turns: Counter[str] = Counter()
    order = []
    for name in names:
        first = _INDEX.search(name)
        kind = name if first is None else name[: first.end()] + _INDEX.sub("#", name[first.end() :])
        turns[kind] += 1
        order.append((turns[kind], name))
    return {name for _, name in sorted(order)[:_MOST_TENSORS]}
