"""Identities of checkpoints under one model name, for tests of the router."""

from kv_connector.protocol.session.checkpoint import Checkpoint

BASE, TUNED = Checkpoint("", "3f2a"), Checkpoint("", "91bc")
QUANTISED = Checkpoint("F8_E4M3", "77d0")
"""A form of BASE, which is compared with neither of them."""
