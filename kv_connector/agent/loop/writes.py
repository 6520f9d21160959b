"""The shares that are open in the transfer engine: which pages are armed, and what waits for their end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_connector.agent.interfaces import TransferPort
from kv_connector.engine import ArmedLayer, Event, PagedWrite, Pages, TransferProgress
from kv_connector.protocol.actions import Push, PushedGroup, Share
from kv_connector.protocol.plans.plan import LayerRun, Plan


@dataclass(frozen=True)
class Bursts:
    """Limits for sending the pages of a prompt in bursts, in bytes.

    Up to this many bytes of a prompt wait for its end and are then sent at once. With more bytes, the pages
    of earlier steps are sent during the prefill, in parts of this size. The last step is sent layer by layer
    if its pages alone exceed the limit.
    """

    most: int
    early_token: int
    """The limit if the client gets its first token from P. The burst delays the second token."""


# Limits by lane. NVLink takes power from the prefill: 2 to 3 % of its speed for 50 ms after each write, which
# is 7 ms of 8,192 tokens of an 8B model. A write of 320 MiB takes 1 ms. With 2 GiB, the pages of twice those
# tokens, it takes 6.5 ms. That is 1.4 % of the time to compute them.
BURSTS = {"nvlink": Bursts(320 << 20, early_token=2 << 30)}


@dataclass(frozen=True)
class WriteTarget:
    """The place of a peer's pages, in the transfer engine's numbers."""

    peer: int  # the transfer engine's number
    regions: tuple[int, ...]  # the peer's memory, imported
    plan: Plan
    bursts: Bursts | None  # None: pages are sent layer by layer


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
    """A share that is open in the transfer engine, as one native transfer."""

    number: int  # the transfer engine's number
    opened: float
    target: WriteTarget
    held: list[_Pages] = field(default_factory=list)  # pages of earlier steps that wait for a later one
    last_signal: int = 0  # the highest signal value that a layer of the share waits for
    step: int | None = None  # the signal base of the last step's pages; None: they were computed already
    # number of pages, by signal value and layer
    step_pages: dict[tuple[int, int], int] = field(default_factory=dict)
    layers: set[int] = field(default_factory=set)
    at_prefill_end: TransferProgress | None = None
    done: list[Callable[[], None]] = field(default_factory=list)  # called at the share's end

    def before_end(self, event: Event) -> tuple[int, int, int]:
        """Pages, bytes and layers that had arrived when the prefill ended, computed from the final event.

        Pages arrive in the order of the steps, and roughly in the order of the layers. So the missing pages
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
    """All open shares of one agent. Owned by the agent's thread. Other threads may look a share up in
    ``open``, never change it."""

    def __init__(self, engine: TransferPort, signal: Any, regions: Sequence[int], layers: int) -> None:
        """``regions``: the transfer engine's ids of the layout's memory regions. Empty while the engine is
        asleep."""
        self.open: dict[Share, Outgoing] = {}
        self.regions = tuple(regions)
        self._engine = engine
        self._signal = signal
        # position of each layer in the signal's order, by ordinal
        self._positions: Sequence[int] = range(1, layers + 1)
        self._ordered_since = 0
        # Signal bases of two steps: the last one in which no prompt ends, and the last one with bytes that
        # wait for its end. The number of these bytes stands beside it.
        self._leisurely: int | None = None
        self._burst: tuple[int | None, int] = None, 0
        self._shares: dict[int, Share] = {}  # by the transfer engine's number

    def __len__(self) -> int:
        return len(self._shares)

    def order_layers(self, signal_base: int, ordinals: Sequence[int]) -> None:
        """Sets the order in which the signal counts the layers, from the step of ``signal_base`` on. Call it
        before the pages of that step are named."""
        self._ordered_since = signal_base
        self._positions = [ordinals.index(ordinal) + 1 for ordinal in range(len(ordinals))]

    def no_prompt_ends(self, signal_base: int) -> None:
        """No prompt ends in the step of ``signal_base``, so its single layers are not urgent. Call it before
        its pages are named."""
        self._leisurely = signal_base

    def push(self, now: float, push: Push, target: WriteTarget) -> None:
        """Adds the pages to the share. The first push opens the share. Raises TransferError."""
        outgoing = self.open.get(push.share)
        if outgoing is None:
            outgoing = Outgoing(self._engine.open_transfer(target.peer), now, target)
            self.open[push.share] = outgoing
            self._shares[outgoing.number] = push.share
        # pages without a base are a step by themselves
        if outgoing.step is None or outgoing.step != push.signal_base:
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
        """Sends pages that wait for a later step. Does nothing if the share has ended."""
        if share in self.open:
            self._release(self.open[share])

    def seal(self, share: Share) -> None:
        """No pages follow. Does nothing if the share has ended."""
        self.release(share)
        if share in self.open:
            self._engine.seal(self.open[share].number)

    def cancel(self, share: Share) -> None:
        """Writes nothing more of the share. Does nothing if it has ended."""
        if share in self.open:
            self.open[share].held.clear()
            self._engine.cancel(self.open[share].number)

    def of(self, transfer_ids: Collection[str]) -> list[Outgoing]:
        """The open shares of these transfers. Any thread may call it."""
        return [outgoing for share, outgoing in list(self.open.items()) if share.transfer_id in transfer_ids]

    def ended(self, number: int) -> tuple[Share, Outgoing] | None:
        """Removes the share of a native transfer that has ended. Returns None if the transfer belongs to no
        share."""
        share = self._shares.pop(number, None)
        if share is None:
            return None
        outgoing = self.open.pop(share)
        for done in outgoing.done:
            done()
        return share, outgoing

    def when_over(self, shares: Sequence[Share], done: Callable[[], None]) -> None:
        """Calls ``done`` once none of these shares is open, so that nothing reads their pages any more."""
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
        """Arms the waiting pages for the end of that step, or else of their own step."""
        held, outgoing.held = outgoing.held, []
        for one in held:
            self._arm(
                outgoing, one, one.push.signal_base if signal_base is None else signal_base, at_end=True
            )

    def _gather(self, outgoing: Outgoing, pushed: _Pages, signal_base: int, most: int) -> None:
        """Arms the pages that must not wait for a later step. At most ``most`` bytes are sent at once at its
        end."""
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
        """The signal value at which the layer's pages of that step are valid and can be sent.

        For a step before the last change of order, whose signal may still be on its way, it is the step's
        end. For pages that are computed already it is 0, where all signals begin.
        """
        if signal_base is None:
            return 0
        by_layer = signal_base >= self._ordered_since and not at_end
        return signal_base + (self._positions[ordinal] if by_layer else len(self._positions))
