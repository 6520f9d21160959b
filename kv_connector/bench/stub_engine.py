"""An engine that computes nothing and answers completions at once, so that only the router's share is
measured.

`--status 500` refuses each completion with that status. `--tokens 100 --pause 0.02` answers with 100 events
in two seconds.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS = 8
_LARGE = 1 << 20
# As vLLM writes it, if token ids are requested.
_EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1764400000,"model":"m","choices":[{"index":0,'
    b'"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[97],'
    b'"prompt_token_ids":null}]}\n\n'
)


async def complete(request: Request) -> Response:
    # Large bodies are neither kept nor parsed: an engine's API server shares no processor with the router.
    raw = bytearray()
    async for chunk in request.stream():
        if len(raw) < _LARGE:
            raw += chunk
    body = msgspec.json.decode(raw) if len(raw) < _LARGE else {}
    if (status := request.app.state.status) != 200:
        return JSONResponse({"error": {"message": "refused by a stub", "code": status}}, status)
    if body.get("stream"):
        tokens = _tokens(request.app.state.tokens, request.app.state.pause)
        return StreamingResponse(tokens, media_type="text/event-stream")
    return JSONResponse({"choices": [{"index": 0, "text": "a"}], "kv_transfer_params": {}})


async def _tokens(tokens: int, pause: float) -> AsyncIterator[bytes]:
    for _ in range(tokens):
        yield _EVENT
        if pause:
            await asyncio.sleep(pause)
    yield b"data: [DONE]\n\n"


async def health(_: Request) -> Response:
    return Response()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--port", type=int, required=True)
    logging.basicConfig(level=logging.WARNING)
    arguments.add_argument("--status", type=int, default=200)
    arguments.add_argument("--tokens", type=int, default=TOKENS)
    arguments.add_argument("--pause", type=float, default=0.0)
    given = arguments.parse_args()
    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)])
    app.state.status, app.state.tokens, app.state.pause = given.status, given.tokens, given.pause
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_config=None, access_log=False)


if __name__ == "__main__":
    main()
