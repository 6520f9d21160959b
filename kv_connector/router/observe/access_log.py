"""AccessLog: one JSON line for each request of a client."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from kv_connector.router.observe.line_writer import STANDARD_OUTPUT, Descriptor, LineWriter, LogFile
from kv_connector.router.requests.token_counts import (
    cached_tokens,
    completion_tokens,
    has_usage,
    last_usage,
    prompt_tokens,
)

logger = logging.getLogger(__name__)

# Name of the request's Exchange in the ASGI scope.
_EXCHANGE = "kv_connector.exchange"

# The line of a request is bounded: a path may have 64 KiB, a model's name the length of a body, and a stream
# may move any number of times.
_LONGEST_TEXT = 256
_MOST_ENGINES = 16
# An error that repeats with each request is logged once a minute.
_REPORT_INTERVAL_S = 60.0


class AccessLogError(ValueError):
    """The file cannot be written. The message says what to change."""


@dataclass(eq=False)
class Exchange:
    """Facts of one request, for its line in the access log. Used from the event loop's thread only."""

    request_id: str = ""
    key: str | None = None
    """Name of the client's API key; None: the router has no keys, or the request has no valid key."""
    status: int | None = None
    """Status of the answer, as the metrics count it; None: no answer has begun."""
    refusal: int | None = None
    """Status with which the server itself answered, for example 400 for a body that is not HTTP."""
    logged: bool = True
    """Whether the request gets a line in the access log."""
    model: str | None = None
    prefill: list[str] = field(default_factory=list)
    """Prefill engines that got the request, in this order."""
    decode: list[str] = field(default_factory=list)
    """Decode engines that got the request, in this order."""
    transfer_id: str | None = None
    """The latest transfer of the request's pages."""
    prompt_tokens: int | None = None
    """Tokens of the prompt, as the first prefill engine reports them."""
    cached_tokens: int | None = None
    begun: float = field(default_factory=time.perf_counter)
    first_byte: float | None = None
    """Seconds until the first byte of the answer's body."""
    _last: bytes = b""
    """The latest part of the answer that has token counts."""

    def prefilling(self, engine: object) -> None:
        _append(self.prefill, str(engine))

    def decoding(self, engine: object) -> None:
        _append(self.decode, str(engine))

    def computed(self, tokens: int | None, cached: int | None) -> None:
        """Notes a prefill engine's report. A stream that moves gets another report, of a longer prompt."""
        if self.prompt_tokens is None:
            self.prompt_tokens, self.cached_tokens = tokens, cached

    def send(self, chunk: bytes) -> None:
        """Notes a part of the answer: whole events of a stream, or a whole body."""
        if has_usage(chunk):
            self._last = chunk

    def body_begins(self) -> None:
        if self.first_byte is None:
            self.first_byte = time.perf_counter() - self.begun

    def usage(self) -> Mapping[str, int | None]:
        """Returns the token counts: of the answer if it has them, else of the prefill engine."""
        found = last_usage(self._last)
        prompt, cached = prompt_tokens(found), cached_tokens(found)
        return {
            "prompt_tokens": self.prompt_tokens if prompt is None else prompt,
            "cached_tokens": self.cached_tokens if cached is None else cached,
            "completion_tokens": completion_tokens(found),
        }


def begin_exchange(scope: MutableMapping[str, Any], request_id: str) -> Exchange:
    """Returns the exchange of a request, which it begins unless the server has refused the request before.
    ``scope``: its ASGI scope."""
    exchange = scope.setdefault(_EXCHANGE, Exchange(request_id))
    assert isinstance(exchange, Exchange)
    return exchange


def exchange_of(scope: Mapping[str, Any]) -> Exchange:
    """Returns the exchange that has begun in this ASGI scope."""
    exchange = scope[_EXCHANGE]
    assert isinstance(exchange, Exchange)
    return exchange


def _append(engines: list[str], engine: str) -> None:
    if len(engines) < _MOST_ENGINES and engines[-1:] != [engine]:
        engines.append(engine)


class AccessLog:
    """Writes no lines. The base class of the log that does."""

    @classmethod
    def to(cls, target: str | None, dropped: Callable[[], None] = lambda: None) -> AccessLog:
        """Returns the log that writes to a file or to standard output. Raises AccessLogError.

        ``dropped``: called, from any thread, for each line that is lost. Too many wait for a slow reader or
        disk, or the file cannot be written.
        """
        return AccessLog() if target is None else _Written(target, dropped)

    @contextmanager
    def request(self, exchange: Exchange, scope: Mapping[str, Any]) -> Iterator[None]:
        """Writes the line of a request, if it gets one, at the end of a block. ``scope``: the ASGI scope."""
        try:
            yield
        finally:
            self.write(exchange, scope)

    def write(self, exchange: Exchange, scope: Mapping[str, Any]) -> None:
        """Writes the line of a request that ends now, if it gets one."""

    def close(self) -> None:
        """Writes the lines that wait, and closes the file. Blocks for at most CLOSE_S."""


class _Written(AccessLog):
    def __init__(self, target: str, dropped: Callable[[], None]) -> None:
        try:
            self._target = Descriptor(STANDARD_OUTPUT) if target == "-" else LogFile(target)
        except OSError as error:
            raise AccessLogError(
                f"cannot write the access log {target}: {error.strerror}. Change --access-log"
            ) from None
        self._dropped = dropped
        self._reported: dict[str, float] = {}
        self._writer = LineWriter(self._write)

    def write(self, exchange: Exchange, scope: Mapping[str, Any]) -> None:
        if exchange.logged and not self._writer.put(_line(exchange, scope)):
            self._dropped()
            self._report("a line was dropped: its reader or disk is too slow")

    def close(self) -> None:
        if self._writer.close():
            self._target.close()
        else:
            self._report("its last lines were dropped: its reader or disk is too slow")

    def _write(self, line: str) -> None:
        try:
            self._target.write(line + "\n")
        except OSError as error:
            self._dropped()
            self._report("a line was not written", f": {error}")

    def _report(self, event: str, reason: str = "") -> None:
        now = time.monotonic()
        if now - self._reported.get(event, -_REPORT_INTERVAL_S) >= _REPORT_INTERVAL_S:
            self._reported[event] = now
            logger.error("access log: %s%s", event, reason)


def _line(exchange: Exchange, scope: Mapping[str, Any]) -> str:
    client = scope.get("client")
    duration = time.perf_counter() - exchange.begun
    arrived = datetime.now(UTC) - timedelta(seconds=duration)
    line = {
        "time": arrived.isoformat(timespec="milliseconds"),
        "request_id": exchange.request_id,
        "client": client[0] if client else None,
        "key": exchange.key,
        "method": _cut(scope["method"]),
        "path": _cut(scope["path"]),
        "status": exchange.refusal or exchange.status,
        "model": _cut(exchange.model),
        "prefill": exchange.prefill,
        "decode": exchange.decode,
        "transfer_id": exchange.transfer_id,
        "first_byte": None if exchange.first_byte is None else round(exchange.first_byte, 6),
        "duration": round(duration, 6),
        **exchange.usage(),
    }
    return msgspec.json.encode(line).decode()


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:_LONGEST_TEXT]
