"""kv_connector/_native.pyi describes the compiled module exactly, parameters included."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kv_connector
from kv_connector import _native

STUB = Path(kv_connector.__file__).with_name("_native.pyi")

# stubtest compares names, kinds and finality. These differences are allowed.
ALLOWED = r"""
# Every pybind11 class has pybind11's metaclass, which no stub needs to know.
kv_connector\._native\.(SharedMemory|LayerSignal|StreamSignal|CounterReader|_?CompletionWord|TransferEngine|MoeGroup|MoeFarRanks|PageSummer)
# The buffer protocol has no Python-visible name before 3.12.
kv_connector\._native\.SharedMemory\.__buffer__
# Only the engine makes one: pybind11 gives every class an __init__ that refuses.
kv_connector\._native\.(LayerSignal|StreamSignal|CounterReader|_CompletionWord)\.__init__
"""


def test_stubtest_finds_no_difference(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed: stubtest is part of it")
    allowlist = tmp_path / "allowed"
    allowlist.write_text(ALLOWED)
    command = [sys.executable, "-m", "mypy.stubtest", "kv_connector._native"]
    command += ["--allowlist", str(allowlist), "--ignore-unused-allowlist"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=STUB.parent.parent)
    assert result.returncode == 0, result.stdout + result.stderr


def stub_parameters() -> dict[tuple[str, str], list[str]]:
    """Returns (class, method) -> its parameters, without self."""
    found = {}
    for node in ast.parse(STUB.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.decorator_list:
                parameters = [argument.arg for argument in method.args.args[1:]]
                found[node.name, method.name] = parameters
    return found


def test_parameters_have_the_same_names_in_the_same_order() -> None:
    """stubtest cannot see the parameters: a pybind11 function's signature is only in its docstring's first
    line."""
    compared = 0
    for (owner, method), expected in stub_parameters().items():
        if method == "__buffer__":
            continue
        signature = getattr(getattr(_native, owner), method).__doc__.splitlines()[0]
        # name(self: kv_connector._native.X, peer: typing.SupportsInt, ...) -> int
        inside = re.sub(r"\[[^\[\]]*(\[[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*\][^\[\]]*)*\]", "", signature)
        names = re.findall(r"(?:\(|, )(\w+):", inside)
        assert names == ["self", *expected], f"{owner}.{method}: {signature}"
        compared += 1
    assert compared > 30
