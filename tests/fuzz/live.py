"""Raw connections to a live agent: noise, greetings that break off, frames that are nearly right.

Before, between and after the attacks the agent transfers pages for an honest peer.
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from agent_setup import AgentSide, stage, until

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.wire.messages import Role, encode
from tests.fuzz.mutator import Mutator
from tests.fuzz.targets import protocol_messages

# Python's and libzmq's allocators settle within this.
GROWTH_MIB = 32.0
# Connections that are held open at a time and send nothing more.
HELD = 100

_DEALER = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


def attack(seed: str, connections: int) -> Iterator[str]:
    """Attacks an agent without and one with a cluster key. Raises AssertionError if one was harmed."""
    for key in (None, ClusterKey.generate()):
        name = "without a key" if key is None else "with a key"
        others = set(listening_ports())  # ports of the process, for example of an earlier test's torch
        with stage("tcp") as agents:
            prefill = agents.side(Role.PREFILL, key=key)
            decode = agents.side(Role.DECODE, key=key)
            transfer(prefill, decode, "before")
            ports = [port for port in listening_ports() if port not in others]
            attack_ports(f"{seed} warm", ports, connections // 10)
            transfer(prefill, decode, "between")
            until(partial(strangers_closed, ports), "strangers' connections are closed")
            descriptors, memory = open_descriptors(), resident_mib()
            attack_ports(seed, ports, connections)
            transfer(prefill, decode, "after")
            until(partial(has_descriptors, descriptors), "no descriptor is left open")
            refused = sum(side.agent.stats().malformed_messages for side in (prefill, decode))
            # Without a key the messages are read and refused. With a key no connection gets that far.
            assert (refused > 0) is (key is None), f"{refused} messages were refused"
            growth = resident_mib() - memory
            assert growth < GROWTH_MIB, f"memory grew by {growth:.1f} MiB"
            yield f"{connections} raw connections to {len(ports)} ports of an agent {name}: +{growth:.1f} MiB"


def has_descriptors(limit: int) -> bool:
    """Whether this process has no more than so many open."""
    return open_descriptors() <= limit


def transfer(prefill: AgentSide, decode: AgentSide, name: str) -> None:
    """Transfers a prompt of three pages."""
    decode.reserve(prefill.address, transfer=name)
    prefill.expect(name)
    prefill.compute((1, 2, 3), transfer=name)
    prefill.agent.request_finished(name, True)
    prefill.wait(sent=[f"p-{name}"])
    decode.wait(received=[f"d-{name}"])
    assert f"d-{name}" not in decode.failed
    assert decode.holds(name, (1, 2, 3), (11, 12, 13))


def attack_ports(seed: str, ports: list[int], connections: int) -> None:
    pick = random.Random(seed)
    frames = Mutator(seed, [encode(message) for message in protocol_messages()])
    with contextlib.ExitStack() as held:
        for number in range(connections):
            connection = socket.create_connection(("127.0.0.1", pick.choice(ports)), timeout=5)
            connection.settimeout(0.0005)
            with contextlib.suppress(OSError):  # the agent has closed the connection
                for part in _conversation(pick, frames):
                    connection.sendall(part)
                connection.recv(4096)
            if number % 10 == 0 and number < 10 * HELD:
                held.callback(connection.close)
            else:
                connection.close()


def _conversation(pick: random.Random, frames: Mutator) -> Iterator[bytes]:
    """Yields the bytes that one stranger sends."""
    match pick.randrange(5):
        case 0:
            yield pick.randbytes(pick.randrange(300))
        case 1:
            yield _greeting(b"NULL")[: pick.randrange(65)]
        case 2:
            yield _greeting(b"CURVE")
            yield _frame(b"\x05HELLO\x01\x00" + pick.randbytes(192), command=True)
        case _:
            yield _greeting(b"NULL")
            yield _frame(_DEALER, command=True)
            for _ in range(pick.randrange(1, 4)):
                yield _frame(frames.next())


def _greeting(mechanism: bytes) -> bytes:
    """Returns a greeting of ZMTP 3.0."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def _frame(body: bytes, *, command: bool = False) -> bytes:
    flags = 4 if command else 0
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8) + body
    return bytes([flags, len(body)]) + body


def _sockets() -> dict[str, Path]:
    """Returns {inode: descriptor} of this process's sockets."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            name = str(entry.readlink())
            if name.startswith("socket:["):
                found[name.removeprefix("socket:[").removesuffix("]")] = entry
    return found


def _tcp(state: str) -> list[int]:
    """Returns the local ports of this process's TCP sockets in a state, as /proc/net/tcp spells it."""
    inodes = _sockets()
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == state and fields[9] in inodes:
            ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def listening_ports() -> list[int]:
    return _tcp("0A")


def strangers_closed(ports: list[int]) -> bool:
    """Returns whether the listeners at these ports have closed each connection that the other end has closed.

    The process may hold other connections, of clients that earlier tests left behind.
    """
    return not set(ports) & set(_tcp("08"))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
