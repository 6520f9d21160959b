"""What an operator writes, and what vLLM makes of it: settings, roles, versions, registration."""

import importlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timers import Timeouts
from kv_connector.vllm.connector import WriteImmConnector, data_parallel_rank, transfer_role
from kv_connector.vllm.internals import (
    RELEASES,
    UnsupportedVllm,
    adopt_vllm_logging,
    default_host,
    release_of,
)
from kv_connector.vllm.plugin import register
from kv_connector.vllm.settings import Settings, SettingsError, parse_settings


def test_nothing_has_to_be_set() -> None:
    settings = parse_settings({})
    assert settings.key() is None
    assert settings.host("10.0.0.5", None) == "127.0.0.1", "strangers are not let in unasked"
    assert settings == Settings()
    assert settings.control_port == 5600
    assert settings.for_device("cpu").providers == ("host", "tcp")
    assert settings.for_device("cuda").providers == ("nvlink",)
    assert not settings.allow_fallback
    assert settings.agent_timeouts() == Timeouts()


@pytest.mark.parametrize(
    ("device", "providers", "wrong", "advice"),
    [
        ("cuda", ["nvlink", "tcp"], "tcp cannot move a KV cache in a GPU's memory", "nvlink"),
        ("cuda", ["host"], "host cannot move a KV cache in a GPU's memory", "bounce"),
        ("cpu", ["nvlink", "host"], "nvlink cannot move a KV cache in CPU memory", "host"),
    ],
)
def test_a_lane_for_the_other_kind_of_memory_is_refused(
    device: str, providers: list[str], wrong: str, advice: str
) -> None:
    settings = parse_settings({"providers": providers})
    with pytest.raises(SettingsError, match=wrong) as refused:
        settings.for_device(device)
    assert advice in str(refused.value)


def test_lanes_for_either_kind_of_memory_are_kept() -> None:
    assert parse_settings({"providers": ["verbs"]}).for_device("cuda").providers == ("verbs",)


def test_everything_can_be_set() -> None:
    settings = parse_settings(
        {
            "control_host": "10.0.0.7",
            "control_port": 6000,
            "providers": ["tcp"],
            "allow_fallback": True,
            "data_host": "10.1.0.7",
            "spin_us": 5,
            "timeouts": {"hold": 30, "dead": 2.5},
            "allow_unauthenticated": True,
            "control_key_file": "key",
            "routers": ["10.0.0.1:8500", "[fd00::1]:8500"],
            "api_url": "http://10.0.0.7:8100",
        }
    )
    assert settings.router_addresses() == (Address("10.0.0.1", 8500), Address("fd00::1", 8500))
    assert settings.providers == ("tcp",)
    assert settings.agent_timeouts() == Timeouts(hold=30, dead=2.5)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"contol_port": 1}, "unknown field `contol_port`.*Valid keys: control_host, control_port"),
        ({"control_port": "5600"}, r"Expected `int`, got `str` - at `\$.control_port`"),
        ({"control_port": 70000}, "control_port"),
        ({"providers": []}, "providers"),
        ({"providers": "tcp"}, "Expected `array`"),
        ({"allow_fallback": 1}, "Expected `bool`"),
        ({"timeouts": {"hold": "30"}}, "Expected `float`"),
        ({"timeouts": {"hold": 0}}, "> 0"),
        ({"timeouts": {"hodl": 30}}, "unknown timeouts hodl. Valid: cancel, connect, dead"),
        ({"control_host": "0.0.0.0"}, "control_host '0.0.0.0' is no address that a peer can dial"),
        ({"control_host": ""}, "control_host '' is no address"),
        ({"control_host": "*"}, "is no address"),
        ({"data_host": "::"}, "data_host '::' is no address"),
        ({"routers": ["10.0.0.1"], "api_url": "http://h:1"}, "routers: '10.0.0.1' must be host:port"),
        ({"routers": ["10.0.0.1:8500"]}, "routers needs api_url"),
    ],
)
def test_what_cannot_be_used_is_named(extra: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        parse_settings(extra)


def test_strangers_are_let_in_only_on_demand(tmp_path: Path) -> None:
    key = ClusterKey.generate()
    key.write(tmp_path / "key")
    reachable = parse_settings({"control_host": "10.0.0.7"})
    with pytest.raises(SettingsError, match=r"kv-connector keygen .*allow_unauthenticated"):
        reachable.host("10.0.0.5", None)
    assert reachable.host("10.0.0.5", key) == "10.0.0.7"
    assert parse_settings({}).host("10.0.0.5", key) == "10.0.0.5"
    assert parse_settings({"control_host": "127.0.0.2"}).host("10.0.0.5", None) == "127.0.0.2"
    unsafe = parse_settings({"control_host": "10.0.0.7", "allow_unauthenticated": True})
    assert unsafe.host("10.0.0.5", None) == "10.0.0.7"
    assert parse_settings({"control_key_file": str(tmp_path / "key")}).key() == key
    with pytest.raises(SettingsError, match="control_key_file: there is no key file"):
        parse_settings({"control_key_file": str(tmp_path / "none")}).key()


def test_each_rank_has_its_port() -> None:
    settings = Settings(control_port=5600)
    ports = [
        settings.port(data_parallel_index=index, ranks=2, rank=rank)
        for index in range(3)
        for rank in range(2)
    ]
    assert ports == list(range(5600, 5606))


def test_a_port_of_the_kernels_choice_is_one_for_each_rank() -> None:
    assert [Settings(control_port=0).port(data_parallel_index=0, ranks=2, rank=rank) for rank in (0, 1)] == [
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("balancer", "moe", "index", "local", "rank"),
    [
        ({}, False, 1, 1, 1),
        ({}, True, 1, 1, 1),
        ({}, True, 3, 1, 3),  # a second host, without an API server
        ({"data_parallel_hybrid_lb": True}, True, 3, 1, 1),
        ({"data_parallel_hybrid_lb": True}, False, 3, 1, 1),
        ({"data_parallel_external_lb": True}, True, 3, 0, 0),
    ],
)
def test_a_core_has_the_rank_by_which_its_api_server_calls_it(
    balancer: dict[str, bool], moe: bool, index: int, local: int, rank: int
) -> None:
    parallel = ParallelConfig(data_parallel_size=4, data_parallel_size_local=2, is_moe_model=moe, **balancer)
    # As EngineCoreProc.run_engine_core does.
    parallel.data_parallel_rank_local, parallel.data_parallel_index = local, index
    if moe:
        parallel.data_parallel_rank = index
    else:
        parallel.reconfigure_for_independent_dp_rank()
    assert data_parallel_rank(parallel) == rank


def test_an_engine_without_data_parallelism_has_rank_0() -> None:
    assert data_parallel_rank(ParallelConfig()) == 0


def test_a_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"leaves no port for rank 1 .* 65536"):
        Settings(control_port=65535).port(data_parallel_index=0, ranks=2, rank=1)


@pytest.mark.parametrize("role", [None, "prefill"])
def test_other_roles_are_refused(role: str | None) -> None:
    with pytest.raises(SettingsError, match=r"kv_producer .*, kv_consumer .* or kv_both"):
        transfer_role(role)


def test_the_default_host_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.9.8.7")
    assert default_host() == "10.9.8.7"
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    assert default_host() == "127.0.0.1"


def test_this_vllm_is_supported() -> None:
    release_of(vllm.__version__)


@pytest.mark.parametrize(
    ("version", "module"),
    [("0.32.0", "release_0_32"), ("0.32.1+cu129", "release_0_32"), ("0.33.0", "release_0_33")],
)
def test_each_release_has_its_module(version: str, module: str) -> None:
    assert release_of(version) == module


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.330.0", "1.32.0", "dev"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    words = f"supports vLLM 0.32.x and 0.33.x, this is vLLM {version}. Install vllm==0.33"
    with pytest.raises(UnsupportedVllm, match=re.escape(words)):
        release_of(version)


def test_the_releases_describe_the_same_differences() -> None:
    modules = [importlib.import_module(f"kv_connector.vllm.{name}") for name in RELEASES.values()]
    names = [{name for name in vars(module) if name.isupper()} for module in modules]
    assert all(theirs == names[0] and theirs for theirs in names)


def test_the_plugin_registers_the_name_once() -> None:
    register()
    register()
    found = KVConnectorFactory.get_connector_class(
        KVTransferConfig(kv_connector="WriteImmConnector", kv_role="kv_both", kv_buffer_device="cpu")
    )
    assert found is WriteImmConnector
    assert KVConnectorFactory.get_connector_class_by_name("WriteImmConnector") is WriteImmConnector


def test_hybrid_models_keep_their_kv_cache_manager() -> None:
    assert supports_hma(WriteImmConnector)


def test_log_lines_go_where_vllms_go() -> None:
    ours, theirs = logging.getLogger("kv_connector"), logging.getLogger("vllm")
    before, handler = (ours.handlers, ours.level, ours.propagate, theirs.level), logging.NullHandler()
    theirs.addHandler(handler)
    theirs.setLevel(logging.DEBUG)
    ours.handlers = []
    try:
        adopt_vllm_logging()
        assert handler in ours.handlers
        assert logging.getLogger("kv_connector.vllm").isEnabledFor(logging.DEBUG)
    finally:
        theirs.removeHandler(handler)
        ours.handlers, ours.propagate = before[0], before[2]
        ours.setLevel(before[1])
        theirs.setLevel(before[3])
