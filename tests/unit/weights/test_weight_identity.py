"""A version of the weights is more than its name: trainers use names again, with other weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file
from weight_engines import WeightEngine, drawn

from kv_connector.protocol.wire.weight_version import MAX_NAME, identity, shown, shown_apart
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import CheckpointSource, TensorSource, WeightSource
from kv_connector.weights.update import PushError

PATIENCE_S = 30


@pytest.fixture
def engines() -> Iterator[list[WeightEngine]]:
    """A prefill and a decode engine."""
    engines = [WeightEngine(1), WeightEngine(1)]
    yield engines
    for engine in engines:
        engine.close()


def push(source: WeightSource, version: str, *engines: WeightEngine) -> None:
    with WeightPusher(source, [str(engine.address) for engine in engines]) as pusher:
        pusher.connect()
        pusher.push(version).wait("applied", PATIENCE_S)


def identities(engines: list[WeightEngine]) -> list[str]:
    """Returns the identities of the versions, which engines and routers compare."""
    return [engine.workers[0].state().served for engine in engines]


def test_engines_of_one_push_serve_the_same_version(engines: list[WeightEngine]) -> None:
    push(TensorSource(drawn(1)), "a", *engines)
    one, other = identities(engines)
    assert one == other
    assert [engine.model.labels for engine in engines] == [["a"], ["a"]]


def test_another_run_of_the_same_name_is_another_version(engines: list[WeightEngine]) -> None:
    """A trainer that is started again counts from 1 again."""
    push(TensorSource(drawn(1)), "1", *engines)
    push(TensorSource(drawn(2)), "1", engines[0])
    updated, other = identities(engines)
    assert updated != other
    assert shown(updated) == shown(other) == "1"


def test_another_push_of_the_same_name_is_another_version(engines: list[WeightEngine]) -> None:
    with WeightPusher(TensorSource(drawn(1)), [str(engines[0].address)]) as pusher:
        pusher.connect()
        pusher.push("1").wait("applied", PATIENCE_S)
        before = identities(engines)[0]
        pusher.push("1").wait("applied", PATIENCE_S)
    assert identities(engines)[0] != before


def test_a_checkpoint_is_the_same_version_in_each_push_until_it_changes(
    engines: list[WeightEngine], tmp_path: Path
) -> None:
    """An operator updates one engine of a fleet after the other."""
    file = tmp_path / "model.safetensors"
    save_file(dict(drawn(1)), file)
    for engine in engines:
        push(CheckpointSource(tmp_path), "a", engine)
    one, other = identities(engines)
    assert one == other
    save_file(dict(drawn(2)), file)
    os.utime(file, ns=(0, 0))  # the time differs, however coarse the file system's clock is
    push(CheckpointSource(tmp_path), "a", engines[0])
    updated, other = identities(engines)
    assert updated != other


def test_push_refuses_a_name_that_no_engine_could_take(engines: list[WeightEngine]) -> None:
    with WeightPusher(TensorSource(drawn(1)), [str(engines[0].address)]) as pusher:
        pusher.connect()
        for name in ("", "n" * (MAX_NAME + 1)):
            with pytest.raises(PushError, match="1 to 119 characters"):
                pusher.push(name)
        pusher.push("n" * MAX_NAME).wait("applied", PATIENCE_S)


@pytest.mark.parametrize("name", ["1", "step#1", "a\nb", "a#00000000"])
def test_shown_gives_back_the_name(name: str) -> None:
    assert shown(identity(name, "content")) == name


def test_a_version_without_a_tag_is_shown_as_it_is() -> None:
    assert [shown(version) for version in ("", "7", "#12345678", "a#1234567")] == [
        "",
        "7",
        "#12345678",
        "a#1234567",
    ]


def test_versions_of_one_name_are_distinguished() -> None:
    one, other = identity("1", "this run"), identity("1", "that run")
    assert shown_apart(one, other) == (one, other)
    assert shown_apart(one, "2") == ("1", "2")
