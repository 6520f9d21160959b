"""The router's HTTP server: uvicorn on httptools, with bounds on the resources that clients can hold."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket
import ssl
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from kv_connector.protocol.actions import Address
from kv_connector.router.failure import Failure, bad_request, failure

logger = logging.getLogger(__name__)

STARTUP_FAILURE = 3  # uvicorn's exit status

# Limit on the request line and headers together. Envoy's is 60 KiB. httptools copies a header's bytes so far
# for each part that arrives: 16 MiB take 0.6 s of the event loop, 128 MiB 15 s.
HEADER_LIMIT = 64 << 10
# A refused client may still be sending. It can read the answer only if no reset arrives before.
_LINGER_S = 5.0


class ReadTurns:
    """Connections that have much to read. In each turn of the event loop, one of them reads.

    A read of 256 KiB takes 0.3 ms, so 64 clients with long bodies would make each turn 20 ms. Used from the
    event loop's thread only.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Flow, None] = {}
        self._next: asyncio.Handle | None = None

    def enter(self, flow: _Flow) -> None:
        """Queues the connection: its transport reads again when its turn comes."""
        self._waiting.setdefault(flow)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def leave(self, flow: _Flow) -> None:
        self._waiting.pop(flow, None)

    def _turn(self) -> None:
        self._next = None
        for first in self._waiting:
            del self._waiting[first]
            first.read()
            break
        if self._waiting:
            self._next = asyncio.get_running_loop().call_soon(self._turn)


class _Flow(FlowControl):
    """uvicorn's flow control, with a queue: a connection waits for its turn before it reads on."""

    def __init__(self, transport: asyncio.Transport, turns: ReadTurns) -> None:
        super().__init__(transport)
        self._turns = turns

    def pause_reading(self) -> None:
        self._turns.leave(self)
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self._turns.enter(self)

    def read(self) -> None:
        if not self._transport.is_closing():
            super().resume_reading()


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration for one server, and the list of its idle connections.

    Used from the event loop's thread only.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        connections: int,
        stall: float,
        tls: ssl.SSLContext | None = None,
        refused: Callable[[MutableMapping[str, Any], int, float | None], str] | None = None,
        **options: Any,
    ) -> None:
        """``connections``: open connections above which an idle connection is closed for a new one.
        ``stall``: seconds that headers and a TLS handshake may take, and that a reader may take nothing.
        ``tls``: for HTTPS at the clients' address; None: HTTP. ``refused``: called for each request that the
        server answers itself, as RouterApp.refused(). ``options``: uvicorn's options."""
        super().__init__(
            app,
            http=BoundedProtocol if tls is None else TlsHandshake,
            # A WebSocket would leave this protocol and its bounds. The router has no route for a WebSocket.
            ws="none",
            # Clients can write X-Forwarded-For themselves. A proxy on this host passes it on by default.
            proxy_headers=False,
            log_config=None,
            access_log=False,
            **options,
        )
        self.tls = tls
        self.refused = refused
        self.most_connections = connections
        self.stall = stall
        self.turns = ReadTurns()
        self.idle: dict[BoundedProtocol | TlsHandshake, None] = {}
        """Connections without a request in progress, the longest idle first."""
        self.handshakes = 0
        """Connections whose TLS handshake is not complete. They are idle, too."""

    def close_idle(self, connections: int) -> None:
        """Closes the longest idle connection, if these and the handshakes are too many."""
        if connections + self.handshakes > self.most_connections:
            for longest in self.idle:
                longest.close()
                break


class RouterServer(uvicorn.Server):
    """uvicorn's server, with a second address for operators, and an action for SIGHUP."""

    config: ServerConfig

    def __init__(
        self,
        config: ServerConfig,
        admin: Address | None = None,
        reload: Callable[[], Awaitable[None]] | None = None,
        reload_due: asyncio.Event | None = None,
    ) -> None:
        """``reload``: called at each SIGHUP, one call after the other. None: SIGHUP ends the process.
        ``reload_due``: set at SIGHUP. The caller sets it for a SIGHUP before the server runs."""
        super().__init__(config)
        self._admin = admin
        self._reload = reload
        self._reload_due = reload_due or asyncio.Event()

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await self._serve_and_reload(sockets)
        finally:
            # uvicorn then raises the signal that ended it, which ends the process at once.
            await asyncio.to_thread(_flush_log)

    async def _serve_and_reload(self, sockets: list[socket.socket] | None) -> None:
        if self._reload is None:
            await super()._serve(sockets)
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reload_due.set)
        reloading = asyncio.create_task(self._reload_when_due(self._reload))
        try:
            await super()._serve(sockets)
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            reloading.cancel()
            await asyncio.gather(reloading, return_exceptions=True)

    async def _reload_when_due(self, reload: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._reload_due.wait()
            self._reload_due.clear()
            try:
                await reload()
            except Exception:
                logger.exception("reload failed: the router keeps its settings")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._admin is None or self.should_exit:
            return
        protocol = functools.partial(BoundedProtocol, self.config, self.server_state, self.lifespan.state)
        loop, backlog = asyncio.get_running_loop(), self.config.backlog
        try:
            server = await loop.create_server(protocol, self._admin.host, self._admin.port, backlog=backlog)
        except OSError as error:
            logger.error("cannot listen on %s: %s. Change --admin", self._admin, error.strerror or error)
            self.started = False
            await self.shutdown(sockets)
            sys.exit(STARTUP_FAILURE)
        self.servers.append(server)


class BoundedProtocol(HttpToolsProtocol):
    """One connection of a client. Long headers get 431, slow headers 408, and what is not HTTP 400.

    The connection is closed if its reader takes nothing, or if it is idle and too many connections are open.
    """

    config: ServerConfig
    flow: _Flow

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._produced = False  # whether the parser has produced anything from the latest data
        self._unproductive = 0  # bytes from which the parser has produced nothing yet
        self._in_headers = False
        self._headers_began = 0.0
        self._refusal: Failure | None = None  # the answer to the headers that the parser is reading
        self._refused = False  # data that arrives is not read
        # More than one if requests are pipelined. uvicorn remembers only the latest.
        self._unfinished: list[RequestResponseCycle] = []
        self._headers_due: asyncio.TimerHandle | None = None
        self._reader_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.config.turns)
        self.config.close_idle(len(self.connections))
        self.config.idle[self] = None
        self.timeout_keep_alive_task = self._later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.idle.pop(self, None)
        self._unset_keepalive_if_required()
        self._unset_headers_due()
        self._unset_reader_due()
        self.config.turns.leave(self.flow)
        super().connection_lost(exc)
        for cycle in self._unfinished:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self._parse(data)
        # As much data may wait in the transport. A request that has not read the earlier data resumes reading
        # by itself.
        if len(data) > HIGH_WATER_LIMIT and not self.flow.read_paused and not self.transport.is_closing():
            self.flow.pause_reading()
            self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        self._produced = False
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        # Trailers after a body count as headers do.
        self._unproductive = 0 if self._produced else self._unproductive + len(data)
        if self._unproductive > HEADER_LIMIT:
            self._refuse(_headers_too_long())
        elif self in self.config.idle and self._headers_due is None and self.timeout_keep_alive_task is None:
            self._headers_due = self._later(self.config.stall, self._headers_are_late)

    def send_400_response(self, msg: str) -> None:
        """Answers whatever the parser, or a method that it calls, does not accept."""
        self._refuse(self._refusal or bad_request("the request is not valid HTTP"))

    def on_message_begin(self) -> None:
        self._in_headers = True
        self._headers_began = time.perf_counter()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer must not change the request: the application already has it.
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._produced = True
        self._unset_headers_due()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEADER_LIMIT:
            self._refusal = _headers_too_long()
            raise ValueError("the headers are too long")  # this ends the parser
        self.config.idle.pop(self, None)
        super().on_headers_complete()
        self._in_headers = False
        self._unfinished.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._produced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._produced = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unfinished = [cycle for cycle in self._unfinished if not cycle.response_complete]
        super().on_response_complete()
        if self.transport.is_closing():
            # The connection closes when the client has taken the rest.
            self._set_reader_due()
        elif self.cycle.response_complete:  # else the next request of a pipeline has begun
            self.config.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_reader_due()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._unset_reader_due()

    def timeout_keep_alive_handler(self) -> None:
        self.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Does nothing: the request is answered as one without an upgrade. That is not an event for
        the log."""

    def _headers_are_late(self) -> None:
        self._headers_due = None
        if self._in_headers:
            self._refuse(failure(408, "invalid_request_error", _LATE % ("headers", self.config.stall)))
        else:
            self.close()

    def _refuse(self, refusal: Failure) -> None:
        """Answers without the application, and reads nothing more."""
        self._refused = True
        self._unset_keepalive_if_required()
        self._unset_headers_due()
        if any(cycle.response_started for cycle in self._unfinished):
            self.close()  # in the middle of another answer
            return
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(
            refusal.body
        )
        head += self._note_refusal(refusal.status) + b"\r\n"
        for cycle in self._unfinished:  # nothing may follow this answer
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        self.flow.resume_reading()  # a request that had not read its body no longer does it
        self.transport.write(STATUS_LINE[refusal.status] + head + refusal.body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.timeout_keep_alive_task = self._later(_LINGER_S, self.close)

    def _note_refusal(self, status: int) -> bytes:
        """Reports the refused request. Returns its id as a header."""
        if self.config.refused is None:
            return b""
        scope: MutableMapping[str, Any]
        if not self._in_headers and self._unfinished and self._unfinished[-1].more_body:
            refused = self._unfinished[-1]  # for its body
            scope = cast(MutableMapping[str, Any], refused.scope)
            # The application never gets a request that waits behind another one.
            waits = any(cycle is refused for cycle, _ in self.pipeline)
            since_headers = time.perf_counter() - self._headers_began
            request_id = self.config.refused(scope, status, since_headers if waits else None)
        else:
            scope = {"client": self.client, "method": None, "path": None, "headers": []}
            seconds = 0.0
            if self._in_headers:
                scope["headers"] = self.headers
                seconds = time.perf_counter() - self._headers_began
                if self.url:  # the parser has a method
                    path = self.url.partition(b"?")[0].decode("ascii", "replace")
                    scope.update(method=self.parser.get_method().decode(), path=urllib.parse.unquote(path))
            request_id = self.config.refused(scope, status, seconds)
        return b"x-request-id: %s\r\n" % request_id.encode("latin-1")

    def close(self) -> None:
        """Closes the connection now, even if its client has not taken all that was sent."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _later(self, seconds: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, act)

    def _set_reader_due(self) -> None:
        if self._reader_due is None:
            self._reader_due = self._later(self.config.stall, self.transport.abort)

    def _unset_reader_due(self) -> None:
        if self._reader_due is not None:
            self._reader_due.cancel()
            self._reader_due = None

    def _unset_headers_due(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class TlsHandshake(asyncio.Protocol):
    """A client's connection until its TLS handshake is complete. A BoundedProtocol has it afterwards.

    uvicorn and the event loop would not count the connection, and would wait 60 s for the handshake.
    """

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._connections = server_state.connections
        self._make = functools.partial(BoundedProtocol, config, server_state, app_state, _loop)
        self._protocol: BoundedProtocol | None = None
        # What arrived when start_tls() did not read yet. Then what arrived together with the handshake's end.
        self._early = b""
        self._lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._config.handshakes += 1
        self._config.close_idle(len(self._connections))
        self._config.idle[self] = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def data_received(self, data: bytes) -> None:
        if self._protocol is None:
            self._early += data
        else:
            self._protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        # Called later than it was decided. The protocol may have taken the connection meanwhile.
        self._lost = True
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    def close(self) -> None:
        self._transport.abort()

    async def _run(self) -> None:
        assert self._config.tls is not None
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin)
        try:
            tls = await loop.start_tls(
                self._transport,
                self,
                self._config.tls,
                server_side=True,
                ssl_handshake_timeout=self._config.stall,
                ssl_shutdown_timeout=_LINGER_S,
            )
        except OSError:  # ssl.SSLError is one
            tls = None
        finally:
            self._config.handshakes -= 1
            self._config.idle.pop(self, None)
        if tls is None or tls.is_closing() or self._transport.is_closing() or self._lost:
            self._transport.abort()
            return
        self._protocol = self._make()
        tls.set_protocol(self._protocol)
        self._protocol.connection_made(tls)
        if self._early:
            self._protocol.data_received(self._early)

    def _begin(self) -> None:
        """Gives the data so far to the protocol that start_tls() has set, before it begins the handshake.

        uvloop reads after connection_made(), even if the transport was paused there.
        """
        early, self._early = self._early, b""
        protocol: Any = self._transport.get_protocol()
        while early and protocol is not self:  # a BufferedProtocol, in asyncio and in uvloop
            buffer = protocol.get_buffer(len(early))
            part, early = early[: len(buffer)], early[len(buffer) :]
            buffer[: len(part)] = part
            protocol.buffer_updated(len(part))


def _flush_log() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()


_LATE = "the request's %s did not arrive within %g s"


def _headers_too_long() -> Failure:
    return failure(431, "invalid_request_error", f"the headers are longer than {HEADER_LIMIT} bytes")
