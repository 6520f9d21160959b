"""Engines that join, leave and die, of a trainer whose router lists them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from agent_setup import PATIENCE, until
from safetensors.torch import save_file
from typer.testing import CliRunner
from weight_engines import PATIENT, WeightEngine, WriterGate, drawn, loads, loads_nothing
from weight_router import WeightRouter
from weight_trainer import Trainer

from kv_connector.cli.main import app
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.weights.mapping.geometry import Geometry, Tensor
from kv_connector.weights.mapping.plan import PlanError
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import Agreed, Engines, TensorSource
from kv_connector.weights.trainer import router_list
from kv_connector.weights.trainer.joining import TargetWorker, workers_of
from kv_connector.weights.trainer.router_list import RouterList
from kv_connector.weights.update import PushError
from kv_connector.weights.wire.links import LinkError
from kv_connector.weights.wire.messages import Begin


class Site:
    """A router and engines, which end with the site."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.router = stack.enter_context(WeightRouter())

    def engine(self, *arguments: int, listed: bool = True, **named: object) -> WeightEngine:
        engine = WeightEngine(*arguments, **named)  # type: ignore[arg-type]
        self._stack.callback(engine.close)
        if listed:
            self.router.listed.append(engine.address)
        return engine

    def pusher(self, **named: object) -> WeightPusher:
        """Returns a connected trainer of one rank."""
        pusher = WeightPusher(
            TensorSource(drawn(1)),
            router=str(self.router.address),
            **{"timeouts": PATIENT, **named},  # type: ignore[arg-type]
        )
        self._stack.enter_context(pusher)
        pusher.connect()
        return pusher


@pytest.fixture
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack)


def missed(pusher: WeightPusher, version: str) -> str:
    """Pushes, and returns the error that names the engines without this version."""
    with pytest.raises(PushError) as failed:
        pusher.push(version).wait("applied", PATIENCE)
    return str(failed.value)


def notice_death(pusher: WeightPusher, engine: WeightEngine) -> None:
    """Ends the trainer's links with a dead engine, as its silence does after a while."""
    links = pusher._links
    (target,) = (one for one in pusher._engines if one.address == engine.address)
    for link in (target.link, *(worker.link for worker in target.workers)):
        assert link is not None
        links.loop.call(lambda link=link: links._lost(link, "it is dead")).result(PATIENCE)  # type: ignore[misc]


@pytest.mark.parametrize("streaming", [False, True])
def test_push_includes_an_engine_that_has_joined(site: Site, streaming: bool) -> None:
    first = site.engine(2, streaming=streaming)
    pusher = site.pusher()
    pusher.push("v1").wait("applied", PATIENCE)
    links = [worker.link for worker in pusher._engines[0].workers]
    second = site.engine(1, streaming=streaming)
    pusher.push("v2").wait("applied", PATIENCE)
    assert first.served == ["v2", "v2"]
    assert second.served == ["v2"]
    assert first.model.serves(1)
    assert second.model.serves(1)
    assert {str(engine.address) for engine in (first, second)} == set(pusher.progress())
    kept = {worker.link for worker in workers_of(pusher._engines)}
    assert kept.issuperset(links), "the sessions with the first engine were ended"


def test_workers_of_an_engine_have_joined_before_one_begins(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker in streaming mode is ready at once. Without the order its engine pauses for the second one."""
    engine = site.engine(2, streaming=True)
    pusher = site.pusher()
    order: list[str] = []
    join, begins = pusher._joining.join, pusher._begins

    def noted_join(worker: TargetWorker) -> None:
        join(worker)
        order.append("joined")

    def noted_begin(worker: TargetWorker, version: str) -> Begin:
        order.append("begins")
        return begins(worker, version)

    monkeypatch.setattr(pusher._joining, "join", noted_join)
    monkeypatch.setattr(pusher, "_begins", noted_begin)
    pusher.push("v1").wait("applied", PATIENCE)
    assert order == ["joined", "joined", "begins", "begins"]
    assert engine.served == ["v1", "v1"]


def test_push_gives_the_next_version_to_an_engine_that_joins_during_a_push(site: Site) -> None:
    first, second = site.engine(1), site.engine(1, listed=False)
    gate = WriterGate()
    pusher = gate.pusher(TensorSource(drawn(1)), router=str(site.router.address), timeouts=PATIENT)
    threads = ThreadPoolExecutor(1)
    with pusher:
        pusher.connect()
        push = threads.submit(pusher.push, "v1")
        assert gate.begun.wait(PATIENCE)
        site.router.listed.append(second.address)
        gate.go.set()
        push.result(PATIENCE).wait("applied", PATIENCE)
        assert (first.served, second.served) == (["v1"], [""])
        pusher.push("v2").wait("applied", PATIENCE)
        assert (first.served, second.served) == (["v2"], ["v2"])
    threads.shutdown()


def test_push_leaves_out_an_engine_that_has_left(site: Site) -> None:
    first, second = site.engine(1), site.engine(2)
    pusher = site.pusher()
    pusher.push("v1").wait("applied", PATIENCE)
    site.router.listed.remove(second.address)
    pusher.push("v2").wait("applied", PATIENCE)  # which names no engine
    assert (first.served, second.served) == (["v2"], ["v1", "v1"])
    assert set(pusher.progress()) == {str(first.address)}
    # It has no session with the trainer any more, so another trainer may push to it.
    until(lambda: not any(worker.state().senders for worker in second.workers))
    with WeightPusher(TensorSource(drawn(2)), [str(second.address)], timeouts=PATIENT) as other:
        other.connect()
        other.push("other").wait("applied", PATIENCE)
    assert second.served == ["other", "other"]


def test_push_names_a_dead_engine_until_the_router_does_not_list_it(site: Site) -> None:
    first, second = site.engine(1), site.engine(1)
    pusher = site.pusher()
    pusher.push("v1").wait("applied", PATIENCE)
    site._stack.pop_all()  # closed below, in another order
    try:
        second.close()
        notice_death(pusher, second)
        for version in ("v2", "v3"):
            assert str(second.address) in (problem := missed(pusher, version))
            assert str(first.address) not in problem
            assert first.served == [version]
        site.router.listed.remove(second.address)
        pusher.push("v4").wait("applied", PATIENCE)
        assert first.served == ["v4"]
    finally:
        pusher.close()
        first.close()
        site.router.close()


def test_push_includes_an_engine_that_was_restarted_with_other_ranks(site: Site) -> None:
    """At the same address, and without a call of connect()."""
    first = site.engine(1)
    ports = free_ports(3)
    old = WeightEngine(1, ports=ports[:2])
    site.router.listed.append(old.address)
    try:
        pusher = site.pusher()
        pusher.push("v1").wait("applied", PATIENCE)
    finally:
        old.close()
    notice_death(pusher, old)
    assert str(old.address) in missed(pusher, "v2")
    new = site.engine(2, ports=ports, listed=False)
    pusher.push("v3").wait("applied", PATIENCE)
    assert (first.served, new.served) == (["v3"], ["v3", "v3"])
    assert new.model.serves(1)


def test_push_goes_on_without_an_engine_that_loads_nothing_of_it(site: Site) -> None:
    looks: list[int] = []

    def refuses(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
        looks.append(rank)
        raise ValueError("its model has no such tensors")

    first = site.engine(1)
    other, another = site.engine(1, load=loads_nothing), site.engine(1, load=refuses)
    pusher = site.pusher()
    for version in ("v1", "v2"):
        problem = missed(pusher, version)
        assert f"{other.address} would load none of the 3 tensors" in problem
        assert "its model has no such tensors" in problem
        assert f"{first.address}:" not in problem
        assert first.served == [version]
    assert looks == [0], "an engine that does not fit was queried again"
    site.router.listed.remove(other.address)
    site.router.listed.remove(another.address)
    pusher.push("v3").wait("applied", PATIENCE)
    site.router.listed.append(another.address)
    missed(pusher, "v4")
    assert looks == [0, 0], "an engine that has returned was not queried"


def test_push_goes_on_without_a_joiner_for_which_the_source_has_no_tensors(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BlockFp8 raises such an error if only some of the engines load float8."""
    first = site.engine(1)
    pusher = site.pusher()
    agree = pusher._source.agree

    def refuse(ask: Callable[[], Engines | str]) -> Agreed:
        assert not isinstance(agree(ask).engines, str)
        raise PlanError("some of the engines load up in float8 and some do not")

    joiner = site.engine(1)
    with monkeypatch.context() as patched:
        patched.setattr(pusher._source, "agree", refuse)
        assert f"{joiner.address}: some of the engines load up in float8" in missed(pusher, "v1")
    assert str(joiner.address) in missed(pusher, "v2")
    assert (first.served, joiner.served) == (["v2"], [""])


def test_push_does_not_wait_for_a_joiner_that_is_slow_to_record(site: Site) -> None:
    go_on = threading.Event()

    def slowly(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
        assert go_on.wait(PATIENCE)
        return loads(rank, ranks, tensors)

    first = site.engine(1)
    pusher = site.pusher()
    pusher.push("v1").wait("applied", PATIENCE)
    slow = site.engine(1, load=slowly)
    pusher._begin_timeout = 0.1
    try:
        update = pusher.push("v2")
        pusher._begin_timeout = PATIENCE
        with pytest.raises(PushError, match=r"no answer within 0"):
            update.wait("applied", PATIENCE)
    finally:
        go_on.set()
    pusher.push("v3").wait("applied", PATIENCE)
    assert (first.served, slow.served) == (["v3"], ["v3"])


def test_push_keeps_its_engines_while_the_router_is_away(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = site.engine(1)
    pusher = site.pusher()
    site.router.close()
    monkeypatch.setattr(router_list, "_ANSWER_S", 0.2)
    with caplog.at_level(logging.WARNING, logger="kv_connector"):
        pusher.push("v1").wait("applied", PATIENCE)
    assert first.served == ["v1"]
    assert "the list of engines stays as it was: no router answers at" in caplog.text


def test_push_names_the_router_if_all_engines_have_left(site: Site) -> None:
    first = site.engine(1)
    pusher = site.pusher()
    pusher.push("v1").wait("applied", PATIENCE)
    site.router.listed.clear()
    assert f"{site.router.address}: no engine at the router" in missed(pusher, "v2")
    site.router.listed.append(first.address)
    pusher.push("v3").wait("applied", PATIENCE)
    assert first.served == ["v3"]


def test_connect_needs_an_engine_that_answers(site: Site) -> None:
    with pytest.raises(PushError, match=r"no engine at the router .* takes weights. Start engines with"):
        site.pusher()
    site.router.others = 2
    with pytest.raises(PushError, match="none of the engines of 2 API servers at the router"):
        site.pusher()
    gone = Address("127.0.0.1", free_ports(1)[0])
    site.router.listed.append(gone)
    with pytest.raises(PushError, match=f"{gone}: it takes no connections"):
        site.pusher()
    misfit = site.engine(1, load=loads_nothing)
    with pytest.raises(PushError, match=f"{misfit.address} would load none of the 3 tensors"):
        site.pusher()
    first = site.engine(1)
    pusher = site.pusher()
    problem = missed(pusher, "v1")
    assert f"{gone}: it takes no connections" in problem
    assert str(misfit.address) in problem
    assert first.served == ["v1"]


def test_connect_names_a_router_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_list, "_ANSWER_S", 0.2)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with (
        WeightPusher(TensorSource(drawn(1)), router=address, timeouts=PATIENT) as pusher,
        pytest.raises(PushError, match=f"no router answers at {address} within 0.2 s. Check that it is"),
    ):
        pusher.connect()


@pytest.mark.parametrize(
    "wrong", [{}, {"engines": ["127.0.0.1:5800"], "router": "127.0.0.1:8500"}, {"router": "127.0.0.1"}]
)
def test_pusher_takes_either_engines_or_a_router(
    wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("kv_connector.weights.pusher.TransferEngine")  # nothing may be left open
    with pytest.raises(ValueError, match=r"give either engines|must be host:port"):
        WeightPusher(TensorSource(drawn(1)), **wrong)  # type: ignore[arg-type]


def test_router_list_reads_every_page() -> None:
    listed = [Address("127.0.0.1", 1000 + number) for number in range(100)]
    with WeightRouter(reversed(listed)) as router:
        found = RouterList(router.address, None)
        try:
            assert found.ask() == listed
            assert found.ask() == listed
        finally:
            found.close()


def test_router_list_answers_after_a_router_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Address("127.0.0.1", 1000)
    with WeightRouter([engine]) as router:
        found = RouterList(router.address, None)
        assert found.ask() == [engine]
    monkeypatch.setattr(router_list, "_ANSWER_S", 0.2)
    with pytest.raises(LinkError):
        found.ask()
    monkeypatch.setattr(router_list, "_ANSWER_S", PATIENCE)
    monkeypatch.setattr("weight_router.free_ports", lambda count: [router.address.port])
    with WeightRouter([engine]):
        assert found.ask() == [engine]
    found.close()


def test_first_worker_of_each_rank_gets_the_address_of_the_controller(site: Site) -> None:
    engine = site.engine(2, replicas=2)
    assert {engine.controlled.get(timeout=PATIENCE) for _ in range(2)} == {
        (0, engine.address),
        (2, engine.address),
    }
    assert engine.controlled.empty()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(dict(drawn(1)), tmp_path / "model.safetensors")
    return tmp_path


def weights(command: str, *words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["weights", command, *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_commands_find_engines_by_the_router(site: Site, checkpoint: Path) -> None:
    first, second = engines = [site.engine(1), site.engine(2)]
    by_router = "--router", site.router.address
    status, said = weights("push", checkpoint, *by_router, "--version", "v1")
    assert status == 0, said
    assert (first.served, second.served) == (["v1"], ["v1", "v1"])
    status, said = weights("status", *by_router)
    assert status == 0, said
    assert all(f"{engine.address}: serves v1" in said for engine in engines)
    status, said = weights("verify", checkpoint, *by_router)
    assert status == 0, said
    assert said.count("all 3 parameters are the checkpoint's") == 3
    gone = Address("127.0.0.1", free_ports(1)[0])
    site.router.listed.append(gone)
    status, said = weights("push", checkpoint, *by_router, "--version", "v2")
    assert status == 1
    assert f"{gone}: it takes no connections" in said
    assert (first.served, second.served) == (["v2"], ["v2", "v2"])


@pytest.mark.parametrize("command", ["push", "status", "verify"])
def test_commands_refuse_a_wrong_choice_of_engines(
    site: Site, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(router_list, "_ANSWER_S", 0.2)
    what = [] if command == "status" else [checkpoint]
    engine, router = ("--engine", "127.0.0.1:5800"), ("--router", site.router.address)
    for words in ([], [*engine, *router]):
        status, said = weights(command, *what, *words)
        assert status == 2
        assert "give either --engine" in said
    status, said = weights(command, *what, *router)
    assert status == 2
    assert "no engine at the router" in said
    site.router.close()
    status, said = weights(command, *what, *router)
    assert status == 2
    assert "no router answers at" in said


def test_ranks_follow_the_list_of_rank_0(site: Site, tmp_path: Path) -> None:
    first = site.engine(2, load=of_modules)
    with Trainer(tmp_path, [], 1, ranks=2, applies=True, router=str(site.router.address)) as trainer:
        trainer.all_say("connected")
        trainer.say("v1")
        trainer.all_say("applied")
        assert first.served == ["v1", "v1"]
        second = site.engine(1, load=of_modules)
        trainer.say("v2")
        trainer.all_say("applied")
        assert (first.served, second.served) == (["v2", "v2"], ["v2"])
        site.router.listed.remove(first.address)
        trainer.say("v3")
        trainer.all_say("applied")
        assert (first.served, second.served) == (["v2", "v2"], ["v3"])


def of_modules(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
    """Does the same as ``loads`` for a trainer's tensors, whose names end in ".weight"."""
    named = [msgspec.structs.replace(one, name=one.name.removesuffix(".weight")) for one in tensors]
    return loads(rank, ranks, named)
