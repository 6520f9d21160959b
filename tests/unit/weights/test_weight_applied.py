"""A version counts as applied when its engine resumes with it, not when its workers have it."""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.controller import Controller
from kv_connector.weights.mapping.geometry import Geometry, Parameter, Write
from kv_connector.weights.metrics import OUTCOMES, WeightMetrics
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.trainer.joining import TargetEngine
from kv_connector.weights.trainer.version_news import _Followed
from kv_connector.weights.update import PushError
from kv_connector.weights.wire.links import Link, News
from kv_connector.weights.wire.messages import Applied
from kv_connector.weights.worker.receiver import ReceiverConfig, WeightReceiver

GEOMETRY = Geometry((Parameter("w", "float32", 4),), (Write(0, 0, (0,), (4,), 0, (1,)),), ())
PATIENCE_S = 30


class Engine:
    """Records at resume whether the pusher has already received the news of its only worker."""

    def __init__(self, worker: WeightReceiver) -> None:
        self._worker = worker
        self.worker_heard = threading.Event()
        self.is_known: Callable[[], bool]
        self.known_at_resume: bool | None = None

    async def pause(self) -> None:
        """Does nothing: this engine computes nothing."""

    async def update(self, version: str) -> None:
        def apply() -> None:
            for _ in self._worker.take(version):
                pass
            self._worker.finish("")

        await asyncio.to_thread(apply)

    async def label(self, version: str) -> None:
        """Does nothing: this engine serves nothing."""

    async def resume(self) -> None:
        assert await asyncio.to_thread(self.worker_heard.wait, PATIENCE_S)
        self.known_at_resume = self.is_known()


def test_rank_0_is_notified_when_the_engine_has_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WeightReceiver(ReceiverConfig("worker", Address("127.0.0.1", 0), ("tcp",)), lambda _: GEOMETRY)
    engine = Engine(worker)
    port = free_ports(1)[0]

    def push() -> None:
        with WeightPusher(TensorSource([("w", torch.ones(4))]), [f"127.0.0.1:{port}"]) as pusher:
            hear = pusher._news._from_worker

            def heard(of: _Followed, target: TargetEngine, link: Link, news: News) -> None:
                hear(of, target, link, news)
                if isinstance(news, Applied):
                    engine.is_known = of.update._done["applied"][f"127.0.0.1:{port}"].done
                    engine.worker_heard.set()

            monkeypatch.setattr(pusher._news, "_from_worker", heard)
            pusher.connect()
            pusher.push("1").wait("applied", PATIENCE_S)

    async def run() -> None:
        controller = Controller(engine, [worker.start()], None)
        try:
            await controller.start(Address("127.0.0.1", port))
            await asyncio.to_thread(push)
        finally:
            controller.close()
            worker.close()

    asyncio.run(run())
    assert engine.known_at_resume is False


class TornEngine:
    """An engine whose worker does not apply a version named "bad"."""

    def __init__(self, worker: WeightReceiver) -> None:
        self._worker = worker

    async def pause(self) -> None:
        """Does nothing: this engine computes nothing."""

    async def update(self, version: str) -> None:
        def apply() -> None:
            for _ in self._worker.take(version):
                pass
            problem = "no such tensor" if shown(version) == "bad" else ""
            self._worker.finish(problem, torn=bool(problem))

        await asyncio.to_thread(apply)

    async def label(self, version: str) -> None:
        """Does nothing: this engine serves nothing."""

    async def resume(self) -> None:
        """Does nothing: this engine computes nothing."""


def test_first_worker_receives_the_reason_and_the_end_of_a_pause() -> None:
    """The first worker receives the reason, and the metrics count the torn version."""
    registry = CollectorRegistry()
    seen = []

    def metrics(*names: str) -> list[float | None]:
        return [registry.get_sample_value(f"kv_connector_weights_{name}") for name in names]

    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    config = ReceiverConfig("worker", Address("127.0.0.1", 0), ("tcp",))
    worker = WeightReceiver(config, lambda _: GEOMETRY, told.put)
    port = free_ports(1)[0]

    def push() -> None:
        with WeightPusher(TensorSource([("w", torch.ones(4))]), [f"127.0.0.1:{port}"]) as pusher:
            pusher.connect()
            pusher.push("good").wait("applied", PATIENCE_S)
            seen.append(registry.get_sample_value("kv_connector_weights_version", {"version": "good"}))
            assert pusher.progress() == {f"127.0.0.1:{port}": (16, 16)}
            with pytest.raises(PushError, match="no such tensor"):
                pusher.push("bad").wait("applied", PATIENCE_S)
            seen.append(registry.get_sample_value("kv_connector_weights_torn"))
            pusher.push("better").wait("applied", PATIENCE_S)

    async def run() -> list[str]:
        controller = Controller(TornEngine(worker), [worker.start()], None, WeightMetrics(registry))
        try:
            await controller.start(Address("127.0.0.1", port))
            await asyncio.to_thread(push)
            return [await asyncio.to_thread(told.get, timeout=PATIENCE_S) for _ in range(3)]
        finally:
            controller.close()
            worker.close()

    good, bad, better = asyncio.run(run())
    assert (good, better) == ("", "")
    assert "no such tensor" in bad
    assert seen == [1, 1]
    assert metrics("torn", "bytes_total", "pause_seconds_count") == [0, 2 * 4 * 4, 3]
    outcomes = {
        outcome: registry.get_sample_value("kv_connector_weights_updates_total", {"outcome": outcome})
        for outcome in OUTCOMES
    }
    assert outcomes == {"applied": 2, "refused": 0, "torn": 1}
    versions = [
        sample.labels["version"]
        for family in registry.collect()
        for sample in family.samples
        if family.name == "kv_connector_weights_version"
    ]
    assert versions == ["better"], "the one before is no series any more"


def test_several_api_servers_report_one_version(tmp_path: Path) -> None:
    """With several API servers, one series reports the version.

    prometheus_client removes no series there, and reads its setting when it is imported.
    """
    code = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from kv_connector.weights.metrics import WeightMetrics
metrics = WeightMetrics(CollectorRegistry())
metrics.applied("v1", 1, 0.1)
metrics.applied("v2", 1, 0.1)
found = CollectorRegistry()
multiprocess.MultiProcessCollector(found)
print(generate_latest(found).decode())
"""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    series = [line for line in done.stdout.splitlines() if line.startswith("kv_connector_weights_version{")]
    assert sorted(series) == [
        'kv_connector_weights_version{version="v1"} 0.0',
        'kv_connector_weights_version{version="v2"} 1.0',
    ]
