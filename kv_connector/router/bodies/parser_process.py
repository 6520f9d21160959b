"""The process in which BodyParser parses long bodies.

It reads bodies from its standard input, writes where their fields are, and ends with its parent.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Mapping
from typing import IO, BinaryIO

import msgspec
import numpy as np

from kv_connector.router.bodies.fields import BodyError, Shape, is_long, named, parse, shape

# If processors are scarce, the router's event loop runs first.
_NICE = 10

REQUEST = struct.Struct("<?Q")
"""Header of a request: whether only the model is wanted, and the bytes of the body that follows."""
ANSWER = struct.Struct("<Q")
"""Header of an answer: the bytes of the Parsed that follows."""


class Field(msgspec.Struct, array_like=True):
    name: str
    start: int
    end: int
    """Offset in the body where the value ends. ``start`` is where the value starts."""
    shape: Shape | None
    """The shape of a long value; None for a short value."""


class Parsed(msgspec.Struct):
    """The positions of a body's fields, its model, or the reason of its refusal."""

    fields: list[Field] = []
    xargs: list[Field] | None = None
    refusal: str | None = None
    """The reason if the body is not a JSON object."""
    model: str | None = None


def parsed(raw: bytes, *, only_model: bool) -> Parsed:
    if only_model:
        return Parsed(model=named(raw))
    try:
        fields = parse(raw)
    except BodyError as error:
        return Parsed(refusal=str(error))
    xargs = None if fields.xargs is None else _spans(raw, fields.xargs)
    return Parsed(_spans(raw, fields.values), xargs)


def _spans(raw: bytes, values: Mapping[str, msgspec.Raw]) -> list[Field]:
    start = _address(raw)
    found = []
    for name, value in values.items():
        at = _address(value) - start
        known = shape(name, value) if is_long(value) else None
        found.append(Field(name, at, at + len(memoryview(value)), known))
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
        only_model, nbytes = REQUEST.unpack(head)
        answer = msgspec.msgpack.encode(parsed(read(source, nbytes), only_model=only_model))
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
