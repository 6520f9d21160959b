"""The phases of a decode engine's KV load: all legal transitions are taken, and no other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.agent.commands import CancelLoad, ReleaseTransfer
from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import AdmissionGate
from kv_connector.protocol.params import BadParams, DecodeParams
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.internals import RequestStatus
from kv_connector.vllm.scheduling import decode_scheduler
from kv_connector.vllm.scheduling.decode_scheduler import DecodeScheduler, LoadPhase

PEER = Address("10.0.0.1", 5600)
LEGAL = {(before, after) for before in LoadPhase for after in decode_scheduler._NEXT[before]}


def scheduler() -> DecodeScheduler:
    made = DecodeScheduler((16,), [], early_tokens=True)
    made.gate = AdmissionGate(1000)
    return made


def request(name: str = "d") -> Any:
    return SimpleNamespace(request_id=name, prompt_token_ids=[1, 2, 3], skip_reading_prefix_cache=False)


def loading(phase: LoadPhase, monkeypatch: pytest.MonkeyPatch) -> tuple[DecodeScheduler, Any]:
    """Returns a load in this phase, on the shortest way."""
    monkeypatch.setattr(decode_scheduler, "prompt_of", lambda request: (3, bytes(16)))
    made = scheduler()
    made.add(request(), DecodeParams("t", PEER, early_token=True))
    load = made._loads["d"]
    ways = {
        LoadPhase.WAITING: (),
        LoadPhase.RESERVED: (LoadPhase.RESERVED,),
        LoadPhase.DISCARDED: (LoadPhase.RESERVED, LoadPhase.DISCARDED),
        LoadPhase.TOKEN_ONLY: (LoadPhase.TOKEN_ONLY,),
        LoadPhase.LEAVING: (LoadPhase.RESERVED, LoadPhase.LEAVING),
        LoadPhase.TOKEN_LEAVING: (LoadPhase.TOKEN_ONLY, LoadPhase.TOKEN_LEAVING),
        LoadPhase.OVER: (LoadPhase.OVER,),
    }
    for after in ways[phase]:
        made._enter(load, after)
    return made, load


@pytest.mark.parametrize("before", LoadPhase)
@pytest.mark.parametrize("after", LoadPhase)
def test_only_legal_transitions_are_taken(
    before: LoadPhase, after: LoadPhase, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, load = loading(before, monkeypatch)
    if (before, after) in LEGAL:
        made._enter(load, after)
        assert load.phase is after
    else:
        with pytest.raises(AssertionError, match="transfer t"):
            made._enter(load, after)
        assert load.phase is before
    assert (load.transfer_id in made._waiting) == (load.phase is LoadPhase.WAITING)
    assert made.has_unreported_ends == (load.phase is LoadPhase.TOKEN_LEAVING)


def test_every_load_can_end() -> None:
    for phase in LoadPhase:
        assert phase is LoadPhase.OVER or LoadPhase.OVER in decode_scheduler._NEXT[phase]
    assert decode_scheduler._NEXT[LoadPhase.OVER] == set()


@pytest.mark.parametrize(
    "phase",
    [LoadPhase.WAITING, LoadPhase.RESERVED, LoadPhase.DISCARDED, LoadPhase.TOKEN_ONLY, LoadPhase.OVER],
)
def test_a_finished_request_is_forgotten_once_nothing_is_under_way(
    phase: LoadPhase, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, load = loading(phase, monkeypatch)
    made.request_finished(load.request)
    under_way = phase in (LoadPhase.RESERVED, LoadPhase.DISCARDED, LoadPhase.TOKEN_ONLY)
    assert len(made) == under_way
    assert made.has_unreported_ends == (phase is LoadPhase.TOKEN_ONLY)
    made.load_ended(["d"])
    assert len(made) == 0
    assert not made.has_unreported_ends


def test_a_request_of_the_same_id_waits_until_the_workers_have_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = loading(LoadPhase.TOKEN_LEAVING, monkeypatch)
    with pytest.raises(BadParams, match="same id"):
        made.add(request(), DecodeParams("u", PEER))
    made.load_ended(["d"])
    made.add(request(), DecodeParams("u", PEER))


@pytest.mark.parametrize("reads", [True, False])
def test_hits_of_prompts_that_get_blocks_are_taken_once(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, load = loading(LoadPhase.WAITING, monkeypatch)
    load.tokens, load.request.skip_reading_prefix_cache = 40, not reads
    made.tokens_to_load(load.request, 17)
    assert made.take_hits() == {}
    made.allocated(load.request, None, 0)
    made.allocated(load.request, None, 0)
    assert made.take_hits() == ({"t": (40, 17)} if reads else {})
    assert made.take_hits() == {}


# --- Each event in each phase


class FreedBlocks:
    """The part of block_tables.BlockTables that a load of full attention needs."""

    def __init__(self) -> None:
        self.freed: list[str] = []

    def first_attended(self, group: int, computed_tokens: int) -> int:
        return 0

    def first_attended_token(self, group: int, computed_tokens: int) -> int:
        return 0

    def free(self, request: Any) -> None:
        self.freed.append(request.request_id)


TABLE = SimpleNamespace(get_block_ids=lambda: ([5],))
EVENTS: dict[str, Callable[[DecodeScheduler, Any], object]] = {
    "allocated 0": lambda made, load: made.allocated(load.request, TABLE, 0),
    "allocated n": lambda made, load: made.allocated(load.request, TABLE, load.end),
    "load ends": lambda made, load: made.load_ended(["d"]),
    "load fails": lambda made, load: made.load_ended(["d"], {"d"}),
    "discard": lambda made, load: made.discard(["d"]),
    "cache reset": lambda made, load: made.after_reset(),
    "all KV is worthless": lambda made, load: made.reset(),
    "finished": lambda made, load: made.request_finished(load.request),
}
WAITING, RESERVED, DISCARDED, TOKEN_ONLY, LEAVING, TOKEN_LEAVING, OVER = LoadPhase
LOADED = "OVER, before its first step"
"""vLLM cannot preempt such a request, so that a reset has to free its blocks."""
FORGOTTEN = "forgotten"
ENDS = ("load ends", "load fails")
CHANGES: dict[tuple[LoadPhase | str, str], tuple[LoadPhase | str, list[type], list[str]]] = {
    (WAITING, "allocated 0"): (OVER, [ReleaseTransfer], []),
    (WAITING, "allocated n"): (RESERVED, [DecodeRequest], []),
    (WAITING, "all KV is worthless"): (TOKEN_ONLY, [DecodeRequest], []),
    (WAITING, "finished"): (FORGOTTEN, [ReleaseTransfer], []),
    **{(RESERVED, end): (OVER, [], []) for end in ENDS},
    (RESERVED, "discard"): (DISCARDED, [], []),
    (RESERVED, "cache reset"): (DISCARDED, [], []),
    (RESERVED, "finished"): (LEAVING, [CancelLoad], []),
    **{(DISCARDED, end): (OVER, [], ["d"]) for end in ENDS},
    (DISCARDED, "finished"): (LEAVING, [CancelLoad], []),
    **{(TOKEN_ONLY, end): (OVER, [], []) for end in ENDS},
    (TOKEN_ONLY, "finished"): (TOKEN_LEAVING, [CancelLoad], []),
    **{(leaving, end): (FORGOTTEN, [], []) for leaving in (LEAVING, TOKEN_LEAVING) for end in ENDS},
    (OVER, "finished"): (FORGOTTEN, [], []),
    (LOADED, "cache reset"): (OVER, [], ["d"]),
    (LOADED, "finished"): (FORGOTTEN, [], []),
}
"""The next phase, the commands to the workers, and the requests whose blocks are freed, by phase and event.

Events that are not listed change nothing. The client may have the early token already.
"""
WITHOUT_TOKEN: dict[tuple[LoadPhase | str, str], tuple[LoadPhase | str, list[type], list[str]]] = {
    **CHANGES,
    (WAITING, "all KV is worthless"): (OVER, [ReleaseTransfer], []),
    (RESERVED, "cache reset"): (DISCARDED, [CancelLoad], []),
}
"""The same table for a load whose request samples its first token itself."""
HOLDING = {RESERVED, DISCARDED, LOADED}
# The workers report no end of a load that they do not know yet.
CELLS = [
    (phase, event)
    for phase in (*LoadPhase, LOADED)
    for event in EVENTS
    if not (phase is WAITING and event in ENDS)
]


@pytest.mark.parametrize(("phase", "event"), CELLS)
@pytest.mark.parametrize("wants_sampled", [True, False])
def test_each_event_has_its_outcome_in_each_phase(
    wants_sampled: bool, phase: LoadPhase | str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = OVER if isinstance(phase, str) else phase
    made, load = loading(before, monkeypatch)
    load.wants_sampled = wants_sampled
    load.end = load.tokens - 1
    blocks = FreedBlocks()
    made.blocks = blocks  # type: ignore[assignment]
    load.request.num_computed_tokens = 0
    load.request.status = RequestStatus.WAITING_FOR_REMOTE_KVS if phase in HOLDING else RequestStatus.RUNNING
    made._commands.clear()
    EVENTS[event](made, load)
    changes = CHANGES if wants_sampled else WITHOUT_TOKEN
    after, commands, freed = changes.get((phase, event), (before, [], []))
    assert (load.phase if len(made) else FORGOTTEN) == after
    assert [type(command) for command in made._commands] == commands
    assert blocks.freed == freed
    # With blocks again, the request runs, or another connector loads.
    holding = phase in HOLDING and after is not FORGOTTEN and (phase, event) != (LOADED, "allocated 0")
    assert (made.loading() == ["d"]) == holding


def test_reset_must_wait_for_pages_of_a_finished_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for phase in LoadPhase:
        made, _ = loading(phase, monkeypatch)
        assert made.reset() == (phase is not LEAVING)
        assert len(made) == 1
