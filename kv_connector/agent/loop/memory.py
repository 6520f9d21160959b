"""The KV cache's memory, as the transfer engine has it registered. It is deregistered while an engine
sleeps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from kv_connector.agent.config import AgentError, PageMemory
from kv_connector.agent.loop.effects import Action, Effects
from kv_connector.agent.loop.page_summer import PageSummer
from kv_connector.agent.loop.thread import AgentThread
from kv_connector.engine import TransferError
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.protocol.timeouts import Timeouts


class KvMemory:
    """The KV cache's memory. It is registered from construction on, except between unregister() and
    register()."""

    def __init__(
        self, engine: TransferEngine, memory: Sequence[PageMemory], engine_id: str, timeouts: Timeouts
    ) -> None:
        """Registers all of it, or none; raises TransferError."""
        self._engine = engine
        self._memory = tuple(memory)
        self._engine_id = engine_id
        self._timeouts = timeouts
        self.regions: list[int] = []
        """The transfer engine's ids of the registered memory. Empty while the memory is not registered."""
        self.regions = self._register_all()

    def descriptors(self) -> tuple[bytes, ...]:
        """Returns the descriptors with which peers write to the memory."""
        return tuple(self._engine.region_descriptor(region) for region in self.regions)

    def unregister(self, effects: Effects, thread: AgentThread, summer: PageSummer) -> None:
        """Does what Agent.unregister_memory() promises."""
        if not self.regions:
            return
        future: Future[None] = Future()
        thread.ask(lambda now: _fall_asleep(now, effects, future), future)
        thread.insist(future, "sleep")
        try:
            summer.drain(self._timeouts.check)  # no transfer is left that could begin another job
            self._engine.deregister_memory(self.regions, self._timeouts.drain)
        except TransferError as error:
            self._wake_up(effects, thread, self.descriptors())
            raise AgentError(f"{self._engine_id}: the KV cache must stay mapped: {error}") from error
        self.regions = []

    def register(self, effects: Effects, thread: AgentThread) -> None:
        """Does what Agent.register_memory() promises."""
        if self.regions:
            return
        try:
            self.regions = self._register_all()
            self._wake_up(effects, thread, self.descriptors())
        except TransferError as error:
            raise AgentError(
                f"{self._engine_id}: cannot register the KV cache again, restart this engine: {error}"
            ) from error

    def _register_all(self) -> list[int]:
        regions: list[int] = []
        try:
            for part in self._memory:
                regions.append(self._engine.register_memory(part.address, part.nbytes))
        except TransferError:
            if regions:  # all or none
                self._engine.deregister_memory(regions, self._timeouts.drain)
            raise
        return regions

    def _wake_up(self, effects: Effects, thread: AgentThread, descriptors: tuple[bytes, ...]) -> None:
        regions, future = tuple(self.regions), Future[None]()

        def command(now: float) -> Sequence[Action]:
            effects.writes.regions = regions
            actions = effects.peers.resume(now, descriptors)
            future.set_result(None)
            return actions

        thread.ask(command, future)
        thread.insist(future, "wake-up")


def _fall_asleep(now: float, effects: Effects, future: Future[None]) -> Sequence[Action]:
    # Executed before the next command, so that every session is being fenced when when_fenced() is called.
    effects.run(now, effects.peers.suspend())
    effects.run(now, effects.prefill.forget_pages(now))
    effects.writes.regions = ()
    effects.when_fenced(lambda: future.set_result(None))
    return ()
