"""Trace files in Mooncake's JSONL format: one request per line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

The timestamp is in milliseconds. An id stands for a block of 512 prompt tokens, the last id for the rest of
the prompt. Equal ids stand for equal tokens. Other fields of a line are ignored.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kv_connector.protocol.wire.messages import UNREADABLE

BLOCK_TOKENS = 512
MAX_LINES = 1_000_000
MAX_LINE_BYTES = 4 << 20
MAX_IDS = 8_000_000
"""Ids of all lines together. Each distinct id needs 218 bytes (measured with 400,000): 1.7 GB in all."""
_MAX_INPUT, _MAX_OUTPUT = 16 << 20, 1 << 20
_MAX_MS = 31 * 24 * 3600 * 1000


class TraceError(ValueError):
    """The file is not a trace. The message names the file and the line."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=_MAX_MS)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_MAX_INPUT)]
    output_length: Annotated[int, msgspec.Meta(ge=1, le=_MAX_OUTPUT)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


@dataclass(frozen=True)
class TracedRequest:
    """One line of a trace."""

    at: float
    """Seconds after the first line."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    conversation: int
    turn: int
    """1 for the first request of a conversation."""
    new_tokens: int
    """Prompt tokens behind the longest prefix that an earlier line has."""


def read_trace(path: Path, limit: int = MAX_LINES) -> list[TracedRequest]:
    """Reads and checks the whole file. Returns the first ``limit`` requests.

    A line continues the conversation of the earlier line with the longest prompt whose complete blocks it
    begins with. TraceError: a line is not valid. OSError: the file is not readable.
    """
    prefixes = _Prefixes()
    requests: list[TracedRequest] = []
    began = before = ids = 0.0
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(raw) > MAX_LINE_BYTES:
                raise TraceError(f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")
            if number > MAX_LINES:
                raise TraceError(f"{where}: a trace has at most {MAX_LINES:,} lines. Split the file")
            line = _line(where, raw)
            if line.timestamp < before:
                raise TraceError(f"{where}: timestamp {line.timestamp:g} is before that of the line above")
            ids += len(line.hash_ids)
            if ids > MAX_IDS:
                raise TraceError(f"{where}: a trace has at most {MAX_IDS:,} hash_ids. Split the file")
            began, before = began if requests else line.timestamp, line.timestamp
            if len(requests) < limit:
                conversation, turn, known = prefixes.add(line)
                requests.append(
                    TracedRequest(
                        at=(line.timestamp - began) / 1e3,
                        input_tokens=line.input_length,
                        output_tokens=line.output_length,
                        blocks=tuple(line.hash_ids),
                        conversation=conversation,
                        turn=turn,
                        new_tokens=max(0, line.input_length - known),
                    )
                )
    if not requests:
        raise TraceError(f"{path}: the file has no lines")
    return requests


def _line(where: str, raw: bytes) -> _Line:
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except UNREADABLE as error:
        raise TraceError(f"{where}: {error}") from None
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != blocks:
        raise TraceError(
            f"{where}: {len(line.hash_ids)} hash_ids for {line.input_length} tokens. A block has "
            f"{BLOCK_TOKENS} tokens, so {blocks} are needed"
        )
    return line


class _Prefixes:
    """A tree of all prompts, by blocks."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        """{(node, block): node behind the block}; 0 is the root."""
        self._ends: dict[int, tuple[int, int]] = {}
        """{node: (conversation, turn) of the last prompt whose complete blocks end there}"""
        self._conversations = 0

    def add(self, line: _Line) -> tuple[int, int, int]:
        """Adds a line. Returns its conversation, its turn, and its prompt tokens that an earlier line has."""
        node, known, path = 0, 0, []
        continued: tuple[int, int] | None = None
        for block in line.hash_ids:
            following = self._nodes.get((node, block))
            if following is None:
                following = self._nodes[node, block] = len(self._nodes) + 1
            else:
                known += BLOCK_TOKENS
            node = following
            path.append(node)
            continued = self._ends.get(node, continued)
        if continued is None:
            self._conversations += 1
            continued = self._conversations, 0
        conversation, turn = continued[0], continued[1] + 1
        if complete := line.input_length // BLOCK_TOKENS:
            self._ends[path[complete - 1]] = conversation, turn
        return conversation, turn, known
