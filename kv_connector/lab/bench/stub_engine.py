"""An engine that computes nothing and answers completions at once: what is left is the router's share."""

import argparse
import logging
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS = 8
_EVENT = b'data: {"choices": [{"index": 0, "text": "a", "token_ids": [97]}]}\n\n'


async def complete(request: Request) -> Response:
    body = await request.json()
    if body.get("stream"):
        return StreamingResponse(_tokens(), media_type="text/event-stream")
    return JSONResponse({"choices": [{"index": 0, "text": "a"}], "kv_transfer_params": {}})


async def _tokens() -> AsyncIterator[bytes]:
    for _ in range(TOKENS):
        yield _EVENT
    yield b"data: [DONE]\n\n"


async def health(_: Request) -> Response:
    return Response()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--port", type=int, required=True)
    logging.basicConfig(level=logging.WARNING)
    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)])
    port = arguments.parse_args().port
    uvicorn.run(app, host="127.0.0.1", port=port, log_config=None, access_log=False)


if __name__ == "__main__":
    main()
