"""The admission of a new process in place of a rank that ended. Collective, with the same end on all ranks.

1. Each rank sends ADMISSION. The members of the group send what the new process takes over.
2. The new process and each member pass descriptors of their segments to each other, and map them.
3. Each rank sends OUTCOME. The members go on with the new process only if no rank has a problem.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from kv_connector import _native
from kv_connector.moe.descriptors import Connection, Meeting, Passed
from kv_connector.moe.fault import GroupError
from kv_connector.moe.forming import Exchange, Formed, FormingPart, bounded_exchange
from kv_connector.moe.sentinels import Sentinels
from kv_connector.moe.settings import GroupSettings
from kv_connector.moe.wire import Admission, Membership, encode, read_admissions


@dataclass(frozen=True)
class AdmittingRank:
    """A rank of the group that admits another one. Everything stays the group's."""

    native: _native.MoeGroup
    sentinels: Sentinels
    connections: Mapping[int, Connection]
    """To the other members."""
    membership: Membership
    problem: str
    """Why this rank admits no other one now, or ""."""
    flush: Callable[[], bool]
    """Handles what other members sent earlier. Returns whether it did."""


def admit(
    settings: GroupSettings, rank: int, member: AdmittingRank, exchange: Exchange, timeout: float
) -> tuple[Connection, bool]:
    """Admits ``rank``. Returns the connection to it, and whether captured graphs stay valid.

    Raises GroupError. The group then goes on without the rank, as before.
    """
    own = _MemberPart(settings, timeout, member)
    try:
        if not own.problem:
            own.prepare()
        message = Admission(**msgspec.structs.asdict(own.hello()), admits=rank, member=member.membership)
        # Members wait for the end of the old process before they send.
        messages = bounded_exchange(exchange, encode(message), 2 * timeout, "settings", member.connections)
        hellos, _ = read_admissions(messages, settings.ranks)
        own.attach(hellos, time.monotonic() + timeout, {rank})
        if not member.flush():
            own.problem = own.problem or "it does not handle the messages of other ranks"
        own.agree(exchange)
        return own.admitted(rank)
    except GroupError as error:
        reason = f"moe: rank {settings.rank} cannot admit rank {rank}: {error}"
        raise type(error)(reason) from error.__cause__
    finally:
        own.close()


def join(settings: GroupSettings, exchange: Exchange, timeout: float) -> tuple[Formed, bytes]:
    """Joins a group in place of a rank that ended. Returns its parts, and the rank of each expert.

    Raises GroupError.
    """
    own = _NewPart(settings, timeout)
    try:
        own.prepare()
        message = Admission(**msgspec.structs.asdict(own.hello()), admits=settings.rank)
        messages = bounded_exchange(exchange, encode(message), 2 * timeout, "settings", {})
        hellos, membership = read_admissions(messages, settings.ranks)
        own.take_over(membership)
        own.attach(hellos, time.monotonic() + timeout)
        own.agree(exchange)
        return own.take(), membership.owners
    except GroupError as error:
        reason = f"moe: rank {settings.rank} cannot join its group: {error}"
        raise type(error)(reason) from error.__cause__
    finally:
        own.close()


class _NewPart(FormingPart):
    """The part of the new process."""

    def take_over(self, membership: Membership) -> None:
        """Takes over the state of the group. A failure is in ``problem``: it is exchanged first."""
        assert self._native is not None
        try:
            self._native.begin(membership.epochs)
            self._native.place(list(membership.owners))
        except Exception as error:
            self.problem = f"it cannot take over the state of the group: {error}"


class _MemberPart(FormingPart):
    """The part of a member. close() leaves the group as it was, unless admitted() came before."""

    def __init__(self, settings: GroupSettings, timeout: float, member: AdmittingRank) -> None:
        super().__init__(settings, timeout)
        self._member = member
        self.problem = member.problem

    def _make(self) -> None:
        self._descriptor = self._member.native.descriptor()
        self._meeting = Meeting()
        self._pidfds = self._member.sentinels.open()

    def _map(self, rank: int, descriptor: int) -> None:
        self._member.native.prepare_admission(rank, descriptor)

    def _peers(self) -> Mapping[int, Connection]:
        return {**self._member.connections, **self.passed.connections}

    def admitted(self, rank: int) -> tuple[Connection, bool]:
        """Goes on with the rank."""
        kept = self._member.native.admit()
        connections, self.passed = self.passed.connections, Passed()
        return connections[rank], kept

    def close(self) -> None:
        super().close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._member.native.cancel_admission()
