"""What `kv-connector demo` shows: prompts through P and D beside one engine alone."""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kv_connector.lab.cluster import Engine, EngineSettings, LocalCluster
from kv_connector.lab.completion import complete
from kv_connector.lab.model import make_llama

# 16 layers of 4 KV heads x 64 x 2 x 4 bytes: 32 KiB of KV a token, 64 KiB a page of 32 tokens and one layer.
# Layers enough that a push layer by layer shows, and a prefill of about a second for the longest prompt.
LAYERS, KV_HEADS, BLOCK_TOKENS = 16, 4, 32
CHUNK_TOKENS = 1024
PROMPT_TOKENS = (7, 100, 500, 1000, 3000)
PROMPTS_PER_LENGTH = 3
OUTPUT_TOKENS = 24

# P's counters reach its /metrics with one of its next steps, and there is no event to wait for.
SETTLE_SECONDS = 10.0
SETTLE_POLL_SECONDS = 0.2

PEERS = "kv_connector_peers"


@dataclass(frozen=True)
class Pushed:
    """What P has pushed, as its /metrics tell: since its start, or between two looks."""

    pages: float
    bytes: float
    early_bytes: float
    layers: float
    early_layers: float

    @classmethod
    def look(cls, prefill: Engine) -> "Pushed":
        return cls(
            pages=prefill.metric("kv_connector_pages_pushed_total"),
            bytes=prefill.metric("kv_connector_bytes_pushed_total"),
            early_bytes=prefill.metric("kv_connector_bytes_pushed_before_prefill_end_total"),
            layers=prefill.metric("kv_connector_layers_pushed_total"),
            early_layers=prefill.metric("kv_connector_layers_pushed_before_prefill_end_total"),
        )

    @classmethod
    def settled(cls, prefill: Engine, before: "Pushed | None" = None) -> "Pushed":
        """The counters once they stand still and are past `before`; as they are if that takes too long."""
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
class Row:
    """The prompts of one length: medians of their times, sums of what was pushed for them."""

    tokens: int
    alone_seconds: float
    disaggregated_seconds: float
    equal: bool
    pushed: Pushed
    lane: str


def demonstrate(console: Console, directory: Path, provider: str | None) -> list[str]:
    """Runs the demo with its files in `directory`; returns what went wrong. Leaves no process behind.

    `provider` None lets the connector choose. StartError where an engine does not start, CompletionError
    where one refuses a prompt.
    """
    started = time.monotonic()
    console.print(f"Making a Llama-shaped model with random weights: {LAYERS} layers, 32 KiB of KV a token")
    model = make_llama(directory / "model", layers=LAYERS, heads=KV_HEADS, kv_heads=KV_HEADS)
    settings = EngineSettings(
        max_model_len=max(PROMPT_TOKENS) + OUTPUT_TOKENS,
        max_batched_tokens=CHUNK_TOKENS,
        block_size=BLOCK_TOKENS,
    )
    extra = {"providers": [provider]} if provider else {}
    with LocalCluster(directory, model, settings) as cluster:
        console.print("Starting P, D and one engine alone (vLLM, float32, one thread each): up to a minute")
        prefill = cluster.start_engine("prefill", role="kv_producer", extra=extra)
        decode = cluster.start_engine("decode", role="kv_consumer", extra=extra)
        alone = cluster.start_engine("alone")
        cluster.wait_ready()
        router = cluster.start_router("router", prefill=[prefill], decode=[decode])
        cluster.wait_ready()
        console.print(f"Ready after {time.monotonic() - started:.0f} s; prefill in chunks of {CHUNK_TOKENS}")
        rows: list[Row] = []
        with Live(_table(rows), console=console, auto_refresh=False) as live:
            for row in _rows(prefill, alone, router):
                rows.append(row)
                live.update(_table(rows), refresh=True)
        console.print()  # the table's last line is still open where there is no terminal
    return [problem for row in rows for problem in _problems(row)]


def _rows(prefill: Engine, alone: Engine, router: str) -> Iterator[Row]:
    random_tokens = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        # No two prompts share a prefix, so nothing comes out of a prefix cache.
        return [random_tokens.randrange(256) for _ in range(tokens)]

    # Not shown: the first contact between P and D, and everything else that happens once.
    for url in (alone.url, router):
        complete(url, prompt(CHUNK_TOKENS), max_tokens=OUTPUT_TOKENS)
    before = Pushed.settled(prefill)
    for tokens in PROMPT_TOKENS:
        prompts = [prompt(tokens) for _ in range(PROMPTS_PER_LENGTH)]
        # Turn by turn: whatever else this machine does falls on both alike.
        pairs = [
            [complete(url, prompt, max_tokens=OUTPUT_TOKENS) for url in (alone.url, router)]
            for prompt in prompts
        ]
        expected, got = zip(*pairs, strict=True)
        after = Pushed.settled(prefill, before)
        yield Row(
            tokens=tokens,
            alone_seconds=statistics.median(answer.first_token_seconds for answer in expected),
            disaggregated_seconds=statistics.median(answer.first_token_seconds for answer in got),
            equal=[answer.tokens for answer in expected] == [answer.tokens for answer in got],
            pushed=after.since(before),
            lane=_lane(prefill),
        )
        before = after


def _lane(prefill: Engine) -> str:
    lanes = {labels.get("lane", "?") for labels, value in prefill.samples(PEERS) if value}
    return ", ".join(sorted(lanes)) or "none"


def _problems(row: Row) -> Iterator[str]:
    if not row.equal:
        yield f"{row.tokens} tokens: the output through P and D differs from one engine's"
    # Whatever did not come through the connector D has computed by itself: equal outputs that show nothing.
    expected = PROMPTS_PER_LENGTH * LAYERS * -(-row.tokens // BLOCK_TOKENS)
    if row.pushed.pages != expected:
        yield f"{row.tokens} tokens: {row.pushed.pages:,.0f} of {expected:,} pages went through the connector"


def _table(rows: list[Row]) -> Table:
    table = Table(
        title="Time to first token alone and through P and D, and what P pushed",
        caption=f"{PROMPTS_PER_LENGTH} prompts of each length, {OUTPUT_TOKENS} greedy tokens each, medians. "
        "Early: before P's prefill ended.",
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
