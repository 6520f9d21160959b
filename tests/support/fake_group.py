"""A stand-in for kv_connector.moe.Group that sends everything through its exchange, for tests of its
users."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_connector.moe.group import Exchange, GroupError, GroupSettings

OLD = 0xEE
"""Byte value of rows that did not reach a rank."""


@dataclass(frozen=True)
class FakeDispatched:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: Sequence[torch.Tensor]
    extras: Sequence[torch.Tensor]


class FakeGroup:
    def __init__(self, settings: GroupSettings, exchange: Exchange) -> None:
        self.settings = settings
        self.owners: Sequence[int] | None = None
        self.gone = ""
        self.closed = False
        self._exchange = exchange
        self._masks: list[torch.Tensor] = []
        self._buffer = torch.empty(0)

    @classmethod
    def form(cls, settings: GroupSettings, exchange: Exchange) -> FakeGroup:
        # Every rank takes part in the exchange: a rank that forms a group alone would block.
        exchange(b"")
        return cls(settings, exchange)

    def place(self, owners: Sequence[int] | None) -> None:
        self.owners = owners

    def fits(self, sizes: Sequence[int], row_bytes: int) -> bool:
        return max(sizes) <= self.settings.max_tokens and row_bytes <= self.settings.row_bytes

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        scales: Sequence[torch.Tensor] = (),
        extras: Sequence[torch.Tensor] = (),
        sizes: Sequence[int],
        slot: int = 0,
    ) -> FakeDispatched:
        self.raise_fault()
        columns = [x, *scales, ids, weights, *extras]
        ranks = self._all_tensors(columns)
        assert [len(one[0]) for one in ranks] == [*sizes]
        gathered = [torch.cat(column) for column in zip(*ranks, strict=True)]
        ids_of_all = gathered[1 + len(scales)]
        self._masks = [self._wanted(ids_of_all, rank) for rank in range(self.settings.ranks)]
        unwanted = ~self._masks[self.settings.rank]
        for masked in gathered[: 1 + len(scales)]:
            masked.view(torch.uint8)[unwanted] = OLD
        behind = 1 + len(scales)
        return FakeDispatched(
            gathered[0],
            ids_of_all,
            gathered[behind + 1],
            gathered[1:behind],
            gathered[behind + 2 :],
        )

    def _wanted(self, ids: torch.Tensor, rank: int) -> torch.Tensor:
        if self.owners is None:
            return torch.ones(len(ids), dtype=torch.bool)
        return (torch.tensor(self.owners)[ids.long()] == rank).any(dim=1)

    def combine_buffer(self, sizes: Sequence[int], slot: int = 0) -> torch.Tensor:
        if self._buffer.shape != (sum(sizes), self.settings.hidden):
            self._buffer = torch.empty(sum(sizes), self.settings.hidden, dtype=torch.bfloat16)
        return self._buffer

    def combine(
        self, out: torch.Tensor, sizes: Sequence[int], slot: int = 0, accumulate: bool = False
    ) -> None:
        own = self.settings.rank
        total = torch.zeros(sizes[own], self.settings.hidden)
        for rank, (results,) in enumerate(self._all_tensors([self._buffer])):
            rows, wanted = results.split([*sizes])[own], self._masks[rank].split([*sizes])[own]
            total[wanted] += rows[wanted].float()
        out.copy_(total)

    def _all_tensors(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        file = io.BytesIO()
        torch.save([*tensors], file)
        return [torch.load(io.BytesIO(one)) for one in self._exchange(file.getvalue())]

    def raise_fault(self) -> None:
        if self.gone:
            raise GroupError(self.gone)

    def explanation(self) -> str:
        return self.gone

    def close(self, timeout: float = 10.0) -> None:
        self.closed = True


class RankThreads:
    """Threads that exchange messages. A test fails if only some ranks exchange."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._barrier = threading.Barrier(number, timeout=20)
        self._messages: list[bytes] = [b""] * number

    def exchange(self, rank: int) -> Exchange:
        def exchange(message: bytes) -> list[bytes]:
            self._messages[rank] = message
            self._barrier.wait()
            messages = [*self._messages]
            self._barrier.wait()
            return messages

        return exchange

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Returns the results by rank. Raises the error of the first rank that failed by itself."""
        results: list[Any] = [None] * self.number
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
