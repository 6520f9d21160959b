"""EventStream: reads an engine's streamed answer (server-sent events) in whole events."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kv_connector.router.failure import UNREADABLE, Failure, reported_failure

END = b"\n\n"
# Events that begin a message or a response before vLLM knows whether the request works.
_BEGINNINGS = ("message_start", "response.created", "response.in_progress")


# In a generated text the quotes would be escaped.
_ENDS = re.compile(
    rb"^data: ?\[DONE\]"
    rb'|"finish_reason": ?"'
    rb'|"type": ?"(?:error|message_stop|response\.(?:completed|incomplete|failed))"',
    re.MULTILINE,
)


class CutOffError(Exception):
    """A stream ended without the end of its answer."""

    def __init__(self) -> None:
        super().__init__("the stream ended without finish_reason and [DONE]")


class EventStream:
    """Reads one answer. ``chunks``: its bytes, cut anywhere. Exceptions of ``chunks`` are raised here."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""  # bytes of an event whose end has not come

    async def read(self) -> bytes:
        """Returns the next events, one or more; b"" at the end.

        An incomplete event at the end of a broken stream is not returned. An error event after it would be
        unreadable.
        """
        while chunk := await anext(self._chunks, b""):
            whole, end, self._rest = (self._rest + chunk).rpartition(END)
            if end:
                return whole + end
        rest, self._rest = self._rest, b""
        return rest

    async def opening(self) -> bytes:
        """Returns all events up to the first with a part of the answer; Failure if that is an error.

        vLLM begins a chat with an event for each choice that names the role, before it knows whether the
        request works.
        """
        opening = b""
        while events := await self.read():
            opening += events
            if any(_tells(event) for event in events.split(END)):
                break
        return opening


def split_at_error(events: bytes) -> tuple[bytes, Failure | None]:
    """Returns the whole events before the first engine error, and that error; all events and None without an
    error.

    vLLM ends a stream with such an event when its engine core dies, because the status has been sent by then.
    """
    if b'"error"' not in events:
        return events, None
    before = b""
    for event in events.split(END):
        if (problem := _error_of(event)) is not None:
            return before, problem
        before += event + END
    return events, None


def has_end(events: bytes) -> bool:
    """Returns whether these events, the last two or more of a stream, show that the answer is complete."""
    return _ENDS.search(events) is not None


def _error_of(event: bytes) -> Failure | None:
    if b'"error"' not in event or not (data := data_of(event)):
        return None
    said = _read(data)
    return None if said is None or said.error is None else reported_failure(said.error, data)


def data_of(event: bytes) -> bytes:
    """Returns an event's data; b"" if it has none. vLLM's data is one line."""
    line = next((line for line in event.split(b"\n") if line.startswith(b"data:")), b"")
    return line.removeprefix(b"data:").strip()


class _Event(msgspec.Struct):
    type: str = ""
    error: dict[str, Any] | None = None
    choices: list[dict[str, Any]] | None = None


def _read(data: bytes) -> _Event | None:
    """Decodes an event's data. None: vLLM did not write it, and the client may know it."""
    try:
        return msgspec.json.decode(data, type=_Event)
    except UNREADABLE:
        return None


def _tells(event: bytes) -> bool:
    """Returns whether the event has a part of the answer; Failure if it is an error."""
    if not (data := data_of(event)):
        return False
    if (said := _read(data)) is None:
        return True
    if said.error is not None:
        raise reported_failure(said.error, data)
    if said.type in _BEGINNINGS:
        return False
    return not said.choices or any(_says(choice) for choice in said.choices)


def _says(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    told = delta if isinstance(delta, dict) else {}
    return any(value for key, value in told.items() if key != "role") or any(
        value for key, value in choice.items() if key not in ("index", "delta")
    )
