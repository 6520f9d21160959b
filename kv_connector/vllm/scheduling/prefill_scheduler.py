"""PrefillScheduler: P's requests in vLLM's scheduler, with ``do_remote_decode``. No call blocks."""

from __future__ import annotations

import heapq
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kv_connector.agent.commands import CacheCleared, Command, FinishPrefill, NewPages, PromptNext
from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import AdmissionGate, Place, no_place
from kv_connector.protocol.params import BadParams, PrefillParams
from kv_connector.protocol.requests import GroupPages, PrefillRequest
from kv_connector.protocol.wire.messages import Role
from kv_connector.vllm.internals import Request, RequestStatus
from kv_connector.vllm.patches import leave_last_token
from kv_connector.vllm.scheduling.prompt import prompt_of
from kv_connector.vllm.scheduling.transferred_blocks import (
    Blocks,
    attended_from,
    blocks_of,
    has_states,
    state_after,
)

logger = logging.getLogger(__name__)

# Status of a prompt that was computed to its end, whatever the first token was.
_GOOD_ENDS = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


@dataclass
class _Prompt:
    """A prompt that P computes for a D."""

    request: Request
    transfer_id: str
    tokens: int
    computed: int
    """Tokens that P computes: all, or all but the last."""
    unsent: str
    """The reason why none of its pages can be sent. Empty: they can be sent."""
    early: bool
    """No D has requested it yet, and whether one will does not depend on P alone."""
    reported: list[int] = field(default_factory=list)
    """Per group: the workers know the logical blocks before this one, since the last admission."""
    complete: bool = False
    """The workers know the whole prompt's blocks."""
    finished: bool = False
    """The prompt's request has left vLLM's scheduler."""
    next: bool = False
    """The next steps compute it, or it is ``begun``."""
    begun: bool = False
    """It has begun, or its request has left vLLM's scheduler."""
    held: list[Any] = field(default_factory=list)


class PrefillScheduler:
    """P's requests, from their arrival until the workers report them sent."""

    def __init__(
        self,
        role: Role,
        engine_id: str,
        block_sizes: tuple[int, ...],
        commands: list[Command],
        step_tokens: int = 0,
    ) -> None:
        """``step_tokens``: most tokens that a step computes."""
        self._role = role
        self._engine_id = engine_id
        self._block_sizes = block_sizes
        self._commands = commands
        self._prompts: dict[str, _Prompt] = {}
        self._transfers: dict[str, _Prompt] = {}
        self._step_tokens = step_tokens
        self._queue: list[tuple[Place, int, str]] = []
        """A heap of the prompts that are not next, and of some that have begun or left."""
        self._arrivals = 0
        self._next_tokens = 0
        """Tokens of the prompts that are next and have not begun."""
        self._computing: dict[str, _Prompt] = {}
        """Prompts that have begun and are not complete, by request id."""
        self.blocks: Blocks | None = None
        self.gate: AdmissionGate | None = None
        """The gate of early prompts. Set before the first request, as ``blocks``."""
        self.place: Callable[[Request], Place] = no_place
        """Returns a request's place in the order of the scheduling policy."""
        self.address: Address | None = None
        """Address of rank 0, for routers that dispatch to D after P. Set before the first request."""

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, request: Request, params: PrefillParams) -> None:
        transfer_id = params.transfer_id or uuid.uuid4().hex
        if transfer_id in self._transfers:
            raise BadParams(f"transfer {transfer_id} belongs to another live request")
        tokens, digest = prompt_of(request)
        computed, unsent = tokens, ""
        if has_states(self._block_sizes) and tokens > 1:
            if request.skip_reading_prefix_cache:
                unsent = "prompt_logprobs need the whole prompt, and no state is kept before its last token"
            else:
                leave_last_token(request)
                computed -= 1
        prompt = _Prompt(
            request,
            transfer_id,
            tokens,
            computed,
            unsent,
            # If D is dispatched after P, D's queue is in P's order, and prompts need no gate. P learns that
            # if it names the transfer itself, as in NIXL's flow, or from the router. It does not hold if P
            # itself has loads.
            early=self._role is Role.BOTH or (params.transfer_id is not None and not params.serial),
            reported=[0] * len(self._block_sizes),
        )
        self._prompts[request.request_id] = self._transfers[transfer_id] = prompt
        self._commands.append(PrefillRequest(request.request_id, transfer_id, tokens, digest))
        self._arrivals += 1
        heapq.heappush(self._queue, (self.place(request), self._arrivals, request.request_id))

    def must_wait(self, request: Request) -> bool:
        """Returns whether this prompt must not be started yet. vLLM may call this every step."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.early:
            return False
        assert self.blocks is not None
        assert self.gate is not None
        blocks = blocks_of(self.blocks, self._block_sizes, prompt.tokens)
        return self.gate.must_wait(request.request_id, blocks, self.place(request))

    def allocated(self, request: Request) -> None:
        """Notes that vLLM has given the request its first blocks, or that it waits only for a lender."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return
        self._leave_queue(prompt)
        self._computing[request.request_id] = prompt
        if prompt.early:
            assert self.blocks is not None
            assert self.gate is not None
            self.gate.enter(request.request_id, blocks_of(self.blocks, self._block_sizes, prompt.tokens))

    def notice_next(self, scheduled: Mapping[str, int]) -> None:
        """Reports the prompts that the next step computes.

        So the RESERVE of a D that is short of blocks arrives before their first layer.

        They are the first of the queue, as many as a step computes behind the prompts that have begun. A
        prompt that the gate holds waits for a D. If the gate holds prompts, those behind them are reported.
        """
        if not self._queue:
            return
        assert self.gate is not None
        ahead = 0 if self.gate.first() is not None else self._next_tokens
        for request_id, prompt in self._computing.items():
            computed = prompt.request.num_computed_tokens + scheduled.get(request_id, 0)
            ahead += max(0, prompt.computed - computed)
        while self._queue and ahead < self._step_tokens:
            *_, request_id = heapq.heappop(self._queue)
            found = self._prompts.get(request_id)
            if found is None or found.next:
                continue
            found.next = True
            self._next_tokens += found.computed
            ahead += found.computed
            self._commands.append(PromptNext(found.transfer_id))

    def _leave_queue(self, prompt: _Prompt) -> None:
        """Notes that the prompt begins, or that it never will."""
        if prompt.next and not prompt.begun:
            self._next_tokens -= prompt.computed
        prompt.next = prompt.begun = True

    def reserved(self, transfer_ids: Collection[str]) -> None:
        """Notes that D has room for these prompts."""
        for transfer_id in transfer_ids:
            if prompt := self._transfers.get(transfer_id):
                prompt.early = False
                self._leave(prompt)

    def preempted(self, request_ids: Iterable[str], scheduled: Collection[str]) -> tuple[str, ...]:
        """Notes that vLLM has taken these requests' blocks back. Returns their transfer ids.

        All their blocks are named again at the next admission. Requests in ``scheduled`` have had that
        admission already.
        """
        transfers = []
        for request_id in request_ids:
            if prompt := self._prompts.get(request_id):
                prompt.reported = [0] * len(self._block_sizes)
                prompt.complete = False
                if not prompt.finished:  # a reset had preempted it before
                    self._computing[request_id] = prompt
                self._give_back(prompt)
                if request_id not in scheduled:
                    self._leave(prompt)
                transfers.append(prompt.transfer_id)
        return tuple(transfers)

    def new_pages(self, num_scheduled_tokens: Mapping[str, int], block_state: Any) -> tuple[NewPages, ...]:
        """Returns the pages that this step makes valid, cached ones included.

        ``block_state``: vLLM's state of the blocks in this step.
        """
        pages: list[NewPages] = []
        if not self._prompts:
            return ()  # D's steps, which may have hundreds of requests, end here
        for request_id, scheduled in num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is None or prompt.complete or prompt.unsent:
                continue
            try:
                pages.append(self._advance(prompt, scheduled, block_state.get_block_ids(request_id)))
            except Exception:
                # The prompt is never complete, so D is notified at the request's end at the latest.
                logger.exception(
                    "transfer %s: cannot send pages of request %s", prompt.transfer_id, request_id
                )
        return tuple(pages)

    def _advance(self, prompt: _Prompt, scheduled: int, tables: tuple[list[int], ...]) -> NewPages:
        assert self.blocks is not None
        computed = min(prompt.request.num_computed_tokens + scheduled, prompt.computed)
        last = computed == prompt.computed
        # Blocks to which D's token no longer attends are never requested. vLLM reuses them while the prompt
        # is still being computed, so they must not be named.
        firsts = attended_from(self.blocks, len(self._block_sizes), prompt.tokens)
        groups = []
        for group, (table, size) in enumerate(zip(tables, self._block_sizes, strict=True)):
            if not size:
                # Before the last chunk, each chunk overwrites the previous chunk's state.
                state = state_after(self.blocks, group, table, prompt.tokens - 1) if last else ()
                groups.append(GroupPages(0, state))
                continue
            end = -(-computed // size) if last else computed // size
            first = max(prompt.reported[group], firsts[group])
            groups.append(GroupPages(first, tuple(table[first:end])))
            prompt.reported[group] = max(prompt.reported[group], end)
        if last:
            prompt.complete = True
            self._computing.pop(prompt.request.request_id, None)
            # When the request finishes, vLLM counts one token further than D, and may free the oldest window
            # block.
            prompt.held = self.blocks.hold_windows(prompt.request.request_id, firsts)
        return NewPages(prompt.transfer_id, tuple(groups), last)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Returns True for each request with a transfer, and the parameters for D.

        True makes vLLM keep the request, with or without blocks, until it is reported sent.
        """
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return False, None
        assert self.address is not None
        self._leave_queue(prompt)
        prompt.finished = True
        self._computing.pop(request.request_id, None)
        ok = prompt.complete and request.status in _GOOD_ENDS
        aborted = request.status is RequestStatus.FINISHED_ABORTED
        reason = "" if ok else f"prefill ended as {request.status.name} before the prompt's end"
        if not aborted:
            reason = prompt.unsent or reason
        whole = ok and prompt.computed == prompt.tokens
        sampled = int(request.output_token_ids[0]) if whole and request.output_token_ids else None
        self._commands.append(
            FinishPrefill(request.request_id, prompt.transfer_id, ok, reason, sampled, aborted)
        )
        if not ok:
            return True, None
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": prompt.transfer_id,
            "remote_engine_id": self._engine_id,
            "remote_host": self.address.host,
            "remote_port": self.address.port,
        }

    def sent(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if prompt := self._prompts.pop(request_id, None):
                self._transfers.pop(prompt.transfer_id, None)
                self._give_back(prompt)
                self._leave(prompt)

    def computes(self, request_id: str) -> bool:
        """Returns whether the request is a prompt for a decode engine that is not finished."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and not prompt.finished

    def before_reset(self) -> None:
        """Frees what vLLM needs before it empties its prefix cache: all blocks of a preempted prompt."""
        for prompt in self._prompts.values():
            if prompt.request.status is RequestStatus.PREEMPTED:
                self._give_back(prompt)

    def reset(self) -> bool:
        """Discards all KV. Returns False while a finished prompt's blocks are still to be read."""
        if self._prompts:
            self._commands.append(CacheCleared())
        return not any(prompt.finished for prompt in self._prompts.values())

    def _leave(self, prompt: _Prompt) -> None:
        assert self.gate is not None
        self.gate.leave(prompt.request.request_id)

    def _give_back(self, prompt: _Prompt) -> None:
        if prompt.held:
            assert self.blocks is not None
            self.blocks.give_back(prompt.held)
            prompt.held = []
