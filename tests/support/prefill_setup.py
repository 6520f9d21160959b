"""A prefill machine with two decode peers, and helpers that read its actions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from protocol_setup import (
    all_of,
    computed,
    every,
    layout,
    only,
    prefill_request,
    reserve,
)

from kv_connector.protocol.actions import (
    Push,
    Reached,
    Seal,
    Send,
    Share,
    State,
)
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine
from kv_connector.protocol.prefill.shares import PrefillAction
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import Reserve, Role

PEER, OTHER = 1, 2
TIMES = Timeouts()
WANTS = all_of(layout())
MOVING = [Reached(Role.PREFILL, "t", "p-t", State.MOVING)]  # both halves of the request are here


@pytest.fixture
def machine() -> PrefillMachine:
    made = PrefillMachine(layout(), TIMES)
    for peer in (PEER, OTHER):
        assert isinstance(made.admit(peer, layout(num_blocks=32), WANTS, regions=1), Plan)
    return made


def message(actions: list[PrefillAction]) -> object:
    """Returns the only message that is sent."""
    return only(actions, Send).message


def pushed(actions: list[PrefillAction]) -> dict[int, int]:
    """Returns {P's block: D's block} over all pushes of group 0."""
    pairs = [(push, group) for push in every(actions, Push) for group in push.groups]
    return {s: t for _, group in pairs for s, t in zip(group.source, group.target, strict=True)}


def active(machine: PrefillMachine) -> None:
    """Brings the machine to a request whose first two of three pages are in flight."""
    assert machine.expect(0.0, prefill_request()) == []
    assert machine.reserve(0.0, PEER, reserve()) == MOVING
    assert pushed(machine.pages_computed(0.0, computed((1, 2)))) == {1: 11, 2: 12}


def sealed(machine: PrefillMachine) -> None:
    active(machine)
    assert pushed(machine.pages_computed(0.0, computed((3,), first=2, base=2))) == {3: 13}
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]


def assert_over(machine: PrefillMachine) -> None:
    assert len(machine) == 0
    assert machine.next_deadline() is None


def wanting() -> Reserve:
    return msgspec.structs.replace(reserve(), wants_sampled=True)


def states(actions: list[PrefillAction]) -> list[tuple[str, State]]:
    return [(reached.request_id, reached.state) for reached in every(actions, Reached)]


def half(share: int, **changes: Any) -> Reserve:
    """Returns RESERVE for one share of two, into separate blocks."""
    first = 21 if share else 11
    return reserve(range(first, first + 3), share=share, shares=2, **changes)
