"""The time that two engines of many ranks take to connect, from decode's first request until each of its
ranks has its page. Every rank is a process with the agent of a running engine."""

from __future__ import annotations

import mmap
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from rich.console import Console

from kv_connector.agent.agent import Agent
from kv_connector.agent.config import AgentConfig, PageMemory
from kv_connector.bench.measurement import Measurement
from kv_connector.bench.records import FirstRequest
from kv_connector.bench.tables import print_table
from kv_connector.protocol.actions import Address, State
from kv_connector.protocol.pages.geometry import Place, head_major, units_of_rank
from kv_connector.protocol.pages.layout import GroupLayout, GroupTarget, KvLayout, LayerLayout
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, GroupPages, PrefillRequest
from kv_connector.protocol.wire.messages import Role, fingerprint

# Layers of a large model: the messages in which ranks describe their pages grow with the layers.
LAYERS = 64
KV_HEADS = 8
_TOKENS = 16  # tokens of a block
_CONTENT = 512  # bytes per token and head
_BLOCKS = 2
_HOST = "127.0.0.1"
_PATIENCE_S = 60.0
# Seconds until all ranks have received the start time.
_NOTICE_S = 0.3
_LOOK_S = 0.0005


@dataclass(kw_only=True)
class Meetings(Measurement[str, FirstRequest]):
    """Measures how engines of many ranks connect over one lane."""

    provider: str
    prefill: int
    decode: int

    def contestants(self, console: Console) -> Sequence[str]:
        return [self.provider]

    def label(self, contestant: str) -> str:
        return contestant

    def settings(self) -> dict[str, str]:
        return {
            "lane": self.provider,
            "ranks": f"{self.prefill} of prefill, {self.decode} of decode, a process each",
            "model": f"{LAYERS} layers, {KV_HEADS} KV heads",
            "rounds": str(self.rounds),
        }

    def measure(self, number: int, contestant: str, console: Console) -> Iterator[FirstRequest]:
        seconds = _measure(contestant, self.prefill, self.decode)
        yield FirstRequest(round=number, lane=contestant, prefill_ranks=self.prefill, seconds=seconds)

    def show(self, console: Console, contestants: Sequence[str], records: Sequence[FirstRequest]) -> None:
        rows = [
            [str(one.round), *(f"{what(one.seconds) * 1e3:.1f}" for what in (min, max))] for one in records
        ]
        rows.append(["median", "", f"{statistics.median(max(one.seconds) for one in records) * 1e3:.1f}"])
        header = ["round", "the first rank, ms", "all ranks, ms"]
        print_table(console, "Time from the decode engine's first request to each rank's page", header, rows)


def _measure(provider: str, prefill_ranks: int, decode_ranks: int) -> list[float]:
    """Returns the seconds by rank of decode. Both engines are new and not connected to any peer."""
    with (
        _engine(Role.PREFILL, prefill_ranks, provider) as (prefill, first),
        _engine(Role.DECODE, decode_ranks, provider) as (decode, _),
    ):
        for rank in prefill:
            rank.send(None)
            _heard(rank)
        begin = time.monotonic() + _NOTICE_S
        for rank in decode:
            rank.send((begin, first))
        seconds = [_heard(rank) for rank in decode]
        assert None not in seconds, "a rank did not get its page"
        return seconds


@contextmanager
def _engine(role: Role, ranks: int, provider: str) -> Iterator[tuple[list[Connection], Address]]:
    """Starts the ranks of an engine, which all know each other.

    Yields the pipe to each rank, and the first rank's address.
    """
    context = multiprocessing.get_context("spawn")
    ways: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, role, rank, ranks, provider))
            process.start()
            processes.append(process)
            theirs.close()
            ways.append(ours)
        known = [_heard(way) for way in ways]
        for way in ways:
            way.send(known)
        yield ways, Address(known[0].host, known[0].port)
    finally:
        for way in ways:
            way.close()
        for started in processes:
            started.join(_PATIENCE_S)


def _heard(way: Connection) -> Any:
    if not way.poll(_PATIENCE_S):
        raise RuntimeError(f"a rank sent no result for {_PATIENCE_S:.0f} s")
    return way.recv()


def _rank(way: Connection, role: Role, rank: int, ranks: int, provider: str) -> None:
    """Runs one rank in its own process, until the other end of ``way`` is closed."""
    layout = _layout(rank, ranks)
    memory = np.frombuffer(mmap.mmap(-1, layout.bytes_per_region()[0]), np.uint8)
    config = AgentConfig(
        engine_id=role.value,
        role=role,
        rank=rank,
        ranks=ranks,
        address=Address(_HOST, 0),
        fingerprint=fingerprint({"model": "none"}),
        layout=layout,
        providers=(provider,),
    )
    agent = Agent(config, [PageMemory(memory.ctypes.data, memory.nbytes)])
    try:
        way.send(agent.described(agent.start()))
        agent.set_ranks(way.recv())
        told = way.recv()
        if role is Role.PREFILL:
            agent.expect(PrefillRequest("p", "t", _TOKENS, None))
            agent.pages_computed(ComputedPages("t", None, (GroupPages(0, (1,)),)))
            agent.request_finished("t", ok=True)
            way.send(None)
        else:
            way.send(_seconds(agent, *told))
        way.poll(None)
    except EOFError:
        pass
    finally:
        agent.close()


def _seconds(agent: Agent, begin: float, prefill: Address) -> float | None:
    """Returns the seconds from ``begin`` until the page is here; None if it did not arrive."""
    time.sleep(max(0.0, begin - time.monotonic()))
    agent.reserve(DecodeRequest("d", "t", prefill, _TOKENS, 0, None, (GroupTarget(0, (1,)),)))
    while (state := agent.state("d")) is not State.DONE:
        if state is State.FAILED or time.monotonic() > begin + _PATIENCE_S:
            return None
        time.sleep(_LOOK_S)
    return time.monotonic() - begin


def _layout(rank: int, ranks: int) -> KvLayout:
    units = units_of_rank(KV_HEADS, rank, ranks)
    page = units.count * _TOKENS * _CONTENT
    layers = [
        LayerLayout(
            f"model.layers.{layer}.self_attn.attn",
            0,
            "bfloat16",
            head_major(Place(0, layer * _BLOCKS * page, page), units, _TOKENS, _CONTENT),
        )
        for layer in range(LAYERS)
    ]
    return KvLayout((GroupLayout(_BLOCKS, _TOKENS, "full"),), tuple(layers))
