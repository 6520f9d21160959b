"""SGLang's pools and states that the adapter refuses, and what to do instead. Imports nothing of SGLang."""

from __future__ import annotations

REFUSED_POOLS = {
    "DeepSeekV4TokenToKVPool": "its pages hold 1, 4 or 128 tokens a state, with rings beside them",
}
"""Classes of pools, with the reason."""

REFUSED_STATES = {"dsa_tail": "serve the model without kpool compression"}
"""Kinds of state whose indices are more than rows, with the remedy."""
