"""Bugs that the simulator has to find in the weights' protocol."""

from __future__ import annotations

from ..planted import Bug

_LANDING = "weights/landing.py"

BUGS = (
    Bug(
        "an arena is given away before it is fenced",
        _LANDING,
        "        if self.phase is not Phase.BEGINNING or self._opening or not begun or self._fencing:\n",
        "        if self.phase is not Phase.BEGINNING or self._opening or not begun:\n",
    ),
    Bug(
        "the other links of a void version stay",
        _LANDING,
        '            actions += self._fence(sender, "the version was dropped")\n',
        "",
    ),
    Bug(
        "a sender that is lost while its version lands voids nothing",
        _LANDING,
        """\
        if self.phase in (Phase.BEGINNING, Phase.LANDING):
            actions += self._drop(said)
""",
        """\
        if self.phase is Phase.BEGINNING:
            actions += self._drop(said)
""",
    ),
    Bug(
        "a lost sender is not fenced",
        _LANDING,
        "        actions += self._fence(sender, reason)\n",
        "",
    ),
    Bug(
        "what is being applied is written over",
        _LANDING,
        "        if self.phase in (Phase.APPLYING, Phase.LANDING):\n",
        "        if self.phase is Phase.LANDING:\n",
    ),
    Bug(
        "a sender that the worker has forgotten is not told",
        _LANDING,
        "                gone = message.sender and sender is None\n",
        "                gone = False\n",
    ),
    Bug(
        "pages of one sender are a version",
        _LANDING,
        "sum(s.begin.pages for s in begun if s.begin is not None))]\n",
        "begun[0].begin.pages)]\n",
    ),
    Bug(
        "what was begun is not forgotten",
        _LANDING,
        """\
            sender.begin = None
            told""",
        """\
            told""",
    ),
    Bug(
        "a void version's counter stays open",
        _LANDING,
        """\
            actions.append(CloseCounter())
""",
        """\
            pass
""",
    ),
)
