"""The lanes of a rank to ranks of other nodes: their forming, and the messages beside steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from kv_connector import _native
from kv_connector.engine import TransferError
from kv_connector.engine.convert import native_domains
from kv_connector.moe.settings import GroupSettings
from kv_connector.moe.wire import Hello

LinkExchange = Callable[[Mapping[int, bytes]], Mapping[int, bytes]]
"""Sends bytes to some ranks, and returns the bytes that the ranks sent to this rank. Collective."""


def far_ranks(rank: int, hellos: Sequence[Hello]) -> dict[int, int]:
    """The ranks of other nodes than ``rank``, with their process ids."""
    own = hellos[rank].machine
    return {hello.rank: hello.pid for hello in hellos if hello.machine != own}


class Lanes:
    """Packets and messages to the ranks of other nodes (native/moe/far_ranks.h).

    The native group keeps its own share. close() ends this object's share, once the group is closed.
    """

    def __init__(self, settings: GroupSettings, processes: Mapping[int, int]) -> None:
        """Opens the lanes of ``settings``. ``processes``: the far ranks, with their process ids. Blocks.

        Raises TransferError where no lane opens on this machine.
        """
        self.processes = dict(processes)
        """Process ids of the far ranks, on their nodes."""
        self._rank = settings.rank
        self.native = _native.MoeFarRanks(
            f"moe-rank-{settings.rank}",
            native_domains(settings.lanes),
            settings.rank,
            settings.ranks,
            list(self.processes),
            settings.slots,
            settings.max_tokens,
            settings.row_bytes,
            settings.hidden,
        )

    def connect(self, exchange: LinkExchange) -> None:
        """Connects to every far rank. ``exchange`` is called three times, also if the rank has a problem.

        Blocks. Raises TransferError, or ConnectionError where a far rank sent nothing.
        """
        problem: Exception | None = None
        sent: dict[int, bytes] = {}
        received: Mapping[int, bytes] = {}
        for step in (self._offer, self._accept, self._complete):
            if problem is None:
                try:
                    sent = step(received)
                except (TransferError, ConnectionError) as error:
                    problem, sent = error, {}
            received = exchange(sent)
        if problem is not None:
            raise problem
        for other in self._senders(received, lower=True):
            self.native.meet(other, received[other])
        self.native.begin()

    def _offer(self, _: Mapping[int, bytes]) -> dict[int, bytes]:
        return {other: self.native.offer(other) for other in self.processes if other > self._rank}

    def _accept(self, received: Mapping[int, bytes]) -> dict[int, bytes]:
        return {
            other: self.native.accept(other, received[other]) for other in self._senders(received, lower=True)
        }

    def _complete(self, received: Mapping[int, bytes]) -> dict[int, bytes]:
        return {
            other: self.native.complete(other, received[other])
            for other in self._senders(received, lower=False)
        }

    def _senders(self, received: Mapping[int, bytes], *, lower: bool) -> list[int]:
        """The far ranks below this rank (``lower``) or above it, which have all sent something."""
        ranks = [other for other in self.processes if (other < self._rank) == lower]
        if missing := [other for other in ranks if not received.get(other)]:
            raise ConnectionError(f"rank {missing[0]} sent no offer of a link")
        return ranks

    def send(self, message: bytes) -> None:
        """Sends a message to every far rank that is still there. Does not block."""
        for other in self.processes:
            with contextlib.suppress(TransferError):
                self.native.send(other, message)

    def leave(self, timeout: float) -> None:
        """Leaves every far rank in good order. Blocks up to ``timeout`` seconds. Raises nothing."""
        with contextlib.suppress(TransferError):  # closed before
            self.native.leave(timeout)

    def failure(self, rank: int) -> str:
        """Why packets to or from a rank failed, as words that follow its name, or "". Any thread may call it,
        also after close().
        """
        with contextlib.suppress(TransferError):
            return self.native.failure(rank)
        return ""

    def close(self) -> None:
        self.native.close()
