"""The scheduler's block tables: what the connector reads from them and holds in them."""

from __future__ import annotations

from typing import Any

from kv_connector.vllm.internals import KVCacheManager, Request
from kv_connector.vllm.model_facts import block_tokens


class KvBlocks:
    """The scheduler's block tables, as far as the connector needs more of them than the hooks show."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self.total: int = self._pool.num_gpu_blocks
        """Blocks of the pool, used or not."""
        self._managers = kv_cache_manager.coordinator.single_type_managers

    def first_attended(self, group: int, computed_tokens: int) -> int:
        """The first logical block of the group that the token after ``computed_tokens`` tokens still attends
        to; of recurrent states, the one that has the state after that many.
        """
        return self.first_attended_token(group, computed_tokens) // int(self._managers[group].block_size)

    def first_attended_token(self, group: int, computed_tokens: int) -> int:
        """The first token that the token after ``computed_tokens`` tokens still attends to, in the layers of
        the group."""
        return int(self._managers[group].get_num_skipped_tokens(computed_tokens))

    def first_loaded(self, request_id: str, group: int) -> int:
        """The first logical block of a request that is about to be loaded whose contents are still to come:
        those before it hold nothing, or are the prefix cache's."""
        table = self._managers[group].req_to_blocks[request_id]
        fresh = (i for i, block in enumerate(table) if not block.is_null and block.block_hash is None)
        return next(fresh, len(table))

    def of_state(self, group: int) -> int:
        """Blocks that a request holds in a group of recurrent states: its own, and one for each token that
        may be drafted."""
        return 1 + int(self._managers[group].num_speculative_blocks)

    def hold_windows(self, request_id: str, firsts: tuple[int, ...]) -> list[Any]:
        """Takes a reference of our own on the request's blocks from logical block ``firsts[group]`` on, in
        each group whose window slides: vLLM gives them back while the request is still ours to send. It keeps
        a state, which is the request's last."""
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
        """Takes all blocks of a request that waits: it begins anew, as vLLM lets it after a failed load."""
        self._manager.free(request)
        request.num_computed_tokens = 0
