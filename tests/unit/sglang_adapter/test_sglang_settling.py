"""The delayed pause of a prefill or decode server, on a stand-in for SGLang's scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.sglang import plugin
from kv_connector.sglang.recomputes import held_shown
from kv_connector.sglang.weights.settling import Settling

OURS = SimpleNamespace(rid=plugin.RID)


def request(
    name: str, *, pages: bool = False, images: object = None, embeds: object = None, ends: object = None
) -> Any:
    """``ends``: SGLang's reason to end the request in its next step."""
    kv = SimpleNamespace(holds_kv=pages)
    return SimpleNamespace(
        name=name,
        rid=name,
        kv=kv,
        multimodal_inputs=images,
        input_embeds=embeds,
        to_finish=ends,
        is_rebootstrap=False,
    )


@dataclass
class Scheduler:
    """Its queue of requests without pages is that of its role. ``busy``: it computes, or sends pages.

    ``seen``: what SGLang's own methods saw in that queue.
    """

    decodes: bool
    busy: bool = False
    takes_weights: bool = True
    recomputes: bool = True
    backend: str = "mooncake"
    _engine_paused: bool = False
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = SimpleNamespace(
            queue=[request("waits")],
            retracted_queue=[],
            held_rebootstrap_reqs=[],
            kv_manager=SimpleNamespace(),
        )
        self.disagg_prefill_bootstrap_queue = None if self.decodes else self.queue
        self.disagg_decode_prealloc_queue = self.queue if self.decodes else None
        self.released: list[object] = []
        self.disagg_decode_transfer_queue = SimpleNamespace(
            queue=[], has_pending_deferred_releases=lambda: bool(self.released)
        )
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.running_batch, self.waiting_queue = SimpleNamespace(reqs=[]), []  # type: ignore[var-annotated]
        self.transfer_backend = SimpleNamespace(value=self.backend)
        if self.takes_weights:
            self.kv_connector_weights = SimpleNamespace(torn=False, tried="")
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

    def abort(self, rid: str, *, abort_all: bool = False) -> None:
        plugin._abort(Scheduler._abort, self, SimpleNamespace(rid=rid, abort_all=abort_all))

    def _abort(self, asked: Any) -> None:
        """Ends the retracted requests that SGLang sees, as its own method does."""
        self.seen.append(f"abort {self.waiting}")
        ended = [one for one in self.queue.retracted_queue if asked.abort_all or one.rid == asked.rid]
        self.queue.retracted_queue = [one for one in self.queue.retracted_queue if one not in ended]
        self.seen += [f"ended {one.name}" for one in ended]

    def hold(self, *names: str) -> None:
        """SGLang's pause has retracted these requests."""
        self.queue.held_rebootstrap_reqs += map(request, names)

    @property
    def held(self) -> list[str]:
        return [one.name for one in self.queue.held_rebootstrap_reqs]


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
    ("recomputes", "more"),
    [(True, {"images": "an image"}), (True, {"embeds": [0.0]}), (True, {"ends": "an abort"}), (False, {})],
)
def test_decode_server_ends_requests_that_are_not_computed_again(
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
    scheduler.abort("another")
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
    scheduler.abort("another")
    scheduler.resume()
    assert scheduler.waiting == ["waits"]


@pytest.mark.parametrize(
    "scheduler",
    [
        Scheduler(decodes=True),
        Scheduler(decodes=True, takes_weights=False, backend=plugin.BACKEND),
    ],
)
def test_abort_ends_a_request_that_is_held_over_a_pause(scheduler: Scheduler) -> None:
    """Its client has left. SGLang itself would compute it again."""
    scheduler.pause()
    scheduler.turn()
    scheduler.hold("stays", "leaves", "stays, too")
    scheduler.queue.retracted_queue.append(request("swapped out"))
    scheduler.abort("leaves")
    assert scheduler.seen[-1] == "ended leaves"
    assert scheduler.held == ["stays", "stays, too"]
    assert [one.name for one in scheduler.queue.retracted_queue] == ["swapped out"]
    scheduler.abort("", abort_all=True)
    assert scheduler.seen[-3:] == ["ended swapped out", "ended stays", "ended stays, too"]
    assert not scheduler.held
    assert not scheduler.queue.retracted_queue


def test_abort_keeps_held_requests_of_other_transfer_backends() -> None:
    scheduler = Scheduler(decodes=True, takes_weights=False)
    scheduler.hold("held")
    scheduler.abort("held")
    assert scheduler.held == ["held"]


def test_controller_that_frees_the_cache_keeps_held_requests() -> None:
    """It aborts all requests of a paused server that keep the cache in use."""
    decode = Scheduler(decodes=True)
    decode.hold("held")
    decode.abort(plugin.RID, abort_all=True)
    assert decode.held == ["held"]


@pytest.mark.parametrize(
    ("decodes", "takes_weights", "counted"),
    [(True, True, {"waits": 2, "held": 3}), (True, False, {"waits": 2}), (False, True, {"waits": 2})],
)
def test_tokens_of_held_requests_count_when_the_version_changes(
    decodes: bool, takes_weights: bool, counted: dict[str, int]
) -> None:
    """Answers report by these counts which version has made which token."""
    scheduler = Scheduler(decodes, takes_weights=takes_weights)
    scheduler.waiting_queue = [SimpleNamespace(name="waits", output_ids=[1, 2])]
    held = SimpleNamespace(name="held", output_ids=[1, 2], pd_rebootstrap_forced_output_id=3)
    # SGLang has retracted it before its first token.
    empty = SimpleNamespace(name="empty", output_ids=[], pd_rebootstrap_forced_output_id=None)
    scheduler.queue.held_rebootstrap_reqs += [held, empty]
    found: dict[str, int] = {}

    def record(scheduler: Scheduler, version: str | None) -> None:
        assert version == "step-1"
        found.update({one.name: len(one.output_ids) for one in scheduler.waiting_queue if one.output_ids})

    plugin._record_weights(record, scheduler, "step-1")
    assert found == counted
    assert [one.name for one in scheduler.waiting_queue] == ["waits"]
    assert held.output_ids == [1, 2]
    assert scheduler.queue.held_rebootstrap_reqs == [held, empty]


@pytest.mark.parametrize("paused", [False, True])
def test_tokens_of_requests_that_wait_for_their_recompute_count(paused: bool) -> None:
    """They were retracted for an earlier version, and no prefill server has computed them since."""
    decode = Scheduler(decodes=True)
    requests = {
        name: SimpleNamespace(name=name, output_ids=[1, 2], pd_rebootstrap_forced_output_id=3)
        for name in ("waits", "is sent", "is new")
    }
    decode.queue.queue = [
        SimpleNamespace(req=requests["waits"], is_rebootstrap=True, name="waits"),
        SimpleNamespace(req=requests["is new"], is_rebootstrap=False, name="is new"),
    ]
    if paused:
        decode.pause()
        decode.turn()
        assert decode.seen == ["pause []"], "SGLang does not see them"
    sent = SimpleNamespace(req=requests["is sent"], is_rebootstrap=True)
    decode.disagg_decode_transfer_queue.queue.append(sent)
    found: dict[str, int] = {}
    plugin._record_weights(
        lambda scheduler, version: found.update(
            {one.name: len(one.output_ids) for one in scheduler.waiting_queue}
        ),
        decode,
        "step-2",
    )
    assert found == {"waits": 3, "is sent": 3}
    assert not decode.waiting_queue
    assert decode.waiting == ([] if paused else ["waits", "is new"])
    assert {tuple(one.output_ids) for one in requests.values()} == {(1, 2)}


def test_held_requests_survive_an_abort_that_fails() -> None:
    queue = SimpleNamespace(retracted_queue=["retracted"], held_rebootstrap_reqs=["held"])
    with pytest.raises(RuntimeError), held_shown(queue):
        raise RuntimeError
    assert (queue.retracted_queue, queue.held_rebootstrap_reqs) == (["retracted"], ["held"])


@pytest.mark.parametrize("decodes", [False, True])
def test_scheduler_reports_once_that_it_has_parts_of_a_version(decodes: bool) -> None:
    scheduler = Scheduler(decodes, backend=plugin.BACKEND)
    reported: list[str] = []
    scheduler.queue.kv_manager = SimpleNamespace(note_torn=reported.append)
    scheduler.turn()
    scheduler.kv_connector_weights = SimpleNamespace(torn=True, tried="step-2#00000000")
    scheduler.turn(stop_at_pause=True)
    assert not reported, "a batch is being computed"
    scheduler.turn()
    scheduler.turn()
    assert reported == ["step-2#00000000"]
    scheduler.kv_connector_weights = SimpleNamespace(torn=True, tried="")
    scheduler.turn()
    assert reported[1:] == [""], "the update failed before this worker tried to apply the version"
    others = Scheduler(decodes)
    others.kv_connector_weights.torn = True
    others.turn()  # another transfer backend compares no versions


def test_recomputed_request_gets_another_room_on_all_ranks() -> None:
    queue = SimpleNamespace(transfer_backend=SimpleNamespace(value=plugin.BACKEND))
    ranks = [SimpleNamespace(bootstrap_room=7) for _ in range(2)]
    rooms = {7}
    for times in range(1, 4):
        for one in ranks:
            plugin._change_room(queue, one, is_rebootstrap=True)
        (room,) = {one.bootstrap_room for one in ranks}
        rooms.add(room)
        assert len(rooms) == times + 1
        assert 0 < room < 1 << 63
    plugin._change_room(queue, ranks[0])
    queue.transfer_backend.value = "mooncake"
    plugin._change_room(queue, ranks[0], is_rebootstrap=True)
    assert ranks[0].bootstrap_room == room, "it is the first use, or another backend"


@pytest.mark.parametrize(("backend", "rank"), [(plugin.BACKEND, 3), ("mooncake", None)])
def test_recomputed_request_stays_with_its_data_parallel_rank(backend: str, rank: int | None) -> None:
    """Prefill servers that balance by load have no rank for a room that they have not seen."""
    queue = SimpleNamespace(transfer_backend=SimpleNamespace(value=backend))
    one = SimpleNamespace(req=SimpleNamespace(disagg_prefill_dp_rank=None))
    plugin._keep_rank(None, queue, one, 3)
    assert one.req.disagg_prefill_dp_rank == rank
