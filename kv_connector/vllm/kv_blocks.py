"""KvBlocks: reads the scheduler's block tables, and holds blocks in them."""

from __future__ import annotations

from typing import Any

from kv_connector.vllm.internals import KVCacheManager, Request
from kv_connector.vllm.model_facts import block_tokens


class KvBlocks:
    """The scheduler's block tables, for the facts that the hooks do not show."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self.total: int = self._pool.num_gpu_blocks
        """Blocks of the pool, used or not."""
        self._managers = kv_cache_manager.coordinator.single_type_managers

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
        """Returns the blocks that a request holds in a group of recurrent states.

        It holds one, and one for each token that may be drafted.
        """
        return 1 + int(self._managers[group].num_speculative_blocks)

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

    def give_back(self, held: list[Any]) -> None:
        """Ends the references that ``hold_windows`` took."""
        self._pool.free_blocks(reversed(held))

    def free(self, request: Request) -> None:
        """Frees all blocks of a request that waits. It begins anew, as vLLM does after a failed load."""
        self._manager.free(request)
        request.num_computed_tokens = 0
