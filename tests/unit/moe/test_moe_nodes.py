"""Groups over several nodes: every array against the oracle over each lane, and ranks that end or stop.

KVC_TEST_PROVIDERS=verbs tests that lane alone. KVC_TEST_DEVICES names NICs, which the nodes take in turns.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_ranks import (
    EndedRank,
    Kill,
    RankPipe,
    ThreadExchange,
    errors,
    form_in_threads,
    open_files,
    run_ranks,
    settings_of,
)
from moe_steps import HIDDEN, Step, same, steps_in, tokens_of

from kv_connector import _native
from kv_connector.engine import DomainConfig, EngineConfig, TransferError
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.moe import oracle, wire
from kv_connector.moe.descriptors import EVICT
from kv_connector.moe.group import Exchange, Group, GroupError, LaunchFault
from kv_connector.moe.settings import GroupSettings
from kv_connector.moe.watcher import Watcher

RANKS = 4
PAIRS = ("a", "a", "b", "b")
CROSSED = ("a", "b", "a", "b")
APART = ("a", "b", "c", "d")
LANES = {
    "tcp": DomainConfig("tcp"),
    "shuffle": DomainConfig("shuffle", device="tcp", seed=3),
    "libfabric": DomainConfig("libfabric", device="tcp"),
}
if os.environ.get("KVC_TEST_PROVIDERS") == "verbs":
    LANES = {"verbs": DomainConfig("verbs")}
FAULTY_LANE = next(iter(LANES))
"""The lane of the tests in which ranks end or stop."""


def on_node(lane: DomainConfig, node: str) -> DomainConfig:
    """Returns the lane with the node's NIC, if the environment names NICs."""
    if lane.provider != "verbs":
        return lane
    nics = os.environ.get("KVC_TEST_DEVICES", "").split(",")
    return replace(lane, device=nics[APART.index(node) % len(nics)])


def lane_of(name: str) -> DomainConfig:
    try:
        TransferEngine(EngineConfig("probe", [on_node(LANES[name], "a")])).close()
    except TransferError as error:
        pytest.skip(f"{name} is not usable on this machine: {error}")
    return LANES[name]


def node_settings(rank: int, nodes: tuple[str, ...], lane: DomainConfig, **more: Any) -> GroupSettings:
    return settings_of(rank, len(nodes), node=nodes[rank], lanes=(on_node(lane, nodes[rank]),), **more)


def far_count(rank: int, nodes: tuple[str, ...]) -> int:
    return sum(node != nodes[rank] for node in nodes)


def node_steps(side: RankPipe, nodes: tuple[str, ...], lane: DomainConfig, count: int) -> Any:
    group = Group.form(node_settings(side.rank, nodes, lane, slots=2), side.exchange)
    rows = steps_in(group, side, count)
    assert group._lanes is not None
    scatters, immediates, *_ = group._lanes.native.counts()
    group.close()
    return rows, scatters, immediates


@pytest.mark.parametrize("nodes", [PAIRS, CROSSED, APART], ids=["pairs", "crossed", "apart"])
@pytest.mark.parametrize("lane", LANES)
def test_every_array_equals_the_oracle_between_nodes(lane: str, nodes: tuple[str, ...]) -> None:
    count = 24
    for rank, (rows, scatters, immediates) in enumerate(
        run_ranks(RANKS, node_steps, nodes, lane_of(lane), count)
    ):
        assert rows[0] > 100
        assert rows[1] > 20
        assert scatters == 2 * count
        assert immediates == 2 * count * far_count(rank, nodes)


class ThreadSide:
    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self._exchange = exchange

    def exchange(self, message: bytes) -> Sequence[bytes]:
        return self._exchange(message)


def test_every_array_equals_the_oracle_between_nodes_over_sim() -> None:
    """The lane sim connects threads of one process only. It reorders pages."""
    lane = DomainConfig("sim", fabric="moe-nodes", seed=5, max_delay_us=200)
    common = ThreadExchange(RANKS)
    exchanges = [common.of(rank) for rank in range(RANKS)]
    settings = [node_settings(rank, PAIRS, lane, slots=2) for rank in range(RANKS)]
    groups = form_in_threads(settings, exchanges)
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        group = groups[rank]
        try:
            assert isinstance(group, Group)
            assert steps_in(group, ThreadSide(rank, exchanges[rank]), 24)[0] > 100
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        assert isinstance(group, Group)
        group.close()
    assert failures == []


def large_steps(side: RankPipe, lane: DomainConfig) -> tuple[int, int]:
    """Packets of 1.6 MB, above the 1 MiB of a batch."""
    hidden, tokens = 4096, 200
    settings = node_settings(
        side.rank, ("a", "b"), lane, hidden=hidden, top_k=4, max_tokens=tokens, row_bytes=9000
    )
    group = Group.form(settings, side.exchange)
    inputs = []
    for rank in range(2):
        draw = torch.Generator().manual_seed(rank)
        x = torch.randn((tokens, hidden), generator=draw).to(torch.bfloat16)
        ids = torch.randint(0, 8, (tokens, 4), generator=draw)
        inputs.append(oracle.Tokens(x, ids, torch.rand((tokens, 4), generator=draw)))
    own = inputs[side.rank]
    for _ in range(3):
        got = group.dispatch(own.x, own.ids, own.weights, sizes=[tokens] * 2)
        assert same(got.x, torch.cat([one.x for one in inputs]))
        group.combine_buffer([tokens] * 2).copy_(got.x)
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16)
        group.combine(out, [tokens] * 2)
        assert same(out, (own.x.float() * 2).to(torch.bfloat16))
    assert group._lanes is not None
    scatters, immediates, *_ = group._lanes.native.counts()
    group.close()
    return scatters, immediates


@pytest.mark.parametrize("lane", LANES)
def test_packets_above_a_batch_count_once(lane: str) -> None:
    assert run_ranks(2, large_steps, lane_of(lane)) == [(6, 6), (6, 6)]


def step_without_one(side: RankPipe, victim: int, phase: str, timeout: float) -> Any:
    """One good step. Then ``victim`` stops before its dispatch or its combine, and the others go on."""
    with pytest.MonkeyPatch.context() as patch:
        # Steps have the timeout of the test. Forming has more, because processes begin at different times.
        real = _native.MoeGroup
        patch.setattr(_native, "MoeGroup", lambda *given: real(*(*given[:-2], timeout, given[-1])))
        group = Group.form(node_settings(side.rank, PAIRS, LANES[FAULTY_LANE]), side.exchange)
    sizes = (2,) * RANKS
    tokens = tokens_of(0, Step(sizes, torch.bfloat16, torch.int64, 0, 0, 0, None, False), side.rank)
    out = torch.zeros((2, HIDDEN), dtype=torch.bfloat16)

    def step(*, last: bool) -> None:
        for name in ("dispatch", "combine"):
            if last and name == phase:
                side.exchange(b"")
                side.note(name)
                if side.rank == victim:
                    side.stop()
            if name == "dispatch":
                group.dispatch(tokens.x, tokens.ids, tokens.weights, sizes=sizes)
            else:
                group.combine(out, sizes)

    side.exchange(b"")
    step(last=False)
    with pytest.raises(GroupError) as raised:
        step(last=True)
    with pytest.raises(GroupError):
        group.dispatch(tokens.x, tokens.ids, tokens.weights, sizes=sizes)
    side.note("failed")
    result = str(raised.value), group.fault()
    group.close()
    return result


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_killed_rank_of_another_node_ends_the_step_with_its_name(phase: str) -> None:
    """The timeout is 30 s: without the end of the link the code would be another, after that time."""

    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if len(notes) == RANKS:
            kill(3)

    results = run_ranks(RANKS, step_without_one, 3, phase, 30.0, noted=noted)
    assert results.pop(3) == EndedRank(-9)
    for error, fault in results:
        assert fault == LaunchFault("LOST", 3), error
        assert re.search(r"rank 3 \(process \d+\)", error), error
        assert "(LOST). The results of this step are void." in error


def test_stopped_rank_of_another_node_is_named_by_all_ranks() -> None:
    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        if [text for _, text in notes].count("failed") == RANKS - 1:
            kill(3, signal.SIGKILL)

    results = run_ranks(RANKS, step_without_one, 3, "dispatch", 4.0, noted=noted)
    assert results.pop(3) == EndedRank(-9)
    codes = set()
    for error, fault in results:
        assert fault is not None, error
        codes.add(fault.code)
        assert fault.rank == 3, error
        assert re.search(r"rank 3 \(process \d+\)", error), error
    assert codes <= {"TIMEOUT_DISPATCH", "EVICTED"}


def test_rank_that_leaves_ends_no_step_of_others_and_leaves_nothing_open() -> None:
    before = open_files()
    lane = DomainConfig("sim", fabric="moe-leaving")
    groups = form_in_threads([node_settings(rank, ("a", "b"), lane) for rank in range(2)])
    assert all(isinstance(group, Group) for group in groups)
    closing = [threading.Thread(target=group.close) for group in groups if isinstance(group, Group)]
    closing[0].start()
    closing[0].join()
    second = groups[1]
    assert isinstance(second, Group)
    tokens = tokens_of(0, Step((1, 1), torch.bfloat16, torch.int64, 0, 0, 0, None, False), 1)
    with pytest.raises(GroupError, match=r"rank 0 \(process \d+\) has left the group \(LOST\)"):
        second.dispatch(tokens.x, tokens.ids, tokens.weights, sizes=(1, 1))
    closing[1].start()
    closing[1].join()
    assert open_files() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvc-")]


def test_rank_that_a_rank_of_another_node_evicts_ends_its_own_step() -> None:
    """The timeout is 30 s, and its end would have another code."""
    lane = DomainConfig("sim", fabric="moe-evicting")
    first, second = form_in_threads([node_settings(rank, ("a", "b"), lane) for rank in range(2)])
    assert isinstance(first, Group)
    assert isinstance(second, Group)
    first._watcher.evict(1)
    tokens = tokens_of(0, Step((1, 1), torch.bfloat16, torch.int64, 0, 0, 0, None, False), 1)
    evicted = (
        r"rank 1 \(process \d+\) did not send in time, and rank 0 \(process \d+\) evicted it \(EVICTED\)"
    )
    with pytest.raises(GroupError, match=evicted):
        second.dispatch(tokens.x, tokens.ids, tokens.weights, sizes=(1, 1))
    assert second.fault() == LaunchFault("EVICTED", 1)
    first.close()
    second.close()


def groups_over_sim(*nodes: str) -> list[Group]:
    lane = DomainConfig("sim", fabric=f"moe-{os.urandom(4).hex()}")
    groups = form_in_threads([node_settings(rank, nodes, lane) for rank in range(len(nodes))])
    assert all(isinstance(group, Group) for group in groups), groups
    return [group for group in groups if isinstance(group, Group)]


def dispatch_ones(group: Group, sizes: tuple[int, ...]) -> None:
    step = Step(sizes, torch.bfloat16, torch.int64, 0, 0, 0, None, False)
    tokens = tokens_of(0, step, group.settings.rank)
    group.dispatch(tokens.x, tokens.ids, tokens.weights, sizes=sizes)


def test_rank_that_one_rank_loses_ends_the_steps_of_all_ranks() -> None:
    """The links of the last rank are all up. The timeout is 30 s, and its end would have another code."""
    first, second, third = groups_over_sim("a", "b", "c")
    first._watcher._lose(1, left=False, reason="the cable is cut")
    lost = r"rank 1 \(process \d+\) is lost, as rank 0 \(process \d+\) reports \(LOST\)"
    for group in (second, third):
        with pytest.raises(GroupError, match=lost):
            dispatch_ones(group, (1, 1, 1))
    for group in (first, second, third):
        group.close()


def test_rank_whose_links_broke_is_named_with_the_reason() -> None:
    first, second = groups_over_sim("a", "b")
    first._watcher._lose(1, left=False, reason="the cable is cut")
    cut = r"rank 1 \(process \d+\) cannot be reached: the cable is cut \(LOST\)"
    with pytest.raises(GroupError, match=cut):
        dispatch_ones(first, (1, 1))
    first.close()
    second.close()


def test_loss_of_a_rank_that_has_left_is_no_loss_here() -> None:
    first, second, third = groups_over_sim("a", "b", "c")
    first.lost(2, left=True)
    first.unreachable(2, by=1)
    assert first.explanation().endswith("has left the group")
    for group in (first, second, third):
        group.close()


def test_packet_of_other_sizes_is_the_error_of_the_rank_that_received_it() -> None:
    first, second = groups_over_sim("a", "b")
    other = threading.Thread(target=dispatch_ones, args=(second, (2, 1)))
    other.start()
    sent = r"of 2: rank 1 \(process \d+\) sent a packet of another step or of other sizes"
    with pytest.raises(GroupError, match=sent):
        dispatch_ones(first, (2, 2))
    other.join()
    first.close()
    second.close()


def test_sentence_names_the_rank_of_the_fault_and_not_the_first_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = groups_over_sim("a", "b", "c")
    first.lost(2, left=True)
    assert first._lanes is not None
    with monkeypatch.context() as patch:
        patch.setattr(first._lanes, "failure", lambda rank: f"sent nothing that rank {rank} sends")
        assert " sent nothing that rank 1 sends (LOST)" in first._sentence(LaunchFault("LOST", 1))
    first._lanes.close()  # close() of another thread
    assert "rank 2" in first._sentence(LaunchFault("LOST", 2))
    assert "closed meanwhile" in first._sentence(LaunchFault("LOST", 1))
    for group in (first, second, third):
        group.close()


def test_group_whose_lanes_are_closed_already_is_closed_as_a_whole() -> None:
    before = open_files()
    groups = groups_over_sim("a", "b")
    for group in groups:
        assert group._lanes is not None
        group._lanes.close()
        # The thread may be about to read what the other group's end has caused.
        assert group._watcher._read_lanes(group._lanes)
        group.close()
    assert open_files() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvc-")]


def test_watch_of_lanes_that_close_before_its_thread_runs_ends_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = groups_over_sim("a", "b")
    lanes = groups[0]._lanes
    assert lanes is not None
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: None)
        watcher = Watcher([], groups[0], lanes)
    lanes.close()
    watcher._requests.put(None)
    os.eventfd_write(watcher._wake, 1)
    watcher._run()
    os.close(watcher._wake)
    for group in groups:
        group.close()


def test_eviction_by_a_rank_that_ends_after_it_is_reported_first() -> None:
    reports: list[Any] = []

    class Reports:
        def lost(self, rank: int, left: bool, reason: str = "") -> None:
            reports.append(("lost", rank, left, reason))

        def ended(self, rank: int) -> None:
            raise AssertionError(rank)

        def evicted(self, rank: int, by: int) -> None:
            reports.append(("evicted", rank, by))

        def unreachable(self, rank: int, by: int) -> None:
            raise AssertionError(rank)

    class Ending:
        """The message and the end of rank 1 come at the first call, whichever it is."""

        native: Any
        calls = 0

        def receive(self) -> list[tuple[int, bytes]]:
            self.calls += 1
            return [(1, EVICT + b"\2")] if self.calls > 1 else []

        def departures(self) -> list[tuple[int, bool, str]]:
            self.calls += 1
            return [(1, False, "it ended")]

    lanes = Ending()
    lanes.native = lanes
    watcher = Watcher([], Reports())
    assert not watcher._read_lanes(lanes)  # type: ignore[arg-type]
    watcher.close()
    assert reports == [("evicted", 2, 1), ("lost", 1, False, "it ended")]


def test_row_that_exceeds_a_packet_is_refused_on_all_ranks() -> None:
    lane = DomainConfig("sim", fabric="moe-rows")
    groups = form_in_threads([node_settings(rank, ("a", "b"), lane, row_bytes=256) for rank in range(2)])
    for group in groups:
        assert isinstance(group, Group)
        assert group.fits([1, 1], 256)
        assert not group.fits([1, 1], 257)
        group.close()


# --- Forming


def test_several_machines_without_lanes_are_an_error_of_all_ranks() -> None:
    settings = [settings_of(rank, 2, node=str(rank)) for rank in range(2)]
    for error in errors(form_in_threads(settings)):
        assert "rank 1 is on another machine than rank 0" in error
        assert "A group of several machines needs lanes." in error


def test_lanes_that_differ_are_an_error_of_all_ranks() -> None:
    settings = [node_settings(rank, ("a", "b"), DomainConfig(("tcp", "sim")[rank])) for rank in range(2)]
    for error in errors(form_in_threads(settings)):
        assert "rank 1 has lanes=('sim',), rank 0 has lanes=('tcp',)" in error


def test_lane_that_does_not_open_is_an_error_of_all_ranks_with_the_reason() -> None:
    before = open_files()
    lanes = [DomainConfig("tcp"), DomainConfig("tcp", address="203.0.113.7")]
    for error in errors(form_in_threads([node_settings(rank, ("a", "b"), lanes[rank]) for rank in range(2)])):
        assert "rank 1: it cannot connect to other nodes: " in error
        assert "203.0.113.7" in error
    assert open_files() == before


def test_ranks_of_one_node_open_no_lane() -> None:
    groups = form_in_threads([node_settings(rank, ("a", "a"), DomainConfig("tcp")) for rank in range(2)])
    for group in groups:
        assert isinstance(group, Group)
        assert group._lanes is None
        group.close()


def form_without_one(side: RankPipe) -> str:
    """Rank 1 ends after its HELLO."""
    rounds = 0

    def exchange(message: bytes) -> Sequence[bytes]:
        nonlocal rounds
        rounds += 1
        messages = side.exchange(message)
        if side.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return messages

    with pytest.raises(GroupError) as raised:
        Group.form(node_settings(side.rank, PAIRS, LANES[FAULTY_LANE]), exchange)
    side.note(f"{rounds} {raised.value}")
    return str(raised.value)


def test_rank_that_ends_while_a_group_forms_is_named_at_once_by_its_node() -> None:
    """The ranks of the other node do not see its end. Their exchange ends with this node's engine."""
    notes_of_first = []

    def noted(notes: list[tuple[int, str]], kill: Kill) -> None:
        notes_of_first.extend(notes)
        kill(2)
        kill(3)

    run_ranks(RANKS, form_without_one, noted=noted)
    rank, error = notes_of_first[0]
    assert rank == 0
    assert re.match(
        r"2 .*rank 1 \(process \d+\): the process has ended; the exchange of links did not end", error
    )
    assert not re.search("within 30 s", error), error


def test_malformed_links_are_an_error_of_all_ranks() -> None:
    def change(number: int, rank: int, message: bytes) -> bytes:
        return b"\xc1" if (number, rank) == (2, 1) else message

    lane = DomainConfig("sim", fabric="moe-malformed")
    exchange = ThreadExchange(2, change)
    ends = form_in_threads(
        [node_settings(rank, ("a", "b"), lane) for rank in range(2)], [exchange.of(rank) for rank in range(2)]
    )
    for error in errors(ends):
        assert "rank 1 sent a malformed message" in error


def test_answer_of_another_kind_is_an_error_of_all_ranks() -> None:
    def change(number: int, rank: int, message: bytes) -> bytes:
        return wire.encode(wire.Links({0: b"x"})) if (number, rank) == (3, 1) else message

    lane = DomainConfig("sim", fabric="moe-answer")
    exchange = ThreadExchange(2, change)
    ends = form_in_threads(
        [node_settings(rank, ("a", "b"), lane) for rank in range(2)], [exchange.of(rank) for rank in range(2)]
    )
    for error in errors(ends):
        assert "the bytes are not the answer of a rank" in error


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"device": 0}, "lanes need host memory"),
        ({"survive": True}, "Set survive=False"),
        ({"node": "x" * 65}, "node has 65 characters"),
        ({"lanes": (DomainConfig("tcp"),) * 17}, "At most 16"),
    ],
)
def test_settings_with_lanes_have_bounds(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        settings_of(0, 2, **({"lanes": (DomainConfig("tcp"),)} | more))


def test_process_of_a_far_rank_is_in_its_name() -> None:
    lane = DomainConfig("sim", fabric="moe-names")
    groups = form_in_threads([node_settings(rank, ("a", "b"), lane) for rank in range(2)])
    for rank, group in enumerate(groups):
        assert isinstance(group, Group)
        assert group._name(1 - rank) == f"rank {1 - rank} (process {os.getpid()})"
        group.close()
