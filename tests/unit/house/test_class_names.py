"""Names of classes: one name stands for one thing in the package.

A message of a wire protocol is named after its tag. Such names repeat, because each protocol has its own
HELLO and its own PING.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import kv_connector

PACKAGE = Path(kv_connector.__file__).parent
SEVERAL = {
    "UnsupportedConfiguration": "each adapter's error for a configuration that it refuses",
}
"""Names that several classes may have, each with the reason."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yields (module, class) for each class at the top of a module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield path.relative_to(PACKAGE).as_posix(), node


def is_message(node: ast.ClassDef) -> bool:
    """Returns whether the class is a message with its own name as its tag."""
    tag = node.name.lower()
    return any(
        one.arg == "tag" and isinstance(one.value, ast.Constant) and one.value.value == tag
        for one in node.keywords
    )


def repeated(scope: Callable[[str], str], *, private: bool) -> dict[tuple[str, str], list[str]]:
    """Returns the modules by (scope, name), for each name that occurs more than once in its scope."""
    modules = defaultdict(list)
    for module, node in classes():
        if node.name.startswith("_") is private and not is_message(node):
            modules[scope(module), node.name].append(module)
    return {key: found for key, found in modules.items() if len(found) > 1}


def test_a_public_class_has_its_name_alone() -> None:
    """A name that no longer needs its exception fails too."""
    assert {name for _, name in repeated(lambda module: "", private=False)} == set(SEVERAL)


def test_a_private_class_has_its_name_alone_in_its_room() -> None:
    assert not repeated(lambda module: module.partition("/")[0], private=True)
