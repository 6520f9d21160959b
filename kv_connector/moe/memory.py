"""Tensors over memory of the native class, without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


def bytes_at(address: int, nbytes: int, device: int | None) -> torch.Tensor:
    """The bytes as a tensor of uint8. ``device``: CUDA ordinal, None for host memory.

    The tensor does not own the memory. Do not use it, or a view of it, after the owner has freed it.
    """
    if device is None:
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        return torch.frombuffer(array, dtype=torch.uint8)
    return torch.as_tensor(_DeviceMemory(address, nbytes), device=torch.device("cuda", device))


class _DeviceMemory:
    """Memory of a GPU, as torch takes it over."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def view(area: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An array of that shape at that offset of the area."""
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    # Bytes first: a view of another element size needs the last dimension to hold whole elements.
    return area[offset : offset + nbytes].view(dtype).view(*shape)
