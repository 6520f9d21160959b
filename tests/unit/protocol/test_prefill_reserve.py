"""The valid contents and targets of RESERVE."""

from __future__ import annotations

import msgspec
import pytest
from prefill_setup import (
    MOVING,
    OTHER,
    PEER,
    TIMES,
    WANTS,
    active,
    assert_over,
    half,
    message,
    pushed,
    sealed,
)
from protocol_setup import (
    BLOCK,
    HASH,
    computed,
    layout,
    only,
    prefill_request,
    reserve,
)

from kv_connector.protocol.actions import (
    Seal,
    Send,
    Share,
)
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine, WritesEnd
from kv_connector.protocol.wire.messages import Cancel, Fail, FailCode, Release, Reserve


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_tokens": 3 * BLOCK - 1}, "prefill engine has 48 tokens, decode engine has 47"),
        ({"prompt_hash": bytes(16)}, "the prompts differ"),
        ({"prompt_hash": None}, "sends no hash of the prompt"),
    ],
)
@pytest.mark.parametrize("order", ["request first", "RESERVE first"])
def test_another_prompt_is_refused_and_the_right_one_still_served(
    machine: PrefillMachine, changes: dict[str, object], words: str, order: str
) -> None:
    wrong = msgspec.structs.replace(reserve(attempt=9), **changes)
    if order == "request first":
        machine.expect(0.0, prefill_request())
        fail = message(machine.reserve(0.0, PEER, wrong))
    else:
        machine.reserve(0.0, PEER, wrong)
        fail = message(machine.expect(0.0, prefill_request()))
    assert isinstance(fail, Fail)
    assert (fail.code, fail.attempt, fail.quiesced) == (FailCode.PROMPT_MISMATCH, 9, True)
    assert words in fail.message
    assert machine.next_deadline() is None
    if "prompt_hash" in changes and changes["prompt_hash"] is not None:
        assert all(cause in fail.message for cause in ("chat template", "tokenizer", "clock", "time zone"))
    machine.pages_computed(0.0, computed((1, 2, 3)))
    assert pushed(machine.reserve(1.0, PEER, reserve(attempt=10))) == {1: 11, 2: 12, 3: 13}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("end", ["release", "cancel"])
def test_another_prompt_is_one_for_each_worker_of_decode(
    machine: PrefillMachine, finished: bool, end: str
) -> None:
    """The first worker may have given the prompt up before the others send RESERVE."""
    machine.expect(0.0, prefill_request())
    if finished:
        machine.request_finished(0.0, "t", True, "")
    wrong = [msgspec.structs.replace(half(share), prompt_hash=bytes(16)) for share in range(2)]
    first = message(machine.reserve(0.0, OTHER, wrong[1]))
    if end == "release":
        machine.release(0.0, OTHER, Release("t", 1))
    else:
        machine.cancel(0.0, OTHER, Cancel("t", 1, 1))
    second = message(machine.reserve(1.0, PEER, wrong[0]))
    assert isinstance(first, Fail)
    assert first.code is FailCode.PROMPT_MISMATCH
    assert second == first
    machine.release(1.0, PEER, Release("t"))
    machine.request_finished(1.0, "t", True, "")
    assert_over(machine)


@pytest.mark.parametrize("theirs", [None, HASH], ids=["neither", "decode has one"])
@pytest.mark.parametrize("order", ["request first", "RESERVE first"])
def test_a_prompt_without_a_hash_is_compared_with_none(
    machine: PrefillMachine, theirs: bytes | None, order: str
) -> None:
    """Its length is still compared."""
    ours = prefill_request(prompt_hash=None)
    short = msgspec.structs.replace(reserve(attempt=1, prompt_hash=theirs), prompt_tokens=3 * BLOCK - 1)
    right = reserve(attempt=2, prompt_hash=theirs)
    if order == "request first":
        machine.expect(0.0, ours)
        fail = message(machine.reserve(0.0, PEER, short))
        machine.reserve(0.0, PEER, right)
    else:
        machine.reserve(0.0, PEER, short)
        fail = message(machine.expect(0.0, ours))
        machine.reserve(0.0, PEER, right)
    assert isinstance(fail, Fail)
    assert fail.message == "prompt length: prefill engine has 48 tokens, decode engine has 47"
    assert pushed(machine.pages_computed(0.0, computed((1, 2, 3)))) == {1: 11, 2: 12, 3: 13}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (reserve(blocks=(32,)), "block 32 of 32"),
        (reserve(more=[(1,)]), "2 KV groups"),
        (reserve(blocks=(1, 2, 3, 4)), "beyond the 3"),
    ],
)
def test_a_reserve_that_does_not_fit_is_refused(machine: PrefillMachine, wrong: Reserve, words: str) -> None:
    machine.expect(0.0, prefill_request())
    fail = message(machine.reserve(0.0, PEER, wrong))
    assert isinstance(fail, Fail)
    assert (fail.code, fail.quiesced) == (FailCode.INCOMPATIBLE, True)
    assert words in fail.message
    assert machine.reserve(0.0, PEER, reserve(attempt=2)) == MOVING  # a valid RESERVE is served


def test_the_same_reserve_twice_is_served_once(machine: PrefillMachine) -> None:
    active(machine)
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert pushed(machine.pages_computed(0.0, computed((1, 2, 3)))) == {3: 13}


@pytest.mark.parametrize(("peer", "attempt"), [(PEER, 2), (OTHER, 1)])
def test_a_second_decode_request_is_refused(machine: PrefillMachine, peer: int, attempt: int) -> None:
    active(machine)
    send = only(machine.reserve(0.0, peer, reserve(attempt=attempt)), Send)
    assert send.peer == peer
    assert isinstance(send.message, Fail)
    assert (send.message.code, send.message.attempt) == (FailCode.DUPLICATE, attempt)
    assert send.message.quiesced
    machine.pages_computed(0.0, computed((3,), first=2))
    # the first reservation continues
    assert machine.request_finished(0.0, "t", True, "") == [Seal(Share("t"))]


def test_after_the_end_the_served_attempt_is_ignored_and_others_are_refused(machine: PrefillMachine) -> None:
    sealed(machine)
    machine.writes_ended(0.0, Share("t"), WritesEnd.DONE, True, "")
    assert machine.reserve(1.0, PEER, reserve()) == []
    fail = message(machine.reserve(1.0, PEER, reserve(attempt=2)))
    assert isinstance(fail, Fail)
    assert fail.code is FailCode.DUPLICATE
    assert_over(machine)


def test_a_reserve_of_a_peer_without_a_session_is_ignored(machine: PrefillMachine) -> None:
    assert machine.reserve(0.0, 77, reserve()) == []
    machine.peer_down(0.0, PEER, "gone")
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert_over(machine)


def test_a_peer_whose_pages_do_not_fit_is_not_admitted() -> None:
    machine = PrefillMachine(layout(), TIMES)
    problem = machine.admit(PEER, layout(groups=(1, 1)), WANTS, regions=1)
    assert isinstance(problem, str)
    assert problem.startswith("layer layer1: kind: prefill engine has full, decode engine has sliding_window")
    problem = machine.admit(PEER, layout(), ((0,),), regions=1)
    assert problem == "HELLO requests parts of 1 layers, its layout has 2"
    problem = machine.admit(PEER, layout(page=32), WANTS, regions=1)
    assert isinstance(problem, str)
    assert problem.startswith(
        "layer layer0: part page: bytes a run: prefill engine has 64, decode engine has 32"
    )
    problem = machine.admit(PEER, layout(), WANTS, regions=0)
    assert problem == "part page of layer layer0 names memory region 0 of 0"
    assert machine.reserve(0.0, PEER, reserve()) == []
    assert_over(machine)
