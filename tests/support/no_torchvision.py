"""A plugin of vLLM's with which models for pictures can be imported without torchvision, whose ordinary wheel
does not load beside a CPU torch: they import its functions for their picture processors' sake, of which
transformers then takes those that do without."""

import sys
from pathlib import Path
from types import ModuleType


def register() -> None:
    """vLLM calls it in each of its processes. `import torchvision` fails as before, so that transformers
    finds none."""
    module = ModuleType("torchvision.transforms.v2")
    module.__dict__["functional"] = None
    sys.modules[module.__name__] = module


def install(directory: Path, plugin: str = __name__) -> str:
    """Writes what vLLM finds a plugin of this folder by; returns what its PYTHONPATH needs."""
    info = directory / f"{plugin}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin} = {plugin}:register\n")
    return f"{directory}:{Path(__file__).parent}"
