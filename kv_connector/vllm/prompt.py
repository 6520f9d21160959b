"""A request's prompt, as both engines of a transfer know it."""

from __future__ import annotations

from kv_connector.protocol.params import BadParams
from kv_connector.protocol.prompt_hash import prompt_hash
from kv_connector.vllm.internals import Request, beside_tokens


def prompt_of(request: Request) -> tuple[int, bytes]:
    """Its tokens, and their hash."""
    if not request.prompt_token_ids:
        raise BadParams("the prompt has no token ids (prompt embeddings cannot be transferred)")
    try:
        digest = prompt_hash(request.prompt_token_ids, beside_tokens(request))
    except (OverflowError, TypeError) as error:
        raise BadParams(f"the prompt's token ids are no unsigned 32-bit integers: {error}") from None
    return len(request.prompt_token_ids), digest
