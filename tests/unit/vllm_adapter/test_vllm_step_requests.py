"""A worker's request for a step of an idle engine."""

from __future__ import annotations

import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from kv_connector.vllm import patches
from kv_connector.vllm.step_requests import StepRequests, request_step

LIMIT = 30.0


def test_request_wakes_the_engine_until_its_next_step() -> None:
    requests, woken = StepRequests(), threading.Event()
    requests.wake = woken.set
    request_step(requests.name)  # it is not started yet
    requests.start()
    requests.start()
    try:
        assert not requests.pending
        request_step(requests.name)
        assert woken.wait(LIMIT)
        assert requests.pending
    finally:
        requests.close()
    requests.close()
    request_step(requests.name)  # nobody is there any more


def test_thread_survives_an_engine_that_cannot_be_woken() -> None:
    requests, calls = StepRequests(), queue.Queue[int]()

    def wake() -> None:
        calls.put(1)
        raise RuntimeError("as the test wants it")

    requests.wake = wake
    requests.start()
    try:
        for _ in range(2):
            request_step(requests.name)
            assert calls.get(timeout=LIMIT) == 1
    finally:
        requests.close()


def test_thread_survives_an_empty_message() -> None:
    """Any process of the machine may send one."""
    requests, woken = StepRequests(), threading.Event()
    requests.wake = woken.set
    requests.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", f"\0{requests.name}")
        request_step(requests.name)
        assert woken.wait(LIMIT)
    finally:
        requests.close()


def test_engine_goes_on_without_a_socket_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCoreProc, "_process_input_queue", lambda engine: "taken")
    requests = StepRequests()

    def fails() -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr(requests, "start", fails)
    patches.wake_idle_engine(requests)
    engine: Any = SimpleNamespace(input_queue=queue.Queue())
    assert EngineCoreProc._process_input_queue(engine) == "taken"


def test_idle_loop_of_vllm_ends_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own loop, in which an engine without requests waits."""
    monkeypatch.setattr(EngineCoreProc, "_process_input_queue", EngineCoreProc._process_input_queue)
    requests = StepRequests()
    patches.wake_idle_engine(StepRequests())
    patches.wake_idle_engine(requests)  # an engine that is made anew
    waits = threading.Event()
    engine: Any = SimpleNamespace(
        input_queue=queue.Queue(),
        has_work=lambda: requests.pending,
        is_running=lambda: True,
        _notify_idle_state_callbacks=waits.set,
        aborts_queue=queue.Queue(),
        process_input_queue_block=True,
        _handle_client_request=lambda kind, request: handled.append(kind),
    )
    handled: list[EngineCoreRequestType] = []
    loop = threading.Thread(target=lambda: EngineCoreProc._process_input_queue(engine), daemon=True)
    try:
        loop.start()
        assert waits.wait(LIMIT)
        request_step(requests.name)
        loop.join(LIMIT)
        assert not loop.is_alive()
        assert handled == [EngineCoreRequestType.WAKEUP]
    finally:
        requests.close()
