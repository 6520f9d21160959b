"""Weights for an engine that joins, from an engine that serves."""
