"""Registrar: keeps an engine registered with its routers, on a separate thread, until it is closed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import (
    HEARTBEAT_S,
    MOST_HITS,
    Activity,
    BeginDrain,
    ControllerAddress,
    EndDrain,
    Leave,
    LoadFailed,
    MembershipMessage,
    MembershipSockets,
    PromptHits,
    Register,
    WorkloadReport,
)
from kv_connector.control.moriio_announcer import MoriioAnnouncer
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.wire.messages import clip

logger = logging.getLogger("kv_connector")


# A router that could not be reached is tried this many times as often. After this many attempts the
# connection is made anew.
_SOONER = 4
_REDIAL = 8
# Seconds without a connection after which the log names the router. A router that restarts is back sooner.
_UNREACHED_S = 10.0
# Failed loads that are still to be reported: as many as the requests of a large engine at a time.
_FAILURES = 1024
# Hits that are still to be reported: more than an engine has in a second. A lost hit corrects nothing.
_HITS = 8 * MOST_HITS
# Longest transfer id whose hits are reported. Ids of our routers have 32 characters. Other routers do not
# read reports, and MOST_HITS of their ids, of 256 characters, would exceed the size of a message.
_LONGEST_ID = 64


@dataclass
class _Router:
    address: Address
    link: Source
    missed: int = 0  # failed attempts in a row
    missed_since: float = 0.0  # the first of them
    reported: bool = False  # whether the log has them


class Registrar:
    """Sends REGISTER to every router at each heartbeat. It does not wait for a router that is away.

    It runs in the process of the engine's first worker. If that process stops or dies, the registration falls
    silent.
    """

    def __init__(
        self,
        registration: Register,
        routers: Sequence[Address],
        key: ClusterKey | None,
        activity: Callable[[], Activity | None] = lambda: None,
        announcer: MoriioAnnouncer | None = None,
    ) -> None:
        """``activity`` is called before each REGISTER, on this thread. ``announcer``: announces at the same
        interval, as long as the engine accepts requests.
        """
        self._registration = registration
        self._activity = activity
        self._announcer = announcer
        self._sockets = MembershipSockets(key)
        self._routers = [_Router(address, self._dial(address)) for address in routers]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.watch(self._wake)
        self._waking = threading.Lock()  # protects _closing, and the life of _wake
        self._closing = False
        self._asleep = False
        self._weights, self._torn = registration.weights, registration.torn
        self._checkpoint = registration.checkpoint
        self._load, self._controller = registration.load, registration.controller
        self._failures: deque[LoadFailed] = deque(maxlen=_FAILURES)
        self._hits: deque[tuple[str, tuple[int, int]]] = deque(maxlen=_HITS)
        self._thread = threading.Thread(target=self._main, name="kv-registrar", daemon=True)
        self._thread.start()

    def set_asleep(self, asleep: bool) -> None:
        """Reports to the routers, at once and from now on, whether the engine is asleep."""
        self._asleep = asleep
        self._notify()

    def set_weights(self, version: str, *, of_checkpoint: bool = False) -> None:
        """Reports to the routers, at once and from now on, that the engine serves this version. Any thread
        may call it. ``of_checkpoint``: as of Agent.set_weights()."""
        if not of_checkpoint:
            self._checkpoint = None
        self._weights = version
        self._notify()

    def forget_checkpoint(self) -> None:
        """Reports to the routers, at once and from now on, no checkpoint: the engine serves other weights,
        which have no version. Any thread may call it."""
        self._checkpoint = None
        self._notify()

    def set_torn(self, reason: str) -> None:
        """Reports to the routers, at once and from now on, why the engine stays paused: not all its workers
        have applied a version. Empty: it does not. Any thread may call it."""
        self._torn = clip(reason)
        self._notify()

    def set_controller(self, address: Address) -> None:
        """Reports to the routers, at once and from now on, where the engine takes weights. Any thread may
        call it."""
        self._controller = ControllerAddress(address.host, address.port)
        self._notify()

    def set_load(self, load: WorkloadReport) -> None:
        """Reports the workload to the routers with the next heartbeat."""
        self._load = load

    def load_failed(self, transfer_id: str, reason: str) -> None:
        """Reports to the routers, at once, why this engine did not receive a transfer's pages. Any thread may
        call it."""
        self._failures.append(LoadFailed(transfer_id, clip(reason)))
        self._notify()

    def add_hits(self, hits: Mapping[str, tuple[int, int]]) -> None:
        """Reports these hits to the routers with the next heartbeat, as in PromptHits. Any thread may call
        it."""
        self._hits.extend(
            (name, hit) for name, hit in hits.items() if len(name) <= _LONGEST_ID and name.isascii()
        )

    def close(self) -> None:
        """Sends LEAVE and ends the thread. Blocks for a fraction of a second. A second call does nothing."""
        with self._waking:
            if self._closing:
                return
            os.eventfd_write(self._wake, 1)
            self._closing = True
        self._thread.join()
        self._sockets.close()
        if self._announcer is not None:
            self._announcer.close()
        os.close(self._wake)

    def _notify(self) -> None:
        with self._waking:
            if not self._closing:
                os.eventfd_write(self._wake, 1)

    def _main(self) -> None:
        while not self._closing:
            try:
                self._beat()
            except Exception:
                logger.exception("registration with the routers: unexpected error, it continues")
                time.sleep(HEARTBEAT_S)
        leave = Leave(self._registration.engine_id, self._registration.incarnation)
        for router in self._routers:
            self._sockets.send(router.link, leave)

    def _dial(self, address: Address) -> Source:
        return self._sockets.dial(address, patient=False)

    def _beat(self) -> None:
        """Sends one REGISTER, the failures and the hits to each router, then receives their messages for one
        heartbeat."""
        failures = [self._failures.popleft() for _ in range(len(self._failures))]
        hits = [self._hits.popleft() for _ in range(len(self._hits))]
        news: list[MembershipMessage] = [
            *failures,
            *(PromptHits(dict(hits[at : at + MOST_HITS])) for at in range(0, len(hits), MOST_HITS)),
        ]
        if self._registration.asleep is not self._asleep:
            self._registration = msgspec.structs.replace(self._registration, asleep=self._asleep)
        now = msgspec.structs.replace(
            self._registration,
            activity=self._activity(),
            load=self._load,
            weights=self._weights,
            checkpoint=self._checkpoint,
            torn=self._torn,
            controller=self._controller,
        )
        if self._announcer is not None and not (now.draining or now.asleep or now.torn):
            self._announcer.announce()
        for router in self._routers:
            if self._sockets.send(router.link, now):
                router.missed = 0
                if router.reported:
                    router.reported = False
                    logger.info("ROUTER BACK: connected to %s", router.address)
                for one in news:
                    self._sockets.send(router.link, one)
                continue
            _report_miss(router)
            router.missed += 1
            if router.missed % _REDIAL == 0:
                # If only one side has a key, ZMQ abandons the connection for good. The other side may have a
                # key by now.
                self._sockets.hang_up(router.link)
                router.link = self._dial(router.address)
        missed = any(router.missed for router in self._routers)
        deadline = time.monotonic() + (HEARTBEAT_S / _SOONER if missed else HEARTBEAT_S)
        while not self._closing and (left := deadline - time.monotonic()) > 0:
            if self._wake in self._sockets.wait(left) and not self._closing:
                os.eventfd_read(self._wake)
                return  # a change is reported at once
            draining = self._registration.draining
            for received in self._sockets.receive():
                if isinstance(received.message, (BeginDrain, EndDrain)):
                    draining = isinstance(received.message, BeginDrain)
            if draining is not self._registration.draining:
                logger.info(
                    "DRAINING: requested by a router. This engine gets no new requests."
                    if draining
                    else "DRAINING ends: requested by a router. This engine gets new requests again."
                )
                self._registration = msgspec.structs.replace(self._registration, draining=draining)
                return  # a change is reported at once


def _report_miss(router: _Router) -> None:
    """Logs one line for an outage. ZMQ does not report whether a key, an address or a firewall causes it."""
    now = time.monotonic()
    if not router.missed:
        router.missed_since = now
    if not router.reported and now - router.missed_since >= _UNREACHED_S:
        router.reported = True
        logger.warning(
            "NO ROUTER: no connection to %s for %.0f s. Check that a router registers engines there, that no "
            "firewall is between, and that both have the same cluster key.",
            router.address,
            now - router.missed_since,
        )
