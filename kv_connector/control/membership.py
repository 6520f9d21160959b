"""What engines and routers tell each other about who is there: MessagePack over the control plane's sockets.

Engines dial routers. An engine says REGISTER again and again, and LEAVE when it stops; so a router that comes
back, or comes new, knows everybody within one heartbeat, and keeps nothing on disk. A drain is asked of any
router, and kept by the engine, which says so in each REGISTER until a router passes on its end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import Codec, MessageSockets, codec_of
from kv_connector.protocol.messages import Host, Id, Message, Natural, Port, Role, Text, Version

# Seconds between two REGISTERs of an engine. A router calls one silent after three of them.
HEARTBEAT_S = 1.0

_MAX_BYTES = 16 << 10

Lane = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Why = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=65535)]  # vLLM numbers its engine cores with two bytes


class Activity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an engine's connector is doing, as its first worker sees it: for whoever looks at a router."""

    lanes: Annotated[dict[Lane, Natural], msgspec.Meta(max_length=16)] = {}
    """Peers that are connected, by the lane that their pages take."""
    transfers: Natural = 0
    """Prompts that are under way, to this engine or from it."""
    bytes_pushed: Natural = 0
    """Since its start."""


class PromptCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What computing a prompt costs an engine, by its own steps: a step of ``n`` of its tokens behind
    ``c`` others takes ``step + token * n + pair * n * (c + n / 2)``."""

    step_ns: Natural
    token_ns: Natural
    pair_ps: Natural
    """Picoseconds for each pair of a token and one that it attends to."""


class WorkloadReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an engine's scheduler has to do, and how fast it is: for a router that chooses by it."""

    step_tokens: Positive
    """That one step computes at most, of all its requests."""
    prompt_tokens: Positive
    """Of them, of one prompt."""
    cache_tokens: Natural
    """That its prefix cache has room for."""
    waiting: Natural = 0
    """Tokens of prompts that it has still to compute."""
    running: Natural = 0
    """Requests whose prompt is computed."""
    decode_ns: Natural | None = None
    """Of a step that computes no prompt, lately; None: there was none."""
    prompt: PromptCost | None = None
    """None: it has computed too few."""


class Register(Message, frozen=True, tag="register"):
    """An engine is there: a data-parallel deployment is one for each rank."""

    engine_id: Id
    incarnation: Id  # new at each start
    role: Role
    url: Url  # of its API server
    control_host: Host  # of its connector's rank 0
    control_port: Port
    draining: bool = False  # finishes what it has, wants nothing new
    asleep: bool = False  # its KV cache is not mapped; it will be back
    early_tokens: bool = False  # P says what it sampled behind a prompt, and D goes on with that
    rank: Rank = 0  # among those that the API server serves, as X-data-parallel-rank counts
    activity: Activity | None = None
    load: WorkloadReport | None = None  # None: it does not say
    weights: Version = ""
    """The version that it serves."""
    torn: Text = ""
    """Why it stays paused, where a new version was not applied by all its workers."""


class Leave(Message, frozen=True, tag="leave"):
    """An engine has stopped."""

    engine_id: Id
    incarnation: Id


class LoadFailed(Message, frozen=True, tag="load_failed"):
    """A decode engine did not get what it was to load, and why: its API server answers without the reason."""

    transfer_id: Id
    reason: Text


class Drain(Message, frozen=True, tag="drain"):
    """To a router: send this API server nothing more. Repeated until DRAINING says that it is idle."""

    url: Url
    move: bool = False  # what it has goes to other engines, where it can
    unless_last: bool = False  # refused if no other engine of its side takes requests


class Draining(Message, frozen=True, tag="draining"):
    """The answer. ``outstanding``: requests of the router's that the engine still has, or owes pages
    to; None: no such engine."""

    outstanding: Natural | None
    moved: Natural = 0  # streams, to other engines
    staying: Annotated[dict[Why, Natural], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    """Of the outstanding, those that end there, by why they are not moved."""
    last: Role | None = None
    """The drain is refused: no other engine of this role takes requests."""


class BeginDrain(Message, frozen=True, tag="begin_drain"):
    """A router passes DRAIN on to the engine."""


class Undrain(Message, frozen=True, tag="undrain"):
    """To a router: this API server takes requests again. Repeated until UNDRAINED says that it does."""

    url: Url


class Undrained(Message, frozen=True, tag="undrained"):
    """The answer. ``draining``: an engine there still reports its drain; None: no such engine."""

    draining: bool | None


class EndDrain(Message, frozen=True, tag="end_drain"):
    """A router passes UNDRAIN on to the engine."""


MembershipMessage = (
    Register | Leave | LoadFailed | Drain | Draining | BeginDrain | Undrain | Undrained | EndDrain
)

_CODEC: Codec[MembershipMessage] = codec_of(MembershipMessage, _MAX_BYTES)
encode, decode = _CODEC.encode, _CODEC.decode


class MembershipSockets(MessageSockets[MembershipMessage]):
    """The sockets between engines and routers."""

    def __init__(self, key: ClusterKey | None) -> None:
        super().__init__(_CODEC, key)
