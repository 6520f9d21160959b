"""The worker side of WriteImmConnector: passes the scheduler's commands to the Agent, and its reports back.

vLLM's model runner calls it on its one thread. No call blocks, with two exceptions. A preemption waits until
nothing reads the blocks. A step that computes nothing waits a moment for the transfers that the engine needs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kv_connector.agent.agent import Agent
from kv_connector.agent.command_runner import CommandRunner
from kv_connector.agent.commands import Command, FailLoad
from kv_connector.agent.layer_progress import LayerProgress
from kv_connector.engine.transfer_engine import StreamSignal
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.internals import KVConnectorTransferResults
from kv_connector.vllm.metadata import News, StepMetadata
from kv_connector.vllm.model.last_block import LastBlocks
from kv_connector.vllm.step_requests import request_step

if TYPE_CHECKING:
    from kv_connector.vllm.spans import TransferSpans

logger = logging.getLogger(__name__)

IDLE_STEP_SECONDS = 0.005
"""Seconds that a step of a CPU engine waits for news if it computes nothing.

Without this wait, an engine that only waits for transfers would take step after step, on cores that the
prefill may need. vLLM's own pause between such steps is replaced. The wait ends with the first news. It
delays a request that arrives meanwhile by at most this time.

A GPU engine does not wait in the step. With async scheduling, vLLM acts on a step's news only after the next
step, which has none (measured on an H200: 5.4 ms later for every request). It waits between steps, in
``pause``.
"""

STEPS_TO_NEWS = 2
"""Steps from the step that reports news until vLLM's scheduler acts on it, with async scheduling.

The next step is in flight by then, and the step after it is the first that can differ.
"""


def current_stream() -> int:
    """Returns the CUDA stream on which this thread computes."""
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


class WorkerSide:
    """One rank's Agent, driven by the connector's hooks."""

    def __init__(
        self,
        agent: Agent,
        layer_names: tuple[str, ...],
        signal: Callable[[int], None],
        last_blocks: LastBlocks,
        spans: TransferSpans | None = None,
        *,
        ends_every_step: bool = True,
    ) -> None:
        """``agent`` must be started. ``signal`` writes agent.signal, in the order of the forward pass.
        ``spans``: set if vLLM sends spans.

        ``ends_every_step``: whether vLLM calls end_step() before it begins another step, unless the step
        raised.
        """
        self.agent = agent
        self._last_blocks = last_blocks
        self._spans = spans
        self._ends_every_step = ends_every_step
        if spans is not None:
            agent.report_ends(spans.over)
        self._progress = LayerProgress(layer_names, signal)
        self._patient = not isinstance(agent.signal, StreamSignal)
        self._commands = CommandRunner(agent)
        self._computes = True
        self.pushes = False
        """Whether pages of this step go to a D.

        A client waits for its token, and a later step ends its request.
        """
        self._steps_to_news = 0
        self._begun: StepMetadata | None = None
        """The step whose preemptions were handled last."""
        self._sampled: dict[str, int] = {}
        self._discarded: set[str] = set()

    def handle_preemptions(self, metadata: StepMetadata) -> None:
        """Handles a step's preemptions before the step may write into the preempted requests' blocks.

        Blocks until nothing reads these blocks. It is a step's first hook: the step's inputs are prepared
        between it and the next hook. Model runner V2 calls it twice, because the connector adds a hook before
        V2's own.
        """
        if metadata is self._begun:
            return
        self._begun = metadata
        if metadata.preempted:
            self.agent.preempt(metadata.preempted)
        if metadata.new_pages:
            self.agent.begin_launch()

    def begin_step(self, metadata: StepMetadata) -> None:
        if self._ends_every_step and not self._progress.ended:
            self._abandon()  # this step was queued behind the step that raised
        self.agent.note_step()
        new = [group for pages in metadata.new_pages for group in pages.groups]
        by_layer = bool(new) and self.agent.leaves_by_layer(new)
        if self._spans is not None:
            self._spans.remember(metadata.contexts)
        if metadata.step_requests:
            self.agent.report_prefix_requests(functools.partial(request_step, metadata.step_requests))
        self._commands.execute(map(self._cleared, metadata.commands))
        if metadata.waiting is not None:
            self._commands.waiting(metadata.waiting)
        ending = [pages.transfer_id for pages in metadata.new_pages if pages.last]

        def before_last() -> None:
            if ending:
                self.agent.note_prefill_end(ending)

        if self._progress.begin_step(before_last, by_layer=by_layer):
            self.agent.order_layers(self._progress.base, self._progress.order)
        if metadata.new_pages and not ending:
            self.agent.no_prompt_ends(self._progress.base)
        self._commands.pages_computed(metadata.new_pages, self._progress.base)
        self._commands.execute(metadata.after_pages)
        self._computes, self.pushes = metadata.computes, bool(metadata.new_pages)
        if metadata.computes:
            # Requests that end with this step's tokens are reported with the step after the next. A pause
            # would delay that.
            self._steps_to_news = max(self._steps_to_news, STEPS_TO_NEWS - 1)

    def _cleared(self, command: Command) -> Command:
        """Clears the blocks that the command names. Returns the command, or FailLoad if that failed."""
        if isinstance(command, DecodeRequest):
            try:
                self._last_blocks.clear(command)
            except Exception:
                words = "transfer %s of request %s: cannot clear the blocks of its KV load"
                logger.exception(words, command.transfer_id, command.request_id)
                return FailLoad(command.request_id, stale=command.engine.prefixes)
        return command

    def layer_computed(self, name: str) -> None:
        self._progress.layer_computed(name)

    def end_step(self, *, raised: bool = False) -> None:
        """Ends a step. ``raised``: its forward pass raised.

        No page of it, or of a later step, is posted then.
        """
        if raised:
            self._abandon()
        else:
            self._progress.end_step()
        self.agent.end_launch()

    def _abandon(self) -> None:
        logger.error("a forward pass failed: this engine sends no further pages of its running prompts")
        self._progress.abandon()

    def transfer_results(self) -> Any:
        """Returns the transfers that have ended since the last call, each request id exactly once."""
        if self._patient and not self._computes:
            self._commands.await_news(IDLE_STEP_SECONDS)
        reports = self._commands.take_reports()
        self._sampled |= reports.sampled
        self._discarded |= reports.stale
        if reports.finished_sending or reports.finished_recving:
            self._steps_to_news = STEPS_TO_NEWS
        return KVConnectorTransferResults(
            finished_sending=reports.finished_sending,
            finished_recving=reports.finished_recving,
            # The scheduler makes discarded loads compute their prompts locally, whatever the setting
            # kv_load_failure_policy.
            failed_recving=reports.failed_recving - reports.stale,
        )

    def pause(self, seconds: float) -> None:
        """Waits for news between steps that compute nothing, in an engine that runs in the worker's process.

        It does not wait until the scheduler has acted on the last news.
        """
        if self._steps_to_news:
            self._steps_to_news -= 1
        else:
            self.agent.await_news(seconds)

    def news(self) -> News | None:
        """Returns the news since the last call. None: there is none. Call it after ``transfer_results``."""
        news = News(
            self.agent.take_reserved(),
            self._sampled,
            self._discarded,
            self.agent.take_prefix_requests(),
            self._commands.take_prompts_due(),
            self._commands.take_prefix_answers(),
            self.agent.take_prefix_loads(),
        )
        self._sampled, self._discarded = {}, set()
        return None if news == News() else news
