"""`kv-connector bench moe` on a machine without GPUs, and its options."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from command_line import invoke, one_line

from kv_connector.bench import moe
from kv_connector.bench.moe import OURS, ExchangeShape, ExpertsPlan, ExpertsWorkload
from kv_connector.bench.tables import make_console
from kv_connector.cli.bench import app
from kv_connector.moe import gpus
from kv_connector.moe.gpus import Gpus


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: None)


def test_bench_moe_measures_the_connector_and_gloo_over_host_memory(no_gpus: None, tmp_path: Path) -> None:
    file = tmp_path / "results"
    arguments = "--hidden", "256", "--tokens", "3,8", "--iterations", "2", "--json", str(file)
    status, output = invoke(app, "moe", *arguments)
    assert status == 0, output
    assert "256 x 3" in output
    first, *records = [json.loads(line) for line in file.read_text().splitlines()]
    assert first["settings"]["ranks"] == "2, a process each, on host memory"
    assert {(one["contestant"], one["tokens"]) for one in records} == {
        (name, tokens) for name in (OURS, "gloo") for tokens in (3, 8)
    }
    for one in records:
        assert (one["type"], one["memory"], one["ranks"], one["hidden"]) == ("moe", "host", 2, 256)
        assert len(one["microseconds"]) == 4  # two turns
        assert min(one["microseconds"]) > 0
    assert not multiprocessing.active_children()


def test_bench_moe_reports_a_rank_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    workload = ExpertsWorkload(2, (ExchangeShape(12, 1),), top_k=1, experts=2, iterations=1)
    assert not moe.run(ExpertsPlan(workload, gpu=False, json=None), make_console())
    assert "hidden is 12. It must be a multiple of 8" in capsys.readouterr().out
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hidden", "100"), "--hidden: every number must be a multiple of 8"),
        (("--tokens", "0"), "--tokens: every number must be a multiple of 1"),
        (("--tokens", "many"), "'many' is not a list of numbers"),
        (("--top-k", "4", "--experts", "2"), "--top-k: 4 of 2 experts"),
    ],
)
def test_bench_moe_refuses_options_by_name(no_gpus: None, arguments: tuple[str, ...], words: str) -> None:
    status, output = invoke(app, "moe", *arguments)
    assert status == 2
    assert words in one_line(output)


def test_bench_moe_refuses_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: Gpus(2, (), ()))
    status, output = invoke(app, "moe", "--ranks", "4")
    assert status == 2
    assert "each of 4 ranks needs a GPU" in one_line(output)
