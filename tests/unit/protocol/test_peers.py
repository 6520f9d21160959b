"""Membership: sessions come up, fall silent, die, and are replaced by new ones."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from protocol_setup import ADVICE, P_ADDRESS, all_of, every, layout, only, pairs, reserve, worker

from kv_connector.protocol.actions import (
    Accept,
    Address,
    Complete,
    Connect,
    Deliver,
    DialFailed,
    Distrust,
    EngineFound,
    EngineNotFound,
    HangUp,
    Inquire,
    Log,
    Reply,
    SessionOver,
    SessionUp,
)
from kv_connector.protocol.session.peers import PeerTable
from kv_connector.protocol.session.sessions import (
    REMEMBERED_ADDRESSES,
    Identity,
    PeersAction,
    PeerState,
)
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import (
    MAX_TEXT,
    MAX_WAITING,
    PROTOCOL_VERSION,
    Bye,
    Cancel,
    CancelAck,
    Directory,
    Fail,
    FailCode,
    Hello,
    HelloAck,
    HelloNak,
    Locate,
    NakReason,
    Ping,
    Pong,
    Release,
    Role,
    fingerprint,
)

TIMES = Timeouts()
DIALLED = b"dialled 1"  # D's name for the connection
CALLER = b"router 1"  # P's name for it
WANTS = all_of(layout())


def identity(engine: str, role: Role, **changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "engine_id": engine,
        "incarnation": f"{engine}-boot1",
        "role": role,
        "rank": 0,
        "fingerprint": pairs(),
        "layout": layout(),
        "regions": (b"region",),
        "advice": ADVICE,
    }
    return Identity(**(fields | changes))


def table(engine: str, role: Role, **changes: Any) -> PeerTable:
    return PeerTable(identity(engine, role, **changes), TIMES)


@pytest.fixture
def decode() -> PeerTable:
    return table("d0", Role.DECODE)


@pytest.fixture
def prefill() -> PeerTable:
    return table("p0", Role.PREFILL)


def dial(decode: PeerTable, now: float = 0.0, source: bytes = DIALLED) -> Hello:
    """D dials. Returns the HELLO that it sends."""
    connect = only(decode.dial(now, P_ADDRESS, P_ADDRESS, WANTS, layout()), Connect)
    reply = only(decode.offered(now, connect.peer, source, b"offer"), Reply)
    assert reply.source == source
    assert isinstance(reply.message, Hello)
    return reply.message


def accept(
    prefill: PeerTable, hello: Hello, now: float = 0.0, source: bytes = CALLER
) -> tuple[int, HelloAck]:
    """P accepts. Returns its number for D, and the HELLO_ACK that it sends."""
    ask = only(prefill.receive(now, source, hello), Accept)
    actions = prefill.accepted(now, ask.peer, "tcp", b"answer")
    assert only(actions, SessionUp) == SessionUp(ask.peer, None, hello.incarnation, knows_defer=True)
    ack = only(actions, Reply)
    assert ack.source == source
    assert isinstance(ack.message, HelloAck)
    return ask.peer, ack.message


def up(decode: PeerTable, prefill: PeerTable, now: float = 0.0) -> tuple[int, int]:
    """Opens a session between the two. Returns D's number for P, and P's number for D."""
    peer, ack = accept(prefill, dial(decode, now), now)
    complete = only(decode.receive(now, DIALLED, ack), Complete)
    assert (complete.answer, complete.lane) == (b"answer", "tcp")
    actions = decode.completed(now, complete.peer)
    assert only(actions, SessionUp) == SessionUp(complete.peer, P_ADDRESS, ack.incarnation, knows_defer=True)
    return complete.peer, peer


def states(peers: PeerTable) -> list[PeerState]:
    return [info.state for info in peers.peers()]


def nak(actions: list[PeersAction]) -> HelloNak:
    message = only(actions, Reply).message
    assert isinstance(message, HelloNak)
    return message


# --- Coming up


def test_session_comes_up_and_both_sides_report_it_once_with_its_lane(
    decode: PeerTable, prefill: PeerTable
) -> None:
    hello = dial(decode)
    assert (hello.engine_id, hello.role) == ("d0", Role.DECODE)
    assert (hello.offer, hello.regions) == (b"offer", (b"region",))
    _, ack = accept(prefill, hello)
    complete = only(decode.receive(0.0, DIALLED, ack), Complete)
    log = only(decode.completed(0.0, complete.peer), Log)
    assert (log.level, log.text) == (logging.INFO, f"UP: prefill peer p0/0 at {P_ADDRESS}, lane tcp")
    (info,) = prefill.peers()
    assert (info.name, info.role, info.state, info.lane) == ("d0/0", Role.DECODE, PeerState.UP, "tcp")
    assert states(decode) == [PeerState.UP]


def test_an_address_is_dialled_once(decode: PeerTable, prefill: PeerTable) -> None:
    dial(decode)
    assert decode.dial(0.0, P_ADDRESS, P_ADDRESS, WANTS, layout()) == []
    _, ack = accept(prefill, dial(table("d1", Role.DECODE)))
    assert only(decode.receive(0.0, DIALLED, ack), Complete)
    assert decode.dial(0.0, P_ADDRESS, P_ADDRESS, WANTS, layout()) == []
    assert len(decode.peers()) == 1


def test_hello_is_repeated_with_growing_pauses_until_dialling_is_given_up(decode: PeerTable) -> None:
    hello = dial(decode)
    said = []
    while True:
        now = decode.next_deadline()
        assert now is not None
        actions = decode.tick(now)
        if every(actions, DialFailed):
            break
        assert only(actions, Reply).message == hello
        said.append(now)
    assert said == [1.0, 3.0]
    assert now == TIMES.connect
    failed = only(actions, DialFailed)
    assert failed.address == P_ADDRESS
    assert "no answer to HELLO within 5 s" in failed.reason
    assert only(actions, HangUp).source == DIALLED
    assert only(actions, SessionOver)
    assert decode.peers() == ()
    assert decode.next_deadline() is None


def test_a_repeated_hello_gets_the_same_answer(decode: PeerTable, prefill: PeerTable) -> None:
    hello = dial(decode)
    _, ack = accept(prefill, hello)
    assert prefill.receive(1.0, CALLER, hello) == [Reply(CALLER, ack)]
    complete = only(decode.receive(1.0, DIALLED, ack), Complete)
    decode.completed(1.0, complete.peer)
    assert decode.receive(1.0, DIALLED, ack) == []  # the answer to the repetition


def test_an_offer_that_cannot_be_made_fails_the_dial(decode: PeerTable) -> None:
    connect = only(decode.dial(0.0, P_ADDRESS, P_ADDRESS, WANTS, layout()), Connect)
    actions = decode.dial_error(0.0, connect.peer, "REFUSED in offer")
    assert only(actions, DialFailed) == DialFailed(P_ADDRESS, "REFUSED in offer")
    assert decode.peers() == ()


def test_an_answer_that_the_engine_refuses_fails_the_dial(decode: PeerTable, prefill: PeerTable) -> None:
    _, ack = accept(prefill, dial(decode))
    complete = only(decode.receive(0.0, DIALLED, ack), Complete)
    actions = decode.dial_error(0.0, complete.peer, "REFUSED in complete")
    assert only(actions, DialFailed).reason == "REFUSED in complete"
    assert only(actions, Reply).message == Bye("REFUSED in complete")


# --- Refusals


def test_a_refusal_names_what_differs_and_what_to_do(prefill: PeerTable) -> None:
    hello = dial(table("d0", Role.DECODE, fingerprint=pairs(block_sizes=("32",))))
    answer = nak(prefill.receive(0.0, CALLER, hello))
    assert answer.reason is NakReason.INCOMPATIBLE
    assert answer.message == (
        "block_sizes: prefill engine has (16), decode engine has (32): give both sides the same block size"
    )
    assert prefill.peers() == ()


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (Role.DECODE, Role.DECODE, "p0 is a decode engine"),
        (Role.PREFILL, Role.PREFILL, "d0 is a prefill engine"),
        (Role.BOTH, Role.PREFILL, "d0 is a prefill engine"),
    ],
)
def test_two_engines_of_one_role_are_refused(ours: Role, theirs: Role, words: str) -> None:
    answer = nak(table("p0", ours).receive(0.0, CALLER, dial(table("d0", theirs))))
    assert answer.reason is NakReason.WRONG_ROLE
    assert words in answer.message


def test_an_engine_of_both_roles_dials_and_is_dialled() -> None:
    one, two = table("e1", Role.BOTH), table("e2", Role.BOTH)
    up(one, two)
    accept(one, dial(two))
    assert [info.role for info in one.peers()] == [Role.PREFILL, Role.DECODE]


def test_another_release_of_the_protocol_is_refused_for_that_reason_alone(prefill: PeerTable) -> None:
    hello = msgspec.structs.replace(
        dial(table("d0", Role.DECODE, fingerprint=pairs(model="other"))), protocol=PROTOCOL_VERSION - 1
    )
    assert nak(prefill.receive(0.0, CALLER, hello)) == HelloNak(
        NakReason.INCOMPATIBLE,
        f"protocol: prefill engine has {PROTOCOL_VERSION}, decode engine has {PROTOCOL_VERSION - 1}: "
        "run the same release of kv-connector on both sides",
    )


def test_a_peer_that_differs_in_everything_fills_no_log(prefill: PeerTable) -> None:
    """A HELLO may have megabytes. The logged, remembered and answered text has at most the length of a
    message's text."""
    names = {f"name{i}": ("x" * MAX_TEXT,) * 4 for i in range(64)}
    actions = prefill.receive(0.0, CALLER, dial(table("d0", Role.DECODE, fingerprint=fingerprint(names))))
    assert len(nak(actions).message) == MAX_TEXT
    assert len(only(actions, Log).text) < 2 * MAX_TEXT


def test_refusal_without_a_lane_has_its_reason(decode: PeerTable, prefill: PeerTable) -> None:
    ask = only(prefill.receive(0.0, CALLER, dial(decode)), Accept)
    actions = prefill.refused(0.0, ask.peer, NakReason.NO_LANE, "NOT_REACHABLE in accept")
    assert nak(actions) == HelloNak(NakReason.NO_LANE, "NOT_REACHABLE in accept")
    assert only(actions, SessionOver).peer == ask.peer  # the transfer engine's begun link is fenced
    assert prefill.peers() == ()


def test_a_refusal_fails_the_dial_and_is_logged_once(decode: PeerTable) -> None:
    refusal = HelloNak(NakReason.INCOMPATIBLE, "start both engines with the same --block-size")
    for attempt in range(3):
        source = b"dialled %d" % attempt
        dial(decode, source=source)
        actions = decode.receive(0.0, source, refusal)
        failed = only(actions, DialFailed)
        assert "refused: incompatible: start both engines with the same --block-size" in failed.reason
        assert only(actions, HangUp).source == source
        assert [log.level for log in every(actions, Log)] == ([logging.ERROR] if attempt == 0 else [])
    dial(decode)
    assert every(decode.receive(0.0, DIALLED, HelloNak(NakReason.DRAINING, "")), Log)  # another reason


def test_a_refusal_that_comes_back_after_a_session_is_logged_again(
    decode: PeerTable, prefill: PeerTable
) -> None:
    refusal = HelloNak(NakReason.DRAINING, "")
    dial(decode)
    assert every(decode.receive(0.0, DIALLED, refusal), Log)
    p, _ = up(decode, prefill)
    decode.drop(0.0, p, "x")
    dial(decode)
    assert every(decode.receive(0.0, DIALLED, refusal), Log)


def test_leaving_engine_accepts_no_new_peer(decode: PeerTable, prefill: PeerTable) -> None:
    prefill.drain()
    assert nak(prefill.receive(0.0, CALLER, dial(decode))).reason is NakReason.DRAINING
    decode_leaving = table("d1", Role.DECODE)
    decode_leaving.drain()
    assert (
        only(decode_leaving.dial(0.0, P_ADDRESS, P_ADDRESS, WANTS, layout()), DialFailed).address == P_ADDRESS
    )


# --- Finding an engine

RANKS = (worker(layout()), worker(layout(), Address("10.0.0.2", 5601)))


def ask(decode: PeerTable, now: float = 0.0, source: bytes = DIALLED) -> Locate:
    """D locates the engine. Returns the LOCATE that it sends."""
    inquire = only(decode.find(now, P_ADDRESS), Inquire)
    assert inquire.address == P_ADDRESS
    reply = only(decode.connected(now, inquire.peer, source), Reply)
    assert reply.source == source
    assert isinstance(reply.message, Locate)
    return reply.message


def test_engine_lists_its_workers(decode: PeerTable, prefill: PeerTable) -> None:
    prefill.set_ranks(RANKS)
    told = only(prefill.receive(0.0, CALLER, ask(decode)), Reply).message
    assert told == Directory("p0", RANKS)
    assert prefill.peers() == (), "to be asked makes no session"
    assert decode.receive(0.0, DIALLED, told) == [HangUp(DIALLED), EngineFound(P_ADDRESS, RANKS)]
    assert decode.peers() == ()
    assert decode.next_deadline() is None
    assert not any((decode._sessions.by_source, decode._sessions.finding))


def test_engine_is_located_once_at_a_time(decode: PeerTable) -> None:
    ask(decode)
    assert decode.find(0.0, P_ADDRESS) == []
    decode.receive(0.0, DIALLED, Directory("p0", RANKS))
    assert only(decode.find(0.0, P_ADDRESS), Inquire)


def test_starting_engine_is_queried_again(decode: PeerTable, prefill: PeerTable) -> None:
    assert prefill.receive(0.0, CALLER, ask(decode)) == []
    prefill.set_ranks(RANKS)
    again = only(decode.tick(1.0), Reply).message
    assert only(prefill.receive(1.0, CALLER, again), Reply).message == Directory("p0", RANKS)


def test_no_engine_is_found_when_none_answers(decode: PeerTable) -> None:
    ask(decode)
    actions = decode.tick(TIMES.connect)
    missing = only(actions, EngineNotFound)
    assert missing.engine == P_ADDRESS
    assert (
        f"no answer to LOCATE within 5 s: is a prefill engine's agent listening at {P_ADDRESS}"
        in missing.reason
    )
    assert only(actions, HangUp).source == DIALLED
    assert every(actions, SessionOver) == []
    assert decode.peers() == ()


def test_a_connection_that_cannot_be_made_finds_no_engine(decode: PeerTable) -> None:
    inquire = only(decode.find(0.0, P_ADDRESS), Inquire)
    actions = decode.dial_error(0.0, inquire.peer, "no such host")
    assert only(actions, EngineNotFound) == EngineNotFound(P_ADDRESS, "no such host")


def test_engine_that_does_not_fit_refuses_to_list_its_workers(prefill: PeerTable) -> None:
    prefill.set_ranks(RANKS)
    decode = table("d0", Role.DECODE, rank=1, fingerprint=pairs(model="other"))
    refusal = nak(prefill.receive(0.0, CALLER, ask(decode)))
    assert refusal.reason is NakReason.INCOMPATIBLE
    assert (
        refusal.message
        == "model: prefill engine has llama, decode engine has other: serve the same model on both sides"
    )
    again = only(decode.receive(0.0, DIALLED, refusal), Inquire)  # D also tries the older protocol
    decode.connected(0.0, again.peer, b"dialled 2")
    actions = decode.receive(0.0, b"dialled 2", refusal)
    assert only(actions, EngineNotFound).reason == f"{P_ADDRESS} refused: incompatible: {refusal.message}"
    assert len(every(actions, Log)) == 1
    other = table("d1", Role.DECODE)
    prefill.suspend()
    assert nak(prefill.receive(0.0, CALLER, ask(other))).reason is NakReason.DRAINING


def test_engine_that_is_being_located_may_send_no_other_message(decode: PeerTable) -> None:
    ask(decode)
    actions = decode.receive(
        0.0, DIALLED, HelloAck("p0", "boot", Role.PREFILL, 0, "tcp", layout(), b"answer")
    )
    assert only(actions, Distrust).source == DIALLED
    assert only(actions, EngineNotFound).engine == P_ADDRESS


def test_leaving_engine_finds_no_engine(decode: PeerTable) -> None:
    decode.drain()
    assert decode.find(0.0, P_ADDRESS) == [EngineNotFound(P_ADDRESS, "this engine is shutting down")]


def test_a_session_is_for_what_was_wanted_of_it(decode: PeerTable, prefill: PeerTable) -> None:
    """An engine came back in another shape. The old session with its worker must end first."""
    p, _ = up(decode, prefill)
    assert decode.dial(0.0, P_ADDRESS, P_ADDRESS, WANTS, layout()) == []
    other = ((), (0,))
    failed = only(decode.dial(0.0, P_ADDRESS, P_ADDRESS, other, layout()), DialFailed)
    assert "has a session of another prefill engine" in failed.reason
    decode.drop(0.0, p, "silent")
    connect = only(decode.dial(0.0, P_ADDRESS, P_ADDRESS, other, layout()), Connect)
    hello = only(decode.offered(0.0, connect.peer, b"dialled 2", b"offer"), Reply).message
    assert isinstance(hello, Hello)
    assert hello.wants == other


# --- Messages


def test_request_messages_of_a_session_are_delivered(decode: PeerTable, prefill: PeerTable) -> None:
    p, d = up(decode, prefill)
    for message in (reserve(), Cancel("t", 1), Release("t")):
        assert prefill.receive(0.0, CALLER, message) == [Deliver(d, message)]
    for answer in (Fail("t", 1, FailCode.EXPIRED, "", quiesced=True), CancelAck("t", 1, drained=True)):
        assert decode.receive(0.0, DIALLED, answer) == [Deliver(p, answer)]


def test_connection_without_a_session_gets_a_bye(prefill: PeerTable) -> None:
    for message in (reserve(), Ping(1), Cancel("t", 1)):
        assert isinstance(only(prefill.receive(0.0, CALLER, message), Reply).message, Bye)
    assert prefill.receive(0.0, CALLER, Bye()) == []  # a BYE gets no answer, or the exchange would never end


@pytest.mark.parametrize(
    "message", [HelloNak(NakReason.PROTOCOL, ""), Directory("p", RANKS), Pong(1), CancelAck("t", 1, True)]
)
def test_decode_must_not_send_messages_of_prefill(
    decode: PeerTable, prefill: PeerTable, message: Any
) -> None:
    _, d = up(decode, prefill)
    actions = prefill.receive(0.0, CALLER, message)
    assert only(actions, Distrust).source == CALLER
    assert only(actions, SessionOver).peer == d


@pytest.mark.parametrize("message", [reserve(), Ping(1), Release("t")])
def test_prefill_must_not_send_messages_of_decode(
    decode: PeerTable, prefill: PeerTable, message: Any
) -> None:
    p, _ = up(decode, prefill)
    actions = decode.receive(0.0, DIALLED, message)
    assert only(actions, Distrust).source == DIALLED
    assert only(actions, SessionOver).peer == p


def test_one_connection_belongs_to_one_engine(decode: PeerTable, prefill: PeerTable) -> None:
    _, d = up(decode, prefill)
    actions = prefill.receive(0.0, CALLER, dial(table("d1", Role.DECODE)))
    assert only(actions, Distrust).source == CALLER
    assert only(actions, SessionOver).peer == d
    # The dialled side must not send HELLO either.
    actions = decode.receive(0.0, DIALLED, dial(table("p0", Role.DECODE)))
    assert only(actions, Distrust).source == DIALLED


def test_a_connection_that_lost_its_standing_ends_its_session(decode: PeerTable, prefill: PeerTable) -> None:
    _, d = up(decode, prefill)
    assert only(prefill.lost(0.0, CALLER, "it sent a malformed message"), SessionOver).peer == d
    assert prefill.lost(0.0, CALLER, "again") == []
    assert prefill.lost(0.0, b"stranger", "malformed") == []


# --- Heartbeats


def exchange(
    decode: PeerTable, prefill: PeerTable, until: float, answering: bool = True
) -> list[tuple[float, Log]]:
    """Lets both tables act on their deadlines, with messages that take no time. Returns all log lines."""
    logs: list[tuple[float, Log]] = []
    while True:
        times = [when for when in (decode.next_deadline(), prefill.next_deadline()) if when is not None]
        if not times or min(times) > until:
            return logs
        now = min(times)
        actions = [*decode.tick(now), *prefill.tick(now)]
        for ping in [a.message for a in every(actions, Reply) if isinstance(a.message, Ping)]:
            if answering:
                answer = only(prefill.receive(now, CALLER, ping), Reply)
                actions += decode.receive(now, DIALLED, answer.message)
        logs += [(now, log) for log in every(actions, Log)]


def test_heartbeats_keep_a_session_up_quietly(decode: PeerTable, prefill: PeerTable) -> None:
    up(decode, prefill)
    assert exchange(decode, prefill, until=60.0) == []
    assert states(decode) == states(prefill) == [PeerState.UP]


def test_silence_is_suspect_and_then_death_on_both_sides(decode: PeerTable, prefill: PeerTable) -> None:
    up(decode, prefill)
    logs = exchange(decode, prefill, until=60.0, answering=False)
    text = [(now, log.text.split(":")[0], log.level) for now, log in logs]
    assert text == [
        (3.0, "SUSPECT", logging.WARNING),
        (3.0, "SUSPECT", logging.WARNING),
        (5.0, "DEAD", logging.WARNING),
        (5.0, "DEAD", logging.WARNING),
    ]
    assert decode.peers() == prefill.peers() == ()


def test_death_is_for_good(decode: PeerTable, prefill: PeerTable) -> None:
    p, d = up(decode, prefill)
    for now in (1.0, 2.0, 3.0, 4.0):
        decode.tick(now)
        prefill.tick(now)
    actions = decode.tick(5.0)
    assert only(actions, SessionOver).peer == p
    assert only(actions, HangUp).source == DIALLED
    assert isinstance(only(actions, Reply).message, Bye)
    assert decode.source(p) is None
    # D continues on the old connection, and learns that its session is over.
    prefill.tick(5.0)
    assert isinstance(only(prefill.receive(6.0, CALLER, Ping(9)), Reply).message, Bye)
    assert d not in [info.peer for info in prefill.peers()]
    assert only(decode.dial(6.0, P_ADDRESS, P_ADDRESS, WANTS, layout()), Connect).peer != p


@pytest.mark.parametrize("message", [Ping(1), Release("t"), Cancel("t", 1)])
def test_any_message_is_a_sign_of_life(decode: PeerTable, prefill: PeerTable, message: Any) -> None:
    up(decode, prefill)
    for now in (1.0, 2.0, 3.0):
        actions = prefill.tick(now)
    assert states(prefill) == [PeerState.SUSPECT]
    log = prefill.receive(4.0, CALLER, message)[0]
    assert isinstance(log, Log)
    assert log.text == "UP: decode peer d0/0 answers again, lane tcp"
    assert states(prefill) == [PeerState.UP]
    for now in (5.0, 6.0):
        actions = prefill.tick(now)
        assert actions == []
    assert every(prefill.tick(7.0), Log)[0].text.startswith("SUSPECT")


def test_a_process_that_stood_still_does_not_blame_its_peers(decode: PeerTable, prefill: PeerTable) -> None:
    up(decode, prefill)
    prefill.tick(0.0)
    assert prefill.tick(60.0) == []
    assert states(prefill) == [PeerState.UP]
    for now in (61.0, 62.0, 63.0, 64.0):
        prefill.tick(now)
    assert every(prefill.tick(65.0), SessionOver)  # the silence counts from then on


def test_the_first_ping_leaves_at_once_and_lists_what_waits(decode: PeerTable, prefill: PeerTable) -> None:
    _, d = up(decode, prefill)
    assert decode.set_waiting(0.0, [("t", P_ADDRESS), ("u", P_ADDRESS), ("x" * 300, P_ADDRESS)]) == []
    ping = only(decode.tick(0.0), Reply).message
    assert ping == Ping(1, ("t", "u"))  # an id that is too long for messages is left out
    assert isinstance(ping, Ping)
    assert prefill.receive(0.0, CALLER, ping) == [Reply(CALLER, Pong(1)), Deliver(d, ping)]
    decode.set_waiting(0.0, [])
    assert only(decode.tick(1.0), Reply).message == Ping(2)
    assert prefill.receive(1.0, CALLER, Ping(2)) == [Reply(CALLER, Pong(2))]


def test_a_paused_engine_has_nothing_held_for_it(decode: PeerTable, prefill: PeerTable) -> None:
    """The decode engine takes no steps. A prefill engine that is to be paused too waits until its prompts are
    no longer held."""
    up(decode, prefill)
    decode.set_waiting(0.0, [("t", P_ADDRESS)])
    decode.note_step(0.0)
    assert listed(decode, 0.0) == ("t",)
    assert listed(decode, TIMES.hold) == ("t",)
    assert listed(decode, TIMES.hold + 1) == ()
    decode.note_step(TIMES.hold + 2)
    assert listed(decode, TIMES.hold + 2) == ("t",)


def listed(decode: PeerTable, now: float) -> tuple[str, ...]:
    """The transfers that the next PING lists. Its peer is alive."""
    decode.receive(now, DIALLED, Pong(1))
    ping = only(decode.tick(now), Reply).message
    assert isinstance(ping, Ping)
    return ping.waiting


def test_engines_of_waiting_requests_are_located(decode: PeerTable) -> None:
    assert only(decode.set_waiting(0.0, [("t", P_ADDRESS)]), Inquire).address == P_ADDRESS
    assert decode.set_waiting(0.0, [("t", P_ADDRESS), ("u", P_ADDRESS)]) == []


def test_engine_is_located_again_at_once_when_a_session_ends_before_waiting_requests(
    decode: PeerTable, prefill: PeerTable
) -> None:
    up(decode, prefill)
    decode.set_waiting(0.0, [("t", P_ADDRESS)])
    decode.receive(100.0, DIALLED, Bye("restarting"))
    assert decode.set_waiting(100.0, [("t", P_ADDRESS), ("u", P_ADDRESS)]) == []  # it is being located
    deadline = decode.next_deadline()
    assert deadline is not None
    assert deadline <= 100.0
    assert only(decode.tick(100.0), Inquire).address == P_ADDRESS


def test_with_one_worker_lost_the_others_list_nothing_until_the_engine_is_found(
    decode: PeerTable, prefill: PeerTable
) -> None:
    up(decode, prefill)
    second = only(decode.dial(0.0, P_ADDRESS, Address("10.0.0.2", 5601), WANTS, layout()), Connect).peer
    decode.set_waiting(0.0, [("t", P_ADDRESS)])
    assert listed(decode, 0.0) == ("t",)
    decode.dial_error(1.0, second, "no such host")
    assert listed(decode, 1.0) == ()
    assert only(decode.tick(5.0), Inquire).address == P_ADDRESS
    assert decode.dial(5.0, P_ADDRESS, P_ADDRESS, WANTS, layout()) == []
    assert listed(decode, 6.0) == ("t",)


def test_pings_list_what_waits_for_each_address_of_the_engine(decode: PeerTable, prefill: PeerTable) -> None:
    """Routers name one engine by its host and by its IP address. Its second worker has one address."""
    up(decode, prefill)
    other, worker = Address("10.0.0.9", 5600), Address("10.0.0.2", 5601)
    hello(decode, P_ADDRESS, worker, b"worker 1")
    assert waiting_of(decode, 0.0, [("t", P_ADDRESS)]) == {DIALLED: ("t",), b"worker 1": ("t",)}
    hello(decode, other, other, b"other")
    assert decode.dial(1.0, other, worker, WANTS, layout()) == []
    waiting = [("t", P_ADDRESS), ("u", other)]
    listed = waiting_of(decode, 1.0, waiting)
    assert (listed[DIALLED], listed[b"other"]) == (("t",), ("u",))
    assert sorted(listed[b"worker 1"]) == ["t", "u"]
    decode.drop(2.0, decode_peer(decode, other), "silent")
    assert waiting_of(decode, 2.0, waiting)[b"worker 1"] == ("t",)


def test_decode_remembers_a_limited_number_of_addresses_of_an_engine(
    decode: PeerTable, prefill: PeerTable
) -> None:
    """Requests name an engine by addresses of their choice."""
    up(decode, prefill)
    aliases = [Address(f"alias-{number}", 5600) for number in range(200)]
    decode.set_waiting(0.0, [("t", P_ADDRESS), ("u", aliases[0])])
    for alias in aliases:
        assert decode.dial(0.0, alias, P_ADDRESS, WANTS, layout()) == []
    engines = decode._sessions.peers[decode_peer(decode, P_ADDRESS)].engines
    assert len(engines) == REMEMBERED_ADDRESSES
    assert {P_ADDRESS, aliases[0], aliases[-1]} <= engines.keys()


def hello(decode: PeerTable, engine: Address, worker: Address, source: bytes) -> None:
    """A session with a worker comes up."""
    connect = only(decode.dial(0.0, engine, worker, WANTS, layout()), Connect)
    decode.offered(0.0, connect.peer, source, b"offer")
    decode.receive(0.0, source, HelloAck("p0", "boot", Role.PREFILL, 0, "tcp", layout(), b"answer"))
    decode.completed(0.0, connect.peer)


def decode_peer(decode: PeerTable, address: Address) -> int:
    return decode._sessions.by_address[address]


def waiting_of(
    decode: PeerTable, now: float, waiting: list[tuple[str, Address]]
) -> dict[bytes, tuple[str, ...]]:
    """The transfers that the next PINGs list, by connection. All peers are alive."""
    decode.note_step(now)
    decode.set_waiting(now, waiting)
    for source in list(decode._sessions.by_source):
        decode.receive(now, source, Pong(1))
    return {
        reply.source: reply.message.waiting
        for reply in every(decode.tick(now), Reply)
        if isinstance(reply.message, Ping)
    }


def test_a_worker_that_was_restarted_with_other_pages_is_left() -> None:
    """The parts that decode wants, and its counts, follow from the directory of the prefill engine."""
    decode = table("d0", Role.DECODE)
    _, ack = accept(table("p0", Role.PREFILL, layout=layout(num_blocks=7)), dial(decode))
    actions = decode.receive(0.0, DIALLED, ack)
    assert every(actions, Complete) == []
    assert only(actions, DialFailed).reason == "it was restarted with other pages"
    assert isinstance(only(actions, Reply).message, Bye)


def test_refusing_engine_is_queried_only_after_a_pause(decode: PeerTable) -> None:
    inquire = only(decode.set_waiting(0.0, [("t", P_ADDRESS)]), Inquire)
    decode.connected(0.0, inquire.peer, DIALLED)
    assert every(decode.receive(0.1, DIALLED, HelloNak(NakReason.DRAINING, "later")), EngineNotFound)
    assert decode.set_waiting(0.2, [("t", P_ADDRESS), ("u", P_ADDRESS)]) == []
    assert not every(decode.tick(TIMES.connect - 0.1), Inquire)
    assert only(decode.tick(TIMES.connect), Inquire)


def test_engine_without_a_usable_answer_is_queried_only_after_a_pause(decode: PeerTable) -> None:
    """The engine was found, and its pages do not fit, so its workers are not dialled."""
    inquire = only(decode.set_waiting(0.0, [("t", P_ADDRESS)]), Inquire)
    decode.connected(0.0, inquire.peer, DIALLED)
    assert every(decode.receive(0.1, DIALLED, Directory("p0", RANKS)), EngineFound)
    assert decode.set_waiting(0.2, [("t", P_ADDRESS), ("u", P_ADDRESS)]) == []
    assert only(decode.tick(TIMES.connect), Inquire)


def test_no_engine_is_dialled_again_for_requests_that_have_stopped_waiting(
    decode: PeerTable, prefill: PeerTable
) -> None:
    up(decode, prefill)
    decode.set_waiting(0.0, [("t", P_ADDRESS)])
    decode.receive(100.0, DIALLED, Bye("restarting"))
    decode.set_waiting(100.0, [])
    assert decode.tick(100.0) == []
    assert decode.next_deadline() is None


def test_a_long_list_takes_several_pings(decode: PeerTable, prefill: PeerTable) -> None:
    names = [f"t{i}" for i in range(MAX_WAITING + 1)]
    up(decode, prefill)
    decode.set_waiting(0.0, [(name, P_ADDRESS) for name in names])
    pings = [reply.message for reply in every(decode.tick(0.0), Reply)]
    assert [name for ping in pings if isinstance(ping, Ping) for name in ping.waiting] == names
    assert len(pings) == 2


# --- Leaving and coming back


def test_bye_ends_the_session_on_the_other_side(decode: PeerTable, prefill: PeerTable) -> None:
    p, d = up(decode, prefill)
    bye = only(prefill.goodbyes(), Reply).message
    assert bye == Bye("shutting down")
    assert only(prefill.leave(1.0), SessionOver).peer == d
    actions = decode.receive(1.0, DIALLED, bye)
    assert only(actions, Log).text == f"BYE from prefill peer p0/0 at {P_ADDRESS}: shutting down"
    assert only(actions, SessionOver).peer == p
    assert every(actions, Reply) == []
    assert decode.peers() == prefill.peers() == ()


def test_sleep_ends_the_sessions_and_wake_sends_the_new_descriptors(
    decode: PeerTable, prefill: PeerTable
) -> None:
    p, _ = up(decode, prefill)
    decode.set_waiting(0.0, [("t", P_ADDRESS)])
    actions = decode.suspend()
    assert only(actions, Reply).message == Bye("going to sleep")
    assert only(actions, SessionOver) == SessionOver(p, "this engine is asleep")
    assert actions.index(only(actions, Reply)) < actions.index(only(actions, SessionOver))
    assert decode.dial(1.0, P_ADDRESS, P_ADDRESS, WANTS, layout()) == [
        DialFailed(P_ADDRESS, "this engine is asleep")
    ]
    assert decode.set_waiting(1.0, [("u", P_ADDRESS)]) == []
    assert decode.tick(100.0) == []
    assert only(decode.resume(100.0, (b"another",)), Inquire).address == P_ADDRESS
    connect = only(decode.dial(100.0, P_ADDRESS, P_ADDRESS, WANTS, layout()), Connect)
    hello = only(decode.offered(100.0, connect.peer, DIALLED, b"offer"), Reply).message
    assert isinstance(hello, Hello)
    assert hello.regions == (b"another",)


def test_sleeping_engine_accepts_no_peer(decode: PeerTable, prefill: PeerTable) -> None:
    prefill.suspend()
    nak = only(prefill.receive(0.0, CALLER, dial(decode)), Reply).message
    assert nak == HelloNak(NakReason.DRAINING, "prefill engine p0 is asleep")
    assert prefill.resume(1.0, (b"another",)) == []
    only(prefill.receive(1.0, CALLER, dial(table("d1", Role.DECODE))), Accept)


def test_a_new_incarnation_replaces_the_old_session(decode: PeerTable, prefill: PeerTable) -> None:
    _, d = up(decode, prefill)
    again = table("d0", Role.DECODE, incarnation="d0-boot2")
    actions = prefill.receive(1.0, b"router 2", dial(again))
    over = only(actions, SessionOver)
    assert over == SessionOver(d, "the engine restarted")
    new = only(actions, Accept).peer
    assert actions.index(over) < actions.index(only(actions, Accept))
    prefill.accepted(1.0, new, "tcp", b"answer")
    assert [info.peer for info in prefill.peers()] == [new]
    # The last message of the old process finds no session.
    assert isinstance(only(prefill.receive(1.0, CALLER, reserve()), Reply).message, Bye)


@pytest.mark.parametrize("source", [CALLER, b"router 2"])
def test_the_same_engine_dialling_again_replaces_its_silent_session(
    decode: PeerTable, prefill: PeerTable, source: bytes
) -> None:
    _, d = up(decode, prefill)
    decode.drop(1.0, decode.peers()[0].peer, "fenced")
    now = 1.0 if source == CALLER else TIMES.suspect  # over the same connection it is replaced at once
    hello = msgspec.structs.replace(dial(decode, now, source=b"dialled 2"), offer=b"another")
    actions = prefill.receive(now, source, hello)
    assert only(actions, SessionOver) == SessionOver(d, "the engine dialled again")
    assert only(actions, Accept).peer != d


def test_hello_of_the_same_process_by_another_name_leaves_its_first_session_up(
    decode: PeerTable, prefill: PeerTable
) -> None:
    _, first = up(decode, prefill)
    actions = prefill.receive(1.0, b"router 2", dial(table("d0", Role.DECODE)))
    assert not every(actions, SessionOver)
    second = only(actions, Accept).peer
    prefill.accepted(1.0, second, "tcp", b"answer")
    assert states(prefill) == [PeerState.UP, PeerState.UP]
    assert only(prefill.receive(2.0, CALLER, reserve()), Deliver).peer == first
    assert only(prefill.receive(2.0, b"router 2", reserve()), Deliver).peer == second
    # The end of one session leaves the other. After the end of the last one nothing is left.
    assert only(prefill.receive(3.0, CALLER, Bye("over")), SessionOver).peer == first
    assert only(prefill.receive(3.0, b"router 2", reserve()), Deliver).peer == second
    assert only(prefill.receive(3.0, b"router 2", Bye("over")), SessionOver).peer == second
    assert not prefill._sessions.callers


def test_hello_of_a_replaced_process_is_refused_while_its_successor_lives(prefill: PeerTable) -> None:
    first, second = (table("d0", Role.DECODE, incarnation=f"boot{number}") for number in (1, 2))
    a, _ = accept(prefill, dial(first), source=b"1")
    actions = prefill.receive(0.0, b"2", dial(second))
    assert only(actions, SessionOver) == SessionOver(a, "the engine restarted")
    b = only(actions, Accept).peer
    prefill.accepted(0.0, b, "tcp", b"answer")
    # The process is alive, so it was not restarted: two engines have one name.
    refused = nak(prefill.receive(1.0, b"3", dial(table("d0", Role.DECODE, incarnation="boot1"))))
    assert refused.reason is NakReason.INCOMPATIBLE
    assert refused.message.startswith("two decode engines have engine_id d0: leave engine_id out")
    assert [info.peer for info in prefill.peers()] == [b]
    # Once the successor has left, this process is the engine of that name again.
    prefill.receive(2.0, b"2", Bye("over"))
    accept(prefill, dial(table("d0", Role.DECODE, incarnation="boot1")), 2.0, b"4")


def test_refused_hello_replaces_no_session(decode: PeerTable, prefill: PeerTable) -> None:
    _, d = up(decode, prefill)
    stranger = table("d0", Role.DECODE, incarnation="x", fingerprint=pairs(model="other"))
    assert nak(prefill.receive(1.0, b"router 2", dial(stranger))).reason is NakReason.INCOMPATIBLE
    assert [info.peer for info in prefill.peers()] == [d]


def test_a_prefill_engine_that_restarted_is_noticed_by_its_answer(
    decode: PeerTable, prefill: PeerTable
) -> None:
    p, _ = up(decode, prefill)
    ack = HelloAck("p0", "p0-boot2", Role.PREFILL, 0, "tcp", layout(), b"answer")
    actions = decode.receive(1.0, DIALLED, ack)
    assert only(actions, SessionOver) == SessionOver(p, "it was restarted")


def test_dropping_a_session_twice_is_once_and_nothing_of_it_is_kept(
    decode: PeerTable, prefill: PeerTable
) -> None:
    p, d = up(decode, prefill)
    for table_, peer in ((decode, p), (prefill, d)):
        assert only(table_.drop(1.0, peer, "x"), SessionOver)
        assert table_.drop(1.0, peer, "x") == []
        assert table_.next_deadline() is None
        assert not any((table_._sessions.by_source, table_._sessions.callers, table_._sessions.by_address))


# --- Lanes that do not lead there


def test_pass_over_dials_again_without_the_lane(decode: PeerTable, prefill: PeerTable) -> None:
    _, ack = accept(prefill, dial(decode))
    first = only(decode.receive(0.0, DIALLED, ack), Complete)
    actions = decode.pass_over(0.0, first.peer, "host", "another pid namespace")
    log = only(actions, Log)
    assert log.level == logging.INFO
    assert log.text == f"prefill peer p0/0 at {P_ADDRESS}: lane host is passed over: another pid namespace"
    assert only(actions, HangUp).source == DIALLED
    assert only(actions, SessionOver).peer == first.peer
    assert not every(actions, DialFailed)
    again = only(actions, Connect)
    assert (again.address, again.without) == (P_ADDRESS, ("host",))
    # Messages of P over the ended connection are ignored, and a new dial finds this session.
    assert not every(decode.receive(0.0, DIALLED, Bye("?")), SessionOver)
    assert decode.dial(0.0, P_ADDRESS, P_ADDRESS, WANTS, layout()) == []
    decode.offered(0.0, again.peer, b"dialled 2", b"offer")
    second = only(decode.receive(0.0, b"dialled 2", ack), Complete)
    (last,) = every(decode.pass_over(0.0, second.peer, "nvlink", "no way"), Connect)
    assert last.without == ("host", "nvlink")
    decode.offered(0.0, last.peer, b"dialled 3", b"offer")
    third = only(decode.receive(0.0, b"dialled 3", ack), Complete)
    assert only(decode.completed(0.0, third.peer), SessionUp) == SessionUp(
        third.peer, P_ADDRESS, ack.incarnation, knows_defer=True
    )
    assert len(decode) == 1
