"""PrefixLender: the prefixes that this engine lends to other engines, in vLLM's scheduler. No call blocks.

It finds a prefix in vLLM's prefix cache by its content, so no forward pass is needed. A lent prefix has
references on its blocks until the workers report it as sent. It is no request of vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any, Protocol

from kv_connector.agent.commands import (
    AnswerPrefix,
    Command,
    EndLendings,
    FinishPrefill,
    NewPages,
    RefuseLending,
)
from kv_connector.protocol.actions import PrefixRequested
from kv_connector.protocol.admission import may_lend
from kv_connector.protocol.requests import GroupPages, PrefillRequest
from kv_connector.protocol.wire.messages import LendOutcome
from kv_connector.vllm.scheduling.content import HashBasis
from kv_connector.vllm.scheduling.transferred_blocks import has_states

logger = logging.getLogger(__name__)

_PAUSED = "the lending engine is paused"


class LendableBlocks(Protocol):
    """The part of block_tables.BlockTables that a lender uses."""

    total: int
    hash_block_tokens: int

    @property
    def unused(self) -> int: ...
    def cached_prefix(
        self, digests: list[bytes], tokens: int, multiple: int
    ) -> tuple[tuple[list[Any], ...], int]: ...
    def hold(self, blocks: list[Any]) -> None: ...
    def give_back(self, held: list[Any]) -> None: ...


class PrefixLender:
    """The lent prefixes, from a borrower's question until nothing reads their blocks."""

    def __init__(self, block_sizes: tuple[int, ...], commands: list[Command], basis: HashBasis) -> None:
        self._block_sizes = block_sizes
        self._commands = commands
        self._basis = basis
        self._lent: dict[str, list[Any]] = {}
        """The blocks of each lent prefix, by transfer id."""
        self._pages: list[NewPages] = []
        self._after_pages: list[Command] = []
        self._logged = ""
        self._paused = False
        self._was_asked = False
        self._refusing = False
        """Whether the workers refuse all borrowers."""
        self.cache: LendableBlocks | None = None
        """Set before the first question."""

    def __len__(self) -> int:
        return len(self._lent)

    @property
    def held(self) -> list[Any]:
        """The blocks of all lent prefixes. A block is in the list as often as it is held."""
        return [block for blocks in self._lent.values() for block in blocks]

    def requested(self, requests: Iterable[PrefixRequested]) -> None:
        """Answers questions of borrowers. Call it at the end of a step, once vLLM has its output."""
        for request in requests:
            self._was_asked = True
            self._refuse()
            try:
                outcome, reason = self._lend(request)
            except Exception:
                logger.exception("prefix %s cannot be lent", request.transfer_id)
                outcome, reason = LendOutcome.FAILED, "its look-up failed"
            if outcome is not LendOutcome.LENT:
                self._after_pages.append(AnswerPrefix(request.transfer_id, 0, outcome, reason))

    def _lend(self, request: PrefixRequested) -> tuple[LendOutcome, str]:
        """Lends a prefix. Returns the outcome, with the reason of a refusal."""
        assert self.cache is not None
        content, transfer_id = request.content, request.transfer_id
        if self._paused:
            return LendOutcome.PAUSED, _PAUSED
        if transfer_id in self._lent:
            return LendOutcome.FAILED, "it is lent already"
        if has_states(self._block_sizes):
            return LendOutcome.UNLIKE, "the model has recurrent states, which are not lent"
        hashed = self.cache.hash_block_tokens
        if (content.basis, content.tokens) != (self._basis.of(hashed), hashed):
            return LendOutcome.UNLIKE, self._other_hashes(content.tokens)
        tables, tokens = self.cache.cached_prefix(content.each(), content.covered, request.multiple)
        if tokens <= request.first_token:
            return LendOutcome.NOT_CACHED, f"{tokens} of its tokens are cached"
        groups = []
        blocks: list[Any] = []
        for table, size in zip(tables, self._block_sizes, strict=True):
            first = request.first_token // size
            groups.append(GroupPages(first, tuple(block.block_id for block in table[first:])))
            blocks += [block for block in table[first:] if not block.is_null]
        held = sum(map(len, self._lent.values()))
        if not may_lend(held, len(blocks), self.cache.total):
            return LendOutcome.BUSY, "too many blocks are lent"
        # Running requests need the free blocks. If none is left, vLLM preempts a stream.
        if sum(block.ref_cnt == 0 for block in blocks) > self.cache.unused // 2:
            return LendOutcome.BUSY, "too few blocks are free"
        self.cache.hold(blocks)
        self._lent[transfer_id] = blocks
        prompt_hash = content.prompt_hash(tokens)
        self._commands.append(PrefillRequest(transfer_id, transfer_id, tokens, prompt_hash, lent=True))
        self._pages.append(NewPages(transfer_id, tuple(groups), last=True))
        self._after_pages += [
            FinishPrefill(transfer_id, transfer_id, ok=True, reason=""),
            AnswerPrefix(transfer_id, tokens),
        ]
        return LendOutcome.LENT, ""

    def _other_hashes(self, block_tokens: int) -> str:
        assert self.cache is not None
        if block_tokens != self.cache.hash_block_tokens:
            reason = f"this engine hashes blocks of {self.cache.hash_block_tokens} tokens, not {block_tokens}"
        else:
            reason = (
                "the engines compute different block hashes: start both with the same "
                "--prefix-caching-hash-algo, block size, PYTHONHASHSEED, and clear_cache in "
                "KV_CONNECTOR_WEIGHTS"
            )
        if self._logged != reason:
            logger.warning("prefixes are not lent to some engine: %s", reason)
            self._logged = reason
        return reason

    def take_pages(self) -> tuple[tuple[NewPages, ...], tuple[Command, ...]]:
        """Returns the pages of prefixes lent since the last call, and the commands that follow them.

        vLLM may compute some of these blocks in a step that is in flight. So their pages leave with the
        layers of the next step.
        """
        taken = tuple(self._pages), tuple(self._after_pages)
        self._pages.clear()
        self._after_pages.clear()
        return taken

    def pause(self, paused: bool) -> None:
        """Notes that the engine is being paused, or resumes.

        vLLM ends its pause once no block is in use. A borrower may take 30 s for a prefix, so the pause ends
        what is lent. The workers refuse new borrowers, because a paused engine may take no step for seconds.
        """
        self._paused = paused
        self._refuse()
        if paused:
            self._end_all(_PAUSED)

    def _refuse(self) -> None:
        # A command costs the pause a step, so engines that never lend send none.
        if self._was_asked and self._refusing != self._paused:
            self._refusing = self._paused
            self._commands.append(RefuseLending(_PAUSED if self._paused else ""))

    def after_reset(self) -> None:
        """Ends what is lent after vLLM has emptied its prefix cache."""
        self._end_all("the lending engine has emptied its prefix cache")

    def _end_all(self, reason: str) -> None:
        if self._lent:
            self._commands.append(EndLendings(reason))

    @property
    def busy(self) -> bool:
        """Returns whether the engine must take steps for a borrower."""
        return bool(self._lent or self._after_pages)

    def sent(self, request_ids: Collection[str]) -> set[str]:
        """Gives back the blocks of prefixes that nothing reads any more. Returns these prefixes, which vLLM
        does not know."""
        over = {request_id for request_id in request_ids if request_id in self._lent}
        for transfer_id in over:
            assert self.cache is not None
            self.cache.give_back(self._lent.pop(transfer_id))
        return over
