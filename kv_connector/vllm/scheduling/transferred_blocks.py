"""The blocks of a request that are transferred, of each KV cache group, and how many blocks it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.vllm.internals import Request


class Blocks(Protocol):
    """The interface of block_tables.BlockTables."""

    total: int
    hash_block_tokens: int

    @property
    def unused(self) -> int: ...
    def first_attended(self, group: int, computed_tokens: int) -> int: ...
    def first_attended_token(self, group: int, computed_tokens: int) -> int: ...
    def first_loaded(self, request_id: str, group: int) -> int: ...
    def of_state(self, group: int) -> int: ...
    def hold_windows(self, request_id: str, firsts: tuple[int, ...]) -> list[Any]: ...
    def give_back(self, held: list[Any]) -> None: ...
    def free(self, request: Request) -> None: ...


def attended_from(blocks: Blocks, groups: int, tokens: int) -> tuple[int, ...]:
    """Returns, per group, the first logical block to which the prompt's last token attends.

    D computes that token.
    """
    return tuple(blocks.first_attended(group, tokens - 1) for group in range(groups))


def blocks_of(blocks: Blocks, block_sizes: tuple[int, ...], tokens: int) -> int:
    """Returns the number of blocks that a prompt holds once it is computed.

    While it is computed, a window holds one more chunk of blocks. A recurrent state holds one block.
    """
    firsts = attended_from(blocks, len(block_sizes), tokens)
    return sum(
        -(-tokens // size) - first if size else blocks.of_state(group)
        for group, (size, first) in enumerate(zip(block_sizes, firsts, strict=True))
    )


def load_targets(
    blocks: Blocks,
    block_sizes: tuple[int, ...],
    request_id: str,
    tables: tuple[list[int], ...],
    first_token: int,
    end: int,
) -> tuple[GroupTarget, ...]:
    """Returns, per group, the blocks into which a load of the tokens [``first_token``, ``end``) goes.

    ``tables``: the blocks that vLLM has given the request. Call it when the load is about to begin.
    """
    targets: list[GroupTarget] = []
    for group, (table, size) in enumerate(zip(tables, block_sizes, strict=True)):
        if not size:
            targets.append(GroupTarget(first=0, blocks=state_after(blocks, group, table, end)))
            continue
        first = first_token // size
        if has_states(block_sizes):
            # The prefix hit is that of full attention. Another group may have less of it.
            first = min(first, blocks.first_loaded(request_id, group))
        needed = blocks.first_attended_token(group, end)
        targets.append(GroupTarget(first, tuple(table[first : -(-end // size)]), needed))
    return tuple(targets)


def has_states(block_sizes: tuple[int, ...]) -> bool:
    """Returns whether some group's blocks are recurrent states or rings.

    D computes the prompt's last token itself, from the state before it. P must therefore not compute that
    token.
    """
    return 0 in block_sizes


def state_after(blocks: Blocks, group: int, table: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Returns the block that holds the state after ``tokens`` tokens, if there is such a state."""
    if tokens == 0:
        return ()
    column = blocks.first_attended(group, tokens)
    if table[column] == 0:
        raise RuntimeError(f"column {column} of KV cache group {group} has no state: {table}")
    return (table[column],)
