"""Models: the names that engines list at /v1/models, and one list that merges several engines' answers."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kv_connector.router.engines.client import EngineReply
from kv_connector.router.failure import UNREADABLE

logger = logging.getLogger(__name__)

# vLLM lists its served names and its adapters. An engine has tens of adapters, and the longest names are
# paths.
_MOST_NAMES = 1024
_LONGEST_NAME = 1024


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Length(msgspec.Struct):
    max_model_len: int | None = None


class _Lengths(msgspec.Struct):
    data: list[_Length] = []


class _Entries(msgspec.Struct):
    data: list[msgspec.Raw]


def names(url: str, reply: EngineReply) -> frozenset[str] | None:
    """Returns the models of an engine's answer; None if it lists no models, or too many."""
    try:
        listed = [] if reply.status != 200 else msgspec.json.decode(reply.body, type=_Models).data
    except UNREADABLE:
        return None
    if len(listed) > _MOST_NAMES or any(len(model.id) > _LONGEST_NAME for model in listed):
        logger.warning(
            "MODELS of %s: requests are not placed by model: more than %d models, or a name over %d "
            "characters",
            url,
            _MOST_NAMES,
            _LONGEST_NAME,
        )
        return None
    return frozenset(model.id for model in listed) or None


def longest(reply: EngineReply) -> int | None:
    """Returns the tokens of the longest model that an engine lists; None if it lists no length.

    Adapters are listed without a length.
    """
    try:
        listed = [] if reply.status != 200 else msgspec.json.decode(reply.body, type=_Lengths).data
    except UNREADABLE:
        return None
    return max((model.max_model_len for model in listed if model.max_model_len), default=None)


def merged(replies: Sequence[EngineReply]) -> EngineReply:
    """Returns the first answer, with the models of all answers. Each answer is a readable list."""
    found: dict[str, msgspec.Raw] = {}
    for reply in replies:
        for entry in msgspec.json.decode(reply.body, type=_Entries).data:
            found.setdefault(msgspec.json.decode(entry, type=_Model).id, entry)
    head = msgspec.json.decode(replies[0].body, type=dict[str, msgspec.Raw])
    body = msgspec.json.encode({**head, "data": list(found.values())})
    return replace(replies[0], body=body)
