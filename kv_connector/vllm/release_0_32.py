"""Differences of vLLM 0.32.x from the other supported releases. internals.py imports them."""

from __future__ import annotations

FOLLOWS_SLEEP = False
"""Sleep unmaps the KV cache without notice to the connector, which would write there."""

PAUSE = "pause_scheduler_async"
"""The method of the engine's core that a user's pause calls."""

TIERS_MISS_BLOCKS = True
"""OffloadingConnector does not note blocks that another connector of a MultiConnector loads."""
