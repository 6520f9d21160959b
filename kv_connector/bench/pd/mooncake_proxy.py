"""The request flow that MooncakeConnector expects: both engines at the same time, paired by a transfer id.

The decode engine receives the address of the prefill engine's bootstrap server and the id of the engine
behind it.
"""

import argparse
import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

logger = logging.getLogger(__name__)


class Proxy:
    """One prefill engine and one decode engine. Used from the event loop's thread only."""

    def __init__(self, prefill: str, decode: str, bootstrap: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self._prefill_url, self._decode_url, self._bootstrap = prefill, decode, bootstrap
        self._prefills: set[asyncio.Task[None]] = set()
        self._engine_id: str | None = None

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def health(self, _: Request) -> Response:
        return Response()

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        transfer_id = uuid.uuid4().hex
        prefill = asyncio.create_task(self._prefill(request.url.path, body, transfer_id))
        self._prefills.add(prefill)
        prefill.add_done_callback(self._prefills.discard)
        pull = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self._bootstrap,
            "remote_engine_id": await self._engine(),
            "transfer_id": transfer_id,
        }
        decode = self._client.build_request(
            "POST", self._decode_url + request.url.path, json={**body, "kv_transfer_params": pull}
        )
        answer = await self._client.send(decode, stream=True)
        if answer.status_code != 200:
            detail = await answer.aread()
            return JSONResponse({"error": detail.decode(errors="replace")}, answer.status_code)
        return StreamingResponse(_relay(answer), media_type=answer.headers.get("content-type"))

    async def _engine(self) -> str:
        if self._engine_id is None:
            engines: dict[str, Any] = (await self._client.get(f"{self._bootstrap}/query")).json()
            self._engine_id = str(next(iter(engines.values()))["engine_id"])
        return self._engine_id

    async def _prefill(self, path: str, body: dict[str, Any], transfer_id: str) -> None:
        push = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        body = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": push}
        try:
            answer = await self._client.post(self._prefill_url + path, json=body)
        except httpx.HTTPError as error:
            # The restarted prefill engine has another id.
            self._engine_id = None
            logger.error("prefill engine: request failed: %s: %s", type(error).__name__, error)
            return
        if answer.status_code != 200:
            logger.error("prefill engine: answered %d: %s", answer.status_code, answer.text[:500])


async def _relay(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("prefill", "decode", "bootstrap"):
        parser.add_argument(f"--{name}", required=True, metavar="URL")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    proxy = Proxy(arguments.prefill, arguments.decode, arguments.bootstrap)
    app = Starlette(
        routes=[
            Route("/v1/completions", proxy.completions, methods=["POST"]),
            Route("/health", proxy.health),
        ],
        lifespan=proxy.lifespan,
    )
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
