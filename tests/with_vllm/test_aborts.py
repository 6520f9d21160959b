"""Clients that leave at every stage of a transfer: both engines become idle and continue to serve."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployment import (
    Client,
    ModelDeployment,
    RefusedCall,
    StepHold,
    assert_quiescent,
    decode_params,
    prefill_params,
    prompt,
    wait_idle,
    wait_live,
    wait_logged,
)
from suite_numbers import whole_of

from kv_connector.protocol.actions import Outcome
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.requests.completion import DISOWNED_PATH, disowned_body

pytestmark = pytest.mark.anyio

# 19 chunks on P.
LONG = 1900

# Requests per kind of dispatch and model. The client leaves every second one. `make test-leaving` sends
# 1,000, and leaves every tenth. KVC_LEAVING_EVERY: another share.
FEW = 16
REQUESTS = whole_of("KVC_LEAVING_REQUESTS", FEW)
EVERY = whole_of("KVC_LEAVING_EVERY", 2 if REQUESTS == FEW else 10)
AT_ONCE = 8
# Printable characters of the tests' tokenizer: text that a router passes on with P's token.
READABLE = list(range(94))


@pytest.fixture
def hold(deployment: ModelDeployment, client: Client, tmp_path: Path) -> StepHold:
    """A hold of P's forward pass."""
    return StepHold(client, deployment.prefill, tmp_path)


@pytest.fixture(autouse=True)
async def still_serving(deployment: ModelDeployment, client: Client) -> AsyncIterator[None]:
    """Checks after each test that both engines become idle sooner than by a timeout, and still serve."""
    yield
    await assert_quiescent(client, deployment.prefill, deployment.decode, seconds=8)
    one = prompt("after an abort", 200)
    output = await client.complete(deployment.concurrent, one, 4)
    assert output == await client.complete(deployment.plain.url, one, 4)
    await assert_quiescent(client, deployment.prefill, deployment.decode)


def in_the_middle(deployment: ModelDeployment) -> int:
    """Returns the number of layers until the prefill is in the middle of its third chunk."""
    return 2 * deployment.shape.layers + deployment.shape.layers // 2


async def leave(task: asyncio.Task[Any]) -> None:
    """Closes the connection of a running request."""
    assert not task.done(), task.result()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def start_both(
    deployment: ModelDeployment, client: Client, hold: StepHold, one: list[int], transfer: str
) -> tuple[asyncio.Task[list[int]], asyncio.Task[list[int]]]:
    """Starts D's half of a request, then P's. P stops in the middle of its third chunk, which
    ``hold.reached()`` awaits."""
    await hold.arm(in_the_middle(deployment))
    params = decode_params(transfer, deployment.prefill)
    decoding = asyncio.create_task(client.complete(deployment.decode.url, one, 8, kv_transfer_params=params))
    await wait_live(client, deployment.decode)  # D has reserved
    params = prefill_params(transfer)
    prefilling = asyncio.create_task(
        client.complete(deployment.prefill.url, one, 1, kv_transfer_params=params)
    )
    return decoding, prefilling


async def test_decode_aborted_before_prefill_knows(deployment: ModelDeployment, client: Client) -> None:
    """D has reserved, and P has not received the request. D's CANCEL, not a timeout, ends it on both
    sides."""
    params = decode_params("abort-before", deployment.prefill)
    request = asyncio.create_task(
        client.complete(deployment.decode.url, prompt("abort before", 300), 8, kv_transfer_params=params)
    )
    await wait_live(client, deployment.prefill)  # P has D's reservation
    await leave(request)


async def test_decode_aborted_during_transfer(
    deployment: ModelDeployment, client: Client, hold: StepHold
) -> None:
    """D leaves after P has pushed the first chunks and is in the middle of a step. D is idle before that step
    ends."""
    one = prompt("abort D during", LONG)
    decoding, prefilling = await start_both(deployment, client, hold, one, "abort-D-during")
    try:
        await hold.reached()
        await leave(decoding)
        await assert_quiescent(client, deployment.decode)
        assert not prefilling.done()
    finally:
        hold.release()
    assert len(await prefilling) == 1


async def test_prefill_aborted_during_transfer(
    deployment: ModelDeployment, client: Client, hold: StepHold
) -> None:
    """P's request is aborted in the middle of its prefill. D's request ends with an error and no invented
    answer."""
    one = prompt("abort P during", LONG)
    decoding, prefilling = await start_both(deployment, client, hold, one, "abort-P-during")
    try:
        await hold.reached()
        logged = len(deployment.prefill.log.read_bytes())
        await leave(prefilling)
        # The server has notified its engine, which handles the abort at the end of the step.
        await wait_logged(deployment.prefill, "Request .* aborted", since=logged)
    finally:
        hold.release()
    with pytest.raises(RefusedCall) as refused:
        await decoding
    assert refused.value.status >= 500


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_client_leaves_router_during_prefill(
    deployment: ModelDeployment, client: Client, hold: StepHold, dispatch: str
) -> None:
    await hold.arm(in_the_middle(deployment))
    url = deployment.concurrent if dispatch == "concurrent" else deployment.serial
    request = asyncio.create_task(client.stream(url, prompt(f"leave {dispatch}", LONG), 8))
    try:
        await hold.reached()
        await leave(request)
        await assert_quiescent(client, deployment.decode)
    finally:
        hold.release()


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_client_leaves_after_first_token(
    deployment: ModelDeployment, client: Client, dispatch: str
) -> None:
    url = deployment.concurrent if dispatch == "concurrent" else deployment.serial
    first = asyncio.Event()
    request = asyncio.create_task(
        client.stream(url, prompt(f"first token {dispatch}", 400), 1200, lambda tokens: first.set())
    )
    await asyncio.wait_for(first.wait(), 60)
    await leave(request)


async def test_decode_aborted_while_decoding(deployment: ModelDeployment, client: Client) -> None:
    """The abort comes after the transfer, on D itself."""
    one, transfer = prompt("abort after", 333), "abort-after"
    first = asyncio.Event()
    prefilling = asyncio.create_task(
        client.complete(deployment.prefill.url, one, 1, kv_transfer_params=prefill_params(transfer))
    )
    decoding = asyncio.create_task(
        client.stream(
            deployment.decode.url,
            one,
            1200,
            lambda tokens: first.set(),
            kv_transfer_params=decode_params(transfer, deployment.prefill),
        )
    )
    await asyncio.wait_for(first.wait(), 60)
    await leave(decoding)
    await prefilling


# The test waits for ten seconds, so it runs with one model.
@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_unfetched_prompt_and_uncomputed_reservation_end_by_timeouts(
    deployment: ModelDeployment, client: Client
) -> None:
    """A prompt on P that no D requests, and a reservation of D without a prompt, end by P's timeouts."""
    held = prompt("held", 300)
    await client.complete(deployment.prefill.url, held, 1, kv_transfer_params=prefill_params("held"))
    await wait_live(client, deployment.prefill)  # P holds the prompt
    with pytest.raises(RefusedCall) as refused:
        await client.complete(
            deployment.decode.url,
            prompt("orphan", 300),
            8,
            kv_transfer_params=decode_params("orphan", deployment.prefill),
        )
    assert refused.value.status >= 500
    await wait_idle(client, deployment.prefill)  # P has dropped both


async def test_a_prompt_that_the_router_disowns(deployment: ModelDeployment, client: Client) -> None:
    """P holds a prompt whose D never received it. The router has a D refuse the prompt, and D notifies P."""
    transfer, held = "disowned", prompt("disowned", 300)
    await client.complete(deployment.prefill.url, held, 1, kv_transfer_params=prefill_params(transfer))
    await wait_live(client, deployment.prefill)  # P holds the prompt
    source = Endpoint.parse(deployment.prefill.endpoint)
    with pytest.raises(RefusedCall) as refused:
        await client.post(deployment.decode.url + DISOWNED_PATH, json.loads(disowned_body(transfer, source)))
    assert refused.value.status == 404


async def test_many_leave_at_random_moments(deployment: ModelDeployment, client: Client) -> None:
    """The client leaves every second of 24 requests. The others run on and get the right answers."""
    staying = [prompt(f"stays {index}", 100 + 61 * index) for index in range(12)]
    leaving = [prompt(f"leaves {index}", 120 + 61 * index) for index in range(12)]
    expected = await asyncio.gather(*(client.complete(deployment.plain.url, one, 8) for one in staying))
    results: list[asyncio.Task[list[int]]] = []
    for index, (stays, leaves) in enumerate(zip(staying, leaving, strict=True)):
        url = deployment.serial if index % 3 == 0 else deployment.concurrent
        results.append(asyncio.create_task(client.complete(url, stays, 8)))
        abandoned = asyncio.create_task(client.complete(url, leaves, 8))
        # Spread over a request's life, which is some 100 ms to some seconds here.
        await asyncio.wait({abandoned}, timeout=0.03 * index)
        abandoned.cancel()
        with suppress(asyncio.CancelledError, httpx.HTTPError):
            await abandoned
    assert [await result for result in results] == expected


async def ends(client: Client, deployment: ModelDeployment) -> Counter[str]:
    """Returns the number of transfers on both sides, by outcome."""
    prefill, decode = await client.stats(deployment.prefill), await client.stats(deployment.decode)
    return Counter(
        {
            name: int(stats.get(name, 0))
            for side, stats in (("sent", prefill), ("received", decode))
            for name in (f"{side}_{outcome.value}" for outcome in Outcome)
        }
    )


@pytest.mark.parametrize("dispatch", ["concurrent", "serial", "early"])
async def test_clients_that_leave_are_no_failures(
    deployment: ModelDeployment, client: Client, dispatch: str
) -> None:
    """Clients leave at any moment of a request. No transfer counts as failed, and no log has a warning."""
    url = {"concurrent": deployment.concurrent, "serial": deployment.serial, "early": deployment.early}[
        dispatch
    ]
    engines = (deployment.prefill, deployment.decode)
    logs = [*(engine.log for engine in engines), deployment.cluster.routers[url].log]
    logged = [len(log.read_bytes()) for log in logs]
    before = await ends(client, deployment)
    alone = time.monotonic()
    await client.stream(url, prompt(f"alone {dispatch}", 700), 16)
    alone = time.monotonic() - alone
    room, left = asyncio.Semaphore(AT_ONCE), Counter[str]()

    async def request(number: int) -> None:
        rng = random.Random(f"leaves {dispatch} {number}")
        one = prompt(f"leaves {dispatch} {number}", rng.randint(20, 1500))
        # Half of the clients leave as a token of P or D arrives, the others at any moment.
        token, moment = rng.choice((1, 2, 9, 99, 99, 99)), rng.uniform(0, AT_ONCE * alone)
        came: list[int] = []
        leaves = asyncio.Event()

        def count(tokens: list[int]) -> None:
            came.extend(tokens)
            if len(came) >= token:
                leaves.set()

        async with room:
            if number % EVERY:
                assert len(await client.stream(url, one, 16, allowed_token_ids=READABLE)) == 16
                return
            task = asyncio.create_task(client.stream(url, one, 16, count, allowed_token_ids=READABLE))
            waits = [task, asyncio.create_task(leaves.wait())]
            await asyncio.wait(waits, timeout=moment, return_when=asyncio.FIRST_COMPLETED)
            left["in time" if not task.done() else "late"] += 1
            for one_of in waits:
                one_of.cancel()
                with suppress(asyncio.CancelledError):
                    await one_of

    async with asyncio.TaskGroup() as group:
        for number in range(REQUESTS):
            group.create_task(request(number))
    await assert_quiescent(client, *engines)
    since = await ends(client, deployment) - before
    print(f"{dispatch}: clients that left: {dict(left)}; transfers: {dict(since)}")
    assert left["in time"], left
    bad = {name: count for name, count in since.items() if re.search("failed|expired|stale", name)}
    assert not bad, f"{since}; see {logs}"
    lines = [
        line
        for log, offset in zip(logs, logged, strict=True)
        for line in log.read_bytes()[offset:].decode(errors="replace").splitlines()
        # Nobody listens at the second router's address unless a test does. SLOW is about speed.
        if re.search(r"\b(WARNING|ERROR)\b", line)
        and f"no connection to {deployment.listener}" not in line
        and "SLOW: transfer" not in line
    ]
    assert not lines, "\n".join(lines)
