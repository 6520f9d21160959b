"""The module that imports SGLang's internals, except for those of experts/internals.py and plugin.py.

SGLang changes the interface of transfer backends between releases. So a release for which these files were
not checked is refused instead of being tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sglang
import torch
import torch.distributed
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.runtime_context import (
    get_device,
    get_disagg,
    get_exec,
    get_lora,
    get_memory,
    get_model,
    get_observability,
    get_parallel,
    get_serving,
    get_spec,
)
from sglang.srt.utils import MultiprocessingSerializer, use_intel_amx_backend
from sglang.srt.utils.network import get_local_ip_auto

from kv_connector.agent.checkpoint_reader import CONSOLIDATED, MODEL, identify
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.session.fingerprint import model_identity
from kv_connector.protocol.wire.weight_version import MAX_NAME, identity, shown
from kv_connector.sglang.plugin import BACKEND, LOADER
from kv_connector.sglang.refusals import REFUSED_POOLS

__all__ = [
    "HEALTH_CHECK_RID_PREFIX",
    "LOADER",
    "BeginWeightUpdateReqInput",
    "CommonKVBootstrapServer",
    "CommonKVManager",
    "CommonKVReceiver",
    "CommonKVSender",
    "ContinueGenerationReqInput",
    "DisaggregationMode",
    "EndWeightUpdateReqInput",
    "KVArgs",
    "KVPoll",
    "KVTransferError",
    "ModelFacts",
    "MultiprocessingSerializer",
    "PauseGenerationReqInput",
    "RankFacts",
    "UnsupportedConfiguration",
    "UpdateWeightVersionReqInput",
    "UpdateWeightsFromTensorReqInput",
    "gather",
    "loaded_checkpoint",
    "model_facts",
    "named",
    "own_host",
    "rank_facts",
    "tensor_rank",
    "tensor_ranks",
    "weight_version",
]

SUPPORTED = ("0.5.23",)


class UnsupportedSglang(ImportError):
    """The adapter does not support this release of SGLang."""


class UnsupportedConfiguration(ValueError):
    """The server is started with an option that the adapter does not support. The message says what to
    change."""


def check_release(version: str) -> None:
    """Raises UnsupportedSglang for a release that is not in SUPPORTED."""
    if version not in SUPPORTED:
        raise UnsupportedSglang(
            f"write_imm supports SGLang {' and '.join(SUPPORTED)}, this is SGLang {version}. Install "
            f"sglang=={SUPPORTED[-1]}, or a kv-connector made for SGLang {version}."
        )


check_release(sglang.__version__)


@dataclass(frozen=True)
class ModelFacts:
    identity: str
    dtype: str
    kv_heads: int
    layers: int


def model_facts(server_args: Any) -> ModelFacts:
    config = ModelConfig.from_server_args(server_args)
    return ModelFacts(
        model_identity(config.hf_config.architectures or ["?"], config.hf_text_config.to_dict()),
        str(config.dtype),
        int(config.get_total_num_kv_heads()),
        int(config.num_hidden_layers),
    )


_SAFETENSORS = {
    "auto": MODEL,
    "safetensors": MODEL,
    "fastsafetensors": MODEL,
    "instanttensor": MODEL,
    "mistral": CONSOLIDATED,
}
"""Files from which SGLang's default loader reads the weights, by load format."""


def loaded_checkpoint() -> Checkpoint | None:
    """The checkpoint that this worker has loaded. None: unknown, as for models of ModelScope, which has its
    own cache."""
    if envs.SGLANG_USE_MODELSCOPE.get():
        return None
    # SGLang has chosen the load format, which need not be that of the options.
    model = get_model()
    files = _SAFETENSORS.get(str(getattr(model.load_format, "value", model.load_format)))
    return identify(
        model.model_path,
        [] if files is None else [files],
        revision=model.revision,
        cache=model.download_dir,
    )


@dataclass(frozen=True)
class RankFacts:
    """One worker, from SGLang's configuration in this process."""

    rank: int
    """Rank in attention's tensor parallelism."""
    ranks: int
    stage: int
    """Stage of the pipeline."""
    stages: int
    data_parallel_rank: int
    alone: bool
    """Whether no other worker takes its turns together with this one."""
    host: str
    """Address of this worker."""
    url: str
    """Address of its server, for logs and metrics."""
    device: Literal["cpu", "cuda"]
    gpu: int
    threads: int
    nics: str | None
    metrics: bool

    @property
    def number(self) -> int:
        """Number of the worker in its engine."""
        return self.stage * self.ranks + self.rank

    @property
    def workers(self) -> int:
        return self.ranks * self.stages

    def first_layer(self, layers: int) -> int:
        """The first layer of this stage, as SGLang divides the layers."""
        if self.stages == 1:
            return 0
        first, _ = get_pp_indices(layers, self.stage, self.stages)
        return int(first)


def rank_facts(args: Any) -> RankFacts:
    parallel, serving, device = get_parallel(), get_serving(), get_device()
    return RankFacts(
        rank=parallel.attn_tp_rank,
        ranks=parallel.attn_tp_size,
        stage=args.pp_rank,
        stages=parallel.pp_size,
        data_parallel_rank=parallel.attn_dp_rank if parallel.attn_dp_size > 1 else (args.system_dp_rank or 0),
        alone=parallel.tp_size == parallel.pp_size == 1,
        host=own_host(),
        url=f"{serving.host}:{serving.port}",
        device="cpu" if device.device == "cpu" else "cuda",
        gpu=int(args.gpu_id),
        threads=torch.get_num_threads(),
        nics=args.ib_device,
        metrics=bool(get_observability().enable_metrics),
    )


def weight_version(pushed: str = "") -> str:
    """The name of the weights that this worker computes with: that of ``--weight-version``, or of the last
    update. ``pushed``: identity of the last version that a trainer pushed, which it is if it has its name.
    """
    version = str(get_serving().weight_version)
    if pushed and shown(pushed) == version:
        return pushed
    return named(version)


def named(version: str) -> str:
    """A version's name for control messages. A name that is too long is cut, and gets a tag of the whole
    name."""
    return version if len(version) <= MAX_NAME else identity(version[:MAX_NAME], version)


def check_configuration(args: Any) -> None:
    """Raises UnsupportedConfiguration for options that the adapter does not support."""
    parallel, disagg = get_parallel(), get_disagg()
    refused = {
        "context parallelism of attention": parallel.attn_cp_size > 1,
        "decode context parallelism": parallel.attn_dcp_size > 1,
        "--enable-kv-cache-sharding": parallel.enable_kv_cache_sharding,
        "--enable-dsa-cache-layer-split": parallel.enable_dsa_cache_layer_split,
        "--disaggregation-decode-allocation-policy prefill_complete": (
            disagg.disaggregation_decode_allocation_policy == "prefill_complete"
        ),
        "--enable-pd-role-switch": disagg.enable_pd_role_switch,
        # Without it, SGLang frees an aborted request's pages while the prefill engine may still write there.
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0": (
            not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
        ),
    }
    if wrong := [name for name, given in refused.items() if given]:
        raise UnsupportedConfiguration(
            f"write_imm does not serve {', '.join(wrong)}. Leave it out, or take another transfer backend."
        )
    if args.mla_compression_ratios is not None:
        ratios = ", ".join(str(ratio) for ratio in sorted({*args.mla_compression_ratios}))
        pool = "DeepSeekV4TokenToKVPool"
        raise UnsupportedConfiguration(
            f"write_imm does not serve {pool} (compression ratios {ratios}): {REFUSED_POOLS[pool]}. Take "
            "another transfer backend for this model, or vLLM."
        )


def check_weight_options() -> None:
    """Raises UnsupportedConfiguration if only one of the two options for weight updates is given."""
    loads = LOADER in (get_model().custom_weight_loader or ())
    controls = BACKEND in (get_serving().warmups or "").split(",")
    if loads and controls:
        return
    given, lacking = f"--custom-weight-loader {LOADER}", f"--warmups {BACKEND}"
    if controls:
        given, lacking = lacking, given
    raise UnsupportedConfiguration(f"An engine that takes weights needs {lacking} beside {given}. Add it.")


def check_takes_weights(model: Any, quantization: str | None) -> None:
    """Raises UnsupportedConfiguration if this engine cannot take weights. The message says what to change."""
    check_weight_options()
    parallel, execution, memory, serving = get_parallel(), get_exec(), get_memory(), get_serving()
    derives = [type(module).__name__ for module in model.modules() if hasattr(module, "post_load_weights")]
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    refused = {
        f"quantization ({quantization})": quantization is not None,
        "--enable-lora": bool(get_lora().enable_lora),
        "--enable-memory-saver": execution.features.enable_memory_saver,
        "--enable-eplb": execution.moe.enable_eplb,
        "--cpu-offload-gb": execution.offload.cpu_offload_gb > 0,
        "--offload-group-size": execution.offload.offload_group_size > 0,
        "--weight-cache-mode": get_model().weight_cache_mode != "off",
        "--speculative-algorithm": get_spec().speculative_algorithm is not None,
        "--dp-size": parallel.dp_size > 1,
        "--pp-size": parallel.pp_size > 1,
        "--nnodes": parallel.nnodes > 1,
        "context parallelism of attention": parallel.attn_cp_size > 1,
        # KV of earlier weights would stay there: flush_cache does not reach it.
        "--hicache-storage-backend": memory.hicache_storage_backend is not None,
        "--enable-unified-cache-external-linker": memory.enable_unified_cache_external_linker,
        "--enable-lmcache": memory.enable_lmcache,
        "--enable-flexkv": memory.enable_flexkv,
        # SGLang has permuted the experts' weights in place.
        "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=1": any(
            getattr(method, "w13_swiglu_interleaved", False) for method in methods
        ),
        "weights that are packed for AMX": any(map(use_intel_amx_backend, model.modules())),
        # SGLang runs no warmup of plugins then, and so no controller.
        "--tokenizer-worker-num": serving.tokenizer_worker_num > 1,
        "gRPC in place of HTTP": serving.grpc_mode or serving.smg_grpc_mode,
        # They compute values from weights, which an update would leave stale.
        f"post_load_weights() of {', '.join(dict.fromkeys(derives))}": bool(derives),
    }
    if wrong := [name for name, given in refused.items() if given]:
        raise UnsupportedConfiguration(
            f"this engine cannot take weights: kv-connector does not update engines with {', '.join(wrong)}. "
            "Start it without, or without the options for weight updates."
        )


def own_host() -> str:
    """The address of this machine, as SGLang finds it."""
    return str(get_local_ip_auto())


def tensor_rank() -> int:
    return int(get_parallel().tp_rank)


def tensor_ranks() -> int:
    return int(get_parallel().tp_size)


def is_disaggregated() -> bool:
    """Whether this server prefills for others, or decodes after others."""
    return str(get_disagg().disaggregation_mode) in ("prefill", "decode")


def recomputes_retracted() -> bool:
    """Whether a prefill server computes this decode server's retracted requests again. SGLang requests that
    over HTTP without a key, and the servers of a deployment have the same key."""
    serving = get_serving()
    return not (serving.api_key or serving.ssl_certfile)


def device_type() -> str:
    return str(get_device().device)


def has_dummy_weights() -> bool:
    return str(get_model().load_format) == "dummy"


def gather(value: Any) -> list[Any]:
    """The ``value`` of each worker of this engine, by number. All workers call it at the same time."""
    parallel = get_parallel()
    values = [value]
    if parallel.attn_tp_size > 1:
        values = _all_gather(value, parallel.attn_tp_group)
    if parallel.pp_size > 1:
        values = [one for stage in _all_gather(values, parallel.pp_group) for one in stage]
    return values


def _all_gather(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values
