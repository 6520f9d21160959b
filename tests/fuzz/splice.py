"""A fuzzer of the early first token: one token of P's stream, followed by D's stream.

A scenario is an answer (tokens with their texts), as P's and D's servers might write it. Its events hold
several tokens or parts of one, its ids are ahead of their texts, and its bytes are cut anywhere.

The client must get D's answer: all its text, ids, its end and its usage, each once. If D began with another
token, the splice must break off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.early_token import EarlyToken, Mismatch, PrefillStream, Rest
from kv_connector.router.requests.events import END, EventStream
from tests.fuzz.seeds import chosen_seeds, search

# Texts like those that the splice searches for, white space, marks, and characters of several bytes.
TEXTS = [
    *(" a", "b", "ab", "", "\n\n", " ", "<", "<think", "[", "|", '"', "\\", "\u00e9", "\u6f22", "\U0001f600"),
    *(
        '"created":9',
        '"finish_reason":"stop"',
        "data: [DONE]",
        '"prompt_token_ids":[1]',
        "\ufffd",
        "]",
        "null",
    ),
]
DONE = b"data: [DONE]" + END


@dataclass(frozen=True)
class Token:
    text: str
    id: int


@dataclass(frozen=True)
class Answer:
    """A client's request and its answer."""

    chat: bool
    reasoning: int
    """Tokens of reasoning before the content of a chat."""
    ids: bool
    usage: bool
    tokens: tuple[Token, ...]
    first: Token
    """P's first token. D's is the first of ``tokens``."""
    finish: str
    p_created: int
    d_created: int
    salt: int
    """Seed of the places where the bytes are cut."""


def scenario(seed: int) -> Answer:
    rng = Random(seed)
    tokens = tuple(Token(rng.choice(TEXTS), rng.randrange(5)) for _ in range(rng.randrange(1, 9)))
    other = Token(rng.choice(TEXTS), rng.randrange(5))
    chat = rng.random() < 0.5
    return Answer(
        chat=chat,
        reasoning=rng.randrange(len(tokens) + 1) if chat else 0,
        ids=rng.random() < 0.5,
        usage=rng.random() < 0.5,
        tokens=tokens,
        first=tokens[0] if rng.random() < 0.8 else other,
        finish=rng.choice(["stop", "length"]),
        p_created=rng.randrange(100),
        d_created=rng.randrange(100),
        salt=rng.randrange(1 << 30),
    )


# --- The servers


def event(answer: Answer, created: int, text: dict[str, str], ids: list[int], finish: str | None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if answer.chat:
        choice["delta"] = text
    else:
        choice["text"] = text.get("text", "")
    if answer.ids:
        choice["token_ids"] = ids
    said = {"id": "x", "created": created, "choices": [choice]}
    return b"data: " + json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode() + END


def key_of(answer: Answer, number: int) -> str:
    if not answer.chat:
        return "text"
    return "reasoning" if number < answer.reasoning else "content"


def usage_of(created: int, tokens: int) -> bytes:
    said = {"created": created, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    return b"data: " + json.dumps(said).encode() + END


ROLE = {"role": "assistant", "content": ""}


def prefill_stream(answer: Answer) -> bytes:
    opening = event(answer, answer.p_created, ROLE, [], None) if answer.chat else b""
    text = {key_of(answer, 0): answer.first.text}
    one = event(answer, answer.p_created, text, [answer.first.id], "length")
    return opening + one + usage_of(answer.p_created, 1) + DONE


def decode_stream(answer: Answer) -> bytes:
    """Returns D's stream. Each event has the next few ids, and text that lags behind them by some
    characters."""
    rng = Random(answer.salt)
    stream = event(answer, answer.d_created, ROLE, [], None) if answer.chat else b""
    waiting: list[tuple[str, str]] = []  # (key, character) of texts that are held back
    ids: list[int] = []
    for number, token in enumerate(answer.tokens):
        waiting += [(key_of(answer, number), character) for character in token.text]
        ids.append(token.id)
        last = number == len(answer.tokens) - 1
        if not last and rng.random() < 0.3:
            continue  # several tokens in one event
        if last and rng.random() < 0.5:  # the end comes in a separate event
            stream += _events(answer, rng, waiting, ids, None, rest=True)
            waiting, ids = [], []
        finish = answer.finish if last else None
        stream += _events(answer, rng, waiting, ids, finish, rest=last)
        ids = []
    if answer.usage:
        stream += usage_of(answer.d_created, len(answer.tokens))
    return stream + DONE


def _events(
    answer: Answer,
    rng: Random,
    waiting: list[tuple[str, str]],
    ids: list[int],
    finish: str | None,
    *,
    rest: bool,
) -> bytes:
    """Takes characters from ``waiting``, all of them with ``rest``, for one event or several."""
    stream = b""
    while True:
        take = len(waiting) if rng.random() < 0.5 else rng.randrange(len(waiting) + 1)
        taken, waiting[:take] = waiting[:take], []
        text: dict[str, str] = {}
        for key, character in taken:
            text[key] = text.get(key, "") + character
        over = not waiting or not rest
        stream += event(answer, answer.d_created, text, ids, finish if over else None)
        ids = []
        if over:
            return stream


# --- The client


@dataclass
class Got:
    """A stream as a client reads it."""

    texts: dict[str, str]
    ids: list[int]
    finishes: list[str]
    roles: int
    created: set[int]
    usages: int
    done: int


def read(stream: bytes) -> Got:
    got = Got({}, [], [], 0, set(), 0, 0)
    assert stream.endswith(END)
    for one in stream[: -len(END)].split(END):
        assert one.startswith(b"data: "), one
        assert not got.done, "events behind the end"
        if one == b"data: [DONE]":
            got.done += 1
            continue
        said = json.loads(one.removeprefix(b"data: "))
        got.created.add(said["created"])
        got.usages += said.get("usage") is not None
        for choice in said["choices"]:
            assert not got.finishes, "a choice behind its end"
            delta = choice.get("delta", choice)
            got.roles += "role" in delta
            for key in ("text", "content", "reasoning"):
                got.texts[key] = got.texts.get(key, "") + (delta.get(key) or "")
            got.ids += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                got.finishes.append(choice["finish_reason"])
    return got


async def events_of(stream: bytes, rng: Random) -> list[bytes]:
    """Returns the stream's events, as the router reads them from bytes that are cut anywhere."""

    async def chunks() -> AsyncIterator[bytes]:
        at = 0
        while at < len(stream):
            end = at + rng.choice([1, rng.randrange(1, 40), rng.randrange(1, 400)])
            yield stream[at:end]
            at = end

    events, read = EventStream(chunks()), []
    while some := await events.read():
        read.append(some)
    return read


async def splice(answer: Answer) -> tuple[EarlyToken | None, bytes]:
    """Returns the token, and what the client gets. Raises Mismatch."""
    rng = Random(answer.salt)
    prefill = PrefillStream()
    token = None
    for events in await events_of(prefill_stream(answer), rng):
        token = prefill.feed(events) or token
    assert prefill.prompt_tokens == 9
    decode = await events_of(decode_stream(answer), rng)
    if token is None:
        return None, b"".join(decode)
    rest = Rest(token)
    return token, token.events + b"".join(rest.of(events) for events in decode)


def problem(answer: Answer) -> str | None:
    """Returns what is wrong, or None."""
    whole = read(decode_stream(answer))
    key = key_of(answer, 0)
    others = [one for one, text in whole.texts.items() if text and one != key]
    begins = whole.texts.get(key, "").startswith(answer.first.text)
    if answer.ids:
        begins = begins and whole.ids[0] == answer.first.id
    try:
        token, stream = asyncio.run(splice(answer))
    except Mismatch as error:
        # D may mix the ends of two texts in one event, if their order is unknown.
        return f"broken off: {error}" if begins and not others else None
    if token is not None and not begins:
        return f"not broken off: {stream!r}"
    plain = answer.first.text.isalpha()
    if plain and token is None:
        return "the token is not passed on"
    try:
        got = read(stream)
    except (AssertionError, ValueError) as error:
        return f"unreadable: {error}: {stream!r}"
    if token is not None:
        whole = replace_created(whole, {answer.p_created})
    return None if got == whole else f"{got} instead of {whole}: {stream!r}"


def replace_created(got: Got, created: set[int]) -> Got:
    return replace(got, created=created)


# --- Requests with and without an early first token

MORE: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "echo": True,
    "logprobs": 0,
    "return_tokens_as_token_ids": True,
    "stream_options": {"continuous_usage_stats": True},
    "stop": ["x"],
    "tools": [{"type": "function"}],
    "functions": [{}],
    "stream": False,
}
LESS: dict[str, Any] = {
    "n": 1,
    "logprobs": None,
    "stream_options": {"include_usage": True},
    "stop": [],
    "tools": [],
    "temperature": 0.5,
    "return_token_ids": True,
}


def request_problem(seed: int) -> str | None:
    """Returns a request that is spliced and must not be, or the reverse, or None."""
    rng = Random(seed)
    body = {"prompt": "x", "stream": True}
    body |= {key: LESS[key] for key in rng.sample(sorted(LESS), rng.randrange(4))}
    more = rng.sample(sorted(MORE), rng.choice([0, 0, 1, 2]))
    body |= {key: MORE[key] for key in more}
    reason = Completion.decode(json.dumps(body).encode()).late_reason()
    return None if (reason is not None) == bool(more) else f"late_reason() is {reason!r} for {body}"


# --- Campaign


def smallest(answer: Answer) -> Answer:
    """Returns the failing answer with as few tokens and as short texts as possible."""
    shorter = True
    while shorter:
        shorter = False
        for number in reversed(range(len(answer.tokens))):
            tokens = answer.tokens[:number] + answer.tokens[number + 1 :]
            candidates = [replace(answer, tokens=tokens)] if tokens else []
            if answer.tokens[number].text not in ("", "a") and number:
                changed = replace(answer.tokens[number], text="a")
                candidates.append(
                    replace(answer, tokens=(*answer.tokens[:number], changed, *answer.tokens[number + 1 :]))
                )
            if found := next((one for one in candidates if problem(one)), None):
                answer, shorter = found, True
                break
    return answer


def report(seed: int) -> str | None:
    """Returns a description of what this seed finds, or None."""
    if text := request_problem(seed):
        return f"seed {seed}: {text}"
    answer = scenario(seed)
    if problem(answer) is None:
        return None
    answer = smallest(answer)
    return f"seed {seed}: {problem(answer)}\n  the smallest answer: {answer}"


def main() -> None:
    search(chosen_seeds(__doc__, 100_000, "answers"), "answers", report)


if __name__ == "__main__":
    main()
