"""The build with the thread sanitizer leaves out native tests, but none that starts a thread.

The test reads the source. Providers start no thread, and whoever makes a transfer engine starts two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "native/tests"
LEFT_OUT = re.findall(
    r"\w+",
    re.findall(r"set\(kvc_of_one_thread ([\w\s]+)\)", (ROOT / "CMakeLists.txt").read_text())[0],
)
STARTS = re.compile(r"std::j?thread\b(?!::)|std::async|pthread_create")
MAKES_ENGINES = re.compile(r"\bSide\b|TransferEngine::create|\b(Control|Domain|Transfer)Thread\b [^(]")
INCLUDE = re.compile(r'^#include "(?:tests/)?(\w+\.h)"', re.MULTILINE)


def with_headers(path: Path) -> Iterator[Path]:
    """Yields the file and the headers of tests that it includes, directly or not."""
    found = [path]
    for one in found:
        yield one
        headers = [TESTS / name for name in INCLUDE.findall(one.read_text())]
        found += [header for header in headers if header.is_file() and header not in found]


def test_some_native_test_starts_threads() -> None:
    assert [path for path in TESTS.glob("*_test.cc") if STARTS.search(path.read_text())]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_native_test_without_thread_sanitizer_starts_no_thread(name: str) -> None:
    test = TESTS / f"{name}_test.cc"
    starting = [path.name for path in with_headers(test) if STARTS.search(path.read_text())]
    assert starting == [], "run it under the thread sanitizer, too: CMakeLists.txt"
    assert not MAKES_ENGINES.search(test.read_text()), "run it under the thread sanitizer, too"
