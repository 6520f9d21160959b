"""The phases of a decode engine's load: which transitions there are, and that no other is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import AdmissionGate
from kv_connector.protocol.params import BadParams, DecodeParams
from kv_connector.vllm import decode
from kv_connector.vllm.decode import DecodeScheduler, LoadPhase

PEER = Address("10.0.0.1", 5600)
LEGAL = {(before, after) for before in LoadPhase for after in decode._NEXT[before]}


def scheduler() -> DecodeScheduler:
    made = DecodeScheduler((16,), [], early_tokens=True)
    made.gate = AdmissionGate(1000)
    return made


def request(name: str = "d") -> Any:
    return SimpleNamespace(request_id=name, prompt_token_ids=[1, 2, 3])


def loading(phase: LoadPhase, monkeypatch: pytest.MonkeyPatch) -> tuple[DecodeScheduler, Any]:
    """A load in this phase, by the shortest way."""
    monkeypatch.setattr(decode, "prompt_of", lambda request: (3, bytes(16)))
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
        assert phase is LoadPhase.OVER or LoadPhase.OVER in decode._NEXT[phase]
    assert decode._NEXT[LoadPhase.OVER] == set()


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
