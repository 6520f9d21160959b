"""Verification: compares the contents of engines' arenas with a checkpoint, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.mapping.coverage import left_out
from kv_connector.weights.mapping.geometry import Geometry, Write, digest
from kv_connector.weights.mapping.hashes import hashes
from kv_connector.weights.sources import WeightSource
from kv_connector.weights.wire.links import Link, LinkError, Links
from kv_connector.weights.wire.messages import Hashed, Verify, WeightMessage, Workers, WorkersAre

# One core hashes a GB a second with BLAKE2b. The limit is for 80 GB on a machine with other work.
_HASH_S = 300.0
_CONNECT_S = Timeouts().connect


def of_checkpoint(geometry: Geometry, source: WeightSource) -> tuple[bytes, ...]:
    """Returns the hashes of a checkpoint's parameters. The source must hold each tensor whole."""
    held = {one.shard.tensor: one for one in source.held()}
    last: tuple[int, torch.Tensor] = -1, torch.empty(0)

    def box(write: Write) -> torch.Tensor:
        nonlocal last
        if last[0] != write.tensor:  # a fused tensor is written in parts, one after another
            last = write.tensor, held[write.tensor].local()
        part = last[1][tuple(slice(a, a + n) for a, n in zip(write.start, write.extent, strict=True))]
        return part.to(getattr(torch, geometry.parameters[write.parameter].dtype))

    return hashes(geometry, box)


@dataclass(frozen=True)
class Verified:
    """The result for a worker, or for an engine with what its workers together leave out of the checkpoint.

    ``problem``: the reason why it cannot be verified or does not match.
    """

    worker: str
    version: str = ""
    parameters: int = 0
    differ: tuple[str, ...] = ()
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.differ and not self.problem


def verify(
    source: WeightSource, engines: Sequence[Address], links: Links, partial: Sequence[str] = ()
) -> Iterator[Verified]:
    """Has all workers of the engines hash at the same time, and yields a result for each.

    An engine that does not answer is one result. So is what an engine leaves out, unless ``partial`` names
    it.
    """
    tensors = tuple(source.tensors())
    asked: list[tuple[Address, Link, Future[WeightMessage]]] = []
    for engine in engines:
        link = links.dial(engine)
        try:
            workers = links.wait(links.ask(link, Workers()), link, _CONNECT_S)
        except LinkError as error:
            yield Verified(str(engine), problem=str(error))
            continue
        assert isinstance(workers, WorkersAre)
        for one in workers.workers:
            worker = links.dial(Address(one.host, one.port))
            asked.append((engine, worker, links.ask(worker, Verify(digest(tensors)))))
    known: dict[bytes, tuple[bytes, ...]] = {}  # by geometry: replicas have the same hashes
    loaded: dict[Address, list[Geometry]] = {}
    failed: set[Address] = set()
    for engine, link, answer in asked:
        try:
            hashed = links.wait(answer, link, _HASH_S)
        except LinkError as error:
            yield Verified(str(link.address), problem=str(error))
            failed.add(engine)
            continue
        assert isinstance(hashed, Hashed)
        geometry = hashed.geometry
        loaded.setdefault(engine, []).append(geometry)
        if (wanted := known.get(geometry.digest())) is None:
            wanted = known[geometry.digest()] = of_checkpoint(geometry, source)
        pairs = zip(geometry.parameters, hashed.hashes, wanted, strict=True)
        differ = tuple(parameter.name for parameter, theirs, ours in pairs if theirs != ours)
        yield Verified(str(link.address), shown(hashed.version), len(wanted), differ)
    for engine, geometries in loaded.items():
        if engine not in failed and (problem := left_out(str(engine), tensors, geometries, partial)):
            yield Verified(str(engine), problem=problem)
