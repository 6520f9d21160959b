"""Sleep and wake: the KV cache is unmapped under the agent, and mapped again with other pages behind it."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from agent_pairs import SOURCE, TARGET, every_lane, pair, refuse, sim, transfer
from agent_setup import PATIENCE, AgentSide, AgentStage, until
from protocol_setup import BLOCK

from kv_connector.agent.config import AgentError
from kv_connector.agent.start import RunningAgent
from kv_connector.engine import ErrorCode
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role
from kv_connector.vllm.connector import WriteImmConnector

__all__ = ["every_lane", "pair", "sim"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FIXED = 0x10


def _map(side: AgentSide, protection: int) -> None:
    """Puts other pages behind the side's addresses."""
    address = side.pages.ctypes.data
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    assert _libc.mmap(address, side.pages.nbytes, protection, flags, -1, 0) == address


def sleep(side: AgentSide) -> None:
    side.agent.unregister_memory()
    _map(side, 0)  # from now on any access ends the process


def wake(side: AgentSide) -> None:
    _map(side, mmap.PROT_READ | mmap.PROT_WRITE)
    side.agent.register_memory()


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
def test_pages_arrive_again_after_a_sleep(every_lane: AgentStage, who: str) -> None:
    prefill, decode = every_lane.pair()
    sleepers = {"prefill": [prefill], "decode": [decode], "both": [prefill, decode]}[who]
    transfer(prefill, decode)
    for side in sleepers:
        sleep(side)
        side.agent.unregister_memory()  # the second call does nothing
    for side in sleepers:
        wake(side)
        side.agent.register_memory()
    until(lambda: prefill.agent.live().peers == decode.agent.live().peers == 0)
    transfer(prefill, decode, "u")
    prefill.idle()
    decode.idle()


def test_sleeping_engine_refuses_requests_with_the_reason(
    pair: tuple[AgentSide, AgentSide], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    sleep(prefill)
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    until(lambda: "prefill engine prefill is asleep" in caplog.text)
    wake(prefill)
    decode.failed.clear()
    transfer(prefill, decode, "u")


def test_sleeping_engine_dials_no_engine_until_it_wakes(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect("waiting")
    sleep(decode)
    decode.agent.set_waiting([("waiting", prefill.address)])
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    assert decode.agent.live().peers == 0
    wake(decode)
    until(lambda: prefill.agent.live().peers == 1)  # for the waiting request


def test_a_sleeping_decode_engine_ends_its_loads(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    sleep(decode)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.compute(SOURCE[1:], first=1)
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    prefill.idle()
    decode.idle()
    wake(decode)
    assert not decode.pages.any(), "nothing is written behind the sleep"


def test_a_sleeping_prefill_engine_ends_what_it_sends(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE, forward=False)  # armed, and never computed
    until(lambda: prefill.agent.live().engine_transfers == 1)
    sleep(prefill)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    assert prefill.agent.live().engine_transfers == 0
    wake(prefill)
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    prefill.idle()
    decode.idle()


def test_pages_computed_before_a_sleep_are_sent_only_when_they_are_computed_again(
    pair: tuple[AgentSide, AgentSide],
) -> None:
    prefill, decode = pair
    prefill.expect()
    prefill.compute(SOURCE)
    sleep(prefill)
    wake(prefill)
    decode.reserve(prefill.address)
    prefill.agent.await_news(20.0)
    assert prefill.agent.take_reserved() == {"t"}
    assert prefill.agent.live().engine_transfers == 0, "the pages before the sleep are gone"
    prefill.compute((4, 5, 6))
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    assert decode.failed == []
    assert decode.holds("t", (4, 5, 6), TARGET)


def test_unfetched_prompt_is_given_up_at_sleep(
    pair: tuple[AgentSide, AgentSide], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    prefill.expect()
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "")
    sleep(prefill)
    prefill.wait(sent=["p-t"])
    wake(prefill)
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    assert "the prefill engine was asleep" in caplog.text


def test_sleep_waits_until_nothing_can_land(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    transfer(prefill, decode)
    engine = decode.agent._engine
    fence, deregister = engine.fence, engine.deregister_memory
    order: list[str] = []
    stuck = refuse(ErrorCode.TIMEOUT)
    monkeypatch.setattr(engine, "fence", stuck)
    monkeypatch.setattr(
        engine, "deregister_memory", lambda *a: (order.append("deregistered"), deregister(*a))
    )
    falling = threading.Thread(target=decode.agent.unregister_memory)
    falling.start()
    tries = stuck.left[0]  # type: ignore[attr-defined]
    until(lambda: stuck.left[0] < tries - 3)  # type: ignore[attr-defined]
    assert order == []

    def let(*arguments: Any) -> None:
        fence(*arguments)  # raises if it takes longer than the agent waits
        order.append("fenced")

    monkeypatch.setattr(engine, "fence", let)
    falling.join(PATIENCE)
    assert order == ["fenced", "deregistered"]


def test_memory_that_cannot_be_let_go_stays_in_use(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    transfer(prefill, decode)
    with monkeypatch.context() as patch:
        patch.setattr(decode.agent._engine, "deregister_memory", refuse(ErrorCode.TIMEOUT))
        with pytest.raises(AgentError, match=r"decode: the KV cache must stay mapped: .*as the test wants"):
            decode.agent.unregister_memory()
    until(lambda: prefill.agent.live().peers == 0)
    transfer(prefill, decode, "u")


def test_memory_that_cannot_be_registered_again_keeps_the_engine_asleep(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    sleep(prefill)
    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._engine, "register_memory", refuse(ErrorCode.REFUSED))
        with pytest.raises(AgentError, match="prefill: cannot register the KV cache again, restart"):
            wake(prefill)
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed.pop() == "d-t"
    prefill.agent.register_memory()
    transfer(prefill, decode, "u")


def test_an_engine_that_sleeps_can_be_closed(sim: AgentStage) -> None:
    prefill = sim.side(Role.PREFILL)
    prefill.expect(tokens=BLOCK)
    sleep(prefill)
    prefill.agent.close()
    assert not prefill.agent._thread.is_alive()


# --- The connector's hooks


def connector(
    words: list[object], refuses: Callable[[], None] = lambda: None, registers: bool = True
) -> WriteImmConnector:
    """A connector's worker side that records its calls."""

    def unregister() -> None:
        refuses()
        words.append("unregister")

    made: WriteImmConnector = object.__new__(WriteImmConnector)
    agent: Any = SimpleNamespace(
        unregister_memory=unregister, register_memory=lambda: words.append("register")
    )
    registrar: Any = SimpleNamespace(set_asleep=words.append) if registers else None
    reporter: Any = None
    made._running = RunningAgent(agent, Address("127.0.0.1", 5600), reporter, registrar, ExitStack())
    return made


@pytest.mark.parametrize("registers", [True, False])
def test_the_hooks_reach_the_agent_and_the_routers(registers: bool) -> None:
    words: list[object] = []
    made = connector(words, registers=registers)
    assert WriteImmConnector.supports_sleep_mode(None)
    made.unregister_kv_caches()
    made.restore_kv_caches()
    assert words == (["unregister", True, "register", False] if registers else ["unregister", "register"])


def test_refused_sleep_raises_and_is_not_reported_to_routers() -> None:
    def refuses() -> None:
        raise AgentError("must stay mapped")

    words: list[object] = []
    with pytest.raises(AgentError, match="must stay mapped"):
        connector(words, refuses).unregister_kv_caches()
    assert words == []
