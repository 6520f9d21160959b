"""The agent over real sockets and a real engine: pages arrive, requests are reported once, and nothing is
left."""

from __future__ import annotations

import ctypes
import logging
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from agent_pairs import SOURCE, TARGET, refuse, transfer
from agent_setup import IMPATIENT, LIVELY, PATIENCE, TIMES, Side, Stage, acquaint, stage, two_lanes, until
from protocol_setup import BLOCK, HASH, PAGE, layout, pairs, with_rows

from kv_connector.agent.agent import Agent
from kv_connector.agent.config import AgentConfig, AgentError, MemoryRange
from kv_connector.agent.writes import Bursts
from kv_connector.engine import ArmedLayer, ErrorCode, PagedWrite, TransferError
from kv_connector.engine.transfer_engine import LayerSignal
from kv_connector.protocol.actions import Address, Outcome, State
from kv_connector.protocol.geometry import Place, Units, head_major, units_of_rank
from kv_connector.protocol.layout import GroupLayout, GroupTarget, KvLayout, LayerLayout
from kv_connector.protocol.messages import Release, Role, encode
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, GroupPages
from kv_connector.protocol.sessions import PeerState


def record_signals(prefill: Side) -> list[list[int]]:
    """By armed write, from now on: the signal values that its layers wait for."""
    engine, values = prefill.agent._engine, list[list[int]]()
    arm = engine.arm

    def recording(number: int, signal: LayerSignal, write: PagedWrite, layers: Sequence[ArmedLayer]) -> None:
        values.append([layer.signal_value for layer in layers])
        arm(number, signal, write, layers)

    engine.arm = recording  # type: ignore[method-assign]
    return values


# --- The good path


def test_pages_arrive_over_every_lane(every_lane: Stage) -> None:
    prefill, decode = every_lane.pair()
    transfer(prefill, decode)
    prefill.idle()
    decode.idle()
    assert decode.pages.sum(dtype=int) == prefill.pages.sum(dtype=int)  # and nothing else was written
    stats = prefill.agent.stats()
    assert (stats.pages_pushed, stats.bytes_pushed, stats.layers_pushed) == (6, 6 * PAGE, 2)
    assert stats.sent == {Outcome.COMPLETED: 1}
    assert [peer.lane for peer in stats.peers] == [every_lane.lane]
    stats = decode.agent.stats()
    assert (stats.received, stats.received_pages) == ({Outcome.COMPLETED: 1}, 6)
    assert stats.received_seconds > 0
    assert [(peer.state, peer.lane) for peer in stats.peers] == [(PeerState.UP, every_lane.lane)]


def test_layers_leave_as_they_are_signalled(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.pages[:] = 7
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE, forward=False)
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.signal.store(1)
    until(lambda: prefill.agent._engine.stats().pages_written == 3)
    assert (decode.pages[0, 11:14] == 7).all()
    assert not decode.pages[1].any()  # the second layer is not computed yet
    decode.poll()
    assert decode.received == []
    prefill.agent.note_prefill_end(["t"])
    prefill.agent.signal.store(2)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    stats = prefill.agent.stats()
    assert (stats.pages_before_prefill_end, stats.layers_before_prefill_end) == (3, 1)
    assert stats.bytes_before_prefill_end == 3 * PAGE


def test_layers_leave_in_the_order_in_which_they_are_computed(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.pages[:] = 7
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.agent.order_layers(0, (1, 0))
    prefill.compute(SOURCE, forward=False)
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.signal.store(1)
    until(lambda: prefill.agent._engine.stats().pages_written == 3)
    assert (decode.pages[1, 11:14] == 7).all()
    assert not decode.pages[0].any()  # it comes last
    prefill.agent.note_prefill_end(["t"])
    prefill.agent.signal.store(2)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().layers_before_prefill_end == 1


def test_pages_of_a_step_before_the_order_changed_wait_for_its_end(pair: tuple[Side, Side]) -> None:
    """Of a GPU's steps several may be under way: what the signal says of an earlier one goes by an order that
    nobody remembers."""
    prefill, decode = pair
    values = record_signals(prefill)
    prefill.expect()
    prefill.compute((1, 2), forward=False)
    prefill.agent.order_layers(2, (1, 0))
    prefill.compute((3,), first=2, forward=False)
    decode.reserve(prefill.address)
    prefill.agent.request_finished("t", True, "")
    prefill.agent.signal.store(4)
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert values == [[2, 2], [4, 3]]


@pytest.mark.parametrize(
    ("bursts", "early_token", "signals"),
    [
        (None, False, [[1, 2], [3, 4], [3, 4]]),
        (None, True, [[1, 2], [3, 4], [3, 4]]),
        (Bursts(1, 4 * PAGE), False, [[2, 2], [3, 4], [3, 4]]),
        (Bursts(2 * PAGE, 4 * PAGE), False, [[2, 2], [4, 4], [3, 4]]),
        (Bursts(4 * PAGE, 1), False, [[4, 4], [4, 4], [3, 4]]),
        (Bursts(6 * PAGE, 1), False, [[4, 4], [4, 4], [4, 4]]),
        (Bursts(1, 6 * PAGE), True, [[4, 4], [4, 4], [4, 4]]),
        (Bursts(1, 2 * PAGE), True, [[2, 2], [4, 4], [3, 4]]),
    ],
)
def test_on_lanes_for_bursts_pages_wait_for_the_prompts_end_where_they_are_soon_gone_then(
    pair: tuple[Side, Side],
    monkeypatch: pytest.MonkeyPatch,
    bursts: Bursts | None,
    early_token: bool,
    signals: list[list[int]],
) -> None:
    """A step in which no prompt ends, and one of which a page of each of the two layers is named twice. What
    is too much goes at the end of its step, and of the last step by layer."""
    monkeypatch.setattr("kv_connector.agent.effects.BURSTS", {"sim": bursts} if bursts else {})
    prefill, decode = pair
    values = record_signals(prefill)
    prefill.expect()
    decode.reserve(prefill.address, early_token=early_token)
    until(lambda: bool(prefill.agent.take_reserved()))
    if bursts is not None:
        prefill.agent.no_prompt_ends(0)
    prefill.compute(SOURCE[:1])
    prefill.agent.computed(ComputedPages("t", 2, (GroupPages(1, SOURCE[1:2]),)))
    prefill.compute(SOURCE[2:], first=2)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert values == signals


@pytest.mark.parametrize("preempted", [False, True])
def test_pages_that_wait_for_a_later_step_go_when_none_comes(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, preempted: bool
) -> None:
    """Before their blocks are somebody else's, and where the prompt's end names no page any more."""
    monkeypatch.setattr("kv_connector.agent.effects.BURSTS", {"sim": Bursts(8 * PAGE, 8 * PAGE)})
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    until(lambda: bool(prefill.agent.take_reserved()))
    prefill.agent.no_prompt_ends(0)
    prefill.compute(SOURCE[:2] if preempted else SOURCE)
    until(lambda: prefill.agent.live().engine_transfers == 1)
    assert prefill.agent._engine.stats().pages_written == 0
    if preempted:
        prefill.agent.preempt(["t"])
        prefill.pages[:] = 99
        prefill.compute((5, 6, SOURCE[2]), first=0)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    assert decode.failed == []
    assert decode.holds("t", SOURCE, TARGET)
    prefill.wait(sent=["p-t"])


@pytest.mark.parametrize("bursts", [False, True])
def test_nothing_is_looked_at_while_a_step_is_launched_whose_pages_wait_anyway(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, bursts: bool
) -> None:
    """For so long at most; on lanes on which pages leave layer by layer it is."""
    monkeypatch.setattr("kv_connector.agent.thread._HOLD_OFF_S", PATIENCE)
    if bursts:
        monkeypatch.setattr("kv_connector.agent.effects.BURSTS", {"sim": Bursts(8 * PAGE, 8 * PAGE)})
    prefill, decode = pair
    transfer(prefill, decode, "met")
    few, many = [(GroupPages(0, tuple(range(pages))),) for pages in (4, 5)]
    assert prefill.agent.leaves_by_layer(few) is not bursts
    assert prefill.agent.leaves_by_layer(many), "in two layers more than wait"
    prefill.agent.begin_launch()
    if bursts:
        prefill.expect()
        assert not prefill.agent.catch_up(0.1)
        prefill.agent.end_launch()
    else:
        prefill.expect()
        assert prefill.agent.catch_up(PATIENCE)
    decode.reserve(prefill.address)
    until(lambda: bool(prefill.agent.take_reserved()))
    if bursts:
        monkeypatch.setattr("kv_connector.agent.thread._HOLD_OFF_S", 0.01)
        prefill.agent.begin_launch()
        assert prefill.agent.catch_up(PATIENCE), "a step that failed"


def test_a_preemption_does_not_wait_for_the_end_of_a_launch(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's model runner V2 tells of a step's preemptions twice: at its begin, and when it is prepared."""
    monkeypatch.setattr("kv_connector.agent.thread._HOLD_OFF_S", 2 * PATIENCE)
    monkeypatch.setattr("kv_connector.agent.effects.BURSTS", {"sim": Bursts(8 * PAGE, 8 * PAGE)})
    prefill, decode = pair
    transfer(prefill, decode, "met")
    prefill.agent.begin_launch()
    before = time.monotonic()
    prefill.agent.preempt(["t"])
    assert time.monotonic() - before < PATIENCE


def test_a_token_that_d_waits_for_is_told_while_another_prompts_step_is_launched(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.agent.thread._HOLD_OFF_S", PATIENCE)
    monkeypatch.setattr("kv_connector.agent.effects.BURSTS", {"sim": Bursts(8 * PAGE, 8 * PAGE)})
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address, early_token=True)
    until(lambda: bool(prefill.agent.take_reserved()))
    prefill.compute(SOURCE)
    assert prefill.agent.catch_up(PATIENCE)
    prefill.agent.begin_launch()
    prefill.agent.request_finished("t", ok=True, sampled=7)
    assert prefill.agent.catch_up(PATIENCE / 2)
    decode.wait(received=["d-t"])


def test_numbers_are_not_said_to_be_the_same_while_the_thread_acts(pair: tuple[Side, Side]) -> None:
    """The engine may take a step's last report in the middle, and no further step."""
    prefill, decode = pair
    turns: list[int | None] = []
    ledger = prefill.agent._ledger
    sent = ledger.sent

    def reported(request_id: str) -> None:
        sent(request_id)
        turns.append(prefill.agent.turns)

    ledger.sent = reported  # type: ignore[method-assign]
    transfer(prefill, decode, "t")
    assert turns == [None]
    until(lambda: prefill.agent.turns is not None)


def test_single_layers_are_signalled_as_soon_as_a_peer_wants_them(
    sim: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = sim.side(Role.PREFILL)
    for number, bursts in enumerate((Bursts(8 * PAGE, 8 * PAGE), None, Bursts(8 * PAGE, 8 * PAGE))):
        monkeypatch.setattr("kv_connector.agent.effects.BURSTS", {"sim": bursts} if bursts else {})
        transfer(prefill, sim.side(Role.DECODE, f"decode {number}"), f"t{number}")
        assert prefill.agent.leaves_by_layer([GroupPages(0, (1,))]) == (number > 0)


def test_what_a_step_computes_is_counted_in_all_groups(sim: Stage) -> None:
    """Two layers' pages for a block of the first group, and one for one of the second."""
    agent = sim.side(Role.PREFILL, pages=layout((2, 1))).agent
    agent._effects.gathered = 5 * PAGE
    some, none = GroupPages(0, (1,)), GroupPages(0, ())
    assert not agent.leaves_by_layer([some, some, some, none])
    assert agent.leaves_by_layer([some, some, some, some])


def test_pages_that_are_computed_already_wait_for_no_signal(every_lane: Stage) -> None:
    prefill, decode = every_lane.pair()
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute_first(SOURCE[:2])
    until(lambda: prefill.agent._engine.stats().pages_written == 4)
    prefill.compute_first(SOURCE[2:], first=2)
    prefill.agent.preempt(["t"])  # waits for the writes, and for no step
    prefill.agent.note_prefill_end(["t"])
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    assert decode.holds("t", SOURCE, TARGET)
    prefill.wait(sent=["p-t"])
    assert prefill.agent.signal.load() == 0
    assert prefill.agent.stats().layers_before_prefill_end == 2


def test_of_pages_that_are_computed_already_each_naming_is_a_step(pair: tuple[Side, Side]) -> None:
    """What arrives after the prefill's end is the last step's: no layer was complete before it."""
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute_first(SOURCE[:2])
    until(lambda: prefill.agent._engine.stats().pages_written == 4)
    prefill.agent.note_prefill_end(["t"])
    prefill.compute_first(SOURCE[2:], first=2)
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    stats = prefill.agent.stats()
    assert (stats.pages_before_prefill_end, stats.layers_before_prefill_end) == (4, 0)


def test_rows_come_beside_the_pages(sim: Stage) -> None:
    """A request's state, from any row to any row, once its last step is done."""
    prefill = sim.side(Role.PREFILL, pages=with_rows(layout(groups=(2, 1)), 8))
    decode = sim.side(Role.DECODE, pages=with_rows(layout(groups=(2, 1), num_blocks=32), 4))
    state = 1  # the layer
    prefill.pages[state, 0] = 5
    prefill.pages[::2, list(SOURCE)] = 6
    prefill.expect()
    prefill.agent.computed(ComputedPages("t", None, (GroupPages(0, (1, 2)), GroupPages(0, ()))))
    prefill.agent.computed(ComputedPages("t", 0, (GroupPages(2, (3,)), GroupPages(0, (0,)))))
    prefill.agent.request_finished("t", True, "")
    groups = GroupTarget(0, TARGET), GroupTarget(0, (3,))
    decode.agent.reserve(DecodeRequest("d-t", "t", prefill.address, 3 * BLOCK, 0, HASH, groups))
    until(lambda: prefill.agent.live().engine_transfers == 1)
    assert decode.received == []
    prefill.agent.signal.store(len(prefill.layout.layers))
    decode.wait(received=["d-t"])
    assert (decode.pages[::2, list(TARGET)] == 6).all()
    assert (decode.pages[state, 3] == 5).all()
    assert decode.pages.sum(dtype=int) == prefill.pages.sum(dtype=int)
    prefill.wait(sent=["p-t"])


@pytest.fixture
def stages(sim: Stage) -> tuple[Side, Side, Side]:
    """The two workers of a prefill engine, with a layer each, and a decode engine with both."""
    halves = [
        msgspec.structs.replace(
            layout(), layers=(msgspec.structs.replace(layer, parts=layout().layers[0].parts),)
        )
        for layer in layout().layers
    ]
    sides = [
        sim.side(Role.PREFILL, pages=half, rank=number, ranks=2, stage=number)
        for number, half in enumerate(halves)
    ]
    acquaint(sides)
    for side in sides:
        side.expect()
    return sides[0], sides[1], sim.side(Role.DECODE)


def test_pages_come_from_several_stages(stages: tuple[Side, Side, Side]) -> None:
    first, second, decode = stages
    decode.reserve(first.address)
    first.compute(SOURCE)
    first.agent.request_finished("t", True, "")
    first.wait(sent=["p-t"])
    decode.poll()
    assert decode.received == []
    second.compute((4, 5, 6))
    second.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    assert decode.failed == []
    assert (decode.pages[0, list(TARGET)] == first.pages[0, list(SOURCE)]).all()
    assert (decode.pages[1, list(TARGET)] == second.pages[0, [4, 5, 6]]).all()
    second.wait(sent=["p-t"])
    for side in stages:
        side.idle()


def test_one_of_several_stages_that_fails_stops_the_others(stages: tuple[Side, Side, Side]) -> None:
    first, second, decode = stages
    decode.reserve(first.address)
    first.compute(SOURCE[:2])
    second.agent.request_finished("t", False, "its client left")
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    first.agent.request_finished("t", True, "")
    for side in (first, second):
        side.wait(sent=["p-t"])
        side.idle()
    decode.idle()


def heads(units: Units, tokens: int, num_blocks: int) -> KvLayout:
    """Two layers, a head of which has two bytes of each token; blocks of so many tokens."""
    page = units.count * tokens * 2
    places = Place(0, 0, page), Place(0, num_blocks * page, page)
    return KvLayout(
        (GroupLayout(num_blocks, tokens, "full"),),
        tuple(
            LayerLayout(f"layer{k}", 0, "", head_major(place, units, tokens, 2))
            for k, place in enumerate(places)
        ),
    )


@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 1), (2, 2)], ids=["wider", "narrower", "as wide"])
@pytest.mark.parametrize(("ours", "theirs"), [(BLOCK, 2 * BLOCK), (2 * BLOCK, BLOCK)])
def test_ranks_and_blocks_may_differ(sim: Stage, a: int, b: int, ours: int, theirs: int) -> None:
    prefill, decode = (
        [
            sim.side(role, rank=rank, ranks=ranks, pages=heads(units_of_rank(2, rank, ranks), tokens, 8))
            for rank in range(ranks)
        ]
        for role, ranks, tokens in ((Role.PREFILL, a, ours), (Role.DECODE, b, theirs))
    )
    for sides in (prefill, decode):
        acquaint(sides)
    tokens = 3 * BLOCK + 5  # in order: two blocks of one size, four of the other
    pages, places = ((1, 2), (6, 5, 4, 3)) if ours > theirs else ((3, 4, 5, 6), (2, 1))
    for d in decode:
        d.reserve(prefill[0].address, places, tokens=tokens)
    random = np.random.default_rng(7)
    whole = random.integers(1, 256, (2, 2, 4 * BLOCK, 2), dtype=np.uint8)  # [layer, head, token, byte]
    for rank, p in enumerate(prefill):
        p.expect(tokens=tokens)
        mine = whole[:, rank * 2 // a : (rank + 1) * 2 // a]
        for number, page in enumerate(pages):
            part = mine[:, :, number * ours : (number + 1) * ours]
            p.pages[:, page] = part.reshape(2, -1)
        p.compute(pages, forward=False)
        p.agent.signal.store(2)
        p.agent.request_finished("t", True, "")
    for rank, d in enumerate(decode):
        d.wait(received=["d-t"])
        assert d.failed == []
        mine = whole[:, rank * 2 // b : (rank + 1) * 2 // b]
        got = d.pages[:, list(places)].reshape(2, len(places), 2 // b, theirs, 2).swapaxes(1, 2)
        assert (got.reshape(2, 2 // b, -1, 2)[:, :, :tokens] == mine[:, :, :tokens]).all()
    for side in (*prefill, *decode):
        side.idle()


def test_loads_of_a_deep_model_do_not_run_out_of_counters(sim: Stage) -> None:
    """An engine has 65,536: one for each of 94 layers would do for 697 requests."""
    pages = layout(groups=(94,), num_blocks=16)
    prefill, decode = sim.side(Role.PREFILL, pages=pages), sim.side(Role.DECODE, pages=pages)
    for number in range(700):
        decode.reserve(prefill.address, (11,), transfer=f"t{number}", tokens=BLOCK)
    until(lambda: decode.agent.phases().get("decode reserved") == 700)
    decode.poll()
    assert decode.failed == []


def test_the_prompt_may_be_computed_before_decode_asks(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    prefill.compute(SOURCE[:2])
    prefill.compute(SOURCE[2:], first=2)
    prefill.agent.request_finished("t", True, "")
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.holds("t", SOURCE, TARGET)
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().pages_before_prefill_end == 0


def test_nothing_wanted_is_complete_at_once(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address, blocks=(0, 0, 0))
    decode.wait(received=["d-t"])
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    assert decode.failed == []
    prefill.idle()
    decode.idle()


def hold(side: Side) -> threading.Event:
    """Stops the agent's thread, which reads messages before commands, until the event is set."""
    stopped, go = threading.Event(), threading.Event()

    def wait(_: float) -> tuple[()]:
        stopped.set()
        assert go.wait(PATIENCE)
        return ()

    side.agent._thread.submit(wait)
    assert stopped.wait(PATIENCE)
    return go


def test_a_fault_at_one_message_costs_no_other(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    transfer(prefill, decode, "met")
    for name in ("a", "b"):
        prefill.expect(name)
    go = hold(prefill)
    for name in ("a", "b"):
        decode.reserve(prefill.address, transfer=name)
    until(lambda: decode.agent.phases().get("decode reserved") == 2)
    peers = prefill.agent._effects.peers
    receive = peers.receive

    def faulty(now: float, source: bytes, message: Any) -> Any:
        if getattr(message, "transfer_id", "") == "a":
            raise RuntimeError("a fault")
        return receive(now, source, message)

    monkeypatch.setattr(peers, "receive", faulty)
    go.set()
    prefill.compute(SOURCE, transfer="b")
    prefill.agent.request_finished("b", True, "")
    decode.wait(received=["d-b"])
    assert "was not acted on" in caplog.text
    monkeypatch.setattr(peers, "receive", receive)
    decode.agent.cancel("d-a")
    decode.wait(received=["d-a"])


def test_agent_close_logs_a_transfer_engine_whose_gpu_hangs(
    sim: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sim.engine("hangs")
    side = sim.side(Role.PREFILL, "hangs", engine=engine)
    native = engine._native

    class Hanging:
        def close(self) -> None:
            native.close()
            raise TransferError(ErrorCode.TIMEOUT, "", "", "close", "GPU 3 hangs")

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

    monkeypatch.setattr(engine, "_native", Hanging())
    side.agent.close()
    assert "GPU 3 hangs" in caplog.text
    with pytest.raises(TransferError, match="GPU 3 hangs"):
        engine.close()


def test_a_fault_at_one_event_of_the_engine_costs_no_other(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    for name in ("a", "b"):
        prefill.expect(name)
        decode.reserve(prefill.address, transfer=name)
    until(lambda: decode.agent.phases().get("decode reserved") == 2)
    go = hold(decode)
    for name in ("a", "b"):
        prefill.compute(SOURCE, transfer=name)
        prefill.agent.request_finished(name, True, "")
    prefill.wait(sent=["p-a", "p-b"])
    machine = decode.agent._effects.decode
    reached, faults = machine.counter_reached, ["a fault"]

    def faulty(now: float, request_id: str) -> Any:
        if faults:
            raise RuntimeError(faults.pop())
        return reached(now, request_id)

    monkeypatch.setattr(machine, "counter_reached", faulty)
    go.set()
    until(lambda: decode.poll() or len(decode.received) == 1)
    assert "was not acted on" in caplog.text
    for name in ("a", "b"):
        decode.agent.cancel(f"d-{name}")
    decode.wait(received=["d-a", "d-b"])


def test_many_transfers_at_once_between_several_engines(sim: Stage) -> None:
    """Both dispatch orders, chunks, aborts on either side, and three engines that come in any order."""
    rng = random.Random(5)
    prefills = [sim.side(Role.PREFILL, f"p{i}", pages=layout(num_blocks=400)) for i in range(2)]
    decodes = [sim.side(Role.DECODE, f"d{i}", pages=layout(num_blocks=400)) for i in range(2)]
    completed: list[tuple[Side, str, tuple[int, ...], tuple[int, ...]]] = []
    for number in range(60):
        name = f"t{number}"
        prefill, decode = rng.choice(prefills), rng.choice(decodes)
        first = 1 + 3 * number
        blocks = tuple(range(first, first + 3))
        targets = tuple(rng.sample(blocks, 3))
        late = rng.random() < 0.5
        fate = rng.choice(["good"] * 4 + ["prefill aborts", "decode aborts"])
        if not late:
            decode.reserve(prefill.address, targets, name)
        prefill.expect(name)
        if fate == "prefill aborts":
            prefill.compute(blocks[:1], transfer=name)
            prefill.agent.request_finished(name, False, "client left")
        else:
            prefill.compute(blocks[:1], transfer=name)
            prefill.compute(blocks[1:], first=1, transfer=name)
            prefill.agent.request_finished(name, True, "")
        if late:
            decode.reserve(prefill.address, targets, name)
        if fate == "decode aborts":
            decode.agent.cancel(f"d-{name}")
        prefill.wait(sent=[])
        if fate == "good":
            completed.append((decode, name, blocks, targets))
    for side in (*decodes, *prefills):
        side.idle()
    assert sorted(name for side in prefills for name in side.sent) == sorted(f"p-t{i}" for i in range(60))
    assert sorted(name for side in decodes for name in side.received) == sorted(f"d-t{i}" for i in range(60))
    assert completed
    for decode, name, blocks, targets in completed:
        assert f"d-{name}" not in decode.failed
        assert decode.holds(name, blocks, targets)


# --- How far a request has come


def test_the_state_of_a_request_is_asked_for_at_any_time(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    until(lambda: prefill.agent.live().prefill_requests == 1)
    assert prefill.agent.state("p-t") is decode.agent.state("d-t") is None
    decode.reserve(prefill.address)
    until(lambda: prefill.agent.state("p-t") is State.MOVING)
    assert decode.agent.state("d-t") is State.MOVING
    prefill.compute(SOURCE)
    until(lambda: decode.agent.state("d-t") is not State.MOVING)
    assert decode.agent.state("d-t") is State.DONE
    assert decode.holds("t", SOURCE[:2], TARGET[:2])
    assert prefill.agent.state("p-t") is State.MOVING  # its engine still works on it
    prefill.agent.request_finished("t", True, "")
    until(lambda: prefill.agent.state("p-t") is State.DONE)
    for side, request in ((prefill, "p-t"), (decode, "d-t")):
        side.agent.forget(request)
        side.idle()  # heard
        assert side.agent.state(request) is None
    assert prefill.sent == decode.received == []  # no report is left of what was forgotten
    assert prefill.agent.take_reserved() == set()


def test_an_adapter_that_does_not_ask_is_told(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    told: list[State] = []
    prefill.agent.tell_reached(lambda reached: told.append(reached.state))
    transfer(prefill, decode)
    assert told == [State.MOVING, State.DONE]


def test_what_has_come_is_known_once_the_agent_has_caught_up(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    decode.reserve(prefill.address)
    until(lambda: prefill.agent.phases() == {"prefill orphan": 1})
    prefill.expect()
    assert prefill.agent.catch_up(10.0)
    assert prefill.agent.state("p-t") is State.MOVING
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])


def test_a_failure_says_why_on_both_sides(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    decode.agent.cancel("d-t")
    # Before P's engine has finished with it: it need not compute the rest.
    until(lambda: prefill.agent.state("p-t") is State.FAILED)
    assert prefill.agent.failure("p-t") == "the decode engine cancelled the transfer"
    until(lambda: decode.agent.state("d-t") is State.FAILED)
    assert decode.agent.failure("d-t") == ""  # who aborts knows
    prefill.agent.request_finished("t", False, "nobody wants it")
    prefill.wait(sent=["p-t"])
    assert prefill.agent.state("p-t") is None  # reported


def test_a_request_that_the_agent_cannot_take_has_failed(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    told: list[tuple[str, str]] = []
    decode.agent.tell_failures(lambda *failure: told.append(failure))

    def broken(*_: object) -> None:
        raise RuntimeError("as the test wants it")

    monkeypatch.setattr(decode.agent._effects.decode, "reserve", broken)
    decode.reserve(prefill.address)
    until(lambda: decode.agent.state("d-t") is State.FAILED)
    why = decode.agent.failure("d-t")
    assert "as the test wants it" in why
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    until(lambda: told == [("t", why)])


# --- Ends that are not good


@pytest.mark.parametrize(
    ("aborted", "outcome", "code", "level"),
    [
        (True, Outcome.CANCELLED, "prefill_aborted", logging.INFO),
        (False, Outcome.FAILED, "write_error", logging.WARNING),
    ],
)
def test_a_prompt_that_ends_early_fails_decode_and_counts_as_what_it_is(
    pair: tuple[Side, Side],
    caplog: pytest.LogCaptureFixture,
    aborted: bool,
    outcome: Outcome,
    code: str,
    level: int,
) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = pair
    told: list[tuple[str, str]] = []
    decode.agent.tell_failures(lambda *failure: told.append(failure))
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.request_finished("t", False, "its end", aborted=aborted)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.wait(sent=["p-t"])
    prefill.idle()
    decode.idle()
    peer = f"prefill/0 at {prefill.address}"
    lines = {
        f"transfer t from {peer} over sim: {outcome.value}: {code}: its end",
        f"transfer t to decode/0 over sim: {outcome.value}: its end",
    }
    until(lambda: lines <= {record.getMessage() for record in caplog.records if record.levelno == level})
    # A client that is still there has to learn whose fault its error is.
    until(lambda: told == [("t", f"{code}: its end")])
    assert prefill.agent.stats().sent == {outcome: 1}
    assert decode.agent.stats().received == {outcome: 1}


def test_an_abort_of_decode_is_not_a_failure(
    pair: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    told: list[tuple[str, str]] = []
    decode.agent.tell_failures(lambda *failure: told.append(failure))
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:2])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    decode.agent.cancel("d-t")
    decode.wait(received=["d-t"])
    assert decode.failed == []
    decode.idle()
    # Nothing lands in the blocks any more, whatever P still computes.
    decode.pages[:] = 0
    prefill.compute(SOURCE[2:], first=2)
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    assert not decode.pages.any()
    prefill.idle()
    assert prefill.agent.stats().sent == {Outcome.CANCELLED: 1}
    assert decode.agent.stats().received == {Outcome.CANCELLED: 1}
    assert told == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_prompt_is_not_loaded_and_prefill_is_free_at_once(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address, prompt_hash=bytes(16))
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().sent == {Outcome.RELEASED: 1}


def test_a_prompt_without_a_hash_is_known_by_its_transfer_alone(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect(prompt_hash=None)
    decode.reserve(prefill.address, prompt_hash=None)
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert decode.failed == []
    assert decode.holds("t", SOURCE, TARGET)


def test_a_release_frees_the_prompt(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    prefill.agent.request_finished("t", True, "")
    decode.agent.release("t", prefill.address)
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().sent == {Outcome.RELEASED: 1}


def test_a_prompt_that_nobody_wants_expires_unless_decode_says_that_it_waits(sim: Stage) -> None:
    prefill, decode = sim.pair(replace(TIMES, hold=1.5, heartbeat=0.1))
    decode.agent.set_waiting([("kept", prefill.address)])
    until(lambda: decode.agent.live().peers == 1)
    for name in ("kept", "lost"):
        prefill.expect(name)
        prefill.agent.request_finished(name, True, "")
    prefill.wait(sent=["p-lost"])
    assert "p-kept" not in prefill.sent
    decode.agent.set_waiting([])
    prefill.wait(sent=["p-kept"])
    assert prefill.agent.stats().sent == {Outcome.EXPIRED: 2}


def test_a_reserve_without_a_request_fails(sim: Stage) -> None:
    prefill, decode = sim.pair(replace(TIMES, orphan=0.2))
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.idle()


# --- Preemption


def test_preemption_returns_when_nothing_reads_the_blocks(sim: Stage) -> None:
    prefill = sim.side(Role.PREFILL, engine=sim.engine("slow", max_delay_us=100_000))
    decode = sim.side(Role.DECODE)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:2])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.preempt(["t", "unknown"])
    prefill.pages[:] = 99  # somebody else's now
    # The prompt is computed again, elsewhere; only what had not gone goes.
    prefill.compute((5, 6, 7))
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    assert decode.failed == []
    assert decode.holds("t", (1, 2, 7), TARGET)
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().pages_pushed == 6


def test_preemption_waits_for_layers_that_are_still_being_computed(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE, forward=False)
    until(lambda: prefill.agent.live().engine_transfers == 1)
    preempting = threading.Thread(target=prefill.agent.preempt, args=(["t"],))
    preempting.start()
    preempting.join(0.05)
    assert preempting.is_alive()
    prefill.agent.signal.store(2)
    preempting.join(20)
    assert not preempting.is_alive()
    decode.wait(received=["d-t"])  # everything has left
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])


def test_preempted_writes_that_do_not_drain_are_fenced(sim: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sim.engine("p")
    prefill = sim.side(Role.PREFILL, engine=engine, timeouts=replace(TIMES, drain=0.3))
    decode = sim.side(Role.DECODE)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:2])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    monkeypatch.setattr(engine, "quiesce", refuse(ErrorCode.TIMEOUT))
    prefill.agent.preempt(["t"])
    assert engine.stats().transfers_open == 0  # the blocks are nobody's business any more
    until(lambda: engine.stats().peers == 0)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    prefill.idle()
    decode.idle()
    transfer_again(prefill, decode)


def test_preemption_waits_for_an_agent_that_is_busy(sim: Stage) -> None:
    """Longer than any time-out: blocks that are still being read must not be written for somebody else."""
    drain = 0.02
    prefill = sim.side(Role.PREFILL, timeouts=replace(TIMES, drain=drain))
    idle = hold(prefill)
    preempting = threading.Thread(target=prefill.agent.preempt, args=(["t"],))
    preempting.start()
    preempting.join(10 * drain)
    assert preempting.is_alive()
    idle.set()
    preempting.join(20)
    assert not preempting.is_alive()


def transfer_again(prefill: Side, decode: Side) -> None:
    """The two find together again."""
    decode.failed.clear()
    transfer(prefill, decode, "again")


# --- The engine says no


def test_writes_that_the_engine_refuses_fail_their_transfer_only(
    sim: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sim.engine("p")
    prefill, decode = sim.side(Role.PREFILL, engine=engine), sim.side(Role.DECODE)
    transfer(prefill, decode, "before")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "arm", refuse(ErrorCode.OUT_OF_RANGE))
        prefill.expect()
        decode.reserve(prefill.address)
        prefill.compute(SOURCE)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    transfer_again(prefill, decode)


def test_a_transfer_that_cannot_be_opened_fails(sim: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sim.engine("p")
    prefill, decode = sim.side(Role.PREFILL, engine=engine), sim.side(Role.DECODE)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "open_transfer", refuse(ErrorCode.RESOURCES))
        prefill.expect()
        decode.reserve(prefill.address)
        prefill.compute(SOURCE)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    transfer_again(prefill, decode)


def test_nothing_is_written_after_a_transfer_was_given_up(
    sim: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are to be pushed, the first cannot be: the second must not be, for D has its blocks back."""
    engine = sim.engine("p")
    prefill, decode = sim.side(Role.PREFILL, engine=engine), sim.side(Role.DECODE)
    prefill.expect()
    prefill.compute(SOURCE[:2])
    prefill.compute(SOURCE[2:], first=2)
    prefill.agent.request_finished("t", True, "")
    open_transfer, calls = engine.open_transfer, []

    def first_fails(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            raise TransferError(ErrorCode.RESOURCES, "sim", "peer", "open_transfer", "as the test wants it")
        return open_transfer(*arguments)

    monkeypatch.setattr(engine, "open_transfer", first_fails)
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert decode.failed == ["d-t"]
    assert len(calls) == 1
    prefill.idle()
    assert not decode.pages.any()


def test_without_counters_a_request_fails(sim: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sim.engine("d")
    prefill, decode = sim.side(Role.PREFILL), sim.side(Role.DECODE, engine=engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "alloc_counters", refuse(ErrorCode.RESOURCES))
        decode.reserve(prefill.address)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    transfer_again(prefill, decode)


def test_blocks_come_back_only_when_the_fence_is_through(sim: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sim.engine("d")
    prefill = sim.side(Role.PREFILL, timeouts=replace(TIMES, drain=0.3))
    decode = sim.side(Role.DECODE, engine=engine)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    stuck = refuse(ErrorCode.TIMEOUT)
    fence = engine.fence
    monkeypatch.setattr(engine, "fence", stuck)
    # It leaves with a BYE, and without a word about its transfer.
    monkeypatch.setattr(prefill.agent._effects.prefill, "close", lambda now: [])
    prefill.agent.close()
    until(lambda: decode.agent.live().fences == 1)
    # Other peers are served meanwhile.
    other = sim.side(Role.PREFILL, "other")
    transfer(other, decode, "u")
    tries = stuck.left[0]  # type: ignore[attr-defined]
    until(lambda: stuck.left[0] < tries - 3)  # type: ignore[attr-defined]
    assert "d-t" not in decode.received
    monkeypatch.setattr(engine, "fence", fence)
    decode.wait(received=["d-t"])
    decode.idle()


# --- Peers


def test_a_prefill_engine_that_shuts_down_ends_its_transfers_at_once(
    pair: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.close()
    prefill.agent.close()
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    until(lambda: decode.agent.live().peers == 0)
    decode.idle()
    until(lambda: "draining: the prefill engine is shutting down" in caplog.text)
    # Whichever of its BYE and the end of its links was read first.
    peer = f"prefill peer prefill/0 at {prefill.address}"
    until(lambda: f"BYE from {peer}" in caplog.text or "the peer ended the link" in caplog.text)


def test_a_decode_engine_that_shuts_down_frees_the_prompts(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    decode.agent.close()
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    until(lambda: prefill.agent.live().peers == 0)
    prefill.idle()


def mute(side: Side) -> None:
    """The process hangs: nothing goes out any more, and nothing is heard."""
    side.agent._control.send = lambda source, message: True  # type: ignore[method-assign]
    side.agent._control.receive = lambda: []  # type: ignore[method-assign]


def test_a_prefill_engine_that_falls_silent_is_declared_dead(
    sim: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = sim.side(Role.PREFILL), sim.side(Role.DECODE, timeouts=IMPATIENT)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    mute(prefill)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    decode.idle()
    until(lambda: f"DEAD: prefill peer prefill/0 at {prefill.address}: silent for" in caplog.text)


def test_a_decode_engine_that_falls_silent_frees_the_prompts(sim: Stage) -> None:
    prefill = sim.side(Role.PREFILL, timeouts=IMPATIENT)
    decode = sim.side(Role.DECODE, timeouts=LIVELY)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    mute(decode)
    until(lambda: prefill.agent.live().peers == 0)
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    prefill.idle()


def test_a_restarted_prefill_engine_is_found_at_its_old_address(sim: Stage) -> None:
    prefill, decode = sim.pair()
    transfer(prefill, decode, "before")
    # It goes without a word, as a killed process does: D talks to the new one and learns that it is a
    # stranger.
    prefill.agent._effects.peers.leave = lambda now: []  # type: ignore[method-assign]
    prefill.agent.close()
    again = sim.side(Role.PREFILL, port=prefill.address.port)
    until(lambda: decode.agent.live().peers == 0)
    transfer(again, decode, "after")


def test_a_restarted_decode_engine_replaces_its_old_self(
    sim: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = sim.pair()
    transfer(prefill, decode, "before")
    again = sim.side(Role.DECODE)
    transfer(prefill, again, "after")
    until(lambda: "DEAD: decode peer decode/0: the engine restarted" in caplog.text)
    assert prefill.agent.live().peers == 1


def test_ranks_on_several_hosts_find_each_other(sim: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kv_connector")
    prefill, decode = (
        [
            sim.side(role, host=f"127.0.0.{rank + 1}", rank=rank, ranks=2, pages=layout(holder=(rank, 2)))
            for rank in range(2)
        ]
        for role in (Role.PREFILL, Role.DECODE)
    )
    engine = prefill[0].address  # all that requests say
    # Each rank's pages are another's: only that of the same number can have them.
    for sides in (prefill, decode):
        acquaint(sides)
    for p in prefill:
        p.expect()
    for d in decode:
        d.reserve(engine)
    for rank, (p, d) in enumerate(zip(prefill, decode, strict=True)):
        p.pages[:] = rank + 1
        p.compute(SOURCE, forward=False)
        p.agent.signal.store(2)
        p.agent.request_finished("t", True, "")
        d.wait(received=["d-t"])
        p.wait(sent=["p-t"])
        assert d.failed == []
        assert (d.pages[:, 11:14] == rank + 1).all()
        assert f"UP: prefill peer prefill/{rank} at {p.address}, lane sim" in caplog.text
        assert p.agent.live().peers == 1


def test_every_rank_of_another_topology_is_refused_at_once(
    sim: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    patient = replace(TIMES, connect=1000.0, transfer=1000.0)
    prefill, two = sim.side(Role.PREFILL), pairs(ranks="2")
    for rank in range(2):
        decode = sim.side(Role.DECODE, fingerprint=two, rank=rank, timeouts=patient)
        decode.reserve(prefill.address)
        decode.wait(received=["d-t"])
        assert decode.failed == ["d-t"]
    reason = "ranks: prefill has 1, decode has 2: give both sides as many ranks"
    assert caplog.text.count(f"NAK from {prefill.address}: incompatible: {reason}") == 2


def test_an_address_where_nobody_listens_fails_the_request(
    sim: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    decode = sim.side(Role.DECODE, timeouts=replace(TIMES, handshake=0.1, connect=0.3))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = Address("127.0.0.1", probe.getsockname()[1])
        decode.reserve(nobody)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    until(lambda: f"is a prefill engine's agent listening at {nobody}, " in caplog.text)
    decode.idle()


@pytest.mark.parametrize(
    ("changes", "words", "naks"),
    [
        (
            {"fingerprint": pairs(block_sizes=("32",))},
            "incompatible: block_sizes: prefill has (16), decode has (32): give both sides the same",
            1,
        ),
        (
            {"pages": layout(page=32)},
            "does not fit: layer layer0: part page: bytes a run: prefill has 64, decode has 32",
            0,
        ),
    ],
    ids=["block size", "layout"],
)
def test_an_engine_that_does_not_fit_is_told_why_and_nobody_else_suffers(
    sim: Stage, changes: dict[str, Any], words: str, naks: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = sim.pair()
    stranger = sim.side(Role.DECODE, "stranger", **changes)
    for name in ("t", "u"):
        stranger.reserve(prefill.address, transfer=name)
        stranger.wait(received=[f"d-{name}"])
    assert stranger.failed == ["d-t", "d-u"]
    until(lambda: words in caplog.text)
    assert caplog.text.count(f"NAK from {prefill.address}") == naks
    stranger.idle()
    transfer(prefill, decode)


def test_two_engines_of_one_role_are_told_so(sim: Stage, caplog: pytest.LogCaptureFixture) -> None:
    decode, other = sim.side(Role.DECODE), sim.side(Role.DECODE, "other")
    decode.reserve(other.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    words = "wrong_role: other is a decode engine: give the router the address of a prefill engine"
    until(lambda: words in caplog.text)


def test_without_a_common_lane_decode_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with stage("sim") as one, stage("tcp") as two:
        prefill, decode = one.side(Role.PREFILL), two.side(Role.DECODE)
        decode.reserve(prefill.address)
        decode.wait(received=["d-t"])
        assert decode.failed == ["d-t"]
        until(lambda: "refused: no_lane" in caplog.text)
        decode.idle()
        prefill.idle()


def test_engines_of_both_roles_send_to_each_other(sim: Stage) -> None:
    one, two = sim.side(Role.BOTH, "one"), sim.side(Role.BOTH, "two")
    transfer(one, two, "there")
    transfer(two, one, "back")
    assert one.agent.live().peers == two.agent.live().peers == 2


# --- Bad input


def test_a_malformed_message_costs_its_sender_only(
    pair: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    transfer(prefill, decode, "before")
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{prefill.address}")
    stranger.send(b"garbage")
    until(lambda: prefill.agent.stats().malformed_messages == 1)
    stranger.send(encode(Release("t")))
    transfer(prefill, decode)
    stranger.close(linger=0)
    context.term()
    until(lambda: "malformed message from 127.0.0.1" in caplog.text)
    assert [peer.state for peer in prefill.agent.stats().peers] == [PeerState.UP]


def test_an_error_in_one_message_does_not_stop_the_agent(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair

    def broken(*_: object) -> None:
        raise ZeroDivisionError("as the test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._effects.prefill, "release", broken)
        decode.agent.release("t", prefill.address)
        until(lambda: "ZeroDivisionError: as the test wants it" in caplog.text)
    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._effects.prefill, "reserve", broken)
        decode.reserve(prefill.address, transfer="y")
        decode.wait(received=["d-y"])
        assert decode.failed == ["d-y"]
    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._effects.prefill, "expect", broken)
        prefill.expect("x")
        until(lambda: prefill.agent.live().commands == 0)
    with monkeypatch.context() as patch:
        patch.setattr(decode.agent._effects.decode, "reserve", broken)
        decode.reserve(prefill.address, transfer="x")
        decode.wait(received=["d-x"])
        assert decode.failed == ["d-y", "d-x"]
    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._effects, "tick", broken)
        prefill.agent.request_finished("nobody", True, "")
        until(lambda: "an error that it did not expect" in caplog.text)
    transfer_again(prefill, decode)


def test_a_reserve_that_no_message_can_carry_fails(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    transfer(prefill, decode, "before")
    with monkeypatch.context() as patch:
        patch.setattr("kv_connector.protocol.messages.MAX_MESSAGE_BYTES", 100)
        decode.reserve(prefill.address)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    transfer_again(prefill, decode)


def test_pages_outside_of_the_memory_are_refused(pair: tuple[Side, Side]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    blocks = ComputedPages("t", 0, (GroupPages(0, (1, 2, 1_000_000)),))
    prefill.agent.computed(blocks)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])


# --- Starting and stopping


ANYWHERE = Address("127.0.0.1", 0)


def config(address: Address = ANYWHERE, **changes: Any) -> AgentConfig:
    base = AgentConfig("p0", Role.PREFILL, 0, 1, address, pairs(), layout(), providers=("sim",))
    return replace(base, **changes)


def test_a_port_in_use_names_the_setting(sim: Stage) -> None:
    taken = sim.side(Role.PREFILL).address
    memory = bytearray(layout().bytes_per_region()[0])
    agent = Agent(config(taken), memory_of(memory))
    words = r"p0/0: cannot listen on 127\.0\.0\.1:\d+: .* Set control_port to a free"
    with pytest.raises(AgentError, match=words):
        agent.start()


def test_an_address_of_another_machine_names_the_setting() -> None:
    memory = bytearray(layout().bytes_per_region()[0])
    agent = Agent(config(Address("203.0.113.1", 0)), memory_of(memory))
    with pytest.raises(AgentError, match=r"no address of this machine\. Set control_host"):
        agent.start()


def memory_of(buffer: bytearray) -> list[MemoryRange]:
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return [MemoryRange(address, len(buffer))]


def test_an_unknown_provider_is_named() -> None:
    memory = bytearray(layout().bytes_per_region()[0])
    with pytest.raises(AgentError, match="pigeon"):
        Agent(config(providers=("pigeon",)), memory_of(memory))


def test_memory_that_is_too_small_is_named() -> None:
    need = layout().bytes_per_region()[0]
    with pytest.raises(AgentError, match=f"memory region 0 has {need - 1} bytes, its layers need {need}"):
        Agent(config(), memory_of(bytearray(need - 1)))


def test_an_agent_that_never_started_closes() -> None:
    memory = bytearray(layout().bytes_per_region()[0])
    agent = Agent(config(), memory_of(memory))
    agent.preempt(["t"])
    agent.close()
    agent.close()
    agent.release("t", Address("127.0.0.1", 1))  # nobody listens any more, and nobody minds
    assert agent.live().idle


def test_closing_leaves_no_thread(sim: Stage) -> None:
    prefill, decode = sim.pair()
    transfer(prefill, decode)
    prefill.agent.close()
    decode.agent.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name in ("kv-agent-prefill", "kv-agent-decode")]


def test_an_idle_agent_sleeps(sim: Stage) -> None:
    """Without peers there is no deadline: the thread waits until it is woken."""
    prefill = sim.side(Role.PREFILL)
    prefill.agent.request_finished("nobody", True, "")
    until(lambda: prefill.agent.live().commands == 0)
    assert prefill.agent._thread._timeout() is None


# --- Lanes that only the completing side finds closed


def one_refusal(side: Side, code: ErrorCode) -> None:
    """The side's engine refuses the first answer."""
    complete = side.agent._engine.complete

    def refusing(peer: int, answer: bytes) -> None:
        side.agent._engine.complete = complete  # type: ignore[method-assign]
        raise TransferError(code, "host", "prefill", "complete", "as the test wants it")

    side.agent._engine.complete = refusing  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("code", "allow_fallback", "lane"),
    [
        (ErrorCode.NOT_REACHABLE, False, "tcp"),
        (ErrorCode.REFUSED, True, "tcp"),
        (ErrorCode.REFUSED, False, ""),
        (ErrorCode.PEER_DOWN, True, ""),
    ],
)
def test_agent_offers_again_without_a_lane_that_does_not_lead_to_prefill(
    code: ErrorCode, allow_fallback: bool, lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kv_connector")
    with stage("") as made:
        prefill = made.side(Role.PREFILL, engine=two_lanes("prefill"))
        decode = made.side(
            Role.DECODE, engine=two_lanes("decode", allow_fallback), allow_fallback=allow_fallback
        )
        one_refusal(decode, code)
        decode.reserve(prefill.address)
        prefill.expect()
        prefill.compute(SOURCE)
        prefill.agent.request_finished("t", True, "")
        decode.wait(received=["d-t"])
        passed = [record.message for record in caplog.records if "lane host is passed over" in record.message]
        if not lane:
            assert decode.failed == ["d-t"]
            assert not [text for text in passed if text.startswith("prefill peer")]
            return
        assert decode.failed == []
        assert decode.holds("t", SOURCE, TARGET)
        prefill.wait(sent=["p-t"])
        decode.idle()
        assert [peer.lane for peer in decode.agent.stats().peers] == [lane]
        assert [text for text in passed if text.startswith("prefill peer prefill/0 at")] == [
            f"prefill peer prefill/0 at {prefill.address}: lane host is passed over: "
            f"{code.value} in complete over host to prefill: as the test wants it"
        ]


def test_agent_names_the_last_lane_that_does_not_lead_to_prefill(sim: Stage) -> None:
    prefill, decode = sim.pair()
    refuse_complete = refuse(ErrorCode.NOT_REACHABLE)
    decode.agent._engine.complete = refuse_complete  # type: ignore[method-assign]
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
