"""CommandRunner: executes the scheduler's commands on a worker's Agent and returns what has ended.

Called on one thread, the framework's. Nothing here blocks, except ``await_news``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kv_connector.agent.agent import Agent
from kv_connector.agent.commands import (
    AnswerPrefix,
    CacheCleared,
    CancelLoad,
    Command,
    DeferLoad,
    EndLendings,
    FailLoad,
    FinishPrefill,
    NewPages,
    PromptNext,
    RefuseLending,
    ReleaseTransfer,
    SetRanks,
    WithdrawPrefix,
)
from kv_connector.agent.reports.ledger import Reports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, PrefillRequest, PrefixRequest

logger = logging.getLogger(__name__)


class CommandRunner:
    """Reports each request that the scheduler waits for exactly once, even if the agent refuses a command."""

    def __init__(self, agent: Agent) -> None:
        """``agent`` must be started."""
        self._agent = agent
        # Requests that the scheduler has finished. Only these may be reported as sent, because only then does
        # the scheduler expect the report.
        self._finished: set[str] = set()
        self._sent: set[str] = set()
        self._failed_here: dict[str, bool] = {}  # whether the load is stale, by request id
        self._refused_prefixes: dict[str, int] = {}
        self._refused_deferrals: set[str] = set()

    def execute(self, commands: Iterable[Command]) -> None:
        """Executes the commands in their order. Raises nothing."""
        for command in commands:
            try:
                self._execute(command)
            except Exception:
                logger.exception("cannot execute %r", command)
                self._give_up(command)

    def waiting(self, transfers: tuple[tuple[str, Address], ...]) -> None:
        """Sets the transfers whose requests still queue at D, with the address of each P."""
        self._agent.set_waiting(transfers)

    def pages_computed(self, pages: Iterable[NewPages], signal_base: int) -> None:
        """Reports the pages of a step whose layers use the signal's values above ``signal_base``. Raises
        nothing."""
        for new in pages:
            try:
                self._agent.pages_computed(ComputedPages(new.transfer_id, signal_base, new.groups))
            except Exception:
                logger.exception("transfer %s: computed pages cannot be handed to the agent", new.transfer_id)

    def await_news(self, seconds: float) -> None:
        """Blocks until there is something to take, at most ``seconds``."""
        if not (self._failed_here or self._sent & self._finished):
            self._agent.await_news(seconds)

    def take_reports(self) -> Reports:
        """The requests that have ended since the last call."""
        reports = self._agent.take_reports()
        self._sent |= reports.finished_sending
        sent = self._sent & self._finished
        self._sent -= sent
        self._finished -= sent
        failed_here, self._failed_here = self._failed_here, {}
        return Reports(
            finished_sending=sent,
            finished_recving=reports.finished_recving | failed_here.keys(),
            failed_recving=reports.failed_recving | failed_here.keys(),
            stale=reports.stale | {request_id for request_id, stale in failed_here.items() if stale},
            sampled=reports.sampled,
        )

    def take_prefix_answers(self) -> dict[str, int]:
        """The answers to this engine's questions for prefixes since the last call, by transfer id: the number
        of tokens that are lent, or 0."""
        refused, self._refused_prefixes = self._refused_prefixes, {}
        return self._agent.take_prefix_answers() | refused

    def take_prompts_due(self) -> set[str]:
        """The deferred transfers that wait for nothing any more, since the last call."""
        refused, self._refused_deferrals = self._refused_deferrals, set()
        return self._agent.take_prompts_due() | refused

    def _execute(self, command: Command) -> None:
        match command:
            case SetRanks():
                self._agent.set_ranks(command.ranks)
            case PrefillRequest():
                self._agent.expect(command)
            case FinishPrefill():
                self._finished.add(command.request_id)
                self._agent.request_finished(
                    command.transfer_id, command.ok, command.reason, command.sampled, command.aborted
                )
            case DecodeRequest():
                self._agent.reserve(command)
            case CancelLoad():
                self._agent.cancel(command.request_id)
            case ReleaseTransfer():
                self._agent.release(command.transfer_id, command.engine)
            case DeferLoad():
                self._agent.defer(command.transfer_id, command.engine)
            case PromptNext():
                self._agent.prompt_next(command.transfer_id)
            case FailLoad():
                self._failed_here[command.request_id] = command.stale
            case CacheCleared():
                self._agent.cache_cleared()
            case PrefixRequest():
                self._agent.request_prefix(command)
            case WithdrawPrefix():
                self._agent.withdraw_prefix(command.transfer_id)
            case AnswerPrefix():
                self._agent.answer_prefix(
                    command.transfer_id, command.tokens, command.outcome, command.reason
                )
            case RefuseLending():
                self._agent.refuse_lending(command.reason)
            case EndLendings():
                self._agent.end_lendings(command.reason)

    def _give_up(self, command: Command) -> None:
        """Reports the request of a refused command, because the agent will not. The scheduler waits for a
        report."""
        match command:
            case PrefillRequest() | FinishPrefill():
                self._sent.add(command.request_id)
            case DecodeRequest():
                self._failed_here[command.request_id] = command.engine.prefixes
            case DeferLoad():
                self._refused_deferrals.add(command.transfer_id)
            case PrefixRequest():
                self._refused_prefixes[command.transfer_id] = 0
