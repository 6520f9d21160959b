"""Streams completions from one URL and measures their times."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np

from kv_connector.lab.cluster import MODEL_NAME
from kv_connector.lab.sse import Events

OUTPUT_TOKENS = 16

# The models made here have a byte-level tokenizer. These are ordinary tokens in each of them.
TOKENS = (32, 127)
REQUEST_SECONDS = 120.0


class LoadError(RuntimeError):
    """A request failed. The message is the server's own."""


class PromptLoad(msgspec.Struct, frozen=True):
    """`requests` prompts of `prompt_tokens` random tokens each, `concurrency` of them at a time."""

    prompt_tokens: int
    concurrency: int
    requests: int

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens} tokens, {self.concurrency} at a time"


class LoadAnswer(msgspec.Struct, frozen=True):
    ttft: float
    """Seconds from sending the request to its first token."""
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ServedLoad:
    seconds: float
    """Seconds from the first request to the last token."""
    answers: Sequence[LoadAnswer]
    """Answers in the order of the prompts."""


def serve(url: str, load: PromptLoad, seed: int) -> ServedLoad:
    """Blocks until all requests are answered. LoadError: a request failed."""
    return asyncio.run(_serve(url, load, seed))


async def _serve(url: str, load: PromptLoad, seed: int) -> ServedLoad:
    prompts = np.random.default_rng(seed).integers(*TOKENS, (load.requests, load.prompt_tokens)).tolist()
    turn = asyncio.Semaphore(load.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as client:

        async def in_turn(prompt: list[int]) -> LoadAnswer:
            async with turn:
                return await complete(client, prompt, OUTPUT_TOKENS)

        start = time.perf_counter()
        try:
            answers = await asyncio.gather(*(in_turn(prompt) for prompt in prompts))
        except httpx.HTTPError as error:
            raise LoadError(f"{url}: {type(error).__name__}: {error}") from error
        return ServedLoad(time.perf_counter() - start, answers)


class _LoadChoice(msgspec.Struct):
    token_ids: list[int] | None = None


class _LoadChunk(msgspec.Struct):
    choices: list[_LoadChoice] = []
    error: object = None


async def complete(client: httpx.AsyncClient, prompt: list[int], output_tokens: int) -> LoadAnswer:
    """Sends one request. LoadError, httpx.HTTPError: the answer is not complete."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    start = time.perf_counter()
    first = 0.0
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise LoadError(f"HTTP {response.status_code}: {(await response.aread())[:500]!r}")
        events = Events()
        async for some in response.aiter_bytes():
            for event in events.feed(some):
                chunk = msgspec.json.decode(event, type=_LoadChunk)
                if chunk.error is not None:
                    raise LoadError(f"error in the stream: {chunk.error}")
                for choice in chunk.choices:
                    if choice.token_ids:
                        first = first or time.perf_counter() - start
                        tokens += choice.token_ids
    if len(tokens) != output_tokens:
        raise LoadError(f"{len(tokens)} tokens instead of {output_tokens}")
    return LoadAnswer(first, tuple(tokens))
