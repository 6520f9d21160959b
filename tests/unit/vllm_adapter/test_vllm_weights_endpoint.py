"""The endpoint for weights: what it refuses before the start, and which API server runs the controller."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kv_connector.agent.settings import AgentSettings
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.vllm.weights.endpoint import WeightsEndpoint
from kv_connector.weights.mapping.geometry import Geometry
from kv_connector.weights.worker.receiver import ReceiverConfig, WeightReceiver

NOTHING = Geometry((), (), ())


def client(*, size: int = 2, local: int = 2, server: int = 0, servers: int = 1) -> SimpleNamespace:
    """vLLM's client of one of the API servers of an engine."""
    parallel = SimpleNamespace(
        data_parallel_size=size,
        data_parallel_size_local=local,
        world_size=1,
        _api_process_rank=server,
        _api_process_count=servers,
    )
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend="write_imm"),
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=parallel,
            load_config=SimpleNamespace(load_format="auto"),
        )
    )


def test_data_parallel_ranks_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such ranks would not be paused, or not be reached. vLLM counts those that it starts itself."""
    monkeypatch.setenv("KV_CONNECTOR_WEIGHTS", '{"control_port": 5800, "control_host": "127.0.0.1"}')
    with pytest.raises(ValueError, match=r"2 of 4 ranks run on its host\. Run all ranks on one host"):
        asyncio.run(WeightsEndpoint().init_state(client(size=4), SimpleNamespace(), None))


def test_the_first_of_several_api_servers_has_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts as many as there are data-parallel ranks, and ends the engine if one fails."""
    port, *workers = free_ports(3)
    receivers = [
        WeightReceiver(
            ReceiverConfig(f"weights/{rank}", Address("127.0.0.1", worker), ("tcp",)), lambda _: NOTHING
        )
        for rank, worker in enumerate(workers)
    ]
    monkeypatch.setenv("KV_CONNECTOR_WEIGHTS", f'{{"control_port": {port}, "control_host": "127.0.0.1"}}')
    firsts = [receiver.start() for receiver in receivers]
    monkeypatch.setattr(
        AgentSettings, "port", lambda self, *, data_parallel_index, **_: workers[data_parallel_index]
    )
    states = [SimpleNamespace() for _ in range(3)]

    async def start() -> list[bool]:
        for server, state in enumerate(states):
            await WeightsEndpoint().init_state(client(server=server, servers=3), state, None)
        found = [hasattr(state, "kv_connector_weights") for state in states]
        states[0].kv_connector_weights.close()
        return found

    try:
        assert asyncio.run(start()) == [True, False, False]
        assert [address.port for address in firsts] == workers
    finally:
        for receiver in receivers:
            receiver.close()


@pytest.mark.parametrize("server", [0, 1])
def test_an_engine_of_several_api_servers_is_not_seeded_at_its_start(
    server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other servers open their API at once."""
    monkeypatch.setenv(
        "KV_CONNECTOR_WEIGHTS", '{"control_host": "127.0.0.1", "seed_from": ["10.0.0.5:5800"]}'
    )
    with pytest.raises(ValueError, match=r"seed_from needs one API server.* 2: .*Add --api-server-count 1"):
        asyncio.run(WeightsEndpoint().init_state(client(server=server, servers=2), SimpleNamespace(), None))
