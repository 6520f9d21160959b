"""The command line of kv-connector verify."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.router import endpoint
from kv_connector.cli.verify.canaries import Route
from kv_connector.router.engines.endpoint import Endpoint

if TYPE_CHECKING:
    from kv_connector.cli.verify.run import Result, VerificationPlan
    from kv_connector.cli.verify.server import VerifiedServer
    from kv_connector.router.engines.client import EngineClient

STANDARD_OUTPUT = Path("-")
# vLLM's default block size on GPUs, for a reference that does not report its own.
USUAL_BLOCK = 16
_SALT = re.compile("[A-Za-z0-9_.-]{1,40}")
# More than any API key has.
_LONGEST_KEY = 4096


def verify(
    target: Annotated[
        Endpoint,
        typer.Argument(
            parser=endpoint, metavar="URL", help="URL of the router, or of another server to check."
        ),
    ],
    reference: Annotated[
        Endpoint | None,
        typer.Option(
            parser=endpoint,
            metavar="URL",
            help="URL of an engine with the same model that computes alone. Default: the first ready decode "
            "engine that the router lists at /health.",
        ),
    ] = None,
    admin: Annotated[
        Endpoint | None,
        typer.Option(
            parser=endpoint,
            metavar="URL",
            help="URL of the router's --admin address, where its metrics and its list of engines are.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to query. Needed if both servers list several models.")
    ] = None,
    route: Annotated[
        list[Route] | None,
        typer.Option(
            help="Kind of prompts: tokens or text (/v1/completions), or chat (/v1/chat/completions). Repeat "
            "for more. Default: all that the reference serves."
        ),
    ] = None,
    load: Annotated[
        int, typer.Option(min=1, max=256, help="Canaries in flight at a time in the pass under load.")
    ] = 8,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Repetitions of the whole check with new prompts.")
    ] = 1,
    longest: Annotated[
        int,
        typer.Option(
            min=64,
            max=1 << 17,
            help="Length of the longest prompt, in tokens. At most the model's longest sequence is used.",
        ),
    ] = 2048,
    max_tokens: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Tokens of each answer. Must fit the model's longest sequence."),
    ] = 24,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Tokens of a block. Prompts have lengths near its multiples. Default: the reference's block "
            f"size, or {USUAL_BLOCK} if it reports none.",
        ),
    ] = None,
    tie: Annotated[
        float,
        typer.Option(
            min=0,
            max=2,
            metavar="NATS",
            help="Do not count a difference at a token whose second candidate is at most this far behind, in "
            "log probability. 0 counts all differences.",
        ),
    ] = 0.0,
    require_transfer: Annotated[
        bool,
        typer.Option(
            "--require-transfer",
            help="Fail if a decode engine computed a prompt itself. Needs the metrics of kv-connector "
            "router, which count other clients' prompts too.",
        ),
    ] = False,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Report up to 20 faults. Default: end with the first one."),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time limit for each answer, in seconds."),
    ] = 120.0,
    salt: Annotated[
        str | None,
        typer.Option(help="Salt of the prompts. Repeats a run with the same prompts. Default: a random one."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the API key that both servers request: vLLM's --api-key, or a client's key of "
            "the router.",
        ),
    ] = None,
    reference_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the API key that the reference requests, if it is another than --api-key-file.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the result as one JSON object. -: standard output."),
    ] = None,
) -> None:
    """Sends canary prompts to a live deployment and compares each answer with that of one engine alone.

    All prompts are greedy. The reference answers each one twice first; a prompt with two answers is not
    counted. Then the deployment answers them one at a time and under load, streamed and whole, with hits and
    misses of its prefix cache.

    Status 1: an answer differs, is missing, or is that of another prompt; or no prompt had a stable reference
    answer. Status 2: a server cannot be reached.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise typer.BadParameter(f"{error}; install it: pip install 'kv-connector[router]'") from None
    if salt is not None and not _SALT.fullmatch(salt):
        raise typer.BadParameter(
            "--salt: use 1 to 40 letters, digits and the characters _ . -", param_hint="--salt"
        )
    if json is not None and json != STANDARD_OUTPUT and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json.absolute().parent} is not a folder", param_hint="--json")
    # Read once: a file such as /dev/stdin has nothing left for a second read.
    key = _api_key(api_key_file, "--api-key-file")
    wanted = RunOptions(
        target=target.url,
        reference=None if reference is None else reference.url,
        admin=None if admin is None else admin.url,
        model=model,
        routes=tuple(dict.fromkeys(route or ())),
        load=load,
        rounds=rounds,
        longest=longest,
        max_tokens=max_tokens,
        block=block_size,
        tie=tie,
        require_transfer=require_transfer,
        keep_going=keep_going,
        timeout=timeout,
        salt=salt or secrets.token_hex(4),
        api_key=key,
        reference_key=_api_key(reference_key_file, "--reference-key-file") or key,
    )
    to_errors = json == STANDARD_OUTPUT
    result = asyncio.run(_verify(wanted, lambda line: typer.echo(line, err=to_errors)))
    if isinstance(result, str):
        typer.echo(result, err=True)
        raise typer.Exit(ExitStatus.USAGE)
    from kv_connector.cli.verify.report import lines

    for line in lines(result):
        typer.echo(line, err=to_errors)
    if json is not None:
        _write(json, result)
    if not result.equal:
        raise typer.Exit(ExitStatus.FAILURE)


class RunOptions(msgspec.Struct, kw_only=True, frozen=True):
    """The options of a run."""

    target: str
    reference: str | None
    admin: str | None
    """URL at which the router lists its engines and has its metrics; None: that of the target."""
    model: str | None
    routes: tuple[Route, ...]
    load: int
    rounds: int
    longest: int
    max_tokens: int
    block: int | None
    tie: float
    require_transfer: bool
    keep_going: bool
    timeout: float
    salt: str
    api_key: str | None
    reference_key: str | None


async def _verify(wanted: RunOptions, say: Callable[[str], None]) -> Result | str:
    """Returns the result, or why no comparison is possible."""
    from kv_connector.cli.verify.run import UnusableError, verify
    from kv_connector.cli.verify.server import ServerError
    from kv_connector.router.engines.client import EngineClient

    async with EngineClient() as client:
        try:
            plan = await _plan(wanted, client)
            say(
                f"model {plan.sampling.model}, reference {plan.reference.url}, block size {plan.block}, "
                f"prompts of up to {plan.longest} tokens, salt {plan.salt}"
            )
            return await verify(plan, say)
        except ServerError as error:
            return f"{error}. Check the URL, and that the server runs and serves this"
        except UnusableError as error:
            return str(error)


async def _plan(wanted: RunOptions, client: EngineClient) -> VerificationPlan:
    from kv_connector.cli.verify import transfers
    from kv_connector.cli.verify.run import UnusableError, VerificationPlan
    from kv_connector.cli.verify.server import Sampling, ServerError, VerifiedServer

    def server(url: str, key: str | None) -> VerifiedServer:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return VerifiedServer(url, client, headers, wanted.timeout)

    target = server(wanted.target, wanted.api_key)
    # The address for operators needs no key, and has no HTTPS that would protect one.
    admin = target if wanted.admin is None else server(wanted.admin, None)
    listed = await target.models()
    engines = transfers.ListedEngines()
    if wanted.reference is None or wanted.require_transfer:
        try:
            engines = await transfers.engines(admin)
        except ServerError as error:
            if wanted.reference is None:
                raise UnusableError(f"{error}. Name an engine that computes alone: --reference URL") from None
    if wanted.reference is None and not engines.decode:
        raise UnusableError(
            f"{admin.url} lists no ready decode engine. If the router has an --admin address, name it with "
            "--admin. Or name an engine that computes alone: --reference URL"
        )
    reference = server(wanted.reference or engines.decode[0], wanted.reference_key)
    model, most = _model(wanted, listed, await reference.models())
    # One token is the room that some templates and servers add for the beginning of a sequence.
    longest = min(wanted.longest, most - wanted.max_tokens - 1) if most else wanted.longest
    if longest < 2:
        raise UnusableError(
            f"a sequence of {model} has at most {most} tokens. Lower --max-tokens from {wanted.max_tokens}"
        )
    decode = [server(url, wanted.reference_key) for url in engines.decode]
    return VerificationPlan(
        target=target,
        reference=reference,
        sampling=Sampling(model, wanted.max_tokens),
        routes=wanted.routes or tuple(Route),
        all_routes=not wanted.routes,
        block=wanted.block or await _block(reference) or USUAL_BLOCK,
        longest=longest,
        load=wanted.load,
        rounds=wanted.rounds,
        salt=wanted.salt,
        tie=wanted.tie,
        keep_going=wanted.keep_going,
        meter=transfers.Meter(admin, decode) if wanted.require_transfer else None,
    )


def _model(
    wanted: RunOptions, target: dict[str, int | None], reference: dict[str, int | None]
) -> tuple[str, int | None]:
    """Returns the model to query, and its longest sequence in tokens if a server reports it."""
    from kv_connector.cli.verify.run import UnusableError

    shared = [name for name in target if name in reference]
    name = wanted.model or (shared[0] if len(shared) == 1 else None)
    if name is None and shared:
        raise UnusableError(f"both servers list several models. Name one: --model {' | '.join(shared[:20])}")
    if name not in shared:
        raise UnusableError(
            f"not both servers list {'a common model' if name is None else name}. The deployment lists "
            f"{', '.join([*target][:20]) or 'none'}, the reference {', '.join([*reference][:20]) or 'none'}"
        )
    known = [most for most in (target[name], reference[name]) if most is not None]
    return name, min(known, default=None)


async def _block(reference: VerifiedServer) -> int | None:
    """Returns the reference's block size; None if it does not report it. vLLM and its fork report it."""
    from kv_connector.cli.verify.server import ServerError

    try:
        found = await reference.metrics()
    except ServerError:
        return None
    for metric in found:
        for sample in metric.samples if metric.name == "vllm:cache_config_info" else ():
            size = sample.labels.get("block_size", "")
            if size.isascii() and size.isdigit() and 1 <= int(size[:9]) <= 4096:
                return int(size[:9])
    return None


def _api_key(file: Path | None, option: str) -> str | None:
    if file is None:
        return None
    try:
        with file.open() as opened:
            key = opened.read(_LONGEST_KEY + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}", param_hint=option) from None
    if not key or len(key) > _LONGEST_KEY or not key.isascii() or not key.isprintable():
        raise typer.BadParameter(f"{file} must hold one API key", param_hint=option)
    return key


def _write(file: Path, result: Result) -> None:
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    if file == STANDARD_OUTPUT:
        typer.echo(text)
        return
    try:
        file.write_bytes(text + b"\n")
    except OSError as error:
        typer.echo(f"cannot write {file}: {error}", err=True)
        raise typer.Exit(ExitStatus.USAGE) from None
