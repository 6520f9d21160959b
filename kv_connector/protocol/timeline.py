"""The timelines of transfers, as an agent that keeps them tells an operator (RECALL, RECALLED).

Times are nanoseconds of CLOCK_MONOTONIC of the worker's host; 0: it was not seen.
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
    """What of one layer went with one step of prefill's engine."""

    layer: Count  # index into Recalled.layers
    computed: Nanoseconds  # its signal: the pages are valid
    first_post: Nanoseconds
    last_post: Nanoseconds
    landed: Nanoseconds  # prefill's worker knows that the last page is in decode's memory
    pages: Count


class About(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A transfer that is over, on one worker of either side."""

    transfer_id: Name
    request_id: Name
    peer: Name  # the first one, where it has several sources
    lane: Name
    reserved: Nanoseconds  # when RESERVE came, or left
    ended: Nanoseconds
    outcome: Name


class Sending(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one of decode's workers got, as prefill's worker saw it."""

    about: About
    share: Count
    nbytes: Count
    # When the agent was told of the pages of each step of the engine: about when the step began.
    steps: Annotated[tuple[Nanoseconds, ...], msgspec.Meta(max_length=MAX_SPANS)]
    spans: Annotated[tuple[LayerSpan, ...], msgspec.Meta(max_length=MAX_SPANS)]


class Receiving(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A transfer as decode's worker saw it."""

    about: About
    pages: Count  # that it waited for
    # (when, how many pages were here): at most MAX_COUNTS of the counter's steps, and its last.
    counts: Annotated[tuple[tuple[Nanoseconds, Count], ...], msgspec.Meta(max_length=MAX_COUNTS)]
