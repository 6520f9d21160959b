"""The house rules of sources: their length, and the names of their classes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("kv_connector", "native", "scripts", "integration")
SUFFIXES = {".py", ".pyi", ".sh", ".h", ".cc", ".cu", ".cuh"}
LIMIT = 600
"""Most lines of a source."""
LONGER = {
    "kv_connector/protocol/prefill/prefill_machine.py": "one state machine: all parts use its shares",
    "integration/benchmarks/gpu_experts.py": "one program: its shapes, ranks and comparison",
}
"""Sources that may have more lines than LIMIT, each with the reason."""


def sources() -> Iterator[tuple[str, Path]]:
    """Yields (name, path) of each source that the limit holds for. Tests are exempt."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and not name.startswith("native/tests/"):
                yield name, path


def test_no_source_has_more_lines_than_the_limit() -> None:
    """An exception that is no longer needed fails too."""
    assert {name for name, path in sources() if len(path.read_text().splitlines()) > LIMIT} == set(LONGER)


def test_no_class_name_occurs_twice_in_a_room() -> None:
    """A folder of the package is a room, and so is each folder in it. `_Name` and `Name` count as one
    name."""
    places = defaultdict(list)
    for name, path in sources():
        if name.startswith("kv_connector/") and path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    room = Path(name).parent.as_posix()
                    places[room, node.name.lstrip("_")].append(f"{name}:{node.lineno}")
    assert places
    assert [found for found in places.values() if len(found) > 1] == []


def test_no_native_test_expects_behind_an_if_without_braces() -> None:
    """g++ refuses the `else` in gtest's macros there. clang++, which builds the tests in CI, does not."""
    unbraced = re.compile(r"^\s*(?:\} )?(?:else )?(?:if .*\)|else)\s+(?:EXPECT|ASSERT)_", re.MULTILINE)
    tests = sorted((ROOT / "native" / "tests").glob("*.*"))
    assert tests
    assert [path.name for path in tests if unbraced.search(path.read_text())] == []


def test_native_code_uses_only_what_the_libcxx_of_the_wheels_has() -> None:
    """`make wheels` compiles with clang and libc++, and all other targets with another C++ library."""
    absent = re.compile(r"std::atomic<std::(shared|weak)_ptr")
    assert not [
        name for name, path in sources() if name.startswith("native/") and absent.search(path.read_text())
    ]
