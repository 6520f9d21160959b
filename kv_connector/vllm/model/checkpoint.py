"""The checkpoint that a worker has loaded, as vLLM's loaders choose its files."""

from __future__ import annotations

from typing import Any

from kv_connector.agent.checkpoint_reader import CONSOLIDATED, MODEL, identify
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.vllm.internals import envs

_SAFETENSORS = {
    "auto": (CONSOLIDATED, MODEL),
    "hf": (MODEL,),
    "safetensors": (MODEL,),
    "fastsafetensors": (MODEL,),
    "instanttensor": (MODEL,),
    "mistral": (CONSOLIDATED,),
}
"""Files from which vLLM's default loader reads the weights, by load format."""

_BACKENDS_WITH_VERSIONS = (None, "write_imm")


def loaded_checkpoint(vllm_config: Any) -> Checkpoint | None:
    """Returns the checkpoint that this worker has loaded.

    None: it is unknown. It is also None if a backend replaces the weights without reporting their version to
    the connector: only its operator knows which weights two engines have then. ModelScope has its own cache.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    backend = getattr(vllm_config.weight_transfer_config, "backend", None)
    # For weights in an object store, vLLM sets model_weights, and the directory has no weights.
    files = () if model.model_weights else _SAFETENSORS.get(str(load.load_format), ())
    if backend not in _BACKENDS_WITH_VERSIONS or envs.VLLM_USE_MODELSCOPE:
        return None
    return identify(model.model, files, revision=model.revision, cache=load.download_dir)
