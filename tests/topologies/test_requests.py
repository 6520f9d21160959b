"""Prompts that are more than tokens: P and D answer them as one engine does, and are idle afterwards."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, flags
from deployment import Client, assert_quiescent, completion_body, decode_params, prefill_params, prompt
from kinds import PICTURE
from PIL import Image
from safetensors.torch import load_file
from site_of_case import FETCHED, CaseCluster, Models, Site

from kv_connector.lab.cluster import LocalCluster

pytestmark = pytest.mark.anyio

PICTURES = Case("pictures", "llava", torchvision=True)
EMBEDDINGS = Case("embeddings", "llama", **flags("--enable-prompt-embeds"))

LOCAL = "kv_connector_router_local_prefills_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
OUTPUT = 16


@dataclass(frozen=True)
class Message:
    words: int
    """Letters before the pictures."""
    pictures: tuple[int, ...]

    def body(self) -> dict[str, Any]:
        pictures = [{"type": "image_url", "image_url": {"url": picture(seed)}} for seed in self.pictures]
        before = {"role": "system", "content": "w" * self.words}
        user = {"role": "user", "content": [*pictures, {"type": "text", "text": "What is it?"}]}
        body = completion_body(None, OUTPUT, messages=[before, user])
        del body["prompt"]
        return body


# Short prompts, a picture behind P's first chunk of 200 tokens, one across its end, several, and none.
MESSAGES = (
    Message(3, (0,)),
    Message(3, (1,)),
    Message(300, (0,)),
    Message(300, (1,)),
    Message(177, (0,)),
    Message(3, (1, 0)),
    Message(3, ()),
)


def picture(seed: int) -> str:
    """Returns noise, as a data URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (PICTURE, PICTURE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def chat(client: Client, url: str, message: Message, **fields: Any) -> tuple[list[int], int]:
    """Returns the answer's tokens, and the number of the prompt's tokens."""
    answer = await client.post(f"{url}/v1/chat/completions", message.body() | fields)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens"]


async def test_pictures(models: Models, interpreter: tuple[str, ...], client: Client, tmp_path: Path) -> None:
    """Only P computes the pictures' embeddings. Pages with equal tokens and different pictures are not mixed
    up."""
    with LocalCluster(tmp_path, models["llava"]) as cluster:
        cluster.interpreter = interpreter
        site = CaseCluster(cluster, PICTURES, models).start(with_alone=True)
        assert site.alone is not None
        right = [await chat(client, site.alone.url, message) for message in MESSAGES]
        assert len({tuple(tokens) for tokens, _ in right}) == len(MESSAGES), right
        for message, answer in zip(MESSAGES, right, strict=True):
            assert await chat(client, site.router, message) == answer, message
            await assert_quiescent(client, site.prefill, site.decode)  # with empty prefix caches
        assert site.decode.metric(FETCHED) == sum(tokens - 1 for _, tokens in right)
        for _ in range(2):  # the second time from both sides' prefix caches
            assert [await chat(client, site.router, message) for message in MESSAGES] == right
        await assert_quiescent(client, site.prefill, site.decode)
        encoded = [await client.probe(engine, "probe_encoded") for engine in (site.prefill, site.decode)]
        assert encoded == [{"inputs": 2}, {"inputs": 0}]


async def test_prompt_embeddings(
    models: Models, interpreter: tuple[str, ...], client: Client, tmp_path: Path
) -> None:
    """D computes embeddings by itself, from any client and in any form. Without token ids, P and D cannot
    check that they have the same prompt."""
    embeddings = load_file(models["llama"] / "model.safetensors")["model.embed_tokens.weight"]
    with LocalCluster(tmp_path, models["llama"]) as cluster:
        cluster.interpreter = interpreter
        site = CaseCluster(cluster, EMBEDDINGS, models).start(with_alone=True)
        assert site.alone is not None
        prompts = [prompt(f"embedded {length}", length) for length in (1, 7, 300)]
        right = [await client.complete(site.alone.url, tokens, OUTPUT) for tokens in prompts]
        bodies = [embedded(embeddings[tokens]) for tokens in prompts]
        assert [await complete(client, site.alone.url, body) for body in bodies] == right
        assert [await complete(client, site.router, body) for body in bodies] == right
        assert f'{LOCAL}{{reason="prompt_embeds"}} {len(bodies)}.0' in await client.get(
            f"{site.router}/metrics"
        )
        assert site.prefill.metric(PROMPT_TOKENS) == 0
        await past_the_router(client, site, bodies[-1], right[-1])
        await assert_quiescent(client, site.prefill, site.decode)
        assert await client.complete(site.router, prompts[-1], OUTPUT) == right[-1]
        await assert_quiescent(client, site.prefill, site.decode)
        assert site.decode.metric(FETCHED) == len(prompts[-1]) - 1


async def past_the_router(client: Client, site: Site, body: dict[str, Any], right: list[int]) -> None:
    """Sends the requests of a router that does not handle embeddings."""
    first = body | {"max_tokens": 1, "kv_transfer_params": prefill_params("embedded")}
    assert await complete(client, site.prefill.url, first) == right[:1]
    second = body | {"kv_transfer_params": decode_params("embedded", site.prefill)}
    assert await complete(client, site.decode.url, second) == right


def embedded(vectors: torch.Tensor) -> dict[str, Any]:
    """Returns a completion's body. `vectors`: [tokens, hidden size]."""
    file = io.BytesIO()
    torch.save(vectors.clone(), file)
    body = completion_body(None, OUTPUT, prompt_embeds=base64.b64encode(file.getvalue()).decode())
    del body["prompt"]
    return body


async def complete(client: Client, url: str, body: dict[str, Any]) -> list[int]:
    answer = await client.post(f"{url}/v1/completions", body)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens
