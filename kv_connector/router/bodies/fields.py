"""Fields: the members of a JSON object, each as its client wrote it, and JSON made of them without a copy."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from kv_connector.router.bodies.messages import Texts, only_text, read
from kv_connector.router.failure import UNREADABLE

# Longest value in bytes that is decoded; a longer value stays JSON. As objects, 63 MiB of `{}` in a list
# would be 1.8 GiB; 4 KiB of them are 100 KiB. No value that the router decides by is longer, and no field's
# name.
LONGEST_READ = 4096
# Most brackets of a value that is decoded. Objects are nested no deeper, so they can be written again:
# msgspec refuses about 1,000 levels, less those of the calling functions. JSON schemas have below 50 levels.
_MOST_BRACKETS = 256
# Requests with vLLM's own fields have about 100.
_MOST_FIELDS = 256
# Fields that may be long and that the router does not use. They are passed on as they came, however short. To
# make objects of 32,000 token ids and to write them twice takes 2 ms, for which a client would wait. To find
# their end takes 0.2 ms.
PASSED_ON = ("prompt", "messages", "input", "system")
# Bytes of a value that are converted at once, which bounds the memory of the copy.
_LOOKED_AT_ONCE = 1 << 20
# Bytes written to an engine between two turns of the event loop: about 50 us. Copying a shorter value takes
# less.
SLICE = 64 << 10

_LIST_OF_OTHERS = re.compile(rb"\s*+\[\s*+[^\s\d-]")  # a list of anything but numbers
# Possessive quantifiers: with \s* twice in a row, spaces before a text would be tried in n ** 2 ways. 8 KiB
# of spaces would take 1.5 s.
_TOKEN_IDS = re.compile(rb"\s*+\[\s*+(?:\[\s*+)?-?\d")


class BodyError(Exception):
    """A body is not a JSON object. The message is for the client."""


class ValueShape(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a long value that the router uses. To find them, each byte is read."""

    several: bool
    """Whether a field of prompts holds a list of several prompts."""
    tokens: int | None
    """Length of a list of token ids, in a field of PASSED_ON; else None."""
    digest: bytes
    """Hash that is equal for equal values, of a field that is not in PASSED_ON."""
    only_text: bool | None = None
    """Whether messages are text alone; None: not looked at."""


class Shapes:
    """The shapes of one body's values, each computed once."""

    def __init__(
        self, known: Mapping[str, ValueShape] | None = None, texts: Mapping[str, Texts | None] | None = None
    ) -> None:
        self._known = dict(known or {})
        self._texts = dict(texts or {})

    def of(self, name: str, value: msgspec.Raw) -> ValueShape:
        """Returns the shape of a value; ``name`` is the name of its field."""
        if (known := self._known.get(name)) is None:
            known = self._known[name] = shape(name, value)
        return known

    def only_text(self, messages: msgspec.Raw) -> bool:
        """Returns whether the messages of a chat are text alone."""
        known = self._known.get("messages")
        return only_text(messages) if known is None or known.only_text is None else known.only_text

    def texts(self, name: str, value: msgspec.Raw) -> Texts | None:
        """Returns a prompt as it reads, as read() does. To be called once for each value, because texts are
        as long as the prompt."""
        return self._texts.pop(name) if name in self._texts else read(name, value)


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object."""

    values: dict[str, msgspec.Raw]
    xargs: dict[str, msgspec.Raw] | None = None
    """Fields of a ``vllm_xargs`` that stays JSON, if it is an object."""
    shapes: Shapes = field(default_factory=Shapes)


def parse(raw: bytes | memoryview) -> Fields:
    """Reads a body; BodyError if it is not a JSON object."""
    try:
        raw = _without_bom(raw)
        _check_utf8(raw)  # msgspec checks only the syntax of values that are passed on
        values = _fields(raw)
        xargs = values.get("vllm_xargs")
        if xargs is not None and stays_json(xargs) and bytes(memoryview(xargs)[:1]) == b"{":
            return Fields(values, _fields(xargs))
        return Fields(values)
    except msgspec.ValidationError as error:
        raise BodyError(f"the body must be a JSON object: {error}") from None
    except UNREADABLE as error:
        raise BodyError(f"the body is not JSON: {error}") from None


class _Named(msgspec.Struct):
    # Only this field is decoded. As objects, 60 MiB of `{}` in a list would be 1.4 GiB.
    model: msgspec.Raw = msgspec.Raw()


def named(body: bytes | memoryview) -> str | None:
    """Returns the model that a request's body names, if it names one."""
    try:
        value = msgspec.json.decode(_without_bom(body), type=_Named).model
        model = None if is_long(value) else msgspec.json.decode(value)
    except UNREADABLE:
        return None
    return model if isinstance(model, str) else None


def is_long(value: object) -> bool:
    """Returns whether the value is JSON that is too long for the router to decode."""
    return isinstance(value, msgspec.Raw) and len(memoryview(value)) > LONGEST_READ


def stays_json(value: msgspec.Raw) -> bool:
    """Returns whether the value is too long or too deeply nested to become objects."""
    if is_long(value):
        return True
    data = memoryview(value)
    return len(data) > 2 * _MOST_BRACKETS and sum(map(bytes(data).count, (b"[", b"{"))) > _MOST_BRACKETS


def shape(name: str, value: msgspec.Raw) -> ValueShape:
    """Computes the shape of a field's value, for which each byte is read."""
    passed_on = name in PASSED_ON
    return ValueShape(
        _several(name, value),
        _count_tokens(value) if passed_on else None,
        b"" if passed_on else blake2b(value, digest_size=8).digest(),
    )


def _several(name: str, value: msgspec.Raw) -> bool:
    """Returns whether the field holds several prompts. A list of token ids is one prompt. Embeddings that are
    not a list are one, too."""
    if name == "prompt":
        return _LIST_OF_OTHERS.match(value) is not None and not is_nothing(value) and not _is_one(value)
    return name == "prompt_embeds" and bytes(memoryview(value)[:1]) == b"[" and not _is_one(value)


def is_nothing(raw: msgspec.Raw) -> bool:
    """Returns whether Python would take the value for False."""
    return not stays_json(raw) and not msgspec.json.decode(raw)


def _count_tokens(value: msgspec.Raw) -> int | None:
    if not _TOKEN_IDS.match(value):
        return None
    characters = np.frombuffer(value, np.uint8)
    parts = (characters[at : at + _LOOKED_AT_ONCE] for at in range(0, len(characters), _LOOKED_AT_ONCE))
    return sum(int(np.count_nonzero(part == ord(","))) for part in parts) + 1


def _is_one(array: msgspec.Raw) -> bool:
    """Returns whether a list has one item, as far as it can be read. msgspec stops at the second item."""
    try:
        msgspec.json.decode(array, type=tuple[msgspec.Raw])
    except (msgspec.ValidationError, RecursionError):
        return False
    return True


class _Name(str):
    """A field's name. msgspec calls a function for each value of a type that it does not know."""


def _fields(raw: bytes | memoryview | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Returns the fields of a JSON object, each as it came. A dict of 64 MiB of short fields would take 1.2
    GiB."""
    left = _MOST_FIELDS

    def name(_: type, text: str) -> _Name:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {_MOST_FIELDS} fields")
        if len(text) > LONGEST_READ:
            raise ValueError(f"the name of a field is longer than {LONGEST_READ} characters")
        return _Name(text)

    found = msgspec.json.decode(raw, type=dict[_Name, msgspec.Raw], dec_hook=name)
    return {str(key): value for key, value in found.items()}


def _without_bom(raw: bytes | memoryview) -> bytes | memoryview:
    """Removes the byte order mark. PowerShell and .NET write one, and vLLM accepts it."""
    if bytes(raw[: len(codecs.BOM_UTF8)]) == codecs.BOM_UTF8:
        return memoryview(raw)[len(codecs.BOM_UTF8) :]
    return raw


def _check_utf8(raw: bytes | memoryview) -> None:
    """Raises UnicodeDecodeError if the bytes are not UTF-8.

    The bytes are decoded in parts: a text of 64 MiB with one emoji is 256 MiB as a str.
    """
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(raw)
    for at in range(0, len(view), _LOOKED_AT_ONCE):
        decoder.decode(view[at : at + _LOOKED_AT_ONCE])
    decoder.decode(b"", True)


class Pieces:
    """JSON in parts. The long parts are views of a client's body."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def slices(self) -> Iterator[bytes | memoryview]:
        """Yields all bytes, at most SLICE at once."""
        for part in self.parts:
            for at in range(0, len(part), SLICE):
                yield part[at : at + SLICE]


Content = bytes | Pieces
"""The body of a request to an engine."""


def encode(body: Mapping[str, Any]) -> Content:
    """Returns the JSON of an object. If its long values exceed a slice together, the JSON refers to them by
    views."""
    if _long_bytes(body) <= SLICE:
        return msgspec.json.encode(body)
    parts: list[bytes | memoryview] = []
    text = bytearray()

    def add(value: Any) -> None:
        if is_long(value):
            parts.extend((bytes(text), memoryview(value)))
            text.clear()
        elif isinstance(value, dict) and value:
            text.extend(b"{")
            for key, member in value.items():
                text.extend(msgspec.json.encode(key) + b":")
                add(member)
                text.extend(b",")
            text[-1:] = b"}"
        else:
            text.extend(msgspec.json.encode(value))

    add(body)
    return Pieces([*parts, bytes(text)])


def content(body: bytes | memoryview) -> Content:
    """Returns a client's own body, as it came."""
    return bytes(body) if len(body) <= SLICE else Pieces([memoryview(body)])


def _long_bytes(body: Mapping[str, Any]) -> int:
    """Returns the bytes of the object's long values, including those in vllm_xargs."""
    xargs = body.get("vllm_xargs")
    values = [*body.values(), *(xargs.values() if isinstance(xargs, dict) else ())]
    return sum(len(memoryview(value)) for value in values if is_long(value))
