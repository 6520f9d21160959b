"""Real trainers' ranks write into real arenas: FSDP2 and HSDP over gloo, lanes host and tcp, deaths."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from agent_setup import PATIENCE, until
from weight_engines import PATIENT, WriterGate, notice_silence
from weight_trainer import SIZES, Trainer, drawn

from kv_connector.cli import weights as weights_command
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.engine import ErrorCode, TransferError
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights import sources
from kv_connector.weights.mapping.geometry import Constant, Geometry, Parameter, Tensor, Write
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import CheckpointSource, SourceError, TensorSource
from kv_connector.weights.trainer.joining import TargetWorker, workers_of
from kv_connector.weights.update import PushError, Update
from kv_connector.weights.wire.links import Link
from kv_connector.weights.worker.receiver import NotLanded, ReceiverConfig, WeightReceiver

PADDED_ROWS = 32


def loads(tp: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
    """A tensor-parallel rank: rows of `up`, in bfloat16 and padded, columns of `down`, and all of `norm`."""
    number = {tensor.name: n for n, tensor in enumerate(tensors)}
    up, columns = SIZES["up"]
    rows = PADDED_ROWS // ranks
    held = min(rows, up - tp * rows)
    inner = SIZES["down"][1] // ranks
    parameters = [
        Parameter("up", "bfloat16", rows * columns, round=0),
        Parameter("down", "float32", SIZES["down"][0] * inner, round=1),
        Parameter("norm", "float32", SIZES["norm"][0], round=2),
    ]
    writes = [
        Write(number["up.weight"], 0, (tp * rows, 0), (held, columns), 0, (columns, 1)),
        Write(number["down.weight"], 1, (0, tp * inner), (SIZES["down"][0], inner), 0, (inner, 1)),
        Write(number["norm.weight"], 2, (0, 0), (SIZES["norm"][0], 1), 0, (1, 0)),
    ]
    padding = [Constant(0, (rows - held, columns), held * columns, (columns, 1), 0.5)] if held < rows else []
    return Geometry(tuple(parameters), tuple(writes), tuple(padding))


class Engine:
    """An engine of two workers."""

    def __init__(
        self,
        provider: str,
        key: ClusterKey | None = None,
        ports: tuple[int, int] = (0, 0),
        *,
        streaming: bool = False,
    ) -> None:
        self.workers = []
        addresses = []
        for rank in range(2):
            config = ReceiverConfig(
                f"{provider}/{rank}",
                Address("127.0.0.1", ports[rank]),
                (provider,),
                key=key,
                timeouts=PATIENT,
                streaming=streaming,
            )
            self.workers.append(
                WeightReceiver(config, lambda tensors, rank=rank: loads(rank, 2, tensors))  # type: ignore[misc]
            )
            addresses.append(self.workers[-1].start())
        for worker in self.workers:
            worker.set_workers(addresses)
        self.address = str(addresses[0])
        self.ports = (addresses[0].port, addresses[1].port)

    def assert_has(self, version: str, seed: int) -> None:
        self.assert_holds([taken(worker, version) for worker in self.workers], seed)

    def assert_holds(self, by_rank: Sequence[dict[str, torch.Tensor]], seed: int) -> None:
        values = dict(drawn(seed))
        for rank, found in enumerate(by_rank):
            up = torch.full((PADDED_ROWS, SIZES["up"][1]), 0.5)
            up[: SIZES["up"][0]] = values["up.weight"]
            rows = PADDED_ROWS // 2
            assert torch.equal(found["up"].view(rows, -1), up[rank * rows :][:rows].bfloat16())
            inner = SIZES["down"][1] // 2
            columns = values["down.weight"][:, rank * inner :][:, :inner]
            assert torch.equal(found["down"].view(-1, inner), columns)
            assert torch.equal(found["norm"], values["norm.weight"].flatten())

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def taken(worker: WeightReceiver, version: str) -> dict[str, torch.Tensor]:
    """Takes a version as an engine does. A content that is not copied is overwritten later."""
    found: dict[str, torch.Tensor] = {}
    landed = worker.state().landed
    assert shown(landed) == shown(version)
    for contents in worker.take(landed):
        found |= {name: content.clone() for name, content in contents.items()}
    worker.finish("")
    return found


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    engines = [Engine("host"), Engine("tcp")]
    yield engines
    for engine in engines:
        engine.close()


def test_shards_land_without_a_gather_and_lost_ranks_void_their_version(
    engines: list[Engine], tmp_path: Path
) -> None:
    """Three trainers lose ranks.

    The first is HSDP of two times two ranks, and one rank falls silent. The second has two ranks with all
    tensors, and one is killed. The third is left alone.
    """
    addresses = [engine.address for engine in engines]
    with Trainer(tmp_path, addresses, 1, ranks=4, replicas=2) as hsdp:
        hsdp.all_say("connected")
        for version in ("first", "second"):
            hsdp.say(version)
            hsdp.all_say("landed")
            for engine in engines:
                engine.assert_has(version, 1)
        hsdp.say("stop third", 3)
        hsdp.say("third", 0, 1, 2)
        assert hsdp.heard(3) == "begun"
        # Its links stand, and only its heartbeat is missing. The other ranks have written all their parts.
        pid = hsdp.ranks[3].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        until(lambda: not any(lands_without(worker, rank=3) for e in engines for worker in e.workers))
        said = hsdp.heard(0)
        assert said.startswith("version third: ")
        assert "was discarded: rank 3 of run" in said
        assert f"silent for {PATIENT.dead:g} s" in said
        nothing_landed(engines, "third")
    with Trainer(tmp_path, addresses, 2, ranks=2, replicas=0) as plain:
        plain.all_say("connected")
        plain.say("fourth")
        plain.all_say("landed")
        for engine in engines:
            engine.assert_has("fourth", 2)
        plain.say("stop fifth", 1)
        plain.say("fifth", 0)
        assert plain.heard(1) == "begun"
        plain.ranks[1].kill()
        assert "was discarded: rank 1 of run" in plain.heard(0)
        nothing_landed(engines, "fifth")
    with WeightPusher(TensorSource(drawn(3)), addresses, apply=lambda _: None) as last:
        last.connect()
        last.push("sixth").wait("landed", PATIENCE)
        for engine in engines:
            engine.assert_has("sixth", 3)


def lands_without(worker: WeightReceiver, rank: int) -> bool:
    """Lets the time pass after which the stopped rank is lost. Returns whether a version still lands."""

    def age() -> None:
        for sender in worker._landing._senders.values():
            if sender.rank == rank:
                sender.last_seen -= PATIENT.dead

    worker._loop.call(age).result()
    return bool(worker.state().landing)


def nothing_landed(engines: Sequence[Engine], version: str) -> None:
    """The version is whole in no engine.

    A worker to which the lost rank had nothing to write may have all.
    """
    workers = [worker for engine in engines for worker in engine.workers]
    # The first worker that notices the loss reports it to the trainer.
    until(lambda: not any(worker.state().landing for worker in workers))
    for engine in engines:
        states = [worker.state() for worker in engine.workers]
        (missing, *_) = [n for n, state in enumerate(states) if shown(state.landed) != version]
        assert "rank" in states[missing].problem
        with pytest.raises(NotLanded, match=f"version {version} has not landed: no version is here"):
            next(engine.workers[missing].take(version))


def test_an_engine_that_dies_costs_only_itself(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TensorSource(drawn(3))
    addresses = [engine.address for engine in engines]
    with WeightPusher(source, addresses, apply=lambda _: None) as pusher:
        pusher.connect()
        pusher.push("1").wait("landed", PATIENCE)
        engines[1].close()
        notice_silence(pusher._links)
        update = pusher.push("2")
        with pytest.raises(PushError) as failed:
            update.wait("landed", PATIENCE)
        assert engines[1].address in str(failed.value)
        assert engines[0].address not in str(failed.value)
        engines[0].assert_has("2", 3)
        # No answer is awaited of an engine that is gone.
        with monkeypatch.context() as patch:
            patch.setattr(pusher._joining, "_reached", None)
            update = pusher.push("2 again")
        with pytest.raises(PushError, match=r"it takes no connections \(Connection refused\)"):
            update.wait("landed", PATIENCE)
        engines[0].assert_has("2 again", 3)
        # The engine comes back at its old address, without weights, and takes the next versions.
        engines[1] = Engine("tcp", ports=engines[1].ports)
        pusher.push("3").wait("landed", PATIENCE)
        for engine in engines:
            engine.assert_has("3", 3)
        pusher.connect()
        pusher.push("4").wait("landed", PATIENCE)
        for engine in engines:
            engine.assert_has("4", 3)


def test_a_second_trainer_is_refused_with_words(engines: list[Engine]) -> None:
    with WeightPusher(
        TensorSource(drawn(3)), [engines[0].address], apply=lambda _: None, name="one"
    ) as pusher:
        pusher.connect()
        with (
            WeightPusher(TensorSource(drawn(3)), [engines[0].address], apply=lambda _: None) as second,
            pytest.raises(PushError, match=r"one/0 .* sends weights to this worker: end that run first"),
        ):
            second.connect()
        pusher.push("1").wait("landed", PATIENCE)


def test_trainer_without_the_key_gets_no_answer(tmp_path: Path) -> None:
    key, other = ClusterKey.generate(), tmp_path / "other"
    ClusterKey.generate().write(other)
    engine = Engine("tcp", key)
    try:
        with (
            WeightPusher(
                TensorSource(drawn(3)),
                [engine.address],
                key_file=str(other),
                apply=lambda _: None,
                timeouts=Timeouts(connect=0.5),
            ) as pusher,
            pytest.raises(PushError, match=r"no answer within 0\.5 s: .* the same cluster key"),
        ):
            pusher.connect()
    finally:
        engine.close()


def test_a_checkpoint_is_a_source(engines: list[Engine], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name, value in drawn(4):
        save_file({name: value}, tmp_path / f"{name}.safetensors")
    with WeightPusher(CheckpointSource(tmp_path), [engines[0].address], apply=lambda _: None) as pusher:
        pusher.connect()
        pusher.push("1").wait("landed", PATIENCE)
    engines[0].assert_has("1", 4)
    with pytest.raises(SourceError, match=r"no \.safetensors files are in"):
        CheckpointSource(tmp_path / "nowhere")


def test_checkpoint_source_opens_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    opened: list[Path] = []
    safe_open = sources.safe_open

    def counted(path: Path, framework: str) -> object:
        opened.append(path)
        return safe_open(path, framework)

    monkeypatch.setattr(sources, "safe_open", counted)
    values = dict(drawn(4))
    save_file(values, tmp_path / "all.safetensors")
    source = CheckpointSource(tmp_path)
    for tensor, held in zip(source.tensors(), source.held(), strict=True):
        assert torch.equal(held.local(), values[tensor.name])
        assert torch.equal(held.local(), values[tensor.name])
    assert opened == [tmp_path / "all.safetensors"]


@pytest.mark.parametrize("content", [b"", b"no header", (1 << 40).to_bytes(8, "little")])
def test_checkpoint_source_names_a_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=r"broken\.safetensors is not readable as safetensors"):
        CheckpointSource(tmp_path)


def test_an_engine_address_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:5600 is given twice"):
        WeightPusher(TensorSource(drawn(1)), ["127.0.0.1:5600", "127.0.0.1:5601", "127.0.0.1:5600"])


def test_tensors_that_have_moved_are_sent_from_where_they_are(engines: list[Engine]) -> None:
    parameters = {name: torch.nn.Parameter(value) for name, value in drawn(1)}
    source = TensorSource(parameters.items())
    with WeightPusher(source, [engines[0].address], apply=lambda _: None) as pusher:
        pusher.connect()
        pusher.push("one").wait("landed", PATIENCE)
        engines[0].assert_has("one", 1)
        before = [parameter.data for parameter in parameters.values()]  # their memory stays allocated
        for name, value in drawn(2):
            parameters[name].data = value
        pusher.push("two").wait("landed", PATIENCE)
        engines[0].assert_has("two", 2)
        del before


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_tensor_that_the_engine_cannot_load_is_named(error: type[Exception]) -> None:
    def record(tensors: Sequence[Tensor]) -> Geometry:
        raise error(f"{tensors[0].name} is not in this model")

    config = ReceiverConfig("worker", Address("127.0.0.1", 0), ("tcp",))
    worker = WeightReceiver(config, record)
    address = worker.start()
    try:
        with (
            WeightPusher(TensorSource(drawn(3)), [str(address)], apply=lambda _: None) as pusher,
            pytest.raises(PushError, match=r"up\.weight is not in this model"),
        ):
            pusher.connect()
    finally:
        worker.close()


def test_an_engine_without_room_takes_a_version_round_by_round() -> None:
    """Three rounds land in the room of two. A thread for each worker takes them, as its main thread would.

    If a trainer leaves between two rounds, the next version makes the engine whole again.
    """
    engine = Engine("tcp", streaming=True)
    found: list[dict[str, torch.Tensor]] = []
    source = TensorSource(drawn(5))
    threads = ThreadPoolExecutor(2)

    def apply(version: str) -> None:
        found.clear()
        found.extend(threads.map(taken, engine.workers, [version] * 2))

    def later(version: str) -> None:
        threads_of_all.submit(apply, version)

    threads_of_all = ThreadPoolExecutor(1)
    try:
        with WeightPusher(source, [engine.address], apply=later) as pusher:
            pusher.connect()
            assert {len(worker.rounds) for worker in workers_of(pusher._engines)} == {3}
            for version in ("1", "2"):
                pusher.push(version).wait("applied", PATIENCE)
                assert shown(engine.workers[0].state().served) == version
                engine.assert_holds(found, 5)
    finally:
        threads_of_all.shutdown()
        threads.shutdown()
        engine.close()


def end_push(pusher: WeightPusher) -> None:
    """Has push() return, whose links were closed while it waits for workers."""
    for worker in workers_of(pusher._engines):
        assert worker.link is not None
        pusher._news.lost(worker.link, "the test ends")


def test_trainer_that_leaves_between_two_rounds_is_reported() -> None:
    engine = Engine("tcp", streaming=True)
    worker = engine.workers[0]
    rounds = ThreadPoolExecutor(1)
    ready = threading.Event()
    try:
        with WeightPusher(TensorSource(drawn(5)), [engine.address], apply=lambda _: ready.set()) as pusher:
            pusher.connect()
            push = rounds.submit(pusher.push, "1")
            assert ready.wait(PATIENCE)
            parts = worker.take(worker.state().landed)
            assert next(parts)
            # The last round has no room before the first is released.
            assert pusher._news._followed is not None
            pusher._links.close()
            with pytest.raises(NotLanded, match=r"rank 0 of run .* it closed the connection"):
                for _ in parts:
                    pass
            worker.finish("the trainer has left", torn=True)
            state = worker.state()
            assert (state.torn, state.served, state.problem) == (True, "", "the trainer has left")
            end_push(pusher)
            push.result(PATIENCE)
    finally:
        rounds.shutdown()
        engine.close()


def test_a_worker_that_is_lost_and_joined_anew_before_a_version_begins_gets_it(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is lost while the version's sources are made ready."""
    with WeightPusher(TensorSource(drawn(5)), [engines[0].address], apply=lambda _: None) as pusher:
        pusher.connect()
        start = pusher._writer.start

        def blip() -> None:
            pusher._end(next(workers_of(pusher._engines)), "a blip")
            start()

        monkeypatch.setattr(pusher._writer, "start", blip)
        pusher.push("1").wait("landed")
        until(lambda: all(shown(worker.state().landed) == "1" for worker in engines[0].workers))
        engines[0].assert_has("1", 5)


def test_asking_engines_of_which_one_is_not_there_leaves_no_links(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = f"127.0.0.1:{free_ports(1)[0]}"
    with WeightPusher(TensorSource(drawn(5)), [engines[0].address, absent]) as pusher:
        wait = pusher._links.wait
        monkeypatch.setattr(
            pusher._links,
            "wait",
            lambda answer, link, _: wait(answer, link, 0.1 if str(link.address) == absent else PATIENCE),
        )
        for _ in range(3):
            with pytest.raises(PushError, match="no answer within 0"):
                pusher.connect()
        assert len(pusher._links._links) == 1, "to the engine that is there"


def test_unexpected_error_of_rank_0_reaches_the_other_ranks(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other ranks would wait for ever for rank 0's result."""

    def exhausted(*_: object) -> None:
        raise zmq.ZMQError(24)

    with WeightPusher(TensorSource(drawn(5)), [engines[0].address]) as pusher:
        monkeypatch.setattr(pusher._links, "dial", exhausted)
        assert "ZMQError: Too many open files" in str(pusher._joining.safely(pusher._joining.ask_engines))


def test_error_of_the_trainer_reaches_the_engines(engines: list[Engine]) -> None:
    gate, worker = WriterGate(), engines[0].workers[0]
    pusher = gate.pusher(TensorSource(drawn(5)), [engines[0].address], apply=lambda _: None)
    with ThreadPoolExecutor(1) as threads:
        pusher.connect()
        threads.submit(pusher.push, "1")
        assert gate.begun.wait(PATIENCE)
        with pytest.raises(RuntimeError), pusher:
            raise RuntimeError("the loss is no number")
        gate.go.set()
        end_push(pusher)
    until(lambda: "the loss is no number" in worker.state().problem)


def test_it_may_be_cancelled_while_it_is_closed(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A seeder is cancelled so if a second worker has found that the seed is not needed any more."""
    with WeightPusher(TensorSource(drawn(5)), [engines[0].address]) as pusher:
        pusher.connect()
        end = pusher._links.end

        def end_too_late(link: Link, reason: str) -> None:
            pusher.close()
            end(link, reason)

        monkeypatch.setattr(pusher._links, "end", end_too_late)
        pusher.cancel("nobody waits for it")
        pusher.cancel("and again")
    assert "not over yet" not in caplog.text


def test_a_rounds_timeout_covers_its_push_and_both_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 7.0, 8.0, 9.0))  # began, pushed, landed, applied
    monkeypatch.setattr(weights_command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    waits: list[tuple[str, float]] = []
    update = SimpleNamespace(wait=lambda what, limit: waits.append((what, limit)), pause_seconds={})
    weights_command._round(
        SimpleNamespace(push=lambda version: update, cancel=lambda reason: None),  # type: ignore[arg-type]
        "v1",
        10.0,
    )
    assert waits == [("landed", 3.0), ("applied", 2.0)]


def test_the_error_that_ended_a_push_is_not_replaced_by_that_of_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pusher = WeightPusher(TensorSource([("w", torch.ones(4))]), ["127.0.0.1:1"], providers=("tcp",))
    close = pusher._engine.close

    def hangs() -> None:
        close()
        raise TransferError(ErrorCode.TIMEOUT, "nvlink", "", "close", "its GPU hangs")

    monkeypatch.setattr(pusher._engine, "close", hangs)
    with pytest.raises(KeyError, match="first"), pusher:
        raise KeyError("first")
    assert "the transfer engine is closed, but not cleanly" in caplog.text


def test_two_threads_that_find_all_workers_ready_apply_a_version_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[str] = []
    source = TensorSource([("w", torch.ones(4))])
    with WeightPusher(source, ["127.0.0.1:1"], providers=("tcp",), apply=applied.append) as pusher:
        both = threading.Barrier(2, timeout=PATIENCE)

        class Meeting:
            """A lock that both threads have reached before either gets it."""

            lock = threading.Lock()

            def __enter__(self) -> None:
                both.wait()
                self.lock.acquire()

            def __exit__(self, *_: object) -> None:
                self.lock.release()

        ready = TargetWorker(Address("127.0.0.1", 1), 0, Link(Address("127.0.0.1", 1), b"1", 0.0))
        news = pusher._news
        monkeypatch.setattr(news, "_engines", [SimpleNamespace(workers=[ready])])
        monkeypatch.setattr(news, "_asking", Meeting())
        news.begin(Update("1", []))
        followed = news._followed
        assert followed is not None
        followed.ready.add(ready)
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(news._apply_once, followed) for _ in range(2)]:
                done.result()
        monkeypatch.undo()
    assert applied == ["1"]
