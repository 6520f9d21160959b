"""Trace files in Mooncake's format: what is read, and what is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kv_connector.bench.conversations import trace
from kv_connector.bench.conversations.trace import TraceError, read_trace


def write(path: Path, *lines: Any) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def line(timestamp: float, tokens: int, *ids: int, answer: int = 10) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": answer, "hash_ids": list(ids)}


def test_trace_has_times_after_its_first_line_and_turns_by_prefixes(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        line(5000, 1100, 1, 2, 3),
        line(5500, 700, 1, 9),
        {**line(7000, 1600, 1, 2, 4, 5), "session_id": "ignored"},
        line(7000, 1500, 7, 8, 10),
        line(9000, 2048, 1, 2, 4, 11),
    )
    requests = read_trace(file)
    assert [request.at for request in requests] == [0.0, 0.5, 2.0, 2.0, 4.0]
    assert [(request.conversation, request.turn) for request in requests] == [
        (1, 1),
        (2, 1),
        (1, 2),
        (3, 1),
        (1, 3),
    ]
    assert [request.new_tokens for request in requests] == [1100, 188, 576, 1500, 512]
    assert (requests[0].blocks, requests[0].output_tokens) == ((1, 2, 3), 10)


def test_trace_is_read_up_to_the_limit_and_checked_to_its_end(tmp_path: Path) -> None:
    good, bad = line(0, 10, 1), "nonsense"
    assert len(read_trace(write(tmp_path, good, good, good), 2)) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(write(tmp_path, good, good, bad), 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "line 2: JSON is malformed"),
        ('{"x":' + "[" * 100_000, "line 2: maximum recursion depth exceeded"),
        ("", "line 2: Input data was truncated"),
        ("[1]", "line 2: Expected `object`"),
        ('{"timestamp": 1}', "line 2: Object missing required field `input_length`"),
        (json.dumps(line(1, 0)), "line 2: Expected `int` >= 1 - at `$.input_length`"),
        (json.dumps(line(1, 1 << 40, 1)), "line 2: Expected `int` <= 16777216 - at `$.input_length`"),
        (json.dumps(line(1, 10, 1, answer=0)), "at `$.output_length`"),
        (json.dumps(line(-1, 10, 1)), "line 2: Expected `float` >= 0.0 - at `$.timestamp`"),
        (json.dumps(line(1, 10, -1)), "at `$.hash_ids[0]`"),
        (json.dumps({**line(1, 10, 1), "hash_ids": ["a"]}), "Expected `int`, got `str`"),
        (json.dumps(line(1, 1025, 1, 2)), "line 2: 2 hash_ids for 1025 tokens. A block has 512 tokens, so 3"),
        (json.dumps(line(0.5, 10, 1)), "line 2: timestamp 0.5 is before that of the line above"),
    ],
)
def test_trace_refuses_a_line_by_its_number(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TraceError) as raised:
        read_trace(write(tmp_path, line(1, 10, 1), text))
    assert words in str(raised.value)
    assert "trace.jsonl, line 2: " in str(raised.value)


def test_trace_refuses_a_line_that_is_not_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b'{"hash_ids": ["\xff"], "other": "\xff"}\n')
    with pytest.raises(TraceError, match="line 1: "):
        read_trace(file)


def test_trace_refuses_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the file has no lines"):
        read_trace(write(tmp_path))


@pytest.mark.parametrize(
    ("bound", "value", "words"),
    [
        ("MAX_LINES", 1, "line 2: a trace has at most 1 lines"),
        ("MAX_LINE_BYTES", 30, "line 1: the line is longer than"),
        ("MAX_IDS", 1, "line 2: a trace has at most 1 hash_ids"),
    ],
)
def test_trace_refuses_what_exceeds_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, words: str
) -> None:
    monkeypatch.setattr(trace, bound, value)
    with pytest.raises(TraceError, match=words):
        read_trace(write(tmp_path, line(0, 10, 1), line(1, 10, 1)))
