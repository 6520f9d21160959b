"""The command line's own part: what it says to wrong input, and what it finds out about a machine."""

from functools import partial

import pytest
from command_line import invoke

from kv_connector.cli.main import app
from kv_connector.engine import ProviderStatus, transfer_engine
from kv_connector.lab import demonstration

run = partial(invoke, app)


def test_help_names_the_commands() -> None:
    status, output = run("--help")
    assert status == 0
    for command in ("bench", "demo", "doctor", "router", "topology"):
        assert command in output


def test_the_router_refuses_a_wrong_address_and_shows_how_one_looks() -> None:
    status, output = run("router", "--prefill", "127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
    assert status == 2
    assert "http://host:port" in output


def test_the_router_needs_both_sides() -> None:
    status, output = run("router", "--prefill", "http://127.0.0.1:8100")
    assert status == 2
    assert "--decode" in output


@pytest.mark.parametrize(("lane", "why"), [("pigeon", "it has"), ("nvlink", "not usable here: ")])
def test_the_demo_refuses_a_lane_before_it_starts_anything(
    lane: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = [ProviderStatus("tcp", True, ""), ProviderStatus("nvlink", False, "no CUDA driver")]
    monkeypatch.setattr(transfer_engine, "providers", lambda: status)
    monkeypatch.setattr(demonstration, "demonstrate", lambda *_: pytest.fail("it has begun"))
    code, output = run("demo", "--provider", lane)
    assert code == 2
    assert lane in output
    assert why in output
