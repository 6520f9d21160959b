"""Verification of an engine's weights by hashes, in the engine's layout and dtypes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from kv_connector.cli.main import app
from kv_connector.protocol.actions import Address
from kv_connector.weights.mapping.geometry import Constant, Geometry, Parameter, Tensor, Write
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import CheckpointSource
from kv_connector.weights.worker.receiver import ReceiverConfig, WeightReceiver

PATIENCE_S = 30


def loads(tensors: Sequence[Tensor]) -> Geometry:
    """`q` and the second half of `k`'s rows in one parameter, converted and padded; `norm` transposed."""
    number = {tensor.name: n for n, tensor in enumerate(tensors)}
    return Geometry(
        (Parameter("qk", "bfloat16", 7 * 8), Parameter("norm", "float32", 12)),
        (
            Write(number["q"], 0, (0, 0), (4, 8), 0, (8, 1)),
            Write(number["k"], 0, (2, 0), (2, 8), 32, (8, 1)),
            Write(number["norm"], 1, (0, 0), (3, 4), 0, (1, 3)),
        ),
        (Constant(0, (1, 8), 48, (8, 1), 0.5),),
    )


def checkpoint(directory: Path, **changes: torch.Tensor) -> Path:
    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randn(*shape, generator=generator)
        for name, shape in (("q", (4, 8)), ("k", (4, 8)), ("norm", (3, 4)))
    }
    directory.mkdir()
    save_file(drawn | changes, directory / "model.safetensors")
    return directory


@pytest.fixture
def worker() -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(ReceiverConfig("worker", Address("127.0.0.1", 0), ("tcp",)), loads)
    yield receiver
    receiver.close()


def verify(directory: Path, address: Address, *more: str) -> Result:
    asked = ["weights", "verify", str(directory), "--engine", str(address), "--partial", "k", *more]
    return CliRunner().invoke(app, asked)


def pusher_of(directory: Path, address: Address) -> WeightPusher:
    source = CheckpointSource(directory)
    return WeightPusher(source, [str(address)], apply=lambda _: None, partial=["k"])


def pushed(directory: Path, address: Address) -> None:
    with pusher_of(directory, address) as pusher:
        pusher.connect()
        pusher.push("v1").wait("landed", PATIENCE_S)


def test_pushed_weights_equal_the_checkpoint(worker: WeightReceiver, tmp_path: Path) -> None:
    address = worker.start()
    same = checkpoint(tmp_path / "same")
    pushed(same, address)
    done = verify(same, address)
    assert done.exit_code == 0, done.output
    assert done.output == f"{address}: version v1: all 2 parameters are the checkpoint's\n"
    (told,) = json.loads(verify(same, address, "--json").output)
    assert (told["version"], told["parameters"], told["differ"]) == ("v1", 2, [])


@pytest.mark.parametrize(("tensor", "parameter"), [("q", "qk"), ("k", "qk"), ("norm", "norm")])
def test_differing_parameter_is_named(
    worker: WeightReceiver, tmp_path: Path, tensor: str, parameter: str
) -> None:
    address = worker.start()
    pushed(checkpoint(tmp_path / "pushed"), address)
    changed = torch.zeros(3, 4) if tensor == "norm" else torch.zeros(4, 8)
    done = verify(checkpoint(tmp_path / "other", **{tensor: changed}), address)
    assert done.exit_code == 1
    assert f"1 of 2 parameters differ: {parameter}\n" in done.output


def test_rows_that_the_engine_does_not_load_are_not_compared(worker: WeightReceiver, tmp_path: Path) -> None:
    address = worker.start()
    directory = checkpoint(tmp_path / "pushed")
    pushed(directory, address)
    k = CheckpointSource(directory).held()[0].local().clone()
    k[:2] = 0
    other = checkpoint(tmp_path / "other", k=k)
    assert verify(other, address).exit_code == 0
    done = CliRunner().invoke(app, ["weights", "verify", str(other), "--engine", str(address)])
    assert done.exit_code == 1
    assert f"{address} would not load all of k [4, 8] (16 of 32 elements)" in done.output


def test_broken_value_in_the_arena_is_found(worker: WeightReceiver, tmp_path: Path) -> None:
    address = worker.start()
    same = checkpoint(tmp_path / "same")
    pushed(same, address)
    assert worker._arena is not None
    worker._arena.box(loads(CheckpointSource(same).tensors()).writes[1])[1, 7] += 1
    assert "1 of 2 parameters differ: qk\n" in verify(same, address).output


def test_verify_reports_that_nothing_can_be_compared(worker: WeightReceiver, tmp_path: Path) -> None:
    address = worker.start()
    same = checkpoint(tmp_path / "same")
    done = verify(same, address)
    assert done.exit_code == 1
    assert "has not looked at such a checkpoint" in done.output
    with pusher_of(same, address) as pusher:
        pusher.connect()
    assert "no complete version lies beside the model" in verify(same, address).output
    pushed(same, address)
    more = checkpoint(tmp_path / "more", bias=torch.zeros(3))
    assert "has not looked at such a checkpoint" in verify(more, address).output
    assert verify(same, address).exit_code == 0, "being asked for another has changed nothing"


def test_an_engine_that_is_not_there_is_named_and_the_others_compared(
    worker: WeightReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.weights.verify._CONNECT_S", 0.2)
    address = worker.start()
    same = checkpoint(tmp_path / "same")
    pushed(same, address)
    done = verify(same, address, "--engine", "127.0.0.1:9")
    assert done.exit_code == 1
    assert "127.0.0.1:9: no answer" in done.output
    assert "all 2 parameters" in done.output
