"""A request's prompt, as both engines of a transfer know it."""

from __future__ import annotations

from typing import Any

from kv_connector.protocol.params import BadParams
from kv_connector.protocol.wire.prompt_hash import prompt_hash
from kv_connector.vllm.internals import Request


def prompt_of(request: Request) -> tuple[int, bytes]:
    """Returns the number of the prompt's tokens, and a hash of all that its pages depend on.

    Raises BadParams for a prompt with embeddings, alone or between tokens: no hash covers them.
    """
    if not request.prompt_token_ids or request.prompt_embeds is not None:
        raise BadParams("the prompt has embeddings, which cannot be transferred")
    try:
        digest = prompt_hash(request.prompt_token_ids, _beside_tokens(request))
    except (OverflowError, TypeError) as error:
        raise BadParams(f"the prompt's token ids are not all unsigned 32-bit integers: {error}") from None
    return len(request.prompt_token_ids), digest


def _beside_tokens(request: Any) -> list[str]:
    """Returns all that vLLM's block hashes cover beside the tokens, in a fixed order: adapter, salt, media.

    D's cache keeps P's KV under D's own block hashes. If one of these facts differed unnoticed, another
    client would get KV of the wrong picture or adapter.

    vLLM hashes a picture together with the model's name or path, and an adapter's path is part of this list.
    If two engines load them from different paths, the lists differ, and D computes such prompts.
    """
    found = []
    if (adapter := request.lora_request) is not None:
        found.append(f"adapter {adapter.lora_name} {adapter.lora_path}")
    if request.cache_salt:
        found.append(f"salt {request.cache_salt}")
    for feature in request.mm_features or ():
        place = feature.mm_position
        found.append(f"{feature.modality} {place.offset} {place.length} {feature.identifier}")
    return found
