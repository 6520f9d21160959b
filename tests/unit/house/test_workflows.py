"""The hosted workflows and templates: what a test can say about them without the host that runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import test_all  # noqa: E402 (the path above)

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
DEVCONTAINER = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def test_there_are_the_five_workflows() -> None:
    assert [workflow.stem for workflow in WORKFLOWS] == ["check", "docs", "nightly", "tests", "wheels"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_action_is_pinned_by_commit(workflow: Path) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_job_names_the_release_of_its_machine_and_of_its_image(workflow: Path) -> None:
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        assert re.fullmatch(r"ubuntu-\d+\.\d+", job["runs-on"])
        container = job.get("container", DEVCONTAINER["image"])
        assert (container if isinstance(container, str) else container["image"]) == DEVCONTAINER["image"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_job_has_a_time_limit_and_each_workflow_few_rights(workflow: Path) -> None:
    described = yaml.safe_load(workflow.read_text())
    assert described["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 180 for job in described["jobs"].values())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_target_of_make_exists(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    runs = [step.get("run", "") for step in steps(workflow)]
    called = {target for run in runs for target in re.findall(r"^make ([a-z-]+)", run, re.MULTILINE)}
    if workflow.stem != "tests":
        assert called
    assert called <= targets


def test_the_devcontainer_is_set_up_as_the_workflows_are() -> None:
    installs = {
        step["run"] for workflow in WORKFLOWS for step in steps(workflow) if "apt-get" in step.get("run", "")
    }
    (install,) = installs
    assert DEVCONTAINER["onCreateCommand"].startswith(f"{install} && ")
    assert re.fullmatch(r"debian:\d+", DEVCONTAINER["image"])
    assert DEVCONTAINER["postCreateCommand"] == "make setup"


@pytest.mark.parametrize(("tag", "status"), [("v0.1.0", 0), ("v0.1.1", 2), ("v0.1", 2)])
def test_a_tag_of_another_version_is_not_published(tmp_path: Path, tag: str, status: int) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/kv_connector-0.1.0.tar.gz").touch()
    publish = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]["publish"]["steps"]
    assert "pypi-publish" in publish[-1]["uses"]
    done = subprocess.run(
        ["bash", "-e", "-c", publish[-2]["run"]],
        cwd=tmp_path,
        env={**os.environ, "GITHUB_REF_NAME": tag},
        capture_output=True,
        check=False,
    )
    assert done.returncode == status


def test_gate_alone_requests_warnings_as_errors() -> None:
    assert "KVC_WARNINGS_AS_ERRORS=ON make prepared" in (ROOT / ".ci/run").read_text().splitlines()
    for file in ("pyproject.toml", "CMakeLists.txt"):
        assert "WARNING_AS_ERROR" not in (ROOT / file).read_text()


def test_the_gate_is_ci_run_and_nothing_else() -> None:
    assert [step.get("run") for step in steps(ROOT / ".github/workflows/tests.yml")][-1:] == ["bash .ci/run"]


def test_a_release_has_a_python_for_each_wheel_that_its_machine_can_test() -> None:
    (made,) = re.findall(r"PYTHONS:-([\d. ]+)", (ROOT / "scripts/wheels").read_text())
    build = steps(ROOT / ".github/workflows/wheels.yml")
    (installed,) = re.findall(
        r"uv python install ([\d. ]+)", "\n".join(step.get("run", "") for step in build)
    )
    assert sorted(["3.11", *installed.split()]) == made.split()  # Debian 12 has Python 3.11
    (test,) = [step for step in build if step.get("run") == "make test-wheels"]
    assert test["env"] == {"REQUIRED": "x86_64"}


@pytest.mark.parametrize(("required", "status"), [("", 0), ("aarch64", 0), ("x86_64", 1)])
def test_a_wheel_that_is_left_out_fails_the_test_of_wheels_if_required(
    tmp_path: Path, required: str, status: int
) -> None:
    script = tmp_path / "integration/wheels/test"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "integration/wheels/test", script)
    (tmp_path / "dist").mkdir()
    # CPython 3.99 is on no machine.
    (tmp_path / "dist/kv_connector-1.0-cp399-cp399-manylinux_2_28_x86_64.whl").touch()
    done = subprocess.run(
        [script], env={**os.environ, "REQUIRED": required}, capture_output=True, text=True, check=False
    )
    assert "left out: no CPython 3.99 for x86_64" in done.stdout
    assert done.returncode == status, done.stderr


NOT_HOSTED = {
    "compose": "builds images: the container of a job has no Docker",
    "verbs": "its VM runs from /dev/shm, which Docker mounts with noexec",
}
"""Suites of scripts/test_all.py that no workflow runs, with the reasons."""


def nightly_suites() -> list[str]:
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    suites: list[str] = nightly["jobs"]["suite"]["strategy"]["matrix"]["suite"]
    return suites


def suites_by_command() -> set[str]:
    """Suites whose whole command is a sequence of steps in one job of a workflow."""
    jobs = [
        [step.get("run", "") for step in job["steps"]]
        for workflow in WORKFLOWS
        for job in yaml.safe_load(workflow.read_text())["jobs"].values()
    ]
    return {
        suite.name
        for suite in test_all.SUITES
        if any(set(suite.command.split(" && ")).issubset(runs) for runs in jobs)
    }


def test_each_nightly_suite_exists() -> None:
    suites = nightly_suites()
    assert len(set(suites)) == len(suites)
    assert set(suites) <= {suite.name for suite in test_all.SUITES}


def test_each_suite_is_run_by_a_workflow_or_has_a_reason() -> None:
    hosted = {*nightly_suites(), *suites_by_command()}
    assert hosted.isdisjoint(NOT_HOSTED)
    assert {*hosted, *NOT_HOSTED} == {suite.name for suite in test_all.SUITES}


def test_the_releasing_page_counts_the_suites_of_the_workflows() -> None:
    page = (ROOT / "docs/contribute/releasing.md").read_text()
    assert suites_by_command() == {"ci", "wheels"}
    of_main = {*nightly_suites(), "ci"}  # wheels.yml runs for tags
    assert f"`nightly.yml` run {len(of_main)} of its {len(test_all.SUITES)} suites for main" in page
    assert all(f"`{name}`" in page for name in NOT_HOSTED)


def test_pre_commit_runs_what_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {
        "ruff",
        "ruff-format",
        "clang-format",
        "text",
        "reference",
        "commit-subject",
    }
    programs = [hook["entry"].split()[1] for hook in hooks if "scripts/" in hook["entry"]]
    assert all((ROOT / program).is_file() for program in programs)


def test_ruff_reads_each_python_program_without_a_suffix_as_pre_commit_does() -> None:
    files = [path for folder in ("scripts", "integration", "examples") for path in (ROOT / folder).rglob("*")]
    programs = [
        path.relative_to(ROOT).as_posix()
        for path in files
        if not path.suffix and path.is_file() and re.match(rb"#!.*python", path.read_bytes()[:80])
    ]
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert ruff["extend-include"] == programs


@pytest.mark.parametrize("template", ["bug", "performance", "feature"])
def test_each_issue_template_requires_a_field(template: str) -> None:
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{template}.yml").read_text())
    required = [field for field in form["body"] if field.get("validations", {}).get("required")]
    assert form["name"]
    assert required
