"""The house rules of tests: pytest and imports find each module by its name alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[2]
AS_PACKAGES = ("simulation", "fuzz", "conformance", "soak")
SPECIAL = {"conftest.py", "__init__.py", "__main__.py"}


def test_no_two_modules_have_one_name() -> None:
    """Modules of packages are exempt: they are imported by their whole names."""
    names = Counter(
        path.name
        for path in TESTS.rglob("*.py")
        if path.name not in SPECIAL and path.relative_to(TESTS).parts[0] not in AS_PACKAGES
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_folder_takes_the_name_of_a_package() -> None:
    """A folder `vllm` on sys.path is found even without vLLM: `importorskip("vllm")` would not skip."""
    folders = {path.parent.name for path in TESTS.rglob("*.py")}
    assert folders.isdisjoint({"vllm", "sglang", "ray", "verl", "torch", "dynamo"})
