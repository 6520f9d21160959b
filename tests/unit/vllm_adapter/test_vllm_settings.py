"""The operator's settings and what vLLM makes of them: roles, versions, registration."""

import dataclasses
import importlib
import logging
import re
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
import vllm
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma

from kv_connector.agent.settings import AgentSettings, SettingsError
from kv_connector.agent.start import WorkerInfo
from kv_connector.cli.config.files import POLICIES, TRANSFER_KEYS
from kv_connector.engine.rank_placement import Device
from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.wire.messages import Role
from kv_connector.vllm.connector import WriteImmConnector, data_parallel_rank, transfer_role
from kv_connector.vllm.internals import RELEASES, UnsupportedVllm, release_of
from kv_connector.vllm.model.configuration import FORCED_TOKEN, forces_tokens
from kv_connector.vllm.plugin import register
from kv_connector.vllm.process import adopt_vllm_logging, default_host


def test_wrong_setting_is_reported_with_its_place() -> None:
    config = VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector="WriteImmConnector",
            kv_connector_module_path="kv_connector.vllm.connector",
            kv_role="kv_both",
            kv_buffer_device="cpu",
            kv_connector_extra_config={"contol_port": 1},
        )
    )
    with pytest.raises(SettingsError, match=r"^kv_connector_extra_config: .*unknown field `contol_port`"):
        WriteImmConnector(config, KVConnectorRole.WORKER, None)


def test_a_wrong_setting_is_refused_before_the_model_loads() -> None:
    """vLLM makes its configuration first, and queries the use of CUDA graphs there."""
    with pytest.raises(SettingsError, match=r"^kv_connector_extra_config: .*'localhost' is a name"):
        WriteImmConnector.requires_piecewise_for_cudagraph({"control_host": "localhost"})
    assert WriteImmConnector.requires_piecewise_for_cudagraph({"control_host": "10.0.0.5"}) is False


def test_config_check_knows_what_stands_beside_our_settings() -> None:
    assert set(TRANSFER_KEYS) == {field.name for field in dataclasses.fields(KVTransferConfig)}
    assert set(POLICIES) == set(get_args(get_type_hints(KVTransferConfig)["kv_load_failure_policy"]))


@pytest.mark.parametrize(
    ("drafts", "installed", "forces"),
    [(None, True, True), (None, False, False), ("a drafter", True, False)],
)
def test_a_token_is_forced_where_vllm_loads_the_plugin_for_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    drafts: str | None,
    installed: bool,
    forces: bool,
) -> None:
    points = [EntryPoint("kv_connector", FORCED_TOKEN, "vllm.logits_processors")] if installed else []
    monkeypatch.setattr("kv_connector.vllm.model.configuration.entry_points", lambda group: points)
    assert forces_tokens(SimpleNamespace(speculative_config=drafts)) is forces
    assert ("is not installed" in caplog.text) is not installed


@pytest.mark.parametrize("compare", [True, False])
def test_so_is_one_that_does_not_fit_the_worker(compare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = []
    checkpoint = Checkpoint("", "3f2a")
    answers = {"kv_layout": (KvLayout((), ()), ()), "rank_fingerprint": None, "loaded_checkpoint": checkpoint}

    def start(settings: AgentSettings, info: WorkerInfo) -> None:
        infos.append(info)
        raise SettingsError("providers: nvlink cannot move it")

    for name, answer in answers.items():
        monkeypatch.setattr(f"kv_connector.vllm.connector.{name}", lambda *_, answer=answer: answer)
    monkeypatch.setattr("kv_connector.vllm.connector.pipeline_and_tensor_parallel_rank", lambda: (1, 1))
    monkeypatch.setattr("kv_connector.vllm.connector.start", start)
    made: WriteImmConnector = object.__new__(WriteImmConnector)
    made._settings = AgentSettings(compare_checkpoints=compare)
    made._transfer_role, made._engine_id = Role.DECODE, "engine"
    made._early_tokens, made._idle, made._prefixes = True, None, "key"
    made._borrows = made._prefetches = True
    made._keeps_answers = False
    parallel = ParallelConfig(
        tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=4, data_parallel_hybrid_lb=True
    )
    parallel.data_parallel_rank_local, parallel.data_parallel_index = 1, 3  # the second of a second host
    made._vllm_config, made._kv_cache_config = VllmConfig(), None
    made._vllm_config.parallel_config = parallel
    with pytest.raises(SettingsError, match=r"^kv_connector_extra_config: providers: nvlink cannot move"):
        made.register_kv_caches({"layer": torch.zeros(1)})
    (info,) = infos
    assert (info.engine_id, info.role, info.device) == ("engine", Role.DECODE, Device("cpu"))
    assert (info.rank, info.ranks, info.data_parallel_index, info.data_parallel_rank) == (3, 4, 3, 1)
    assert (info.stage, info.early_tokens) == (1, True)
    assert (info.prefixes, info.borrows, info.prefetches, info.keeps_answers) == ("key", True, True, False)
    assert info.checkpoint == (checkpoint if compare else None)


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
    # EngineCoreProc.run_engine_core sets them so.
    parallel.data_parallel_rank_local, parallel.data_parallel_index = local, index
    if moe:
        parallel.data_parallel_rank = index
    else:
        parallel.reconfigure_for_independent_dp_rank()
    assert data_parallel_rank(parallel) == rank


def test_an_engine_without_data_parallelism_has_rank_0() -> None:
    assert data_parallel_rank(ParallelConfig()) == 0


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
    words = f"supports vLLM 0.32.x and 0.33.x, but vLLM {version} is installed. Install vllm==0.33"
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
