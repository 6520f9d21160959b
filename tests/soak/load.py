"""The load of the soak: prompts of several kinds at random moments, and clients that leave."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from deployment import Client, RefusedCall, completion_body, prompt

from kv_connector.lab.cluster import MODEL_NAME

OUTPUT_TOKENS = (4, 32)
# Fixed prompts, whose greedy answers must never change.
FIXED_SHORT = tuple(range(20, 180, 20))
FIXED_LONG = tuple(range(700, 1500, 100))
CONVERSATIONS = 16
# A conversation begins anew, under its old name, before it exceeds the engines' longest prompt.
LONGEST_CONVERSATION = 1500
TURN_TOKENS = (20, 120)
# A client leaves within this time. Most answers take longer.
LEAVES_WITHIN_SECONDS = 0.5
# Requests in flight at which a client waits, so that a busy machine does not collect a queue without end.
MOST_IN_FLIGHT = 12


@dataclass
class Outcome:
    """The results of the load so far."""

    ended: int = 0
    """Requests that have ended in any way."""
    answered: Counter[str] = field(default_factory=Counter)
    """Complete answers, by kind."""
    left: int = 0
    """Requests whose client left."""
    failed: Counter[str] = field(default_factory=Counter)
    """Failures, by reason."""
    failures: list[tuple[float, str]] = field(default_factory=list)
    """The last failures, with their time."""
    wrong: list[str] = field(default_factory=list)
    """Answers that differ from the first answer to the same prompt, and engines that keep something at the
    end."""


class Load:
    """Sends requests to the router until the block is left. ``rate``: requests a second."""

    def __init__(self, url: str, rate: float, seed: int = 0) -> None:
        self._url = url
        self._rate = rate
        self._random = random.Random(seed)
        self._expected: dict[tuple[int, int], list[int]] = {}
        self._conversations: dict[int, list[int]] = {}
        self._talking: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()
        self.outcome = Outcome()
        self._kinds: dict[str, tuple[float, Callable[[Client], Coroutine[Any, Any, None]]]] = {
            "short": (0.35, self._short),
            "long": (0.2, self._long),
            "conversation": (0.3, self._turn),
            "chat": (0.05, self._chat),
            "leaves": (0.1, self._leave),
        }

    async def __aenter__(self) -> Self:
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sending.cancel()
        await asyncio.gather(self._sending, *self._tasks, return_exceptions=True)

    async def _send(self) -> None:
        names = list(self._kinds)
        weights = [self._kinds[name][0] for name in names]
        async with Client() as client:
            while True:
                await asyncio.sleep(self._random.expovariate(self._rate))
                while len(self._tasks) >= MOST_IN_FLIGHT:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                (name,) = self._random.choices(names, weights)
                task = asyncio.create_task(self._one(name, client))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _one(self, name: str, client: Client) -> None:
        outcome = self.outcome
        try:
            await self._kinds[name][1](client)
        except TimeoutError:
            outcome.left += 1
        except (RefusedCall, httpx.HTTPError) as error:
            reason = f"HTTP {error.status}" if isinstance(error, RefusedCall) else type(error).__name__
            outcome.failed[reason] += 1
            outcome.failures = [*outcome.failures[-99:], (self.seconds, f"{name}: {error!s:.200}")]
        else:
            outcome.answered[name] += 1
        outcome.ended += 1

    @property
    def seconds(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._began

    async def _short(self, client: Client) -> None:
        await self._fixed(client, self._random.choice(FIXED_SHORT), stream=False)

    async def _long(self, client: Client) -> None:
        await self._fixed(client, self._random.choice(FIXED_LONG), stream=True)

    async def _fixed(self, client: Client, length: int, *, stream: bool) -> None:
        output = self._random.choice((8, 16))
        call = client.stream if stream else client.complete
        tokens = await call(self._url, prompt(f"soak {length}", length), output)
        expected = self._expected.setdefault((length, output), tokens)
        if tokens != expected:
            self.outcome.wrong.append(f"prompt of {length} tokens: {tokens} instead of {expected}")

    async def _turn(self, client: Client) -> None:
        free = [number for number in range(CONVERSATIONS) if number not in self._talking]
        number = self._random.choice(free)
        said = self._conversations.get(number, [])
        if len(said) > LONGEST_CONVERSATION:
            said = []
        said = said + prompt(self._random.random(), self._random.randint(*TURN_TOKENS))
        self._talking.add(number)
        try:
            output = self._random.randint(*OUTPUT_TOKENS)
            answer = await client.stream(self._url, said, output, user=f"conversation {number}")
            self._conversations[number] = said + answer
        finally:
            self._talking.discard(number)

    async def _chat(self, client: Client) -> None:
        text = "".join(self._random.choices("abcdefgh ", k=self._random.randint(20, 300)))
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._random.randint(*OUTPUT_TOKENS),
            "temperature": 0,
            "stream": self._random.random() < 0.5,
        }
        if body["stream"]:
            await client.events(f"{self._url}/v1/chat/completions", body)
        else:
            await client.post(f"{self._url}/v1/chat/completions", body)

    async def _leave(self, client: Client) -> None:
        asked = prompt(self._random.random(), self._random.choice((100, 900)))
        async with asyncio.timeout(self._random.uniform(0, LEAVES_WITHIN_SECONDS)):
            if self._random.random() < 0.5:
                await client.stream(self._url, asked, OUTPUT_TOKENS[1])
            else:
                await client.post(f"{self._url}/v1/completions", completion_body(asked, OUTPUT_TOKENS[1]))
