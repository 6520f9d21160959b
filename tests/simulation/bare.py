"""Lets the simulator run where only msgspec is installed: on a big machine that is lent for a campaign.

kv_connector.engine, whose values kv_connector.effects takes and gives, imports the native engine and numpy.
Where one of these is missing, modules take its place in which every name is an empty class. Nothing of them
is ever called. To be imported before anything of kv_connector.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REPLACED = ("numpy", "kv_connector._native")


class _Anything:
    def __class_getitem__(cls, _: object) -> type:
        return cls


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything, Exception), {})


class _Finder(MetaPathFinder, Loader):
    """Asked last, so only for what is not there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if not any(name == replaced or name.startswith(f"{replaced}.") for replaced in _REPLACED):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
