"""PrefixBorrower: requests whose leading tokens come from another engine, in vLLM's scheduler.

No call blocks.

A prefix is loaded if that takes less time than computing it (borrow_costs.py). A load that takes longer all
the same is discarded. Few prefixes are requested or loaded at once. A request that comes too late for that
waits, but no longer than its tokens take to compute.

A request's prefix goes through these phases:

    phase     blocks   meaning                                                next
    WANTED    none     vLLM has not looked at the request yet, or others are  ASKED, OVER
                       first
    ASKED     none     the lender is to answer                                HELD, OVER
    HELD      none     the lender holds the pages, for a short time           LOADING, WANTED, ASKED,
                                                                              LAPSED, OVER
    LAPSED    none     vLLM had no blocks in that time                        ASKED, OVER
    LOADING   its own  the workers load the pages                             LOADED, LEAVING, OVER
    LOADED    its own  the pages are here, and are vLLM's like a prefix hit   OVER
    LEAVING   vLLM's   the request is finished, and pages may still land      OVER
    OVER      -        the request computes what it lacks                     -

A prefetch is a request that loads a prefix for a later request, and computes nothing. It waits for no other
request, and its load need not be sooner than computing. It ends after its load, or without one
(gated_scheduler.py).

The workers know the load by the lending's transfer id alone. A prompt that this engine computes for a D has
its own id there.
"""

from __future__ import annotations

import enum
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from kv_connector.agent.commands import CancelLoad, Command, FailLoad, ReleaseTransfer, WithdrawPrefix
from kv_connector.protocol.actions import Address
from kv_connector.protocol.params import BadParams, PrefixFrom
from kv_connector.protocol.requests import DecodeRequest, PrefixRequest
from kv_connector.protocol.wire.content_key import ContentKey
from kv_connector.vllm.internals import Request, RequestStatus
from kv_connector.vllm.scheduling.borrow_costs import BorrowCosts
from kv_connector.vllm.scheduling.content import HashBasis, content_key_of
from kv_connector.vllm.scheduling.transferred_blocks import Blocks, has_states, load_targets

logger = logging.getLogger(__name__)

# Prefixes that are requested or loaded at once. An answer takes up to two steps of the lender, 60 ms. In this
# time a lane of 50 GB/s moves 16 prefixes of 1,500 tokens of an 8B model (128 KiB each), so more at once are
# not here any sooner.
MOST_AT_ONCE = 16

# The part of MOST_AT_ONCE that may be prefetches. Each of several routers limits only its own prefetches, and
# a request whose client waits must find room.
MOST_PREFETCHES = MOST_AT_ONCE // 2

# The share of the pool that loads may hold, as at a lender (protocol/admission.py). Blocks of a load compute
# nothing, and a single prefix may be larger.
_LOADED_SHARE = 4

# Questions for one prefix. If vLLM has no blocks for seconds, each answer holds the lender's blocks in vain.
_MOST_QUESTIONS = 3

# Questions that were withdrawn when their answer may have been in flight already.
_REMEMBERED = 1024


class PrefixPhase(enum.Enum):
    """The phases of a prefix. The module's docstring describes them in a table."""

    WANTED = enum.auto()
    ASKED = enum.auto()
    HELD = enum.auto()
    LAPSED = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    LEAVING = enum.auto()
    OVER = enum.auto()


_NEXT = {
    PrefixPhase.WANTED: {PrefixPhase.ASKED, PrefixPhase.OVER},
    PrefixPhase.ASKED: {PrefixPhase.HELD, PrefixPhase.OVER},
    PrefixPhase.HELD: {
        PrefixPhase.LOADING,
        PrefixPhase.WANTED,
        PrefixPhase.ASKED,
        PrefixPhase.LAPSED,
        PrefixPhase.OVER,
    },
    PrefixPhase.LAPSED: {PrefixPhase.ASKED, PrefixPhase.OVER},
    PrefixPhase.LOADING: {PrefixPhase.LOADED, PrefixPhase.LEAVING, PrefixPhase.OVER},
    PrefixPhase.LOADED: {PrefixPhase.OVER},
    PrefixPhase.LEAVING: {PrefixPhase.OVER},
    PrefixPhase.OVER: set(),
}
"""The legal transitions of a prefix's phase."""


@dataclass
class _Prefix:
    request: Request
    lender: Address
    expected: int
    """Tokens that the router expects the lender to have."""
    content: ContentKey | None = None
    transfer_id: str = ""
    """Transfer id of the lending. Each question has a new one."""
    tokens: int = 0
    """The end of the prefix that the lender holds."""
    local: int = 0
    """Tokens that this engine had when it asked."""
    questions: int = 0
    """Questions so far."""
    waits_since: float | None = None
    """Time at which too many others were requested or loaded."""
    since: float = 0.0
    """Time of the question, or of the beginning of the load."""
    wire_s: float = 0.0
    """Seconds from the load's reservation to its last page, once it has arrived."""
    until: float = 0.0
    """Time from which on the lender may have freed it."""
    phase: PrefixPhase = PrefixPhase.WANTED
    discarded: bool = False
    """Whether its pages must not be used."""
    sent: bool = False
    """In LEAVING: the prompt of the same request is reported as sent."""
    prefetch: int | None = None
    """Most tokens that a prefetch loads. None: the request is no prefetch."""
    offered: bool = False
    """Whether vLLM was to give a prefetch its blocks."""

    @property
    def missing(self) -> int:
        """Tokens that are to be loaded, as far as they are known."""
        return (self.tokens or self.expected) - self.local

    def enter(self, phase: PrefixPhase) -> None:
        """Changes the phase of a prefix. No other code does."""
        assert phase in _NEXT[self.phase], f"prefix of {self.request.request_id}: {self.phase} -> {phase}"
        self.phase = phase


class PrefixBorrower:
    """The borrowed prefixes, from a request's arrival until it has left the scheduler and nothing is written
    for it."""

    def __init__(
        self,
        block_sizes: tuple[int, ...],
        commands: list[Command],
        basis: HashBasis,
        hold_s: float,
        remember_s: float,
        ask_s: float,
    ) -> None:
        """``hold_s``: how long a lender holds a prefix, in seconds. ``remember_s``: how long a lender's
        measurements count. ``ask_s``: how long any prefix may take."""
        self._block_sizes = block_sizes
        self._commands = commands
        self._basis = basis
        self._hold_s = hold_s
        self._ask_s = ask_s
        self._prefixes: dict[str, _Prefix] = {}
        """Prefixes of live requests, by request id."""
        self._by_transfer: dict[str, _Prefix] = {}
        """Prefixes whose question or load the workers have, by transfer id."""
        self._withdrawn: dict[str, Address] = {}
        self._prefetched: list[tuple[Request, int]] = []
        """Prefetches that are to end, each with the tokens that it has loaded."""
        self._contexts: dict[str, Mapping[str, str]] = {}
        """Trace contexts of new lendings, by transfer id."""
        self.costs = BorrowCosts(lambda before, tokens: None, remember_s)
        self.clock: Callable[[], float] = time.monotonic
        self.address: Address | None = None
        """This engine's own address."""
        self.blocks: Blocks | None = None
        """Set before the first request."""
        self.ends_prefetches = False
        """Whether the scheduler takes prefetches and ends them. Otherwise they are computed like others."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, request: Request, prefix: PrefixFrom) -> None:
        """Notes a proposal. Raises BadParams if it cannot be used."""
        if has_states(self._block_sizes):
            raise BadParams("prefix_from: the model has recurrent states, which are not lent")
        if prefix.lender == self.address:
            raise BadParams(f"prefix_from names this engine itself, {prefix.lender}")
        if request.skip_reading_prefix_cache:
            raise BadParams("prefix_from: the request reads no cached tokens")
        lender = replace(prefix.lender, prefixes=True)
        prefetch = prefix.prefetch if self.ends_prefetches else None
        self._prefixes[request.request_id] = _Prefix(request, lender, prefix.tokens, prefetch=prefetch)

    def is_prefetch(self, request_id: str) -> bool:
        """Returns whether the request computes nothing."""
        prefix = self._prefixes.get(request_id)
        return prefix is not None and prefix.prefetch is not None

    def take_prefetched(self) -> list[tuple[Request, int]]:
        """Returns the prefetches that are to end, each with the tokens that it has loaded."""
        taken, self._prefetched = self._prefetched, []
        return taken

    def must_wait(self, request: Request, local_tokens: int) -> bool:
        """Returns whether the request waits for a lender's answer. vLLM may call this every step."""
        prefix = self._prefixes.get(request.request_id)
        if prefix is None:
            return False
        waits = self._look(prefix, local_tokens)
        return waits if prefix.prefetch is None else self._prefetch_waits(prefix, local_tokens)

    def _look(self, prefix: _Prefix, local_tokens: int) -> bool:
        match prefix.phase:
            case PrefixPhase.WANTED:
                self._ask(prefix, local_tokens)
            case PrefixPhase.HELD if prefix.tokens <= local_tokens:
                self._release(prefix)
                prefix.enter(PrefixPhase.OVER)
            case PrefixPhase.HELD if local_tokens < prefix.local:
                # Without tokens that were in its own cache at the question, the lender holds too few pages.
                self._release(prefix)
                self._ask(prefix, local_tokens)
            case PrefixPhase.HELD if self.clock() >= prefix.until:
                self._release(prefix)
                if prefix.prefetch is not None:
                    prefix.enter(PrefixPhase.OVER)  # a prefetch waits for no other request
                    return False
                prefix.enter(PrefixPhase.LAPSED)
                self._ask_with_room(prefix, local_tokens)
            case PrefixPhase.LAPSED:
                self._ask_with_room(prefix, local_tokens)
        return prefix.phase in (PrefixPhase.WANTED, PrefixPhase.ASKED)

    def _ask_with_room(self, prefix: _Prefix, local_tokens: int) -> None:
        """Requests the prefix again if the prompt finds blocks: vLLM begins no load without room for all of
        it."""
        assert self.blocks is not None
        tokens = prefix.request.num_tokens - local_tokens
        if sum(-(-tokens // size) for size in self._block_sizes) <= self.blocks.unused:
            self._ask(prefix, local_tokens)

    def _prefetch_waits(self, prefix: _Prefix, local_tokens: int) -> bool:
        """Returns whether a prefetch must not begin its load in this step, and notes its end."""
        assert prefix.prefetch is not None
        held = prefix.phase is PrefixPhase.HELD
        tokens = self.tokens_to_load(prefix.request, local_tokens)
        if not prefix.offered and 0 < tokens <= prefix.prefetch:
            prefix.offered = True
            return False
        if held:
            # vLLM has no blocks for it, or would compute, or the lender has more than expected. At the front
            # of the queue it would delay others.
            self._release(prefix)
            prefix.enter(PrefixPhase.OVER)
        if prefix.phase is PrefixPhase.OVER:
            self._prefetched.append((prefix.request, 0))
        return True

    def _ask(self, prefix: _Prefix, local_tokens: int) -> None:
        assert self.blocks is not None
        request, hashed = prefix.request, self.blocks.hash_block_tokens
        most, multiple = request.num_prompt_tokens - 1, lcm(hashed, *self._block_sizes)
        prefix.local, prefix.tokens = local_tokens, 0
        prefix.expected = min(prefix.expected, most)
        held = [one.missing for one in self._by_transfer.values()]
        if prefix.prefetch is None:
            wanted = self.costs.pays(prefix.lender, local_tokens, prefix.expected, sum(held))
        else:
            wanted = self._prefetch_fits(prefix, held)
        if prefix.missing < multiple or not wanted or prefix.questions == _MOST_QUESTIONS:
            prefix.enter(PrefixPhase.OVER)
            return
        if self._too_many(prefix, held):
            self._wait(prefix)
            return
        content = content_key_of(request, self._basis.of(hashed), hashed).up_to(most)
        prefix.content, prefix.transfer_id = content, uuid.uuid4().hex
        prefix.enter(PrefixPhase.ASKED)
        prefix.questions += 1
        prefix.since = self.clock()
        self._by_transfer[prefix.transfer_id] = prefix
        if request.trace_headers:
            self._contexts[prefix.transfer_id] = dict(request.trace_headers)
        self._commands.append(
            PrefixRequest(prefix.transfer_id, prefix.lender, content, local_tokens, multiple)
        )

    def _prefetch_fits(self, prefix: _Prefix, held: list[int]) -> bool:
        """Returns whether a prefetch takes nothing that other requests need.

        It lacks more than ``prefetch`` tokens if this engine has dropped a part of the prompt meanwhile. To
        load that would drop other prompts in turn.
        """
        assert self.blocks is not None
        assert prefix.prefetch is not None
        blocks = sum(-(-prefix.missing // size) for size in self._block_sizes)
        prefetches = sum(one.prefetch is not None for one in self._by_transfer.values())
        return (
            prefix.missing <= prefix.prefetch
            and blocks <= self.blocks.unused // 2
            and prefetches < MOST_PREFETCHES
            and not self._too_many(prefix, held)
            and not self.costs.was_late_for_prefetch(prefix.lender)
        )

    def _too_many(self, prefix: _Prefix, held: list[int]) -> bool:
        assert self.blocks is not None
        tokens = sum(held) + prefix.missing
        blocks = sum(-(-tokens // size) for size in self._block_sizes)
        return len(held) >= MOST_AT_ONCE or (bool(held) and blocks > self.blocks.total // _LOADED_SHARE)

    def _wait(self, prefix: _Prefix) -> None:
        """Has a request wait for others, until it could have been computed."""
        now = self.clock()
        if prefix.waits_since is None:
            prefix.waits_since = now
        computed = self.costs.compute_seconds(prefix.local, prefix.missing)
        if computed is None or now - prefix.waits_since >= computed:
            prefix.enter(PrefixPhase.OVER)
        elif prefix.phase is PrefixPhase.HELD:
            prefix.enter(PrefixPhase.WANTED)

    def take_contexts(self) -> dict[str, Mapping[str, str]]:
        """Returns the trace contexts of prefixes that were requested since the last call, by transfer id."""
        taken, self._contexts = self._contexts, {}
        return taken

    def answered(self, answers: Mapping[str, int]) -> None:
        """Handles lenders' answers, by transfer id."""
        for transfer_id, tokens in answers.items():
            prefix = self._by_transfer.get(transfer_id)
            if prefix is None:
                lender = self._withdrawn.pop(transfer_id, None)
                if lender is not None and tokens:
                    self._commands.append(ReleaseTransfer(transfer_id, lender))
            elif prefix.phase is PrefixPhase.ASKED:
                now = self.clock()
                # A refusal has cost the request as much as another answer.
                self.costs.answered(prefix.lender, now - prefix.since)
                if not tokens:
                    del self._by_transfer[transfer_id]
                    prefix.enter(PrefixPhase.OVER)
                    continue
                prefix.tokens, prefix.until = tokens, now + self._hold_s / 2
                prefix.enter(PrefixPhase.HELD)
                if prefix.prefetch is not None:
                    continue
                ahead = sum(one.missing for one in self._by_transfer.values()) - prefix.missing
                if not self.costs.pays(prefix.lender, prefix.local, tokens, ahead, asked=True):
                    self._release(prefix)
                    prefix.enter(PrefixPhase.OVER)

    def tokens_to_load(self, request: Request, local_tokens: int) -> int:
        """Returns the number of tokens to load behind the first ``local_tokens``."""
        prefix = self._prefixes.get(request.request_id)
        if prefix is None or prefix.phase is not PrefixPhase.HELD:
            return 0
        if any(local_tokens % size for size in self._block_sizes):
            return 0
        return max(prefix.tokens - local_tokens, 0)

    def allocated(self, request: Request, blocks: Any, external_tokens: int) -> None:
        """Notes that vLLM has given the request blocks, and will load ``external_tokens`` tokens."""
        prefix = self._prefixes.get(request.request_id)
        if prefix is None or prefix.phase not in (PrefixPhase.HELD, PrefixPhase.LAPSED):
            return
        if external_tokens == 0 or prefix.phase is PrefixPhase.LAPSED:
            if prefix.phase is PrefixPhase.HELD:
                self._release(prefix)
            prefix.enter(PrefixPhase.OVER)
            return
        prefix.enter(PrefixPhase.LOADING)
        prefix.since = self.clock()
        try:
            self._commands.append(self._load(prefix, blocks.get_block_ids(), external_tokens))
        except Exception:
            logger.exception("prefix %s: cannot reserve blocks for its load", prefix.transfer_id)
            self._commands.append(FailLoad(prefix.transfer_id, stale=True))

    def _load(self, prefix: _Prefix, tables: tuple[list[int], ...], external_tokens: int) -> DecodeRequest:
        assert self.blocks is not None
        assert prefix.content is not None
        first_token = prefix.tokens - external_tokens
        request_id = prefix.request.request_id
        groups = load_targets(self.blocks, self._block_sizes, request_id, tables, first_token, prefix.tokens)
        return DecodeRequest(
            request_id=prefix.transfer_id,
            transfer_id=prefix.transfer_id,
            engine=prefix.lender,
            prompt_tokens=prefix.tokens,
            first_token=first_token,
            prompt_hash=prefix.content.prompt_hash(prefix.tokens),
            groups=groups,
        )

    def request_finished(self, request: Request, *, computes_for_decode: bool) -> None:
        """Handles the end of a request. ``computes_for_decode``: vLLM keeps it until its prompt is reported
        as sent."""
        prefix = self._prefixes.pop(request.request_id, None)
        if prefix is None:
            return
        match prefix.phase:
            case PrefixPhase.ASKED:
                self._withdraw(prefix)
            case PrefixPhase.HELD:
                self._release(prefix)
            case PrefixPhase.LOADING:
                self._commands.append(CancelLoad(prefix.transfer_id))
                prefix.sent = not computes_for_decode
                prefix.enter(PrefixPhase.LEAVING)

    def sent(self, request_ids: Collection[str]) -> set[str]:
        """Returns the requests that are reported as sent while pages may still land in their blocks.

        vLLM gets the end of their loads in place of that report.
        """
        leaving = {
            prefix.request.request_id: prefix
            for prefix in self._by_transfer.values()
            if prefix.phase is PrefixPhase.LEAVING
        }
        early = {request_id for request_id in request_ids if request_id in leaving}
        for request_id in early:
            leaving[request_id].sent = True
        return early

    def discard(self, ids: Iterable[str]) -> None:
        """Marks the loads of ``ids`` that are prefixes as discarded: their pages will not be used.

        A worker reports it no later than its end of the load. That may be steps before the load ends at all
        workers.
        """
        for transfer_id in ids:
            if prefix := self._by_transfer.get(transfer_id):
                prefix.discarded = True

    def arrived(self, seconds: Mapping[str, float]) -> None:
        """Notes how long pages took from their reservation to the last of them, by transfer id."""
        for transfer_id, wire_s in seconds.items():
            if prefix := self._by_transfer.get(transfer_id):
                prefix.wire_s = wire_s

    def discard_late(self) -> None:
        """Discards loads that take longer than computing their tokens would, so that requests compute these.

        Call it each step. The rate of a lender is not known before its first load, and changes.
        """
        now = self.clock()
        for prefix in self._by_transfer.values():
            if prefix.phase is not PrefixPhase.LOADING or prefix.discarded:
                continue
            taken = now - prefix.since
            if taken < self._ask_s:
                continue
            computed = self.costs.compute_seconds(prefix.local, prefix.missing)
            if computed is not None and taken >= computed:
                prefix.discarded = True
                self._commands.append(CancelLoad(prefix.transfer_id))

    def load_ended(self, ids: Iterable[str], failed: Collection[str]) -> tuple[set[str], set[str]]:
        """Handles the ends of loads, successful or not. Returns those of ``ids`` that are prefixes, and the
        requests for which vLLM gets the report."""
        over, reported = set(), set()
        for transfer_id in ids:
            prefix = self._by_transfer.pop(transfer_id, None)
            if prefix is None:
                continue
            over.add(transfer_id)
            request = prefix.request
            if prefix.phase is PrefixPhase.LEAVING:
                prefix.enter(PrefixPhase.OVER)
                # EngineCore ends if a request is reported twice. The prompt's report follows.
                if prefix.sent:
                    reported.add(request.request_id)
                continue
            reported.add(request.request_id)
            taken = self.clock() - prefix.since
            if prefix.discarded or transfer_id in failed:
                prefix.enter(PrefixPhase.OVER)
                if taken >= self._ask_s:
                    self.costs.late(prefix.lender, prefetch=prefix.prefetch is not None)
                self._begin_anew(request)
                loaded = 0
            else:
                prefix.enter(PrefixPhase.LOADED)
                self.costs.loaded(prefix.lender, prefix.missing, taken, prefix.wire_s)
                loaded = prefix.missing
            if prefix.prefetch is not None:
                self._prefetched.append((request, loaded))
        return over, reported

    def _begin_anew(self, request: Request) -> None:
        assert self.blocks is not None
        self.blocks.free(request)

    def loading(self) -> list[str]:
        """Returns the requests that hold blocks of a load and have not run. vLLM cannot preempt them."""
        return [prefix.request.request_id for prefix in self._holding()]

    def _holding(self) -> list[_Prefix]:
        # vLLM sets a request whose load is over to WAITING, with the next step.
        waits = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING
        return [
            prefix
            for prefix in self._prefixes.values()
            if prefix.phase is PrefixPhase.LOADING
            or (prefix.phase is PrefixPhase.LOADED and prefix.request.status in waits)
        ]

    @property
    def leaving(self) -> bool:
        """Returns whether pages may still land in the blocks of a finished request."""
        return any(prefix.phase is PrefixPhase.LEAVING for prefix in self._by_transfer.values())

    def after_reset(self) -> None:
        """Ends all prefixes after vLLM has emptied its prefix cache.

        What lenders hold for live requests, and what routers have proposed for them, is from before the
        reset, as the loads are.
        """
        for prefix in self._prefixes.values():
            match prefix.phase:
                case PrefixPhase.WANTED | PrefixPhase.LAPSED:
                    prefix.enter(PrefixPhase.OVER)
                case PrefixPhase.ASKED:
                    self._withdraw(prefix)
                    prefix.enter(PrefixPhase.OVER)
                case PrefixPhase.HELD:
                    self._release(prefix)
                    prefix.enter(PrefixPhase.OVER)
        for prefix in self._holding():
            if prefix.phase is PrefixPhase.LOADING:
                prefix.discarded = True
                self._commands.append(CancelLoad(prefix.transfer_id))
            else:
                prefix.enter(PrefixPhase.OVER)
                self._begin_anew(prefix.request)

    def _withdraw(self, prefix: _Prefix) -> None:
        del self._by_transfer[prefix.transfer_id]
        self._commands.append(WithdrawPrefix(prefix.transfer_id))
        if len(self._withdrawn) >= _REMEMBERED:
            del self._withdrawn[next(iter(self._withdrawn))]
        self._withdrawn[prefix.transfer_id] = prefix.lender

    def _release(self, prefix: _Prefix) -> None:
        del self._by_transfer[prefix.transfer_id]
        self._commands.append(ReleaseTransfer(prefix.transfer_id, prefix.lender))
