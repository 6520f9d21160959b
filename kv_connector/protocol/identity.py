"""What two engines as a whole must have alike before one's pages mean anything to the other.

What can be said of each layer, its layout says: how it is quantized, by which scales, who has which heads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kv_connector.protocol.messages import Fingerprint, fingerprint

# Where a model was loaded from, by what, and how its weights are stored: none of it changes what a page
# holds, but for the scales of a quantized KV cache, which layouts have.
_IRRELEVANT = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "quantization_config"}

# What to do about each pair that differs.
ADVICE = {
    "engine": "run the same release of the engine on both sides",
    "model": "serve the same model on both sides",
    "dtype": "start both engines with the same --dtype",
}


def engine_fingerprint(engine: str, model: str, dtype: str) -> Fingerprint:
    """``engine``: the framework and its release. ``dtype``: of the model, with the module it is from or
    without."""
    return fingerprint({"engine": engine, "model": model, "dtype": dtype.removeprefix("torch.")})


def model_identity(architectures: Sequence[str], config: Mapping[str, Any]) -> str:
    """Architecture and a hash of its configuration, the same wherever the model was loaded from."""
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    text = json.dumps(relevant, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    return f"{'+'.join(architectures)} {digest.hexdigest()}"
