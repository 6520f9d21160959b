"""The router over real sockets: the fake engines and the router are servers on loopback."""

import asyncio
import json
import logging
import socket
from contextlib import AsyncExitStack
from typing import Any, cast

import httpx
import msgspec
import pytest
from router_setup import (
    FedStream,
    Rendezvous,
    answer_ok,
    client_of,
    cluster,
    metric,
    nobody,
    refuse,
    serve,
    serve_engine,
    until_metric,
    within,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kv_connector.router.engines.client import LOST_SECONDS, EngineClient
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Members
from kv_connector.router.engines.pool import NoEngine, Pool
from kv_connector.router.failure import Failure
from kv_connector.router.front.app import DONE, create_app
from kv_connector.router.requests.completion import Completion
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

FIRST_STEP = "kv_connector.router.streams.dispatch.Dispatcher._attempt"
EVENTS = "kv_connector.router.requests.events.EventStream"

# --- Dispatch


async def test_prefill_and_decode_are_dispatched_at_the_same_time() -> None:
    together = Rendezvous()
    async with cluster(together, together) as (p, d, client):
        answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 7})
        assert answer.status_code == 200
        assert answer.json()["choices"] == [{"text": "ok"}]
        assert len(p.bodies) == len(d.bodies) == 1


async def test_prefill_gets_one_token_and_decode_gets_the_request_with_the_control_address() -> None:
    request = {
        "prompt": "hello",
        "max_tokens": 7,
        "min_tokens": 3,
        "n": 2,
        "temperature": 0.5,
        "kv_transfer_params": {"remote_host": "evil", "remote_port": 1},
    }
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        await client.post("/v1/completions", json=request)
        (to_p,), (to_d,) = p.bodies, d.bodies
        transfer = to_p["kv_transfer_params"]["transfer_id"]
        assert len(transfer) == 32
        assert to_p == {
            "prompt": "hello",
            "max_tokens": 1,
            "temperature": 0.5,
            "stream": False,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer,
                "serial": False,
            },
        }
        assert to_d == request | {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer,
                "remote_host": "10.0.0.1",
                "remote_port": 5601,
                "remote_engine_id": None,
            }
        }


async def test_each_request_has_its_own_transfer() -> None:
    async with cluster(answer_ok, answer_ok) as (p, _, client):
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "hello"})
        first, second = (body["kv_transfer_params"]["transfer_id"] for body in p.bodies)
        assert first != second


async def test_prefill_engine_counts_as_free_once_it_has_answered() -> None:
    release = asyncio.Event()

    async def hold(request: Request, body: dict[str, Any]) -> Response:
        await within(release.wait())
        return await answer_ok(request, body)

    async with serve_engine(hold) as busy, serve_engine(answer_ok) as quick, serve_engine(answer_ok) as d:
        settings = RouterSettings(
            prefill=(Endpoint.parse(busy.url), Endpoint.parse(quick.url)), decode=(Endpoint.parse(d.url),)
        )
        async with (
            serve(create_app(settings)) as url,
            client_of(url) as client,
        ):
            for _ in range(3):
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
                # The prefill engine of the first request is still computing; the other requests are finished.
                await until_metric(client, "kv_connector_router_in_flight", 1)
            assert (len(busy.bodies), len(quick.bodies)) == (1, 2)
            release.set()
            await until_metric(client, "kv_connector_router_in_flight", 0)


async def test_listed_ranks_are_used_in_turn_each_with_its_own_pages() -> None:
    """The router sets the rank of each request. A client's header does not change it."""
    async with serve_engine(answer_ok) as p, serve_engine(answer_ok) as d:
        settings = RouterSettings(
            prefill=tuple(Endpoint.parse(f"{p.url}@10.0.0.1:{port}") for port in (5600, 5602)),
            decode=(Endpoint.parse(d.url),) * 2,
        )
        async with (
            serve(create_app(settings)) as url,
            client_of(url) as client,
        ):
            for _ in range(4):
                headers = {"X-data-parallel-rank": "7"}
                answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
                assert answer.status_code == 200
            assert list((await client.get("/health")).json()["decode"]) == [d.url, f"{d.url} rank 1"]
    assert [headers["x-data-parallel-rank"] for headers in p.headers] == ["0", "1"] * 2
    assert [headers["x-data-parallel-rank"] for headers in d.headers] == ["0", "1"] * 2
    assert [body["kv_transfer_params"]["remote_port"] for body in d.bodies] == [5600, 5602] * 2


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_rank_that_an_engine_lacks_is_no_fault_of_the_request(side: str, stream: bool) -> None:
    """The messages are those of vLLM's input_processor.py."""

    async def one_rank(request: Request, body: dict[str, Any]) -> Response:
        if (rank := request.headers["x-data-parallel-rank"]) != "0":
            message = f"data_parallel_rank {rank} is out of range [0, 1)."
            return JSONResponse({"error": {"message": message, "type": "BadRequestError"}}, 400)
        return await answer_ok(request, body)

    handlers = {"prefill": answer_ok, "decode": answer_ok} | {side: one_rank}
    async with serve_engine(handlers["prefill"]) as p, serve_engine(handlers["decode"]) as d:
        endpoints: dict[str, Any] = {"prefill": (Endpoint.parse(p.url),), "decode": (Endpoint.parse(d.url),)}
        url = endpoints[side][0].url
        endpoints[side] = tuple(Endpoint.parse(f"{url}@10.0.0.1:{port}") for port in (5600, 5602))
        async with (
            # Serial, because the fake decode engine does not wait for pages, as a real one does.
            serve(create_app(RouterSettings(**endpoints, dispatch="serial"))) as address,
            client_of(address) as client,
        ):
            for _ in range(8):
                answer = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
                assert answer.status_code == 200
            states = (await client.get("/health")).json()[side]
            assert states == {url: "ready", f"{url} rank 1": "failing"}
            shown = (await client.get("/status.json")).json()["failures"]
            assert [one["what"] for one in shown if one["engine"] == f"{side} 2"][-1] == "answers 502"


async def test_a_400_of_another_cause_is_the_requests_fault() -> None:
    async def refuse(request: Request, body: dict[str, Any]) -> Response:
        message = "1 validation error: 'data_parallel_rank 1 is out of range'"
        return JSONResponse({"error": {"message": message, "type": "BadRequestError"}}, 400)

    async with serve_engine(answer_ok) as p, serve_engine(refuse) as d:
        settings = RouterSettings((Endpoint.parse(p.url),), (Endpoint.parse(d.url),) * 2)
        async with (
            serve(create_app(settings)) as url,
            client_of(url) as client,
        ):
            for _ in range(2):
                assert (await client.post("/v1/completions", json={"prompt": ["x", "y"]})).status_code == 400
    assert len(d.bodies) == 2


async def test_locally_prefilled_request_goes_to_the_chosen_rank() -> None:
    async with cluster(answer_ok, answer_ok) as (_, d, client):
        await client.post("/v1/completions", json={"prompt": ["x", "y"]})
        assert d.headers[0]["x-data-parallel-rank"] == "0"


async def test_chat_for_prefill_has_both_names_of_the_limit_set() -> None:
    request = {
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 9,
    }
    stream = FedStream()
    stream.queue.put_nowait(b"data: x\n\n")
    stream.queue.put_nowait(None)
    async with cluster(answer_ok, stream) as (p, d, client):
        await client.post("/v1/chat/completions", json=request)
        (to_p,), (to_d,) = p.bodies, d.bodies
        assert (to_p["max_tokens"], to_p["max_completion_tokens"], to_p["stream"]) == (1, 1, False)
        assert "stream_options" not in to_p
        assert to_d["stream_options"] == {"include_usage": True}
        assert to_d["max_completion_tokens"] == 9


async def test_serial_dispatch_passes_the_prefill_answer_to_decode() -> None:
    async with cluster(answer_ok, answer_ok, dispatch="serial") as (p, d, client):
        answer = await client.post("/v1/completions", json={"prompt": "hello"})
        assert answer.status_code == 200
        assert p.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
        assert d.bodies[0]["kv_transfer_params"] == {"do_remote_prefill": True, "from": "p"}


async def test_serial_dispatch_waits_for_prefill() -> None:
    release = asyncio.Event()

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        await within(release.wait())
        return await answer_ok(request, body)

    async with cluster(prefill, answer_ok, dispatch="serial") as (p, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hello"}))
        await within(p.arrived.wait())
        assert not d.bodies
        release.set()
        assert (await asking).status_code == 200
        assert len(d.bodies) == 1


async def test_serial_dispatch_refuses_to_prefill_twice() -> None:
    async def no_params(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse({"choices": [{"text": "ok"}], "kv_transfer_params": None})

    async with cluster(no_params, answer_ok, dispatch="serial") as (p, d, client):
        answer = await client.post("/v1/completions", json={"prompt": "hello"})
        assert answer.status_code == 502
        assert p.url in answer.json()["error"]["message"]
        assert "--kv-transfer-config" in answer.json()["error"]["message"]
        assert not d.bodies


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        ({"prompt": ["one", "two"]}, "several_prompts"),
        ({"prompt": [[1, 2], [3]]}, "several_prompts"),
        ({"prompt": "one", "prompt_embeds": "AAAA"}, "several_prompts"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt_embeds": ["AAAA"], "prompt": ""}, "prompt_embeds"),
        ({"prompt": "one", "use_beam_search": True, "n": 2}, "beam_search"),
        ({"prompt": "one", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "one", "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_request_that_cannot_be_shared_is_prefilled_by_decode(
    request_body: dict[str, Any], reason: str
) -> None:
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        answer = await client.post("/v1/completions", json=request_body | {"kv_transfer_params": {"a": 1}})
        assert answer.status_code == 200
        assert not p.bodies
        assert d.bodies == [request_body]
        assert await metric(client, f'kv_connector_router_local_prefills_total{{reason="{reason}"}}') == 1


@pytest.mark.parametrize("prompt", ["one", ["one"], [1, 2, 3], [[1, 2, 3]], []])
def test_a_single_prompt_is_shared(prompt: object) -> None:
    assert Completion.decode(msgspec.json.encode({"prompt": prompt})).local_reason() is None


def test_a_prompt_is_passed_on_as_it_came() -> None:
    prompt = b"[1,  12345678901234567890, 3 ]"
    completion = Completion.decode(b'{"model": "m", "prompt": ' + prompt + b', "n": 1}')
    assert prompt in cast(bytes, completion.prefill_body("t", serial=False))
    assert prompt in cast(bytes, completion.decode_body({}))
    assert prompt in cast(bytes, completion.local_body())


async def test_undecodable_answer_of_prefill_is_a_prefill_failure() -> None:
    async def garbled(request: Request, body: dict[str, Any]) -> Response:
        return Response(b'{"kv_transfer_params": {"a": "\xff"}}', media_type="application/json")

    async with cluster(garbled, answer_ok, dispatch="serial") as (p, _, client):
        answer = await client.post("/v1/completions", json={"prompt": [1]})
        assert answer.status_code == 502
        assert p.url in answer.json()["error"]["message"]
        line = f'kv_connector_router_failures_total{{engine="{p.url}",side="prefill"}}'
        assert await metric(client, line) == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_router_fault_is_reported_and_counted_as_a_router_fault(
    begun: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fault(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("where nobody looked")

    monkeypatch.setattr(
        "kv_connector.router.requests.events.EventStream.read" if begun else FIRST_STEP, fault
    )
    event = b'data: {"choices": [{"text": "a"}]}\n\n'

    async def opening(_: object) -> bytes:
        return event

    monkeypatch.setattr(EVENTS + ".opening", opening)
    stream = FedStream()
    async with cluster(answer_ok, stream) as (_, _, client):
        stream.queue.put_nowait(event)
        request = {"prompt": [1], "stream": True}
        answer = await client.post("/v1/completions", json=request, headers={"X-Request-Id": "mine-1"})
        assert answer.status_code == (200 if begun else 500)
        assert answer.headers["x-request-id"] == "mine-1"
        last = answer.content.removeprefix(event + b"data: ") if begun else answer.content
        if begun:
            assert last.endswith(DONE)
        assert "mine-1" in json.loads(last.removesuffix(DONE))["error"]["message"]
        line = 'kv_connector_router_requests_total{route="/v1/completions",status="500"}'
        await until_metric(client, line, 1)
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert "mine-1" in logged.getMessage()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{\n  "error": {\n    "message": "no"\n  }\n}', "no"),
        (b"Internal Server Error\nsee the log", "Internal Server Error\nsee the log"),
        (b"", ""),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_failure_is_one_event_whatever_its_message(body: bytes, message: str) -> None:
    data, end, rest = Failure(500, body).event().partition(b"\n")
    assert (end, rest) == (b"\n", b"\n")
    assert json.loads(data.removeprefix(b"data: "))["error"]["message"] == message


# --- Headers


async def test_both_engines_get_the_clients_request_id_and_key() -> None:
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        headers = {"X-Request-Id": "mine-1", "Authorization": "Bearer key", "Cookie": "secret"}
        answer = await client.post("/v1/completions", json={"prompt": "hello"}, headers=headers)
        assert answer.headers["x-request-id"] == "mine-1"
        for got in (p.headers[0], d.headers[0]):
            assert got["x-request-id"] == "mine-1"
            assert got["authorization"] == "Bearer key"
            assert "cookie" not in got


async def test_without_a_usable_request_id_both_engines_get_the_same_new_one() -> None:
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        answer = await client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "x" * 129}
        )
        made = answer.headers["x-request-id"]
        assert p.headers[0]["x-request-id"] == d.headers[0]["x-request-id"] == made
        assert len(made) == 32


# --- Streaming


async def test_chunks_pass_through_one_by_one() -> None:
    stream = FedStream()
    async with cluster(answer_ok, stream) as (_, _, client):
        stream.queue.put_nowait(b"data: 1\n\n")
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            chunks = answer.aiter_raw()
            assert await within(anext(chunks)) == b"data: 1\n\n"
            # The engine sends the next event only now. A router that waits for more would have hung above.
            stream.queue.put_nowait(DONE)
            assert await within(anext(chunks)) == DONE
            stream.queue.put_nowait(None)
            assert [chunk async for chunk in chunks] == []
        assert await metric(client, "kv_connector_router_first_byte_seconds_count") == 1


async def test_status_waits_for_the_first_byte_so_that_a_prefill_error_can_be_reported() -> None:
    fail = asyncio.Event()
    stream = FedStream()

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        await within(fail.wait())
        return JSONResponse({"error": {"message": "too long"}}, 400)

    async with cluster(prefill, stream) as (_, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
        await within(d.arrived.wait())
        fail.set()
        answer = await asking
        assert answer.status_code == 400
        assert answer.json() == {"error": {"message": "too long"}}
        await within(stream.aborted.wait())


async def test_prefill_that_never_answers_is_left_once_decode_has_answered() -> None:
    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        return await p.until_gone(request)

    async with cluster(prefill, answer_ok, patience=0.1) as (p, _, client):
        answer = await within(client.post("/v1/completions", json={"prompt": "x"}))
        assert answer.status_code == 200
        await within(p.aborted.wait())
        await until_metric(client, "kv_connector_router_in_flight", 0)


async def test_decode_continues_when_prefill_fails_after_the_first_byte() -> None:
    fail = asyncio.Event()
    stream = FedStream()

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        await within(fail.wait())
        return JSONResponse({"error": {"message": "late"}}, 500)

    async with cluster(prefill, stream) as (p, _, client):
        stream.queue.put_nowait(b"data: 1\n\n")
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            chunks = answer.aiter_raw()
            assert await within(anext(chunks)) == b"data: 1\n\n"
            fail.set()
            failures = f'kv_connector_router_failures_total{{engine="{p.url}",side="prefill"}}'
            await until_metric(client, failures, 1)
            stream.queue.put_nowait(b"data: 2\n\n")
            assert await within(anext(chunks)) == b"data: 2\n\n"
            stream.queue.put_nowait(None)


async def test_broken_decode_stream_ends_with_an_error_event() -> None:
    stream = FedStream()
    async with cluster(answer_ok, stream) as (_, d, client):
        stream.queue.put_nowait(b"data: 1\n\n")
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            chunks = answer.aiter_raw()
            assert await within(anext(chunks)) == b"data: 1\n\n"
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            stream.queue.put_nowait(b'data: {"half of')
            stream.queue.put_nowait(RuntimeError("the engine broke"))
            last = b"".join([chunk async for chunk in chunks])
        assert last.startswith(b"data: {")
        assert last.endswith(DONE)
        error = json.loads(last.removeprefix(b"data: ").removesuffix(DONE))["error"]
        assert d.url in error["message"]


# --- Errors


async def test_prefill_error_is_the_answer_and_decode_is_aborted() -> None:
    async def decode(request: Request, body: dict[str, Any]) -> Response:
        return await d.until_gone(request)

    async with cluster(refuse(500, "P is out of memory"), decode) as (_, d, client):
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500
        assert answer.json() == {"error": {"message": "P is out of memory"}}
        await within(d.aborted.wait())


async def test_decode_error_is_the_answer_and_prefill_is_aborted() -> None:
    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        return await p.until_gone(request)

    async with cluster(prefill, refuse(400, "context too long")) as (p, d, client):
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 400
        assert answer.json() == {"error": {"message": "context too long"}}
        await within(p.aborted.wait())
        assert (
            await metric(client, f'kv_connector_router_failures_total{{engine="{d.url}",side="decode"}}') == 1
        )


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_an_engine_that_is_down_is_named(side: str, dispatch: str) -> None:
    with nobody() as down:

        async def wait(request: Request, body: dict[str, Any]) -> Response:
            # The result must not depend on whether the other engine's request is still in flight.
            return (
                await engine.until_gone(request)
                if dispatch == "concurrent"
                else await answer_ok(request, body)
            )

        async with serve_engine(wait) as engine:
            urls = {"prefill": engine.url, "decode": engine.url} | {side: down}
            settings = RouterSettings(
                prefill=(Endpoint.parse(urls["prefill"]),),
                decode=(Endpoint.parse(urls["decode"]),),
                dispatch=dispatch,  # type: ignore[arg-type]
                require_prefill=True,
            )
            async with (
                serve(create_app(settings)) as url,
                client_of(url) as client,
            ):
                answer = await client.post("/v1/completions", json={"prompt": "x"})
                assert answer.status_code == 502
                assert f"the {side} engine {down} failed" in answer.json()["error"]["message"]
                health = await client.get("/health")
                assert health.status_code == 503
                assert health.json()[side] == {down: "unreachable"}


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_request_whose_only_prefill_engine_is_down_is_served_by_decode_alone(dispatch: str) -> None:
    async def load(request: Request, body: dict[str, Any]) -> Response:
        if "kv_transfer_params" in body:
            return await d.until_gone(request)
        return await answer_ok(request, body)

    with nobody() as down:
        async with serve_engine(load) as d:
            settings = RouterSettings(
                (Endpoint.parse(down),),
                (Endpoint.parse(d.url),),
                dispatch=dispatch,  # type: ignore[arg-type]
                patience=0.05,
            )
            async with (
                serve(create_app(settings)) as url,
                client_of(url) as client,
            ):
                for _ in range(2):
                    answer = await client.post("/v1/completions", json={"prompt": "x"})
                    assert answer.status_code == 200
                assert (await client.get("/health")).json()["status"] == "degraded"
                assert await metric(client, "kv_connector_router_retries_total") == 1
                name = 'kv_connector_router_local_prefills_total{reason="no_prefill"}'
                assert await metric(client, name) == 2


async def test_failing_prefill_engine_gets_trials_and_decode_serves_alone() -> None:
    async with cluster(refuse(500, "broken"), answer_ok, dispatch="serial") as (p, d, client):
        statuses = [
            (await client.post("/v1/completions", json={"prompt": "x"})).status_code for _ in range(6)
        ]
    assert statuses == [500] * 2 + [200] * 4, "the third failure opens the breaker, and is tried again"
    assert len(p.bodies) == 3
    assert len(d.bodies) == 4


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b'{"prompt": ["\xff", "b"]}', b"[1]", b'"text"', b"[" * 100_000]
)
async def test_a_malformed_body_is_refused_without_asking_an_engine(body: bytes) -> None:
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        answer = await client.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert not p.bodies
        assert not d.bodies
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_body_over_the_limit_is_refused() -> None:
    async with cluster(answer_ok, answer_ok, body_limit=1000) as (p, _, client):
        answer = await client.post("/v1/completions", content=b" " * 1001)
        assert answer.status_code == 413
        assert "1000 bytes" in answer.json()["error"]["message"]
        assert not p.bodies


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/reset_prefix_cache", 404)],
)
async def test_unknown_routes_are_refused_in_openais_shape(method: str, path: str, status: int) -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        answer = await client.request(method, path)
        assert answer.status_code == status
        assert "/v1/chat/completions" in answer.json()["error"]["message"]


# --- Clients that disconnect


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_a_client_that_leaves_before_the_answer_aborts_the_engines(dispatch: str) -> None:
    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        return await p.until_gone(request)

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        return await d.until_gone(request)

    async with cluster(prefill, decode, dispatch=dispatch) as (p, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await within(p.arrived.wait())
        if dispatch == "concurrent":
            await within(d.arrived.wait())
        asking.cancel()
        await within(p.aborted.wait())
        if dispatch == "concurrent":
            await within(d.aborted.wait())
        line = 'kv_connector_router_requests_total{route="/v1/completions",status="499"}'
        await until_metric(client, line, 1)
        assert await metric(client, "kv_connector_router_in_flight") == 0
        assert await metric(client, "kv_connector_router_failures_total") == 0
        assert (await client.get("/status.json")).json()["failures"] == []


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_prefill_is_notified_of_a_client_that_left_before_decode_answered(dispatch: str) -> None:
    """The decode engine may not know the request, and the prefill engine would hold the prompt for it."""
    told = asyncio.Event()

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        if body.get("model", "").startswith("nobody-wants/"):
            told.set()
            return await refuse(404, "no such model")(request, body)
        return await d.until_gone(request)

    async with cluster(answer_ok, decode, dispatch=dispatch) as (p, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await within(d.arrived.wait())
        asking.cancel()
        await within(told.wait())
        (prefill,) = p.bodies
        _, disowned = d.bodies
        assert disowned["kv_transfer_params"] == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": prefill["kv_transfer_params"]["transfer_id"],
            "remote_host": "10.0.0.1",
            "remote_port": 5601,
            "remote_engine_id": None,
        }


@pytest.mark.parametrize("dispatch", ["concurrent", "serial", "early"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": "lots"}),
        ("/v1/completions", {"prompt": "x", "return_token_ids": "x", "stream": True}),
        ("/v1/chat/completions", {"messages": [], "stream_options": {}}),
        ("/v1/chat/completions", {"messages": [], "stream": "maybe"}),
        ("/v1/chat/completions", {"messages": [], "max_tokens": "lots", "stream": True}),
        ("/v1/messages", {"messages": []}),
    ],
)
async def test_prefill_is_notified_when_decode_refuses_a_body_that_prefill_accepted(
    path: str, body: dict[str, Any], dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine's validation of a body ends before its connector knows the request."""
    told = asyncio.Event()

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        if not body["stream"]:
            return await answer_ok(request, body)
        token = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n'
        return Response(token + DONE, media_type="text/event-stream")

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        if body.get("model", "").startswith("nobody-wants/"):
            told.set()
        return await refuse(400, "D refuses it")(request, body)

    if dispatch == "early":
        monkeypatch.setattr(Members, "early_tokens", lambda self, endpoint: True)
    how = "concurrent" if dispatch == "early" else dispatch
    async with cluster(prefill, decode, dispatch=how) as (p, d, client):
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "D refuses it")
        await within(told.wait())
        transfers = {body["kv_transfer_params"]["transfer_id"] for body in p.bodies}
        assert d.bodies[-1]["kv_transfer_params"]["transfer_id"] in transfers
        assert await metric(client, "kv_connector_router_retries_total") == 0


async def test_an_engine_that_ends_a_stream_with_an_error_event_has_failed() -> None:
    """vLLM reports the death of its engine core in this way, after a status of 200."""
    good = b'data: {"choices": [{"text": "a"}]}\n\n'
    error = {
        "error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}
    }
    end = b"data: " + json.dumps(error).encode() + b"\n\n"
    stream = FedStream()
    async with cluster(answer_ok, stream) as (_, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
        for chunk in (good, good + end + b"data: [DONE]\n\n", None):
            stream.queue.put_nowait(chunk)
        body = (await within(asking)).content
        assert body.startswith(good + good)
        assert b"EngineCore encountered an issue" in body
        line = 'kv_connector_router_requests_total{route="/v1/completions",status="500"}'
        await until_metric(client, line, 1)
        failures = f'kv_connector_router_failures_total{{engine="{d.url}",side="decode"}}'
        await until_metric(client, failures, 1)


@pytest.mark.parametrize(
    ("path", "end", "status"),
    [
        ("/v1/completions", b"", 502),
        ("/v1/messages", b"", 502),
        ("/v1/completions", b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n', 200),
        ("/v1/completions", b"data: [DONE]\n\n", 200),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n', 200),
        ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n', 200),
    ],
)
async def test_a_stream_that_ends_without_an_end_of_its_answer_has_failed(
    path: str, end: bytes, status: int
) -> None:
    """The connection is closed cleanly, as by a proxy whose engine is gone."""
    good = b'data: {"choices":[{"text":"[DONE] \\"finish_reason\\":\\"stop\\"","finish_reason":null}]}\n\n'
    stream = FedStream()
    async with cluster(answer_ok, stream) as (_, d, client):
        body = {"prompt": "x", "messages": [], "input": "x", "stream": True}
        asking = asyncio.create_task(client.post(path, json=body))
        for chunk in (good, good + end, None):
            stream.queue.put_nowait(chunk)
        content = (await within(asking)).content
        assert content.startswith(good + good + end)
        assert (b"ended without finish_reason" in content) is (status != 200)
        await until_metric(
            client, f'kv_connector_router_requests_total{{route="{path}",status="{status}"}}', 1
        )
        failures = await metric(
            client, f'kv_connector_router_failures_total{{engine="{d.url}",side="decode"}}'
        )
        assert failures == (status != 200)


async def test_words_of_an_error_within_an_answer_are_an_answer() -> None:
    text = json.dumps({"choices": [{"text": 'say "error" {"error": 1}', "finish_reason": "stop"}]}).encode()
    stream = FedStream()
    async with cluster(answer_ok, stream) as (_, _, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
        for chunk in (b"data: " + text + b"\n\n", b"data: [DONE]\n\n", None):
            stream.queue.put_nowait(chunk)
        assert (await within(asking)).content == b"data: " + text + b"\n\ndata: [DONE]\n\n"
        await until_metric(
            client, 'kv_connector_router_requests_total{route="/v1/completions",status="200"}', 1
        )


async def test_prefill_is_notified_of_a_client_that_left_between_prefill_and_decode() -> None:
    """In serial dispatch, the decode engine never got the request."""
    told = asyncio.Event()

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        return await p.until_gone(request)

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        assert body["model"].startswith("nobody-wants/")
        told.set()
        return JSONResponse({}, 404)

    async with cluster(prefill, decode, dispatch="serial") as (p, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await within(p.arrived.wait())
        asking.cancel()
        await within(told.wait())
        assert len(d.bodies) == 1


async def test_stopping_router_waits_until_prefill_is_notified() -> None:
    asked, answering = asyncio.Event(), asyncio.Event()

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        if not body.get("model", "").startswith("nobody-wants/"):
            return await d.until_gone(request)
        asked.set()
        await answering.wait()
        return JSONResponse({}, 404)

    async with serve_engine(answer_ok) as p, serve_engine(decode) as d:
        app = create_app(RouterSettings(prefill=(Endpoint.parse(p.url),), decode=(Endpoint.parse(d.url),)))
        running = AsyncExitStack()
        await running.enter_async_context(app.router.lifespan_context(app))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://router", verify=False
        ) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            await within(d.arrived.wait())
            asking.cancel()
            await within(asked.wait())
        ending = asyncio.create_task(running.aclose())
        await asyncio.wait({ending}, timeout=0.1)
        assert not ending.done()
        answering.set()
        await within(ending)


@pytest.mark.usefixtures("unwatched")
async def test_prefill_is_notified_of_an_unreachable_decode_engine() -> None:
    """The request continues with another decode engine, under a new transfer id."""
    told = asyncio.Event()

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        if body.get("model", "").startswith("nobody-wants/"):
            told.set()
        return await answer_ok(request, body)

    with nobody() as down:
        async with serve_engine(answer_ok) as p, serve_engine(decode) as d:
            decodes = (Endpoint.parse(down), Endpoint.parse(d.url))
            settings = RouterSettings(prefill=(Endpoint.parse(p.url),), decode=decodes)
            async with (
                serve(create_app(settings)) as url,
                client_of(url) as client,
            ):
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
                await within(told.wait())
        transfers = {body.get("model"): body["kv_transfer_params"]["transfer_id"] for body in d.bodies}
        (disowned,) = transfers.keys() - {None}
        assert disowned == f"nobody-wants/{transfers[disowned]}"
        assert transfers[None] != transfers[disowned]


async def test_a_client_that_leaves_a_stream_aborts_both() -> None:
    stream = FedStream()

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        return await p.until_gone(request)

    async with cluster(prefill, stream) as (p, _, client):
        stream.queue.put_nowait(b"data: 1\n\n")
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert await within(anext(answer.aiter_raw())) == b"data: 1\n\n"
        await within(stream.aborted.wait())
        await within(p.aborted.wait())
        line = 'kv_connector_router_requests_total{route="/v1/completions",status="499"}'
        await until_metric(client, line, 1)
        assert await metric(client, "kv_connector_router_failures_total") == 0
        assert (await client.get("/status.json")).json()["failures"] == []


async def test_prefill_is_not_aborted_when_decode_is_faster() -> None:
    release = asyncio.Event()
    finished = asyncio.Event()

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        await within(release.wait())
        assert not await request.is_disconnected()
        finished.set()
        return await answer_ok(request, body)

    async with cluster(prefill, answer_ok) as (_, _, client):
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        # Time enough for a router to close the prefill engine's connection, if it did.
        assert (await client.get("/health")).status_code == 200
        release.set()
        await within(finished.wait())


# --- Hosts that vanish


async def test_connections_to_engines_end_with_their_host() -> None:
    async with (
        serve_engine(FedStream()) as engine,
        EngineClient() as client,
        client.stream("POST", f"{engine.url}/v1/completions", b"{}") as response,
    ):
        assert response.connection is not None
        assert response.connection.transport is not None
        connection = response.connection.transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        values = [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options]
        idle, between, count, unacknowledged = values
        assert idle + between * count == unacknowledged / 1000 == LOST_SECONDS


# --- Forwarded routes


async def test_other_routes_are_answered_by_a_decode_engine() -> None:
    async with cluster(answer_ok, answer_ok) as (_, d, client):
        assert (await client.get("/v1/models")).json()["engine"] == d.url
        assert (await client.post("/tokenize", json={"prompt": "x"})).json() == {"echo": {"prompt": "x"}}
        health = await client.get("/health")
        assert health.status_code == 200
        assert health.json()["decode"] == {d.url: "ready"}


async def test_other_routes_are_answered_by_another_engine_where_one_is_gone() -> None:
    with nobody() as down:
        async with serve_engine(answer_ok) as engine:
            settings = RouterSettings(
                prefill=(Endpoint.parse(engine.url),),
                decode=(Endpoint.parse(down), Endpoint.parse(engine.url)),
            )
            async with (
                serve(create_app(settings)) as url,
                client_of(url) as client,
            ):
                for _ in range(2):  # the engines take turns
                    assert (await client.get("/v1/models")).json().get("engine") == engine.url
                assert (await client.get("/health")).json()["decode"][down] == "unreachable"


# --- Parts


def pool_of(engines: int) -> tuple[Pool, list[Endpoint]]:
    endpoints = [Endpoint.parse(f"http://h:{port + 1}") for port in range(engines)]
    return Pool(endpoints), endpoints


def test_the_pool_gives_the_least_loaded_engine_and_lets_equals_take_turns() -> None:
    pool, [a, b, c] = pool_of(3)
    leases = [pool.acquire(pool.fewest()) for _ in range(3)]
    assert [lease.endpoint for lease in leases] == [a, b, c]
    leases[1].release()
    leases[1] = pool.acquire(pool.fewest())
    assert leases[1].endpoint == b
    for lease in leases:
        lease.release()
    with pool.lease(pool.fewest()) as first, pool.lease(pool.fewest()) as second:
        assert {first.endpoint, second.endpoint, pool.fewest()} == {a, b, c}


def test_request_is_unfinished_once_while_it_runs_or_lacks_its_pages() -> None:
    pool, [engine] = pool_of(1)

    def counts() -> tuple[int, int]:
        return pool.outstanding(engine), pool.unfinished(engine)

    for released_first in (True, False):
        lease = pool.acquire(engine)
        with lease.owing():
            assert counts() == (1, 1)
            if released_first:
                lease.release()
                with lease.owing():
                    assert counts() == (0, 1)
                assert counts() == (0, 1)
        if not released_first:
            assert counts() == (1, 1)
            lease.release()
        assert counts() == (0, 0)
        with lease.owing():
            assert counts() == (0, 1)
        assert counts() == (0, 0)


def test_pool_avoids_the_given_engines_unless_no_other_is_usable() -> None:
    pool, [a, b] = pool_of(2)
    assert [pool.acquire(pool.fewest(avoid={a})).endpoint for _ in range(3)] == [b, b, b]
    assert pool.acquire(pool.fewest(avoid={a, b})).endpoint == a
    pool.set_usable(b, False)
    assert pool.acquire(pool.fewest(avoid={a})).endpoint == a
    assert not pool.usable(avoid={a})
    pool.remove(a, lost=False)
    with pytest.raises(NoEngine):
        pool.acquire(pool.fewest())


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("http://h:81", Endpoint("http://h:81", "h", 5600)),
        ("http://h:81/", Endpoint("http://h:81", "h", 5600)),
        ("https://h:81@10.0.0.1:5601", Endpoint("https://h:81", "10.0.0.1", 5601)),
        ("http://[::1]:81@[::2]:5601", Endpoint("http://[::1]:81", "::2", 5601)),
    ],
)
def test_endpoints_are_read(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint


@pytest.mark.parametrize(
    "text",
    ["", "h:81", "ftp://h:81", "http://h:81/v1", "http://h:81@", "http://h:81@c", "http://h:81@c:99999"],
)
def test_a_wrong_endpoint_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|host:port"):
        Endpoint.parse(text)


def test_a_router_needs_both_sides() -> None:
    with pytest.raises(ValueError, match="at least one --prefill"):
        RouterSettings(prefill=(), decode=(Endpoint.parse("http://h:1"),))


def test_two_ranks_of_a_listed_prefill_engine_have_two_control_addresses() -> None:
    twice = (Endpoint.parse("http://h:1"),) * 2
    with pytest.raises(ValueError, match="own control address"):
        RouterSettings(prefill=twice, decode=twice)
    RouterSettings(prefill=twice[:1], decode=twice)


def test_an_empty_object_is_the_engines_to_judge() -> None:
    assert Completion.decode(b"{}").local_reason() is None
    with pytest.raises(Failure):
        Completion.decode(b"null")
