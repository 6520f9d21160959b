"""StepCosts: the cost of an engine's steps and the work that is left, as its scheduler sees them."""

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

# Between two WorkloadReports. A heartbeat, which takes the last report along, is sent every second.
_INTERVAL_NS = 100_000_000

# Between two fits. A fit delays the thread that steps, and that sends tokens, by 0.2 ms, and by 0.8 ms with
# cold caches (0.5 ms beside an H200). The cost of a token does not change within a second.
_FIT_INTERVAL_NS = 1_000_000_000

# Steps without a prompt whose median is decode_ns. The median follows within a fraction of a second. It
# ignores an engine's first step, which takes longer because kernels are compiled.
_DECODE_SAMPLES = 32

# Least tokens of a prompt in a step that counts. Fewer are the rest behind a cached prefix, and cost what a
# step costs.
_MIN_CHUNK_TOKENS = 16
# From this number of tokens on, a step shows the cost of a token. On a GPU, fewer tokens cost little beside
# the step itself.
_MIN_INFORMATIVE_TOKENS = 64
_MIN_SAMPLES = 8
# Steps kept of each size (sizes are powers of two), so that many short prompts do not push out the few long
# ones.
_SAMPLES_PER_SIZE = 64

# Weight against a step's and a pair's share of the cost: a tenth of a step's evidence. It decides where the
# steps do not: if all have about as many tokens, the cost is assigned to the tokens.
_PRIOR_WEIGHT = 0.1
# All choices of non-zero costs among step, token and pair, except for none.
_COST_SUBSETS = np.array([*itertools.product([1.0, 0.0], repeat=3)][:-1])


class _Step(NamedTuple):
    scheduled_ns: int
    tokens: int
    """Prompt tokens."""
    pairs: float
    """Pairs of a prompt token and a token to which it attends."""
    decodes: bool
    """Whether the step computes, but no prompt."""


class Sample(NamedTuple):
    """A step that computed prompts."""

    tokens: int
    pairs: float
    took_ns: int


def step_tokens(scheduler_config: Any) -> int:
    """Returns the most tokens that a step computes. Drafted tokens make it fewer."""
    return int(scheduler_config.max_num_scheduled_tokens or scheduler_config.max_num_batched_tokens)


def idle_load(scheduler_config: Any, cache_tokens: int, block_tokens: int) -> WorkloadReport:
    """Returns the WorkloadReport of an engine that has done nothing yet, from vLLM's SchedulerConfig."""
    most = step_tokens(scheduler_config)
    longest = scheduler_config.long_prefill_token_threshold or most
    return WorkloadReport(most, min(most, longest), cache_tokens, block_tokens=block_tokens)


class StepCosts:
    """Receives requests and steps from the connector's hooks, in the scheduler's process."""

    def __init__(
        self,
        idle: WorkloadReport,
        in_flight: int,
        expects_prompt: Callable[[str], bool],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``in_flight``: the most steps that vLLM schedules before the first of them ends.

        ``expects_prompt``: returns whether a request's prompt will arrive from another engine. ``clock``: in
        ns.
        """
        self._idle = idle
        self._expects_prompt = expects_prompt
        self._clock = clock
        self._live: dict[str, Request] = {}
        self._computing: dict[str, Request] = {}
        """Live requests whose prompt is not fully scheduled, by request id."""
        self._steps: deque[_Step] = deque(maxlen=in_flight)
        """Steps that are scheduled and not over. If an end is missed, the full queue drops the oldest
        step."""
        self._ended_ns = 0
        self._decodes: deque[int] = deque(maxlen=_DECODE_SAMPLES)
        self._samples: dict[int, deque[Sample]] = {}
        """Steps with prompts, by size."""
        self._prompt: PromptCost | None = None
        self._fitted = True
        self._fitted_ns = -_FIT_INTERVAL_NS
        self._reported_ns = 0
        self._reported_busy = False

    def arrived(self, request: Request) -> None:
        self._live[request.request_id] = self._computing[request.request_id] = request

    def request_finished(self, request_id: str) -> None:
        """Forgets a request after any end. An unknown request has no effect."""
        self._live.pop(request_id, None)
        self._computing.pop(request_id, None)

    def scheduled(self, step: Any) -> WorkloadReport | None:
        """Handles a scheduled step.

        ``step``: vLLM's SchedulerOutput, before it counts the step's tokens as computed. Returns the
        WorkloadReport at the step's beginning if it is due: a few times a second, and when no work is left.
        """
        now = self._clock()
        for request_id in step.preempted_req_ids or ():
            if request := self._live.get(request_id):
                self._computing[request_id] = request
        # The fit runs beside a step that is computed, if steps overlap. The first prompt of an idle engine
        # then does not wait for it.
        if self._steps or self._steps.maxlen == 1:
            self._fit(now)
        load = self._news(now)
        tokens, pairs = 0, 0.0
        # The intersection walks the smaller of the two, in C: this cost occurs in each step.
        for request_id in self._computing.keys() & step.num_scheduled_tokens.keys():
            request, chunk = self._computing[request_id], step.num_scheduled_tokens[request_id]
            before = request.num_computed_tokens
            # A single token is computed as a decode token is: D's last prompt token, behind those that
            # arrived from P.
            if chunk > 1:
                tokens += chunk
                pairs += chunk * (before + chunk / 2)
            # After a preemption, generated tokens are computed again as well.
            if before + chunk >= request.num_tokens:
                del self._computing[request_id]
        decodes = tokens == 0 and step.total_num_scheduled_tokens > 0
        self._steps.append(_Step(now, tokens, pairs, decodes))
        return load

    def step_ended(self) -> None:
        """Handles the end of the oldest scheduled step."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        # With async scheduling a step is scheduled while the previous step is computed.
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
        """Returns the current WorkloadReport.

        It does not know yet what vLLM will find in its prefix cache for a waiting prompt.
        """
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

    def prompt_seconds(self, before: int, tokens: int) -> float | None:
        """Returns the seconds in which this engine computes ``tokens`` tokens behind ``before`` others.

        None: it has computed too few prompts.
        """
        cost = self._prompt
        if cost is None:
            return None
        steps = -(-tokens // self._idle.prompt_tokens)
        pairs = tokens * (before + tokens / 2)
        return (cost.step_ns * steps + cost.token_ns * tokens + cost.pair_ps * pairs / 1000) / 1e9

    def _fit(self, now: int) -> None:
        """Fits the costs if a fit is due and new samples exist."""
        if self._fitted or now - self._fitted_ns < _FIT_INTERVAL_NS:
            return
        samples = [sample for size in self._samples.values() for sample in size]
        if sum(sample.tokens >= _MIN_INFORMATIVE_TOKENS for sample in samples) >= _MIN_SAMPLES:
            self._prompt = fit(samples)
            self._fitted_ns = now
        self._fitted = True


def fit(samples: Sequence[Sample]) -> PromptCost:
    """Returns the non-negative costs that explain the steps best.

    A step's error counts in relation to its duration. A step that was held up for a second therefore counts
    as little as any other unexplained step.
    """
    tokens, pairs, took = np.array(samples, dtype=np.float64).T
    shares = np.stack([np.ones_like(took), tokens, pairs]) / took
    units = shares.mean(axis=1, keepdims=True)
    shares /= units  # a cost of 1 explains a step, on average
    products = shares @ shares.T + np.diag([_PRIOR_WEIGHT, 0.0, _PRIOR_WEIGHT])
    sums = shares.sum(axis=1)
    # The equation of a cost that is not chosen sets it to zero.
    both = _COST_SUBSETS[:, :, None] * _COST_SUBSETS[:, None, :]
    equations = np.where(both, products, np.eye(3))
    costs = np.linalg.solve(equations, (_COST_SUBSETS * sums)[:, :, None])[:, :, 0]
    explained = np.where((costs >= 0).all(axis=1), costs @ sums, -np.inf)
    step_ns, token_ns, pair_ns = costs[explained.argmax()] / units[:, 0]
    return PromptCost(round(step_ns), round(token_ns), round(pair_ns * 1000))
