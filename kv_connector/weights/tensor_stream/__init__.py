"""Whole tensors by name, for frameworks that load them by themselves."""
