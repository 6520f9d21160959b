"""The calls of Ray's orchestrator to the backend, against a stand-in with the interface of Ray 2.60."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kv_connector.protocol.actions import Address
from kv_connector.protocol.params import DecodeParams, PrefillParams, parse_params

TRANSFER = "ray.llm._internal.serve.engines.vllm.kv_transfer"
RANKS = 4

Backend = Callable[..., Any]


class Base:
    """The backend's base for one replica: the third of its deployment, unless it has a data-parallel rank."""

    requires_peer_binding = False
    concurrent_handoff = False

    def __init__(self, llm_config: Any) -> None:
        self.llm_config = llm_config

    @property
    def kv_transfer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.llm_config.engine_kwargs["kv_transfer_config"]
        return config

    def _compute_port_offset(self) -> int:
        rank: int | None = self.llm_config.engine_kwargs.get("data_parallel_rank")
        return 2 * RANKS if rank is None else rank

    def prepare_decode_request(self) -> None: ...
    def replica_metadata(self) -> None: ...


class Factory:
    registered: dict[str, str]

    @classmethod
    def is_registered(cls, name: str) -> bool:
        return name in cls.registered

    @classmethod
    def register_backend(cls, name: str, where: str) -> None:
        assert name not in cls.registered
        cls.registered[name] = where


def clamp(request: Any) -> None:
    request.max_tokens, request.stream = 1, False


class Request(SimpleNamespace):
    def model_copy(self, *, deep: bool) -> Request:
        assert deep
        return copy.deepcopy(self)


@pytest.fixture
def forget() -> Iterator[None]:
    """Modules that were imported with the stand-in for Ray."""
    yield
    for name in [name for name in sys.modules if name.startswith("kv_connector.ray")]:
        del sys.modules[name]


def pretend(monkeypatch: pytest.MonkeyPatch, base: type) -> None:
    monkeypatch.setattr(Factory, "registered", {}, raising=False)
    contents: dict[str, dict[str, Any]] = {
        "ray": {"__version__": "2.60.0"},
        f"{TRANSFER}.base": {"BaseConnectorBackend": base, "clamp_request_to_single_token": clamp},
        f"{TRANSFER}.factory": {"KVConnectorBackendFactory": Factory},
        "ray.serve.llm": {"build_pd_openai_app": lambda args: ("application", args)},
        "ray.util": {"get_node_ip_address": lambda: "10.0.0.7"},
    }
    for name in contents:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            module = ModuleType(parent)
            module.__path__ = []
            vars(module).update(contents.get(parent, {}))
            monkeypatch.setitem(sys.modules, parent, module)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, forget: None) -> Backend:
    pretend(monkeypatch, Base)
    module = importlib.import_module("kv_connector.ray.backend")

    def make(role: str, extra: dict[str, Any] | None = None, **engine_kwargs: Any) -> Any:
        transfer: dict[str, Any] = {"kv_connector": "WriteImmConnector", "kv_role": role}
        if extra is not None:
            transfer["kv_connector_extra_config"] = extra
        config = SimpleNamespace(
            engine_kwargs={"kv_transfer_config": transfer, **engine_kwargs},
            get_engine_config=lambda: SimpleNamespace(num_devices=RANKS),
        )
        made = module.WriteImmBackend(config)
        made.setup()
        return made

    return make


def settings(backend: Any) -> dict[str, Any]:
    found: dict[str, Any] = backend.kv_transfer_config["kv_connector_extra_config"]
    return found


def where(backend: Any) -> tuple[str, int]:
    told = backend.replica_metadata()
    return told["remote_host"], told["remote_port"]


@pytest.mark.parametrize(("role", "first"), [("kv_producer", 5600), ("kv_both", 5600), ("kv_consumer", 6600)])
def test_each_replica_has_its_ports(backend: Backend, role: str, first: int) -> None:
    made = backend(role)
    assert settings(made) == {"control_host": "10.0.0.7", "control_port": first + 2 * RANKS}
    assert where(made) == ("10.0.0.7", first + 2 * RANKS)


def test_the_operators_word_stands(backend: Backend) -> None:
    made = backend("kv_producer", {"control_host": "fd00::7", "control_port": 7000, "providers": ["tcp"]})
    assert settings(made) == {
        "control_host": "fd00::7",
        "control_port": 7000 + 2 * RANKS,
        "providers": ["tcp"],
    }


def test_decode_gets_the_first_of_several_addresses_when_ranks_span_nodes(backend: Backend) -> None:
    made = backend("kv_producer", {"control_host": None})
    assert settings(made)["control_host"] is None
    assert where(made) == ("10.0.0.7", 5600 + 2 * RANKS)


@pytest.mark.parametrize("extra", [None, {"control_host": None}])
def test_a_nodes_own_word_on_its_address_stands(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any] | None
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "192.168.0.7")
    assert where(backend("kv_producer", extra)) == ("192.168.0.7", 5600 + 2 * RANKS)


def test_a_data_parallel_replica_counts_from_the_first_ones_port_by_itself(backend: Backend) -> None:
    made = backend("kv_producer", data_parallel_rank=3)
    assert settings(made)["control_port"] == 5600
    assert where(made) == ("10.0.0.7", 5600 + 3 * RANKS)


def test_both_halves_mean_one_transfer(backend: Backend) -> None:
    prefill, decode = backend("kv_producer"), backend("kv_consumer")
    assert decode.requires_peer_binding
    assert decode.concurrent_handoff
    names = set()
    for _ in range(2):
        # A client may send transfer parameters, and may use the same id twice.
        request = Request(
            request_id="r",
            max_tokens=8,
            min_tokens=4,
            n=2,
            stream=True,
            kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.6.6.6", "remote_port": 1},
        )
        peer = prefill.replica_metadata()
        half_of_p = decode.prepare_prefill_request(request=request, peer=peer)
        half_of_d = decode.prepare_decode_request(request=request, peer=peer, prefill_response=None)
        assert (half_of_p.max_tokens, half_of_p.min_tokens, half_of_p.n, half_of_p.stream) == (1, 0, 1, False)
        assert (half_of_d.max_tokens, half_of_d.min_tokens, half_of_d.n, half_of_d.stream) == (8, 4, 2, True)
        of_p, of_d = (parse_params(half.kv_transfer_params) for half in (half_of_p, half_of_d))
        assert isinstance(of_p, PrefillParams)
        assert of_d == DecodeParams(str(of_p.transfer_id), Address("10.0.0.7", 5600 + 2 * RANKS))
        names.add(of_p.transfer_id)
    assert len(names) == 2


def test_prefill_engine_with_another_connector_is_named(backend: Backend) -> None:
    decode = backend("kv_consumer")
    request = Request(kv_transfer_params={"transfer_id": "t"})
    with pytest.raises(ValueError, match="must name WriteImmConnector"):
        decode.prepare_decode_request(request=request, peer={}, prefill_response=None)


def test_the_application_registers_the_backend_once(monkeypatch: pytest.MonkeyPatch, forget: None) -> None:
    pretend(monkeypatch, Base)
    app = importlib.import_module("kv_connector.ray.app")
    for _ in range(2):
        assert app.build_pd_app({"prefill_config": 1}) == ("application", {"prefill_config": 1})
    assert Factory.registered == {"WriteImmConnector": "kv_connector.ray.backend:WriteImmBackend"}


def test_a_ray_without_the_orchestrator_is_refused(monkeypatch: pytest.MonkeyPatch, forget: None) -> None:
    pretend(monkeypatch, type("Older", (), {"requires_peer_binding": False}))
    with pytest.raises(
        ImportError, match=r"Ray Serve LLM 2\.60: .* have no concurrent_handoff, prepare_decode"
    ):
        importlib.import_module("kv_connector.ray.backend")


def test_no_ray_is_named(monkeypatch: pytest.MonkeyPatch, forget: None) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"Ray Serve LLM 2\.60: .*examples/ray/README\.md names"):
        importlib.import_module("kv_connector.ray.app")
