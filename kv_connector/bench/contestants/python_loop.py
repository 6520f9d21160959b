"""The latency loop of the contestants that are driven from Python."""

import time
from collections.abc import Callable


def ping_pong(
    write: Callable[[], None], await_answer: Callable[[], None], iterations: int, pause_us: int
) -> list[float]:
    """Returns half of each round trip in microseconds."""
    halves = []
    for _ in range(iterations):
        if pause_us:
            time.sleep(pause_us / 1e6)
        start = time.perf_counter()
        write()
        await_answer()
        halves.append((time.perf_counter() - start) / 2 * 1e6)
    return halves
