"""The changes that the connector makes to vLLM itself."""

from types import SimpleNamespace

import pytest
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.engine import core

from kv_connector.vllm import patches


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records sleeps, none of which takes any time. At the end, sleep_for_messages() is undone."""
    naps: list[float] = []
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)
    monkeypatch.setattr(patches, "time", SimpleNamespace(monotonic=lambda: 100.0, sleep=naps.append))
    patches.sleep_for_messages()
    return naps


@pytest.mark.parametrize(
    ("waited", "nap"), [(0.0, 50e-6), (0.0001, 50e-6), (0.004, 0.0005), (0.03, 0.001), (1.0, 0.001)]
)
def test_a_cpu_engine_sleeps_while_it_waits_for_a_message(
    slept: list[float], waited: float, nap: float
) -> None:
    condition = SimpleNamespace(last_read=100.0 - waited, busy_loop_s=1)
    SpinCondition.wait(condition, timeout_ms=None)
    assert slept == [pytest.approx(nap)]


def test_an_idle_engine_waits_as_vllm_lets_it(slept: list[float]) -> None:
    polled: list[float | None] = []

    def poll(timeout: float | None) -> list[tuple[object, int]]:
        polled.append(timeout)
        return []

    condition = SimpleNamespace(
        is_reader=True,
        last_read=-3600.0,  # of any clock
        busy_loop_s=1,
        poller=SimpleNamespace(poll=poll),
        read_cancel_socket=None,
        local_notify_socket=None,
    )
    SpinCondition.wait(condition, timeout_ms=5000)
    assert polled == [5000]
    assert slept == []


def test_engine_loop_calls_the_replaced_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "time", core.time)  # for the end of the test
    pauses: list[float] = []
    patches.replace_idle_pause(pauses.append)
    loop = SimpleNamespace(
        step_fn=lambda: (None, False),
        post_step=lambda executed: None,
        scheduler=SimpleNamespace(has_requests=lambda: True),
    )
    core.EngineCoreProc._process_engine_step(loop)
    assert pauses == [0.001]
    assert core.time.monotonic() <= core.time.monotonic()
