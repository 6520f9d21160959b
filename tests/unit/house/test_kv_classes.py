"""The reader of other projects' sources: which classes a model class makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from kv_classes import Sources

FILES = {
    "pkg/__init__.py": "",
    "pkg/layers.py": """
class Base: ...
class Full(Base): ...
class Window(Base): ...
class Cross(Base): ...
class Replaced(Base): ...
""",
    "pkg/devices.py": """
if current_platform.is_rocm():
    from .layers import Replaced as Layer
elif current_platform.is_cpu():
    from .layers import Window as Layer
else:
    from .layers import Full as Layer
""",
    "pkg/models.py": """
from typing import TYPE_CHECKING
from . import devices
from .layers import Cross, Full, Replaced
if TYPE_CHECKING:
    class _Parent: ...
else:
    _Parent = Grandparent

class Grandparent:
    def __init__(self, layer: type[Cross] = Full) -> None:
        self.make()
        assert not isinstance(layer, Cross)
    def make(self) -> None:
        self.inner = Replaced()
    def forward(self) -> None:
        Cross()

class Aliased(_Parent): ...

class Overriding(Grandparent):
    def make(self) -> None:
        from pkg.layers import Window
        self.inner = Window()

class Extending(Overriding):
    def make(self) -> None:
        super().make()

class Calling:
    def __init__(self) -> None:
        self.layer = helper()

def helper():
    return TYPES["full"]

TYPES = {"full": Full}

class OnDevice:
    def __init__(self) -> None:
        self.layer = devices.Layer()
""",
}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path, ("pkg",))


def layers(sources: Sources, name: str) -> set[str]:
    (found,) = sources.find("pkg.models", name)
    made = {one.name: one for one in sources.made_by(found)}
    return {name for name, one in made.items() if "Base" in {above.name for above in sources.lineage(one)}}


@pytest.mark.parametrize(
    ("model", "made"),
    [
        ("Grandparent", {"Full", "Replaced"}),  # neither a type, nor what runs later
        ("Aliased", {"Full", "Replaced"}),
        ("Overriding", {"Full", "Window"}),
        ("Extending", {"Full", "Window"}),
        ("Calling", {"Full"}),
        ("OnDevice", {"Full", "Window"}),
    ],
)
def test_reader_finds_what_a_model_class_makes(sources: Sources, model: str, made: set[str]) -> None:
    assert layers(sources, model) == made


def test_reader_finds_no_class_where_there_is_none(sources: Sources) -> None:
    assert sources.find("pkg.models", "Other") == []
    assert sources.find("pkg.other", "Other") == []
    assert sources.find("elsewhere", "Other") == []
