"""CPU time of a streamed request at a router, by stage: for the request, and for each part of its answer.

A timer of the router's own processor time samples the router's stack. A sample belongs to the stage of its
innermost frame that a stage names. Two loads are run: streams of one event, and streams of many events at
intervals. Their difference is the cost of a part. `--functions` also lists the functions with the most
samples.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from router_streams import HOST, WARM_UP_SECONDS, StreamLoad, cpu_seconds, send

from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import Process, ProcessGroup, leave_on_signals, starting

# The kernel counts processor time in ticks of 4 ms or less often.
SAMPLE_SECONDS = 0.004
REPORT, FILE = signal.SIGUSR2, "ROUTER_PROFILE"

# Beginnings of module names, the first that fits.
STAGES = {
    "kv_connector.router.front.server": "client: connection and HTTP",
    "kv_connector.router.front.api_keys": "API key",
    "kv_connector.router.front.limits": "limits, deadlines and comments",
    "kv_connector.router.front.deadline": "limits, deadlines and comments",
    "kv_connector.router.front.keep_alive": "limits, deadlines and comments",
    "kv_connector.router.front": "client: route and answer",
    "kv_connector.router.bodies.prompt": "placement",
    "kv_connector.router.bodies": "body",
    "kv_connector.router.requests.completion": "body",
    "kv_connector.router.placement": "placement",
    "kv_connector.router.engines.client": "engines: HTTP",
    "kv_connector.router.engines": "placement",
    "kv_connector.router.observe.metrics": "metrics",
    "kv_connector.router.observe.first_bytes": "metrics",
    "kv_connector.router.observe": "access log",
    "kv_connector.router.requests": "events of the answer",
    "kv_connector.router.streams.usage": "events of the answer",
    "kv_connector.router.streams.running": "events of the answer",
    "kv_connector.router.streams.stream": "events of the answer",
    "kv_connector.router.streams": "dispatch",
    "prometheus_client": "metrics",
    "aiohttp": "engines: HTTP",
    "uvicorn.protocols": "client: connection and HTTP",
    "starlette": "client: route and answer",
}
OTHER = "event loop and rest"


def stage_of(module: str) -> str | None:
    return next((stage for name, stage in STAGES.items() if module.startswith(name)), None)


def sample(counts: Counter[tuple[str, str]], frame: FrameType | None) -> None:
    leaf = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        leaf = leaf or f"{module}.{frame.f_code.co_qualname}"
        if (stage := stage_of(module)) is not None:
            counts[stage, f"{module}.{frame.f_code.co_qualname} ({leaf})"] += 1
            return
        frame = frame.f_back
    counts[OTHER, leaf] += 1


def router(words: list[str]) -> None:
    """Runs a router that samples itself. BLOCKS until a signal ends it."""
    from kv_connector.cli.main import app

    counts: Counter[tuple[str, str]] = Counter()

    def report(_: int, __: FrameType | None) -> None:
        """Writes the samples since the last report."""
        target = Path(os.environ[FILE])
        target.with_suffix(".new").write_text(json.dumps([[*key, n] for key, n in counts.items()]))
        target.with_suffix(".new").rename(target)
        counts.clear()

    signal.signal(signal.SIGPROF, lambda _, frame: sample(counts, frame))
    signal.signal(REPORT, report)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    sys.argv = ["kv-connector", *words]
    try:
        app()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)  # it would end the interpreter, which no longer samples


def samples(process: Process, target: Path) -> Counter[tuple[str, str]]:
    """Returns the samples since the last call."""
    target.unlink(missing_ok=True)
    os.kill(process.pid, REPORT)
    while not target.exists():
        time.sleep(0.01)
    return Counter({(stage, place): count for stage, place, count in json.loads(target.read_text())})


def measure(
    load: StreamLoad, seconds: float, options: list[str]
) -> tuple[float, int, Counter[tuple[str, str]]]:
    """Returns the router's processor seconds, the streams in this time, and the samples."""
    prefill, decode, port = free_ports(3)
    with tempfile.TemporaryDirectory() as directory, ProcessGroup() as group:
        target = Path(directory) / "samples"

        def start(name: str, port: int, *words: str) -> Process:
            command = [sys.executable, *words, "--port", str(port)]
            with starting():
                process = Process(name, command, environment={FILE: str(target)}, log=Path(directory) / name)
                group._adopt(process, f"http://{HOST}:{port}/{'live' if name == 'router' else 'health'}")
            return process

        stub = "-m", "kv_connector.bench.stub_engine"
        start("prefill", prefill, *stub)
        start("decode", decode, *stub, "--tokens", str(load.tokens), "--pause", str(load.pause))
        engines = ("--prefill", f"http://{HOST}:{prefill}", "--decode", f"http://{HOST}:{decode}")
        of_router = start("router", port, __file__, "--router", "router", *engines, *options)
        group.wait_ready()
        url = f"http://{HOST}:{port}"
        asyncio.run(send(url, load, WARM_UP_SECONDS))
        samples(of_router, target)
        used = cpu_seconds(of_router)
        complete = asyncio.run(send(url, load, seconds))
        return cpu_seconds(of_router) - used, complete, samples(of_router, target)


def by_stage(used: float, complete: int, found: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """Returns microseconds of a stream, by stage."""
    times = dict.fromkeys([*STAGES.values(), OTHER], 0.0)
    for (stage, _), count in found.items():
        times[stage] += 1e6 * used / complete * count / sum(found.values())
    return times


def main() -> None:
    if sys.argv[1:2] == ["--router"]:
        router(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each load")
    parser.add_argument("--streams", type=int, default=50, help="streams at a time")
    parser.add_argument("--events", type=int, default=100, help="events of a long stream")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two events")
    parser.add_argument("--functions", type=int, default=0, help="functions to list for each load")
    options, words = parser.parse_known_args()
    loads = (StreamLoad(options.streams, 1, 0.0), StreamLoad(options.streams, options.events, options.pause))
    results: list[dict[str, float]] = []
    with leave_on_signals():
        for load in loads:
            used, complete, found = measure(load, options.seconds, words)
            print(
                f"streams of {load.tokens} events: {complete} in {used:.2f} s of processor time, "
                f"{1e6 * used / complete:.0f} us each, {sum(found.values())} samples"
            )
            for (stage, place), count in Counter(found).most_common(options.functions):
                print(f"  {100 * count / sum(found.values()):5.1f} % {stage}: {place}")
            results.append(by_stage(used, complete, found))
    one, many = results
    print("| stage | a request, us | a part, us |\n|---|---|---|")
    for stage in sorted(one, key=lambda stage: -one[stage]):
        print(f"| {stage} | {one[stage]:.0f} | {(many[stage] - one[stage]) / (options.events - 1):.1f} |")
    total = sum(one.values())
    print(f"| all | {total:.0f} | {(sum(many.values()) - total) / (options.events - 1):.1f} |")


if __name__ == "__main__":
    main()
