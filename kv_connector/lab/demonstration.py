"""The demonstration of `kv-connector demo`: prompts through P (prefill engine) and D (decode engine), beside
one engine alone."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kv_connector.lab import plots
from kv_connector.lab.completion import CompletionTokens
from kv_connector.lab.model import make_llama
from kv_connector.lab.served import Served

# 16 layers of 4 KV heads x 64 x 2 x 4 bytes: 32 KiB of KV a token, 64 KiB a page of 32 tokens and one layer.
# The layers are enough to show a push layer by layer, with a prefill of about a second for the longest
# prompt.
LAYERS, KV_HEADS, BLOCK_TOKENS = 16, 4, 32
CHUNK_TOKENS = 1024
PROMPT_TOKENS = (7, 100, 500, 1000, 3000)
PROMPTS_PER_LENGTH = 3
OUTPUT_TOKENS = 24

# P's counters reach its /metrics with one of its next steps, and no event announces that.
SETTLE_SECONDS = 10.0
SETTLE_POLL_SECONDS = 0.2

PEERS = "kv_connector_peers"


class CompleteCall(Protocol):
    def __call__(self, url: str, prompt: Sequence[int], *, max_tokens: int) -> CompletionTokens:
        """Requests greedy tokens. CompletionError: the answer is incomplete."""


@dataclass(frozen=True)
class Site:
    """Ready engines, and the ways to reach them."""

    prefill: Served
    alone: str
    """URL of an engine that computes prefill and decode."""
    router: str
    complete: CompleteCall
    pages: Callable[[int], int]
    """Returns the number of pages that P pushes for a prompt of this many tokens."""


@dataclass(frozen=True)
class Pushed:
    """Counters of P's pushes from its /metrics: since its start, or between two readings."""

    pages: float
    bytes: float
    early_bytes: float
    layers: float
    early_layers: float

    @classmethod
    def look(cls, prefill: Served) -> "Pushed":
        return cls(
            pages=prefill.metric("kv_connector_pages_pushed_total"),
            bytes=prefill.metric("kv_connector_bytes_pushed_total"),
            early_bytes=prefill.metric("kv_connector_bytes_pushed_before_prefill_end_total"),
            layers=prefill.metric("kv_connector_layers_pushed_total"),
            early_layers=prefill.metric("kv_connector_layers_pushed_before_prefill_end_total"),
        )

    @classmethod
    def settled(cls, prefill: Served, before: "Pushed | None" = None) -> "Pushed":
        """Returns the counters once they stand still and are past `before`.

        Returns them anyway if that takes too long.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        last = cls.look(prefill)
        while time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_SECONDS)
            now = cls.look(prefill)
            if now == last and now != before:
                break
            last = now
        return last

    def since(self, before: "Pushed") -> "Pushed":
        return Pushed(
            self.pages - before.pages,
            self.bytes - before.bytes,
            self.early_bytes - before.early_bytes,
            self.layers - before.layers,
            self.early_layers - before.early_layers,
        )


@dataclass(frozen=True)
class DemonstrationRow:
    """The prompts of one length: medians of their times, and sums of their pushes."""

    tokens: int
    alone_seconds: float
    disaggregated_seconds: float
    equal: bool
    pushed: Pushed
    lane: str
    pages: int
    """Pages that P should push."""


def demonstrate(
    console: Console,
    directory: Path,
    start: Callable[[Path, Path], AbstractContextManager[Site]],
    plot: Path | None = None,
) -> list[str]:
    """Runs the demo with its files in `directory`, and returns the problems. Leaves no process behind.

    `start` makes the site, from a folder for its logs and a model. `plot` is the file in which its times are
    drawn. StartError: an engine does not start. CompletionError: an engine refuses a prompt.
    """
    started = time.monotonic()
    console.print(f"Making a Llama-shaped model with random weights: {LAYERS} layers, 32 KiB of KV a token")
    model = make_llama(directory / "model", layers=LAYERS, heads=KV_HEADS, kv_heads=KV_HEADS)
    console.print(
        "Starting a prefill engine, a decode engine and one engine alone (float32, one thread each): "
        "up to a minute"
    )
    with start(directory, model) as site:
        console.print(f"Ready after {time.monotonic() - started:.0f} s; prefill in chunks of {CHUNK_TOKENS}")
        rows: list[DemonstrationRow] = []
        with Live(_table(rows), console=console, auto_refresh=False) as live:
            for row in _rows(site):
                rows.append(row)
                live.update(_table(rows), refresh=True)
        console.print()  # ends the table's last line if the output is no terminal
    if plot is not None:
        _plot(plot, rows)
    return [problem for row in rows for problem in _problems(row)]


def _plot(file: Path, rows: Sequence[DemonstrationRow]) -> None:
    columns = [f"{row.tokens:,}" for row in rows]
    times = [
        plots.Series("one engine", [row.alone_seconds * 1e3 for row in rows]),
        plots.Series("prefill and decode apart", [row.disaggregated_seconds * 1e3 for row in rows]),
    ]
    early = [100 * row.pushed.early_bytes / row.pushed.bytes if row.pushed.bytes else None for row in rows]
    plots.bars(
        file,
        [
            plots.Panel("Time to first token", columns, times, "ms", "tokens of the prompt"),
            plots.Panel(
                "At decode before prefill has ended",
                columns,
                [plots.Series("of the bytes", early)],
                "%",
                "tokens of the prompt",
            ),
        ],
    )


def _rows(site: Site) -> Iterator[DemonstrationRow]:
    random_tokens = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        # No two prompts share a prefix, so no prefix cache has a hit.
        return [random_tokens.randrange(256) for _ in range(tokens)]

    # Not shown: the first contact between P and D, and everything else that happens once.
    urls = site.alone, site.router
    for url in urls:
        site.complete(url, prompt(CHUNK_TOKENS), max_tokens=OUTPUT_TOKENS)
    before = Pushed.settled(site.prefill)
    for tokens in PROMPT_TOKENS:
        prompts = [prompt(tokens) for _ in range(PROMPTS_PER_LENGTH)]
        # Engines take turns, so that other load on this machine affects both alike.
        pairs = [[site.complete(url, prompt, max_tokens=OUTPUT_TOKENS) for url in urls] for prompt in prompts]
        expected, got = zip(*pairs, strict=True)
        after = Pushed.settled(site.prefill, before)
        yield DemonstrationRow(
            tokens=tokens,
            alone_seconds=statistics.median(answer.first_token_seconds for answer in expected),
            disaggregated_seconds=statistics.median(answer.first_token_seconds for answer in got),
            equal=[answer.tokens for answer in expected] == [answer.tokens for answer in got],
            pushed=after.since(before),
            lane=_lane(site.prefill),
            pages=PROMPTS_PER_LENGTH * site.pages(tokens),
        )
        before = after


def _lane(prefill: Served) -> str:
    lanes = {labels.get("lane", "?") for labels, value in prefill.samples(PEERS) if value}
    return ", ".join(sorted(lanes)) or "none"


def _problems(row: DemonstrationRow) -> Iterator[str]:
    if not row.equal:
        yield f"{row.tokens} tokens: the output of the two engines differs from one engine's"
    # D has computed itself whatever did not come through the connector. Equal outputs prove nothing then.
    if row.pushed.pages != row.pages:
        went = f"{row.pushed.pages:,.0f} of {row.pages:,} pages"
        yield f"{row.tokens} tokens: {went} went through the connector"


def _table(rows: list[DemonstrationRow]) -> Table:
    table = Table(
        title="Time to first token with one engine and with two (P/D), and pages pushed",
        caption=f"{PROMPTS_PER_LENGTH} prompts of each length, {OUTPUT_TOKENS} greedy tokens each, medians. "
        "Early: before prefill ended.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    headings = ("\ntokens", "\noutput", "alone\nms", "P/D\nms", "\nratio", "\npages", "\nMiB")
    for heading in (*headings, "early\nlayers", "early\nbytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("\nlane")
    for row in rows:
        pushed = row.pushed
        table.add_row(
            f"{row.tokens:,}",
            "[green]equal" if row.equal else "[bold red]DIFFERS",
            f"{row.alone_seconds * 1e3:,.0f}",
            f"{row.disaggregated_seconds * 1e3:,.0f}",
            f"{row.disaggregated_seconds / row.alone_seconds:.2f}",
            f"{pushed.pages:,.0f}",
            f"{pushed.bytes / 2**20:,.1f}",
            f"{pushed.early_layers:,.0f}/{pushed.layers:,.0f}",
            f"{pushed.early_bytes / pushed.bytes:.0%}" if pushed.bytes else "-",
            row.lane,
        )
    return table
