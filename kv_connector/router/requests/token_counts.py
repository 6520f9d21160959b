"""Token counts: the prompt's tokens by the usage of an answer of any API; None if the usage lacks them."""

from typing import Any

_DETAILS = ("prompt_tokens_details", "input_tokens_details")


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
    details = next((found for name in _DETAILS if isinstance(found := usage.get(name), dict)), {})
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    return cached if isinstance(cached, int) else None


def written_tokens(usage: Any) -> int | None:
    """Returns the tokens that were written into the prefix cache, by the usage of an answer of
    /v1/responses."""
    details = usage.get("input_tokens_details") if isinstance(usage, dict) else None
    written = details.get("cache_write_tokens") if isinstance(details, dict) else None
    return written if isinstance(written, int) else None
