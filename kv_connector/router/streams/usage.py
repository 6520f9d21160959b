"""Usage: corrects the token counts of an answer.

The decode engine counts all tokens from the prefill engine as cached. Users want prefix-cache hits, which are
the prefill engine's. In serial dispatch vLLM corrects the counts itself, by the prefill engine's
kv_transfer_params.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from kv_connector.router.failure import UNREADABLE
from kv_connector.router.requests.answers import Answer, Computed
from kv_connector.router.requests.events import END, data_of
from kv_connector.router.requests.token_counts import DETAILS, HOLDERS

_USAGE = b'"usage"'
# If an answer has none of these fields, no correction is needed, and the prefill engine's number is not
# awaited.
_NUMBERS = (b'"cached_tokens":', b'"cache_read_input_tokens":')


async def recounted(
    answer: Answer, computed: Callable[[], Awaitable[Computed | None]]
) -> AsyncIterator[bytes]:
    """Yields the decode engine's answer with the cached tokens that the prefill engine counted.

    If the prefill engine does not report them, the answer is unchanged.
    """
    async for chunk in answer.chunks:
        if _counts(chunk) and (report := await computed()) is not None and report.cached is not None:
            cached, written = report.cached, report.written
            if answer.streaming:
                chunk = END.join(_event(event, cached, written) for event in chunk.split(END))
            else:
                chunk = _corrected(chunk, cached, written)
        yield chunk


def _counts(said: bytes) -> bool:
    """Returns whether the event may have a count of cached tokens. For most events this is one search."""
    return _USAGE in said and any(number in said for number in _NUMBERS)


def _event(event: bytes, cached: int, written: int | None) -> bytes:
    if not _counts(event) or not (data := data_of(event)):
        return event
    return event.replace(data, _corrected(data, cached, written), 1)


def _corrected(said: bytes, cached: int, written: int | None) -> bytes:
    """Corrects the usage in an event's data. Other fields are not read: a tool's input may have fields of any
    name."""
    try:
        fields = msgspec.json.decode(said, type=dict[str, msgspec.Raw])
        name = None if "usage" in fields else next((name for name in HOLDERS if name in fields), None)
        holder = fields if name is None else msgspec.json.decode(fields[name], type=dict[str, msgspec.Raw])
        if "usage" not in holder:
            return said
        usage = msgspec.json.decode(holder["usage"], type=dict[str, Any])
    except UNREADABLE:
        return said  # null, or not written by vLLM
    _correct(usage, cached, written)
    holder["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    if name is not None:
        fields[name] = msgspec.Raw(msgspec.json.encode(holder))
    return msgspec.json.encode(fields)


def _correct(usage: dict[str, Any], cached: int, written: int | None) -> None:
    for name in DETAILS:
        details = usage.get(name)
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = cached
            if written is not None and isinstance(details.get("cache_write_tokens"), int):
                details["cache_write_tokens"] = written
            # Only requests with tools that the engine calls have a second turn. They go to the decode engine
            # alone.
            if details.get("cached_tokens_per_turn"):
                details["cached_tokens_per_turn"] = [cached]
    read, rest = usage.get("cache_read_input_tokens"), usage.get("input_tokens")
    if isinstance(read, int) and isinstance(rest, int):
        # In Anthropic's API the prompt is the sum of both and the created tokens, which vLLM leaves as the
        # decode engine counted them.
        usage |= {"cache_read_input_tokens": cached, "input_tokens": max(0, rest + read - cached)}
