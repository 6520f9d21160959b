"""Reads from Python sources, without importing them, which KV cache layers a model class makes.

A model class makes its layers when it is constructed. The reader follows every class and function that a
class names in its constructor, through imports and base classes, and collects the classes that have a KV
cache. It may collect a layer that a configuration leaves out, but it misses none that a name leads to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

# Methods that run after the construction, and names of the model's interface.
_LATER = {"forward", "load_weights", "get_input_embeddings", "embed_input_ids", "embed_multimodal"}
# Branches for accelerators that this project does not support.
_OTHER_DEVICES = {"is_rocm", "is_xpu", "is_tpu", "_is_hip", "_is_npu", "_is_xpu"}


@dataclass(frozen=True)
class Definition:
    """A class, a function or a value at the top of a module."""

    module: Module
    name: str
    node: ast.AST = field(compare=False, hash=False)

    @property
    def of_class(self) -> ast.ClassDef | None:
        return self.node if isinstance(self.node, ast.ClassDef) else None


class Module:
    """One file of a package."""

    def __init__(self, tree: Sources, name: str, path: Path) -> None:
        self.tree = tree
        self.name = name
        self.path = path

    @cached_property
    def names(self) -> dict[str, list[ast.AST]]:
        """Meanings of each name at the top of the module."""
        return _names(ast.parse(self.path.read_text()).body)

    def resolve(
        self, name: str, local: dict[str, list[ast.AST]] | None = None
    ) -> Iterator[Definition | Module]:
        """Yields what a name means in this module. Names from outside the package mean nothing."""
        for node in (local or {}).get(name, self.names.get(name, ())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._imported(node, name)
            elif isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) != name:
                yield from self.tree.meanings(self, node, {})
            else:
                yield Definition(self, name, node)

    def _imported(self, node: ast.Import | ast.ImportFrom, name: str) -> Iterator[Definition | Module]:
        original = next(one.name for one in node.names if (one.asname or one.name) == name)
        if isinstance(node, ast.Import):
            found = self.tree.module(original)
            if found is not None:
                yield found
            return
        base = node.module or ""
        if node.level:
            package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        if (whole := self.tree.module(f"{base}.{original}")) is not None:
            yield whole
        elif (module := self.tree.module(base)) is not None:
            yield from module.resolve(original)


class Sources:
    """The sources of an installed package, of which only modules with these beginnings are read."""

    def __init__(self, root: Path, read: Sequence[str]) -> None:
        self._root = root
        self._read = tuple(read)

    @cache  # noqa: B019  the sources live as long as the process
    def module(self, name: str) -> Module | None:
        if not name.startswith(self._read):
            return None
        path = self._root.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return Module(self, name, file)
        return None

    def find(self, module: str, name: str) -> list[Definition]:
        """Returns a class by module and name: one for each kind of device that has its own. May be empty."""
        found = self.module(module)
        every = () if found is None else found.resolve(name)
        return [one for one in every if isinstance(one, Definition)]

    @cache  # noqa: B019
    def lineage(self, definition: Definition) -> tuple[Definition, ...]:
        """Returns a class and all classes that it inherits from, the nearest first."""
        node = definition.of_class
        if node is None:
            return ()
        bases = [
            above
            for base in node.bases
            for one in self.meanings(definition.module, base, {})
            if isinstance(one, Definition)
            for above in self.lineage(one)
        ]
        return (definition, *dict.fromkeys(bases))

    def methods(self, definition: Definition, name: str) -> Iterator[tuple[Module, ast.FunctionDef]]:
        """Yields the method that a class has under a name, and those that it calls by `super`."""
        for one in self.lineage(definition):
            for node in one.of_class.body if one.of_class else ():
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    yield one.module, node
                    if not _continues(node):
                        return

    def made_by(self, definition: Definition) -> set[Definition]:
        """Returns every class and function to which the construction of a class leads."""
        found: set[Definition] = set()
        seen: set[_Step] = set()
        left: list[_Step] = [(definition, frozenset())]
        while left:
            step = left.pop()
            if step in seen:
                continue
            seen.add(step)
            named, bases = self._steps(step)
            found.update(named)
            left += [(one, frozenset()) for one in named]
            left += bases
        return found

    @cache  # noqa: B019
    def _steps(self, step: _Step) -> tuple[tuple[Definition, ...], tuple[_Step, ...]]:
        """Returns the definitions that one names, and the base classes by which the search goes on."""
        definition, overridden = step
        node = definition.of_class
        if node is None:
            return tuple(self._named(definition.module, definition.node)), ()
        bodies = [one for one in node.body if getattr(one, "name", "") not in _LATER | overridden]
        named = tuple(one for body in bodies for one in self._named(definition.module, body))
        replaced = {one.name for one in node.body if isinstance(one, ast.FunctionDef) and not _continues(one)}
        bases = tuple(
            (one, overridden | frozenset(replaced))
            for base in node.bases
            for one in self.meanings(definition.module, base, {})
            if isinstance(one, Definition) and one.of_class is not None
        )
        return named, bases

    def _named(self, module: Module, node: ast.AST) -> Iterator[Definition]:
        own = node.body if isinstance(node, ast.FunctionDef) else ()
        local = _names(own, imports_only=True)
        for name in _uses(node):
            for one in self.meanings(module, name, local):
                if isinstance(one, Definition):
                    yield one

    def meanings(
        self, module: Module, node: ast.expr, local: dict[str, list[ast.AST]]
    ) -> Iterator[Definition | Module]:
        match node:
            case ast.Name(id=name):
                yield from module.resolve(name, local)
            case ast.Attribute(value=value, attr=name):
                for one in self.meanings(module, value, local):
                    if isinstance(one, Module):
                        yield from one.resolve(name)
            case ast.Subscript(value=value):
                yield from self.meanings(module, value, local)


_Step = tuple[Definition, frozenset[str]]
"""A definition to follow, and the methods of this class that a child replaces."""


def _uses(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the names and dotted names that a piece of code evaluates, without types and decorators."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
            parts: Sequence[ast.AST] = [*defaults, *node.body]
        case ast.AnnAssign():
            parts = [node.value] if node.value is not None else []
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass" | "cast")):
            parts = node.args[:1]
        case ast.If() if _of_other_device(node.test):
            parts = node.orelse
        case ast.Import() | ast.ImportFrom():
            parts = []
        case ast.Name() | ast.Attribute():
            yield node
            parts = [node.value] if isinstance(node, ast.Attribute) else []
        case _:
            parts = list(ast.iter_child_nodes(node))
    for part in parts:
        yield from _uses(part)


def _of_other_device(test: ast.expr) -> bool:
    match test:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Name(id=name):
            return name in _OTHER_DEVICES
    return False


def _continues(method: ast.FunctionDef) -> bool:
    """Whether a method calls the method that it replaces."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == method.name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in ast.walk(method)
    )


def _names(body: Sequence[ast.AST], *, imports_only: bool = False) -> dict[str, list[ast.AST]]:
    """Returns what the names of a body mean, in all branches except those of other devices."""
    found: dict[str, list[ast.AST]] = {}

    def add(name: str, node: ast.AST) -> None:
        found.setdefault(name, []).append(node)

    def read(nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            match node:
                case ast.Import() | ast.ImportFrom():
                    for one in node.names:
                        add(one.asname or one.name, node)
                case ast.If():
                    if not _of_other_device(node.test):
                        read(node.body)
                    read(node.orelse)
                case ast.Try():
                    read([*node.body, *(each for one in node.handlers for each in one.body), *node.orelse])
                case ast.With() | ast.For() | ast.While():
                    read(node.body)
                case ast.FunctionDef() | ast.ClassDef() if not imports_only:
                    add(node.name, node)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if not imports_only:
                    add(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if not imports_only:
                    add(name, value)

    read(body)
    return found
