"""scripts/same_code.py: texts may differ, code may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import git
from same_code import cpp_code, main, python_code

PYTHON = '''"""Module."""
X = 1  # one
"""Field."""


def f() -> str:
    """Does it."""
    return "text"
'''


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("Module.", "Another.", True),
        ("Field.", "Another.", True),
        ("Does it.", "Does\n    more.", True),
        ("  # one", "", True),
        ('    """Does it."""\n', "", True),
        ('"text"', '"other"', False),
        ("X = 1", "X = 2", False),
        ("def f", "def g", False),
    ],
)
def test_python_differs_only_by_its_code(before: str, after: str, same: bool) -> None:
    assert before in PYTHON
    assert (python_code(PYTHON) == python_code(PYTHON.replace(before, after))) is same


CPP = """// Text.
#define A 1  // one
int a = f(1'000,
          'x');  /* more */
const char* b = "// no comment";
int c = a - -b;
"""


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("// Text.\n", "", True),
        ("// one", "", True),
        ("/* more */", "// less", True),
        ("1'000,\n          ", "1'000, ", True),
        ("// no comment", "// a string", False),
        ("1'000", "1'001", False),
        ("'x'", "'y'", False),
        ("- -b", "--b", False),
        ("A 1  // one\n", "A 1 ", False),
        ("// one\n", "// one \\\n", False),
    ],
)
def test_cpp_differs_only_by_its_code(before: str, after: str, same: bool) -> None:
    assert before in CPP
    assert (cpp_code(CPP) == cpp_code(CPP.replace(before, after))) is same


def test_main_prints_the_files_whose_code_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "init")
    for name, text in (("text.py", PYTHON), ("code.py", PYTHON), ("text.h", CPP), ("code.h", CPP)):
        (tmp_path / name).write_text(text)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "files")
    (tmp_path / "text.py").write_text(PYTHON.replace("Does it.", "Another."))
    (tmp_path / "text.h").write_text(CPP.replace("Text.", "Another."))
    monkeypatch.chdir(tmp_path)
    assert main(["HEAD"]) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "code.py").write_text(PYTHON.replace("X = 1", "X = 2"))
    (tmp_path / "code.h").write_text(CPP.replace("int c", "long c"))
    assert main(["HEAD"]) == 1
    assert capsys.readouterr().out == "code.h: its code changed\ncode.py: its code changed\n"
    assert main(["HEAD", "text.py", "text.h"]) == 0
    (tmp_path / "new.py").write_text(PYTHON)
    assert main(["HEAD", "new.py"]) == 1
    assert capsys.readouterr().out.endswith("new.py: added\n")


def test_files_that_cannot_be_compared_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main([*arguments]) == 2
        return capsys.readouterr().err

    git(tmp_path, "init")
    (tmp_path / "a.py").write_text(PYTHON)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a file")
    monkeypatch.chdir(tmp_path)
    assert "nosuch" in refused("nosuch")
    assert "nosuch.py: no such file" in refused("HEAD", "nosuch.py")
    (tmp_path / "a.py").write_text("def f(:\n")
    assert "a.py:1: invalid syntax" in refused("HEAD")
    (tmp_path / "a.py").write_bytes(b"# \xe9\n")
    assert "a.py: 'utf-8' codec" in refused("HEAD")
