"""A server of completions that a test makes up."""

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
    """A server on a free port that answers completions, and `more` at their names; yields its URL."""
    routes = [Route("/v1/completions", completions, methods=["POST"])]
    routes += [Route(f"/{name}", handler) for name, handler in more.items()]
    async with serve(Starlette(routes=routes)) as url:
        yield url
