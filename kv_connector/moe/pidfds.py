"""Descriptors that show the end of a process or a thread."""

from __future__ import annotations

import ctypes
import os

# The number is the same on all processors but Alpha.
_SYSCALL = 434


def open_pidfd(pid: int, flags: int = 0) -> int:
    """Opens a pidfd of a process, or of a thread. Raises OSError.

    os.pidfd_open() is missing if Python was compiled with headers of a kernel before Linux 5.3.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid, flags)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(_SYSCALL, pid, flags)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor
