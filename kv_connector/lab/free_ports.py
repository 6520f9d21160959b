"""Free TCP ports on this machine."""

import itertools
import random
import socket

# Below the kernel's default range for outgoing connections (32768 to 60999): a port we picked cannot be taken
# by some client's connection before its server binds it.
LOWEST, HIGHEST = 20000, 32000

# An engine's ranks listen behind its port: as many as two of these, and a controller of weights, need.
STEP = 4

# Once for the whole process, as ports are the machine's: one that was given out and that its server has not
# bound yet is not given out again. In an order of its own: of two processes that do this side by side, each
# seldom comes upon the other's.
_ports = itertools.cycle(random.sample(range(LOWEST, HIGHEST, STEP), (HIGHEST - LOWEST) // STEP))


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nobody listens on, nor on the three behind each. Nothing holds them: use
    them soon.

    None that this process was given before, until all were.
    """
    ports: list[int] = []
    for port in itertools.islice(_ports, (HIGHEST - LOWEST) // STEP):
        if all(_is_free(host, one) for one in range(port, port + STEP)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"fewer than {count} free ports between {LOWEST} and {HIGHEST} on {host}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
