"""kv-connector bench conversations: measures the user's own endpoints with conversations."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from kv_connector.bench.conversations.prompts import Api
from kv_connector.bench.conversations.workload import PRESETS, Pace
from kv_connector.cli.common.exit_status import ExitStatus

if TYPE_CHECKING:
    from kv_connector.bench.conversations.counters import MetricsSource
    from kv_connector.bench.conversations.run import Traced


class Preset(StrEnum):
    """Keys of PRESETS."""

    CHAT = "chat"
    AGENT = "agent"
    SMALL = "small"


_AT_ONCE = 4


def conversations(
    url: Annotated[
        list[str],
        typer.Option(
            metavar="URL",
            help="OpenAI-compatible endpoint: a router or an engine. Repeat it to spread conversations; all "
            "turns of a conversation go to one endpoint.",
        ),
    ],
    preset: Annotated[
        Preset,
        typer.Option(
            metavar="chat|agent|small",
            help="Conversations to generate. The options below change single values.",
        ),
    ] = Preset.CHAT,
    conversations: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, max=1_000_000, help="Number of conversations.")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, max=10_000, help="Turns of a conversation.")
    ] = None,
    system_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=0,
            max=10_000_000,
            help="Tokens of the system prompt, equal in all conversations.",
        ),
    ] = None,
    first_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", min=1, max=10_000_000, help="Tokens of a conversation's first message."
        ),
    ] = None,
    message_tokens: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", min=1, max=10_000_000, help="Tokens of each later message."),
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, max=1_000_000, help="Tokens of each answer.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=1,
            max=100_000,
            help=f"Closed loop: conversations in flight at any time. Default: {_AT_ONCE}.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            min=0.001,
            max=10_000,
            help="Open loop: conversations that start per second, at random times.",
        ),
    ] = None,
    think_time: Annotated[
        float,
        typer.Option(
            metavar="NUMBER",
            min=0,
            max=86_400,
            help="Mean pause between an answer and the next turn, in seconds.",
        ),
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trace in Mooncake's JSONL format, sent at its own times in place of generated "
            "conversations.",
        ),
    ] = None,
    trace_lines: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Lines of the trace to send. Default: all.")
    ] = None,
    trace_speed: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            min=0.001,
            max=1e6,
            help="Factor by which the trace is sent faster. Default: 1.",
        ),
    ] = None,
    api: Annotated[
        Api,
        typer.Option(
            metavar="chat|completions|tokens",
            help="Form of requests. chat: messages. completions: text. tokens: token ids, which vLLM "
            "supports.",
        ),
    ] = Api.CHAT,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model of the requests. Default: the first served model.")
    ] = "",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="Engine whose metrics are read before and after. Repeat it. Names that differ in their last "
            "number form a side, such as decode-0.",
        ),
    ] = None,
    compare: Annotated[
        str,
        typer.Option(metavar="URL", help="Endpoint that receives each turn too. Its answers must be equal."),
    ] = "",
    seed: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", min=0, help="Seed of all words and times. Equal seeds send equal first turns."
        ),
    ] = 0,
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos",
            help="Let answers end early. Default: answers of the full length, by `ignore_eos` (an extension "
            "of vLLM and SGLang).",
        ),
    ] = False,
    session_header: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Header that carries the conversation's id. Empty: no such header."
        ),
    ] = "X-Session-ID",
    timeout: Annotated[
        float, typer.Option(metavar="NUMBER", min=0.1, max=86_400, help="Limit of one turn, in seconds.")
    ] = 600.0,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="File to which conditions and results are appended as JSON lines. -: standard output; "
            "tables then go to standard error.",
        ),
    ] = None,
) -> None:
    """Sends conversations to your endpoints and measures each turn. Needs the extra `router`.

    Repeated runs need another --seed each, or engines with empty caches. Ctrl-C prints the turns that ended.
    """
    lengths = {
        "conversations": conversations,
        "turns": turns,
        "system": system_tokens,
        "first": first_tokens,
        "message": message_tokens,
        "answer": answer_tokens,
    }
    given = {name: value for name, value in lengths.items() if value is not None}
    if at_once is not None and rate is not None:
        raise typer.BadParameter("--at-once and --rate exclude each other. Give one of them")
    try:
        from kv_connector.bench.conversations.run import ConversationsPlan, Generated, Interrupted, run
        from kv_connector.bench.tables import make_console
    except ImportError as error:
        raise typer.BadParameter(f"{error}. Install it: pip install 'kv-connector[router]'") from None
    work: Generated | Traced
    if trace is not None:
        if given or at_once is not None or rate is not None or think_time:
            raise typer.BadParameter(
                "--trace brings its own lengths and times. Leave out the options of generated conversations"
            )
        work = _traced(trace, trace_lines, trace_speed or 1.0)
    else:
        if trace_lines is not None or trace_speed is not None:
            raise typer.BadParameter("--trace-lines and --trace-speed need --trace FILE")
        pace = Pace(
            at_once=0 if rate is not None else at_once or _AT_ONCE,
            rate=rate or 0.0,
            think_seconds=think_time,
        )
        work = Generated(replace(PRESETS[preset], **given), pace)
    plan = ConversationsPlan(
        urls=tuple(_base("--url", one) for one in url),
        work=work,
        api=api,
        model=model,
        seed=seed,
        ignore_eos=not stop_at_eos,
        session_header=_header(session_header),
        timeout=timeout,
        engines=_engines(engine or []),
        compare=_base("--compare", compare) if compare else "",
        json=json,
    )
    try:
        good = run(plan, make_console(json))
    except Interrupted:
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    if not good:
        raise typer.Exit(ExitStatus.FAILURE)


def _traced(file: Path, lines: int | None, speed: float) -> "Traced":
    from kv_connector.bench.conversations.run import Traced
    from kv_connector.bench.conversations.trace import MAX_LINES, TraceError, read_trace

    try:
        return Traced(file, read_trace(file, lines or MAX_LINES), speed)
    except TraceError as error:
        raise typer.BadParameter(f"--trace: {error}") from None
    except OSError as error:
        raise typer.BadParameter(f"--trace: {file}: {error.strerror}") from None


def _base(option: str, text: str) -> str:
    """Returns an endpoint's URL without the path of OpenAI's routes."""
    _check_url(option, text)
    return text.rstrip("/").removesuffix("/v1")


def _engines(texts: list[str]) -> "tuple[MetricsSource, ...]":
    from kv_connector.bench.conversations.counters import MetricsSource

    found: dict[str, MetricsSource] = {}
    for text in texts:
        name, separator, address = text.partition("=")
        if not name or not separator:
            raise typer.BadParameter(f"--engine: {text!r} is not NAME=URL, such as decode-0=http://host:8000")
        _check_url("--engine", address)
        if name in found:
            raise typer.BadParameter(f"--engine: the name {name!r} is used twice")
        page = address if urlsplit(address).path.strip("/") else f"{address.rstrip('/')}/metrics"
        found[name] = MetricsSource(name, page)
    return tuple(found.values())


def _check_url(option: str, text: str) -> None:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable or parts.query or parts.fragment:
        raise typer.BadParameter(f"{option}: {text!r} is not a URL such as http://127.0.0.1:8000")


def _header(name: str) -> str:
    if not all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name):
        raise typer.BadParameter(f"--session-header: {name!r} is not a header's name")
    return name
