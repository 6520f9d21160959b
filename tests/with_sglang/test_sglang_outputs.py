"""Greedy tokens of P and D behind SGLang's router are those of one server, for all kinds of requests."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import httpx
import pytest
from site_of_servers import Client, Pair, at_rest, body, metrics, prompts, sent

from kv_connector.lab.sglang_cluster import SglangServer


@dataclass
class Site:
    """A pair, its routers, and the server whose answers are right."""

    one: SglangServer
    prefill: SglangServer
    decode: SglangServer
    router: str
    mini: str


@pytest.fixture(scope="module")
def site(pair: Pair, one: SglangServer) -> Site:
    cluster = pair.cluster
    router = cluster.start_router("router", prefill=[pair.prefill], decode=[pair.decode])
    mini = cluster.start_router("mini", prefill=[pair.prefill], decode=[pair.decode], mini=True)
    cluster.wait_ready()
    return Site(one, pair.prefill, pair.decode, router, mini)


@pytest.mark.anyio
async def test_tokens_are_one_servers(site: Site, client: Client) -> None:
    asked = [*prompts(24), [1], list(range(16)), list(range(17)), list(range(128)), list(range(129))]
    expected = await client.all(site.one.url, asked, at_once=8)
    assert len({tuple(tokens) for tokens in expected}) > 20
    assert await client.all(site.router, asked) == expected
    before = await metrics(site.prefill)
    assert await client.all(site.router, asked, at_once=16) == expected
    assert await client.all(site.mini, asked, at_once=8) == expected
    await at_rest(site.prefill, site.decode)
    after = await metrics(site.prefill)
    assert after["kv_connector_pages_pushed_total"] > before["kv_connector_pages_pushed_total"] > 0


@pytest.mark.anyio
async def test_a_common_beginning_is_computed_and_sent_once(site: Site, client: Client) -> None:
    """If D has a cache, P sends only what follows the common beginning."""
    (begin,) = prompts(1, seed=7, longest=2)
    begin = begin * 320
    asked = prompts(8, seed=3, longest=40, begin=begin)
    expected = await client.all(site.one.url, asked)
    await client.generate(site.router, asked[0])
    # Transfers that P had sent with and without the beginning in D's cache.
    transfers, before = await sent(site.prefill)
    assert await client.all(site.router, asked) == expected
    _, after = await sent(site.prefill, transfers + len(asked))
    token_bytes = 4 * 2 * 2 * 64 * 4
    if "--disaggregation-decode-enable-radix-cache" in site.decode.command:
        assert after - before < 8 * 100 * token_bytes
    else:
        assert after - before > 8 * 320 * token_bytes


@pytest.mark.anyio
async def test_streams(site: Site, client: Client) -> None:
    asked = prompts(8, seed=11)
    expected = await client.all(site.one.url, asked)
    assert await asyncio.gather(*(client.stream(site.router, prompt) for prompt in asked)) == expected


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_openai_routes(site: Site, client: Client, path: str) -> None:
    async def ask(url: str, number: int) -> str:
        text = f"Question {number}: " + "what is it? " * number
        request = {"model": "model", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        request |= (
            {"prompt": text}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": text}]}
        )
        answer = await client.http.post(f"{url}{path}", json=request)
        answer.raise_for_status()
        return json.dumps(answer.json()["choices"][0].get("text") or answer.json()["choices"][0]["message"])

    for number in (1, 9, 40):
        assert await ask(site.router, number) == await ask(site.one.url, number)


@pytest.mark.anyio
async def test_log_probabilities_of_the_first_token_come_with_it(site: Site, client: Client) -> None:
    (prompt,) = prompts(1, seed=5)
    asked = body(prompt, 4, return_logprob=True, top_logprobs_num=3)
    answers = [
        (await client.http.post(f"{url}/generate", json=asked)).json() for url in (site.mini, site.one.url)
    ]
    ours, expected = (answer["meta_info"]["output_token_logprobs"] for answer in answers)
    assert [token for _, token, _ in ours] == [token for _, token, _ in expected]
    assert [p for p, _, _ in ours] == pytest.approx([p for p, _, _ in expected], abs=1e-3)


@pytest.mark.anyio
async def test_each_server_is_healthy_by_itself(site: Site) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        for server in (site.prefill, site.decode):
            assert (await http.get(f"{server.url}/health_generate")).status_code == 200
