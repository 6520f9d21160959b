"""The timelines of transfers, as an agent that keeps them sends them to an operator (RECALL, RECALLED).

Times are nanoseconds of CLOCK_MONOTONIC of the worker's host. 0: not observed.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_SPANS = 1 << 15  # of one transfer: 256 layers in 128 chunks, 1.6 MB
MAX_COUNTS = 4096
MAX_TIMELINES = 4096

Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class LayerSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pages of one layer that were sent in one step of the prefill engine."""

    layer: Count  # index into Recalled.layers
    computed: Nanoseconds  # when the signal showed that the pages are valid
    first_post: Nanoseconds
    last_post: Nanoseconds
    # when the prefill engine's worker knew that the last page is in the decode engine's memory
    landed: Nanoseconds
    pages: Count


class About(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A transfer that is over, on one worker of either side."""

    transfer_id: Name
    request_id: Name
    peer: Name  # the first peer, if there are several sources
    lane: Name
    reserved: Nanoseconds  # when RESERVE arrived, or was sent
    ended: Nanoseconds
    outcome: Name


class Sending(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pages for one of the decode engine's workers, as the prefill engine's worker recorded them."""

    about: About
    share: Count
    nbytes: Count
    # When the agent received the pages of each step of the engine: roughly when the step began.
    steps: Annotated[tuple[Nanoseconds, ...], msgspec.Meta(max_length=MAX_SPANS)]
    spans: Annotated[tuple[LayerSpan, ...], msgspec.Meta(max_length=MAX_SPANS)]


class Receiving(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A transfer as the decode engine's worker recorded it."""

    about: About
    pages: Count  # number of pages that it waited for
    # (time, number of pages received): at most MAX_COUNTS of the counter's steps, including the last one.
    counts: Annotated[tuple[tuple[Nanoseconds, Count], ...], msgspec.Meta(max_length=MAX_COUNTS)]
