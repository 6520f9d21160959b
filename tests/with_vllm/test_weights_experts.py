"""New weights for serving engines with experts, of one rank and of two, and a vocabulary that vLLM pads.

Their tokens are those of an engine that was started with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Client
from test_weight_loading import SMALL, VOCABULARY, change, make_qwen3_moe, short_vocabulary
from test_weights import MORE_PROMPTS, Site, all_answers, answers, serving
from weight_trainer import Trainer

pytestmark = pytest.mark.anyio

# The reverse of test_weights: the engine of two ranks is in shadow mode, the one of one rank takes layer by
# layer.
ENGINES = ((1, ("host",), "streaming"), (2, ("host", "tcp"), "shadow"))


@pytest.fixture(scope="module")
def site(interpreter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("experts")
    checkpoints = {
        name: make_qwen3_moe(directory / name, SMALL, experts=8, seed=seed) for seed, name in enumerate("ab")
    }
    for path in checkpoints.values():
        change(path, {"vocab_size": VOCABULARY}, short_vocabulary)
    with serving(directory, interpreter, checkpoints, ENGINES) as site:
        yield site


async def test_experts_are_served(site: Site, client: Client, tmp_path: Path) -> None:
    """The weights come from a trainer's shards, then from a checkpoint."""
    a, same = await all_answers(client, site.engines, MORE_PROMPTS)
    assert a == same
    b = await answers(client, site.oracle, MORE_PROMPTS)
    assert all(before != after for before, after in zip(a, b, strict=True))
    with Trainer(tmp_path, site.takes, site.checkpoints["b"], ranks=4, replicas=2, applies=True) as trainer:
        await asyncio.to_thread(trainer.all_say, "connected")
        trainer.say("step-1")
        await asyncio.to_thread(trainer.all_say, "applied")
        assert await all_answers(client, site.engines, MORE_PROMPTS) == [b, b]
    await asyncio.to_thread(site.push, "a")
    assert await all_answers(client, site.engines, MORE_PROMPTS) == [a, a]
