"""Log lines about a request begin with its id, so that an operator finds all lines about the request."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kv_connector.router import streams

# Lines about an engine, and not about a request.
_OTHERS = ("drain of ",)
_LEVELS = {"debug", "info", "warning", "error", "exception"}


@pytest.mark.parametrize(
    "path", sorted(Path(next(iter(streams.__path__))).glob("*.py")), ids=lambda one: one.stem
)
def test_router_log_lines_about_a_request_begin_with_its_id(path: Path) -> None:
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        texts = {
            target.id: str(node.value.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "logger"):
                continue
            assert call.func.attr in _LEVELS
            first = call.args[0]
            text = str(texts[first.id] if isinstance(first, ast.Name) else ast.literal_eval(first))
            assert text.startswith(("request %s: ", *_OTHERS)), f"{path.name}:{call.lineno}: {text}"
