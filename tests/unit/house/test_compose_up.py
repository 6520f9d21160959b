"""The files of examples/compose, and its script `up` with a stand-in for docker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import yaml

from kv_connector.cli.router import SHUTDOWN_S

COMPOSE = Path(__file__).parents[3] / "examples/compose"
UP = COMPOSE / "up"
DOCKER = """#!/bin/sh
echo "$*" >>calls
cat >/dev/null
"""


def test_up_passes_its_options_to_every_call_of_compose(tmp_path: Path) -> None:
    """The query call gets them too: without --project-name it would go to another project's containers."""
    shutil.copy(UP, tmp_path)
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    path = f"{docker.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [tmp_path / "up", "gpu", "--project-name", "other"], env={**os.environ, "PATH": path}, check=False
    )
    assert done.returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    for call, verb in zip(calls, ("up", "exec"), strict=True):
        assert call.startswith(f"compose --env-file gpu.env --project-name other {verb} ")


def test_only_the_router_is_published_beyond_the_loopback_address() -> None:
    """Grafana has its default password, and Prometheus has none."""
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert len(published.pop("router")) == 1
    assert {"prometheus", "grafana"} == set(published)
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_router_is_not_killed_before_its_streams_have_an_error_event() -> None:
    router = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["router"]
    assert "--shutdown-timeout" not in router["command"]
    assert router["stop_grace_period"] == f"{SHUTDOWN_S + 10}s"
