"""Runs vLLM's own tests of KV connectors with WriteImmConnector in place of NIXL's connector.

    python scripts/upstream_tests.py PATH

PATH is a source tree (a checkout, or an unpacked sdist) of the installed vLLM release. Nothing is fetched,
and nothing is written outside a temporary folder. Exits with status 1 unless each test passes, or is in
NOT_APPLICABLE and fails as stated there.

The assertions of the tests are unchanged. Only their set-up is adapted:

- a configuration names our connector, in both roles (NIXL's has none), and a local model;
- the connector receives its workers' address, as from the engine core before the first request;
- a request that loads names its transfer;
- NIXL's P names its blocks to D, and ours names them to its own workers: the test finds these in the place of
  NIXL's;
- a mock of the connector passes each hook that its test does not script on to ours, and the requests of such
  tests load;
- the recorder around vLLM's ExampleConnector is put around ours, with a mock as its worker side, which would
  need the KV caches of an engine.

Two checks are added. If a test finds the scheduler empty, our connector's bookkeeping must be empty too. And
our log must have no warning, because a failing hook is reported only there.
"""
# ruff: noqa: T201  (its output is a report)

from __future__ import annotations

import argparse
import copy
import fnmatch
import functools
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

FOLDER = Path("tests/v1/kv_connector/unit")
HELPERS = ("utils.py", "conftest.py")
FILES = (
    "test_remote_prefill_lifecycle.py",
    "test_remote_decode_lifecycle.py",
    "test_kv_connector_lifecycle.py",
    "test_kv_load_failure_recovery.py",
    "test_invalid_blocks_correctness.py",
    "test_cache_pollution_prevention.py",
    "test_error_propagation.py",
    "test_output_aggregator.py",
)

# By test, without its parameters: text of the error with which it must fail, and why it cannot apply.
NOT_APPLICABLE = {
    "test_remote_prefill_lifecycle.py::test_basic_lifecycle": (
        ".num_computed_tokens",
        "asserts that a load counts every token of the prompt; ours leaves the last one, which vLLM computes "
        "again in any case, to vLLM. test_full_block_prompt takes the same steps",
    ),
    "test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba": (
        "WriteImmConnector cannot transfer KV cache group 1 (MambaSpec)",
        "state-space layers: such an engine does not start, and says why",
    ),
    "test_remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_mamba_spec_blocks": (
        "WriteImmConnector cannot transfer KV cache group 1 (MambaSpec)",
        "state-space layers: such an engine does not start, and says why",
    ),
}

# Files of the same folder in which no connector can replace NIXL's.
OTHERS = {
    "test_nixl_*": "NIXL's classes and messages",
    "test_bidirectional_kv_transfer.py": "NIXL's loads from D to P, which ours does not have",
    "test_tp_mapping.py": "NIXL's ranks",
    "test_transfer_topology_sharded.py": "NIXL's ranks",
    "test_mooncake_*": "Mooncake's classes",
    "test_moriio_*": "MoRIIO's classes",
    "test_lmcache_*": "LMCache's classes",
    "test_hf3fs_*": "HF3FS's classes",
    "test_hisparse_*": "HiSparse's classes",
    "test_flexkv_*": "FlexKV's classes",
    "test_umbp_*": "UMBP's classes",
    "test_*offload*": "classes of the connectors that offload",
    "test_hidden_states_*": "the connector of hidden states",
    "test_decode_bench_*": "the connector that makes up pages",
    "test_example_*": "the example's files",
    "test_multi_connector.py": "MultiConnector over vLLM's example, and NIXL's statistics",
    "test_config.py": "vLLM's configuration: makes no connector",
    "test_hma_auto_config.py": "vLLM's configuration: makes no connector",
    "test_handshake_pp_aggregation.py": "vLLM's engine core, over connectors of the test's own",
    "test_scheduler_kv_connector_override.py": "vLLM's scheduler, over a connector of the test's own",
}

# facebook/opt-125m, which the tests name. They need its configuration only.
MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
SETTINGS = {"control_host": "127.0.0.1", "control_port": 5600}


def wrap(module: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replaces a function by one that takes the original as its first argument."""

    def install(wrapper: Callable[..., Any]) -> None:
        original = getattr(module, name)
        setattr(module, name, functools.wraps(original)(functools.partial(wrapper, original)))

    return install


def show_blocks(connector: Any) -> None:
    """Adds the blocks that the connector names to its workers to its answer for a prompt.

    They are added as ``remote_block_ids``.
    """
    named: dict[str, list[list[int]]] = {}

    @wrap(connector, "build_connector_meta")
    def build_connector_meta(original: Callable[..., Any], scheduler_output: Any) -> Any:
        metadata = original(scheduler_output)
        for pages in metadata.new_pages:
            groups = named.setdefault(pages.transfer_id, [[] for _ in pages.groups])
            for blocks, group in zip(groups, pages.groups, strict=True):
                blocks.extend(group.blocks)
        return metadata

    @wrap(connector, "request_finished_all_groups")
    def request_finished_all_groups(original: Callable[..., Any], *arguments: Any) -> Any:
        held, params = original(*arguments)
        if params is not None:
            params["remote_block_ids"] = tuple(named[params["transfer_id"]])
        return held, params


def adapt(helpers: Any, model: Path) -> None:
    """Makes the tests' helpers set our connector up. Call it before the tests are imported."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

    from kv_connector.protocol.pages.layout import KvLayout
    from kv_connector.protocol.wire.messages import Rank
    from kv_connector.vllm.connector import WriteImmConnector
    from kv_connector.vllm.internals import KVConnectorTransferResults
    from kv_connector.vllm.metadata import DescribedRank, StepMetadata

    connectors: list[Any] = []

    @wrap(helpers, "create_vllm_config")
    def create_vllm_config(original: Callable[..., Any], **options: Any) -> Any:
        ours = {
            "kv_connector": "WriteImmConnector",
            "kv_connector_module_path": WriteImmConnector.__module__,
            "kv_role": "kv_both",
            "kv_connector_extra_config": SETTINGS,
        }
        return original(**{"model": str(model), **({} if "kv_connector" in options else ours), **options})

    @wrap(helpers, "create_scheduler")
    def create_scheduler(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        scheduler = original(*arguments, **options)
        connector = scheduler.connector
        assert isinstance(connector, WriteImmConnector)
        rank = DescribedRank(Rank("127.0.0.1", 5600, 0, KvLayout((), ())))
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): rank})
        show_blocks(connector)
        connectors.append(connector)
        return scheduler

    @wrap(helpers, "create_request")
    def create_request(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        request = original(*arguments, **options)
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            request.kv_transfer_params["transfer_id"] = f"transfer of {request.request_id}"
        return request

    @wrap(helpers, "create_mock_connector")
    def create_mock_connector(original: Callable[..., Any]) -> Any:
        """Returns a mock, which the test puts into the scheduler that was made last."""
        mock = Mock(wraps=connectors[-1])
        mock.get_external_cache_hit_sources = original().get_external_cache_hit_sources
        return mock

    @wrap(helpers, "assert_scheduler_empty")
    def assert_scheduler_empty(original: Callable[..., Any], scheduler: Any) -> None:
        original(scheduler)
        assert scheduler.reset_prefix_cache(reset_connector=True), "the connector's books are not empty"

    def example(config: Any, role: Any, kv_cache_config: Any) -> Any:
        config = copy.copy(config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_connector_extra_config = SETTINGS
        connector = WriteImmConnector(config, role, kv_cache_config)
        connector.worker = Mock(
            **{"transfer_results.return_value": KVConnectorTransferResults(), "reserved.return_value": None}
        )
        return connector

    helpers.ExampleConnector = example
    example_connector.ExampleConnectorMetadata = StepMetadata  # type: ignore[misc]


class Plugin(logging.Handler):
    """Distinguishes inapplicable tests from failures, checks our log, and counts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._complaints: list[str] = []
        self.unused = set(NOT_APPLICABLE)
        self.outcomes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """Number of tests by file and outcome."""

    def emit(self, record: logging.LogRecord) -> None:
        self._complaints.append(self.format(record))

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for module in {item.module for item in items}:
            if hasattr(module, "create_mock_connector"):
                module.create_request = functools.partial(module.create_request, do_remote_prefill=True)

    def pytest_runtest_logstart(self) -> None:
        self._complaints.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Function) -> Generator[None]:
        test = f"{item.path.name}::{item.originalname}"
        error, reason = NOT_APPLICABLE.get(test, ("", ""))
        self.unused.discard(test)
        try:
            yield
        except Exception as failure:
            if reason and error in str(failure):
                pytest.xfail(reason)
            raise
        if reason:
            pytest.fail("passes, and stands in NOT_APPLICABLE")
        if self._complaints:
            pytest.fail("the connector complains: " + "\n".join(self._complaints))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome = "not applicable" if hasattr(report, "wasxfail") else report.outcome
            self.outcomes[Path(report.fspath).name][outcome] += 1


def copy_tests(tree: Path, target: Path) -> Path:
    """Copies the wanted tests into packages of the same names, from which they import their helpers."""
    (target / FOLDER).mkdir(parents=True)
    for name in HELPERS + FILES:
        shutil.copy(tree / FOLDER / name, target / FOLDER / name)
    for package in (FOLDER, *FOLDER.parents[:-1]):
        (target / package / "__init__.py").touch()
    (target / "pytest.ini").write_text("[pytest]\nmarkers = cpu_test: runs without a GPU\n")
    return target / FOLDER


def unknown_files(tree: Path) -> list[str]:
    """Returns tests of this release that are neither listed as applicable nor as inapplicable."""
    return [
        path.name
        for path in sorted((tree / FOLDER).glob("test_*.py"))
        if path.name not in FILES and not any(fnmatch.fnmatch(path.name, pattern) for pattern in OTHERS)
    ]


def print_table(tree: Path, outcomes: dict[str, dict[str, int]]) -> None:
    columns = ("passed", "not applicable", "failed", "skipped")
    print(f"\n{'file':38}{''.join(f'{column:>16}' for column in ('tests', *columns))}")
    for name in FILES:
        counts = outcomes[name]
        cells = (sum(counts.values()), *(counts[column] for column in columns))
        print(f"{name:38}{''.join(f'{cell:16}' for cell in cells)}")
    print("\nnot applicable:")
    for test, (_, reason) in NOT_APPLICABLE.items():
        print(f"  {test}: {reason}")
    print("\nnot run:")
    for pattern, reason in OTHERS.items():
        if found := len(list((tree / FOLDER).glob(pattern))):
            print(f"  {pattern} ({found} {'file' if found == 1 else 'files'}): {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "tree", type=Path, metavar="PATH", help="a source tree of the vLLM that this Python has"
    )
    tree: Path = parser.parse_args().tree.resolve()
    if missing := [name for name in HELPERS + FILES if not (tree / FOLDER / name).is_file()]:
        parser.error(
            f"{tree / FOLDER} lacks {', '.join(missing)}: is this a source tree of vLLM, with its tests?"
        )

    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # nothing is computed: any wheel works, on any machine
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tests = copy_tests(tree, root)
        model = root / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        sys.path.insert(0, str(root))
        adapt(importlib.import_module(".".join((*FOLDER.parts, "utils"))), model)
        plugin = Plugin()
        logging.getLogger("kv_connector").addHandler(plugin)
        options = ["-q", "--disable-plugin-autoload", "-p", "no:cacheprovider"]
        status = pytest.main(
            [*options, "--rootdir", folder, "--config-file", str(root / "pytest.ini"), str(tests)],
            plugins=[plugin],
        )
    import vllm

    print(f"\nvLLM {vllm.__version__}")
    print_table(tree, plugin.outcomes)
    problems = [f"{test} stands in NOT_APPLICABLE and is not there" for test in sorted(plugin.unused)]
    problems += [f"{name} has skipped tests" for name in FILES if plugin.outcomes[name]["skipped"]]
    problems += [f"{name} is new: does it apply? See FILES and OTHERS" for name in unknown_files(tree)]
    for problem in problems:
        print(f"\nupstream_tests: {problem}")
    return 1 if status or problems else 0


if __name__ == "__main__":
    sys.exit(main())
