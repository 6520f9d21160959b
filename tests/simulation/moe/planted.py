"""Mistakes in the protocol that the exploration must find, each with the smallest group that shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .program import Rules, Sizes

FULL: Sizes = ((1, 1, 1), (1, 1, 1))
# The second rank's row of the second round has the place of the first rank's row of the first round.
SHIFTED: Sizes = ((1, 1, 1), (0, 1, 1))
SPARSE: Sizes = ((1, 0, 1), (0, 1, 1))
# As SHIFTED, with fewer states.
LATE: Sizes = ((1, 1, 0), (0, 1, 1))

STALE, OVERWRITTEN, DEADLOCK = "the row is not of this round", "before the last reader", "deadlock"


@dataclass(frozen=True)
class Mistake:
    name: str
    rules: Rules
    found: str
    """Part of the report."""
    sizes: Sizes = FULL
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the exploration."""


def _unsigned(flag: int, epoch: int) -> bool:
    return flag >= epoch


def _two_signed_words(flag: int, epoch: int) -> bool:
    def word(value: int) -> int:
        return value - (1 << 32) if value >> 31 else value

    return word(flag) >= word(epoch)


def _changed(flag: int, epoch: int) -> bool:
    return flag != 0


MISTAKES = (
    Mistake("no fence before the dispatch flag", Rules(fence_before_arrived=False), STALE),
    Mistake("no fence before combine ready", Rules(fence_before_ready=False), STALE),
    Mistake("flag before the rows", Rules(flag_after_rows=False), STALE),
    Mistake("no acquire after the dispatch flags", Rules(acquire_after_arrived=False), STALE),
    Mistake("no acquire after combine ready", Rules(acquire_after_ready=False), STALE),
    Mistake("dispatch does not wait", Rules(wait_for_arrived=False), STALE),
    Mistake("combine does not wait", Rules(wait_for_ready=False), STALE),
    # A rank without tokens reads nothing in combine, but it writes in the next dispatch.
    Mistake("no wait in combine without tokens", Rules(wait_without_tokens=False), OVERWRITTEN, SPARSE),
    Mistake("no flag without tokens", Rules(flag_without_tokens=False), DEADLOCK, SPARSE),
    Mistake("no epoch without tokens", Rules(raise_without_tokens=False), STALE, SPARSE),
    Mistake("dispatch beside the combine before it", Rules(ordered_kernels=False), OVERWRITTEN),
    Mistake("flag compared with the value at the start", Rules(reached=_changed), STALE),
    Mistake("flag compared unsigned", Rules(reached=_unsigned), STALE, options={"epoch": (1 << 32) - 2}),
    Mistake(
        "flag and epoch compared as signed words",
        Rules(reached=_two_signed_words),
        STALE,
        options={"epoch": (1 << 31) - 2},
    ),
    Mistake("mask word ends no wait", Rules(lost_ends_waits=False), DEADLOCK, options={"victim": 0}),
    # The last stores of the dead rank may land after its death is known. A rank that receives them then waits
    # for a survivor alone, which had its fault before they landed and raises nothing more.
    Mistake(
        "mask word ends only waits beside one for the dead rank",
        Rules(lost_ends_all_waits=False),
        DEADLOCK,
        options={"victim": 0},
    ),
    Mistake("mask word counts as a flag", Rules(ended_is_a_fault=False), STALE, options={"victim": 0}),
    Mistake("deadline counts as a flag", Rules(ended_is_a_fault=False), STALE, options={"deadlines": True}),
    # The accused rank goes on, and waits for survivors that raise nothing more.
    Mistake(
        "rank that was given up does not learn it",
        Rules(given_up_is_reported=False),
        DEADLOCK,
        options={"stuck": 0},
    ),
    Mistake("report ends no wait", Rules(lost_ends_waits=False), DEADLOCK, options={"stuck": 0}),
    # The rows of its `out` are not of this round, and another rank would add them.
    Mistake("combine ready after a fault", Rules(fault_is_silent=False), STALE, options={"victim": 0}),
    Mistake(
        "combine ready after a deadline", Rules(fault_is_silent=False), STALE, options={"deadlines": True}
    ),
    Mistake(
        "combine ready of a rank that gave up", Rules(fault_is_silent=False), STALE, options={"stuck": 0}
    ),
    Mistake(
        "rows of a masked rank are read",
        Rules(masked_is_left_out=False),
        STALE,
        SHIFTED,
        {"victim": 0, "survive": True},
    ),
    Mistake(
        "mask ends no wait in combine",
        Rules(mask_stays=False),
        DEADLOCK,
        SHIFTED,
        {"victim": 0, "survive": True},
    ),
    Mistake(
        "a rank that is gone is never masked",
        Rules(lost_ends_waits=False),
        DEADLOCK,
        SHIFTED,
        {"victim": 0, "survive": True},
    ),
    Mistake(
        "dispatch before the masked rank is fenced",
        Rules(fence_after_mask=False),
        OVERWRITTEN,
        SHIFTED,
        {"victim": 0, "survive": True},
    ),
    Mistake(
        "dispatch before a late rank is fenced",
        Rules(fence_after_mask=False),
        OVERWRITTEN,
        LATE,
        {"stuck": 0, "survive": True},
    ),
    Mistake(
        "a late rank gives out sums without a look at the flag",
        Rules(combine_checks=False),
        OVERWRITTEN,
        LATE,
        {"stuck": 0, "survive": True},
    ),
    Mistake(
        "a late rank that was masked does not end",
        Rules(evicted_is_seen=False),
        DEADLOCK,
        LATE,
        {"stuck": 0, "survive": True},
    ),
)
