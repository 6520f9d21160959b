"""Bugs in the weights' protocol that the simulator must find."""

from __future__ import annotations

from ..planted import Bug

_LANDING = "weights/worker/landing.py"

BUGS = (
    Bug(
        "an arena is given away before it is fenced",
        _LANDING,
        "        if self.phase is not LandingPhase.BEGINNING or self._opening or not begun"
        " or self._fencing:\n",
        "        if self.phase is not LandingPhase.BEGINNING or self._opening or not begun:\n",
        first=30,
    ),
    Bug(
        "the other links of a void version stay",
        _LANDING,
        '            actions += self._fence(sender, "the version was discarded")\n',
        "",
    ),
    Bug(
        "a sender that is lost while its version lands voids nothing",
        _LANDING,
        """\
        if sender.run == self._run and (
            unfinished or self.phase in (LandingPhase.BEGINNING, LandingPhase.LANDING)
        ):
""",
        """\
        if sender.run == self._run and (unfinished or self.phase is LandingPhase.BEGINNING):
""",
    ),
    Bug(
        "a lost sender is not fenced",
        _LANDING,
        "        actions += self._fence(sender, reason)\n",
        "",
    ),
    Bug(
        "a sender that the worker has forgotten is not told",
        _LANDING,
        "                gone = message.sender and sender is None\n",
        "                gone = False\n",
        first=180,
    ),
    Bug(
        "pages of one sender are a version",
        _LANDING,
        "        pages = sum(sender.begin.pages[round] for sender in begun if sender.begin is not None)\n",
        "        pages = begun[0].begin.pages[round]\n",
    ),
    Bug(
        "a void version's counter stays open",
        _LANDING,
        "[LandingCloseCounter(round) for round in sorted(self._opening | self._counting)]",
        "[]",
    ),
    Bug(
        "a round is opened in the room of one that is read",
        _LANDING,
        "        following = round + self.slots\n",
        "        following = round + 1\n",
    ),
    Bug(
        "a sender that is lost between its rounds voids nothing",
        _LANDING,
        """\
        if sender.run == self._run and (
            unfinished or self.phase in (LandingPhase.BEGINNING, LandingPhase.LANDING)
        ):
""",
        """\
        if sender.run == self._run and self.phase in (LandingPhase.BEGINNING, LandingPhase.LANDING):
""",
    ),
    Bug(
        "who takes a version is not told that it is void",
        _LANDING,
        "            actions.append(GiveUp(reason))  # the taker reads what has arrived, until applied()\n",
        "            pass\n",
        first=100,
    ),
    Bug(
        "what is lent is written",
        _LANDING,
        "        if self._lent or self._is_held():\n",
        "        if self._is_held():\n",
        first=30,
    ),
    Bug(
        "a seeding engine that leaves voids the trainer's version",
        _LANDING,
        """\
        if sender.run == self._run and (
            unfinished or self.phase in (LandingPhase.BEGINNING, LandingPhase.LANDING)
        ):
""",
        """\
        if unfinished or self.phase in (LandingPhase.BEGINNING, LandingPhase.LANDING):
""",
        first=80,
    ),
    Bug(
        "a trainer that waits for a seed waits for ever",
        _LANDING,
        "        del self._lent[seed.run]\n        return self._follow()\n",
        "        del self._lent[seed.run]\n        return []\n",
        first=100,
    ),
    Bug(
        "a version that is held is left for the next",
        _LANDING,
        "        if self._lent or self._is_held():\n",
        "        if self._lent:\n",
        first=40,
    ),
)
