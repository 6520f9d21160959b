"""RouterApp: the ASGI application of a router's two addresses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kv_connector.protocol.actions import Address
from kv_connector.router.front.keep_alive import COMMENT
from kv_connector.router.observe.access_log import AccessLog, begin_exchange
from kv_connector.router.settings import RouterSettings

LONGEST_REQUEST_ID = 128

# Name of the server's own send function in the ASGI scope.
_SEND = "kv_connector.send"


class RouterApp(Starlette):
    """The application of the clients' address and of the operators' address."""

    refusal: str | None = None
    """The operator's mistake for which the router does not start."""

    def __init__(
        self,
        change: Callable[[RouterSettings], None],
        access_log: AccessLog,
        unlogged: Collection[str],
        admin: Address | None,
        of_operators: ASGIApp,
        **options: Any,
    ) -> None:
        """``unlogged``: paths of probes and scrapes, which would be most lines of the log. ``of_operators``:
        answers requests at the address ``admin``. ``options``: those of Starlette."""
        super().__init__(**options)
        self.change = change
        """Takes other settings while requests run. Only listed engines, limits, time limits and the contents
        of key files change. KeyFileError or AuthorityError, and nothing changes, if a file cannot be read."""
        self._access_log = access_log
        self._unlogged = unlogged
        self._admin_port = None if admin is None else admin.port
        self._of_operators = of_operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._live(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Its id is in the answer's headers, and in its line of the access log."""
        exchange = begin_exchange(scope, _request_id(Headers(scope=scope)))
        named = b"x-request-id", exchange.request_id.encode("latin-1")

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), named]}
            elif exchange.first_byte is None and message.get("body") not in (None, b"", COMMENT):
                exchange.body_begins()
            await send(message)

        scope[_SEND] = send
        server = scope.get("server")
        at_admin = self._admin_port is not None and server is not None and server[1] == self._admin_port
        answer = self._of_operators if at_admin else super().__call__
        exchange.logged = exchange.refusal is not None or scope["path"] not in self._unlogged
        with self._access_log.request(exchange, scope):
            try:
                await answer(scope, receive, note)
            finally:
                del scope[_SEND]  # it has the scope

    def refused(self, scope: MutableMapping[str, Any], status: int, seconds: float | None) -> str:
        """Notes that the server answers a request itself. Returns the id for the answer's headers.

        ``scope``: ``client``, and ``method``, ``path`` and ``headers`` as far as they are known. ``seconds``:
        time since the headers began; None: this application has the request, and writes its line.
        """
        exchange = begin_exchange(scope, _request_id(Headers(scope=scope)))
        exchange.refusal, exchange.logged = status, True
        if seconds is not None:
            exchange.begun -= seconds
            exchange.body_begins()
            self._access_log.write(exchange, scope)
        return exchange.request_id

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(message: Message) -> None:
            # A server logs this message. Starlette's own message is a traceback of a page.
            if message["type"] == "lifespan.startup.failed" and self.refusal is not None:
                message = {**message, "message": self.refusal}
            await send(message)

        await super().__call__(scope, receive, say)


def sender_of_body(scope: Scope) -> Send:
    """Returns what sends the parts behind the first of an answer's body. All middleware looks only at the
    beginning of an answer."""
    send: Send = scope[_SEND]
    return send


def _request_id(headers: Headers) -> str:
    """Returns the client's X-Request-Id if it is fit for a log line, else a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
