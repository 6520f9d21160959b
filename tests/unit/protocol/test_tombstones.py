"""P's memory of transfers that are over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prefill_setup import PEER, TIMES, WANTS
from protocol_setup import (
    layout,
    reserve,
)

from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.prefill import tombstones
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine
from kv_connector.protocol.wire.messages import Cancel


def test_tombstones_are_forgotten_by_age() -> None:
    times = replace(TIMES, hold=1.0, orphan=1.0, transfer=2.0, cancel=1.0, drain=1.0)
    machine = PrefillMachine(layout(), times)
    assert isinstance(machine.admit(PEER, layout(), WANTS, regions=1), Plan)
    machine.cancel(0.0, PEER, Cancel("t", 1))
    machine.tick(2 * times.longest() - 0.1)
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert len(machine) == 0
    machine.tick(2 * times.longest())
    machine.reserve(7.0, PEER, reserve())
    assert len(machine) == 1


def test_tombstones_are_bounded(machine: PrefillMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 3)
    for name in "abcd":
        machine.cancel(0.0, PEER, Cancel(name, 1))
    machine.reserve(0.0, PEER, reserve(transfer="a"))
    assert len(machine) == 1  # forgotten: it is an orphan now
    machine.reserve(0.0, PEER, reserve(transfer="b"))
    assert len(machine) == 1


def test_remembered_transfers_are_counted_until_they_are_forgotten() -> None:
    machine = PrefillMachine(layout(), TIMES)
    assert isinstance(machine.admit(PEER, layout(), WANTS, regions=1), Plan)
    for name in "ab":
        machine.cancel(0.0, PEER, Cancel(name, 1))
    assert machine.remembered == 2
    machine.tick(2 * TIMES.longest())
    assert machine.remembered == 0
