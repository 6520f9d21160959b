"""D on model runner V2 begins with the token that P has sampled, and its first step computes the second.

The answer is the one of D alone.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from deployment import BLOCK, GEMMA3, TIMEOUTS, Client, assert_quiescent, engine_settings, prompt
from nursery import nursery
from test_early_tokens import READABLE, REQUESTS, answered, outcomes, said, some_request
from v2_on_cpu import v2_environment

from kv_connector.lab.cluster import HOST, MODEL_NAME, EngineProcess, LocalCluster
from kv_connector.lab.free_ports import free_ports

pytestmark = pytest.mark.anyio

AT_ONCE = 8
WINDOW = max(group.window or 0 for group in GEMMA3.groups)


@dataclass(frozen=True)
class Pair:
    prefill: EngineProcess
    decode: EngineProcess
    early: str
    """Router at which the first token comes from P."""
    late: str
    """Router at which the first token comes from D."""


@pytest.fixture(scope="module")
def pair(model_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("v2")
    environment = v2_environment(directory)
    settings = engine_settings()
    settings = replace(settings, environment={**settings.environment, **environment})
    with ExitStack() as stack:
        interpreter = stack.enter_context(nursery(directory, {"OMP_NUM_THREADS": "1", **environment}))
        cluster = stack.enter_context(LocalCluster(directory, model_directories["gemma3"], settings))
        cluster.interpreter = interpreter
        (registration,) = free_ports(1)
        routers, extra = [f"{HOST}:{registration}"], {"timeouts": TIMEOUTS}
        prefill = cluster.start_engine("prefill", role="kv_producer", routers=routers, extra=extra)
        decode = cluster.start_engine("decode", role="kv_consumer", routers=routers, extra=extra)
        early = cluster.start_router("router-early", registration=registration)
        late = cluster.start_router("router-late", prefill=[prefill], decode=[decode])
        cluster.wait_ready()
        cluster.wait_joined(early, prefill, decode)
        assert "first_token.FirstTokenAsyncScheduler" in decode.log.read_text()
        assert "first_token.FirstTokenAsyncScheduler" not in prefill.log.read_text()
        yield Pair(prefill, decode, early, late)


async def test_answer_is_the_same_behind_the_prefill_token(pair: Pair, client: Client) -> None:
    """This includes a seeded answer, whose second token is drawn by its position."""
    rng = random.Random("v2")
    before = await outcomes(client, pair.early)
    requests = [some_request(rng, seeded=number % 2 == 1) for number in range(REQUESTS)]
    for first in range(0, len(requests), AT_ONCE):
        some = requests[first : first + AT_ONCE]
        early, late = [
            await asyncio.gather(*(answered(client, router + path, body) for path, body in some))
            for router in (pair.early, pair.late)
        ]
        for (path, body), one, other in zip(some, early, late, strict=True):
            assert said(one) == said(other), f"{path}: {body}"
    found = await outcomes(client, pair.early) - before
    assert found["mismatch"] == 0
    assert found["sent"] + found["decode_first"] > REQUESTS / 4, found
    await assert_quiescent(client, pair.prefill, pair.decode)


async def test_answer_is_the_same_wherever_the_prompts_pages_end(pair: Pair, client: Client) -> None:
    """Prompts end at a block's end and behind it, and where the window would lose a block to the last
    token."""
    lengths = [
        tokens for end in (BLOCK, WINDOW + BLOCK, WINDOW + 6 * BLOCK) for tokens in (end - 1, end, end + 1)
    ]
    body = {"model": MODEL_NAME, "stream": True, "temperature": 0, "ignore_eos": True}
    bodies = [
        body
        | {"prompt": random.Random(tokens).choices(READABLE, k=tokens)}
        | {"max_tokens": 5, "allowed_token_ids": READABLE}
        for tokens in (1, *lengths)
    ]
    before = await outcomes(client, pair.early)
    early, late = [
        await asyncio.gather(*(client.events(f"{router}/v1/completions", body) for body in bodies))
        for router in (pair.early, pair.late)
    ]
    assert [*map(said, early)] == [*map(said, late)]
    found = await outcomes(client, pair.early) - before
    assert found["sent"] + found["decode_first"] == len(bodies), found
    await assert_quiescent(client, pair.prefill, pair.decode)


async def test_decode_continues_with_the_token_that_prefill_sampled(pair: Pair, client: Client) -> None:
    """Without a seed, D alone would have another first token nine times in ten."""
    body = {"model": MODEL_NAME, "stream": True, "max_tokens": 5, "temperature": 2.0, "ignore_eos": True}
    body |= {"allowed_token_ids": READABLE, "prompt": prompt("v2", 100)}
    before = await outcomes(client, pair.early)
    answers = await asyncio.gather(
        *(client.events(f"{pair.early}/v1/completions", body) for _ in range(AT_ONCE))
    )
    texts = [said(events)[0] for events in answers]
    assert [len(text) for text in texts] == [5] * AT_ONCE
    assert len({text[0] for text in texts}) > 1
    found = await outcomes(client, pair.early) - before
    assert found["mismatch"] == 0
    assert found["sent"] + found["decode_first"] == AT_ONCE, found
    await assert_quiescent(client, pair.prefill, pair.decode)
