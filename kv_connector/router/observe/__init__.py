"""Observability: metrics, waiting times and traces of requests."""
