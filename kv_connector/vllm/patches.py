"""All changes that the connector makes to vLLM's own objects, beside the hooks that vLLM offers.

A change is a function here, with three fields in its docstring: what it replaces, why, and until which
release of vLLM it is needed. Changes that belong to a class of their own are made elsewhere:

    module              what it changes                           why, and until when
    first_token         SchedulerConfig.scheduler_cls, if the     A decode engine's requests begin with the
                        user set no other (choose_scheduler)      prefill engine's token, and held requests
                                                                  cost no look. Until a hook schedules.
    forced_token        SamplingParams.extra_args (force)         D samples the prefill engine's token. Until
                                                                  a request can begin with one.
    scheduler_side      KVConnectorOutput.finished_recving and    vLLM knows no load without pages, and no
                        finished_sending                          prefix that is lent. Until it lets such
                        (SchedulerSide.reported)                  requests wait.
    block_tables        references of blocks (hold_windows, hold, A window's blocks stay until they are sent,
                        free)                                     as those of lent prefixes do, and a
                                                                  discarded load begins again. Until vLLM
                                                                  keeps them itself.
    kept_cache          block hashes and preemption of requests   New requests find no KV of earlier weights,
                        (keep)                                    which running ones keep. Until vLLM's block
                                                                  hashes contain the version of the weights.
    metrics             prometheus_client.REGISTRY: metrics of    An engine that is made anew registers the
                        an earlier engine are removed             same names. Until vLLM removes them.
    plugin              KV_CONNECTOR_PROTOCOLS of Dynamo's        Dynamo refuses connectors that it does not
                        worker                                    list. Until Dynamo lists this connector.
    process             handlers and level of the logger          One log. For as long as vLLM configures only
                        kv_connector (adopt_vllm_logging)         its own logger.
    experts.step_watch  methods of the worker's class             A step without a lost rank's rows is void,
                        (watch_steps)                             and vLLM has no hook behind a step's output.
                                                                  Until it has.
    experts.manager     AgRsAll2AllManager (replace_exchange),    Rows go only to the ranks of their experts.
                        with KV_CONNECTOR_MOE=1                   Until vLLM takes exchanges from plugins.
    weights             moe_kernel of a layer's quantisation      vLLM packs experts for a CPU only once.
    .loaded_model       method, on CPUs (_packed_again)           Until a reload packs them again.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from kv_connector.vllm.internals import (
    KVCacheManager,
    PauseState,
    Request,
    Scheduler,
    engine_core_module,
    model_runner_class,
    offloading_scheduler_class,
    shm_broadcast,
)
from kv_connector.vllm.process import connectors_within
from kv_connector.vllm.step_requests import StepRequests

# Divisor for the pause between two looks at a message queue. The pause is an eighth of the wait so far, so a
# message is late by at most an eighth of its duration. The bounds are the resolution of kernel timers (50 us)
# and a delay that has no effect (1 ms).
_LOOKS = 8
_SHORTEST_LOOK_SECONDS = 50e-6
_LONGEST_LOOK_SECONDS = 1e-3

logger = logging.getLogger(__name__)


def report_preemptions_first(kind: type, report: Callable[[Any], None]) -> None:
    """Has model runner V2 call ``report`` with a step's metadata of this kind before it writes into a block.

    An engine that is made anew in this process replaces the ``report`` of the previous engine. Other wrappers
    of the method, a profiler's for example, stay in place.

    Replaces: ``GPUModelRunner.update_requests`` of model runner V2, for the whole process.
    Why: V2 zeroes new blocks, and copies into them, before it reports to its connector that a request lost
    them. Pages that are still to be pushed would be zeros, without any error. V1 reports first.
    Until: V2 reports first, too. 0.32 and 0.33 do not.
    """
    runner = model_runner_class()
    wrapped = runner.update_requests
    while wrapped is not None and not isinstance(wrapped, _ReportedFirst):
        wrapped = getattr(wrapped, "__wrapped__", None)
    if wrapped is None:
        wrapped = _ReportedFirst(runner.update_requests)
        runner.update_requests = wrapped
    wrapped.kind, wrapped.report = kind, report


class _ReportedFirst:
    """The method update_requests of model runner V2, with a call of ``report`` before it."""

    kind: type
    report: Callable[[Any], None]

    def __init__(self, update: Callable[..., Any]) -> None:
        functools.update_wrapper(self, update)
        self._update = update

    def __get__(self, runner: Any, _: type | None = None) -> Callable[..., Any]:
        return self if runner is None else functools.partial(self, runner)

    def __call__(self, runner: Any, scheduler_output: Any) -> Any:
        metadata = scheduler_output.kv_connector_metadata
        for one in getattr(metadata, "metadata", (metadata,)):  # the metadata of a MultiConnector is a tuple
            if isinstance(one, self.kind):
                self.report(one)
        return self._update(runner, scheduler_output)


def sleep_for_messages() -> None:
    """Lets this process sleep while it waits for the other processes of its engine. For CPU engines.

    Idempotent.

    Replaces: ``SpinCondition.wait`` of vLLM's message queues, for the whole process.
    Why: the queue between an engine's scheduler and its workers polls for a second before it sleeps. If the
    model runs on the same cores, P and D would keep each other from computing. docs/performance.md has
    numbers.
    Until: vLLM's queue sleeps earlier, or takes the time as a setting. 0.32 and 0.33 do not.
    """
    shm_broadcast.SpinCondition.wait = _wait_asleep


_wait_awake = shm_broadcast.SpinCondition.wait


def _wait_asleep(condition: Any, timeout_ms: int | None = None) -> None:
    waited = time.monotonic() - condition.last_read
    if waited > condition.busy_loop_s:
        _wait_awake(condition, timeout_ms)  # this call sleeps by itself
    else:
        time.sleep(min(max(waited / _LOOKS, _SHORTEST_LOOK_SECONDS), _LONGEST_LOOK_SECONDS))


def replace_idle_pause(pause: Callable[[float], None]) -> None:
    """Has this process's engine loop call ``pause(seconds)`` after a step that computed nothing.

    Replaces: the module ``time`` in ``vllm.v1.engine.core``, by a module with another ``sleep``.
    Why: vLLM sleeps there for a millisecond, so that the threads of connectors run. A D that waits for pages
    takes just such steps, and would sleep after news has arrived.
    Until: connectors can end that sleep. In 0.32 and 0.33 they cannot.
    """
    engine_core_module().time = _Clock(pause)


class _Clock:
    """The module `time` with another sleep()."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def show_tiers_all_blocks() -> None:
    """Has vLLM's OffloadingConnector note also the blocks that other connectors of a MultiConnector load.

    Idempotent. Call it when all connectors of the engine exist. It does nothing without an
    OffloadingConnector.

    Replaces: ``OffloadingConnectorScheduler.update_state_after_alloc``, for the whole process.
    Why: a finished request's blocks may be given to a load while the tier still stores them. The tier ends
    such stores before the step, but only for blocks that it has noted. Otherwise it would store the pages
    that a peer writes there under the hashes of the earlier blocks (vLLM issue 46951).
    Until: vLLM 0.33.
    """
    tier = offloading_scheduler_class()
    if tier is None or hasattr(tier.update_state_after_alloc, "__wrapped__"):
        return
    update = tier.update_state_after_alloc

    @functools.wraps(update)
    def note_and_update(self: Any, request: Request, blocks: Any, num_external_tokens: int) -> None:
        for group in blocks.blocks:
            self._current_batch_allocated_block_ids.update(
                block.block_id for block in group if not block.is_null
            )
        update(self, request, blocks, num_external_tokens)

    tier.update_state_after_alloc = note_and_update


def wake_idle_engine(requests: StepRequests) -> None:
    """Has this process's engine loop take a step whenever ``requests`` gets a request, also without a client.

    An engine that is made anew in this process replaces the ``requests`` of the previous engine.

    Replaces: ``EngineCoreProc._process_input_queue``, for the whole process.
    Why: an engine without requests waits there, where no hook of a connector runs. Its workers' news, such as
    a prefix that another engine requests, would wait as long.
    Until: connectors can request a step. In 0.32 and 0.33 they cannot.
    """
    core = engine_core_module()
    wrapped = getattr(core.EngineCoreProc._process_input_queue, "__wrapped__", None)
    process = wrapped or core.EngineCoreProc._process_input_queue

    @functools.wraps(process)
    def process_input_queue(engine: Any) -> Any:
        wakeup = core.EngineCoreRequestType.WAKEUP, None
        requests.wake = lambda: engine.input_queue.put_nowait(wakeup)
        try:
            requests.start()
        except OSError:
            logger.exception(
                "cannot wake the idle engine for other engines: it answers them with its next step"
            )
        return process(engine)

    core.EngineCoreProc._process_input_queue = process_input_queue


def report_pauses(kind: type, report: Callable[[Any, bool], None]) -> None:
    """Has each of vLLM's schedulers call ``report(connector, paused)`` for its connectors of this kind.

    The call comes when a pause is requested, and when it ends. A second call of this function replaces
    ``report``.

    Replaces: ``Scheduler.set_pause_state``, for the whole process.
    Why: a pause waits until no block is in use. Blocks that are lent to other engines are free sooner if they
    are not waited for, and the next borrower must not take more of them.
    Until: connectors are notified of a pause. 0.32 and 0.33 do not notify them.
    """
    wrapped = Scheduler.set_pause_state
    set_pause_state = getattr(wrapped, "__wrapped__", wrapped)

    @functools.wraps(set_pause_state)
    def set_and_report(scheduler: Any, state: PauseState) -> None:
        set_pause_state(scheduler, state)
        for connector in connectors_within(scheduler.connector):
            if isinstance(connector, kind):
                report(connector, state is not PauseState.UNPAUSED)

    Scheduler.set_pause_state = set_and_report


def leave_last_token(request: Request) -> None:
    """Has vLLM compute a new request's prompt except for the last token, and sample one token then.

    Other holders of the prompt keep theirs: the request gets its own lists.

    Replaces: the request's lists of tokens and block hashes, its ``num_prompt_tokens`` and ``max_tokens``.
    Why: D computes the prompt's last token, from the recurrent state before it. P must not compute that token
    into the state that it sends.
    Until: vLLM keeps the state before the last token, or lets connectors shorten a prompt. 0.32 and 0.33 do
    not.
    """
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    if request.prompt_is_token_ids is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-1]
    request._all_token_ids.pop()
    request.num_prompt_tokens -= 1
    # Only the last hash can cover the removed token. If it does not, the next call makes it anew.
    del request.block_hashes[-1:]
    request.update_block_hashes()
    # The next token would be computed into the state that is to be sent.
    request.max_tokens = 1


def let_states_load(kv_cache_manager: KVCacheManager) -> None:
    """Has vLLM leave a token to be loaded if its prefix cache lacks only the recurrent state.

    Replaces: ``get_computed_blocks_for_connector`` of the engine's manager. It shortens some hits.
    Why: with ``supports_divergent_local_hybrid_hits`` a hit may be longer than the hit of the state's group.
    But vLLM starts a load only for missing tokens. If the hit leaves none, vLLM falls back to a shorter hit,
    down to nothing, and computes the rest.
    Until: vLLM loads a state although no token is missing. 0.32 and 0.33 do not.
    """
    find = kv_cache_manager.get_computed_blocks_for_connector
    managers = kv_cache_manager.coordinator.single_type_managers
    aligned = kv_cache_manager.coordinator.scheduler_block_size

    def find_and_leave(request: Request, *limits: Any) -> tuple[Any, int, int, bool]:
        found, tokens, boundary, diverged = find(request, *limits)
        if diverged and tokens == request.num_tokens - 1:
            tokens = (tokens - 1) // aligned * aligned
            groups = zip(found.blocks, managers, strict=True)
            found = kv_cache_manager.create_kv_cache_blocks(
                tuple(list(blocks[: tokens // manager.block_size]) for blocks, manager in groups)
            )
        return found, tokens, boundary, diverged

    kv_cache_manager.get_computed_blocks_for_connector = find_and_leave


def around_reset(
    kv_cache_manager: KVCacheManager,
    before: Callable[[], Collection[str]],
    after: Callable[[], None],
    lent: Callable[[], list[Any]] = list,
) -> None:
    """Has vLLM empty its prefix cache although the requests that ``before()`` names hold blocks.

    These requests keep their blocks, and so do the borrowers of the blocks ``lent()``. ``after()`` is called
    after a successful reset.

    Replaces: ``reset_prefix_cache`` of the engine's manager.
    Why: vLLM resets only a pool without users, and cannot preempt a request that waits for a load. It knows
    no borrowers.
    Until: vLLM preempts such requests at a reset. 0.32 and 0.33 do not.
    """
    reset = kv_cache_manager.reset_prefix_cache
    managers = kv_cache_manager.coordinator.single_type_managers
    pool = kv_cache_manager.block_pool

    def reset_around_loads() -> bool:
        blocks = [
            block
            for request_id in before()
            for manager in managers
            for block in manager.req_to_blocks.get(request_id, ())
            if not block.is_null
        ]
        blocks += lent()
        # No other code of the scheduler runs in between.
        pool.free_blocks(blocks)
        try:
            succeeded: bool = reset()
        finally:
            pool.touch(blocks)
        if succeeded:
            after()
        return succeeded

    kv_cache_manager.reset_prefix_cache = reset_around_loads


def keep_cache_over_updates(
    utility: str, keep: Callable[[Any, str], None], admit: Callable[[Any, Request], None]
) -> None:
    """Has vLLM's engine core call ``keep(core, version)`` for this utility, which a client requests.

    It also calls ``admit(core, request)`` with each new request, before the scheduler gets it. A second call
    of this function changes nothing.

    Replaces: ``EngineCore.add_request``, for the whole process. Adds the method ``utility`` to the class.
    Why: without ``clear_cache`` a pause leaves KV of the previous weights where new requests find it.
    Until: vLLM's block hashes contain the version of the weights. In 0.32 and 0.33 they do not.
    """
    core = engine_core_module().EngineCore
    if hasattr(core, utility):
        return
    add_request = core.add_request

    @functools.wraps(add_request)
    def admit_and_add(engine: Any, request: Request, *wave: int) -> None:
        admit(engine, request)
        add_request(engine, request, *wave)

    def keep_cache(engine: Any, version: str) -> None:
        keep(engine, version)

    core.add_request = admit_and_add
    setattr(core, utility, keep_cache)


def report_preemptions(scheduler: Scheduler, report: Callable[[Request], None]) -> None:
    """Has this scheduler call ``report(request)`` for each request that it has preempted.

    The call comes when the request is in the queue again. A second call of this function replaces ``report``.

    Replaces: ``_preempt_request`` of the engine's scheduler.
    Why: a preempted stream is computed anew with the current weights, and its block hashes can be those of
    earlier weights.
    Until: vLLM's block hashes contain the version of the weights. In 0.32 and 0.33 they do not.
    """
    preempt = type(scheduler)._preempt_request

    def preempt_and_report(request: Request, *given: Any, **named: Any) -> None:
        preempt(scheduler, request, *given, **named)
        report(request)

    scheduler._preempt_request = preempt_and_report
