"""Fleet: which of a router's engines get a trainer's next version. Rank 0 decides it for all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from kv_connector.protocol.actions import Address
from kv_connector.weights.sources import Engines
from kv_connector.weights.trainer.joining import (
    RECORD_S,
    EngineAnswer,
    Joining,
    MisfitError,
    TargetEngine,
    absent,
    engines_of,
)
from kv_connector.weights.trainer.router_list import NoEngines, RouterList
from kv_connector.weights.wire.links import LinkError

logger = logging.getLogger("kv_connector")

UNCHANGED = ""
"""The answer of changes() if the next version goes to the engines of the last one."""


class Fleet:
    """The engines that one router lists. One thread calls it."""

    def __init__(
        self,
        router: Address,
        listed: RouterList,
        joining: Joining,
        engines: Sequence[TargetEngine],
        name: str,
    ) -> None:
        """``engines``: the engines of the current plan."""
        self._router = router
        self._list = listed
        self._joining = joining
        self._engines = engines
        self._name = name
        self._misfits: dict[str, str] = {}
        """Engines that cannot take these weights. They are queried again once the router has not listed them
        for a while."""
        self._joined: list[Address] = []
        """New engines in the last answer of changes()."""
        self.left_out: dict[str, str] = {}
        """Listed engines that do not get the version, with the reasons."""

    def all(self) -> Engines:
        """Returns the listed engines that answer.

        Raises LinkError if the router does not answer, or none of its engines does.
        """
        self._misfits, self.left_out = {}, {}
        answers = self._query(self._list.ask(), RECORD_S)
        if not answers:
            raise LinkError("; ".join(self.left_out.values()))
        return engines_of(answers)

    def changes(self, limit: float) -> Engines | str:
        """Returns the listed engines that answer, or UNCHANGED.

        Engines that have joined answer within ``limit`` seconds, or get the version after the next one. If
        the router does not answer, its last list remains.
        """
        self.left_out = {}
        try:
            listed = self._list.ask()
        except NoEngines as error:
            listed = []
            self.left_out[str(self._router)] = str(error)
        except LinkError as error:
            logger.warning("%s: the list of engines stays as it was: %s", self._name, error)
            self.left_out = dict(self._misfits)
            return UNCHANGED
        here = {e.address for e in self._engines if e.link is not None and not e.link.over}
        names = {str(address) for address in listed}
        self._misfits = {name: why for name, why in self._misfits.items() if name in names}
        self.left_out |= self._misfits
        joined = self._query(
            (one for one in listed if one not in here and str(one) not in self._misfits), limit
        )
        gone = [e.address for e in self._engines if e.address not in here or e.address not in listed]
        self._joined = [one.engine.address for one in joined]
        if not joined and not gone:
            return UNCHANGED
        for engine in joined:
            logger.info("%s: sends the next versions to %s, too", self._name, engine.engine.address)
        for address in gone:
            logger.info("%s: sends no more versions to %s, which has left", self._name, address)
        return engines_of([*self._query((one for one in listed if one in here), limit), *joined])

    def refuse(self, misfits: Mapping[str, str]) -> None:
        """Leaves out engines that have answered, for these reasons."""
        self._misfits |= misfits
        self.left_out |= misfits

    def refuse_joined(self, reason: str) -> None:
        """Leaves out the engines that have joined in the last answer of changes()."""
        self.refuse({str(address): reason for address in self._joined})

    def close(self) -> None:
        self._list.close()

    def _query(self, addresses: Iterable[Address], limit: float) -> list[EngineAnswer]:
        """Queries these engines, and notes in ``left_out`` which of them do not answer."""
        engines: list[TargetEngine] = []
        for address in addresses:
            if why := absent(address):
                self.left_out[str(address)] = f"{address}: {why}"
            else:
                engines.append(self._joining.target(address))
        answers, problems = self._joining.query(engines, limit)
        for address, problem in problems.items():
            self.left_out[str(address)] = str(problem)
            if isinstance(problem, MisfitError):
                self._misfits[str(address)] = str(problem)
        return answers
