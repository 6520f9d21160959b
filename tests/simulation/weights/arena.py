"""The memory where a version lands, and a transfer engine that writes into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from kv_connector.engine import ErrorCode
from kv_connector.weights.mapping.geometry import Geometry, Parameter, Tensor, Write

from ..fabric import Batch, SimEngine, Transfer, failure

if TYPE_CHECKING:
    from .trainer import Rank
    from .worker import Worker

CELLS = 7
"""Parts of a worker's share of the model. A rank writes at least one."""

ROUNDS = 4
"""Rounds of a version if the memory holds only two of them. Each round reuses the memory of the round before
the last."""

TENSORS = (Tensor("w", "float32", (CELLS,)),)
CELL_BYTES = 4


def round_of(cell: int, rounds: int) -> int:
    return cell * rounds // CELLS


def geometry(rounds: int) -> Geometry:
    """Returns a geometry with one parameter in each round."""
    parts = [[cell for cell in range(CELLS) if round_of(cell, rounds) == part] for part in range(rounds)]
    return Geometry(
        tuple(Parameter(f"w{part}", "float32", len(cells), round=part) for part, cells in enumerate(parts)),
        tuple(Write(0, part, (cells[0],), (len(cells),), 0, (1,)) for part, cells in enumerate(parts)),
        (),
    )


Tag = tuple[str, int]
"""One set of weights: a trainer's run, and its step."""


def cells_of(rank: int, ranks: int, worker: int) -> list[int]:
    """Returns the cells that a rank writes to the worker. If the ranks are many, some write nothing."""
    writers = min(ranks, 3)
    return [cell for cell in range(CELLS) if (cell + worker) % writers == rank]


@dataclass
class Arena:
    rounds: int
    content: list[Tag | None] = field(default_factory=lambda: [None] * CELLS)

    def cells(self, round: int) -> list[int]:
        return [cell for cell in range(CELLS) if round_of(cell, self.rounds) == round]

    def whole(self, round: int) -> Tag | None:
        """Returns the weights of which the whole round consists. None: the round is mixed or incomplete."""
        found = {self.content[cell] for cell in self.cells(round)}
        return found.pop() if len(found) == 1 else None

    def clear(self, round: int) -> None:
        """Empties the memory of a round for the next one."""
        for cell in self.cells(round):
            self.content[cell] = None


class WeightsEngine(SimEngine):
    """The transfer engine of a rank or a worker."""

    slow_fences = 0.5

    # Faults, as budgets: how many times the worker fails to load a checkpoint, or to apply a version.
    not_applied = 0
    not_recorded = 0

    def heal(self) -> None:
        """Ends all faults."""
        self.write_errors = self.stuck_writes = self.no_handshakes = self.no_counters = 0
        self.not_applied = self.not_recorded = 0

    def open_transfer(self, peer: int) -> int:
        if peer not in self._peers:
            raise failure(ErrorCode.UNKNOWN_PEER, "open_transfer", "never connected, or fenced")
        return super().open_transfer(peer)

    def write(self, number: int, cells: Sequence[int], immediate: int) -> None:
        """Writes each cell to its place in the peer's arena, in a few batches."""
        transfer = self._open(number, "write")
        self._refuse("write")
        if transfer.stopped:
            raise failure(ErrorCode.PEER_DOWN, "write", f"the transfer has ended: {transfer.reason}")
        mixed = list(cells)
        self._rng.shuffle(mixed)
        cut = self._rng.randint(0, len(mixed))
        for part in (mixed[:cut], mixed[cut:]):
            if part:
                self._post(transfer, part, immediate)
        self.post_due()

    def _post(self, transfer: Transfer, cells: Sequence[int], immediate: int) -> None:
        batch = Batch(transfer, len(cells), tuple((cell, cell) for cell in cells), 0, immediate)
        transfer.batches.append(batch)
        transfer.link.live[batch] = None
        self._armed.append(batch)

    def in_flight(self, numbers: Sequence[int]) -> bool:
        return any(number in self._transfers for number in numbers)

    # --- The contents of the memory

    def _contents(self, batch: Batch) -> tuple[Any, ...]:
        return (cast("Rank", self.process).tag,) * len(batch.cells)

    def _take(self, batch: Batch) -> None:
        worker, tag = cast("Worker", self.process), cast("Tag", batch.contents[0])
        worker.land([target for _, target in batch.cells], tag, batch.immediate)

    def _counted(self, batch: Batch) -> None:
        """Does nothing: cells are not awaited one by one."""

    def _stray(self, batch: Batch) -> None:
        """Accepts a page of a discarded version: its counter is freed before its links are fenced."""
