"""Why two engines cannot share pages, in words that say what to change."""

from __future__ import annotations

from kv_connector.protocol.messages import Compatibility

# What to do about each field of Compatibility that differs.
_ADVICE = {
    "protocol": "install the same release of kv-connector on both sides",
    "engine": "run the same release of the engine on both sides",
    "model": "serve the same model on both sides",
    "dtype": "start both engines with the same --dtype and --kv-cache-dtype",
    "kv_scales": "load the same checkpoint on both sides: it has the scales of the quantized KV cache",
    "kv_layout": "run both engines on the same kind of machine with the same KV cache layout",
    "attention_backend": "start both engines with the same --attention-backend",
    "block_sizes": "start both engines with the same --block-size",
    "page_bytes": "start both engines with the same model, --dtype, --kv-cache-dtype and --block-size",
    "layer_names": "serve the same model on both sides, with the same speculative decoding",
    "tensor_parallel": "start both engines with the same --tensor-parallel-size",
    "pipeline_parallel": "start both engines with the same --pipeline-parallel-size",
}

# Fields that differ where another one does: that one is to be named, and this one's advice would mislead.
_FOLLOWS = {"page_bytes": "tensor_parallel"}

_SHOWN = 4  # entries of a list that are worth showing: beyond it, only the first difference is


def incompatibility(prefill: Compatibility, decode: Compatibility) -> str | None:
    """One sentence for each field that differs, or None if none does."""
    different = {
        field: (getattr(prefill, field), getattr(decode, field))
        for field in Compatibility.__struct_fields__
        if getattr(prefill, field) != getattr(decode, field)
    }
    problems = [
        f"{_difference(field, *values)}: {_ADVICE[field]}"
        for field, values in different.items()
        if _FOLLOWS.get(field) not in different
    ]
    return "; ".join(problems) or None


def _difference(field: str, prefill: object, decode: object) -> str:
    if isinstance(prefill, tuple) and isinstance(decode, tuple) and max(len(prefill), len(decode)) > _SHOWN:
        if len(prefill) != len(decode):
            return f"{field}: prefill has {len(prefill)} entries, decode has {len(decode)} entries"
        index = next(i for i, (a, b) in enumerate(zip(prefill, decode, strict=True)) if a != b)
        return _difference(f"{field}[{index}]", prefill[index], decode[index])
    return f"{field}: prefill has {prefill}, decode has {decode}"
