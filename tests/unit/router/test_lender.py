"""The choice of an engine from which a prefill engine may load the beginning of a prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from checkpoints import BASE
from checkpoints import TUNED as OTHER

from kv_connector.control.membership import PromptCost, Register, WorkloadReport
from kv_connector.protocol.session.checkpoint import Weights
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import Member, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement.lender import Lenders, Prefix, least_lead, lending
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion

# 25 us a token, and 20 ms a step: a question costs 400 tokens.
TUNED = Weights("", OTHER)
LOAD = WorkloadReport(
    8192, 8192, 1 << 20, decode_ns=20_000_000, prompt=PromptCost(step_ns=0, token_ns=25_000, pair_ps=0)
)


class Fleet:
    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.prefill = self.engine("p", borrows=True, weights=Weights("", BASE))

    def engine(self, name: str, *, outstanding: int = 0, **facts: Any) -> Member:
        facts = {"prefixes": "key", **facts}
        member = Member(Endpoint.parse(f"http://{name}:1"), Workload(), usable=True, **facts)
        member.outstanding = outstanding
        self.index.add(member.workload.cache)
        member.workload.hear(LOAD)
        return member

    def propose(self, *held: tuple[int, Member], own: int = 0) -> Prefix | None:
        """Returns the proposal if each engine holds so many tokens, and the prefill engine ``own``."""
        engines = [one for _, one in held]
        matches = sorted(
            ((one.workload.cache.bit, tokens) for tokens, one in held), key=lambda match: -match[1]
        )
        return Lenders(matches, partial(lending, engines)).propose(self.prefill, own)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_lender_is_the_engine_with_the_most_tokens(fleet: Fleet) -> None:
    some, most = fleet.engine("d0"), fleet.engine("d1", outstanding=9)
    assert fleet.propose((2000, some), (5000, most), own=1000) == Prefix(most.endpoint, 5000)


def test_lender_has_whole_blocks(fleet: Fleet) -> None:
    lender = fleet.engine("d0")
    lender.workload.hear(msgspec.structs.replace(LOAD, block_tokens=128))
    assert fleet.propose((5030, lender), own=4992) is None
    assert fleet.propose((5130, lender), own=4992) == Prefix(lender.endpoint, 5120)


def test_lender_of_equals_is_the_engine_with_the_fewest_requests(fleet: Fleet) -> None:
    busy, idle = fleet.engine("d0", outstanding=3), fleet.engine("p1", outstanding=2)
    both = busy.workload.cache.bit | idle.workload.cache.bit
    for engines in ([busy, idle], [idle, busy]):
        found = Lenders([(both, 4000)], partial(lending, engines)).propose(fleet.prefill, 0)
        assert found == Prefix(idle.endpoint, 4000)


@pytest.mark.parametrize(
    "facts", [{"prefixes": ""}, {"prefixes": "other"}, {"weights": Weights("2")}, {"weights": TUNED}]
)
def test_lender_has_equal_hashes_and_weights(fleet: Fleet, facts: dict[str, Any]) -> None:
    """An engine of an older release reports no key."""
    assert fleet.propose((5000, fleet.engine("d0", **facts))) is None
    second = fleet.engine("d1")
    found = fleet.propose((5000, fleet.engine("d2", **facts)), (2000, second))
    assert found is not None
    assert found.lender == second.endpoint


def test_engines_without_a_key_lend_nothing_to_each_other(fleet: Fleet) -> None:
    fleet.prefill.prefixes = ""
    assert fleet.propose((5000, fleet.engine("d0", prefixes=""))) is None


def test_prefill_engine_that_does_not_borrow_gets_no_proposal(fleet: Fleet) -> None:
    fleet.prefill.borrows = False
    assert fleet.propose((5000, fleet.engine("d0"))) is None


@pytest.mark.parametrize("own", [4000, 3968])
def test_prefill_engine_does_not_borrow_from_itself(fleet: Fleet, own: int) -> None:
    """If it has the whole prompt, it still computes the last token, so it has a block less."""
    bit = fleet.prefill.workload.cache.bit
    assert Lenders([(bit, 4000)], partial(lending, [fleet.prefill])).propose(fleet.prefill, own) is None


def test_busy_lender_needs_the_lead_that_is_computed_in_half_of_its_step(fleet: Fleet) -> None:
    busy = fleet.engine("d0", outstanding=1)
    assert least_lead(fleet.prefill, busy) == 400
    assert fleet.propose((1399, busy), own=1000) is None
    assert fleet.propose((1400, busy), own=1000) is not None


def test_idle_lender_needs_a_block(fleet: Fleet) -> None:
    idle = fleet.engine("d0")
    assert fleet.propose((1031, idle), own=1000) is None
    assert fleet.propose((1032, idle), own=1000) is not None


def test_lender_with_fewer_tokens_is_taken_if_the_first_is_too_busy(fleet: Fleet) -> None:
    busy, idle = fleet.engine("d0", outstanding=1), fleet.engine("d1")
    found = fleet.propose((1300, busy), (1200, idle), own=1000)
    assert found is not None
    assert found.lender == idle.endpoint


def test_registration_decides_whether_an_engine_lends_and_borrows() -> None:
    pools = {side: Pool() for side in Side}
    members = Members(pools, {side: [] for side in Side}, Incidents(), suspect=3.0, dead=5.0)

    def register(**facts: Any) -> Member:
        message = Register("p", "1", Role.PREFILL, "http://p:1", "p", 5600, **facts)
        members.answered(members.register(0.0, message))
        return pools[Side.PREFILL].choices()[0]

    one = register()
    assert (one.prefixes, one.borrows, one.prefetches) == ("", False, False), "an older release"
    one = register(prefixes="key", borrows=True, prefetches=True)
    assert (one.prefixes, one.borrows, one.prefetches) == ("key", True, True)


@pytest.mark.parametrize(("cached", "borrowed"), [(160, 0), (192, 0), (240, 0), (256, 65), (384, 193)])
def test_tokens_of_a_list_were_borrowed_if_the_engine_cannot_have_had_them(
    cached: int, borrowed: int
) -> None:
    """The engine is known to have three prefixes, 191 tokens, and to lack the fourth, which ends at 255."""
    pool = Pool()
    pool.set_usable(endpoint := Endpoint.parse("http://p:1"), True, workload := Workload())
    body = {"model": "m", "prompt": [*range(100, 500)]}  # 1,601 bytes
    prompt = Completion.decode(json.dumps(body, separators=(",", ":")).encode()).prompt("/v1/completions")
    assert prompt.ends[:4] == (256, 512, 768, 1024)
    before = replace(prompt, prefixes=prompt.prefixes[:3], ends=prompt.ends[:3])
    workload.cache.prompt_computed(before)
    counted: list[tuple[str, int]] = []
    records = CacheRecords(proposed=lambda *one: counted.append(one))
    with pool.lease(endpoint, prompt=prompt) as lease:
        prefix = Prefix(Endpoint.parse("http://d:1"), tokens=400)
        records.prefilled(lease, Computed(tokens=400, cached=cached), prefix)
    assert counted == [("borrowed" if borrowed else "computed", borrowed)]
    assert workload.use.actual == cached - borrowed


@pytest.mark.parametrize("separator", [",", ", "])
def test_proposal_counts_as_computed_when_later_token_ids_are_longer(separator: str) -> None:
    """A turn of 2,300 short ids, an answer of 300 long ids and a message of 300 short ids."""
    pool = Pool()
    pool.set_usable(endpoint := Endpoint.parse("http://p:1"), True, workload := Workload())

    def listed(ids: list[int]) -> Prompt:
        body = json.dumps({"model": "m", "prompt": ids}, separators=(separator, ":"))
        return Completion.decode(body.encode()).prompt("/v1/completions")

    first, answer = [64] * 2300, [100_000] * 300
    before = listed(first)
    workload.cache.prompt_computed(before)
    prompt = listed([*first, *answer, *[64] * 300])
    counted: list[tuple[str, int]] = []
    records = CacheRecords(proposed=lambda *one: counted.append(one))
    with pool.lease(endpoint, prompt=prompt) as lease:
        prefix = Prefix(Endpoint.parse("http://d:1"), tokens=2600)
        records.prefilled(lease, Computed(tokens=2900, cached=2288), prefix)
    assert counted == [("computed", 0)]
    assert workload.use.actual == 2288
    assert 2200 < workload.use.predicted <= 2300
    after = before.followed_by(",".join(map(str, answer)).encode())
    assert after.tokens_of(after.ends[-1], 2600) == prompt.tokens_of(after.ends[-1], 2900)
    assert prompt.bytes_with(2288, 2900) == max(
        end for end in prompt.ends if prompt.tokens_of(end, 2900) <= 2288
    )
