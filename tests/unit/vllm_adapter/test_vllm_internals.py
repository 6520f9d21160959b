"""What the connector changes of vLLM itself, and asks of it."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.engine import async_llm, core

from kv_connector.vllm import internals
from kv_connector.vllm.connector import WriteImmConnector


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The naps that were taken, none of which takes any time; sleep_for_messages() is undone at the end."""
    naps: list[float] = []
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)
    monkeypatch.setattr(internals, "time", SimpleNamespace(monotonic=lambda: 100.0, sleep=naps.append))
    internals.sleep_for_messages()
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


def test_the_engine_loop_pauses_as_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "time", core.time)  # for the end of the test
    pauses: list[float] = []
    internals.replace_idle_pause(pauses.append)
    loop = SimpleNamespace(
        step_fn=lambda: (None, False),
        post_step=lambda executed: None,
        scheduler=SimpleNamespace(has_requests=lambda: True),
    )
    core.EngineCoreProc._process_engine_step(loop)
    assert pauses == [0.001]
    assert core.time.monotonic() <= core.time.monotonic()


@pytest.mark.parametrize(("latent", "layout"), [(False, "LBHNC"), (True, "LBNHC")])
def test_vllm_is_asked_for_heads_first(latent: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that would rather have tokens first."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=None),
        kv_transfer_config=SimpleNamespace(),
        model_config=SimpleNamespace(use_mla=latent),
        scheduler_config=SimpleNamespace(scheduler_cls="another"),
    )
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda _: WriteImmConnector)
    assert resolve_kv_cache_layout(config, [["LBNHC", "LBHNC"]]).name == layout


def test_a_pause_that_keeps_requests_is_vllms_own_without_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this release's pause asks of its engine, and in that order."""
    asked: list[tuple[object, ...]] = []

    class Part:
        def __getattr__(self, name: str) -> object:
            async def ask(**arguments: object) -> None:
                asked.append((name, arguments))

            return ask

    class Clock:
        async def sleep(self, seconds: float) -> None:
            asked.append(("sleep", seconds))

    client = SimpleNamespace(renderer=Part(), engine_core=Part())
    monkeypatch.setattr(async_llm, "asyncio", Clock())
    asyncio.run(async_llm.AsyncLLM.pause_generation(client, mode="keep", clear_cache=True))
    theirs, ours = [*asked], asked
    asked.clear()
    asyncio.run(internals.pause_keeping_requests(client))
    assert [*ours, ("sleep", 0.02)] == theirs
