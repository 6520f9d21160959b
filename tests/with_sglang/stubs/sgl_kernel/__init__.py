"""A stand-in for SGLang's kernels, which have no build for CPUs. Without AMX every operator uses torch, and
no function of this module is called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0"


class _Absent:
    """Stands for any looked-up object. It can be named, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel has no {self._name} on CPUs")

    def __getattr__(self, name: str) -> _Absent:
        return _absent(f"{self._name}.{name}")


def _absent(name: str) -> _Absent:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return _Absent(name)


def __getattr__(name: str) -> _Absent:
    return _absent(name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        # SGLang has a replacement if this module is missing.
        if name.startswith("sgl_kernel.") and name != "sgl_kernel.scalar_type":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = _absent
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Submodules())
