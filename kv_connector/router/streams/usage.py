"""Usage: an answer's counts of tokens. To D all that came from P was cached: users read prefix-cache hits,
which are P's.

Where D is asked after P, vLLM does this itself, by P's kv_transfer_params.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from kv_connector.router.failure import UNREADABLE
from kv_connector.router.requests.answers import Answer, Computed
from kv_connector.router.requests.events import END, data_of

_USAGE = b'"usage"'
# Without one of them there is nothing to correct, and P's number is not waited for.
_NUMBERS = (b'"cached_tokens":', b'"cache_read_input_tokens":')
# An event's field that has the usage, of /v1/responses and of /v1/messages; else it is the event's own.
_HOLDERS = ("response", "message")
_DETAILS = ("prompt_tokens_details", "input_tokens_details")


async def recounted(
    answer: Answer, computed: Callable[[], Awaitable[Computed | None]]
) -> AsyncIterator[bytes]:
    """D's answer with the cached tokens that P counted, once it has; as it is where P does not say."""
    async for chunk in answer.chunks:
        if _counts(chunk) and (report := await computed()) is not None and report.cached is not None:
            cached, written = report.cached, report.written
            if answer.streaming:
                chunk = END.join(_event(event, cached, written) for event in chunk.split(END))
            else:
                chunk = _corrected(chunk, cached, written)
        yield chunk


def _counts(said: bytes) -> bool:
    """Whether it may say how many tokens were cached: a look, and no more at most events."""
    return _USAGE in said and any(number in said for number in _NUMBERS)


def _event(event: bytes, cached: int, written: int | None) -> bytes:
    if not _counts(event) or not (data := data_of(event)):
        return event
    return event.replace(data, _corrected(data, cached, written), 1)


def _corrected(said: bytes, cached: int, written: int | None) -> bytes:
    """A tool's input may have fields of any name: what is not usage is not looked into."""
    try:
        fields = msgspec.json.decode(said, type=dict[str, msgspec.Raw])
        name = None if "usage" in fields else next((name for name in _HOLDERS if name in fields), None)
        holder = fields if name is None else msgspec.json.decode(fields[name], type=dict[str, msgspec.Raw])
        if "usage" not in holder:
            return said
        usage = msgspec.json.decode(holder["usage"], type=dict[str, Any])
    except UNREADABLE:
        return said  # null, or not of vLLM's making
    _correct(usage, cached, written)
    holder["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    if name is not None:
        fields[name] = msgspec.Raw(msgspec.json.encode(holder))
    return msgspec.json.encode(fields)


def _correct(usage: dict[str, Any], cached: int, written: int | None) -> None:
    for name in _DETAILS:
        details = usage.get(name)
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = cached
            if written is not None and isinstance(details.get("cache_write_tokens"), int):
                details["cache_write_tokens"] = written
            # A second turn is of tools that the engine calls: such requests go to D alone.
            if details.get("cached_tokens_per_turn"):
                details["cached_tokens_per_turn"] = [cached]
    read, rest = usage.get("cache_read_input_tokens"), usage.get("input_tokens")
    if isinstance(read, int) and isinstance(rest, int):
        # In Anthropic's words the prompt is both and what was created, which vLLM leaves as D counted it.
        usage |= {"cache_read_input_tokens": cached, "input_tokens": max(0, rest + read - cached)}
