"""A plugin of SGLang for tests. On a CPU without AMX, SGLang selects a path for latent attention (MLA) that
its plain backend cannot compute. The plugin selects the absorbed path, which it can."""

from __future__ import annotations


def register() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )

    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)
