"""The scheduler's half of WriteImmConnector: bookkeeping per request, nothing that waits, no socket.

P's requests carry ``do_remote_decode``, D's ``do_remote_prefill`` with the address of their P. What the
workers have to do goes into one StepMetadata per engine step.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kv_connector.agent.commands import (
    CacheCleared,
    Cancel,
    Command,
    FailLoad,
    FinishPrefill,
    NewPages,
    Release,
    SetRanks,
)
from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import AdmissionGate, gates
from kv_connector.protocol.layout import GroupTarget
from kv_connector.protocol.messages import Rank, Role
from kv_connector.protocol.params import BadParams, DecodeParams, PrefillParams, parse_params
from kv_connector.protocol.prompt_hash import prompt_hash
from kv_connector.protocol.requests import DecodeRequest, GroupPages, PrefillRequest
from kv_connector.vllm.dialects import in_our_words
from kv_connector.vllm.forced_token import force
from kv_connector.vllm.internals import Request, RequestStatus, beside_tokens, leave_last_token
from kv_connector.vllm.metadata import News, StepMetadata

logger = logging.getLogger(__name__)

# A prompt that was computed to its end, whatever the first token turned out to be.
_GOOD_ENDS = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class Blocks(Protocol):
    """What internals.KvBlocks offers."""

    total: int

    def first_attended(self, group: int, computed_tokens: int) -> int: ...
    def first_attended_token(self, group: int, computed_tokens: int) -> int: ...
    def first_loaded(self, request_id: str, group: int) -> int: ...
    def of_state(self, group: int) -> int: ...
    def let_states_load(self) -> None: ...
    def hold_windows(self, request_id: str, firsts: tuple[int, ...]) -> list[Any]: ...
    def give_back(self, held: list[Any]) -> None: ...
    def free(self, request: Request) -> None: ...
    def around_reset(self, before: Callable[[], Collection[str]], after: Callable[[], None]) -> None: ...


def _first_attended(blocks: Blocks, groups: int, tokens: int) -> tuple[int, ...]:
    """Per group: the first logical block that the prompt's last token, which D computes, attends to."""
    return tuple(blocks.first_attended(group, tokens - 1) for group in range(groups))


def _blocks_of(blocks: Blocks, block_sizes: tuple[int, ...], tokens: int) -> int:
    """What a prompt holds when it is computed; a window holds a chunk more before, a state one block."""
    firsts = _first_attended(blocks, len(block_sizes), tokens)
    return sum(
        -(-tokens // size) - first if size else blocks.of_state(group)
        for group, (size, first) in enumerate(zip(block_sizes, firsts, strict=True))
    )


def has_states(block_sizes: tuple[int, ...]) -> bool:
    """Whether some group's blocks are recurrent states. D goes on from the state before the prompt's last
    token, which it computes itself: so P must not compute that one."""
    return 0 in block_sizes


def _state(blocks: Blocks, group: int, table: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The block of the state after so many tokens, if any."""
    if tokens == 0:
        return ()
    column = blocks.first_attended(group, tokens)
    if table[column] == 0:
        raise RuntimeError(f"column {column} of KV cache group {group} has no state: {table}")
    return (table[column],)


@dataclass
class _Prompt:
    """A prompt that P computes for a D."""

    request: Request
    transfer_id: str
    tokens: int
    computed: int
    """How many of them P computes: all, or all but the last."""
    unsent: str
    """Why none of its pages can be sent; empty where they can."""
    early: bool
    """No D has asked for it yet, and whether one will does not depend on P alone."""
    told: list[int] = field(default_factory=list)
    """Per group: the logical blocks before this one have been named to the workers (since the last
    admission).
    """
    complete: bool = False
    """The workers know the whole prompt's blocks."""
    finished: bool = False
    """It has left vLLM's scheduler."""
    held: list[Any] = field(default_factory=list)


class PrefillScheduler:
    """P's requests, from their arrival until the workers report them sent."""

    def __init__(
        self, role: Role, engine_id: str, block_sizes: tuple[int, ...], commands: list[Command]
    ) -> None:
        self._role = role
        self._engine_id = engine_id
        self._block_sizes = block_sizes
        self._commands = commands
        self._prompts: dict[str, _Prompt] = {}
        self._transfers: set[str] = set()
        self.blocks: Blocks | None = None
        self.gate: AdmissionGate | None = None
        """Of early prompts. Both are set before the first request."""
        self.address: Address | None = None
        """Of rank 0, for routers that dispatch D after P. Set before the first request."""

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, request: Request, params: PrefillParams) -> None:
        transfer_id = params.transfer_id or uuid.uuid4().hex
        if transfer_id in self._transfers:
            raise BadParams(f"transfer {transfer_id} belongs to another live request")
        tokens, digest = _prompt(request)
        computed, unsent = tokens, ""
        if has_states(self._block_sizes) and tokens > 1:
            if request.skip_reading_prefix_cache:
                unsent = "prompt_logprobs need the whole prompt, and no state is kept from before its end"
            else:
                leave_last_token(request)
                computed -= 1
        self._transfers.add(transfer_id)
        self._prompts[request.request_id] = _Prompt(
            request,
            transfer_id,
            tokens,
            computed,
            unsent,
            # Where D comes after P its queue is in P's order: where P names the transfer, as in NIXL's flow,
            # or the router says so. That helps unless P has loads of its own.
            early=self._role is Role.BOTH or (params.transfer_id is not None and not params.serial),
            told=[0] * len(self._block_sizes),
        )
        self._commands.append(PrefillRequest(request.request_id, transfer_id, tokens, digest))

    def must_wait(self, request: Request) -> bool:
        """Whether this prompt must not be started yet. vLLM may ask every step."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.early:
            return False
        assert self.blocks is not None
        assert self.gate is not None
        blocks = _blocks_of(self.blocks, self._block_sizes, prompt.tokens)
        return self.gate.must_wait(request.request_id, blocks)

    def allocated(self, request: Request) -> None:
        """vLLM has given the request its first blocks."""
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and prompt.early:
            assert self.blocks is not None
            assert self.gate is not None
            self.gate.enter(request.request_id, _blocks_of(self.blocks, self._block_sizes, prompt.tokens))

    def reserved(self, transfer_ids: Collection[str]) -> None:
        """D has room for these prompts."""
        for prompt in self._prompts.values():
            if prompt.transfer_id in transfer_ids:
                prompt.early = False
                self._leave(prompt)

    def preempted(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """vLLM has taken these requests' blocks back; all will be named again at the next admission."""
        transfers = []
        for request_id in request_ids:
            if prompt := self._prompts.get(request_id):
                prompt.told = [0] * len(self._block_sizes)
                prompt.complete = False
                self._give_back(prompt)
                self._leave(prompt)
                transfers.append(prompt.transfer_id)
        return tuple(transfers)

    def new_pages(self, num_scheduled_tokens: Mapping[str, int], block_state: Any) -> tuple[NewPages, ...]:
        """The pages that this step makes valid, cached ones included. ``block_state`` is vLLM's, of this
        step.
        """
        pages = []
        for request_id, scheduled in num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is None or prompt.complete or prompt.unsent:
                continue
            try:
                pages.append(self._advance(prompt, scheduled, block_state.get_block_ids(request_id)))
            except Exception:
                # Never complete, so D is told at the request's end at the latest.
                logger.exception("transfer %s: pages of request %s are lost", prompt.transfer_id, request_id)
        return tuple(pages)

    def _advance(self, prompt: _Prompt, scheduled: int, tables: tuple[list[int], ...]) -> NewPages:
        assert self.blocks is not None
        computed = min(prompt.request.num_computed_tokens + scheduled, prompt.computed)
        last = computed == prompt.computed
        # Blocks that D's token no longer attends to are never asked for, and vLLM reuses them while the
        # prompt is still being computed: they must not be named.
        firsts = _first_attended(self.blocks, len(self._block_sizes), prompt.tokens)
        groups = []
        for group, (table, size) in enumerate(zip(tables, self._block_sizes, strict=True)):
            if not size:
                # Until the last chunk, each overwrites the state of the one before.
                state = _state(self.blocks, group, table, prompt.tokens - 1) if last else ()
                groups.append(GroupPages(0, state))
                continue
            end = -(-computed // size) if last else computed // size
            first = max(prompt.told[group], firsts[group])
            groups.append(GroupPages(first, tuple(table[first:end])))
            prompt.told[group] = max(prompt.told[group], end)
        if last:
            prompt.complete = True
            # When the request finishes, vLLM counts one token further than D and may free the oldest window
            # block.
            prompt.held = self.blocks.hold_windows(prompt.request.request_id, firsts)
        return NewPages(prompt.transfer_id, tuple(groups), last)

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """True for each request of ours: it stays in vLLM's books, blocks or none, until reported sent."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return False, None
        prompt.finished = True
        ok = prompt.complete and request.status in _GOOD_ENDS
        reason = "" if ok else f"prefill ended as {request.status.name} before the prompt's end"
        reason = prompt.unsent or reason
        whole = ok and prompt.computed == prompt.tokens
        sampled = int(request.output_token_ids[0]) if whole and request.output_token_ids else None
        self._commands.append(FinishPrefill(request.request_id, prompt.transfer_id, ok, reason, sampled))
        if not ok:
            return True, None
        assert self.address is not None
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
                self._transfers.discard(prompt.transfer_id)
                self._give_back(prompt)
                self._leave(prompt)

    def before_reset(self) -> None:
        """vLLM is about to empty its prefix cache: of a preempted prompt it wants all blocks back now."""
        for prompt in self._prompts.values():
            if prompt.request.status is RequestStatus.PREEMPTED:
                self._give_back(prompt)

    def reset(self) -> bool:
        """All KV is worthless. False while a finished prompt's blocks are still to be read."""
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


class _Load(enum.Enum):
    WAITING = enum.auto()  # no blocks yet
    RESERVED = enum.auto()  # the workers were told to fetch it
    OVER = enum.auto()  # received, failed, or not needed


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
    """That token, once P has told it."""
    end: int = 0
    """It loads the tokens before this one."""
    load: _Load = _Load.WAITING
    finished: bool = False
    void: bool = False
    """What comes is of no use: the request computes its prompt itself once nothing comes any more."""


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
        self._told_waiting: tuple[tuple[str, Address], ...] = ()
        self._first_tokens: list[tuple[Request, int]] = []
        self.gives_first_tokens = False
        """FirstTokenScheduler takes these. This and the next two are set before the first request."""
        self.blocks: Blocks | None = None
        self.gate: AdmissionGate | None = None
        """Of loads."""

    def __len__(self) -> int:
        return len(self._targets)

    def add(self, request: Request, params: DecodeParams) -> None:
        transfer_id, peer = params.transfer_id, params.peer
        tokens, digest = _prompt(request)
        if first := self._transfers.get(transfer_id):
            if (first.peer, first.prompt_hash) != (peer, digest):
                raise BadParams(f"transfer {transfer_id} belongs to another live request")
            # Samples of one prompt (n > 1) share their parameters: the first one loads for all.
            self._siblings[request.request_id] = first
            return
        wants_sampled = self._early_tokens and params.early_token
        target = _Target(request, request.request_id, transfer_id, peer, tokens, digest, wants_sampled)
        self._transfers[transfer_id] = self._targets[request.request_id] = target

    def must_wait(self, request: Request) -> bool:
        """Whether another request loads this one's prompt, which is then found in the prefix cache, or there
        is no room for this load yet. vLLM may ask every step."""
        if first := self._siblings.get(request.request_id):
            return first.load is not _Load.OVER
        target = self._targets.get(request.request_id)
        if target is None or target.load is not _Load.WAITING:
            return False
        assert self.gate is not None
        return self.gate.must_wait(target.request_id, self._blocks_of(target))

    def loads(self, request_id: str) -> bool:
        """Whether the request's prompt is still to come from a P."""
        target = self._siblings.get(request_id) or self._targets.get(request_id)
        return target is not None and target.load is not _Load.OVER

    def _blocks_of(self, target: _Target) -> int:
        assert self.blocks is not None
        return _blocks_of(self.blocks, self._block_sizes, target.tokens)

    def tokens_to_load(self, request: Request, local_tokens: int) -> int:
        """How many tokens to load behind the first ``local_tokens``. Pure: vLLM may ask every step.

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
        return _first_attended(self.blocks, groups, target.tokens + 1) != _first_attended(
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
        target.load = _Load.RESERVED
        assert self.gate is not None
        self.gate.enter(target.request_id, self._blocks_of(target))
        try:
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
        groups = []
        for group, (table, size) in enumerate(zip(tables, self._block_sizes, strict=True)):
            if not size:
                groups.append(GroupTarget(first=0, blocks=_state(self.blocks, group, table, loaded)))
                continue
            first, end = first_token // size, -(-loaded // size)
            if has_states(self._block_sizes):
                # The hit is the one of full attention; another group may have less of it.
                first = min(first, self.blocks.first_loaded(target.request_id, group))
            needed = self.blocks.first_attended_token(group, loaded)
            groups.append(GroupTarget(first, tuple(table[first:end]), needed))
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
        target.finished = True
        if target.load is _Load.WAITING:
            self._release(target)
        elif target.load is _Load.RESERVED:
            self._commands.append(Cancel(target.request_id))
        self._forget_if_over(target)

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
        """What comes for these is of no use. It is told no later than the end of the load."""
        for request_id in request_ids:
            if target := self._targets.get(request_id):
                target.void = True

    def received(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """These loads are over, well or not."""
        for request_id in request_ids:
            if target := self._targets.get(request_id):
                self._over(target)
                if target.sampled is not None and not target.finished:
                    if self.gives_first_tokens and not target.void and request_id not in failed:
                        self._first_tokens.append((target.request, target.sampled))
                    else:
                        force(target.request.sampling_params, target.sampled)
                if target.void and not target.finished:
                    assert self.blocks is not None
                    self.blocks.free(target.request)
                self._forget_if_over(target)

    def loading(self) -> list[str]:
        """The requests that hold blocks for a load. vLLM cannot preempt them."""
        return [target.request_id for target in self._loading()]

    def _loading(self) -> list[_Target]:
        return [
            target
            for target in self._targets.values()
            if target.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ]

    def after_reset(self) -> None:
        """vLLM has emptied its prefix cache: what is being loaded, and what is loaded, is not used."""
        for target in self._loading():
            if target.load is _Load.OVER:
                assert self.blocks is not None
                self.blocks.free(target.request)
            elif not target.void:
                target.void = True
                if not target.wants_sampled:  # else it waits for that: the client may have it already
                    self._commands.append(Cancel(target.request_id))

    def reset(self) -> bool:
        """All KV is worthless, P's too: who would have asked for it computes its prompt here. False while
        pages may still land for a finished request."""
        for target in self._targets.values():
            if target.load is _Load.WAITING:
                self._release(target)
        return not any(target.finished for target in self._targets.values())

    def waiting(self) -> tuple[tuple[str, Address], ...] | None:
        """The transfers whose requests have no blocks yet; None if the workers know."""
        waiting = tuple(
            (target.transfer_id, target.peer)
            for target in self._targets.values()
            if target.load is _Load.WAITING
        )
        if waiting == self._told_waiting:
            return None
        self._told_waiting = waiting
        return waiting

    def _over(self, target: _Target) -> None:
        target.load = _Load.OVER
        assert self.gate is not None
        self.gate.leave(target.request_id)

    def _release(self, target: _Target) -> None:
        self._over(target)
        self._commands.append(Release(target.transfer_id, target.peer))

    def _forget_if_over(self, target: _Target) -> None:
        if target.finished and target.load is _Load.OVER:
            del self._targets[target.request_id], self._transfers[target.transfer_id]


class SchedulerSide:
    """Both roles' bookkeeping behind the connector's hooks."""

    def __init__(
        self, role: Role, engine_id: str, block_sizes: tuple[int, ...], *, early_tokens: bool = False
    ) -> None:
        """``block_sizes``: tokens a block, per KV cache group; 0: its blocks are recurrent states.
        ``early_tokens``: as DecodeScheduler's."""
        self._role = role
        self._block_sizes = block_sizes
        self._commands: list[Command] = []
        self._contexts: dict[str, Mapping[str, str]] = {}
        """Of new requests that are traced; see StepMetadata."""
        self._emptied = False
        """vLLM has just emptied its prefix cache."""
        self.prefill = PrefillScheduler(role, engine_id, block_sizes, self._commands)
        self.decode = DecodeScheduler(block_sizes, self._commands, early_tokens=early_tokens)

    def set_ranks(self, ranks: tuple[Rank, ...]) -> None:
        """The engine's workers, by rank. Each is told of all: the address of the first is all that routers
        know."""
        self.prefill.address = Address(ranks[0].host, ranks[0].port)
        if len(ranks) > 1:
            self._commands.append(SetRanks(ranks))

    def bind(self, blocks: Blocks) -> None:
        """Before the first request."""
        self.prefill.blocks = self.decode.blocks = blocks
        self.prefill.gate, self.decode.gate = gates(self._role, blocks.total)
        if has_states(self._block_sizes):
            blocks.let_states_load()
        blocks.around_reset(self._before_reset, self._after_reset)

    def _before_reset(self) -> Collection[str]:
        self.prefill.before_reset()
        return self.decode.loading()

    def _after_reset(self) -> None:
        self._emptied = True
        self.decode.after_reset()

    def reset(self) -> bool:
        """After a try of vLLM's to empty its prefix cache: KV elsewhere is worthless too. Whether nothing of
        before is still on its way.
        """
        emptied, self._emptied = self._emptied, False
        if not emptied:
            return False
        prefill, decode = self.prefill.reset(), self.decode.reset()
        return prefill and decode

    def on_new_request(self, request: Request) -> None:
        try:
            said = in_our_words(request.kv_transfer_params or {}, request.request_id)
            match parse_params(said):
                case PrefillParams() as params:
                    self._require(Role.PREFILL, "do_remote_decode")
                    self.prefill.add(request, params)
                    self._note_context(request)
                case DecodeParams() as params:
                    self._require(Role.DECODE, "do_remote_prefill")
                    self.decode.add(request, params)
                    self._note_context(request)
        except BadParams as error:
            # vLLM's own notice that it refused a request, or that a client left, computes nothing.
            if not request.abort_immediately:
                logger.warning(
                    "request %s is computed here alone: kv_transfer_params: %s", request.request_id, error
                )

    def _note_context(self, request: Request) -> None:
        if request.trace_headers:  # vLLM drops them where it sends no spans
            self._contexts[request.request_id] = dict(request.trace_headers)

    def _require(self, role: Role, key: str) -> None:
        if self._role not in (role, Role.BOTH):
            raise BadParams(f"{key} is for a {role.value} engine, this one's role is {self._role.value}")

    def build_metadata(self, scheduler_output: Any) -> StepMetadata:
        preempted = self.prefill.preempted(scheduler_output.preempted_req_ids or ())
        pages = self.prefill.new_pages(
            scheduler_output.num_scheduled_tokens, scheduler_output.kv_connector_block_state
        )
        commands = tuple(self._commands)
        self._commands.clear()
        contexts, self._contexts = self._contexts, {}
        return StepMetadata(
            preempted,
            commands,
            pages,
            self.decode.waiting(),
            contexts,
            computes=scheduler_output.total_num_scheduled_tokens > 0,
        )

    def has_unsent_commands(self) -> bool:
        """Whether the workers have still to be told something: the engine must take another step for it."""
        return bool(self._commands)

    def update(
        self,
        finished_sending: Iterable[str] | None,
        finished_recving: Iterable[str] | None,
        failed_recving: Collection[str] | None,
        news: News,
    ) -> None:
        """What the workers report at the end of a step."""
        if news.reserved:
            self.prefill.reserved(news.reserved)
        self.decode.sampled(news.sampled)
        self.decode.make_void(news.void)
        self.prefill.sent(finished_sending or ())
        self.decode.received(finished_recving or (), failed_recving or ())

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.decode.finished(request)
        return self.prefill.finished(request)


def _prompt(request: Request) -> tuple[int, bytes]:
    """Its tokens, and their hash."""
    if not request.prompt_token_ids:
        raise BadParams("the prompt has no token ids (prompt embeddings cannot be transferred)")
    tokens = list(request.prompt_token_ids)
    try:
        return len(tokens), prompt_hash(tokens, beside_tokens(request))
    except (OverflowError, TypeError) as error:
        raise BadParams(f"the prompt's token ids are no unsigned 32-bit integers: {error}") from None
