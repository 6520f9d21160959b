"""The messages between engines and routers about membership: MessagePack over the control plane's sockets.

Engines connect to routers. An engine repeats REGISTER, and sends LEAVE when it stops. So a restarted or new
router knows every engine within one heartbeat, and keeps nothing on disk. A drain is requested of any router
and kept by the engine, which reports it in each REGISTER until a router passes on its end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import Codec, MessageSockets, codec_of
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.wire.messages import Host, Id, Natural, Port, Role, Text, Version, WireMessage

# Seconds between two REGISTERs of an engine. A router calls an engine silent after three of them.
HEARTBEAT_S = 1.0

_MAX_BYTES = 16 << 10
# Prompts of one PROMPT_HITS. Each takes up to 80 bytes with the router's transfer ids, of 32 characters.
MOST_HITS = 128

Lane = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Why = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
PrefixKey = Annotated[str, msgspec.Meta(max_length=64)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=65535)]  # vLLM numbers its engine cores with two bytes

# Controllers of one CONTROLLERS_ARE. Each takes up to 260 bytes with the longest host name.
PAGE = 48


class Activity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The activity of an engine's connector, as its first worker sees it. Routers show it to operators."""

    lanes: Annotated[dict[Lane, Natural], msgspec.Meta(max_length=16)] = {}
    """Connected peers, by the lane that their pages take."""
    transfers: Natural = 0
    """Prompts in flight or held, to this engine or from it."""
    bytes_pushed: Natural = 0
    """Bytes sent since the connector's start."""


class PromptCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of computing a prompt, from the engine's own steps.

    A step of ``n`` of its tokens behind ``c`` others takes ``step + token * n + pair * n * (c + n / 2)``.
    """

    step_ns: Natural
    token_ns: Natural
    pair_ps: Natural
    """Picoseconds for each pair of a token and a token that it attends to."""


class WorkloadReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The workload of an engine's scheduler and its speed, for routers that choose engines by it."""

    step_tokens: Positive
    """Most tokens that one step computes, over all its requests."""
    prompt_tokens: Positive
    """Most tokens of one prompt that one step computes."""
    cache_tokens: Natural
    """Tokens that the prefix cache has room for."""
    waiting: Natural = 0
    """Tokens of prompts that are still to be computed."""
    running: Natural = 0
    """Requests whose prompt is computed."""
    decode_ns: Natural | None = None
    """Recent duration of a step that computes no prompt. None: there was no such step."""
    prompt: PromptCost | None = None
    """None: the engine has computed too few prompts."""
    block_tokens: Natural = 0
    """Tokens of a block of the prefix cache: a hit ends with a block. 0: not reported."""


class ControllerAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """The address at which an engine's controller takes weights."""

    host: Host
    port: Port


class Register(WireMessage, frozen=True, tag="register"):
    """An engine is available. In a data-parallel deployment each rank registers as an engine."""

    engine_id: Id
    incarnation: Id  # new at each start
    role: Role
    url: Url  # URL of its API server
    control_host: Host  # address of its connector's rank 0
    control_port: Port
    draining: bool = False  # it finishes its requests and accepts no new ones
    asleep: bool = False  # its KV cache is not mapped; the engine will wake up
    early_tokens: bool = False  # P sends the token that it sampled behind a prompt, and D continues with it
    rank: Rank = 0  # among the ranks of the API server, in the numbering of X-data-parallel-rank
    activity: Activity | None = None
    load: WorkloadReport | None = None  # None: not reported
    weights: Version = ""
    """The weight version that it serves."""
    torn: Text = ""
    """Why it stays paused after some of its workers did not apply a new version."""
    prefixes: PrefixKey = ""
    """Key of its block hashes. It lends prefixes to engines with the same key. Empty: it lends none."""
    borrows: bool = False  # it loads the prefixes that a router proposes (prefix_from)
    prefetches: bool = False  # it loads them for later requests, too, and computes nothing for that
    keeps_answers: bool = True  # its prefix cache keeps what it generates, and not prompts alone
    controller: ControllerAddress | None = None  # takes its weights. None: no controller has started
    checkpoint: Checkpoint | None = None
    """The checkpoint whose weights it serves. None: unknown, or later weights."""


class Leave(WireMessage, frozen=True, tag="leave"):
    """An engine has stopped."""

    engine_id: Id
    incarnation: Id


class LoadFailed(WireMessage, frozen=True, tag="load_failed"):
    """A decode engine did not receive a transfer, for this reason, which its API server's answer does not
    contain."""

    transfer_id: Id
    reason: Text


class PromptHits(WireMessage, frozen=True, tag="prompt_hits"):
    """A decode engine's hits of prompts that prefill engines computed. Its API server's answers count all
    tokens of such a prompt as cached."""

    hits: Annotated[dict[Id, tuple[Natural, Natural]], msgspec.Meta(max_length=MOST_HITS)]
    """{transfer id: (tokens of the prompt, those in the engine's own prefix cache)}"""


class Drain(WireMessage, frozen=True, tag="drain"):
    """To a router: send this API server nothing more. Repeated until DRAINING reports that it is idle."""

    url: Url
    move: bool = False  # its streams move to other engines where possible
    unless_last: bool = False  # refused if no other engine of its role accepts requests


class Draining(WireMessage, frozen=True, tag="draining"):
    """The answer. ``outstanding``: requests of the router that the engine still has, or whose pages it still
    holds. None: the router knows no such engine."""

    outstanding: Natural | None
    moved: Natural = 0  # streams that moved to other engines
    staying: Annotated[dict[Why, Natural], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    """Outstanding requests that end on this engine, by the reason why they are not moved."""
    last: Role | None = None
    """The drain is refused, because no other engine of this role accepts requests."""


class BeginDrain(WireMessage, frozen=True, tag="begin_drain"):
    """A router passes DRAIN on to the engine."""


class Undrain(WireMessage, frozen=True, tag="undrain"):
    """To a router: this API server accepts requests again. Repeated until UNDRAINED confirms it."""

    url: Url


class Undrained(WireMessage, frozen=True, tag="undrained"):
    """The answer. ``draining``: an engine there still reports its drain. None: the router knows no such
    engine."""

    draining: bool | None


class EndDrain(WireMessage, frozen=True, tag="end_drain"):
    """A router passes UNDRAIN on to the engine."""


class Controllers(WireMessage, frozen=True, tag="controllers"):
    """To a router: queries the controllers of registered engines that take weights.

    CONTROLLERS_ARE answers, once every engine had the time to register.
    """

    number: Natural
    """Chosen by the sender. The answer has the same."""
    after: ControllerAddress | None = None
    """The last controller of the previous answer. None: this is the first query."""


class ControllersAre(WireMessage, frozen=True, tag="controllers_are"):
    number: Natural
    controllers: Annotated[tuple[ControllerAddress, ...], msgspec.Meta(max_length=PAGE)]
    """In ascending order."""
    more: bool = False  # a query after the last of them has further ones
    others: Natural = 0
    """API servers of the router's engines that have reported no controller."""


MembershipMessage = (
    Register
    | Leave
    | LoadFailed
    | PromptHits
    | Drain
    | Draining
    | BeginDrain
    | Undrain
    | Undrained
    | EndDrain
    | Controllers
    | ControllersAre
)

_CODEC: Codec[MembershipMessage] = codec_of(MembershipMessage, _MAX_BYTES)
encode, decode = _CODEC.encode, _CODEC.decode


class MembershipSockets(MessageSockets[MembershipMessage]):
    """The sockets between engines and routers."""

    def __init__(self, key: ClusterKey | None) -> None:
        super().__init__(_CODEC, key)
