"""A complete stream leaves no object to the garbage collector, whose pauses hold all other streams."""

import gc
import weakref
from typing import Any

import pytest
from router_setup import answer_ok, cluster, streaming, until_metric

from kv_connector.router.front import app, router_app
from kv_connector.router.front.app import DONE
from kv_connector.router.observe.access_log import Exchange

pytestmark = pytest.mark.anyio

EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'


@pytest.mark.parametrize("comments", [None, 60.0])
async def test_complete_stream_leaves_no_garbage(
    monkeypatch: pytest.MonkeyPatch, comments: float | None
) -> None:
    begun: list[weakref.ref[Any]] = []
    begin = router_app.begin_exchange

    class Answering(app._Answering):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begun.append(weakref.ref(self))

    def begin_exchange(*args: Any) -> Exchange:
        exchange = begin(*args)
        begun.append(weakref.ref(exchange))
        return exchange

    async with cluster(answer_ok, streaming(EVENT, EVENT, DONE), stream_comments=comments) as (_, _, client):
        body = {"prompt": "x", "stream": True}
        await client.post("/v1/completions", json=body)  # imports, and opens connections
        with monkeypatch.context() as patched:
            patched.setattr(app, "_Answering", Answering)
            patched.setattr(router_app, "begin_exchange", begin_exchange)
            gc.disable()
            try:
                answer = await client.post("/v1/completions", json=body)
                assert answer.content == EVENT + EVENT + DONE
                of_stream = list(begun)
                # The server keeps a connection's latest request until the next.
                await until_metric(client, "kv_connector_router_in_flight", 0)
                assert [one() for one in of_stream] == [None, None]
            finally:
                gc.enable()
