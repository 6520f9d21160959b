"""The fingerprint of an engine: facts that two engines must have in common before their pages mean the same.

Facts about single layers are in the layout: quantization, scales and the heads of each rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kv_connector.protocol.wire.messages import Fingerprint, fingerprint

# Facts about the source of a model, its loader and the storage of its weights. None of them changes the
# content of a page, except the scales of a quantized KV cache, which layouts contain.
_IRRELEVANT = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "quantization_config"}

# The advice to operators for each pair that differs.
ADVICE = {
    "engine": "run the same release of the engine on both sides",
    "model": "serve the same model on both sides",
    "dtype": "start both engines with the same --dtype",
}


def engine_fingerprint(engine: str, model: str, dtype: str) -> Fingerprint:
    """The fingerprint of an engine. ``engine``: the framework and its release. ``dtype``: the model's, with
    or without its module."""
    return fingerprint({"engine": engine, "model": model, "dtype": dtype.removeprefix("torch.")})


def model_identity(architectures: Sequence[str], config: Mapping[str, Any]) -> str:
    """Architecture and a hash of the model's configuration. The place that the model was loaded from makes no
    difference."""
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    text = json.dumps(relevant, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    return f"{'+'.join(architectures)} {digest.hexdigest()}"
