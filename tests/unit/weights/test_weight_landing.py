"""The worker's side of the weights protocol: who may write, what lands, and when a version is discarded."""

from __future__ import annotations

from typing import TypeVar

import pytest

from kv_connector.weights.mapping.geometry import Geometry, Parameter, Tensor, Write, digest
from kv_connector.weights.wire.messages import (
    NOT_DESCRIBED,
    REASON_S,
    Applied,
    Ask,
    Begin,
    Begun,
    Describe,
    Described,
    Dropped,
    Hold,
    Join,
    Joined,
    Leave,
    Ping,
    Pong,
    Ready,
    Refused,
    Release,
    Seed,
    State,
    WeightMessage,
    WorkerAddress,
)
from kv_connector.weights.worker.landing import Landing, LandingPhase
from kv_connector.weights.worker.landing_actions import (
    Action,
    GiveUp,
    HandOver,
    LandingAccept,
    LandingCloseCounter,
    LandingFence,
    LandingLog,
    LandingOpenCounter,
    LandingReply,
    Record,
)

TENSORS = (Tensor("w", "float32", (4,)),)
GEOMETRY = Geometry((Parameter("w", "float32", 4),), (Write(0, 0, (0,), (4,), 0, (1,)),), ())
NBYTES = 16
DEAD = 5.0

T = TypeVar("T")


def only(actions: list[Action], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def replies(actions: list[Action]) -> dict[bytes, WeightMessage]:
    return {reply.source: reply.message for reply in only(actions, LandingReply)}


def described() -> Landing:
    landing = Landing(DEAD)
    assert landing.receive(0, b"asker", Describe(TENSORS)) == [Record(TENSORS)]
    answer = Described(GEOMETRY)
    assert replies(landing.recorded(digest(TENSORS), answer, NBYTES)) == {b"asker": answer}
    return landing


def join(landing: Landing, rank: int, run: str = "run", now: float = 0.0) -> bytes:
    """Joins rank r over connection r, as peer r."""
    source = b"%d" % rank
    actions = landing.receive(now, source, Join(run, rank, f"trainer/{rank}", digest(TENSORS), b"offer"))
    assert only(actions, LandingAccept) == [LandingAccept(source, f"trainer/{rank}", b"offer")]
    joined = Joined(b"answer", b"region", (0,), "tcp")
    assert replies(landing.accepted(source, rank, joined)) == {source: joined}
    return source


def begin(
    version: str = "1",
    *,
    senders: int = 2,
    pages: tuple[int, ...] = (3,),
    nbytes: int = 8,
    plan: bytes = b"p",
) -> Begin:
    return Begin(version, plan, senders, pages, nbytes)


def landing_of_two() -> tuple[Landing, bytes, bytes]:
    """A landing whose two senders have both begun."""
    landing = described()
    a, b = join(landing, 0), join(landing, 1)
    assert landing.receive(0, a, begin()) == []
    assert landing.receive(0, b, begin()) == [LandingOpenCounter((0, 1), 6)]
    assert replies(landing.opened(77)) == {a: Begun("1", 77), b: Begun("1", 77)}
    return landing, a, b


def test_a_version_lands_and_is_applied() -> None:
    landing, a, b = landing_of_two()
    assert landing.take("1") == [GiveUp("version 1 has not landed: version 1 is landing")]
    actions = landing.reached()
    assert only(actions, LandingCloseCounter)
    assert replies(actions) == {a: Ready("1"), b: Ready("1")}
    assert landing.take("2") == [GiveUp("version 2 has not landed: version 1 is ready")]
    assert landing.take("1") == [HandOver()]
    assert replies(landing.applied("")) == {a: Applied("1"), b: Applied("1")}
    assert landing.state() == State("1", landed="1", senders=2, arena_bytes=NBYTES)
    assert landing.receive(0, a, begin("2")) == []
    assert landing.state().landing == "2"


@pytest.mark.parametrize("when", ["landing", "ready", "applying"])
def test_the_next_version_waits_for_the_one_that_lands_or_is_applied(when: str) -> None:
    """Ranks do not wait for each other, so they begin versions at different times.

    A landed version is left when all its senders go on.
    """
    landing, a, b = landing_of_two()
    if when != "landing":
        landing.reached()
    if when == "applying":
        landing.take("1")
    assert landing.receive(0, a, begin("2")) == []
    assert (landing.state().landed or landing.state().landing) == "1"
    if when == "landing":
        assert replies(landing.reached()) == {a: Ready("1"), b: Ready("1")}
        assert landing.take("1") == [HandOver()]
    if when == "ready":
        # The other sender does not wait for "1" to be applied either.
        assert landing.receive(0, b, begin("2")) == [LandingOpenCounter((0, 1), 6)]
        return
    assert replies(landing.applied("")) == {a: Applied("1"), b: Applied("1")}
    assert landing.state().landing == "2"
    assert landing.receive(0, b, begin("2")) == [LandingOpenCounter((0, 1), 6)]


def test_the_next_version_is_dropped_with_the_one_before() -> None:
    landing, a, b = landing_of_two()
    landing.receive(0, a, begin("2"))
    dropped = replies(landing.receive(0, b, Leave("it is through")))[a]
    assert isinstance(dropped, Dropped)
    assert dropped.version == "1"
    assert landing.phase is LandingPhase.EMPTY


def test_version_that_was_not_applied_can_be_applied_again() -> None:
    landing, _, _ = landing_of_two()
    landing.reached()
    assert landing.take("1") == [HandOver()]
    assert not replies(landing.applied("a kernel failed", torn=True))
    assert landing.state() == State(
        "", landed="1", senders=2, arena_bytes=NBYTES, problem="a kernel failed", torn=True
    )
    assert landing.take("1") == [HandOver()]
    landing.applied("")
    assert landing.state() == State("1", landed="1", senders=2, arena_bytes=NBYTES)


@pytest.mark.parametrize("stage", ["beginning", "opening", "landing"])
def test_a_lost_sender_voids_the_version_for_all(stage: str) -> None:
    landing = described()
    a, b = join(landing, 0), join(landing, 1)
    landing.receive(0, a, begin())
    if stage != "beginning":
        landing.receive(0, b, begin())
    if stage == "landing":
        landing.opened(77)
    landing.peer_lost(0, 1, "the link broke")
    actions = landing.tick(REASON_S)
    assert replies(actions)[b] == Leave("the link broke")
    assert {fence.peer for fence in only(actions, LandingFence)} == {0, 1}
    assert bool(only(actions, LandingCloseCounter)) == (stage != "beginning")
    dropped = replies(actions)[a]
    assert isinstance(dropped, Dropped)
    assert "rank 1 of run run (trainer/1): the link broke" in dropped.reason
    assert landing.opened(78) == [LandingCloseCounter()]
    assert landing.phase is LandingPhase.EMPTY
    # The remaining sender has to join again. It gets its counter only when no old write can land any more.
    (refused,) = replies(landing.receive(0, a, begin("2"))).values()
    assert isinstance(refused, Refused)
    again = join(landing, 2)
    assert landing.receive(0, again, begin("2", senders=1, nbytes=NBYTES)) == []
    assert landing.fenced(0) == []
    assert landing.fenced(1) == [LandingOpenCounter((2,), 3)]


def test_a_sender_that_leaves_is_lost_with_its_reason_though_its_link_broke_first() -> None:
    landing, a, b = landing_of_two()
    landing.peer_lost(1.0, 1, "the link broke")
    assert landing.next_deadline() == 1.0 + REASON_S
    assert landing.tick(0.9 + REASON_S) == []
    dropped = replies(landing.receive(0.9 + REASON_S, b, Leave("the loss is no number")))[a]
    assert isinstance(dropped, Dropped)
    assert "rank 1 of run run (trainer/1): the loss is no number" in dropped.reason


@pytest.mark.parametrize("other", [Describe((Tensor("v", "float32", (4,)),)), None])
def test_a_sender_whose_link_broke_keeps_no_other_trainer_out(other: Describe | None) -> None:
    landing, _, _ = landing_of_two()
    for peer in (0, 1):
        landing.peer_lost(0, peer, "the link broke")
    new = other or Join("another run", 0, "trainer", digest(TENSORS), b"offer")
    actions = landing.receive(0, b"new", new)
    assert only(actions, Record if other else LandingAccept)
    assert b"new" not in replies(actions)
    assert landing.state().senders == (0 if other else 1)
    assert landing.phase is LandingPhase.EMPTY
    assert {fence.peer for fence in only(actions, LandingFence)} == {0, 1}


def test_a_sender_that_is_lost_behind_the_last_page_voids_nothing() -> None:
    landing, a, _ = landing_of_two()
    landing.reached()
    assert only(landing.receive(0, a, Leave()), LandingFence) == [LandingFence(0, "it has left")]
    assert landing.take("1") == [HandOver()]


def test_silence_is_death() -> None:
    landing, a, b = landing_of_two()
    landing.receive(3, a, Ping(sender=True))
    assert landing.next_deadline() == DEAD
    assert landing.tick(DEAD - 0.1) == []
    actions = landing.tick(DEAD)
    assert {fence.peer for fence in only(actions, LandingFence)} == {0, 1}
    assert isinstance(replies(actions)[a], Dropped)
    # The sender was only asleep. The answer is that it is no sender any more.
    assert isinstance(replies(landing.receive(6, b, Ping(sender=True)))[b], Leave)
    assert replies(landing.receive(6, b, Ping())) == {b: Pong()}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (begin("2"), "version 1 of 2 senders, version 2 of 2 senders"),
        (begin(plan=b"q"), "announced different versions or plans"),
        (begin(senders=3), "version 1 of 2 senders, version 1 of 3 senders"),
        (begin(nbytes=9), "announced 17 bytes of 16 expected"),
        (begin(pages=(3, 3)), "announced 2 rounds of 1 expected"),
    ],
)
def test_senders_that_do_not_agree_write_nothing(second: Begin, words: str) -> None:
    landing = described()
    a, b = join(landing, 0), join(landing, 1)
    landing.receive(0, a, begin())
    actions = landing.receive(0, b, second)
    assert not only(actions, LandingOpenCounter)
    for source in (a, b):
        dropped = replies(actions)[source]
        assert isinstance(dropped, Dropped)
        assert words in dropped.reason


def test_another_run_is_refused_while_one_is_there() -> None:
    landing = described()
    source = join(landing, 0)
    other = Join("other", 0, "second/0", digest(TENSORS), b"offer")
    (refused,) = replies(landing.receive(0, b"x", other)).values()
    assert isinstance(refused, Refused)
    assert "trainer/0 (run run) sends weights to this worker" in refused.reason
    (refused,) = replies(landing.receive(0, b"x", Describe((Tensor("v", "float32", (4,)),)))).values()
    assert isinstance(refused, Refused)
    landing.receive(0, source, Leave())
    assert only(landing.receive(0, b"x", other), LandingAccept)


def test_a_rank_that_comes_again_replaces_itself() -> None:
    landing = described()
    join(landing, 0)
    actions = landing.receive(0, b"new", Join("run", 0, "trainer/0", digest(TENSORS), b"offer"))
    assert only(actions, LandingFence) == [LandingFence(0, "the same rank joined again")]
    assert landing.state().senders == 1


def test_one_that_left_while_its_offer_was_accepted_is_fenced() -> None:
    landing = described()
    landing.receive(0, b"0", Join("run", 0, "trainer/0", digest(TENSORS), b"offer"))
    landing.receive(0, b"0", Leave())
    assert landing.accepted(b"0", 5, Joined(b"", b"", (), "tcp")) == [
        LandingFence(5, "it has left meanwhile")
    ]


def test_checkpoints_are_examined_once() -> None:
    landing = described()
    assert replies(landing.receive(0, b"x", Describe(TENSORS))) == {b"x": Described(GEOMETRY)}
    (refused,) = replies(landing.receive(0, b"y", Join("run", 0, "t", b"another", b"offer"))).values()
    assert refused == Refused(NOT_DESCRIBED)
    (refused,) = replies(landing.receive(0, b"y", Describe(TENSORS, protocol=99))).values()
    assert isinstance(refused, Refused)
    assert "version 99" in refused.reason


def test_checkpoint_that_cannot_be_recorded_is_refused_with_the_reason() -> None:
    landing = Landing(DEAD)
    landing.receive(0, b"x", Describe(TENSORS))
    assert replies(landing.not_recorded("w is not taken")) == {b"x": Refused("w is not taken")}
    assert landing.receive(0, b"x", Describe(TENSORS)) == [Record(TENSORS)]


def test_words_that_mean_nothing_are_answered() -> None:
    landing = described()
    assert replies(landing.receive(0, b"x", Ask())) == {b"x": landing.state()}
    (refused,) = replies(landing.receive(0, b"x", begin())).values()
    assert isinstance(refused, Refused)


def streaming_of_two(rounds: int = 4) -> tuple[Landing, bytes, bytes]:
    """A streaming landing whose two senders have both begun. Two of its rounds have room."""
    parameters = tuple(Parameter(f"w{n}", "float32", 1, round=n) for n in range(rounds))
    landing = Landing(DEAD, slots=2)
    landing.receive(0, b"asker", Describe(TENSORS))
    landing.recorded(digest(TENSORS), Described(Geometry(parameters, (), ())), NBYTES)
    a, b = join(landing, 0), join(landing, 1)
    assert landing.receive(0, a, begin(pages=(1,) * rounds)) == []
    # The second sender has nothing to write in the third round, and neither sender in the fourth.
    actions = landing.receive(0, b, begin(pages=(1, 1, 0, 0)[:rounds]))
    assert replies(actions) == {a: Ready("1"), b: Ready("1")}
    assert not only(actions, LandingOpenCounter)
    return landing, a, b


def test_without_room_for_a_version_it_lands_round_by_round_when_it_is_taken() -> None:
    landing, a, b = streaming_of_two()
    assert landing.take("1") == [LandingOpenCounter((0, 1), 2, 0), LandingOpenCounter((0, 1), 2, 1)]
    assert replies(landing.opened(70, 0)) == {a: Begun("1", 70, 0), b: Begun("1", 70, 0)}
    landing.opened(71, 1)
    # The second round lands before the first. The fourth gets its room, and the third waits for the first.
    assert landing.reached(1) == [LandingCloseCounter(1), HandOver(1)]
    assert landing.released(1) == [LandingOpenCounter((0, 1), 1, 3)]
    landing.opened(73, 3)
    assert landing.reached(0) == [LandingCloseCounter(0), HandOver(0)]
    assert landing.released(0) == [LandingOpenCounter((0, 1), 1, 2)]
    landing.opened(72, 2)
    for last in (2, 3):
        assert landing.reached(last) == [LandingCloseCounter(last), HandOver(last)]
        assert landing.released(last) == []
    assert replies(landing.applied("")) == {a: Applied("1"), b: Applied("1")}
    assert landing.state() == State("1", senders=2, arena_bytes=NBYTES)
    assert landing.take("1") == [GiveUp("version 1 has not landed: no version is here")]
    # The next version begins.
    assert landing.receive(0, a, begin("2", pages=(1, 1, 1, 1))) == []


def test_round_without_writers_is_complete_at_once() -> None:
    landing = streaming_of_two()[0]
    for source in (b"0", b"1"):
        landing.receive(0, source, begin("2", pages=(1, 0, 1, 1)))
    assert landing.take("2") == [LandingOpenCounter((0, 1), 2, 0), LandingOpenCounter((0, 1), 0, 1)]


@pytest.mark.parametrize("stage", ["ready", "landing", "between"])
def test_a_sender_lost_in_the_middle_of_its_rounds_leaves_a_torn_model(stage: str) -> None:
    landing, a, b = streaming_of_two()
    if stage != "ready":
        landing.take("1")
        landing.opened(70, 0)
        landing.opened(71, 1)
        landing.reached(0)
    if stage == "between":
        landing.reached(1)
    actions = landing.receive(0, b, Leave("it is through"))
    assert isinstance(replies(actions)[a], Dropped)
    assert only(actions, LandingCloseCounter) == ([LandingCloseCounter(1)] if stage == "landing" else [])
    if stage == "ready":
        assert not only(actions, GiveUp)
        assert landing.phase is LandingPhase.EMPTY
        return
    (given_up,) = only(actions, GiveUp)
    assert "rank 1 of run run (trainer/1): it is through" in given_up.reason
    # The round that is being read stays as it is, and no further round lands.
    assert landing.released(0) == []
    again = join(landing, 2)
    assert landing.receive(0, again, begin("2", senders=1, pages=(1, 1, 1, 1), nbytes=NBYTES)) == []
    assert landing.released(0) == []
    assert not replies(landing.applied(given_up.reason, torn=True))
    state = landing.state()
    assert (state.torn, state.landed, state.landing, state.senders) == (True, "", "2", 1)
    # The next version repairs the model.
    landing.fenced(0)
    assert replies(landing.fenced(1)) == {again: Ready("2")}
    landing.take("2")
    landing.applied("")
    assert landing.state() == State("2", senders=1, arena_bytes=NBYTES)


def test_a_round_that_cannot_be_applied_voids_what_follows() -> None:
    landing, _, _ = streaming_of_two()
    landing.take("1")
    landing.opened(70, 0)
    landing.opened(71, 1)
    actions = landing.applied("a kernel failed", torn=True)
    assert only(actions, LandingCloseCounter) == [LandingCloseCounter(0), LandingCloseCounter(1)]
    assert {fence.peer for fence in only(actions, LandingFence)} == {0, 1}
    assert {type(message) for message in replies(actions).values()} == {Dropped}
    assert landing.state() == State("", arena_bytes=NBYTES, problem="a kernel failed", torn=True)


# --- Held by the engine's controller


def test_a_version_that_is_held_is_not_left_for_the_next() -> None:
    """The senders of each worker are different.

    All senders of one worker go on, while a sender of another worker is late. The first worker must keep the
    version that the second one is about to take.
    """
    quick, slow = described(), described()
    (alone,) = [join(quick, 0)]
    a, b = join(slow, 0), join(slow, 1)
    quick.receive(0, alone, begin(senders=1, nbytes=NBYTES))
    slow.receive(0, a, begin())
    slow.receive(0, b, begin())
    for landing in (quick, slow):
        landing.opened(77)
        landing.reached()
        assert replies(landing.receive(0, b"controller", Hold("1"))) == {b"controller": landing.state()}
    assert quick.receive(0, alone, begin("2", senders=1, nbytes=NBYTES)) == []
    assert slow.receive(0, a, begin("2")) == []
    for landing in (quick, slow):
        assert landing.take("1") == [HandOver()]
        assert replies(landing.applied("a kernel failed", torn=True)) == {}
        assert landing.take("1") == [HandOver()], "what failed can be tried again"
        assert alone in replies(landing.applied(""))
        assert landing.state().landed == "1"
    assert quick.receive(0, b"controller", Release()) == [LandingOpenCounter((0,), 3)]
    assert slow.receive(0, b"controller", Release()) == []
    assert slow.state().landing == "2"


def test_a_version_that_is_not_there_is_not_held() -> None:
    landing, a, b = landing_of_two()
    held = replies(landing.receive(0, b"controller", Hold("1")))
    assert held == {b"controller": Refused("version 1 is landing")}
    landing.reached()
    held = replies(landing.receive(0, b"controller", Hold("2")))
    assert held == {b"controller": Refused("version 1 is ready")}
    for source in (a, b):
        landing.receive(0, source, Leave())
    landing.receive(0, b"other", Describe((Tensor("v", "float32", (4,)),)))
    held = replies(landing.receive(0, b"controller", Hold("1")))
    assert held == {b"controller": Refused("the worker is busy with another checkpoint")}


def test_another_checkpoint_waits_for_a_version_that_is_held() -> None:
    landing, a, b = landing_of_two()
    landing.reached()
    landing.receive(0, b"controller", Hold("1"))
    for source in (a, b):
        landing.receive(0, source, Leave())
    other = (Tensor("v", "float32", (4,)),)
    (refused,) = replies(landing.receive(0, b"other", Describe(other))).values()
    assert isinstance(refused, Refused)
    landing.receive(0, b"stranger", Release())
    assert landing.take("1") == [HandOver()]
    landing.applied("")
    landing.receive(0, b"controller", Release())
    assert landing.receive(0, b"other", Describe(other)) == [Record(other)]


@pytest.mark.parametrize("how", ["silent", "malformed"])
def test_a_version_is_held_as_long_as_its_controller_is_there(how: str) -> None:
    landing, a, b = landing_of_two()
    landing.reached()
    landing.receive(0, b"controller", Hold("1"))
    for now, source in ((1, b"controller"), (3, a), (3, b)):
        landing.receive(now, source, Ping(sender=source != b"controller"))
    for source in (a, b):
        landing.receive(3, source, begin("2"))
    assert landing.next_deadline() == 1 + DEAD
    assert landing.tick(DEAD) == []
    actions = landing.tick(1 + DEAD) if how == "silent" else landing.lost(b"controller", "malformed")
    assert only(actions, LandingOpenCounter) == [LandingOpenCounter((0, 1), 6)]
    (log,) = only(actions, LandingLog)
    assert "version 1" in log.text


def test_rounds_that_are_held_are_followed_by_the_next_version() -> None:
    """The last round has no separate room that could be held."""
    landing, a, b = streaming_of_two()
    landing.receive(0, b"controller", Hold("1"))
    landing.take("1")
    for round in range(4):
        landing.opened(70, round)
    assert landing.receive(0, a, begin("2", pages=(1, 1, 1, 1))) == []
    landing.applied("")
    landing.receive(0, b, begin("2", pages=(1, 1, 1, 1)))
    landing.receive(0, b"controller", Release())
    assert landing.take("2") == [LandingOpenCounter((0, 1), 2, 0), LandingOpenCounter((0, 1), 2, 1)]


# --- Lent to another engine, and seeded by one

SEED = Seed("seed", "1", WorkerAddress("10.0.0.7", 5800))
TO = "10.0.0.7:5800"


def serving_one() -> tuple[Landing, bytes, bytes]:
    """A landing that serves version 1."""
    landing, a, b = landing_of_two()
    landing.reached()
    landing.take("1")
    landing.applied("")
    return landing, a, b


def seeder(landing: Landing, rank: int = 7) -> bytes:
    source = b"%d" % rank
    join_as = Join("seed", rank, f"seeder/{rank}", digest(TENSORS), b"offer", seeds=True)
    assert only(landing.receive(0, source, join_as), LandingAccept)
    landing.accepted(source, rank, Joined(b"answer", b"region", (0,), "tcp"))
    return source


def test_lent_arena_is_written_when_it_is_returned() -> None:
    landing, a, b = serving_one()
    assert landing.lend(SEED, TO) == ""
    assert landing.state().seeding == TO
    (log,) = landing.receive(0, a, begin("2"))
    assert isinstance(log, LandingLog)
    assert log.text == f"version 2 waits: the worker writes its weights to {TO}"
    assert landing.receive(0, b, begin("2")) == []
    assert "version 2 is being pushed to it" in landing.lend(Seed("more", "1", SEED.engine), TO)
    others = (Tensor("v", "float32", (4,)),)
    assert replies(landing.receive(0, b"other", Describe(others))).keys() == {b"other"}
    assert landing.take("1") == [HandOver()], "to be applied again is to be read"
    assert landing.returned(SEED) == []
    assert landing.applied("")[-1] == LandingOpenCounter((0, 1), 6)
    assert landing.state().seeding == ""


def test_it_is_returned_when_all_have_done_so() -> None:
    landing, a, b = serving_one()
    second = Seed("second", "1", WorkerAddress("10.0.0.8", 5800))
    assert landing.lend(SEED, TO) == landing.lend(second, "10.0.0.8:5800") == ""
    assert landing.state().seeding == f"{TO}, 10.0.0.8:5800"
    landing.receive(0, a, begin("2"))
    landing.receive(0, b, begin("2"))
    assert landing.returned(SEED) == []
    assert landing.returned(second) == [LandingOpenCounter((0, 1), 6)]


def test_another_checkpoint_is_not_examined_while_the_arena_is_lent() -> None:
    landing, a, b = serving_one()
    for source in (a, b):
        landing.receive(0, source, Leave())
    landing.lend(SEED, TO)
    said = replies(landing.receive(0, b"other", Describe((Tensor("v", "float32", (4,)),))))
    assert said == {b"other": Refused(f"the worker writes its weights to {TO}: retry later")}
    assert replies(landing.receive(0, b"same", Describe(TENSORS))) == {b"same": Described(GEOMETRY)}


def test_no_sender_may_write_while_another_checkpoint_is_examined() -> None:
    landing = described()
    other = (Tensor("v", "float32", (4,)),)
    assert landing.receive(0, b"other", Describe(other)) == [Record(other)]
    refused = Refused("the worker is busy with another checkpoint: retry later")
    joining = Join("run", 0, "trainer/0", digest(TENSORS), b"offer")
    assert replies(landing.receive(0, b"late", joining)) == {b"late": refused}
    assert landing.state().senders == 0


def test_senders_that_describe_the_same_checkpoint_are_answered_together() -> None:
    landing = Landing(DEAD)
    assert landing.receive(0, b"one", Describe(TENSORS)) == [Record(TENSORS)]
    assert landing.receive(0, b"two", Describe(TENSORS)) == []
    answer = Described(GEOMETRY)
    assert replies(landing.recorded(digest(TENSORS), answer, NBYTES)) == {b"one": answer, b"two": answer}


def test_why_nothing_is_lent() -> None:
    landing, a, b = landing_of_two()
    assert landing.lend(SEED, TO) == "it serves the weights that it was started with"
    landing, a, b = serving_one()
    assert landing.lend(Seed("s", "0", SEED.engine), TO) == "it serves version 1, not 0"
    landing.receive(0, a, begin("2"))
    landing.receive(0, b, begin("2"))
    beside = "in its arena, from which it would send, "
    assert landing.lend(SEED, TO) == f"{beside}version 2 is beginning"
    landing.receive(0, b, Leave())
    assert landing.lend(SEED, TO) == f"{beside}nothing is"
    landing, a, b = serving_one()
    for source in (a, b):
        landing.receive(0, source, Leave())
    landing.receive(0, b"other", Describe((Tensor("v", "float32", (4,)),)))
    assert landing.lend(SEED, TO) == "it is busy with another checkpoint: retry later"
    landing, a, b = serving_one()
    landing.take("1")
    landing.applied("broken", torn=True)
    assert landing.lend(SEED, TO) == "it has weights of more than one version"
    landing = Landing(DEAD, slots=2)
    assert landing.lend(SEED, TO) == "it is in streaming mode, and keeps no copy of its weights"
    landing, a, b = serving_one()
    for source in (a, b):
        landing.receive(0, source, Leave())
    seeder(landing)
    assert landing.lend(SEED, TO) == "it is being seeded itself"


def test_one_trainer_and_one_seeding_engine_may_join() -> None:
    landing = described()
    join(landing, 0)
    seeder(landing)
    for seeds, name in ((False, "trainer/0"), (True, "seeder/7")):
        more = Join("more", 1, "more", digest(TENSORS), b"offer", seeds)
        (refused,) = replies(landing.receive(0, b"more", more)).values()
        assert isinstance(refused, Refused)
        assert refused.reason.startswith(name)
    assert landing.state().senders == 2


def test_a_trainer_waits_for_a_seed_that_lands_until_it_is_applied() -> None:
    landing = described()
    trainer, seeding = join(landing, 0), seeder(landing)
    assert landing.receive(0, seeding, begin("1", senders=1, nbytes=NBYTES)) == [LandingOpenCounter((7,), 3)]
    landing.opened(77)
    assert landing.receive(0, trainer, begin("2", senders=1, nbytes=NBYTES)) == []
    assert replies(landing.reached()) == {seeding: Ready("1")}
    assert landing.take("1") == [HandOver()]
    assert landing.applied("") == [LandingReply(seeding, Applied("1")), LandingOpenCounter((0,), 3)]
    assert only(landing.receive(0, seeding, Leave()), LandingCloseCounter) == []
    assert landing.state().landing == "2"


@pytest.mark.parametrize("when", ["landing", "landed"])
def test_trainer_that_waits_for_a_seed_is_next_when_the_seeding_engine_is_lost(when: str) -> None:
    landing = described()
    trainer, seeding = join(landing, 0), seeder(landing)
    landing.receive(0, seeding, begin("1", senders=1, nbytes=NBYTES))
    landing.opened(77)
    if when == "landed":
        landing.reached()
    assert landing.receive(0, trainer, begin("2", senders=1, nbytes=NBYTES)) == []
    actions = landing.receive(0, seeding, Leave())
    assert LandingFence(7, "it has left") in actions
    assert trainer not in replies(actions)
    assert landing.fenced(7) == [LandingOpenCounter((0,), 3)]


def test_trainer_that_begins_goes_before_a_seeder_that_has_not_begun() -> None:
    landing = described()
    trainer, seeding = join(landing, 0), seeder(landing)
    said = replies(landing.receive(0, trainer, begin("2", senders=1, nbytes=NBYTES)))
    assert said == {seeding: Leave("trainer/0 begins version 2")}
    landing.fenced(7)
    for when in ("it lands", "it is served"):
        again = Join("again", 7, "seeder/7", digest(TENSORS), b"offer", seeds=True)
        refused = Refused("trainer/0 (run run) has begun version 2 here")
        assert replies(landing.receive(0, b"again", again)) == {b"again": refused}, when
        landing.opened(77)
        landing.reached()
        landing.take("2")
        landing.applied("")


def test_a_seed_that_not_all_have_begun_is_left_for_a_trainers_version() -> None:
    landing = described()
    trainer, one, two = join(landing, 0), seeder(landing, 6), seeder(landing, 7)
    assert landing.receive(0, one, begin("1")) == []
    said = replies(landing.receive(0, trainer, begin("2", senders=1, nbytes=NBYTES)))
    assert said.keys() == {one, two}
    assert landing.state().senders == 1
    assert landing.fenced(6) == []
    assert landing.fenced(7) == [LandingOpenCounter((0,), 3)]
