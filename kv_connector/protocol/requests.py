"""The requests of an engine to its worker's state machines: a prompt to be sent, a prompt to be received, and
a prefix to be borrowed."""

from __future__ import annotations

from dataclasses import dataclass

from kv_connector.protocol.actions import Address
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.content_key import ContentKey


@dataclass(frozen=True)
class PrefillRequest:
    """A request whose prompt this engine computes for the decode engine of another request."""

    request_id: str
    transfer_id: str
    # None if the framework names its pages and not its tokens: D's number is accepted.
    prompt_tokens: int | None
    # 16 bytes over the prompt's tokens, by the same function on both sides. None if the transfer id alone
    # identifies the prompt.
    prompt_hash: bytes | None
    lent: bool = False
    """Whether it is no request of a client, but a prefix that this engine lends. Its pages are in the cache,
    and are held for a short time only."""


@dataclass(frozen=True)
class GroupPages:
    """Logical block ``first + i`` of a KV group lies in ``blocks[i]``. The group's null block is skipped."""

    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class ComputedPages:
    """Pages that become valid in one step, while the signal rises from ``signal_base``, by one value a layer.

    ``signal_base`` None: the pages are computed already, on a GPU too, and are sent at once, whatever the
    signal's value. ``groups`` has one entry per KV group. The blocks must keep their contents until the
    request is reported as sent or is preempted. Pages may be named repeatedly.
    """

    transfer_id: str
    signal_base: int | None
    groups: tuple[GroupPages, ...]


@dataclass(frozen=True)
class DecodeRequest:
    """A request whose prompt pages come from ``engine``, the address of its rank 0.

    With ``engine.prefixes`` they are the pages of a prefix, which the engine has lent under the transfer id.
    If they do not come, the request computes its prompt, whatever the reason.

    ``groups`` has one entry per KV group: logical block ``first + i`` lands in ``blocks[i]``. The blocks
    belong to the transfer until it is reported.
    """

    request_id: str
    transfer_id: str
    engine: Address
    prompt_tokens: int
    first_token: int  # D has the tokens before this one
    prompt_hash: bytes | None  # as in PrefillRequest
    groups: tuple[GroupTarget, ...]
    wants_sampled: bool = False
    """Whether the request continues with the token that P samples behind the prompt. The transfer then ends
    only once that token has arrived, or cannot arrive any more."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens of a borrowed prefix that are to be loaded. 0: it is a prompt."""
        return self.prompt_tokens - self.first_token if self.engine.prefixes else 0

    def limit(self, timeouts: Timeouts) -> float:
        """Seconds that its transfer may take."""
        return timeouts.borrow if self.engine.prefixes else timeouts.transfer


@dataclass(frozen=True)
class PrefixRequest:
    """The question whether the engine ``lender`` (with Address.prefixes) has the leading tokens of a prompt.

    One worker of the engine asks. If the answer is good, each worker sends a DecodeRequest with the same
    transfer id, or releases it.
    """

    transfer_id: str
    lender: Address
    content: ContentKey
    first_token: int  # this engine has the tokens before this one
    multiple: int  # this engine can use multiples of these tokens, as its blocks have
