"""Weights that are gathered anew for each version, as Megatron-Bridge yields them.

This is the loop of docs/weights.md, on ranks of which some send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from test_weight_transfer import Engine
from weight_trainer import PATIENCE_S, RankProcesses, drawn

from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import TensorSource

RANKS = 3
SENDERS = (0, 2)
VERSIONS = 2


class Bridge:
    """Yields each tensor from the rank that has it, in new memory each time."""

    def export_hf_weights(self, model: int, show_progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """``model``: the seed of its weights."""
        for number, (name, weight) in enumerate(drawn(model)):
            owner = number % RANKS
            found = weight if torch.distributed.get_rank() == owner else torch.empty_like(weight)
            torch.distributed.broadcast(found, owner)
            yield name, found


def main(told: Connection, store: str, rank: int, engines: Sequence[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    bridge = Bridge()
    sends = rank in SENDERS
    group = torch.distributed.new_group(SENDERS, backend="gloo")
    copy: dict[str, torch.Tensor] = {}

    def export(model: int) -> None:
        for name, weight in bridge.export_hf_weights(model, show_progress=False):
            if sends:
                copy.setdefault(name, torch.empty_like(weight)).copy_(weight)

    export(0)
    if sends:
        pusher = WeightPusher(TensorSource(copy.items(), group), engines, apply=lambda _: None)
        pusher.connect()
        told.send(sum(part.nbytes for part in pusher.parts()))
    for version in range(1, VERSIONS + 1):
        export(version)
        if sends:
            pusher.push(str(version)).wait("landed", PATIENCE_S)
            told.send(f"landed {version}")
        told.recv()


def test_some_ranks_send_copies_of_what_all_gather(tmp_path: Path) -> None:
    """The sending ranks divide the tensors among themselves."""
    engine = Engine("tcp")
    try:
        with RankProcesses(main, tmp_path, RANKS, [engine.address]) as ranks:
            assert all(int(ranks.heard(rank)) for rank in SENDERS)
            for version in range(1, VERSIONS + 1):
                assert [ranks.heard(rank) for rank in SENDERS] == [f"landed {version}"] * len(SENDERS)
                engine.assert_has(str(version), version)
                ranks.say("go on")
    finally:
        engine.close()
