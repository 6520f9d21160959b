"""DEFER and DUE: a decode engine short of blocks takes them when the prompt is about to be computed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from prefill_setup import OTHER, PEER, TIMES
from protocol_setup import (
    P_ADDRESS,
    all_of,
    computed,
    decode_request,
    every,
    layout,
    only,
    pairs,
    prefill_request,
    reserve,
    worker,
)

from kv_connector.protocol.actions import (
    Accept,
    Address,
    Connect,
    Deliver,
    Dial,
    Distrust,
    EngineNotFound,
    FindEngine,
    HangUp,
    Inquire,
    Log,
    PromptDue,
    Reply,
    Send,
    SessionUp,
)
from kv_connector.protocol.decode.decode_machine import DecodeMachine
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine
from kv_connector.protocol.session.peers import PeerTable
from kv_connector.protocol.session.sessions import REMEMBERED_OLDER, Identity, PeersAction
from kv_connector.protocol.wire.messages import (
    DEFER_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Defer,
    Directory,
    Due,
    Hello,
    HelloNak,
    Locate,
    NakReason,
    Release,
    Role,
)

PAGES = layout(num_blocks=32)
DUE = PromptDue("t")
NOTICE = [Send(PEER, Due("t"))]


# --- The prefill side


def notices(actions: list[object]) -> list[Send]:
    return [send for send in every(actions, Send) if isinstance(send.message, Due)]


def test_prefill_sends_due_when_its_engine_is_about_to_compute(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    assert machine.defer(1.0, PEER, Defer("t")) == []
    assert machine.due(2.0, "t") == NOTICE
    assert machine.due(3.0, "t") == []


def test_prefill_sends_due_with_the_first_pages(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.defer(1.0, PEER, Defer("t"))
    assert machine.pages_computed(2.0, computed((1, 2))) == NOTICE


def test_prefill_sends_due_at_once_for_a_prompt_that_has_begun(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.pages_computed(1.0, computed((1, 2)))
    assert machine.defer(2.0, PEER, Defer("t")) == NOTICE
    assert machine.defer(2.0, OTHER, Defer("t")) == [Send(OTHER, Due("t"))]


def test_prefill_remembers_a_defer_that_precedes_the_request(machine: PrefillMachine) -> None:
    assert machine.defer(0.0, PEER, Defer("t")) == []
    assert machine.next_deadline() == TIMES.orphan
    machine.expect(1.0, prefill_request())
    assert machine.tick(TIMES.orphan) == []
    assert machine.due(100.0, "t") == NOTICE


def test_prefill_sends_due_if_the_request_does_not_arrive(machine: PrefillMachine) -> None:
    machine.defer(0.0, PEER, Defer("t"))
    assert machine.tick(TIMES.orphan) == NOTICE
    assert machine.next_deadline() is None


@pytest.mark.parametrize("ok", [True, False])
def test_prefill_sends_due_at_the_end_of_a_request(machine: PrefillMachine, ok: bool) -> None:
    machine.expect(0.0, prefill_request())
    machine.defer(0.0, PEER, Defer("t"))
    assert notices([*machine.request_finished(1.0, "t", ok, "", aborted=not ok)]) == NOTICE
    assert machine.defer(2.0, PEER, Defer("t")) == NOTICE


def test_prefill_sends_due_for_a_transfer_that_is_over(machine: PrefillMachine) -> None:
    machine.release(0.0, PEER, Release("t"))
    assert machine.defer(1.0, PEER, Defer("t")) == NOTICE


def test_prefill_sends_due_for_all_when_it_shuts_down(machine: PrefillMachine) -> None:
    machine.defer(0.0, PEER, Defer("t"))
    assert notices([*machine.close(1.0)]) == NOTICE
    assert machine.defer(2.0, PEER, Defer("t")) == NOTICE


def test_prefill_sends_nothing_to_a_decode_engine_that_waits_no_more(machine: PrefillMachine) -> None:
    machine.expect(0.0, prefill_request())
    machine.defer(0.0, PEER, Defer("t"))
    machine.reserve(1.0, PEER, reserve())
    assert machine.due(2.0, "t") == []
    machine.expect(0.0, replace(prefill_request("u"), request_id="p-u"))
    machine.defer(0.0, OTHER, Defer("u"))
    machine.peer_down(1.0, OTHER, "gone")
    assert machine.due(2.0, "u") == []


# --- The decode side


@pytest.fixture
def decode() -> DecodeMachine:
    return DecodeMachine(PAGES, TIMES)


def deferred(decode: DecodeMachine, *, knows_defer: bool = True) -> list[object]:
    """Defers a load, and brings its session up. Returns the actions that follow."""
    assert decode.deferring.defer(0.0, "t", P_ADDRESS) == [FindEngine(P_ADDRESS)]
    found = decode.engine_found(0.0, P_ADDRESS, (worker(PAGES),))
    assert found.count(Dial(P_ADDRESS, P_ADDRESS, all_of(PAGES), PAGES)) >= 1
    return [*decode.peer_up(0.0, P_ADDRESS, PEER, knows_defer=knows_defer)]


def test_decode_defers_until_due(decode: DecodeMachine) -> None:
    assert deferred(decode) == [Send(PEER, Defer("t"))]
    assert decode.deferring.due(OTHER, Due("t")) == []
    assert decode.deferring.due(PEER, Due("t")) == [DUE]
    assert decode.deferring.due(PEER, Due("t")) == []
    assert decode.next_deadline() is None


def test_decode_sends_defer_over_a_session_that_is_up(decode: DecodeMachine) -> None:
    deferred(decode)
    assert decode.deferring.defer(1.0, "u", P_ADDRESS) == [Send(PEER, Defer("u"))]
    assert decode.deferring.defer(1.0, "u", P_ADDRESS) == []


def test_decode_does_not_wait_for_an_older_engine(decode: DecodeMachine) -> None:
    assert deferred(decode, knows_defer=False) == [DUE]


@pytest.mark.parametrize("lost", ["session", "dial", "engine", "time", "closing"])
def test_decode_waits_no_more_after_a_failure(decode: DecodeMachine, lost: str) -> None:
    if lost in ("session", "time", "closing"):
        deferred(decode)
    else:
        decode.deferring.defer(0.0, "t", P_ADDRESS)
    match lost:
        case "session":
            actions = decode.peer_down(1.0, PEER, "gone")
        case "dial":
            decode.engine_found(0.0, P_ADDRESS, (worker(PAGES),))
            actions = decode.dial_failed(1.0, P_ADDRESS, "gone")
        case "engine":
            actions = decode.engine_not_found(1.0, P_ADDRESS, "gone")
        case "time":
            actions = decode.tick(TIMES.transfer)
            assert every(actions, Log)
        case _:
            actions = decode.close(1.0)
    assert only(actions, PromptDue) == DUE
    assert len(decode.deferring) == 0


def test_decode_ends_the_wait_with_its_reservation(decode: DecodeMachine) -> None:
    deferred(decode)
    decode.reserve(1.0, decode_request())
    assert decode.deferring.due(PEER, Due("t")) == []
    deferred_again = decode.deferring.defer(2.0, "u", P_ADDRESS)
    assert deferred_again == [Send(PEER, Defer("u"))]
    decode.release(3.0, "u", P_ADDRESS)
    assert len(decode.deferring) == 0


# --- Sessions with older releases


def table(engine: str, role: Role) -> PeerTable:
    return PeerTable(Identity(engine, f"{engine}-1", role, 0, pairs(), PAGES, (b"region",)), TIMES)


def located(decode: PeerTable, actions: list[PeersAction], source: bytes) -> Locate:
    inquiry = only(actions, Inquire)
    message = only(decode.connected(0.0, inquiry.peer, source), Reply).message
    assert isinstance(message, Locate)
    return message


def hello_of(decode: PeerTable) -> Hello:
    connect = only(decode.dial(0.0, P_ADDRESS, P_ADDRESS, all_of(PAGES), PAGES), Connect)
    message = only(decode.offered(0.0, connect.peer, b"session", b"offer"), Reply).message
    assert isinstance(message, Hello)
    return message


REFUSED = HelloNak(NakReason.INCOMPATIBLE, "protocol: prefill engine has 3, decode engine has 5")


def test_decode_repeats_locate_for_an_older_engine() -> None:
    decode, prefill = table("d", Role.DECODE), table("p", Role.PREFILL)
    prefill.set_ranks((worker(PAGES),))
    first = located(decode, decode.find(0.0, P_ADDRESS), b"first")
    assert first.protocol == DEFER_PROTOCOL_VERSION
    actions = decode.receive(0.0, b"first", REFUSED)
    assert only(actions, HangUp) == HangUp(b"first")
    assert not every(actions, EngineNotFound)
    second = located(decode, actions, b"second")
    assert second.protocol == PROTOCOL_VERSION
    # LOCATE may have been repeated over the first connection.
    decode.receive(0.0, b"first", REFUSED)
    directory = only(prefill.receive(0.0, b"caller", second), Reply).message
    decode.receive(0.0, b"second", directory)
    assert hello_of(decode).protocol == PROTOCOL_VERSION


def test_a_search_does_not_change_the_version_of_sessions_that_are_being_made() -> None:
    """Another worker's session failed meanwhile, so D locates the engine again."""
    decode = table("d", Role.DECODE)
    located(decode, decode.find(0.0, P_ADDRESS), b"first")
    located(decode, decode.receive(0.0, b"first", REFUSED), b"second")
    decode.receive(0.0, b"second", Directory("p", (worker(PAGES),)))
    connect = only(decode.dial(0.0, P_ADDRESS, P_ADDRESS, all_of(PAGES), PAGES), Connect)
    assert located(decode, decode.find(0.1, P_ADDRESS), b"third").protocol == DEFER_PROTOCOL_VERSION
    hello = only(decode.offered(0.1, connect.peer, b"session", b"offer"), Reply).message
    assert isinstance(hello, Hello)
    assert hello.protocol == PROTOCOL_VERSION
    again = only(decode.pass_over(0.1, connect.peer, "verbs", "no route"), Connect)
    hello = only(decode.offered(0.1, again.peer, b"session 2", b"offer"), Reply).message
    assert isinstance(hello, Hello)
    assert hello.protocol == PROTOCOL_VERSION


def test_a_search_that_has_no_answer_yet_does_not_make_an_older_engine_newer() -> None:
    """D dials a worker by the directory that it still has, while it locates the engine again."""
    decode, prefill = table("d", Role.DECODE), table("p", Role.PREFILL)
    prefill.set_ranks((worker(PAGES),))
    located(decode, decode.find(0.0, P_ADDRESS), b"first")
    located(decode, decode.receive(0.0, b"first", REFUSED), b"second")
    decode.receive(0.0, b"second", Directory("p", (worker(PAGES),)))
    newer = located(decode, decode.find(0.1, P_ADDRESS), b"third")
    assert newer.protocol == DEFER_PROTOCOL_VERSION
    assert hello_of(decode).protocol == PROTOCOL_VERSION
    # The engine was replaced by a newer one, which answers.
    decode.drop(0.2, decode._sessions.by_address[P_ADDRESS], "it was replaced")
    decode.receive(0.2, b"third", only(prefill.receive(0.2, b"caller", newer), Reply).message)
    assert hello_of(decode).protocol == DEFER_PROTOCOL_VERSION


def test_decode_tries_the_newer_version_again_when_it_locates_the_engine_again() -> None:
    decode = table("d", Role.DECODE)
    located(decode, decode.find(0.0, P_ADDRESS), b"first")
    located(decode, decode.receive(0.0, b"first", REFUSED), b"second")
    assert only(decode.receive(0.0, b"second", REFUSED), EngineNotFound).engine == P_ADDRESS
    assert located(decode, decode.find(9.0, P_ADDRESS), b"third").protocol == DEFER_PROTOCOL_VERSION


def test_decode_remembers_a_limited_number_of_older_engines() -> None:
    decode = table("d", Role.DECODE)
    for port in range(REMEMBERED_OLDER + 2):
        engine = Address("10.0.0.1", port + 1)
        located(decode, decode.find(0.0, engine), b"first %d" % port)
        located(decode, decode.receive(0.0, b"first %d" % port, REFUSED), b"second %d" % port)
        decode.receive(0.0, b"second %d" % port, REFUSED)
    older = decode._sessions.older
    assert len(older) == REMEMBERED_OLDER
    assert Address("10.0.0.1", 2) not in older
    assert engine in older


@pytest.mark.parametrize("version", [PROTOCOL_VERSION, DEFER_PROTOCOL_VERSION])
def test_prefill_takes_defer_only_in_sessions_that_know_it(version: int) -> None:
    decode, prefill = table("d", Role.DECODE), table("p", Role.PREFILL)
    hello = msgspec.structs.replace(hello_of(decode), protocol=version)
    accept = only(prefill.receive(0.0, b"caller", hello), Accept)
    prefill.accepted(0.0, accept.peer, "tcp", b"answer")
    actions = prefill.receive(0.0, b"caller", Defer("t"))
    if version == PROTOCOL_VERSION:
        assert every(actions, Distrust)
    else:
        assert actions == [Deliver(accept.peer, Defer("t"))]


@pytest.mark.parametrize("message", [Defer("t"), Due("t")])
def test_decode_takes_due_and_no_defer(message: Defer | Due) -> None:
    decode, prefill = table("d", Role.DECODE), table("p", Role.PREFILL)
    accept = only(prefill.receive(0.0, b"caller", hello_of(decode)), Accept)
    ack = only(prefill.accepted(0.0, accept.peer, "tcp", b"answer"), Reply).message
    decode.receive(0.0, b"session", ack)
    peer = decode.peers()[0].peer
    assert only(decode.completed(0.0, peer), SessionUp).knows_defer
    actions = decode.receive(0.0, b"session", message)
    assert actions == [Deliver(peer, message)] if isinstance(message, Due) else every(actions, Distrust)
