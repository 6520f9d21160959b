"""What trainers, workers and engines say to each other about weights: MessagePack over the control sockets.

A trainer's ranks are the senders, an engine's workers the receivers; its API server's part, the controller,
has a version applied. All of a trainer's ranks with one `connect()` are a run.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_connector.control.sockets import Codec, codec_of
from kv_connector.protocol.messages import Host, Id, Message, Natural, Port, Text
from kv_connector.weights.geometry import Geometry, Tensor

PROTOCOL = 1

NOT_DESCRIBED = "this worker has not looked at such a checkpoint"
"""A worker refuses Join with it. A sender whose first rank is still describing the checkpoint asks again."""

# A model of 37,000 tensors is described in 3 MB, and what a rank's loader does with it in 5.
_MAX_BYTES = 64 << 20

Version = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Bytes = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class WorkerAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    host: Host
    port: Port


class Describe(Message, frozen=True, tag="describe"):
    """Trainer to worker: what would you load of this checkpoint?"""

    tensors: tuple[Tensor, ...]
    protocol: Natural = PROTOCOL


class Described(Message, frozen=True, tag="described"):
    geometry: Geometry


class Join(Message, frozen=True, tag="join"):
    """Trainer's rank to worker: let me write, in this run. ``offer``: of its transfer engine."""

    run: Id
    rank: Rank
    name: Id
    tensors: Bytes  # digest of those that were described
    offer: Bytes
    seeds: bool = False  # it is an engine's, that writes what it serves: a trainer may come beside it


class Joined(Message, frozen=True, tag="joined"):
    answer: Bytes  # to the offer
    region: Bytes  # the arena's descriptor
    offsets: tuple[Natural, ...]  # bytes, of each parameter that the loader writes
    lane: Text


class Begin(Message, frozen=True, tag="begin"):
    """Trainer's rank to worker: so many pages will follow, from each of the ``senders`` that say so."""

    version: Version
    plan: Bytes  # digest
    senders: Rank
    pages: tuple[Natural, ...]  # by round
    nbytes: Natural


class Begun(Message, frozen=True, tag="begun"):
    """All senders have said BEGIN, and there is room for this round's pages."""

    version: Version
    immediate: Natural
    round: Natural = 0


class Ready(Message, frozen=True, tag="ready"):
    """The engine may be paused for the version: it has landed, or will where it is not served meanwhile."""

    version: Version


class Dropped(Message, frozen=True, tag="dropped"):
    """The version will not be applied, what has come of it is void, and every link to this worker is over."""

    version: Version
    reason: Text


class Applied(Message, frozen=True, tag="applied"):
    """What the worker serves from now on; or, of a controller, all of the engine's."""

    version: Version
    pause_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # of the engine, which its workers do not know


class NotApplied(Message, frozen=True, tag="not_applied"):
    """Controller to trainer: the engine does not serve the version, for this reason."""

    version: Version
    reason: Text
    torn: bool = False  # it serves nothing


class Refused(Message, frozen=True, tag="refused"):
    """The answer to what cannot be done; nothing has changed."""

    reason: Text


class Ping(Message, frozen=True, tag="ping"):
    """Once a second while the connection stands; answered by PONG."""

    sender: bool = False
    """Whether to be told (LEAVE) where the worker does not know this connection as a sender's any more."""


class Pong(Message, frozen=True, tag="pong"):
    pass


class Leave(Message, frozen=True, tag="leave"):
    """This end is through."""

    reason: Text = ""


class Workers(Message, frozen=True, tag="workers"):
    """To a controller: where do the workers of your engine listen?"""


class WorkersAre(Message, frozen=True, tag="workers_are"):
    """Answers WORKERS. Of a controller to its workers: so many there are, of all data-parallel ranks."""

    workers: tuple[WorkerAddress, ...]


class Apply(Message, frozen=True, tag="apply"):
    """To a controller: pause, have all workers take this version, go on."""

    version: Version


class Hold(Message, frozen=True, tag="hold"):
    """Controller to worker: keep this version, which has landed, until RELEASE. Answered by STATE; REFUSED
    where it is not there.

    PING keeps it held: a controller that is silent holds nothing any more."""

    version: Version


class Release(Message, frozen=True, tag="release"):
    """Controller to worker: what was held may be left for the next version. It has no answer."""


class Torn(Message, frozen=True, tag="torn"):
    """Controller to its first worker, from which routers hear of the engine: it stays paused, for this
    reason; empty: it goes on."""

    reason: Text


class Verify(Message, frozen=True, tag="verify"):
    """To a worker: what has landed of such a checkpoint? Answered by HASHED; REFUSED where nothing has."""

    tensors: Bytes  # digest


class Hashed(Message, frozen=True, tag="hashed"):
    """What lies in the arena, by parameter (verify.py)."""

    version: Version
    geometry: Geometry
    hashes: tuple[Bytes, ...]


class Seed(Message, frozen=True, tag="seed"):
    """To each worker of an engine that serves the version: write it to another engine. Answered by SEEDED;
    REFUSED where it cannot be, or has failed. LEAVE, before that, ends it."""

    run: Id
    version: Version
    engine: WorkerAddress  # the other one's controller


class Seeded(Message, frozen=True, tag="seeded"):
    """The other engine serves it."""

    version: Version


class Ask(Message, frozen=True, tag="ask"):
    """To a worker or a controller: how far are you? Answered by STATE."""


class State(Message, frozen=True, tag="state"):
    served: Annotated[str, msgspec.Meta(max_length=128)]  # empty: what the engine was started with
    landing: Annotated[str, msgspec.Meta(max_length=128)] = ""  # or being taken
    landed: Annotated[str, msgspec.Meta(max_length=128)] = ""
    senders: Natural = 0
    arena_bytes: Natural = 0
    problem: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """Why the last version was not applied; empty: it was."""
    torn: bool = False  # it has weights of more than one version, and must not serve
    seeding: Annotated[str, msgspec.Meta(max_length=1024)] = ""  # the engines that it writes its version to


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
    | Verify
    | Hashed
    | Seed
    | Seeded
    | Ask
    | State
)

CODEC: Codec[WeightMessage] = codec_of(WeightMessage, _MAX_BYTES)
