"""What two SGLang servers must have alike; what can be said of a layer, its layout says (``pool``)."""

from __future__ import annotations

from kv_connector.protocol.messages import Fingerprint, fingerprint

ADVICE = {
    "engine": "run the same release of SGLang on both sides",
    "model": "serve the same model on both sides",
    "dtype": "start both servers with the same --dtype",
}
"""What to do about each pair that differs."""


def rank_fingerprint(version: str, model: str, dtype: str) -> Fingerprint:
    return fingerprint({"engine": f"sglang {version}", "model": model, "dtype": dtype})
