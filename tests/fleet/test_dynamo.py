"""Dynamo's table of connectors, loaded from its file: the rest of Dynamo does not import with this vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace

import pytest

from kv_connector.protocol.actions import Address
from kv_connector.protocol.params import DecodeParams, PrefillParams, parse_params
from kv_connector.vllm.plugin import CONNECTOR, register

MODULE = "dynamo.vllm.kv_connector_protocols"


def test_dynamo_gives_both_engines_the_fields_that_the_connector_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = importlib.metadata.distribution("ai-dynamo").locate_file(MODULE.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(MODULE, str(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, MODULE, module)
    spec.loader.exec_module(module)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=CONNECTOR))
    with pytest.raises(ValueError, match="Unsupported kv_connector"):
        module.make_kv_connector_protocol(config)

    register()
    protocol = module.make_kv_connector_protocol(config)
    assert parse_params(protocol.prefill_request_kv_transfer_params()) == PrefillParams(None, serial=False)
    answer = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.0.0.1", "remote_port": 5600}
    params = protocol.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=answer))
    assert parse_params(params) == DecodeParams("t", Address("10.0.0.1", 5600))
