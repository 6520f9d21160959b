"""Failure: an answer that is an error, in a shape that OpenAI's and Anthropic's clients understand."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kv_connector.protocol.wire.messages import UNREADABLE as UNREADABLE

# Retry-After for a 429 or 503 of the router: an engine joins, or a request ends, within about a second.
_RETRY_AFTER_S = "1"


class Failure(Exception):
    """An error as the client receives it. `body` is JSON, or what for example a proxy answers instead."""

    def __init__(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        retry_after: str | None = None,
    ) -> None:
        """``retry_after``: the header's value, seconds or a date."""
        super().__init__(f"HTTP {status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body
        self.content_type = content_type
        self.retry_after = retry_after

    def event(self, *, named: bool = False) -> bytes:
        """The error as an event for a stream that has begun, as vLLM ends one.

        ``named``: the stream's events have names, and its clients ignore events without a name.
        """
        try:
            line = msgspec.json.format(self.body, indent=-1)
        except UNREADABLE:
            return failure(self.status, "api_error", self.body.decode(errors="replace")).event(named=named)
        return (b"event: error\n" if named else b"") + b"data: " + line + b"\n\n"


def failure(status: int, kind: str, message: str) -> Failure:
    """Returns a failure that the router itself reports. `kind` is a type of both APIs:
    invalid_request_error, rate_limit_error or api_error."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = msgspec.json.encode({"type": "error", "error": error})
    return Failure(status, body, retry_after=_RETRY_AFTER_S if status in (429, 503) else None)


def overloaded(message: str) -> Failure:
    """Returns a failure for a request for which the router itself has no room. No engine is to blame."""
    return failure(503, "api_error", message)


def too_many(message: str) -> Failure:
    """Returns a failure for a client that has as many requests in flight as it may have."""
    return failure(429, "rate_limit_error", message)


def bad_request(message: str) -> Failure:
    return failure(400, "invalid_request_error", message)


def reported_failure(error: Mapping[str, Any], data: bytes) -> Failure:
    """Returns the failure for an engine's error within a stream; ``data`` is the data of the event."""
    code = error.get("code")
    return Failure(code if isinstance(code, int) and 400 <= code <= 599 else 500, data)


def refused_key(status: int, client: str | None) -> Failure | None:
    """Returns the failure if an engine's answer refuses the router's key. None: it does not.

    ``client``: name of the client whose key the router has checked. No engine gets that key. None: engines
    get the client's key, if it has one.
    """
    if status != 401 or client is None:
        return None
    words = "an engine refuses the router's key. Set --engine-key-file to the key of the engines"
    return failure(502, "api_error", words)


def engine_down(side: str, engine: str, error: Exception) -> Failure:
    """Returns the failure for an engine that could not be reached, or that broke off."""
    return failure(
        502, "api_error", f"the {side} engine {engine} failed: {type(error).__name__}: {error or 'no answer'}"
    )
