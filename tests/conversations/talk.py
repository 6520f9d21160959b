"""Talk: many conversations at a time through the router, and the faults beside them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx
from deployment import Client, RefusedCall, completion_body, wait_until
from dialogues import Sent, Turn
from fleet_of_kind import Fleet

AT_ONCE = 8
TENANTS = ("first tenant", "second tenant")
# Seconds that an engine stands still. The router gives an engine up after five.
STILL_SECONDS = 2.0
# One turn in so many is cancelled by its client, and sent again.
CANCELLED = 8


class Talk:
    """Conversations of two tenants that both have every dialogue."""

    def __init__(self, fleet: Fleet, client: Client, dialogues: Sequence[list[Turn]]) -> None:
        self._fleet = fleet
        self._client = client
        self._pick = random.Random(47)
        self._conversations = [(tenant, turns) for turns in dialogues for tenant in TENANTS]
        self._pick.shuffle(self._conversations)
        self._sent = {tenant: Sent(fleet.kind.decode.block_size) for tenant in TENANTS}
        self.turns = sum(len(turns) for _, turns in self._conversations)
        self.answered = 0
        self.cached = 0
        """Prompt tokens that prefill engines did not compute."""
        self._disturbed = False
        self._disturbances = 0
        self.failures: list[tuple[float, float, str]] = []
        """Begin, end and reason of each request that failed."""
        self.outages: list[tuple[float, float]] = []
        """Begin and end of each time in which requests may fail."""

    async def run(self) -> None:
        conversations = iter(self._conversations)
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._some(conversations))

    async def _some(self, conversations: Iterator[tuple[str, list[Turn]]]) -> None:
        for tenant, turns in conversations:
            for turn in turns:
                await self._turn(tenant, turn)

    async def _turn(self, tenant: str, turn: Turn) -> None:
        sent = self._sent[tenant]
        sent.add([*turn.prompt, *turn.answer])
        repeated = self._pick.randrange(CANCELLED) == 0
        undisturbed = self._disturbances
        if repeated:
            await self._leave(tenant, turn, self._pick.randrange(len(turn.answer)))
        while (answer := await self._answer(tenant, turn)) is None:
            repeated = True
            await asyncio.sleep(0.2)  # a refused client retries after a pause
        tokens, cached = answer
        assert tokens == turn.answer, f"{tenant}: wrong answer to {len(turn.prompt)} tokens"
        # If a prefill engine dies before it has reported, the answer has the decode engine's count.
        if not repeated and undisturbed == self._disturbances and not self._disturbed:
            known = sent.leading(turn.prompt)
            assert cached <= known, f"{tenant}: {cached} cached tokens, of which it has sent {known} before"
        self.cached += cached
        self.answered += 1

    async def _answer(self, tenant: str, turn: Turn) -> tuple[list[int], int] | None:
        """Returns the answer's tokens and the prompt's cached ones; None: the request failed."""
        began = time.monotonic()
        try:
            return await ask(self._client, self._fleet.router, turn.prompt, len(turn.answer), tenant)
        except (RefusedCall, httpx.HTTPError) as error:
            self.failures.append((began, time.monotonic(), f"{type(error).__name__}: {error!s:.300}"))
            return None

    async def _leave(self, tenant: str, turn: Turn, after: int) -> None:
        """Sends a turn and leaves after so many tokens of its answer."""
        tokens: list[int] = []
        enough = asyncio.Event()

        def more(some: list[int]) -> None:
            tokens.extend(some)
            if len(tokens) >= after:
                enough.set()

        url, length = self._fleet.router, len(turn.answer)
        stream = asyncio.create_task(self._client.stream(url, turn.prompt, length, more, cache_salt=tenant))
        left = asyncio.create_task(enough.wait())
        try:
            if after:
                await asyncio.wait({stream, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stream, left):
                task.cancel()
            await asyncio.gather(stream, left, return_exceptions=True)
        assert tokens == turn.answer[: len(tokens)]

    @contextmanager
    def outage(self) -> Iterator[None]:
        began = time.monotonic()
        self._disturbed = True
        self._disturbances += 1
        try:
            yield
        finally:
            self._disturbed = False
            self.outages.append((began, time.monotonic()))

    async def reached(self, turns: int) -> None:
        """Waits until so many turns are answered."""

        async def missing() -> str:
            return "" if self.answered >= turns else f"{turns} turns are answered, not {self.answered}"

        await wait_until(missing, 600)

    def assert_failures_are_of_outages(self) -> None:
        unexplained = [
            failure
            for failure in self.failures
            if not any(failure[0] <= end and begin <= failure[1] for begin, end in self.outages)
        ]
        assert not unexplained, unexplained


async def ask(client: Client, url: str, prompt: list[int], length: int, tenant: str) -> tuple[list[int], int]:
    """Returns the output tokens of a streamed completion, and how many of its prompt's tokens were cached."""
    more = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": tenant}
    session = str(prompt[:100])  # the system prompt and a part of the first message
    body = completion_body(prompt, length, user=session, **more)
    tokens: list[int] = []
    cached = 0
    for event in await client.events(f"{url}/v1/completions", body):
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return tokens, cached


async def faults(talk: Talk, fleet: Fleet, client: Client) -> None:
    """Injects each fault once, at equal distances of turns."""

    async def reset(name: str) -> None:
        await client.post(f"{fleet.engines[name].url}/reset_prefix_cache")

    async def pause(name: str, clear: str) -> None:
        url = fleet.engines[name].url
        await client.post(f"{url}/pause?mode=keep&clear_cache={clear}")
        try:
            await asyncio.sleep(STILL_SECONDS)
        finally:
            await client.post(f"{url}/resume")

    async def stop(name: str) -> None:
        probe = await client.probe(fleet.engines[name], "probe_process")
        os.killpg(probe["group"], signal.SIGSTOP)
        try:
            await asyncio.sleep(STILL_SECONDS)
        finally:
            os.killpg(probe["group"], signal.SIGCONT)

    async def kill(name: str) -> None:
        with talk.outage():
            await fleet.kill_and_restart(name)

    steps: list[Callable[[], Awaitable[None]]] = [
        lambda: reset("p0"),
        lambda: stop("d0"),
        lambda: pause("p1", "false"),
        lambda: kill("d0"),
        lambda: reset("d1"),
        lambda: stop("p0"),
        lambda: pause("d1", "true"),
        lambda: kill("p0"),
    ]
    for number, step in enumerate(steps, 1):
        await talk.reached(number * talk.turns // (len(steps) + 1))
        await step()
