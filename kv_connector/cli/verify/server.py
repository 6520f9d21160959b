"""VerifiedServer: bounded requests to one OpenAI server, and its answers to canaries."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

import aiohttp
import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kv_connector.cli.verify.canaries import Canary, Route
from kv_connector.lab.comparison import Output
from kv_connector.lab.sse import Events
from kv_connector.router.engines.client import EngineClient, HttpError
from kv_connector.router.failure import UNREADABLE, Failure

# The longest answer that is read. 4,096 tokens with two candidates each are about 1 MiB in a stream.
LONGEST_ANSWER = 16 << 20
# Metrics, models and states of a deployment. vLLM's /metrics has about 100 KiB.
LONGEST_PAGE = 16 << 20
# Time for everything but answers to canaries, in seconds.
PAGE_SECONDS = 10.0
# Bytes of an error that are shown.
_SHOWN = 500
_NAMES_ENGINES = re.compile("prefill|decode|engine|upstream|served-by|backend", re.IGNORECASE)
_MOST_HEADERS = 8
# Models of a list that are read.
_MOST_MODELS = 1000


class Trouble(StrEnum):
    """Why a request has no complete answer."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    BROKEN = "broken off"
    UNREADABLE = "unreadable"
    LATE = "late"


class ServerError(Exception):
    """A request has no complete answer. The message names the server and the reason."""

    def __init__(self, trouble: Trouble, words: str, status: int | None = None) -> None:
        super().__init__(words)
        self.trouble = trouble
        self.status = status
        """HTTP status of a refusal."""
        self.request_id = ""


@dataclass(frozen=True)
class CanaryReply:
    """A complete answer to a canary."""

    output: Output
    request_id: str
    prompt_tokens: int | None
    """Length of the prompt as the server counts it; None if it does not report it."""
    served_by: dict[str, str]
    """Headers of the answer that name engines, if the server sends any."""


@dataclass(frozen=True)
class Sampling:
    """The fields that all requests of a run share."""

    model: str
    max_tokens: int

    def body(self, canary: Canary, *, stream: bool) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": canary.prompt}
        if canary.route is Route.CHAT:
            prompt = {"messages": [{"role": "user", "content": canary.prompt}]}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "seed": 0,
            # Without these two of vLLM's fields an answer may end early, and is compared by its text.
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }


@dataclass(frozen=True)
class VerifiedServer:
    """A router or an engine. Used within the client's event loop."""

    url: str
    client: EngineClient
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 120.0
    """Time limit for one answer, in seconds."""

    async def answer(self, path: str, body: Mapping[str, Any], request_id: str) -> CanaryReply:
        """Sends one canary and returns its answer. ServerError: it is not complete."""
        headers = {**self.headers, "content-type": "application/json", "x-request-id": request_id}
        parts = _Parts()
        async with self._open("POST", path, body, headers, self.timeout, LONGEST_ANSWER) as (
            chunks,
            served_by,
        ):
            if body["stream"]:
                events = Events()
                async for chunk in chunks:
                    for event in events.feed(chunk):
                        self._take(parts, event)
            else:
                self._take(parts, b"".join([chunk async for chunk in chunks]))
        if not parts.finished:
            raise ServerError(Trouble.BROKEN, f"{self.url}: the answer ended without a finish_reason")
        return CanaryReply(parts.output(), request_id, parts.prompt_tokens, served_by)

    def _take(self, parts: _Parts, data: bytes) -> None:
        try:
            parts.take(msgspec.json.decode(data, type=_Body))
        except UNREADABLE as error:
            raise ServerError(
                Trouble.UNREADABLE, f"{self.url}: the answer is not a completion ({error}): {_shown(data)}"
            ) from None
        if parts.error is not None:
            raise ServerError(Trouble.BROKEN, f"{self.url}: error in the answer: {_shown(parts.error)}")

    async def page(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Returns a page: GET, or POST of `body`. ServerError: the server has none."""
        method = "GET" if body is None else "POST"
        headers = {**self.headers, "content-type": "application/json"}
        async with self._open(method, path, body, headers, PAGE_SECONDS, LONGEST_PAGE) as (chunks, _):
            return b"".join([chunk async for chunk in chunks])

    async def decoded(self, path: str, kind: Any, body: Mapping[str, Any] | None = None) -> Any:
        """Returns a page as an object of this type. ServerError: it has another shape."""
        data = await self.page(path, body)
        try:
            return msgspec.json.decode(data, type=kind)
        except UNREADABLE as error:
            raise ServerError(
                Trouble.UNREADABLE, f"{self.url}{path} is not what was expected ({error}): {_shown(data)}"
            ) from None

    async def models(self) -> dict[str, int | None]:
        """Returns the served models, with their longest sequence in tokens if the server reports it."""
        listed: _Models = await self.decoded("/v1/models", _Models)
        return {one.id: one.max_model_len for one in islice(listed.data, _MOST_MODELS)}

    async def tokenize(self, model: str, text: str, *, special: bool) -> tuple[int, ...]:
        """Returns the tokens of a text. `special`: with the model's token for the beginning."""
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        tokens: _Tokens = await self.decoded("/tokenize", _Tokens, body)
        return tuple(tokens.tokens)

    async def metrics(self) -> list[Metric]:
        """Returns the server's Prometheus metrics."""
        data = await self.page("/metrics")
        try:
            return list(text_string_to_metric_families(data.decode()))
        except ValueError as error:
            raise ServerError(Trouble.UNREADABLE, f"{self.url}/metrics: {error}") from None

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        seconds: float,
        longest: int,
    ) -> AsyncIterator[tuple[AsyncIterator[bytes], dict[str, str]]]:
        """Yields the bytes of an answer, bounded in time and size, and its headers that name engines.

        ServerError: it has another status than 200, or breaks off, also within the block.
        """
        url = self.url + path
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(seconds),
                self.client.stream(method, url, data, headers) as response,
            ):
                chunks = _bounded(response, url, longest)
                if response.status != 200:
                    start = b"".join([chunk async for chunk in chunks])
                    words = f"{url} answered {response.status}: {_shown(start)}"
                    raise ServerError(Trouble.REFUSED, words, response.status)
                yield chunks, _served_by(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerError(Trouble.UNREACHABLE, f"{url}: no connection ({error or 'timeout'})") from None
        except TimeoutError:
            raise ServerError(Trouble.LATE, f"{url}: no complete answer within {seconds:g} s") from None
        except HttpError as error:
            words = f"{url}: the connection broke ({type(error).__name__}: {error})"
            raise ServerError(Trouble.BROKEN, words) from None
        except Failure as error:  # its text is for the router's clients
            words = f"{url}: this command has no socket left ({error.__cause__}). Raise its limit (ulimit -n)"
            raise ServerError(Trouble.UNREACHABLE, words) from None


async def _bounded(response: aiohttp.ClientResponse, url: str, longest: int) -> AsyncIterator[bytes]:
    left = longest
    async for chunk in response.content.iter_any():
        left -= len(chunk)
        if left < 0:
            raise ServerError(Trouble.UNREADABLE, f"{url}: the answer is longer than {longest >> 20} MiB")
        yield chunk


def _served_by(response: aiohttp.ClientResponse) -> dict[str, str]:
    """Returns headers by which routers name the engines of a request."""
    named = ((name, value) for name, value in response.headers.items() if _NAMES_ENGINES.search(name))
    return {name: _shown(value.encode()) for name, value in islice(named, _MOST_HEADERS)}


def _shown(data: bytes | msgspec.Raw) -> str:
    """Returns the beginning of a server's own words, without control characters."""
    text = bytes(data)[:_SHOWN].decode(errors="replace")
    return "".join(char if char.isprintable() else " " for char in text) or "(empty)"


# --- The shape of the answers


class _Candidate(msgspec.Struct):
    logprob: float


class _Logged(msgspec.Struct):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    """Candidates of each token: `top_logprobs` of a completion, `content` of a chat completion."""

    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_Logged] | None = None

    def margins(self) -> list[float | None]:
        rows: list[Sequence[float]] = [list((row or {}).values()) for row in self.top_logprobs or ()]
        rows += [[one.logprob for one in row.top_logprobs] for row in self.content or ()]
        return [_margin(row) for row in rows]


def _margin(candidates: Sequence[float]) -> float | None:
    if len(candidates) < 2:
        return None
    best, second = sorted(candidates, reverse=True)[:2]
    return best - second


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Parts:
    """The pieces of one answer, as they arrive."""

    def __init__(self) -> None:
        self.finished = False
        self.prompt_tokens: int | None = None
        self.error: msgspec.Raw | None = None
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._counted = True  # every piece with text had token ids
        self._margins: list[float | None] = []

    def take(self, body: _Body) -> None:
        if bytes(body.error) != b"null":
            self.error = body.error
        if body.usage is not None and body.usage.prompt_tokens is not None:
            self.prompt_tokens = body.usage.prompt_tokens
        for choice in body.choices:
            message = choice.message or choice.delta or _Message()
            # Servers with a reasoning parser send the answer's first part in another field.
            pieces = (choice.text, message.reasoning or message.reasoning_content, message.content)
            text = "".join(piece for piece in pieces if piece)
            self._text.append(text)
            if choice.token_ids is not None:
                self._tokens += choice.token_ids
            elif text:
                self._counted = False
            if choice.logprobs is not None:
                self._margins += choice.logprobs.margins()
            self.finished |= choice.finish_reason is not None

    def output(self) -> Output:
        tokens = tuple(self._tokens) if self._counted and self._tokens else None
        # Candidates of a part of the tokens only cannot be assigned.
        margins = tuple(self._margins) if tokens is not None and len(self._margins) == len(tokens) else ()
        return Output("".join(self._text), tokens, margins)
