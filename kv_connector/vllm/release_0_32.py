"""vLLM 0.32.x, where it differs from the other supported releases: internals.py takes these from here."""

from __future__ import annotations

FOLLOWS_SLEEP = False
"""Sleep unmaps the KV cache and says nothing to the connector, which would write there."""

PAUSE = "pause_scheduler_async"
"""What a user's pause asks of the engine's core."""
