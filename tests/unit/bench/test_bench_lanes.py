"""`kv-connector bench` of our lanes alone: its commands measure what they claim. Speed is not tested."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke

from kv_connector.bench import harness, machine
from kv_connector.bench.contestant import SideRole
from kv_connector.bench.lane import Lane, UnknownLane, choose_lanes
from kv_connector.bench.measurements import experts, micro, writes
from kv_connector.bench.records import Micro, percentile
from kv_connector.bench.workloads import PageWorkload
from kv_connector.cli.bench import app

run = partial(invoke, app)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "QUIET_PATIENCE", 0.0)
    monkeypatch.setattr(harness, "POOL_BYTES", 4 << 20)  # what these tests write fits
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def lines(file: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert found[0]["type"] == "conditions"
    return [line for line in found if line["type"] == kind]


# --- writes


def test_table_2_over_two_lanes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(writes, "SINGLE_BYTES", (64 << 10, 2 << 20))
    monkeypatch.setattr(writes, "_SINGLES", {64 << 10: 5, 2 << 20: 3})
    monkeypatch.setattr(writes, "PAGE_BYTES", (4 << 10,))
    monkeypatch.setattr(writes, "PAGED", (PageWorkload("paged 4K", 512, 4 << 10),))
    file = tmp_path / "results.jsonl"
    status, output = run("writes", "--provider", "host,tcp", "--rounds", "1", "--json", str(file))
    assert status == 0, output
    assert output.index("Conditions") < output.index("Single writes") < output.index("Paged writes")
    singles = lines(file, "singles")
    assert [(line["contestant"], line["bytes"], len(line["seconds"])) for line in singles] == [
        (lane, size, count) for lane in ("host", "tcp") for size, count in ((64 << 10, 5), (2 << 20, 3))
    ]
    assert all(min(line["seconds"]) > 0 for line in singles)
    paged = lines(file, "throughput")
    assert [line["verified"] for line in paged] == [True, True]


def test_sim_is_refused_where_two_processes_are_measured() -> None:
    status, output = run("writes", "--provider", "sim")
    assert status == 2
    assert "one process" in output


# --- Engines that connect


def test_engines_of_unequal_ranks_connect(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    words = ("--prefill", "2", "--decode", "1", "--rounds", "1", "--json", str(file))
    status, output = run("meeting", *words)
    assert status == 0, output
    (found,) = lines(file, "meeting")
    assert (found["lane"], found["prefill_ranks"], len(found["seconds"])) == ("host", 2, 1)
    assert 0 < found["seconds"][0] < 60


# --- peers


def test_peers_bench_measures_the_cost_for_each_side(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    words = ("--provider", "host,tcp", "--peers", "20", "--rounds", "1", "--json", str(file))
    status, output = run("peers", *words)
    assert status == 0, output
    found = lines(file, "peers")
    assert [(line["contestant"], line["peers"]) for line in found] == [("host", 20), ("tcp", 20)]
    for line in found:
        assert line["seconds"] > 0
        for side in ("initiator", "target"):
            assert line[side]["descriptors"] >= 1
            assert line[side]["written_bytes"] > 0


# --- registration


@pytest.mark.parametrize("provider", ["sim", "host", "tcp"])
def test_a_ping_pong_by_itself_and_beside_registrations(provider: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    words = (
        "--provider",
        provider,
        "--mib",
        "8",
        "--iterations",
        "100",
        "--rounds",
        "2",
        "--json",
        str(file),
    )
    status, output = run("registration", *words)
    assert status == 0, output
    found = lines(file, "registering")
    assert [(line["round"], line["lane"]) for line in found] == [(1, provider), (2, provider)]
    for line in found:
        assert len(line["undisturbed"]) == len(line["disturbed"]) == 100
        assert line["registrations_a_second"] > 0


# --- groups


@pytest.mark.parametrize("provider", ["sim", "host", "tcp"])
def test_the_steps_of_a_scatter_and_of_a_barrier(provider: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    words = ("--provider", provider, "--peers", "2,3", "--iterations", "20", "--json", str(file))
    status, output = run("groups", *words)
    assert status == 0, output
    assert output.index("Conditions") < output.index("call -> enqueued")
    found = lines(file, "group")
    assert [(line["operation"], line["peers"]) for line in found] == [
        (operation, peers)
        for peers in (2, 3)
        for operation in ("scatter", "prepared scatter", "barrier", "prepared barrier")
    ]
    for line in found:
        for step in ("submit", "dequeue", "first", "last", "done"):
            assert len(line[step]) == 20, step
        # The times of single steps must fit into the whole.
        for submit, first, last, done in zip(
            line["submit"], line["first"], line["last"], line["done"], strict=True
        ):
            assert submit > 0
            assert last > 0
            assert submit + first + last <= done


@pytest.mark.parametrize("peers", ["eight", "0", ""])
def test_empty_group_is_refused(peers: str) -> None:
    assert run("groups", "--provider", "sim", "--peers", peers)[0] == 2


@pytest.mark.parametrize("provider", ["sim", "tcp"])
def test_the_sends_of_experts_between_nodes(provider: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    words = ("--experts", "--provider", provider, "--peers", "1,2", "--iterations", "20", "--json", str(file))
    status, output = run("groups", *words)
    assert status == 0, output
    assert output.index("Conditions") < output.index("call -> first write")
    found = lines(file, "experts")
    assert [(line["peers"], line["tokens"], line["operation"]) for line in found] == [
        (peers, tokens, operation)
        for peers in (1, 2)
        for tokens in experts.TOKENS
        for operation in ("dispatch", "combine")
    ]
    for line in found:
        assert len(line["submit"]) == len(line["first"]) == 20
        for submit, first in zip(line["submit"], line["first"], strict=True):
            assert submit > 0
            assert submit + first > 0


def test_experts_have_peers_of_their_own_by_default(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    status, output = run("groups", "--experts", "--provider", "sim", "--iterations", "2", "--json", str(file))
    assert status == 0, output
    assert {row["peers"] for row in lines(file, "experts")} == {1, 3, 7}


def test_experts_have_up_to_seven_peers() -> None:
    status, output = run("groups", "--experts", "--provider", "sim", "--peers", "1,8")
    assert status == 2
    assert "up to 7 peers" in output


# --- micro


def test_the_hot_loops_are_compared_with_their_aims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(micro, "REPEATS", 3)
    file = tmp_path / "results.jsonl"
    status, output = run("micro", "--iterations", "1000", "--json", str(file))
    found = lines(file, "micro")
    assert [line["aim"] for line in found] == [200, None, None, 100, 10]
    assert all(line["p50"] > 0 for line in found)
    missed = "not reached" in output
    assert status == (1 if missed else 0)


def test_an_aim_may_be_a_floor_or_a_ceiling() -> None:
    def figure(value: float, *, at_least: bool) -> Micro:
        return Micro(name="x", unit="ns", p50=value, p99=value, aim=10, at_least=at_least)

    assert figure(10, at_least=False).reached
    assert not figure(10.1, at_least=False).reached
    assert figure(10.1, at_least=True).reached
    assert not figure(9.9, at_least=True).reached
    assert Micro(name="x", unit="ns", p50=1, p99=1, aim=None).reached is None


# --- lanes


def test_without_names_every_usable_lane_is_measured() -> None:
    for in_one_process in (False, True):
        lanes = [lane.provider for lane in choose_lanes([], [], [], in_one_process=in_one_process)]
        assert {"host", "tcp"} <= set(lanes)
        assert not {"sim", "shuffle", "bounce"} & set(lanes)


@pytest.mark.parametrize(
    ("names", "devices", "words"),
    [
        (["pigeon"], [], "no provider 'pigeon'"),
        (["host", "tcp"], ["mlx5_0"], "NICs of one provider"),
    ],
)
def test_a_lane_that_cannot_be_is_refused(names: list[str], devices: list[str], words: str) -> None:
    with pytest.raises(UnknownLane, match=words):
        choose_lanes(names, devices, [], in_one_process=True)


def test_a_lane_has_a_domain_for_each_nic_of_its_side() -> None:
    lane = Lane("verbs", ("rxe0", "rxe1"), ("rxe2",))
    assert [domain.device for domain in lane.domains(SideRole.INITIATOR)] == ["rxe0", "rxe1"]
    assert [domain.device for domain in lane.domains(SideRole.TARGET)] == ["rxe2"]
    assert lane.name == "verbs rxe0+rxe1"
    assert [domain.device for domain in Lane("tcp").domains(SideRole.TARGET)] == [""]


def test_percentiles_of_few_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 99.9) == 3.0
    assert percentile([1.0], 0) == 1.0
