"""Free TCP ports on this machine."""

import itertools
import random
import socket

# Below the kernel's default range for outgoing connections (32768 to 60999). So no client's connection can
# take a picked port before its server binds it.
LOWEST, HIGHEST = 20000, 32000

# An engine's ranks listen on the ports behind its own. This is enough for two ranks and a controller of
# weights.
STEP = 4

# One sequence for the whole process, because ports belong to the machine. A port that was given out, and that
# its server has not bound yet, is not given out again. The order is random, so that two such processes seldom
# pick the same port.
_ports = itertools.cycle(random.sample(range(LOWEST, HIGHEST, STEP), (HIGHEST - LOWEST) // STEP))


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns `count` different ports that are free together with the three behind each.

    They are not reserved: use them soon. A port is given out again only after all others.
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
