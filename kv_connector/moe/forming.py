"""The forming of a group: collective, and with the same end on all ranks.

1. Each rank makes its segment and its socket, and sends HELLO with what all must have alike.
2. Each rank passes the descriptor of its segment to every other rank of its node, and maps theirs.
3. If there are several nodes, each rank connects to the ranks of other nodes, by three rounds of LINKS.
4. Each rank sends OUTCOME. A problem of one rank is the error of all.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kv_connector import __version__, _native
from kv_connector.moe import columns
from kv_connector.moe.descriptors import LEAVE, Connection, Meeting, Passed, ended
from kv_connector.moe.fault import ExchangeError, GroupError
from kv_connector.moe.lanes import Lanes, far_ranks
from kv_connector.moe.sentinels import Sentinels
from kv_connector.moe.settings import MAX_TIMEOUT, GroupSettings
from kv_connector.moe.wire import (
    NAME_BYTES,
    SECRET_BYTES,
    Facts,
    FormingOutcome,
    Hello,
    Links,
    bounded,
    encode,
    read_hellos,
    read_links,
    read_outcomes,
)

logger = logging.getLogger("kv_connector")

Exchange = Callable[[bytes], Sequence[bytes]]
"""All-gather of one message a rank, in rank order."""

# A process may have ended after its part of an exchange, which then still completes. The other ranks need
# milliseconds for theirs.
_GRACE_SECONDS = 2.0
LINK_ROUNDS = 3
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Formed:
    """The parts of a formed group. Their owner closes them."""

    native: _native.MoeGroup
    connections: dict[int, Connection]
    """To the other ranks of this node."""
    sentinels: Sentinels
    lanes: Lanes | None
    """To the ranks of other nodes. None: there is one node."""


def form(settings: GroupSettings, exchange: Exchange) -> Formed:
    """The native group with all ranks attached or joined, and what belongs to it.

    ``exchange`` is called twice, and five times with several nodes. Each call, and the passing of memory, may
    take up to the timeout of the settings. Raises GroupError, on all ranks alike as far as they live.
    """
    own = FormingPart(settings, settings.timeout)
    try:
        own.prepare()
        deadline = time.monotonic() + settings.timeout
        messages = bounded_exchange(exchange, encode(own.hello()), settings.timeout, "settings", {})
        hellos = read_hellos(messages, settings.ranks)
        own.attach(hellos, deadline)
        if len({hello.machine for hello in hellos}) > 1:
            own.connect(hellos, exchange)
        own.agree(exchange)
        return own.take()
    except GroupError as error:
        reason = f"moe: rank {settings.rank} cannot form a group: {error}"
        raise type(error)(reason) from error.__cause__
    finally:
        own.close()


class FormingPart:
    """This rank's part of a forming. close() frees all that take() did not hand over."""

    def __init__(self, settings: GroupSettings, timeout: float) -> None:
        self._settings = settings
        self._timeout = timeout
        self._native: _native.MoeGroup | None = None
        self._meeting: Meeting | None = None
        self._descriptor: int | None = None
        self._sentinels: Sentinels | None = None
        self._pidfds: Sequence[int] = ()
        """Descriptors of this rank's sentinels, for the other ranks."""
        self._lanes: Lanes | None = None
        self.passed = Passed()
        self.problem = ""
        """Why this rank has no group, or ""."""

    def prepare(self) -> None:
        """Makes the segment and the socket. Raises nothing: the other ranks wait for this rank's HELLO."""
        try:
            self._make()
        except Exception as error:
            self.problem = f"it cannot make its segment: {error}"

    def _make(self) -> None:
        settings = self._settings
        rows = settings.ranks * settings.max_tokens
        self._native = _native.MoeGroup(
            settings.rank,
            settings.ranks,
            -1 if settings.device is None else settings.device,
            columns.dispatch_bytes(rows, settings.row_bytes),
            rows * settings.hidden * 2,
            settings.max_tokens,
            settings.experts,
            settings.slots,
            settings.timeout,
            settings.survive,
        )
        self._descriptor = self._native.descriptor()
        self._meeting = Meeting()
        self._sentinels = Sentinels()
        self._pidfds = self._sentinels.pidfds

    def hello(self) -> Hello:
        meeting = self._meeting
        return Hello(
            release=__version__,
            rank=self._settings.rank,
            facts=Facts.of(self._settings),
            machine=_machine(self._settings.node),
            pid=os.getpid(),
            uid=os.geteuid(),
            name=meeting.name if meeting else bytes(NAME_BYTES),
            secret=meeting.secret if meeting else bytes(SECRET_BYTES),
            problem=bounded(self.problem),
        )

    def attach(self, hellos: Sequence[Hello], deadline: float, others: Collection[int] | None = None) -> None:
        """Maps the segments of ``others``, or of all. A failure is in ``problem``: it is exchanged first."""
        assert self._meeting is not None
        assert self._descriptor is not None
        try:
            self.passed = self._meeting.pass_around(
                self._settings.rank, hellos, self._descriptor, deadline, self._pidfds, others
            )
            problems = [self.problem] if self.problem else []
            problems += self.passed.problems.values()
            processes = [one.process for one in self.passed.connections.values()]
            if self._settings.survive and None in processes:
                problems.append("it cannot watch processes by pidfds, which survive needs")
            for rank, descriptor in sorted(self.passed.descriptors.items()):
                try:
                    self._map(rank, descriptor)
                except Exception as error:
                    problems.append(f"it cannot map the segment of rank {rank}: {error}")
            self.problem = "; ".join(problems)
        except Exception as error:
            self.problem = f"it cannot pass descriptors: {error}"
        finally:
            self.passed.close_descriptors()

    def _map(self, rank: int, descriptor: int) -> None:
        assert self._native is not None
        self._native.attach(rank, descriptor)

    def connect(self, hellos: Sequence[Hello], exchange: Exchange) -> None:
        """Connects to the ranks of other nodes. A failure is in ``problem``: it is exchanged first.

        A rank with a problem connects to none, and only takes part in the exchange. Collective. Raises
        ExchangeError.
        """
        assert self._native is not None
        settings = self._settings
        rounds = 0

        def pass_links(to: Mapping[int, bytes]) -> Mapping[int, bytes]:
            nonlocal rounds
            rounds += 1
            messages = self._exchange(exchange, encode(Links(dict(to))), "links")
            return read_links(messages, settings.ranks, settings.rank)

        try:
            if not self.problem:
                self._lanes = Lanes(settings, far_ranks(settings.rank, hellos))
                self._lanes.connect(pass_links)
                self._native.join(self._lanes.native)
        except GroupError:
            raise
        except Exception as error:
            self.problem = f"it cannot connect to other nodes: {error}"
        while rounds < LINK_ROUNDS:  # the other ranks wait for this rank's messages
            pass_links({})

    def agree(self, exchange: Exchange) -> None:
        """Exchanges the OUTCOME of every rank. Raises GroupError where a rank has a problem."""
        message = encode(FormingOutcome(bounded(self.problem)))
        outcomes = self._exchange(exchange, message, "outcomes")
        try:
            read_outcomes(outcomes, self._settings.ranks)
        except GroupError:
            self._leave()
            raise

    def _exchange(self, exchange: Exchange, message: bytes, subject: str) -> Sequence[bytes]:
        """Exchanges a message after attach(). An error begins with the problem of this rank."""
        # A rank that passed no descriptor has ended or stands still. It may never send a message.
        patience = min(_GRACE_SECONDS if self.passed.problems else MAX_TIMEOUT, self._timeout)
        try:
            return bounded_exchange(exchange, message, patience, subject, self._peers())
        except GroupError as error:
            if not self.problem:
                raise
            raise type(error)(f"{self.problem}; {error}") from error.__cause__

    def _peers(self) -> Mapping[int, Connection]:
        """Ranks whose end ends an exchange."""
        return self.passed.connections

    def _leave(self) -> None:
        """Reports to ranks that still wait for the outcomes that this rank has them, before it closes."""
        for connection in self.passed.connections.values():
            connection.send(LEAVE)

    def take(self) -> Formed:
        assert self._native is not None
        assert self._sentinels is not None
        native, self._native = self._native, None
        connections, self.passed = self.passed.connections, Passed()
        sentinels, self._sentinels = self._sentinels, None
        sentinels.release()
        lanes, self._lanes = self._lanes, None
        return Formed(native, connections, sentinels, lanes)

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self.passed.close()
        if self._sentinels is not None:
            self._sentinels.close()
        if self._native is not None:
            try:
                self._native.close(CLOSE_SECONDS)
            except Exception as error:
                logger.warning("moe: rank %d cannot free its segment: %s", self._settings.rank, error)
        if self._lanes is not None:
            self._lanes.close()


def bounded_exchange(
    exchange: Exchange, message: bytes, timeout: float, subject: str, peers: Mapping[int, Connection]
) -> Sequence[bytes]:
    """Calls the exchange on a thread, because it may wait for a dead rank without a time limit.

    Raises ExchangeError if it fails, if it does not end in time, and if a process of ``peers`` ends.
    """
    results: list[Sequence[bytes]] = []
    errors: list[Exception] = []
    done, mark_done = os.pipe2(os.O_CLOEXEC)

    def call() -> None:
        try:
            results.append(exchange(message))
        except Exception as error:
            errors.append(error)
        finally:
            os.close(mark_done)  # the other end becomes readable

    thread = threading.Thread(target=call, name="kvc-moe-forming", daemon=True)
    thread.start()
    begin = time.monotonic()
    waiting = [done, *(pidfd for one in peers.values() for pidfd in one.pidfds)]
    try:
        ready = _readable(waiting, timeout)
        if ready and done not in ready:
            # A rank that has left has all messages, so this rank gets them too, however busy the machine is.
            left = all(map(_has_left, ended(peers)))
            ready = _readable([done], timeout if left else min(timeout, _GRACE_SECONDS))
    finally:
        os.close(done)
    if done in ready:
        thread.join()
    if results:
        return results[0]
    # Its connection fails the exchange before the kernel reports the end of the process.
    dead = [one for one in ended(peers) if not _has_left(one)]
    if dead:
        names = ", ".join(f"rank {one.rank} (process {one.pid})" for one in dead)
        raise ExchangeError(f"{names} has ended during the exchange of {subject}")
    if errors:
        raise ExchangeError(f"the exchange of {subject} failed: {errors[0]}") from errors[0]
    seconds = time.monotonic() - begin
    raise ExchangeError(f"the exchange of {subject} did not end within {seconds:.0f} s. A rank is missing.")


def _has_left(connection: Connection) -> bool:
    """Whether its rank has all messages and does not form the group. The message stays to be read."""
    try:
        message = connection.socket.recv(len(LEAVE), socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return message == LEAVE


def _readable(descriptors: Sequence[int], timeout: float) -> set[int]:
    """The descriptors that are readable or at their end, as soon as one is. None after ``timeout`` seconds.

    poll(), because select() refuses descriptors from 1,024 on. A worker of many sockets and files has them.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(timeout * 1000))}


def _machine(node: str) -> str:
    """Equal for processes of a node that can connect by abstract sockets and that see each other's pids."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    parts += [str(Path("/proc/self/ns", name).stat().st_ino) for name in ("net", "pid")]
    return "/".join([*parts, node])
