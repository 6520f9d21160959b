"""vLLM 0.33.x, where it differs from the other supported releases: internals.py takes these from here."""

from __future__ import annotations

FOLLOWS_SLEEP = True
"""Sleep calls unregister_kv_caches before it unmaps the KV cache, and wake-up restore_kv_caches."""

PAUSE = "pause_generation_async"
"""What a user's pause asks of the engine's core."""
