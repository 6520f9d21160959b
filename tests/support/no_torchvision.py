"""A vLLM plugin that makes models for pictures importable without torchvision.

The ordinary torchvision wheel does not load beside a CPU torch. The models import its functions for their
picture processors. transformers then selects the processors that do not need it.
"""

import sys
from pathlib import Path
from types import ModuleType


def register() -> None:
    """Installs an empty module. vLLM calls this in each of its processes. `import torchvision` still fails,
    so that transformers does not find it."""
    module = ModuleType("torchvision.transforms.v2")
    module.__dict__["functional"] = None
    sys.modules[module.__name__] = module


def install(directory: Path, plugin: str = __name__) -> str:
    """Writes the metadata by which vLLM finds a plugin of this folder. Returns the additions to
    PYTHONPATH."""
    info = directory / f"{plugin}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin} = {plugin}:register\n")
    return f"{directory}:{Path(__file__).parent}"
