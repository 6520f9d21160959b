"""GatedScheduler: vLLM's scheduler, with steps that skip the requests that a gate holds, and prefetches.

vLLM looks at each waiting request in each step: it searches the prefix cache for the prompt, and calls the
connector, which answers "not yet". With thousands of held requests that takes longer than the step.

A prefetch (prefix_borrower.py) ends here, because vLLM ends a request only behind a token that it computes.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from kv_connector.protocol.admission import AdmissionGate
from kv_connector.vllm.internals import (
    AsyncScheduler,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    Request,
    RequestQueue,
    RequestStatus,
    Scheduler,
)
from kv_connector.vllm.process import connectors_within
from kv_connector.vllm.scheduling.scheduler_side import SchedulerSide


def _arrival(request: Request) -> float:
    return float(request.arrival_time)


class GatedQueue(RequestQueue):  # type: ignore[misc]  # vLLM is not typed for mypy
    """vLLM's queue of waiting requests, with the requests that a gate holds kept aside.

    Requests aside are counted, listed and removed like others. A look at the queue sees only requests that no
    gate holds. A request is put aside when its turn comes, before vLLM looks at it. It returns to its place
    in vLLM's queue when it is the first that its gate holds and fits, or when it leaves the gate.
    """

    def __init__(self, queue: Any, deferred: set[Request], sides: Sequence[SchedulerSide]) -> None:
        """``queue``: vLLM's queue, of either policy. ``deferred``: vLLM's set of requests that its steps
        skipped.

        Requests aside belong to this set, for vLLM's statistics.
        """
        self._queue = queue
        self._deferred = deferred
        self._sides = sides
        self._gates: list[AdmissionGate] = []
        self._aside: dict[str, Request] = {}
        """Requests that a gate holds, by request id."""
        for side in sides:
            self._gates += side.gates
        for gate in self._gates:
            gate.on_leave = self._return

    def _held(self, request: Request) -> bool:
        return any(side.held(request) for side in self._sides)

    def _return(self, request_id: str) -> None:
        """Puts a request that was aside into vLLM's queue."""
        request = self._aside.pop(request_id, None)
        if request is None:
            return
        if isinstance(self._queue, deque):
            bisect.insort(self._queue, request, key=_arrival)
        else:
            self._queue.add_request(request)

    def _advance(self) -> None:
        """Brings a request that no gate holds to the front of vLLM's queue, if such a request exists."""
        while self._queue and self._held(self._queue.peek_request()):
            request = self._queue.pop_request()
            self._aside[request.request_id] = request
            self._deferred.add(request)
        for gate in self._gates:
            first = self._aside.get(gate.first() or "")
            # At most one request of each gate: only after it has its blocks is it known whether the next one
            # fits.
            if first is not None and not self._held(first):
                self._return(first.request_id)

    def __bool__(self) -> bool:
        """Returns whether the queue has a request that no gate holds."""
        self._advance()
        return bool(self._queue)

    def peek_request(self) -> Request:
        self._advance()
        return self._queue.peek_request()

    def pop_request(self) -> Request:
        """Takes the request that peek_request() returned. It may be behind its gate by now."""
        return self._queue.pop_request()

    def add_request(self, request: Request) -> None:
        self._queue.add_request(request)

    def prepend_request(self, request: Request) -> None:
        self._queue.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._queue.prepend_requests(requests)

    def remove_request(self, request: Request) -> None:
        if self._aside.pop(request.request_id, None) is None:
            self._queue.remove_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        self._queue.remove_requests(
            [request for request in requests if self._aside.pop(request.request_id, None) is None]
        )

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._queue, self._aside.values())


class GatedScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with a GatedQueue. Loads that fail do not hold up other loads. Prefetches end without
    a forward pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connectors = connectors_within(self.connector)
        found = (getattr(connector, "scheduler", None) for connector in connectors)
        self.sides = [side for side in found if isinstance(side, SchedulerSide)]
        """The scheduler sides of this project's connectors, among those that vLLM has."""
        if self.sides:
            self.waiting: Any = GatedQueue(self.waiting, self.deferred_waiting, self.sides)
        for side in self.sides:
            side.end_prefetches()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        for side in self.sides:
            for request, tokens in side.take_prefetched():
                if not request.is_finished():
                    client = outputs.setdefault(request.client_index, EngineCoreOutputs())
                    client.outputs.append(self._end_prefetch(request, tokens))
        return outputs

    def _end_prefetch(self, request: Request, tokens: int) -> Any:
        """Ends a prefetch that has loaded so many tokens. Returns the output for its client."""
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._handle_blocked_waiting_request(request)  # gives the loaded blocks their hashes
        if self.log_stats:
            # Without it, the duration of the prefill would count from the epoch.
            request.record_event(EngineCoreEventType.SCHEDULED)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_LENGTH_CAPPED)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            kv_transfer_params={"prefetched_tokens": tokens},
            trace_headers=request.trace_headers,
        )

    def _inflight_prefill_reserved_blocks(self) -> int:
        """Returns the free blocks that a load must leave, for prompts with blocks and for its last token.

        A load that is alone needs no reserve: the pool has room for the longest prompt.

        A load that failed or was discarded has lost its blocks and waits anew, but vLLM counts its whole
        prompt. An urgent load in front of it would wait for these blocks forever. So it is no longer counted.
        """
        if self.sides:
            self._inflight_prefills.difference_update(
                [
                    request
                    for request in self._inflight_prefills
                    if request.status != RequestStatus.RUNNING and not self._holds_kv_blocks(request)
                ]
            )
        reserved: int = super()._inflight_prefill_reserved_blocks()
        if self.sides and self._inflight_prefills:
            reserved += len(self.kv_cache_config.kv_cache_groups)
        return reserved

    def _request_remaining_blocks(self, request: Request) -> int:
        """Returns the blocks that a prompt still takes.

        A loaded prompt takes one in each group for its last token if a block begins there. vLLM counts none
        in the groups of sliding windows. So loads could fill the pool, and none of them could run then.
        """
        remaining: int = super()._request_remaining_blocks(request)
        if not self.sides or request.num_computed_tokens >= request.num_tokens:
            return remaining
        following = request.num_computed_tokens + 1
        of_next_token = self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=following,
            new_computed_blocks=self.kv_cache_manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_local_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=following,
        )
        return max(remaining, int(of_next_token))

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Returns whether vLLM may schedule the request in this step.

        A load that has failed or is discarded has lost its blocks. At the front of vLLM's queue of block
        holders it would wait for blocks of the loads behind it, and these cannot start before it. If it is
        skipped once, vLLM puts it into the queue of requests without blocks.
        """
        loaded = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        ready: bool = super()._handle_blocked_waiting_request(request)
        in_front_of_loads = loaded and not self._holds_kv_blocks(request) and len(self.kv_holding_waiting) > 1
        return ready and not in_front_of_loads


class GatedAsyncScheduler(GatedScheduler, AsyncScheduler):  # type: ignore[misc]
    """GatedScheduler for async scheduling: step N+1 is scheduled before the output of step N is known."""
