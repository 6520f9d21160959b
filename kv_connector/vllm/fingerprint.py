"""What two engines must agree on before one's pages mean anything to the other."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

import torch

from kv_connector.protocol.layout import KvLayout
from kv_connector.protocol.messages import PROTOCOL_VERSION, Compatibility
from kv_connector.vllm.internals import VLLM_VERSION, attention_backends, attention_isa, kv_scales

# Where a model was loaded from, by what, and how its weights are stored: none of it changes what a page
# holds, but for the scales of a quantized KV cache, which are compared themselves.
_IRRELEVANT = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "quantization_config"}


def compatibility(vllm_config: Any, kv_cache_config: Any, layout: KvLayout) -> Compatibility:
    """Of this rank. Called where vLLM has chosen its attention backends."""
    names = [layer.name for layer in layout.layers]
    parallel = vllm_config.parallel_config
    return Compatibility(
        protocol=PROTOCOL_VERSION,
        engine=f"vllm {VLLM_VERSION}",
        model=model_identity(vllm_config.model_config),
        dtype=f"{vllm_config.model_config.dtype} kv {vllm_config.cache_config.cache_dtype}",
        kv_scales=kv_scales(vllm_config, names),
        kv_layout=_memory_order(vllm_config, kv_cache_config, names),
        attention_backend=attention_backends(vllm_config, names),
        block_sizes=tuple(group.block_size for group in layout.groups),
        page_bytes=tuple(layer.page_bytes for layer in layout.layers),
        layer_names=tuple(names),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
    )


def model_identity(model_config: Any) -> str:
    """Architecture and a hash of its configuration, the same wherever the model was loaded from."""
    config = {
        key: value for key, value in model_config.hf_text_config.to_dict().items() if key not in _IRRELEVANT
    }
    digest = hashlib.blake2b(
        json.dumps(config, sort_keys=True, default=str).encode(), digest_size=8
    ).hexdigest()
    return f"{'+'.join(model_config.architectures)} {digest}"


def _memory_order(vllm_config: Any, kv_cache_config: Any, names: list[str]) -> str:
    order = str(kv_cache_config.kv_cache_layout)
    isa = attention_isa(vllm_config, names)
    if not isa:
        return order
    # A page's bytes are opaque on a CPU: equal only under the same packing, by the same build of the kernels.
    return f"{order} {platform.machine()} {isa} {torch.backends.cpu.get_cpu_capability()}"
