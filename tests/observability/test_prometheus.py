"""The rules' own tests, and board and rules on a real Prometheus that scrapes a router and two engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_files import ALERTS, BOARD, FILES, RULES

from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey
from kv_connector.lab.cluster import MODEL_NAME, LocalCluster
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import Process, wait_healthy

pytestmark = pytest.mark.anyio

BIN = Path(os.environ["KVC_PROMETHEUS"])
SCRAPE_SECONDS = 1
LOAD_SECONDS = 20.0
# Seconds until the last answers are scraped, and the rules over them evaluated.
SETTLE_SECONDS = 20.0

# Expressions that may have no series in a healthy fleet: phases that no transfer was in when a step ended.
MAY_BE_EMPTY = ('phase="fencing"',)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "promtool", *arguments], capture_output=True, text=True, cwd=FILES)


def test_the_rules_are_sound_and_pass_their_own_tests() -> None:
    for arguments in (("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Returns the expression's current result; fails if Prometheus rejects the expression."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def firing(self) -> set[str]:
        """Returns the alerts whose condition holds, for whatever time."""
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"]}

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        data: dict[str, Any] = told["data"]
        return data


@contextlib.contextmanager
def prometheus(directory: Path, targets: dict[str, list[str]]) -> Iterator[Prometheus]:
    """Runs a Prometheus with our rules that scrapes these addresses, by job."""
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(FILES / "rules.yaml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": addresses}]}
            for job, addresses in targets.items()
        ],
    }
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML, too
    command = [
        str(BIN / "prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = Process("prometheus", command, environment={}, log=directory / "prometheus.log")
    try:
        wait_healthy({process: f"http://127.0.0.1:{port}/-/ready"}, deadline=time.monotonic() + 30)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()


async def load(router: str) -> None:
    """Sends completions, some of which only the decode engine computes, and one that no engine accepts."""
    async with httpx.AsyncClient(base_url=router, timeout=60) as client:

        async def ask(expected: int = 200, **request: Any) -> None:
            body = {"model": MODEL_NAME, "max_tokens": 8, "ignore_eos": True, **request}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == expected, answer.text

        async def keep_asking(number: int) -> None:
            end = time.monotonic() + LOAD_SECONDS
            while time.monotonic() < end:
                prompt = [(number * 7 + at * at + int(time.monotonic() * 1e3)) % 256 for at in range(700)]
                await ask(prompt=prompt)

        await ask(prompt=["a", "b"])
        await ask(prompt="a", max_tokens=-1, expected=400)
        await asyncio.gather(*(keep_asking(number) for number in range(3)))


def board_expressions() -> dict[str, str]:
    """Returns the board's expressions by panel and query, with Grafana's variables filled in."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", "30s")
        .replace("$model", ".*")
        for panel in BOARD["panels"]
        for target in panel.get("targets", ())
    }


async def test_every_panel_and_rule_answers_under_load(tmp_path: Path, interpreter: tuple[str, ...]) -> None:
    ClusterKey.generate().write(tmp_path / "key")
    model = make_llama(tmp_path / "model")
    with LocalCluster(tmp_path / "logs", model) as cluster:
        cluster.interpreter = interpreter
        cluster.environment = {KEY_FILE_VARIABLE: str(tmp_path / "key")}
        (registration,) = free_ports(1)
        joining = [f"127.0.0.1:{registration}"]
        engines = [
            cluster.start_engine("prefill", role="kv_producer", routers=joining),
            cluster.start_engine("decode", role="kv_consumer", routers=joining),
        ]
        cluster.wait_ready()
        router = cluster.start_router("router", registration=registration)
        cluster.wait_ready()
        targets = {
            "vllm": [engine.url.removeprefix("http://") for engine in engines],
            "router": [router.removeprefix("http://")],
        }
        with prometheus(tmp_path, targets) as server:
            await load(router)
            check(server)


def check(server: Prometheus) -> None:
    records = {rule["record"]: rule["record"] for rule in RULES if "record" in rule}
    questions = board_expressions() | records
    deadline = time.monotonic() + SETTLE_SECONDS
    unanswered = questions
    while unanswered and time.monotonic() < deadline:
        unanswered = {name: text for name, text in unanswered.items() if not answers(server, text)}
        time.sleep(SCRAPE_SECONDS)
    assert {name: text for name, text in unanswered.items() if not may_be_empty(text)} == {}
    for rule in ALERTS.values():
        server.ask(rule["expr"])
    assert server.firing() == set(), "nothing is wrong with these engines"


def answers(server: Prometheus, expression: str) -> bool:
    """Returns whether the result has a series with a number."""
    return any(series["value"][1] != "NaN" for series in server.ask(expression))


def may_be_empty(expression: str) -> bool:
    return any(part in expression for part in MAY_BE_EMPTY)
