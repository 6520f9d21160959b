"""The tables of a run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from kv_connector.bench.conversations.results import EngineGrowth, Prediction, Totals, Turn
from kv_connector.bench.conversations.turn_numbers import TurnNumbers
from kv_connector.bench.tables import print_table

_HEADER = [
    "turn",
    "answers",
    "failed",
    "TTFT p50",
    "TTFT p99",
    "between p50",
    "between p99",
    "prompt",
    "cached",
    "new",
    "answer",
]


def totals(
    turns: Sequence[Turn], engines: Sequence[EngineGrowth], seconds: float, *, interrupted: bool
) -> Totals:
    complete = [turn for turn in turns if not turn.failed]
    cached = [turn.cached_tokens for turn in complete if turn.cached_tokens is not None]
    return Totals(
        seconds=round(seconds, 3),
        interrupted=interrupted,
        conversations=len({turn.conversation for turn in complete}),
        turns=len(complete),
        failures=dict(Counter(turn.cause for turn in turns if turn.failed)),
        differences=sum(bool(turn.difference) for turn in turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in complete),
        new_tokens=sum(turn.new_tokens for turn in complete),
        unseen_tokens=sum(turn.unseen_tokens for turn in complete),
        cached_tokens=sum(cached) if cached else None,
        answer_tokens=sum(turn.answer_tokens for turn in complete),
        computed_tokens=_sum(engine.computed_tokens for engine in engines),
        bytes_pushed=_sum(engine.bytes_pushed for engine in engines),
        spread=dict(_spread(engines)),
        max_late_s=max((turn.late_s for turn in turns), default=0.0),
    )


def _sum(values: Iterable[int | None]) -> int | None:
    """Returns the sum of the known values; None: no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _spread(engines: Sequence[EngineGrowth]) -> Iterator[tuple[str, float]]:
    for side in dict.fromkeys(engine.side for engine in engines):
        tokens = [engine.prompt_tokens for engine in engines if engine.side == side]
        known = [number for number in tokens if number is not None]
        if len(known) > 1 and min(known) > 0:
            yield side, round(max(known) / min(known), 3)


def print_results(
    console: Console,
    turns: Sequence[Turn],
    engines: Sequence[EngineGrowth],
    predictions: Sequence[Prediction],
    total: Totals,
) -> None:
    """Prints all tables. A table without rows is left out."""
    title = "Turns: times in ms, tokens as means per turn (between: time between tokens)"
    print_table(console, title, _HEADER, _turn_rows(turns))
    print_table(
        console,
        "Engines: prompt tokens by source during the run",
        ["engine", "requests", "prompt", "computed", "own cache", "transferred", "own hit rate", "MB pushed"],
        (_engine_row(engine) for engine in engines if not engine.problem),
    )
    print_table(
        console,
        "Router's hit counters",
        ["counter", "labels", "growth"],
        (
            [
                escape(one.name),
                escape(", ".join(f"{k}={v}" for k, v in one.labels.items())),
                f"{one.tokens:,.0f}",
            ]
            for one in predictions
        ),
        names=2,
    )
    print_table(console, "Totals", ["", "", "per conversation"], _total_rows(total))
    for engine in engines:
        if engine.problem:
            console.print(f"[yellow]no counters of engine {escape(engine.name)}:[/] {escape(engine.problem)}")
    _print_failures(console, turns)
    if total.interrupted:
        console.print("[yellow]interrupted:[/] the tables have the turns that had ended")


def _turn_rows(turns: Sequence[Turn]) -> Iterator[list[str]]:
    numbers = sorted({turn.turn for turn in turns})
    for number in numbers:
        yield _turn_row(str(number), [turn for turn in turns if turn.turn == number])
    if len(numbers) > 2:
        yield _turn_row("2 and later", [turn for turn in turns if turn.turn > 1])
    if len(numbers) > 1:
        yield _turn_row("all", turns)


def _turn_row(name: str, turns: Sequence[Turn]) -> list[str]:
    row = TurnNumbers.of(turns)
    times = (row.ttft_p50, row.ttft_p99, row.between_p50, row.between_p99)
    tokens = (row.prompt, row.cached, row.new, row.answer)
    return [
        name,
        str(row.answers),
        f"[red]{row.failed}[/]" if row.failed else "0",
        *("-" if number is None else f"{number:,.1f}" for number in times),
        *("-" if number is None else f"{number:,.0f}" for number in tokens),
    ]


def _engine_row(engine: EngineGrowth) -> list[str]:
    hits = _ratio(engine.local_hit_tokens, engine.prompt_tokens)
    return [
        escape(engine.name),
        *(
            _count(number)
            for number in (
                engine.requests,
                engine.prompt_tokens,
                engine.computed_tokens,
                engine.local_hit_tokens,
                engine.transferred_tokens,
            )
        ),
        "-" if hits is None else f"{hits:.1%}",
        "-" if engine.bytes_pushed is None else f"{engine.bytes_pushed / 1e6:,.1f}",
    ]


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _total_rows(total: Totals) -> Iterator[list[str]]:
    def row(name: str, value: int | None, unit: int = 1) -> list[str]:
        if value is None:
            return [name, "-", "-"]
        each = f"{value / unit / total.conversations:,.1f}" if total.conversations else "-"
        return [name, f"{value / unit:,.1f}" if unit > 1 else f"{value:,}", each]

    yield ["seconds", f"{total.seconds:,.1f}", ""]
    yield ["conversations", f"{total.conversations:,}", ""]
    yield row("complete turns", total.turns)
    yield row("prompt tokens", total.prompt_tokens)
    yield row("new: not in the prompt of the turn before", total.new_tokens)
    yield row("unseen: new, and not in the answer before", total.unseen_tokens)
    if total.cached_tokens is not None:
        yield row("cached, by the answers' usage", total.cached_tokens)
    yield row("answer tokens", total.answer_tokens)
    if total.computed_tokens is not None:
        yield row("prompt tokens computed by all engines", total.computed_tokens)
        for name, tokens in (("new", total.new_tokens), ("unseen", total.unseen_tokens)):
            if (ratio := _ratio(total.computed_tokens, tokens)) is not None:
                yield [f"computed per {name} token", f"{ratio:.2f}", ""]
    if total.bytes_pushed is not None:
        yield row("MB pushed", total.bytes_pushed, 1_000_000)
    for side, spread in total.spread.items():
        yield [f"prompt tokens, busiest / least busy {escape(side)}", f"{spread:.2f}", ""]
    yield ["latest request, s behind its time", f"{total.max_late_s:.3f}", ""]


def _print_failures(console: Console, turns: Sequence[Turn]) -> None:
    failed = [turn for turn in turns if turn.failed]
    for cause, count in Counter(turn.cause for turn in failed).most_common():
        one = next(turn for turn in failed if turn.cause == cause)
        where = f"conversation {one.conversation}, turn {one.turn}"
        console.print(f"[red]failed turns, {escape(cause)}: {count}.[/] {where}: {escape(one.reason)}")
    if different := [turn for turn in turns if turn.difference]:
        one = different[0]
        where = f"conversation {one.conversation}, turn {one.turn}"
        console.print(
            f"[red]different answers: {len(different)}.[/] The first: {where}, {escape(one.difference)}"
        )
