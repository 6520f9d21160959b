"""Token counts: the tokens of prompt and answer by the usage of any API; None if the usage lacks them."""

from typing import Any

import msgspec

from kv_connector.router.failure import UNREADABLE
from kv_connector.router.requests.events import END, data_of

# Fields that contain the usage in events of /v1/responses and /v1/messages. Otherwise the event itself does.
HOLDERS = ("response", "message")
# Fields of a usage with the details of the prompt's tokens.
DETAILS = ("prompt_tokens_details", "input_tokens_details")

# Fields of a usage that counts an answer's tokens. In a text the quotes would be escaped.
_COMPLETION = b'"completion_tokens":'
_OUTPUT = b'"output_tokens":'


def has_usage(said: bytes) -> bool:
    """Returns whether a part of an answer may have a usage that counts the answer's tokens."""
    return _COMPLETION in said or _OUTPUT in said


def last_usage(said: bytes) -> Any:
    """Returns the last usage in whole events or a whole body; None if none can be read."""
    found = None
    events = [data for event in said.split(END) if (data := data_of(event))]
    for data in filter(has_usage, events or [said]):
        try:
            fields = msgspec.json.decode(data)
        except UNREADABLE:
            continue
        holders = [fields, *map(fields.get, HOLDERS)] if isinstance(fields, dict) else []
        usages = (one.get("usage") for one in holders if isinstance(one, dict))
        found = next((one for one in usages if isinstance(one, dict)), found)
    return found


def prompt_tokens(usage: Any) -> int | None:
    """Returns the prompt's tokens. Anthropic's API counts cached tokens apart."""
    if not isinstance(usage, dict):
        return None
    total = usage.get("prompt_tokens", usage.get("input_tokens"))
    apart = (usage.get(f"cache_{how}_input_tokens") or 0 for how in ("read", "creation"))
    return sum(apart, total) if isinstance(total, int) else None


def completion_tokens(usage: Any) -> int | None:
    """Returns the tokens of the answer."""
    if not isinstance(usage, dict):
        return None
    total = usage.get("completion_tokens", usage.get("output_tokens"))
    return total if isinstance(total, int) else None


def cached_tokens(usage: Any) -> int | None:
    """Returns the tokens that the engine had in its prefix cache."""
    if not isinstance(usage, dict):
        return None
    details = next((found for name in DETAILS if isinstance(found := usage.get(name), dict)), {})
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    return cached if isinstance(cached, int) else None


def written_tokens(usage: Any) -> int | None:
    """Returns the tokens that were written into the prefix cache, by the usage of an answer of
    /v1/responses."""
    details = usage.get("input_tokens_details") if isinstance(usage, dict) else None
    written = details.get("cache_write_tokens") if isinstance(details, dict) else None
    return written if isinstance(written, int) else None
