"""What an engine asks of its worker's state machines: a prompt to be sent, a prompt to be received."""

from __future__ import annotations

from dataclasses import dataclass

from kv_connector.protocol.actions import Address
from kv_connector.protocol.layout import GroupTarget


@dataclass(frozen=True)
class PrefillRequest:
    """A request whose prompt this engine computes for somebody else's decode."""

    request_id: str
    transfer_id: str
    # None where the framework names its pages and not its tokens: D's word is taken.
    prompt_tokens: int | None
    # 16 bytes over the prompt's tokens, by the same function on both sides. None where the transfer id alone
    # says which prompt it is.
    prompt_hash: bytes | None


@dataclass(frozen=True)
class GroupPages:
    """Logical block ``first + i`` of a KV group lies in ``blocks[i]``; the group's null block is skipped."""

    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class ComputedPages:
    """Pages that become valid in one step: as the signal goes from ``signal_base`` up, one value a layer.

    ``signal_base`` None: they are computed already, on a GPU too, and go at once, whatever the signal says.
    ``groups`` has one entry per KV group. The blocks must keep their contents until the request is reported
    as sent or preempted; repeating pages is fine.
    """

    transfer_id: str
    signal_base: int | None
    groups: tuple[GroupPages, ...]


@dataclass(frozen=True)
class DecodeRequest:
    """A request whose prompt pages come from ``engine``, the address of its rank 0.

    ``groups`` has one entry per KV group: logical block ``first + i`` is to land in ``blocks[i]``. The blocks
    belong to the transfer until it is reported.
    """

    request_id: str
    transfer_id: str
    engine: Address
    prompt_tokens: int
    first_token: int  # the tokens before this one are here already
    prompt_hash: bytes | None  # as PrefillRequest's
    groups: tuple[GroupTarget, ...]
    wants_sampled: bool = False
    """It goes on with the token that P samples behind the prompt: it is not over before that is here, or not
    to be had."""
