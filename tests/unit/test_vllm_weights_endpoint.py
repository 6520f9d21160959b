"""What the weights' endpoint refuses before anything is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kv_connector.vllm.weights_endpoint import WeightsEndpoint


def test_data_parallel_ranks_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not be paused, or not be reached. vLLM counts those that it starts itself."""
    monkeypatch.setenv("KV_CONNECTOR_WEIGHTS", '{"control_port": 5800, "control_host": "127.0.0.1"}')
    parallel = SimpleNamespace(data_parallel_size=4, data_parallel_size_local=2, world_size=1)
    config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend="write_imm"),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=parallel,
    )
    with pytest.raises(ValueError, match=r"has 2 of 4 ranks beside it: have them all on one host"):
        asyncio.run(
            WeightsEndpoint().init_state(SimpleNamespace(vllm_config=config), SimpleNamespace(), None)
        )
