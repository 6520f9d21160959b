"""Cases that compare a prefill and a decode engine with one engine: their servers, metrics and options."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).resolve().parents[2] / "integration" / "benchmarks"))
from gpu_engines import HOST, GpuServer, first_error, ours

# Ports of a case: three API servers, and control sockets ten above them.
_FIRST_PORT, _PORTS = 9100, 40


def server(
    case: str,
    side: str,
    port: int,
    model: Path,
    flags: Sequence[str],
    directory: Path,
    provider: str,
    environment: Mapping[str, str],
    around: Callable[[dict[str, Any]], dict[str, Any]] = lambda transfer: transfer,
) -> GpuServer:
    """Returns the prefill engine, the decode engine or the one engine ("alone") of a case.

    ``directory`` gets its log. ``around``: changes the KV transfer settings of the first two.
    """
    gpu, number = {"prefill": (0, 0), "decode": (1, 1), "alone": (0, 2)}[side]
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(side)
    control = port + 10 + number
    url, registration = f"http://{HOST}:{port + number}", port + 20  # no router listens there
    transfer = None if role is None else around(ours(role, control, provider, url, registration))
    return GpuServer(
        f"{case}-{side}",
        [gpu],
        port + number,
        model,
        list(flags),
        directory,
        transfer,
        control,
        dict(environment),
    )


async def counted(client: httpx.AsyncClient, server: GpuServer, metric: str) -> float:
    """Returns the sum of a counter of vLLM or of the connector over its series."""
    text = (await client.get(f"{server.url}/metrics")).text
    line = rf"^(?:vllm:|kv_connector_){metric}_total(?:\{{[^}}]*\}})? (\S+)$"
    found = re.findall(line, text, re.MULTILINE)
    return sum(float(value) for value in found)


def run_cases(
    description: str | None,
    noun: str,
    names: Sequence[str],
    prepare: Callable[[str, Path], None],
    run: Callable[[str, Path, int, str], str],
) -> None:
    """Runs the cases that the command line chooses, and exits with status 1 if one fails.

    ``prepare`` gets a case's name and its directory, for each case before the first one runs. ``run`` also
    gets its first port and the provider. It returns what is printed.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    work = Path(f"/tmp/kvc-gpu-{Path(sys.argv[0]).stem}")
    parser.add_argument("--work", type=Path, default=work, help="models and logs")
    parser.add_argument("--provider", default="nvlink")
    parser.add_argument(f"--{noun}", nargs="*", default=names, choices=names, dest="chosen")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="as many of them side by side")
    plan = parser.parse_args()
    work = plan.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache

    def result(name: str) -> bool:
        port = _FIRST_PORT + _PORTS * names.index(name)
        try:
            print(f"{name}: {run(name, directories[name], port, plan.provider)}", flush=True)
        except Exception as error:
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
            for log in sorted(work.glob(f"{name.replace(' ', '-')}-*.log")):
                print(f"{name}: first error in {log}: {first_error(log) or 'none'}", flush=True)
            return False
        return True

    directories = {name: work / name.replace(" ", "-") for name in names if name in plan.chosen}
    for name, directory in directories.items():
        prepare(name, directory)
    with ThreadPoolExecutor(plan.at_once) as pool:
        right = [*pool.map(result, directories)]
    sys.exit(not all(right))
