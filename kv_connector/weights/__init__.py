"""Weights from a trainer straight into serving engines: counted one-sided writes beside what they serve."""
