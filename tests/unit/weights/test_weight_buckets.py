"""Buckets in one process: how tensors are cut and put together, and content that is refused."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import torch
from weight_streams import Named, drawn, same

from kv_connector.weights.tensor_stream.buckets import Chunk, Filling, Merging, StreamError


def through_buckets(weights: Iterable[Named], nbytes: int) -> tuple[list[Named], list[list[str]]]:
    """Returns what arrives, and the names in each bucket."""
    found: list[Named] = []
    names: list[list[str]] = [[]]
    memory, merging = torch.empty(nbytes, dtype=torch.uint8), Merging()
    filling = Filling(memory)

    def sent() -> Filling:
        list_offset, end = filling.seal()
        found.extend((name, tensor.clone()) for name, tensor in merging.take(memory[:end], list_offset))
        names.append([])
        memory.fill_(0xEE)
        return Filling(memory)

    for name, tensor in weights:
        tensor, offset = tensor.contiguous(), 0
        while True:
            if (end := filling.put(name, tensor, offset)) is None:
                filling = sent()
                continue
            names[-1].append(name)
            if (offset := end) == tensor.nbytes:
                break
    sent()
    assert merging.missing() == ""
    return found, names[:-1]


@pytest.mark.parametrize("nbytes", [1 << 10, 3001 * 256, 64 << 10, 4 << 20])
def test_tensors_pass_through_buckets_of_any_size_bit_by_bit(nbytes: int) -> None:
    found, _ = through_buckets(drawn(5), nbytes)
    same(found, drawn(5))


def test_only_tensors_that_fit_into_no_bucket_are_split() -> None:
    sizes = {"a": 300, "b": 700, "large": 1500, "c": 10}
    tensors = [(name, torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()]
    _, names = through_buckets(tensors, 1024)
    assert names == [["a"], ["b", "large"], ["large"], ["large", "c"]]


def test_a_bucket_that_is_too_small_for_a_name_is_refused() -> None:
    filling = Filling(torch.empty(64, dtype=torch.uint8))
    with pytest.raises(StreamError, match="name: its name and shape do not fit"):
        filling.put("a long " * 9 + "name", torch.zeros(1), 0)


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ([Chunk("x", "float32", (4,), 0, 16, 56)], "does not describe its content"),  # ends in the list
        ([Chunk("x", "float32", (4,), 0, 17, 0)], "does not describe its content"),
        ([Chunk("x", "float32", (100,), 16, 16, 0)], "does not describe its content"),  # no beginning
        (
            [Chunk("x", "float32", (100,), 0, 16, 0), Chunk("x", "float32", (100,), 32, 16, 0)],
            "does not describe its content",
        ),
        (
            [Chunk("x", "float32", (100,), 0, 16, 0), Chunk("y", "float32", (4,), 0, 16, 0)],
            "does not describe its content",
        ),
        ([Chunk("x", "float5", (4,), 0, 16, 0)], "no dtype 'float5'"),
        ([Chunk("x", "nn", (4,), 0, 16, 0)], "no dtype 'nn'"),
    ],
)
def test_a_list_that_does_not_describe_the_bucket_is_refused(chunks: list[Chunk], problem: str) -> None:
    encoded = msgspec.msgpack.encode(chunks)
    bucket = torch.cat([torch.zeros(64, dtype=torch.uint8), torch.tensor(list(encoded), dtype=torch.uint8)])
    with pytest.raises(StreamError, match=problem):
        list(Merging().take(bucket, 64))


def test_bytes_that_are_no_list_are_refused() -> None:
    with pytest.raises(StreamError, match="the list of a bucket is invalid"):
        list(Merging().take(torch.full((80,), 0xC1, dtype=torch.uint8), 64))
