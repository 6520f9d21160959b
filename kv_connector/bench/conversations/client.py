"""One streamed turn at an OpenAI-compatible endpoint, timed at the client."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kv_connector.lab.sse import Events
from kv_connector.protocol.wire.messages import UNREADABLE

# A million tokens at 256 bytes an event.
_MAX_ANSWER_BYTES = 1 << 28
_FAILURES = aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE
# Characters of a server's error in a message.
_QUOTED = 300


class TurnError(Exception):
    """A turn without a complete answer."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause
        """Short name of the cause, equal for equal causes."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The usage field of an answer."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        if self.delta is None:
            return self.text or ""
        return (self.delta.reasoning_content or self.delta.reasoning or "") + (self.delta.content or "")


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True)
class TimedAnswer:
    """A complete answer. Times are in seconds."""

    text: str
    """The content, which the next turn repeats."""
    said: str
    """The content and the reasoning before it."""
    token_ids: list[int]
    """The answer's tokens, if the request wanted their ids."""
    first: float
    """Time from sending the request to the first token."""
    gaps: Sequence[float]
    """Times between events with tokens. Tokens of one event have no gap between them."""
    usage: Usage


class CompletionServer:
    """An OpenAI-compatible server."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, *, timeout: float, headers: Mapping[str, str]
    ) -> None:
        """``timeout``: limit of one request, in seconds. ``headers``: of every request."""
        self._http = http
        self.url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._seconds = timeout
        self._headers = {"Content-Type": "application/json", **headers}

    async def model(self) -> str:
        """Returns the first served model. TurnError: it is unknown."""
        try:
            async with self._http.get(
                f"{self.url}/v1/models", headers=self._headers, timeout=self._timeout
            ) as response:
                await self._check(response)
                models = msgspec.json.decode(await response.read(), type=_Models).data
        except _FAILURES as error:
            raise self._failed(error) from error
        if not models:
            raise TurnError("no model", f"{self.url}/v1/models names no model. Set --model")
        return models[0].id

    async def ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> TimedAnswer:
        """Sends a request and reads its stream to the end. TurnError: the answer is not complete."""
        data = msgspec.json.encode(body)
        stream = _Stream(self.url)
        try:
            async with self._http.post(
                self.url + path, data=data, headers={**self._headers, **headers}, timeout=self._timeout
            ) as response:
                await self._check(response)
                async for some in response.content.iter_any():
                    stream.feed(some)
        except _FAILURES as error:
            raise self._failed(error) from error
        return stream.answer()

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if not 200 <= response.status < 300:
            text = (await response.content.read(_QUOTED)).decode(errors="replace").strip()
            raise TurnError(f"HTTP {response.status}", f"{self.url} answered {response.status}: {text}")

    def _failed(self, error: Exception) -> TurnError:
        reason = str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            return TurnError("timeout", f"{self.url}: no complete answer within {self._seconds:g} s")
        if isinstance(error, aiohttp.ClientConnectorError):
            return TurnError("unreachable", f"{self.url} is unreachable: {reason}")
        if isinstance(error, UNREADABLE):
            return TurnError("malformed answer", f"{self.url} sent JSON that is not OpenAI's: {reason}")
        return TurnError("broken stream", f"{self.url} broke off: {reason}")


class _Stream:
    """The events of one answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._sent = time.perf_counter()
        self._events = Events()
        self._bytes = 0
        self._times: list[float] = []
        self._text: list[str] = []
        self._said: list[str] = []
        self._token_ids: list[int] = []
        self._finished: float | None = None
        self._usage: Usage | None = None

    def feed(self, some: bytes) -> None:
        now = time.perf_counter()
        self._bytes += len(some)
        if self._bytes > _MAX_ANSWER_BYTES:
            raise TurnError(
                "malformed answer", f"{self._url}: the answer exceeds {_MAX_ANSWER_BYTES >> 20} MiB"
            )
        for event in self._events.feed(some):
            chunk = msgspec.json.decode(event, type=_Chunk)
            if bytes(chunk.error) not in (b"", b"null"):
                text = bytes(chunk.error).decode(errors="replace")[:_QUOTED]
                raise TurnError("error in the stream", f"{self._url} sent an error in the stream: {text}")
            self._usage = chunk.usage or self._usage
            for choice in chunk.choices:
                self._add(choice, now)

    def _add(self, choice: _Choice, now: float) -> None:
        if choice.said or choice.token_ids:
            self._times.append(now)
        self._said.append(choice.said)
        self._text.append((choice.delta.content if choice.delta else choice.text) or "")
        self._token_ids += choice.token_ids or []
        if choice.finish_reason is not None:
            self._finished = now

    def answer(self) -> TimedAnswer:
        if self._finished is None:
            raise TurnError("broken stream", f"{self._url} ended the stream without finish_reason")
        if self._usage is None:
            raise TurnError("no usage", f"{self._url} sent no usage, which stream_options requested")
        # An answer of special tokens alone has no text.
        times = self._times or [self._finished]
        return TimedAnswer(
            text="".join(self._text),
            said="".join(self._said),
            token_ids=self._token_ids,
            first=times[0] - self._sent,
            gaps=[later - earlier for earlier, later in itertools.pairwise(times)],
            usage=self._usage,
        )
