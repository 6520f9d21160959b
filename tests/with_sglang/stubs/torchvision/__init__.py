"""A stand-in for torchvision, whose wheel is linked against CUDA. SGLang imports it for vision models; text
models call none of it."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.28.0"


class InterpolationMode:
    NEAREST, NEAREST_EXACT, BILINEAR = "nearest", "nearest-exact", "bilinear"
    BICUBIC, BOX, HAMMING, LANCZOS = "bicubic", "box", "hamming", "lanczos"


class _Module(types.ModuleType):
    """A module in which every name is a class."""

    __path__: Any = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return InterpolationMode if name == "InterpolationMode" else type(name, (), {})


for _name in (
    *("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"),
    *("io", "ops", "ops.boxes", "utils", "models"),
):
    _full = f"{__name__}.{_name}"
    _module = _Module(_full)
    _module.__spec__ = importlib.machinery.ModuleSpec(_full, None, is_package=True)
    sys.modules[_full] = _module
    setattr(sys.modules[_full.rpartition(".")[0]], _name.rpartition(".")[2], _module)
