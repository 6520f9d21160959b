"""examples/compose: images are built, a request is answered, an engine is killed and started again.

`make test-compose`. Without a base image from a registry, name one of this machine: BASE=python:3.11-local.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_connector.lab.cluster import engine_states
from kv_connector.lab.free_ports import free_ports

COMPOSE = Path(__file__).parents[2] / "examples" / "compose"
BASE = os.environ.get("BASE", "python:3.11-slim-bookworm")
PATIENCE_SECONDS = 120
PROJECT = "kv-connector-test"

pytestmark = pytest.mark.skipif("KVC_COMPOSE" not in os.environ, reason="builds images: make test-compose")


def docker(*words: str) -> str:
    """Returns the output; a RuntimeError has the output of a failed call."""
    done = subprocess.run(["docker", *words], cwd=COMPOSE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"docker {' '.join(words)}: {done.stderr[-3000:]}")
    return done.stdout


def compose(*words: str) -> str:
    return docker("compose", "--env-file", "cpu.env", "--project-name", PROJECT, *words)


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    """The router's URL, after `up` has received its answer."""
    try:
        docker("info")
        docker("compose", "version")
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no docker with compose 2 here: {error}")
    try:
        docker("image", "inspect", BASE)
    except RuntimeError:
        try:
            docker("pull", BASE)
        except RuntimeError as error:
            pytest.skip(f"no base image (BASE={BASE}): {error}")
    os.environ["PORT"] = str(free_ports(1)[0])
    try:
        started = subprocess.run(
            ["./up", "cpu", "--project-name", PROJECT],
            cwd=COMPOSE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert started.returncode == 0, started.stdout[-5000:] + compose("logs", "--tail", "30")
        assert '"finish_reason": "length"' in started.stdout
        yield f"http://127.0.0.1:{os.environ['PORT']}"
    finally:
        compose("down", "--timeout", "5", "--volumes")


def ask(router: str) -> str:
    body = {"model": "model", "prompt": "Once upon a time " * 20, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{router}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        text = json.load(response)["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def pages_pushed() -> float:
    code = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
    lines = compose("exec", "-T", "prefill", "python3", "-c", code).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("kv_connector_pages_pushed_total"))


def until_prefill(router: str, state: str | None) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := engine_states(router).get("http://prefill:8000")) != state:
        assert time.monotonic() < deadline, f"{found}, not {state}; {compose('logs', '--tail', '20')}"
        time.sleep(0.2)


def test_the_answer_s_kv_came_from_the_prefill_engine(router: str) -> None:
    before = pages_pushed()
    first = ask(router)
    assert ask(router) == first
    assert pages_pushed() > before > 0


def test_a_killed_engine_is_missed_and_comes_back(router: str) -> None:
    expected = ask(router)
    compose("kill", "prefill")
    until_prefill(router, None)  # dead, and removed from the router
    assert ask(router) == expected  # the decode engine computes the prompt
    compose("up", "--detach", "--wait", "prefill")
    until_prefill(router, "ready")
    assert ask(router) == expected


def test_engines_find_a_router_that_comes_back_with_another_address(router: str) -> None:
    """The engines resolve the router's name again."""
    container = compose("ps", "--quiet", "router").strip()
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    before = docker("inspect", "--format", template, container).strip()
    compose("rm", "--stop", "--force", "router")
    # Another container takes the router's address, in case Docker assigns it again at once.
    taken = docker("run", "--detach", "--rm", "--network", f"{PROJECT}_default", BASE, "sleep", "300")
    try:
        compose("up", "--detach", "--wait", "router")
        container = compose("ps", "--quiet", "router").strip()
        assert docker("inspect", "--format", template, container).strip() != before
        until_prefill(router, "ready")
        assert ask(router)
    finally:
        docker("kill", taken.strip())
