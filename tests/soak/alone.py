"""How much one engine of vLLM grows without this connector, under the load of the soak.

    PYTHONPATH=tests/support python -m tests.soak.alone --minutes 15 --rate 8

Prints the table of the soak. The growth of the API server is the source of report.API_SERVER_GROWTH.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deployment import SMALL
from nursery import nursery
from suite_numbers import positive

from kv_connector.lab.model import make_llama
from kv_connector.lab.process import leave_on_signals
from tests.faults.fault_site import Site
from tests.soak.__main__ import FEWEST_SAMPLES, LAYERS, NO_CACHE_OF_PRODUCTS, SAMPLE_SECONDS
from tests.soak.load import Load
from tests.soak.processes import Sample, listener, of_group
from tests.soak.report import judged, table

NAME = "alone"


async def run(directory: Path, minutes: float, rate: float) -> list[Sample]:
    """Returns the samples of the engine's processes."""
    model = make_llama(directory / "model", layers=LAYERS, **SMALL)
    found: list[Sample] = []
    with nursery(directory, {"OMP_NUM_THREADS": "1"}) as interpreter, Site(directory, model) as site:
        site.cluster.interpreter = interpreter
        site.cluster.environment.update(NO_CACHE_OF_PRODUCTS)
        engine = site.cluster.start_engine(NAME)
        await asyncio.to_thread(site.cluster.wait_ready)
        server = listener(engine.port)
        assert server is not None
        async with Load(engine.url, rate) as load:
            while load.seconds < minutes * 60:
                due = time.monotonic() + min(SAMPLE_SECONDS, minutes * 60 / FEWEST_SAMPLES)
                at, ended = round(load.seconds, 1), load.outcome.ended
                found += [Sample(at, ended, *one) for one in of_group(NAME, server)]
                await asyncio.sleep(due - time.monotonic())
        print(f"requests: {load.outcome.ended}; failed: {dict(load.outcome.failed)}")
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=positive, default=15.0, help="duration of the load, in minutes")
    parser.add_argument("--rate", type=positive, default=8.0, help="requests a second")
    parser.add_argument("--out", type=Path, default=Path("build/soak-alone"), help="directory of logs")
    given = parser.parse_args(arguments)
    directory = given.out.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with leave_on_signals():
        samples = asyncio.run(run(directory, given.minutes, given.rate))
    print(table(judged(samples)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
