"""DecodeScheduler: D's requests in vLLM's scheduler, with ``do_remote_prefill`` and the address of their P.

No call blocks. A request's KV load goes through these phases:

    phase          blocks   meaning                                             next
    WAITING        none     vLLM has no blocks for it, or its gate holds it     RESERVED, TOKEN_ONLY, OVER
    RESERVED       its own  the workers fetch its pages                         DISCARDED, LEAVING, OVER
    DISCARDED      its own  pages may land, and will not be used                LEAVING, OVER
    TOKEN_ONLY     none     the workers fetch only the token that P sampled     TOKEN_LEAVING, OVER
    LEAVING        vLLM's   the request is finished, and pages may still land   OVER
    TOKEN_LEAVING  none     the request is finished, and was TOKEN_ONLY         OVER
    OVER           its own  received, failed, or not needed                     -

A request is forgotten once it is finished and its load is OVER. After DISCARDED it computes its prompt from
the beginning.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kv_connector.agent.commands import CancelLoad, Command, DeferLoad, FailLoad, ReleaseTransfer
from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import AdmissionGate, Place, no_place
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.params import BadParams, DecodeParams
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.forced_token import force
from kv_connector.vllm.internals import Request, RequestStatus
from kv_connector.vllm.scheduling.prompt import prompt_of
from kv_connector.vllm.scheduling.transferred_blocks import Blocks, attended_from, blocks_of, load_targets

logger = logging.getLogger(__name__)

# Seconds between two lists of waiting transfers, which go to each worker with a step. A list of 5,000 entries
# takes 17 to 32 ms to pickle and unpickle (two loaded cores). Workers use the list once a heartbeat (1 s),
# and P then holds a prompt for 20 s.
_WAITING_INTERVAL_S = 0.25


class LoadPhase(enum.Enum):
    """The phases of a KV load. The module's docstring describes them in a table."""

    WAITING = enum.auto()
    RESERVED = enum.auto()
    DISCARDED = enum.auto()
    TOKEN_ONLY = enum.auto()
    LEAVING = enum.auto()
    TOKEN_LEAVING = enum.auto()
    OVER = enum.auto()


_NEXT = {
    LoadPhase.WAITING: {LoadPhase.RESERVED, LoadPhase.TOKEN_ONLY, LoadPhase.OVER},
    LoadPhase.RESERVED: {LoadPhase.DISCARDED, LoadPhase.LEAVING, LoadPhase.OVER},
    LoadPhase.DISCARDED: {LoadPhase.LEAVING, LoadPhase.OVER},
    LoadPhase.TOKEN_ONLY: {LoadPhase.TOKEN_LEAVING, LoadPhase.OVER},
    LoadPhase.LEAVING: {LoadPhase.OVER},
    LoadPhase.TOKEN_LEAVING: {LoadPhase.OVER},
    LoadPhase.OVER: set(),
}
"""The legal transitions of a KV load's phase."""


@dataclass
class KvLoad:
    """The KV load of a prompt that P computes, for a request of D."""

    request: Request
    request_id: str
    transfer_id: str
    peer: Address
    tokens: int
    prompt_hash: bytes
    wants_sampled: bool = False
    """Whether the request goes on with the token that P samples."""
    sampled: int | None = None
    """The token that P sampled, once P has reported it."""
    end: int = 0
    """The end of the load: it loads the tokens before this one."""
    local: int = 0
    """The number of tokens that vLLM last found in its prefix cache."""
    offered: int = 0
    """The number of tokens that the load last offered to vLLM."""
    phase: LoadPhase = LoadPhase.WAITING
    deferred: bool = False
    """Whether P is to report when the prompt is next in its queue."""
    due: bool = False
    """Whether a deferred load may take blocks, whatever its gate holds."""
    elsewhere: bool = False
    """Whether vLLM gave the request blocks last without this load. Another connector may write them."""


class DecodeScheduler:
    """D's requests, from their arrival until they have left the scheduler and nothing is written for them."""

    def __init__(
        self, block_sizes: tuple[int, ...], commands: list[Command], *, early_tokens: bool = False
    ) -> None:
        """``early_tokens``: whether this engine can go on with a token that P sampled."""
        self._block_sizes = block_sizes
        self._commands = commands
        self._early_tokens = early_tokens
        self._loads: dict[str, KvLoad] = {}
        self._transfers: dict[str, KvLoad] = {}
        self._siblings: dict[str, KvLoad] = {}
        """Requests that wait for another request's load of the same transfer, with that load."""
        self._waiting: dict[str, Address] = {}
        """The prefill engine of each transfer whose load is WAITING."""
        self._hits: dict[str, tuple[int, int]] = {}
        """Tokens of prompts that got blocks, and their local hits, by transfer id, to be reported."""
        self._unreported_ends = 0
        """The number of loads that are TOKEN_LEAVING."""
        self._reported_waiting: tuple[tuple[str, Address], ...] = ()
        self._reported_at = -math.inf
        self._reported_other = False
        """Whether it was logged that another connector loads prompts."""
        self.clock: Callable[[], float] = time.monotonic
        self._first_tokens: list[tuple[Request, int]] = []
        self.gives_first_tokens = False
        """Whether FirstTokenScheduler takes the first tokens.

        Set before the first request, as the next two fields.
        """
        self.blocks: Blocks | None = None
        self.gate: AdmissionGate | None = None
        """The gate of KV loads."""
        self.place: Callable[[Request], Place] = no_place
        """Returns a request's place in the order of the scheduling policy."""

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, request: Request, params: DecodeParams) -> None:
        known = self._loads.get(request.request_id)
        if known is not None and known.phase is LoadPhase.TOKEN_LEAVING:
            raise BadParams("an earlier request of the same id has not ended yet")
        transfer_id, peer = params.transfer_id, params.peer
        tokens, digest = prompt_of(request)
        if first := self._transfers.get(transfer_id):
            if (first.peer, first.prompt_hash) != (peer, digest):
                raise BadParams(f"transfer {transfer_id} belongs to another live request")
            # Samples of one prompt (n > 1) share their parameters. The first one loads for all.
            self._siblings[request.request_id] = first
            return
        wants_sampled = self._early_tokens and params.early_token
        self._waiting[transfer_id] = peer
        load = KvLoad(request, request.request_id, transfer_id, peer, tokens, digest, wants_sampled)
        self._transfers[transfer_id] = self._loads[request.request_id] = load

    def must_wait(self, request: Request) -> bool:
        """Returns whether the request must wait before it gets blocks. vLLM may call this every step.

        It waits while another request loads the same prompt, which is then found in the prefix cache. It also
        waits while its own load has no room.
        """
        if first := self._siblings.get(request.request_id):
            return first.phase is not LoadPhase.OVER
        load = self._loads.get(request.request_id)
        return (load is not None and load.phase is LoadPhase.TOKEN_ONLY) or self.held(request)

    def held(self, request: Request) -> bool:
        """Returns whether the gate has no room for this load yet."""
        load = self._loads.get(request.request_id)
        if load is None or load.phase is not LoadPhase.WAITING or load.due:
            return False
        assert self.gate is not None
        waits = self.gate.must_wait(load.request_id, self._blocks_of(load), self.place(request))
        if waits and self.gate.defers and not load.deferred:
            load.deferred = True
            self._commands.append(DeferLoad(load.transfer_id, load.peer))
        return waits

    def prompts_due(self, transfer_ids: Iterable[str]) -> None:
        """Notes that these deferred loads may take blocks as soon as the engine has them."""
        for transfer_id in transfer_ids:
            load = self._transfers.get(transfer_id)
            if load is not None and load.deferred and load.phase is LoadPhase.WAITING:
                assert self.gate is not None
                load.due = True
                self.gate.leave(load.request_id)

    def expects_prompt(self, request_id: str) -> bool:
        """Returns whether the request's prompt is still to arrive from a P."""
        load = self._siblings.get(request_id) or self._loads.get(request_id)
        without_pages = LoadPhase.TOKEN_ONLY, LoadPhase.TOKEN_LEAVING, LoadPhase.OVER
        return load is not None and load.phase not in without_pages

    @property
    def has_unreported_ends(self) -> bool:
        """Returns whether the workers have still to report on a request that vLLM has forgotten."""
        return self._unreported_ends > 0

    def _blocks_of(self, load: KvLoad) -> int:
        assert self.blocks is not None
        return blocks_of(self.blocks, self._block_sizes, load.tokens)

    def tokens_to_load(self, request: Request, local_tokens: int) -> int:
        """Returns the number of tokens to load behind the first ``local_tokens``.

        vLLM may call this every step, each time with another prefix hit. The last answer counts:
        ``allocated`` reserves up to the end that this call notes.

        The last token of the prompt is not loaded: vLLM computes it again to sample from it. If P has
        sampled, the last token is loaded too, and the next step computes only the token behind it. But that
        may cost a sliding window its oldest block, as vLLM keeps the window of the token after it. In that
        case the last token is not loaded.
        """
        load = self._loads.get(request.request_id)
        if load is None or load.phase is not LoadPhase.WAITING:
            return 0
        load.local = local_tokens
        if any(size and local_tokens % size for size in self._block_sizes):
            return 0
        load.end = load.tokens - 1
        # All is here but the token that P samples, and vLLM lets no request wait that loads nothing.
        wants_last = load.wants_sampled and (self.gives_first_tokens or local_tokens >= load.end)
        if wants_last and not self._costs_a_window(load):
            load.end = load.tokens
        load.offered = max(load.end - local_tokens, 0)
        return load.offered

    def _costs_a_window(self, load: KvLoad) -> bool:
        assert self.blocks is not None
        groups = len(self._block_sizes)
        return attended_from(self.blocks, groups, load.tokens + 1) != attended_from(
            self.blocks, groups, load.tokens
        )

    def allocated(self, request: Request, blocks: Any, external_tokens: int) -> None:
        """Notes that vLLM has given the request blocks.

        vLLM will load ``external_tokens`` tokens. 0: it needs nothing.
        """
        load = self._loads.get(request.request_id)
        if load is None:
            return
        load.elsewhere = external_tokens == 0 and load.phase in (LoadPhase.WAITING, LoadPhase.OVER)
        if load.phase is not LoadPhase.WAITING:
            return
        if not request.skip_reading_prefix_cache:
            self._hits[load.transfer_id] = load.tokens, load.local
        if external_tokens == 0:
            if load.wants_sampled and load.offered and not request.skip_reading_prefix_cache:
                self._report_other_connector(load)
            self._release(load)
            return
        self._enter(load, LoadPhase.RESERVED)
        try:
            assert self.gate is not None
            if not load.due:
                self.gate.enter(load.request_id, self._blocks_of(load))
            self._commands.append(self._reservation(load, blocks.get_block_ids(), external_tokens))
        except Exception:
            logger.exception(
                "transfer %s: cannot reserve blocks for request %s", load.transfer_id, load.request_id
            )
            self._commands.append(FailLoad(load.request_id))

    def take_hits(self) -> dict[str, tuple[int, int]]:
        """Returns the prompts that got blocks since the last call: their tokens and local hits, by transfer
        id."""
        hits, self._hits = self._hits, {}
        return hits

    def _report_other_connector(self, load: KvLoad) -> None:
        """Logs, once per engine, that another connector loads a prompt whose client may have P's token."""
        if not self._reported_other:
            logger.warning(
                "transfer %s of request %s: another KV connector loads the prompt, so the prefill engine's "
                "first token is lost. Put WriteImmConnector first in MultiConnector",
                load.transfer_id,
                load.request_id,
            )
        self._reported_other = True

    def _reservation(
        self, load: KvLoad, tables: tuple[list[int], ...], external_tokens: int
    ) -> DecodeRequest:
        assert self.blocks is not None
        first_token = load.end - external_tokens
        groups = load_targets(self.blocks, self._block_sizes, load.request_id, tables, first_token, load.end)
        return self._request(load, first_token, groups)

    def _request(self, load: KvLoad, first_token: int, groups: Iterable[GroupTarget]) -> DecodeRequest:
        return DecodeRequest(
            request_id=load.request_id,
            transfer_id=load.transfer_id,
            engine=load.peer,
            prompt_tokens=load.tokens,
            first_token=first_token,
            prompt_hash=load.prompt_hash,
            groups=tuple(groups),
            wants_sampled=load.wants_sampled,
        )

    def request_finished(self, request: Request) -> None:
        """Handles the end of a request.

        vLLM itself keeps the blocks of a request that is still being loaded, until the load's end is
        reported.
        """
        self._siblings.pop(request.request_id, None)
        load = self._loads.get(request.request_id)
        if load is None:
            return
        match load.phase:
            case LoadPhase.WAITING:
                self._release(load)
            case LoadPhase.RESERVED | LoadPhase.DISCARDED:
                self._enter(load, LoadPhase.LEAVING)
                self._commands.append(CancelLoad(load.request_id))
            case LoadPhase.TOKEN_ONLY:
                self._enter(load, LoadPhase.TOKEN_LEAVING)
                self._commands.append(CancelLoad(load.request_id))
        if load.phase is LoadPhase.OVER:
            self._forget(load)

    def sampled(self, tokens: Mapping[str, int]) -> None:
        """Notes the tokens that P sampled, by request id.

        They arrive no later than the end of the load, so before vLLM schedules the request.
        """
        for request_id, token in tokens.items():
            if load := self._loads.get(request_id):
                load.sampled = token

    def take_first_tokens(self) -> list[tuple[Request, int]]:
        """Returns the requests whose pages have arrived since the last call, each with P's sampled token."""
        taken, self._first_tokens = self._first_tokens, []
        return taken

    def discard(self, request_ids: Iterable[str]) -> None:
        """Marks these loads as discarded: their pages will not be used.

        Workers report them no later than their ends.
        """
        for request_id in request_ids:
            load = self._loads.get(request_id)
            if load is not None and load.phase is LoadPhase.RESERVED:
                self._enter(load, LoadPhase.DISCARDED)

    def token_only(self, request_ids: Iterable[str]) -> set[str]:
        """Returns the requests with a load that vLLM does not know.

        The ends of these loads must not be reported to vLLM.
        """
        loads, token_only = self._loads, (LoadPhase.TOKEN_ONLY, LoadPhase.TOKEN_LEAVING)
        return {one for one in request_ids if one in loads and loads[one].phase in token_only}

    def load_ended(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """Handles the ends of these loads, successful or not."""
        for request_id in request_ids:
            load = self._loads.get(request_id)
            if load is None or load.phase is LoadPhase.OVER:
                continue
            before = load.phase
            self._enter(load, LoadPhase.OVER)
            if before in (LoadPhase.LEAVING, LoadPhase.TOKEN_LEAVING):
                self._forget(load)
                continue
            if load.sampled is not None:
                if self.gives_first_tokens and before is LoadPhase.RESERVED and request_id not in failed:
                    self._first_tokens.append((load.request, load.sampled))
                else:
                    force(load.request.sampling_params, load.sampled)
            elif before is LoadPhase.TOKEN_ONLY:
                words = (
                    "transfer %s of request %s: prefill engine %s did not report its first token: the client "
                    "may have received another token"
                )
                logger.warning(words, load.transfer_id, load.request_id, load.peer)
            if before is LoadPhase.DISCARDED:
                assert self.blocks is not None
                self.blocks.free(load.request)

    def loading(self) -> list[str]:
        """Returns the requests that hold blocks of a load and have not run. vLLM cannot preempt them."""
        return [load.request_id for load in self._holding()]

    def _holding(self) -> list[KvLoad]:
        # vLLM sets a request whose load is over to WAITING. It may wait there for its next block. Blocks that
        # another connector of a MultiConnector loads stay with vLLM: that connector may still write there.
        return [
            load
            for load in self._loads.values()
            if not load.elsewhere
            and (
                load.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
                or (load.request.status is RequestStatus.WAITING and load.request.num_computed_tokens > 0)
            )
        ]

    def after_reset(self) -> None:
        """Discards all loads, running and complete, after vLLM has emptied its prefix cache."""
        for load in self._holding():
            if load.phase is LoadPhase.OVER:
                assert self.blocks is not None
                self.blocks.free(load.request)
            elif load.phase is LoadPhase.RESERVED:
                self._enter(load, LoadPhase.DISCARDED)
                if not load.wants_sampled:  # else it waits for the token, which the client may have already
                    self._commands.append(CancelLoad(load.request_id))

    def reset(self) -> bool:
        """Ends all waiting loads: all KV is stale, also P's.

        Returns False while pages may still land for a finished request. A request that would have requested
        KV computes its prompt here. If its client may have P's token already, the request fetches that token
        alone, at once, because a pause of P waits for it.
        """
        for load in self._loads.values():
            if load.phase is not LoadPhase.WAITING:
                continue
            if load.wants_sampled:
                self._fetch_token(load)
            else:
                self._release(load)
        return not any(load.phase is LoadPhase.LEAVING for load in self._loads.values())

    def _fetch_token(self, load: KvLoad) -> None:
        self._enter(load, LoadPhase.TOKEN_ONLY)
        nothing = [GroupTarget(0, ()) for _ in self._block_sizes]
        self._commands.append(self._request(load, load.tokens, nothing))

    def waiting(self) -> tuple[tuple[str, Address], ...] | None:
        """Returns the transfers whose requests have no blocks yet.

        None: the workers have this list, or a list that is younger than _WAITING_INTERVAL_S. An engine may
        take no further step after its last waiting request has left, so an empty list is sent at once.
        """
        now = self.clock()
        if self._waiting and now - self._reported_at < _WAITING_INTERVAL_S:
            return None
        addresses: dict[Address, Address] = {}  # one object for each address: pickle writes it once
        waiting = tuple((one, addresses.setdefault(peer, peer)) for one, peer in self._waiting.items())
        if waiting == self._reported_waiting:
            return None
        self._reported_waiting, self._reported_at = waiting, now
        return waiting

    def _enter(self, load: KvLoad, phase: LoadPhase) -> None:
        """Changes the phase of a load, with all consequences. No other code changes a phase."""
        assert phase in _NEXT[load.phase], f"transfer {load.transfer_id}: {load.phase} -> {phase}"
        if load.phase is LoadPhase.WAITING:
            del self._waiting[load.transfer_id]
        leaving = LoadPhase.TOKEN_LEAVING
        self._unreported_ends += (phase is leaving) - (load.phase is leaving)
        load.phase = phase
        if phase in (LoadPhase.TOKEN_ONLY, LoadPhase.OVER):
            assert self.gate is not None
            self.gate.leave(load.request_id)

    def _release(self, load: KvLoad) -> None:
        self._enter(load, LoadPhase.OVER)
        self._commands.append(ReleaseTransfer(load.transfer_id, load.peer))

    def _forget(self, load: KvLoad) -> None:
        del self._loads[load.request_id], self._transfers[load.transfer_id]
