"""FakeVllm: an engine with vLLM's HTTP interface. Each output token follows from all tokens before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from router_setup import FakeEngine, serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "m"
LENGTH = 400


class Died(Exception):
    """The stand-in for a killed process: its connections break."""


def next_token(ids: list[int]) -> int:
    return (sum(ids) * 7 + len(ids) * 13) % 97 + 1


def ids_of(prompt: Any) -> list[int]:
    """Returns the token ids of a prompt or of a chat's messages."""
    return (
        prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else [*json.dumps(prompt).encode()]
    )


class Detokenizer:
    """Detokenizes each token as its number. Every fifth token produces no text until the next one, like a
    part of a character."""

    def __init__(self) -> None:
        self._held = ""

    def text(self, token: int, *, last: bool) -> str:
        self._held += f"{token},"
        if token % 5 == 0 and not last:
            return ""
        text, self._held = self._held, ""
        return text


class MarkDetokenizer(Detokenizer):
    """Ends each token's text with what may begin a mark. Of every fifth token it holds that back, as parsers
    of vLLM's chats do."""

    def text(self, token: int, *, last: bool) -> str:
        text, self._held = f"{self._held}{token}<", ""
        if token % 5 == 0 and not last:
            text, self._held = text[:-1], "<"
        return text


class FakeVllm(FakeEngine):
    """A fake engine whose streams stop after ``limits[0]`` tokens until ``go`` is set, and for good after
    ``limits[1]``."""

    def __init__(self, created: int) -> None:
        super().__init__(self.answer)
        self.created = created
        self.limits = LENGTH, LENGTH
        self.go = asyncio.Event()
        self.an_event = 1
        """Tokens of a stream in each event. More than one: speculative decoding."""
        self.killed = asyncio.Event()
        """Set: its streams break, and it breaks off each request."""
        self.pace = 0.0
        """Seconds per token."""
        self.refuses: int | None = None
        """HTTP status of each refusal. None: requests are accepted."""
        self.dies_behind: int | None = None
        """Tokens of a stream after which the engine dies, -1: before its answer. None: it does not die."""
        self.reports = False
        """Whether it reports its death within the stream, as a server does whose engine core dies."""
        self.marks = False
        """Whether texts are those of MarkDetokenizer."""
        self.hides = False
        """Whether it hides the token ids of answers, as vLLM does with the reasoning."""
        self.disowned = 0
        """Requests that asked this engine to disown a transfer at P."""
        self.said = 0
        """Tokens of streams that were sent."""
        self.closed = 0
        """Streams that the router closed before their end."""
        self.app.router.routes.insert(0, Route("/v1/models", self.models))
        self.app.router.routes.insert(0, Route("/detokenize", self.detokenize, methods=["POST"]))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "adapter"}, {"id": MODEL, "max_model_len": LENGTH}]})

    async def detokenize(self, request: Request) -> Response:
        tokens = (await request.json())["tokens"]
        if self.marks:
            return JSONResponse({"prompt": "".join(f"{token}<" for token in tokens)})
        return JSONResponse(
            {"prompt": "".join("\ufffd" if token % 5 == 0 else f"{token}," for token in tokens)}
        )

    async def step(self, said: int) -> None:
        """Runs before each token."""
        if said == self.dies_behind:
            raise Died
        if said >= self.limits[0]:
            await self._until(self.go)
        if said >= self.limits[1]:
            await self._until(asyncio.Event())
        if self.killed.is_set():
            raise Died
        await asyncio.sleep(self.pace)

    async def _until(self, event: asyncio.Event) -> None:
        """Waits until the event, or until the engine is killed."""
        waits = [asyncio.ensure_future(one.wait()) for one in (event, self.killed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def answer(self, request: Request, body: dict[str, Any]) -> Response:
        if body.get("model", MODEL) != MODEL:
            self.bodies.remove(body)
            self.disowned += 1
            return JSONResponse({"error": {"message": "no such model", "code": 404}}, 404)
        if self.refuses:
            return JSONResponse({"error": {"message": "no", "code": self.refuses}}, self.refuses)
        if body.get("stream"):
            if self.dies_behind is not None and self.dies_behind < 0:
                raise Died
            stream = self.stream(request, body)
            return StreamingResponse(stream, media_type="text/event-stream")
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return JSONResponse({"choices": [], "kv_transfer_params": {"from": "p"}})
        ids = self.ids(request, body)
        left, text = self.left(request, body, ids), Detokenizer()
        said = ""
        if self.limits[0] < LENGTH:
            await self._until(self.go)
        if self.killed.is_set():
            raise Died
        prompt = len(ids)
        while left:
            left -= 1
            ids.append(next_token(ids))
            said += text.text(ids[-1], last=not left)
        wants, chat = body.get("return_token_ids"), self.is_chat(request)
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, **({"message": message} if chat else {"text": said})}
        choice |= {"finish_reason": "length", "token_ids": ids[prompt:] if wants and not self.hides else None}
        asked = {"prompt_token_ids": ids[:prompt] if wants else None}
        return JSONResponse({"choices": [choice | ({} if chat else asked)], **(asked if chat else {})})

    def ids(self, request: Request, body: dict[str, Any]) -> list[int]:
        return list(ids_of(body["messages"] if self.is_chat(request) else body["prompt"]))

    def ids_of_body(self, path: str, body: dict[str, Any]) -> list[int]:
        return ids_of(body.get("messages") or body["prompt"])

    def is_chat(self, request: Request) -> bool:
        return request.url.path == "/v1/chat/completions"

    def left(self, request: Request, body: dict[str, Any], ids: list[int]) -> int:
        limit = body.get("max_tokens", None if self.is_chat(request) else 16)
        limit = body.get("max_completion_tokens", limit)
        assert limit is not None or self.is_chat(request)  # as in vLLM
        assert limit is None or limit <= LENGTH
        return min(LENGTH - len(ids), LENGTH if limit is None else limit)

    async def stream(self, request: Request, body: dict[str, Any]) -> AsyncIterator[bytes]:
        chat, ids, wants = self.is_chat(request), self.ids(request, body), body.get("return_token_ids")
        prompt, options = len(ids), body.get("stream_options") or {}
        name = request.headers["x-request-id"]
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.created,
            "model": MODEL,
        }
        counts = lambda: {  # noqa: E731
            "prompt_tokens": prompt,
            "completion_tokens": len(ids) - prompt,
            "total_tokens": len(ids),
        }
        each = (lambda: {"usage": counts()}) if options.get("continuous_usage_stats") else dict
        left, done = self.left(request, body, ids), False
        text = MarkDetokenizer() if self.marks else Detokenizer()
        asked = list(ids) if wants else None
        logprobs: dict[str, Any] | None = {"content": []} if body.get("logprobs") else None
        try:
            if chat:
                choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
                choice |= {"logprobs": None, "finish_reason": None}
                await self.step(0)
                yield _event(head | {"choices": [choice], "prompt_token_ids": asked} | each())
            while left:
                said, begin = "", len(ids)
                while left and len(ids) < begin + self.an_event:
                    await self.step(len(ids) - prompt)
                    left -= 1
                    ids.append(next_token(ids))
                    self.said += 1
                    said += text.text(ids[-1], last=not left)
                finish = None if left else "length"
                token = ids[begin:] if wants and not self.hides else None
                if chat:
                    delta: dict[str, Any] = {"content": said}
                    if body.get("tools"):
                        call = {"index": 0, "function": {"name": None, "arguments": said}}
                        delta = {"tool_calls": [call]} if said else {}
                    if not (delta or wants or logprobs or not left):
                        continue
                    choice = {"index": 0, "delta": delta, "logprobs": logprobs}
                    choice |= {"finish_reason": finish, **({} if left else {"stop_reason": None})}
                    choice |= {"token_ids": token}
                else:
                    choice = {"index": 0, "text": said, "logprobs": None, "finish_reason": finish}
                    choice |= {"stop_reason": None, "prompt_token_ids": asked, "token_ids": token}
                    asked = None
                yield _event(head | {"choices": [choice]} | each())
            if options.get("include_usage"):
                usage = counts() | {"prompt_tokens_details": {"cached_tokens": prompt - 1}}
                yield _event(head | {"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            done = True
        except Died:
            if not self.reports:
                raise
            yield _event(
                {"error": {"message": "EngineCore died.", "type": "InternalServerError", "code": 500}}
            )
            yield b"data: [DONE]\n\n"
        finally:
            self.closed += not done


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def serve_vllm(created: int) -> AsyncIterator[FakeVllm]:
    engine = FakeVllm(created)
    async with serve(engine.app) as engine.url:
        yield engine
