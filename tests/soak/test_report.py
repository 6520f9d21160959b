"""The report of the soak."""

from __future__ import annotations

import json

import msgspec

from kv_connector.lab import plots
from tests.soak.processes import Sample
from tests.soak.report import judged, lines, picture, table

MIB = 1 << 20


def samples(leak: int = 0) -> list[Sample]:
    """Half an hour: a process that leaks so many bytes for a request, one that fills a cache in the warm-up,
    and one that is restarted every five minutes."""
    found = []
    for number in range(180):
        at, requests = 10.0 * number, 20 * number
        steady = {"memory": float(100 * MIB + leak * requests), "descriptors": 30.0 + number % 3}
        found.append(Sample(at, requests, "router", 1, steady))
        found.append(Sample(at, requests, "p0", 2, {"memory": float(min(number, 50) * MIB)}))
        found.append(Sample(at, requests, "d1", 10 + number // 30, {"descriptors": float(number % 30)}))
    return found


def test_report_finds_the_process_that_leaks() -> None:
    assert {one.word for one in judged(samples())} == {"flat", "not judged"}
    verdicts = {(one.process, one.series): one for one in judged(samples(leak=2000))}
    assert [key for key, one in verdicts.items() if one.word == "GROWS"] == [("router", "memory")]
    assert verdicts["d1", "descriptors"].word == "not judged", "each life is too short"
    router = verdicts["router", "memory"]
    assert (router.samples, router.requests, router.seconds) == (120, 2380, 1190)
    assert abs(router.per_week / (2000 * 20 / 10 * 604_800) - 1) < 0.01


def test_report_expects_an_api_server_to_grow_as_without_this_connector() -> None:
    """But not by more, and no other process of an engine."""

    def word(process: str, growth: float) -> str:
        found = [
            Sample(10.0 * number, 200 * number, process, 1, {"memory": 100 * MIB + growth * 200 * number})
            for number in range(180)
        ]
        (verdict,) = judged(found)
        return verdict.word

    assert [word("p0", 400), word("p0", 600), word("p0 worker", 400)] == ["flat", "GROWS", "GROWS"]


def test_report_has_a_row_and_a_line_for_each_series() -> None:
    verdicts = judged(samples(leak=2000))
    assert "| router | memory | 102.3 MiB | 1,907 ± 0 MiB | 2,307 MiB | GROWS |" in table(verdicts)
    line = next(one for one in map(json.loads, lines(verdicts).splitlines()) if one["verdict"] == "GROWS")
    assert (line["process"], line["series"]) == ("router", "memory")


def test_picture_has_a_panel_for_each_kind_of_resource() -> None:
    data = picture(samples(), {"caption": "c"})
    panels = msgspec.convert(data["panels"], list[plots.Panel])
    assert [panel.title for panel in panels] == ["memory", "descriptors", "threads"]
    assert [series.name for series in panels[0].series] == ["router", "p0"]
    assert panels[0].series[0].values == [100.0] * 12
    assert panels[1].columns[-1] == "30"
