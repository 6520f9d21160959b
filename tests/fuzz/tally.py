"""Code that hostile peers of every lane share: their constants, and the report of what they did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Links that are made at a time: a call to the victim's process takes as long as making some links.
BATCH = 32
# Connections that are held open at a time and send nothing more: several times the victim's limit (64).
HELD = 300
# Seconds that a live victim has for an answer.
PATIENCE = 20.0


@dataclass
class Tally:
    """The attacks on the victim, as counts."""

    frames: int = 0
    links: int = 0
    foreign: int = 0  # pages that were to raise the honest peer's counter


Attack = Callable[[int], Tally]
"""Attacks for a number of frames."""
