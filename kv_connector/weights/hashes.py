"""Hashes of a parameter's content, by which it is compared without being sent.

Both sides hash the same boxes in the same order: a worker those of its arena, who asks those of the
checkpoint, in the parameter's dtype. What a loader writes of its own, padding, is in neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from kv_connector.weights.geometry import Geometry, Write

HASH_BYTES = 16


def hashes(geometry: Geometry, box: Callable[[Write], torch.Tensor]) -> tuple[bytes, ...]:
    """Of each parameter. ``box``: what the write writes, in its parameter's dtype, wherever it lies."""
    found = [hashlib.blake2b(digest_size=HASH_BYTES) for _ in geometry.parameters]
    for write in geometry.writes:
        content = box(write).contiguous().cpu().reshape(-1).view(torch.uint8)
        found[write.parameter].update(content.numpy())
    return tuple(one.digest() for one in found)
