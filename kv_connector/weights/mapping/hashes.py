"""Hashes of parameters' contents, by which two sides compare them without sending them.

Both sides hash the same boxes in the same order: the worker in its arena, the requester in the checkpoint,
converted to the parameter's dtype. Padding that a loader writes itself is in neither hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from kv_connector.weights.mapping.geometry import Geometry, Write

HASH_BYTES = 16


def hashes(geometry: Geometry, box: Callable[[Write], torch.Tensor]) -> tuple[bytes, ...]:
    """Returns the hash of each parameter.

    ``box``: returns the content of a write, in its parameter's dtype.
    """
    found = [hashlib.blake2b(digest_size=HASH_BYTES) for _ in geometry.parameters]
    for write in geometry.writes:
        content = box(write).contiguous().cpu().reshape(-1).view(torch.uint8)
        found[write.parameter].update(content.numpy())
    return tuple(one.digest() for one in found)
