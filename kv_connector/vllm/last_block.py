"""What lies behind a loaded prompt in the last block that it fills."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from kv_connector.protocol.layout import GroupTarget
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.model_facts import block_tokens


class LastBlocks:
    """Empties a request's last block before its pages come.

    vLLM zeroes new blocks where old bytes might be no numbers under a kernel that masks them only later: they
    may have been a state's, or of another precision. It leaves out blocks that are loaded, and a P whose
    blocks are smaller does not fill the last of them.
    """

    def __init__(self, kv_cache_config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: vLLM's views by layer name, the first axis of which is of (kernel) blocks."""
        self._num_blocks = kv_cache_config.num_blocks
        needed = kv_cache_config.needs_kv_cache_zeroing
        self._groups = []
        """Per KV cache group, its tokens a block, and its layers' pages; none of a group of states."""
        for group in kv_cache_config.kv_cache_groups:
            tokens = block_tokens(group.kv_cache_spec)
            layers = [tensors[name] for name in group.layer_names] if needed and tokens else []
            self._groups.append((tokens, layers))
        # Not the engine's stream, on which steps wait: what is cleared is nobody else's.
        device = next(iter(tensors.values())).device
        self._stream = torch.cuda.Stream(device) if needed and device.type == "cuda" else None

    def clear(self, request: DecodeRequest) -> None:
        """Before the reservation goes out. BLOCKS, for as long as that takes, which is some microseconds."""
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
        splits = len(tensor) // self._num_blocks  # kernel blocks of one of the scheduler's
        return tensor[block * splits : (block + 1) * splits].zero_()


def _has_last_token(target: GroupTarget, request: DecodeRequest, tokens: int) -> bool:
    """Whether the last of these blocks has the prompt's last token: those before it are full."""
    return target.first + len(target.blocks) > (request.prompt_tokens - 1) // tokens
