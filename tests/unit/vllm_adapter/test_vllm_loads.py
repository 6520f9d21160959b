"""The states of a decode engine's load: which transitions there are, and that no other is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.protocol.actions import Address
from kv_connector.protocol.admission import AdmissionGate
from kv_connector.protocol.params import BadParams, DecodeParams
from kv_connector.vllm import decode
from kv_connector.vllm.decode import DecodeScheduler, _Load

PEER = Address("10.0.0.1", 5600)
LEGAL = {(before, after) for before in _Load for after in decode._NEXT[before]}


def scheduler() -> DecodeScheduler:
    made = DecodeScheduler((16,), [], early_tokens=True)
    made.gate = AdmissionGate(1000)
    return made


def request(name: str = "d") -> Any:
    return SimpleNamespace(request_id=name, prompt_token_ids=[1, 2, 3])


def loading(state: _Load, monkeypatch: pytest.MonkeyPatch) -> tuple[DecodeScheduler, Any]:
    """A load in this state, by the shortest way."""
    monkeypatch.setattr(decode, "prompt_of", lambda request: (3, bytes(16)))
    made = scheduler()
    made.add(request(), DecodeParams("t", PEER, early_token=True))
    target = made._targets["d"]
    ways = {
        _Load.WAITING: (),
        _Load.RESERVED: (_Load.RESERVED,),
        _Load.VOID: (_Load.RESERVED, _Load.VOID),
        _Load.ASKED: (_Load.ASKED,),
        _Load.LEFT: (_Load.RESERVED, _Load.LEFT),
        _Load.SETTLING: (_Load.ASKED, _Load.SETTLING),
        _Load.OVER: (_Load.OVER,),
    }
    for after in ways[state]:
        made._enter(target, after)
    return made, target


@pytest.mark.parametrize("before", _Load)
@pytest.mark.parametrize("after", _Load)
def test_only_legal_transitions_are_taken(
    before: _Load, after: _Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, target = loading(before, monkeypatch)
    if (before, after) in LEGAL:
        made._enter(target, after)
        assert target.load is after
    else:
        with pytest.raises(AssertionError, match="transfer t"):
            made._enter(target, after)
        assert target.load is before
    assert (target.transfer_id in made._waiting) == (target.load is _Load.WAITING)
    assert made.settling == (target.load is _Load.SETTLING)


def test_every_load_can_end() -> None:
    for state in _Load:
        assert state is _Load.OVER or _Load.OVER in decode._NEXT[state]
    assert decode._NEXT[_Load.OVER] == set()


@pytest.mark.parametrize("state", [_Load.WAITING, _Load.RESERVED, _Load.VOID, _Load.ASKED, _Load.OVER])
def test_a_finished_request_is_forgotten_once_nothing_is_under_way(
    state: _Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, target = loading(state, monkeypatch)
    made.finished(target.request)
    under_way = state in (_Load.RESERVED, _Load.VOID, _Load.ASKED)
    assert len(made) == under_way
    assert made.settling == (state is _Load.ASKED)
    made.received(["d"])
    assert len(made) == 0
    assert not made.settling


def test_a_request_of_the_same_id_waits_until_the_workers_have_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = loading(_Load.SETTLING, monkeypatch)
    with pytest.raises(BadParams, match="same id"):
        made.add(request(), DecodeParams("u", PEER))
    made.received(["d"])
    made.add(request(), DecodeParams("u", PEER))
