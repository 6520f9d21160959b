"""Fixtures of several tests of the agent."""

from agent_pairs import every_lane, pair, sim

__all__ = ["every_lane", "pair", "sim"]
