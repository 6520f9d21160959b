"""What hostile peers of every lane have in common: their numbers, and how they say what they have done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Links that are made at a time: a call to the victim's process takes as long as making some links.
BATCH = 32
# Connections that are held open at a time, saying nothing more: several times what the victim lets in (64).
HELD = 300
# For an answer of a victim that is alive.
PATIENCE = 20.0


@dataclass
class Tally:
    """What was done to the victim."""

    frames: int = 0
    links: int = 0
    foreign: int = 0  # pages for which it was asked to raise the honest peer's counter


Attack = Callable[[int], Tally]
"""Goes on for a number of frames."""
