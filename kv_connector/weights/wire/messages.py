"""Messages about weights between trainers, workers and controllers: MessagePack over the control sockets.

A trainer's ranks are the senders, and an engine's workers the receivers. The controller, a part of the
engine's API server, has a version applied. A run is all ranks of a trainer with one `connect()`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_connector.control.sockets import Codec, codec_of
from kv_connector.protocol.wire.messages import Host, Id, Natural, Port, Text, WireMessage
from kv_connector.weights.mapping.geometry import Geometry, Tensor

PROTOCOL = 1

NOT_DESCRIBED = "this worker has not looked at such a checkpoint"
"""The reason with which a worker refuses Join.

The sender retries while its first rank describes the checkpoint.
"""

RETRY_LATER = "retry later"
"""Part of the reason with which a worker refuses what it may accept later."""

REASON_S = 1.0
"""After a link of the transfer engines broke, the peer's own reason is awaited for so long, in seconds.

The peer sends it before it breaks the link, over the control connection. It needs milliseconds, and longer on
a machine with too much to do. Only a peer that was killed sends none.
"""

# Descriptions of a model of 37,000 tensors take 3 MB, and the answer of a rank's loader takes 5 MB.
_MAX_BYTES = 64 << 20

Version = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Bytes = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class WorkerAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    host: Host
    port: Port


class Describe(WireMessage, frozen=True, tag="describe"):
    """From a trainer to a worker: queries what it would load of this checkpoint. DESCRIBED answers."""

    tensors: tuple[Tensor, ...]
    protocol: Natural = PROTOCOL


class Described(WireMessage, frozen=True, tag="described"):
    geometry: Geometry


class Join(WireMessage, frozen=True, tag="join"):
    """From a trainer's rank to a worker: requests to write in this run.

    ``offer``: of the rank's transfer engine.
    """

    run: Id
    rank: Rank
    name: Id
    tensors: Bytes  # digest of the described tensors
    offer: Bytes
    seeds: bool = False  # the sender is an engine that sends its own version: a trainer may join beside it


class Joined(WireMessage, frozen=True, tag="joined"):
    answer: Bytes  # to the offer
    region: Bytes  # the arena's descriptor
    offsets: tuple[Natural, ...]  # offset of each parameter that the loader writes, in bytes
    lane: Text


class Begin(WireMessage, frozen=True, tag="begin"):
    """From a trainer's rank to a worker: announces its pages of a version.

    ``senders`` ranks send BEGIN in all.
    """

    version: Version
    plan: Bytes  # digest
    senders: Rank
    pages: tuple[Natural, ...]  # by round
    nbytes: Natural


class Begun(WireMessage, frozen=True, tag="begun"):
    """All senders have sent BEGIN, and this round's pages have room."""

    version: Version
    immediate: Natural
    round: Natural = 0


class Ready(WireMessage, frozen=True, tag="ready"):
    """The engine may be paused for the version: it has landed, or it will land while the engine is paused."""

    version: Version


class Dropped(WireMessage, frozen=True, tag="dropped"):
    """The version will not be applied. Its bytes are discarded, and every link to this worker has ended."""

    version: Version
    reason: Text


class Applied(WireMessage, frozen=True, tag="applied"):
    """The version that a worker serves from now on.

    From a controller: the version that the whole engine serves.
    """

    version: Version
    # pause of the engine; a worker does not know it and sends 0
    pause_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class NotApplied(WireMessage, frozen=True, tag="not_applied"):
    """From a controller to a trainer: the engine does not serve the version, with the reason."""

    version: Version
    reason: Text
    torn: bool = False  # the engine serves nothing


class Refused(WireMessage, frozen=True, tag="refused"):
    """The answer to a request that cannot be fulfilled. Nothing has changed."""

    reason: Text


class Ping(WireMessage, frozen=True, tag="ping"):
    """Sent once a second while the connection stands. PONG answers."""

    sender: bool = False
    """Whether the worker answers LEAVE if it does not know this connection as a sender's."""


class Pong(WireMessage, frozen=True, tag="pong"):
    pass


class Leave(WireMessage, frozen=True, tag="leave"):
    """The sender of this message closes the connection."""

    reason: Text = ""


class Workers(WireMessage, frozen=True, tag="workers"):
    """To a controller: queries the addresses of the engine's workers."""


class WorkersAre(WireMessage, frozen=True, tag="workers_are"):
    """Answers WORKERS. From a controller to its workers: the workers of all data-parallel ranks."""

    workers: tuple[WorkerAddress, ...]


class Apply(WireMessage, frozen=True, tag="apply"):
    """To a controller: requests a pause in which all workers take this version."""

    version: Version


class Hold(WireMessage, frozen=True, tag="hold"):
    """From a controller to a worker: keep this landed version until RELEASE.

    STATE answers, or REFUSED if the worker does not have the version. PING keeps it held: a silent controller
    holds nothing.
    """

    version: Version


class Release(WireMessage, frozen=True, tag="release"):
    """From a controller to a worker: the held version may be left for the next version. It has no answer."""


class Torn(WireMessage, frozen=True, tag="torn"):
    """From a controller to its first worker: the engine stays paused, for this reason.

    Empty: the engine resumes. The first worker reports it to the routers.
    """

    reason: Text


class Controls(WireMessage, frozen=True, tag="controls"):
    """From a controller to its first workers: trainers reach the engine's controller at this address.

    The first workers report it to the routers.
    """

    controller: WorkerAddress


class Verify(WireMessage, frozen=True, tag="verify"):
    """To a worker: queries the hashes of what has landed of this checkpoint.

    HASHED answers, or REFUSED if nothing has.
    """

    tensors: Bytes  # digest


class Hashed(WireMessage, frozen=True, tag="hashed"):
    """The hashes of the arena's contents, by parameter (verify.py)."""

    version: Version
    geometry: Geometry
    hashes: tuple[Bytes, ...]


class Seed(WireMessage, frozen=True, tag="seed"):
    """To each worker of an engine that serves the version: write it to another engine.

    SEEDED answers, or REFUSED if the worker cannot write it or failed. LEAVE before the answer ends the
    seeding.
    """

    run: Id
    version: Version
    engine: WorkerAddress  # the controller of the engine that is seeded


class Seeded(WireMessage, frozen=True, tag="seeded"):
    """The seeded engine serves the version."""

    version: Version


class Ask(WireMessage, frozen=True, tag="ask"):
    """To a worker or a controller: queries its state. STATE answers."""


class State(WireMessage, frozen=True, tag="state"):
    served: Annotated[str, msgspec.Meta(max_length=128)]  # empty: the weights from the engine's start
    landing: Annotated[str, msgspec.Meta(max_length=128)] = ""  # or being taken
    landed: Annotated[str, msgspec.Meta(max_length=128)] = ""
    senders: Natural = 0
    arena_bytes: Natural = 0
    problem: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """The reason why the last version was not applied. Empty: it was applied."""
    torn: bool = False  # it has weights of more than one version, and must not serve
    seeding: Annotated[str, msgspec.Meta(max_length=1024)] = ""  # the engines to which it writes its version


WeightMessage = (
    Describe
    | Described
    | Join
    | Joined
    | Begin
    | Begun
    | Ready
    | Dropped
    | Applied
    | NotApplied
    | Refused
    | Ping
    | Pong
    | Leave
    | Workers
    | WorkersAre
    | Apply
    | Hold
    | Release
    | Torn
    | Controls
    | Verify
    | Hashed
    | Seed
    | Seeded
    | Ask
    | State
)

CODEC: Codec[WeightMessage] = codec_of(WeightMessage, _MAX_BYTES)
