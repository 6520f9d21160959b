"""The published packages: an inexpensive part of the checks of `make wheels` and `make test-wheels`."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest

import kv_connector

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


def test_the_sdist_has_what_is_built_and_tested_and_nothing_else(sdist: Path) -> None:
    assert sdist.name == f"kv_connector-{kv_connector.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    published = {"kv_connector", "native", "integration", "tests", "examples", "docs", "scripts"}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders <= published
    wanted = {
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "PKG-INFO",
        "scripts/wheels",
        "native/cuda/kernels.cu",
    }
    assert wanted <= names
    packages = {str(path.relative_to(ROOT)) for path in (ROOT / "kv_connector").rglob("*.py")}
    assert packages <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", ".log"))]


def test_wheels_are_made_for_the_pythons_that_the_metadata_names(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"kv_connector-{kv_connector.__version__}/PKG-INFO")
        assert member is not None
        metadata = Parser().parsestr(member.read().decode())
    named = [
        version
        for classifier in metadata.get_all("Classifier", [])
        if (version := classifier.removeprefix("Programming Language :: Python :: ")).startswith("3.")
    ]
    script = (ROOT / "scripts/wheels").read_text()
    made = re.search(r"\$\{PYTHONS:-([0-9. ]+)\}", script)
    assert made is not None
    assert made[1].split() == named
    assert metadata["Requires-Python"] == f">={named[0]}"


def test_wheels_are_built_by_what_pip_would_build_with() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "integration/wheels/packages.txt").read_text().splitlines()
        if "==" in line
    )
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in required:
        name, lowest = re.split(r">=|,", requirement)[:2]
        assert tuple(map(int, pinned[name].split("."))) >= tuple(map(int, lowest.split(".")))
