"""The entry point that vLLM calls, with its registrations at vLLM and at Dynamo's worker."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.ray.ray_env import get_env_vars_to_copy

from kv_connector.vllm.plugin import CONNECTOR, register

PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
PROTOCOLS = "dynamo.vllm.kv_connector_protocols"


class NixlConnectorProtocol:
    """A class like Dynamo's, whose protocol passes P's answer to D."""


class Own(NixlConnectorProtocol):
    """The protocol of a Dynamo that knows the connector."""


def protocols(table: dict[str, type]) -> ModuleType:
    module = ModuleType(PROTOCOLS)
    module.KV_CONNECTOR_PROTOCOLS = table  # type: ignore[attr-defined]
    module.NixlConnectorProtocol = NixlConnectorProtocol  # type: ignore[attr-defined]
    return module


def test_vllm_knows_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, PROTOCOLS, raising=False)
    for _ in range(2):
        register()
        assert CONNECTOR in KVConnectorFactory._registry
    assert PROTOCOLS not in sys.modules


@pytest.mark.parametrize("given", ["", "MINE_,", "MINE_,KV_CONNECTOR_"])
def test_register_has_vllm_copy_the_variables_to_ray_workers(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("KV_CONNECTOR_WEIGHTS", '{"control_port": 5900}')
    monkeypatch.setenv("MINE_OWN", "1")
    monkeypatch.setenv(PREFIXES, given)
    for _ in range(2):
        register()
    copied = get_env_vars_to_copy()
    assert "KV_CONNECTOR_WEIGHTS" in copied
    assert ("MINE_OWN" in copied) == bool(given)
    assert os.environ[PREFIXES].count("KV_CONNECTOR_") == 1


def test_dynamos_worker_knows_it_as_one_like_nixls(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, type] = {"NixlConnector": NixlConnectorProtocol}
    monkeypatch.setitem(sys.modules, PROTOCOLS, protocols(table))
    for _ in range(2):
        register()
    assert table == {"NixlConnector": NixlConnectorProtocol, CONNECTOR: NixlConnectorProtocol}


def test_existing_dynamo_entry_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, type] = {CONNECTOR: Own}
    monkeypatch.setitem(sys.modules, PROTOCOLS, protocols(table))
    register()
    assert table == {CONNECTOR: Own}
