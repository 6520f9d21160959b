"""Engines with several weight versions at one router: which of them are used, and which together."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoints import BASE, QUANTISED, TUNED

from kv_connector.control.membership import PromptCost, Register, WorkloadReport
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, MemberStatus, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.placement.balance import EvenStreams
from kv_connector.router.placement.goodput import Goodput
from kv_connector.router.placement.policy import FewestOutstanding, Placement, PlacementRequest, Policy
from kv_connector.router.requests.completion import Completion
from kv_connector.router.settings import Objectives
from kv_connector.router.streams.continuing import Continuing
from kv_connector.router.streams.moves import Moves

# The engine's report on its speed, which Goodput needs. The prefill engine is far faster than the decode
# engine.
LOAD = WorkloadReport(
    step_tokens=512, prompt_tokens=512, cache_tokens=10**6, prompt=PromptCost(10**6, 10**4, 0)
)


class Router:
    """A policy over engines that register ("p1", "d2", or "b3" for both roles) and report their weight
    versions."""

    def __init__(self, *, objectives: bool = False) -> None:
        self.pools = {side: Pool() for side in Side}
        self.incidents = Incidents()
        self.members = Members(self.pools, {side: [] for side in Side}, self.incidents, suspect=3.0, dead=5.0)
        self.policy: Policy = FewestOutstanding(self.pools)
        if objectives:
            self.policy = Goodput(Objectives(0.4, 0.1), self.pools, self.members.index)

    def says(
        self, name: str, weights: str = "", torn: str = "", checkpoint: Checkpoint | None = None
    ) -> Endpoint:
        role = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}[name[0]]
        message = Register(
            name,
            "1",
            role,
            f"http://{name}:8000",
            name,
            5600,
            load=LOAD,
            weights=weights,
            torn=torn,
            checkpoint=checkpoint,
        )
        endpoint = self.members.register(0.0, message)
        for joining in self.members.to_probe():
            self.members.answered(joining)
        return endpoint

    def place(self, avoid: tuple[Endpoint, ...] = ()) -> Placement:
        raw = b'{"model": "m", "prompt": [' + b"7," * 999 + b'7], "stream": true}'
        return self.policy.place(PlacementRequest(Completion.decode(raw), "/v1/completions", avoid))

    def pairs(self, requests: int = 12) -> set[tuple[str, str]]:
        """Returns which pairs serve so many requests whose streams do not end: a prefill engine or "-", and a
        decode engine."""
        found = set()
        for _ in range(requests):
            placement = self.place()
            if placement.prefill is not None:
                self.pools[Side.PREFILL].acquire(placement.prefill)
            self.pools[Side.DECODE].acquire(placement.decode)
            prefill = "-" if placement.prefill is None else placement.prefill.control_host
            found.add((prefill, placement.decode.control_host))
        return found


@pytest.fixture(params=[False, True], ids=["fewest", "goodput"])
def router(request: pytest.FixtureRequest) -> Router:
    return Router(objectives=request.param)


def test_a_torn_engine_gets_nothing_new_until_it_is_repaired(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    router.says("p1", "v1")
    router.says("d1", "v1")
    with caplog.at_level(logging.INFO):
        caplog.clear()
        for _ in range(3):
            router.says("d1", "v1", torn="worker 1: no such tensor")
        assert router.members.states()[Side.DECODE] == {"http://d1:8000": MemberStatus.TORN}
        assert not router.pools[Side.DECODE].usable()
        router.says("d1", "v2")
    assert router.members.states()[Side.DECODE] == {"http://d1:8000": MemberStatus.READY}
    torn, ready = (record.getMessage() for record in caplog.records)
    assert torn.startswith("TORN: d1 at http://d1:8000")
    assert torn.endswith("worker 1: no such tensor")
    assert ready.startswith("READY")
    (incident,) = router.incidents.latest()
    assert "stays paused" in incident.what
    assert (incident.detail, incident.times) == ("worker 1: no such tensor", 1)


def test_torn_engine_that_is_drained_is_shown_as_torn(router: Router) -> None:
    router.says("d1", torn="why")
    router.members.drain("http://d1:8000")
    assert router.members.states()[Side.DECODE] == {"http://d1:8000": MemberStatus.TORN}


def test_engines_that_are_updated_one_by_one_pair_with_their_like(router: Router) -> None:
    for name in ("p1", "p2", "d1", "d2"):
        router.says(name, "v1")
    assert {one for pair in router.pairs() for one in pair} == {"p1", "p2", "d1", "d2"}
    router.says("p1", "v2")
    assert router.pairs() == {("p2", "d1"), ("p2", "d2")}, "who has no partner waits"
    router.says("d1", "v2")
    assert router.pairs() == {("p1", "d1"), ("p2", "d2")}
    router.says("p2", "v2")
    assert {d for _, d in router.pairs()} == {"d1"}, "no prefill engine is of the other's weights"
    router.says("d2", "v2")
    assert {one for pair in router.pairs(50) for one in pair} == {"p1", "p2", "d1", "d2"}


def test_engines_that_are_replaced_one_by_one_pair_with_their_checkpoint(router: Router) -> None:
    for name in ("p1", "p2", "d1", "d2"):
        router.says(name, checkpoint=BASE)
    router.says("p1", checkpoint=TUNED)
    assert router.pairs() == {("p2", "d1"), ("p2", "d2")}
    router.says("d1", checkpoint=TUNED)
    assert router.pairs() == {("p1", "d1"), ("p2", "d2")}
    router.says("p2", checkpoint=TUNED)
    assert {d for _, d in router.pairs()} == {"d1"}, "no prefill engine has the other's checkpoint"
    router.says("d2", checkpoint=TUNED)
    assert {one for pair in router.pairs(50) for one in pair} == {"p1", "p2", "d1", "d2"}


def test_decode_engine_computes_prompts_when_its_checkpoint_is_no_prefill_engines(router: Router) -> None:
    router.says("p1", checkpoint=BASE)
    router.says("d1", checkpoint=TUNED)
    assert router.pairs() == {("-", "d1")}
    assert router.place().reason == "other_weights"


@pytest.mark.parametrize("checkpoint", [None, QUANTISED])
def test_engine_whose_checkpoint_is_not_compared_pairs_with_all(
    router: Router, checkpoint: Checkpoint | None
) -> None:
    router.says("p1", checkpoint=checkpoint)
    router.says("d1", checkpoint=BASE)
    router.says("d2", checkpoint=TUNED)
    assert router.pairs() == {("p1", "d1"), ("p1", "d2")}
    router.says("p2", checkpoint=BASE)
    later = router.pairs(60)
    assert ("p2", "d1") in later
    assert later <= {("p1", "d1"), ("p1", "d2"), ("p2", "d1")}


def test_engine_that_no_longer_serves_its_checkpoint_pairs_by_version(router: Router) -> None:
    router.says("p1", "v1")
    router.says("d1", "v1", checkpoint=TUNED)
    router.says("d2", checkpoint=TUNED)
    assert router.pairs() == {("p1", "d1")}


def test_decode_engines_compute_prompts_when_no_two_engines_share_a_version(router: Router) -> None:
    router.says("p1", "v1")
    router.says("d1", "v2")
    router.says("d2")
    assert router.pairs() == {("-", "d1"), ("-", "d2")}
    assert router.place().reason == "other_weights"


def test_engines_without_a_reported_version_have_one_version(router: Router) -> None:
    router.says("p1")
    router.says("d1")
    assert router.pairs() == {("p1", "d1")}


def test_a_torn_engine_is_no_partner(router: Router) -> None:
    router.says("p1", "v2", torn="why")
    router.says("p2", "v1")
    router.says("d1", "v2")
    assert router.pairs() == {("-", "d1")}


def test_an_engine_of_both_sides_alone_with_its_version_computes_its_prompts(router: Router) -> None:
    router.says("b1", "v1")
    router.says("b2", "v2")
    assert router.pairs() == {("-", "b1"), ("-", "b2")}


def test_an_engine_that_has_failed_is_avoided_for_one_of_other_weights(router: Router) -> None:
    for version in ("1", "2"):
        router.says(f"p{version}", f"v{version}")
    failed = router.says("d1", "v1")
    router.says("d2", "v2")
    placement = router.place(avoid=(failed,))
    assert placement.prefill is not None
    assert (placement.prefill.control_host, placement.decode.control_host) == ("p2", "d2")


def test_later_chosen_decode_engine_has_the_weights_of_prefill() -> None:
    """The same holds in serial dispatch, and for streams that move."""
    router = Router()
    prefill = router.says("p1", "v1")
    one, other, like = (
        router.says(name, version) for name, version in (("d1", "v2"), ("d2", "v2"), ("d3", "v1"))
    )
    decodes = router.pools[Side.DECODE]
    for _ in range(3):
        decodes.acquire(like)
    assert decodes.partner(router.pools[Side.PREFILL], prefill, ()) == like
    assert decodes.partner(router.pools[Side.PREFILL], prefill, (like,)) in (one, other)
    assert decodes.partner(decodes, one, ()) == other
    assert decodes.partner(decodes, like, ()) in (one, other), "it computes anew what was said"
    router = Router()
    prefill, one, like = (
        router.says(name, checkpoint=it) for name, it in (("p1", BASE), ("d1", TUNED), ("d2", BASE))
    )
    decodes = router.pools[Side.DECODE]
    decodes.acquire(like)
    assert decodes.partner(router.pools[Side.PREFILL], prefill, ()) == like
    assert decodes.partner(router.pools[Side.PREFILL], prefill, (like,)) == one


def test_streams_are_evened_out_among_engines_of_the_same_weights() -> None:
    router = Router()
    busy, other, like = (
        router.says(name, weights) for name, weights in (("b1", "v1"), ("b2", "v2"), ("b3", "v1"))
    )
    nothing = cast("Any", None)
    moves = Moves(router.pools, router.members, Continuing(router.pools, nothing), nothing, nothing)

    def stream(engine: Endpoint) -> Any:
        running, call = SimpleNamespace(engine=engine), SimpleNamespace(model="m")
        return SimpleNamespace(running=running, call=call, moving=False, to=None, stays=None, failed=0)

    def evened(*engines: Endpoint) -> list[Endpoint | None]:
        streams = [stream(engine) for engine in engines]
        moves._requests = cast("Any", streams)
        moves.balance_once(EvenStreams())
        return [one.to for one in streams]

    assert evened(*[busy] * 5) == [None] * 4 + [like]
    router.members.learnt(like, frozenset({"other"}))
    assert evened(*[busy] * 5) == [None] * 5, "the other one serves another model"
    router.members.learnt(like, None)
    router.says("b3", "v2")
    assert evened(*[busy] * 5) == [None] * 5
    assert evened(*[other] * 5) == [None] * 4 + [like]
    router.says("b1", checkpoint=BASE)
    router.says("b2", checkpoint=TUNED)
    router.says("b3", checkpoint=BASE)
    assert evened(*[busy] * 5) == [None] * 4 + [like]
    router.says("b3", checkpoint=TUNED)
    assert evened(*[busy] * 5) == [None] * 5
    router.says("b3")
    assert evened(*[busy] * 5) == [None] * 5, "it would join two that differ"
    router.says("b2", "v2")
    assert evened(*[busy] * 5) == [None] * 4 + [like], "an unknown checkpoint fits"
