"""Numbers that a person gives a suite: a wrong one ends it with its name, its value and what is allowed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from suite_numbers import positive_of, whole_of

ROOT = Path(__file__).parents[3]
VARIABLE = "KVC_OF_THIS_TEST"


@pytest.mark.parametrize("text", ["zero", "0", "-3", "1.5", "", "1e3"])
def test_wrong_whole_number_names_the_variable_and_its_value(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(
        pytest.Collector.CollectError, match=f"{VARIABLE}: '{text}' is not a whole number of at least 1"
    ):
        whole_of(VARIABLE, 7)


@pytest.mark.parametrize("text", ["abc", "0", "-3", "nan", "inf", ""])
def test_wrong_number_names_the_variable_and_its_value(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(pytest.Collector.CollectError, match=f"{VARIABLE}: '{text}' is not a number above 0"):
        positive_of(VARIABLE, 7.0)


def test_right_numbers_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (whole_of(VARIABLE, 7), positive_of(VARIABLE, 7.5)) == (7, 7.5)
    monkeypatch.setenv(VARIABLE, "12")
    assert (whole_of(VARIABLE, 7), positive_of(VARIABLE, 7.5)) == (12, 12.0)


def test_wrong_variable_ends_its_suite_without_a_traceback(tmp_path: Path) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(f"from suite_numbers import whole_of\nNUMBER = whole_of({VARIABLE!r}, 7)\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(suite)]
    done = subprocess.run(
        command, env={**os.environ, VARIABLE: "zero"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{VARIABLE}: 'zero' is not a whole number of at least 1" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("module", ["tests.fuzz.splice", "tests.simulation"])
@pytest.mark.parametrize("text", ["zero", "0"])
def test_wrong_number_of_seeds_ends_a_fuzzer_without_a_traceback(module: str, text: str) -> None:
    """No seed would be no fault found, and status 0."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--seeds", text],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(f"argument --seeds: .*{text}", done.stderr)


def test_no_suite_reads_a_number_from_its_environment_by_itself() -> None:
    suites = [path for path in (ROOT / "tests").rglob("*.py") if "unit" not in path.parts]
    found = [path for path in suites if re.search(r"(?:int|float)\(os\.environ", path.read_text())]
    # This program runs without pytest, on machines with GPUs.
    assert [path.relative_to(ROOT) for path in found] == [Path("tests/gpu/moe.py")]
