"""The agent starts, or explains what to change, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from typing import Any

import pytest
from agent_pairs import transfer
from agent_setup import AgentStage, until
from protocol_setup import layout, pairs

from kv_connector.agent.agent import Agent
from kv_connector.agent.config import AgentConfig, AgentError, PageMemory
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role

ANYWHERE = Address("127.0.0.1", 0)


def config(address: Address = ANYWHERE, **changes: Any) -> AgentConfig:
    base = AgentConfig("p0", Role.PREFILL, 0, 1, address, pairs(), layout(), providers=("sim",))
    return replace(base, **changes)


def test_a_port_in_use_names_the_setting(sim: AgentStage) -> None:
    taken = sim.side(Role.PREFILL).address
    memory = bytearray(layout().bytes_per_region()[0])
    agent = Agent(config(taken), memory_of(memory))
    words = r"p0/0: cannot listen on 127\.0\.0\.1:\d+: .* Set control_port to a free"
    with pytest.raises(AgentError, match=words):
        agent.start()


def test_an_address_of_another_machine_names_the_setting() -> None:
    memory = bytearray(layout().bytes_per_region()[0])
    agent = Agent(config(Address("203.0.113.1", 0)), memory_of(memory))
    with pytest.raises(AgentError, match="Set control_host"):
        agent.start()


def memory_of(buffer: bytearray) -> list[PageMemory]:
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return [PageMemory(address, len(buffer))]


def test_an_unknown_provider_is_named() -> None:
    memory = bytearray(layout().bytes_per_region()[0])
    with pytest.raises(AgentError, match="pigeon"):
        Agent(config(providers=("pigeon",)), memory_of(memory))


def test_memory_that_is_too_small_is_named() -> None:
    need = layout().bytes_per_region()[0]
    with pytest.raises(AgentError, match=f"memory region 0 has {need - 1} bytes, its layers need {need}"):
        Agent(config(), memory_of(bytearray(need - 1)))


def test_an_agent_that_never_started_closes() -> None:
    memory = bytearray(layout().bytes_per_region()[0])
    agent = Agent(config(), memory_of(memory))
    agent.preempt(["t"])
    agent.close()
    agent.close()
    agent.release("t", Address("127.0.0.1", 1))  # the agent is closed, and the call does nothing
    assert agent.live().idle


def test_closing_leaves_no_thread(sim: AgentStage) -> None:
    prefill, decode = sim.pair()
    transfer(prefill, decode)
    prefill.agent.close()
    decode.agent.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name in ("kv-agent-prefill", "kv-agent-decode")]


def test_an_idle_agent_sleeps(sim: AgentStage) -> None:
    """Without peers there is no deadline: the thread waits until it is woken."""
    prefill = sim.side(Role.PREFILL)
    prefill.agent.request_finished("nobody", True, "")
    until(lambda: prefill.agent.live().commands == 0)
    assert prefill.agent._thread._timeout() is None
