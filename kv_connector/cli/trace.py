"""kv-connector trace: a transfer's timeline, layer by layer, for Perfetto or Chrome's chrome://tracing."""

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.router import KeyFile, address, cluster_key
from kv_connector.control.timelines import Unanswered, WorkerTimelines, ask_workers
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role
from kv_connector.protocol.wire.timeline import MAX_TIMELINES, About, LayerSpan, Receiving, Sending

ANSWER_SECONDS = 5.0

Json = dict[str, Any]


def trace(
    engines: Annotated[
        list[Address],
        typer.Argument(
            parser=address,
            metavar="HOST:PORT",
            help="Control addresses of the prefill engine, the decode engine, or both. One worker's address "
            "is enough for an engine.",
        ),
    ],
    request: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="Id of the transfer or of the request (X-Request-Id), or a part of it. Default: any.",
        ),
    ] = "",
    last: Annotated[
        int, typer.Option(min=1, max=MAX_TIMELINES, help="Transfers of each worker, the newest first.")
    ] = 1,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File for the trace.")
    ] = Path("trace.json"),
    key_file: KeyFile = None,
) -> None:
    """Writes the times at which each layer was computed, posted and landed, as a trace for ui.perfetto.dev.

    Engines record timelines only with a setting such as "timelines": 100.
    """
    try:
        workers = ask_workers(engines, cluster_key(key_file), request, last, ANSWER_SECONDS)
    except Unanswered as error:
        raise typer.BadParameter(str(error)) from None
    for worker in workers:
        if not worker.recalled.kept:
            typer.echo(f'{worker.name} keeps no timelines. Set "timelines": 100 in its settings', err=True)
        elif worker.recalled.lost:
            typer.echo(
                f"{worker.name} dropped {worker.recalled.lost} steps for lack of room: the trace "
                "may have gaps",
                err=True,
            )
    found = [about for worker in workers for about in _abouts(worker)]
    if not found:
        typer.echo(
            "no worker has a timeline of such a transfer. Check --request, and that the engines "
            "keep timelines",
            err=True,
        )
        raise typer.Exit(ExitStatus.FAILURE)
    output.write_text(json.dumps(chrome_trace(workers)))
    transfers = ", ".join(dict.fromkeys(about.transfer_id for about in found))
    typer.echo(f"{output}: {transfers}. Open it at https://ui.perfetto.dev or chrome://tracing")


def chrome_trace(workers: Sequence[WorkerTimelines]) -> Json:
    """Returns the timelines in Chrome's Trace Event Format.

    Each worker is a process, and each layer of each transfer a thread. Arrows lead from a post at prefill to
    the count at decode.
    """
    events: list[Json] = []
    clocks: Json = {}
    for process, worker in enumerate(workers, 1):
        role = worker.recalled.role.value
        drawn = _Process(process, worker)
        drawn.describe("process_name", 0, name=f"{role} {worker.name}")
        drawn.describe("process_sort_index", 0, sort_index=process if role == Role.DECODE.value else -process)
        clocks[worker.name] = {"error_us": worker.error / 1e3, "host": worker.recalled.host}
        for sending in worker.recalled.sent:
            drawn.sending(sending)
        for receiving in worker.recalled.received:
            drawn.receiving(receiving, _sources(workers, receiving))
        events += drawn.events
    begin = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - begin) / 1e3
    about = {
        "clocks": clocks,
        "aligned": "other hosts' clocks by the shortest of some round trips as the trace was fetched: wrong "
        "by error_us at most, and by what they have drifted apart since the transfer",
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _abouts(worker: WorkerTimelines) -> Iterator[About]:
    yield from (sending.about for sending in worker.recalled.sent)
    yield from (receiving.about for receiving in worker.recalled.received)


Landing = tuple[int, str, int, int]
"""The time at which prefill posted the last page of a layer (in our clock), the layer, the pages until then,
and the id of prefill's arrow."""


def _sources(workers: Sequence[WorkerTimelines], receiving: Receiving) -> list[Landing]:
    """Maps decode's count to layers, if one prefill worker wrote for one decode worker.

    A layer has landed once decode has counted all pages up to its last. Layers are posted one after the
    other, and land in that order except for a batch or two.
    """
    sendings = [
        (worker, sending)
        for worker in workers
        for sending in worker.recalled.sent
        if sending.about.transfer_id == receiving.about.transfer_id
    ]
    if len(sendings) != 1:
        return []
    worker, sending = sendings[0]
    pages, landings = 0, []
    for span in sorted(sending.spans, key=lambda span: span.last_post):
        pages += span.pages
        name = worker.recalled.layers[span.layer]
        landings.append((span.last_post + worker.to_ours, name, pages, _arrow(sending, span)))
    return landings


def _arrow(sending: Sending, span: LayerSpan) -> int:
    return zlib.crc32(f"{sending.about.transfer_id} {span.layer} {span.last_post}".encode())


class _Process:
    """One worker's events, in nanoseconds of our clock."""

    def __init__(self, number: int, worker: WorkerTimelines) -> None:
        self.events: list[Json] = []
        self._number = number
        self._worker = worker
        self._threads = 0

    def describe(self, what: str, thread: int, **values: object) -> None:
        self._add(ph="M", name=what, tid=thread, args=values)

    def sending(self, sending: Sending) -> None:
        about = sending.about
        self._transfer(sending, to=about.peer, bytes=sending.nbytes, decode_worker=sending.share)
        steps = self._thread("steps of the engine")
        for begin, end in _steps(sending):
            self._span("step", steps, begin, end, {})
        threads = {
            layer: self._thread(self._layer(layer)) for layer in sorted({s.layer for s in sending.spans})
        }
        for span in sending.spans:
            thread, values = threads[span.layer], {"pages": span.pages}
            self._span("waits", thread, span.computed, span.first_post, values)
            self._span("posted", thread, span.first_post, span.last_post, values)
            self._span("lands", thread, span.last_post, span.landed, values)
            self._at(span.computed, ph="i", s="t", name="computed", cat="layer", tid=thread, args=values)
            self._at(span.last_post, ph="s", name="pages", cat="flow", id=_arrow(sending, span), tid=thread)

    def receiving(self, receiving: Receiving, landings: Sequence[Landing]) -> None:
        about = receiving.about
        self._transfer(receiving, of=about.peer, pages=receiving.pages)
        for when, pages in receiving.counts:
            self._at(when, ph="C", name=f"pages of {about.transfer_id}", tid=0, args={"pages": pages})
        names = dict.fromkeys(sorted(name for _, name, _, _ in landings))
        threads = {name: self._thread(name) for name in names}
        for posted, name, pages, arrow in landings:
            for counted in [when for when, count in receiving.counts if count >= pages][:1]:
                # P's worker records a post after making it, so D may have counted the page earlier.
                when, thread = max(counted, posted - self._worker.to_ours), threads[name]
                self._at(when, ph="i", s="t", name="landed", cat="layer", tid=thread, args={"pages": pages})
                self._at(when, ph="f", bp="e", name="pages", cat="flow", id=arrow, tid=thread)

    def _transfer(self, timeline: Sending | Receiving, **values: object) -> None:
        about = timeline.about
        span = {"cat": "transfer", "id": about.transfer_id, "name": about.transfer_id, "tid": 0}
        said = {"request": about.request_id, "lane": about.lane, "outcome": about.outcome, **values}
        self._at(about.reserved, ph="b", args=said, **span)
        self._at(about.ended, ph="e", **span)

    def _thread(self, name: str) -> int:
        self._threads += 1
        self.describe("thread_name", self._threads, name=name)
        self.describe("thread_sort_index", self._threads, sort_index=self._threads)
        return self._threads

    def _layer(self, layer: int) -> str:
        names = self._worker.recalled.layers
        return names[layer] if layer < len(names) else str(layer)

    def _span(self, name: str, thread: int, begin: int, end: int, values: Json) -> None:
        if begin and end:
            self._at(
                begin, ph="X", name=name, cat="layer", tid=thread, dur=max(0, end - begin) / 1e3, args=values
            )

    def _at(self, when: int, **event: object) -> None:
        self._add(ts=when + self._worker.to_ours, **event)

    def _add(self, **event: object) -> None:
        self.events.append({"pid": self._number, **event})


def _steps(sending: Sending) -> Iterator[tuple[int, int]]:
    """Yields each step's span: from its report to the agent until its last layer was computed."""
    ends = (*sending.steps[1:], 1 << 62)
    for begin, limit in zip(sending.steps, ends, strict=True):
        computed = [span.computed for span in sending.spans if begin <= span.computed < limit]
        if computed:
            yield begin, max(computed)
