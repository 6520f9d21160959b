"""Registrations of a trainer's memory, which moves between versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from weight_engines import WeightEngine, drawn

from kv_connector.engine import ErrorCode, MemoryRange, TransferError
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import TensorSource


@pytest.fixture
def engine() -> Iterator[WeightEngine]:
    engine = WeightEngine(1)
    yield engine
    engine.close()


def registered(pusher: WeightPusher) -> int:
    """Returns how many regions the transfer engine of the pusher has, without its staging memory."""
    return pusher._engine.stats().regions - 1


def test_writer_deregisters_memory_of_freed_tensors(engine: WeightEngine) -> None:
    parameters = {name: torch.nn.Parameter(value) for name, value in drawn(1)}
    kept = []
    with WeightPusher(TensorSource(parameters.items()), [str(engine.address)]) as pusher:
        pusher.connect()
        pusher.push("1").wait("applied", 30)
        least = registered(pusher)
        assert least > 0
        for version in range(2, 6):
            # Allocated before the old memory is freed, so that each version lies elsewhere than the last.
            moved = {name: value.data.clone() for name, value in parameters.items()}
            kept += [torch.empty_like(value) for value in moved.values()]
            for name, value in moved.items():
                parameters[name].data = value
            del moved, value
            pusher.push(str(version)).wait("applied", 30)
        assert registered(pusher) == least


def test_writer_registers_memory_anew_that_comes_back_at_the_same_address(
    engine: WeightEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = dict(drawn(1))
    # Memory with a fixed address, like an allocation that was freed and made again.
    memory = {name: bytearray(value.numpy().tobytes()) for name, value in values.items()}

    def back(name: str) -> torch.Tensor:
        return torch.frombuffer(memory[name], dtype=torch.float32).view(values[name].shape)

    parameters = {name: torch.nn.Parameter(back(name)) for name in values}
    addresses = {parameter.data_ptr() for parameter in parameters.values()}
    with WeightPusher(TensorSource(parameters.items()), [str(engine.address)]) as pusher:
        steps: list[str] = []
        register, deregister = pusher._engine.register_ranges, pusher._engine.deregister_memory

        def registering(ranges: Sequence[MemoryRange]) -> list[int]:
            steps.extend("registers" for one in ranges if one.address in addresses)
            return register(ranges)

        def deregistering(regions: Sequence[int], timeout: float) -> None:
            steps.extend("deregisters" for _ in regions)
            deregister(regions, timeout)

        monkeypatch.setattr(pusher._engine, "register_ranges", registering)
        monkeypatch.setattr(pusher._engine, "deregister_memory", deregistering)
        pusher.connect()
        pusher.push("1").wait("applied", 30)
        found = steps.count("registers")
        assert steps == ["registers"] * found
        for name in parameters:
            parameters[name].data = torch.empty(0)  # offloaded
        for name in parameters:
            parameters[name].data = back(name)
        assert {parameter.data_ptr() for parameter in parameters.values()} == addresses
        pusher.push("2").wait("applied", 30)
        assert steps == ["registers"] * found + ["deregisters"] * found + ["registers"] * found


def test_release_leaves_no_memory_registered_and_the_next_push_sends(engine: WeightEngine) -> None:
    parameters = {name: torch.nn.Parameter(value) for name, value in drawn(1)}
    with WeightPusher(TensorSource(parameters.items()), [str(engine.address)]) as pusher:
        pusher.connect()
        pusher.push("1").wait("applied", 30)
        before = registered(pusher)
        assert before > 0
        pusher.release()
        assert registered(pusher) == 0
        pusher.push("2").wait("applied", 30)
        assert engine.served == ["2"]
        assert registered(pusher) == before


def test_writer_tries_again_to_deregister_what_was_still_in_use(
    engine: WeightEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {name: torch.nn.Parameter(value) for name, value in drawn(1)}
    with WeightPusher(TensorSource(parameters.items()), [str(engine.address)]) as pusher:
        pusher.connect()
        pusher.push("1").wait("applied", 30)

        def stuck(regions: Sequence[int], timeout: float) -> None:
            raise TransferError(ErrorCode.TIMEOUT, "", "", "deregister_memory", "still in use")

        with monkeypatch.context() as patched:
            patched.setattr(pusher._engine, "deregister_memory", stuck)
            with pytest.raises(TransferError, match="still in use"):
                pusher.release()
        before = registered(pusher)
        pusher.push("2").wait("applied", 30)  # with other regions
        assert engine.served == ["2"]
        assert registered(pusher) == before
