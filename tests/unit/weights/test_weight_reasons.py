"""The reason that a push reports if a link breaks before the worker's own reason arrives."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from agent_setup import until
from weight_engines import PATIENT, WeightEngine, WriterGate, drawn

from kv_connector.protocol.actions import Source
from kv_connector.weights.pusher import _Awaited
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.trainer.joining import TargetWorker
from kv_connector.weights.trainer.version_news import WorkerNews
from kv_connector.weights.update import PushError
from kv_connector.weights.wire.messages import WeightMessage

PATIENCE_S = 60.0


@pytest.mark.parametrize("comes", [True, False])
def test_push_reports_the_reason_of_a_worker_whose_link_broke_first(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Without a reason, the error of the write is reported."""
    monkeypatch.setattr("kv_connector.weights.pusher.REASON_S", PATIENCE_S if comes else 0.0)
    gate, engine, threads = WriterGate(), WeightEngine(1), ThreadPoolExecutor(1)
    worker, held = engine.workers[0], list[tuple[Source, WeightMessage]]()
    send, due = worker._loop.sockets.send, queue.SimpleQueue[float]()

    def hold(source: Source, message: WeightMessage) -> bool:
        held.append((source, message))
        return True

    try:
        source = TensorSource(drawn(1))
        with gate.pusher(source, [str(engine.address)], providers=("tcp",), timeouts=PATIENT) as pusher:
            pusher.connect()
            wait_for = pusher._wait_for

            def wait_for_reason(awaited: Mapping[TargetWorker, _Awaited]) -> list[WorkerNews]:
                for one in awaited.values():
                    if not one.rounds:
                        due.put(one.due)
                return wait_for(awaited)

            monkeypatch.setattr(pusher, "_wait_for", wait_for_reason)
            push = threads.submit(pusher.push, "v1")
            assert gate.begun.wait(PATIENCE_S)
            monkeypatch.setattr(worker._loop.sockets, "send", hold)
            worker._loop.call(lambda: worker._run(worker._landing._drop("the loss is no number"))).result()
            until(lambda: not worker._landing._fencing)
            gate.go.set()
            if comes:
                assert due.get(timeout=PATIENCE_S) > time.monotonic(), "it waits for the reason"
                worker._loop.call(lambda: [send(*one) for one in held[:]]).result()
            reason = "version v1 was discarded: the loss is no number" if comes else "PEER_DOWN"
            with pytest.raises(PushError, match=reason):
                push.result(PATIENCE_S).wait("landed", PATIENCE_S)
    finally:
        gate.go.set()
        threads.shutdown()
        engine.close()
