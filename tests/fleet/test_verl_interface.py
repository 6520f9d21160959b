"""The checkpoint engine for verl beside the base class of verl's wheel. Only sources are read."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import kv_connector

VERL = importlib.util.find_spec("verl")


def calls(path: Path, name: str) -> dict[str, tuple[type[ast.stmt], list[str]]]:
    """Returns the kind and the arguments of each method of a class."""
    (found,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {
        node.name: (type(node), [argument.arg for argument in node.args.args])
        for node in found.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.skipif(VERL is None, reason="verl is not installed: run scripts/setup fleet")
def test_the_checkpoint_engine_has_the_calls_of_verls_base_class() -> None:
    assert VERL is not None
    assert VERL.origin is not None
    theirs = calls(Path(VERL.origin).parent / "checkpoint_engine" / "base.py", "CheckpointEngine")
    ours = calls(
        Path(kv_connector.__file__).parent / "verl" / "checkpoint_engine.py", "WriteImmCheckpointEngine"
    )
    # Its arguments are those that build_topology() returns.
    assert ours.pop("init_process_group")[0] is theirs.pop("init_process_group")[0]
    assert len(theirs) == 5
    assert {name: ours[name] for name in theirs} == theirs
