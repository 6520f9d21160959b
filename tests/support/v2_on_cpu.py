"""Model runner V2 on CPUs. vLLM's wheel for CPUs contains it, and its kernels run in Triton's interpreter. A
step of a small model takes some tens of milliseconds."""

import os
from pathlib import Path
from typing import Any

_ENTRY_POINTS = """
[triton.backends]
cpu = triton.backends.nvidia
[vllm.general_plugins]
v2_on_cpu = v2_on_cpu:register
"""


def v2_environment(directory: Path) -> dict[str, str]:
    """Returns the environment of an interpreter that imports vLLM. Writes into ``directory``.

    vLLM checks whether Triton compiles for CPUs, which the available wheel does not. The written metadata
    makes it find a backend of that name, which belongs to another package and is not used.
    """
    installed = directory / "v2_on_cpu-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: v2_on_cpu\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = (str(directory), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")]))
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def register() -> None:
    """Installs the changes. vLLM calls this in each of its processes."""
    from triton.runtime.interpreter import InterpreterBuilder
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = (
        False  # its kernel does not run in the interpreter; PyTorch has the function
    )
    store, check = InterpreterBuilder.create_masked_store, CpuPlatform.check_and_update_config

    def store_masked(self: Any, pointers: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        mask.data = mask.data.astype(bool)  # the kernel that applies a grammar's mask passes integers
        return store(self, pointers, value, mask, cache_policy)

    def check_and_leave(_: Any, vllm_config: Any) -> None:
        """Keeps asynchronous scheduling, as on GPU engines: a step is scheduled before the previous step's
        output is known."""
        ahead = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = ahead

    InterpreterBuilder.create_masked_store = store_masked
    CpuPlatform.check_and_update_config = classmethod(check_and_leave)
