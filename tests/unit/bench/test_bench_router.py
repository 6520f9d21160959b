"""`kv-connector bench router` measures what it claims. Speed is not tested."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from command_line import invoke

from kv_connector.bench import router
from kv_connector.bench.router import WAYS
from kv_connector.cli.bench import app

run = partial(invoke, app)


def test_each_way_is_measured_while_readers_query_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "_LOOK_SECONDS", 0.001)
    file = tmp_path / "results.jsonl"
    status, output = run("router", "--rounds", "2", "--requests", "20", "--json", str(file))
    assert status == 0, output
    where, *records = [json.loads(line) for line in file.read_text().splitlines()]
    assert where["type"] == "conditions"
    assert [record["way"] for record in records] == [way.label for way in WAYS] * 2
    assert all(len(record["first_byte"]) == 20 for record in records)
    readers = {way.label: way.readers for way in WAYS}
    assert all((record["looks"] > 0) == (readers[record["way"]] > 0) for record in records)
    assert all(way.label in output for way in WAYS)
