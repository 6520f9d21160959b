"""LastBlocks: clears the room behind a loaded prompt in the last block that the prompt fills."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.model.model_facts import block_tokens


class LastBlocks:
    """Clears a request's last block before its pages arrive.

    Old bytes may be no valid numbers: they may come from a recurrent state or have another precision. Some
    kernels mask them too late. vLLM therefore zeroes new blocks, but not those that are loaded, and a P with
    smaller blocks does not fill the last one.
    """

    def __init__(self, kv_cache_config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: vLLM's views by layer name. Their first axis counts (kernel) blocks."""
        self._num_blocks = kv_cache_config.num_blocks
        needed = kv_cache_config.needs_kv_cache_zeroing
        self._groups = []
        """Per KV cache group: tokens a block, and the layers' pages.

        Groups of recurrent states have no pages here.
        """
        for group in kv_cache_config.kv_cache_groups:
            tokens = block_tokens(group.kv_cache_spec)
            layers = [tensors[name] for name in group.layer_names] if needed and tokens else []
            self._groups.append((tokens, layers))
        # Not the engine's stream, because steps wait for it. No one else uses the block that is cleared.
        device = next(iter(tensors.values())).device
        self._stream = torch.cuda.Stream(device) if needed and device.type == "cuda" else None

    def clear(self, request: DecodeRequest) -> None:
        """Clears the block. Call it before the reservation is sent. Blocks for some microseconds."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            cleared = [
                self._clear(tensor, target.blocks[-1])
                for (tokens, tensors), target in zip(self._groups, request.groups, strict=True)
                for tensor in tensors
                if target.blocks and target.blocks[-1] != 0 and _has_last_token(target, request, tokens)
            ]
        if cleared and self._stream is not None:
            self._stream.synchronize()

    def _clear(self, tensor: torch.Tensor, block: int) -> torch.Tensor:
        splits = len(tensor) // self._num_blocks  # kernel blocks in one block of the scheduler
        return tensor[block * splits : (block + 1) * splits].zero_()


def _has_last_token(target: GroupTarget, request: DecodeRequest, tokens: int) -> bool:
    """Returns whether the last of these blocks has the prompt's last token. The blocks before it are full."""
    return target.first + len(target.blocks) > (request.prompt_tokens - 1) // tokens
