"""Fixtures of several tests of the protocol."""

from prefill_machine import machine

__all__ = ["machine"]
