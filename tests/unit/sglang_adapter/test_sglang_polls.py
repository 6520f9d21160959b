"""The values for SGLang's queues. A value that one of them does not expect would end its server."""

from __future__ import annotations

import pytest

from kv_connector.protocol.actions import State
from kv_connector.sglang.polls import Poll, receiving, sending

STATES = [None, *State]


@pytest.mark.parametrize("state", STATES)
def test_bootstrap_queue_sees_no_page_states(state: State | None) -> None:
    legal = {Poll.FAILED, Poll.BOOTSTRAPPING, Poll.WAITING_FOR_INPUT}
    assert sending(state, complete=False) in legal
    assert receiving(state, reserved=False) in legal


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, Poll.TRANSFERRING),
        (State.MOVING, Poll.TRANSFERRING),
        (State.DONE, Poll.SUCCESS),
        (State.FAILED, Poll.FAILED),
    ],
)
def test_prefill_is_through_once_all_was_handed_over_and_has_arrived(
    state: State | None, expected: Poll
) -> None:
    assert sending(state, complete=True) is expected


def test_prefill_waits_for_input_once_decode_has_come() -> None:
    assert sending(None, complete=False) is Poll.BOOTSTRAPPING
    assert sending(State.MOVING, complete=False) is Poll.WAITING_FOR_INPUT


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, Poll.WAITING_FOR_INPUT),
        (State.MOVING, Poll.TRANSFERRING),
        (State.DONE, Poll.SUCCESS),
        (State.FAILED, Poll.FAILED),
    ],
)
def test_decode_is_through_once_all_has_come(state: State | None, expected: Poll) -> None:
    assert receiving(state, reserved=True) is expected
