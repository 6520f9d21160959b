"""Prefixes that the engine which computes a prompt loads from another engine, so that it computes only new
tokens."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployment import (
    BLOCK,
    DATA_HOST,
    TIMEOUTS,
    Client,
    ModelDeployment,
    StepHold,
    assert_quiescent,
    decode_params,
    engine_settings,
    prefill_params,
    prompt,
    wait_until,
)

from kv_connector.lab.cluster import HOST, EngineProcess

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("deployment", ["llama"], indirect=True)]

ANSWER = 40
OUTPUT = 12


def prefix_from(lender: EngineProcess, tokens: int) -> dict[str, Any]:
    return {"prefix_from": {"host": HOST, "port": lender.control_port, "tokens": tokens}}


def in_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


class Counted:
    """The prompt tokens of an engine by source, and its requests for prefixes by outcome, since a moment."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        tokens = self._engine.samples("vllm:prompt_tokens_by_source_total")
        found = {labels["source"]: value for labels, value in tokens}
        for labels, value in self._engine.samples("kv_connector_prefix_requests_total"):
            found[f"{labels['side']} {labels['outcome']}"] = value
        return found

    async def is_(self, **expected: float) -> None:
        """Waits until the counts are these. Metrics follow with an engine's steps."""

        async def missing() -> str:
            now = await asyncio.to_thread(self._now)
            grown = {name: now.get(name, 0) - self._before.get(name, 0) for name in now}
            wrong = {name: grown.get(name, 0) for name in expected if grown.get(name, 0) != expected[name]}
            return f"{expected}, not {wrong}" if wrong else ""

        await wait_until(missing)


async def first_turn(
    client: Client, deployment: ModelDeployment, name: str
) -> tuple[list[int], list[int], int]:
    """P computes a prompt and D generates its answer.

    Returns the next turn, its answer of one engine alone, and the number of leading tokens that D has.
    """
    one = prompt(f"first turn, {name}", 300)
    answer = await client.complete(deployment.concurrent, one, ANSWER)
    turn = [*one, *answer, *prompt(f"second turn, {name}", 50)]
    expected = await client.complete(deployment.plain.url, turn, OUTPUT)
    await assert_quiescent(client, deployment.prefill)  # and P forgets what it has computed
    return turn, expected, len(one) + len(answer) - 1  # D has not computed the last token of its answer


async def alone(client: Client, engine: EngineProcess, turn: list[int], lender: EngineProcess) -> list[int]:
    """The engine computes the turn and its answer, with a prefix from the lender."""
    params = prefix_from(lender, len(turn))
    return await client.complete(engine.url, turn, OUTPUT, kv_transfer_params=params)


@pytest.mark.parametrize("busy", [False, True])
async def test_next_turn_computes_only_what_is_new(
    deployment: ModelDeployment, client: Client, busy: bool
) -> None:
    prefill, decode = deployment.prefill, deployment.decode
    turn, expected, had = await first_turn(client, deployment, f"busy {busy}")
    counted = Counted(prefill)
    started = asyncio.Event()
    other = asyncio.create_task(
        client.stream(decode.url, prompt("beside", 100), 200 if busy else 1, lambda tokens: started.set())
    )
    await started.wait()
    transfer = f"next turn {busy}"
    tokens, _ = await asyncio.gather(
        client.complete(decode.url, turn, OUTPUT, kv_transfer_params=decode_params(transfer, prefill)),
        client.complete(
            prefill.url,
            turn,
            1,
            kv_transfer_params={**prefill_params(transfer), **prefix_from(decode, len(turn))},
        ),
    )
    assert tokens == expected
    lent = in_blocks(had)
    await counted.is_(**{"external_kv_transfer": lent, "local_compute": len(turn) - lent, "borrow lent": 1})
    await other
    await assert_quiescent(client, prefill, decode)


def prefetches(deployment: ModelDeployment) -> dict[str, float]:
    """Returns the prefetches of the router at which engines register, by outcome."""
    name = "kv_connector_router_answer_prefetches_total"
    text = httpx.get(f"{deployment.early}/metrics", trust_env=False).text
    found = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


async def test_prefill_engine_loads_the_answer_before_the_next_turn(
    deployment: ModelDeployment, client: Client
) -> None:
    prefill, router = deployment.prefill, deployment.early
    one, answer_tokens = prompt("pause", 300), 100
    before = prefetches(deployment).get("loaded", 0)
    counted = Counted(prefill)
    answer = await client.stream(router, one, answer_tokens, user="pause")

    async def missing() -> str:
        found = await asyncio.to_thread(prefetches, deployment)
        return "" if found.get("loaded", 0) == before + 1 else f"no answer is loaded: {found}"

    await wait_until(missing)
    await counted.is_(**{"local_compute": len(one), "borrow lent": 1})
    turn = [*one, *answer, *prompt("second turn", 50)]
    had = in_blocks(len(one) + len(answer) - 1)
    assert had > in_blocks(len(one)) + BLOCK
    expected = await client.complete(deployment.plain.url, turn, OUTPUT)
    counted = Counted(prefill)
    assert await client.complete(router, turn, OUTPUT, user="pause") == expected
    await counted.is_(**{"local_compute": len(turn) - had, "local_cache_hit": had, "borrow lent": 0})
    await assert_quiescent(client, prefill, deployment.decode)


async def test_refused_prefetch_computes_nothing(deployment: ModelDeployment, client: Client) -> None:
    """Its answer has no token. A paused lender has not evicted the prefix."""
    prefill, decode = deployment.prefill, deployment.decode
    turn, _, had = await first_turn(client, deployment, "refused prefetch")
    prefix = prefix_from(decode, had)
    prefix["prefix_from"]["prefetch"] = len(turn)
    body = {"prompt": turn[:had], "max_tokens": 1, "kv_transfer_params": prefix}
    counted = Counted(prefill)
    await client.post(f"{decode.url}/pause?mode=keep&clear_cache=false")
    try:
        answer = await client.post(f"{prefill.url}/v1/completions", body)
    finally:
        await client.post(f"{decode.url}/resume")
    assert answer["kv_transfer_params"] == {"prefetched_tokens": 0}
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)
    await counted.is_(**{"borrow paused": 1, "local_compute": 0})
    await assert_quiescent(client, prefill, decode)


async def test_prompt_of_a_refused_prefix_is_computed(deployment: ModelDeployment, client: Client) -> None:
    """The lender is paused, and then it has emptied its cache. Neither costs the wait for a lender."""
    prefill, decode = deployment.prefill, deployment.decode
    turn, expected, _ = await first_turn(client, deployment, "refused")
    counted = Counted(prefill)
    await client.post(f"{decode.url}/pause?mode=keep&clear_cache=false")
    try:
        assert await alone(client, prefill, turn, decode) == expected
        await counted.is_(**{"borrow paused": 1, "local_compute": len(turn)})
    finally:
        await client.post(f"{decode.url}/resume")
    await assert_quiescent(client, prefill, decode)
    counted = Counted(prefill)
    assert await alone(client, prefill, turn, decode) == expected
    await counted.is_(**{"borrow not_cached": 1, "local_compute": len(turn)})
    await assert_quiescent(client, prefill, decode)


async def test_decode_engine_alone_loads_the_prefix_from_a_prefill_engine(
    deployment: ModelDeployment, client: Client
) -> None:
    prefill, decode = deployment.prefill, deployment.decode
    one = prompt("decode engine alone", 300)
    await client.complete(prefill.url, one, 1)
    turn = [*one, *prompt("after, alone", 50)]
    expected = await client.complete(deployment.plain.url, turn, OUTPUT)
    counted = Counted(decode)
    assert await alone(client, decode, turn, prefill) == expected
    lent = in_blocks(len(one))
    await counted.is_(**{"external_kv_transfer": lent, "local_compute": len(turn) - lent, "borrow lent": 1})
    await assert_quiescent(client, prefill, decode)


async def test_prompt_of_a_dead_lender_is_computed(
    deployment: ModelDeployment, client: Client, tmp_path: Path
) -> None:
    """The lender dies when a decode engine has a half of the prefix. Later it is gone."""
    prefill, decode = deployment.prefill, deployment.decode
    extra = {"providers": ("host", "tcp"), "data_host": DATA_HOST, "timeouts": TIMEOUTS}
    lender = deployment.cluster.start_engine(
        "lender", role="kv_consumer", extra=extra, settings=engine_settings(blocks=64)
    )
    try:
        await asyncio.to_thread(deployment.cluster.wait_ready, lender)
        one = prompt("dead lender", 300)
        await client.complete(lender.url, one, 1)
        turn = [*one, *prompt("after", 50)]
        expected = await client.complete(deployment.plain.url, turn, OUTPUT)
        counted = Counted(prefill)
        assert await alone(client, prefill, turn, lender) == expected
        await counted.is_(**{"borrow lent": 1, "external_kv_transfer": in_blocks(len(one))})
        await assert_quiescent(client, prefill, lender)
        await client.complete(lender.url, one, 1)  # its cache is empty
        # Pages leave with the layers of a step, so the lender has something to compute.
        started = asyncio.Event()
        beside = asyncio.create_task(
            client.stream(lender.url, prompt("beside the loan", 40), 1500, lambda tokens: started.set())
        )
        await started.wait()
        layers, blocks = deployment.shape.layers // 2, len(one) // BLOCK
        hold, counted = StepHold(client, lender, tmp_path), Counted(decode)
        await hold.arm_lending(layers)
        borrowing = asyncio.create_task(alone(client, decode, turn, lender))
        await hold.reached(pages=layers * blocks)
    finally:
        lender.kill()
    with suppress(httpx.HTTPError):
        await beside
    assert await borrowing == expected
    await counted.is_(**{"borrow lent": 1, "external_kv_transfer": 0, "local_compute": len(turn)})
    counted = Counted(prefill)
    assert await alone(client, prefill, turn, lender) == expected
    await counted.is_(**{"borrow lent": 0, "local_compute": len(turn)})
    await assert_quiescent(client, prefill, decode)
