"""The hosted workflows and templates: what a test can say about them without the host that runs them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import test_all  # noqa: E402 (the path above)

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


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


def test_the_gate_is_ci_run_and_nothing_else() -> None:
    assert [step.get("run") for step in steps(ROOT / ".github/workflows/tests.yml")][-1:] == ["bash .ci/run"]


def test_each_nightly_suite_exists() -> None:
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    suites = nightly["jobs"]["suite"]["strategy"]["matrix"]["suite"]
    assert set(suites) <= {suite.name for suite in test_all.SUITES}


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


@pytest.mark.parametrize("template", ["bug", "performance", "feature"])
def test_each_issue_template_asks_for_something(template: str) -> None:
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{template}.yml").read_text())
    required = [field for field in form["body"] if field.get("validations", {}).get("required")]
    assert form["name"]
    assert required
