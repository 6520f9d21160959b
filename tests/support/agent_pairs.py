"""Two agents connected over one lane, and a complete transfer: the setup of the agent tests and the sleep
tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_setup import PATIENCE, AgentSide, AgentStage, stage

from kv_connector.engine import ErrorCode, TransferError

SOURCE, TARGET = (1, 2, 3), (11, 12, 13)


@pytest.fixture(params=["sim", "tcp", "host"])
def every_lane(request: pytest.FixtureRequest) -> Iterator[AgentStage]:
    with stage(request.param) as made:
        yield made


@pytest.fixture
def sim() -> Iterator[AgentStage]:
    with stage("sim") as made:
        yield made


@pytest.fixture
def pair(sim: AgentStage) -> tuple[AgentSide, AgentSide]:
    return sim.pair()


def refuse(code: ErrorCode, times: int = 1 << 30) -> Callable[..., Any]:
    """Returns a stand-in for an engine operation that fails the given number of times."""
    left = [times]

    def operation(*_: object, **__: object) -> None:
        left[0] -= 1
        raise TransferError(code, "sim", "peer", "operation", "as the test wants it")

    operation.left = left  # type: ignore[attr-defined]
    return operation


def transfer(prefill: AgentSide, decode: AgentSide, name: str = "t") -> None:
    """Runs one transfer from reservation to end, without faults."""
    prefill.expect(name)
    decode.reserve(prefill.address, transfer=name)
    prefill.compute(SOURCE, transfer=name)
    prefill.agent.request_finished(name, True, "")
    decode.wait(received=[f"d-{name}"])
    prefill.wait(sent=[f"p-{name}"])
    assert decode.failed == []
    assert decode.holds(name, SOURCE, TARGET)


def hold(side: AgentSide) -> threading.Event:
    """Stops the agent's thread, which reads messages before commands, until the event is set."""
    stopped, go = threading.Event(), threading.Event()

    def wait(_: float) -> tuple[()]:
        stopped.set()
        assert go.wait(PATIENCE)
        return ()

    side.agent._thread.submit(wait)
    assert stopped.wait(PATIENCE)
    return go


def transfer_again(prefill: AgentSide, decode: AgentSide) -> None:
    """Runs transfers until one succeeds after the two sides have reconnected."""
    decode.failed.clear()
    transfer(prefill, decode, "again")
