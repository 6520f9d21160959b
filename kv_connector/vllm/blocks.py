"""What the connector asks vLLM about its blocks, and what a request holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kv_connector.vllm.internals import Request


class Blocks(Protocol):
    """What kv_blocks.KvBlocks offers."""

    total: int

    def first_attended(self, group: int, computed_tokens: int) -> int: ...
    def first_attended_token(self, group: int, computed_tokens: int) -> int: ...
    def first_loaded(self, request_id: str, group: int) -> int: ...
    def of_state(self, group: int) -> int: ...
    def hold_windows(self, request_id: str, firsts: tuple[int, ...]) -> list[Any]: ...
    def give_back(self, held: list[Any]) -> None: ...
    def free(self, request: Request) -> None: ...


def attended_from(blocks: Blocks, groups: int, tokens: int) -> tuple[int, ...]:
    """Per group: the first logical block that the prompt's last token, which D computes, attends to."""
    return tuple(blocks.first_attended(group, tokens - 1) for group in range(groups))


def blocks_of(blocks: Blocks, block_sizes: tuple[int, ...], tokens: int) -> int:
    """What a prompt holds when it is computed; a window holds a chunk more before, a state one block."""
    firsts = attended_from(blocks, len(block_sizes), tokens)
    return sum(
        -(-tokens // size) - first if size else blocks.of_state(group)
        for group, (size, first) in enumerate(zip(block_sizes, firsts, strict=True))
    )


def has_states(block_sizes: tuple[int, ...]) -> bool:
    """Whether some group's blocks are recurrent states. D goes on from the state before the prompt's last
    token, which it computes itself: so P must not compute that one."""
    return 0 in block_sizes


def state_after(blocks: Blocks, group: int, table: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The block of the state after so many tokens, if any."""
    if tokens == 0:
        return ()
    column = blocks.first_attended(group, tokens)
    if table[column] == 0:
        raise RuntimeError(f"column {column} of KV cache group {group} has no state: {table}")
    return (table[column],)
