"""The shares that are open in the transfer engine: what of them is armed, and who waits for their end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_connector.agent.ports import TransferPort
from kv_connector.engine import ArmedLayer, Event, PagedWrite, Pages, TransferProgress
from kv_connector.protocol.actions import Push, PushedGroup, Share
from kv_connector.protocol.plan import LayerRun, Plan


@dataclass(frozen=True)
class Bursts:
    """Up to how many bytes of a prompt wait for its end, and go at once then. With more of them, those of the
    steps before go while it is computed, so many at a time, and the last step's layer by layer where they
    alone are too many."""

    most: int
    early_token: int
    """Where the client is to have its first token from P: they delay its second."""


# By lane. NVLink takes power from the prefill, and 2 to 3 % of its speed, for 50 ms after each write: 7 ms of
# 8,192 tokens of an 8B model. 320 MiB are gone in 1 ms; 2 GiB, the pages of twice those tokens, in 6.5, which
# is 1.4 % of the time that they take to compute.
BURSTS = {"nvlink": Bursts(320 << 20, early_token=2 << 30)}


@dataclass(frozen=True)
class Target:
    """Where a peer's pages lie, as the engine knows them."""

    peer: int  # the engine's
    regions: tuple[int, ...]  # its memory, imported
    plan: Plan
    bursts: Bursts | None  # None: layer by layer


@dataclass(frozen=True)
class _Pages:
    """A Push, in the runs of the peer's plan."""

    push: Push
    batches: Sequence[tuple[PushedGroup, LayerRun]]

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(
            run.page_bytes * len(run.offsets) * len(run.layers) * len(pages.source)
            for pages, run in self.batches
        )


@dataclass
class Outgoing:
    """A share that is open in the engine, as a transfer of its own."""

    number: int  # the engine's
    opened: float
    target: Target
    held: list[_Pages] = field(default_factory=list)  # of earlier steps, for a later one
    last_signal: int = 0  # the highest value that a layer of it waits for
    step: int | None = None  # the signal base of the last step's pages; None: they were computed already
    step_pages: dict[tuple[int, int], int] = field(default_factory=dict)  # of a signal value and its layer
    layers: set[int] = field(default_factory=set)
    at_prefill_end: TransferProgress | None = None
    done: list[Callable[[], None]] = field(default_factory=list)  # to be called at its end

    def before_end(self, event: Event) -> tuple[int, int, int]:
        """Pages, bytes and layers that had arrived when the prefill ended, by the event of the end.

        Pages arrive in the order of the steps, and about in the order of the layers: what was missing then
        were the last layers of the last step.
        """
        then = self.at_prefill_end
        if then is None:
            return 0, 0, 0
        missing = event.pages - then.pages_done
        late = set()
        for (_, ordinal), pages in sorted(self.step_pages.items(), reverse=True):
            if missing <= 0:
                break
            missing -= pages
            late.add(ordinal)
        return then.pages_done, then.bytes_done, len(self.layers - late)


class Writes:
    """Owned by the agent's thread. Others may look a share up in ``open``, never change it."""

    def __init__(self, engine: TransferPort, signal: Any, regions: Sequence[int], layers: int) -> None:
        """``regions``: the engine's numbers of the memory regions of our layout; none while it is asleep."""
        self.open: dict[Share, Outgoing] = {}
        self.regions = tuple(regions)
        self._engine = engine
        self._signal = signal
        self._positions: Sequence[int] = range(1, layers + 1)  # in the signal's order, by ordinal
        self._ordered_since = 0
        # Signal bases: of the last step in which no prompt ends, and of the last with bytes that wait for its
        # end, so many.
        self._leisurely: int | None = None
        self._burst: tuple[int | None, int] = None, 0
        self._shares: dict[int, Share] = {}  # by the engine's number

    def __len__(self) -> int:
        return len(self._shares)

    def order_layers(self, signal_base: int, ordinals: Sequence[int]) -> None:
        """From the step of ``signal_base`` on the signal counts the layers in this order. Before the pages of
        that step are named."""
        self._ordered_since = signal_base
        self._positions = [ordinals.index(ordinal) + 1 for ordinal in range(len(ordinals))]

    def no_prompt_ends(self, signal_base: int) -> None:
        """In the step of ``signal_base``: nobody waits for its single layers. Before its pages are named."""
        self._leisurely = signal_base

    def push(self, now: float, push: Push, target: Target) -> None:
        """Adds the pages to the share, which the first of them opens. Raises what the engine raises."""
        outgoing = self.open.get(push.share)
        if outgoing is None:
            outgoing = Outgoing(self._engine.open_transfer(target.peer), now, target)
            self.open[push.share] = outgoing
            self._shares[outgoing.number] = push.share
        if outgoing.step is None or outgoing.step != push.signal_base:  # what has no base is a step by itself
            outgoing.step, outgoing.step_pages = push.signal_base, {}
        batches = [
            (pages, run) for pages in push.groups for run in target.plan.runs(*pages.groups, pages.places)
        ]
        pushed = _Pages(push, batches)
        if target.bursts is None or push.signal_base is None:
            self._arm(outgoing, pushed, push.signal_base, at_end=False)
        else:
            most = target.bursts.early_token if push.early_token else target.bursts.most
            self._gather(outgoing, pushed, push.signal_base, most)

    def release(self, share: Share) -> None:
        """What waits for a later step waits no longer. What is not open has ended."""
        if share in self.open:
            self._release(self.open[share])

    def seal(self, share: Share) -> None:
        """Nothing follows. What is not open has ended."""
        self.release(share)
        if share in self.open:
            self._engine.seal(self.open[share].number)

    def cancel(self, share: Share) -> None:
        """Nothing more is to be written. What is not open has ended."""
        if share in self.open:
            self.open[share].held.clear()
            self._engine.cancel(self.open[share].number)

    def of(self, transfer_ids: Collection[str]) -> list[Outgoing]:
        """What is open of these transfers. Any thread may call it."""
        return [outgoing for share, outgoing in list(self.open.items()) if share.transfer_id in transfer_ids]

    def ended(self, number: int) -> tuple[Share, Outgoing] | None:
        """The engine's last word on one of its transfers: which it was, unless it is another's."""
        share = self._shares.pop(number, None)
        if share is None:
            return None
        outgoing = self.open.pop(share)
        for done in outgoing.done:
            done()
        return share, outgoing

    def when_over(self, shares: Sequence[Share], done: Callable[[], None]) -> None:
        """Calls ``done`` once none of these is open: nothing reads their pages any more."""
        waiting = {share for share in shares if share in self.open}

        def ended(share: Share) -> None:
            waiting.remove(share)
            if not waiting:
                done()

        for share in tuple(waiting):
            self.open[share].done.append(functools.partial(ended, share))
        if not waiting:
            done()

    def _release(self, outgoing: Outgoing, signal_base: int | None = None) -> None:
        """What waits goes at the end of that step, or else of its own."""
        held, outgoing.held = outgoing.held, []
        for one in held:
            self._arm(
                outgoing, one, one.push.signal_base if signal_base is None else signal_base, at_end=True
            )

    def _gather(self, outgoing: Outgoing, pushed: _Pages, signal_base: int, most: int) -> None:
        """Arms what is not to wait for a later step, of which at most so many bytes go at once at its end."""
        step, waiting = self._burst
        waiting = pushed.nbytes + (waiting if step == signal_base else 0)
        held = sum(one.nbytes for one in outgoing.held)
        if waiting + held > most:
            self._release(outgoing)
            held = 0
        if signal_base == self._leisurely:
            if pushed.nbytes <= most:
                outgoing.held.append(pushed)
            else:
                self._arm(outgoing, pushed, signal_base, at_end=True)
            return
        at_end = waiting + held <= most
        if at_end:
            self._burst = signal_base, waiting + held
        self._release(outgoing, signal_base)
        self._arm(outgoing, pushed, signal_base, at_end=at_end)

    def _arm(self, outgoing: Outgoing, pushed: _Pages, signal_base: int | None, *, at_end: bool) -> None:
        for pages, run in pushed.batches:
            self._arm_run(outgoing, pushed.push, pages, run, signal_base, at_end)

    def _arm_run(
        self,
        outgoing: Outgoing,
        push: Push,
        pages: PushedGroup,
        run: LayerRun,
        signal_base: int | None,
        at_end: bool,
    ) -> None:
        target = outgoing.target
        signals = [self._signal_value(signal_base, layer.ordinal, at_end) for layer in run.layers]
        armed = [
            ArmedLayer(
                signal_value=signal_value,
                source_offset=layer.source_offset + source_offset,
                target_offset=layer.target_offset + target_offset,
                immediate=push.immediate,
            )
            for layer, signal_value in zip(run.layers, signals, strict=True)
            for source_offset, target_offset in run.offsets
        ]
        write = PagedWrite(
            page_bytes=run.page_bytes,
            source=self.regions[run.source_region],
            source_pages=Pages(pages.source, run.source_stride),
            target=target.regions[run.target_region],
            target_pages=Pages(pages.target, run.target_stride),
        )
        self._engine.arm(outgoing.number, self._signal, write, armed)
        landing = len(pages.source) * len(run.offsets)
        for layer, signal_value in zip(run.layers, signals, strict=True):
            outgoing.layers.add(layer.ordinal)
            when = signal_value, layer.ordinal
            outgoing.step_pages[when] = outgoing.step_pages.get(when, 0) + landing
            outgoing.last_signal = max(outgoing.last_signal, signal_value)

    def _signal_value(self, signal_base: int | None, ordinal: int, at_end: bool) -> int:
        """At which the layer's pages of that step go: they are valid by then. For a step before the last
        change of order, whose signal may still be on its way, that is the step's end; 0, where all signals
        begin, for what is computed already."""
        if signal_base is None:
            return 0
        by_layer = signal_base >= self._ordered_since and not at_end
        return signal_base + (self._positions[ordinal] if by_layer else len(self._positions))
