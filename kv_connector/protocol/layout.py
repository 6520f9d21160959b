"""Where each page of each layer lies in memory.

A page is the KV of one block of tokens in one layer on one rank: contiguous bytes at
``region base + offset + block * block_stride``. What a request has besides, such as a recurrent state or a
line in a table of the framework, is a page too: a row of a group without tokens. These types travel in HELLO
and RESERVE, so they are msgspec structs.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class GroupLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV cache group: layers that share one block table."""

    num_blocks: int
    block_size: int  # tokens a block; 0: a block is a row, and says nothing of tokens
    # "full", "sliding_window", ...: the attention that decides which blocks a request keeps; of rows, what
    # they hold.
    kind: str

    @property
    def null_block(self) -> int | None:
        """The block that holds nothing: outside of a sliding window, or not needed. Every row holds some."""
        return 0 if self.block_size > 0 else None


class LayerLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's pages on one rank."""

    name: str
    group: int  # index into KvLayout.groups
    region: int  # index of the registered memory region (one per distinct storage)
    offset: int  # bytes from the region's start to block 0 of this layer
    block_stride: int  # bytes from one block's page to the next block's
    page_bytes: int  # bytes of one page


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All pages of one rank. ``layers`` is in an order that both ends agree on; its index is the ordinal."""

    groups: tuple[GroupLayout, ...]
    layers: tuple[LayerLayout, ...]

    def bytes_per_region(self) -> dict[int, int]:
        """The least length in bytes that each region must have for every page to lie inside it."""
        need: dict[int, int] = {}
        for layer in self.layers:
            end = (
                layer.offset
                + (self.groups[layer.group].num_blocks - 1) * layer.block_stride
                + layer.page_bytes
            )
            need[layer.region] = max(need.get(layer.region, 0), end)
        return need


class GroupTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where D wants the pages of one KV group: logical block ``first + i`` goes to D's block ``blocks[i]``.

    Where that is the group's null block, D needs nothing.
    """

    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
    blocks: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)], ...], msgspec.Meta(max_length=1 << 20)
    ]
