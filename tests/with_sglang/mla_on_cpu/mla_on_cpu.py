"""A plugin of SGLang's, for tests: on a CPU without AMX it takes a path for latent attention (MLA) that its
plain backend cannot compute. The absorbed one it can."""

from __future__ import annotations


def register() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )

    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)
