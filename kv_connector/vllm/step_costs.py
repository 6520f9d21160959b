"""What an engine's steps cost and what it has still to compute, as its scheduler sees it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from kv_connector.control.membership import PromptCost, WorkloadReport

if TYPE_CHECKING:
    from kv_connector.vllm.internals import Request

# Between two Loads; a heartbeat, which takes the last one along, is 1 s.
_INTERVAL_NS = 100_000_000

# Between two fits, each of which costs the thread that steps, and hands out tokens, 0.2 ms, and 0.8 where its
# caches are cold (0.5 beside an H200): what a token costs does not change within a second.
_FIT_INTERVAL_NS = 1_000_000_000

# Steps without a prompt that decode_ns is the median of: it follows within a fraction of a second, and the
# first step of an engine, in which kernels are compiled, does not stand for what it costs.
_DECODE_SAMPLES = 32

# Of a prompt's tokens in one step. Fewer are the rest behind a cached prefix: they cost what a step costs.
_MIN_CHUNK_TOKENS = 16
# From so many on a step shows what a token costs: on a GPU, fewer cost little beside the step itself.
_MIN_INFORMATIVE_TOKENS = 64
_MIN_SAMPLES = 8
# Steps kept of each size (sizes are powers of two): many short prompts do not push the few long ones out.
_SAMPLES_PER_SIZE = 64

# How much is held against a step's and a pair's share of the cost: a tenth of a step's evidence. It decides
# where the steps do not: if all have about as many tokens, the cost is the tokens'.
_PRIOR_WEIGHT = 0.1
# Which of the costs (step, token, pair) are not zero: all choices but none.
_COST_SUBSETS = np.array([*itertools.product([1.0, 0.0], repeat=3)][:-1])


class _Step(NamedTuple):
    scheduled_ns: int
    tokens: int
    """Of prompts."""
    pairs: float
    """Of such a token and one that it attends to."""
    decodes: bool
    """It computes, and no prompt."""


class Sample(NamedTuple):
    """A step that computed prompts."""

    tokens: int
    pairs: float
    took_ns: int


def idle_load(scheduler_config: Any, cache_tokens: int) -> WorkloadReport:
    """The WorkloadReport of an engine that has done nothing yet, from vLLM's SchedulerConfig."""
    # Where tokens are drafted, a step takes fewer from the requests.
    step_tokens = scheduler_config.max_num_scheduled_tokens or scheduler_config.max_num_batched_tokens
    longest = scheduler_config.long_prefill_token_threshold or step_tokens
    return WorkloadReport(step_tokens, min(step_tokens, longest), cache_tokens)


class StepCosts:
    """Gets requests and steps from the connector's hooks, in the scheduler's process."""

    def __init__(
        self,
        idle: WorkloadReport,
        in_flight: int,
        expects_prompt: Callable[[str], bool],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``in_flight``: steps that vLLM schedules before it sees the first one's end, at most.
        ``expects_prompt``: whether a request's prompt is to come from another engine. ``clock``: in ns."""
        self._idle = idle
        self._expects_prompt = expects_prompt
        self._clock = clock
        self._live: dict[str, Request] = {}
        self._computing: dict[str, Request] = {}
        """Of them, those whose prompt has still a token that no step was to compute."""
        self._steps: deque[_Step] = deque(maxlen=in_flight)
        """Scheduled, and not over. An end that is missed is made up for once the queue is full."""
        self._ended_ns = 0
        self._decodes: deque[int] = deque(maxlen=_DECODE_SAMPLES)
        self._samples: dict[int, deque[Sample]] = {}
        """By size."""
        self._prompt: PromptCost | None = None
        self._fitted = True
        self._fitted_ns = -_FIT_INTERVAL_NS
        self._reported_ns = 0
        self._reported_busy = False

    def arrived(self, request: Request) -> None:
        self._live[request.request_id] = self._computing[request.request_id] = request

    def request_finished(self, request_id: str) -> None:
        """Whatever its end; a request that is not known does nothing."""
        self._live.pop(request_id, None)
        self._computing.pop(request_id, None)

    def scheduled(self, step: Any) -> WorkloadReport | None:
        """``step`` is vLLM's SchedulerOutput, before it has counted the step's tokens as computed. The
        WorkloadReport at its beginning, where it is time to report it: a few times a second, and when nothing
        is left to do.
        """
        now = self._clock()
        for request_id in step.preempted_req_ids or ():
            if request := self._live.get(request_id):
                self._computing[request_id] = request
        # Beside a step that is computed, where there are such: the first prompt of an engine at rest does not
        # wait for it.
        if self._steps or self._steps.maxlen == 1:
            self._fit(now)
        load = self._news(now)
        tokens, pairs = 0, 0.0
        # The smaller of the two is walked through, in C: this is each step's cost.
        for request_id in self._computing.keys() & step.num_scheduled_tokens.keys():
            request, chunk = self._computing[request_id], step.num_scheduled_tokens[request_id]
            before = request.num_computed_tokens
            # A single one is computed as a decode's is: D's last token, behind those that came from P.
            if chunk > 1:
                tokens += chunk
                pairs += chunk * (before + chunk / 2)
            # After a preemption, what was generated is computed again as well.
            if before + chunk >= request.num_tokens:
                del self._computing[request_id]
        decodes = tokens == 0 and step.total_num_scheduled_tokens > 0
        self._steps.append(_Step(now, tokens, pairs, decodes))
        return load

    def step_ended(self) -> None:
        """The oldest of the scheduled steps is over."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        # With async scheduling a step is scheduled while the one before it is computed.
        took = now - max(step.scheduled_ns, self._ended_ns)
        self._ended_ns = now
        if step.decodes:
            self._decodes.append(took)
        elif step.tokens >= _MIN_CHUNK_TOKENS:
            samples = self._samples.setdefault(step.tokens.bit_length(), deque(maxlen=_SAMPLES_PER_SIZE))
            samples.append(Sample(step.tokens, step.pairs, max(took, 1)))
            self._fitted = False

    def _news(self, now: int) -> WorkloadReport | None:
        came_to_rest = self._reported_busy and not self._live
        if now - self._reported_ns < _INTERVAL_NS and not came_to_rest:
            return None
        self._reported_ns, self._reported_busy = now, bool(self._live)
        return self.load()

    def load(self) -> WorkloadReport:
        """Of now. What vLLM will find in its prefix cache of a prompt that waits, it does not know yet."""
        waiting = sum(
            max(request.num_tokens - request.num_computed_tokens, 0)
            for request_id, request in self._computing.items()
            if not self._expects_prompt(request_id)
        )
        return msgspec.structs.replace(
            self._idle,
            waiting=waiting,
            running=len(self._live) - len(self._computing),
            decode_ns=round(statistics.median(self._decodes)) if self._decodes else None,
            prompt=self._prompt,
        )

    def _fit(self, now: int) -> None:
        """Where it is time to, and there is something new."""
        if self._fitted or now - self._fitted_ns < _FIT_INTERVAL_NS:
            return
        samples = [sample for size in self._samples.values() for sample in size]
        if sum(sample.tokens >= _MIN_INFORMATIVE_TOKENS for sample in samples) >= _MIN_SAMPLES:
            self._prompt = fit(samples)
            self._fitted_ns = now
        self._fitted = True


def fit(samples: Sequence[Sample]) -> PromptCost:
    """The costs, none below zero, that explain the steps best. Each step counts by what it is off in relation
    to what it took: one that was held up for a second counts as little as any other that is not explained.
    """
    tokens, pairs, took = np.array(samples, dtype=np.float64).T
    shares = np.stack([np.ones_like(took), tokens, pairs]) / took
    units = shares.mean(axis=1, keepdims=True)
    shares /= units  # a cost of 1 explains a step, on average
    products = shares @ shares.T + np.diag([_PRIOR_WEIGHT, 0.0, _PRIOR_WEIGHT])
    sums = shares.sum(axis=1)
    # A cost that is not chosen has the equation that it is zero.
    both = _COST_SUBSETS[:, :, None] * _COST_SUBSETS[:, None, :]
    equations = np.where(both, products, np.eye(3))
    costs = np.linalg.solve(equations, (_COST_SUBSETS * sums)[:, :, None])[:, :, 0]
    explained = np.where((costs >= 0).all(axis=1), costs @ sums, -np.inf)
    step_ns, token_ns, pair_ns = costs[explained.argmax()] / units[:, 0]
    return PromptCost(round(step_ns), round(token_ns), round(pair_ns * 1000))
