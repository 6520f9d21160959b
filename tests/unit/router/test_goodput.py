"""The choice of engines by objectives."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kv_connector.control.membership import PromptCost, Register, WorkloadReport
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import NoEngine, Pool
from kv_connector.router.engines.workload import Cost
from kv_connector.router.placement.goodput import Goodput
from kv_connector.router.placement.policy import FewestOutstanding, Placement, PlacementRequest
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.token_counts import prompt_tokens
from kv_connector.router.settings import Objectives

PATH = "/v1/completions"
# 25 us a token, and 5 ms a step of any size: a model of 8 billion parameters on a large GPU.
COST = PromptCost(step_ns=5_000_000, token_ns=25_000, pair_ps=0)
MS = 1e-3


def load(**changes: Any) -> WorkloadReport:
    fields: dict[str, Any] = {
        "step_tokens": 8192,
        "prompt_tokens": 8192,
        "cache_tokens": 1 << 20,
        "prompt": COST,
        "decode_ns": 5_000_000,
    }
    return WorkloadReport(**(fields | changes))


SMALL_STEPS = load(step_tokens=1024, prompt_tokens=256)  # a step with 256 prompt tokens takes 11.4 ms


class Router:
    """A policy over engines that register."""

    def __init__(self, ttft: float = 400 * MS, tbt: float = 15 * MS) -> None:
        self.pools = {side: Pool() for side in Side}
        self.members = Members(self.pools, {side: [] for side in Side}, Incidents(), suspect=3.0, dead=5.0)
        self.caches = CacheRecords()
        self.policy = Goodput(Objectives(ttft, tbt), self.pools, self.members.index, self.caches.sizes)

    def join(
        self,
        role: Role,
        number: int,
        said: WorkloadReport | None,
        incarnation: str = "1",
        **facts: Any,
    ) -> Endpoint:
        name = f"{role.value}-{number}"
        port = 8000 + 100 * [*Role].index(role) + number
        message = Register(name, incarnation, role, f"http://h:{port}", "h", port + 50, load=said, **facts)
        endpoint = self.members.register(0.0, message)
        for joining in self.members.to_probe():
            self.members.answered(joining)
        workload = self.pools[Side.PREFILL if role is Role.PREFILL else Side.DECODE].workload(endpoint)
        if workload is not None:
            # Time stands still: on a busy machine, prompts would be computed between two lines of a test.
            now = time.monotonic()
            workload.clock = workload.backlog._clock = lambda: now
        return endpoint

    def pair(self, decode: WorkloadReport | None = SMALL_STEPS) -> tuple[Endpoint, Endpoint]:
        return self.join(Role.PREFILL, 0, load()), self.join(Role.DECODE, 0, decode)

    def place(self, tokens: int, *, first: int = 0, **body: Any) -> Placement:
        """Places a prompt of so many token ids. ``first`` is its first id, which makes prompts differ."""
        ids = [first, *([7] * (tokens - 1))]
        raw = json.dumps({"model": "m", "prompt": ids, "stream": True, **body}).encode()
        return self.policy.place(PlacementRequest(Completion.decode(raw), PATH))

    def serve(self, tokens: int, *, computed: bool = False, **body: Any) -> Placement:
        """Places a prompt and begins to serve it. ``computed``: until the decode engine's answer begins."""
        placement = self.place(tokens, **body)
        prompt = placement.prompt
        if placement.prefill is None:
            lease = self.pools[Side.DECODE].acquire(placement.decode, placement.work, prompt=prompt)
        else:
            prefill = self.pools[Side.PREFILL].acquire(placement.prefill, placement.work, prompt=prompt)
            lease = self.pools[Side.DECODE].acquire(placement.decode, prompt=prompt)
            if computed:
                self.caches.prefilled(prefill, Computed())
                prefill.release()
        if computed:
            self.caches.began(lease, placement)
        return placement


@pytest.fixture
def router() -> Router:
    return Router()


def test_an_idle_prefill_engine_computes_a_long_prompt(router: Router) -> None:
    prefill, decode = router.pair()
    placement = router.place(4000)
    assert (placement.prefill, placement.decode) == (prefill, decode)
    assert placement.reason == "prefill_sooner"
    assert placement.work is not None
    assert placement.work.tokens == 4000
    assert placement.work.seconds == pytest.approx(105 * MS)
    assert not placement.late


def test_short_prompt_behind_a_queue_is_computed_where_it_decodes(router: Router) -> None:
    _, decode = router.pair()
    router.serve(8000, first=1)  # 205 ms
    short = router.place(500, first=2)
    assert (short.prefill, short.decode, short.reason) == (None, decode, "decode_sooner")
    assert short.work is not None
    # Two steps: of 256 tokens and of 244.
    assert short.work.seconds == pytest.approx((2 * 5 + 12.5) * MS)


def test_a_decode_engine_with_large_steps_computes_nothing(router: Router) -> None:
    prefill, _ = router.pair(load())
    router.serve(8000, first=1)
    long = router.place(8000, first=2)
    assert (long.prefill, long.reason) == (prefill, "streams_first"), "205 ms in one step"
    short = router.place(1000, first=3)  # 30 ms a step
    assert (short.prefill, short.reason) == (prefill, "streams_first")
    tiny = router.place(300, first=4)
    assert (tiny.prefill, tiny.reason) == (None, "decode_sooner"), "12.5 ms"
    router.serve(300, first=5)
    third = router.place(300, first=6)
    assert (third.prefill, third.reason) == (prefill, "streams_first"), "two in one step are 20 ms"


def test_a_prompt_takes_its_own_share_of_a_step_and_no_more(router: Router) -> None:
    prefill, _ = router.pair(load(step_tokens=512, prompt_tokens=256))
    router.serve(8000, first=1)
    alone = router.serve(2000, first=2)  # 11.4 ms a step
    assert (alone.prefill, alone.reason) == (None, "decode_sooner")
    second = router.place(2000, first=3)
    assert (second.prefill, second.reason) == (prefill, "streams_first"), "of both, 17.8 ms"


@pytest.mark.parametrize(("step_tokens", "prompts"), [(256, 0), (512, 1), (1024, 3)])
def test_prompts_leave_tokens_for_streams_that_come(step_tokens: int, prompts: int) -> None:
    """This holds however patient the current streams are."""
    router = Router(tbt=100 * MS)
    prefill, decode = router.pair(load(step_tokens=step_tokens, prompt_tokens=256, running=1))
    router.pools[Side.DECODE].acquire(decode)
    router.pools[Side.PREFILL].acquire(prefill, Work(80_000, 2.0))
    for number in range(prompts):
        assert router.serve(4000, first=number).decode == decode
    full = router.place(4000, first=9)
    assert (full.prefill, full.reason) == (prefill, "streams_first")
    short = router.place(10, first=10)
    assert (short.prefill, short.reason) == (None, "decode_sooner"), "they fit in beside"


def test_requests_that_wait_for_prefill_take_no_tokens_of_decode_steps() -> None:
    router = Router(tbt=100 * MS)
    prefill, decode = router.pair(load(step_tokens=512, prompt_tokens=256, running=1))
    for _ in range(300):
        router.pools[Side.DECODE].acquire(decode)
    router.pools[Side.PREFILL].acquire(prefill, Work(80_000, 2.0))
    assert router.place(4000).reason == "decode_sooner"


def test_prompt_that_is_believed_to_be_cached_may_fill_the_steps() -> None:
    router = Router()
    prefill, _ = router.pair(load(step_tokens=256, prompt_tokens=256, running=1))
    router.serve(6000, computed=True)
    router.serve(8000, first=1)
    again = router.place(6000)
    assert (again.prefill, again.reason) == (prefill, "streams_first"), "24 steps, if it is not"


def test_a_prompt_that_a_decode_engine_has_cached_is_computed_there(router: Router) -> None:
    prefill, decode = router.pair()
    assert router.serve(6000, computed=True).prefill == prefill
    router.pools[Side.PREFILL].acquire(prefill, Work(14_000, 0.35))
    follow_up = router.place(6400)
    assert (follow_up.prefill, follow_up.decode) == (None, decode), "it has the pages of the first"
    assert follow_up.work is not None
    assert 400 <= follow_up.work.tokens < 1000
    router.join(Role.DECODE, 0, SMALL_STEPS, incarnation="2")
    anew = router.place(6400)
    assert (anew.prefill, anew.decode.url) == (None, decode.url)
    assert anew.work is not None
    assert anew.work.tokens == 6400, "another process has nothing cached"


def test_late_prompt_does_not_delay_others(router: Router) -> None:
    prefill, _ = router.pair()
    late = router.place(20_000, first=1)  # 505 ms, or 895 ms in small steps
    assert (late.prefill, late.reason, late.late) == (None, "late_anyway", True)
    router.join(Role.DECODE, 0, load(step_tokens=256, prompt_tokens=64))
    later = router.place(20_000, first=2)  # 2,065 ms in smaller steps
    assert (later.prefill, later.reason, later.late) == (prefill, "prefill_sooner", True)


def test_the_prefill_engine_with_the_least_to_compute_is_taken(router: Router) -> None:
    router.pair(load())
    other = router.join(Role.PREFILL, 1, load())
    busy = router.serve(8000, first=1)
    assert busy.prefill is not None
    idle = {router.join(Role.PREFILL, 0, load()), other} - {busy.prefill}
    assert {router.serve(2000, first=2).prefill} == idle
    assert {router.serve(2000, first=3).prefill} == idle, "by the tokens, not by the number of requests"


def test_other_routers_prompts_count(router: Router) -> None:
    first, _ = router.pair(load())
    second = router.join(Role.PREFILL, 1, load())
    router.join(Role.PREFILL, 0, load(waiting=8000))
    assert router.place(1000, first=1).prefill == second
    router.serve(4000, first=2)
    assert router.place(1000, first=3).prefill == second, "105 ms there, 205 at the first"
    router.serve(6000, first=4)
    assert router.place(1000, first=5).prefill == first


def test_work_that_an_engine_reports_is_not_counted_twice(router: Router) -> None:
    router.pair(load())
    router.serve(7000, first=1)
    router.join(Role.PREFILL, 0, load(waiting=7000))
    behind = router.place(7000, first=2)
    assert not behind.late, "360 ms, if counted twice 540"


def test_cost_of_a_decode_engine_without_prompts_is_judged_by_the_other_engines(router: Router) -> None:
    router.pair(load(step_tokens=512, prompt_tokens=256, prompt=None, decode_ns=9_000_000))
    router.serve(8000, first=1)
    assert router.place(200, first=2).reason == "decode_sooner", "9 ms and 5"
    assert router.place(500, first=3).reason == "streams_first", "9 ms and 6.4"


def test_a_decode_engines_own_cost_has_its_streams_in_it(router: Router) -> None:
    # All its steps had 256 tokens of prompts, and 11 ms. The constant part of a step is not known from them.
    own = PromptCost(step_ns=0, token_ns=43_000, pair_ps=0)
    _, decode = router.pair(load(step_tokens=512, prompt_tokens=256, prompt=own))
    router.serve(8000, first=1)
    placement = router.place(1024, first=2)
    assert (placement.prefill, placement.decode, placement.reason) == (None, decode, "decode_sooner")
    assert placement.work is not None
    assert placement.work.seconds == pytest.approx(1024 * 0.043 * MS)
    short = router.place(8, first=3)
    assert short.work is not None
    assert short.work.seconds == pytest.approx(5 * MS), "no step is shorter than the streams' own"


@pytest.mark.parametrize("silent", [None, load(prompt=None)])
def test_while_nothing_is_measured_every_prompt_goes_to_a_prefill_engine(
    router: Router, silent: WorkloadReport | None
) -> None:
    prefill = router.join(Role.PREFILL, 0, silent)
    router.join(Role.DECODE, 0, SMALL_STEPS)
    router.serve(8000, first=1)
    placement = router.place(100, first=2)
    assert (placement.prefill, placement.reason) == (prefill, "unmeasured")


def test_decode_engine_without_a_report_gets_no_prompt_to_compute(router: Router) -> None:
    prefill, _ = router.pair(None)
    router.serve(8000, first=1)
    assert router.place(100, first=2).prefill == prefill


def test_prefill_corrects_what_was_thought_to_be_cached() -> None:
    router = Router(tbt=1 * MS)  # no decode engine is that fast
    prefill, decode = router.pair()
    router.pools[Side.DECODE].acquire(decode)
    for expected in (6000, 1000):
        placement = router.place(6000)
        assert placement.prefill == prefill
        assert placement.work is not None
        assert placement.work.tokens <= expected
        with router.pools[Side.PREFILL].lease(prefill, prompt=placement.prompt) as lease:
            router.caches.prefilled(lease, Computed(tokens=6000, cached=0))
    third = router.place(6000)
    assert third.work is not None
    assert third.work.tokens == 6000, "it does not keep such prompts"


def test_engines_of_both_sides_never_prefill_for_themselves(router: Router) -> None:
    one = router.join(Role.BOTH, 0, load())
    alone = router.place(1000)
    assert (alone.prefill, alone.decode, alone.reason) == (None, one, "one_engine")
    other = router.join(Role.BOTH, 1, load())
    for number in range(6):
        placement = router.serve(3000, first=number)
        assert placement.prefill != placement.decode
        assert {placement.prefill, placement.decode} <= {one, other, None}


def test_there_must_be_engines_of_both_sides(router: Router) -> None:
    router.join(Role.PREFILL, 0, load())
    with pytest.raises(NoEngine) as lack:
        router.place(10)
    assert lack.value.pool is router.pools[Side.DECODE]


def test_prompts_that_an_engine_has_cached_are_no_other_routers(router: Router) -> None:
    router.pair(None)
    router.serve(8000, computed=True)
    for _ in range(3):
        router.serve(8000)  # about 10 ms each
    before = router.pools[Side.PREFILL].choices()[0].workload.wait(Cost.of(COST))
    router.join(Role.PREFILL, 0, load(waiting=24_000))
    after = router.pools[Side.PREFILL].choices()[0].workload.wait(Cost.of(COST))
    assert after == pytest.approx(before, abs=0.1)


def test_the_streams_do_not_rely_on_what_is_believed_to_be_cached(router: Router) -> None:
    prefill, _ = router.pair(load())
    router.serve(8000, computed=True)
    router.serve(8000, first=1)
    again = router.place(8000)
    assert (again.prefill, again.reason) == (prefill, "streams_first"), "205 ms if it is not"


def test_decode_engine_without_streams_keeps_no_request_waiting(router: Router) -> None:
    prefill, decode = router.pair(load())
    router.pools[Side.PREFILL].acquire(prefill, Work(8000, 0.2))
    for tokens in (8000, 9000):  # in one step, and in two
        placement = router.place(tokens)
        assert (placement.prefill, placement.decode, placement.reason) == (None, decode, "decode_sooner")


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 7}, 7),
        ({"input_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": None}, 6),
        ({"prompt_tokens": "7"}, None),
        ([], None),
        (None, None),
    ],
)
def test_usage_of_an_engine_gives_the_prompts_length(usage: object, tokens: int | None) -> None:
    assert prompt_tokens(usage) == tokens


def test_a_prompt_with_pictures_is_not_forecast(router: Router) -> None:
    prefill, _ = router.pair()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    body = {"model": "m", "messages": [{"role": "user", "content": [picture]}]}
    chat = Completion.decode(json.dumps(body).encode())
    placement = router.policy.place(PlacementRequest(chat, "/v1/chat/completions"))
    assert (placement.prefill, placement.reason, placement.work) == (prefill, "pictures", None)
    with router.pools[Side.PREFILL].lease(prefill, prompt=placement.prompt) as lease:
        router.caches.prefilled(lease, Computed(tokens=1000, cached=0))
    text = Completion.decode(json.dumps({"model": "m", "prompt": "x" * 3998}).encode())
    learned = router.policy.place(PlacementRequest(text, PATH))
    assert learned.work is not None
    assert learned.work.tokens == 1000, "nothing is learned of it"


def test_without_objectives_the_fewest_requests_decide() -> None:
    router = Router()
    prefill, decode = router.pair()
    other = router.join(Role.PREFILL, 1, load(waiting=1 << 20))
    policy = FewestOutstanding(router.pools)
    completion = Completion.decode(b'{"prompt": [1, 2]}')
    with router.pools[Side.PREFILL].lease(prefill):
        placement = policy.place(PlacementRequest(completion, PATH))
    assert (placement.prefill, placement.decode, placement.reason) == (other, decode, "fewest_outstanding")
    assert placement.work is None


@pytest.mark.parametrize("lends", [True, False])
def test_prefill_engine_may_load_what_a_decode_engine_has(router: Router, lends: bool) -> None:
    """The decode engine reports no workload, so it computes no prompt itself."""
    key = "key" if lends else ""
    router.join(Role.PREFILL, 0, load(), prefixes="key", borrows=True)
    decode = router.join(Role.DECODE, 0, None, prefixes=key)
    router.serve(2000, computed=True)
    known, workload = router.place(2600).prompt, router.pools[Side.DECODE].workload(decode)
    assert known is not None
    assert workload is not None
    workload.cache.prompt_computed(known)
    placement = router.place(2700)
    assert placement.prefill is not None
    if not lends:
        assert placement.prefix is None
        return
    assert placement.prefix is not None
    assert placement.prefix.lender == decode
    assert placement.work is not None
    assert placement.work.cached == pytest.approx(2000, abs=100), "what the prefill engine has itself"
    assert placement.prefix.tokens == pytest.approx(2600, abs=100)


def test_decode_engine_that_computes_a_prompt_may_load_what_a_prefill_engine_has(router: Router) -> None:
    prefill = router.join(Role.PREFILL, 0, load(), prefixes="key", borrows=True)
    router.join(Role.DECODE, 0, load(), prefixes="key", borrows=True)
    known, workload = router.place(2600).prompt, router.pools[Side.PREFILL].workload(prefill)
    assert known is not None
    assert workload is not None
    workload.cache.prompt_computed(known)
    workload.backlog.add(Work(20_000, 0.5))
    placement = router.place(2700)
    assert (placement.prefill, placement.reason) == (None, "decode_sooner")
    assert placement.prefix is not None
    assert placement.prefix.lender == prefill
    assert placement.prefix.tokens == pytest.approx(2600, abs=100)
    assert placement.work is not None
    assert placement.work.cached == 0, "the forecast counts what is loaded as computed"
    assert router.place(2700, n=2).prefix is None, "each answer would load it"


def test_decode_engine_without_prefill_engines_may_load_what_another_one_has(router: Router) -> None:
    lender, other = (
        router.join(Role.DECODE, number, load(), prefixes="key", borrows=True) for number in range(2)
    )
    ids = [7] * 2700

    def alone(**body: Any) -> Placement:
        raw = json.dumps({"model": "m", "prompt": ids, **body}).encode()
        return router.policy.alone(PlacementRequest(Completion.decode(raw), PATH))

    first, workload = alone(), router.pools[Side.DECODE].workload(lender)
    assert (first.decode, first.prefix) == (lender, None)
    assert first.prompt is not None
    assert workload is not None
    workload.cache.prompt_computed(first.prompt)
    with router.pools[Side.DECODE].lease(lender):
        placement = alone()
        assert alone(n=2).prefix is None, "each answer would load it"
    assert (placement.prefill, placement.decode, placement.reason) == (None, other, "no_prefill")
    assert placement.prefix is not None
    assert placement.prefix.lender == lender


def test_engine_with_a_whole_prompt_of_full_blocks_gets_no_proposal(router: Router) -> None:
    """It computes the last token, so it has a block less, and so has the other engine."""
    engines = [
        router.join(Role.DECODE, number, load(block_tokens=64), prefixes="key", borrows=True)
        for number in range(2)
    ]
    messages = [{"role": "user", "content": "x" * 4088}]
    chat = Completion.decode(json.dumps({"model": "m", "messages": messages}).encode())
    request = PlacementRequest(chat, "/v1/chat/completions")
    prompt = router.policy.alone(request).prompt
    assert prompt is not None
    assert router.caches.sizes.tokens(prompt) % 64 == 0
    for engine in engines:
        workload = router.pools[Side.DECODE].workload(engine)
        assert workload is not None
        workload.cache.prompt_computed(prompt)
    assert router.policy.alone(request).prefix is None
