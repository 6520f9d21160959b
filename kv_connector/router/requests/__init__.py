"""Requests: what clients send, and what engines answer."""
