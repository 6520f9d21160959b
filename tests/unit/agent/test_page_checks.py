"""Agents that verify pages: equal pages pass, a flipped bit is found and named, and pages that cannot be
verified are reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import msgspec
import numpy as np
import pytest
from agent_pairs import SOURCE, TARGET, every_lane, transfer, transfer_again
from agent_setup import PATIENCE, TIMES, AgentSide, AgentStage, acquaint, until
from protocol_setup import BLOCK, PAGE, layout

from kv_connector.agent.config import AgentError, PageMemory
from kv_connector.agent.loop.page_summer import PageSummer, Summed
from kv_connector.agent.reports.ledger import CheckStats
from kv_connector.protocol.actions import Outcome, SummedPages
from kv_connector.protocol.page_sums import SUM_BYTES
from kv_connector.protocol.pages.geometry import Place, head_major, units_of_rank
from kv_connector.protocol.pages.layout import GroupLayout, KvLayout, LayerLayout
from kv_connector.protocol.requests import ComputedPages, GroupPages
from kv_connector.protocol.wire.messages import Role

__all__ = ["every_lane"]

PAGES_OF_BLOCK_0 = SummedPages(((0, 0),), (0,), PAGE, (0,), PAGE)


def verifying(stage: AgentStage) -> tuple[AgentSide, AgentSide]:
    return stage.side(Role.PREFILL), stage.side(Role.DECODE, verify_pages=True)


def flip_bit(side: AgentSide, ordinal: int, block: int, bit: int = 77) -> None:
    side.pages[ordinal, block, bit // 8] ^= 1 << bit % 8


def flip_last_page(side: AgentSide, block: int) -> None:
    """Flips a bit of each half of the page, because two decode workers have half of the heads each."""
    flip_bit(side, 0, block)
    flip_bit(side, 0, block, 4 * side.pages.shape[2] + 77)


def hold_sums(side: AgentSide, calls: list[str] | None = None) -> threading.Event:
    """Keeps the side from summing pages until the event is set. ``calls``: gets an entry for each batch."""
    go, native = threading.Event(), side.agent._summer._native

    class Held:
        def sum(self, *arguments: object) -> bytes:
            if calls is not None:
                calls.append("summed")
            assert go.wait(PATIENCE)
            return native.sum(*arguments)  # type: ignore[arg-type]

    side.agent._summer._native = Held()  # type: ignore[assignment]
    return go


def before_summing(side: AgentSide, act: Callable[[], None], turn: int = 1) -> None:
    """Calls ``act`` before the side sums pages for the ``turn``-th time from now, on the agent's thread."""
    summer: PageSummer = side.agent._summer
    whole, left = summer.sum, [turn]

    def watched(
        pages: Sequence[SummedPages], summed: Summed, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        left[0] -= 1
        if not left[0]:
            summer.sum = whole  # type: ignore[method-assign]
            act()
        whole(pages, summed, wanted)

    summer.sum = watched  # type: ignore[method-assign]


def test_equal_pages_pass_over_every_lane(every_lane: AgentStage) -> None:
    prefill, decode = verifying(every_lane)
    for name in ("one", "two"):
        transfer(prefill, decode, name)
    prefill.idle()
    decode.idle()
    assert decode.agent.stats().checks == CheckStats(pages=12, corrupt=0, unverified=0)
    assert prefill.agent.stats().checks == CheckStats(0, 0, 0)


@pytest.mark.parametrize("damaged", [Role.PREFILL, Role.DECODE])
def test_one_flipped_bit_is_found_with_page_layer_and_engines(
    sim: AgentStage, damaged: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """A page may be damaged at either end: in flight and at D, or at P after it was sent."""
    prefill, decode = verifying(sim)
    side, block = (prefill, 2) if damaged is Role.PREFILL else (decode, 12)
    before_summing(side, lambda: flip_bit(side, 1, block))
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    prefill.idle()
    decode.idle()
    assert decode.failed == ["d-t"]
    assert decode.agent.stats().checks == CheckStats(pages=6, corrupt=1, unverified=0)
    assert decode.agent.stats().received == {Outcome.FAILED: 1}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    first, last = BLOCK, 2 * BLOCK - 1
    for words in (
        "CORRUPT PAGE: transfer t of request d-t from prefill/0 at 127.0.0.1:",
        " over sim to decode/0: 1 of 6 pages differ",
        f"layer layer1, block 12 (tokens {first} to {last})",
    ):
        assert words in line
    transfer_again(prefill, decode)


def test_a_page_that_left_before_it_was_computed_is_found(sim: AgentStage) -> None:
    """Sums are those of P's pages after its last layer, not of the bytes that were sent."""
    prefill, decode = verifying(sim)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE, forward=False)
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.signal.store(1)  # too early: pages of the first layer follow
    until(lambda: prefill.agent._engine.stats().pages_written == 3)
    prefill.pages[0, 3] = 9
    prefill.agent.signal.store(2)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    assert decode.agent.stats().checks.corrupt == 1


def test_request_is_delivered_before_its_prefill_engine_reports_its_end(sim: AgentStage) -> None:
    prefill, decode = verifying(sim)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE)
    decode.wait(received=["d-t"])
    assert decode.failed == []
    prefill.poll()
    assert prefill.sent == []
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])


def test_blocks_of_the_prefill_engine_are_held_until_they_are_summed(sim: AgentStage) -> None:
    prefill, decode = verifying(sim)
    go = hold_sums(prefill)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "")
    until(lambda: prefill.agent._engine.stats().pages_written == 6)
    until(lambda: prefill.agent.live().engine_transfers == 0)
    until(lambda: decode.agent.phases() == {"decode checking": 1})
    prefill.poll()
    decode.poll()
    assert (prefill.sent, decode.received) == ([], [])
    go.set()
    prefill.wait(sent=["p-t"])
    decode.wait(received=["d-t"])
    assert decode.failed == []


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_pages_of_transfers_that_have_ended_are_not_summed(sim: AgentStage, role: Role) -> None:
    """Otherwise a long queue stays long: decode engines give up each of its transfers before its turn."""
    prefill, decode = verifying(sim)
    calls: list[str] = []
    side = prefill if role is Role.PREFILL else decode
    go = hold_sums(side, calls)

    def checking(transfers: int) -> bool:
        return decode.agent.phases() == {"decode checking": transfers}

    for number, name in enumerate(("one", "two", "three")):
        prefill.expect(name)
        first = 3 * number
        decode.reserve(prefill.address, range(11 + first, 14 + first), name)
        prefill.compute(range(1 + first, 4 + first), transfer=name)
        until(partial(checking, number + 1))
    until(lambda: len(calls) == 1)
    decode.agent.cancel("d-two")
    decode.agent.cancel("d-three")
    prefill.agent.request_finished("one", True, "")
    for name in ("two", "three"):
        prefill.agent.request_finished(name, False, "aborted", aborted=True)
    prefill.wait(sent=["p-two", "p-three"])
    until(partial(checking, 1))
    go.set()
    decode.wait(received=["d-one"])
    prefill.idle()
    decode.idle()
    side.agent._summer.drain(PATIENCE)
    assert decode.failed == []
    assert calls == ["summed"]


def test_early_token_waits_for_the_check(sim: AgentStage) -> None:
    prefill, decode = verifying(sim)
    before_summing(decode, lambda: flip_bit(decode, 0, 11))
    prefill.expect()
    decode.reserve(prefill.address, early_token=True)
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "", 42)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]


def test_pages_of_a_preempted_prompt_are_not_verified(
    sim: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    """P's blocks hold another request's pages at the end."""
    prefill, decode = verifying(sim)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute((1,))
    until(lambda: prefill.agent._engine.stats().pages_written == 2)
    prefill.agent.preempt(["t"])
    prefill.pages[:, 1] = 0
    prefill.compute((4,))
    prefill.compute((2, 3), first=1)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert decode.failed == []
    assert decode.holds("t", SOURCE, TARGET)
    assert decode.agent.stats().checks == CheckStats(pages=0, corrupt=0, unverified=1)
    (line,) = [text for text in caplog.messages if "NOT VERIFIED" in text]
    assert "from prefill/0 at 127.0.0.1:" in line
    assert line.endswith("over sim: its prompt was preempted at the prefill engine")


def test_several_prefill_workers_are_each_verified(sim: AgentStage, caplog: pytest.LogCaptureFixture) -> None:
    """Each pipeline stage sums its layers. The page that differs is named with its own stage."""
    halves = [
        msgspec.structs.replace(
            layout(), layers=(msgspec.structs.replace(layer, parts=layout().layers[0].parts),)
        )
        for layer in layout().layers
    ]
    stages = [
        sim.side(Role.PREFILL, "p", pages=half, rank=number, ranks=2, stage=number)
        for number, half in enumerate(halves)
    ]
    acquaint(stages)
    decode = sim.side(Role.DECODE, verify_pages=True)
    for name, failed in (("good", []), ("bad", ["d-bad"])):
        if failed:
            before_summing(stages[1], lambda: flip_bit(stages[1], 0, 3))
        for stage in stages:
            stage.expect(name)
        decode.reserve(stages[0].address, transfer=name)
        for stage in stages:
            stage.compute(SOURCE, transfer=name)
            stage.agent.request_finished(name, True, "")
        decode.wait(received=[f"d-{name}"])
        assert decode.failed == failed
    (line,) = [text for text in caplog.messages if "CORRUPT PAGE" in text]
    assert "from p/1 at" in line
    assert "layer layer1, block 13" in line


@pytest.mark.parametrize(
    ("ranks", "block_sizes"),
    [((2, 1), (16, 16)), ((1, 2), (16, 16)), ((1, 1), (32, 16)), ((2, 1), (16, 64)), ((1, 2), (48, 32))],
)
def test_pages_of_other_layouts_are_verified(
    sim: AgentStage, ranks: tuple[int, int], block_sizes: tuple[int, int]
) -> None:
    """A sum covers the bytes of a write, which are the same on both sides."""
    tokens = 192
    sides: list[list[AgentSide]] = []
    for role, count, block_size in zip((Role.PREFILL, Role.DECODE), ranks, block_sizes, strict=True):
        made = []
        for rank in range(count):
            units = units_of_rank(4, rank, count)
            part = head_major(Place(0, 0, units.count * block_size * 8), units, block_size, 8)
            pages = KvLayout((GroupLayout(16, block_size, "full"),), (LayerLayout("layer0", 0, "", part),))
            made.append(
                sim.side(
                    role,
                    pages=pages,
                    rank=rank,
                    ranks=count,
                    verify_pages=role is Role.DECODE,
                    name=role.value,
                )
            )
        if count > 1:
            acquaint(made)
        sides.append(made)
    prefills, decodes = sides
    source = tuple(range(1, 1 + tokens // block_sizes[0]))
    target = tuple(range(3, 3 + tokens // block_sizes[1]))
    for damaged, failed in (("", []), ("p", ["d-p"]), ("d", ["d-d"])):
        for side in [*prefills, *decodes]:
            side.failed.clear()
        name = damaged or "good"
        for number, side in enumerate(prefills):
            side.pages[:] = np.random.default_rng(number).integers(0, 256, side.pages.shape, dtype=np.uint8)
            side.expect(name, tokens)
            if damaged == "p" and number == 0:
                # Once the pages for all decode workers have arrived: the last of them notices, at least.
                before_summing(side, lambda: flip_last_page(prefills[0], source[-1]), len(decodes))
        if damaged == "d":
            before_summing(decodes[0], lambda: flip_bit(decodes[0], 0, target[1]))
        for side in decodes:
            side.reserve(prefills[0].address, target, name, tokens)
        for side in prefills:
            side.agent.pages_computed(ComputedPages(name, None, (GroupPages(0, source),)))
            side.agent.request_finished(name, True, "")
        for side in decodes:
            side.wait(received=[f"d-{name}"])
        assert {name for side in decodes for name in side.failed} == set(failed)
        for side in prefills:
            side.wait(sent=[f"p-{name}"])
    assert sum(side.agent.stats().checks.corrupt for side in decodes) >= 2


def test_pages_outside_their_own_region_are_not_summed() -> None:
    """Another region may begin where this region ends."""
    memory = np.zeros(4 * PAGE, np.uint8)
    half = memory.nbytes // 2
    ranges = (PageMemory(memory.ctypes.data, half), PageMemory(memory.ctypes.data + half, half))
    summer, results = PageSummer(ranges, on_gpu=False), SimpleQueue[tuple[bytes, str]]()
    for layers in (((0, 0), (1, PAGE)), ((1, PAGE), (0, 2 * PAGE)), ((0, 0), (1, 2 * PAGE))):
        pages = SummedPages(layers, (0,), PAGE, (0,), PAGE)
        summer.sum((pages,), lambda sums, problem: results.put((sums, problem)))
    whole, first, second = (results.get(timeout=PATIENCE) for _ in range(3))
    summer.close(PATIENCE)
    assert (len(whole[0]), whole[1]) == (2 * SUM_BYTES, "")
    assert first == (b"", "OUT_OF_RANGE in sum_pages: a page lies outside memory region 0")
    assert second == (b"", "OUT_OF_RANGE in sum_pages: a page lies outside memory region 1")


def test_sleep_waits_until_nothing_reads_the_pages(sim: AgentStage) -> None:
    """The framework may unmap the pages after unregister_memory()."""
    prefill, decode = verifying(sim)
    transfer(prefill, decode)
    order: list[str] = []
    go = hold_sums(prefill)
    prefill.agent._summer.sum((PAGES_OF_BLOCK_0,), lambda sums, problem: order.append("summed"))
    sleep = threading.Thread(target=lambda: (prefill.agent.unregister_memory(), order.append("asleep")))
    sleep.start()
    until(lambda: prefill.agent.live().peers == 0)
    go.set()
    sleep.join()
    assert order == ["summed", "asleep"]


def test_engine_that_never_summed_sleeps_without_a_thread_for_sums(sim: AgentStage) -> None:
    prefill = sim.side(Role.PREFILL)
    prefill.agent.unregister_memory()
    assert prefill.agent._summer._thread is None


def test_close_drops_the_sums_that_are_still_to_be_computed() -> None:
    """Their transfers are over. A CPU engine may have seconds of sums to compute."""
    summer, begun, go, done = PageSummer((), on_gpu=False), threading.Event(), threading.Event(), list[str]()

    def first(sums: bytes, problem: str) -> None:
        begun.set()
        assert go.wait(PATIENCE)
        done.append("first")

    summer.sum((), first)
    summer.sum((), lambda sums, problem: done.append("second"))
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=summer.close, args=(PATIENCE,))
    closing.start()
    until(lambda: summer._closing)
    go.set()
    closing.join()
    assert done == ["first"]


@pytest.mark.parametrize("end", ["sleep", "close"])
def test_gpu_that_hangs_while_it_sums_does_not_hang_the_engine(
    sim: AgentStage, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    prefill = sim.side(Role.PREFILL, timeouts=replace(TIMES, check=0.05))
    calls: list[str] = []
    go = hold_sums(prefill, calls)
    summed = threading.Event()
    prefill.agent._summer.sum((PAGES_OF_BLOCK_0,), lambda sums, problem: summed.set())
    until(lambda: bool(calls))
    if end == "sleep":
        with pytest.raises(
            AgentError, match=r"must stay mapped: TIMEOUT in sum_pages: .*restart this engine"
        ):
            prefill.agent.unregister_memory()
        assert prefill.agent._memory.regions, "it is awake"
    else:
        prefill.agent.close()
        assert "TIMEOUT in sum_pages" in caplog.text
    go.set()
    assert summed.wait(PATIENCE), "the thread reads the memory until then"
