"""Models that an engine refuses to update, and drafters that an update does not reach."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_connector.vllm.weights import backend
from kv_connector.vllm.weights.loaded_model import LoadedModel
from kv_connector.weights.worker import start_receiver


class Runner(torch.nn.Module):
    """Experts whose first forward pass keeps the gates as one matrix, or does not."""

    def __init__(self, fuses: bool) -> None:
        super().__init__()
        self._fse_fuse_gate = fuses


class Model(torch.nn.Module):
    def __init__(self, fuses: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Runner(fuses)])


class Derives(Model):
    def process_weights_after_loading(self) -> None: ...


def config(speculative: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto"),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        parallel_config=SimpleNamespace(enable_eplb=False, data_parallel_index=0, rank=0, world_size=1),
        model_config=SimpleNamespace(enable_sleep_mode=False, quantization=None),
        lora_config=None,
        quant_config=None,
        speculative_config=speculative,
    )


def loaded(model: torch.nn.Module, speculative: Any = None) -> LoadedModel:
    return LoadedModel(model, config(speculative), torch.device("cpu"))


def test_model_that_derives_values_outside_of_layers_is_refused() -> None:
    assert loaded(Model()).refusal() is None
    refusal = loaded(Derives()).refusal()
    assert refusal is not None
    assert refusal.startswith("Derives.process_weights_after_loading() computes values from weights")
    refusal = loaded(Model(fuses=True)).refusal()
    assert refusal is not None
    assert refusal.startswith("layers.0 (Runner, fused gates) computes values from weights")


TARGET = SimpleNamespace()


def speculative(method: str, draft: Any) -> SimpleNamespace:
    return SimpleNamespace(method=method, draft_model_config=draft, target_model_config=TARGET)


@pytest.mark.parametrize(
    ("speculative", "drafter"),
    [
        (None, None),
        (speculative("ngram", TARGET), None),
        (speculative("suffix", None), None),
        (speculative("extract_hidden_states", SimpleNamespace()), None),
        (speculative("eagle3", SimpleNamespace()), "eagle3"),
        (speculative("mtp", SimpleNamespace()), "mtp"),
    ],
)
def test_engine_warns_at_start_of_a_draft_model_that_keeps_its_weights(
    speculative: Any,
    drafter: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KV_CONNECTOR_WEIGHTS", '{"control_host": "127.0.0.1", "control_port": 5800}')

    class Receiver:
        """A stand-in for a receiver that listens."""

        def __init__(self, *_: object) -> None: ...
        def start(self) -> SimpleNamespace:
            return SimpleNamespace(host="127.0.0.1", port=5801)

        def set_workers(self, workers: object) -> None: ...

    gather: Callable[[Any], list[Any]] = lambda address: [address]  # noqa: E731
    monkeypatch.setattr(start_receiver, "WeightReceiver", Receiver)
    monkeypatch.setattr(backend, "gather_from_workers", gather)
    monkeypatch.setattr(backend, "adopt_vllm_logging", lambda: None)
    with caplog.at_level(logging.WARNING, "kv_connector"):
        backend.WriteImmWeightTransferEngine(
            SimpleNamespace(), config(speculative), torch.device("cpu"), Model()
        )
    warned = [record.getMessage() for record in caplog.records if "draft model" in record.getMessage()]
    assert warned == (
        []
        if drafter is None
        else [
            f"weights/0: updates do not change the draft model ({drafter}), which keeps its weights. "
            "Fewer of its tokens are accepted with each update"
        ]
    )
