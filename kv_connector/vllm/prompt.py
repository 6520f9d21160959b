"""A request's prompt, as both engines of a transfer know it."""

from __future__ import annotations

from kv_connector.protocol.params import BadParams
from kv_connector.protocol.prompt_hash import prompt_hash
from kv_connector.vllm.internals import Request, beside_tokens


def prompt_of(request: Request) -> tuple[int, bytes]:
    """The number of its tokens, and a hash of all that its pages depend on. Raises BadParams for a prompt
    that has embeddings, alone or between tokens: no hash covers them."""
    if not request.prompt_token_ids or request.prompt_embeds is not None:
        raise BadParams("the prompt has embeddings, which cannot be transferred")
    try:
        digest = prompt_hash(request.prompt_token_ids, beside_tokens(request))
    except (OverflowError, TypeError) as error:
        raise BadParams(f"the prompt's token ids are no unsigned 32-bit integers: {error}") from None
    return len(request.prompt_token_ids), digest
