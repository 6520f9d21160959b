"""The transfer engine's hot loops by themselves, over sim in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from kv_connector import _bench
from kv_connector.bench.measurement import Measurement
from kv_connector.bench.records import Micro, percentile
from kv_connector.bench.tables import print_table, verdict

# A request of a 32-layer model at 1,024 tokens: 64 blocks a layer. The pages are small, so that the engine is
# measured and not memcpy. All of them fit into the window.
PAGES, PAGE_BYTES = 2048, 64
COUNTERS = 61  # layers of a large model, counted in turn
REPEATS = 9  # repetitions of the figures that are one number a run


@dataclass(kw_only=True)
class HotLoops(Measurement[str, Micro]):
    """Measures the hot loops and compares them with their aims."""

    iterations: int

    def contestants(self, console: Console) -> Sequence[str]:
        return ["sim"]

    def label(self, contestant: str) -> str:
        return contestant

    def settings(self) -> dict[str, str]:
        return {
            "lane": "sim without delay, two engines in this process, workers that never sleep",
            "submit": f"{self.iterations} calls, each by itself, less what the clock takes",
            "post": f"{PAGES} pages of {PAGE_BYTES} bytes a request, none adjacent to another",
            "count": f"{COUNTERS} counters in turn",
            "pinned": "no",
        }

    def measure(self, number: int, contestant: str, console: Console) -> Iterator[Micro]:
        return _measure(self.iterations)

    def show(self, console: Console, contestants: Sequence[str], records: Sequence[Micro]) -> None:
        print_table(
            console,
            "Hot loops",
            ["", "p50", "p99", "", "aim", ""],
            (
                [
                    record.name,
                    f"{record.p50:,.1f}",
                    f"{record.p99:,.1f}",
                    record.unit,
                    ""
                    if record.aim is None
                    else f"{'at least' if record.at_least else 'at most'} {record.aim:g}",
                    "" if record.reached is None else verdict(record.reached),
                ]
                for record in records
            ),
        )

    def good(self, records: Sequence[Micro]) -> bool:
        return all(record.reached is not False for record in records)


def _measure(iterations: int) -> Iterator[Micro]:
    # Measured in parts, each with its own engines: a transfer leaves no state behind, but an allocator does.
    part = max(1, iterations // REPEATS)
    clock = _bench.clock_cost()
    write = [spent - clock for _ in range(REPEATS) for spent in _bench.submit_write(part)]
    yield _figure("submit -> enqueued: a page on an open transfer", "ns", write, 200)
    write_one = [spent - clock for _ in range(REPEATS) for spent in _bench.submit_write_one(part)]
    yield _figure("submit -> enqueued: a transfer of one page", "ns", write_one, None)
    yield _figure("the clock, taken off the two", "ns", [clock], None)
    posted = _bench.post_pages(max(REPEATS, iterations // PAGES), PAGES, PAGE_BYTES)
    yield _figure("post, a page", "ns", posted, 100)
    rates = [_bench.count_immediates(max(1000, iterations * 10), COUNTERS) / 1e6 for _ in range(REPEATS)]
    yield Micro(
        name="count",
        unit="million immediates a second and core",
        p50=percentile(rates, 50),
        p99=percentile(rates, 1),  # the slow end, as in the other figures
        aim=10,
        at_least=True,
    )


def _figure(name: str, unit: str, values: list[float], aim: float | None) -> Micro:
    return Micro(name=name, unit=unit, p50=percentile(values, 50), p99=percentile(values, 99), aim=aim)
