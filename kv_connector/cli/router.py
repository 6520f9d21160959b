"""kv-connector router: OpenAI's routes in front of prefill and decode engines."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from typer.core import TyperCommand

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.common.router_file import RouterFileError, read_router_file
from kv_connector.control.addresses import is_loopback, parse_address
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey, KeyFileError, find_key
from kv_connector.protocol.actions import Address
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.limits import raise_descriptor_limit, requests_for
from kv_connector.router.settings import Objectives, PolicyName, RequestTimeouts, RouterSettings

if TYPE_CHECKING:
    from kv_connector.router.front.certificate import Certificate

# ALB and nginx keep idle connections for 60 s. The side that sends requests must close first: a proxy does
# not repeat a POST that meets the end of its connection.
KEEP_ALIVE_S = 75


logger = logging.getLogger(__name__)

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The exception for a wrong command line: click's, or that of a typer with click built in."""

# Name of the command's words in its context.
_WORDS = "kv_connector.words"
# Parameters that a reload applies, beside the contents of the file of API keys.
_RELOADED = frozenset(
    (
        *("prefill", "decode", "body_limit", "body_budget", "max_requests", "requests_per_key"),
        *("first_token_timeout", "idle_timeout", "request_timeout", "stream_comments"),
    )
)

# Options that name files which a reload reads again. Without any of them SIGHUP ends the router.
_FILES = ("config", "api_key_file", "engine_key_file", "engine_ca", "ssl_certfile")

# Longer than most answers: 12,000 tokens at 20 tokens a second. The Helm chart waits as long.
SHUTDOWN_S = 600


def endpoint(text: str) -> Endpoint:
    """Reads an engine's address for typer, which shows the reason if the address is invalid."""
    try:
        return Endpoint.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def address(text: str) -> Address:
    """Reads host:port for typer."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def cluster_key(path: Path | None) -> ClusterKey | None:
    """Returns the key that an option or the environment names, for typer."""
    try:
        return find_key(None if path is None else str(path))
    except KeyFileError as error:
        raise typer.BadParameter(str(error)) from None


def objectives(ttft_ms: float | None, tbt_ms: float | None) -> Objectives | None:
    """Returns the objectives, which the options give in milliseconds, for typer."""
    if ttft_ms is None and tbt_ms is None:
        return None
    if ttft_ms is None or tbt_ms is None:
        raise typer.BadParameter("--ttft-ms and --tbt-ms belong together. Give both or neither")
    try:
        return Objectives(ttft_ms / 1e3, tbt_ms / 1e3)
    except ValueError as error:
        raise typer.BadParameter(f"{error} (--ttft-ms, --tbt-ms)") from None


KeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help=f"File with the cluster key (default: {KEY_FILE_VARIABLE})."),
]


def config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the options of a file the defaults of the command's options, for typer."""
    if path is not None:
        try:
            context.default_map = read_router_file(Path(path), context.command.params)
        except RouterFileError as error:
            raise typer.BadParameter(str(error)) from None
    return path


def router(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=config_file,
            is_eager=True,
            metavar="FILE",
            help="YAML or JSON file with these options by name (`port: 8000`). Options of the command line "
            "override it.",
        ),
    ] = None,
    prefill: Annotated[
        list[Endpoint] | None,
        typer.Option(
            parser=endpoint,
            metavar="URL[@HOST:PORT]",
            help="Prefill engine; after the @ the control address of its connector "
            "(default: same host, port 5600). Repeat for each engine, and in order for each data-parallel "
            "rank.",
        ),
    ] = None,
    decode: Annotated[
        list[Endpoint] | None,
        typer.Option(
            parser=endpoint,
            metavar="URL",
            help="Decode engine. Repeat for each engine, and for each data-parallel rank.",
        ),
    ] = None,
    encoder: Annotated[
        list[Endpoint] | None,
        typer.Option(
            parser=endpoint,
            metavar="URL",
            help="Encoder engine (experimental). It gets requests with pictures first, and the prefill "
            "engine fetches their embeddings. Repeat for each engine.",
        ),
    ] = None,
    registration: Annotated[
        Address | None,
        typer.Option(
            parser=address,
            metavar="HOST:PORT",
            help="Address where engines register by themselves (engine setting `routers`).",
        ),
    ] = None,
    key_file: KeyFile = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated", help="Accept registrations from other machines without a cluster key."
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    admin: Annotated[
        Address | None,
        typer.Option(
            parser=address,
            metavar="HOST:PORT",
            help="Second address, with metrics and the status page, which the first one does not serve "
            "then. It needs no API key.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with a line `NAME KEY` for each client. Requests without a key of the file get 401. "
            "Engines do not get the key.",
        ),
    ] = None,
    engine_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the key that the router sends to engines (vLLM's --api-key). Default: engines "
            "get the client's key.",
        ),
    ] = None,
    engine_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file of the certificate authorities for engines with an https address. Default: the "
            "authorities of this host.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin whose scripts in browsers may call the router (CORS), or *. Repeat for each origin.",
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file with the router's own certificate and its chain. Clients then use HTTPS. The "
            "address of --admin stays HTTP.",
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file with the private key of --ssl-certfile. Default: the key is in that file.",
        ),
    ] = None,
    serial: Annotated[
        bool,
        typer.Option("--serial", help="Prefill first, then decode (NIXL's flow). Default: both at once."),
    ] = False,
    policy: Annotated[
        PolicyName | None,
        typer.Option(
            help="How engines are chosen. cache_aware: least work, given what engines have cached. "
            "fewest_outstanding: fewest requests. goodput: by --ttft-ms and --tbt-ms, the default with them.",
            show_default="cache_aware",
        ),
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Objective for the time to the first token, in milliseconds. With --tbt-ms a prompt is "
            "computed where its first token comes soonest, also by a decode engine. Default: always by a "
            "prefill engine.",
        ),
    ] = None,
    tbt_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Objective for the time between two tokens, in milliseconds. A decode engine computes no "
            "prompt whose chunks would delay its streams for longer.",
        ),
    ] = None,
    require_prefill: Annotated[
        bool,
        typer.Option(
            "--require-prefill",
            help="Answer 503 while no prefill engine takes requests. Default: decode engines compute the "
            "prompts meanwhile.",
        ),
    ] = False,
    require_encoder: Annotated[
        bool,
        typer.Option(
            "--require-encoder",
            help="Answer requests with pictures with 503 while no encoder engine takes requests. Default: "
            "prefill engines encode the pictures meanwhile.",
        ),
    ] = False,
    prefetch_answers: Annotated[
        bool,
        typer.Option(
            help="After an answer of a chat or a session, let the prefill engine load its KV from the decode "
            "engine. The next turn does not compute it.",
        ),
    ] = True,
    rebalance: Annotated[
        bool,
        typer.Option(
            "--rebalance",
            help="Every second, move the youngest stream from a decode engine with at least twice as many "
            "streams as another, and at least 4 more. For engines of role kv_both.",
        ),
    ] = False,
    status_details: Annotated[
        bool,
        typer.Option(
            "--status-details",
            help="Show engines' addresses and error messages on the status page. Use only where no stranger "
            "reaches this port.",
        ),
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Endpoint for OpenTelemetry spans, as vLLM's option of this name (with the same "
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL). Default: no spans.",
        ),
    ] = None,
    access_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write one JSON line for each request to this file; -: standard output. The file may be "
            "moved away while the router runs.",
        ),
    ] = None,
    body_limit: Annotated[
        int,
        typer.Option(metavar="MIB", min=1, help="Largest body of a request, in MiB. Longer bodies get 413."),
    ] = 64,
    body_budget: Annotated[
        int,
        typer.Option(
            metavar="MIB",
            min=1,
            help="Largest sum of the bodies of all requests in flight, in MiB. Requests beyond it get 503.",
        ),
    ] = 128,
    max_requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most requests in flight. Requests beyond it get 503. Default: a quarter of the limit on "
            "open files, which is also the maximum.",
        ),
    ] = None,
    requests_per_key: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most requests in flight with one API key. Requests beyond it get 429. Default: no limit.",
        ),
    ] = None,
    first_token_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds from a request's last byte to the first event of its stream. Later streams end "
            "with error 504. Default: no limit.",
        ),
    ] = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds between two events of a stream. A longer pause ends the stream with error 504. "
            "Default: no limit.",
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds from a request's last byte to the end of its answer. Longer requests end with "
            "error 504. Default: no limit.",
        ),
    ] = None,
    stream_comments: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds without an event after which a stream gets the comment `: keep-alive`, for proxies "
            "that end idle connections. Default: no comments.",
        ),
    ] = None,
    keep_alive: Annotated[
        int,
        typer.Option(
            metavar="S",
            min=1,
            help="Seconds until an idle connection is closed. Must exceed the idle timeout of a proxy in "
            "front of the router.",
        ),
    ] = KEEP_ALIVE_S,
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            metavar="S",
            min=0,
            help="Seconds after SIGTERM in which running requests may finish. The rest get an error event.",
        ),
    ] = SHUTDOWN_S,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log each request.")] = False,
) -> None:
    """Dispatches each completion to a prefill and a decode engine at the same time."""
    reload_due = asyncio.Event()
    reloads = any(map(context.params.get, _FILES))
    if reloads:
        # The server's own handler comes a second later. Until then, SIGHUP would end the process, and systemd
        # does not restart a service that SIGHUP has ended.
        signal.signal(signal.SIGHUP, lambda *_: reload_due.set())
    try:
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401

        from kv_connector.router.engines.client import AuthorityError
        from kv_connector.router.front.app import create_app
        from kv_connector.router.front.certificate import CertificateError
        from kv_connector.router.front.server import RouterServer, ServerConfig
        from kv_connector.router.observe.access_log import AccessLogError
        from kv_connector.router.observe.line_writer import STANDARD_ERROR, QueuedHandler
        from kv_connector.router.observe.spans import SpansError
    except ImportError as error:
        raise typer.BadParameter(f"{error}; install it: pip install 'kv-connector[router]'") from None
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[QueuedHandler(STANDARD_ERROR)],
    )
    requests = requests_for(raise_descriptor_limit())
    settings = settings_of(context.params, cluster_key(key_file), requests)
    try:
        certificate = _certificate(context.params)
        app = create_app(settings)
    except SpansError as error:
        raise typer.BadParameter(f"--otlp-traces-endpoint: {error}") from None
    except (AccessLogError, AuthorityError, CertificateError, KeyFileError) as error:
        raise typer.BadParameter(str(error)) from None
    logger.info(
        "router: listens on %s://%s:%d with %s dispatch, prefill engines %s, decode engines %s%s%s",
        "http" if ssl_certfile is None else "https",
        host,
        port,
        settings.dispatch,
        ", ".join(f"{e.url} (control {e.control_host}:{e.control_port})" for e in settings.prefill) or "-",
        ", ".join(engine.url for engine in settings.decode) or "-",
        f", encoder engines {', '.join(e.url for e in settings.encoders)}" if settings.encoders else "",
        f", and registration at {settings.registration}" if settings.registration else "",
    )
    server = RouterServer(
        ServerConfig(
            app,
            connections=2 * requests,
            stall=settings.stall,
            tls=None if certificate is None else certificate.context,
            refused=app.refused,
            host=host,
            port=port,
            # named: without this name and without uvloop, uvicorn would silently take a slower loop
            loop="uvloop",
            timeout_keep_alive=keep_alive,
            timeout_graceful_shutdown=shutdown_timeout,
        ),
        settings.admin,
        Reloads(context, app, requests, certificate).reload if reloads else None,
        reload_due,
    )
    # A full collection looks at all objects, while no stream gets a token. The 70,000 of a router without
    # requests took 45 ms (two busy cores, 2026-11-30).
    gc.collect()
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise typer.Exit(ExitStatus.STARTUP)


class RouterCommand(TyperCommand):
    """The command, which keeps its words: a reload parses them again."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


class Changing(Protocol):
    """The application, as far as a reload uses it."""

    def change(self, settings: RouterSettings, /) -> None: ...


def _certificate(given: Mapping[str, Any]) -> "Certificate | None":
    """Returns the router's own certificate. Raises CertificateError."""
    from kv_connector.router.front.certificate import Certificate

    if given["ssl_certfile"] is None:
        return None
    return Certificate(given["ssl_certfile"], given["ssl_keyfile"])


class Reloads:
    """Reads the configuration file again, and the files of keys and certificates, while the router runs."""

    def __init__(
        self, context: typer.Context, app: Changing, requests: int, certificate: "Certificate | None" = None
    ) -> None:
        """``requests``: as for settings_of(). ``certificate``: the router's own."""
        self._command, self._words = context.command, context.meta[_WORDS]
        self._app = app
        self._certificate = certificate
        self._requests = requests
        self._running = dict(context.params)

    async def reload(self) -> None:
        """Applies what can change, and logs what needs a restart. If there is an error, nothing changes."""
        try:
            used, settings, fixed = await asyncio.to_thread(self._read)
            latest = None if self._certificate is None else self._certificate.read()
            self._app.change(settings)
        except (UsageError, ValueError) as error:  # a ValueError is an error of a file
            logger.error("reload failed: %s. The router keeps its settings", message_of(error))
            return
        if self._certificate is not None and latest is not None:
            self._certificate.present(latest)
        self._running |= {name: used[name] for name in _RELOADED}
        logger.info("reload: the router uses the new configuration%s", _restart(fixed))

    def _read(self) -> tuple[dict[str, Any], RouterSettings, Collection[str]]:
        """Returns the parameters to use, their settings, and the parameters that need a restart."""
        given = self._command.make_context("router", list(self._words)).params
        settings_of(given, cluster_key(given["key_file"]), self._requests)
        fixed = {name for name, value in given.items() if value != self._running[name]} - _RELOADED
        if (given["api_key_file"] is None) == (self._running["api_key_file"] is None):
            fixed.discard("api_key_file")
        # The new options must fit the options that stay. A list of engines that ends because they are to
        # register would leave this router without engines.
        used = {**given, **{name: self._running[name] for name in fixed}}
        try:
            return used, settings_of(used, cluster_key(used["key_file"]), self._requests), fixed
        except UsageError as error:
            raise typer.BadParameter(f"{message_of(error)}{_restart(fixed)}") from None


def message_of(error: Exception) -> str:
    """Returns an error's text, with the name of the option if click knows it."""
    if isinstance(error, typer.BadParameter) and error.param is not None:
        return error.format_message()
    return str(getattr(error, "message", error))


def _restart(fixed: Collection[str]) -> str:
    options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(fixed))
    return f". Restart the router to change {options}" if fixed else ""


def settings_of(given: Mapping[str, Any], key: ClusterKey | None, requests: int) -> RouterSettings:
    """Returns the settings for the command's parameters, for typer.

    ``given``: the parameters by name. ``key``: the cluster key. ``requests``: most requests in flight for
    which this process has descriptors.
    """
    registration, admin, port = given["registration"], given["admin"], given["port"]
    if admin is not None and admin.port == port:
        raise typer.BadParameter(f"--admin and --port both have port {port}. Give --admin another port")
    if given["ssl_keyfile"] is not None and given["ssl_certfile"] is None:
        raise typer.BadParameter("--ssl-keyfile is the key of --ssl-certfile. Give both, or neither")
    if registration is not None and key is None and not given["allow_unauthenticated"]:
        refuse_strangers(registration)
    try:
        return RouterSettings(
            tuple(given["prefill"] or ()),
            tuple(given["decode"] or ()),
            dispatch="serial" if given["serial"] else "concurrent",
            registration=registration,
            key=key,
            encoders=tuple(given["encoder"] or ()),
            require_prefill=given["require_prefill"],
            require_encoder=given["require_encoder"],
            policy=PolicyName(given["policy"]) if given["policy"] else None,
            objectives=objectives(given["ttft_ms"], given["tbt_ms"]),
            prefetch_answers=given["prefetch_answers"],
            rebalance=given["rebalance"],
            status_details=given["status_details"],
            otlp_traces_endpoint=given["otlp_traces_endpoint"],
            access_log=given["access_log"],
            body_limit=given["body_limit"] << 20,
            body_budget=given["body_budget"] << 20,
            requests=min(requests, given["max_requests"] or requests),
            timeouts=RequestTimeouts(
                given["first_token_timeout"], given["idle_timeout"], given["request_timeout"]
            ),
            stream_comments=given["stream_comments"],
            requests_per_key=given["requests_per_key"],
            api_key_file=_path(given["api_key_file"]),
            engine_key_file=_path(given["engine_key_file"]),
            engine_ca=_path(given["engine_ca"]),
            admin=admin,
            allow_origins=tuple(given["allow_origin"] or ()),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _path(given: object) -> str | None:
    return None if given is None else str(given)


def refuse_strangers(registration: Address) -> None:
    """Refuses an address that other machines reach: any process that registers there gets prompts."""
    if not is_loopback(registration.host):
        raise typer.BadParameter(
            f"no cluster key: any machine that reaches {registration} could register as an engine and "
            "receive prompts. Create a key (kv-connector keygen FILE) and name it in --key-file, or give "
            "--allow-unauthenticated"
        )
