"""Dialogues: conversations whose right answers one engine alone has given."""

from __future__ import annotations

import array
import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deployment import Client, prompt

MOST_TURNS = 12
SYSTEM = 70
# Half of the answers fill a block, so that a prefill engine lacks a block that the decode engine has. A
# quarter of them are long enough for a prefetch.
ANSWERS = (4, 20, 40, 80)


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    answer: list[int]
    """Output tokens of one engine alone."""


async def write_dialogues(client: Client, url: str, count: int, longest: int) -> list[list[Turn]]:
    """Returns dialogues with the answers of this engine. ``longest``: most tokens of a prompt and its
    answer."""
    permits = asyncio.Semaphore(8)

    async def one(number: int) -> list[Turn]:
        async with permits:
            return await _write(client, url, number, longest)

    return await asyncio.gather(*(one(number) for number in range(count)))


async def _write(client: Client, url: str, number: int, longest: int) -> list[Turn]:
    pick = random.Random(f"dialogue {number}")
    text = prompt("system", SYSTEM) if pick.random() < 0.5 else []
    turns: list[Turn] = []
    for turn in range(pick.randint(2, MOST_TURNS)):
        message = pick.randint(5, 80) if turn else pick.randint(40, 300)
        text = [*text, *prompt(f"{number} {turn}", message)]
        length = pick.choice(ANSWERS)
        if len(text) + length > longest:
            break
        answer = await client.complete(url, text, length)
        turns.append(Turn(text, answer))
        kind = pick.random()
        if kind < 0.2:  # the template strips the thinking at the answer's beginning
            text = [*text, *answer[pick.randrange(1, length) :]]
        elif kind < 0.35:  # the client edits an earlier message
            text = text[: pick.randrange(len(text) // 4, len(text))]
        else:
            text = [*text, *answer]
    return turns


class Sent:
    """Texts of one tenant's requests, which caches may have, in whole blocks."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._beginnings: Counter[bytes] = Counter()

    def add(self, tokens: Sequence[int]) -> None:
        self._beginnings.update(self._digests(tokens))

    def leading(self, tokens: Sequence[int]) -> int:
        """Returns how many leading tokens of an added text another added text has too."""
        number = 0
        for digest in self._digests(tokens):
            if self._beginnings[digest] < 2:
                break
            number += self._block
        return number

    def _digests(self, tokens: Sequence[int]) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for end in range(self._block, len(tokens) + 1, self._block):
            digest.update(array.array("H", tokens[end - self._block : end]).tobytes())
            yield digest.digest()
