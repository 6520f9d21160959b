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
from kv_connector.router.engines.settings import Objectives, Settings
from kv_connector.router.front.limits import raise_descriptor_limit, requests_for

# ALB and nginx keep idle connections 60 s. The side that sends requests must close first: a proxy does not
# repeat a POST whose connection has ended.
KEEP_ALIVE_S = 75

STARTUP_FAILURE = 3  # uvicorn's value


def endpoint(text: str) -> Endpoint:
    """Parses an engine's address for typer, which shows the reason if it is wrong."""
    try:
        return Endpoint.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def address(text: str) -> Address:
    """Parses host:port for typer."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def cluster_key(path: Path | None) -> ClusterKey | None:
    """Returns the key in the file of an option or of the environment, for typer."""
    try:
        return find_key(None if path is None else str(path))
    except KeyFileError as error:
        raise typer.BadParameter(str(error)) from None


def objectives(ttft_ms: float | None, tbt_ms: float | None) -> Objectives | None:
    """Converts the options' milliseconds, for typer."""
    if ttft_ms is None and tbt_ms is None:
        return None
    if ttft_ms is None or tbt_ms is None:
        raise typer.BadParameter("--ttft-ms and --tbt-ms belong together: set both, or neither")
    try:
        return Objectives(ttft_ms / 1e3, tbt_ms / 1e3)
    except ValueError as error:
        raise typer.BadParameter(f"{error} (--ttft-ms, --tbt-ms)") from None


KeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help=f"File of the cluster key. Default: the file in {KEY_FILE_VARIABLE}."),
]


def router(
    prefill: Annotated[
        list[Endpoint] | None,
        typer.Option(
            parser=endpoint,
            metavar="URL[@HOST:PORT]",
            help="URL of a prefill engine, and after the @ its connector's control address "
            "(default: the same host, port 5600). Repeat for each engine, and for each data-parallel rank "
            "in order.",
        ),
    ] = None,
    decode: Annotated[
        list[Endpoint] | None,
        typer.Option(
            parser=endpoint,
            metavar="URL",
            help="URL of a decode engine. Repeat for each engine, and for each data-parallel rank.",
        ),
    ] = None,
    registration: Annotated[
        Address | None,
        typer.Option(
            parser=address,
            metavar="HOST:PORT",
            help="Address at which engines register (their setting `routers`).",
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
    serial: Annotated[
        bool,
        typer.Option(
            "--serial", help="Send a request to decode after prefill (NIXL's flow). Default: to both at once."
        ),
    ] = False,
    ttft_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Objective: milliseconds to the first token. Needs --tbt-ms. A prompt goes to the "
            "engine with "
            "the earliest first token, decode engines included. Default: always to a prefill engine.",
        ),
    ] = None,
    tbt_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Objective: milliseconds between two tokens. A decode engine gets no prompt whose chunks "
            "would delay its streams for longer. Needs --ttft-ms.",
        ),
    ] = None,
    require_prefill: Annotated[
        bool,
        typer.Option(
            "--require-prefill",
            help="Answer 503 if no prefill engine takes requests. Default: decode engines compute the "
            "prompts.",
        ),
    ] = False,
    rebalance: Annotated[
        bool,
        typer.Option(
            "--rebalance",
            help="Move the youngest stream of a decode engine to one with at most half as many "
            "streams and at "
            "least four fewer, once a second. For engines of role kv_both.",
        ),
    ] = False,
    status_details: Annotated[
        bool,
        typer.Option(
            "--status-details",
            help="Show engines' addresses and their own failure messages on the status page. Use it only if "
            "no untrusted client reaches this port.",
        ),
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL for OpenTelemetry spans, like vLLM's option of this name (also with "
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL). Default: no spans.",
        ),
    ] = None,
    body_limit: Annotated[
        int,
        typer.Option(metavar="MIB", min=1, help="Largest body of a request, in MiB. Larger bodies get 413."),
    ] = 64,
    body_budget: Annotated[
        int,
        typer.Option(
            metavar="MIB",
            min=1,
            help="Largest sum of the bodies of all requests in flight, in MiB. Beyond it, new "
            "requests get 503.",
        ),
    ] = 128,
    keep_alive: Annotated[
        int,
        typer.Option(
            metavar="S",
            min=1,
            help="Seconds until an idle connection is closed. Set it longer than the timeout of the proxy in "
            "front of the router.",
        ),
    ] = KEEP_ALIVE_S,
    shutdown_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            min=0,
            help="Seconds after SIGTERM for running requests to end. The remaining ones get an error event. "
            "Default: no limit.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log each request.")] = False,
) -> None:
    """Dispatches each completion to a prefill engine and a decode engine at the same time."""
    try:
        import httptools  # noqa: F401
        import uvicorn
        import uvloop  # noqa: F401

        from kv_connector.router.front.app import create_app
        from kv_connector.router.front.server import ServerConfig
        from kv_connector.router.observe.spans import SpansError
    except ImportError as error:
        raise typer.BadParameter(f"{error}. Install it: pip install 'kv-connector[router]'") from None
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    key = cluster_key(key_file)
    if registration is not None and key is None and not allow_unauthenticated:
        refuse_strangers(registration)
    requests = requests_for(raise_descriptor_limit())
    try:
        settings = Settings(
            tuple(prefill or ()),
            tuple(decode or ()),
            dispatch="serial" if serial else "concurrent",
            registration=registration,
            key=key,
            require_prefill=require_prefill,
            objectives=objectives(ttft_ms, tbt_ms),
            rebalance=rebalance,
            status_details=status_details,
            otlp_traces_endpoint=otlp_traces_endpoint,
            body_limit=body_limit << 20,
            body_budget=body_budget << 20,
            requests=requests,
        )
    except ValueError as error:
        raise typer.BadParameter(f"{error} (--prefill, --decode, --registration, --body-budget)") from None
    logging.getLogger(__name__).info(
        "%s dispatch over prefill %s and decode %s%s; listening on http://%s:%d",
        settings.dispatch,
        ", ".join(f"{e.url} (control {e.control_host}:{e.control_port})" for e in settings.prefill) or "-",
        ", ".join(engine.url for engine in settings.decode) or "-",
        f", and engines that register at {registration}" if registration else "",
        host,
        port,
    )
    try:
        app = create_app(settings)
    except SpansError as error:
        raise typer.BadParameter(f"--otlp-traces-endpoint: {error}") from None
    server = uvicorn.Server(
        ServerConfig(
            app,
            connections=2 * requests,
            stall=settings.stall,
            host=host,
            port=port,
            # named, because uvicorn would otherwise silently use a slower loop if it is missing
            loop="uvloop",
            timeout_keep_alive=keep_alive,
            timeout_graceful_shutdown=shutdown_timeout,
        )
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise typer.Exit(STARTUP_FAILURE)


def refuse_strangers(registration: Address) -> None:
    """Requires a key for registrations from other machines, because registered engines get prompts."""
    if not is_loopback(registration.host):
        raise typer.BadParameter(
            f"other machines reach {registration}, and no cluster key is set: any process that "
            "registers there "
            "gets prompts. Create a key (kv-connector keygen FILE) and set --key-file, or set "
            "--allow-unauthenticated"
        )
