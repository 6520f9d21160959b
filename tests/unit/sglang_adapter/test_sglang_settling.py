"""The delayed pause of a prefill or decode server, on a stand-in for SGLang's scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.sglang import plugin
from kv_connector.sglang.weights.settling import Settling

OURS = SimpleNamespace(rid=plugin.RID)


def request(name: str, *, pages: bool = False, images: object = None, embeds: object = None) -> Any:
    kv = SimpleNamespace(holds_kv=pages)
    return SimpleNamespace(name=name, kv=kv, multimodal_inputs=images, input_embeds=embeds)


@dataclass
class Scheduler:
    """Its queue of requests without pages is that of its role. ``busy``: it computes, or sends pages.

    ``seen``: what SGLang's own methods saw in that queue.
    """

    decodes: bool
    busy: bool = False
    takes_weights: bool = True
    recomputes: bool = True
    _engine_paused: bool = False
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = SimpleNamespace(queue=[request("waits")], retracted_queue=[])
        self.disagg_prefill_bootstrap_queue = None if self.decodes else self.queue
        self.disagg_decode_prealloc_queue = self.queue if self.decodes else None
        self.released: list[object] = []
        self.disagg_decode_transfer_queue = SimpleNamespace(
            queue=[], has_pending_deferred_releases=lambda: bool(self.released)
        )
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.running_batch, self.waiting_queue = SimpleNamespace(reqs=[]), []  # type: ignore[var-annotated]
        if self.takes_weights:
            self.kv_connector_settling = Settling(self, recomputes=self.recomputes)

    def is_fully_idle(self) -> bool:
        return not (self.busy or self.queue.queue)

    @property
    def waiting(self) -> list[str]:
        return [one.name for one in self.queue.queue]

    def pause(self, asked: Any = OURS) -> None:
        plugin._pause(Scheduler._pause, self, asked)

    def _pause(self, asked: Any) -> None:
        self._engine_paused = True
        self.seen.append(f"pause {self.waiting}")

    def turn(self, **more: bool) -> None:
        plugin._turn(None, self, **more)

    def resume(self) -> None:
        plugin._resume(self, "asked")
        self._engine_paused = False

    def abort(self) -> None:
        plugin._abort(Scheduler._abort, self, "asked")

    def _abort(self, asked: Any) -> None:
        self.seen.append(f"abort {self.waiting}")


def test_prefill_server_pauses_once_it_has_sent_what_decode_servers_wait_for() -> None:
    prefill = Scheduler(decodes=False, busy=True)
    prefill.pause()
    prefill.turn()
    assert not prefill.seen
    assert prefill.waiting == ["waits"], "a decode server may get pages for it"
    prefill.busy = False
    prefill.turn(stop_at_pause=True)
    assert not prefill.seen, "a batch is being computed"
    prefill.turn()
    assert prefill.seen == ["pause []"]
    assert prefill.is_fully_idle(), "SGLang empties its cache"


def test_prefill_server_waits_for_a_queued_request_with_pages() -> None:
    prefill = Scheduler(decodes=False)
    prefill.queue.queue.append(request("has pages", pages=True))
    prefill.pause()
    prefill.turn()
    assert not prefill._engine_paused
    prefill.queue.queue.pop()
    prefill.turn()
    assert prefill._engine_paused


@pytest.mark.parametrize("what", ["transfer", "release", "retracted", "grammar"])
def test_decode_server_pauses_once_its_transfers_have_ended(what: str) -> None:
    decode = Scheduler(decodes=True, busy=True)
    busy = {
        "transfer": decode.disagg_decode_transfer_queue.queue,
        "release": decode.released,
        "retracted": decode.queue.retracted_queue,
        "grammar": decode.grammar_manager.grammar_queue,
    }[what]
    busy.append("a request")
    decode.pause()
    decode.turn()
    assert not decode.seen
    assert not decode.waiting, "it begins no more transfers"
    busy.clear()
    decode.turn()
    assert decode.seen == ["pause []"], "requests that decode are retracted"


@pytest.mark.parametrize("where", ["running", "waiting"])
@pytest.mark.parametrize(
    ("recomputes", "more"), [(True, {"images": "an image"}), (True, {"embeds": [0.0]}), (False, {})]
)
def test_decode_server_ends_requests_that_cannot_be_computed_again(
    recomputes: bool, more: dict[str, Any], where: str
) -> None:
    decode = Scheduler(decodes=True, recomputes=recomputes)
    decoding = decode.running_batch.reqs if where == "running" else decode.waiting_queue
    decoding.append(request("decodes", pages=True, **more))
    decode.pause()
    decode.turn()
    assert not decode.seen
    decoding[:] = [request("decodes", pages=True)] * recomputes
    decode.turn()
    assert decode.seen == ["pause []"]


@pytest.mark.parametrize("decodes", [False, True])
def test_requests_of_the_pause_are_served_after_it(decodes: bool) -> None:
    scheduler = Scheduler(decodes)
    scheduler.pause()
    scheduler.turn()
    # A request that has passed the gate of the server process before it closed.
    scheduler.queue.queue.append(request("late"))
    scheduler.turn()
    assert scheduler.is_fully_idle()
    scheduler.abort()
    assert scheduler.seen == ["pause []", "abort ['waits', 'late']"]
    assert scheduler.is_fully_idle()
    scheduler.resume()
    assert scheduler.waiting == ["waits", "late"]
    scheduler.turn()
    assert scheduler.waiting == ["waits", "late"]


@pytest.mark.parametrize("decodes", [False, True])
def test_delayed_pause_is_dropped_when_the_server_resumes(decodes: bool) -> None:
    scheduler = Scheduler(decodes, busy=True)
    scheduler.disagg_decode_transfer_queue.queue.append("a request")
    scheduler.pause()
    scheduler.turn()
    scheduler.resume()
    assert scheduler.waiting == ["waits"]
    scheduler.busy = False
    scheduler.disagg_decode_transfer_queue.queue.clear()
    scheduler.turn()
    assert not scheduler.seen


def test_paused_server_is_paused_again_at_once() -> None:
    scheduler = Scheduler(decodes=False, busy=True, _engine_paused=True)
    scheduler.pause()
    assert scheduler.seen == ["pause ['waits']"]


@pytest.mark.parametrize(
    ("scheduler", "asked"),
    [
        (Scheduler(decodes=True), SimpleNamespace(rid=None)),
        (Scheduler(decodes=True), SimpleNamespace(rid="an operator's")),
        (Scheduler(decodes=True, takes_weights=False), OURS),
    ],
)
def test_pauses_of_others_take_effect_at_once(scheduler: Scheduler, asked: Any) -> None:
    scheduler.disagg_decode_transfer_queue.queue.append("a request")
    scheduler.pause(asked)
    assert scheduler.seen == ["pause ['waits']"]
    scheduler.turn()
    scheduler.abort()
    scheduler.resume()
    assert scheduler.waiting == ["waits"]
