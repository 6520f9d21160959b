"""One streamed completion of token ids, timed at the client."""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kv_connector.lab.cluster import MODEL_NAME
from kv_connector.lab.sse import Events

# Our engines answer in a second or two. A busy machine may take longer.
ANSWER_SECONDS = 120.0


class CompletionError(RuntimeError):
    """The engine or the router refused the request, or broke off. The message contains its reason."""


@dataclass(frozen=True)
class CompletionTokens:
    tokens: list[int]
    first_token_seconds: float


def complete(
    url: str, prompt: Sequence[int], *, max_tokens: int, parameters: Mapping[str, Any] | None = None
) -> CompletionTokens:
    """Sends a prompt of token ids and blocks until the answer is complete.

    The answer is greedy and has exactly `max_tokens` tokens (the end-of-sequence token counts like any
    other), unless `parameters` of the request's body change that. CompletionError: the answer is incomplete.
    """
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **(parameters or {}),
    }
    tokens: list[int] = []
    first = 0.0
    with _streaming(url, "/v1/completions", body) as (started, chunks):
        for chunk in chunks:
            for choice in chunk["choices"]:
                first = first or time.perf_counter()
                tokens += choice["token_ids"]
    return CompletionTokens(tokens, first - started)


def generate(url: str, prompt: Sequence[int], *, max_tokens: int) -> CompletionTokens:
    """Sends a prompt like complete(), to an SGLang server or its router."""
    sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    tokens: list[int] = []
    first = 0.0
    with _streaming(url, "/generate", body) as (started, chunks):
        for chunk in chunks:
            first = first or time.perf_counter()
            tokens = chunk["output_ids"]  # all tokens so far
    return CompletionTokens(tokens, first - started)


@contextmanager
def _streaming(
    url: str, path: str, body: Mapping[str, Any]
) -> Iterator[tuple[float, Iterator[dict[str, Any]]]]:
    """Yields the time at which the request left, and the chunks of its answer.

    CompletionError: they break off.
    """
    try:
        with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client:
            started = time.perf_counter()
            with client.stream("POST", url + path, json=body) as response:
                yield started, _chunks(response, url + path)
    except httpx.HTTPError as error:
        raise CompletionError(f"{url} broke off: {type(error).__name__}: {error}") from error


def _chunks(response: httpx.Response, url: str) -> Iterator[dict[str, Any]]:
    if response.status_code != 200:
        raise CompletionError(f"{url} answered {response.status_code}: {response.read().decode()[:1000]}")
    events = Events()
    for event in itertools.chain.from_iterable(map(events.feed, response.iter_bytes())):
        chunk: dict[str, Any] = json.loads(event)
        if "error" in chunk:
            raise CompletionError(f"{url} broke off: {chunk['error']}")
        yield chunk
