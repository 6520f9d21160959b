"""The native rooms, and the headers that each of them may include.

docs/architecture.md describes them. The test reads the source. native/tests may include everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms import NATIVE_ROOMS as ROOMS
from rooms import ways_back

NATIVE = Path(__file__).parents[3] / "native"
SOURCES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')


def room_of(path: str) -> str:
    """Returns the room of a path below native: its folder, and below providers each folder or unit."""
    unit = path.rpartition(".")[0]
    first, _, rest = unit.partition("/")
    return f"{first}/{rest.partition('/')[0]}" if first == "providers" else first


def sources() -> Iterator[tuple[str, Path]]:
    for path in sorted(NATIVE.rglob("*")):
        name = path.relative_to(NATIVE).as_posix()
        if path.suffix in SOURCES and not name.startswith("tests/"):
            yield name, path


def included(room: str) -> Iterator[tuple[str, str]]:
    """Yields (where, header) for each include of a project's header in the room."""
    for name, path in sources():
        if room_of(name) == room:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if found := INCLUDE.match(line):
                    yield f"{name}:{number}", found[1]


def test_each_native_source_lies_in_a_room() -> None:
    assert {room_of(name) for name, _ in sources()} == set(ROOMS)


def test_the_native_table_has_no_way_back() -> None:
    assert ways_back(ROOMS) == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_native_room_includes_only_what_its_arrows_lead_to(room: str) -> None:
    allowed = {room, *ROOMS[room]}
    wrong = [
        f"{where} includes {header}"
        for where, header in included(room)
        if room_of(header) not in allowed or not (NATIVE / header).is_file()
    ]
    assert not wrong
