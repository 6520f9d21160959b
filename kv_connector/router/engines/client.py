"""EngineClient: HTTP requests to the engines' API servers."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from kv_connector.router.bodies.fields import Content, Pieces
from kv_connector.router.failure import overloaded

logger = logging.getLogger(__name__)

# Deadline for the connection only: a prompt may wait in a queue and take minutes.
CONNECT_SECONDS = 5.0
# An API server that has a request and gives no sign of life for this time is lost. The time is long because
# vLLM's only server thread neither reads nor writes while it tokenizes a long prompt.
LOST_SECONDS = 2 * CONNECT_SECONDS
# vLLM closes a connection that was idle for 5 s. A connection that is reused must not be closing at that
# moment.
KEEP_ALIVE_SECONDS = 2.0

# The exceptions of a failed request to an engine.
HttpError = (aiohttp.ClientError, TimeoutError)


def refused(error: Exception) -> bool:
    """Returns whether no process listens at the engine's address."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED


# This process, or its host, has no descriptor or no local port left.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


# The authorities of a whole operating system are 250 KB. A larger file was named by mistake.
_LONGEST_AUTHORITY = 4 << 20


class AuthorityError(ValueError):
    """The file holds no certificates. The message says what to do."""


def read_authority(path: Path) -> ssl.SSLContext:
    """Returns what verifies engines by the certificates in a PEM file. Raises AuthorityError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it verifies certificates and names
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_AUTHORITY + 1)
        if len(text) > _LONGEST_AUTHORITY:
            raise ValueError(f"it is longer than {_LONGEST_AUTHORITY} bytes")
        context.load_verify_locations(cadata=text.decode("ascii"))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise AuthorityError(f"cannot read certificates from {path}: {error}. Change --engine-ca") from None
    return context


@dataclass(frozen=True)
class EngineReply:
    """An engine's whole answer."""

    status: int
    content_type: str
    body: bytes
    retry_after: str | None = None
    """Value of the Retry-After header, if the engine sent one."""


# If an answer takes minutes, only TCP can report that a host has vanished. By default TCP never does while
# the answer is awaited, and takes a quarter of an hour while a request is sent. TCP_USER_TIMEOUT also counts
# time in which a live engine takes none of a long body. Without that option, probes are counted.
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": int(CONNECT_SECONDS),
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": int(LOST_SECONDS - CONNECT_SECONDS),
    "TCP_USER_TIMEOUT": int(1000 * LOST_SECONDS),
}


class EngineClient:
    """Sends requests to engines. Opened, used and closed in one event loop, as an asynchronous context
    manager.

    A request that is left before the end of its answer, or cancelled, closes its connection: so vLLM learns
    to abort it. No POST is sent twice, no redirect is followed. Methods raise one of HttpError. They raise
    Failure 503 if this process has no descriptor or port left, which indicates no fault of the engine.
    """

    def __init__(self, key: str | None = None, authority: ssl.SSLContext | None = None) -> None:
        """Takes the arguments of change()."""
        self.change(key, authority)

    def change(self, key: str | None, authority: ssl.SSLContext | None) -> None:
        """Uses another key and other authorities in requests from now on. Those in flight continue.

        ``key``: sent to engines with each request that has no other authorization; None: none is.
        ``authority``: verifies engines with an https address; None: the authorities of this host do.
        """
        self._key = {} if key is None else {"authorization": f"Bearer {key}"}
        # Connections of another authority are not used again: aiohttp keeps them apart.
        self._authority: ssl.SSLContext | bool = True if authority is None else authority

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEP_ALIVE_SECONDS,
                socket_factory=_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers={"accept-encoding": "identity"},
            skip_auto_headers=("content-type", "user-agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, body: Content | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request and yields its answer once the status line has arrived."""
        try:
            data = _Payload(body) if isinstance(body, Pieces) else body
            response = await self._session.request(
                method,
                url,
                data=data,
                headers={**self._key, **(headers or {})},
                allow_redirects=False,
                ssl=self._authority,
            )
        except aiohttp.ClientOSError as error:
            if error.errno in _EXHAUSTED:
                name = (headers or {}).get("x-request-id", "-")
                logger.error("no socket for a request to %s: request %s failed: %s", url, name, error)
                raise overloaded(f"the router has no socket left: {error.strerror}") from error
            raise
        async with response:
            yield response

    async def whole(
        self, method: str, url: str, body: Content | None = None, headers: Mapping[str, str] | None = None
    ) -> EngineReply:
        async with self.stream(method, url, body, headers) as response:
            answer = await response.read()
            return EngineReply(response.status, content_type(response), answer, retry_after(response))


class _Payload(aiohttp.Payload):
    """Pieces as a request's body. The event loop runs between two slices of it."""

    _value: Pieces
    _autoclose = True  # nothing has to be closed

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)
        self._size = len(pieces)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value.parts).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for part in self._value.slices():
            await writer.write(part)
            await asyncio.sleep(0)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Writes the whole body, so ``content_length`` is not used."""
        await self.write(writer)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def content_type(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("content-type", "application/json")


def retry_after(response: aiohttp.ClientResponse) -> str | None:
    return response.headers.get("retry-after")
