"""Translates the agent's state of a room to the values that SGLang's queues accept at each moment.

An unexpected value ends SGLang's server, so both tables are here and nowhere else. Values are those of
SGLang's KVPoll.
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
    """The value for a room of P. ``complete``: all its pages were handed over. Until then SGLang accepts only
    FAILED, BOOTSTRAPPING and WAITING_FOR_INPUT."""
    if state is State.FAILED:
        return Poll.FAILED
    if not complete:
        return Poll.BOOTSTRAPPING if state is None else Poll.WAITING_FOR_INPUT
    return Poll.SUCCESS if state is State.DONE else Poll.TRANSFERRING


def receiving(state: State | None, reserved: bool) -> Poll:
    """The value for a room of D whose P is known. ``reserved``: its pages were requested. Until then SGLang
    accepts only FAILED, BOOTSTRAPPING and WAITING_FOR_INPUT."""
    if not reserved or state is None:
        return Poll.WAITING_FOR_INPUT
    return {State.MOVING: Poll.TRANSFERRING, State.DONE: Poll.SUCCESS, State.FAILED: Poll.FAILED}[state]
