"""CacheAware: the choice of engines by what they have cached and what they have to do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from checkpoints import BASE, TUNED
from hypothesis import given
from hypothesis import strategies as st
from plain_placement import PlainPlacement

from kv_connector.control.membership import WorkloadReport
from kv_connector.protocol.session.checkpoint import Weights
from kv_connector.router.bodies.messages import ChatMessage
from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.breaker import FAILURES
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import TEXT_SIDES, Side
from kv_connector.router.engines.pool import Lease, Member, NoEngine, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.recent_work import RecentWork
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement import records
from kv_connector.router.placement.cache_aware import CacheAware, excess
from kv_connector.router.placement.lender import Lenders, Prefix
from kv_connector.router.placement.policy import Placement, PlacementRequest
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.placement.session_engines import SessionEngines, session_of
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.transcript import Said

CHAT = "/v1/chat/completions"
TEXT = "All happy families are alike; each unhappy family is unhappy in its own way. "  # about 19 tokens
LONG = TEXT * 100  # 1,925 tokens at 4 bytes each


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, Any], **body: Any) -> Completion:
    return Completion.decode(
        json.dumps({"model": "m", "messages": messages, "stream": True, **body}).encode()
    )


class Fleet:
    """The policy over engines p0, p1, ... and d0, d1, ..."""

    def __init__(self, prefills: int = 2, decodes: int = 2) -> None:
        self.now = 0.0
        self.alone = False
        """Whether decode engines compute all prompts."""
        self.pools = {side: Pool() for side in TEXT_SIDES}
        self.index = PrefixIndex()
        self.hits: list[tuple[Side, int, int]] = []
        self.caches = CacheRecords(count=lambda *hit: self.hits.append(hit))
        self.policy = CacheAware(
            self.pools, self.index, self.caches.sizes, self.caches.sessions, lambda: self.now
        )
        for side, count in ((Side.PREFILL, prefills), (Side.DECODE, decodes)):
            for number in range(count):
                self.join(side, number)

    def join(self, side: Side, number: int, **more: Any) -> Endpoint:
        endpoint = self.engine(f"{side.value[0]}{number}")
        workload = Workload(lambda: self.now)
        self.pools[side].set_usable(endpoint, True, workload, **more)
        self.index.add(workload.cache)
        return endpoint

    def engine(self, name: str) -> Endpoint:
        return Endpoint.parse(f"http://{name}:1")

    def workload(self, name: str) -> Workload:
        side = Side.PREFILL if name[0] == "p" else Side.DECODE
        found = self.pools[side].workload(self.engine(name))
        assert found is not None
        return found

    def place(
        self, *messages: dict[str, Any], avoid: tuple[str, ...] = (), session: int | None = None, **body: Any
    ) -> Placement:
        away = [self.engine(name) for name in avoid]
        place = self.policy.alone if self.alone else self.policy.place
        return place(PlacementRequest(chat(*messages, **body), CHAT, away, session=session))

    def serve(self, *messages: dict[str, Any], cached: int | None = None, **more: Any) -> Placement:
        """Places a request and answers it, "Because."."""
        request = self.begin(*messages, **more)
        request.prefilled(Computed(tokens=None if cached is None else 2000, cached=cached))
        request.answer()
        return request.placement

    def begin(self, *messages: dict[str, Any], **more: Any) -> Request:
        """Places a request and leases its engines."""
        return Request(self, self.place(*messages, **more))


class Request:
    """A request that is placed and has its engines."""

    def __init__(self, fleet: Fleet, placement: Placement) -> None:
        self.placement = placement
        self._caches = fleet.caches
        prompt, pools = placement.prompt, fleet.pools
        work = placement.work if placement.prefill is None else None
        self.decode = pools[Side.DECODE].acquire(placement.decode, work, placement.tokens, prompt)
        self.prefill: Lease | None = None
        if placement.prefill is not None:
            self.prefill = pools[Side.PREFILL].acquire(placement.prefill, placement.work, prompt=prompt)

    def prefilled(self, report: Computed) -> None:
        assert self.prefill is not None
        self._caches.prefilled(self.prefill, report, self.placement.prefix)
        self.prefill.release()

    def answer(self, moved: Lease | None = None, text: str = "Because.", **more: Any) -> None:
        """The decode engine answers."""
        self._caches.began(self.decode, self.placement)
        said = Said(ChatMessage(role="assistant", content=text), **more)
        self._caches.answered(self.decode, said, self.placement, moved=moved)
        self.decode.release()

    def serve(self) -> None:
        """Both engines serve it, without a report of their hits."""
        self.prefilled(Computed())
        self.answer()

    def refuse(self) -> None:
        """Neither engine takes it."""
        for lease in (self.prefill, self.decode):
            if lease is not None:
                lease.release()


def names(placement: Placement) -> tuple[str, str]:
    prefill = "-" if placement.prefill is None else placement.prefill.control_host
    return prefill, placement.decode.control_host


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_turns_of_a_conversation_stay_at_their_engines(fleet: Fleet) -> None:
    first = fleet.serve(user(LONG))
    other = fleet.serve(user("x" * 4000))
    assert set(names(first)) & set(names(other)) == set(), "new conversations spread"
    second = fleet.serve(user(LONG), assistant("Because."), user("Why?"))
    assert names(second) == names(first)
    assert second.reason == "cached"
    assert first.reason == "least_work"
    assert second.work is not None
    assert second.work.tokens < 20
    assert second.decode_cached > second.work.cached, "it has the answer, too"


def test_work_of_a_prompt_is_what_the_prefill_engine_has_not_cached(fleet: Fleet) -> None:
    fleet.serve(user(LONG))
    again = fleet.place(user(LONG))
    assert again.work is not None
    assert (again.work.tokens, again.work.cached) == (1, again.tokens - 1), (
        "the last token is always computed"
    )


def test_prompt_leaves_a_prefill_engine_whose_queue_is_longer_than_the_hit(fleet: Fleet) -> None:
    first = fleet.serve(user(LONG))
    hit = first.tokens
    pool = fleet.pools[Side.PREFILL]
    assert first.prefill is not None
    with pool.lease(first.prefill, Work(hit - 600, 0.0)):
        assert fleet.place(user(LONG)).prefill == first.prefill
    with pool.lease(first.prefill, Work(hit + 400, 0.0)):
        assert fleet.place(user(LONG)).prefill != first.prefill


def test_prompt_leaves_a_prefill_engine_that_reports_other_routers_prompts(fleet: Fleet) -> None:
    first = fleet.serve(user(LONG))
    name = names(first)[0]
    fleet.workload(name).hear(WorkloadReport(8192, 8192, 1 << 20, waiting=5000))
    assert fleet.place(user(LONG)).prefill != first.prefill


def test_request_leaves_a_decode_engine_with_far_more_context(fleet: Fleet) -> None:
    first = fleet.serve(user(LONG))
    pool = fleet.pools[Side.DECODE]
    with pool.lease(first.decode, context=2 * first.tokens):
        assert fleet.place(user(LONG)).decode == first.decode
    with pool.lease(first.decode, context=6 * first.tokens):
        assert fleet.place(user(LONG)).decode != first.decode


def test_decode_engine_with_far_more_streams_is_not_chosen_for_its_cache(fleet: Fleet) -> None:
    first = fleet.serve(user(LONG))
    pool = fleet.pools[Side.DECODE]
    for _ in range(4):
        pool.acquire(first.decode)
    assert fleet.place(user(LONG)).decode == first.decode
    fleet.workload(names(first)[1]).hear(WorkloadReport(8192, 8192, 1 << 20, running=5))
    assert fleet.place(user(LONG)).decode != first.decode, "streams of other routers count"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 4))
def test_decode_engines_streams_stay_within_the_bound(asked: list[int], engines: int) -> None:
    fleet = Fleet(decodes=engines)
    for number in asked:
        fleet.begin(user(LONG + str(number)))
        counts = [one.outstanding for one in fleet.pools[Side.DECODE].choices()]
        assert max(counts) <= max(1.5 * min(counts), min(counts) + 4) + 1


def test_conversations_spread_although_all_begin_with_the_same_system_prompt(fleet: Fleet) -> None:
    system = {"role": "system", "content": TEXT * 20}
    places = Counter(names(fleet.serve(system, user(f"{number} " + TEXT * 10))) for number in range(40))
    for side in (0, 1):
        counts = Counter[str]()
        for place, count in places.items():
            counts[place[side]] += count
        assert max(counts.values()) <= 1.5 * min(counts.values()), places


def test_engine_that_has_joined_gets_its_part_and_no_more(fleet: Fleet) -> None:
    conversations = [[user(f"{number} {LONG}")] for number in range(20)]
    for _ in range(3):
        for turns in conversations:
            fleet.serve(*turns)
            turns += [assistant("Because."), user("Why? " * 10)]
    fleet.join(Side.PREFILL, 2)
    moved = sum(names(fleet.serve(*turns))[0] == "p2" for turns in conversations)
    assert moved == 0, "their prefixes are elsewhere"
    new = Counter(names(fleet.serve(user(f"new {number} {LONG}")))[0] for number in range(30))
    assert 8 <= new["p2"] <= 14


@pytest.mark.parametrize("pause", ["drain", "breaker"])
def test_engine_that_comes_back_gets_its_part_and_no_more(fleet: Fleet, pause: str) -> None:
    pool, back = fleet.pools[Side.PREFILL], fleet.engine("p1")
    breaker = pool.choices()[1].breaker
    for number in range(20):
        fleet.serve(user(f"{number} {LONG}"))
    if pause == "breaker":
        for _ in range(FAILURES):
            breaker.failed(0.0)
    pool.set_usable(back, pause == "breaker")
    for number in range(20, 80):
        fleet.now += 10.0
        assert names(fleet.serve(user(f"{number} {LONG}")))[0] == "p0"
    breaker.close()
    pool.set_usable(back, True)
    new = Counter(names(fleet.serve(user(f"new {number} {LONG}")))[0] for number in range(20))
    assert 8 <= new["p1"] <= 12


def test_refused_request_leaves_recent_work_and_index_as_they_were(fleet: Fleet) -> None:
    for number in range(4):
        fleet.serve(user(f"{number} {LONG}"))

    def state() -> list[float]:
        members = [fleet.pools[side].choices() for side in TEXT_SIDES]
        fleet.now += 1.0
        now = [one.recent.tokens(0.0) for each in members for one in each if one.recent]
        return sorted([len(fleet.index), *now])

    before = state()
    refused = fleet.begin(user(LONG * 50))
    assert state() != before
    refused.refuse()
    assert state() == pytest.approx(before)


def test_placement_sees_the_work_of_requests_without_an_outcome(fleet: Fleet) -> None:
    first = fleet.begin(user(LONG))
    second = fleet.begin(user(LONG))
    assert set(names(first.placement)) & set(names(second.placement)) == set()


def test_request_with_many_pictures_idles_no_engine(fleet: Fleet) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    flood = user("")
    flood["content"] = [picture] * 10_000  # type: ignore[assignment]
    for side in TEXT_SIDES:
        for member in fleet.pools[side].choices():
            member.workload.longest = 8192
    request = fleet.begin(flood)
    assert request.placement.tokens == 8192
    request.prefilled(Computed(tokens=600, cached=0))
    request.decode.counted(600)
    request.answer()
    for side in TEXT_SIDES:
        assert sum(excess(fleet.pools[side].rows(), fleet.now)) == pytest.approx(600, abs=1), (
            "by the engine's own count"
        )


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"truncate_prompt_tokens": 100}),
        (CHAT, {"truncate_prompt_tokens": -1}),
        ("/v1/responses", {"truncation": "auto"}),
        ("/v1/responses", {"truncation": None}),
    ],
)
def test_nothing_is_learned_of_a_prompt_that_the_engine_may_cut(path: str, more: dict[str, Any]) -> None:
    fleet = Fleet(1, 1)
    body = {"model": "m", "messages": [user(LONG)], "input": [user(LONG)], **more}
    completion = Completion.decode(json.dumps(body).encode())
    for _ in range(2):
        request = Request(fleet, fleet.policy.place(PlacementRequest(completion, path)))
        assert request.placement.reason == "least_work"
        request.prefilled(Computed(tokens=100, cached=96))
        request.answer()
    assert len(fleet.index) == 0
    assert fleet.hits == []
    assert fleet.place(user("x" * 3996)).tokens == pytest.approx(1000, abs=3), "nor of its size"


def test_prompt_that_responses_may_not_cut_is_learned() -> None:
    fleet = Fleet(1, 1)
    body = {"model": "m", "input": [user(LONG)], "truncation": "disabled"}
    completion = Completion.decode(json.dumps(body).encode())
    Request(fleet, fleet.policy.place(PlacementRequest(completion, "/v1/responses"))).answer()
    assert len(fleet.index) > 0


def test_session_decides_between_equal_engines(fleet: Fleet) -> None:
    first = fleet.serve(user("Hello"), session=1)
    for number in range(6):
        again = fleet.serve(user(f"{number} never seen"), session=1)
        assert names(again) == names(first)
    others = {names(fleet.serve(user(f"{number} nor this"), session=2 + number)) for number in range(6)}
    assert names(first) not in others, "these engines have had less work"


def test_session_never_overrides_load(fleet: Fleet) -> None:
    first = fleet.serve(user("Hello"), session=1)
    assert first.prefill is not None
    prefills, decodes = (fleet.pools[side] for side in TEXT_SIDES)
    with prefills.lease(first.prefill, Work(2000, 0.0)), decodes.lease(first.decode, context=8000):
        again = fleet.place(user("Something else"), session=1)
    assert set(names(again)) & set(names(first)) == set()


def test_retry_avoids_the_engines_that_failed(fleet: Fleet) -> None:
    first = fleet.serve(user(LONG))
    again = fleet.place(user(LONG), avoid=names(first))
    assert set(names(again)) & set(names(first)) == set()
    assert fleet.place(user(LONG), avoid=("p0", "p1")).prefill == first.prefill, "no others take requests"


def test_engines_of_a_placement_serve_the_same_weights() -> None:
    fleet = Fleet(1, 1)
    fleet.join(Side.PREFILL, 1, weights=Weights("v2"))
    fleet.join(Side.DECODE, 1, weights=Weights("v2"))
    seen = {names(fleet.serve(user(f"{number} {LONG}"))) for number in range(8)}
    assert seen == {("p0", "d0"), ("p1", "d1")}
    alone = Fleet(1, 0)
    alone.join(Side.DECODE, 1, weights=Weights("v2"))
    placement = alone.place(user(LONG))
    assert (names(placement), placement.reason) == (("-", "d1"), "other_weights")


def test_engines_of_a_placement_have_checkpoints_that_do_not_differ() -> None:
    fleet = Fleet(0, 0)
    for number, checkpoint in enumerate((BASE, TUNED)):
        for side in TEXT_SIDES:
            fleet.join(side, number, weights=Weights("", checkpoint))
    seen = {names(fleet.serve(user(f"{number} {LONG}"))) for number in range(8)}
    assert seen == {("p0", "d0"), ("p1", "d1")}
    fleet.join(Side.DECODE, 2)
    seen = {names(fleet.serve(user(f"again {number} {LONG}"))) for number in range(24)}
    assert seen == {("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d2")}, "an unknown one fits all"


def test_decode_engine_of_another_checkpoint_computes_its_prompts() -> None:
    fleet = Fleet(0, 0)
    fleet.join(Side.PREFILL, 0, weights=Weights("", BASE))
    fleet.join(Side.DECODE, 0, weights=Weights("", TUNED))
    placement = fleet.place(user(LONG))
    assert (names(placement), placement.reason) == (("-", "d0"), "other_weights")


def test_engine_of_both_roles_never_prefills_for_itself() -> None:
    fleet = Fleet(0, 0)
    for number in range(2):
        endpoint = fleet.engine(f"b{number}")
        workload = Workload(lambda: fleet.now)
        for side in TEXT_SIDES:
            fleet.pools[side].set_usable(endpoint, True, workload)
        fleet.index.add(workload.cache)
        if number == 0:
            alone = fleet.place(user(LONG))
            assert (names(alone), alone.reason) == (("-", "b0"), "one_engine")
    for number in range(6):
        placement = fleet.serve(user(f"{number} {LONG}"))
        assert {*names(placement)} == {"b0", "b1"}


def test_policy_needs_engines_of_both_sides() -> None:
    for engines in ((0, 1), (1, 0)):
        with pytest.raises(NoEngine):
            Fleet(*engines).place(user("Hello"))


def test_prompt_without_prefill_engines_goes_where_its_prefix_is() -> None:
    fleet = Fleet(0, 3)
    raw = json.dumps({"model": "m", "messages": [user(LONG)], "stream": True}).encode()
    places = []
    for _ in range(3):
        placement = fleet.policy.alone(PlacementRequest(Completion.decode(raw), CHAT))
        Request(fleet, placement).answer()
        places.append(names(placement))
        assert placement.reason == "no_prefill"
    assert len(set(places)) == 1
    assert placement.work is not None
    assert placement.work.tokens == 1


def test_picture_brings_the_next_turn_to_the_same_engines(fleet: Fleet) -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 300_000}}
    seen = {"role": "user", "content": [url, {"type": "text", "text": "What is it?"}]}
    first = fleet.serve(seen, cached=0)
    assert first.tokens < 1100, "not 75,000"
    fleet.serve(user("x" * 4000))
    assert names(fleet.serve(seen, assistant("Because."), user("Sure?"))) == names(first)
    assert fleet.hits == []
    assert fleet.place(user("x" * 3996)).tokens == pytest.approx(1000, abs=3), "nothing is learned of it"


def test_other_adapters_and_tenants_share_no_prefix(fleet: Fleet) -> None:
    fleet.serve(user(LONG))
    assert fleet.place(user(LONG), model="adapter").reason == "least_work"
    assert fleet.place(user(LONG), cache_salt="tenant").reason == "least_work"


def test_records_count_predicted_and_actual_hits(fleet: Fleet) -> None:
    for cached in (0, 1984):
        fleet.serve(user(LONG), cached=cached)
    assert fleet.hits == [(Side.PREFILL, 0, 0), (Side.PREFILL, 1999, 1984)]
    fleet.serve(user(LONG))
    assert len(fleet.hits) == 2, "an engine that reports no hits is not counted"


def test_prompts_in_one_step_do_not_make_the_cache_smaller() -> None:
    """The second prompt could not find the prefix that the first one computed in the same step."""
    fleet = Fleet(1, 1)
    both = [fleet.begin(user(f"{LONG} {number}")) for number in range(2)]
    others = [fleet.begin(user(f"{number} {LONG}")) for number in range(5)]
    for request in (*both, *others):
        request.prefilled(Computed(tokens=2000, cached=0))
        request.answer()
    assert fleet.place(user(f"{LONG} 0")).reason == "cached"


def test_records_count_hits_of_prompts_that_a_decode_engine_computed() -> None:
    fleet = Fleet(0, 1)
    raw = json.dumps({"model": "m", "messages": [user(LONG)]}).encode()
    for cached in (0, 1900):
        placement = fleet.policy.alone(PlacementRequest(Completion.decode(raw), CHAT))
        Request(fleet, placement).answer(prompt_tokens=2000, cached_tokens=cached)
    assert fleet.hits == [(Side.DECODE, 0, 0), (Side.DECODE, 1999, 1900)]


def test_records_count_hits_that_a_decode_engine_reports_of_received_prompts(fleet: Fleet) -> None:
    for name, cached in (("first", 0), ("second", 1900)):
        request = fleet.begin(user(LONG))
        fleet.caches.sent(name, request.decode)
        for _ in range(2):
            fleet.caches.received(name, 2000, cached)
        request.answer()
    fleet.caches.received("of another router", 2000, 0)
    assert fleet.hits == [(Side.DECODE, 0, 0), (Side.DECODE, 1999, 1900)]


def test_report_of_a_decode_engine_that_lost_prefixes_makes_its_cache_smaller() -> None:
    fleet = Fleet(1, 1)
    texts = [f"{number} {LONG}" for number in range(4)]
    for text in texts:
        fleet.begin(user(text)).answer()
    request = fleet.begin(user(texts[3]))
    fleet.caches.sent("t", request.decode)
    fleet.caches.received("t", 1930, 0)
    request.answer()
    assert mostly_cached(fleet, "d0", texts) == [False, True, True, True]


def test_decode_engine_drops_no_prefix_of_a_running_stream() -> None:
    fleet = Fleet(1, 1)
    fleet.workload("d0").hear(WorkloadReport(512, 512, 6000))  # three prompts
    texts = [f"{number} {LONG}" for number in range(4)]
    running = fleet.begin(user(texts[0]))
    fleet.caches.began(running.decode, running.placement)
    for text in texts[1:]:
        fleet.begin(user(text)).answer()
    assert mostly_cached(fleet, "d0", texts) == [True, False, True, True]
    running.decode.release()
    for text in texts[1:]:
        fleet.begin(user(text)).answer()
    assert mostly_cached(fleet, "d0", texts) == [False, True, True, True]


def test_decode_engine_that_has_taken_blocks_drops_no_prefix_that_it_found() -> None:
    fleet = Fleet(1, 1)
    fleet.workload("d0").hear(WorkloadReport(512, 512, 6000))  # three prompts
    texts = [f"{number} {LONG}" for number in range(4)]
    fleet.begin(user(texts[0])).answer()
    waiting = fleet.begin(user(texts[0]))
    fleet.caches.sent("t", waiting.decode)
    fleet.caches.received("t", 1930, 1920)
    for text in texts[1:]:
        fleet.begin(user(text)).answer()
    assert mostly_cached(fleet, "d0", texts) == [True, False, True, True]
    waiting.refuse()
    for text in texts[1:]:
        fleet.begin(user(text)).answer()
    assert mostly_cached(fleet, "d0", texts) == [False, True, True, True]


def test_report_after_the_end_of_its_request_pins_nothing() -> None:
    fleet = Fleet(1, 1)
    fleet.workload("d0").hear(WorkloadReport(512, 512, 6000))  # three prompts
    texts = [f"{number} {LONG}" for number in range(4)]
    ended = fleet.begin(user(texts[0]))
    fleet.caches.sent("t", ended.decode)
    ended.answer()
    fleet.caches.received("t", 1930, 0)
    for text in texts[1:]:
        fleet.begin(user(text)).answer()
    assert mostly_cached(fleet, "d0", texts) == [False, True, True, True]


def test_reports_that_are_awaited_for_too_long_are_forgotten(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = fleet.begin(user(LONG))
    assert request.placement.prompt is not None
    each = records._AWAITED_PROMPT + len(request.placement.prompt.prefixes)
    monkeypatch.setattr(records, "_AWAITED", 2 * each)
    for name in ("first", "second", "third"):
        fleet.caches.sent(name, request.decode)
    fleet.caches.received("first", 2000, 0)
    assert fleet.hits == []
    fleet.caches.received("second", 2000, 0)
    assert len(fleet.hits) == 1


def test_short_prompts_whose_reports_never_come_take_little_memory(fleet: Fleet) -> None:
    """Engines of older releases and SGLang never report. A prompt of one prefix takes 0.8 KB."""
    request = fleet.begin(user("Hi"))
    for number in range(records._AWAITED // 20):
        fleet.caches.sent(str(number), request.decode)
    assert 5000 < len(fleet.caches._awaited) < 12_000


@pytest.mark.parametrize(("tokens", "cached"), [(0, 0), (-1, 0), (2000, -1), (2000, 2001), (2000, 1 << 48)])
def test_impossible_counts_of_an_engine_are_not_counted(fleet: Fleet, tokens: int, cached: int) -> None:
    request = fleet.begin(user(LONG))
    fleet.caches.sent("t", request.decode)
    fleet.caches.received("t", tokens, cached)
    request.prefilled(Computed(tokens=tokens, cached=cached))
    request.answer()
    assert fleet.hits == []


def test_hits_are_expected_in_whole_blocks() -> None:
    fleet = Fleet(1, 1)
    for name in ("p0", "d0"):
        fleet.workload(name).hear(WorkloadReport(512, 512, 1 << 20, block_tokens=512))
    fleet.serve(user(LONG), cached=0)
    placement = fleet.serve(user(LONG), user("Sure?"), cached=1536)
    assert placement.decode_cached == 1536
    assert placement.work is not None
    assert placement.work.cached == 1536
    assert fleet.hits[1] == (Side.PREFILL, 1536, 1536)


def test_records_take_no_cached_tokens_of_a_decode_engine_that_got_its_kv(fleet: Fleet) -> None:
    fleet.begin(user(LONG)).answer(prompt_tokens=2000, cached_tokens=2000)
    assert fleet.hits == []


def test_decode_engines_room_is_that_of_the_tokens_which_prefill_engines_count() -> None:
    """Both engines report room for 10,000 tokens. A token of these prompts has two bytes, not four."""
    fleet = Fleet(1, 1)
    for name in ("p0", "d0"):
        fleet.workload(name).hear(WorkloadReport(512, 512, 10_000))
    texts = [f"{number} {LONG}" for number in range(100)]
    for text in texts:
        request = fleet.begin(user(text))
        assert request.placement.prompt is not None
        request.prefilled(Computed(tokens=request.placement.prompt.size // 2, cached=0))
        request.answer()
    held = [
        sum(fleet.workload(name).cache.cached(request_prompt(fleet, text)) for text in texts)
        for name in ("p0", "d0")
    ]
    assert held == pytest.approx([20_000, 20_000], rel=0.2)


def test_decode_engines_room_is_counted_in_tokens_of_each_prompt() -> None:
    """Nothing is known of the model's tokens, but each prompt is counted before the answer begins."""
    fleet = Fleet(1, 1)
    fleet.workload("d0").hear(WorkloadReport(512, 512, 10_000))
    texts = [f"{number} {LONG}" for number in range(60)]
    for text in texts:
        request = fleet.begin(user(text))
        request.decode.counted(len(text) // 2)
        request.answer()
    cache = fleet.workload("d0").cache
    held = sum(cache.cached(request_prompt(fleet, text)) for text in texts)
    assert held == pytest.approx(20_000, rel=0.2)


def test_prefill_engine_is_expected_to_drop_the_oldest_for_prompts_in_flight() -> None:
    fleet = Fleet(1, 1)
    texts = [f"{number} {LONG}" for number in range(5)]

    def held() -> list[bool]:
        return mostly_cached(fleet, "p0", texts)

    fleet.workload("p0").hear(WorkloadReport(512, 512, 8_000))  # four prompts of 1,925 tokens
    for text in texts[:4]:
        fleet.serve(user(text))
    assert held() == [True, True, True, True, False]
    request = fleet.begin(user(texts[4]))
    assert held() == [False, True, True, True, False]
    request.prefilled(Computed())
    assert held() == [False, True, True, True, True]


@pytest.mark.parametrize("arrives", [True, False])
def test_decode_engine_is_expected_to_drop_the_oldest_for_prompts_in_flight(arrives: bool) -> None:
    fleet = Fleet(1, 1)
    texts = [f"{number} {LONG}" for number in range(5)]

    def held() -> list[bool]:
        return mostly_cached(fleet, "d0", texts)

    fleet.workload("d0").hear(WorkloadReport(512, 512, 8_000))  # four prompts of 1,925 tokens
    for text in texts[:4]:
        fleet.begin(user(text)).answer()
    assert held() == [True, True, True, True, False]
    request = fleet.begin(user(texts[4]))
    assert held() == [False, True, True, True, False]
    if arrives:
        request.answer()
        assert held() == [False, True, True, True, True]
    else:
        request.refuse()
        fleet.begin(user(texts[0])).answer()
        assert held() == [True, True, True, True, False]


@pytest.mark.parametrize("engine", ["p0", "d0"])
def test_request_in_flight_keeps_its_prefix_and_other_prefixes_are_dropped(engine: str) -> None:
    """Before the engine takes blocks for the rest of the prompt, it has found the hit."""
    fleet = Fleet(1, 1)
    texts = [f"{number} {LONG}" for number in range(4)]
    fleet.workload(engine).hear(WorkloadReport(512, 512, 8_000))  # four prompts of 1,925 tokens
    for text in texts:
        fleet.begin(user(text)).serve()
    request = fleet.begin(user(texts[0]), assistant("Because."), user(LONG))
    assert mostly_cached(fleet, engine, texts) == [True, False, True, True]
    request.serve()
    assert mostly_cached(fleet, engine, texts) == [True, False, True, True]


def test_prompt_that_a_decode_engine_is_still_to_load_stays_at_the_prefill_engine() -> None:
    """Then it is the most recently used, because the engine gives its blocks back then."""
    fleet = Fleet(1, 1)
    texts = [f"{number} {LONG}" for number in range(9)]
    fleet.workload("p0").hear(WorkloadReport(512, 512, 8_000))  # four prompts of 1,925 tokens
    late = fleet.begin(user(texts[0]))
    assert late.prefill is not None
    with late.prefill.owing():
        late.prefilled(Computed())
        for text in texts[1:6]:
            fleet.begin(user(text)).serve()
        assert mostly_cached(fleet, "p0", texts) == [True, *2 * [False], *3 * [True], *3 * [False]]
    for text in texts[6:]:
        fleet.begin(user(text)).serve()
    assert mostly_cached(fleet, "p0", texts) == [True, *5 * [False], *3 * [True]]


def test_answer_that_is_known_takes_no_room_beside_its_own() -> None:
    fleet = Fleet(1, 1)
    fleet.begin(user(LONG)).answer(text=LONG)
    request = fleet.begin(user("another " + LONG))
    cache = request.decode.workload.cache
    fleet.caches.began(request.decode, request.placement)
    assert cache._loading > 0
    said = Said(ChatMessage(role="assistant", content=LONG))
    fleet.caches.answered(request.decode, said, request.placement, moved=None)
    assert cache._loading == 0
    request.decode.release()
    assert cache._loading == 0


def test_answer_of_unknown_size_is_no_short_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(1, 1)
    fleet.begin(user(LONG)).answer(text=LONG)
    average = fleet.caches._answer_tokens
    assert average > 0
    monkeypatch.setattr(Prompt, "followed_by", lambda prompt, answer: prompt)
    fleet.begin(user(LONG)).answer(text=LONG)
    assert fleet.caches._answer_tokens == average


def test_answers_in_flight_take_room_at_the_decode_engine_until_they_end() -> None:
    fleet = Fleet(1, 1)
    texts = [f"{number} {LONG}" for number in range(5)]
    for _ in range(40):
        fleet.begin(user(LONG)).answer(text=LONG)
    fleet.workload("d0").cache.clear()
    fleet.workload("d0").hear(WorkloadReport(512, 512, 10_500))  # five prompts of 1,925 tokens

    def begin(text: str) -> Lease:
        request = fleet.begin(user(text))
        fleet.caches.began(request.decode, request.placement)
        return request.decode

    for text in texts[:3]:
        begin(text).release()
    assert mostly_cached(fleet, "d0", texts) == [True, True, True, False, False]
    streams = [begin(text) for text in texts[3:]]
    assert mostly_cached(fleet, "d0", texts) == [False, False, True, True, True], (
        "as long as the answers before"
    )
    for stream in streams:
        stream.release()
    begin(texts[0]).release()
    assert mostly_cached(fleet, "d0", texts) == [True, False, True, True, True]
    waits = fleet.begin(user(texts[1]))
    assert mostly_cached(fleet, "d0", texts) == [True, False, True, True, True]
    fleet.caches.sent("transfer", waits.decode)
    assert mostly_cached(fleet, "d0", texts) == [True, False, False, True, True], "before it begins, too"


def test_prompt_that_is_too_long_for_the_decode_engine_costs_its_cache_nothing() -> None:
    fleet = Fleet(1, 1)
    workload = fleet.workload("d0")
    workload.longest = 2_500
    workload.hear(WorkloadReport(512, 512, 4_000))
    fleet.begin(user(LONG)).answer()
    before = workload.cache.cached(request_prompt(fleet, LONG))
    fleet.begin(user("x" + 3 * LONG)).refuse()
    assert workload.cache.cached(request_prompt(fleet, LONG)) == before > len(LONG) / 2


def mostly_cached(fleet: Fleet, engine: str, texts: Sequence[str]) -> list[bool]:
    """Returns whether the index expects most of each text in the engine's cache."""
    cache = fleet.workload(engine).cache
    return [cache.cached(request_prompt(fleet, text)) > len(text) / 2 for text in texts]


def request_prompt(fleet: Fleet, text: str) -> Prompt:
    found = fleet.place(user(text)).prompt
    assert found is not None
    return found


def test_records_forget_an_answer_of_an_engine_that_was_replaced(fleet: Fleet) -> None:
    request = fleet.begin(user(LONG))
    name = names(request.placement)[1]
    fleet.index.remove(fleet.workload(name).cache)
    fleet.pools[Side.DECODE].remove(request.placement.decode, lost=True)
    fleet.join(Side.DECODE, int(name[1]))
    request.answer()
    assert len(fleet.workload(name).cache) == len(fleet.index) == 0


def test_records_follow_a_stream_that_has_moved(fleet: Fleet) -> None:
    request = fleet.begin(user(LONG))
    placement = request.placement
    other = "d1" if names(placement)[1] == "d0" else "d0"
    request.answer(moved=fleet.pools[Side.DECODE].acquire(fleet.engine(other)))
    assert placement.prompt is not None
    longer = placement.prompt.followed_by(ChatMessage(role="assistant", content="Because."))
    assert fleet.index.matches(longer)[0] == (fleet.workload(other).cache.bit, longer.size)


def test_prediction_becomes_smaller_when_a_prefill_engine_keeps_nothing() -> None:
    fleet = Fleet(1, 1)
    for number in range(8):
        fleet.serve(user(f"{number % 2} {LONG}"), cached=0)
    predicted = [tokens for _, tokens, _ in fleet.hits]
    assert predicted[:2] == [0, 0]
    assert predicted[-1] < 100


def test_recent_work_halves_each_minute_and_takes_back_what_is_left() -> None:
    recent = RecentWork(1000, 0.0)
    assert recent.tokens(60.0) == 500
    recent.add(200, 60.0, 60.0)
    recent.add(-1000, 0.0, 120.0)
    assert recent.tokens(120.0) == pytest.approx(100), "half of the 200"
    recent.add(-1000, 120.0, 120.0)
    assert recent.tokens(120.0) == 0
    assert RecentWork(1e9, 0.0).tokens(1e9) == 0


def test_excess_begins_beyond_the_engine_with_the_least() -> None:
    pool = Pool([Endpoint.parse(f"http://{name}:1") for name in "ab"])

    def found() -> list[float]:
        return excess(pool.rows(), 0.0).tolist()

    def give(name: str, tokens: float) -> None:
        member = pool.member(Endpoint.parse(f"http://{name}:1"))
        assert member is not None
        assert member.recent is not None
        member.recent.add(tokens, 0.0, 0.0)
        member.workload.changed()

    assert found() == [0, 0]
    give("a", 500)
    give("b", 2000)
    assert found() == pytest.approx([0, 2000 - 1.25 * 500])
    pool.set_usable(Endpoint.parse("http://c:1"), True)
    assert found() == pytest.approx([0, 1375, 0]), "a new engine counts as the least"
    give("a", 1200)
    give("c", 1200)
    assert found() == [0, 0, 0], "1,700 and 2,000 are about even"
    give("c", -1200)
    assert found() == [1700 - 1.25 * 500, 2000 - 1.25 * 500, 0], "it began with the 500 of the least"


def test_sessions_are_bounded_and_the_latest_stay() -> None:
    sessions = SessionEngines(most=10)
    p, d = Endpoint.parse("http://p:1"), Endpoint.parse("http://d:1")
    for number in range(30):
        sessions.placed(number, p, d)
        sessions.placed(0, None, d)
    assert len(sessions) == 10
    assert sessions.engines(0) == (p, d), "a turn without a prefill engine leaves the one before"
    assert sessions.engines(29) == (p, d)
    assert sessions.engines(15) == sessions.engines(None) == (None, None)


@pytest.mark.parametrize(
    ("headers", "body", "like"),
    [
        ({"x-session-id": "a"}, {"user": "b"}, ({"x-session-id": "a"}, {"prompt_cache_key": "c"})),
        ({}, {"prompt_cache_key": "a", "user": "b"}, ({}, {"prompt_cache_key": "a"})),
        ({}, {"user": "b"}, ({"x-session-id": ""}, {"user": "b", "prompt_cache_key": 7})),
        ({}, {"user": "b", "metadata": {"user_id": "c"}}, ({}, {"user": "b"})),
        ({}, {"metadata": {"user_id": "c"}}, ({}, {"metadata": {"user_id": "c", "x": 1}, "user": ""})),
        ({}, {"user": "b", "cache_salt": None}, ({}, {"user": "b"})),
    ],
)
def test_session_is_named_by_the_header_then_by_fields(
    headers: dict[str, str], body: dict[str, Any], like: tuple[dict[str, str], dict[str, Any]]
) -> None:
    assert session_of(headers, body) == session_of(*like) is not None
    assert session_of({}, {}) is None
    assert session_of({}, {"user": "a"}) != session_of({}, {"prompt_cache_key": "a"})


@pytest.mark.parametrize("headers", [{"x-session-id": "a"}, {}])
@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"model": {"not": "a name"}},
        {"cache_salt": "tenant"},
        {"cache_salt": msgspec.Raw(b'"%s"' % (b"x" * 5000))},
    ],
)
def test_session_belongs_to_one_model_and_one_tenant(headers: dict[str, str], other: dict[str, Any]) -> None:
    plain = {"model": "m", "user": "a"}
    assert session_of(headers, plain) != session_of(headers, {**plain, **other})


@pytest.mark.parametrize(
    "metadata", [None, "a", ["user_id"], {"user_id": 7}, msgspec.Raw(b'{"user_id":"a"}')]
)
def test_session_has_no_name_in_odd_metadata(metadata: Any) -> None:
    assert session_of({}, {"metadata": metadata}) is None


# --- Prefixes from other engines


def lending(prefills: int = 2, decodes: int = 2) -> Fleet:
    """Returns a fleet whose engines exchange prefixes."""
    fleet = Fleet(prefills, decodes)
    fleet.alone = not prefills
    for side, count in ((Side.PREFILL, prefills), (Side.DECODE, decodes)):
        for number in range(count):
            name = fleet.engine(f"{side.value[0]}{number}")
            fleet.pools[side].set_usable(name, True, prefixes="key", borrows=True)
    return fleet


ANSWER = "Because the answer of a decode engine is a part of the next turn. " * 20  # 325 tokens


def answered(fleet: Fleet, *messages: dict[str, Any]) -> Placement:
    """Places a request and answers it, ANSWER."""
    request = fleet.begin(*messages)
    request.prefilled(Computed())
    request.answer(text=ANSWER)
    return request.placement


def own_tokens(fleet: Fleet, placement: Placement) -> int:
    """Returns the tokens of the prompt that the prefill engine is expected to have itself."""
    assert placement.prompt is not None
    cached = fleet.workload(names(placement)[0]).cache.cached(placement.prompt)
    return placement.prompt.tokens_of(cached, placement.tokens)


def test_prefill_engine_may_load_the_answer_from_the_decode_engine_that_gave_it() -> None:
    fleet = lending()
    first = answered(fleet, user(LONG))
    assert first.prefix is None
    second = fleet.place(user(LONG), assistant(ANSWER), user("Why?"))
    assert names(second) == names(first)
    assert second.prefix is not None
    assert second.prefix.lender == first.decode
    assert second.prefix.tokens - own_tokens(fleet, second) == pytest.approx(325, rel=0.1)
    assert second.work is not None
    assert second.work.tokens == second.tokens - second.prefix.tokens < 20
    assert second.work.cached == second.prefix.tokens


@pytest.mark.parametrize("tenant", [{}, {"cache_salt": "another"}])
def test_prefix_of_another_tenant_is_not_proposed(tenant: dict[str, Any]) -> None:
    fleet = lending()
    request = fleet.begin(user(LONG), cache_salt="one")
    request.prefilled(Computed())
    request.answer(text=ANSWER)
    turns = user(LONG), assistant(ANSWER), user("Why?")
    assert fleet.place(*turns, cache_salt="one").prefix is not None
    assert fleet.place(*turns, **tenant).prefix is None


def test_engines_that_do_not_lend_get_no_proposal(fleet: Fleet) -> None:
    answered(fleet, user(LONG))
    second = fleet.place(user(LONG), assistant(ANSWER), user("Why?"))
    assert second.prefix is None
    assert second.work is not None
    assert second.work.tokens > 325


@pytest.mark.parametrize(("queue", "leaves"), [(400, False), (1200, True)])
def test_prompt_leaves_a_busy_prefill_engine_and_takes_its_prefix_along(queue: int, leaves: bool) -> None:
    """A prefix that is loaded costs half of one that is computed: of 1,925 tokens about 960."""
    fleet = lending(decodes=1)
    first = answered(fleet, user(LONG))
    assert first.prefill is not None
    with fleet.pools[Side.PREFILL].lease(first.prefill, Work(queue, 0.0)):
        second = fleet.place(user(LONG), assistant(ANSWER), user("Why?"))
    assert (second.prefill != first.prefill) == leaves
    assert second.prefix is not None
    assert (own_tokens(fleet, second) == 0) == leaves


@pytest.mark.parametrize("way", ["unusable", "avoided", "cleared"])
def test_engine_that_takes_no_requests_or_lost_its_cache_lends_nothing(way: str) -> None:
    fleet = lending()
    first = answered(fleet, user(LONG))
    avoid: tuple[str, ...] = ()
    match way:
        case "unusable":
            fleet.pools[Side.DECODE].set_usable(first.decode, False, prefixes="key")
        case "avoided":
            avoid = (first.decode.control_host,)
        case "cleared":
            fleet.workload(names(first)[1]).cache.clear()
    second = fleet.place(user(LONG), assistant(ANSWER), user("Why?"), avoid=avoid)
    assert second.prefill == first.prefill
    assert second.prefix is None


@pytest.mark.parametrize(
    ("cached", "result", "own"),
    [(2240, "borrowed", True), (1920, "computed", True), (None, "unknown", False)],
)
def test_proposal_is_counted_by_what_the_prefill_engine_reports(
    cached: int | None, result: str, own: bool
) -> None:
    """Loaded tokens are not counted as hits of the engine's own cache."""
    fleet = lending()
    counted: list[tuple[str, int]] = []
    fleet.caches = CacheRecords(
        count=lambda *hit: fleet.hits.append(hit), proposed=lambda *one: counted.append(one)
    )
    first = answered(fleet, user(LONG))
    request = fleet.begin(user(LONG), assistant(ANSWER), user("Why?"))
    second = request.placement
    had = own_tokens(fleet, second)
    request.prefilled(Computed(tokens=second.tokens, cached=cached))
    assert second.prefix is not None
    borrowed = 2240 - had if result == "borrowed" else 0
    assert counted == [(result, borrowed)]
    use = fleet.workload(names(second)[0]).use
    assert dict(use.borrowed) == ({first.decode: borrowed} if borrowed else {})
    expected = [(Side.PREFILL, had, min(cached or 0, had))] if own else []
    assert fleet.hits == expected
    assert (use.predicted, use.actual) == (expected[0][1:] if expected else (0, 0))


@pytest.mark.parametrize(("context", "leaves"), [(2000, False), (5000, True)])
def test_decode_engine_alone_loads_the_prefix_of_a_busier_engine(context: int, leaves: bool) -> None:
    """Other streams have so many tokens there, which count for a quarter. A loaded token counts for half."""
    fleet = lending(prefills=0)
    first = fleet.begin(user(LONG))
    assert first.placement.prefix is None
    first.answer(text=ANSWER)
    turns = user(LONG), assistant(ANSWER), user("Why?")
    with fleet.pools[Side.DECODE].lease(first.placement.decode, context=context):
        second = fleet.place(*turns)
        assert fleet.place(*turns, n=2).prefix is None, "each answer would load it"
    assert (second.decode != first.placement.decode) == leaves
    assert second.work is not None
    assert second.work.tokens < 20
    if not leaves:
        assert second.prefix is None, "it has all itself"
        return
    assert second.prefix == Prefix(first.placement.decode, second.work.cached)


def test_decode_engine_alone_loads_nothing_of_other_weights() -> None:
    fleet = lending(1, 2)
    (prefill,) = fleet.pools[Side.PREFILL].endpoints
    fleet.pools[Side.PREFILL].set_usable(prefill, True, weights=Weights("2"), prefixes="key", borrows=True)
    first = fleet.begin(user(LONG))
    assert first.placement.reason == "other_weights"
    prompt = first.placement.prompt
    assert prompt is not None
    fleet.workload("p0").cache.prompt_computed(prompt)
    assert fleet.place(user(LONG)).prefix is None
    first.answer(text=ANSWER)
    avoid = (first.placement.decode.control_host,)
    assert fleet.place(user(LONG), avoid=avoid).prefix is None, "an engine that has failed lends nothing"
    with fleet.pools[Side.DECODE].lease(first.placement.decode, context=9000):
        placement = fleet.place(user(LONG))
    assert placement.decode != first.placement.decode
    assert placement.prefix is not None
    assert placement.prefix.lender == first.placement.decode


@pytest.mark.parametrize("side", TEXT_SIDES)
def test_session_engine_that_loads_a_prefix_wins_if_its_costs_are_about_as_low(side: Side) -> None:
    """Half of 1,925 tokens are about as many as the queue of the engine that has them."""
    fleet, letter = lending(2 if side is Side.PREFILL else 0, 2), side.value[0]
    lender = fleet.workload(f"{letter}1")
    lender.cache.prompt_computed(chat(user(LONG)).prompt(CHAT))
    lender.backlog.add(Work(900, 0.0))
    fleet.caches.sessions.placed(1, fleet.engine("p0"), fleet.engine("d0"))
    for session, chosen in ((None, f"{letter}1"), (1, f"{letter}0")):
        placement = fleet.place(user(LONG), session=session)
        assert (placement.prefill or placement.decode).control_host == chosen
        assert (placement.prefix is None) == (session is None)


def test_only_engine_of_both_roles_loads_the_prefix_of_a_prefill_engine() -> None:
    fleet = lending(1, 0)
    both, workload = fleet.engine("both"), Workload(lambda: fleet.now)
    for side in TEXT_SIDES:
        fleet.pools[side].set_usable(both, True, workload, prefixes="key", borrows=True)
    fleet.index.add(workload.cache)
    fleet.workload("p0").cache.prompt_computed(chat(user(LONG)).prompt(CHAT))
    fleet.workload("p0").backlog.add(Work(1200, 0.0))
    placement = fleet.place(user(LONG))
    assert (placement.prefill, placement.decode, placement.reason) == (None, both, "one_engine")
    assert placement.prefix is not None
    assert placement.prefix.lender == fleet.engine("p0")


@pytest.mark.parametrize(
    ("cached", "result", "own"),
    [(1920, "borrowed", True), (0, "computed", True), (None, "unknown", False)],
)
def test_proposal_is_counted_by_what_the_decode_engine_alone_reports(
    cached: int | None, result: str, own: bool
) -> None:
    fleet = lending(prefills=0)
    counted: list[tuple[str, int]] = []
    fleet.caches = CacheRecords(
        count=lambda *hit: fleet.hits.append(hit), proposed=lambda *one: counted.append(one)
    )
    first = fleet.begin(user(LONG))
    first.answer(text=ANSWER)
    lender = first.placement.decode
    with fleet.pools[Side.DECODE].lease(lender, context=9000):
        second = fleet.begin(user(LONG), assistant(ANSWER), user("Why?"))
    assert second.placement.prefix is not None
    second.answer(prompt_tokens=second.placement.tokens, cached_tokens=cached)
    assert counted == [(result, cached if result == "borrowed" else 0)]
    use = fleet.workload(names(second.placement)[1]).use
    assert dict(use.borrowed) == ({lender: cached} if result == "borrowed" else {})
    assert fleet.hits == ([(Side.DECODE, 0, 0)] if own else [])


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3000)), min_size=8, max_size=8))
def test_engines_whose_lenders_are_not_searched_would_not_be_chosen(
    state: list[tuple[int, int]],
) -> None:
    """Each engine has so many messages of the prompt, and so many tokens in its queue."""
    fleet, turns = lending(4, 4), [user(f"{number}{TEXT * 12}") for number in range(8)]
    for name, (count, queued) in zip(("p0", "p1", "p2", "p3", "d0", "d1", "d2", "d3"), state, strict=True):
        fleet.workload(name).cache.prompt_computed(chat(*turns[:count]).prompt(CHAT))
        fleet.workload(name).backlog.add(Work(queued, 1.0))
    parts = fleet.pools, fleet.index, fleet.caches.sizes, fleet.caches.sessions, lambda: fleet.now
    placed = fleet.place(*turns)
    expected = PlainPlacement(*parts).place(PlacementRequest(chat(*turns), CHAT))
    assert (placed.prefill, placed.decode, placed.prefix) == expected


def test_lenders_are_searched_only_where_a_loan_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, asked = lending(3, 3), Counter[str]()
    first = fleet.serve(user(LONG))
    propose = Lenders.propose

    def counted(self: Lenders, prefill: Member, own: int) -> Prefix | None:
        asked[prefill.endpoint.control_host] += 1
        return propose(self, prefill, own)

    monkeypatch.setattr(Lenders, "propose", counted)
    assert first.prefill is not None
    fleet.place(user(LONG), assistant("Because."), user("So?"))
    assert asked == {first.prefill.control_host: 1}
