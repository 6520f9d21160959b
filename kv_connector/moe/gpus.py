"""Reports through the CUDA driver whether this machine can exchange rows of experts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

# CUdevice_attribute: a piece of virtual memory can be exported as a file descriptor.
_EXPORTS_DESCRIPTORS = 103


@dataclass(frozen=True)
class Gpus:
    """The visible GPUs. Ordinals are those of CUDA."""

    count: int
    apart: tuple[tuple[int, int], ...]
    """Pairs of which the first GPU cannot reach the memory of the second."""
    sealed: tuple[int, ...]
    """GPUs whose memory cannot be exported as a descriptor."""


def visible_gpus(driver: Any = None) -> Gpus | None:
    """None where no CUDA driver is usable. Makes no context, and takes no memory of a GPU."""
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    gpus = range(count.value)
    devices = []
    for gpu in gpus:
        device = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), gpu):
            return None
        devices.append(device.value)
    return Gpus(
        count.value,
        tuple(
            (one, two)
            for one in gpus
            for two in gpus
            if one != two and not _reaches(driver, devices, one, two)
        ),
        tuple(gpu for gpu in gpus if not _exports(driver, devices[gpu])),
    )


def _reaches(driver: Any, devices: list[int], one: int, two: int) -> bool:
    can = ctypes.c_int()
    return not driver.cuDeviceCanAccessPeer(ctypes.byref(can), devices[one], devices[two]) and can.value == 1


def _exports(driver: Any, device: int) -> bool:
    value = ctypes.c_int()
    return (
        not driver.cuDeviceGetAttribute(ctypes.byref(value), _EXPORTS_DESCRIPTORS, device)
        and value.value == 1
    )
