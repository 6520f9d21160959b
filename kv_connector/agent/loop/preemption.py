"""Preemption: the engine takes away blocks that writes may still read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kv_connector.agent.loop.effects import Action, Effects
from kv_connector.agent.loop.thread import AgentThread
from kv_connector.engine import ErrorCode, TransferError
from kv_connector.engine.transfer_engine import LayerSignal, TransferEngine
from kv_connector.protocol.actions import Share

# Interval at which preempt() checks whether the forward pass before it has signalled its last layer. On a CPU
# engine it always has. On a GPU the stream lags by some milliseconds.
_SIGNAL_POLL_S = 0.0002


@dataclass(frozen=True)
class _Draining:
    """The writes of a preempted request that are not over yet."""

    share: Share
    number: int
    last_signal: int


class Preemption:
    """Waits, on the caller's thread, until nothing reads the blocks that preempted requests lose."""

    def __init__(
        self,
        engine: TransferEngine,
        signal: LayerSignal,
        effects: Effects,
        thread: AgentThread,
        drain_s: float,
    ) -> None:
        """``drain_s``: how long the writes may take before their sessions are ended, in seconds."""
        self._engine = engine
        self._signal = signal
        self._effects = effects
        self._thread = thread
        self._drain_s = drain_s

    def preempt(self, transfer_ids: Sequence[str]) -> None:
        """Does what Agent.preempt() promises."""
        future: Future[list[_Draining]] = Future()
        self._thread.ask(lambda now: self._preempt(now, transfer_ids, future), future)
        draining = self._thread.insist(future, "preemption")
        deadline = time.monotonic() + self._drain_s
        stuck = [writes for writes in draining if not self._drained(writes, deadline)]
        if stuck:
            self._fence_preempted(stuck)

    def _preempt(
        self, now: float, transfer_ids: Sequence[str], future: Future[list[_Draining]]
    ) -> Sequence[Action]:
        draining = []
        actions: list[Action] = []
        for share in self._effects.prefill.preempt(transfer_ids):
            actions += self._effects.release(now, share)
            outgoing = self._effects.writes.open.get(share)
            if outgoing is not None:
                draining.append(_Draining(share, outgoing.number, outgoing.last_signal))
        future.set_result(draining)
        return actions

    def _drained(self, writes: _Draining, deadline: float) -> bool:
        """Waits until nothing of the transfer is in flight. Returns False at the deadline."""
        while self._signal.load() < writes.last_signal:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_SIGNAL_POLL_S)
        try:
            self._engine.quiesce(writes.number, max(deadline - time.monotonic(), 0.0))
        except TransferError as error:
            return error.code is not ErrorCode.TIMEOUT  # any other error: the transfer has ended
        return True

    def _fence_preempted(self, stuck: Sequence[_Draining]) -> None:
        """Ends the sessions of these writes, and so the writes."""
        future: Future[None] = Future()

        def command(now: float) -> Sequence[Action]:
            for writes in stuck:
                self._effects.run(now, self._effects.prefill.quiesce_failed(now, writes.share))
            self._effects.writes.when_over(
                [writes.share for writes in stuck], lambda: future.set_result(None)
            )
            return ()

        self._thread.ask(command, future)
        self._thread.insist(future, "preemption")
