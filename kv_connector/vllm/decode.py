"""D's requests in vLLM's scheduler: ``do_remote_prefill`` and the address of their P. Nothing waits.

A request's load goes through these states:

    state      blocks   meaning                                             next
    WAITING    none     vLLM has no blocks for it, or its gate no room      RESERVED, ASKED, OVER
    RESERVED   its own  the workers fetch its pages                         VOID, LEFT, OVER
    VOID       its own  pages may land, and will not be used                LEFT, OVER
    ASKED      none     the workers fetch the token alone that P sampled    SETTLING, OVER
    LEFT       vLLM's   the request is finished, and pages may still land   OVER
    SETTLING   none     the request is finished, and was ASKED              OVER
    OVER       its own  received, failed, or not needed                     -

A request that finishes in OVER, or reaches OVER when it is finished, is forgotten. After VOID it computes its
prompt from the beginning.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kv_connector.agent.commands import Cancel, Command, FailLoad, Release
from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import AdmissionGate, Place, no_place
from kv_connector.protocol.layout import GroupTarget
from kv_connector.protocol.params import BadParams, DecodeParams
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.blocks import Blocks, attended_from, blocks_of, has_states, state_after
from kv_connector.vllm.forced_token import force
from kv_connector.vllm.internals import Request, RequestStatus
from kv_connector.vllm.prompt import prompt_of

logger = logging.getLogger(__name__)

# Seconds between two lists of waiting transfers, which go to each worker with a step. One of 5,000 entries
# takes 17 to 32 ms to pickle and unpickle (two loaded cores). Workers use it once a heartbeat (1 s), and P
# holds a prompt for 20 s then.
_WAITING_INTERVAL_S = 0.25


class _Load(enum.Enum):
    """The states of a load; the module's table says what they mean."""

    WAITING = enum.auto()
    RESERVED = enum.auto()
    VOID = enum.auto()
    ASKED = enum.auto()
    LEFT = enum.auto()
    SETTLING = enum.auto()
    OVER = enum.auto()


_NEXT = {
    _Load.WAITING: {_Load.RESERVED, _Load.ASKED, _Load.OVER},
    _Load.RESERVED: {_Load.VOID, _Load.LEFT, _Load.OVER},
    _Load.VOID: {_Load.LEFT, _Load.OVER},
    _Load.ASKED: {_Load.SETTLING, _Load.OVER},
    _Load.LEFT: {_Load.OVER},
    _Load.SETTLING: {_Load.OVER},
    _Load.OVER: set(),
}
"""The legal transitions."""


@dataclass
class _Target:
    """A request of D whose prompt a P computes."""

    request: Request
    request_id: str
    transfer_id: str
    peer: Address
    tokens: int
    prompt_hash: bytes
    wants_sampled: bool = False
    """It goes on with the token that P samples."""
    sampled: int | None = None
    """That token, once P has reported it."""
    end: int = 0
    """It loads the tokens before this one."""
    load: _Load = _Load.WAITING


class DecodeScheduler:
    """D's requests, from their arrival until they have left the scheduler and nothing is written for them."""

    def __init__(
        self, block_sizes: tuple[int, ...], commands: list[Command], *, early_tokens: bool = False
    ) -> None:
        """``early_tokens``: whether this engine can go on with a token that P sampled."""
        self._block_sizes = block_sizes
        self._commands = commands
        self._early_tokens = early_tokens
        self._targets: dict[str, _Target] = {}
        self._transfers: dict[str, _Target] = {}
        self._siblings: dict[str, _Target] = {}
        """Requests that want what another one loads."""
        self._waiting: dict[str, Address] = {}
        """The prefill engine of each transfer whose load is WAITING."""
        self._settling = 0
        """Loads that are SETTLING."""
        self._reported_waiting: tuple[tuple[str, Address], ...] = ()
        self._reported_at = -math.inf
        self.clock: Callable[[], float] = time.monotonic
        self._first_tokens: list[tuple[Request, int]] = []
        self.gives_first_tokens = False
        """FirstTokenScheduler takes these. This and the next two are set before the first request."""
        self.blocks: Blocks | None = None
        self.gate: AdmissionGate | None = None
        """Of loads."""
        self.place: Callable[[Request], Place] = no_place
        """A request's place in the order of the scheduling policy."""

    def __len__(self) -> int:
        return len(self._targets)

    def add(self, request: Request, params: DecodeParams) -> None:
        known = self._targets.get(request.request_id)
        if known is not None and known.load is _Load.SETTLING:
            raise BadParams("one of the same id is not over")
        transfer_id, peer = params.transfer_id, params.peer
        tokens, digest = prompt_of(request)
        if first := self._transfers.get(transfer_id):
            if (first.peer, first.prompt_hash) != (peer, digest):
                raise BadParams(f"transfer {transfer_id} belongs to another live request")
            # Samples of one prompt (n > 1) share their parameters: the first one loads for all.
            self._siblings[request.request_id] = first
            return
        wants_sampled = self._early_tokens and params.early_token
        self._waiting[transfer_id] = peer
        target = _Target(request, request.request_id, transfer_id, peer, tokens, digest, wants_sampled)
        self._transfers[transfer_id] = self._targets[request.request_id] = target

    def must_wait(self, request: Request) -> bool:
        """Whether another request loads this one's prompt, which is then found in the prefix cache, or there
        is no room for this load yet. vLLM may ask every step."""
        if first := self._siblings.get(request.request_id):
            return first.load is not _Load.OVER
        target = self._targets.get(request.request_id)
        return (target is not None and target.load is _Load.ASKED) or self.held(request)

    def held(self, request: Request) -> bool:
        """Whether the gate has no room for this load yet."""
        target = self._targets.get(request.request_id)
        if target is None or target.load is not _Load.WAITING:
            return False
        assert self.gate is not None
        return self.gate.must_wait(target.request_id, self._blocks_of(target), self.place(request))

    def loads(self, request_id: str) -> bool:
        """Whether the request's prompt is still to come from a P."""
        target = self._siblings.get(request_id) or self._targets.get(request_id)
        return target is not None and target.load not in (_Load.ASKED, _Load.SETTLING, _Load.OVER)

    @property
    def settling(self) -> bool:
        """Whether the workers have still to report on a request that vLLM has forgotten."""
        return self._settling > 0

    def _blocks_of(self, target: _Target) -> int:
        assert self.blocks is not None
        return blocks_of(self.blocks, self._block_sizes, target.tokens)

    def tokens_to_load(self, request: Request, local_tokens: int) -> int:
        """How many tokens to load behind the first ``local_tokens``. vLLM may ask every step, with another
        prefix hit each time. The last answer counts: ``allocated`` reserves up to the end that it notes.

        All but the prompt's last token, which vLLM recomputes to sample from it; that one too where P has
        sampled, and the next step computes the token behind it alone. But to claim it may cost a sliding
        window its oldest block: vLLM takes the window of the token after it.
        """
        target = self._targets.get(request.request_id)
        if target is None or target.load is not _Load.WAITING:
            return 0
        if any(size and local_tokens % size for size in self._block_sizes):
            return 0
        target.end = target.tokens - 1
        # Where all is here but the token that P samples: vLLM has no request wait that loads nothing.
        wants_last = target.wants_sampled and (self.gives_first_tokens or local_tokens >= target.end)
        if wants_last and not self._costs_a_window(target):
            target.end = target.tokens
        return max(target.end - local_tokens, 0)

    def _costs_a_window(self, target: _Target) -> bool:
        assert self.blocks is not None
        groups = len(self._block_sizes)
        return attended_from(self.blocks, groups, target.tokens + 1) != attended_from(
            self.blocks, groups, target.tokens
        )

    def allocated(self, request: Request, blocks: Any, external_tokens: int) -> None:
        """vLLM has given the request blocks, and will load ``external_tokens`` (0: it needs nothing)."""
        target = self._targets.get(request.request_id)
        if target is None or target.load is not _Load.WAITING:
            return
        if external_tokens == 0:
            self._release(target)
            return
        self._enter(target, _Load.RESERVED)
        try:
            assert self.gate is not None
            self.gate.enter(target.request_id, self._blocks_of(target))
            self._commands.append(self._reservation(target, blocks.get_block_ids(), external_tokens))
        except Exception:
            logger.exception(
                "transfer %s: no reservation for request %s", target.transfer_id, target.request_id
            )
            self._commands.append(FailLoad(target.request_id))

    def _reservation(
        self, target: _Target, tables: tuple[list[int], ...], external_tokens: int
    ) -> DecodeRequest:
        assert self.blocks is not None
        loaded = target.end
        first_token = loaded - external_tokens
        groups: list[GroupTarget] = []
        for group, (table, size) in enumerate(zip(tables, self._block_sizes, strict=True)):
            if not size:
                groups.append(GroupTarget(first=0, blocks=state_after(self.blocks, group, table, loaded)))
                continue
            first, end = first_token // size, -(-loaded // size)
            if has_states(self._block_sizes):
                # The hit is the one of full attention; another group may have less of it.
                first = min(first, self.blocks.first_loaded(target.request_id, group))
            needed = self.blocks.first_attended_token(group, loaded)
            groups.append(GroupTarget(first, tuple(table[first:end]), needed))
        return self._request(target, first_token, groups)

    def _request(self, target: _Target, first_token: int, groups: Iterable[GroupTarget]) -> DecodeRequest:
        return DecodeRequest(
            request_id=target.request_id,
            transfer_id=target.transfer_id,
            engine=target.peer,
            prompt_tokens=target.tokens,
            first_token=first_token,
            prompt_hash=target.prompt_hash,
            groups=tuple(groups),
            wants_sampled=target.wants_sampled,
        )

    def finished(self, request: Request) -> None:
        """vLLM itself keeps the blocks of a request that is still being loaded, until the load is reported
        over.
        """
        self._siblings.pop(request.request_id, None)
        target = self._targets.get(request.request_id)
        if target is None:
            return
        match target.load:
            case _Load.WAITING:
                self._release(target)
            case _Load.RESERVED | _Load.VOID:
                self._enter(target, _Load.LEFT)
                self._commands.append(Cancel(target.request_id))
            case _Load.ASKED:
                self._enter(target, _Load.SETTLING)
                self._commands.append(Cancel(target.request_id))
        if target.load is _Load.OVER:
            self._forget(target)

    def sampled(self, tokens: Mapping[str, int]) -> None:
        """By request, what P sampled. It comes no later than the end of the load, so before vLLM schedules
        the request."""
        for request_id, token in tokens.items():
            if target := self._targets.get(request_id):
                target.sampled = token

    def take_first_tokens(self) -> list[tuple[Request, int]]:
        """The requests whose pages have come since the last call, and what P sampled behind them."""
        taken, self._first_tokens = self._first_tokens, []
        return taken

    def make_void(self, request_ids: Iterable[str]) -> None:
        """What comes for these is of no use. It is reported no later than the end of the load."""
        for request_id in request_ids:
            target = self._targets.get(request_id)
            if target is not None and target.load is _Load.RESERVED:
                self._enter(target, _Load.VOID)

    def asked(self, request_ids: Iterable[str]) -> set[str]:
        """Those of whose loads vLLM knows nothing: it must not hear of their end."""
        targets, asked = self._targets, (_Load.ASKED, _Load.SETTLING)
        return {one for one in request_ids if one in targets and targets[one].load in asked}

    def received(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """These loads are over, well or not."""
        for request_id in request_ids:
            target = self._targets.get(request_id)
            if target is None or target.load is _Load.OVER:
                continue
            before = target.load
            self._enter(target, _Load.OVER)
            if before in (_Load.LEFT, _Load.SETTLING):
                self._forget(target)
                continue
            if target.sampled is not None:
                if self.gives_first_tokens and before is _Load.RESERVED and request_id not in failed:
                    self._first_tokens.append((target.request, target.sampled))
                else:
                    force(target.request.sampling_params, target.sampled)
            elif before is _Load.ASKED:
                words = "transfer %s: %s does not say what it sampled: the client may have another token"
                logger.warning(words, target.transfer_id, target.peer)
            if before is _Load.VOID:
                assert self.blocks is not None
                self.blocks.free(target.request)

    def loading(self) -> list[str]:
        """The requests that hold blocks of a load and have not run. vLLM cannot preempt them."""
        return [target.request_id for target in self._holding()]

    def _holding(self) -> list[_Target]:
        # vLLM promotes a request whose load is over to WAITING, where it may wait for its next block.
        return [
            target
            for target in self._targets.values()
            if target.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            or (target.request.status is RequestStatus.WAITING and target.request.num_computed_tokens > 0)
        ]

    def after_reset(self) -> None:
        """vLLM has emptied its prefix cache: what is being loaded, and what is loaded, is not used."""
        for target in self._holding():
            if target.load is _Load.OVER:
                assert self.blocks is not None
                self.blocks.free(target.request)
            elif target.load is _Load.RESERVED:
                self._enter(target, _Load.VOID)
                if not target.wants_sampled:  # else it waits for that: the client may have it already
                    self._commands.append(Cancel(target.request_id))

    def reset(self) -> bool:
        """All KV is worthless, P's too: who would have asked for it computes its prompt here. Where its
        client may have P's token already, it asks for that alone, at once: a pause of P's waits for it. False
        while pages may still land for a finished request.
        """
        for target in self._targets.values():
            if target.load is not _Load.WAITING:
                continue
            if target.wants_sampled:
                self._ask(target)
            else:
                self._release(target)
        return not any(target.load is _Load.LEFT for target in self._targets.values())

    def _ask(self, target: _Target) -> None:
        self._enter(target, _Load.ASKED)
        nothing = [GroupTarget(0, ()) for _ in self._block_sizes]
        self._commands.append(self._request(target, target.tokens, nothing))

    def waiting(self) -> tuple[tuple[str, Address], ...] | None:
        """The transfers whose requests have no blocks yet. None: the workers have this list, or one that is
        younger than _WAITING_INTERVAL_S.

        An engine whose last waiting request has gone may take no further step: an empty list goes at once.
        """
        now = self.clock()
        if self._waiting and now - self._reported_at < _WAITING_INTERVAL_S:
            return None
        addresses: dict[Address, Address] = {}  # one object for each: pickle writes it once
        waiting = tuple((one, addresses.setdefault(peer, peer)) for one, peer in self._waiting.items())
        if waiting == self._reported_waiting:
            return None
        self._reported_waiting, self._reported_at = waiting, now
        return waiting

    def _enter(self, target: _Target, load: _Load) -> None:
        """The one place in which a load changes its state, and what follows from it."""
        assert load in _NEXT[target.load], f"transfer {target.transfer_id}: {target.load} -> {load}"
        if target.load is _Load.WAITING:
            del self._waiting[target.transfer_id]
        self._settling += (load is _Load.SETTLING) - (target.load is _Load.SETTLING)
        target.load = load
        if load in (_Load.ASKED, _Load.OVER):
            assert self.gate is not None
            self.gate.leave(target.request_id)

    def _release(self, target: _Target) -> None:
        self._enter(target, _Load.OVER)
        self._commands.append(Release(target.transfer_id, target.peer))

    def _forget(self, target: _Target) -> None:
        del self._targets[target.request_id], self._transfers[target.transfer_id]
