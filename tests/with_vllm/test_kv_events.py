"""vLLM's KV cache events: a decode engine publishes pushed blocks as an engine does that computed them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from deployment import (
    BLOCK,
    PATIENCE_SECONDS,
    Client,
    ModelDeployment,
    assert_quiescent,
    prompt,
    wait_until,
)

pytestmark = pytest.mark.anyio

TOKENS = 610
OUTPUT = 40
END = b"\xff" * 8
"""Number of the message that ends a replay."""


@dataclass
class Reader:
    """Reads an engine's events as any reader does, beginning with those that are published from now on."""

    deployment: ModelDeployment
    name: str
    following: int = 0
    """Number of the next batch."""

    @classmethod
    async def begin(cls, deployment: ModelDeployment, name: str) -> Reader:
        reader = cls(deployment, name)
        await reader.read()
        return reader

    async def read(self) -> list[dict[str, Any]]:
        """Returns the events since the last call."""
        events: list[dict[str, Any]] = []
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"ipc://{self.deployment.events[self.name]}")
            await socket.send_multipart([b"", self.following.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    *_, number, payload = await socket.recv_multipart()
                if number == END:
                    return events
                self.following = int.from_bytes(number, "big") + 1
                _, batch, *_ = msgspec.msgpack.decode(payload)
                events += batch

    async def read_prompt(self, text: list[int], blocks: int) -> list[dict[str, Any]]:
        """Returns the events since the last call, once they have so many blocks of the prompt."""
        events: list[dict[str, Any]] = []

        async def missing() -> str:
            events.extend(await self.read())
            found = len(stored(events, text))
            return "" if found >= blocks else f"{self.name} publishes {blocks} blocks, not {found}"

        await wait_until(missing)
        return events


def stored(events: list[dict[str, Any]], text: list[int]) -> list[tuple[Any, ...]]:
    """Returns the blocks of full attention that belong to a prompt: all that a reader learns about each."""
    found: list[tuple[Any, ...]] = []
    hashes: set[Any] = set()
    for event in events:
        if event["type"] != "BlockStored" or event["kv_cache_spec_kind"] != "full_attention":
            continue
        for block in blocks_of(event):
            block_hash, parent, tokens, *_ = block
            if parent in hashes or (parent is None and tokens == text[: len(tokens)]):
                hashes.add(block_hash)
                found.append(block)
    return found


def blocks_of(event: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    size, parent = event["block_size"], event["parent_block_hash"]
    more = [event.get(key) for key in ("medium", "lora_name", "group_idx")]
    keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
    for index, (block_hash, extra) in enumerate(zip(event["block_hashes"], keys, strict=True)):
        yield block_hash, parent, event["token_ids"][index * size : (index + 1) * size], size, extra, *more
        parent = block_hash


def hashes_of_windows(events: list[dict[str, Any]]) -> set[Any]:
    return {
        (event["group_idx"], block_hash)
        for event in events
        if event["type"] == "BlockStored" and event["kv_cache_spec_kind"] == "sliding_window"
        for block_hash in event["block_hashes"]
    }


@pytest.mark.parametrize("router", ["concurrent", "serial", "early"])
async def test_decode_engine_publishes_pushed_blocks_as_computed_ones(
    deployment: ModelDeployment, client: Client, router: str
) -> None:
    """The blocks of the prompt were pushed, and those of the answer computed."""
    readers = [await Reader.begin(deployment, name) for name in ("plain", "decode")]
    text = prompt(f"events {router}", TOKENS)
    urls = deployment.plain.url, getattr(deployment, router)
    right, answer = await asyncio.gather(*(client.complete(url, text, OUTPUT) for url in urls))
    assert answer == right
    blocks = (TOKENS + OUTPUT - 1) // BLOCK
    plain, decode = [await reader.read_prompt(text, blocks) for reader in readers]
    computed = stored(plain, text)
    assert stored(decode, text) == computed
    assert [token for block in computed for token in block[2]] == (text + right)[: blocks * BLOCK]
    # A decode engine has the last blocks of a sliding window alone.
    assert hashes_of_windows(decode) <= hashes_of_windows(plain)
    await assert_quiescent(client, deployment.prefill, deployment.decode)
