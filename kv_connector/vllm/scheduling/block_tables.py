"""BlockTables: reads the scheduler's block tables, and holds blocks in them."""

from __future__ import annotations

from math import lcm
from typing import Any

from kv_connector.vllm.internals import KVCacheManager, Request
from kv_connector.vllm.model.model_facts import block_tokens


class BlockTables:
    """The scheduler's block tables, for the facts that the hooks do not show."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self.total: int = self._pool.num_gpu_blocks
        """Blocks of the pool, used or not."""
        self.hash_block_tokens: int = self._pool.hash_block_size
        """Tokens of a block that vLLM hashes."""
        self._managers = kv_cache_manager.coordinator.single_type_managers

    @property
    def unused(self) -> int:
        """Blocks that no request holds, cached or not."""
        return int(self._pool.get_num_free_blocks())

    def first_attended(self, group: int, computed_tokens: int) -> int:
        """Returns the first logical block of the group to which the next token attends.

        The next token is that after ``computed_tokens`` tokens. For recurrent states, returns the block that
        has the state after that many tokens.
        """
        return self.first_attended_token(group, computed_tokens) // int(self._managers[group].block_size)

    def first_attended_token(self, group: int, computed_tokens: int) -> int:
        """Returns the first token to which the next token attends, in the group's layers.

        The next token is that after ``computed_tokens`` tokens.
        """
        return int(self._managers[group].get_num_skipped_tokens(computed_tokens))

    def first_loaded(self, request_id: str, group: int) -> int:
        """Returns the first logical block of a request whose contents are still to be loaded.

        The blocks before it are empty or belong to the prefix cache. Call it when the load is about to begin.
        """
        table = self._managers[group].req_to_blocks[request_id]
        fresh = (i for i, block in enumerate(table) if not block.is_null and block.block_hash is None)
        return next(fresh, len(table))

    def of_state(self, group: int) -> int:
        """Returns the blocks that a request holds in a group of recurrent states or rings.

        It holds one, and for a recurrent state one for each token that may be drafted. A ring has room for
        drafted tokens within its one block.
        """
        return 1 + int(getattr(self._managers[group], "num_speculative_blocks", 0))

    def hold_windows(self, request_id: str, firsts: tuple[int, ...]) -> list[Any]:
        """Takes an additional reference on the request's blocks from logical block ``firsts[group]`` on.

        It does so in each group with a sliding window: vLLM would free these blocks while they are still to
        be sent. A state is the request's last block, and vLLM keeps it.
        """
        held = [
            block
            for manager, first in zip(self._managers, firsts, strict=True)
            if manager.get_num_skipped_tokens(1 << 40) > 0 and block_tokens(manager.kv_cache_spec)
            for block in manager.req_to_blocks[request_id][first:]
            if not block.is_null
        ]
        self._pool.touch(held)
        return held

    def cached_prefix(
        self, digests: list[bytes], tokens: int, multiple: int
    ) -> tuple[tuple[list[Any], ...], int]:
        """Returns the cached blocks of a prefix, per group, and the number of its tokens.

        It has at most ``tokens`` tokens, a multiple of ``multiple`` and of each group's block. A window has
        null blocks in place of those that it has left behind. ``digests``: of the prompt's hashed blocks.
        """
        multiple = lcm(multiple, *(int(manager.block_size) for manager in self._managers))
        while (tokens := tokens // multiple * multiple) > 0:
            found, hit, _ = self._manager.coordinator.find_longest_cache_hit(digests, tokens)
            if hit % multiple == 0:
                return found, int(hit)
            tokens = int(hit)
        return (), 0

    def hold(self, blocks: list[Any]) -> None:
        """Takes a reference on cached blocks."""
        self._pool.touch(blocks)

    def give_back(self, held: list[Any]) -> None:
        """Ends the references that ``hold_windows`` or ``hold`` took."""
        self._pool.free_blocks(reversed(held))

    def free(self, request: Request) -> None:
        """Frees all blocks of a request that waits. It begins anew, as vLLM does after a failed load."""
        self._manager.free(request)
        request.num_computed_tokens = 0
