"""WriteImmConnector: the class that vLLM loads. It passes each hook to the scheduler side or the worker side.

A hook that raises would end the engine for all its requests, so no hook raises. An error is logged, and the
deadlines of the protocol end the request that it affects. Only the start may fail (a wrong setting, a port in
use, an unusable lane). Its error says what to change.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from kv_connector.agent.layer_progress import signal_writer
from kv_connector.agent.settings import SettingsError, parse_settings
from kv_connector.agent.start import RunningAgent, WorkerInfo, start
from kv_connector.control.membership import WorkloadReport
from kv_connector.engine.rank_placement import Device
from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import no_place
from kv_connector.protocol.session.fingerprint import ADVICE
from kv_connector.protocol.wire.messages import Role
from kv_connector.vllm.internals import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    Request,
    SupportsHMA,
    release,
)
from kv_connector.vllm.metadata import DescribedRank, News, StepMetadata
from kv_connector.vllm.metrics import PromMetrics, TransferStats
from kv_connector.vllm.model.checkpoint import loaded_checkpoint
from kv_connector.vllm.model.configuration import UnsupportedConfiguration, check_configuration, forces_tokens
from kv_connector.vllm.model.kv_cache import kv_layout
from kv_connector.vllm.model.last_block import LastBlocks
from kv_connector.vllm.model.model_facts import (
    block_tokens,
    hashed_block_tokens,
    hit_tokens,
    keeps_answers,
    kv_cache_tokens,
    rank_fingerprint,
    retained_tokens,
)
from kv_connector.vllm.patches import (
    replace_idle_pause,
    report_pauses,
    report_preemptions_first,
    show_tiers_all_blocks,
    sleep_for_messages,
    wake_idle_engine,
)
from kv_connector.vllm.process import adopt_vllm_logging, default_host, pipeline_and_tensor_parallel_rank
from kv_connector.vllm.scheduling.content import prefix_key
from kv_connector.vllm.scheduling.first_token import choose_scheduler, has_own_scheduler
from kv_connector.vllm.scheduling.scheduler_side import SchedulerSide, by_priority
from kv_connector.vllm.scheduling.step_costs import StepCosts, idle_load, step_tokens
from kv_connector.vllm.scheduling.transferred_blocks import has_states
from kv_connector.vllm.step_requests import StepRequests
from kv_connector.vllm.worker_side import WorkerSide, current_stream
from kv_connector.weights.settings import weight_settings

if TYPE_CHECKING:
    from kv_connector.vllm.spans import TransferSpans

logger = logging.getLogger(__name__)

_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}

P = ParamSpec("P")
R = TypeVar("R")


def never_raises(default: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a hook log its error and return ``default()`` instead of raising."""

    def wrap(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("WriteImmConnector.%s failed", hook.__name__)
                answer: R = default()
                return answer

        return call

    return wrap


@contextlib.contextmanager
def _extra_config() -> Iterator[None]:
    """Adds the place of the settings to a SettingsError."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"kv_connector_extra_config: {error}") from error


def _nothing() -> None:
    return None


def _no_pause(seconds: float) -> None:
    """Does nothing: a CPU engine's workers wait in the step that computes nothing (IDLE_STEP_SECONDS)."""


class WriteImmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not typed for mypy
    """Pushes a prompt's KV pages, layer by layer, from the engine that computes it to the decode engine."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        adopt_vllm_logging()
        with _extra_config():
            self._settings = parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._transfer_role = transfer_role(vllm_config.kv_transfer_config.kv_role)
        check_configuration(vllm_config, kv_cache_config)
        if vllm_config.device_config.device_type == "cpu":
            sleep_for_messages()
        self._engine_id: str = vllm_config.kv_transfer_config.engine_id
        self.scheduler: SchedulerSide | None = None
        """The scheduler side. Set in the scheduler's process only."""
        self.worker: WorkerSide | None = None
        """The worker side. Set in a worker once it has its KV caches."""
        self._running: RunningAgent | None = None
        self._idle: WorkloadReport | None = None
        self._step_costs: StepCosts | None = None
        """The cost of steps. Set in the scheduler's process, if routers are configured or prefixes may be
        borrowed."""
        no_prefixes = _no_prefixes(vllm_config, self._transfer_role)
        if self._settings.routers or not no_prefixes:
            caching = vllm_config.cache_config.enable_prefix_caching
            tokens = kv_cache_tokens(vllm_config, kv_cache_config) if caching else 0
            block = hit_tokens(vllm_config, kv_cache_config) if caching else 0
            self._idle = idle_load(vllm_config.scheduler_config, tokens, block)
        block_sizes = tuple(block_tokens(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
        # With recurrent states, P leaves the prompt's last token to D and samples no first token.
        self._early_tokens = forces_tokens(vllm_config) and not has_states(block_sizes)
        self._prefixes = "" if has_states(block_sizes) else _prefix_key(vllm_config, kv_cache_config)
        self._borrows = bool(self._prefixes) and not no_prefixes
        self._prefetches = self._borrows and has_own_scheduler(vllm_config)
        generates = self._transfer_role is not Role.PREFILL
        self._keeps_answers = not generates or keeps_answers(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(
                self._transfer_role,
                self._engine_id,
                block_sizes,
                early_tokens=self._early_tokens,
                place=by_priority if vllm_config.scheduler_config.policy == "priority" else no_place,
                hash_algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
                no_prefixes=no_prefixes,
                lend_s=self._settings.agent_timeouts().lend,
                remember_s=self._settings.agent_timeouts().remember,
                step_tokens=step_tokens(vllm_config.scheduler_config),
                ask_s=self._settings.agent_timeouts().ask,
            )
            if not self._keeps_answers and self._prefixes and self._settings.routers:
                self._log_lost_answers()
            if vllm_config.cache_config.enable_prefix_caching:
                self.scheduler.step_requests = StepRequests()
                wake_idle_engine(self.scheduler.step_requests)
                report_pauses(WriteImmConnector, WriteImmConnector.note_pause)
            if self._idle is not None:
                steps = vllm_config.max_concurrent_batches
                self._step_costs = StepCosts(self._idle, steps, self.scheduler.expects_prompt)
                self.scheduler.set_compute_seconds(self._step_costs.prompt_seconds)
            if vllm_config.device_config.device_type == "cpu":
                replace_idle_pause(_no_pause)

    def _log_lost_answers(self) -> None:
        logger.warning(
            "prefixes: engine %s lends no answers: vLLM caches the sliding windows of prompts alone. "
            "Start it with --prefix-cache-retention-interval %d",
            self._engine_id,
            retained_tokens(self._vllm_config, self._kv_cache_config),
        )

    # --- Either side

    @never_raises(_nothing)
    def shutdown(self) -> None:
        if self._running is not None:
            self._running.close()
        if self.scheduler is not None and self.scheduler.step_requests is not None:
            self.scheduler.step_requests.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Returns the layout with heads first, or None for MLA, whose pages have one head.

        With heads first, the part of a page for a rank of another tensor parallelism is one write. The
        variable VLLM_KV_CACHE_LAYOUT takes precedence. vLLM warns if its kernels do not have the layout.

        The name is the full one, not its alias HND: vLLM's MultiConnector compares the names of its
        connectors as texts, and OffloadingConnector returns LBHNC.

        This call also chooses D's scheduler, unless VLLM_KV_CACHE_LAYOUT is set. vLLM makes the call in the
        scheduler's process before it makes the scheduler, and no earlier call shows its configuration there.
        """
        choose_scheduler(vllm_config)
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Checks the settings, and returns False. Raises SettingsError.

        A full graph replays without the layer hooks, so that such a step signals all its layers behind the
        graph. vLLM uses full graphs for decode steps, which have nothing to push. Prefills run piecewise,
        with hooks between the pieces.

        The settings are checked here because vLLM calls no other hook with them before it loads the model on
        a GPU, which takes minutes.
        """
        with _extra_config():
            parse_settings(extra_config)
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data=data) if data is not None else TransferStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- The worker side

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker is not None, "no KV caches are registered"
        return self.worker

    @_extra_config()
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Opens the lanes and the control socket. An error says what to change."""
        stage, tensor_rank = pipeline_and_tensor_parallel_rank()
        layout, memory = kv_layout(self._vllm_config, self._kv_cache_config, kv_caches, tensor_rank)
        device = next(iter(kv_caches.values())).device
        parallel = self._vllm_config.parallel_config
        info = WorkerInfo(
            engine_id=self._engine_id,
            role=self._transfer_role,
            rank=stage * parallel.tensor_parallel_size + tensor_rank,
            ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            stage=stage,
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_rank=data_parallel_rank(parallel),
            host=default_host(),
            device=Device(device.type, device.index or 0),
            compute_threads=torch.get_num_threads(),
            layout=layout,
            memory=memory,
            fingerprint=rank_fingerprint(self._vllm_config),
            advice=ADVICE,
            checkpoint=loaded_checkpoint(self._vllm_config) if self._settings.compare_checkpoints else None,
            early_tokens=self._early_tokens,
            load=self._idle,
            prefixes=self._prefixes,
            borrows=self._borrows,
            prefetches=self._prefetches,
            keeps_answers=self._keeps_answers,
        )
        self._running = start(self._settings, info)
        agent = self._running.agent
        self.worker = WorkerSide(
            agent,
            tuple(layer.name for layer in layout.layers),
            signal_writer(
                agent.signal, current_stream, agent.timelines.signalled if agent.timelines.on else None
            ),
            LastBlocks(self._kv_cache_config, kv_caches),
            self._spans(info.rank),
            # With a drafter, model runner V1 ends a step on the last pipeline stage alone.
            ends_every_step=self._vllm_config.use_v2_model_runner
            or self._vllm_config.speculative_config is None
            or parallel.pipeline_parallel_size == 1,
        )
        if device.type == "cuda":
            replace_idle_pause(self.worker.pause)
        if self._vllm_config.use_v2_model_runner:
            report_preemptions_first(StepMetadata, self.handle_preemptions)

    def _spans(self, rank: int) -> TransferSpans | None:
        """Returns the spans of transfers if vLLM sends spans, else None. vLLM then has OpenTelemetry."""
        if self._vllm_config.observability_config.otlp_traces_endpoint is None:
            return None
        from kv_connector.vllm.spans import TransferSpans

        return TransferSpans(rank)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Returns True.

        A lane that cannot register such memory (nvlink) refuses it when the engine starts.
        """
        return True

    def unregister_kv_caches(self) -> None:
        """Prepares for sleep, which unmaps the KV cache.

        Raises if the cache must stay mapped, so that sleep fails.
        """
        assert self._running is not None, "no KV caches are registered"
        self._running.sleep()

    def restore_kv_caches(self) -> None:
        """Resumes after sleep.

        The KV cache is mapped again, at its old addresses and without its contents.
        """
        assert self._running is not None, "no KV caches are registered"
        self._running.wake()

    def set_weights(self, version: str) -> None:
        """Sets the weight version that this worker computes with from now on. Call it between two steps."""
        if self._running is not None:
            self._running.set_weights(version)

    def set_torn(self, reason: str) -> None:
        """Reports that the engine stays paused, with the reason, or with "" that it resumes.

        Any thread may call it.
        """
        if self._running is not None and self._running.registrar is not None:
            self._running.registrar.set_torn(reason)

    def set_controller(self, controller: Address) -> None:
        """Reports where the engine takes weights. Any thread may call it."""
        if self._running is not None and self._running.registrar is not None:
            self._running.registrar.set_controller(controller)

    def get_handshake_metadata(self) -> DescribedRank | None:
        running = self._running
        return None if running is None else DescribedRank(running.agent.described(running.address))

    @never_raises(_nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    @never_raises(_nothing)
    def _begin_step(self, metadata: StepMetadata) -> None:
        self._worker.begin_step(metadata)
        if self._running is not None and (registrar := self._running.registrar) is not None:
            registrar.add_hits(metadata.hits)
            if metadata.load is not None:
                registrar.set_load(metadata.load)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: it is called after the forward pass.

        RESERVE was sent when the step's metadata was bound.
        """

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: KV loads are asynchronous.

        A request is scheduled only once all its pages are here.
        """

    @never_raises(_nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.layer_computed(layer_name)

    @never_raises(_nothing)
    def wait_for_save(self) -> None:
        # Model runner V1 calls this in a `finally`, also after the forward pass has raised.
        self._worker.end_step(raised=sys.exc_info()[0] is not None)

    @never_raises(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns the transfers that have ended.

        It ignores ``finished_req_ids``: the step's metadata names each of this connector's requests
        (FinishPrefill).
        """
        return self._worker.transfer_results()

    @never_raises(_nothing)
    def build_connector_worker_meta(self) -> News | None:
        return self._worker.news()

    @never_raises(_nothing)
    def get_kv_connector_stats(self) -> TransferStats | None:
        if self._step_costs is not None:
            # In the scheduler's process vLLM calls this hook once for each step, when it has the step's
            # output. No other hook is called at the end of every step.
            self._step_costs.step_ended()
        if self._running is None:
            return None
        interval = self._running.reporter.take(later=self._worker.pushes)
        return TransferStats.of(interval) if interval is not None else None

    # --- The scheduler side

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler is not None, "a worker's connector has no scheduler side"
        return self.scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)
        if release.TIERS_MISS_BLOCKS:
            show_tiers_all_blocks()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        ours = metadata[0, 0]
        if not isinstance(ours, DescribedRank):
            raise UnsupportedConfiguration(
                "vLLM's MultiConnector gives all its connectors the handshake metadata of the first "
                f"connector that has any. Here that is another connector's ({type(ours).__name__}): put "
                "WriteImmConnector first."
            )
        self._scheduler.set_ranks(tuple(metadata[place].rank for place in sorted(metadata)))

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Returns True: D may have a prompt's attention pages without its recurrent state.

        The state is loaded in any case.
        """
        return True

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Returns all groups: vLLM must not zero any block that a peer may be writing."""
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    @never_raises(_nothing)
    def note_pause(self, paused: bool) -> None:
        """Notes that vLLM is being paused, or resumes."""
        self._scheduler.pause(paused)

    @never_raises(_nothing)
    def on_new_request(self, request: Request) -> None:
        if self._step_costs is not None:
            self._step_costs.arrived(request)
        self._scheduler.on_new_request(request)

    @never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    @never_raises(_nothing)
    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        metadata = self._step_metadata(scheduler_output)
        metadata.load = self._load(scheduler_output)
        return metadata

    @never_raises(StepMetadata)
    def _step_metadata(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.build_metadata(scheduler_output)

    @never_raises(_nothing)
    def _load(self, scheduler_output: Any) -> WorkloadReport | None:
        load = None if self._step_costs is None else self._step_costs.scheduled(scheduler_output)
        return load if self._settings.routers else None

    @never_raises(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.reported(connector_output)

    @never_raises(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    @never_raises(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    def _finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if self._step_costs is not None:
            self._step_costs.request_finished(request.request_id)
        return self._scheduler.request_finished(request)

    @never_raises(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_unsent_commands()

    @never_raises(lambda: False)
    def reset_cache(self) -> bool:
        """Discards the transfers, which carry KV from before the reset.

        The connector itself caches nothing.
        """
        return self._scheduler.reset()


def _no_prefixes(vllm_config: Any, role: Role) -> str:
    """Returns the reason why this engine borrows no prefixes, or ""."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off: start this engine with --enable-prefix-caching"
    # vLLM frees blocks that a step in flight may still write, unless the engine is a consumer. Pages of a
    # prefix may be written into such blocks.
    if role is Role.PREFILL and vllm_config.max_concurrent_batches > 1:
        return "several steps are in flight: start this prefill engine with kv_role kv_both"
    return ""


def _prefix_key(vllm_config: Any, kv_cache_config: Any) -> str:
    """Returns the key of the engine's block hashes, or "" if it keeps no prefixes."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return ""
    hashed = hashed_block_tokens(vllm_config, kv_cache_config)
    return prefix_key(cache.prefix_caching_hash_algo, hashed, keeps_cache=_keeps_cache(vllm_config))


def _keeps_cache(vllm_config: Any) -> bool:
    """Returns whether the engine keeps its KV over an update of its weights. Raises SettingsError."""
    if vllm_config.weight_transfer_config is None:
        return False
    return not weight_settings(os.environ, vllm_config.device_config.device_type).clear_cache


def transfer_role(kv_role: str | None) -> Role:
    try:
        return _ROLES[kv_role or ""]
    except KeyError:
        raise SettingsError(
            f"WriteImmConnector needs kv_role kv_producer (prefill), kv_consumer (decode) or kv_both, "
            f"not {kv_role!r}."
        ) from None


def data_parallel_rank(parallel_config: Any) -> int:
    """Returns this engine's rank as its API server counts it in X-data-parallel-rank.

    With an external load balancer, an API server has the engine cores of one host, or one core, and counts
    only these.
    """
    if parallel_config.local_engines_only:
        return int(parallel_config.data_parallel_rank_local)
    return int(parallel_config.data_parallel_index)
