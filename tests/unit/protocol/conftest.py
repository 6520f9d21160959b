"""Fixtures of several tests of the protocol."""

from prefill_setup import machine

__all__ = ["machine"]
