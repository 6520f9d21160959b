"""Access to the router: API keys, its second address, other origins, and engines with TLS and keys."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from command_line import invoke, one_line
from router_setup import (
    PATIENCE,
    EndingServer,
    FakeEngine,
    FedStream,
    Handler,
    answer_ok,
    client_of,
    cluster,
    refuse,
    serve,
    serve_engine,
    serve_engines,
    within,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kv_connector.cli.main import app
from kv_connector.control.cluster_key import KeyFileError
from kv_connector.protocol.actions import Address
from kv_connector.router.engines.client import AuthorityError, EngineClient, HttpError, read_authority
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.api_keys import ApiKeys, read_engine_key
from kv_connector.router.front.app import DONE, create_app
from kv_connector.router.front.certificate import Certificate
from kv_connector.router.front.server import HEADER_LIMIT, RouterServer, ServerConfig
from kv_connector.router.settings import RouterSettings
from kv_connector.router.streams.dispatch import MOST_ENGINES

pytestmark = pytest.mark.anyio

CERTIFICATES = Path(__file__).parents[2] / "support" / "certificates"
ENGINES = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
ALICE, BOB = "a" * 16, "b" * 256


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return written(tmp_path / "keys", f"# clients\n\nalice {ALICE}\nbob\t{BOB}\n")


def written(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- API keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (bearer(ALICE), 200),
        (bearer(BOB), 200),
        ({"authorization": f"bearer  {ALICE}"}, 200),
        ({"x-api-key": ALICE}, 200),
        (bearer(ALICE[1:]), 401),
        (bearer("alice"), 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": f"Basic {ALICE}"}, 401),
        (bearer("\xff" * 1000), 401),
        ({"x-api-key": BOB, **bearer("wrong")}, 401),
    ],
)
async def test_request_needs_a_key_of_the_file(headers: dict[str, str], status: int, key_file: str) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with cluster(answer_ok, answer_ok, api_key_file=key_file) as (p, d, client):
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=encoded)
        assert answer.status_code == status
        assert len(p.bodies) == len(d.bodies) == (status == 200)
        if status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer" in answer.json()["error"]["message"]
        for engine in (p, d):  # the router's own key goes to no engine
            assert all("authorization" not in sent for sent in engine.headers)


async def test_access_log_has_the_name_of_a_key_and_not_the_key(key_file: str, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with cluster(answer_ok, answer_ok, api_key_file=key_file, access_log=str(log)) as (_, _, client):
        for headers in (bearer(ALICE), bearer("c" * 16)):
            await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    text = log.read_text()
    assert {json.loads(line)["key"] for line in text.splitlines()} == {"alice", None}
    assert ALICE not in text
    assert "c" * 16 not in text


async def test_access_log_has_every_request_without_a_valid_key(key_file: str, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with cluster(answer_ok, answer_ok, api_key_file=key_file, access_log=str(log)) as (_, _, client):
        for headers in (bearer("guess" * 4), bearer(ALICE)):
            for path in ("/metrics", "/live"):
                await client.get(path, headers=headers)
    (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["path"], line["status"]) == ("/metrics", 401)


async def test_paths_without_a_key_are_probes_that_name_no_engine(key_file: str) -> None:
    async with cluster(answer_ok, answer_ok, api_key_file=key_file) as (_, _, client):
        for path in ("/", "/status.json", "/metrics", "/load", "/openapi.json", "/v1/models", "/nothing"):
            assert (await client.get(path)).status_code == 401
        assert (await client.get("/live")).json() == {"live": True}
        for path in ("/health", "/ping"):
            assert (await client.get(path)).json() == {"status": "ready"}
        assert (await client.get("/metrics", headers=bearer(ALICE))).status_code == 200


async def test_client_with_too_many_requests_gets_429_and_another_client_is_served(key_file: str) -> None:
    streams = FedStream()
    limits = {"api_key_file": key_file, "requests_per_key": 1}
    async with cluster(answer_ok, streams, **limits) as (_, d, client):

        def ask(key: str) -> Any:
            return client.post("/v1/completions", json={"prompt": "x"}, headers=bearer(key))

        first = asyncio.create_task(ask(ALICE))
        await within(d.arrived.wait())
        refused = await ask(ALICE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        d.handler = answer_ok
        assert (await ask(BOB)).status_code == 200
        for chunk in (DONE, None):
            streams.queue.put_nowait(chunk)
        assert (await within(first)).status_code == 200
        async with asyncio.timeout(PATIENCE):
            while (await ask(ALICE)).status_code != 200:
                pass  # the first request ends after its client has the answer


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no key"),
        ("# only a comment\n", "has no key"),
        ("alice\n", "line 1"),
        (f"alice {ALICE[1:]}\n", "line 1"),
        (f"alice {BOB}b\n", "line 1"),
        (f"alice {ALICE}\nalice bob {ALICE}\n", "line 2"),
        (f"{'n' * 65} {ALICE}\n", "line 1"),
        (f"alice {ALICE}\nbob {ALICE}\n", "repeats the key of alice"),
        (b"alice \xff" + b"a" * 16, "line 1"),
        ("#" * (5 << 20), "longer than"),
    ],
)
def test_key_file_that_cannot_be_used_is_refused(text: str | bytes, why: str, tmp_path: Path) -> None:
    name = written(tmp_path / "keys", text)
    with pytest.raises(KeyFileError, match=why) as raised:
        ApiKeys.read(Path(name))
    assert ALICE not in str(raised.value)


def test_key_file_of_others_is_refused_before_the_router_starts(key_file: str, tmp_path: Path) -> None:
    Path(key_file).chmod(0o644)
    for name, why in ((key_file, "open to others"), (str(tmp_path / "none"), "no key file")):
        for option in ("--api-key-file", "--engine-key-file"):
            status, output = invoke(app, "router", *ENGINES, option, name)
            assert status == 2
            assert why in one_line(output)
    status, output = invoke(app, "router", *ENGINES, "--requests-per-key", "1")
    assert (status, "Set --api-key-file" in one_line(output)) == (2, True)


# --- Keys and certificates of engines


async def test_engines_get_the_key_that_they_expect(key_file: str, tmp_path: Path) -> None:
    engine_key = written(tmp_path / "engine", "of-the-engines\n")
    keys = {"api_key_file": key_file, "engine_key_file": engine_key}
    async with cluster(answer_ok, answer_ok, **keys) as (p, d, client):
        await client.post("/v1/completions", json={"prompt": "x"}, headers=bearer(ALICE))
        for engine in (p, d):
            assert [sent["authorization"] for sent in engine.headers] == ["Bearer of-the-engines"]
    async with cluster(answer_ok, answer_ok, engine_key_file=engine_key) as (p, _, client):
        await client.post("/v1/completions", json={"prompt": "x"}, headers=bearer("of-the-client"))
        assert p.headers[0]["authorization"] == "Bearer of-the-client"


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_refuses_the_routers_key_is_no_fault_of_the_client(
    stream: bool, key_file: str
) -> None:
    unauthorized, body = refuse(401, "Unauthorized"), {"prompt": "x", "stream": stream}
    async with cluster(unauthorized, unauthorized, api_key_file=key_file) as (_, _, client):
        answer = await client.post("/v1/completions", json=body, headers=bearer(ALICE))
        assert answer.status_code == 502
        assert "Set --engine-key-file" in answer.json()["error"]["message"]
    async with cluster(unauthorized, unauthorized) as (_, _, client):  # the engines check the client's key
        answer = await client.post("/v1/completions", json=body, headers=bearer(ALICE))
        assert (answer.status_code, answer.json()["error"]["message"]) == (401, "Unauthorized")


async def test_forwarded_request_that_engines_refuse_by_their_key_gets_502(key_file: str) -> None:
    async with cluster(answer_ok, answer_ok, api_key_file=key_file) as (_, d, client):

        async def unauthorized(request: Request) -> Response:
            return JSONResponse({"error": "Unauthorized"}, 401)

        d.app.router.routes.insert(0, Route("/tokenize", unauthorized, methods=["POST"]))
        answer = await client.post("/tokenize", json={"prompt": "x"}, headers=bearer(ALICE))
        assert answer.status_code == 502
        assert "Set --engine-key-file" in answer.json()["error"]["message"]


@pytest.mark.parametrize("dispatch", ["serial", "concurrent"])
async def test_engines_that_refuse_the_routers_key_use_up_no_attempts(dispatch: str, key_file: str) -> None:
    """An engine that has not read a request was not ended by it."""
    handlers = [refuse(401, "Unauthorized"), refuse(401, "Unauthorized"), answer_ok]
    async with serve_engines(handlers, handlers) as (_, _, engines):
        settings = RouterSettings(**engines, dispatch=dispatch, api_key_file=key_file)  # type: ignore[arg-type]
        async with serve(create_app(settings)) as url, client_of(url) as client:
            for _ in range(3):
                answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=bearer(ALICE))
                assert answer.status_code == 200, answer.text


async def test_request_goes_to_a_bounded_number_of_engines_that_refuse_the_routers_key(key_file: str) -> None:
    refusing = [refuse(401, "Unauthorized")] * (MOST_ENGINES + 3)
    async with serve_engines([answer_ok], refusing) as (_, d, engines):
        settings = RouterSettings(**engines, dispatch="serial", api_key_file=key_file)  # type: ignore[arg-type]
        async with serve(create_app(settings)) as url, client_of(url) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=bearer(ALICE))
            assert answer.status_code == 502
        prompts = [sum(body["prompt"] == "x" for body in engine.bodies) for engine in d]
        assert sorted(prompts) == [0, 0, *[1] * (MOST_ENGINES + 1)]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_engine_that_refuses_the_routers_key_gets_few_requests(side: str, key_file: str) -> None:
    """It answers at once, so it has the fewest requests in flight. Other engines get its requests."""
    handlers: dict[str, list[Handler]] = {"prefill": [answer_ok], "decode": [answer_ok]}
    handlers[side].append(refuse(401, "Unauthorized"))
    tokenized: list[Request] = []
    async with serve_engines(**handlers) as (p, d, engines):

        async def unauthorized(request: Request) -> Response:
            tokenized.append(request)
            return JSONResponse({"error": "Unauthorized"}, 401)

        wrong = (p if side == "prefill" else d)[1]
        wrong.app.router.routes.insert(0, Route("/tokenize", unauthorized, methods=["POST"]))
        settings = RouterSettings(**engines, dispatch="serial", api_key_file=key_file)
        async with serve(create_app(settings)) as url, client_of(url) as client:
            for path in ["/tokenize", "/v1/completions"] * 20:
                answer = await client.post(path, json={"prompt": "x"}, headers=bearer(ALICE))
                assert answer.status_code == 200, answer.text
    # Three failures open its breaker. Trials come after 2, 6, 14 and 30 s.
    assert 0 < len(wrong.bodies) + len(tokenized) < 10


@pytest.mark.parametrize("text", ["", "a b", "a\nb", "\x01", "a" * 257])
def test_engine_key_that_no_header_can_have_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="one key of 1 to 256"):
        read_engine_key(Path(written(tmp_path / "engine", text)))


@contextlib.asynccontextmanager
async def secure_engine() -> AsyncIterator[FakeEngine]:
    """Runs an engine that speaks HTTPS, with a certificate of the tests' authority."""
    engine = FakeEngine(answer_ok)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = EndingServer(
            uvicorn.Config(
                engine.app,
                log_level="error",
                ssl_certfile=CERTIFICATES / "server.pem",
                timeout_graceful_shutdown=1,
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not task.done(), "the server did not start"
            await asyncio.sleep(0.005)
        try:
            engine.url = f"https://127.0.0.1:{listener.getsockname()[1]}"
            yield engine
        finally:
            server.end()
            await task


async def test_engine_with_tls_is_verified_by_the_authority_of_the_operator() -> None:
    authority = read_authority(CERTIFICATES / "authority.pem")
    async with secure_engine() as engine:
        async with EngineClient(authority=authority) as client:
            assert (await client.whole("GET", f"{engine.url}/health")).status == 200
            with pytest.raises(HttpError, match="certificate"):  # the certificate has the address only
                await client.whole("GET", f"{engine.url.replace('127.0.0.1', 'localhost')}/health")
        async with EngineClient() as client:
            with pytest.raises(HttpError, match="certificate"):
                await client.whole("GET", f"{engine.url}/health")


async def test_router_sends_requests_to_engines_with_tls() -> None:
    async with secure_engine() as p, secure_engine() as d:
        endpoints = ((Endpoint.parse(p.url),), (Endpoint.parse(d.url),))
        settings = RouterSettings(*endpoints, engine_ca=str(CERTIFICATES / "authority.pem"))
        async with shipped(settings) as (url, _), client_of(url) as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "certificate"),
        (b"no certificate", "certificate"),
        (b"\xff", "ascii"),
        (b"#" * (5 << 20), "longer than"),
    ],
)
def test_file_without_certificates_is_refused(text: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(text)
    with pytest.raises(AuthorityError, match=why):
        read_authority(path)
    status, output = invoke(app, "router", *ENGINES, "--engine-ca", str(path))
    assert (status, "Change --engine-ca" in one_line(output)) == (2, True)


async def test_change_reads_the_key_and_the_authorities_for_engines_again(tmp_path: Path) -> None:
    authority, key = tmp_path / "authority.pem", Path(written(tmp_path / "engine", "first"))
    authority.write_bytes((CERTIFICATES / "other.pem").read_bytes())
    async with secure_engine() as engine:
        engines = (Endpoint.parse(engine.url),)
        settings = RouterSettings(
            engines, engines, engine_ca=str(authority), engine_key_file=str(key), patience=0.01
        )
        application = create_app(settings)
        async with serve(application) as url, client_of(url) as client:

            async def ask() -> int:
                return (await client.post("/v1/completions", json={"prompt": "x"})).status_code

            assert await ask() >= 500
            authority.write_bytes((CERTIFICATES / "authority.pem").read_bytes())
            written(key, "second")
            application.change(settings)
            async with asyncio.timeout(PATIENCE):
                while await ask() != 200:
                    pass  # the router notices within a second that the engine is well
            assert engine.headers[-1]["authorization"] == "Bearer second"
            authority.write_text("nonsense")
            with pytest.raises(AuthorityError):
                application.change(settings)
            assert await ask() == 200


# --- HTTPS at the router's own port


async def test_router_with_a_certificate_serves_https_and_metrics_at_the_second_address() -> None:
    admin = Address("127.0.0.1", free_port())
    tls = Certificate(CERTIFICATES / "server.pem", None).context
    async with serve_engine(answer_ok) as p, serve_engine(answer_ok) as d:
        settings = RouterSettings((Endpoint.parse(p.url),), (Endpoint.parse(d.url),), admin=admin)
        verified = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
        async with (
            shipped(settings, tls) as (url, _),
            httpx.AsyncClient(
                base_url=url.replace("http:", "https:"), verify=verified, timeout=PATIENCE
            ) as client,
            client_of(url) as plain,
            client_of(f"http://{admin}") as operator,
        ):
            answer = await client.post("/v1/completions", json={"prompt": "x" * 500_000})
            assert answer.json()["choices"]
            assert (await client.get("/live", headers={"x": "a" * HEADER_LIMIT})).status_code == 431
            with pytest.raises(httpx.TransportError):
                await plain.get("/live")
            assert (await operator.get("/metrics")).status_code == 200


async def test_connections_without_a_tls_handshake_are_closed_for_new_ones() -> None:
    tls = Certificate(CERTIFICATES / "server.pem", None).context
    verified = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    async with (
        shipped(RouterSettings(engines, engines), tls, connections=2) as (url, server),
        httpx.AsyncClient(
            base_url=url.replace("http:", "https:"), verify=verified, timeout=PATIENCE
        ) as client,
    ):
        opened = [await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])) for _ in range(4)]
        for reader, _ in opened[:2]:
            with contextlib.suppress(ConnectionError):
                assert await within(reader.read()) == b""
        assert server.config.handshakes == 2
        assert (await client.get("/live")).status_code == 200
        for _, writer in opened:
            writer.close()


def test_router_on_uvloop_accepts_many_tls_connections_at_once() -> None:
    async def run() -> None:
        tls = Certificate(CERTIFICATES / "server.pem", None).context
        verified = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
        engines = (Endpoint.parse("http://127.0.0.1:1"),)
        async with shipped(RouterSettings(engines, engines), tls) as (url, _):

            async def ask() -> bytes:
                port = int(url.rpartition(":")[2])
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=verified)
                writer.write(b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n")
                answer = await reader.read()
                writer.close()
                return answer

            answers = await within(asyncio.gather(*(ask() for _ in range(32))))
            assert [answer[9:12] for answer in answers] == [b"200"] * 32

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def test_tls_handshake_that_does_not_end_is_given_up() -> None:
    tls = Certificate(CERTIFICATES / "server.pem", None).context
    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    async with shipped(RouterSettings(engines, engines), tls, stall=0.05) as (url, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"\x16\x03\x01")
        with contextlib.suppress(ConnectionError):
            assert await within(reader.read()) == b""
        writer.close()
        assert (server.config.handshakes, server.config.idle) == (0, {})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--ssl-certfile", "/nowhere/server.pem"), "No such file or directory"),
        (("--ssl-certfile", "AUTHORITY"), "Change --ssl-certfile"),
        (("--ssl-certfile", "SERVER", "--ssl-keyfile", "OTHER"), "KEY_VALUES_MISMATCH"),
        (("--ssl-keyfile", "SERVER"), "--ssl-keyfile is the key of --ssl-certfile"),
    ],
)
def test_certificate_that_cannot_be_used_is_refused(
    options: tuple[str, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = {name.upper(): str(CERTIFICATES / f"{name}.pem") for name in ("authority", "server", "other")}
    with caplog.at_level(logging.INFO):
        status, output = invoke(app, "router", *ENGINES, *(files.get(word, word) for word in options))
    assert (status, "".join(why.split()) in "".join(one_line(output).split())) == (2, True), output
    assert "listens on" not in caplog.text


# --- The second address


@contextlib.asynccontextmanager
async def shipped(
    settings: RouterSettings,
    tls: ssl.SSLContext | None = None,
    *,
    connections: int = 1000,
    stall: float = 3600,
) -> AsyncIterator[tuple[str, RouterServer]]:
    """Runs a router as `kv-connector router` does, and yields its URL."""
    application = create_app(settings)
    config = ServerConfig(
        application,
        connections=connections,
        stall=stall,
        tls=tls,
        refused=application.refused,
        port=0,
        timeout_graceful_shutdown=1,
    )
    server = RouterServer(config, settings.admin)
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "the server did not start"
        await asyncio.sleep(0.005)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        await within(task)


async def test_access_log_has_the_address_of_the_connection_and_none_that_a_client_writes(
    tmp_path: Path,
) -> None:
    path, engines = tmp_path / "access.log", (Endpoint.parse("http://127.0.0.1:1"),)
    async with (
        shipped(RouterSettings(engines, engines, access_log=str(path))) as (url, _),
        client_of(url) as client,
    ):
        await client.get("/nothing", headers={"x-forwarded-for": "10.9.9.9"})
    assert json.loads(path.read_text())["client"] == "127.0.0.1"


_POST = b"POST /v1/completions HTTP/1.1\r\nx-request-id: mine\r\n"
_CHUNKED = _POST + b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "method", "path"),
    [
        (b"GARBAGE\r\n\r\n", 400, None, None),
        (
            b"GET /v1/models HTTP/1.1\r\nx-request-id: mine\r\nx: 1\r\n\x00: x\r\n\r\n",
            400,
            "GET",
            "/v1/models",
        ),
        (_POST + b"content-length: x\r\n\r\n", 400, "POST", "/v1/completions"),
        (b"GET http://[/ HTTP/1.1\r\nx-request-id: mine\r\n\r\n", 400, "GET", "http://[/"),
        (_CHUNKED + b"\r\nno length\r\n", 400, "POST", "/v1/completions"),
        (_CHUNKED + b"expect: 100-continue\r\n\r\nno length\r\n", 400, "POST", "/v1/completions"),
        (b"GET /%61?b HTTP/1.1\r\nx-request-id: mine\r\nx: 1\r\n", 408, "GET", "/a"),
        (b"GE", 408, None, None),
        (
            b"GET /live HTTP/1.1\r\nx-request-id: mine\r\nx: " + b"a" * HEADER_LIMIT + b"\r\n\r\n",
            431,
            "GET",
            "/live",
        ),
        (b"GET /live HTTP/1.1\r\nx-request-id: mine\r\nx: " + b"a" * (1 << 20), 431, "GET", "/live"),
        (b"GET /" + b"a" * (1 << 20), 431, "GET", "/" + "a" * 255),
        (_CHUNKED + b"\r\n0\r\nx: " + b"a" * (1 << 20), 431, "POST", "/v1/completions"),
    ],
    ids=[
        "no method",
        "header",
        "length",
        "target",
        "body",
        "continue",
        "late",
        "late method",
        "complete",
        "long",
        "path",
        "trailer",
    ],
)
async def test_access_log_has_one_line_for_a_request_that_the_server_refuses(
    tmp_path: Path, sent: bytes, status: int, method: str | None, path: str | None
) -> None:
    log, engines = tmp_path / "access.log", (Endpoint.parse("http://127.0.0.1:1"),)
    stall = 0.05 if status == 408 else 3600
    async with shipped(RouterSettings(engines, engines, access_log=str(log)), stall=stall) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        writer.write(sent)
        answer = await within(reader.read())
        writer.close()
    (line,) = map(json.loads, log.read_text().splitlines())
    request_id = line["request_id"]
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"\r\nx-request-id: %s\r\n" % request_id.encode()) == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status
    assert (line["status"], line["method"], line["path"]) == (status, method, path)
    assert (request_id == "mine") == (b"mine" in sent)
    assert line["client"] == "127.0.0.1"
    assert line["duration"] >= (stall if status == 408 else 0)
    assert (line["first_byte"] is None) == (b"chunked" in sent)  # the application has sent nothing


async def test_refused_request_ends_the_unanswered_request_before_it(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with (
        serve_engines([FedStream()], [FedStream()]) as ((p,), _, engines),
        shipped(RouterSettings(**engines, access_log=str(log))) as (url, _),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        body = b'{"prompt": "x"}'
        writer.write(_POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await within(p.arrived.wait())
        writer.write(b"GARBAGE\r\n\r\n")
        answer = await within(reader.read())
        writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["method"], line["status"]) for line in found] == [(None, 400), ("POST", 499)]


async def test_access_log_has_a_line_for_a_refused_request_that_waits_behind_another(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with (
        serve_engines([FedStream()], [FedStream()]) as ((p,), _, engines),
        shipped(RouterSettings(**engines, access_log=str(log))) as (url, _),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        body = b'{"prompt": "x"}'
        first = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        writer.write(first)
        await within(p.arrived.wait())
        writer.write(_CHUNKED + b"\r\n1\r\n{\r\n")
        writer.write(b"no length\r\n")
        answer = await within(reader.read())
        writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["request_id"] == "mine", line["status"]) for line in found] == [(True, 400), (False, 499)]


async def test_log_is_written_before_a_signal_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flushed: list[bool] = []

    class Kept(logging.NullHandler):
        def flush(self) -> None:
            flushed.append(True)

    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    monkeypatch.setattr(logging.getLogger(), "handlers", [Kept()])
    async with shipped(RouterSettings(engines, engines)) as (_, server):

        def end(_: int) -> None:
            assert flushed, "the signal ends the process before the log is written"

        monkeypatch.setattr("uvicorn.server.signal.raise_signal", end)
        server.handle_exit(signal.SIGTERM, None)
    assert flushed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_metrics_and_status_are_at_the_second_address_alone(key_file: str) -> None:
    admin = Address("127.0.0.1", free_port())
    async with serve_engine(answer_ok) as p, serve_engine(answer_ok) as d:
        endpoints = ((Endpoint.parse(p.url),), (Endpoint.parse(d.url),))
        settings = RouterSettings(*endpoints, admin=admin, api_key_file=key_file)
        async with (
            shipped(settings) as (url, _),
            client_of(url) as client,
            client_of(f"http://{admin}") as operator,
        ):
            of_operators = ("/", "/status.json", "/metrics", "/load")
            for path in of_operators:
                assert (await client.get(path, headers=bearer(ALICE))).status_code == 404
                assert (await operator.get(path)).status_code == 200
            assert (await client.get("/health")).json() == {"status": "ready"}
            assert p.url in (await operator.get("/health")).json()["prefill"]
            assert (await operator.get("/live")).status_code == 200
            # No prompts go through the second address, which needs no key.
            body = {"prompt": "x"}
            assert (await operator.post("/v1/completions", json=body)).status_code == 404
            assert (await client.post("/v1/completions", json=body)).status_code == 401


async def test_router_whose_second_address_is_taken_ends_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        admin = Address("127.0.0.1", taken.getsockname()[1])
        settings = RouterSettings(engines, engines, admin=admin)
        config = ServerConfig(
            create_app(settings), connections=10, stall=3600, port=0, timeout_graceful_shutdown=1
        )
        server = RouterServer(config, admin)
        with pytest.raises(SystemExit) as ended:
            await within(server._serve())
    assert (ended.value.code, server.started) == (3, False)
    assert f"cannot listen on {admin}" in caplog.text
    assert "Change --admin" in caplog.text


def test_second_address_with_the_port_of_the_first_is_refused() -> None:
    status, output = invoke(app, "router", *ENGINES, "--port", "8000", "--admin", "127.0.0.1:8000")
    assert (status, "Give --admin another port" in one_line(output)) == (2, True)


# --- Other origins


async def test_scripts_of_a_named_origin_may_call_the_router(key_file: str) -> None:
    origin = "https://chat.example.com"
    access: dict[str, Any] = {"allow_origins": (origin,), "api_key_file": key_file}
    async with cluster(answer_ok, answer_ok, **access) as (_, _, client):
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = await client.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = await client.options("/v1/completions", headers={**asked, "origin": "https://other.org"})
        assert refused.status_code == 400
        body = {"prompt": "x"}
        for headers, status in ((bearer(ALICE), 200), ({}, 401)):
            sent = {"origin": origin, **headers}
            answer = await client.post("/v1/completions", json=body, headers=sent)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_router_without_origins_answers_no_preflight() -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        answer = await client.options("/v1/completions", headers=asked)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["*", "https://a.example", "http://127.0.0.1:3000", "http://[::1]:3000"])
def test_origin_that_a_browser_sends_is_accepted(origin: str) -> None:
    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    assert RouterSettings(engines, engines, allow_origins=(origin,)).allow_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["", "chat.example.com", "https://a.example/", "https://", "http://a:b", "**"]
)
def test_text_that_is_no_origin_is_refused(origin: str) -> None:
    status, output = invoke(app, "router", *ENGINES, "--allow-origin", origin)
    assert (status, "is not an origin" in one_line(output)) == (2, True)
