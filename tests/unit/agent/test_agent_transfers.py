"""The agent over real sockets and a real transfer engine: pages arrive, requests are reported once, nothing
is left."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from agent_pairs import SOURCE, TARGET, hold, transfer
from agent_setup import PATIENCE, AgentSide, AgentStage, acquaint, until
from protocol_setup import BLOCK, HASH, PAGE, layout, with_rows

from kv_connector.agent.loop.writes import Bursts
from kv_connector.engine import ArmedLayer, ErrorCode, PagedWrite, TransferError
from kv_connector.engine.transfer_engine import LayerSignal
from kv_connector.protocol.actions import Outcome
from kv_connector.protocol.pages.geometry import Place, Units, head_major, units_of_rank
from kv_connector.protocol.pages.layout import GroupLayout, GroupTarget, KvLayout, LayerLayout
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, GroupPages
from kv_connector.protocol.session.sessions import PeerState
from kv_connector.protocol.wire.messages import Role


def record_signals(prefill: AgentSide) -> list[list[int]]:
    """Records for each armed write, from now on, the signal values that its layers wait for."""
    engine, values = prefill.agent._engine, list[list[int]]()
    arm = engine.arm

    def recording(number: int, signal: LayerSignal, write: PagedWrite, layers: Sequence[ArmedLayer]) -> None:
        values.append([layer.signal_value for layer in layers])
        arm(number, signal, write, layers)

    engine.arm = recording  # type: ignore[method-assign, assignment]
    return values


def test_pages_arrive_over_every_lane(every_lane: AgentStage) -> None:
    prefill, decode = every_lane.pair()
    transfer(prefill, decode)
    prefill.idle()
    decode.idle()
    assert decode.pages.sum(dtype=int) == prefill.pages.sum(dtype=int)  # nothing else was written
    stats = prefill.agent.stats()
    assert (stats.pages_pushed, stats.bytes_pushed, stats.layers_pushed) == (6, 6 * PAGE, 2)
    assert stats.sent == {Outcome.COMPLETED: 1}
    assert [peer.lane for peer in stats.peers] == [every_lane.lane]
    stats = decode.agent.stats()
    assert (stats.received, stats.received_pages) == ({Outcome.COMPLETED: 1}, 6)
    assert stats.received_seconds > 0
    assert [(peer.state, peer.lane) for peer in stats.peers] == [(PeerState.UP, every_lane.lane)]


def test_layers_leave_as_they_are_signalled(pair: tuple[AgentSide, AgentSide]) -> None:
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


def test_layers_leave_in_the_order_in_which_they_are_computed(pair: tuple[AgentSide, AgentSide]) -> None:
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
    assert not decode.pages[0].any()  # layer 0 is computed last
    prefill.agent.note_prefill_end(["t"])
    prefill.agent.signal.store(2)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().layers_before_prefill_end == 1


def test_pages_of_a_step_before_the_order_changed_wait_for_its_end(pair: tuple[AgentSide, AgentSide]) -> None:
    """Several steps of a GPU may be in flight. The signal of an earlier step follows an order that is no
    longer known."""
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
def test_burst_lanes_hold_pages_until_the_prompts_end_if_it_is_near(
    pair: tuple[AgentSide, AgentSide],
    monkeypatch: pytest.MonkeyPatch,
    bursts: Bursts | None,
    early_token: bool,
    signals: list[list[int]],
) -> None:
    """No prompt ends in the first step. In the second, a page of each of the two layers is named twice. Pages
    beyond the limit are sent at the end of their step, and those of the last step by layer."""
    monkeypatch.setattr("kv_connector.agent.loop.effects.BURSTS", {"sim": bursts} if bursts else {})
    prefill, decode = pair
    values = record_signals(prefill)
    prefill.expect()
    decode.reserve(prefill.address, early_token=early_token)
    until(lambda: bool(prefill.agent.take_reserved()))
    if bursts is not None:
        prefill.agent.no_prompt_ends(0)
    prefill.compute(SOURCE[:1])
    prefill.agent.pages_computed(ComputedPages("t", 2, (GroupPages(1, SOURCE[1:2]),)))
    prefill.compute(SOURCE[2:], first=2)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert values == signals


@pytest.mark.parametrize("preempted", [False, True])
def test_pages_that_wait_for_a_later_step_go_when_none_comes(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch, preempted: bool
) -> None:
    """They are sent before their blocks go to another request, and if the prompt's end names no more
    pages."""
    monkeypatch.setattr("kv_connector.agent.loop.effects.BURSTS", {"sim": Bursts(8 * PAGE, 8 * PAGE)})
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
def test_thread_is_held_off_while_a_step_whose_pages_wait_anyway_is_launched(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch, bursts: bool
) -> None:
    """The thread is held off for a limited time. On lanes that send pages layer by layer it is not held
    off."""
    monkeypatch.setattr("kv_connector.agent.loop.thread._HOLD_OFF_S", PATIENCE)
    if bursts:
        monkeypatch.setattr("kv_connector.agent.loop.effects.BURSTS", {"sim": Bursts(8 * PAGE, 8 * PAGE)})
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
        monkeypatch.setattr("kv_connector.agent.loop.thread._HOLD_OFF_S", 0.01)
        prefill.agent.begin_launch()
        assert prefill.agent.catch_up(PATIENCE), "a step that failed"


def test_a_preemption_does_not_wait_for_the_end_of_a_launch(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's model runner V2 reports a step's preemptions twice: at its beginning, and when it is
    prepared."""
    monkeypatch.setattr("kv_connector.agent.loop.thread._HOLD_OFF_S", 2 * PATIENCE)
    monkeypatch.setattr("kv_connector.agent.loop.effects.BURSTS", {"sim": Bursts(8 * PAGE, 8 * PAGE)})
    prefill, decode = pair
    transfer(prefill, decode, "met")
    prefill.agent.begin_launch()
    before = time.monotonic()
    prefill.agent.preempt(["t"])
    assert time.monotonic() - before < PATIENCE


def test_awaited_token_is_sent_while_another_prompts_step_is_launched(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.agent.loop.thread._HOLD_OFF_S", PATIENCE)
    monkeypatch.setattr("kv_connector.agent.loop.effects.BURSTS", {"sim": Bursts(8 * PAGE, 8 * PAGE)})
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


def test_turn_number_is_unknown_while_the_thread_acts(pair: tuple[AgentSide, AgentSide]) -> None:
    """The engine may take a step's last report in the middle of a turn, and then make no further step."""
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
    sim: AgentStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = sim.side(Role.PREFILL)
    for number, bursts in enumerate((Bursts(8 * PAGE, 8 * PAGE), None, Bursts(8 * PAGE, 8 * PAGE))):
        monkeypatch.setattr("kv_connector.agent.loop.effects.BURSTS", {"sim": bursts} if bursts else {})
        transfer(prefill, sim.side(Role.DECODE, f"decode {number}"), f"t{number}")
        assert prefill.agent.leaves_by_layer([GroupPages(0, (1,))]) == (number > 0)


def test_pages_of_a_step_are_counted_in_all_groups(sim: AgentStage) -> None:
    """A block of the first group has pages of two layers, and a block of the second group has one page."""
    agent = sim.side(Role.PREFILL, pages=layout((2, 1))).agent
    agent._effects.gathered = 5 * PAGE
    some, none = GroupPages(0, (1,)), GroupPages(0, ())
    assert not agent.leaves_by_layer([some, some, some, none])
    assert agent.leaves_by_layer([some, some, some, some])


def test_pages_that_are_computed_already_wait_for_no_signal(every_lane: AgentStage) -> None:
    prefill, decode = every_lane.pair()
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute_first(SOURCE[:2])
    until(lambda: prefill.agent._engine.stats().pages_written == 4)
    prefill.compute_first(SOURCE[2:], first=2)
    prefill.agent.preempt(["t"])  # waits for the writes, not for a step
    prefill.agent.note_prefill_end(["t"])
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    assert decode.holds("t", SOURCE, TARGET)
    prefill.wait(sent=["p-t"])
    assert prefill.agent.signal.load() == 0
    assert prefill.agent.stats().layers_before_prefill_end == 2


def test_each_naming_of_computed_pages_is_a_step(pair: tuple[AgentSide, AgentSide]) -> None:
    """Pages that arrive after the prefill's end belong to the last step, so no layer was complete before
    it."""
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


def test_rows_come_beside_the_pages(sim: AgentStage) -> None:
    """A request's state is copied from any row to any row, once its last step has ended."""
    prefill = sim.side(Role.PREFILL, pages=with_rows(layout(groups=(2, 1)), 8))
    decode = sim.side(Role.DECODE, pages=with_rows(layout(groups=(2, 1), num_blocks=32), 4))
    state = 1  # the layer
    prefill.pages[state, 0] = 5
    prefill.pages[::2, list(SOURCE)] = 6
    prefill.expect()
    prefill.agent.pages_computed(ComputedPages("t", None, (GroupPages(0, (1, 2)), GroupPages(0, ()))))
    prefill.agent.pages_computed(ComputedPages("t", 0, (GroupPages(2, (3,)), GroupPages(0, (0,)))))
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
def stages(sim: AgentStage) -> tuple[AgentSide, AgentSide, AgentSide]:
    """The two workers of a prefill engine, with one layer each, and a decode engine with both layers."""
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


def test_pages_come_from_several_stages(stages: tuple[AgentSide, AgentSide, AgentSide]) -> None:
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


def test_failing_stage_stops_the_other_stages(stages: tuple[AgentSide, AgentSide, AgentSide]) -> None:
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
    """Two layers with blocks of ``tokens`` tokens. A head has two bytes of each token."""
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
def test_ranks_and_blocks_may_differ(sim: AgentStage, a: int, b: int, ours: int, theirs: int) -> None:
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


def test_loads_of_a_deep_model_do_not_run_out_of_counters(sim: AgentStage) -> None:
    """An engine has 65,536 counters. With one for each of 94 layers, 697 requests would use them up."""
    pages = layout(groups=(94,), num_blocks=16)
    prefill, decode = sim.side(Role.PREFILL, pages=pages), sim.side(Role.DECODE, pages=pages)
    for number in range(700):
        decode.reserve(prefill.address, (11,), transfer=f"t{number}", tokens=BLOCK)
    until(lambda: decode.agent.phases().get("decode reserved") == 700)
    decode.poll()
    assert decode.failed == []


def test_prompt_may_be_computed_before_decode_requests_it(pair: tuple[AgentSide, AgentSide]) -> None:
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


def test_nothing_wanted_is_complete_at_once(pair: tuple[AgentSide, AgentSide]) -> None:
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


def test_a_fault_at_one_message_costs_no_other(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    sim: AgentStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


def test_many_transfers_at_once_between_several_engines(sim: AgentStage) -> None:
    """Both dispatch orders, chunks, aborts on either side, and three engines that start in any order."""
    rng = random.Random(5)
    prefills = [sim.side(Role.PREFILL, f"p{i}", pages=layout(num_blocks=400)) for i in range(2)]
    decodes = [sim.side(Role.DECODE, f"d{i}", pages=layout(num_blocks=400)) for i in range(2)]
    completed: list[tuple[AgentSide, str, tuple[int, ...], tuple[int, ...]]] = []
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
