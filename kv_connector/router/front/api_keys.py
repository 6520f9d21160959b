"""ApiKeys: the router's own keys, and the check of each request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kv_connector.control.cluster_key import KeyFileError, read_private
from kv_connector.router.failure import failure
from kv_connector.router.observe.access_log import exchange_of

# Paths for probes, which have no key. With keys, their answers name no engine.
OPEN_PATHS = ("/live", "/health", "/ping")

# 10,000 lines of the longest form are 3 MiB. A larger file was named by mistake.
_LONGEST_FILE = 4 << 20
# A key of 16 characters of a generator's 64 has 96 bits. 256 characters are four times the longest usual key.
_LINE = re.compile(r"(?P<name>[A-Za-z0-9._@-]{1,64})[ \t]+(?P<key>[!-~]{16,256})")
_ENGINE_KEY = re.compile(rb"[!-~]{1,256}")


class ApiKeys:
    """Keys of clients. Only their hashes are kept.

    A key is looked up by its hash, so the time of a look-up tells nothing about the key.
    """

    def __init__(self, names: Mapping[bytes, str]) -> None:
        """``names``: client by the SHA-256 of its key."""
        self._names = dict(names)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file with a name and a key in each line. Raises KeyFileError."""
        names: dict[bytes, str] = {}
        text = read_private(path, _LONGEST_FILE, "Write a line `NAME KEY` for each client")
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.decode("ascii", "replace").strip()
            if not line or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line)
            if found is None:
                raise KeyFileError(
                    f"line {number} of the key file {path} is not `NAME KEY`. A name has 1 to 64 letters, "
                    "digits and ._@-, a key 16 to 256 printable characters"
                )
            digest = _digest(found["key"])
            if digest in names:
                raise KeyFileError(f"line {number} of the key file {path} repeats the key of {names[digest]}")
            names[digest] = found["name"]
        if not names:
            raise KeyFileError(f"the key file {path} has no key. Write a line `NAME KEY` for each client")
        return cls(names)

    def replace(self, keys: ApiKeys) -> None:
        """Takes the keys of another object. Requests in flight continue."""
        self._names = keys._names

    def client(self, headers: Headers) -> str | None:
        """Returns the name of the client whose key a request has; None: it has no valid key."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        return self._names.get(_digest(given)) if given else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


class KeyCheck:
    """ASGI middleware that answers 401 to requests without a valid key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            client = self._keys.client(Headers(scope=scope))
            if client is None:
                exchange_of(scope).logged = True  # also at the metrics: an attacker may be guessing keys
                words = "no valid API key. Send one as `Authorization: Bearer KEY`"
                body = failure(401, "invalid_request_error", words).body
                headers = {"www-authenticate": "Bearer"}
                await Response(body, 401, headers, media_type="application/json")(scope, receive, send)
                return
            exchange_of(scope).key = client
        await self._app(scope, receive, send)


def read_engine_key(path: Path) -> str:
    """Returns the key that engines expect (vLLM's --api-key). Raises KeyFileError."""
    key = read_private(path, _LONGEST_FILE, "Write the value of the engines' --api-key").strip()
    if _ENGINE_KEY.fullmatch(key) is None:
        raise KeyFileError(f"the key file {path} must hold one key of 1 to 256 printable characters")
    return key.decode("ascii")
