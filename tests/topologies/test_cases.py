"""Each case of cases.py: the greedy tokens of P and D are those of one engine, and both are idle at the
end."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from cases import CASES, Case, left_out
from deployment import (
    BLOCK,
    PATIENCE_SECONDS,
    Client,
    assert_quiescent,
    completion_body,
    decode_params,
    prefill_params,
    prompt,
    wait_idle,
    wait_until,
)
from site_of_case import ACCEPTED, FETCHED, Ask, CaseCluster, Known, Models, Right, Site

from kv_connector.lab.cluster import EngineProcess, LocalCluster

pytestmark = pytest.mark.anyio

OUTPUT = 16
# One token, an end inside a block, an end behind a block, and several chunks.
LENGTHS = (1, 2, 7, 33, 100, 300, 700)
REPEATED = (33, 300, 700)
HITS = "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"


def lengths(case: Case) -> list[Ask]:
    # The shifted single engine needs one token more.
    tokens = [prompt(f"length {n}", n) for n in LENGTHS if n >= case.shortest]
    return [Ask(tuple(one), OUTPUT + case.shifted, case.body) for one in tokens]


def more(case: Case) -> list[Ask]:
    return [Ask(tuple(prompt("more", 150)), OUTPUT, body) for body in case.more]


def crowd(case: Case) -> list[Ask]:
    """Returns requests whose prompts fit into the small pool, while their answers do not."""
    if not case.pool:
        return []
    bodies = [case.crowd[index % len(case.crowd)] for index in range(8)]
    return [Ask(tuple(prompt(f"crowd {index}", 120 + index)), 128, body) for index, body in enumerate(bodies)]


@pytest.fixture(scope="session")
def known() -> Known:
    return Known()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_tokens_are_one_engines(
    case: Case, models: Models, known: Known, interpreter: tuple[str, ...], client: Client, tmp_path: Path
) -> None:
    if reason := left_out(case.prefill.flags, case.decode.flags):
        pytest.skip(f"{case.name}: {reason}")
    asks = lengths(case) + more(case) + crowd(case)
    unknown = [ask for ask in asks if ask.key() not in known.of(case)]
    began = time.monotonic()
    with LocalCluster(tmp_path, models[case.model]) as cluster:
        cluster.interpreter = interpreter
        site = CaseCluster(cluster, case, models).start(with_alone=bool(unknown))
        print(f"{case.name}: up after {time.monotonic() - began:.0f} s")
        if site.alone:
            await ask_alone(client, site.alone, case, known, unknown)
        # For recurrent states vLLM compiles at the first prompt of several tokens, on two ranks at once. That
        # may take longer than a D waits for pages in these tests.
        await client.complete(site.prefill.url, prompt("first", max(100, case.shortest)), 1)
        steps = Steps(client, site, case, known)
        await steps.all_lengths()
        await steps.prefix_hits()
        await steps.tier_hits()
        await steps.further_requests()
        await steps.aborts()
        await steps.preemptions()
        await steps.rest()
    print(f"{case.name}: over after {time.monotonic() - began:.0f} s")


async def ask_alone(client: Client, engine: EngineProcess, case: Case, known: Known, asks: list[Ask]) -> None:
    for ask in asks:
        before = engine.metric(ACCEPTED)
        choices = await answer(client, engine.url, ask)
        known.of(case)[ask.key()] = Right(choices, engine.metric(ACCEPTED) - before)
    outputs = [right.choices[0][0] for right in known.of(case).values()]
    # Otherwise the test would pass with any KV.
    assert len({tuple(output) for output in outputs}) >= len(lengths(case)), outputs


async def answer(client: Client, url: str, ask: Ask) -> list[tuple[list[int], str]]:
    """Returns the output tokens of each choice, and its finish reason."""
    body = completion_body(list(ask.prompt), ask.length, **ask.body)
    choices = (await client.post(f"{url}/v1/completions", body))["choices"]
    return [(one["token_ids"], one["finish_reason"]) for one in sorted(choices, key=lambda one: one["index"])]


class Steps:
    """The steps of a case, in order. Each leaves P and D idle."""

    def __init__(self, client: Client, site: Site, case: Case, known: Known) -> None:
        self.client = client
        self.site = site
        self.case = case
        self.right = known.of(case)

    async def all_lengths(self) -> None:
        """Sends new prompts: D has all but the last token from P, and computes none of them itself."""
        fetched = self.site.decode.metric(FETCHED)
        asks = lengths(self.case)
        accepted = []
        for ask in asks:
            before = self.site.decode.metric(ACCEPTED)
            await self.check(ask)
            accepted.append(self.site.decode.metric(ACCEPTED) - before)
        await self.rest()
        wanted = sum(len(ask.prompt) - (not self.case.shifted) for ask in asks)
        assert self.site.decode.metric(FETCHED) - fetched == wanted
        if self.case.drafts:
            right = [self.right[ask.key()].accepted for ask in asks]
            print(accepted, right)
            assert sum(right) > len(asks), (
                "the single engine's drafter is hardly ever right: this shows nothing"
            )
            assert accepted == right

    async def prefix_hits(self) -> None:
        """Repeats prompts, for hits in P's prefix cache, then in both."""
        for sides in ({"prefill"}, {"prefill", "decode"}):
            asks = [ask for ask in lengths(self.case) if len(ask.prompt) in REPEATED]
            for ask in asks:
                await self.check(ask)
            if sides == {"prefill"}:
                await assert_quiescent(self.client, self.site.decode)
            before = {name: getattr(self.site, name).metric(HITS) for name in ("prefill", "decode")}
            for ask in asks:
                await self.check(ask)
            hit = {name for name, hits in before.items() if getattr(self.site, name).metric(HITS) > hits}
            if self.case.caching:
                # Another data-parallel rank may have got the repetition.
                assert hit == sides or "--data-parallel-size" in self.case.decode.flags
            await self.rest()

    async def tier_hits(self) -> None:
        """Repeats prompts that both engines' tiers hold and their prefix caches do not."""
        if self.case.tier != "OffloadingConnector":
            return
        asks = [ask for ask in lengths(self.case) if len(ask.prompt) in REPEATED]
        for ask in asks:
            await self.check(ask)
        engines = (self.site.prefill, self.site.decode)
        for engine in engines:
            await wait_until(partial(self._unforgotten, engine))
        before = [engine.metric(FETCHED) for engine in engines]
        for ask in asks:
            await self.check(ask)
        fetched = [engine.metric(FETCHED) - n for engine, n in zip(engines, before, strict=True)]
        whole = sum(len(ask.prompt) // BLOCK * BLOCK for ask in asks)
        loaded = sum(len(ask.prompt) - 1 for ask in asks)
        if self.case.model == "llama":
            assert fetched == [whole, whole if self.case.tier_first else loaded]
        else:  # the tier has only the last blocks of windows
            assert all(fetched)
        await wait_until(partial(self._unforgotten, self.site.prefill))
        await self.cached_tokens(asks[-1])
        await self.rest()

    async def _unforgotten(self, engine: EngineProcess) -> str:
        """Empties the engine's prefix cache, but not its tier. Returns why that failed."""
        answer = await self.client.post(f"{engine.url}/reset_prefix_cache")
        return "" if answer["success"] else f"{engine.name} has not freed all its KV blocks"

    async def cached_tokens(self, ask: Ask) -> None:
        """Checks that the prefill engine's answer counts the tokens from its tier as cached."""
        prompt_ids, prefill = list(ask.prompt), self.site.prefill
        first = completion_body(prompt_ids, 1, kv_transfer_params=prefill_params("cached"))
        second = completion_body(
            prompt_ids, ask.length, kv_transfer_params=decode_params("cached", prefill), **ask.body
        )
        answers = await asyncio.gather(
            self.client.post(f"{prefill.url}/v1/completions", first),
            self.client.post(f"{self.site.decode.url}/v1/completions", second),
        )
        cached = answers[0]["kv_transfer_params"]["remote_prefill_cached_tokens"]
        assert 0 < cached <= len(prompt_ids) // BLOCK * BLOCK

    async def further_requests(self) -> None:
        for ask in more(self.case):
            await self.check(ask)
        outputs = [self.right[ask.key()].choices for ask in more(self.case)]
        assert all(outputs.count(output) == 1 for output in outputs), outputs
        await self.rest()

    async def aborts(self) -> None:
        """Has all clients leave once the first has read a token. Others wait for tokens, or for P."""
        first = asyncio.Event()
        stream = partial(self.client.stream, self.site.router, on_tokens=lambda _: first.set())
        prompts = [prompt(f"abort {index}", 700 - 50 * index) for index in range(6)]
        streams = [asyncio.create_task(stream(one, 256, **self.case.body)) for one in prompts]
        leaving = asyncio.create_task(first.wait())
        await asyncio.wait([leaving, *streams], return_when=asyncio.FIRST_COMPLETED)
        assert first.is_set(), [stream.exception() for stream in streams if stream.done()]
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await self.rest()
        await self.check(lengths(self.case)[-1])
        await self.rest()

    async def preemptions(self) -> None:
        """Lets answers grow until D's pool is full. D computes preempted requests again."""
        if not self.case.pool:
            return
        before = self.site.decode.metric(PREEMPTIONS)
        await asyncio.gather(*(self.check(ask) for ask in crowd(self.case)))
        assert self.site.decode.metric(PREEMPTIONS) > before
        await self.rest()

    async def check(self, ask: Ask) -> None:
        right = self.right[ask.key()].choices
        if self.case.shifted:
            ((tokens, ended),) = right
            ask = Ask((*ask.prompt, tokens[0]), ask.length - 1, ask.body)
            right = [(tokens[1:], ended)]
        assert await answer(self.client, self.site.router, ask) == right, f"{len(ask.prompt)} tokens"

    async def rest(self) -> None:
        """Checks that every block is free and both sides are idle. Empties the prefix caches."""
        for engine in (self.site.prefill, self.site.decode):
            await assert_quiescent(self.client, engine)
            if "--data-parallel-size" in engine.command:
                await wait_until(partial(ranks_at_work, engine))
        await wait_idle(self.client, self.site.prefill)


async def ranks_at_work(engine: EngineProcess) -> str:
    """Makes each data-parallel rank run a step, and reports ranks that have not.

    vLLM's answers are the first rank's. The others report their state in metrics at the end of a step.
    """
    ranks = int(engine.command[engine.command.index("--data-parallel-size") + 1])
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as http:
        for rank in range(ranks):
            url, headers = f"{engine.url}/v1/completions", {"x-data-parallel-rank": str(rank)}
            (await http.post(url, json=completion_body([1], 1), headers=headers)).raise_for_status()
    names = ("live_prefill_requests", "live_decode_requests", "live_transfers", "transfers_under_way")
    busy = [s for name in names for s in engine.samples(f"kv_connector_{name}") if s[1]]
    return f"{engine.name} has nothing in hand: {busy}; see {engine.log}" if busy else ""
