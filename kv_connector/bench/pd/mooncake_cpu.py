"""vLLM's MooncakeConnector on a machine without an accelerator.

It asks torch for the current accelerator's index, and torch refuses where there is none; the answer is only
passed on to the platform's set_device(), which on CPUs takes a CPU device. vLLM loads this module by
`kv_connector_module_path`, in the engine's processes only.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: torch.device("cpu")

__all__ = ["MooncakeConnector"]
