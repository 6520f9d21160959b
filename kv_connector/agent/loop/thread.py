"""The agent's thread: handles sockets, engine events, commands and deadlines in turns."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from kv_connector.agent.config import AgentError
from kv_connector.agent.loop.effects import Action, Effects
from kv_connector.control.sockets import ControlPlane

logger = logging.getLogger("kv_connector")

# How long the thread waits at most while a step is prepared and launched. A prompt's step takes 10 to 35 ms
# for that (32 layers, H200), and no deadline of a peer is shorter than a second.
_HOLD_OFF_S = 0.05

_T = TypeVar("_T")


class AgentThread:
    """The one thread that acts on an agent's state machines. Any thread may hand it commands."""

    def __init__(self, engine_id: str, control: ControlPlane, effects: Effects, drain_s: float) -> None:
        """``drain_s``: how long end() may take, and how often insist() logs that it waits, in seconds."""
        self._control = control
        self._effects = effects
        self._drain_s = drain_s
        self._commands: deque[Callable[[float], Sequence[Action]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._main, name=f"kv-agent-{engine_id}", daemon=True)
        self.in_turn = False
        """True while the thread acts on messages, events and commands."""
        self.turns = 0
        self._launched = threading.Event()  # set: the thread need not wait
        self._launched.set()
        self._hold_until = 0.0
        self._leave_by: float | None = None  # set by end(): when the thread leaves at the latest
        self.closed = False
        self._wake_lock = threading.Lock()  # protects closed, and the life of _wake

    def start(self) -> None:
        """Starts the thread. The control socket must be bound."""
        self._control.watch(self._wake)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Ends all transfers and sessions, and accepts no more commands. Blocks as Agent.close() does."""
        if self._thread.is_alive():
            self.submit(self._begin_close)
            self._thread.join()
        with self._wake_lock:
            self.closed = True
            os.close(self._wake)

    @property
    def commands(self) -> int:
        """Number of commands that are not executed yet."""
        return len(self._commands)

    def hold_off(self) -> None:
        """Makes the thread take no turn until go_on(), for _HOLD_OFF_S at most."""
        self._hold_until = time.monotonic() + _HOLD_OFF_S
        self._launched.clear()

    def go_on(self) -> None:
        """Ends hold_off()."""
        self._launched.set()

    def submit(self, command: Callable[[float], Sequence[Action]]) -> None:
        """Hands the thread a command. Commands are executed in order."""
        with self._wake_lock:
            if not self.closed:
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)

    def ask(self, command: Callable[[float], Sequence[Action]], future: Future[Any]) -> None:
        """Does the same as submit(). An exception goes to ``future``."""

        def guarded(now: float) -> Sequence[Action]:
            try:
                return command(now)
            except Exception as error:
                future.set_exception(error)
                return ()

        if self._thread.is_alive():
            self.submit(guarded)
        else:
            guarded(time.monotonic())

    def insist(self, future: Future[_T], what: str) -> _T:
        """Waits for the agent's thread, however long it takes.

        Without this wait another request's pages would be written into blocks that are still being read for
        this one, and the error would stay unnoticed.
        """
        waited = 0.0
        while True:
            try:
                return future.result(self._drain_s)
            except FutureTimeoutError:
                if not self._thread.is_alive() and not future.done():
                    raise AgentError(f"{what}: the agent was closed meanwhile") from None
                waited += self._drain_s
                logger.error("%s: still waiting for the agent's thread, %g s so far", what, waited)

    def _begin_close(self, now: float) -> Sequence[Action]:
        self._leave_by = now + self._drain_s
        self._effects.peers.drain()
        return [*self._effects.decode.close(now), *self._effects.prefill.close(now)]

    def _main(self) -> None:
        while not self._may_leave():
            try:
                self._turn()
            except Exception:
                logger.exception("agent: unexpected error, its thread continues")
                time.sleep(0.01)  # the error may repeat at once
        try:
            self._effects.run(time.monotonic(), self._effects.peers.goodbyes())
            self._control.close()  # the BYEs must be sent before the data links end
            self._effects.run(time.monotonic(), self._effects.peers.leave(time.monotonic()))
        except Exception:
            logger.exception("agent: cannot end its sessions with a BYE")

    def _turn(self) -> None:
        readable = self._control.wait(self._timeout())
        if not self._launched.wait(self._hold_until - time.monotonic()):
            self._launched.set()  # for the next turns, too
        self.in_turn = True
        try:
            self._act(readable)
        finally:
            self.turns += 1
            self.in_turn = False

    def _act(self, readable: Collection[int]) -> None:
        if self._wake in readable:
            os.eventfd_read(self._wake)
        # The time is read anew before each step, because the duration of transfers is measured with it.
        self._effects.receive(time.monotonic())
        self._effects.engine_events(time.monotonic())
        while self._commands:
            now = time.monotonic()
            try:
                self._effects.run(now, self._commands[0](now))
            except Exception:
                logger.exception("agent: a command failed")
            finally:
                self._commands.popleft()  # not earlier: live() counts a command until it is executed
        self._effects.tick(time.monotonic())

    def _timeout(self) -> float | None:
        deadlines = [d for d in (self._effects.next_deadline(), self._leave_by) if d is not None]
        return min(deadlines) - time.monotonic() if deadlines else None

    def _may_leave(self) -> bool:
        if self._leave_by is None:
            return False
        effects = self._effects
        busy = len(effects.prefill) + len(effects.decode) + effects.fences
        return busy == 0 or time.monotonic() >= self._leave_by
