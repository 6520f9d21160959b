"""The scheduler side of WriteImmConnector: bookkeeping for each request.

It has no socket, and no call blocks. P's requests have ``do_remote_decode``, and D's requests
``do_remote_prefill`` with the address of their P. One StepMetadata for each engine step carries the workers'
commands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kv_connector.agent.commands import Command, SetRanks
from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import AdmissionGate, Place, gates, no_place
from kv_connector.protocol.params import (
    BadParams,
    DecodeParams,
    PrefillParams,
    parse_params,
    parse_prefix,
)
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import Rank, Role
from kv_connector.vllm.dialects import in_our_words
from kv_connector.vllm.internals import KVCacheManager, Request
from kv_connector.vllm.metadata import News, StepMetadata
from kv_connector.vllm.patches import around_reset, let_states_load
from kv_connector.vllm.scheduling.block_tables import BlockTables
from kv_connector.vllm.scheduling.content import HashBasis
from kv_connector.vllm.scheduling.decode_scheduler import DecodeScheduler
from kv_connector.vllm.scheduling.prefill_scheduler import PrefillScheduler
from kv_connector.vllm.scheduling.prefix_borrower import PrefixBorrower
from kv_connector.vllm.scheduling.prefix_lender import PrefixLender
from kv_connector.vllm.scheduling.transferred_blocks import has_states
from kv_connector.vllm.step_requests import StepRequests

logger = logging.getLogger(__name__)


def by_priority(request: Request) -> tuple[float | str, ...]:
    """Returns a request's place in vLLM's queue with ``--scheduling-policy priority``."""
    return request.priority, request.arrival_time, request.request_id


class SchedulerSide:
    """The bookkeeping of both roles behind the connector's hooks."""

    def __init__(
        self,
        role: Role,
        engine_id: str,
        block_sizes: tuple[int, ...],
        *,
        early_tokens: bool = False,
        place: Callable[[Request], Place] = no_place,
        hash_algorithm: str = "sha256",
        no_prefixes: str = "",
        lend_s: float = Timeouts.lend,
        remember_s: float = Timeouts.remember,
        step_tokens: int = 0,
        ask_s: float = Timeouts.ask,
    ) -> None:
        """``block_sizes``: tokens a block, per KV cache group. 0: the blocks are recurrent states.
        ``early_tokens``: as of DecodeScheduler. ``place``: returns a request's place in the policy's order.
        ``hash_algorithm``: of vLLM's block hashes. ``no_prefixes``: the reason why this engine borrows no
        prefixes. ``lend_s``: how long a lender holds one, in seconds. ``remember_s``: how long this engine
        relies on measurements of a lender. ``ask_s``: how long it waits for one at least.
        ``step_tokens``: most tokens that a step computes.
        """
        self._role = role
        self._block_sizes = block_sizes
        self._commands: list[Command] = []
        self._contexts: dict[str, Mapping[str, str]] = {}
        """Trace contexts of new requests, as in StepMetadata."""
        self._emptied = False
        """Whether vLLM has just emptied its prefix cache."""
        self._prefill = PrefillScheduler(role, engine_id, block_sizes, self._commands, step_tokens)
        self._decode = DecodeScheduler(block_sizes, self._commands, early_tokens=early_tokens)
        self._basis = HashBasis(hash_algorithm)
        self._lender = PrefixLender(block_sizes, self._commands, self._basis)
        self._borrower = PrefixBorrower(block_sizes, self._commands, self._basis, lend_s, remember_s, ask_s)
        self._no_prefixes = no_prefixes
        self.step_requests: StepRequests | None = None
        """The workers' requests for steps. None: only steps for other reasons carry their news."""
        self._announced = False
        self._prefill.place = self._decode.place = place

    def set_ranks(self, ranks: tuple[Rank, ...]) -> None:
        """Sets the engine's workers, by rank, and sends the list to each worker.

        Routers know only the first one's address.
        """
        self._prefill.address = self._borrower.address = Address(ranks[0].host, ranks[0].port)
        if len(ranks) > 1:
            self._commands.append(SetRanks(ranks))

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Connects to vLLM's block tables. Call it before the first request.

        It changes two methods of vLLM's manager (patches.py).
        """
        blocks = BlockTables(kv_cache_manager)
        self._prefill.blocks = self._decode.blocks = self._borrower.blocks = blocks
        self._lender.cache = blocks
        self._prefill.gate, self._decode.gate = gates(self._role, blocks.total, lambda: blocks.unused)
        if has_states(self._block_sizes):
            let_states_load(kv_cache_manager)
        around_reset(kv_cache_manager, self._before_reset, self._after_reset, lambda: self._lender.held)

    def _before_reset(self) -> Collection[str]:
        self._emptied = False
        self._prefill.before_reset()
        return [*self._decode.loading(), *self._borrower.loading()]

    def _after_reset(self) -> None:
        self._emptied = True
        self._decode.after_reset()
        self._borrower.after_reset()
        self._lender.after_reset()

    def set_compute_seconds(self, compute_seconds: Callable[[int, int], float | None]) -> None:
        """Sets this engine's cost of computing tokens, as in BorrowCosts."""
        self._borrower.costs.compute_seconds = compute_seconds

    def pause(self, paused: bool) -> None:
        """Notes that vLLM is being paused, or resumes."""
        self._lender.pause(paused)

    def reset(self) -> bool:
        """Ends transfers after vLLM has tried to empty its prefix cache: KV elsewhere is stale, too.

        Returns whether no earlier KV is still in flight.
        """
        emptied, self._emptied = self._emptied, False
        if not emptied:
            return False
        prefill, decode = self._prefill.reset(), self._decode.reset()
        return prefill and decode and not self._borrower.leaving and not len(self._lender)

    def cross_update(self) -> None:
        """Ends transfers as an emptied prefix cache does, for an update over which vLLM keeps that cache.

        Call it when vLLM has preempted the requests for which sends() is true.
        """
        self._before_reset()
        self._after_reset()
        self.reset()
        self._basis.note_versions()

    def sends(self, request_id: str) -> bool:
        """Returns whether the request's prompt goes to a decode engine, and is not finished."""
        return self._prefill.computes(request_id)

    def on_new_request(self, request: Request) -> None:
        said = in_our_words(request.kv_transfer_params or {}, request.request_id)
        self._note_prefix(request, said)
        try:
            match parse_params(said):
                case PrefillParams() as params:
                    self._require(Role.PREFILL, "do_remote_decode")
                    self._prefill.add(request, params)
                    self._note_context(request)
                case DecodeParams() as params:
                    self._require(Role.DECODE, "do_remote_prefill")
                    self._decode.add(request, params)
                    self._note_context(request)
        except BadParams as error:
            # vLLM sends a notice of a refused request, or of a client that left, as a request that computes
            # nothing.
            if not request.abort_immediately:
                logger.warning(
                    "request %s is computed without a transfer: kv_transfer_params: %s",
                    request.request_id,
                    error,
                )

    def _note_prefix(self, request: Request, params: Mapping[str, Any]) -> None:
        try:
            prefix = parse_prefix(params)
            if prefix is None or request.abort_immediately:
                return
            if self._no_prefixes:
                raise BadParams(f"prefix_from: {self._no_prefixes}")
            self._borrower.add(request, prefix)
        except BadParams as error:
            words = "request %s: its prefix is computed, not loaded: kv_transfer_params: %s"
            logger.warning(words, request.request_id, error)

    def _note_context(self, request: Request) -> None:
        if request.trace_headers:  # vLLM drops them if it sends no spans
            self._contexts[request.request_id] = dict(request.trace_headers)

    def _require(self, role: Role, key: str) -> None:
        if self._role not in (role, Role.BOTH):
            raise BadParams(
                f"{key} is for a {role.value} engine, but this engine's role is {self._role.value}"
            )

    @property
    def gates(self) -> tuple[AdmissionGate, AdmissionGate]:
        """The gates of prompts and of KV loads. Available after ``bind``."""
        assert self._prefill.gate is not None
        assert self._decode.gate is not None
        return self._prefill.gate, self._decode.gate

    def expects_prompt(self, request_id: str) -> bool:
        """Returns whether this engine computes no prompt for the request: it is still to arrive from a P, or
        the request is a prefetch."""
        return self._decode.expects_prompt(request_id) or self._borrower.is_prefetch(request_id)

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Returns the number of tokens to load behind ``local_tokens``. None: the request must wait.

        vLLM may call this every step.
        """
        if self._prefill.must_wait(request) or self._decode.must_wait(request):
            return None
        if self._borrower.must_wait(request, local_tokens):
            # It is inside the gate, where no prompt waits behind it.
            self._prefill.allocated(request)
            return None
        borrowed = self._borrower.tokens_to_load(request, local_tokens)
        return borrowed or self._decode.tokens_to_load(request, local_tokens)

    def allocated(self, request: Request, blocks: Any, external_tokens: int) -> None:
        """Notes that vLLM has given the request blocks.

        vLLM will load ``external_tokens`` tokens. 0: it needs nothing.
        """
        self._prefill.allocated(request)
        self._decode.allocated(request, blocks, external_tokens)
        self._borrower.allocated(request, blocks, external_tokens)

    def held(self, request: Request) -> bool:
        """Returns whether a gate holds the request: it must not take blocks yet."""
        return self._prefill.must_wait(request) or self._decode.held(request)

    def build_metadata(self, scheduler_output: Any) -> StepMetadata:
        preempted = self._prefill.preempted(
            scheduler_output.preempted_req_ids or (), scheduler_output.num_scheduled_tokens
        )
        pages = self._prefill.new_pages(
            scheduler_output.num_scheduled_tokens, scheduler_output.kv_connector_block_state
        )
        self._prefill.notice_next(scheduler_output.num_scheduled_tokens)
        self._borrower.discard_late()
        lent, after_pages = self._lender.take_pages()
        commands = tuple(self._commands)
        self._commands.clear()
        contexts, self._contexts = self._contexts | self._borrower.take_contexts(), {}
        step_requests = ""
        if self.step_requests is not None and self.step_requests.started:
            # This step's news has what a worker has requested it for.
            self.step_requests.pending = False
            step_requests = "" if self._announced else self.step_requests.name
            self._announced = True
        return StepMetadata(
            preempted,
            commands,
            pages + lent,
            after_pages,
            self._decode.waiting(),
            contexts,
            step_requests,
            computes=scheduler_output.total_num_scheduled_tokens > 0,
            hits=self._decode.take_hits(),
        )

    def has_unsent_commands(self) -> bool:
        """Returns whether the engine must take another step for the connector.

        It must if the workers have not received a command yet, have still to report on a request that vLLM
        does not know, or have requested a step.
        """
        requested = self.step_requests is not None and self.step_requests.pending
        return bool(requested or self._commands or self._decode.has_unreported_ends or self._lender.busy)

    def reported(self, output: Any) -> None:
        """Handles the workers' reports at the end of a step, in vLLM's KVConnectorOutput.

        Removes loads of tokens alone and lent prefixes, because vLLM does not know them. The load of a prefix
        becomes that of its request.
        """
        news = output.kv_connector_worker_meta or News()
        received = output.finished_recving or set()
        self._borrower.discard(news.discarded)
        self._borrower.arrived(news.arrived)
        prefixes, borrowers = self._borrower.load_ended(received, output.failed_recving or ())
        received = received - prefixes
        token_only = self._decode.token_only(received)
        if prefixes or token_only:
            output.finished_recving = (received - token_only) | borrowers  # vLLM reads it after this
        self._borrower.answered(news.answers)
        if news.reserved:
            self._prefill.reserved(news.reserved)
        self._decode.prompts_due(news.due)
        self._decode.sampled(news.sampled)
        self._decode.discard(news.discarded)
        sent = output.finished_sending or set()
        if hidden := self._lender.sent(sent) | self._borrower.sent(sent):
            output.finished_sending = sent - hidden
        self._lender.requested(news.requested)
        self._prefill.sent(sent)
        self._decode.load_ended(received, output.failed_recving or ())

    def give_first_tokens(self) -> None:
        """Makes FirstTokenScheduler take the first tokens from now on. Call it before the first request."""
        self._decode.gives_first_tokens = True

    def take_first_tokens(self) -> list[tuple[Request, int]]:
        """Returns the requests whose pages have arrived since the last call, each with P's sampled token."""
        return self._decode.take_first_tokens()

    def end_prefetches(self) -> None:
        """Makes GatedScheduler end prefetches from now on. Call it before the first request."""
        self._borrower.ends_prefetches = True

    def take_prefetched(self) -> list[tuple[Request, int]]:
        """Returns the prefetches that are to end, each with the tokens that it has loaded."""
        return self._borrower.take_prefetched()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._decode.request_finished(request)
        kept, params = self._prefill.request_finished(request)
        self._borrower.request_finished(request, computes_for_decode=kept)
        return kept, params
