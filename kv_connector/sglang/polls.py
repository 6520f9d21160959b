"""What our agent knows of a room, in the words that SGLang's queues take at each moment.

A queue that hears a value it does not expect ends its server, so both tables are here and nowhere else.
Values are those of SGLang's KVPoll.
"""

from __future__ import annotations

from enum import IntEnum

from kv_connector.protocol.actions import State


class Poll(IntEnum):
    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


def sending(state: State | None, complete: bool) -> Poll:
    """P's room. ``complete``: all its pages were handed over. Until then SGLang takes FAILED, BOOTSTRAPPING
    and WAITING_FOR_INPUT alone."""
    if state is State.FAILED:
        return Poll.FAILED
    if not complete:
        return Poll.BOOTSTRAPPING if state is None else Poll.WAITING_FOR_INPUT
    return Poll.SUCCESS if state is State.DONE else Poll.TRANSFERRING


def receiving(state: State | None, reserved: bool) -> Poll:
    """D's room, whose P is known. ``reserved``: its pages were asked for. Until then SGLang takes FAILED,
    BOOTSTRAPPING and WAITING_FOR_INPUT alone."""
    if not reserved or state is None:
        return Poll.WAITING_FOR_INPUT
    return {State.MOVING: Poll.TRANSFERRING, State.DONE: Poll.SUCCESS, State.FAILED: Poll.FAILED}[state]
