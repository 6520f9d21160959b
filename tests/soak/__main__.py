"""Runs a prefill engine, two decode engines and a router for a while, and reports what grows.

    python -m tests.soak --minutes 30               the run; status 1 if a series grows or an answer is wrong
    python -m tests.soak --report build/soak        the report on the samples of a run that was broken off

Each sample and each verdict is a JSON line, in samples.jsonl and report.jsonl. picture.json is data for
scripts/pictures: copy it to docs/data.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx
from deployment import SMALL, Client, prompt
from nursery import nursery
from suite_numbers import positive

from kv_connector.lab.model import make_llama
from kv_connector.lab.process import leave_on_signals
from tests.faults.fault_site import Site
from tests.soak.faults import ENGINES, Faults
from tests.soak.load import Load, Outcome
from tests.soak.processes import Sample, engine_gauges, listener, of_group, read, router_gauges, write
from tests.soak.report import judged, lines, picture, table

LAYERS = 4
SAMPLE_SECONDS = 10.0
# Fewest samples of a run, so that a short run is judged too.
FEWEST_SAMPLES = 90
FAULT_SECONDS = 75.0
# Fewest faults of a run.
FEWEST_FAULTS = 8
# A prefill engine remembers an ended transfer for twice this time and a little more. With the default, the
# number of remembered transfers would grow for ten minutes.
TIMEOUTS = {"transfer": 60.0}
# oneDNN keeps up to 1,024 compiled products of matrices, for each number of tokens that a step has had. They
# made a worker of vLLM without a connector grow by 290 MiB in 420 prompts of random lengths. Without them, it
# stayed at 542 MiB (2026-11-29).
NO_CACHE_OF_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1"}
# Tokens of the prompts that each engine computes before the load, as of range().
WARM_TOKENS = (10, 1500, 25)
# Share of the requests that must be answered: a killed decode engine costs those that it has.
ANSWERED = 0.9


class Soak:
    """One run. ``directory``: gets logs, samples and the report."""

    def __init__(self, directory: Path, minutes: float, rate: float) -> None:
        self.directory = directory
        self.seconds = minutes * 60
        self._rate = rate
        self._interval = min(SAMPLE_SECONDS, self.seconds / FEWEST_SAMPLES)
        self._servers: dict[int, int] = {}  # by process id of the engine's starter
        self.samples = directory / "samples.jsonl"
        directory.mkdir(parents=True, exist_ok=True)
        self.samples.write_text("")

    def log(self, line: str) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)

    async def run(self) -> Outcome:
        """Runs the load and the faults, and writes the samples."""
        model = make_llama(self.directory / "model", layers=LAYERS, **SMALL)
        with (
            nursery(self.directory, {"OMP_NUM_THREADS": "1"}) as interpreter,
            Site(self.directory, model) as site,
        ):
            site.cluster.interpreter = interpreter
            site.extra = {"timeouts": TIMEOUTS}
            site.cluster.environment.update(NO_CACHE_OF_PRODUCTS)
            site.start_router()
            for name in ENGINES:
                site.start(name)
            await asyncio.to_thread(site.cluster.wait_ready)
            await site.until_ready()
            await _compute_prompts(site)
            self.log(f"engines are ready; {self.seconds / 60:g} min at {self._rate:g} requests a second")
            faults = Faults(site, min(FAULT_SECONDS, self.seconds / FEWEST_FAULTS), self.log)
            async with Load(site.router, self._rate) as load:
                causing = asyncio.create_task(faults.run())
                try:
                    await self._sample(site, load)
                finally:
                    causing.cancel()
                    await asyncio.gather(causing, return_exceptions=True)
            await asyncio.to_thread(site.cluster.wait_ready)
            self.log(f"faults: {dict(faults.caused)}")
            async with Client() as client:
                try:
                    await site.assert_at_rest(client)
                except AssertionError as error:
                    load.outcome.wrong.append(f"at the end: {error}")
            return load.outcome

    async def _sample(self, site: Site, load: Load) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            while load.seconds < self.seconds:
                due = time.monotonic() + self._interval
                write(self.samples, await self._take(site, load, http))
                await asyncio.sleep(due - time.monotonic())

    async def _take(self, site: Site, load: Load, http: httpx.AsyncClient) -> list[Sample]:
        at, ended = round(load.seconds, 1), load.outcome.ended
        router = site.cluster.routers[site.router].pid
        found = [Sample(at, ended, *one) for one in of_group("router", router)]
        found.append(Sample(at, ended, "router", router, await router_gauges(http, site.router)))
        for name, engine in list(site.engines.items()):
            starter = engine.pid
            if starter not in self._servers:
                if (pid := listener(engine.port)) is None:
                    continue  # it starts
                self._servers[starter] = pid
            pid = self._servers[starter]
            found += [Sample(at, ended, *one) for one in of_group(name, pid)]
            if gauges := await engine_gauges(http, engine.url):
                found.append(Sample(at, ended, name, pid, gauges))
        return found


async def _compute_prompts(site: Site) -> None:
    """Lets each engine compute prompts of all lengths by itself, which fills its caches. Decode engines do
    that otherwise only while the prefill engine is drained, and grow each time."""
    async with Client() as client:
        for length in range(*WARM_TOKENS):
            for name in ENGINES:
                await client.complete(site.engines[name].url, prompt(f"warm {length}", length), 2)


def report(directory: Path, outcome: Outcome | None) -> int:
    """Writes and prints the report. Returns the exit status."""
    samples = read(directory / "samples.jsonl")
    verdicts = judged(samples)
    (directory / "report.jsonl").write_text(lines(verdicts))
    minutes, requests = samples[-1].at / 60, samples[-1].requests
    about = {
        "log": "benchmarks/2026-11-30-faults.md#growth-over-time",
        "command": f"make soak MINUTES={minutes:.0f}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "method": f"The values are medians of {minutes / 12:.0f} minutes.",
        "caption": f"{requests:,} requests in {minutes:.0f} minutes",
    }
    (directory / "picture.json").write_text(json.dumps(picture(samples, about), indent=1))
    print(table(verdicts), end="")
    growing = [f"{one.process}: {one.series}" for one in verdicts if one.word == "GROWS"]
    problems = [f"grows: {', '.join(growing)}"] if growing else []
    if outcome is not None:
        answered = sum(outcome.answered.values())
        print(
            f"requests: {outcome.ended}; answered {dict(outcome.answered)}, "
            f"left by their client {outcome.left}"
        )
        print(f"failed: {dict(outcome.failed)}")
        problems += outcome.wrong
        if answered + outcome.left < ANSWERED * outcome.ended:
            problems.append(
                f"answered: only {answered} of {outcome.ended}; the last: {outcome.failures[-5:]}"
            )
    for problem in problems:
        print(problem)
    print("soak: failed" if problems else "soak: every series is flat")
    return 1 if problems else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=positive, default=30.0, help="duration of the load, in minutes")
    parser.add_argument("--rate", type=positive, default=2.0, help="requests a second")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="directory of logs and samples")
    parser.add_argument("--report", type=Path, help="directory of a run whose samples are reported")
    given = parser.parse_args(arguments)
    if given.report is not None:
        return report(given.report, None)
    with leave_on_signals():
        outcome = asyncio.run(Soak(given.out.resolve(), given.minutes, given.rate).run())
    return report(given.out, outcome)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
