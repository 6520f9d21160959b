"""Requests of a decode server that SGLang retracts for a weight update.

SGLang holds them during its pause. After it, the prefill server computes them again, with their tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def next_room(room: int) -> int:
    """The room in which a request is computed again that was in ``room`` before.

    All ranks of a decode server call it, so it depends on nothing else. A prefill server may have been
    started since, or another one may have its address: neither knows of the earlier room. SGLang's metadata
    have 63 bits for a room, and 0 stands for no room.
    """
    digest = hashlib.blake2b(str(room).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


@contextmanager
def held_shown(queue: Any) -> Iterator[None]:
    """SGLang sees held requests among the retracted ones in the block, so that it can abort them.

    It aborts retracted requests of all kinds but the held ones, whose KV has been freed already. ``queue``:
    SGLang's DecodePreallocQueue.
    """
    held, retracted = queue.held_rebootstrap_reqs, queue.retracted_queue
    names = {id(request) for request in held}
    queue.held_rebootstrap_reqs, queue.retracted_queue = [], [*retracted, *held]
    try:
        yield
    finally:
        left = queue.retracted_queue
        queue.retracted_queue = [request for request in left if id(request) not in names]
        queue.held_rebootstrap_reqs += [request for request in left if id(request) in names]


@contextmanager
def retracted_waiting(scheduler: Any) -> Iterator[None]:
    """SGLang sees retracted requests of a decode server among the waiting ones in the block, with all their
    tokens.

    It holds some of them. Others wait for their KV since an earlier pause. Otherwise SGLang attributes their
    tokens to the version that is next, because it does not note when their version changes.
    """
    queue, transfers = scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue
    resumed = [waiting.req for waiting in [*queue.queue, *transfers.queue] if waiting.is_rebootstrap]
    retracted = [*queue.held_rebootstrap_reqs, *resumed]
    # SGLang has taken the last token away, and puts it back once the others are computed again.
    cut = [request for request in retracted if request.pd_rebootstrap_forced_output_id is not None]
    for request in cut:
        request.output_ids.append(request.pd_rebootstrap_forced_output_id)
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, [*scheduler.waiting_queue, *retracted]
    try:
        yield
    finally:
        scheduler.waiting_queue = waiting
        for request in cut:
            request.output_ids.pop()
