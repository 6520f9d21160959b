"""Passes the descriptor of each rank's segment to every other rank.

A pair of ranks has one connection: the higher rank connects to the lower one. The sockets are abstract and
have random names. Any process of the machine can connect to them. So a rank accepts a connection only if the
kernel names the expected process and user as its peer. The first message must also have the rank's secret.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kv_connector.moe.sentinels import open_pidfd
from kv_connector.moe.wire import MAX_BYTES, NAME_BYTES, SECRET_BYTES, Hello, Introduction, decode, encode

logger = logging.getLogger("kv_connector")

# Connections that the kernel completes before accept(): seven ranks, and as many strangers.
_BACKLOG = 16
_PREFIX = b"\0kv-connector-moe-"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_INT = struct.calcsize("i")
# A segment, and the pidfds of two threads.
_MAX_DESCRIPTORS = 3
# Room for one more makes a message with too many detectable.
_CONTROL_BYTES = socket.CMSG_SPACE((_MAX_DESCRIPTORS + 1) * _INT)
LEAVE = b"leave"
# Followed by a byte with the number of the rank that its sender no longer waits for.
EVICT = b"give up "
# Followed by a byte with the number of the rank that its sender lost. Only to groups of several nodes.
LOSE = b"lost "


@dataclass
class Connection:
    """The connection to another rank, which stands as long as both have the group."""

    rank: int
    pid: int
    socket: socket.socket
    pidfds: list[int]
    """Each is readable once the process, or a sentinel of it, has ended. Empty: this kernel or sandbox has no
    pidfds."""
    process: int | None = None
    """The one of ``pidfds`` that is readable once the whole process has ended, with its use of the GPU."""

    def send(self, message: bytes) -> None:
        """Sends LEAVE, EVICT or LOSE. Does not block. A rank that has ended gets nothing."""
        with contextlib.suppress(OSError):
            self.socket.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        self.socket.close()
        while self.pidfds:
            os.close(self.pidfds.pop())


@dataclass
class Passed:
    """The result of the passing. Another rank is in the first two dictionaries, or in ``problems`` alone."""

    connections: dict[int, Connection] = field(default_factory=dict)
    descriptors: dict[int, int] = field(default_factory=dict)
    """Descriptors of other ranks' segments. The caller closes them."""
    problems: dict[int, str] = field(default_factory=dict)

    def close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])

    def close(self) -> None:
        self.close_descriptors()
        while self.connections:
            self.connections.popitem()[1].close()


class Meeting:
    """A listening socket, and the passing of descriptors over it. Used by one thread."""

    def __init__(self) -> None:
        self.name = secrets.token_bytes(NAME_BYTES)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_address(self.name))
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise

    def close(self) -> None:
        self._listener.close()

    def pass_around(
        self,
        rank: int,
        hellos: Sequence[Hello],
        descriptor: int,
        deadline: float,
        sentinels: Sequence[int] = (),
        others: Collection[int] | None = None,
    ) -> Passed:
        """Sends ``descriptor`` and ``sentinels`` (pidfds) to other ranks of the node, and receives theirs.

        ``others``: those ranks, which name this rank in return. None: every other rank of the node.

        Blocks until ``deadline`` at most (time.monotonic()). Raises nothing that a peer can cause: its
        failure is in ``problems``.
        """
        descriptors = [descriptor, *sentinels]
        node = hellos[rank].machine
        missing = {hello.rank for hello in hellos if hello.machine == node} - {rank}
        if others is not None:
            missing &= set(others)
        passing = _Passing(self._listener, self.secret, rank, hellos, descriptors, deadline, missing)
        try:
            return passing.run()
        finally:
            passing.close()


class _Passing:
    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        rank: int,
        hellos: Sequence[Hello],
        descriptors: Sequence[int],
        deadline: float,
        missing: set[int],
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._rank = rank
        self._hellos = hellos
        self._descriptors = descriptors
        self._begin = time.monotonic()
        self._deadline = deadline
        self._passed = Passed()
        self._missing = missing
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, int | None] = {}
        """Connections without a descriptor yet, with the rank that they lead to. None: not known yet."""

    def run(self) -> Passed:
        self._selector.register(self._listener, selectors.EVENT_READ)
        for other in sorted(self._missing):
            self._watch(other)
        for other in sorted(self._missing):
            if other < self._rank:
                self._connect(other)
        while self._missing:
            ready = self._selector.select(max(0.0, self._deadline - time.monotonic()))
            # A process that has ended may have sent everything before.
            for key, _ in sorted(ready, key=lambda item: isinstance(item[0].data, int)):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    if key.fileobj in self._open:
                        self._receive(key.fileobj)
                elif key.data in self._missing:
                    self._fail(key.data, "the process has ended")
            if not ready and time.monotonic() >= self._deadline:
                seconds = time.monotonic() - self._begin
                for other in sorted(self._missing):
                    self._fail(other, f"no descriptor of its segment came within {seconds:.0f} s")
        return self._passed

    def close(self) -> None:
        """Frees what did not become part of the result."""
        for connection in list(self._open):
            self._drop(connection)
        self._selector.close()
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def _watch(self, other: int) -> None:
        # Without a pidfd (a sandbox may forbid it) the end of the connection shows the end of a process.
        #
        # If the process had ended before this call, its number could belong to another process. The group
        # is not formed in that case: a rank sends OUTCOME only after it has this rank's introduction, which
        # follows this call.
        with contextlib.suppress(OSError):
            try:
                self._pidfds[other] = open_pidfd(self._hellos[other].pid)
            except ProcessLookupError:
                self._fail(other, "the process has ended")
                return
            self._selector.register(self._pidfds[other], selectors.EVENT_READ, other)

    def _fail(self, other: int, reason: str) -> None:
        self._missing.discard(other)
        self._passed.problems[other] = f"rank {other} (process {self._hellos[other].pid}): {reason}"
        for connection, rank in list(self._open.items()):
            if rank == other:
                self._drop(connection)
        if other in self._pidfds:
            self._selector.unregister(self._pidfds[other])
            os.close(self._pidfds.pop(other))

    def _drop(self, connection: socket.socket) -> None:
        del self._open[connection]
        self._selector.unregister(connection)
        connection.close()

    def _connect(self, other: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # connect() waits where the backlog is full, for as long as a send may take.
            remaining = max(0.001, self._deadline - time.monotonic())
            limit = struct.pack("ll", int(remaining), int(remaining % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(_address(self._hellos[other].name))
            if _peer(connection) != self._expected(other):
                raise OSError("another process listens at its socket")
            connection.setblocking(False)
            self._introduce(connection, other)
        except OSError as error:
            connection.close()
            self._fail(other, f"its socket takes no message: {error}")
            return
        self._open[connection] = other
        self._selector.register(connection, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        peer = _peer(connection)
        ranks = [other for other in self._missing if other > self._rank and peer == self._expected(other)]
        if not ranks:
            logger.warning("moe: refused a connection of process %d, user %d: not in the group", *peer)
            connection.close()
            return
        connection.setblocking(False)
        # Threads of one process may be several ranks: their message says which.
        self._open[connection] = ranks[0] if len(ranks) == 1 else None
        self._selector.register(connection, selectors.EVENT_READ)

    def _expected(self, other: int) -> tuple[int, int]:
        return self._hellos[other].pid, self._hellos[other].uid

    def _introduce(self, connection: socket.socket, other: int) -> None:
        message = encode(Introduction(self._rank, self._hellos[other].secret))
        passed = array.array("i", self._descriptors)
        connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)], socket.MSG_NOSIGNAL)

    def _receive(self, connection: socket.socket) -> None:
        expected = self._open[connection]
        descriptors: list[int] = []
        try:
            other = self._read(connection, descriptors)
            if other not in self._missing or expected not in (None, other):
                raise ValueError(f"it sent the introduction of rank {other}")
            if _peer(connection) != self._expected(other):
                raise ValueError("another process sent its introduction")
            if other > self._rank:
                self._introduce(connection, other)
        except (OSError, ValueError) as error:
            for received in descriptors:
                os.close(received)
            self._drop(connection)
            if expected is not None and expected in self._missing:
                self._fail(expected, str(error))
            return
        del self._open[connection]
        self._selector.unregister(connection)
        self._missing.discard(other)
        segment, *pidfds = descriptors
        if (process := self._pidfds.pop(other, None)) is not None:
            self._selector.unregister(process)
            pidfds.append(process)
        self._passed.descriptors[other] = segment
        pid = self._hellos[other].pid
        self._passed.connections[other] = Connection(other, pid, connection, pidfds, process)

    def _read(self, connection: socket.socket, descriptors: list[int]) -> int:
        """The rank that introduces itself. All its descriptors are put into ``descriptors``."""
        data, control, flags, _ = connection.recvmsg(
            MAX_BYTES, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
        for level, kind, content in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % _INT])
                descriptors.extend(received)
        if not data and not descriptors:
            raise ValueError("it closed the connection")
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ValueError(
                "its message was cut off. If this process has too many open files, raise `ulimit -n`."
            )
        introduction = decode(data, Introduction)
        if not hmac.compare_digest(introduction.secret, self._secret):
            raise ValueError("its introduction has a wrong secret")
        if not 1 <= len(descriptors) <= _MAX_DESCRIPTORS:
            raise ValueError(
                f"its introduction has {len(descriptors)} descriptors instead of 1 to {_MAX_DESCRIPTORS}"
            )
        return introduction.rank


def _address(name: bytes) -> bytes:
    return _PREFIX + name.hex().encode()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel noted them when the connection was made."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(content)
    return pid, uid & 0xFFFFFFFF


def ended(connections: Mapping[int, Connection]) -> list[Connection]:
    """The connections whose process has ended. Does not block."""
    with selectors.DefaultSelector() as selector:
        for connection in connections.values():
            for pidfd in connection.pidfds:
                selector.register(pidfd, selectors.EVENT_READ, connection)
        dead = {key.data.rank for key, _ in selector.select(0)} if selector.get_map() else set()
    return [connection for rank, connection in connections.items() if rank in dead]
