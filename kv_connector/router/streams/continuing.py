"""Continuing: makes the request by which another engine continues a stream, and reads what that takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import msgspec

from kv_connector.router.bodies.fields import Content
from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.client import EngineReply
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.models import longest
from kv_connector.router.engines.pool import NoEngine, Pool
from kv_connector.router.failure import UNREADABLE, Failure, failure
from kv_connector.router.observe.access_log import Exchange
from kv_connector.router.requests.continuation import CHAT, PATHS, Continuation, tokens_left
from kv_connector.router.requests.early_token import MARKS
from kv_connector.router.requests.events import data_of
from kv_connector.router.streams.calls import Call
from kv_connector.router.streams.request import Request
from kv_connector.router.streams.running import Running

# A tokenizer's decoder returns this character if some of a character's bytes are missing.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# Longest wait for the text of token ids, as for a whole move. The client's stream pauses for it.
MAX_QUESTION_S = 5.0

Forward = Callable[[str, Call, Content], Awaitable[EngineReply]]
"""Returns the answer of any decode engine that serves the call's model."""


class Continuing:
    """Used from the event loop's thread only."""

    def __init__(self, pools: Mapping[Side, Pool], forward: Forward) -> None:
        self._pools = pools
        self._forward = forward

    async def of(
        self,
        request: Request,
        running: Running,
        ids: bytes,
        said: int,
        *,
        why: str,
        prompt: Prompt | None = None,
        resumes: bool = False,
    ) -> tuple[Continuation, Call]:
        """Returns the request for the rest of an answer, and the call for it; Failure if no decode engine
        reports its model's length, which a chat without a limit needs.

        ``running``: gets the progress. ``ids``: token ids of prompt and answer, of which the last ``said``
        are the answer's. ``why``: as of Continuation.late_reason(). ``prompt``: as of Continuation.of().
        ``resumes``: as of Call.
        """
        call = request.call
        # The first engine, and the prefill engine, already have a request with the original id.
        number = f"-{request.resumed}" if request.resumed else ""
        name = f"{call.request_id}-{why}{number}"
        headers = {**call.headers, "x-request-id": name}
        call = Call(PATHS[0], headers, name, call.model, running, resumes=resumes)
        left = tokens_left(request.call.path, request.completion, said)
        if left is None:
            left = await self._model_length(call)
        return Continuation.of(request.completion, ids, said, left, why=why, prompt=prompt), call

    async def text(self, request: Request, ids: bytes) -> str:
        """Returns the text of these token ids, by any decode engine. ContinuingError if it reports none."""
        question = b'{"model":%s,"tokens":[%s]}'
        body = question % (msgspec.json.encode(request.completion.body.get("model")), ids)
        try:
            async with asyncio.timeout(MAX_QUESTION_S):
                reply = await self._forward("POST", _question(request.call, "/detokenize"), body)
            return msgspec.json.decode(reply.body, type=_Detokenized).prompt
        except TimeoutError:
            raise ContinuingError(f"no answer at /detokenize within {MAX_QUESTION_S:g} s") from None
        except (Failure, *UNREADABLE) as error:
            raise ContinuingError(str(error)) from error

    async def held(self, request: Request) -> str:
        """Returns the text behind the latest place that a parser of the engine's server holds back; "" if
        that is nothing, or not known.

        In a chat, vLLM's parsers hold back what may begin a mark. Of the token ` <`, the client has a space.
        """
        running = request.running
        if request.call.path != CHAT or running.place is None:
            return ""
        token = bytes(running.ids[: running.place[0]]).rpartition(b",")[2]
        try:
            told = msgspec.json.decode(data_of(running.spoken), type=_ChatEvent).choices[0].delta.content
            text = await self.text(request, token)
        except (ContinuingError, *UNREADABLE, IndexError):
            return ""
        end = next(end for end in range(len(text), -1, -1) if told.endswith(text[:end]))
        # Tokenizers may write a token differently if it is alone.
        return text[end:] if text[end : end + 1] in MARKS else ""

    def other(self, request: Request, engine: Endpoint) -> Endpoint | None:
        """Returns a decode engine that may continue a stream of this engine; None: no other takes
        requests."""
        pool = self._pools[Side.DECODE]
        with contextlib.suppress(NoEngine):
            # If only an engine of other weights is left, that engine computes prompt and answer anew.
            other = pool.partner(pool, engine, (), pool.known(request.call.model))
            return None if other == engine else other
        return None

    async def _model_length(self, call: Call) -> int:
        """Returns the length of the model, in tokens.

        A completion must have a limit. vLLM subtracts the prompt's tokens from it.
        """
        reply = await self._forward("GET", _question(call, "/v1/models"), b"")
        if (length := longest(reply)) is not None:
            return length
        raise failure(502, "api_error", "a decode engine lists no max_model_len at /v1/models")


def _question(call: Call, path: str) -> Call:
    """Returns the call of a question about this request. The access log does not list its engine."""
    return replace(call, path=path, exchange=Exchange())


class ContinuingError(Exception):
    """An engine does not report the text of token ids."""


class _Delta(msgspec.Struct):
    content: str


class _ChatChoice(msgspec.Struct):
    delta: _Delta


class _ChatEvent(msgspec.Struct):
    """An event of a chat."""

    choices: list[_ChatChoice]


class _Detokenized(msgspec.Struct):
    """vLLM's answer at /detokenize."""

    prompt: str
