"""What two engines must agree on before one's pages mean anything to the other.

What can be said of each layer, its layout says (``kv_cache``): how it is quantized, by which scales, and who
has which heads.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kv_connector.protocol.messages import Fingerprint, fingerprint
from kv_connector.vllm.internals import VLLM_VERSION

# Where a model was loaded from, by what, and how its weights are stored: none of it changes what a page
# holds, but for the scales of a quantized KV cache, which are compared themselves.
_IRRELEVANT = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "quantization_config"}


def rank_fingerprint(vllm_config: Any) -> Fingerprint:
    return fingerprint(
        {
            "engine": f"vllm {VLLM_VERSION}",
            "model": model_identity(vllm_config.model_config),
            "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
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


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
