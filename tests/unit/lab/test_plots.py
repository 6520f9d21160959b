"""Pictures of measurements: readable on bright and dark pages, and equal to the documents' numbers."""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import json
import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke

from kv_connector.bench import report
from kv_connector.bench.contestants import CONTESTANTS
from kv_connector.bench.pd import run as pd
from kv_connector.bench.pd.deployments import DEPLOYMENTS
from kv_connector.bench.records import Throughput
from kv_connector.cli.main import app
from kv_connector.lab import demonstration, plots

run = partial(invoke, app)

COMMANDS = [("bench",), ("bench", "pd"), pytest.param(("demo",), marks=pytest.mark.needs_vllm)]
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
DOCS = Path(__file__).parents[3] / "docs"
drawing = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="no matplotlib: pip install 'kv-connector[plot]'"
)


def texts(file: Path) -> set[str]:
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text()))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, brighter = sorted((luminance(one), luminance(other)))
    return (brighter + 0.05) / (darker + 0.05)


def throughputs() -> list[Throughput]:
    """Returns throughputs of the first two contestants in two workloads."""
    return [
        Throughput(
            round=1,
            contestant=contestant.name,
            workload=workload,
            bytes=10**9,
            seconds=[seconds],
            cpu_initiator=0.0,
            cpu_target=0.0,
            foreign_cores=0.0,
            verified=True,
        )
        for contestant in CONTESTANTS[:2]
        for workload, seconds in (("1024x64K", 0.1), ("4096x4K", 0.2))
    ]


def draw_bench(file: Path) -> set[str]:
    report.plot_results(file, CONTESTANTS, throughputs())
    return {CONTESTANTS[0].label, CONTESTANTS[1].label, "4096x4K", "1024x64K", "GB/s"}


def draw_pd(file: Path) -> set[str]:
    records = [
        pd.MeasuredDeployment(
            round=1,
            deployment=deployment.name,
            load=load,
            seconds=1.0,
            ttft=[0.1, 0.2],
            cpu_seconds=0.0,
            equal=1,
        )
        for deployment in DEPLOYMENTS[:2]
        for load in pd.LOADS
    ]
    pd._plot(file, DEPLOYMENTS, records)
    return {DEPLOYMENTS[0].label, DEPLOYMENTS[1].label, "Requests a second", pd.LOADS[0].name}


def draw_demo(file: Path) -> set[str]:
    pushed = demonstration.Pushed(pages=4, bytes=4, early_bytes=3, layers=4, early_layers=3)
    demonstration._plot(file, [demonstration.DemonstrationRow(1000, 0.1, 0.2, True, pushed, "tcp", 4)])
    return {"1,000", "one engine", "prefill and decode apart"}


def draw_timeline(file: Path) -> set[str]:
    plots.timeline(file, json.loads((DOCS / "data" / "timeline.json").read_text()))
    return {"prefill computes the layer", "layer 0", "chunk 1"}


@drawing
@pytest.mark.parametrize("draw", [draw_bench, draw_pd, draw_demo, draw_timeline])
def test_picture_has_its_labels_and_contrast_on_bright_and_dark_pages(
    draw: Callable[[Path], set[str]], tmp_path: Path
) -> None:
    file = tmp_path / "picture.svg"
    expected = draw(file)
    assert expected <= texts(file)
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", file.read_text()))
    assert drawn
    for colour in drawn:
        assert contrast(colour, "#ffffff") > 3
        assert contrast(colour, "#0d1117") > 3


@drawing
def test_the_same_numbers_make_the_same_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw_bench(first)
    draw_bench(second)
    assert first.read_bytes() == second.read_bytes()


@drawing
def test_trace_without_prefill_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(plots.PlotError, match="no step of a prefill engine"):
        plots.timeline(tmp_path / "picture.svg", {"traceEvents": []})


@drawing
@pytest.mark.parametrize(("name", "why"), [("picture.png", r"\.svg"), ("nowhere/picture.svg", "directory")])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_file_is_refused_before_anything_is_measured(
    command: tuple[str, ...], name: str, why: str, tmp_path: Path
) -> None:
    status, output = run(*command, "--plot", str(tmp_path / name))
    assert status == 2
    assert re.search(why, output)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_matplotlib_the_error_names_the_extra(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    status, output = run(*command, "--plot", str(tmp_path / "picture.svg"))
    assert status == 2
    assert "kv-connector[plot]" in output


# --- Pictures in the documents


RUNS = sorted((DOCS / "data").glob("*.json"))
DOCUMENTS = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]


@pytest.mark.parametrize("data", RUNS, ids=lambda file: file.stem)
def test_a_document_shows_each_recorded_run(data: Path) -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    recorded = json.loads(data.read_text())
    if "kind" in recorded or "traceEvents" in recorded:
        assert any(f"pictures/{data.stem}.svg" in text for text in texts)
    if "traceEvents" not in recorded:
        assert any(f"<!-- generated: run {data.stem} -->" in text for text in texts)


@pytest.mark.parametrize("data", RUNS, ids=lambda file: file.stem)
def test_a_picture_is_of_its_data_as_it_is_now(data: Path) -> None:
    recorded = json.loads(data.read_text())
    if "kind" not in recorded and "traceEvents" not in recorded:
        return
    picture = (DOCS / "pictures" / f"{data.stem}.svg").read_text()
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    assert f"<!-- data: {digest} -->" in picture, f"{data.stem}.svg is older than its data: scripts/pictures"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("{", r"a\.json: "),
        ("[]", r"a\.json: Expected `object`"),
        ('{"kind": "lines"}', r"a\.json: no such field or kind: 'panels'"),
        ('{"kind": "pie", "panels": [], "caption": ""}', r"a\.json: no such field or kind: 'pie'"),
        ('{"kind": "bars", "panels": [{}], "caption": ""}', r"a\.json: Object missing required field"),
    ],
)
def test_data_that_cannot_be_drawn_is_an_error(
    data: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = runpy.run_path(str(DOCS.parent / "scripts/pictures"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.json").write_text(data)
    monkeypatch.setitem(pictures["main"].__globals__, "DOCS", tmp_path)
    with pytest.raises(SystemExit, match=error):
        pictures["main"]([])


@pytest.mark.parametrize(
    "data",
    [data for data in RUNS if "traceEvents" not in json.loads(data.read_text())],
    ids=lambda file: file.stem,
)
def test_each_number_of_a_recorded_run_stands_in_its_log(data: Path) -> None:
    recorded = json.loads(data.read_text())
    log = (DOCS / recorded["log"].partition("#")[0]).read_text()
    assert recorded["date"] in log
    cells = {number for line in log.splitlines() if line.startswith("|") for number in NUMBER.findall(line)}
    expected = {number for row in recorded.get("rows", ()) for number in NUMBER.findall(" ".join(row[1:]))}
    for panel in recorded.get("panels", ()):
        for series in [*panel.get("beside", ()), *panel["series"]]:
            form = series.get("format", panel["format"])
            expected |= {format(value, form).lstrip("+") for value in series["values"]}
    assert expected - cells == set()
