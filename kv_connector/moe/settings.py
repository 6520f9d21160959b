"""The settings of a group, and the limits of the native class (native/cuda/moe_launch.h)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kv_connector.engine import DomainConfig

MAX_RANKS = 8
MAX_COLUMNS = 8
MAX_TOP_K = 32
MAX_SLOTS = 2
MAX_TOKENS = 1 << 24
MAX_EXPERTS = 1 << 16
# 16 times the largest hidden size of today's models (16,384).
MAX_HIDDEN = 1 << 18
MAX_ROW_BYTES = 1 << 21
MAX_TIMEOUT = 3600.0
# A kernel adds vectors of 16 bytes, which are 8 elements of bf16.
HIDDEN_UNIT = 8
# In a group that survives, one block of threads combines a whole row.
MAX_SURVIVING_HIDDEN = 8192
MAX_LANES = 16
MAX_NODE = 64
# More is a mistake on every machine of today. The native class has the same limit.
MAX_AREA_BYTES = 1 << 40


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """The facts that a group is formed for. Only ``rank``, ``device`` and ``node`` differ between ranks.

    The ranks have ``lanes`` of the same providers in the same order. Their devices and addresses may differ.

    Raises ValueError where a value is out of range.
    """

    rank: int
    """Number of this rank, from 0."""
    ranks: int
    """Ranks of the group, 1 to 8."""
    hidden: int
    """Elements of a token's result, a multiple of 8."""
    top_k: int
    """Experts of a token, 1 to 32."""
    experts: int
    """Experts of the layer, over all ranks."""
    max_tokens: int = 1024
    """Most tokens of one rank in a step."""
    row_bytes: int
    """Most bytes of one token's columns together."""
    slots: int = 1
    """Batches in flight at once, 1 or 2."""
    device: int | None = None
    """CUDA ordinal of this rank's GPU. None: host memory."""
    timeout: float = 30.0
    """Seconds that forming takes at most, and that a step waits for a rank that does not wait itself."""
    survive: bool = False
    """Steps go on without a rank that ends or is late. ``hidden`` is 8,192 at most."""
    lanes: tuple[DomainConfig, ...] = ()
    """This rank's NICs to other nodes, in order of preference. Empty: all ranks are on one node. Host memory
    only, and not with ``survive``."""
    node: str = ""
    """Name of this rank's node among the nodes of one machine. Machines are always different nodes."""

    def __post_init__(self) -> None:
        _check("ranks", self.ranks, 1, MAX_RANKS)
        _check("rank", self.rank, 0, self.ranks - 1)
        _check("hidden", self.hidden, HIDDEN_UNIT, MAX_HIDDEN)
        if self.hidden % HIDDEN_UNIT:
            raise ValueError(f"hidden is {self.hidden}. It must be a multiple of {HIDDEN_UNIT}.")
        if self.survive and self.hidden > MAX_SURVIVING_HIDDEN:
            raise ValueError(f"hidden is {self.hidden}. With survive it is {MAX_SURVIVING_HIDDEN} at most.")
        _check("experts", self.experts, 1, MAX_EXPERTS)
        _check("top_k", self.top_k, 1, MAX_TOP_K)
        _check("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _check("row_bytes", self.row_bytes, 1, MAX_ROW_BYTES)
        _check("slots", self.slots, 1, MAX_SLOTS)
        if self.device is not None:
            _check("device", self.device, 0, 1 << 16)
        if not (math.isfinite(self.timeout) and 0 < self.timeout <= MAX_TIMEOUT):
            raise ValueError(f"timeout is {self.timeout}. Set a number of seconds up to {MAX_TIMEOUT:g}.")
        if len(self.lanes) > MAX_LANES:
            raise ValueError(f"lanes has {len(self.lanes)} entries. At most {MAX_LANES} are valid.")
        if self.lanes and self.device is not None:
            raise ValueError(
                "lanes need host memory: the GPU kernels have no packets for other nodes. Leave device unset."
            )
        if self.lanes and self.survive:
            raise ValueError("a group with lanes cannot survive the end of a rank. Set survive=False.")
        if len(self.node) > MAX_NODE:
            raise ValueError(f"node has {len(self.node)} characters. At most {MAX_NODE} are valid.")
        if (nbytes := self.ranks * self.max_tokens * max(self.row_bytes, 2 * self.hidden)) > MAX_AREA_BYTES:
            raise ValueError(f"an area would have {nbytes} bytes. Set a smaller max_tokens.")


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}. Valid: {least} to {most}.")


def linear_owners(experts: int, ranks: int) -> list[int]:
    """Returns the rank of each expert.

    The ranks have consecutive blocks, and the first ranks the longer ones.
    """
    block, longer = divmod(experts, ranks)
    return [rank for rank in range(ranks) for _ in range(block + (rank < longer))]
