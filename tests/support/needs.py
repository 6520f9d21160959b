"""Optional packages that tests need, by folder or file, as markers that `-m` selects.

If a package is missing, the tests that import it are left out, and pytest's header reports it. KVC_WITHOUT
names packages that count as missing. `make check` names vLLM and torch: each of its processes would take ten
seconds to import them.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
MARKERS = {"needs_vllm": "vllm", "needs_torch": "torch"}
"""Marker: the package whose absence leaves a test out."""
WITHOUT = frozenset(os.environ.get("KVC_WITHOUT", "").split(","))
NEEDS = {
    "needs_vllm": (
        "conversations",
        "faults",
        "fleet",
        "fuzz/test_scheduler.py",
        "topologies",
        "unit/vllm_adapter",
        "with_vllm",
    ),
    "needs_torch": (
        "unit/bench/test_moe_bench.py",
        "unit/moe",
        "unit/sglang_adapter/test_sglang_experts.py",
        "unit/sglang_adapter/test_sglang_metadata_rows.py",
        "unit/verl_adapter",
        "unit/weights",
    ),
}
"""Marker: folders and files below tests."""


def markers_of(path: Path) -> list[str]:
    """The markers of a test file."""
    if not path.is_relative_to(TESTS):
        return []
    below = path.relative_to(TESTS)
    return [marker for marker, places in NEEDS.items() if any(below.is_relative_to(p) for p in places)]


@cache
def missing(package: str) -> bool:
    return package in WITHOUT or importlib.util.find_spec(package) is None


def left_out(path: Path) -> bool:
    """Whether a file or folder needs a package that is missing."""
    return any(missing(MARKERS[marker]) for marker in markers_of(path))


def reason(package: str) -> str:
    """Why the package counts as missing."""
    return f"{package} is in KVC_WITHOUT" if package in WITHOUT else f"{package} is not installed"


def header() -> list[str]:
    """A line for each package that is missing."""
    return [
        f"{reason(package)}; left out: {', '.join(f'tests/{place}' for place in NEEDS[marker])}"
        for marker, package in MARKERS.items()
        if missing(package)
    ]
