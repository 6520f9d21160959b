"""Conversations over two prefill and two decode engines, with the answers of one engine alone.

KVC_CONVERSATIONS is the number of conversations of each kind of model. Half of them are those of a second
tenant, which has the prompts of the first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from deployment import BLOCK, Client, assert_quiescent, prompt, wait_until
from dialogues import write_dialogues
from fleet_of_kind import KINDS, Fleet
from suite_numbers import whole_of
from talk import TENANTS, Talk, ask, faults

from kv_connector.lab.cluster import HOST, LocalCluster

pytestmark = pytest.mark.anyio

CONVERSATIONS = whole_of("KVC_CONVERSATIONS", 200)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=KINDS)
async def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, interpreter: tuple[str, ...]
) -> AsyncIterator[Fleet]:
    kind = KINDS[request.param]
    model = kind.model(tmp_path / "model")
    with LocalCluster(tmp_path / "logs", model, kind.decode) as cluster:
        cluster.interpreter = interpreter
        yield Fleet(cluster, kind)


async def test_answers_are_one_engines_at_every_turn(fleet: Fleet, client: Client) -> None:
    """Engines evict, lend, lose their caches, stand still and die meanwhile."""
    plain = fleet.cluster.start_engine("plain")
    fleet.cluster.wait_ready()
    dialogues = await write_dialogues(client, plain.url, max(1, CONVERSATIONS // 2), fleet.kind.longest)
    fleet.cluster.stop(plain)
    fleet.start()
    talk = Talk(fleet, client, dialogues)
    async with asyncio.TaskGroup() as group:
        group.create_task(talk.run())
        group.create_task(faults(talk, fleet, client))
    lent, prefetched = fleet.lent(), fleet.prefetched()
    print(
        f"{2 * len(dialogues)} conversations, {talk.turns} turns, {talk.cached} tokens cached, "
        f"lent prefixes {dict(lent)}, prefetches {dict(prefetched)}, {len(talk.failures)} failures"
    )
    assert talk.answered == talk.turns
    talk.assert_failures_are_of_outages()
    assert all(engine.running() for engine in fleet.engines.values())
    await fleet.assert_at_rest(client)
    if fleet.kind.lends:
        assert talk.cached
        assert all(lent[role] for role in "pd"), f"prefixes are lent by both sides: {lent}"
        assert prefetched["loaded"], f"no answer was loaded before the next turn: {prefetched}"
        await _tenants_never_share(fleet, client)
    else:
        assert not any(lent.values())
        assert not prefetched


async def _tenants_never_share(fleet: Fleet, client: Client) -> None:
    """One tenant has a conversation's prefix on both sides. The other one's request finds none of it there.

    A prefill engine cannot borrow the prefix for the other tenant either.
    """
    first, second = TENANTS
    of_prefill, of_decode = fleet.prompt_tokens("p"), fleet.prompt_tokens("d")
    one = prompt("of a tenant", 300)
    answer, _ = await ask(client, fleet.router, one, 60, first)
    turn = [*one, *answer, *prompt("second turn", 50)]
    expected, cached = await ask(client, fleet.router, turn, 12, second)
    assert not cached
    computed = len(one) + len(turn)
    await _until_sources_are(fleet, "p", of_prefill, {"local_compute": computed})
    loaded = {"external_kv_transfer": computed - 2, "local_compute": 2}
    await _until_sources_are(fleet, "d", of_decode, loaded)
    tokens, cached = await ask(client, fleet.router, turn, 12, first)
    assert tokens == expected
    assert cached >= len(one) // BLOCK * BLOCK

    assert await _borrowed(fleet, client, turn, expected, "third tenant") == {"not_cached": 2}
    assert (await _borrowed(fleet, client, turn, expected, first))["lent"]


async def _borrowed(
    fleet: Fleet, client: Client, turn: list[int], expected: list[int], tenant: str
) -> Counter[str]:
    """Lets a prefill engine borrow the turn's prefix from each decode engine. Returns the outcomes."""
    prefill = fleet.engines["p0"]

    def outcomes() -> Counter[str]:
        samples = prefill.samples("kv_connector_prefix_requests_total")
        return Counter(
            {labels["outcome"]: int(value) for labels, value in samples if labels["side"] == "borrow"}
        )

    before = outcomes()
    for name in ("d0", "d1"):
        await assert_quiescent(client, prefill)  # and it forgets what it has computed
        lender = {"host": HOST, "port": fleet.engines[name].control_port, "tokens": len(turn)}
        more = {"kv_transfer_params": {"prefix_from": lender}, "cache_salt": tenant}
        assert await client.complete(prefill.url, turn, len(expected), **more) == expected

    async def missing() -> str:
        grown = await asyncio.to_thread(outcomes) - before
        return "" if grown.total() == 2 else f"two requests for prefixes have outcomes, not {grown}"

    await wait_until(missing)
    return outcomes() - before


async def _until_sources_are(
    fleet: Fleet, role: str, before: Counter[str], wanted: Mapping[str, int]
) -> None:
    """Waits until the prompt tokens of a role's engines have grown by these numbers since ``before``."""

    async def missing() -> str:
        grown = await asyncio.to_thread(fleet.prompt_tokens, role) - before
        return "" if grown == Counter(wanted) else f"{role} have {wanted}, not {grown}"

    await wait_until(missing)
