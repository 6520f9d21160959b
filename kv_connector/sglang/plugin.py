"""The ``sglang.srt.plugins`` entry point. SGLang calls it in each of its processes, whatever its transfer
backend.

Only the names are imported here. The adapter itself is loaded when SGLang first requests one of its classes,
so a frontend needs no transfer engine.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kv_connector.sglang.recomputes import held_shown, next_room, retracted_waiting

logger = logging.getLogger(__name__)

BACKEND = "write_imm"
"""Name of the transfer backend, and of the warmup that starts the controller of weights."""
LOADER = "kv_connector.sglang.weights.loader.take"
"""Value of ``--custom-weight-loader`` of an engine that takes weights."""
RID = "kv-connector-weights"
"""The request id by which a scheduler recognises a pause for pushed weights, which may be delayed, and an
abort for it."""
_EXPERTS = "kv_connector.sglang.experts.dispatcher"
"""The module that serves experts. A process loads it when it makes its first layer of experts."""

# The adapter's classes, by the values of SGLang's KVClassType.
_CLASSES = {
    "manager": ("kv_connector.sglang.manager", "Manager"),
    "sender": ("kv_connector.sglang.sender", "Sender"),
    "receiver": ("kv_connector.sglang.receiver", "Receiver"),
    "bootstrap_server": ("kv_connector.sglang.internals", "CommonKVBootstrapServer"),
}


def register() -> None:
    """Makes ``--disaggregation-transfer-backend write_imm`` known to SGLang. Idempotent."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND in TransferBackend._value2member_map_:
        return
    choices.add_disagg_transfer_backend_choices([BACKEND])
    _add_member(TransferBackend, BACKEND)
    utils, decode = "sglang.srt.disaggregation.utils", "sglang.srt.disaggregation.decode"
    HookRegistry.register(f"{utils}.get_kv_class", _kv_class, HookType.AROUND)
    HookRegistry.register(f"{decode}.DecodeTransferQueue.__init__", _hold_until_drained, HookType.AFTER)
    queue = f"{decode}.DecodePreallocQueue"
    HookRegistry.register(f"{queue}._create_receiver_and_enqueue", _change_room, HookType.BEFORE)
    HookRegistry.register(f"{queue}._init_receiver", _keep_rank, HookType.AFTER)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.on_idle", _rest, HookType.AFTER)
    recorded = f"{scheduler}.record_weight_version_change"
    HookRegistry.register(recorded, _record_weights, HookType.AROUND)
    HookRegistry.register(recorded, _note_weights, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.__init__", _start_weights, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.pause_generation", _pause, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.ingest_requests", _turn, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.continue_generation", _resume, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.abort_request", _abort, HookType.AROUND)
    if os.environ.get("KV_CONNECTOR_MOE") == "1":
        layer = "sglang.srt.layers.moe.fused_moe_triton.layer"
        HookRegistry.register(f"{layer}.create_moe_dispatcher", _create_dispatcher, HookType.AROUND)
        HookRegistry.register(f"{scheduler}.process_batch_result", _check_step, HookType.BEFORE)
        HookRegistry.register(f"{scheduler}.run_event_loop", _run, HookType.AROUND)
    try:
        from sglang.srt.entrypoints.warmup import warmup
    except ImportError:  # another release, which serves without weight updates
        return
    warmup(BACKEND)(_serve_weights)


def _add_member(enumeration: Any, value: str) -> None:
    """Adds a member to SGLang's enumeration of backends, in which SGLang looks them up by value."""
    member = object.__new__(enumeration)
    member._name_, member._value_ = value.upper(), value
    member._sort_order_ = len(enumeration._member_names_)
    enumeration._member_names_.append(member._name_)
    enumeration._member_map_[member._name_] = member
    enumeration._value2member_map_[value] = member


def _kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Replaces SGLang's get_kv_class()."""
    found = _CLASSES.get(class_type.value) if transfer_backend.value == BACKEND else None
    if found is None:
        return original(transfer_backend, class_type)
    module, name = found
    return getattr(importlib.import_module(module), name)


def _hold_until_drained(result: None, queue: Any, *args: Any, **kwargs: Any) -> None:
    """Runs after DecodeTransferQueue.__init__().

    SGLang frees an aborted request's pages after some seconds even if they may still be written. The agent
    always learns when they cannot be written any more, and reports it.
    """
    if queue.scheduler.transfer_backend.value == BACKEND:
        queue.deferred_kv_release_timeout = float("inf")


def _change_room(queue: Any, request: Any, is_rebootstrap: bool = False) -> None:
    """Runs before DecodePreallocQueue._create_receiver_and_enqueue(). ``is_rebootstrap``: the prefill server
    is to compute a request again.

    SGLang has both servers use the request's earlier room again. A prefill server that was started since
    would take it for a first use.
    """
    if is_rebootstrap and queue.transfer_backend.value == BACKEND:
        request.bootstrap_room = next_room(request.bootstrap_room)


def _keep_rank(result: None, queue: Any, request: Any, prefill_dp_rank: int) -> None:
    """Runs after DecodePreallocQueue._init_receiver(). The request stays with this data-parallel rank of the
    prefill server: which rank another room would have is known only once a rank has its prompt."""
    if queue.transfer_backend.value == BACKEND:
        request.req.disagg_prefill_dp_rank = prefill_dp_rank


def _rest(result: None, scheduler: Any) -> None:
    """Runs after Scheduler.on_idle(), which SGLang calls in each turn that finds nothing to compute and runs
    no batch. SGLang would otherwise take the next turn at once."""
    if (manager := _manager(scheduler)) is not None:
        manager.rest(scheduler.recv_from_tokenizer)


def _record_weights(original: Any, scheduler: Any, new_version: str | None) -> None:
    """Replaces Scheduler.record_weight_version_change(), which overlooks requests that were retracted."""
    with ExitStack() as seen:
        if (settling := _settling(scheduler)) is not None:
            seen.enter_context(settling.shown())
        if _holds(scheduler):
            seen.enter_context(retracted_waiting(scheduler))
        original(scheduler, new_version)


def _note_weights(result: None, scheduler: Any, new_version: str | None) -> None:
    """Runs after Scheduler.record_weight_version_change(). SGLang calls that in each rank after each update,
    and for ``/update_weight_version``. ``new_version``: None after an update without a version. A pushed
    version gets its name after the update."""
    if (manager := _manager(scheduler)) is None:
        return
    if new_version is None:
        manager.forget_checkpoint()
        return
    worker = getattr(scheduler, "kv_connector_weights", None)
    manager.note_weights("" if worker is None else worker.served)


def _start_weights(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Runs after Scheduler.__init__(), once the model is loaded."""
    try:
        from sglang.srt.runtime_context import get_model

        takes_weights = LOADER in (get_model().custom_weight_loader or ())
    except (ImportError, AttributeError):  # another release, which serves without weight updates
        return
    if takes_weights:
        importlib.import_module("kv_connector.sglang.weights.worker").start_worker(scheduler)


def _pause(original: Any, scheduler: Any, asked: Any) -> None:
    """Replaces Scheduler.pause_generation()."""
    settling = _settling(scheduler)
    if settling is not None and asked.rid == RID:
        settling.pause(lambda: original(scheduler, asked))
    else:
        original(scheduler, asked)


def _turn(result: Any, scheduler: Any, stop_at_pause: bool = False) -> None:
    """Runs after Scheduler.ingest_requests(), which SGLang calls at the start of each turn. With
    ``stop_at_pause`` a batch is being computed."""
    settling = _settling(scheduler)
    if settling is None or stop_at_pause:
        return
    settling.turn()
    worker, manager = scheduler.kv_connector_weights, _manager(scheduler)
    if manager is not None and worker.torn:
        worker.torn = False
        manager.note_torn(worker.tried)


def _resume(scheduler: Any, asked: Any) -> None:
    """Runs before Scheduler.continue_generation()."""
    if (settling := _settling(scheduler)) is not None:
        settling.resume()


def _abort(original: Any, scheduler: Any, asked: Any) -> None:
    """Replaces Scheduler.abort_request(). SGLang overlooks requests that it holds during a pause, and does
    not see those that Settling hides."""
    settling = _settling(scheduler)
    with ExitStack() as seen:
        if settling is not None:
            seen.enter_context(settling.shown())
        # The controller ends requests that keep the cache in use. Held requests have no KV.
        if _holds(scheduler) and asked.rid != RID:
            seen.enter_context(held_shown(scheduler.disagg_decode_prealloc_queue))
        original(scheduler, asked)


def _holds(scheduler: Any) -> bool:
    """Whether this is a decode server whose pauses hold requests, with our transfer backend or weights."""
    ours = _settling(scheduler) is not None or _manager(scheduler) is not None
    return ours and scheduler.disagg_decode_prealloc_queue is not None


def _settling(scheduler: Any) -> Any:
    """The Settling of this scheduler. None: it takes no pushed weights, or prefills and decodes by itself."""
    return getattr(scheduler, "kv_connector_settling", None)


def _create_dispatcher(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any) -> Any:
    """Replaces SGLang's create_moe_dispatcher(), with which each layer of experts exchanges its rows."""
    try:
        experts = importlib.import_module(_EXPERTS)
    except ImportError as error:  # another release of SGLang
        logger.error("experts: SGLang's own exchange stays in use: %s", error)
        return original(moe_runner_config, quant_method)
    return experts.create_dispatcher(original, moe_runner_config, quant_method)


def _check_step(scheduler: Any, batch: Any, result: Any) -> None:
    """Runs before Scheduler.process_batch_result(). The tokens of a step without a lost rank's rows are
    wrong. An error here ends the server."""
    if (experts := sys.modules.get(_EXPERTS)) is not None:
        experts.check_step(result)


def _run(original: Callable[[Any], Any], scheduler: Any) -> Any:
    """Replaces Scheduler.run_event_loop(), whose end or error ends the server."""
    run = functools.partial(original, scheduler)
    experts = sys.modules.get(_EXPERTS)
    return run() if experts is None else experts.run_named(run)


async def _serve_weights(disaggregation_mode: str, tokenizer_manager: Any) -> None:
    """The warmup ``write_imm``: SGLang's server runs it before it listens for requests."""
    await importlib.import_module("kv_connector.sglang.weights.serving").serve_weights(tokenizer_manager)


def _manager(scheduler: Any) -> Any:
    """The Manager of this scheduler. None: it prefills and decodes by itself, or has another backend."""
    queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
    return queue.kv_manager if queue is not None and scheduler.transfer_backend.value == BACKEND else None
