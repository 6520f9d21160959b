"""Documents' generated tables, and documents' quotations of the code: neither may be out of date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import reference

from kv_connector.agent.settings import SETTINGS, TIMEOUTS, AgentSettings
from kv_connector.cli.common.environment import VARIABLES
from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.engine.transfer_engine import providers
from kv_connector.protocol.timeouts import Timeouts

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})


def test_every_generated_table_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/reference.py", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_stale_table_is_reported_and_regenerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- generated: timeouts dead -->\n| old |\n<!-- end -->\nafter\n")
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    assert page.read_text().startswith("before\n<!-- generated: timeouts dead -->\n\n| timeout |")
    assert "| `dead` | 5 | " in page.read_text()
    assert page.read_text().endswith("\n\n<!-- end -->\nafter\n")


@pytest.mark.parametrize(
    ("page", "data", "error"),
    [
        ("<!-- generated: timeouts -->\nold\n", None, "needs one `<!-- end -->`"),
        (
            "<!-- generated: timeouts -->\n\ntext\n\n<!-- generated: statuses -->\n<!-- end -->\n",
            None,
            "needs one `<!-- end -->`",
        ),
        ("<!-- generated: tables -->\n<!-- end -->\n", None, "no such table"),
        ("<!-- generated: timeouts dead deaf -->\n<!-- end -->\n", None, "no such rows: deaf"),
        ("<!-- generated: run -->\n<!-- end -->\n", None, "name one file"),
        ("<!-- generated: run a -->\n<!-- end -->\n", None, r"a\.json: No such file"),
        ("<!-- generated: run a -->\n<!-- end -->\n", "{", r"a\.json: not a recorded run"),
        ("<!-- generated: run a -->\n<!-- end -->\n", "[]", r"a\.json: not a recorded run"),
        ("<!-- generated: run a -->\n<!-- end -->\n", "{}", r"a\.json: the field 'log' is missing"),
    ],
)
def test_a_table_that_cannot_be_made_is_an_error(
    page: str, data: str | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    (tmp_path / "docs/data").mkdir(parents=True)
    (tmp_path / "README.md").write_text(page)
    if data is not None:
        (tmp_path / "docs/data/a.json").write_text(data)
    with pytest.raises(SystemExit, match=error):
        reference.main([])
    assert (tmp_path / "README.md").read_text() == page


def test_a_summary_replaces_the_method_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    (tmp_path / "docs/data").mkdir(parents=True)
    recorded = {
        "log": "log.md#run",
        "method": "M.",
        "machine": "H",
        "date": "D",
        "command": "C",
        "summary": "Short.",
    }
    (tmp_path / "docs/data/a.json").write_text(json.dumps(recorded))
    blocks = {kind: f"<!-- generated: {kind} a -->\n<!-- end -->\n" for kind in ("run", "summary")}
    (tmp_path / "README.md").write_text("".join(blocks.values()))
    assert reference.main([]) == 0
    run, summary = (tmp_path / "README.md").read_text().split("<!-- end -->\n", 1)
    assert "M. Machine: H. Date: D. Command: `C`. [Log](docs/log.md#run)." in run
    assert summary.splitlines()[2] == "Short. [Log](docs/log.md#run)."


def test_an_unknown_option_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("<!-- generated: timeouts dead -->\n| old |\n<!-- end -->\n")
    with pytest.raises(SystemExit):
        reference.main(["--chekc"])
    assert "| old |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("owner", "names"),
    [(AgentSettings, SETTINGS), (Timeouts, TIMEOUTS), (ExitStatus, tuple(ExitStatus.__members__))],
)
def test_every_field_is_described(owner: type, names: tuple[str, ...]) -> None:
    assert tuple(reference.field_docs(owner)) == names


def test_setting_without_a_fixed_default_describes_what_happens() -> None:
    _, rows = reference.settings()
    assert not [row for row in rows if row[2] in ("`null`", "`[]`", "`{}`", "")]


def test_every_variable_that_the_code_reads_is_described() -> None:
    sources = [*(ROOT / "kv_connector").rglob("*.py"), *(ROOT / "native").rglob("*.cc")]
    found = {
        name for file in sources for name in re.findall(r"[\"'](KV_CONNECTOR_[A-Z_]+)[\"']", file.read_text())
    }
    assert found == set(VARIABLES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_metrics_that_there_are(document: Path) -> None:
    tables = (
        reference.engine_metrics(),
        reference.weight_metrics(),
        reference.moe_metrics(),
        reference.router_metrics(),
    )
    known = {one.name for table in tables for one in table}
    text = re.sub(r"kv_connector_extra_config|kv_connector_module_path", "", document.read_text())
    named = set(re.findall(r"(?<![\w/.])kv_connector_\w+", text))
    # A histogram's series, and a name without its suffix.
    assert not {
        name
        for name in named
        if not {name, name + "_total", re.sub("_(bucket|count|sum)$", "", name)} & known
    }


def test_compatibility_has_every_lane() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    lanes = re.findall(r"^\| `(\w+)` \|", page.partition("| lane | for |")[2], re.MULTILINE)
    known = [status.name for status in providers() if status.name not in ("sim", "shuffle")]
    assert sorted(lanes[: len(known)]) == sorted(known)
