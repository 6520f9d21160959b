"""The end of a group: why a step is void, and the error that names the rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIMEOUTS = {
    "TIMEOUT_DISPATCH": "did not send its rows within {timeout:g} s",
    "TIMEOUT_COMBINE": "did not send its results within {timeout:g} s",
}
LOST = "LOST"
EVICTED = "EVICTED"
# The native codes, by number. Another rank reports EVICTED, by a message or by a flag of a surviving group.
NATIVE_CODES = {1: "TIMEOUT_DISPATCH", 2: "TIMEOUT_COMBINE", 3: LOST, 4: EVICTED}
CODES = tuple(NATIVE_CODES.values())


class GroupError(RuntimeError):
    """A group cannot be formed, used or closed. The message names the rank and the reason."""


class ExchangeError(GroupError):
    """The exchange of the forming failed or did not end. One of its calls may still wait within the
    framework's group, and could disturb that group's next collective. So the engine has to end."""


@dataclass(frozen=True)
class LaunchFault:
    """Why a launch gave up waiting. The results of that step, and of all later ones, are void."""

    code: str
    """TIMEOUT_DISPATCH, TIMEOUT_COMBINE, LOST or EVICTED."""
    rank: int
    """The rank that ended, or that did not send in time."""


def first_problem(problems: Sequence[str]) -> str:
    """Returns the first problem of a rank, with the rank's number if not all ranks have it, or ""."""
    for rank, problem in enumerate(problems):
        if problem:
            return problem if all(one == problem for one in problems) else f"rank {rank}: {problem}"
    return ""
