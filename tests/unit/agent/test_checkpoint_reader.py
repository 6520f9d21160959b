"""The identity of a checkpoint: it follows from the weights, and not from their place or division."""

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from kv_connector.agent import checkpoint_reader
from kv_connector.agent.checkpoint_reader import (
    CONSOLIDATED,
    MODEL,
    UnknownCheckpoint,
    identify,
    read_checkpoint,
)
from kv_connector.protocol.session.checkpoint import Checkpoint

Weights = dict[str, NDArray[Any]]
COLUMNS = 4096


def weights(seed: int = 0, layers: int = 3) -> Weights:
    """Returns matrices that are larger than their samples, and norms that are smaller."""
    rng = np.random.default_rng(seed)
    found: Weights = {"model.embed.weight": rng.standard_normal((16, COLUMNS), np.float32)}
    for layer in range(layers):
        found[f"model.layers.{layer}.q.weight"] = rng.standard_normal((8, COLUMNS), np.float32)
        found[f"model.layers.{layer}.norm.weight"] = rng.standard_normal(64, np.float32)
    return found


def write(directory: Path, tensors: Weights, files: int = 1, *, index: bool = False) -> Path:
    """Writes the tensors into this many files, in turns."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1}-of-{files}.safetensors"
        part = dict(itertools.islice(tensors.items(), number, None, files))
        save_file(part, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    if index:
        (directory / MODEL[1]).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def raw(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path.parent


def digest(directory: Path) -> str:
    return read_checkpoint(directory).digest


def test_checkpoint_identity_is_that_of_the_weights(tmp_path: Path) -> None:
    one = digest(write(tmp_path / "one", weights()))
    assert len(one) == 16
    assert digest(write(tmp_path / "copy", weights())) == one
    assert digest(write(tmp_path / "other", weights(seed=1))) != one


@pytest.mark.parametrize("index", [False, True])
def test_checkpoint_in_other_files_has_the_same_identity(tmp_path: Path, index: bool) -> None:
    whole = digest(write(tmp_path / "whole", weights()))
    assert digest(write(tmp_path / "parts", weights(), files=3, index=index)) == whole


def test_symlinked_snapshot_has_the_same_identity(tmp_path: Path) -> None:
    """The cache of the Hugging Face hub has links to its blobs."""
    directory = write(tmp_path / "blobs", weights(), files=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in directory.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert digest(snapshot) == digest(directory)


@pytest.mark.parametrize("name", [*weights()])
def test_one_changed_tensor_changes_the_identity(tmp_path: Path, name: str) -> None:
    """For example a LoRA of rank 1 that was merged into one matrix."""
    changed = weights()
    rng = np.random.default_rng(7)
    shape = changed[name].shape
    change = np.multiply.outer(rng.standard_normal(shape[0]), rng.standard_normal(shape[1:])) / 1000
    changed[name] = (changed[name] + change).astype(np.float32)
    assert digest(write(tmp_path / "tuned", changed)) != digest(write(tmp_path / "base", weights()))


@pytest.mark.parametrize("row", [0, 8, 15])
def test_first_middle_and_last_row_are_sampled(tmp_path: Path, row: int) -> None:
    changed = weights()
    changed["model.embed.weight"][row] += 1
    assert digest(write(tmp_path / "tuned", changed)) != digest(write(tmp_path / "base", weights()))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {"model.extra.weight": np.zeros(1, np.float32)},
        lambda tensors: {name.replace("embed", "input"): one for name, one in tensors.items()},
        lambda tensors: (
            tensors | {"model.layers.0.norm.weight": tensors["model.layers.0.norm.weight"][:, None]}
        ),
        lambda tensors: tensors | {"model.layers.0.norm.weight": np.zeros(64, np.float16)},
    ],
    ids=["tensor", "name", "shape", "type"],
)
def test_header_changes_the_identity(tmp_path: Path, change: Callable[[Weights], Weights]) -> None:
    assert digest(write(tmp_path / "other", change(weights()))) != digest(write(tmp_path / "base", weights()))


def test_empty_and_scalar_tensors_are_read(tmp_path: Path) -> None:
    tensors: Weights = {"empty": np.zeros((0, 3), np.float32), "scalar": np.array(2, np.float32)}
    other: Weights = tensors | {"scalar": np.array(3, np.float32)}
    assert digest(write(tmp_path / "one", tensors)) != digest(write(tmp_path / "two", other))


@pytest.mark.parametrize(
    ("types", "storage"),
    [((np.float32, np.float16), ""), ((np.float32, np.int32, np.uint8), "I32 U8")],
)
def test_storage_names_the_types_of_quantised_weights(
    tmp_path: Path, types: Sequence[type], storage: str
) -> None:
    tensors: Weights = {f"t{number}": np.ones(4, kind) for number, kind in enumerate(types)}
    assert read_checkpoint(write(tmp_path, tensors)).storage == storage


def test_files_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    directory = write(tmp_path / "one", weights(), files=2, index=True)
    before = digest(directory)
    save_file(weights(seed=1), directory / "consolidated.safetensors")
    assert digest(directory) == before
    assert read_checkpoint(directory, (CONSOLIDATED, MODEL)).digest != before


def test_more_tensors_than_are_sampled_are_taken_from_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 2 layers with 5 experts each. 3 experts a layer are sampled, and all headers."""
    monkeypatch.setattr(checkpoint_reader, "_MOST_TENSORS", 8)

    def tensors(changed: str = "") -> Weights:
        names = [f"layers.{layer}.experts.{expert}.up" for layer in range(2) for expert in range(5)]
        names += [f"layers.{layer}.q" for layer in range(2)]
        return {name: np.full(4, name == changed, np.float32) for name in names}

    base = digest(write(tmp_path / "base", tensors()))
    seen = {
        name
        for name in tensors()
        if digest(write(tmp_path / f"changed-{name}", tensors(name), files=3)) != base
    }
    experts = {f"layers.{layer}.experts.{expert}.up" for layer in range(2) for expert in range(3)}
    assert seen == {"layers.0.q", "layers.1.q"} | experts
    fewer = tensors()
    del fewer["layers.1.experts.4.up"]
    assert digest(write(tmp_path / "fewer", fewer)) != base


# --- Checkpoints that cannot be read


ENTRY = b'"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        (b"", b"", 1 << 62, "claims a header of 4,611,686,018,427,387,904 bytes"),
        (b"{}", b"", 3, "claims a header of 3 bytes"),
        (b"{}" + b" " * 98, b"", 100, "has no tensors"),
        (b"{", b"", None, "truncated"),
        (b"[1]", b"", None, "Expected `object`"),
        (b"[" * 100_000, b"", None, "Expected `object`"),
        (b'{"t":' + b"[" * 100_000, b"", None, "model.safetensors"),
        (b'{"t":{"dtype":"F32"}}', b"", None, "missing required field `shape`"),
        (b"{" + ENTRY + b"}", b"1234567", None, "has no bytes for tensor t"),
        (b"{" + ENTRY.replace(b"[0,8]", b"[8,0]") + b"}", b"12345678", None, "has no bytes for tensor t"),
        (b"{" + ENTRY.replace(b"[0,8]", b"[-9,0]") + b"}", b"12345678", None, "has no bytes for tensor t"),
    ],
)
def test_damaged_file_is_reported(
    tmp_path: Path, header: bytes, data: bytes, length: int | None, words: str
) -> None:
    with pytest.raises(UnknownCheckpoint) as found:
        read_checkpoint(raw(tmp_path / "model.safetensors", header, data, length))
    assert words in str(found.value)


def test_file_without_a_header_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(UnknownCheckpoint, match="ends within its tensors"):
        read_checkpoint(tmp_path)


def test_file_that_shrinks_meanwhile_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, weights()) / "model-1-of-1.safetensors"
    chosen = checkpoint_reader._chosen

    def shrink(tensors: list[checkpoint_reader._Tensor]) -> set[str]:
        os.truncate(path, path.stat().st_size - COLUMNS)
        return chosen(tensors)

    monkeypatch.setattr(checkpoint_reader, "_chosen", shrink)
    with pytest.raises(UnknownCheckpoint, match="ends within its tensors"):
        read_checkpoint(tmp_path)


def test_fifo_and_directory_are_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UnknownCheckpoint, match="is no regular file"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(UnknownCheckpoint, match="is no regular file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"weight_map": 1}', "\N{REPLACEMENT CHARACTER}"])
def test_damaged_index_is_reported(tmp_path: Path, text: str) -> None:
    (write(tmp_path, weights()) / MODEL[1]).write_text(text)
    with pytest.raises(UnknownCheckpoint, match=MODEL[1]):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("_MOST_FILES", 1, "has more than 1 files of weights"),
        ("_MOST_HEADER_BYTES", 10, "claims a header of"),
        ("_MOST_HEADERS_BYTES", 10, "the headers have more than 10 bytes"),
        ("_MOST_SECONDS", -1.0, "takes more than -1 s"),
    ],
)
def test_reading_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, words: str
) -> None:
    write(tmp_path, weights(), files=2)
    monkeypatch.setattr(checkpoint_reader, limit, value)
    with pytest.raises(UnknownCheckpoint) as found:
        read_checkpoint(tmp_path)
    assert words in str(found.value)


def test_read_that_is_stuck_leaves_the_identity_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is a daemon, so that the process can exit."""
    write(tmp_path, weights(), files=2)
    freed, stuck = threading.Event(), list[threading.Thread]()

    def pread(*_: object) -> bytes:
        stuck.append(threading.current_thread())
        freed.wait()
        return b""

    monkeypatch.setattr(checkpoint_reader, "_MOST_SECONDS", 0.2)
    monkeypatch.setattr(os, "pread", pread)
    try:
        with pytest.raises(UnknownCheckpoint, match=r"takes more than 0\.2 s"):
            read_checkpoint(tmp_path)
        assert all(thread.daemon for thread in stuck)
    finally:
        freed.set()
    for thread in stuck:
        thread.join()


def test_file_system_that_answers_nothing_leaves_the_identity_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed, stuck = threading.Event(), list[threading.Thread]()

    def is_dir(_: Path) -> bool:
        stuck.append(threading.current_thread())
        return freed.wait()

    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_reader, "_MOST_SECONDS", 0.2)
        patch.setattr(Path, "is_dir", is_dir)
        try:
            assert identify(str(tmp_path), (MODEL,)) is None
        finally:
            freed.set()
        for thread in stuck:
            thread.join()
    assert "takes more than 0.2 s" in caplog.text


def test_file_is_closed_if_the_kernel_refuses_its_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, weights())
    before = len(list(Path("/proc/self/fd").iterdir()))

    def refused(*_: object) -> None:
        raise OSError("no advice")

    monkeypatch.setattr(os, "posix_fadvise", refused)
    with pytest.raises(OSError, match="no advice"):
        read_checkpoint(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_long_index_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, weights(), index=True)
    monkeypatch.setattr(checkpoint_reader, "_MOST_HEADER_BYTES", 10)
    with pytest.raises(UnknownCheckpoint, match=r"index\.json has more than 10 bytes"):
        read_checkpoint(tmp_path)


# --- identify()


def test_identify_logs_the_identity(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = identify(str(write(tmp_path, weights())), (MODEL,))
    assert found == Checkpoint("", digest(tmp_path))
    assert f"weights: checkpoint {found.digest} (read in " in caplog.text


@pytest.mark.parametrize(
    ("files", "words"),
    [((), "the load format is not safetensors"), ((MODEL,), "has no safetensors files")],
)
def test_identify_logs_why_an_identity_is_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: Sequence[tuple[str, str]], words: str
) -> None:
    caplog.set_level(logging.INFO)
    assert identify(str(tmp_path), files) is None
    assert words in caplog.text


def test_file_that_may_not_be_read_leaves_the_identity_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Root may read everything, so the test raises the error itself."""

    def denied(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path, weights())
    monkeypatch.setattr(os, "open", denied)
    caplog.set_level(logging.INFO)
    assert identify(str(tmp_path), (MODEL,)) is None
    assert "Permission denied" in caplog.text


def test_name_of_the_hub_is_found_in_its_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    of_model = tmp_path / "models--some--model"
    expected = digest(write(of_model / "snapshots" / ("a" * 40), weights()))
    write(of_model / "snapshots" / ("b" * 40), weights(seed=1))
    (of_model / "refs").mkdir()
    (of_model / "refs" / "main").write_text("a" * 40)

    def found(revision: str | None) -> Checkpoint | None:
        return identify("some/model", (MODEL,), revision=revision, cache=str(tmp_path))

    assert found(None) == found("a" * 40) == Checkpoint("", expected)
    other = found("b" * 40)
    assert other is not None
    assert other.digest != expected
    assert found("c" * 40) is None
    assert identify("no such model", (MODEL,), cache=str(tmp_path)) is None
    assert "the cache of the Hugging Face hub does not have it" in caplog.text
