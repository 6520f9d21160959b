"""The router's configuration file, and its reload at SIGHUP."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from command_line import invoke, one_line
from router_setup import PATIENCE, FedStream, answer_ok, client_of, serve_engine, until_metric, within

from kv_connector.cli.main import app
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.app import DONE, create_app
from kv_connector.router.front.certificate import Certificate
from kv_connector.router.front.router_app import RouterApp
from kv_connector.router.front.server import RouterServer
from kv_connector.router.settings import RequestTimeouts, RouterSettings

pytestmark = pytest.mark.anyio

CERTIFICATES = Path(__file__).parents[2] / "support" / "certificates"
ENGINES = "prefill: http://127.0.0.1:8100\ndecode: [http://127.0.0.1:8200]\n"
BODY = {"prompt": "x", "stream": True}
EVENT = b'data: {"choices": []}\n\n'


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RouterServer]]:
    """The servers that the command makes. They do not run."""
    before = signal.getsignal(signal.SIGHUP)
    servers: list[RouterServer] = []

    def run(server: uvicorn.Server) -> None:
        assert isinstance(server, RouterServer)
        server.started = True
        servers.append(server)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    yield servers
    signal.signal(signal.SIGHUP, before)


def router(path: Path, text: str, *options: str) -> tuple[int, str]:
    path.write_text(text)
    status, output = invoke(app, "router", "--config", str(path), *options)
    return status, one_line(output)


# --- The file


@pytest.mark.parametrize("dash", ["-", "_"])
def test_options_of_a_file_are_defaults_of_the_command_line(
    dash: str, tmp_path: Path, started: list[RouterServer]
) -> None:
    text = f"{ENGINES}port: 8001\nkeep-alive: 90\nshutdown-timeout: 5\n".replace("-", dash)
    status, output = router(tmp_path / "router.yaml", text, "--port", "8002")
    assert (status, output) == (0, "")
    (server,) = started
    config = server.config
    assert (config.port, config.timeout_keep_alive, config.timeout_graceful_shutdown) == (8002, 90, 5)


def test_file_may_be_json(tmp_path: Path, started: list[RouterServer]) -> None:
    options = {"prefill": ["http://127.0.0.1:8100"], "decode": "http://127.0.0.1:8200", "port": 8001}
    assert router(tmp_path / "router.json", json.dumps(options))[0] == 0
    assert started[0].config.port == 8001


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be one mapping"),
        ("- port", "must be one mapping"),
        ("port: 1\n---\nport: 2", "must be one mapping"),
        ("port: [", "is not YAML"),
        ("[" * 10_000, "nested too deeply"),
        ("#" * (65 << 10), "longer than 65536 bytes"),
        ("prefil: x", "unknown option `prefil`: did you mean `prefill`?"),
        ("config: other.yaml", "unknown option `config`"),
        ("body-limit: 1\nbody_limit: 2", "`body_limit` is given twice"),
        ("decode: http://a:1\ndecode: http://b:1", "`decode` is given twice. Write several values as a list"),
        ("admin: 9000", "'9000' must be host:port"),
        ("registration: 8500", "'8500' must be host:port"),
        ("host: 2026-13-45", "is not YAML: month must be in 1..12"),
        ("port: 8000.7", "--port"),
        ("port: .inf", "--port"),
        ("port: [8000]", "`port` must be a text or a number"),
        ("port: true", "`port` must be a text or a number"),
        ("port:", "`port` must be a text or a number"),
        ("serial: 1", "`serial` must be true or false"),
        ("prefill: [1]", "`prefill` must be a text, or a list of texts"),
        ("prefill: 127.0.0.1:8100", "http://host:port"),
        ("port: 70000", "--port"),
        (ENGINES + "idle-timeout: 0", "--idle-timeout"),
    ],
)
def test_file_that_cannot_be_used_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    status, output = router(tmp_path / "router.yaml", text)
    assert status == 2
    assert why in output


def test_file_that_is_missing_is_refused() -> None:
    status, output = invoke(app, "router", "--config", "/nowhere/router.yaml")
    assert (status, "cannot read /nowhere/router.yaml" in one_line(output)) == (2, True)


def test_config_check_reads_the_file_of_a_router(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    for text, status, words in (
        (ENGINES, 0, "router at 127.0.0.1:8000"),
        (ENGINES + "body-limit: 300\n", 1, "--body-budget must be at least --body-limit"),
        (ENGINES + "prot: 1\n", 1, "did you mean `port`?"),
        (ENGINES + "ssl-keyfile: server.key\n", 1, "--ssl-keyfile is the key of --ssl-certfile"),
        (ENGINES + "body-limit: x\n", 1, "Invalid value for '--body-limit'"),
        ("registration: 10.0.0.9:8500\n", 1, "no cluster key"),
    ):
        path.write_text(text)
        for file, content in (
            (path, text),
            (tmp_path / "start.sh", f"kv-connector router --config {path}\n"),
        ):
            file.write_text(content)
            found, output = invoke(app, "config", "check", "--json", str(file))
            assert (found, words in output) == (status, True), output
    for option in ("--config ", "--config=", f"--config {path} --config "):
        (tmp_path / "start.sh").write_text(f"kv-connector router {option}/nowhere/router.yaml\n")
        found, output = invoke(app, "config", "check", "--json", str(tmp_path / "start.sh"))
        assert (found, "is not on this machine" in output) == (0, True)


@pytest.mark.parametrize("word", ["prefil", "decod", "registraton"])
def test_config_check_names_the_option_if_every_engine_option_is_misspelt(word: str, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(f"{word}: http://127.0.0.1:8100\nport: 8000\n")
    status, output = invoke(app, "config", "check", "--json", str(path))
    assert (status, f"unknown option `{word}`: did you mean `" in output) == (1, True), output


@pytest.mark.parametrize("option", ["first-token-timeout", "idle-timeout", "request-timeout"])
def test_time_limit_that_cannot_be_used_is_named_alone(option: str, tmp_path: Path) -> None:
    status, output = router(tmp_path / "router.yaml", f"{ENGINES}{option}: -1\n")
    assert status == 2
    assert [word for word in output.split() if word.endswith("-timeout")] == [f"--{option}"]


@pytest.mark.parametrize(
    ("option", "most"), [("", 16_351), ("max-requests: 7", 7), ("max-requests: 99999", 16_351)]
)
def test_most_requests_are_those_of_the_option_if_the_descriptors_suffice(
    option: str, most: int, tmp_path: Path, started: list[RouterServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RouterSettings] = []

    def create(settings: RouterSettings) -> RouterApp:
        made.append(settings)
        return create_app(settings)

    monkeypatch.setattr("kv_connector.cli.router.raise_descriptor_limit", lambda: 65_535)
    monkeypatch.setattr("kv_connector.router.front.app.create_app", create)
    assert router(tmp_path / "router.yaml", f"{ENGINES}{option}\n")[0] == 0
    assert made[0].requests == most
    assert started[0].config.most_connections == 2 * 16_351


# --- The reload


def test_sighup_before_the_server_runs_is_a_reload(
    tmp_path: Path, started: list[RouterServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(settings: RouterSettings) -> RouterApp:
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL, "the signal would end this process"
        os.kill(os.getpid(), signal.SIGHUP)
        return create_app(settings)

    monkeypatch.setattr("kv_connector.router.front.app.create_app", create)
    assert router(tmp_path / "router.yaml", ENGINES)[0] == 0
    assert started[0]._reload_due.is_set()


@contextlib.asynccontextmanager
async def running(
    path: Path, started: list[RouterServer], *options: str
) -> AsyncIterator[tuple[httpx.AsyncClient, RouterServer]]:
    """Runs the router of a configuration file, and yields a client and its server."""
    status, output = invoke(app, "router", "--config", str(path), *options)
    assert status == 0, output
    server = started.pop()
    server.started = False
    server.config.port = 0
    task = asyncio.create_task(server._serve())
    try:
        while not server.started:
            assert not task.done(), "the server did not start"
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with client_of(f"http://127.0.0.1:{port}") as client:
            yield client, server
    finally:
        server.should_exit = True
        await within(task)


async def reload(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Sends SIGHUP, and waits for the line of the log."""
    caplog.clear()
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(PATIENCE):
        while words not in caplog.text:
            await asyncio.sleep(0.005)  # polled: a log gives no event to wait for


async def test_reload_changes_engines_and_limits_while_a_stream_continues(
    tmp_path: Path, started: list[RouterServer], caplog: pytest.LogCaptureFixture
) -> None:
    path, streams = tmp_path / "router.yaml", FedStream()
    caplog.set_level(logging.INFO)
    async with serve_engine(answer_ok) as p, serve_engine(streams) as old, serve_engine(answer_ok) as new:
        path.write_text(f"prefill: {p.url}\ndecode: {old.url}\nshutdown-timeout: 1\n")
        async with running(path, started) as (client, _):
            streams.queue.put_nowait(EVENT)
            async with client.stream("POST", "/v1/completions", json=BODY) as answer:
                chunks = answer.aiter_bytes()
                assert await within(anext(chunks)) == EVENT
                path.write_text(
                    f"prefill: {p.url}\ndecode: {new.url}\nshutdown-timeout: 1\n"
                    "max-requests: 3\nbody-limit: 1\nkeep-alive: 99\n"
                )
                await reload(caplog, "Restart the router to change --keep-alive")
                ready = 'kv_connector_router_engines{side="decode",state="ready"}'
                await until_metric(client, ready, 1)
                health = (await client.get("/health")).json()
                assert health["decode"] == {new.url: "ready"}
                assert old.url not in (await client.get("/metrics")).text
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
                assert (len(old.bodies), len(new.bodies)) == (1, 1)
                long = {"prompt": "x" * (1 << 20)}
                assert (await client.post("/v1/completions", json=long)).status_code == 413
                # The stream of the engine that is no longer listed continues to its end.
                for chunk in (EVENT, DONE, None):
                    streams.queue.put_nowait(chunk)
                assert b"".join([chunk async for chunk in chunks]) == EVENT + DONE


async def test_reload_of_a_wrong_file_changes_nothing(
    tmp_path: Path, started: list[RouterServer], caplog: pytest.LogCaptureFixture
) -> None:
    path, keys = tmp_path / "router.yaml", tmp_path / "keys"
    keys.write_text(f"alice {'a' * 16}\n")
    keys.chmod(0o600)
    async with serve_engine(answer_ok) as p, serve_engine(answer_ok) as d:
        text = f"prefill: {p.url}\ndecode: {d.url}\nshutdown-timeout: 1\napi-key-file: {keys}\n"
        path.write_text(text)
        async with running(path, started) as (client, _):

            async def status(key: str) -> int:
                sent = {"authorization": f"Bearer {key}"}
                answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=sent)
                return answer.status_code

            path.write_text(text.replace("decode", "decoed"))
            await reload(caplog, "did you mean `decode`?")
            assert "The router keeps its settings" in caplog.text
            path.write_text(text.replace(d.url, "http://127.0.0.1:1"))
            keys.write_text("alice short\n")
            await reload(caplog, "line 1")
            assert await status("a" * 16) == 200
            path.write_text(text)
            keys.write_text(f"bob {'b' * 16}\n")
            caplog.set_level(logging.INFO)
            await reload(caplog, "reload: the router uses the new configuration")
            assert (await status("a" * 16), await status("b" * 16)) == (401, 200)


async def test_reload_keeps_the_engines_if_the_new_file_needs_a_restart_for_others(
    tmp_path: Path, started: list[RouterServer], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "router.yaml"
    async with serve_engine(answer_ok) as p, serve_engine(answer_ok) as d:
        path.write_text(f"prefill: {p.url}\ndecode: {d.url}\nshutdown-timeout: 1\n")
        async with running(path, started) as (client, _):
            path.write_text("registration: 127.0.0.1:8500\nshutdown-timeout: 1\n")
            await reload(caplog, "Restart the router to change --registration. The router keeps its settings")
            assert "reload failed: the router has no engines" in caplog.text
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_options_of_the_command_line_stay_after_a_reload(
    tmp_path: Path, started: list[RouterServer], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(ENGINES + "idle-timeout: 5\nrequest-timeout: 7\nshutdown-timeout: 1\n")
    caplog.set_level(logging.INFO)
    async with running(path, started, "--request-timeout", "9") as (_, server):
        changed: list[Any] = []
        application: Any = server.config.app
        original = application.change
        application.change = lambda settings: (changed.append(settings), original(settings))
        path.write_text(ENGINES + "request-timeout: 8\n")
        await reload(caplog, "Restart the router to change --shutdown-timeout")
        (settings,) = changed
        assert settings.timeouts == RequestTimeouts(request=9)
        assert settings.decode == (Endpoint.parse("http://127.0.0.1:8200"),)


def test_router_without_a_file_is_ended_by_sighup(started: list[RouterServer]) -> None:
    engines = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
    assert invoke(app, "router", *engines)[0] == 0
    assert started[0]._reload is None


async def peer_certificate(server: RouterServer) -> bytes:
    """Returns the certificate that the router presents in a new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = server.servers[0].sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


def certificate_of(name: str) -> bytes:
    text = (CERTIFICATES / name).read_text()
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(begin + text.partition(begin)[2].partition(end)[0] + end)


async def test_reload_presents_the_certificate_that_the_file_has_now(
    tmp_path: Path, started: list[RouterServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, certificate = tmp_path / "router.yaml", tmp_path / "server.pem"
    certificate.write_bytes((CERTIFICATES / "server.pem").read_bytes())
    path.write_text(f"{ENGINES}ssl-certfile: {certificate}\nshutdown-timeout: 1\n")
    async with running(path, started) as (_, server):
        assert await peer_certificate(server) == certificate_of("server.pem")
        certificate.write_bytes((CERTIFICATES / "other.pem").read_bytes())
        await reload(caplog, "the router uses the new configuration")
        assert await peer_certificate(server) == certificate_of("other.pem")
        certificate.write_text("nonsense")
        await reload(caplog, "reload failed: cannot read a certificate")
        assert await peer_certificate(server) == certificate_of("other.pem")


@pytest.mark.parametrize("replaced", ["before", "behind"])
async def test_reload_of_a_certificate_that_is_being_replaced(
    tmp_path: Path,
    started: list[RouterServer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    replaced: str,
) -> None:
    """The key is still that of the certificate before, or has been replaced since both files were read."""
    caplog.set_level(logging.INFO)
    path, certificate, key = (tmp_path / name for name in ("router.yaml", "server.pem", "key.pem"))
    for file in (certificate, key):
        file.write_bytes((CERTIFICATES / "server.pem").read_bytes())
    path.write_text(f"{ENGINES}ssl-certfile: {certificate}\nssl-keyfile: {key}\nshutdown-timeout: 1\n")
    read = Certificate.read

    def read_while_replaced(self: Certificate) -> ssl.SSLContext:
        latest = read(self)
        certificate.write_bytes((CERTIFICATES / "server.pem").read_bytes())
        return latest

    async with running(path, started) as (_, server):
        certificate.write_bytes((CERTIFICATES / "other.pem").read_bytes())
        if replaced == "before":
            await reload(caplog, "reload failed: cannot read a certificate")
            assert "KEY_VALUES_MISMATCH" in caplog.text
            assert await peer_certificate(server) == certificate_of("server.pem")
        key.write_bytes((CERTIFICATES / "other.pem").read_bytes())
        monkeypatch.setattr(Certificate, "read", read_while_replaced)
        await reload(caplog, "the router uses the new configuration")
        assert await peer_certificate(server) == certificate_of("other.pem")
