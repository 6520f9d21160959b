"""vLLM's MooncakeConnector on a machine without an accelerator.

The connector requests the current accelerator's index from torch, and torch raises an error if there is none.
The index is only passed on to the platform's set_device(), which takes a CPU device on CPUs. vLLM loads this
module by `kv_connector_module_path`, in the engine's processes only.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: torch.device("cpu")

__all__ = ["MooncakeConnector"]
