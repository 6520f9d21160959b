"""An engine that joins gets its weights from an engine that serves.

No trainer takes part, and the seeding engine does not pause. If either dies during the seed, the other keeps
its weights.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from agent_setup import until
from command_line import one_line
from typer.testing import CliRunner, Result
from weight_engines import DEAD_S, PATIENT, WeightEngine, WriterGate, drawn, notice_silence
from weight_engines import main as engine_process
from weight_trainer import FORKSERVER

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.main import app
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.seeding.start_seeding import SeedError, seed, seed_at_start
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.update import PushError
from kv_connector.weights.wire.links import Links

PATIENCE_S = 60


def address_of(one: WeightEngine | Address) -> Address:
    return one if isinstance(one, Address) else one.address


class Site:
    def __init__(self) -> None:
        self._engines: list[WeightEngine] = []
        self.links = Links(None, PATIENT, heard=lambda *_: None, lost=lambda *_: None)
        self.threads = ThreadPoolExecutor(4)

    def engine(self, *arguments: int, **named: object) -> WeightEngine:
        self._engines.append(WeightEngine(*arguments, **named))  # type: ignore[arg-type]
        return self._engines[-1]

    def end(self, engine: WeightEngine) -> None:
        self._engines.remove(engine)
        engine.close()

    def close(self) -> None:
        self.links.close()
        for engine in self._engines:
            engine.close()
        self.threads.shutdown()

    def seed(self, seeder: WeightEngine | Address, joiner: WeightEngine | Address) -> str:
        return seed(address_of(seeder), address_of(joiner), self.links, PATIENCE_S)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[WriterGate]:
    """A gate that holds the pushers of seeders."""
    gate = WriterGate()
    monkeypatch.setattr("kv_connector.weights.seeding.seeding_worker.WeightPusher", gate.pusher)
    yield gate
    gate.go.set()


@contextmanager
def trainer(of: int, *engines: WeightEngine, **named: object) -> Iterator[WeightPusher]:
    """A connected trainer of these engines."""
    addresses = [str(engine.address) for engine in engines]
    with WeightPusher(TensorSource(drawn(of)), addresses, timeouts=PATIENT, **named) as pusher:  # type: ignore[arg-type]
        pusher.connect()
        yield pusher


def pushed(version: str, of: int, *engines: WeightEngine) -> None:
    with trainer(of, *engines) as pusher:
        pusher.push(version).wait("applied", PATIENCE_S)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["weights", *words])


@pytest.mark.parametrize(
    ("seeders", "joiners", "streaming"), [(2, 1, False), (1, 2, True), (2, 4, False), (4, 2, True)]
)
def test_a_joiner_serves_what_the_fleet_serves_and_takes_the_next_version(
    site: Site, seeders: int, joiners: int, streaming: bool
) -> None:
    """The joiner has other ranks and another mode. Later it seeds a third engine with its version."""
    fleet, joiner = site.engine(seeders), site.engine(joiners, streaming=streaming)
    pushed("v1", 1, fleet)
    assert site.seed(fleet, joiner) == "v1"
    assert joiner.model.serves(1)
    assert joiner.model.labels == joiner.served[:1] == ["v1"]
    assert fleet.model.labels == ["v1"]
    assert fleet.seeding == [""] * seeders
    if not streaming:
        third = site.engine(2)
        assert site.seed(joiner, third) == "v1"
        assert third.model.serves(1)
    pushed("v2", 2, fleet, joiner)
    assert fleet.model.serves(2)
    assert joiner.model.serves(2)


def test_all_data_parallel_ranks_are_one_engine(site: Site) -> None:
    """Workers know only those of their own rank, until the controller sends them the full list."""
    fleet, joiner = site.engine(2, replicas=2), site.engine(1, replicas=2)
    pushed("v1", 1, fleet)
    assert fleet.served == ["v1"] * 4
    assert fleet.model.serves(1)
    assert site.seed(fleet, joiner) == "v1"
    assert joiner.served == ["v1"] * 2
    assert joiner.model.serves(1)
    with trainer(2, fleet, joiner) as pusher:
        pusher.push("v2").wait("applied", PATIENCE_S)
    assert fleet.model.serves(2)
    assert joiner.model.serves(2)


def test_several_are_seeded_at_once(site: Site, gate: WriterGate) -> None:
    fleet, joiners = site.engine(2), [site.engine(1), site.engine(2)]
    pushed("v1", 1, fleet)
    asked = [site.threads.submit(site.seed, fleet, joiner) for joiner in joiners]
    until(lambda: all(all(str(one.address) in to for to in fleet.seeding) for one in joiners))
    gate.go.set()
    assert [one.result(PATIENCE_S) for one in asked] == ["v1", "v1"]
    assert all(joiner.model.serves(1) for joiner in joiners)


# --- Beside a trainer


@pytest.mark.parametrize("restarted", [False, True])
def test_a_trainer_that_is_connected_to_both_goes_on_with_both(site: Site, restarted: bool) -> None:
    """``restarted``: the joiner was restarted since the trainer's last version. Otherwise it has received
    none yet."""
    ports = free_ports(2)
    fleet, joiner = site.engine(2), site.engine(1, ports=ports)
    if not restarted:
        pushed("v1", 1, fleet)
    with trainer(2, fleet, joiner) as pusher:
        if restarted:
            pusher.push("v1").wait("applied", PATIENCE_S)
            site.end(joiner)
            joiner = site.engine(1, ports=ports)
            # An engine needs longer for its start than a trainer needs to notice its loss.
            (worker,) = pusher._engines[1].workers
            until(lambda: worker.link is not None and bool(worker.link.over))
        assert site.seed(fleet, joiner) == "v1"
        assert joiner.model.serves(2 if restarted else 1)
        pusher.push("v2").wait("applied", PATIENCE_S)
        assert fleet.served == ["v2", "v2"]
        assert joiner.served == ["v2"]
        assert joiner.model.serves(2)


def test_a_trainer_that_comes_while_a_joiner_is_seeded_is_next(site: Site, gate: WriterGate) -> None:
    """At both engines the version waits: the written weights stay as they are until then."""
    fleet, joiner = site.engine(2), site.engine(1)
    pushed("v1", 1, fleet)
    seeded = site.threads.submit(site.seed, fleet, joiner)
    assert gate.begun.wait(PATIENCE_S)
    with trainer(2, fleet, joiner) as pusher:
        push = site.threads.submit(pusher.push, "v2")
        for worker in (*fleet.workers, *joiner.workers):
            until(lambda w=worker: any(s.following for s in w._landing._senders.values()))  # type: ignore[misc]
        assert [worker.state().landing for worker in fleet.workers] == ["", ""]
        assert shown(joiner.workers[0].state().landing) == "v1"
        gate.go.set()
        push.result(PATIENCE_S).wait("applied", PATIENCE_S)
    assert fleet.model.serves(2)
    assert joiner.model.serves(2)
    assert seeded.result(PATIENCE_S) == "v1"
    assert joiner.model.labels == ["v1", "v2"]


def test_engine_with_a_trainers_version_is_not_seeded(site: Site) -> None:
    fleet, joiner = site.engine(1), site.engine(1)
    pushed("v1", 1, fleet)
    with trainer(2, joiner, name="grpo") as pusher:
        pusher.push("v2").wait("applied", PATIENCE_S)
        with pytest.raises(SeedError, match=r"grpo/0 \(run .*\) has begun version v2 here"):
            site.seed(fleet, joiner)
    assert joiner.served == ["v2"]
    assert site.seed(fleet, joiner) == "v1", "who asks for it by the command means it"


# --- What cannot be


def test_engine_that_cannot_seed_reports_the_reason(site: Site) -> None:
    fleet, joiner = site.engine(1), site.engine(1)
    with pytest.raises(SeedError, match="serves the weights that it was started with: push a version"):
        site.seed(fleet, joiner)
    with pytest.raises(SeedError, match="cannot seed itself"):
        site.seed(fleet, fleet)
    streaming = site.engine(1, streaming=True)
    pushed("v1", 1, fleet, streaming)
    with pytest.raises(SeedError, match=r"cannot seed .*: it is in streaming mode, and keeps no copy"):
        site.seed(streaming, joiner)
    with trainer(2, fleet, apply=lambda _: None) as pusher:
        pusher.push("v2").wait("landed", PATIENCE_S)
        with pytest.raises(SeedError, match="in its arena, from which it would send, version v2 is ready"):
            site.seed(fleet, joiner)
    fleet.model.broken = "the kernels do not like it"
    with pytest.raises(PushError, match="the kernels do not like it"):
        pushed("v3", 3, fleet)
    with pytest.raises(SeedError, match="has weights of more than one version, and stays paused"):
        site.seed(fleet, joiner)
    assert (joiner.served, joiner.model.labels) == ([""], [])


def test_one_of_another_model_is_refused_by_its_tensor(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(rank: int, ranks: int, tensors: object) -> None:
        raise ValueError("norm is not in this model")

    fleet = site.engine(2)
    pushed("v1", 1, fleet)
    monkeypatch.setattr("weight_engines.loads", other)
    joiner = site.engine(1)
    with pytest.raises(SeedError, match=r"did not seed .*: norm is not in this model"):
        site.seed(fleet, joiner)
    assert fleet.seeding == ["", ""]


def test_a_key_is_needed_and_is_enough(site: Site) -> None:
    key = ClusterKey.generate()
    fleet, joiner, stranger = (site.engine(1, key=one) for one in (key, key, ClusterKey.generate()))
    links = Links(key, PATIENT, heard=lambda *_: None, lost=lambda *_: None)
    try:
        with WeightPusher(TensorSource(drawn(1)), [str(fleet.address)], key=key) as pusher:
            pusher.connect()
            pusher.push("v1").wait("applied", PATIENCE_S)
        assert seed(fleet.address, joiner.address, links, PATIENCE_S) == "v1"
        links.timeouts = Timeouts(connect=0.2)
        with pytest.raises(SeedError, match=r"no answer within .* the same cluster key"):
            seed(stranger.address, joiner.address, links, PATIENCE_S)
    finally:
        links.close()


# --- What goes wrong


class Process:
    """An engine in a process that can be killed."""

    def __init__(self, ranks: int, *, holds: bool = False) -> None:
        self._told, theirs = FORKSERVER.Pipe()
        self._process = FORKSERVER.Process(target=engine_process, args=(theirs, ranks, holds), daemon=True)
        self._process.start()
        host, port = self.heard().rsplit(":", 1)
        self.address = Address(host, int(port))

    def heard(self) -> str:
        assert self._told.poll(PATIENCE_S)
        return str(self._told.recv())

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def test_a_seeding_engine_that_dies_leaves_the_joiner_as_it_was(site: Site) -> None:
    fleet, joiner = Process(2, holds=True), site.engine(2)
    try:
        with WeightPusher(TensorSource(drawn(1)), [str(fleet.address)], timeouts=PATIENT) as pusher:
            pusher.connect()
            pusher.push("v1").wait("applied", PATIENCE_S)
        seeded = site.threads.submit(site.seed, fleet.address, joiner)
        assert fleet.heard() == "begun"
        until(lambda: all(shown(worker.state().landing) == "v1" for worker in joiner.workers))
    finally:
        fleet.kill()
    notice_silence(site.links)
    with pytest.raises(SeedError, match=rf"silent for {DEAD_S:g} s"):
        seeded.result(PATIENCE_S)
    until(lambda: not any(worker.state().landing for worker in joiner.workers))
    assert (joiner.served, joiner.model.labels) == (["", ""], [])
    assert "rank" in joiner.workers[0].state().problem
    pushed("v2", 2, joiner)
    assert joiner.model.serves(2)


def test_a_joiner_that_dies_leaves_the_seeding_engine_free(site: Site, gate: WriterGate) -> None:
    fleet, joiner = site.engine(2), Process(1)
    pushed("v1", 1, fleet)
    seeded = site.threads.submit(site.seed, fleet, joiner.address)
    assert gate.begun.wait(PATIENCE_S)
    assert fleet.seeding == [str(joiner.address)] * 2
    joiner.kill()
    for pusher in gate.pushers:
        notice_silence(pusher._links)
    with pytest.raises(SeedError, match="did not seed"):
        seeded.result(PATIENCE_S)
    until(lambda: fleet.seeding == ["", ""])
    pushed("v2", 2, fleet)
    assert fleet.model.serves(2)


@pytest.mark.parametrize("how", ["deadline", "who asked leaves", "one worker cannot"])
def test_arena_is_returned_whatever_the_outcome_of_the_seed(
    site: Site, gate: WriterGate, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    fleet, joiner = site.engine(2), site.engine(1)
    pushed("v1", 1, fleet)
    said = "the version was not written within 60 s"
    if how == "deadline":
        monkeypatch.setattr("kv_connector.weights.seeding.seeding_worker.threading.Timer", gate.timer)
    if how == "one worker cannot":
        said = "it is being seeded itself"
        monkeypatch.setattr(fleet.workers[1]._landing, "lend", lambda *_: said)
    links = Links(None, PATIENT, heard=lambda *_: None, lost=lambda *_: None)
    seeded = site.threads.submit(seed, fleet.address, joiner.address, links, PATIENCE_S)
    if how == "who asked leaves":
        said = "it is interrupted"
        assert gate.begun.wait(PATIENCE_S)
        links.end_all(said)
    with pytest.raises(SeedError, match=said):
        seeded.result(PATIENCE_S)
    until(lambda: fleet.seeding == ["", ""])
    until(lambda: not joiner.workers[0].state().senders)
    monkeypatch.undo()
    links.close()
    assert joiner.served == [""]
    assert site.seed(fleet, joiner) == "v1", "the next one is not in its way"
    assert joiner.model.serves(1)


def test_a_worker_ends_while_it_seeds(site: Site, gate: WriterGate, caplog: pytest.LogCaptureFixture) -> None:
    fleet, joiner = site.engine(1), site.engine(1)
    pushed("v1", 1, fleet)
    seeded = site.threads.submit(site.seed, fleet, joiner)
    assert gate.begun.wait(PATIENCE_S)
    site.end(fleet)
    (said,) = [one for one in caplog.messages if "did not seed" in one]
    assert "the worker shuts down" in said
    with pytest.raises(SeedError):
        seeded.result(PATIENCE_S)
    until(lambda: not joiner.workers[0].state().senders)
    assert joiner.served == [""]


# --- An engine that cannot pause


def test_an_engine_that_does_not_pause_goes_on_as_it_was(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = site.engine(2)
    pushed("v1", 1, engine)

    async def pause() -> None:
        engine.model.paused = True
        raise RuntimeError("the prefix cache is in use")

    monkeypatch.setattr(engine.model, "pause", pause)
    with trainer(2, engine) as pusher, pytest.raises(PushError, match="the prefix cache is in use"):
        pusher.push("v2").wait("applied", PATIENCE_S)
    assert engine.model.serves(1)
    told = json.loads(run("status", "--json", "--engine", str(engine.address)).output)
    assert told[str(engine.address)]["torn"] is False
    monkeypatch.undo()
    pushed("v3", 3, engine)
    assert engine.model.serves(3)


def test_a_worker_that_does_not_answer_before_the_pause_tears_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = site.engine(1)
    pushed("v1", 1, engine)

    async def nobody(version: str) -> list[str]:
        raise TimeoutError

    with trainer(2, engine) as pusher:
        monkeypatch.setattr(engine._controller, "_hold", nobody)
        with pytest.raises(PushError, match="TimeoutError"):
            pusher.push("v2").wait("applied", PATIENCE_S)
        monkeypatch.undo()
        told = json.loads(run("status", "--json", "--engine", str(engine.address)).output)
        assert told[str(engine.address)]["torn"] is False
    assert engine.model.serves(1)
    (said,) = [one for one in caplog.messages if "version v2 is not served" in one]
    assert "stays paused" not in said


# --- By the command, and at the start


def test_the_command(site: Site) -> None:
    fleet, joiner, streaming = site.engine(2), site.engine(1), site.engine(1, streaming=True)
    pushed("v1", 1, fleet)
    joiners = [word for one in (joiner, streaming) for word in ("--engine", str(one.address))]
    done = run("seed", "--from", str(fleet.address), *joiners)
    assert done.exit_code == 0, done.output
    assert f"{joiner.address}: version v1 is served, after " in done.output
    assert joiner.model.serves(1)
    assert streaming.model.serves(1)
    told = json.loads(run("status", "--json", "--engine", str(joiner.address)).output)
    assert told[str(joiner.address)]["served"] == "v1"
    done = run("seed", "--from", str(streaming.address), "--engine", str(joiner.address))
    assert done.exit_code == ExitStatus.FAILURE
    assert "it is in streaming mode" in done.output


def test_status_names_the_engine_that_a_seeder_writes_to(site: Site, gate: WriterGate) -> None:
    fleet, joiner = site.engine(1), site.engine(1)
    pushed("v1", 1, fleet)
    seeded = site.threads.submit(site.seed, fleet, joiner)
    assert gate.begun.wait(PATIENCE_S)
    assert (
        f"serves v1, v1 has landed, seeds {joiner.address}"
        in run("status", "--engine", str(fleet.address)).output
    )
    gate.go.set()
    seeded.result(PATIENCE_S)


class Warned(logging.Handler):
    """Notes whether a warning with this text was logged."""

    def __init__(self, words: str) -> None:
        super().__init__(logging.WARNING)
        self._words = words
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.seen.set()


def test_an_engine_that_starts_while_a_version_lands_is_seeded_with_that_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not open its API with its old weights."""
    gate, warned = WriterGate(), Warned("does not seed this engine")
    fleet, joiner = site.engine(1), site.engine(1)
    pushed("v1", 1, fleet)
    logger = logging.getLogger("kv_connector")
    logger.addHandler(warned)
    try:
        with gate.pusher(TensorSource(drawn(2)), [str(fleet.address)], timeouts=PATIENT) as pusher:
            pusher.connect()
            update = site.threads.submit(pusher.push, "v2")
            assert gate.begun.wait(PATIENCE_S)
            started = site.threads.submit(seed_at_start, [fleet.address], joiner.address, None, required=True)
            assert warned.seen.wait(PATIENCE_S)
            assert not started.done()
            assert joiner.served == [""]
            gate.go.set()
            update.result(PATIENCE_S).wait("applied", PATIENCE_S)
            started.result(PATIENCE_S)
        assert joiner.model.serves(2)
        assert joiner.served == ["v2"]
    finally:
        gate.go.set()
        logger.removeHandler(warned)


def test_start_with_a_required_seed_fails_when_no_engine_can_seed(site: Site) -> None:
    empty, joiner = site.engine(1), site.engine(1)
    with pytest.raises(SeedError, match=r"no own weights.*serves the weights that it was started with"):
        seed_at_start([empty.address], joiner.address, None, required=True)


def test_an_engine_that_no_engine_can_seed_in_time_goes_on_with_its_own_weights(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.weights.seeding.start_seeding.SEED_S", 0.0)
    fleet, joiner = site.engine(1, streaming=True), site.engine(1)
    pushed("v1", 1, fleet)
    seed_at_start([fleet.address], joiner.address, None)
    assert joiner.served == [""]
    with pytest.raises(SeedError, match="no own weights"):
        seed_at_start([fleet.address], joiner.address, None, required=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "127.0.0.1:1"], "Missing option '--from'"),
        (["--from", "127.0.0.1:1"], "Missing option '--engine'"),
        (["--from", "127.0.0.1", "--engine", "127.0.0.1:1"], "must be host:port"),
        (
            ["--from", "127.0.0.1:1", "--engine", "127.0.0.1:2", "--key-file", "nowhere"],
            "there is no key file",
        ),
    ],
)
def test_unusable_arguments_of_the_command_are_reported(words: list[str], said: str) -> None:
    done = run("seed", *words)
    assert done.exit_code == ExitStatus.USAGE
    assert said in one_line(done.output)


def test_engine_tries_the_given_seeders_in_turn(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.weights.wire.links.Timeouts", lambda: PATIENT)
    fleet, empty, joiner = site.engine(2), site.engine(1), site.engine(1)
    pushed("v1", 1, fleet)
    with caplog.at_level(logging.INFO, "kv_connector"):
        seed_at_start([empty.address, joiner.address], joiner.address, None)
        *_, warned = [
            record.message
            for record in caplog.records
            if record.name == "kv_connector" and record.levelno == logging.WARNING
        ]
        assert f"{empty.address} serves the weights that it was started with" in warned
        assert f"{joiner.address} cannot seed itself" in warned
        assert joiner.served == [""]
        seed_at_start([empty.address, fleet.address], joiner.address, None)
    assert f"weights: seeded by {fleet.address} with version v1" in caplog.messages
    assert joiner.model.serves(1)
