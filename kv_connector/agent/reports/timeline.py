"""The timelines of an agent's last transfers: when each layer was computed, posted and landed.

Off unless the setting ``timelines`` is above 0. The transfer thread records what only it sees (batches,
immediates) as steps (TransferEngine.start_trace). This module joins these steps with the agent's own events.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kv_connector.agent.reports.ledger import Timing
from kv_connector.engine import StepKind, TraceStep
from kv_connector.protocol.actions import Ended, Share
from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.wire.messages import MAX_MESSAGE_BYTES, Recall, Recalled, Role, clip
from kv_connector.protocol.wire.timeline import MAX_COUNTS, MAX_SPANS, About, LayerSpan, Receiving, Sending

# Steps between two turns of the agent. In a burst of a thousand pages, each batch of 64 pages makes two
# steps.
_STEPS = 1 << 16
# Layers whose signals are remembered: with 80 layers those of the engine's last 100 steps.
_SIGNALS = 1 << 13
# Bytes of a message that timelines may use.
_ROOM = MAX_MESSAGE_BYTES * 3 // 4


class Tracer(Protocol):
    """The part of a transfer engine that records steps."""

    def start_trace(self, steps: int) -> None: ...

    def take_trace(self) -> tuple[list[TraceStep], int]: ...


@dataclass
class _Span:
    layer: int
    computed: int
    first_post: int = 0
    last_post: int = 0
    landed: int = 0
    pages: int = 0


@dataclass
class _ShareTimes:
    """The times of a share that is being written."""

    number: int  # the transfer engine's number
    steps: dict[int, int] = field(default_factory=dict)  # when the step's pages were named, by signal base
    pushes: int = 0
    spans: dict[tuple[int, int], _Span] = field(default_factory=dict)  # by step and layer
    requests: dict[int, _Span] = field(default_factory=dict)  # by the transfer engine's request


@dataclass
class _Incoming:
    """The arrivals of a request that waits for its pages."""

    immediate: int
    pages: int
    counts: list[tuple[int, int]] = field(default_factory=list)


class Timelines:
    """The timelines of one agent. Owned by its thread, except signalled()."""

    def __init__(
        self,
        *,
        engine: Tracer,
        layout: KvLayout,
        addresses: Sequence[int],
        keep: int,
        engine_id: str,
        rank: int,
        role: Role,
        host: str,
        on_gpu: bool,
    ) -> None:
        """``addresses``: of the layout's regions. ``keep``: number of transfers; 0 switches everything off.
        ``host``: see Recalled. ``on_gpu``: a signal is stored when a layer is enqueued, not when it is
        computed."""
        self.on = keep > 0
        self._engine = engine
        self._about = engine_id, rank, role, host
        self._names = tuple(clip(layer.name) for layer in layout.layers)
        places = sorted(
            (addresses[part.region] + part.offset, ordinal)
            for ordinal, layer in enumerate(layout.layers)
            for part in layer.parts
        )
        self._starts = [address for address, _ in places]
        self._ordinals = [ordinal for _, ordinal in places]
        self.order: Sequence[int] = range(len(layout.layers))
        """The layers' ordinals, in the order in which the signal counts them."""
        self._keep = keep
        self._kept: deque[Sending | Receiving] = deque(maxlen=keep)
        self._lost = 0
        self._signals: list[tuple[int, int]] = [(0, 0)] * _SIGNALS  # value and time
        self._on_gpu = on_gpu
        self._named: dict[int, int] = {}  # when a step's pages were named, by signal base
        self._outgoing: dict[Share, _ShareTimes] = {}
        self._shares: dict[int, Share] = {}  # by the transfer engine's number
        self._live: dict[int, _Span] = {}  # by the transfer engine's request
        self._incoming: dict[str, _Incoming] = {}  # by request id
        self._counting: dict[int, _Incoming] = {}  # by immediate
        if self.on:
            engine.start_trace(_STEPS)

    # --- Events

    def signalled(self, value: int) -> None:
        """The layer with this signal value has been computed. Called on the thread of the forward pass."""
        self._signals[value % _SIGNALS] = value, time.monotonic_ns()

    def named(self, signal_base: int | None, when: int) -> None:
        """The pages of a step were named at this time."""
        if signal_base is not None and signal_base not in self._named:
            self._named[signal_base] = when
            while len(self._named) > _SIGNALS:
                del self._named[next(iter(self._named))]

    def pushed(self, share: Share, number: int, signal_base: int | None) -> None:
        """Pages of a step were armed, for the native transfer ``number``."""
        outgoing = self._outgoing.get(share)
        if outgoing is None:
            outgoing = self._outgoing[share] = _ShareTimes(number)
            self._shares[number] = share
        outgoing.pushes += 1
        # Pages without a signal are a step by themselves.
        step = -outgoing.pushes if signal_base is None else signal_base
        outgoing.steps.setdefault(step, self._named.get(step, time.monotonic_ns()))

    def counter_opened(self, request_id: str, immediate: int, pages: int) -> None:
        """A request waits for this number of pages, which this immediate counts."""
        incoming = self._incoming[request_id] = _Incoming(immediate, pages)
        self._counting[immediate] = incoming

    def look(self) -> None:
        """Takes the steps that the transfer thread has recorded. Call it often enough that its buffer does
        not overflow."""
        steps, lost = self._engine.take_trace()
        self._lost += lost
        for step in steps:
            if step.kind is StepKind.COUNTED:
                incoming = self._counting.get(step.request)
                if incoming is not None:
                    before = incoming.counts[-1][1] if incoming.counts else 0
                    incoming.counts.append((step.nanoseconds, before + step.pages))
            elif step.kind is StepKind.RELEASED:
                self._released(step)
            elif (span := self._live.get(step.request)) is not None:
                if step.kind is StepKind.POSTED:
                    span.first_post = span.first_post or step.nanoseconds
                    span.last_post = step.nanoseconds
                    span.pages += step.pages
                else:
                    span.landed = step.nanoseconds

    def ended(self, now: float, ended: Ended, peer: str, timing: Timing) -> None:
        """A transfer is over. ``peer``: empty if there was no session."""
        self.look()
        end = round(now * 1e9)
        about = About(
            transfer_id=ended.transfer_id,
            request_id=clip(ended.request_id),
            peer=clip(peer),
            lane=clip(timing.lane),
            reserved=end - round(ended.seconds * 1e9),
            ended=end,
            outcome=ended.outcome.value,
        )
        if ended.side is Role.PREFILL:
            outgoing = self._outgoing.pop(Share(ended.transfer_id, ended.share), None)
            if outgoing is not None:
                self._kept.append(Sending(about, ended.share, timing.nbytes, *self._forget(outgoing)))
            return
        incoming = self._incoming.pop(ended.request_id, None)
        if incoming is not None:
            del self._counting[incoming.immediate]
            self._kept.append(Receiving(about, incoming.pages, _thinned(incoming.counts)))

    # --- Queries

    def recalled(self, recall: Recall, others: Sequence[tuple[str, int]]) -> Recalled:
        """The answer to a RECALL. ``others``: addresses of the other workers of this engine."""
        sent: list[Sending] = []
        received: list[Receiving] = []
        room = _ROOM
        for timeline in reversed(self._kept):
            about = timeline.about
            if recall.text not in about.transfer_id and recall.text not in about.request_id:
                continue
            if len(sent) + len(received) == recall.limit:
                break
            room -= len(msgspec.msgpack.encode(timeline))
            if room < 0:
                break
            if isinstance(timeline, Sending):
                sent.append(timeline)
            else:
                received.append(timeline)
        engine_id, rank, role, host = self._about
        return Recalled(
            engine_id=engine_id,
            rank=rank,
            role=role,
            host=host,
            now=time.monotonic_ns(),
            kept=self._keep,
            lost=self._lost,
            layers=self._names,
            others=tuple(others),
            sent=tuple(sent),
            received=tuple(received),
        )

    # --- Steps

    def _released(self, step: TraceStep) -> None:
        share = self._shares.get(step.transfer)
        if share is None:
            return
        outgoing = self._outgoing[share]
        layer = self._layer(step)
        key = step.signal_value or -outgoing.pushes, layer
        span = outgoing.spans.get(key)
        if span is None:
            span = outgoing.spans[key] = _Span(layer, self._computed(step))
        self._live[step.request] = outgoing.requests[step.request] = span

    def _layer(self, step: TraceStep) -> int:
        """The layer at the step's source address. Of layers that share pages, the one of the signal's
        value."""
        last = max(0, bisect_right(self._starts, step.source) - 1)
        there = self._ordinals[bisect_left(self._starts, self._starts[last]) : last + 1]
        signalled = self.order[(step.signal_value - 1) % len(self.order)]
        return signalled if signalled in there else there[-1]

    def _computed(self, step: TraceStep) -> int:
        """When the layer was computed: by its hook, else by the time at which the transfer thread saw the
        signal."""
        if step.signal_value and not self._on_gpu:
            # Layers that are signalled together have the signal value of the last one.
            for value in range(step.signal_value, step.signal_value + len(self._names)):
                signalled, when = self._signals[value % _SIGNALS]
                if signalled == value:
                    return when
        return step.nanoseconds

    def _forget(self, outgoing: _ShareTimes) -> tuple[tuple[int, ...], tuple[LayerSpan, ...]]:
        """Removes the share from the tables and returns its steps and spans, in their order."""
        del self._shares[outgoing.number]
        for request, span in outgoing.requests.items():
            if self._live.get(request) is span:  # its place may belong to a newer request
                del self._live[request]
        spans = sorted(outgoing.spans.values(), key=lambda span: (span.computed, span.layer))
        return (
            tuple(sorted(outgoing.steps.values())[:MAX_SPANS]),
            tuple(
                LayerSpan(s.layer, s.computed, s.first_post, s.last_post, s.landed, s.pages)
                for s in spans[:MAX_SPANS]
            ),
        )


def _thinned(counts: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """At most MAX_COUNTS of the counts, including the last one."""
    every = -(-len(counts) // (MAX_COUNTS - 1)) or 1
    chosen = counts[::every]
    return tuple(chosen if not counts or chosen[-1] == counts[-1] else [*chosen, counts[-1]])
