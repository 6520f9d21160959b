"""scripts/test_all.py: the suites that it runs, the results that it keeps, and its table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from repository import git

SCRIPT = Path(__file__).parents[3] / "scripts/test_all.py"


@pytest.fixture(scope="module")
def test_all() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_all_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("build/\nruns\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def runs(root: Path) -> list[str]:
    path = root / "runs"
    return path.read_text().split() if path.exists() else []


def test_a_broken_off_run_continues_behind_what_passed(test_all: ModuleType, root: Path) -> None:
    good = test_all.Suite("good", "echo good >>runs; echo '== 3 passed in 1s =='", 1)
    bad = test_all.Suite("bad", "echo bad >>runs; echo broken; exit 3", 1)
    assert test_all.main([], root=root, suites=(good, bad)) == 1
    mended = test_all.Suite("bad", "echo mended >>runs; echo '1 passed'", 1)
    assert test_all.main([], root=root, suites=(good, mended)) == 0
    assert runs(root) == ["good", "bad", "mended"]
    (root / "new").write_text("a change: nothing is known of this state")
    assert test_all.main(["good"], root=root, suites=(good, mended)) == 0
    assert runs(root) == ["good", "bad", "mended", "good"]


def test_the_table_has_every_suite_with_commit_result_and_reason(
    test_all: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = (
        test_all.Suite("good", "echo '== 3 passed in 1s =='", 1),
        test_all.Suite("bad", "echo first; echo broken; exit 3", 1),
        test_all.Suite("idle", "echo '== 2 skipped in 1s =='", 1),
        test_all.Suite("later", "echo 1 passed", 1),
    )
    assert test_all.main(["good", "bad", "idle"], root=root, suites=suites) == 1
    written = (root / "build/test-all/table.md").read_text()
    assert capsys.readouterr().out.endswith(written)
    rows = {row.split(" | ")[0].strip("| "): row for row in written.splitlines()[2:]}
    commit, _ = test_all.state_of(root)
    assert f"| {commit} | passed |" in rows["good"]
    assert "3 passed" in rows["good"]
    assert "| failed |" in rows["bad"]
    assert "status 3: broken" in rows["bad"]
    assert "| not run |" in rows["idle"]
    assert "not started" in rows["later"]
    assert (root / "build/test-all/bad.log").read_text() == "first\nbroken\n"


def test_a_suite_that_hangs_ends_with_all_its_processes(
    test_all: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.lab.process.STOP_SECONDS", 0.3)
    hangs = test_all.Suite("hangs", "trap '' TERM; sleep 1000 & echo $! >>runs; wait; sleep 1000", 0.01)
    assert test_all.main([], root=root, suites=(hangs,)) == 1
    assert "timed out" in (root / "build/test-all/table.md").read_text()
    status = Path("/proc") / runs(root)[0] / "stat"
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/contribute/releasing.md"])
def test_documents_have_the_sum_of_the_durations(test_all: ModuleType, document: str) -> None:
    hours = sum(suite.minutes for suite in test_all.SUITES) / 60
    assert f" {hours:.1f} hours " in (SCRIPT.parents[1] / document).read_text()


def test_every_suite_is_a_target_of_the_makefile(test_all: ModuleType) -> None:
    makefile = (SCRIPT.parents[1] / "Makefile").read_text()
    for suite in test_all.SUITES:
        words = suite.command.split()
        assert words[0] == "bash" or f"\n{words[1]}:" in makefile
    outside = {"test-native", "test-simulation", "test-python", "test-all", "test-upstream"}
    for line in makefile.splitlines():
        name = line.partition(":")[0]
        if name.startswith("test-") and name not in outside:
            assert any(name in suite.command.split() for suite in test_all.SUITES), f"{name} is in no table"
