"""Differences of vLLM 0.33.x from the other supported releases. internals.py imports them."""

from __future__ import annotations

FOLLOWS_SLEEP = True
"""Sleep calls unregister_kv_caches before it unmaps the KV cache, and wake-up calls restore_kv_caches."""

PAUSE = "pause_generation_async"
"""The method of the engine's core that a user's pause calls."""

TIERS_MISS_BLOCKS = False
"""OffloadingConnector notes the blocks of each load."""
