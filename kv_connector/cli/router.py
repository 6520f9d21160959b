"""kv-connector router: OpenAI's routes in front of prefill and decode engines."""

import contextlib
import logging
from pathlib import Path
from typing import Annotated

import typer

from kv_connector.control.addresses import is_loopback, parse_address
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey, KeyFileError, find_key
from kv_connector.protocol.actions import Address
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.settings import Objectives, PolicyName, Settings, Timeouts
from kv_connector.router.front.limits import raise_descriptor_limit, requests_for

# ALB and nginx keep idle connections for 60 s. The side that sends requests must close first: a proxy does
# not repeat a POST that meets the end of its connection.
KEEP_ALIVE_S = 75


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


def router(
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
    try:
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401

        from kv_connector.router.engines.client import AuthorityError
        from kv_connector.router.front.app import create_app
        from kv_connector.router.front.server import STARTUP_FAILURE, RouterServer, ServerConfig
        from kv_connector.router.observe.access_log import AccessLogError
        from kv_connector.router.observe.spans import SpansError
    except ImportError as error:
        raise typer.BadParameter(f"{error}; install it: pip install 'kv-connector[router]'") from None
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if admin is not None and admin.port == port:
        raise typer.BadParameter(f"--admin and --port both have port {port}. Give --admin another port")
    key = cluster_key(key_file)
    if registration is not None and key is None and not allow_unauthenticated:
        refuse_strangers(registration)
    requests = requests_for(raise_descriptor_limit())
    if max_requests is not None:
        requests = min(requests, max_requests)
    try:
        settings = Settings(
            tuple(prefill or ()),
            tuple(decode or ()),
            dispatch="serial" if serial else "concurrent",
            registration=registration,
            key=key,
            require_prefill=require_prefill,
            policy=policy,
            objectives=objectives(ttft_ms, tbt_ms),
            rebalance=rebalance,
            status_details=status_details,
            otlp_traces_endpoint=otlp_traces_endpoint,
            access_log=access_log,
            body_limit=body_limit << 20,
            body_budget=body_budget << 20,
            requests=requests,
            timeouts=Timeouts(first_token_timeout, idle_timeout, request_timeout),
            requests_per_key=requests_per_key,
            api_key_file=None if api_key_file is None else str(api_key_file),
            engine_key_file=None if engine_key_file is None else str(engine_key_file),
            engine_ca=None if engine_ca is None else str(engine_ca),
            admin=admin,
            allow_origins=tuple(allow_origin or ()),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    logging.getLogger(__name__).info(
        "%s dispatch; prefill engines: %s; decode engines: %s%s; listening on http://%s:%d",
        settings.dispatch,
        ", ".join(f"{e.url} (control {e.control_host}:{e.control_port})" for e in settings.prefill) or "-",
        ", ".join(engine.url for engine in settings.decode) or "-",
        f"; engines register at {registration}" if registration else "",
        host,
        port,
    )
    try:
        app = create_app(settings)
    except SpansError as error:
        raise typer.BadParameter(f"--otlp-traces-endpoint: {error}") from None
    except (AccessLogError, AuthorityError, KeyFileError) as error:
        raise typer.BadParameter(str(error)) from None
    server = RouterServer(
        ServerConfig(
            app,
            connections=2 * requests,
            stall=settings.stall,
            host=host,
            port=port,
            # named: without this name and without uvloop, uvicorn would silently take a slower loop
            loop="uvloop",
            timeout_keep_alive=keep_alive,
            timeout_graceful_shutdown=shutdown_timeout,
        ),
        admin,
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise typer.Exit(STARTUP_FAILURE)


def refuse_strangers(registration: Address) -> None:
    """Refuses an address that other machines reach: any process that registers there gets prompts."""
    if not is_loopback(registration.host):
        raise typer.BadParameter(
            f"no cluster key: any machine that reaches {registration} could register as an engine and "
            "receive prompts. Create a key (kv-connector keygen FILE) and name it in --key-file, or give "
            "--allow-unauthenticated"
        )
