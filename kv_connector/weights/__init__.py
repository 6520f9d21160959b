"""Weights from a trainer straight into serving engines, by counted one-sided writes."""
