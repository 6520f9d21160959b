#!/usr/bin/env python3
"""Proves that texts changed and code did not.

    scripts/same_code.py BASE [PATH ...]

Compares the files of the working tree with those of the commit BASE. Python files may differ in comments and
docstrings, including those of fields. C++ files may differ in comments and line breaks. It prints each file
whose code changed, and exits with 1 if it finds any. It exits with 2 if it cannot compare.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_TOKEN = re.compile(
    r"""
    (?P<comment> //(?:\\\n|[^\n])* | /\*[\s\S]*?\*/)  # a backslash joins the next line to a // comment
  | (?P<token> R"(?P<mark>\w*)\([\s\S]*?\)(?P=mark)"   # a raw string
             | "(?:[^"\\\n]|\\[\s\S])*"
             | [0-9](?:'?[\w.])*                        # a number with its separators
             | '(?:[^'\\\n]|\\.)+'
             | \w+
             | [-+<>&|=*/%^!~:]+                        # an operator: `a - -b` is not `a --b`
             | \\\n
             | [^\s])
  | (?P<newline> \n)
    """,
    re.VERBOSE,
)


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops strings that stand alone as statements."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                kept = [one for one in statements if not _is_text(one)]
                if statements and not kept:
                    kept = [ast.Pass()]
                setattr(node, name, kept)
        return node


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def python_code(text: str) -> str:
    """The syntax tree of a source, without docstrings."""
    return ast.dump(_WithoutDocstrings().visit(ast.parse(text)))


def cpp_code(text: str) -> list[str]:
    """The tokens of a source, without comments. Line ends count only after preprocessor directives."""
    tokens: list[str] = []
    directive, fresh = False, True
    for match in _TOKEN.finditer(text):
        if match["newline"]:
            if directive:
                tokens.append("\n")
            directive, fresh = False, True
        elif match["token"] == "\\\n":
            continue
        elif match["token"]:
            directive = directive or (fresh and match["token"] == "#")
            fresh = False
            tokens.append(match["token"])
    return tokens


def reader(name: str) -> Callable[[str], object] | None:
    """Returns the function that extracts a file's code. None: files of this kind are not compared."""
    suffix = Path(name).suffix
    if suffix in {".py", ".pyi"}:
        return python_code
    if suffix in {".h", ".cc", ".cu", ".cuh", ".cpp"}:
        return cpp_code
    return None


class _Unreadable(Exception):
    """The comparison cannot be made. The text is for the user."""


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    if done.returncode:
        raise _Unreadable(done.stderr.decode(errors="replace").strip())
    return done.stdout


def _code(name: str, text: bytes, whose: str) -> object:
    extract = reader(name)
    assert extract is not None
    try:
        return extract(text.decode())
    except SyntaxError as error:
        raise _Unreadable(f"{name}:{error.lineno or 1}: {error.msg} (in {whose})") from None
    except ValueError as error:  # not UTF-8, or with null bytes
        raise _Unreadable(f"{name}: {error} (in {whose})") from None


def changes(root: Path, base: str, paths: list[str]) -> Iterator[tuple[str, str]]:
    """(file, reason) of each file whose code is not that of `base`, or is not compared."""
    if not _git(root, "rev-list", "--max-count=1", "--ignore-missing", "--end-of-options", base, "--"):
        raise _Unreadable(f"{base}: no such commit")
    for path in paths:
        if not (root / path).exists() and not _git(root, "ls-tree", base, "--", path):
            raise _Unreadable(f"{path}: no such file or folder, here or in {base}")
    listed = _git(root, "diff", "--no-renames", "--relative", "--name-status", "-z", base, "--", *paths)
    fields = listed.decode().split("\0")
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *paths).decode().split("\0")
    found = {name: status for status, name in zip(fields[::2], fields[1::2], strict=False)}
    for name, status in sorted((found | dict.fromkeys(filter(None, new), "A")).items()):
        if reader(name) is None:
            if not name.endswith(".md"):
                yield name, "not compared"
        elif status in "ADT":
            yield name, {"A": "added", "D": "deleted", "T": "its type changed"}[status]
        elif _code(name, _git(root, "show", f"{base}:./{name}"), base) != _code(
            name, (root / name).read_bytes(), "the working tree"
        ):
            yield name, "its code changed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Proves that texts changed and code did not.")
    parser.add_argument("base", metavar="BASE", help="Commit to compare the working tree with.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="Files and folders; default: all.")
    options = parser.parse_args(arguments)
    try:
        found = list(changes(Path.cwd(), options.base, options.paths))
    except _Unreadable as error:
        sys.stderr.write(f"same_code: {error}\n")
        return 2
    for name, reason in found:
        sys.stdout.write(f"{name}: {reason}\n")
    return 1 if any(reason != "not compared" for _, reason in found) else 0


if __name__ == "__main__":
    sys.exit(main())
