"""GPU memory for the conformance list, through the CUDA driver or its stand-in.

The stand-in's memory (native/tests/fake_cuda) can be mapped by other processes, as a GPU's can.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_ROOT = Path(__file__).resolve().parents[2]
_SONAME = "libcuda.so.1"


def real_driver() -> bool:
    """Returns whether the real driver is present: False also if load() has loaded the stand-in under its
    name."""
    try:
        cuda = ctypes.CDLL(_SONAME)
    except OSError:
        return False
    return not hasattr(cuda, "fakeBreak") and bool(cuda.cuInit(0) == 0)


def build_stand_in(directory: Path) -> str:
    """Compiles the stand-in and returns its path. Raises the compiler process's error."""
    library = directory / _SONAME
    source = _ROOT / "native/tests/fake_cuda/fake_cuda.cc"
    command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{_SONAME}"]
    subprocess.run([*command, f"-I{_ROOT / 'native'}", str(source), "-o", str(library)], check=True)
    return str(library)


@functools.cache
def load(library: str) -> ctypes.CDLL:
    """Loads ``library`` under the driver's name, which is the name that the engine opens."""
    cuda = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    cuda.cuInit(0)
    return cuda


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp of the driver."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc of the driver."""

    _fields_ = (("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class GpuMemory:
    """Bytes of one GPU with as much of an array of uint8 as the tests need: slices without a step."""

    def __init__(self, nbytes: int, device: int, library: str | None, vmm: bool = False) -> None:
        """Allocates the memory. ``device`` counts modulo the number of GPUs. ``library``: the driver's path;
        None: the real driver.

        ``vmm``: in pieces (cuMemCreate), as PyTorch's expandable segments are.
        """
        self._cuda = load(library or _SONAME)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device % count.value)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self.size = nbytes
        self._reserved = 0
        if vmm:
            self._map_pieces(handle.value)
        else:
            pointer = ctypes.c_uint64()
            self._in_context("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            self.address = pointer.value
        self[:] = 0

    def _map_pieces(self, device: int) -> None:
        """Maps pieces of the smallest size. The memory begins a little before the second one."""
        properties = _AllocationProperties(
            type=_PINNED, handle_types=_DESCRIPTOR, location_type=_DEVICE, location=device
        )
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
        piece = ctypes.c_size_t(granularity.value)
        before = 2048
        pieces = 1 + -(-(self.size - before) // piece.value)
        self._piece = piece.value
        self._reserved = pieces * piece.value
        base = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        reserved = ctypes.c_size_t(self._reserved)
        self._call("cuMemAddressReserve", ctypes.byref(base), reserved, ctypes.c_size_t(0), none, none)
        access = _Access(location_type=_DEVICE, location=device, flags=_READ_WRITE)
        for index in range(pieces):
            allocation = ctypes.c_uint64()
            self._call("cuMemCreate", ctypes.byref(allocation), piece, ctypes.byref(properties), none)
            address = ctypes.c_uint64(base.value + index * piece.value)
            self._call("cuMemMap", address, piece, ctypes.c_size_t(0), allocation, none)
            self._call("cuMemRelease", allocation)
            self._call("cuMemSetAccess", address, piece, ctypes.byref(access), ctypes.c_size_t(1))
        self._base = base.value
        self.address = base.value + piece.value - before

    def __getitem__(self, part: slice) -> npt.NDArray[np.uint8]:
        begin, end, _ = part.indices(self.size)
        copy = np.empty(max(end - begin, 0), dtype=np.uint8)
        if copy.size:
            self._in_context(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(copy.ctypes.data),
                ctypes.c_uint64(self.address + begin),
                ctypes.c_size_t(copy.size),
            )
        return copy

    def __setitem__(self, part: slice, value: int | npt.NDArray[np.uint8]) -> None:
        begin, end, _ = part.indices(self.size)
        source = np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype=np.uint8), (end - begin,)))
        self._in_context(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.address + begin),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(source.size),
        )
        self._in_context("cuCtxSynchronize")

    def read_word(self, address: int) -> int:
        """Returns 64 bits from any memory that this GPU can read."""
        word = ctypes.c_uint64()
        self._in_context("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(address), ctypes.c_size_t(8))
        return word.value

    def free(self) -> None:
        if self._reserved == 0:
            self._in_context("cuMemFree_v2", ctypes.c_uint64(self.address))
            return
        for address in range(self._base, self._base + self._reserved, self._piece):
            self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(self._piece))
        self._call("cuMemAddressFree", ctypes.c_uint64(self._base), ctypes.c_size_t(self._reserved))

    def _in_context(self, function: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(function, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._cuda, function)(*arguments)
        if result != 0:
            raise RuntimeError(f"{function}: CUDA error {result}")
