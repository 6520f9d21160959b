"""Two agents in one process, over real sockets and a real engine, and the calls that their engines would
make."""

from __future__ import annotations

import itertools
import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from protocol_setup import ADVICE, BLOCK, HASH, layout, pairs

from kv_connector.agent.agent import Agent
from kv_connector.agent.config import AgentConfig, PageMemory
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.engine import DomainConfig, EngineConfig
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.protocol.actions import Address
from kv_connector.protocol.pages.layout import GroupTarget, KvLayout
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, GroupPages, PrefillRequest
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import Fingerprint, Role

# Long enough for a machine that is busy with other tests. A failing test still ends.
PATIENCE = 60.0

# A loaded machine outruns none of these. A test that waits for a limit sets it.
TIMES = Timeouts(connect=PATIENCE, suspect=PATIENCE, dead=PATIENCE, ask=PATIENCE, lend=PATIENCE)
# For tests in which one agent falls silent: IMPATIENT for the agent that detects it, LIVELY for the silent
# one.
IMPATIENT = replace(TIMES, heartbeat=0.1, suspect=1.0, dead=2.0)
LIVELY = replace(TIMES, heartbeat=0.1)

_fabric = itertools.count()


def until(condition: Callable[[], object], what: str = "") -> None:
    """Waits until another thread has made the condition true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what or condition}"
        time.sleep(0.002)


@dataclass
class AgentSide:
    """One engine's half: an agent, its pages, and the reports that it has made."""

    agent: Agent
    address: Address
    pages: npt.NDArray[np.uint8] = field(repr=False)  # [layer, block, byte]; a test may unmap it
    layout: KvLayout
    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    signalled: int = 0

    def poll(self) -> None:
        reports = self.agent.take_reports()
        self.sent += sorted(reports.finished_sending)
        self.received += sorted(reports.finished_recving)
        self.failed += sorted(reports.failed_recving)

    def wait(self, *, sent: Sequence[str] = (), received: Sequence[str] = ()) -> None:
        """Waits until these requests are reported, in addition to those reported before."""

        def reported() -> bool:
            self.poll()
            return set(sent) <= set(self.sent) and set(received) <= set(self.received)

        until(reported, f"{sent or received} of {self.sent} and {self.received}")

    def idle(self) -> None:
        """Waits until no request is in flight, and checks that no request was reported twice."""
        until(lambda: self.agent.live().idle, f"{self.agent.live()}")
        self.poll()
        for ids in (self.sent, self.received, self.failed):
            assert len(ids) == len(set(ids)), ids
        assert set(self.failed) <= set(self.received)

    # --- Prefill side

    def expect(self, transfer: str = "t", tokens: int = 3 * BLOCK, prompt_hash: bytes | None = HASH) -> None:
        self.agent.expect(PrefillRequest(f"p-{transfer}", transfer, tokens, prompt_hash))

    def compute(
        self, blocks: Sequence[int], first: int = 0, transfer: str = "t", forward: bool = True
    ) -> None:
        """Runs one step of the engine: names the pages, then computes them layer by layer."""
        base = self.signalled
        self.agent.pages_computed(ComputedPages(transfer, base, (GroupPages(first, tuple(blocks)),)))
        self.signalled += len(self.layout.layers)
        if forward:
            for ordinal in range(len(self.layout.layers)):
                for block in blocks:
                    self.pages[ordinal, block] = content(transfer, ordinal, block)
                if self.agent.timelines.on:
                    self.agent.timelines.signalled(base + ordinal + 1)
                self.agent.signal.store(base + ordinal + 1)

    def compute_first(self, blocks: Sequence[int], first: int = 0, transfer: str = "t") -> None:
        """Runs a step whose pages are named after they are computed, without a signal."""
        for ordinal in range(len(self.layout.layers)):
            for block in blocks:
                self.pages[ordinal, block] = content(transfer, ordinal, block)
        self.agent.pages_computed(ComputedPages(transfer, None, (GroupPages(first, tuple(blocks)),)))

    # --- Decode side

    def reserve(
        self,
        engine: Address,
        blocks: Sequence[int] = (11, 12, 13),
        transfer: str = "t",
        tokens: int = 3 * BLOCK,
        prompt_hash: bytes | None = HASH,
        early_token: bool = False,
    ) -> None:
        groups = (GroupTarget(0, tuple(blocks)),)
        self.agent.reserve(
            DecodeRequest(f"d-{transfer}", transfer, engine, tokens, 0, prompt_hash, groups, early_token)
        )

    def holds(self, transfer: str, source: Sequence[int], target: Sequence[int]) -> bool:
        """Returns whether the prefill engine's pages have arrived in every layer."""
        return all(
            (self.pages[ordinal, mine] == content(transfer, ordinal, theirs)).all()
            for ordinal in range(len(self.layout.layers))
            for theirs, mine in zip(source, target, strict=True)
        )


def content(transfer: str, ordinal: int, block: int) -> npt.NDArray[np.uint8]:
    """Returns the bytes that the prefill engine computes for one page."""
    seed = sum(transfer.encode()) * 1_000_003 + ordinal * 1009 + block
    return np.random.default_rng(seed).integers(0, 256, 64, dtype=np.uint8)


def two_lanes(name: str, allow_fallback: bool = False, address: str = "127.0.0.1") -> TransferEngine:
    """Makes an engine with the default lanes at this address."""
    domains = (DomainConfig("host"), DomainConfig("tcp", address=address))
    return TransferEngine(EngineConfig(name, domains, allow_fallback=allow_fallback))


class AgentStage:
    """Makes agents and closes them at the end of the test."""

    def __init__(self, stack: ExitStack, lane: str) -> None:
        self.lane = lane
        self._stack = stack
        self._fabric = f"agents {next(_fabric)}"

    def engine(self, name: str, max_delay_us: int = 50) -> TransferEngine:
        domain = DomainConfig(self.lane, fabric=self._fabric, max_delay_us=max_delay_us)
        return TransferEngine(EngineConfig(name, (domain,)))

    def side(
        self,
        role: Role,
        name: str = "",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        pages: KvLayout | None = None,
        fingerprint: Fingerprint | None = None,
        checkpoint: Checkpoint | None = None,
        timeouts: Timeouts = TIMES,
        engine: TransferEngine | None = None,
        rank: int = 0,
        ranks: int = 1,
        stage: int = 0,
        key: ClusterKey | None = None,
        timelines: int = 0,
        verify_pages: bool = False,
        allow_fallback: bool = False,
    ) -> AgentSide:
        shape = pages if pages is not None else layout(num_blocks=64 if role is Role.PREFILL else 32)
        dimensions = len(shape.layers), shape.groups[0].num_blocks, shape.layers[0].parts[0].block_stride
        # Separate pages: a test may unmap them.
        memory = np.frombuffer(mmap.mmap(-1, math.prod(dimensions)), np.uint8).reshape(dimensions)
        name = name or role.value
        config = AgentConfig(
            engine_id=name,
            role=role,
            rank=rank,
            ranks=ranks,
            stage=stage,
            address=Address(host, port),
            fingerprint=fingerprint if fingerprint is not None else pairs(),
            checkpoint=checkpoint,
            advice=ADVICE,
            layout=shape,
            timeouts=timeouts,
            key=key,
            timelines=timelines,
            verify_pages=verify_pages,
            allow_fallback=allow_fallback,
        )
        ranges = [PageMemory(memory.ctypes.data, memory.nbytes)]
        agent = Agent(config, ranges, engine if engine is not None else self.engine(name))
        self._stack.callback(agent.close)
        self._stack.callback(lambda: memory)  # outlives the agent
        return AgentSide(agent, agent.start(), memory, shape)

    def pair(self, timeouts: Timeouts = TIMES) -> tuple[AgentSide, AgentSide]:
        """Makes a prefill and a decode engine."""
        return self.side(Role.PREFILL, timeouts=timeouts), self.side(Role.DECODE, timeouts=timeouts)


def acquaint(sides: Sequence[AgentSide]) -> None:
    """Tells the agents that they are the workers of one engine, by rank."""
    ranks = [side.agent.described(side.address) for side in sides]
    for side in sides:
        side.agent.set_ranks(ranks)
    until(lambda: not any(side.agent.live().commands for side in sides))


@contextmanager
def stage(lane: str) -> Iterator[AgentStage]:
    with ExitStack() as stack:
        yield AgentStage(stack, lane)
