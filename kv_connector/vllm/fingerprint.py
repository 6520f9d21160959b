"""What two engines must agree on before one's pages mean anything to the other."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

import torch

from kv_connector.protocol.layout import KvLayout
from kv_connector.protocol.messages import Fingerprint, fingerprint
from kv_connector.protocol.mismatch import Advice
from kv_connector.vllm.internals import VLLM_VERSION, attention_backends, attention_isa, kv_scales

# Where a model was loaded from, by what, and how its weights are stored: none of it changes what a page
# holds, but for the scales of a quantized KV cache, which are compared themselves.
_IRRELEVANT = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "quantization_config"}


# What to do about each pair that differs.
ADVICE = {
    "engine": Advice("run the same release of the engine on both sides"),
    "model": Advice("serve the same model on both sides"),
    "dtype": Advice("start both engines with the same --dtype and --kv-cache-dtype"),
    "kv_scales": Advice(
        "load the same checkpoint on both sides: it has the scales of the quantized KV cache",
        follows="tensor_parallel",  # there may be one a head
    ),
    "kv_layout": Advice("run both engines on the same kind of machine with the same KV cache layout"),
    "attention_backend": Advice("start both engines with the same --attention-backend"),
    "block_sizes": Advice("start both engines with the same --block-size"),
    "page_bytes": Advice(
        "start both engines with the same model, --dtype, --kv-cache-dtype and --block-size",
        follows="tensor_parallel",
    ),
    "layer_names": Advice("serve the same model on both sides, with the same speculative decoding"),
    "tensor_parallel": Advice("start both engines with the same --tensor-parallel-size"),
    "pipeline_parallel": Advice("start both engines with the same --pipeline-parallel-size"),
}


def rank_fingerprint(vllm_config: Any, kv_cache_config: Any, layout: KvLayout) -> Fingerprint:
    """Of this rank. Called where vLLM has chosen its attention backends."""
    names = [layer.name for layer in layout.layers]
    parallel = vllm_config.parallel_config
    return fingerprint(
        {
            "engine": f"vllm {VLLM_VERSION}",
            "model": model_identity(vllm_config.model_config),
            "dtype": f"{vllm_config.model_config.dtype} kv {vllm_config.cache_config.cache_dtype}",
            "kv_scales": tuple(map(_scales, kv_scales(vllm_config, names))),
            "kv_layout": _memory_order(vllm_config, kv_cache_config, names),
            "attention_backend": attention_backends(vllm_config, names),
            "block_sizes": tuple(str(group.block_size) for group in layout.groups),
            "page_bytes": tuple(str(layer.page_bytes) for layer in layout.layers),
            "layer_names": tuple(names),
            "tensor_parallel": str(parallel.tensor_parallel_size),
            "pipeline_parallel": str(parallel.pipeline_parallel_size),
        }
    )


def model_identity(model_config: Any) -> str:
    """Architecture and a hash of its configuration, the same wherever the model was loaded from."""
    config = {
        key: value for key, value in model_config.hf_text_config.to_dict().items() if key not in _IRRELEVANT
    }
    return (
        f"{'+'.join(model_config.architectures)} {_digest(json.dumps(config, sort_keys=True, default=str))}"
    )


def _scales(layer: tuple[float, ...]) -> str:
    if not layer:
        return "none"
    text = " ".join(map(str, layer))
    # One a head would fill a refusal, and the advice is the same.
    return text if len(layer) <= 2 else f"{len(layer)} scales {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _memory_order(vllm_config: Any, kv_cache_config: Any, names: list[str]) -> str:
    order = str(kv_cache_config.kv_cache_layout)
    isa = attention_isa(vllm_config, names)
    if not isa:
        return order
    # A page's bytes are opaque on a CPU: equal only under the same packing, by the same build of the kernels.
    return f"{order} {platform.machine()} {isa} {torch.backends.cpu.get_cpu_capability()}"
