"""The process in which BodyParser parses long bodies.

It reads bodies from its standard input, writes where their fields are, and ends with its parent.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import IO, BinaryIO

import msgspec
import numpy as np

from kv_connector.router.bodies.fields import PASSED_ON, BodyError, ValueShape, is_long, named, parse, shape
from kv_connector.router.bodies.messages import LOOKED_AT, Texts, only_text
from kv_connector.router.bodies.messages import read as read_prompt

# If processors are scarce, the router's event loop runs first.
_NICE = 10


class WantedParts(IntEnum):
    """The parts of a body that the parent needs."""

    MODEL = 0
    FIELDS = 1
    PROMPT = 2
    """The fields, and the prompt as it reads."""


REQUEST = struct.Struct("<BQ")
"""Header of a request: a WantedParts, and the bytes of the body that follows."""
ANSWER = struct.Struct("<Q")
"""Header of an answer: the bytes of the Parsed that follows."""


class Field(msgspec.Struct, array_like=True):
    name: str
    start: int
    end: int
    """Offset in the body where the value ends. ``start`` is where the value starts."""
    shape: ValueShape | None
    """The shape of a long value; None for a short value."""
    texts: Texts | None = None
    """The prompt in a long value, if it is wanted and can be read."""


class Parsed(msgspec.Struct):
    """The positions of a body's fields, its model, or the reason of its refusal."""

    fields: list[Field] = []
    xargs: list[Field] | None = None
    refusal: str | None = None
    """The reason if the body is not a JSON object."""
    model: str | None = None


def parsed(raw: bytes, wanted: WantedParts) -> Parsed:
    if wanted is WantedParts.MODEL:
        return Parsed(model=named(raw))
    try:
        fields = parse(raw)
    except BodyError as error:
        return Parsed(refusal=str(error))
    xargs = None if fields.xargs is None else _spans(raw, fields.xargs, prompt=False)
    return Parsed(_spans(raw, fields.values, prompt=wanted is WantedParts.PROMPT), xargs)


def _spans(raw: bytes, values: Mapping[str, msgspec.Raw], *, prompt: bool) -> list[Field]:
    start = _address(raw)
    found, left = [], LOOKED_AT
    for name, value in values.items():
        at, nbytes = _address(value) - start, len(memoryview(value))
        field = Field(name, at, at + nbytes, shape(name, value) if is_long(value) else None)
        if prompt and is_long(value) and name in PASSED_ON and nbytes <= left:
            field.texts = read_prompt(name, value)
            left -= nbytes
        if field.shape is not None and name == "messages":
            field.shape = msgspec.structs.replace(field.shape, only_text=only_text(value))
        found.append(field)
    return found


def _address(buffer: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def read(source: IO[bytes], nbytes: int) -> bytes:
    """Reads so many bytes; EOFError if there are fewer."""
    found = source.read(nbytes)
    if len(found) < nbytes:
        raise EOFError
    return found


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until the parent closes its end of the pipe."""
    while head := source.read(REQUEST.size):
        wanted, nbytes = REQUEST.unpack(head)
        answer = msgspec.msgpack.encode(parsed(read(source, nbytes), WantedParts(wanted)))
        sink.write(ANSWER.pack(len(answer)) + answer)
        sink.flush()


def main() -> None:
    # A terminal, or systemd, sends these signals to all processes. The parent decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
