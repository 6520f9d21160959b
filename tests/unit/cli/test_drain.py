"""kv-connector drain, and the routers that it queries: several, busy, restarted, or gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from command_line import invoke

from kv_connector.cli import drain
from kv_connector.cli.main import app
from kv_connector.control.membership import Drain, Draining, MembershipSockets, Undrain, Undrained, encode
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role

ENGINE = "http://10.0.0.1:8000"
run = partial(invoke, app)
# Seconds; longer than any step here takes.
PATIENCE = 30.0


class Router:
    """Answers each query with the next of its answers, and repeats the last one. None ends it."""

    def __init__(
        self,
        *answers: int | Draining | None,
        silent_after: int | None = None,
        draining: bool | None = False,
    ) -> None:
        """``draining``: the answer to each UNDRAIN."""
        self.address = Address("127.0.0.1", free_ports(1)[0])
        self.asked: list[str] = []
        self.moves = False
        self.ended = False
        self._draining = draining
        self._answers, self._silent_after = answers, silent_after
        self.idle = threading.Event()
        """Set when the router has given its last answer."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        sockets = MembershipSockets(None)
        sockets.bind(self.address)
        while not self._ending.is_set():
            sockets.wait(0.02)
            for received in sockets.receive():
                if isinstance(received.message, Undrain):
                    self.ended = True
                    sockets.send(received.source, Undrained(draining=self._draining))
                    continue
                assert isinstance(received.message, Drain)
                self.may_answer.wait(PATIENCE)
                count = len(self.asked)
                self.asked.append(received.message.url)
                self.moves = received.message.move
                if self._silent_after is None or count < self._silent_after:
                    answer = self._answers[min(count, len(self._answers) - 1)]
                    if not isinstance(answer, Draining):
                        answer = Draining(answer)
                    sockets.send(received.source, answer)
                if count >= len(self._answers) - 1:
                    self.idle.set()
        sockets.close()

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "REPEAT_SECONDS", 0.05)
    monkeypatch.setattr(drain, "SILENCE_SECONDS", 0.6)


@pytest.fixture
def routers() -> Iterator[list[Router]]:
    started: list[Router] = []
    yield started
    for router in started:
        router.end()


def begin(routers: list[Router], *those: Router) -> None:
    for router in those:
        router.start()
        routers.append(router)


def words(routers: Sequence[Router], *more: str) -> list[str]:
    return ["drain", ENGINE, *(w for r in routers for w in ("--router", str(r.address))), *more]


def test_every_router_is_waited_for(routers: list[Router]) -> None:
    begin(routers, Router(0), Router(3, 2, 1, 0))
    status, output = run(*words(routers))
    assert (status, output.strip()) == (0, f"{ENGINE} is idle")
    assert set(routers[0].asked) == set(routers[1].asked) == {ENGINE}
    assert len(routers[1].asked) >= 4


def test_drain_reports_the_routers_answers_as_json(routers: list[Router]) -> None:
    begin(routers, Router(2), Router(0))
    status, output = run(*words(routers, "--timeout", "0.5", "--json"))
    assert status == 1
    said = {str(routers[0].address): 2, str(routers[1].address): 0}
    assert json.loads(output) == {"engine": ENGINE, "idle": False, "outstanding": said}


def test_a_busy_engine_is_given_up_on_at_the_deadline(routers: list[Router]) -> None:
    begin(routers, Router(2), Router(5), Router(0))
    status, output = run(*words(routers, "--timeout", "3"))
    assert status == 1
    assert f"{ENGINE} still has 7 requests after 3 s" in output


def test_a_router_that_is_not_there_is_not_waited_for(routers: list[Router]) -> None:
    begin(routers, Router(2, 1, 0))
    away = Router()
    began = time.monotonic()
    status, output = run(*words([*routers, away], "--timeout", "60"))
    assert time.monotonic() - began < 30
    assert status == 0
    assert f"no router answers at {away.address}" in output
    assert f"{ENGINE} is idle" in output


def test_a_router_that_dies_does_not_keep_the_engine(routers: list[Router]) -> None:
    """The router's requests at the engine died with the router."""
    begin(routers, Router(2, silent_after=3), Router(0))
    status, output = run(*words(routers, "--timeout", "60"))
    assert status == 0, output


def test_a_router_that_knows_no_such_engine_has_nothing_there(routers: list[Router]) -> None:
    """The router was restarted a moment ago; the engine will report its drain to it."""
    begin(routers, Router(None), Router(1, 0))
    assert run(*words(routers))[0] == 0


def test_engine_name_is_wrong_when_no_router_knows_it(routers: list[Router]) -> None:
    begin(routers, Router(None), Router(None))
    status, output = run(*words(routers))
    assert status == 2
    assert "does not know the engine" in output


def test_unreachable_routers_are_reported_soon() -> None:
    away = Router(), Router()
    began = time.monotonic()
    status, output = run(*words(away, "--timeout", "60"))
    assert time.monotonic() - began < 30
    assert status == 2
    assert all(f"no router answers at {router.address}" in output for router in away)


def test_moved_and_remaining_requests_are_summed_over_all_routers(routers: list[Router]) -> None:
    one = Draining(3, 2, {"seed": 2, "tools": 1}), Draining(0, 5)
    begin(routers, Router(*one), Router(Draining(1, 4, {"seed": 1}), Draining(0, 4)))
    status, output = run(*words(routers, "--move"))
    assert status == 0
    assert f"{ENGINE}: 4 requests end on this engine: 3 seed, 1 tools" in output
    assert f"{ENGINE} is idle, 9 streams have moved" in output
    assert all(router.moves for router in routers)


def test_remaining_requests_are_reported_once_all_routers_have_answered(
    routers: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late router answers several queries at once."""
    monkeypatch.setattr(drain, "SILENCE_SECONDS", 60.0)
    early = Router(*[Draining(3, 2, {"seed": 2})] * 3, Draining(0, 5))
    late = Router(Draining(1, 4, {"seed": 1}), Draining(0, 4))
    late.may_answer = early.idle
    begin(routers, early, late)
    status, output = run(*words(routers, "--move", "--timeout", "60"))
    assert status == 0
    assert f"{ENGINE}: 3 requests end on this engine: 3 seed" in output
    assert "2 requests end on this engine" not in output


def test_a_router_that_refuses_the_drain_is_named(routers: list[Router]) -> None:
    begin(routers, Router(3), Router(Draining(0, last=Role.DECODE)))
    status, output = run(*words(routers, "--timeout", "60"))
    assert status == 2
    assert f"the router at {routers[1].address} refuses the drain" in output
    assert "last decode engine" in output
    assert "--force" in output


def test_undrain_reaches_all_routers_and_reports_its_end(routers: list[Router]) -> None:
    begin(routers, Router(), Router(draining=None))
    status, output = run("undrain", *words(routers)[1:])
    assert (status, output.strip()) == (0, f"the drain of {ENGINE} has ended")
    assert all(router.ended for router in routers)


def test_undrain_of_an_engine_that_does_not_agree_fails(routers: list[Router]) -> None:
    begin(routers, Router(), Router(draining=True))
    status, output = run("undrain", *words(routers)[1:], "--timeout", "0.5")
    assert status == 1
    assert f"{ENGINE} still reports its drain after 0.5 s" in output


def test_undrain_names_the_router_that_does_not_answer(routers: list[Router]) -> None:
    begin(routers, Router())
    away = Router()
    status, output = run("undrain", *words([*routers, away])[1:], "--timeout", "60")
    assert status == 0
    assert f"no router answers at {away.address}" in output
    assert run("undrain", *words([away])[1:], "--timeout", "60")[0] == 2


def test_undrain_of_an_engine_that_no_router_knows_is_a_wrong_name(routers: list[Router]) -> None:
    begin(routers, Router(draining=None), Router(draining=None))
    status, output = run("undrain", *words(routers)[1:])
    assert status == 2
    assert "does not know the engine" in output


def test_a_drain_with_force_is_one_that_routers_of_before_know(routers: list[Router]) -> None:
    assert b"unless_last" not in encode(Drain(ENGINE))
    assert b"last" not in encode(Draining(0))


def test_drain_without_move_sends_older_routers_no_new_field(routers: list[Router]) -> None:
    begin(routers, Router(0))
    assert run(*words(routers))[0] == 0
    assert not routers[0].moves
    assert b"move" not in encode(Drain(ENGINE))
    assert b"staying" not in encode(Draining(0))
