"""A room's whole life between two managers, without servers: the tests make the calls of SGLang's queues."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pool_pair import LAYERS, PAGE_SIZE, PATIENCE, Pair, pages, pair, until

from kv_connector.agent.agent import Agent
from kv_connector.protocol.actions import Reached, State
from kv_connector.protocol.wire.messages import Role
from kv_connector.protocol.wire.weight_version import identity
from kv_connector.sglang import bell, internals, plugin
from kv_connector.sglang import manager as manager_module
from kv_connector.sglang.internals import (
    KVPoll,
    UnsupportedConfiguration,
    check_configuration,
    get_parallel,
    rank_facts,
)
from kv_connector.sglang.receiver import Receiver

SOURCE, TARGET = (7, 3, 4, 9), (21, 22, 30, 12)


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair() as two:
        yield two


@pytest.fixture(scope="module")
def with_states() -> Iterator[Pair]:
    with pair(("mamba", "request_row")) as two:
        yield two


@pytest.fixture(autouse=True)
def fresh(two: Pair) -> Iterator[None]:
    two.decode.pages[:] = 0
    for buffer in two.decode.metadata:
        buffer[:] = 0
    yield
    two.idle()


def test_a_prompt_goes_over_in_chunks_with_its_metadata(two: Pair) -> None:
    sender, receiver = two.bootstrapped(1 << 62, TARGET)
    sender.init(4, 2)
    sender.send(pages(SOURCE[:2]))
    assert sender.poll() == KVPoll.WaitingForInput  # the only legal state before the last chunk
    until(lambda: two.holds(SOURCE[:2], TARGET[:2]))
    assert receiver.poll() == KVPoll.Transferring
    assert two.decode.slot_room(5) == 0
    two.prefill.fill_slot(2, 1 << 62)
    sender.send(pages(SOURCE[2:]))
    until(lambda: receiver.poll() == KVPoll.Success)
    assert two.holds(SOURCE, TARGET)
    assert [buffer[5].tobytes() for buffer in two.decode.metadata] == [
        buffer[2].tobytes() for buffer in two.prefill.metadata
    ]
    assert two.decode.slot_room(5) == 1 << 62
    until(lambda: sender.poll() == KVPoll.Success)
    for end in (sender, receiver):
        end.clear()
        end.clear()


def rested(manager: Any, condition: Callable[[], object]) -> None:
    """Waits for the condition turn by turn, as an idle scheduler does."""

    def turns() -> None:
        while not condition():
            manager.rest(None)

    scheduler = threading.Thread(target=turns, daemon=True)
    scheduler.start()
    scheduler.join(PATIENCE)
    assert not scheduler.is_alive(), f"nothing has ended a rest in {PATIENCE} s"


def test_awaited_event_ends_the_schedulers_rest(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bell, "_PATIENCE_MS", 10 * PATIENCE * 1000)
    sender, receiver = two.send_room(58), two.receive_room(58)
    assert sender.poll() == KVPoll.Bootstrapping
    receiver.send_metadata(pages(TARGET), 5, [], decode_prefix_len=0)
    rested(two.prefill.manager, lambda: sender.poll() == KVPoll.WaitingForInput)
    sender.pop_decode_prefix_len()
    sender.init(4, 2)
    two.prefill.fill_slot(2, 58)
    sender.send(pages(SOURCE))
    rested(two.decode.manager, lambda: receiver.poll() == KVPoll.Success)
    rested(two.prefill.manager, lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()


def test_a_worker_among_others_does_not_rest(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers wait for it in each turn, and it receives their agents' reports only in the next
    one."""
    monkeypatch.setattr(bell, "_PATIENCE_MS", 10 * PATIENCE * 1000)
    monkeypatch.setattr(two.decode.manager, "_alone", False)
    turns = iter(range(3))
    rested(two.decode.manager, lambda: next(turns, None) is None)


@pytest.mark.parametrize(
    "sizes",
    [("tp_size", "attn_tp_size", "moe_tp_size"), ("tp_size", "attn_dp_size", "moe_tp_size"), ("pp_size",)],
)
def test_rank_facts_recognise_a_lone_rank(two: Pair, sizes: tuple[str, ...]) -> None:
    args = two.decode.manager.kv_args
    assert rank_facts(args).alone
    with get_parallel().override(**dict.fromkeys(sizes, 2)):
        assert not rank_facts(args).alone


def arrived(agent: Agent, transfer: str) -> int:
    """Returns the pages of a transfer that P knows to be at D."""
    return sum(agent._engine.progress(one.number).pages_done for one in agent._effects.writes.of((transfer,)))


def test_pages_sent_before_the_last_chunk_was_computed_are_counted(two: Pair) -> None:
    agent = two.prefill.manager.agent
    before = agent.stats().pages_before_prefill_end
    sender, receiver = two.bootstrapped(11, TARGET)
    sender.init(4, 2)
    sender.send(pages(SOURCE[:2]))
    until(lambda: arrived(agent, "11") == 2 * 2 * LAYERS, "the engine's word that two pages are there")
    two.prefill.fill_slot(2, 11)
    sender.send(pages(SOURCE[2:]))
    until(lambda: receiver.poll() == KVPoll.Success)
    until(lambda: sender.poll() == KVPoll.Success)
    assert agent.stats().pages_before_prefill_end - before == 2 * 2 * LAYERS
    sender.clear(), receiver.clear()


def test_a_room_that_sglang_has_cleared_stays_cleared(two: Pair) -> None:
    sender = two.send_room(52)
    del two.prefill.manager.request_status[52]
    assert sender.poll() == KVPoll.Failed
    assert 52 not in two.prefill.manager.request_status
    sender.clear()


def send_suffix(two: Pair, room: int) -> None:
    sender, receiver = two.bootstrapped(room, TARGET[2:], prefix=2 * PAGE_SIZE)
    sender.init(2, 1)
    two.prefill.fill_slot(1, room)
    sender.send(pages(SOURCE[2:]))
    until(lambda: receiver.poll() == KVPoll.Success)
    assert two.holds(SOURCE[2:], TARGET[2:])
    assert not two.decode.pages[:, list(TARGET[:2])].any()
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()


def test_pages_that_decode_has_are_not_sent(two: Pair) -> None:
    send_suffix(two, 12)


def test_a_last_chunk_without_pages_brings_the_metadata(two: Pair) -> None:
    sender, receiver = two.bootstrapped(13, TARGET[:2])
    sender.init(3, 1)  # of which D has requested two
    sender.send(pages(SOURCE[:2]))
    until(lambda: two.holds(SOURCE[:2], TARGET[:2]))
    two.prefill.fill_slot(1, 13)
    assert sender.should_send_kv_chunk(0, True)
    sender.num_kv_indices = 2
    sender.send(pages(()))
    until(lambda: receiver.poll() == KVPoll.Success)
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()


@pytest.mark.parametrize("moment", ["queued", "reserved", "half sent", "all sent"])
def test_decode_aborts(two: Pair, moment: str) -> None:
    room = 20 + ["queued", "reserved", "half sent", "all sent"].index(moment)
    if moment == "queued":
        sender, receiver = two.send_room(room), two.receive_room(room)
    else:
        sender, receiver = two.bootstrapped(room, TARGET)
        sender.init(4, 2)
    if moment in ("half sent", "all sent"):
        two.prefill.fill_slot(2, room)
        sender.send(pages(SOURCE if moment == "all sent" else SOURCE[:2]))
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed
    until(lambda: two.decode.manager.is_abort_release_safe(room, 1), "an end of D's")
    with pytest.raises(Exception, match="AbortReq"):
        receiver.failure_exception()
    two.decode.manager.clear_deferred_abort_state(room)
    if moment == "queued":  # P's half cannot complete any more: the router aborts it, too
        until(lambda: sender.poll() == KVPoll.WaitingForInput)
        sender.abort()
    elif moment == "all sent":
        until(lambda: sender.poll() in (KVPoll.Success, KVPoll.Failed))
    else:
        until(lambda: sender.poll() == KVPoll.Failed)
    sender.clear()


def test_an_aborted_requests_pages_are_held_until_prefill_has_answered(two: Pair) -> None:
    sender, receiver = two.bootstrapped(25, TARGET)
    sender.init(4, 2)
    manager, answer = two.decode.manager, threading.Event()
    asked = threading.Event()

    def busy(now: float) -> tuple[()]:
        asked.set()
        assert answer.wait(PATIENCE)
        return ()

    two.prefill.manager.agent._thread.submit(busy)  # its thread processes no message until then
    assert asked.wait(PATIENCE)
    receiver.abort()
    assert not manager.is_abort_release_safe(25, 1)
    until(lambda: manager.agent.live().commands == 0, "CANCEL")
    receiver.clear()
    assert not manager.is_abort_release_safe(25, 1)
    assert 25 in manager._landing
    answer.set()
    until(lambda: manager.is_abort_release_safe(25, 1), "CANCEL_ACK")
    until(lambda: sender.poll() == KVPoll.Failed)
    sender.clear()


def test_a_room_is_refused_while_pages_of_an_earlier_request_may_land(two: Pair) -> None:
    """A client that chooses rooms itself aborts a request, and repeats it at once."""
    sender, receiver = two.bootstrapped(26, TARGET)
    sender.init(4, 2)
    manager, answer = two.decode.manager, threading.Event()
    asked = threading.Event()

    def busy(now: float) -> tuple[()]:
        asked.set()
        assert answer.wait(PATIENCE)
        return ()

    def assert_refused() -> None:
        again = Receiver(manager, two.bootstrap_addr, 26)
        again.init(0)
        assert again.poll() == KVPoll.Failed
        with pytest.raises(Exception, match="room 26 is in use"):
            again.failure_exception()

    assert_refused()  # while the first request runs
    assert receiver.poll() == KVPoll.Transferring
    two.prefill.manager.agent._thread.submit(busy)  # its thread processes no message until then
    assert asked.wait(PATIENCE)
    receiver.abort()
    with pytest.raises(Exception, match="AbortReq"):
        receiver.failure_exception()
    assert_refused()
    assert not manager.is_abort_release_safe(26, 1)
    answer.set()
    until(lambda: manager.is_abort_release_safe(26, 1), "CANCEL_ACK")
    assert_refused()  # SGLang frees the pages in a later turn
    manager.clear_deferred_abort_state(26)
    receiver.clear()
    assert 26 not in manager.request_status
    until(lambda: sender.poll() == KVPoll.Failed)
    sender.clear()
    for _ in range(3):  # the decode server has counted the refused uses, too
        two.send_room(26).clear()
    two.decode.pages[:] = 0
    send_suffix(two, 26)


def assert_in_use(two: Pair, room: int) -> None:
    again = Receiver(two.decode.manager, two.bootstrap_addr, room)
    assert again.poll() == KVPoll.Failed
    with pytest.raises(Exception, match=f"room {room} is in use"):
        again.failure_exception()
    again.clear()


def test_a_room_is_in_use_until_sglang_clears_its_request(two: Pair) -> None:
    """Before a request has pages, and after they arrived, the agent knows nothing that is under way."""
    sender, receiver = two.send_room(27), two.receive_room(27)
    assert_in_use(two, 27)
    receiver.abort()
    receiver.clear()
    assert not two.decode.manager.in_use(27)
    until(lambda: sender.poll() == KVPoll.WaitingForInput)
    sender.abort()
    sender.clear()
    sender, receiver = two.bootstrapped(28, TARGET)
    sender.init(4, 2)
    two.prefill.fill_slot(2, 28)
    sender.send(pages(SOURCE))
    until(lambda: two.decode.manager.agent.state("28") is State.DONE)
    assert_in_use(two, 28)
    until(lambda: receiver.poll() == KVPoll.Success)
    assert_in_use(two, 28)
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()
    assert not two.decode.manager.in_use(28)


def test_a_room_whose_request_sglang_dropped_is_free(two: Pair) -> None:
    sender, receiver = two.send_room(29), two.receive_room(29)
    assert two.decode.manager.in_use(29)
    receiver.abort()
    del receiver
    gc.collect()
    assert not two.decode.manager.in_use(29)
    two.decode.manager.request_status.clear()  # SGLang keeps its own entry
    until(lambda: sender.poll() == KVPoll.WaitingForInput)
    sender.abort()
    sender.clear()


@pytest.mark.parametrize("moment", ["queued", "reserved", "half sent"])
def test_prefill_aborts(two: Pair, moment: str) -> None:
    room = 30 + ["queued", "reserved", "half sent"].index(moment)
    if moment == "queued":
        sender, receiver = two.send_room(room), two.receive_room(room)
        sender.abort()
        receiver.send_metadata(pages(TARGET), 5, [], decode_prefix_len=0)
    else:
        sender, receiver = two.bootstrapped(room, TARGET)
        sender.init(4, 2)
        if moment == "half sent":
            sender.send(pages(SOURCE[:2]))
        sender.abort()
    assert sender.poll() == KVPoll.Failed
    until(lambda: receiver.poll() == KVPoll.Failed)
    with pytest.raises(Exception, match="the prefill engine aborted the request"):
        receiver.failure_exception()
    receiver.ensure_abort_notified(force_arm=True)  # SGLang does this for every failure
    assert receiver.abort_notified
    until(lambda: two.decode.manager.is_abort_release_safe(room, 1))
    receiver.clear(), sender.clear()


def test_a_prompt_without_all_that_decode_wants_fails_on_both_sides(two: Pair) -> None:
    sender, receiver = two.bootstrapped(40, TARGET)
    sender.init(2, 2)
    two.prefill.fill_slot(2, 40)
    sender.send(pages(SOURCE[:2]))
    until(lambda: receiver.poll() == KVPoll.Failed)
    until(lambda: sender.poll() == KVPoll.Failed)
    with pytest.raises(Exception, match="never computed"):
        sender.failure_exception()
    with pytest.raises(Exception, match="never computed"):
        receiver.failure_exception()


def test_an_abort_at_prefill_returns_once_nothing_reads_the_pages(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gives the pages to another request at once, whose bytes D would count."""
    sender, receiver = two.bootstrapped(45, TARGET)
    sender.init(4, 2)
    sender.send(pages(SOURCE[:2]))
    agent, drained = two.prefill.manager.agent, []
    preempt = agent.preempt
    monkeypatch.setattr(agent, "preempt", lambda rooms: (preempt(rooms), drained.extend(rooms)))  # type: ignore[func-returns-value]
    sender.abort()
    assert drained == ["45"]
    until(lambda: receiver.poll() == KVPoll.Failed)
    receiver.clear(), sender.clear()


def test_a_computed_prompt_is_given_up_where_another_rank_has_failed(two: Pair) -> None:
    """SGLang uses the least of all ranks' polls."""
    sender, receiver = two.bootstrapped(46, TARGET)
    sender.init(4, 2)
    two.prefill.fill_slot(2, 46)
    sender.send(pages(SOURCE))
    with pytest.raises(Exception, match="another rank"):
        sender.failure_exception()
    until(lambda: receiver.poll() in (KVPoll.Success, KVPoll.Failed))
    receiver.clear()


def test_early_pages_go_once_their_event_has_come(two: Pair) -> None:
    """On a GPU the previous step may still be computing what P's cache has."""
    sender, receiver = two.bootstrapped(47, TARGET)
    sender.init(4, 2)
    computed = threading.Event()
    sender._early_send_wait_event = SimpleNamespace(synchronize=computed.wait)
    sender.send(pages(SOURCE[:2]))
    two.prefill.fill_slot(2, 47)
    rest = threading.Thread(target=lambda: sender.send(pages(SOURCE[2:])))
    rest.start()
    until(lambda: two.holds(SOURCE[2:], TARGET[2:]))
    assert receiver.poll() == KVPoll.Transferring
    assert not two.decode.pages[:, list(TARGET[:2])].any()
    computed.set()
    rest.join()
    until(lambda: receiver.poll() == KVPoll.Success)
    assert two.holds(SOURCE, TARGET)
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()


def test_the_bootstrap_server_knows_the_agent_and_sglangs_own_socket_is_closed(two: Pair) -> None:
    row = httpx.get(
        f"http://{two.bootstrap_addr}/route",
        params={"prefill_dp_rank": 0, "prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0},
    ).json()
    address = two.prefill.manager._running.address
    assert row == {"rank_ip": address.host, "rank_port": address.port}
    assert two.prefill.manager.server_socket.closed
    assert two.decode.manager.server_socket.closed


def test_sglangs_heartbeat_fails_what_waits_and_not_what_is_under_way(two: Pair) -> None:
    """The heartbeat queries the HTTP server, which may be silent while the transfer continues."""
    sender, receiver = two.bootstrapped(48, TARGET)
    waiting = two.receive_room(49)
    two.decode.manager._handle_node_failure(two.bootstrap_addr)
    assert waiting.poll() == KVPoll.Failed
    assert receiver.poll() == KVPoll.Transferring
    assert not two.decode.manager._engines
    sender.init(4, 2)
    two.prefill.fill_slot(2, 48)
    sender.send(pages(SOURCE))
    until(lambda: receiver.poll() == KVPoll.Success)
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear(), waiting.clear()


def test_bootstrap_server_is_queried_anew_after_a_failure(two: Pair) -> None:
    """P may have restarted at other ports."""
    sender, receiver = two.bootstrapped(51, TARGET)
    assert two.decode.manager._engines
    sender.abort()
    until(lambda: receiver.poll() == KVPoll.Failed)
    assert not two.decode.manager._engines
    assert two.bootstrap_addr not in two.decode.manager.prefill_info_table
    receiver.clear(), sender.clear()


def test_prefill_is_notified_of_requests_that_queue_for_pages_alone(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(
        two.decode.manager.agent, "set_waiting", lambda waiting: told.append([room for room, _ in waiting])
    )
    sender, receiver = two.bootstrapped(53, TARGET[:1])
    queued = two.receive_room(54)
    queued.poll()
    assert told == []
    queued.poll(), queued.poll()
    assert told == [["54"]]
    queued.abort(), queued.clear()
    assert told == [["54"], []]
    sender.init(1, 2)
    two.prefill.fill_slot(2, 53)
    sender.send(pages(SOURCE[:1]))
    until(lambda: receiver.poll() == KVPoll.Success)
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()


def test_decode_may_come_first(two: Pair) -> None:
    receiver = two.receive_room(50)
    receiver.send_metadata(pages(TARGET[:1]), 5, [], decode_prefix_len=0)
    sender = two.send_room(50)
    until(lambda: sender.poll() == KVPoll.WaitingForInput)
    assert sender.pop_decode_prefix_len() == 0
    sender.init(1, 2)
    two.prefill.fill_slot(2, 50)
    sender.send(pages(SOURCE[:1]))
    until(lambda: receiver.poll() == KVPoll.Success)
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()


def test_later_pipeline_stage_reports_its_state_without_being_polled(two: Pair) -> None:
    manager = two.prefill.manager
    manager.agent.report_reached(manager._reached)
    sender, receiver = two.send_room(55), two.receive_room(55)
    receiver.send_metadata(pages(TARGET), 5, [], decode_prefix_len=0)
    until(lambda: manager.request_status[55] == KVPoll.WaitingForInput)
    receiver.abort()
    until(lambda: manager.request_status[55] == KVPoll.Failed)
    until(lambda: two.decode.manager.is_abort_release_safe(55, 1), "an end of D's")
    sender.clear(), receiver.clear()
    manager._reached(Reached(Role.PREFILL, "55", "55", State.MOVING))
    assert 55 not in manager.request_status
    manager.agent.report_reached(lambda reached: None)


def test_earlier_reservation_of_decode_is_known_in_the_first_poll(two: Pair) -> None:
    """Otherwise a batch would be computed without it."""
    receiver = two.receive_room(56)
    receiver.send_metadata(pages(TARGET[:1]), 5, [], decode_prefix_len=0)
    agent = two.prefill.manager.agent
    until(lambda: agent.phases().get("prefill orphan"), "RESERVE")
    senders = [two.send_room(56), two.send_room(57)]
    assert [sender.poll() for sender in senders] == [KVPoll.WaitingForInput, KVPoll.Bootstrapping]
    for sender in senders:
        sender.abort()
    until(lambda: receiver.poll() == KVPoll.Failed)
    receiver.clear(), senders[0].clear(), senders[1].clear()


def test_kv_of_other_weights_is_refused(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """P began the prompt before its weight update, and D has not updated yet."""
    versions = iter(("v1", "v1", "v1"))
    monkeypatch.setattr(manager_module, "weight_version", lambda pushed: next(versions))
    two.prefill.manager.note_weights()
    sender, receiver = two.send_room(80), two.receive_room(80)
    receiver.send_metadata(pages(TARGET), 5, [], decode_prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed)
    with pytest.raises(Exception, match="prefill engine has v1, decode engine has default"):
        receiver.failure_exception()
    until(lambda: sender.poll() == KVPoll.Failed)
    receiver.clear(), sender.clear()
    two.decode.manager.note_weights()
    send_suffix(two, 81)
    two.prefill.manager.note_weights()
    assert next(versions, None) is None
    monkeypatch.undo()
    for half in (two.decode, two.prefill):
        half.manager.note_weights()
    send_suffix(two, 82)


def test_a_weight_version_whose_name_returns_is_warned_of(
    two: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted trainer counts from 1 again. SGLang knows only the name of a version."""
    manager = two.decode.manager
    for version in ("run-1", "run-2", "run-2", "run-1", "run-3"):
        monkeypatch.setattr(manager_module, "weight_version", lambda pushed, version=version: version)
        with caplog.at_level("WARNING"):
            manager.note_weights()
    warned = [record.getMessage() for record in caplog.records if "used before" in record.getMessage()]
    assert [message.split(" was used before")[0] for message in warned] == ["write_imm: weight version run-1"]
    monkeypatch.undo()
    manager.note_weights()


def test_weight_versions_of_long_names_are_distinguished(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control message has room for 128 characters."""
    serving = SimpleNamespace(weight_version="v" * 200 + "1")
    monkeypatch.setattr(internals, "get_serving", lambda: serving)
    one = internals.weight_version()
    for half in (two.decode, two.prefill):
        half.manager.note_weights()
    send_suffix(two, 84)
    serving.weight_version = "v" * 200 + "2"
    assert internals.weight_version() != one
    monkeypatch.undo()
    for half in (two.decode, two.prefill):
        half.manager.note_weights()


def test_pushed_versions_of_one_name_are_distinguished(
    two: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their identities differ by the contents. The first version returns with the same contents."""
    monkeypatch.setattr(internals, "get_serving", lambda: SimpleNamespace(weight_version="7"))
    one, other = identity("7", "one"), identity("7", "other")
    two.prefill.manager.note_weights(one)
    two.decode.manager.note_weights(other)
    receiver, sender = two.receive_room(85), two.send_room(85)
    receiver.send_metadata(pages(TARGET), 5, [], decode_prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed)
    with pytest.raises(Exception, match=f"prefill engine has {one}, decode engine has {other}"):
        receiver.failure_exception()
    until(lambda: sender.poll() == KVPoll.Failed)
    receiver.clear(), sender.clear()
    with caplog.at_level("WARNING"):
        two.decode.manager.note_weights(one)
        two.decode.manager.note_weights(other)
        two.decode.manager.note_weights(one)
    assert "used before" not in caplog.text
    send_suffix(two, 86)
    assert internals.weight_version(identity("8", "one")) == "7", "an update of SGLang's own came after it"
    monkeypatch.undo()
    for half in (two.decode, two.prefill):
        half.manager.note_weights()


def test_the_same_weight_version_again_costs_no_prompt(two: Pair) -> None:
    """SGLang reports it for each bucket of an update."""
    sender, receiver = two.bootstrapped(83, TARGET)
    sender.init(4, 2)
    sender.send(pages(SOURCE[:2]))
    two.prefill.manager.note_weights()
    two.prefill.fill_slot(2, 83)
    sender.send(pages(SOURCE[2:]))
    until(lambda: receiver.poll() == KVPoll.Success)
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()


def test_a_decode_engine_that_frees_pages_before_they_are_drained_is_refused(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = two.decode.manager.kv_args
    check_configuration(args)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
    with pytest.raises(UnsupportedConfiguration, match="SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0"):
        check_configuration(args)


def test_the_pool_of_deepseek_v4_is_refused_by_name(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    args = two.decode.manager.kv_args
    monkeypatch.setattr(args, "mla_compression_ratios", [4, 128, 4])
    with pytest.raises(
        UnsupportedConfiguration, match=r"DeepSeekV4TokenToKVPool \(compression ratios 4, 128\)"
    ):
        check_configuration(args)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_room_is_used_again(two: Pair, first: str) -> None:
    """A client that chooses rooms itself may use one again."""
    room = {"prefill": 90, "decode": 91}[first]
    send_suffix(two, room)
    two.decode.pages[:] = 0
    if first == "prefill":
        send_suffix(two, room)
    else:
        send_decode_first(two, room)


def send_decode_first(two: Pair, room: int) -> None:
    """The order of a request that is computed again: D requests its pages, and has P compute them."""
    receiver = two.receive_room(room)
    receiver.send_metadata(pages(TARGET), 5, [], decode_prefix_len=0)
    sender = two.send_room(room)
    until(lambda: sender.poll() == KVPoll.WaitingForInput)
    assert sender.pop_decode_prefix_len() == 0
    sender.init(4, 2)
    two.prefill.fill_slot(2, room)
    sender.send(pages(SOURCE))
    until(lambda: receiver.poll() == KVPoll.Success)
    assert two.holds(SOURCE, TARGET)
    assert two.decode.slot_room(5) == room
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()


def test_a_retracted_request_is_computed_again_by_a_restarted_prefill_server(two: Pair) -> None:
    """SGLang retracts running requests for a weight update, any number of times."""
    queue = SimpleNamespace(transfer_backend=SimpleNamespace(value=plugin.BACKEND))
    request = SimpleNamespace(bootstrap_room=92)
    send_suffix(two, request.bootstrap_room)
    plugin._change_room(queue, request, is_rebootstrap=True)
    send_decode_first(two, request.bootstrap_room)
    plugin._change_room(queue, request, is_rebootstrap=True)
    two.restart_prefill()
    two.decode.pages[:] = 0
    send_decode_first(two, request.bootstrap_room)


def test_a_recompute_that_prefill_answers_with_an_error_fails_with_the_agents_cause(two: Pair) -> None:
    """P's two answers, the agent's and that of its HTTP server, arrive in any order."""
    two.prefill.manager.note_torn("step-2")
    receiver = two.receive_room(93)
    receiver.send_metadata(pages(TARGET), 5, [], decode_prefix_len=0)
    until(receiver.failure, "the agent's FAIL")
    two.decode.manager._fail_prefill_recompute(receiver, "status=500")
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(Exception, match="prefill engine has parts of step-2 and default, decode engine has"):
        receiver.failure_exception()
    # The answer of an ended request changes nothing.
    two.decode.manager._fail_prefill_recompute(receiver, "status=500")
    assert 93 not in two.decode.manager.failure_records
    until(lambda: two.decode.manager.is_abort_release_safe(93, 1))
    receiver.clear()
    two.prefill.manager.note_weights()
    send_suffix(two, 94)


def test_a_recompute_without_a_prefill_server_fails_with_its_address(two: Pair) -> None:
    receiver = two.receive_room(95)
    two.decode.manager._fail_prefill_recompute(receiver, "request errored for rid=7")
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(Exception, match=rf"prefill server of {two.bootstrap_addr} did not .* rid=7"):
        receiver.failure_exception()
    unknown = Receiver(two.decode.manager, "127.0.0.1:1", 96)
    unknown.abort()  # SGLang aborts it after 15 attempts to reach the bootstrap server
    assert unknown.poll() == KVPoll.Failed
    with pytest.raises(Exception, match=r"bootstrap server at 127\.0\.0\.1:1 named its prefill engine"):
        unknown.failure_exception()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_prefill_engine_with_parts_of_two_versions_refuses_at_once(two: Pair, moment: str) -> None:
    """It is paused, so its scheduler does not look at the request."""
    room = {"before": 97, "after": 98}[moment]
    manager = two.prefill.manager
    if moment == "after":
        manager.note_torn("step-2")
    receiver = two.receive_room(room)
    receiver.send_metadata(pages(TARGET), 5, [], decode_prefix_len=0)
    if moment == "before":
        until(lambda: manager.agent.phases().get("prefill orphan"), "RESERVE")
        manager.note_torn("step-2")
    until(lambda: receiver.poll() == KVPoll.Failed)
    with pytest.raises(
        Exception, match="prefill engine has parts of step-2 and default, decode engine has default"
    ):
        receiver.failure_exception()
    until(lambda: two.decode.manager.is_abort_release_safe(room, 1))
    receiver.clear()
    manager.note_weights()
    send_suffix(two, room + 100)


def test_an_engine_that_stays_torn_names_the_last_whole_version(
    two: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next push may fail as well, or bring the version back that was whole before."""
    manager = two.prefill.manager
    given: list[tuple[str, bool]] = []

    def note(version: str, *, of_checkpoint: bool) -> None:
        given.append((version, of_checkpoint))

    monkeypatch.setattr(manager, "_running", SimpleNamespace(set_weights=note))
    manager.note_torn("step-2")
    manager.note_torn("step-2")
    manager.note_torn("")
    with caplog.at_level("WARNING"):
        manager.note_weights()
        manager.note_weights()
    names = ["parts of step-2 and default"] * 2 + ["parts of another version and default", "default"]
    assert given == [(name, False) for name in names]
    assert not caplog.records


def test_memory_is_released_and_resumed(two: Pair) -> None:
    """SGLang drops its requests without clearing them, and the pages that it held for aborted ones."""
    manager = two.decode.manager
    sender, aborted = two.bootstrapped(61, TARGET)
    aborted.abort()
    waiting = two.receive_room(62)
    waiting.poll(), waiting.poll()
    assert all(manager.in_use(room) for room in (61, 62))
    assert manager._waiting
    for half in (two.decode, two.prefill):
        half.manager.deregister_buffer_to_engine()
        half.manager.register_buffer_to_engine()
    assert not any(manager.in_use(room) for room in (61, 62))
    assert not manager._waiting
    manager.request_status.clear()  # SGLang keeps its own entries
    sender.clear()
    send_suffix(two, 60)


def test_states_go_over_as_rows(with_states: Pair) -> None:
    two = with_states
    sender, receiver = two.bootstrapped(70, TARGET)
    sender.init(4, 2)
    two.prefill.fill_slot(2, 70)
    sender.send(pages(SOURCE), [[pages((6,))], pages((1,))])
    until(lambda: receiver.poll() == KVPoll.Success)
    assert two.holds(SOURCE, TARGET)
    for number, row in enumerate((6, 1)):
        assert (two.decode.states[number][3] == two.prefill.states[number][row]).all()
    until(lambda: sender.poll() == KVPoll.Success)
    sender.clear(), receiver.clear()
    two.idle()
