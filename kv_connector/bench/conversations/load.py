"""Sends the turns of a workload or the lines of a trace, and records each."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from kv_connector.bench.conversations.client import CompletionServer, TimedAnswer, TurnError, Usage
from kv_connector.bench.conversations.prompts import Api, Dialogue, Piece, Scale, new_dialogue, piece
from kv_connector.bench.conversations.results import Turn
from kv_connector.bench.conversations.trace import BLOCK_TOKENS, TracedRequest
from kv_connector.bench.conversations.workload import ConversationShape, Pace
from kv_connector.lab.comparison import common

# Words of the requests that measure tokens per word. A byte-level tokenizer makes 1,280 tokens of the
# longest.
_FEW, _MANY = 64, 256
# Characters around a difference in a message.
_SHOWN = 24

_Begin = Callable[[float], Coroutine[Any, Any, None]]
"""Sends a conversation or a line that is due at a time."""


@dataclass(frozen=True)
class Manner:
    """The form of each request."""

    api: Api
    model: str
    seed: int
    ignore_eos: bool = True
    """Answers always have the full length (an extension of vLLM and SGLang)."""
    session_header: str = ""
    """Name of the header that identifies the conversation; empty: none."""

    def body(self, dialogue: Dialogue, answer_tokens: int) -> dict[str, Any]:
        body = {
            "model": self.model,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dialogue.body(),
        }
        return {**body, "ignore_eos": True} if self.ignore_eos else body


async def calibrate(endpoint: CompletionServer, manner: Manner) -> Scale:
    """Measures the tokens of words by the usage of short requests. TurnError: one of them failed."""
    if manner.api is Api.TOKENS:
        return Scale()

    async def prompt_tokens(*counts: int) -> int:
        dialogue = new_dialogue(manner.api)
        for number, count in enumerate(counts):
            key = f"{manner.seed}:calibration:{counts}:{number}"
            dialogue.add("assistant" if number % 2 else "user", piece(manner.api, key, count))
        answer = await endpoint.ask(manner.api.path, manner.body(dialogue, 1), {})
        return answer.usage.prompt_tokens

    few, many = await prompt_tokens(_FEW), await prompt_tokens(_MANY)
    word = (many - few) / (_MANY - _FEW)
    if word <= 0:
        raise TurnError("no usage", f"{endpoint.url}: usage.prompt_tokens does not grow with the prompt")
    message = 0.0
    if manner.api is Api.CHAT:
        split = await prompt_tokens(_FEW, _FEW, _MANY - 2 * _FEW)
        message = max(0.0, (split - many) / 2)
    return Scale(word=word, message=message, prompt=many - _MANY * word - message)


class ConversationLoad:
    """The turns of one run. ``record`` receives each turn when it has ended."""

    def __init__(
        self,
        endpoints: Sequence[CompletionServer],
        manner: Manner,
        scale: Scale,
        record: Callable[[Turn], None],
        compare: CompletionServer | None = None,
    ) -> None:
        """All turns of a conversation go to the same endpoint. ``compare``: its answers must be equal."""
        self._endpoints = endpoints
        self._manner = manner
        self._scale = scale
        self._record = record
        self._compare = compare
        self._began = 0.0

    async def converse(self, shape: ConversationShape, pace: Pace) -> None:
        """Runs all conversations of a workload."""
        self._began = time.perf_counter()
        numbers = iter(range(1, shape.conversations + 1))
        if pace.at_once:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(pace.at_once, shape.conversations)):
                    group.create_task(self._one_after_another(shape, pace, numbers))
            return
        await self._open_loop(
            (at, partial(self._conversation, shape, pace, number))
            for number, at in zip(numbers, pace.starts(self._manner.seed), strict=False)
        )

    async def replay(self, requests: Sequence[TracedRequest], speed: float) -> None:
        """Sends the lines of a trace at their times, divided by ``speed``."""
        self._began = time.perf_counter()
        await self._open_loop((request.at / speed, partial(self._line, request)) for request in requests)

    async def _open_loop(self, starts: Iterator[tuple[float, _Begin]]) -> None:
        async with asyncio.TaskGroup() as group:
            for at, begin in starts:
                due = self._began + at
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(begin(due))

    async def _one_after_another(self, shape: ConversationShape, pace: Pace, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._conversation(shape, pace, number, time.perf_counter())

    async def _conversation(self, shape: ConversationShape, pace: Pace, number: int, due: float) -> None:
        """Sends the turns of one conversation until one fails."""
        dialogue = new_dialogue(self._manner.api)
        # Long prompts take milliseconds, which would delay the events of other streams.
        messages = await asyncio.to_thread(self._messages, shape, number)
        if shape.system:
            dialogue.add("system", messages.pop(0))
        before: Usage | None = None
        for turn, (message, pause) in enumerate(
            zip(messages, pace.pauses(self._manner.seed, number), strict=False), 1
        ):
            dialogue.add("user", message)
            body = self._manner.body(dialogue, shape.answer)
            # The first conversation alone brings the shared system prompt.
            shared = shape.system if number > 1 else 0
            new = partial(_new, before=before, shared=shared)
            answer = await self._turn(number, turn, due, body, new)
            if answer is None:
                return
            dialogue.add("assistant", _repeated(self._manner.api, answer))
            before = answer.usage
            due = time.perf_counter() + pause
            if turn < shape.turns:
                await asyncio.sleep(pause)

    def _messages(self, shape: ConversationShape, number: int) -> list[Piece]:
        api, seed = self._manner.api, self._manner.seed
        pieces = []
        if shape.system:
            pieces.append(piece(api, f"{seed}:system", self._scale.words(shape.system, begins=True)))
        for turn in range(1, shape.turns + 1):
            # A later turn also has the template's tokens of the answer before.
            tokens = shape.first if turn == 1 else shape.message - self._scale.message
            count = self._scale.words(tokens, begins=turn == 1 and not shape.system)
            pieces.append(piece(api, f"{seed}:{number}:{turn}", count))
        return pieces

    async def _line(self, request: TracedRequest, due: float) -> None:
        dialogue = new_dialogue(self._manner.api)
        dialogue.add("user", await asyncio.to_thread(self._blocks, request))
        body = self._manner.body(dialogue, request.output_tokens)
        new = partial(_new_of_line, new=request.new_tokens)
        await self._turn(request.conversation, request.turn, due, body, new)

    def _blocks(self, request: TracedRequest) -> Piece:
        """Returns the prompt of a line. Equal blocks have equal words."""
        api, scale = self._manner.api, Scale(word=self._scale.word)
        *complete, last = (f"{self._manner.seed}:block:{block}" for block in request.blocks)
        pieces = [piece(api, key, scale.words(BLOCK_TOKENS)) for key in complete]
        rest = request.input_tokens - len(complete) * BLOCK_TOKENS
        pieces.append(piece(api, last, scale.words(rest)))
        if api is Api.TOKENS:
            return [token for some in pieces for token in some if isinstance(token, int)]
        return "".join(some for some in pieces if isinstance(some, str))

    async def _turn(
        self,
        conversation: int,
        turn: int,
        due: float,
        body: Mapping[str, Any],
        new: Callable[[Usage], tuple[int, int]],
    ) -> TimedAnswer | None:
        """Sends a turn and records it. ``new`` returns its new and its unseen tokens. None: it failed."""
        endpoint = self._endpoints[(conversation - 1) % len(self._endpoints)]
        path, session = self._manner.api.path, self._manner.session_header
        headers = {session: f"{self._manner.seed}-{conversation}"} if session else {}
        sent = time.perf_counter()
        record = Turn(
            conversation=conversation,
            turn=turn,
            endpoint=endpoint.url,
            sent_s=round(sent - self._began, 6),
            late_s=round(max(0.0, sent - due), 6),
        )
        try:
            answer = await endpoint.ask(path, body, headers)
            if self._compare is not None:
                expected = await self._compare.ask(path, body, headers)
                difference = first_difference(self._manner.api, answer, expected)
            else:
                difference = ""
        except TurnError as error:
            self._record(replace(record, cause=error.cause, reason=str(error)))
            return None
        new_tokens, unseen = new(answer.usage)
        self._record(
            replace(
                record,
                ttft_ms=round(answer.first * 1e3, 3),
                gaps_ms=[round(gap * 1e3, 3) for gap in answer.gaps],
                prompt_tokens=answer.usage.prompt_tokens,
                new_tokens=new_tokens,
                unseen_tokens=unseen,
                cached_tokens=answer.usage.cached_tokens,
                answer_tokens=answer.usage.completion_tokens,
                difference=difference,
            )
        )
        return answer


def first_difference(api: Api, answer: TimedAnswer, expected: TimedAnswer) -> str:
    """Returns the first position at which two answers differ, counted from 1, with what is there; empty: they
    are equal."""
    if api is Api.TOKENS:
        ours, theirs = answer.token_ids, expected.token_ids
        if ours == theirs:
            return ""
        at = common(ours, theirs)
        if at == min(len(ours), len(theirs)):
            return f"token {at + 1}: {len(ours)} tokens instead of {len(theirs)}"
        return f"token {at + 1}: {ours[at]} instead of {theirs[at]}"
    said, right = answer.said, expected.said
    if said == right:
        return ""
    at = common(said, right)
    return f"character {at + 1}: {said[at : at + _SHOWN]!r} instead of {right[at : at + _SHOWN]!r}"


def _repeated(api: Api, answer: TimedAnswer) -> Piece:
    return answer.token_ids if api is Api.TOKENS else answer.text


def _new_of_line(usage: Usage, new: int) -> tuple[int, int]:
    new = min(new, usage.prompt_tokens)
    return new, new


def _new(usage: Usage, before: Usage | None, shared: int) -> tuple[int, int]:
    """Returns a turn's prompt tokens that are new, and those that no engine has."""
    if before is None:
        new = max(0, usage.prompt_tokens - shared)
        return new, new
    new = max(0, usage.prompt_tokens - before.prompt_tokens)
    return new, max(0, new - before.completion_tokens)
