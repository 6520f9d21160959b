"""EngineClient: HTTP to the engines' API servers."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Self

import aiohttp
from aiohttp.typedefs import LooseHeaders

# A prompt may wait in a queue and take minutes: only reaching the engine has a deadline.
CONNECT_SECONDS = 5.0
# vLLM closes a connection that was idle for 5 s. One that we reuse must not be closing at that moment.
KEEP_ALIVE_SECONDS = 2.0

# What a request to an engine fails with.
HttpError = (aiohttp.ClientError, TimeoutError)


@dataclass(frozen=True)
class Reply:
    """An engine's whole answer."""

    status: int
    content_type: str
    body: bytes


class EngineClient:
    """Opened, used and closed in one event loop, as an asynchronous context manager.

    A request that is left before the end of its answer (or cancelled) closes its connection, which is how
    vLLM learns to abort. No POST is sent twice, no redirect is followed. Methods raise one of HttpError.
    """

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers={"accept-encoding": "identity"},
            skip_auto_headers=("content-type", "user-agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def stream(
        self, method: str, url: str, body: bytes | None = None, headers: LooseHeaders | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """An answer from its status line on."""
        return self._session.request(method, url, data=body, headers=headers, allow_redirects=False)

    async def whole(
        self, method: str, url: str, body: bytes | None = None, headers: LooseHeaders | None = None
    ) -> Reply:
        async with self.stream(method, url, body, headers) as response:
            return Reply(response.status, content_type(response), await response.read())


def content_type(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("content-type", "application/json")
