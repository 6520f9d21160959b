"""The data fabric and each engine's end of it in virtual time, with the interface TransferEngine of
kv_connector.agent.interfaces.

It guarantees what the contract of the data plane guarantees (docs/architecture.md) and nothing more.
Operations overtake each other. A page is read some time before it lands. A failed write may land long after
its sender has the failure, until the receiver's fence is through.

The native engine with its `sim` provider is no substitute: it runs on a thread in real time. No seed could
decide an order there, and no hour could pass in a millisecond. tests/conformance checks that the native
engine keeps the contract.
"""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kv_connector.engine import (
    ArmedLayer,
    CounterSet,
    EngineStats,
    ErrorCode,
    Event,
    EventKind,
    Handshake,
    LostLink,
    PagedWrite,
    TransferError,
    TransferProgress,
)

from .pool import Content
from .shape import CELL

if TYPE_CHECKING:
    from .actor import Actor
    from .process import Process


# A simulated link has one NIC, so no link is lost while its peer has others.
_NO_STATS = EngineStats(*[0] * 16)


class Phase(enum.Enum):
    ARMED = enum.auto()  # waits for its layer's signal
    POSTED = enum.auto()  # the source is not read yet
    READ = enum.auto()  # in flight: the sender's memory no longer matters
    LANDED = enum.auto()
    GONE = enum.auto()  # will never land


@dataclass(eq=False)
class Batch:
    """Pages of one layer that are sent together."""

    transfer: Transfer
    pages: int
    cells: tuple[tuple[int, int], ...]  # cell of the sender's memory, and of the receiver's
    signal: int
    immediate: int
    phase: Phase = Phase.ARMED
    told: bool = False  # its sender has the completion
    detour: bool = False  # its link broke: it lands once uncounted, and is written again
    contents: tuple[Content, ...] = ()


@dataclass(eq=False)
class Transfer:
    number: int
    link: Link
    engine: SimEngine
    batches: list[Batch] = field(default_factory=list)  # whose completion the sender does not have
    sealed: bool = False
    stopped: EventKind | None = None
    reason: str = ""
    late: bool = False  # a page may land after the end
    pages: int = 0
    ended: bool = False

    def stop(self, how: EventKind, reason: str) -> None:
        """Stops posting."""
        if self.stopped is None and not self.ended:
            self.stopped, self.reason = how, reason
        for batch in [b for b in self.batches if b.phase is Phase.ARMED]:
            self.engine.forget(batch)
        self.maybe_end()

    def maybe_end(self) -> None:
        """Reports the final event once nothing is in flight on this side."""
        if self.ended or self.batches or not (self.stopped or self.sealed):
            return
        self.ended = True
        kind = self.stopped or EventKind.TRANSFER_DONE
        error = None
        if kind is EventKind.TRANSFER_FAILED:
            error = TransferError(ErrorCode.PEER_DOWN, "sim", "", "write", self.reason)
        self.engine.over(self, Event(kind, self.number, not self.late, self.pages, 0, error))


class Link:
    """The connection of two engines, with all their NICs."""

    def __init__(self, rng: random.Random, offerer: SimEngine, acceptor: SimEngine) -> None:
        self.rng = rng
        self.engines = (offerer, acceptor)
        self.numbers: dict[SimEngine, int] = {}
        self.fence_through: dict[SimEngine, float] = {}  # earliest end of each fence that has begun
        self.fenced: set[SimEngine] = set()  # engines where nothing can land any more
        self.live: dict[Batch, None] = {}  # batches that may still be posted, read or land
        self.transfers: dict[Transfer, None] = {}

    def other(self, engine: SimEngine) -> SimEngine:
        first, second = self.engines
        return second if engine is first else first


@dataclass(eq=False)
class _Counters:
    values: list[int]
    raisers: Sequence[int]  # peers
    targets: Sequence[int] | None = None
    reached: bool = False


class SimSignal:
    """The simulated LayerSignal."""

    def __init__(self, engine: SimEngine) -> None:
        self.value = 0
        self._engine = engine

    def store(self, value: int) -> None:
        self.value = value
        self._engine.post_due()


class SimEngine:
    """The TransferEngine of one process. It raises the errors that the native engine raises."""

    slow_fences = 0.1  # share of fences that take seconds

    def __init__(self, process: Actor, rng: random.Random) -> None:
        self.process = process
        self.signal = SimSignal(self)
        # Faults, as budgets: the number of next operations that fail.
        self.write_errors = 0
        self.stuck_writes = 0
        self.refusals = 0
        self.no_handshakes = 0
        self.no_counters = 0
        self._clock = process.world.clock
        self._books = process.world.books
        self._rng = rng
        self._last = 0
        self._peers: dict[int, Link | None] = {}  # None: offered, not answered yet
        self.links: dict[Link, None] = {}  # links over which pages could land or be read here
        self._transfers: dict[int, Transfer] = {}
        self._armed: list[Batch] = []
        self._sets: dict[int, _Counters] = {}
        self._immediates: dict[int, tuple[_Counters, int, int]] = {}
        self._events: list[Event] = []
        self._frozen: list[Callable[[], None]] = []  # work that the stopped process would do

    @property
    def _kv(self) -> Process:
        """The process in a world of KV. The engine of a world of weights overrides all users of it."""
        return cast("Process", self.process)

    # --- Called by effects.py

    def offer(self, name: str, without: Sequence[str] = ()) -> Handshake:
        self._refuse("offer", "no_handshakes")
        self._peers[number := self._number()] = None
        return Handshake(number, self.process.world.fabric.offer(self, number))

    def accept(self, name: str, offer: bytes) -> Handshake:
        offerer, its_number = self.process.world.fabric.offers[offer]
        if offerer.process.dead or its_number not in offerer._peers:
            raise failure(ErrorCode.NOT_REACHABLE, "accept", "nobody listens there any more")
        self._refuse("accept", "no_handshakes")
        link = Link(random.Random(f"{self._rng.random()}"), offerer, self)
        link.numbers = {offerer: its_number, self: (number := self._number())}
        self._peers[number] = link
        self.links[link] = offerer.links[link] = None
        return Handshake(number, self.process.world.fabric.answer(link))

    def complete(self, peer: int, answer: bytes) -> None:
        link = self.process.world.fabric.answers[answer]
        other = link.other(self)
        if other.process.dead or other in link.fence_through:
            # It stays an offer: fence() forgets it.
            raise failure(ErrorCode.PEER_DOWN, "complete", "the peer answered, but its connection is gone")
        self._peers[peer] = link

    def import_region(self, peer: int, descriptor: bytes) -> int:
        self._refuse("import_region", "no_handshakes")
        return 1

    def lane(self, peer: int) -> str:
        return "sim"

    def fence(self, peer: int, timeout: float) -> None:
        if peer not in self._peers:
            raise failure(ErrorCode.UNKNOWN_PEER, "fence", "never connected, or fenced")
        links = [link for link in self.links if link.numbers[self] == peer]
        through = [self._fence(link) for link in links]  # queried for each link, without a short circuit
        if not all(through):
            raise failure(ErrorCode.TIMEOUT, "fence", "a write of this peer may still land here: call again")
        for link in links:
            del self.links[link]
        del self._peers[peer]

    def open_transfer(self, peer: int) -> int:
        link = self._peers[peer]
        self._refuse("open_transfer")
        if link is None or self in link.fence_through:
            raise failure(ErrorCode.UNKNOWN_PEER, "open_transfer", "the link to this peer broke")
        transfer = Transfer(self._number(), link, self)
        self._transfers[transfer.number] = link.transfers[transfer] = transfer  # type: ignore[assignment]
        return transfer.number

    def arm(self, number: int, signal: SimSignal, write: PagedWrite, layers: Sequence[ArmedLayer]) -> None:
        transfer = self._open(number, "arm")
        self._refuse("arm")
        if transfer.stopped:
            raise failure(ErrorCode.PEER_DOWN, "arm", f"the transfer has ended: {transfer.reason}")
        due: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for layer in layers:
            pages = due.setdefault((layer.signal_value, layer.immediate), [])
            for source, target in zip(write.source_pages.indices, write.target_pages.indices, strict=True):
                start = source * write.source_pages.stride + layer.source_offset
                pages.append((start, target * write.target_pages.stride + layer.target_offset))
        for (signal_value, immediate), pages in due.items():
            self._rng.shuffle(pages)
            cut = self._rng.randint(0, len(pages))
            for part in (pages[:cut], pages[cut:]):
                if part:
                    cells = tuple(_cells(part, write.page_bytes))
                    batch = Batch(transfer, len(part), cells, signal_value, immediate)
                    transfer.batches.append(batch)
                    transfer.link.live[batch] = None
                    self._armed.append(batch)
        self.post_due()

    def seal(self, number: int) -> None:
        transfer = self._open(number, "seal")
        transfer.sealed = True
        transfer.maybe_end()

    def cancel(self, number: int) -> None:
        self._open(number, "cancel").stop(EventKind.TRANSFER_CANCELLED, "cancelled")

    def alloc_counters(self, count: int, raisers: Sequence[int]) -> CounterSet:
        if self.no_counters:
            self.no_counters -= 1
            raise failure(ErrorCode.RESOURCES, "alloc_counters", "all counters are in use")
        counters = self._sets[number := self._number()] = _Counters([0] * count, raisers)
        immediates = tuple(self.process.world.fabric.immediate() for _ in range(count))
        self._immediates |= {imm: (counters, number, i) for i, imm in enumerate(immediates)}
        return CounterSet(number, immediates)

    def expect(self, number: int, targets: Sequence[int]) -> None:
        self._sets[number].targets = targets
        self._maybe_reached(number)

    def release_counters(self, number: int) -> None:
        counters = self._sets.pop(number)
        self._immediates = {k: v for k, v in self._immediates.items() if v[0] is not counters}

    def counter_values(self, number: int) -> list[int]:
        return list(self._sets[number].values)

    def progress(self, number: int) -> TransferProgress:
        pages = self._open(number, "progress").pages
        return TransferProgress(pages, 0, pages, 0)

    def poll_events(self, limit: int) -> list[Event]:
        events, self._events = self._events[:limit], self._events[limit:]
        return events

    def stats(self) -> EngineStats:
        return _NO_STATS

    def lost_links(self) -> list[LostLink]:
        return []

    # --- Queries of the engine process's model

    def quiet(self, number: int) -> bool:
        """Stands in for quiesce(). Returns whether all writes whose signal has passed have completed."""
        transfer = self._transfers.get(number)
        return transfer is None or all(batch.phase is Phase.ARMED for batch in transfer.batches)

    def leftovers(self) -> dict[str, int]:
        """Returns counts that are 0 in an engine at rest, and its peers."""
        return {
            "transfers": len(self._transfers),
            "counter sets": len(self._sets),
            "immediates": len(self._immediates),
            "armed batches": len(self._armed),
            "events": len(self._events),
            "peers": len(self._peers),
        }

    def reading(self, blocks: set[int]) -> bool:
        """Returns whether an operation may still read these blocks of this process's memory."""
        block_of = self._kv.worker.block_of
        return any(
            block_of.get(source) in blocks
            for link in self.links
            for batch in link.live
            if batch.transfer.engine is self and batch.phase in (Phase.ARMED, Phase.POSTED)
            for source, _ in batch.cells
        )

    def awaiting(self, blocks: set[int]) -> bool:
        """Returns whether a page may still land in these blocks of this process's memory."""
        block_of = self._kv.worker.block_of
        return any(
            block_of.get(target) in blocks
            for link in self.links
            for batch in link.live
            if batch.transfer.engine is not self
            for _, target in batch.cells
        )

    def may_write(self, link: Link) -> bool:
        """Returns whether this end has the link and has not given it up."""
        has = self._peers.get(link.numbers[self]) is link
        return has and not self.process.dead and self not in link.fence_through

    # --- Faults

    def die(self) -> None:
        """Ends the process. Pages that were read may still be in flight."""
        for link in list(self.links):
            for batch in [b for b in link.live if b.transfer.engine is self]:
                if batch.phase is not Phase.READ or link.rng.random() < 0.5:
                    self.forget(batch)
            other = link.other(self)
            if self.process.vanished:
                continue
            broken = functools.partial(other.broken, link, "its process is gone")
            self._clock.after(link.rng.uniform(0.001, 0.2), broken)

    def thaw(self) -> None:
        """Continues the process after SIGSTOP."""
        frozen, self._frozen = self._frozen, []
        for step in frozen:
            step()
        self.post_due()

    def when_thawed(self, step: Callable[[], None]) -> None:
        """Leaves a step of the stopped process for the time at which it continues."""
        self._frozen.append(step)

    def broken(self, link: Link, reason: str) -> None:
        """Breaks the link: no NIC reaches that peer any more."""
        if link not in self.links or self.process.dead or self in link.fence_through:
            return
        if self.process.stopped:
            self._frozen.append(lambda: self.broken(link, reason))
            return
        number = link.numbers[self]
        if self._peers[number] is None:
            return  # not connected yet: complete() will raise
        self._fail_all(link, reason)
        down = failure(ErrorCode.PEER_DOWN, "write", reason)
        self._report(Event(EventKind.PEER_DOWN, number, False, 0, 0, down))

    def fail_over(self, link: Link) -> None:
        """Breaks one NIC of several. Its batches are written once more and counted exactly once."""
        for batch in link.live:
            if batch.transfer.engine is self and batch.phase in (Phase.POSTED, Phase.READ):
                batch.detour = link.rng.random() < 0.7

    # --- The life of a batch

    def post_due(self) -> None:
        if self.process.stopped or self.process.dead:
            return
        due = [batch for batch in self._armed if batch.signal <= self.signal.value]
        if not due:
            return
        self._armed = [batch for batch in self._armed if batch.signal > self.signal.value]
        for batch in due:
            batch.phase = Phase.POSTED
            delay = batch.transfer.link.rng.uniform(0, self.process.world.scenario.wire)
            if self.stuck_writes:
                self.stuck_writes -= 1
                delay += batch.transfer.link.rng.uniform(0, 10.0)
            self._clock.after(delay, functools.partial(self._read, batch))
            if self.write_errors:
                self.write_errors -= 1
                # The failure comes before the read, or after it. In the second case the batch may still land.
                delay += batch.transfer.link.rng.uniform(-0.5, 2) * self.process.world.scenario.wire
                failed = functools.partial(self._failed, batch, "the NIC reports an error")
                self._clock.after(max(delay, 0.0), failed)

    def forget(self, batch: Batch) -> None:
        """Drops a batch that will never land and whose sender needs no completion."""
        batch.phase = Phase.GONE
        batch.transfer.link.live.pop(batch, None)
        if batch in self._armed:
            self._armed.remove(batch)
        if batch in batch.transfer.batches:
            batch.transfer.batches.remove(batch)

    def over(self, transfer: Transfer, event: Event) -> None:
        del self._transfers[transfer.number]
        transfer.link.transfers.pop(transfer, None)
        self._report(event)

    def _read(self, batch: Batch) -> None:
        if batch.phase is not Phase.POSTED:
            return
        if self.process.stopped:
            self._frozen.append(lambda: self._read(batch))
            return
        batch.contents = self._contents(batch)
        batch.phase = Phase.READ
        delay = batch.transfer.link.rng.uniform(0, 2 * self.process.world.scenario.wire)
        self._clock.after(delay, lambda: self._land(batch))

    def _contents(self, batch: Batch) -> tuple[Content, ...]:
        block_of, content = self._kv.worker.block_of, self._kv.pool.content
        blocks = [block_of.get(source, -1) for source, _ in batch.cells]
        if not all(content.get(block) for block in blocks):
            self._books.fail(f"{self.process} reads from blocks {set(blocks)}, one of which holds nothing")
        return tuple(
            content[block].get(source) for block, (source, _) in zip(blocks, batch.cells, strict=True)
        )

    def _land(self, batch: Batch) -> None:
        if batch.phase is not Phase.READ:
            return
        link, receiver = batch.transfer.link, batch.transfer.link.other(self)
        if receiver in link.fenced or (receiver.process.dead and not receiver.process.vanished):
            link.live.pop(batch, None)
            batch.phase = Phase.GONE
            self._failed(batch, "the peer cut the link")
            return
        if receiver.process.dead:
            return  # the page is lost: only a fence ends the batch
        heals = self.process.world.heals(self.process.name, receiver.process.name)
        if heals is not None:
            self._clock.at(heals + link.rng.uniform(0, 0.1), lambda: self._land(batch))
            return
        if receiver.process.stopped and link.rng.random() < 0.5:  # its worker would have to read the socket
            receiver._frozen.append(lambda: self._land(batch))
            return
        receiver._take(batch)
        if batch.detour:
            batch.detour = False
            batch.phase = Phase.READ if batch.told else Phase.POSTED
            again = self._land if batch.told else self._read
            self._clock.after(link.rng.expovariate(20.0), lambda: again(batch))
            return
        batch.phase = Phase.LANDED
        link.live.pop(batch, None)
        receiver._count(batch)
        self._clock.after(link.rng.expovariate(200.0), lambda: self._completed(batch))

    def _take(self, batch: Batch) -> None:
        block_of, pool = self._kv.worker.block_of, self._kv.pool
        for (_, target), content in zip(batch.cells, batch.contents, strict=True):
            block = block_of.get(target, -1)
            awaited = pool.awaited.get(block, {})
            if target not in awaited:
                self._books.fail(f"{content} lands in block {block} of {self.process}, which awaits nothing")
            if awaited[target] != content:
                where = f"block {block} of {self.process}, where {awaited[target]} is awaited"
                self._books.fail(f"{content} lands in {where}")
            pool.content[block][target] = content

    def _count(self, batch: Batch) -> None:
        found = self._immediates.get(batch.immediate)
        if found is None:
            self._stray(batch)
            return
        counters, number, index = found
        foreign = batch.transfer.link.numbers[self] not in counters.raisers
        self._books.check(not foreign, "%s counts a page of the wrong peer", self.process)
        counters.values[index] += batch.pages
        self._counted(batch)
        if counters.targets is not None:
            too_many = counters.values[index] > counters.targets[index]
            self._books.check(not too_many, "%s counts a page too many", self.process)
        self._maybe_reached(number)

    def _counted(self, batch: Batch) -> None:
        for _, target in batch.cells:
            awaited = self._kv.pool.awaited[self._kv.worker.block_of[target]]
            self._books.check(target in awaited, "%s counts cell %d twice", self.process, target)
            awaited.pop(target, None)

    def _stray(self, batch: Batch) -> None:
        self._books.fail(f"{self.process} counts a page on counters that it has freed")

    def _maybe_reached(self, number: int) -> None:
        counters = self._sets[number]
        if counters.targets is None or counters.reached or list(counters.targets) != counters.values:
            return
        counters.reached = True
        self._report(Event(EventKind.COUNTERS_REACHED, number, True, 0, 0, None))

    def _completed(self, batch: Batch) -> None:
        if batch.told or self.process.dead:
            return
        if self.process.stopped:
            self._frozen.append(lambda: self._completed(batch))
            return
        batch.told = True
        batch.transfer.pages += batch.pages
        batch.transfer.batches.remove(batch)
        batch.transfer.maybe_end()

    def _failed(self, batch: Batch, reason: str) -> None:
        """Reports the failure to the sender. A batch that was read may still land."""
        if batch.told or self.process.dead or batch not in batch.transfer.batches:
            return
        if self.process.stopped:
            self._frozen.append(lambda: self._failed(batch, reason))
            return
        batch.told = True
        if batch.phase is Phase.READ:
            batch.transfer.late = True
        elif batch.phase is Phase.POSTED:
            batch.phase = Phase.GONE
            batch.transfer.link.live.pop(batch, None)
        batch.transfer.batches.remove(batch)
        batch.transfer.stop(EventKind.TRANSFER_FAILED, reason)

    def _fail_all(self, link: Link, reason: str) -> None:
        for transfer in [t for t in link.transfers if t.engine is self]:
            for batch in [b for b in transfer.batches if b.phase is not Phase.ARMED]:
                self._failed(batch, reason)
            transfer.stop(EventKind.TRANSFER_FAILED, reason)

    # --- Fencing

    def _fence(self, link: Link) -> bool:
        other = link.other(self)
        if self not in link.fence_through:
            slow = link.rng.random() < self.slow_fences
            link.fence_through[self] = self._clock.now + (
                link.rng.uniform(0, 3.0) if slow else link.rng.expovariate(100.0)
            )
            self._fail_all(link, "this peer was fenced here")
            if not self.process.world.scenario.lease:
                notice = link.rng.expovariate(50.0)
                heals = self.process.world.heals(self.process.name, other.process.name)
                when = notice + (self._clock.now if heals is None else heals)
                self._clock.at(when, lambda: other.broken(link, "the peer closed the connection"))
        if self._clock.now < link.fence_through[self]:
            return False
        if self.process.world.scenario.lease and other.may_write(link):
            return False
        # A peer that was stopped during a copy into shared memory cannot be fenced until it has ended.
        incoming = [b for b in link.live if b.transfer.engine is other]
        if other.process.stopped and link.rng.random() < 0.5 and any(b.phase is Phase.READ for b in incoming):
            return False
        link.fenced.add(self)
        for batch in incoming:
            link.live.pop(batch, None)
        return True

    # --- Steps

    def _number(self) -> int:
        self._last += 1
        return self._last

    def _open(self, number: int, operation: str) -> Transfer:
        transfer = self._transfers.get(number)
        if transfer is None:
            raise failure(ErrorCode.INVALID_ARGUMENT, operation, f"transfer {number} has ended")
        return transfer

    def _refuse(self, operation: str, budget: str = "refusals") -> None:
        left = getattr(self, budget)
        if left and self._rng.random() < 0.7:  # a refusal may come in the middle of an operation
            setattr(self, budget, left - 1)
            raise failure(ErrorCode.RESOURCES, operation, "no room for another request")

    def _report(self, event: Event) -> None:
        self._events.append(event)
        self.process.wake(self._rng.expovariate(1000.0))


class Fabric:
    """Handshakes in transit between engines."""

    def __init__(self) -> None:
        self.offers: dict[bytes, tuple[SimEngine, int]] = {}
        self.answers: dict[bytes, Link] = {}
        self._last_immediate = 0

    def offer(self, engine: SimEngine, number: int) -> bytes:
        data = b"offer %d" % len(self.offers)
        self.offers[data] = (engine, number)
        return data

    def answer(self, link: Link) -> bytes:
        data = b"answer %d" % len(self.answers)
        self.answers[data] = link
        return data

    def immediate(self) -> int:
        """Returns an immediate that was never used. The engine itself must not credit an old generation."""
        self._last_immediate += 1
        return self._last_immediate


def _cells(pages: Sequence[tuple[int, int]], page_bytes: int) -> Iterator[tuple[int, int]]:
    for source, target in pages:
        for offset in range(0, page_bytes, CELL):
            yield (source + offset) // CELL, (target + offset) // CELL


def failure(code: ErrorCode, operation: str, text: str) -> TransferError:
    return TransferError(code, "sim", "", operation, text)
