"""A server of completions whose answers the test defines."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from router_setup import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


@contextlib.asynccontextmanager
async def serving(completions: Handler, **more: Handler) -> AsyncIterator[str]:
    """Runs a server on a free port with a handler for completions and `more` handlers by name. Yields its
    URL."""
    routes = [Route("/v1/completions", completions, methods=["POST"])]
    routes += [Route(f"/{name}", handler) for name, handler in more.items()]
    async with serve(Starlette(routes=routes)) as url:
        yield url
