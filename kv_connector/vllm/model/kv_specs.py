"""Which KV cache specs of vLLM the connector transfers, and why it refuses the others."""

from __future__ import annotations

from typing import Any

from kv_connector.vllm.internals import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

# Exact types: a subclass stores something else in its pages, or keeps other blocks than its parent.
SUPPORTED_SPECS = (
    FullAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    CircularBufferSpec,
    MambaSpec,
)

_REASONS = {
    "CrossAttentionSpec": "its pages hold what an encoder made, and vLLM refuses connectors for such models",
    "HiSparseHotSpec": "its blocks are copies of pages in host memory. Leave HiSparse out",
    "HiSparseResidentSpec": "its blocks are copies of pages in host memory. Leave HiSparse out",
    "HiddenStateCacheSpec": "its pages hold hidden states. Leave the method extract_hidden_states out",
    "RSWASpec": "vLLM frees blocks between the prompt and the window of the answer",
    "SinkFullAttentionSpec": "its first blocks hold sinks that all requests share",
}


def spec_problem(spec: Any) -> str | None:
    """Returns why the pages of one layer's spec cannot be transferred, or None."""
    name = type(spec).__name__
    if type(spec) not in SUPPORTED_SPECS:
        return f"{name}: {_REASONS.get(name, 'this release of kv-connector does not know it')}"
    if type(spec) is MambaSpec:  # a state has no number of tokens
        return None
    shared = spec.tokens_per_state
    if not isinstance(shared, int) or shared < 1 or spec.block_size % shared:
        return f"{name}: a block of {spec.block_size} tokens does not hold whole states of {shared} tokens"
    if spec.prefix_replay_tokens:
        return (
            f"{name} with bounded replay: vLLM computes its last {spec.prefix_replay_tokens} tokens anew "
            "after a prefix hit. Start the engine with --no-swa-bounded-replay"
        )
    return None


def unproven(spec: Any) -> bool:
    """Returns whether no run has shown that answers of a model with this spec are those of one engine.

    Windows of latents ran in DeepSeek-V4, whose answers to long prompts differ, with one engine alone too.
    Caches with several tokens a state ran with latents alone (MLAAttentionSpec).
    """
    compressed = getattr(spec, "tokens_per_state", 1) > 1
    return type(spec) is SlidingWindowMLASpec or (compressed and type(spec) is not MLAAttentionSpec)
