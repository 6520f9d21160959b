"""KV that outlives an update of the weights: ``clear_cache: false`` of an engine that takes weights.

Requests that decode go on with their KV. New requests never read it: their block hashes contain the version
of the weights, as they contain a cache salt. So the earlier blocks stay in vLLM's prefix cache until vLLM
needs their memory, and engines with equal versions have equal hashes. A request whose KV is of two versions
has block hashes that no other request gets. If vLLM preempts it later, it gets the hashes of the version
with which it is computed anew. All of this happens in vLLM's engine core, most of it in the pause.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from kv_connector.protocol.wire.weight_version import shown
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.internals import AllBlocksCleared, Request, RequestStatus
from kv_connector.vllm.patches import keep_cache_over_updates, report_preemptions
from kv_connector.vllm.process import adopt_vllm_logging, connectors_within
from kv_connector.vllm.scheduling.scheduler_side import SchedulerSide

logger = logging.getLogger("kv_connector")

Hasher = Callable[[Request], list[bytes]]


class SaltedHasher:
    """vLLM's block hasher with a salt in the hash of a request's first block, and so in the whole chain."""

    def __init__(self, hasher: Hasher, salt: str) -> None:
        self.hasher = hasher
        self.salt = salt

    def __call__(self, request: Request) -> list[bytes]:
        """Returns the hashes of the request's full blocks that have none yet."""
        if request.block_hashes:
            return self.hasher(request)
        given = request.cache_salt
        # A client's salt is a text, so none equals this tuple.
        request.cache_salt = (self.salt, given or "")
        try:
            return self.hasher(request)
        finally:
            request.cache_salt = given


def install(utility: str) -> None:
    """Makes vLLM's engine core in this process handle the utility of this name. Idempotent."""
    keep_cache_over_updates(utility, keep, admit)


def keep(core: Any, version: str) -> None:
    """Carries the KV of a paused engine core over an update to this version.

    Call it after all workers have applied the version, and before the engine resumes. Requests whose prompt
    is not computed, and KV transfers in flight, begin anew: a prompt that is sent must be of one version.
    """
    adopt_vllm_logging()
    scheduler = core.scheduler
    sides = _sides(scheduler.connector)
    _preempt_prompts(scheduler, sides)
    for side in sides:
        side.cross_update()
    hasher = core.request_block_hasher
    if hasher is not None:
        plain = hasher.hasher if isinstance(hasher, SaltedHasher) else hasher
        core.request_block_hasher = SaltedHasher(plain, version)
        _hash_anew(scheduler, core.request_block_hasher, SaltedHasher(plain, secrets.token_hex(16)))
        report_preemptions(scheduler, functools.partial(admit, core))
    pool = scheduler.kv_cache_manager.block_pool
    if pool.enable_kv_cache_events:
        pool.kv_event_queue.append(AllBlocksCleared())  # no new request finds an earlier block
    core.reset_encoder_cache()
    logger.info("weights: the engine keeps its KV cache over the update to version %s", shown(version))


def admit(core: Any, request: Request) -> None:
    """Gives a request without KV the hashes of the version that the engine serves.

    vLLM makes new requests in another thread, which may have used the previous hasher. A preempted stream
    has hashes of earlier versions.
    """
    if request._block_hasher is not core.request_block_hasher:
        _rehash(request, core.request_block_hasher)


def _sides(connector: Any) -> list[SchedulerSide]:
    if connector is None:
        return []
    found = [one.scheduler for one in connectors_within(connector) if isinstance(one, WriteImmConnector)]
    return [side for side in found if side is not None]


def _preempt_prompts(scheduler: Any, sides: list[SchedulerSide]) -> None:
    """Preempts requests whose prompt is not computed, as vLLM's reset of its prefix cache does."""
    prompts = [
        request
        for request in scheduler.running
        if request.num_computed_tokens < request.num_prompt_tokens
        or any(side.sends(request.request_id) for side in sides)
    ]
    for request in reversed(prompts):  # the last one first, because each goes to the front of the queue
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _hash_anew(scheduler: Any, current: SaltedHasher, mixed: SaltedHasher) -> None:
    """Gives the engine's requests new hashes. ``mixed``: the hasher of those with KV of two versions."""
    for request in scheduler.requests.values():
        if request.is_finished():
            continue
        if request.status is RequestStatus.RUNNING:
            computed = request.num_computed_tokens // scheduler.hash_block_size
            _diverge(request, computed, mixed)
        else:
            _rehash(request, mixed if request.num_computed_tokens else current)


def _diverge(request: Request, computed: int, mixed: SaltedHasher) -> None:
    """Gives the request other hashes from its block ``computed`` on. The earlier blocks are full, and cached.

    The hashes form a chain, so one replaced hash changes all that follow. A new chain from the first block
    would hash all tokens of all streams in the pause. Only a preempted stream needs such a chain,
    from ``admit``.
    """
    hashes = request.block_hashes
    del hashes[computed:]
    request._block_hasher = mixed
    if hashes:
        # Of the same length, because content keys need hashes of one length.
        hashes[-1] = hashlib.shake_256(mixed.salt.encode() + hashes[-1]).digest(len(hashes[-1]))
    request.update_block_hashes()


def _rehash(request: Request, hasher: Hasher | None) -> None:
    request._block_hasher = hasher
    request.block_hashes.clear()
    request.update_block_hashes()
