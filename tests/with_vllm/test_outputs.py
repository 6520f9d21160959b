"""Greedy output through P and D is that of one engine, at any prompt length, and each page is sent once."""

import asyncio

import pytest
from deployment import (
    BLOCK,
    Client,
    ModelDeployment,
    PageCount,
    assert_quiescent,
    decode_params,
    prefill_params,
    prompt,
)

pytestmark = pytest.mark.anyio

OUTPUT = 12

# One token, lengths around one block, two blocks and the steps of P and D, and several steps.
LENGTHS = (1, 2, 31, 32, 33, 34, 63, 64, 65, 66, 100, 101, 200, 201, 257, 319, 320, 321, 322, 500, 641, 900)
SERIAL_LENGTHS = (1, 33, 320, 741)


def lengths(deployment: ModelDeployment) -> list[int]:
    """Returns LENGTHS, and those where the oldest token in a window begins or ends a block."""
    found = set(LENGTHS)
    for group in deployment.shape.groups:
        if group.window is not None:
            for blocks in (0, 1, 5, 18):
                edge = group.window + blocks * BLOCK
                found |= {edge - 1, edge, edge + 1, edge + 2}
    return sorted(found)


async def test_reference_depends_on_the_whole_prompt(deployment: ModelDeployment, client: Client) -> None:
    """The basis of the other tests: one changed token, in any block, changes the plain engine's output."""
    url, tokens = deployment.plain.url, 700
    original = prompt("reference", tokens)
    changed = []
    for position in (0, 40, 333, tokens - BLOCK - 40, tokens - 2):
        other = list(original)
        other[position] = (other[position] + 1) % 256
        changed.append(other)
    outputs = await asyncio.gather(
        *(client.complete(url, one, 2 * OUTPUT) for one in (original, *changed, prompt("another", tokens)))
    )
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert all(len(set(output)) > 3 for output in outputs), outputs


async def test_plain_engine_repeats_itself(deployment: ModelDeployment, client: Client) -> None:
    """The plain engine's output does not depend on its batch or its cache: a difference is caused by P and
    D."""
    url = deployment.plain.url
    prompts = [prompt(f"repeat {length}", length) for length in (1, 33, 320, 641, 900)]
    alone = [await client.complete(url, one, OUTPUT) for one in prompts]
    assert await asyncio.gather(*(client.complete(url, one, OUTPUT) for one in prompts)) == alone


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_lengths(deployment: ModelDeployment, client: Client, dispatch: str) -> None:
    url = deployment.concurrent if dispatch == "concurrent" else deployment.serial
    for length in lengths(deployment) if dispatch == "concurrent" else SERIAL_LENGTHS:
        one = prompt(f"{dispatch} {length}", length)
        count = await PageCount.begin(client, deployment)
        output, expected = await asyncio.gather(
            client.complete(url, one, OUTPUT), client.complete(deployment.plain.url, one, OUTPUT)
        )
        assert output == expected, f"{length} tokens"
        # D got every page that it needed: it computed none of them unnoticed.
        assert await count.pages() == deployment.shape.pages(length), f"{length} tokens"
    await assert_quiescent(client, deployment.prefill, deployment.decode)


@pytest.mark.parametrize("deployment", ["gemma3"], indirect=True)
async def test_log_probabilities_at_window_edges(deployment: ModelDeployment, client: Client) -> None:
    """The oldest of 128 tokens in a window weighs too little to change the output. Log probabilities show
    it."""
    for length in (edge for edge in lengths(deployment) if edge not in LENGTHS):
        one = prompt(f"edge {length}", length)
        found, expected = await asyncio.gather(
            client.log_probabilities(deployment.concurrent, one, 3),
            client.log_probabilities(deployment.plain.url, one, 3),
        )
        # A missing token changes the first of these by 0.003.
        assert found == pytest.approx(expected, abs=1e-4), f"{length} tokens"
    await assert_quiescent(client, deployment.prefill, deployment.decode)


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_many_at_once(deployment: ModelDeployment, client: Client, dispatch: str) -> None:
    """Sends 16 requests of mixed lengths, every second one streamed."""
    url = deployment.concurrent if dispatch == "concurrent" else deployment.serial
    mixed = [1, 31, 32, 33, 90, 128, 129, 200, 256, 300, 321, 400, 480, 555, 640, 900]
    prompts = [prompt(f"many {dispatch} {length}", length) for length in mixed]
    count = await PageCount.begin(client, deployment)
    expected = await asyncio.gather(*(client.complete(deployment.plain.url, one, OUTPUT) for one in prompts))
    outputs = await asyncio.gather(
        *(
            (client.stream if index % 2 else client.complete)(url, one, OUTPUT)
            for index, one in enumerate(prompts)
        )
    )
    assert outputs == expected
    assert await count.pages() == sum(deployment.shape.pages(length) for length in mixed)
    await assert_quiescent(client, deployment.prefill, deployment.decode)


async def test_samples_of_one_prompt(deployment: ModelDeployment, client: Client) -> None:
    """n > 1: one sample's pages come from P, the others find them on D."""
    one = prompt("samples", 200)
    sampling = {"n": 3, "temperature": 1.0, "seed": 7}
    outputs = await client.choices(deployment.concurrent, one, OUTPUT, **sampling)
    assert outputs == await client.choices(deployment.plain.url, one, OUTPUT, **sampling)
    assert len({tuple(output) for output in outputs}) == 3
    await assert_quiescent(client, deployment.prefill, deployment.decode)


async def test_several_prompts_in_one_body(deployment: ModelDeployment, client: Client) -> None:
    prompts = [prompt("body 1", 150), prompt("body 2", 40), prompt("body 3", 333)]
    outputs = await client.choices(deployment.concurrent, prompts, OUTPUT)
    assert outputs == await client.choices(deployment.plain.url, prompts, OUTPUT)
    await assert_quiescent(client, deployment.prefill, deployment.decode)


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_prompt_log_probabilities(deployment: ModelDeployment, client: Client) -> None:
    """D computes such a prompt whole, although it should fetch pages, and releases P's hold."""
    one, transfer = prompt("log probabilities", 300), "log-probabilities"
    count = await PageCount.begin(client, deployment)
    expected, _, output = await asyncio.gather(
        client.complete(deployment.plain.url, one, OUTPUT),
        client.complete(deployment.prefill.url, one, 1, kv_transfer_params=prefill_params(transfer)),
        client.complete(
            deployment.decode.url,
            one,
            OUTPUT,
            prompt_logprobs=1,
            kv_transfer_params=decode_params(transfer, deployment.prefill),
        ),
    )
    assert output == expected
    # Before P's hold time would end.
    await assert_quiescent(client, deployment.prefill, deployment.decode, seconds=8)
    assert await count.pages() == 0
